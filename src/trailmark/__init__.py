"""Trailmark: teach language models to reason over many steps by reinforcement learning."""

__version__ = "0.1.0"
