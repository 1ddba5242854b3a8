"""`trailmark stages RECIPE`: what the stages of a recipe are, and which of them are done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Names = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Make this stage. May be given several times.")]
Again = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Make this stage again, though nothing has changed.")
]


def stages(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe of a method that has stages.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys to set.")] = None,
    only: Names = None,
    redo: Again = None,
    number: Annotated[int, typer.Option("--round", min=1, help="Of which round, where a name does not say it.")] = 1,
) -> None:
    """List the stages of a recipe, which of them are done, and which will be made again and why. With --only and
    --redo: make some of them; those before must be done. `train` makes them all."""
    from trailmark import methods
    from trailmark.config import load_recipe
    from trailmark.errors import RecipeError
    from trailmark.methods.pipeline import some, stage_named
    from trailmark.plain_files import read_json
    from trailmark.runs.launch import launch
    from trailmark.runs.stages import record_of
    from trailmark.runs.store import Run

    config = methods.resolve_recipe(load_recipe(recipe, words or ()))
    method = methods.get_method(config.method)
    if not method.stages(config, Run(config.out)):
        raise RecipeError(f"{recipe}: its method '{config.method}' has no stages: `trailmark train` makes the run.")
    again = [stage_named(method, config, name, number) for name in redo or ()]
    wanted = [*(stage_named(method, config, name, number) for name in only or ()), *again]
    if not wanted:
        return _list(method, config)
    launch(some(method, wanted, again), config, resume=True)
    for name in dict.fromkeys(wanted):
        made = read_json(record_of(config.out, name))["summary"]
        numbers = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in made.items())
        typer.echo(f"{name}: {numbers}")


def _list(method: Any, config: Any) -> None:
    from trailmark.runs.stages import stage_state
    from trailmark.runs.store import Run
    from trailmark.seats.pinned_models import pin_models

    run = Run(config.out)
    config = pin_models(config, run, write=False) if run.recipe_file.is_file() else config
    found = method.stages(config, run)
    width, unsure = max(15, *(len(s.name) for s in found)), dict[Path, str]()  # folders that will be written, by stage
    for stage in found:
        state, home = stage_state(run.path, stage), run.path / (stage.home or stage.name)
        writes = [home / name for name in stage.outputs or ()] if stage.home else [home]
        inputs = [p for path in stage.inputs.values() for p in (Path(path), *Path(path).parents)]
        above = next((unsure[p] for p in inputs if p in unsure), None)
        if state == "done" and above is not None:
            state = f"done, and looked at again after {above}"
        if state != "done":
            unsure |= dict.fromkeys(writes, stage.name)
        typer.echo(f"{stage.name:<{width}} {state}")
