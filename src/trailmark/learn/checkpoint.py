"""Checkpoints: folders that are complete or absent. Weights are files that transformers can load. The optimiser and the
random states are safetensors and JSON, never pickle.

    checkpoints/000010/policy/          config.json, model.safetensors (or a LoRA adapter), tokenizer files,
                                        heads.safetensors
    checkpoints/000010/optimiser-policy.safetensors
    checkpoints/000010/state.json       step, random states, what objectives learned, the method's own state,
                                        metric history
    checkpoints/000010/extra            (an empty file) no step of `checkpoint.every`: written by the clock or a signal
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trailmark.errors import RunError, TrailmarkError, first_line
from trailmark.fault_points import point
from trailmark.learn.learner import Learner
from trailmark.models.adapters import name_base
from trailmark.models.checked import load_plain, same_names
from trailmark.models.lm import LM
from trailmark.plain_files import read_json
from trailmark.runs.atomic_files import cannot_write, sync_folder
from trailmark.runs.checkpoints import EXTRA, numbered

# errors that reading a cut, empty or edited file may raise
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError, TrailmarkError)


def save(folder: Path, step: int, learner: Learner, state: Mapping[str, Any], extra: bool = False) -> Path:
    """Write checkpoint `step` under a temporary name, sync it, and rename it. An `extra` one is kept only while it is
    the newest."""
    final, scratch = folder / f"{step:06d}", folder / f".{step:06d}.partial"
    if final.exists():
        return final
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        point("checkpoint.begin")
        scratch.mkdir(parents=True)
        for name, optimiser in learner.optimisers.items():
            save_model(learner.models[name], scratch / name, folder.parent / f"base-{name}")
            if optimiser.average:
                with optimiser.averaged():
                    save_model(learner.models[name], scratch / f"{name}-ema", folder.parent / f"base-{name}")
            point("checkpoint.weights")
            save_file(
                {k: t.detach().cpu().contiguous() for k, t in optimiser.tensors().items()},
                scratch / f"optimiser-{name}.safetensors",
            )
            point("checkpoint.optimiser")
        for name in learner.keeps:
            save_model(learner.models[name], scratch / name, folder.parent / f"base-{name}")
        whole = {
            "step": step,
            "optimiser_steps": {n: o.steps for n, o in learner.optimisers.items()},
            "learned": learner.learned,
            "random": random_state(),
            **({"places": learner.places} if learner.places and torch.cuda.is_available() else {}),
            **state,
        }
        (scratch / "state.json").write_text(json.dumps(whole, indent=1, sort_keys=True, allow_nan=False))
        if extra:
            (scratch / EXTRA).touch()
        point("checkpoint.state")
        mode = (scratch / "state.json").stat().st_mode  # safetensors writes files that only their owner can read
        for path in [*scratch.rglob("*"), scratch]:
            if path.is_file():
                path.chmod(mode)
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        point("checkpoint.synced")
        scratch.rename(final)
        point("checkpoint.renamed")
        sync_folder(folder)
    except OSError as problem:
        shutil.rmtree(scratch, ignore_errors=True)
        raise cannot_write(final, problem) from problem
    except Exception as problem:
        shutil.rmtree(scratch, ignore_errors=True)
        if number := re.search(r"os error (\d+)", str(problem)):  # safetensors has its own error for a full disk
            code = int(number[1])
            raise cannot_write(final, OSError(code, os.strerror(code))) from problem
        raise
    return final


def save_model(lm: LM, folder: Path, base_folder: Path) -> None:
    if lm.adapted:
        config = lm.model.peft_config["default"]
        if not config.base_model_name_or_path or config.base_model_name_or_path == "tiny":
            if not base_folder.exists():  # a new base model is stored once, so that the adapter can be loaded
                scratch = base_folder.with_name(f".{base_folder.name}.partial")
                shutil.rmtree(scratch, ignore_errors=True)
                with_plain_names = {
                    k.replace(".base_layer", ""): v for k, v in lm.base.state_dict().items() if "lora_" not in k
                }
                lm.base.save_pretrained(scratch, state_dict=with_plain_names)
                lm.tokenizer.save_pretrained(scratch)
                scratch.rename(base_folder)
            config.base_model_name_or_path = str(base_folder.resolve())
    lm.model.save_pretrained(folder)
    if lm.adapted:
        name_base(lm, folder)
    lm.tokenizer.save_pretrained(folder)
    if len(lm.heads):
        save_file(
            {k: t.detach().cpu().contiguous() for k, t in lm.heads.state_dict().items()}, folder / "heads.safetensors"
        )


def load_weights(lm: LM, folder: Path) -> None:
    """Load a checkpoint's weights into a model of the same shape."""
    if lm.adapted:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        stored = load_plain(folder / "adapter_model.safetensors", device=str(lm.device))
        same_names(stored, get_peft_model_state_dict(lm.model), f"{folder}/adapter_model.safetensors")
        set_peft_model_state_dict(lm.model, stored)
    else:
        tensors: dict[str, torch.Tensor] = {}
        for part in sorted(folder.glob("model*.safetensors")):
            tensors.update(load_plain(part, device=str(lm.device)))
        missing, extra = lm.base.load_state_dict(tensors, strict=False)
        tied = set(getattr(lm.base, "_tied_weights_keys", None) or [])
        if extra or [m for m in missing if m not in tied]:
            raise RunError(f"{folder}: the weights do not fit the recipe's model (first: {(extra or missing)[0]})")
        lm.base.tie_weights()
    if len(lm.heads):
        lm.heads.load_state_dict(load_plain(folder / "heads.safetensors", device=str(lm.device)))


