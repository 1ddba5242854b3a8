"""What `methods/vrcli` brings (`registry.py`)."""

PROVIDES = {
    "methods": {"vrcli": "trailmark.methods.vrcli.method:VrcliMethod"},
    "recipes": {"vrcli": "trailmark.methods.vrcli.config:VrcliRecipe"},
    "rewards": {"likelihood": "trailmark.methods.vrcli.config:LikelihoodJudgeConfig"},
    "warnings": {"own_plan_gain": "trailmark.methods.vrcli.plan_controls:not_about_the_row"},
    "end_warnings": {"plans": "trailmark.methods.vrcli.plan_controls:at_the_end"},
    "commands": {
        "votes": "trailmark.methods.vrcli.commands.votes:votes",
        "write": "trailmark.methods.vrcli.commands.write:write",
        "chapters": "trailmark.methods.vrcli.commands.chapters:chapters",
        "improvement": "trailmark.methods.vrcli.commands.improvement:improvement",
        "judge": "trailmark.methods.vrcli.commands.judge:judge",
    },
    "data": {
        "books": "trailmark.methods.vrcli.commands.data:books",
        "stories": "trailmark.methods.vrcli.commands.data:stories",
        "hints": "trailmark.methods.vrcli.commands.data:hints",
    },
    "quickstarts": {"vrcli": "trailmark.methods.vrcli.quickstart:quickstart"},
    "study_data": {"hints": "trailmark.methods.vrcli.study:HintRows"},
}
