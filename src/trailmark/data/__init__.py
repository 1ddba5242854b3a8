"""Data sets to imitate: what a teacher did, why, and what would have been best.

decisions.py   one decision on record; steps.jsonl and the five files that Reflect-RL is fine-tuned on
teacher.py     who is asked: rules (offline), or any server that speaks OpenAI's protocol
queries.py     the offline teacher's questions: sentences that authors wrote themselves
answers.py     what a server has answered, kept so that no question is asked twice
stages.py      a folder made stage by stage, which goes on where it was stopped
auto_explore/  repositories: filtered, with questions, walks, mistakes and a split
plays.py       plays of one who mostly does what is best; taxi.py and alfworld.py know what that is there
gold.py        a task's own worked answers
"""
