"""How teachers look for an answer: their own play, and the repair of a mistake.

A *positive* walk is the teacher's own. At every step it first reflects on the state without the list of commands, then
it is shown the list and chooses. The walk is kept whether or not it found the right file. A *negative* walk follows the
best path to the target's folder, opens a wrong file there on purpose, and then asks the teacher what was wrong and what
to do. Only that last step is learnt from; the mistake itself is never imitated.

Without negative walks a reflector would always say that all is well, and could not help a policy that makes mistakes.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from trailmark.ask.client import Unusable, run_limited
from trailmark.data.stages import Counts
from trailmark.errors import DataError
from trailmark.methods.reflect.explore.explorer import Explorer, Seeker
from trailmark.methods.reflect.explore.records import Record, Walk
from trailmark.methods.reflect.explore.tasks import renumbered
from trailmark.methods.reflect.teacher import Exchange, Moment, Teacher
from trailmark.run_async import wait
from trailmark.tasks.labels import NEXT_PAGE, PREVIOUS_PAGE

ABOUT = (
    "You look for the one file of a repository that answers a question. `cd` goes into a folder, `cat` shows the "
    "beginning of a file, `id` names the file that answers the question and ends the search: use it when you are sure. "
    "Every command counts."
)
THINK = (
    "\nWithout choosing a command yet, say in about 50 words where we are, whether the last command helped, and what "
    "to do next.\n"
)
REPAIR = (
    "\nThe last command opened a wrong file. Without choosing a command yet, say in about 50 words why it is wrong and "
    "how to correct it.\n"
)
PAGES = (NEXT_PAGE, PREVIOUS_PAGE)


def rule(seeker: Seeker) -> str:
    """The reflection by rule, in two or three short sentences."""
    world, last = seeker.world, seeker.last
    where = f"We are in {world.cwd}/." if world.cwd else "We are at the root."
    if last is None:
        verdict = "Nothing has been looked at yet."
    elif last.command.startswith("cat "):
        name = last.command[4:]
        verdict = f"{name} answers the question." if last.good else f"{name} is the wrong file."
    else:
        verdict = f"The last step, {last.command}, {'led on' if last.good else 'led away'}."
    return f"{where} {verdict} Next: {seeker.best}"


def moment(seeker: Seeker, request: str = THINK, past: Sequence[Exchange] = ()) -> Moment:
    return Moment(ABOUT, request, seeker.seen, seeker.best_label, rule(seeker), tuple(past))


async def positive(explorer: Explorer, record: Record, teacher: Teacher, markov: bool) -> Walk:
    """The teacher's own play from start to end. `markov`: it sees no earlier exchange."""
    seeker, past = explorer.start(record), list[Exchange]()
    while not seeker.over:
        now, state = moment(seeker, past=() if markov else past), seeker.seen.state
        thought = await teacher.reflect(now)
        command = seeker.do(await teacher.choose(now, thought))
        if command not in PAGES:
            past.append(Exchange(state, thought, command))
    return Walk(teacher.name, tuple((e.thought, e.command) for e in past), seeker.world.identified, "positive0")


async def negative(explorer: Explorer, record: Record, teacher: Teacher, wrong: str) -> Walk:
    """The path to the target's folder, a wrong `cat` there, and the step that repairs it."""
    seeker = explorer.start(record, [*record.optimal_path[:-2], wrong])
    done, command = list(seeker.world.history), PAGES[0]
    now = moment(seeker, REPAIR)
    thought = await teacher.reflect(now)
    while command in PAGES:
        command = seeker.do(await teacher.choose(replace(now, seen=seeker.seen, best=seeker.best_label), thought))
    return Walk(teacher.name, (*(("", c) for c in done), (thought, command)), seeker.world.identified, "negative0")


def wrong_looks(explorer: Explorer, record: Record) -> list[str]:
    """The `cat` commands of the target's folder that do not open a target."""
    world, folder = explorer.start(record).world, record.target.rpartition("/")[0]
    return [o.text for o in world.library.whole(folder).offers if o.verb == "cat" and o.path not in world.targets]


async def walks_of(
    explorer: Explorer, record: Record, teacher: Teacher, seed: int, negatives: int, markov: bool, counts: Counts
) -> Record:
    """The record with its walks: one positive and at most `negatives` negative ones. A file that the positive walk has
    identified counts as a target, so it is not opened as a mistake."""

    async def keep(kind: str, walk: Awaitable[Walk]) -> None:
        nonlocal record
        try:
            record = replace(record, walks=renumbered([*record.walks, await walk]))
        except Unusable as problem:
            counts.left_out[f"{kind} walk: {problem.reason}"] += 1
        except DataError:
            counts.left_out[f"{kind} walk: longer than the horizon"] += 1

    await keep("positive", positive(explorer, record, teacher, markov))
    options = wrong_looks(explorer, record)
    counts.left_out["negative walk: no other file in the folder"] += negatives > 0 and not options
    for wrong in random.Random(f"wrong {seed} {record.key}").sample(options, min(negatives, len(options))):
        await keep("negative", negative(explorer, record, teacher, wrong))
    return record


def add_walks(
    explorer: Explorer, records: Sequence[Record], teacher: Teacher, seed: int = 0, negatives: int = 2,
    markov: bool = False,
    done: Callable[[int], None] = lambda n: None,
) -> tuple[list[Record], Counts]:  # fmt: skip
    """Every record with walks. A record in which no teacher identified a file is left out and counted."""
    counts = Counts()

    async def one(record: Record) -> Record:
        return await walks_of(explorer, record, teacher, seed, negatives, markov, counts)

    made = wait(run_limited(records, one, teacher.at_once, done))
    teacher.settle()
    kept = [r for r in made if any(w.positive and w.found for w in r.walks)]
    counts.left_out["record in which no file was pointed out"] += len(made) - len(kept)
    counts.left_out = +counts.left_out
    all_walks = [w for r in kept for w in r.walks]
    counts.kept["records"] = len(kept)
    counts.kept["positive walks"] = sum(w.positive for w in all_walks)
    counts.kept["negative walks"] = sum(not w.positive for w in all_walks)
    counts.kept["positive walks to the target"] = sum(w.positive and w.found == r.target for r in kept for w in r.walks)
    if not kept:
        raise DataError(f"the teacher '{teacher.name}' pointed out no file in any record ({counts.line('walks')}).")
    return kept, counts
