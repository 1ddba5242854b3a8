"""What `methods/oreo` brings (`registry.py`)."""

PROVIDES = {
    "methods": {
        "oreo": "trailmark.methods.oreo.method:OreoMethod",
        "oreo_rounds": "trailmark.methods.oreo.rounds:OreoRoundsMethod",
    },
    "recipes": {
        "oreo": "trailmark.methods.oreo.config:OreoRecipe",
        "oreo_rounds": "trailmark.methods.oreo.config:RoundsRecipe",
    },
    "data": {
        "experts": "trailmark.methods.oreo.commands:experts",
        "rollouts": "trailmark.methods.oreo.commands:rollouts",
    },
    "quickstarts": {"oreo": "trailmark.methods.oreo.quickstart:quickstart"},
}
