"""LoRA adapters: add them to a base model, store them without it, and find the base again after both have moved.

An adapter folder says what it was trained on. `adapter_config.json` names the base as peft does: a hub name with its
revision, or an absolute folder. `base.json` holds a fingerprint if the base is a folder. So a base that was moved is
found, and a base that was changed is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.config import ModelConfig
from trailmark.errors import ModelError, first_line
from trailmark.memory import need
from trailmark.models.checked import MOST_LAYERS, quiet, read_tensors, same_names
from trailmark.plain_files import open_plain, read_json, read_plain

if TYPE_CHECKING:
    from trailmark.models.lm import LM

NOTE = "base.json"
PATTERNS = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern", "modules_to_save")
NAMES = re.compile(r"(?:\w|\\?\.(?![*+?])|\.\*\??|\\d\+|\((?:\?:)?(?:\w|\\?\.|\|)+\))*")
SAMPLED = 64  # values of each tensor that go into a fingerprint


@dataclass(frozen=True)
class Base:
    """What an adapter was trained on: a folder, or a name and revision on the hub."""

    path: str
    revision: str | None = None


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / "adapter_config.json").is_file()


def fingerprint(folder: str | Path) -> str:
    """A hash of names, dtypes, shapes and `SAMPLED` evenly spaced values of every tensor of a model folder. Training
    changes nearly all values, so these few distinguish models, and a large model need not be read whole. Empty if the
    folder has no safetensors."""
    import torch
    from safetensors import SafetensorError, safe_open

    digest, files = hashlib.sha256(), sorted(Path(folder).glob("model*.safetensors"))
    for file in files:
        try:
            open_plain(file).close()
            with safe_open(file, framework="pt") as stored:
                for name in sorted(stored.keys()):
                    flat = stored.get_tensor(name).flatten()
                    last = max(len(flat) - 1, 0)
                    at = torch.linspace(0, last, min(SAMPLED, len(flat))).long()
                    some = flat[at.clamp(max=last)]  # float32 rounds an odd number above 2**24 up, past the end
                    shape = stored.get_slice(name).get_shape()
                    digest.update(f"{name} {flat.dtype} {shape}".encode())
                    digest.update(some.contiguous().view(torch.uint8).numpy().tobytes())
        except (SafetensorError, OSError, RuntimeError) as problem:
            raise ModelError(f"{file}: the weights cannot be read: {first_line(problem)}") from problem
    return digest.hexdigest() if files else ""


def weights_print(model: ModelConfig) -> str:
    """A text that changes if the weights of a `model:` section change; nothing is loaded. For a folder: its
    fingerprint. For an adapter: the fingerprints of base and adapter. For a tiny model: its shape and seed. For a name
    on the hub: its revision in the local cache."""
    folder = Path(model.name)
    if is_adapter(folder):
        base = find_base(folder)
        under = fingerprint(base.path) if Path(base.path).is_dir() else f"{base.path} {base.revision}"
        own = hashlib.sha256(b"".join(read_plain(f) for f in sorted(folder.glob("adapter_model*.safetensors"))))
        return f"{under} {own.hexdigest()}"
    if folder.is_dir():
        return fingerprint(folder)
    if model.name == "tiny":
        return f"tiny {model.shape and model.shape.model_dump_json()} {model.seed} {model.tokenizer}"
    return f"{model.name} {model.revision or _commit(model.name)}"


def _commit(name: str) -> str:
    """The commit of a hub model in the local cache; "" if there is none."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # smollm2, or no name of the hub at all
        return ""
    return Path(found).parent.name if isinstance(found, str) else ""


def add_lora(model: Any, config: ModelConfig) -> Any:
    """A new adapter, initialised from the model's seed."""
    import torch
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    lora = config.lora
    assert lora is not None
    names = None if lora.targets == "all-linear" else tuple(lora.targets)
    sides = [
        m.in_features + m.out_features
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear)
        and (m is not model.get_output_embeddings() if names is None else name.split(".")[-1] in names)
    ]
    count = lora.rank * sum(sides)
    need(4 * count, f"model.lora.rank {lora.rank:,}: adapters of {count:,} weights", "lower the rank", model.device)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            settings = PeftLora(
                r=lora.rank,
                lora_alpha=lora.alpha,  # pyrefly: ignore[bad-argument-type]  (a float is fine)
                lora_dropout=lora.dropout,
                target_modules=lora.targets,
                task_type="CAUSAL_LM",
            )
            return get_peft_model(model, settings)
    except ValueError as problem:
        raise ModelError(f"model.lora.targets does not fit '{config.name}': {problem}") from problem


def attach(model: Any, folder: Path, base: Base) -> Any:
    """A stored adapter on its base, ready for further training."""
    import torch
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    stored = read_tensors(folder / "adapter_model.safetensors")
    _only_lora(folder, stored)
    no_fit = f"{folder}: this LoRA does not fit its base '{base.path}': it was made for another model"
    try:
        settings = PeftConfig.from_pretrained(str(folder))
        settings.base_model_name_or_path = base.path
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")  # what they say of missing weights is an error below
            adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=True, config=settings)
        wanted = get_peft_model_state_dict(adapted)
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # damaged settings may raise anything
        said = (str(problem).strip() or type(problem).__name__).splitlines()[-1].strip()[:160]
        raise ModelError(f"{no_fit} ({said})") from problem
    same_names(stored, wanted, f"{no_fit}, or its file was cut: of the tensors that it should adapt, it")
    return adapted


