"""What `methods/reflect` brings (`registry.py`)."""

PROVIDES = {
    "methods": {
        "reflect": "trailmark.methods.reflect.method:ReflectMethod",
        "reflect_imitation": "trailmark.methods.reflect.imitation:ImitationMethod",
    },
    "recipes": {
        "reflect": "trailmark.methods.reflect.config:ReflectRecipe",
        "reflect_imitation": "trailmark.methods.reflect.config:ImitationRecipe",
    },
    "formats": {
        "reflect-policy": {
            "module": "trailmark.methods.reflect.formats",
            "about": "lines of {text}: sft.jsonl, sft_policy.jsonl",
            "rewards": False,
        },
        "reflect-reflector": {
            "module": "trailmark.methods.reflect.formats",
            "about": "lines of {text}: sft_reflection.jsonl",
            "rewards": False,
            "seat": "reflector",
        },
    },
    "data": {
        "auto-explore": "trailmark.methods.reflect.commands:auto_explore",
        "sft": "trailmark.methods.reflect.commands:sft",
        "records": "trailmark.methods.reflect.commands:records",
        "taxi": "trailmark.methods.reflect.commands:taxi",
        "alfworld": "trailmark.methods.reflect.commands:alfworld",
    },
    "commands": {"curves": "trailmark.methods.reflect.commands:curves"},
    "quickstarts": {"reflect": "trailmark.methods.reflect.quickstart:quickstart"},
    "advice": {"followed": "trailmark.methods.reflect.copy_rate:copy_rate"},  # a metric of words that an actor hears
    "markers": {" # Analyze:\n": True, " # Action:\n": False},  # whether an end token follows
}
