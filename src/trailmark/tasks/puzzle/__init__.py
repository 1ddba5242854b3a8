"""Order puzzles: a small world of reasoning in steps, in which the truth of every step and the value of every beginning
are known."""

from trailmark.tasks.puzzle.orders import Puzzle, Truth, make_puzzle, read_lines, read_puzzle, true_step_values
from trailmark.tasks.puzzle.policies import Walker, careful, careless, exact_soundness, exact_value, player
from trailmark.tasks.puzzle.source import Puzzles, puzzle_of, soundness

__all__ = [
    "Puzzle", "Puzzles", "Truth", "Walker", "careful", "careless", "exact_soundness", "exact_value", "make_puzzle",
    "player", "puzzle_of", "read_lines", "read_puzzle", "soundness", "true_step_values",
]  # fmt: skip
