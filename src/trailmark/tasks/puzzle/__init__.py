"""Order puzzles: a small world of reasoning in steps, in which the truth of every step and the value of every beginning
are known."""
