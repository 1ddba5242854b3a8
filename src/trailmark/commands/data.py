"""`trailmark data …`: data sets to imitate. Nothing heavy is imported before a command needs it.

gold          a task's own worked answers
auto-explore  repositories -> questions, walks with reflections and recoveries, a split, files for fine-tuning
sft           the last stage alone, from any file of records
taxi          plays of the taxi with reflections
alfworld      plays of an ALFWorld expert with reflections
experts       published plays of ALFWorld as conversations
rollouts      folders of an agent's plays, a file each, as one file
books         rows of stories with a gold text, from the chapters of books
stories       files to train VR-CLI on, from conversations or stories with a gold text
hints         conversations with a planted hint, to try VR-CLI on a laptop
records       records of repositories between our lines and the reference's JSON
tokenizer     a small tokenizer for a tiny model, from the texts of a file
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trailmark import MOST_SEED

if TYPE_CHECKING:
    from trailmark.data.teacher import Teacher

data = typer.Typer(name="data", help="Make data sets to imitate.", no_args_is_help=True)

MANY = 1_000_000  # the upper limit of counts, so that a wrong number does not fill the memory


def _finite(value: float) -> float:
    """Refuse nan, which passes limits because no comparison with it is true."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder to write; the same command resumes an unfinished one.")
]
Name = Annotated[
    str, typer.Option("--teacher", metavar="offline|URL", help="offline: rules; or a server that speaks OpenAI's API.")
]
Model = Annotated[str | None, typer.Option("--model", help="The model's name on the server.")]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar="TRAILMARK_TEACHER_KEY", help="The API key, sent as bearer token or api-key."),
]
Version = Annotated[
    str | None, typer.Option("--api-version", help="Azure's API version; the key is then sent as api-key.")
]
Temperature = Annotated[float, typer.Option("--temperature", min=0, max=100, callback=_finite, help="Of the teacher.")]
TopP = Annotated[
    float, typer.Option("--top-p", min=1e-6, max=1, callback=_finite, help="Nucleus of the teacher's sampling.")
]
AtOnce = Annotated[int, typer.Option("--at-once", min=1, max=4096, help="Questions at the same time.")]
Deadline = Annotated[
    float,
    typer.Option("--deadline", min=0.1, max=86400, callback=_finite, help="Seconds for one answer, retries included."),
]
Shuffle = Annotated[
    bool, typer.Option("--shuffle-labels", help="Draw labels from the whole alphabet, not the first ones.")
]
Retries = Annotated[
    int, typer.Option("--retries", min=0, max=1000, help="Retries after a refused connection, 429 or 5xx.")
]
Failures = Annotated[
    float, typer.Option(min=0, max=1, callback=_finite, metavar="SHARE", help="Of the teacher's answers that may fail.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Random seed.")]
Starts = Annotated[int, typer.Option(min=1, max=MANY, help="Plays.")]
Perturb = Annotated[float, typer.Option(min=0, max=1, callback=_finite, help="Share of random steps.")]
Horizon = Annotated[int, typer.Option(min=1, max=MANY, help="Most steps of a walk.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the task.")]
Tokenizer = Annotated[
    str,
    typer.Option("--tokenizer", metavar="NAME", help="Tokenizer for labels and token counts: a folder, smollm2, tiny."),
]


def _teacher(
    name: str, model: str | None, key: str | None, version: str | None, temperature: float, top_p: float, at_once: int,
    deadline: float, retries: int, failures: float,
) -> tuple[dict[str, Any], Callable[[Path], Teacher]]:  # fmt: skip
    """The teacher's part of a data set's settings, and a function that opens the teacher with its file of answers."""
    from trailmark.data.answers import Answers
    from trailmark.data.teacher import Offline, Server
    from trailmark.errors import TrailmarkError

    if name == "offline":
        return {"teacher": "offline"}, lambda answers: Offline()
    if not name.startswith(("http://", "https://")):
        raise TrailmarkError(f"--teacher '{name}' is neither 'offline' nor an address that begins with http.")
    if model is None:
        raise TrailmarkError(f"--teacher {name} needs --model, the model's name on that server.")
    settings = {"teacher": model, "temperature": temperature, "top_p": top_p}
    options: dict[str, Any] = {"api_key": key, "api_version": version, "temperature": temperature, "top_p": top_p,
                               "at_once": at_once, "deadline": deadline, "retries": retries,
                               "failures": failures}  # fmt: skip
    return settings, lambda answers: Server(name, model, Answers(answers), **options)


