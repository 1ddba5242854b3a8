"""Options that several commands share: a teacher behind a server or by rules, a folder to write, seeds and counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trailmark import MOST_SEED

if TYPE_CHECKING:
    from trailmark.ask.client import Client

MANY = 1_000_000  # the upper limit of counts, so that a wrong number does not fill the memory


def finite(value: float) -> float:
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
Temperature = Annotated[float, typer.Option("--temperature", min=0, max=100, callback=finite, help="Of the teacher.")]
TopP = Annotated[
    float, typer.Option("--top-p", min=1e-6, max=1, callback=finite, help="Nucleus of the teacher's sampling.")
]
AtOnce = Annotated[int, typer.Option("--at-once", min=1, max=4096, help="Questions at the same time.")]
Deadline = Annotated[
    float,
    typer.Option("--deadline", min=0.1, max=86400, callback=finite, help="Seconds for one answer, retries included."),
]
Shuffle = Annotated[
    bool, typer.Option("--shuffle-labels", help="Draw labels from the whole alphabet, not the first ones.")
]
Retries = Annotated[
    int, typer.Option("--retries", min=0, max=1000, help="Retries after a refused connection, 429 or 5xx.")
]
Failures = Annotated[
    float, typer.Option(min=0, max=1, callback=finite, metavar="SHARE", help="Of the teacher's answers that may fail.")
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


def teacher_of(
    name: str, model: str | None, key: str | None, version: str | None, temperature: float, top_p: float, at_once: int,
    deadline: float, retries: int, failures: float,
) -> tuple[dict[str, Any], Callable[[Path], Client | None]]:  # fmt: skip
    """The teacher's part of a data set's settings, and a function that opens it from a file of answers. It gives None
    for the offline teacher."""
    from trailmark.ask.engines import open_teacher
    from trailmark.errors import TrailmarkError

    if name == "offline":
        return {"teacher": "offline"}, lambda answers: None
    if not name.startswith(("http://", "https://")):
        raise TrailmarkError(f"--teacher '{name}' is neither 'offline' nor an address that begins with http.")
    if model is None:
        raise TrailmarkError(f"--teacher {name} needs --model, the model's name on that server.")
    settings = {"teacher": model, "temperature": temperature, "top_p": top_p}
    options: dict[str, Any] = {"api_key": key, "api_version": version, "temperature": temperature, "top_p": top_p,
                               "at_once": at_once, "deadline": deadline, "retries": retries,
                               "failures": failures}  # fmt: skip
    return settings, lambda answers: open_teacher(name, model, answers, **options)
