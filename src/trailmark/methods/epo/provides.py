"""What `methods/epo` brings (`registry.py`)."""

PROVIDES = {
    "methods": {
        "epo": "trailmark.methods.epo.method:EpoMethod",
        "epo_rounds": "trailmark.methods.epo.rounds:EpoRoundsMethod",
    },
    "recipes": {
        "epo": "trailmark.methods.epo.config:EpoRecipe",
        "epo_rounds": "trailmark.methods.epo.config:EpoRoundsRecipe",
    },
    "data": {
        "select": "trailmark.methods.epo.commands:select",
        "shape": "trailmark.methods.epo.commands:shape",
    },
}
