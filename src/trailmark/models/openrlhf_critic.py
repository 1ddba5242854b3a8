"""A value model in the layout of OpenRLHF: its head stands among the weights, where ours is in heads.safetensors."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trailmark.errors import ModelError
from trailmark.models.checked import must_hold_files, read_tensors
from trailmark.plain_files import read_json

HEADS = ("value_head.weight", "score.weight")  # OpenRLHF's names


@contextlib.contextmanager
def in_our_layout(folder: Path) -> Iterator[Path]:
    """The folder of a value model, or during the block a copy of it in our layout."""
    if not (found := foreign_head(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield import_critic(folder, Path(scratch) / "critic", found)


def foreign_head(folder: Path) -> str:
    """The name of the value head in a folder that OpenRLHF wrote; empty if there is none."""
    from safetensors import SafetensorError, safe_open

    must_hold_files(folder)
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != "heads.safetensors":
            try:
                with safe_open(path, "np") as stored:
                    names = [n.removeprefix("base_model.model.") for n in list(stored.keys())]
            except (SafetensorError, OSError) as problem:
                raise ModelError(f"{path} cannot be read: {str(problem)[:200]}.") from None
            plain = {n.replace(".lora_A", "").replace(".lora_B", "") for n in names}
            if found := next((h for h in HEADS if h in plain), ""):
                return found
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ModelError(
            f"{folder}: its weights are pickle files, which Trailmark does not read: save them as safetensors first"
        )
    return ""


def import_critic(source: Path, target: Path, head: str) -> Path:
    """Convert an OpenRLHF critic to a folder of ours, with its head in heads.safetensors. In an adapter the head is
    adapted too: its base is zero and is not stored, so the head is scale * B @ A, and no other base head may be
    added."""
    from safetensors.torch import save_file

    from trailmark.models.adapters import is_adapter

    if (target / "heads.safetensors").is_file():
        return target
    half = target.with_name(f".{target.name}.partial")
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(source, half, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json"))
    tensors: dict[str, Any] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors.update(read_tensors(path))
    plain = head.removesuffix(".weight")
    mine = {n: tensors.pop(n) for n in list(tensors) if plain in n.split(".")}
    if is_adapter(source):
        try:
            settings = read_json(source / "adapter_config.json")
            scale = settings["lora_alpha"] / (math.sqrt(settings["r"]) if settings.get("use_rslora") else settings["r"])
            a, b = (next(t for n, t in mine.items() if f"lora_{k}" in n).float() for k in "AB")
            weight = scale * (b @ a)
        except Exception as problem:  # a damaged adapter may raise anything
            raise ModelError(f"{source}: its value head cannot be read from this adapter ({problem!r:.200}).") from None
        if isinstance(settings.get("target_modules"), list):
            settings["target_modules"] = [m for m in settings["target_modules"] if m != plain]
        settings["task_type"] = "CAUSAL_LM"
        (half / "adapter_config.json").write_text(json.dumps(settings, indent=2))
        save_file(tensors, half / "adapter_model.safetensors")
    else:
        weight = next(iter(mine.values())).float()
        save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
        if "lm_head.weight" not in tensors:  # a critic has no output layer, and none is made up
            settings = read_json(half / "config.json")
            (half / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}, indent=2))
    save_file({"value.weight": weight.contiguous()}, half / "heads.safetensors")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(target)
    half.rename(target)
    return target