@data.command()
def gold(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task whose starts have a gold answer.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The JSONL to write.")],
    words: Words = None,
    n: Annotated[int, typer.Option(min=1, max=10 * MANY, help="How many rows.")] = 1000,
    split: Annotated[str, typer.Option(help="Which split.")] = "train",
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Random seed.")] = 0,
) -> None:
    """Write a task's own worked answers as prompt and response, to imitate (`method: sft`)."""
    from trailmark.data import gold as answers
    from trailmark.tasks import task_options

    rows = answers.make(task, out, task_options(words or []), n, split, seed)
    typer.echo(f"{out}: {rows} rows")


@data.command("auto-explore")
def auto_explore(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SRC", help="Repositories (a folder each), or packages: click==8.1.7\\[#sha256=…]."),
    ] = None,
    out: Out = Path("auto-explore"),
    teacher: Name = "offline",
    model: Model = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this: repos, tasks, filter, walks, split, sft.")] = None,
    tasks: Annotated[Path | None, typer.Option(help="Take questions from this file, not from the teacher.")] = None,
    rules: Annotated[
        bool, typer.Option("--filter/--no-filter", help="Leave out tests, licences, private names, …")
    ] = True,
    files: Annotated[int, typer.Option(min=1, max=MANY, help="Most files of a repository to ask about.")] = 100,
    per_file: Annotated[int, typer.Option(min=1, max=MANY, help="Most questions about one file.")] = 3,
    negatives: Annotated[int, typer.Option(min=0, max=MANY, help="Mistakes with a recovery, for each question.")] = 2,
    markov: Annotated[bool, typer.Option("--markov", help="Show the teacher only the current state.")] = False,
    horizon: Horizon = 15,
    split: Annotated[str, typer.Option(help="hash, exact (shares), or given (as the tasks say).")] = "hash",
    shuffle: Shuffle = False,
    tokenizer: Tokenizer = "",
    seed: Seed = 0,
    key: Key = None,
    version: Version = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    at_once: AtOnce = 8,
    deadline: Deadline = 120.0,
    retries: Retries = 5,
    failures: Failures = 0.0,
) -> None:  # fmt: skip
    """Make a data set of the repository world: repositories, questions, walks, a split, files for fine-tuning."""
    from dataclasses import asdict

    from trailmark.data.auto_explore.make import STAGES, Plan, make
    from trailmark.data.auto_explore.sources import sources_of
    from trailmark.data.auto_explore.split import check_by, check_given
    from trailmark.data.output_paths import writable

    writable(out)
    about, open_teacher = _teacher(
        teacher, model, key, version, temperature, top_p, at_once, deadline, retries, failures
    )
    if check_by(split) == "given":
        check_given(tasks)
    found = sources_of(sources or [], tasks)
    plan = Plan(
        seed, files, per_file, rules, str(tasks or ""), negatives, markov, horizon, check_by(split), shuffle, tokenizer
    )  # fmt: skip
    settings = {"kind": "auto-explore", "sources": [s.text for s in found], **asdict(plan), **about}
    make(out, found, plan, open_teacher, settings, stage or STAGES, typer.echo)


