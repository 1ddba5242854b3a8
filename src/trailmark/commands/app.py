"""The command line: the main app, and small commands. Heavy modules are imported when a command needs them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trailmark import __version__, registry, stopping
from trailmark.commands.convert import convert
from trailmark.commands.data import data
from trailmark.commands.evaluate import compare, evaluate, prune, study
from trailmark.commands.models import models
from trailmark.commands.plan import plan
from trailmark.commands.play import play
from trailmark.commands.quickstart import quickstart
from trailmark.commands.report import inspect, report
from trailmark.commands.serve import serve
from trailmark.commands.stages import stages
from trailmark.commands.verify import verify
from trailmark.errors import RunError, TaskError, TrailmarkError
from trailmark.terminal.options import say_error
from trailmark.trust import command


class _Group(TyperGroup):
    """Turns an error of a command into one sentence and an exit code."""

    def main(self, args: Any = None, *more: Any, **named: Any) -> Any:
        with command(sys.argv[1:] if args is None else list(args)) as words:
            return super().main(words, *more, **named)

    def invoke(self, ctx: Any) -> Any:
        try:
            with stopping.at_once():
                return super().invoke(ctx)
        except TrailmarkError as e:
            say_error(str(e))
            raise typer.Exit(e.code) from None
        except KeyboardInterrupt as e:
            stopped = e if isinstance(e, stopping.Stopped) else stopping.Stopped(signal.SIGINT)
            how = "give the same command again" + (": it keeps what is finished" if _keeps(ctx) else "")
            notes = [str(note) for note in getattr(e, "__notes__", [])]
            say_error("; ".join([str(stopped), *notes, *([] if "trailmark " in "".join(notes) else [how])]) + ".")
            raise typer.Exit(128 + stopped.number) from None
        except Exception as e:
            # typer handles usage errors, exits and a closed pipe itself.
            if hasattr(e, "exit_code") or isinstance(e, typer.Abort | BrokenPipeError):
                raise
            if isinstance(e, OSError) and e.filename is not None:
                say_error(f"{e.filename} cannot be read or written ({e.strerror or e}).")
                raise typer.Exit(2) from None
            traceback.print_exception(e)
            say_error("this is a bug of trailmark, not of your input; please report it with the lines above.")
            raise typer.Exit(1) from None


def _keeps(ctx: Any) -> bool:
    """Whether a command that was stopped goes on when it is given again."""
    return ctx.invoked_subcommand in ("data", "judge", "stages", "study", "write")


app = typer.Typer(
    cls=_Group,
    name="trailmark",
    help="Teach language models to reason over many steps by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trailmark {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Run code that the recipe of a run names. May stand anywhere in the command."),
    ] = False,
) -> None: ...


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe in YAML.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to set.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved recipe, check it, and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in `out`.")] = False,
    insist: Annotated[bool, typer.Option("--insist", help="Run even if the memory seems too small.")] = False,
) -> None:
    """Run the method of a recipe."""
    from trailmark import methods
    from trailmark.config import dump, load_recipe
    from trailmark.memory import INSIST
    from trailmark.runs.launch import launch

    config = methods.resolve_recipe(load_recipe(recipe, overrides or ()))
    if dry_run:
        typer.echo(dump(config), nl=False)
        for line in methods.check(config):
            typer.echo(f"# {line}")
        return
    if resume and not Path(config.out).is_dir():
        raise RunError(f"--resume: there is no run in {config.out} to go on with; leave --resume out to start one.")
    if insist:
        os.environ[INSIST] = "1"
    with stopping.advising(lambda: _go_on(config.out, recipe, overrides or ())):
        launch(methods.get_method(config.method), config, resume)
    typer.echo(f"The run is in {config.out}. To look at it: trailmark report {shlex.quote(config.out)}", err=True)


def _go_on(out: str, recipe: Path, overrides: Sequence[str]) -> str:
    if not (Path(out) / "recipe.yaml").is_file():
        return "nothing was made yet"
    return "go on with: " + shlex.join(["trailmark", "train", str(recipe), *overrides, "--resume"])


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    every: Annotated[
        bool, typer.Option("--all", help="Print every difference, also if there are many of one kind.")
    ] = False,
) -> None:
    """Compare two runs bit by bit, and show where they differ. Exit code 0: they are equal; 1: they are not."""
    from trailmark.methods import complete
    from trailmark.runs.diff import diff_runs, few

    found = diff_runs(a, b, complete)
    typer.echo("\n".join(map(str, found) if every else few(found)) or "identical")
    raise typer.Exit(1 if found else 0)


@app.command()
def tasks(
    words: Annotated[list[str] | None, typer.Argument(metavar="[check] NAME KEY=VALUE")] = None,
    action: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="check: an action to try, such as a right answer.")
    ] = None,
    max_steps: Annotated[int, typer.Option(min=1, help="check: stop a play after so many steps.")] = 200,
) -> None:
    """List the tasks, show one with its first start, or check that one follows the protocol (`tasks check NAME`)."""
    from trailmark.tasks import get_task, task_names, task_options
    from trailmark.tasks.base import draw_tasks

    check, words = (words or [])[:1] == ["check"], list(words or [])
    words = words[1:] if check else words
    if not words:
        if check:
            raise TrailmarkError("tasks check: which task? Such as 'trailmark tasks check taxi'.")
        typer.echo("\n".join(task_names()))
        return
    source = get_task(words[0], **task_options(words[1:]))
    if check:
        from trailmark.tasks.check import check_task

        report = check_task(source, max_steps=max_steps, actions=action or ())
        typer.echo(str(report))
        raise typer.Exit(0 if report.ok else 1)
    if action:
        raise TrailmarkError(f"--action is for 'trailmark tasks check {words[0]}'.")
    starts = list(draw_tasks(source, "train", 1, 0))
    if not starts:
        raise TaskError(f"task '{source.name}' has no start in split 'train'.")
    try:
        seen = source.make().reset(starts[0]).text
    except TrailmarkError:
        raise
    except Exception as e:  # a world may be the user's own code
        raise TaskError(f"task '{source.name}' raised {type(e).__name__} at its first start: {e}") from e
    typer.echo((source.__doc__ or source.name).strip())
    typer.echo(f"\nfirst start ({starts[0].id}):\n{seen}")


app.command()(convert)
app.add_typer(data)
app.command()(plan)
app.command()(play)
app.command()(quickstart)
app.command()(serve)
app.command()(report)
app.command()(inspect)
app.command("eval")(evaluate)
app.command()(compare)
app.command()(stages)
app.command()(study)
app.command()(prune)
app.command()(verify)
app.command()(models)
for _name in registry.names("commands"):
    _found = registry.load("commands", _name)
    app.add_typer(_found, name=_name) if isinstance(_found, typer.Typer) else app.command(_name)(_found)


def main() -> None:
    app()
