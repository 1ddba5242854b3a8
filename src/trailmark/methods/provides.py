"""What `methods` brings (`registry.py`)."""

PROVIDES = {
    "methods": {
        "sft": "trailmark.methods.sft:SftMethod",
        "policy_gradient": "trailmark.methods.policy_gradient:PolicyGradientMethod",
        "preference": "trailmark.methods.preference:PreferenceMethod",
        "reward_model": "trailmark.methods.reward_model:RewardModelMethod",
        "step_rl": "trailmark.methods.step_rl:StepRlMethod",
    },
    "recipes": {  # of these methods, without torch
        "sft": "trailmark.methods.configs:SftRecipe",
        "policy_gradient": "trailmark.methods.online_configs:PolicyGradientRecipe",
        "preference": "trailmark.methods.offline_configs:PreferenceRecipe",
        "reward_model": "trailmark.methods.offline_configs:RewardModelRecipe",
        "step_rl": "trailmark.methods.online_configs:StepRlRecipe",
    },
}