@data.command()
def sft(
    records: Annotated[
        Path, typer.Argument(metavar="RECORDS", help="Records with walks: train.jsonl, or the reference's JSON.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    repos: Annotated[Path, typer.Option(help="The folder that holds their repositories.")],
    horizon: Horizon = 15,
    shuffle: Shuffle = False,
    tokenizer: Tokenizer = "",
) -> None:  # fmt: skip
    """Make the files for fine-tuning from records of repositories. Every walk is played again."""
    from trailmark.data.auto_explore.explorer import Explorer, read_tokenizer
    from trailmark.data.auto_explore.make import make_sft
    from trailmark.data.output_paths import writable
    from trailmark.errors import RunError

    if out.exists():
        raise RunError(f"{out} exists: choose another folder.")
    writable(out.parent)
    words = read_tokenizer(tokenizer)
    counts = make_sft(records, out, lambda path: Explorer(repos, path, horizon, words, shuffle))
    typer.echo(counts.line(str(out)))


@data.command()
def records(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Records: our lines, or the reference's JSON.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="NAME.jsonl: our lines; NAME.json: the reference's.")],
) -> None:
    """Convert records of repositories to the reference's JSON, or back."""
    from trailmark.data.auto_explore.records import read_records, write_records
    from trailmark.data.output_paths import new_file

    new_file(target)
    found = read_records(source)
    write_records(target, found)
    typer.echo(f"{target}: {len(found)} records")


@data.command()
def taxi(
    words: Words = None,
    out: Out = Path("taxi-data"),
    teacher: Name = "offline",
    model: Model = None,
    starts: Starts = 100,
    perturb: Perturb = 0.5,
    fatal: Annotated[bool, typer.Option("--fatal", help="Random steps may end the game.")] = False,
    seed: Seed = 0,
    key: Key = None,
    version: Version = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    at_once: AtOnce = 8,
    deadline: Deadline = 120.0,
    retries: Retries = 5,
    failures: Failures = 0.0,
) -> None:
    """Write plays of the taxi with a teacher's reflections, the action taken and the best one. The default horizon is
    20."""
    from trailmark.data.taxi import TaxiGuide
    from trailmark.tasks import task_options
    from trailmark.tasks.taxi import Taxi

    about, open_teacher = _teacher(
        teacher, model, key, version, temperature, top_p, at_once, deadline, retries, failures
    )
    options = {"horizon": 20, **task_options(words or [])}
    source = _task("taxi", options)
    assert isinstance(source, Taxi)
    settings = {"kind": "taxi", "options": options, "starts": starts, "perturb": perturb, "fatal": fatal, "seed": seed}
    draw = lambda: source.tasks("train", starts, seed)
    _plays(out, {**settings, **about}, draw, lambda: TaxiGuide(source, fatal), open_teacher)


@data.command()
def alfworld(
    words: Words = None,
    out: Out = Path("alfworld-data"),
    teacher: Name = "offline",
    model: Model = None,
    starts: Starts = 100,
    split: Annotated[str, typer.Option(help="Which games.")] = "train",
    perturb: Perturb = 0.5,
    tokenizer: Tokenizer = "",
    seed: Seed = 0,
    key: Key = None,
    version: Version = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.9,
    at_once: AtOnce = 8,
    deadline: Deadline = 120.0,
    retries: Retries = 5,
    failures: Failures = 0.0,
) -> None:
    """Write plays of an ALFWorld expert (expert=seeing or expert=exploring) with a teacher's reflections. games=PATH is
    the folder of the games."""
    from trailmark.data.alfworld import AlfworldGuide
    from trailmark.data.auto_explore.explorer import read_tokenizer
    from trailmark.errors import TrailmarkError
    from trailmark.tasks import task_options
    from trailmark.tasks.alfworld.source import Alfworld

    about, open_teacher = _teacher(
        teacher, model, key, version, temperature, top_p, at_once, deadline, retries, failures
    )
    options = task_options(words or [])
    source = _task("alfworld", options)
    assert isinstance(source, Alfworld)
    if source.mode != "labels":
        raise TrailmarkError("data alfworld records labels: leave out mode, or set mode=labels.")
    if tokenizer:
        source.bind(read_tokenizer(tokenizer))
    settings = {"kind": "alfworld", "options": options, "starts": starts, "split": split, "perturb": perturb,
                "tokenizer": tokenizer, "seed": seed}  # fmt: skip
    draw = lambda: source.tasks(split, starts, seed)
    _plays(out, {**settings, **about}, draw, lambda: AlfworldGuide(source), open_teacher)
    if source.games.skipped:
        typer.echo(
            f"games left out: {len(source.games.skipped)}; the first: {next(iter(source.games.skipped.values()))}"
        )


@data.command()
def experts(
    source: Annotated[Path, typer.Argument(metavar="PLAYS", help="Published plays: JSON or lines, plain or .xz.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The JSONL to write.")],
    words: Words = None,
    n: Annotated[int | None, typer.Option(min=1, max=10 * MANY, help="Most plays.")] = None,
) -> None:
    """Write expert plays of ALFWorld as conversations (format agent, reward 1). Each is played again in its game.
    games=PATH is the folder of the games; opening=apart puts the instruction in its own message, as OREO does."""
    from trailmark.data import experts as plays
    from trailmark.data.output_paths import new_file
    from trailmark.tasks import task_options
    from trailmark.tasks.alfworld.source import Alfworld

    new_file(out)
    made = _task("alfworld", {"mode": "text", **task_options(words or [])})
    assert isinstance(made, Alfworld)
    rows, left = plays.make(source, out, made, n)
    typer.echo(f"{out}: {rows} plays" + "".join(f", {k} left out ({why})" for why, k in left.items()))


@data.command()
def books(
    files: Annotated[list[Path], typer.Argument(metavar="BOOKS …", help="JSONL of chapters, plain, .gz or .xz.")],
    out: Out = Path("books"),
    teacher: Name = "offline",
    model: Model = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this: chapters, synopses, summaries, …")] = None,
    characters: Annotated[int, typer.Option(min=1, max=20, help="Main characters of a book.")] = 3,
    names: Annotated[Path | None, typer.Option(help="JSON: the characters of each book.")] = None,
    last: Annotated[int, typer.Option(min=1, max=100, help="Previous chapters that a row holds.")] = 1,
    skip: Annotated[int, typer.Option(min=1, max=100, help="First and last chapters that are no targets.")] = 2,
    tokenizer: Tokenizer = "",
    key: Key = None,
    version: Version = None,
    temperature: Temperature = 0.6,
    top_p: TopP = 0.9,
    at_once: AtOnce = 8,
    deadline: Deadline = 120.0,
    retries: Retries = 5,
    failures: Failures = 0.0,
) -> None:
    """Make rows of stories from books: synopses, summaries so far, character sheets. Then: trailmark data stories."""
    from dataclasses import asdict

    from trailmark.data.auto_explore.explorer import read_tokenizer
    from trailmark.data.auto_explore.tasks import token_count
    from trailmark.data.output_paths import writable
    from trailmark.data.stories.books import STAGES, Plan, make, read_books, read_characters
    from trailmark.data.stories.writer import Model as Asked
    from trailmark.data.stories.writer import Rules
    from trailmark.data.teacher import Server

    writable(out)
    about, open_teacher = _teacher(
        teacher, model, key, version, temperature, top_p, at_once, deadline, retries, failures
    )
    read_books(files, 0, read_characters(names))  # a mistake in the files is reported before anything is made
    count = token_count(read_tokenizer(tokenizer))

    def open_writer(answers: Path) -> Asked | Rules:
        who = open_teacher(answers)
        return Asked(who) if isinstance(who, Server) else Rules(count)

    how = Plan(characters, last, skip, tokenizer)
    settings = {"kind": "books", **asdict(how), **about}
    make(out, files, how, open_writer, count, settings, names, stage or STAGES, typer.echo)


def _share(text: str, option: str) -> float | None:
    """A share from 0 to 0.9; None if it is the name of a file."""
    from trailmark.errors import TrailmarkError

    try:
        share = float(text)
    except ValueError:
        if Path(text).is_file():
            return None
        raise TrailmarkError(f"{option} '{text}': expected a share such as 0.1, or a file that exists.") from None
    if not 0 <= share <= 0.9:
        raise TrailmarkError(f"{option} {text}: a share goes from 0 to 0.9.")
    return share


@data.command()
def stories(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="JSONL: `messages`, or the fields of a story.")],
    out: Out = Path("stories"),
    by: Annotated[str, typer.Option(help="Split by book, row, or given (the rows' `split`).")] = "",
    val: Annotated[str, typer.Option(metavar="SHARE|FILE", help="Share of val, at least one; or its file.")] = "0.1",
    test: Annotated[str, typer.Option(metavar="SHARE|FILE", help="Share of test, at least one; or its file.")] = "0.1",
    seed: Seed = 0,
    tokenizer: Tokenizer = "",
    max_tokens: Annotated[
        int, typer.Option(min=1, max=10 * MANY, help="Most tokens of a prompt; the previous chapter is cut to fit.")
    ] = 12000,
    drop_long: Annotated[bool, typer.Option("--drop-long", help="Leave out longer prompts; do not cut them.")] = False,
    first: Annotated[int | None, typer.Option(min=0, max=MANY, help="Smallest index of a chapter, from 0.")] = None,
    over: Annotated[int | None, typer.Option(min=0, max=MANY, help="A gold text has more words than this.")] = None,
    under: Annotated[int | None, typer.Option(min=0, max=MANY, help="A gold text has fewer words than this.")] = None,
    previous: Annotated[int | None, typer.Option(min=0, max=MANY, help="The previous text has fewer words.")] = None,
    prompt: Annotated[int | None, typer.Option(min=0, max=MANY, help="A prompt has fewer words than this.")] = None,
    leak: Annotated[
        float, typer.Option(min=0, max=1, callback=_finite, help="Largest share of a gold text in its prompt.")
    ] = 0.02,
    drop_leaks: Annotated[bool, typer.Option("--drop-leaks", help="Leave out rows with a larger one.")] = False,
    gold_words: Annotated[
        int | None, typer.Option(min=1, max=MANY, help="Keep only so many first words of a gold text.")
    ] = None,
    system_role: Annotated[bool, typer.Option("--system-role/--no-system-role", help="A system message.")] = True,
    summary: Annotated[bool, typer.Option("--summary/--no-summary", help="Show the summary so far.")] = True,
    plan: Annotated[bool, typer.Option("--plan/--no-plan", help="Show the plan of the whole story.")] = True,
    sheets: Annotated[bool, typer.Option("--sheets/--no-sheets", help="Show the character sheets.")] = True,
    synopsis: Annotated[bool, typer.Option("--synopsis/--no-synopsis", help="Show the synopsis.")] = True,
    chapters: Annotated[bool, typer.Option("--chapters/--no-chapters", help="Show the previous chapters.")] = True,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Leave out rows that repeat another one.")
    ] = False,
    instruction: Annotated[
        str | None, typer.Option(help="What a policy is asked, in place of our text; name the marker of a plan.")
    ] = None,
    identical: Annotated[
        bool, typer.Option("--identical", help="The same instruction with and without a plan: an empty plan earns 0.")
    ] = False,
) -> None:
    """Make files to train VR-CLI on: prompts with their gold texts, and conversations to imitate, in three splits."""
    from dataclasses import asdict

    from trailmark.data.auto_explore.explorer import read_tokenizer
    from trailmark.data.output_paths import writable
    from trailmark.data.stages import data_folder, read_json
    from trailmark.data.stories import setup as s
    from trailmark.errors import TrailmarkError
    from trailmark.tasks.stories.prompts import VERSION, Show
    from trailmark.tasks.stories.rows import StoryRow, read_rows

    writable(out)
    shares, ready = [], {}
    for name, said_of in (("val", val), ("test", test)):
        share = _share(said_of, f"--{name}")
        shares.append(share if share is not None else 0.0)
        if share is None:
            ready[name] = Path(said_of)
    found = read_rows(rows, [] if drop_duplicates else None)
    usual = s.Filters() if isinstance(found[0], StoryRow) else s.NO_FILTERS
    given = {"first": first, "over": over, "under": under, "previous": previous, "prompt": prompt}
    bounds = s.Filters(**{k: getattr(usual, k) if v is None else v for k, v in given.items()})
    by = by or ("book" if all(r.story_id for r in found) else "row")
    if by not in ("book", "row", "given"):
        raise TrailmarkError(f"--by '{by}' is not known: book, row or given.")
    if by == "given" and ready:
        raise TrailmarkError("--by given reads the splits from one file: leave it out where --val or --test is a file.")
    show = Show(summary, plan, sheets, synopsis, chapters, system_role, identical, instruction)
    sizes = (max_tokens, drop_long, leak, drop_leaks, gold_words, drop_duplicates)
    how = s.Setup(show, bounds, by, tuple(shares), seed, *sizes)  # type: ignore[arg-type]
    said: dict[str, Any] = asdict(how)
    for part, key in ((said, "gold_words"), (said, "drop_duplicates"), (said["show"], "instruction")):
        if part[key] is None or part[key] is False:
            del part[key]  # folders from before this option stay as they are
    settings = {"kind": "stories", **said, "tokenizer": tokenizer, "prompts": VERSION}
    words = read_tokenizer(tokenizer)
    with data_folder(out, settings) as place:
        outputs = [f"{kind}{split}.jsonl" for kind in ("", "sft_") for split in s.SPLITS]
        stage = place.stage(
            "setup", lambda: s.make(rows, out, how, words, ready), [*outputs, "statistics.json"],
            files={"rows": rows, **ready},
        )
        place.make([stage], ["setup"], typer.echo)
        for line in s.report(read_json(out / "statistics.json")):
            typer.echo(line)


