"""What `tasks/alfworld` brings (`registry.py`)."""

PROVIDES = {
    "tasks": {"alfworld": "trailmark.tasks.alfworld.source:Alfworld"},
    "commands": {"worlds": "trailmark.tasks.alfworld.commands:app"},
}
