"""External dashboards: TensorBoard, trackio, Weights & Biases. They get copies; `metrics.jsonl` holds the originals.

A recipe names them (`trackers: [tensorboard]`). If one fails during the run, a line on stderr says so and the run goes
on without it.
"""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trailmark.errors import RecipeError, nearest
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.store import Run


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard. After a resume, steps that are written again replace the old ones."""

    def __init__(self, run: Run, config: Mapping[str, Any], resumed_at: int):
        writer = _need("tensorboard", "torch.utils.tensorboard").SummaryWriter
        purge = resumed_at + 1 if resumed_at else None
        self.writer = writer(log_dir=str(run.path / "tensorboard"), purge_step=purge)
        self.writer.add_text("recipe", "```\n" + run.recipe + "\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Trackio:
    """A local dashboard. Trackio chooses where its data is stored (TRACKIO_DIR)."""

    def __init__(self, run: Run, config: Mapping[str, Any], resumed_at: int):
        self.trackio = _need("trackio")
        self.trackio.init(
            project="trailmark", name=_name(run, config), config=dict(config), resume="allow" if resumed_at else "never"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self.trackio.finish()


class Wandb:
    """Weights & Biases. Its own environment variables set the project and the mode (WANDB_PROJECT, WANDB_MODE)."""

    def __init__(self, run: Run, config: Mapping[str, Any], resumed_at: int):
        wandb = _need("wandb")
        note = run.path / "wandb.id"  # a resumed run continues under the same id
        if not note.is_file():
            atomic_write(note, uuid.uuid4().hex[:12].encode())
        self.run = wandb.init(
            id=note.read_text("ascii"), name=_name(run, config), config=dict(config), dir=str(run.path), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}


class Trackers:
    """All trackers of a run; there may be none."""

    def __init__(self, open_: Mapping[str, Tracker]):
        self.open = dict(open_)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
        for name, tracker in list(self.open.items()):
            self._try(name, lambda s=tracker: s.log(step, numbers))

    def close(self) -> None:
        for name, tracker in list(self.open.items()):
            self._try(name, tracker.close)
        self.open.clear()

    def _try(self, name: str, what: Any) -> None:
        try:
            what()
        except Exception as e:  # the run goes on whatever a dashboard raises
            self.open.pop(name, None)
            print(f"tracker '{name}' failed and is not used any more: {type(e).__name__}: {e}", file=sys.stderr)


def open_trackers(names: Sequence[str], run: Run, config: Any = None, resumed_at: int = 0) -> Trackers:
    """Open the trackers of a run. `config` is the resolved recipe (a mapping or a pydantic model). A resumed run goes
    on after step `resumed_at`."""
    for name in names:
        if name not in TRACKERS:
            raise RecipeError(f"trackers: there is no tracker '{name}'.{nearest(name, TRACKERS)}")
    plain = config.model_dump(mode="json") if hasattr(config, "model_dump") else dict(config or {})
    return Trackers({name: TRACKERS[name](run, plain, resumed_at) for name in dict.fromkeys(names)})


def _need(name: str, module: str | None = None) -> Any:
    try:
        return importlib.import_module(module or name)
    except ImportError as e:
        raise RecipeError(
            f"trackers: '{name}' is not installed ({e}): pip install 'trailmark[trackers]', or leave it out."
        ) from e


def _name(run: Run, config: Mapping[str, Any]) -> str:
    return str(config.get("name") or run.path.name)