def restore(folder: Path, learner: Learner) -> dict[str, Any]:
    """Load weights, optimisers and random states of one checkpoint. Returns the rest of its state."""
    state = read_json(folder / "state.json")
    if missing := [k for k in ("best", "without_better", "stopped", "method") if k not in state]:
        raise KeyError(f"state.json has no '{missing[0]}'")
    if state["step"] != int(folder.name):
        raise ValueError(f"state.json is of step {state['step']}")
    for name, optimiser in learner.optimisers.items():
        load_weights(learner.models[name], folder / name)
        optimiser.load(load_plain(folder / f"optimiser-{name}.safetensors"), state["optimiser_steps"][name])
    learner.learned = state.get("learned", {})
    learner.places = state.get("places")
    set_random_state(state["random"])
    return state


def go_back(folder: Path, learner: Learner, load: Callable[[Mapping[str, Any]], None]) -> dict[str, Any] | None:
    """Restore the newest checkpoint that can be read, and pass the method's state to `load`. Damaged checkpoints are
    moved to the run's folder `damaged`, with a warning on standard error. Returns None if there is no checkpoint."""
    damaged = []
    for path in reversed(found := numbered(folder)):
        try:
            state = restore(path, learner)
            load(state["method"])
        except DAMAGE as problem:
            damaged.append((path, f"{path} is damaged ({first_line(problem)})"))
            continue
        for bad, why in damaged:  # only now: if no checkpoint can be read, no file is moved
            print(
                f"warning: {why}: the run goes on from step {state['step']}; it lies in {_aside(bad)}", file=sys.stderr
            )
        return state
    if found:
        raise RunError(
            f"{damaged[0][1]}, and no earlier checkpoint can be read: start again with another out=DIR, or put the "
            "files back."
        )
    return None


def _aside(path: Path) -> Path:
    """Move a damaged checkpoint away, because a new one will be written in its place."""
    shelf = path.parent.parent / "damaged"
    shelf.mkdir(exist_ok=True)
    names = (shelf / (path.name if k == 0 else f"{path.name}-{k}") for k in itertools.count())
    place = next(p for p in names if not p.exists())
    path.rename(place)
    return place


def seed_all(seed: int) -> None:
    """Seed the global random generators. Trailmark does not use them, but a user's task or model may, and is then
    repeatable too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [kind, keys.tolist(), int(pos), int(has_gauss), float(cached)],  # type: ignore[union-attr]
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [s.numpy().tobytes().hex() for s in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, pos, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), pos, has_gauss, cached))

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()

    torch.set_rng_state(tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([tensor(t) for t in state["cuda"]])
