"""AutoExplore: find the file of a repository that answers a question, with cd, cat and id.

repo.py      a repository read once as a list of names, and safe reading of its files
contents.py  how much of a file is shown: kinds, lines and tokens
commands.py  commands as text, and text as commands; never a shell
world.py     one episode: an overlay over the snapshot, a menu, costs
oracle.py    the best next command
records.py   task files: ours (JSONL) and the reference's (JSON)
packages.py  repositories from source distributions, by name, version and checksum
source.py    the task
"""
