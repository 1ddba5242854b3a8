"""Who says how good something is. Scorers and judges do not sit at the table: they give numbers, with where these came
from.

tokens       log-probs, entropies, values of stored episodes, token by token
values       a value model that a search asks while it writes
classes      a head of several classes at the ends of reasoning steps, and its reduction over them
likelihood   how probable a gold text becomes by what was written
function     a person's own Python function
judge        a language model that is asked for marks

Every path that runs a model goes through `models/forward.py`, so a shared prefix is computed once.
"""
