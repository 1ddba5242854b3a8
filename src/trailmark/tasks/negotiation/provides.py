"""What `tasks/negotiation` brings (`registry.py`)."""

PROVIDES = {
    "tasks": {"negotiation": "trailmark.tasks.negotiation.source:Negotiation"},
    "players": {  # functions that recipes may name
        "a negotiator who may take advice": "trailmark.tasks.negotiation.players:advised",
        "a negotiator who takes no advice": "trailmark.tasks.negotiation.players:deaf",
        "a strategist without a plan": "trailmark.tasks.negotiation.players:anything",
        "a scripted strategist": "trailmark.tasks.negotiation.players:strategist",
    },
}
