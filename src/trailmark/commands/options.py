"""Options that several commands share: a teacher behind a server or by rules, a folder to write, seeds and counts."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from trailmark import MOST_SEED

MANY = 1_000_000  # the upper limit of counts, so that a wrong number does not fill the memory


def finite(value: float) -> float:
    """Refuse nan, which passes limits because no comparison with it is true."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder to write; the same command resumes an unfinished one.")
]
Shuffle = Annotated[
    bool, typer.Option("--shuffle-labels", help="Draw labels from the whole alphabet, not the first ones.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Random seed.")]
Starts = Annotated[int, typer.Option(min=1, max=MANY, help="Plays.")]
Perturb = Annotated[float, typer.Option(min=0, max=1, callback=finite, help="Share of random steps.")]
Horizon = Annotated[int, typer.Option(min=1, max=MANY, help="Most steps of a walk.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the task.")]
Tokenizer = Annotated[
    str,
    typer.Option("--tokenizer", metavar="NAME", help="Tokenizer for labels and token counts: a folder, smollm2, tiny."),
]
Opens = tuple[dict[str, Any], Callable[[Path], Any]]  # settings of the data set, and what opens the teacher


def with_teacher(**usual: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a teacher, with other defaults where `usual` has them. The command gets them as
    one argument `who`, an `Opens`."""
    options = dict(inspect.signature(teacher_of, eval_str=True).parameters)
    options |= {name: options[name].replace(default=value) for name, value in usual.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            who = teacher_of(**{name: given.pop(name) for name in options})
            command(**given, who=who)

        mine = inspect.signature(command, eval_str=True)
        own = [p for p in mine.parameters.values() if p.name != "who"]
        run.__signature__ = mine.replace(parameters=[*own, *options.values()])  # type: ignore[attr-defined]
        run.__annotations__ = {}  # those of the signature count
        return run

    return decorate


def teacher_of(
    teacher: Annotated[
        str,
        typer.Option("--teacher", metavar="offline|URL", help="offline: rules; or a server that speaks OpenAI's API."),
    ] = "offline",
    model: Annotated[str | None, typer.Option("--model", help="The model's name on the server.")] = None,
    key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="TRAILMARK_TEACHER_KEY", help="The API key, sent as bearer token or api-key."),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--api-version", help="Azure's API version; the key is then sent as api-key.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, max=100, callback=finite, help="Of the teacher.")
    ] = 0.7,
    top_p: Annotated[
        float, typer.Option("--top-p", min=1e-6, max=1, callback=finite, help="Nucleus of the teacher's sampling.")
    ] = 0.9,
    at_once: Annotated[int, typer.Option("--at-once", min=1, max=4096, help="Questions at the same time.")] = 8,
    deadline: Annotated[
        float,
        typer.Option("--deadline", min=0.1, max=86400, callback=finite, help="Seconds for one answer, with retries."),
    ] = 120.0,
    retries: Annotated[
        int, typer.Option("--retries", min=0, max=1000, help="Retries after a refused connection, 429 or 5xx.")
    ] = 5,
    failures: Annotated[
        float,
        typer.Option(min=0, max=1, callback=finite, metavar="SHARE", help="Of the teacher's answers that may fail."),
    ] = 0.0,
) -> Opens:
    """The teacher's part of a data set's settings, and a function that opens it from a file of answers. It gives None
    for the offline teacher."""
    from trailmark.ask.engines import open_teacher
    from trailmark.errors import TrailmarkError

    if teacher == "offline":
        return {"teacher": "offline"}, lambda answers: None
    if not teacher.startswith(("http://", "https://")):
        raise TrailmarkError(f"--teacher '{teacher}' is neither 'offline' nor an address that begins with http.")
    if model is None:
        raise TrailmarkError(f"--teacher {teacher} needs --model, the model's name on that server.")
    options: dict[str, Any] = {"api_key": key, "api_version": version, "temperature": temperature, "top_p": top_p,
                               "at_once": at_once, "deadline": deadline, "retries": retries,
                               "failures": failures}  # fmt: skip
    settings = {"teacher": model, "temperature": temperature, "top_p": top_p}
    return settings, lambda answers: open_teacher(teacher, model, answers, **options)
