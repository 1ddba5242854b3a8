"""Scorers and judges: they give numbers for texts and episodes, and record where each number came from.

    tokens       log-probs, entropies, values of stored episodes, token by token
    values       a value model that guides a search
    classes      a head of several classes at the ends of reasoning steps, and its reduction over steps
    likelihood   how much an answer raises the probability of a gold text: the equation, and who reads (`TextScorer`)
    model_server a model behind a server that reads gold texts
    function     a user's Python function
    judge        a language model that gives marks
    open_judge   the judge that a recipe names

Everything that runs a model goes through `models/forward.py`, so a shared prefix is computed once.
"""
