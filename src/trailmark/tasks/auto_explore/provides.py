"""What `tasks/auto_explore` brings (`registry.py`)."""

PROVIDES = {"tasks": {"auto-explore": "trailmark.tasks.auto_explore.source:AutoExplore"}}
