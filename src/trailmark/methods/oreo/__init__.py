"""OREO: a policy and a value that satisfy the soft Bellman equation on a file of scored trajectories. Read `method.py`
first."""
