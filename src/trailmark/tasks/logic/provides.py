"""What `tasks/logic` brings (`registry.py`)."""

PROVIDES = {"tasks": {"logic": "trailmark.tasks.logic.source:Logic"}}
