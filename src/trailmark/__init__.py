"""Trailmark: teach language models to reason over many steps by reinforcement learning."""

__version__ = "0.1.0"

MOST_SEED = 2**63 - 1  # of recipes and commands
