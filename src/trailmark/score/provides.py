"""What `score` brings (`registry.py`)."""

PROVIDES = {
    "rewards": {
        "function": "trailmark.score.config:FunctionJudgeConfig",
        "model": "trailmark.score.config:ModelJudgeConfig",
    }
}
