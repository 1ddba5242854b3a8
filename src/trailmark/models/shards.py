"""Checkpoints of other programs, put together into one folder that transformers loads.

    model-00001-of-00003.safetensors, …     pieces of a model, with or without an index
    pytorch_model.bin, …                    the same as pickles
    global_step8/*_optim_states.pt, …       DeepSpeed ZeRO, stages 1, 2 and 3: every process wrote its part

Of pickles only weights are read (`models/pickled.py`). A tensor that repeats a few numbers is refused. The new folder
is written beside its place, loaded once, and then renamed. So it is there as a whole or not at all.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import ModelError, RunError, TrailmarkError, first_line
from trailmark.memory import need
from trailmark.models import deepspeed
from trailmark.models.pickled import Gathered, file_names, read_pickled
from trailmark.plain_files import read_json

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
FOREIGN = {"FSDP": "*.distcp", "Megatron": "latest_checkpointed_iteration.txt", "Megatron-LM": "mp_rank_*"}


def gather(folder: Path, tag: str | None = None) -> Gathered:
    """All weights of a checkpoint. An error names what is missing or damaged."""
    from trailmark.models.checked import must_be_plain, must_hold_files

    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder.")
    must_hold_files(folder)
    try:
        found = _gather(folder, tag)
    except TrailmarkError:
        raise
    except Exception as problem:  # a damaged file may raise anything
        raise ModelError(f"{folder} is no checkpoint of a layout that is read here: {first_line(problem)}.") from None
    must_be_plain(found.tensors, folder)
    return found


def _gather(folder: Path, tag: str | None) -> Gathered:
    if tag is not None or (folder / "latest").is_file() or any(map(deepspeed.OPTIM.fullmatch, file_names(folder))):
        return deepspeed.gather(deepspeed.tagged(folder, tag))
    if (files := _pieces(folder)) is not None:
        return _merged(folder, *files)
    if any(map(deepspeed.STATES.fullmatch, file_names(folder))):
        return deepspeed.gather(folder)
    inside = [p.name for p in sorted(folder.iterdir()) if p.is_dir() and (p / "latest").is_file()]
    hint = f" There are checkpoints in {', '.join(inside)}: name one of these folders." if inside else ""
    for program, sign in FOREIGN.items():
        if next(folder.glob(sign), None) is not None:
            hint += f" It is a checkpoint of {program}: put it together with that program first."
    raise ModelError(
        f"{folder} holds no checkpoint: neither model.safetensors nor pytorch_model.bin, whole or in pieces, nor the "
        f"file 'latest' of DeepSpeed.{hint}"
    )


# --- pieces of a model ------------------------------------------------------------------------------------------------


def _pieces(folder: Path) -> tuple[list[str], Mapping[str, str]] | None:
    """The files that hold a model, and the place of every weight if an index says it."""
    for name in INDEXES:
        if (folder / name).is_file():
            where = _read_index(folder / name)
            return sorted(set(where.values())), where
    for name in SINGLE:
        if (folder / name).is_file():
            return [name], {}
    found = [m for n in file_names(folder) if (m := PART.fullmatch(n))]
    if not found:
        return None
    stem, total, end = found[0][1], found[0][3], found[0][4]
    if not 0 < int(found[-1][2]) <= int(total):
        raise ModelError(f"{folder / found[-1][0]}: no piece of a model has such a number: remove it.")
    return [f"{stem}-{k:05d}-of-{total}.{end}" for k in range(1, int(total) + 1)], {}


def _read_index(path: Path) -> dict[str, str]:
    try:
        where = read_json(path)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ModelError(f"{path} is no index of weights: {first_line(problem)}.") from None
    named = where.values() if isinstance(where, dict) else ()
    if not named or not all(isinstance(v, str) and Path(v).name == v for v in named):
        raise ModelError(f"{path} is no index of weights: 'weight_map' must name files of this folder.")
    return where


def _merged(folder: Path, files: Sequence[str], where: Mapping[str, str]) -> Gathered:
    if missing := [name for name in files if not (folder / name).is_file()]:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelError(
            f"{folder} is not complete: {missing[0]}{more} is missing, one of its {len(files)} files. Copy it there."
        )
    tensors: Tensors = {}
    for name in files:
        held = _weights_of(folder / name)
        if lost := next((w for w, file in where.items() if file == name and w not in held), None):
            raise ModelError(f"{folder / name} has no weight '{lost}', which the index says is there.")
        tensors |= held
    return Gathered("safetensors" if files[0].endswith(".safetensors") else "bin", tensors, files=len(files))


def _weights_of(path: Path) -> Tensors:
    """The tensors of one file."""
    import torch

    if path.suffix == ".safetensors":
        from trailmark.models.checked import read_tensors

        return read_tensors(path)
    held = read_pickled(path)
    held = held.get("state_dict", held) if isinstance(held, dict) else held
    if not isinstance(held, dict) or not all(torch.is_tensor(t) for t in held.values()):
        raise ModelError(f"{path} holds something other than the weights of a model.")
    return dict(held)


# --- the new folder ---------------------------------------------------------------------------------------------------


def convert(source: Path, out: Path, like: Path | None = None, tag: str | None = None, dtype: str = "") -> list[str]:
    """Write the checkpoint `source` as the folder `out`. Config and tokenizer come from `source`, and what is not there
    from the folder `like`. `dtype` changes the numbers' type. Returns lines that say what was done."""
    import torch

    from trailmark.models.checked import same_shapes

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} exists: choose another folder.")
    if (source / "adapter_config.json").is_file():
        raise ModelError(f"{source} holds an adapter and no model: it needs no conversion, and every command loads it.")
    found = gather(source, tag)
    beside = _beside([source, *([like] if like else [])])
    if "config.json" not in beside:
        raise ModelError(
            f"{source} has no config.json: name the model that training began with, such as --like Qwen/Qwen2.5-3B."
        )
    asked, tied = _asked_by(beside["config.json"], source)
    tensors, same = _plain_names(found.tensors), _plain_names(found.same)
    same_shapes(tensors, asked, source)
    first: dict[tuple[Any, ...], str] = {}
    for name, t in tensors.items():  # a .bin file stores two names of one weight as one weight
        if (held := first.setdefault((t.data_ptr(), t.shape, t.stride(), t.dtype), name)) != name and t.numel():
            same[name] = held
    tensors = {n: t for n, t in tensors.items() if n not in same}
    if dtype:
        tensors = {n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in tensors.items()}
    left = sorted(n for n in tensors if n in found.buffers and n not in asked)
    tensors = {n: t for n, t in tensors.items() if n not in left}
    if not tied:  # two names stay two weights
        tensors |= {n: tensors[m].clone() for n, m in same.items()}
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()})
    count = sum(t.numel() for t in tensors.values())
    with _whole_folder(out) as place:
        for name, file in beside.items():
            shutil.copyfile(file, place / name)
        _write(place, tensors)
        del tensors
        found.tensors.clear()
        for file in place.glob("*.safetensors"):
            file.chmod((place / "config.json").stat().st_mode)  # not only for its owner
        _load_once(place, source)
    files = f"{found.files} files" if found.files > 1 else "one file"
    lines = [f"{source}: {found.kind}, {files}", f"{out}: {count:,} weights, {' and '.join(kinds)}"]
    if not any(n.startswith(("tokenizer", "vocab")) for n in beside):
        lines.append("note: there is no tokenizer: copy one there, or convert with --like MODEL.")
    if left:
        lines.append(f"note: left out {len(left)} buffers that no model of this config.json has, such as '{left[0]}'.")
    return lines


