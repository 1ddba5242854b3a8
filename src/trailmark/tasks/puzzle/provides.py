"""What `tasks/puzzle` brings (`registry.py`)."""

PROVIDES = {
    "tasks": {"puzzle": "trailmark.tasks.puzzle.source:Puzzles"},
    "metrics": {"sound": "trailmark.tasks.puzzle.source:soundness"},
    "players": {"careless": "trailmark.tasks.puzzle.policies:careless"},  # functions that recipes may name
}
