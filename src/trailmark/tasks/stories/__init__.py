"""Rows, prompts and plans of VR-CLI: a model writes a plan, and its reward is how much likelier the plan makes a text.

    rows.py       the two kinds of rows: conversations, and the nine fields of a story
    prompts.py    the prompts for reasoning, scoring and writing, made of the same pieces
    plans.py      the plan in a model's answer
    lengths.py    how long a chapter should be, and how a prompt that is too long is cut

A file that `trailmark data stories` makes of these is a file of `tasks/prompts.py`.
"""
