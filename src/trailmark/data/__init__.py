"""Data sets to imitate: what a teacher did, why, and what would have been best.

decisions.py   one stored decision; steps.jsonl and the five files that Reflect-RL is fine-tuned on
teacher.py     teachers: rules (offline), or any server with OpenAI's protocol
queries.py     the offline teacher's questions: sentences that authors wrote themselves
answers.py     the stored answers of a server, so that no question is asked twice
stages.py      a folder made stage by stage, which continues where it was stopped
auto_explore/  repositories: filtered, with questions, walks, mistakes and a split
plays.py       plays of a guide that mostly takes the best action; taxi.py and alfworld.py are the guides
gold.py        a task's own worked answers
"""