@data.command()
def hints(
    out: Out = Path("hints"),
    train: Annotated[int, typer.Option(min=1, max=8000, help="Rows to train on.")] = 512,
    val: Annotated[int, typer.Option(min=1, max=1000, help="Rows of val.")] = 64,
    test: Annotated[int, typer.Option(min=1, max=1000, help="Rows of test.")] = 64,
    lessons: Annotated[int, typer.Option(min=1, max=MANY, help="Lessons that make the reader.")] = 9000,
    seed: Seed = 0,
) -> None:
    """Make conversations with a planted hint, and lessons for a tiny model that can use it: VR-CLI on a laptop."""
    from dataclasses import asdict

    from trailmark.data.output_paths import writable
    from trailmark.data.stages import data_folder
    from trailmark.data.stories import hints as h

    writable(out)
    how = h.Hints(train, val, test, lessons, seed=seed)
    with data_folder(out, {"kind": "hints", **asdict(how)}) as place:
        place.make([place.stage("hints", lambda: h.write(out, how), h.FILES)], ["hints"], typer.echo)


@data.command()
def rollouts(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER …", help="Folders of {task}_{repeat}.json.")],
    out: Annotated[Path, typer.Option("--out", metavar="OUT", help="The JSONL to write.")],
    failures: Annotated[bool, typer.Option("--failures", help="Keep lost plays only.")] = False,
) -> None:
    """Merge folders of agent rollouts, as OREO's scripts write them, into one file of format agent, and count the
    successes."""
    from trailmark.data import rollouts as plays

    won, total = plays.merge(folders, out, failures)
    typer.echo(f"{out}: {won} of {total} plays were won ({won / total:.3f})")


