"""Credit: pure numpy functions (float64) from rewards and values to returns and advantages."""

from .gae import gae, gae_on_clock
from .groups import group_relative, leave_one_out, leave_one_out_turns
from .marks import marked_rewards, turn_weights
from .returns import discounted, max_abs_normalise
from .shaping import kl_shaped, place, whiten
from .steps import against_greedy, group_steps, step_rewards
from .turns import outcome_of, side_of, turn_returns, turn_rewards

__all__ = [
    "against_greedy",
    "discounted",
    "gae",
    "gae_on_clock",
    "group_relative",
    "group_steps",
    "kl_shaped",
    "leave_one_out",
    "leave_one_out_turns",
    "marked_rewards",
    "max_abs_normalise",
    "outcome_of",
    "place",
    "side_of",
    "step_rewards",
    "turn_returns",
    "turn_rewards",
    "turn_weights",
    "whiten",
]
