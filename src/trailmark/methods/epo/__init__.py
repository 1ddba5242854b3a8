"""EPO: a strategist learns to advise an agent that stays as it is. Read `method.py` first."""