@data.command()
def tokenizer(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="A file of rows; every text in them counts.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write, for model.tokenizer.")],
    size: Annotated[int, typer.Option("--size", min=300, max=200_000, help="Most tokens.")] = 1000,
) -> None:
    """Learn a small tokenizer from the texts of a file: bytes and their commonest pieces. For tiny models."""
    from trailmark.data.output_paths import new_folder
    from trailmark.formats.rows import each
    from trailmark.models.tiny import learnt_tokenizer

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict | list):
            return [t for v in (value.values() if isinstance(value, dict) else value) for t in texts(v)]
        return [value] if isinstance(value, str) else []

    found = [t for row in each(rows, lambda row: texts(row.value))[0] for t in row]
    new_folder(out)
    made = learnt_tokenizer(found, size)
    made.save_pretrained(out)
    typer.echo(f"{out}: {len(made)} tokens, from {len(found)} texts")


def _plays(out: Path, settings: dict[str, Any], tasks: Callable[[], Any], guide: Any, open_teacher: Any) -> None:
    from trailmark.data import plays
    from trailmark.data.output_paths import writable
    from trailmark.data.stages import Counts, data_folder
    from trailmark.progress import Progress

    writable(out)
    with data_folder(out, settings) as place:
        who = open_teacher(out / "answers.jsonl")

        def stage() -> Counts:
            starts = tasks()
            with Progress(len(starts), name="plays") as bar:
                return plays.make(
                    out, starts, guide, who, settings["perturb"], settings["seed"], lambda n: bar.update(n, {})
                )

        outputs = ["steps.jsonl", "oracle", "behaviour", "plays.partial.jsonl"]
        place.make([place.stage("plays", stage, outputs)], ["plays"], typer.echo)


def _task(name: str, options: dict[str, Any]) -> Any:
    from trailmark.tasks import get_task

    return get_task(name, **options)
