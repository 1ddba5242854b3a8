"""Reflect-RL: a frozen reflector thinks, and a policy that is trained in play answers with one label. Read `method.py`
first."""
