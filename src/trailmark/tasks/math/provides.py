"""What `tasks/math` brings (`registry.py`)."""

PROVIDES = {
    "tasks": {"math": "trailmark.tasks.math.source:Math"},
    "answers": {"math": "trailmark.tasks.math.check:answer_of"},
}
