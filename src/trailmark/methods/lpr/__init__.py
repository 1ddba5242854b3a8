"""LPR: process rewards from nothing but outcomes, a model of them, and what it teaches. Read `method.py` first."""