def _asked_by(file: Path, source: Path) -> tuple[Mapping[str, tuple[int, ...]], bool]:
    """The names and shapes of the weights that a config.json asks for, and whether it ties the output layer."""
    from trailmark.models.checked import described
    from trailmark.models.load import load_config

    config = load_config(str(file.parent))
    try:
        shapes = described(config)
    except Exception as problem:  # a damaged config may raise anything
        raise ModelError(f"{source}: its config.json describes no model: {first_line(problem)}.") from None
    whole = 2 * sum(math.prod(shape) for shape in shapes.values())
    need(whole, f"{source}: a model as its config.json describes it", "look at its config.json")
    return shapes, bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def _beside(folders: Sequence[Path]) -> dict[str, Path]:
    """Config and tokenizer files, from the first folder that has them. The files of one tokenizer stay together."""
    out: dict[str, Path] = {}
    for folder in folders:
        mine = {n: folder / n for n in BESIDE if (folder / n).is_file()}
        words = {n for n in mine if n not in BESIDE[:2]}
        if words & {"tokenizer.json", "tokenizer.model", "vocab.json"} and not any(n in out for n in BESIDE[2:]):
            out |= {n: mine[n] for n in words}
        if "config.json" in mine and "config.json" not in out:
            out |= {n: mine[n] for n in BESIDE[:2] if n in mine}
    return out


def _plain_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Without a prefix that a wrapper has put before every name."""
    out = dict(tensors)
    for prefix in ("module.", "_orig_mod.", "module."):
        if out and all(n.startswith(prefix) for n in out):
            bare = lambda x, p=prefix: x.removeprefix(p) if isinstance(x, str) else x
            out = {bare(n): bare(t) for n, t in out.items()}
    return out


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name at the end, or is removed if there is an error."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as problem:
        raise RunError(f"{out} cannot be written: {problem.strerror}.") from None
    try:
        yield place
        if out.is_dir():
            out.rmdir()
        place.chmod(0o755)
        place.rename(out)
    except OSError as problem:
        raise RunError(f"{out} cannot be written: {problem.strerror or problem}.") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write(place: Path, tensors: Tensors) -> None:
    """One model.safetensors, or files of 5 GB with an index. A weight that is a part of a longer row is copied."""
    import torch
    from huggingface_hub import save_torch_state_dict

    whole = lambda t: t.is_contiguous() and t.untyped_storage().nbytes() == t.numel() * t.element_size()
    alone = {n: t if whole(t) else t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
    save_torch_state_dict(alone, place, max_shard_size="5GB", metadata={"format": "pt"})


def _load_once(place: Path, source: Path) -> None:
    """Load the folder once, as every command will."""
    from transformers.utils import logging

    from trailmark.models.checked import load_whole

    logging.disable_progress_bar()
    try:
        load_whole(place, source, local_files_only=True, dtype="auto", attn_implementation="eager")
    except TrailmarkError:
        raise
    except Exception as problem:  # a damaged checkpoint may raise anything
        raise ModelError(f"{source}: its weights do not fit its config.json: {first_line(problem)}.") from None


# --- the hub ----------------------------------------------------------------------------------------------------------


def push(folder: Path, name: str, public: bool = False) -> str:
    """Upload a folder to the hub, and return its address. The repository is private if it is new."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api = HfApi()
    try:
        url = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message="Add the model")
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx.HTTPError, OSError) as problem:
        raise ModelError(
            f"--push {name}: {first_line(problem)}. ({folder} is complete: `hf upload {name} {folder}` sends it later.)"
        ) from None
    return str(url)
