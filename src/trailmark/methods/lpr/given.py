"""Files from elsewhere in the place of what a stage would make (`given`), in the first round. What cannot be tied to a
question or to another record is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trailmark import formats
from trailmark.episodes import won
from trailmark.errors import DataError
from trailmark.formats.rows import each, write_lines
from trailmark.methods.lpr import formats as records
from trailmark.methods.lpr.judged import judged, other_label, turned_pairs, world_reads
from trailmark.methods.lpr.round import SEAT, Made, Round, because, listed, shard_name
from trailmark.runs.annotations import write_notes
from trailmark.types import Episode, Task


def solutions(r: Round, folder: Path) -> Made:
    files = listed(r.files.solutions or r.files.states)
    episodes, odd = _with_tasks(r, records.all_solutions(files, r.tokenizer, SEAT))
    formats.write("episodes", folder / "000.jsonl", episodes, None)
    summary = {"solutions": len(episodes), "questions": len({e.group for e in episodes})}
    return summary | {what: n for what, n in odd.items() if n}, {}


def _with_tasks(r: Round, episodes: Sequence[Episode]) -> tuple[list[Episode], Counter[str]]:
    """Give questions of a file the task's own start of the same id, if any: its world judges solutions, as it does
    completions. What the file says otherwise is counted."""
    source, known = r.source(judge=False), dict[str, Task]()
    odd, joined = Counter[str](), []
    for task in r.questions(source):
        known |= {task.id: task, str(task.meta.get("id", task.id)): task}
    for e in episodes:
        if (t := known.get(e.task.id)) is not None:
            odd["solutions with another label than the task's (the task's counts)"] += other_label(
                e.task.meta.get("label"), t
            )
            e = replace(e, task=replace(t, meta={**e.task.meta, **t.meta}))
        joined.append(judged(e, world_reads(source), odd))
    return joined, odd


def states(r: Round, folder: Path) -> Made:
    shards, lost = records.all_states(listed(r.files.states), r.solved(), r.tokenizer)
    for i, shard in enumerate(shards):
        write_lines(folder / shard_name(i, len(shards)), shard)
    return {"states": sum(map(len, shards))}, lost


def completions(r: Round, folder: Path) -> Made:
    reads = world_reads(r.source(judge=False))
    file = str(r.files.completions)
    made, lost = records.read_completions(file, r.shard(), r.solved(), r.tokenizer, SEAT, reads)
    formats.write("episodes", folder / "all.jsonl", made, None)
    summary = {"completions": len(made), "right": sum(map(won, made))}
    counted = {what: n for what, n in lost.items() if "counts)" in what and n}
    return summary | counted, Counter({what: n for what, n in lost.items() if what not in counted})


def scores(r: Round, folder: Path) -> Made:
    notes, lost = records.read_scores(str(r.files.scores), r.solved())
    if not notes:
        raise DataError(f"scores no solution that is here: {because(lost)}.", r.files.scores)
    write_notes(folder / "scores.jsonl", notes)
    return {"solutions": len({a.episode for a in notes})}, lost


def pairs(r: Round, folder: Path) -> Made:
    source = r.source(judge=False)
    tasks = {str(name): t for t in r.questions(source) for name in (t.id, t.meta.get("id", t.id))}
    prompts = {name: source.make().reset(task).text for name, task in tasks.items()}
    sides, lost = records.read_pairs(str(r.files.pairs), prompts, r.tokenizer, SEAT)
    formats.write("episodes", folder / "sides.jsonl", sides, None)
    summary = {"pairs": len(sides) // 2}
    if n := turned_pairs(sides, tasks, world_reads(source)):
        summary["pairs whose chosen answer is wrong and whose rejected one is right"] = n
    return summary, lost


def excluded(r: Round, episodes: Sequence[Episode]) -> set[str]:
    """The questions of which no two right answers are compared (`pairs.exclude`)."""
    file = r.config.pairs.exclude
    if file is None:
        return set()
    excluded = set(map(str, each(file, lambda row: row.value)[0]))
    tasks = [*r.questions(r.source()), *(e.task for e in episodes)]
    known = {str(name) for t in tasks for name in (t.id, t.meta.get("id", t.id))} | {e.group for e in episodes}
    if unknown := sorted(excluded - known):
        raise DataError(
            f"names {len(unknown)} questions that task '{r.config.task.name}' does not have, the first "
            f"'{unknown[0]}': the ids of questions are wanted, such as '{tasks[0].meta.get('id', tasks[0].id)}'.",
            file, key="pairs.exclude",
        )  # fmt: skip
    return excluded
