"""What `formats` brings (`registry.py`)."""

PROVIDES = {
    "formats": {
        "episodes": {
            "module": "trailmark.formats.own_episodes",
            "about": "Trailmark's own: everything; annotations in NAME.annotations.jsonl beside it",
        },
        "messages": {
            "module": "trailmark.formats.messages",
            "about": "lines of {messages: [{role, content}]}",
            "rewards": False,
        },
        "sharegpt": {
            "module": "trailmark.formats.sharegpt",
            "about": "list of {conversations: [{from, value, score}], score}",
            "layout": "list",
            "holds": ("score",),
        },
        "trajectories": {"module": "trailmark.formats.scored", "about": "lines of {prompt, response, reward}"},
        "agent": {
            "module": "trailmark.formats.scored",
            "about": "list of {conversations: [{role, content}], reward}",
            "layout": "list",
        },
        "pairs": {
            "module": "trailmark.formats.scored",
            "about": "lines of {prompt, chosen, rejected}",
            "rewards": False,
            "holds": ("preferred",),
        },
    }
}
