"""`trailmark play`: a person plays a task in the terminal, and the episode is saved.

End of file and Ctrl-C end the play like `quit`: what was played is saved. Heavy modules are imported when the command
runs.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trailmark import MOST_SEED
from trailmark.errors import DataError, RunError

if TYPE_CHECKING:
    from trailmark.terminal_play import PersonPlay
    from trailmark.types import Annotation, Episode


def _asker() -> Callable[[], str | None]:
    """A function that reads a line; None at the end of the input. Bytes that are not text are replaced."""
    if sys.stdin is None:  # closed by the parent process
        return lambda: None
    if (change := getattr(sys.stdin, "reconfigure", None)) is not None:
        change(errors="replace")
    if not sys.stdin.isatty():
        return lambda: sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history of `input`)

    def ask() -> str | None:
        try:
            return input("> ")
        except EOFError:
            return None

    return ask


def _free_name(task: str) -> Path:
    stem = "".join(c if c.isalnum() else "-" for c in task)
    return next(p for i in range(1, 1 << 30) if not (p := Path(f"play-{stem}-{i}.jsonl")).exists())


def _options(
    words: list[str], game: str | None, repo: Path | None, query: str | None, target: list[str] | None
) -> dict:
    from trailmark.tasks import task_options

    made = task_options(words)
    if game is not None:
        made["games" if Path(game).exists() else "game"] = game
    if repo is not None:
        made["repo"] = str(repo)
    if query is not None:
        made["query"] = query
    if target:
        made["target"] = target
    return made


def play(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task by name, such as taxi; or a run, with --seat.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the task.")] = None,
    game: Annotated[str | None, typer.Option(help="alfworld: a game's file or id.")] = None,
    repo: Annotated[Path | None, typer.Option(metavar="PATH", help="auto-explore: a repository.")] = None,
    query: Annotated[str | None, typer.Option(help="auto-explore: the question.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="auto-explore: the file that answers it.")] = None,
    split: Annotated[str | None, typer.Option(help="Which split; 'train', or 'all' with --repo.")] = None,
    start: Annotated[int, typer.Option(min=1, help="Which start of the split.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Which draw of it.")] = 0,
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="For the saved tokens and the labels: a folder, a hub name, smollm2 or tiny."
        ),
    ] = "tiny",
    seat: Annotated[
        str | None, typer.Option(metavar="NAME", help="With a run: the seat that you play. Its models play the others.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to save, if not play-TASK-1.jsonl.")] = None,
) -> None:
    """Play a task in the terminal and save the episode. With a run and --seat, play its task together with its
    models."""
    from trailmark.rollout.judging import judge_of
    from trailmark.seats.model_names import load_tokenizer
    from trailmark.tasks import get_task
    from trailmark.terminal_play import PersonPlay, pick_start, play_in_terminal

    if out is not None and out.exists():
        raise RunError(f"{out} exists: choose another file.")
    if out is not None and not out.parent.is_dir():
        raise DataError("there is no such folder to save into.", out.parent)
    if seat is not None:
        return _sit_at_table(task, seat, words or [], split, start, seed, out)
    source = get_task(task, **_options(words or [], game, repo, query, target))
    judge_of(source, None)  # a world that cannot judge itself needs a judge before it is played
    # A tiny tokenizer is made only when it is needed, because a person should not wait for the first line.
    words_of = None if tokenizer == "tiny" else load_tokenizer(tokenizer)
    if words_of is not None and source.binds:
        source.bind(words_of)  # pyrefly: ignore[missing-attribute]
    person_play = PersonPlay(source, pick_start(source, split or ("train" if repo is None else "all"), start, seed))
    typer.echo(f"{source.name}, start '{person_play.task.id}'; ':help' says what can be typed.\n")
    try:
        play_in_terminal(person_play, _asker(), lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt as stopped:
        typer.echo("")
        if getattr(stopped, "number", signal.SIGINT) != signal.SIGINT:
            raise  # after the play is saved
    finally:
        if person_play.played:
            there = out is None or out.exists()  # by now, of another play
            _save(person_play, words_of or load_tokenizer(tokenizer), _free_name(task) if there else out)
        else:
            typer.echo("Nothing was played, so nothing is saved.")


def _save(person_play: PersonPlay, tokenizer: Any, out: Path) -> None:
    from trailmark.rollout.judging import collecting_notes
    from trailmark.terminal_play import episode_of

    with collecting_notes(person_play.source) as notes:
        episode = episode_of(person_play, tokenizer)
    _store(episode, notes, len(person_play.played), out)


def _store(episode: Episode, notes: Sequence[Annotation], steps: int, out: Path) -> None:
    from trailmark.runs.store import write_beside, write_rows
    from trailmark.terminal_play import describe_outcome

    write_rows(out, [episode])
    write_beside(out, notes)
    typer.echo(f"{describe_outcome(episode.outcome)}; {steps} step{'s' * (steps != 1)} saved to {out}")


def _sit_at_table(
    run: str, seat: str, words: list[str], split: str | None, start: int, seed: int, out: Path | None
) -> None:
    """Play one episode with a person in one seat of a run and its models in the others, by the code that plays all
    episodes."""
    from trailmark.errors import TrailmarkError, nearest
    from trailmark.evaluate.players import method_of
    from trailmark.rollout.judging import collecting_notes
    from trailmark.rollout.play import play as play_episodes
    from trailmark.score.config import pin_options
    from trailmark.seats.config import PersonSeat
    from trailmark.seats.model_names import locate
    from trailmark.seats.open_seats import OpenSeats, stored_seats
    from trailmark.tasks import get_task, task_options
    from trailmark.terminal_play import pick_start

    found = locate(run)
    if found.checkpoint is None or not found.recipe:
        raise TrailmarkError(f"play --seat: '{run}' is no run with a checkpoint.")
    task = found.section("task")
    options = (task.get("options") or {}) | task_options(words)
    method, config = method_of(found.recipe, {**task, "options": options})
    seats = method.seats_of(config)
    if seat not in seats:
        raise TrailmarkError(f"'{run}' has no seat '{seat}' (seats: {', '.join(seats)}).{nearest(seat, seats)}")
    mine = PersonSeat(sampling=seats[seat].sampling, side=seats[seat].side)
    others = stored_seats({n: s for n, s in seats.items() if n != seat}, found.checkpoint, config.model)
    opened = OpenSeats(
        {n: mine if n == seat else others[n] for n in seats}, terminal=(_asker(), lambda t: typer.echo(t, nl=False))
    )
    source = get_task(config.task.name, **pin_options(options, found.run))
    opened.bind(source)
    first = pick_start(source, split or "train", start, seed)
    typer.echo(f"{source.name}, start '{first.id}'; you are '{seat}'.\n")
    protocol = method.evaluation_protocol(config, source)
    with collecting_notes(source) as notes:
        (episode,) = play_episodes(source, [first], opened.seats, protocol, seed=seed)
    steps = sum(t.action is not None for t in episode.turns)
    if not steps:
        typer.echo("Nothing was played, so nothing is saved.")
        return
    _store(episode, notes, steps, _free_name(Path(run).name) if out is None or out.exists() else out)
