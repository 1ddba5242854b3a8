"""Data sets of the repository world, from raw repositories to files for fine-tuning.

sources.py       where repositories come from: folders, packages
repos.py         which files of a repository are kept
records.py       a question about a repository, its target and the teachers' walks; also the reference's own JSON
tasks.py         questions from a teacher; repeated and broken ones are removed
explorer.py      the world in which data are made
walks.py         a teacher's own play, and recoveries from a wrong `cat`
split.py         train, validate, test
replay.py        every walk played again in the world, decision by decision
make.py          all of it in stages
"""
