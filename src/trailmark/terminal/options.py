"""Options that several commands share: a teacher, a server, a folder to write, seeds and counts."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from trailmark import MOST_SEED
from trailmark.errors import TrailmarkError

if TYPE_CHECKING:
    from trailmark.ask.client import Client

MANY = 1_000_000  # the upper limit of counts, so that a wrong number does not fill the memory


def say_error(message: str) -> None:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(message, err=True)


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


@dataclass
class TeacherOptions:
    """A teacher: rules, or a model behind a server."""

    teacher: Annotated[
        str, typer.Option(metavar="offline|URL", help="offline: rules; or a server that speaks OpenAI's API.")
    ] = "offline"
    model: Annotated[str | None, typer.Option(help="The model's name on the server.")] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="TRAILMARK_TEACHER_KEY", help="The API key, sent as bearer token or api-key.")
    ] = None
    api_version: Annotated[
        str | None, typer.Option(help="Azure's API version; the key is then sent as api-key.")
    ] = None
    temperature: Annotated[float, typer.Option(min=0, max=100, callback=finite, help="Of the teacher.")] = 0.7
    top_p: Annotated[
        float, typer.Option(min=1e-6, max=1, callback=finite, help="Nucleus of the teacher's sampling.")
    ] = 0.9
    at_once: Annotated[int, typer.Option(min=1, max=4096, help="Questions at the same time.")] = 8
    deadline: Annotated[
        float, typer.Option(min=0.1, max=86400, callback=finite, help="Seconds for one answer, retries included.")
    ] = 120.0
    retries: Annotated[
        int, typer.Option(min=0, max=1000, help="Retries after a refused connection, 429 or 5xx.")
    ] = 5
    failures: Annotated[
        float,
        typer.Option(min=0, max=1, callback=finite, metavar="SHARE", help="Of the teacher's answers that may fail."),
    ] = 0.0

    def settings(self) -> dict[str, Any]:
        """The teacher's part of a data set's settings."""
        if self.teacher == "offline":
            return {"teacher": "offline"}
        if not self.teacher.startswith(("http://", "https://")):
            raise TrailmarkError(
                f"--teacher '{self.teacher}' is neither 'offline' nor an address that begins with http."
            )
        if not self.model:
            raise TrailmarkError(f"--teacher {self.teacher} needs --model, the model's name on that server.")
        return {"teacher": self.model, "temperature": self.temperature, "top_p": self.top_p}

    def open(self, answers: Path) -> Client | None:
        """The teacher, with a file of answers. None is the offline teacher."""
        from trailmark.ask.client import open_teacher

        if self.teacher == "offline":
            return None
        rest = {k: v for k, v in vars(self).items() if k not in ("teacher", "model")}
        return open_teacher(self.teacher, str(self.model), answers, **rest)


@dataclass(frozen=True)
class ServerOptions:
    """How a server is asked."""

    served: Annotated[
        str | None, typer.Option("--served", metavar="NAME", help="The model's name on a server.")
    ] = None
    header: Annotated[
        list[str] | None, typer.Option(help="HTTP header for a server: NAME=VALUE or NAME=env:VARIABLE.")
    ] = None
    query: Annotated[
        list[str] | None, typer.Option(help="Query parameter for a server: NAME=VALUE, such as api-version=…")
    ] = None
    key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable with a server's bearer key.")
    ] = None

    def section(self) -> dict[str, Any]:
        """As keys of a section `server` of a recipe."""
        named = {"model": self.served} if self.served else {}
        return {**named, "headers": pairs(self.header or (), "--header"), "query": pairs(self.query or (), "--query"),
                "api_key_env": self.key_env}  # fmt: skip


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE options. VALUE may be env:VARIABLE, so that a secret (Azure's `api-key`) need not be on the
    command line."""
    for word in words:
        if "=" not in word:
            raise TrailmarkError(f"{option} '{word}': expected NAME=VALUE, such as api-version=2024-10-21.")
    return {k.strip(): v for k, _, v in (w.partition("=") for w in words)}


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose parameters that are data classes of options (as above) are options, each annotated field one of
    them. The parameter's default has their defaults."""
    hints = get_type_hints(command, include_extras=True)
    params = list[inspect.Parameter]()
    for p in inspect.signature(command).parameters.values():
        kind = hints[p.name]
        each = _flat(kind, p.default) if is_dataclass(kind) else [(p.name, kind, p.default)]
        params += [p.replace(name=name, annotation=kind, default=default) for name, kind, default in each]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        return command(**{name: _made(hints[name], name, values) for name in hints if name != "return"})

    run.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in params}
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


def _flat(kind: Any, default: Any) -> list[tuple[str, Any, Any]]:
    """Name, annotation and default of each option of a data class, and of those in it."""
    out = []
    for name, inner in get_type_hints(kind, include_extras=True).items():
        if is_dataclass(inner):
            out += _flat(inner, getattr(default, name))
        elif get_origin(inner) is Annotated:
            out.append((name, inner, getattr(default, name)))
    return out


def _made(kind: Any, name: str, values: dict[str, Any]) -> Any:
    if not is_dataclass(kind):
        return values[name]
    hints = get_type_hints(kind, include_extras=True).items()
    options = {n: hint for n, hint in hints if is_dataclass(hint) or get_origin(hint) is Annotated}
    return kind(**{n: _made(hint, n, values) for n, hint in options.items()})