def _only_lora(folder: Path, stored: Mapping[str, Any]) -> None:
    """Refuse settings of another kind of adapter, and a rank that its weights do not have. (Other kinds can load
    tokenizers and modules of their own.)"""
    settings = _read(folder / "adapter_config.json")
    if settings.get("peft_type") != "LORA" or settings.get("megatron_config"):
        raise ModelError(
            f"{folder}/adapter_config.json: peft_type is {settings.get('peft_type')!r}, and only plain LoRA is loaded"
        )
    for key in PATTERNS:
        value = settings.get(key)
        plain = isinstance(value, list) and key in ("target_modules", "exclude_modules")
        for name in [value] if isinstance(value, str) else value if isinstance(value, list | dict) else ():
            if not isinstance(name, str) or not (plain or name == "all-linear" or _is_quick(name)):
                raise ModelError(
                    f"{folder}/adapter_config.json: {key} holds {str(name)[:60]!r}, which is neither the name of a "
                    "module nor a simple pattern (names, '.*', '(a|b)'): write a list of names"
                )
    copies = settings.get("layer_replication") or []
    plain = isinstance(copies, list) and all(
        isinstance(c, list) and len(c) == 2 and all(isinstance(k, int) for k in c) for c in copies
    )
    if not plain or sum(max(1, end - begin) for begin, end in copies) > MOST_LAYERS:
        raise ModelError(
            f"{folder}/adapter_config.json: layer_replication must be ranges of {MOST_LAYERS} layers at most"
        )
    held = {t.shape[0] for name, t in stored.items() if ".lora_A." in name and t.ndim == 2}
    pattern = settings.get("rank_pattern") or {}
    scales = settings.get("alpha_pattern") or {}
    for scale in (settings.get("lora_alpha"), *(scales.values() if isinstance(scales, dict) else (None,))):
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise ModelError(f"{folder}/adapter_config.json: lora_alpha is {str(scale)[:60]}, and must be a number")
    said = [settings.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    most = max(held, default=0)
    if bad := [r for r in said if not isinstance(r, int) or not 0 < r <= most]:
        raise ModelError(f"{folder}/adapter_config.json: its rank is {bad[0]}, and its weights have rank {most}")


def _is_quick(pattern: str) -> bool:
    """Whether a regular expression is simple enough to be tried on every module: names, at most three repeats, at most
    three groups of different names."""
    groups = [g.removeprefix("?:").split("|") for g in re.findall(r"\(([^()]*)\)", pattern)]
    few = len(re.findall(r"[*+]", pattern)) <= 3 and len(groups) <= 3 and len(pattern) <= 1000
    known = NAMES.fullmatch(pattern.removeprefix("^").removesuffix("$"))
    return few and known is not None and all(len(set(g)) == len(g) for g in groups)


def name_base(lm: LM, folder: Path) -> None:
    """Write into a saved adapter what it was trained on, independent of the working directory."""
    file = folder / "adapter_config.json"
    settings = read_json(file)
    base = Path(settings["base_model_name_or_path"] or "")
    if base.is_dir():
        settings["base_model_name_or_path"] = str(base.resolve())
        lm.base_print = lm.base_print or fingerprint(base)
        (folder / NOTE).write_text(json.dumps({"fingerprint": lm.base_print, "name": base.name}, indent=1) + "\n")
    else:
        settings["revision"] = getattr(lm.base.config, "_commit_hash", None) or lm.revision or None
    if isinstance(settings.get("target_modules"), list):
        settings["target_modules"].sort()  # peft keeps a set, and its order differs between processes
    file.write_text(json.dumps(settings, indent=2, sort_keys=True))


def find_base(folder: Path) -> Base:
    """The base of an adapter: where it was, where it has moved with the adapter, or on the hub. A base in a folder must
    still have the weights that the adapter was trained on."""
    settings, note = _read(folder / "adapter_config.json"), {}
    if (folder / NOTE).is_file():
        note = _read(folder / NOTE)
    named = settings.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ModelError(
            f"{folder}/adapter_config.json: key 'base_model_name_or_path' is missing, so the base model is unknown"
        )
    wanted, other = note.get("fingerprint"), None
    for place in _places(folder, named, moved=bool(wanted)):
        if not wanted or fingerprint(place) == wanted:
            return Base(str(place))
        other = other or place
    if other is not None:
        raise ModelError(
            f"{folder}: the model in {other} is not the one this adapter was trained on: its weights have changed. "
            f"Put the base back, or name its folder as 'base_model_name_or_path' in {folder}/adapter_config.json"
        )
    if wanted or Path(named).is_absolute() or named.startswith(".") or named.count("/") > 1:
        raise ModelError(
            f"{folder}: its base model is not here. It was trained on {named}, which is neither there nor in the "
            "folders above the adapter: copy the base beside it, or name its folder as 'base_model_name_or_path' in "
            f"{folder}/adapter_config.json"
        )
    return Base(named, settings.get("revision"))


def _places(folder: Path, named: str, moved: bool) -> Iterator[Path]:
    """Folders that may be the base: the named folder; folders beside the run's checkpoints; SmolLM2's cache. If the
    base has a fingerprint, also the end of its old path below every folder above the adapter."""
    beside = folder.resolve().parent.parent.parent / f"base-{folder.name.removesuffix('-ema')}"
    found = [Path(named), beside]
    if moved:
        from trailmark.models.smollm import cache_dir

        parts = Path(named).parts[1:]
        ends = [Path(*parts[k:]) for k in range(len(parts))]
        found += [above / end for above in folder.resolve().parents for end in ends]
        found.append(cache_dir() / Path(named).name)
    seen = set()
    for place in found:
        if place not in seen and (place / "config.json").is_file():
            seen.add(place)
            yield place


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_plain(file))
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{file} cannot be read ({problem})") from problem
    if not isinstance(found, dict):
        raise ModelError(f"{file}: expected a mapping")
    return found
