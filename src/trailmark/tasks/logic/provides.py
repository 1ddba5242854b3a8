"""What `tasks/logic` brings (`registry.py`)."""

PROVIDES = {
    "tasks": {"logic": "trailmark.tasks.logic.source:Logic"},
    "leaderboards": {"logic": "trailmark.tasks.logic.choices:Leaderboard"},
    "varied": {"order": "trailmark.tasks.logic.choices:order_row"},  # a row over all values of a varied option
}
