"""Who earned the reward: pure numpy functions (float64) from rewards and values to returns and advantages."""

from .gae import gae, gae_on_clock
from .groups import group_relative, leave_one_out
from .returns import discounted, max_abs_normalise
from .shaping import kl_shaped, place, whiten

__all__ = [
    "discounted",
    "gae",
    "gae_on_clock",
    "group_relative",
    "kl_shaped",
    "leave_one_out",
    "max_abs_normalise",
    "place",
    "whiten",
]
