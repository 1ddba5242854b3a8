"""What `tasks` brings (`registry.py`)."""

PROVIDES = {
    "tasks": {
        "arith": "trailmark.tasks.arith:Arith",
        "gym": "trailmark.tasks.gym:Gym",
        "prompts": "trailmark.tasks.prompts:Prompts",
        "solved": "trailmark.tasks.solved:Solved",
        "taxi": "trailmark.tasks.taxi:Taxi",
    },
    "answers": {"options": "trailmark.answers:of_options", "number": "trailmark.tasks.arith:answer_of"},
    "players": {"careless sums": "trailmark.tasks.arith:careless_solver"},  # functions that recipes may name
}
