"""The run that a served model comes from, and what of its recipe the server takes over: an engine's length and dtype,
stop texts.

    runs/x                           the policy of its newest checkpoint
    runs/x/checkpoints/000200        the policy of this one
    runs/x/checkpoints/000200/ema    this folder; the recipe is found all the same
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.config import EngineConfig, ModelConfig, SamplingConfig, resolve
from trailmark.errors import ModelError, RecipeError

if TYPE_CHECKING:
    from trailmark.models.lm import LM

SHARE = 0.5  # of the free memory that keys and values may take where nobody said how long sequences are


@dataclass(frozen=True)
class Home:
    folder: str  # or a name on the hub
    run: Path | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return str(self.recipe.get("method", ""))

    @property
    def engine(self) -> EngineConfig:
        """Of the run; the default where it has none here."""
        section = self._section("engine")
        return resolve(section, EngineConfig) if section.get("kind", "local") == "local" else EngineConfig()

    @property
    def stop(self) -> list[str]:
        return resolve(self._section("sampling"), SamplingConfig).stop

    def model(self, device: str, dtype: str | None, revision: str | None, tokenizer: str | None) -> dict[str, Any]:
        """The `model:` section to load, in the dtype of the run; quantised as there, where the device can."""
        own = self._section("model")
        fields = {"name": self.folder, "revision": revision, "tokenizer": tokenizer, "device": device}
        fields["dtype"] = dtype or own.get("dtype", "float32")
        from trailmark.models.load import is_adapter, pick_device

        if own.get("quant", "none") != "none" and is_adapter(self.folder) and pick_device(device).startswith("cuda"):
            fields["quant"] = own["quant"]
        return fields

    def _section(self, name: str) -> dict[str, Any]:
        found = self.recipe.get(name)
        return found if isinstance(found, dict) else {}


def find_home(model: str) -> Home:
    folder = Path(model)
    if not folder.is_dir():
        return Home(model)
    if (folder / "checkpoints").is_dir():
        from trailmark.runs.checkpoints import listed

        found = [p / "policy" for p in listed(folder / "checkpoints") if (p / "policy").is_dir()]
        if not found:
            raise ModelError(f"{folder}: this run has no checkpoint of a policy yet")
        folder = found[-1]
    elif (folder / "state.json").is_file() and not (folder / "config.json").is_file():
        if not (folder / "policy").is_dir():
            held = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir()))
            raise ModelError(f"{folder} holds no policy, but: {held or 'nothing'}. Name one of these folders.")
        folder = folder / "policy"
    for run in folder.resolve().parents[:3]:
        if (run / "recipe.yaml").is_file() and (run / "checkpoints").is_dir():
            return Home(str(folder), run, _recipe(run / "recipe.yaml"))
    return Home(str(folder))


def _recipe(file: Path) -> dict[str, Any]:
    from trailmark.marked_yaml import parse

    try:
        value = parse(file.read_text(encoding="utf-8"), str(file))[0]
    except (OSError, UnicodeDecodeError) as problem:
        raise RecipeError(f"{file}: cannot be read ({problem}).") from None
    if not isinstance(value, dict):
        raise RecipeError(f"{file}: a recipe is a mapping of keys to values.")
    return value


def model_config(fields: dict[str, Any]) -> ModelConfig:
    """Checked; a wrong one is an option of the command line."""
    from pydantic import ValidationError

    try:
        return ModelConfig.model_validate(fields)
    except ValidationError as problem:
        first = problem.errors()[0]
        raise ModelError(f"--{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}.") from None


def longest(lm: LM, slots: int) -> int:
    """The model's context, or as much of it as `slots` sequences can have in half of the memory that is free."""
    config: Any = lm.base.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    a_token = 2 * config.num_hidden_layers * kept * size * lm.dtype.itemsize
    fits = int(SHARE * free_memory(lm.device) / (a_token * max(1, slots)))
    return max(2, min(lm.context, max(256, fits // 256 * 256)))


def free_memory(device: Any) -> float:
    import torch

    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return 8e9  # a machine that does not say
