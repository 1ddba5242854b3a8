"""WebShop: buy what an instruction asks for, among the products of a catalogue. In Python; no server, no Java.

similarity.py  how alike two options or attributes are
nouns.py       the nouns of a title, by a tagger
products.py    a catalogue: its products and their prices
search.py      BM25 over it; stemmer.py: Porter's
reward.py      what a purchase pays
goals.py       the goals, their caps, and whether a product meets them
pages.py       the texts of the pages
world.py       one visit
source.py      the task
sessions.py    recorded visits of people, as actions
"""
