"""`trailmark data books | stories | hints`: rows of stories with a gold text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark.terminal.options import MANY, Out, Seed, TeacherOptions, Tokenizer, finite, grouped


@grouped
def books(
    files: Annotated[list[Path], typer.Argument(metavar="BOOKS …", help="JSONL of chapters, plain, .gz or .xz.")],
    out: Out = Path("books"),
    stage: Annotated[list[str] | None, typer.Option(help="Only this: chapters, synopses, summaries, …")] = None,
    characters: Annotated[int, typer.Option(min=1, max=20, help="Main characters of a book.")] = 3,
    names: Annotated[Path | None, typer.Option(help="JSON: the characters of each book.")] = None,
    last: Annotated[int, typer.Option(min=1, max=100, help="Previous chapters that a row holds.")] = 1,
    skip: Annotated[int, typer.Option(min=1, max=100, help="First and last chapters that are no targets.")] = 2,
    tokenizer: Tokenizer = "",
    asked: TeacherOptions = TeacherOptions(temperature=0.6),
) -> None:
    """Make rows of stories from books: synopses, summaries so far, character sheets. Then: trailmark data stories."""
    from dataclasses import asdict

    from trailmark.data.output_paths import writable
    from trailmark.methods.vrcli.stories.books import STAGES, Plan, make, read_books, read_characters
    from trailmark.methods.vrcli.stories.writer import Model as Writer
    from trailmark.methods.vrcli.stories.writer import Rules
    from trailmark.seats.model_names import read_tokenizer
    from trailmark.texts import token_count

    writable(out)
    about = asked.settings()
    read_books(files, 0, read_characters(names))  # a mistake in the files is reported before anything is made
    count = token_count(read_tokenizer(tokenizer))

    def open_writer(answers: Path) -> Writer | Rules:
        who = asked.open(answers)
        return Rules(count) if who is None else Writer(who)

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
        float, typer.Option(min=0, max=1, callback=finite, help="Largest share of a gold text in its prompt.")
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

    from trailmark.data.output_paths import writable
    from trailmark.data.stages import data_folder, read_json
    from trailmark.errors import TrailmarkError
    from trailmark.methods.vrcli.stories import setup as s
    from trailmark.seats.model_names import read_tokenizer
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
    options: dict[str, Any] = asdict(how)
    settings = {"kind": "stories", **options, "tokenizer": tokenizer, "prompts": VERSION}
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
    from trailmark.methods.vrcli.stories import hints as h

    writable(out)
    how = h.Hints(train, val, test, lessons, seed=seed)
    with data_folder(out, {"kind": "hints", **asdict(how)}) as place:
        place.make([place.stage("hints", lambda: h.write(out, how), h.FILES)], ["hints"], typer.echo)
