"""What `methods/lpr` brings (`registry.py`)."""

PROVIDES = {
    "methods": {"lpr": "trailmark.methods.lpr.method:LprMethod"},
    "recipes": {"lpr": "trailmark.methods.lpr.config:LprRecipe"},
    "formats": {
        "react": {
            "module": "trailmark.methods.lpr.react",
            "about": "list of {text, label, response, pred, id}, with reasoning steps",
            "layout": "list",
        },
        "step-labels": {
            "module": "trailmark.methods.lpr.step_labels",
            "about": "lines of {question, steps, labels}, or of PRMBench",
            "rewards": False,
            "holds": ("label",),
        },
    },
    "commands": {"lpr": "trailmark.methods.lpr.commands:lpr"},
    "quickstarts": {"lpr": "trailmark.methods.lpr.quickstart:quickstart"},
}
