"""Data of VR-CLI.

setup.py       rows -> files to train on: filters, lengths, leaks, splits, token counts
leaks.py       how much of a gold text stands in a prompt
books.py       books -> rows, in stages
writer.py      who writes summaries and character sheets: rules, or a model behind a server
sentences.py   sentences, names and salient sentences of a text, by rules
"""
