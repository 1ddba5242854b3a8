"""Checkpoints of other programs, put together into one folder that transformers loads.

    model-00001-of-00003.safetensors, …     pieces of a model, with or without an index
    pytorch_model.bin, …                    the same as pickles
    global_step8/*_optim_states.pt, …       DeepSpeed ZeRO, stages 1, 2 and 3: every process wrote its part

This is the only place that reads pickles, and it reads weights alone: torch refuses everything in a file but tensors,
plain values and the few names of `ALLOWED`, for which harmless stand-ins are put. A file that would grow while it is
read is refused: compressed records, tensors that repeat a few numbers. The new folder is written beside its place,
loaded once, and then renamed. So it is there as a whole or not at all.

ZeRO keeps the weights of a group as one long row of float32 numbers, cut into as many parts as there were processes.
Stages 1 and 2 cut the row of all weights. Stage 3 cuts every weight by itself, and pads its last part.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import ModelError, RunError, TrailmarkError
from trailmark.memory import need
from trailmark.plain_files import read_json

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
OPTIM = re.compile(r"(.*zero_pp_rank_)(\d+)(_mp_rank_)(\d+)(_optim_states\.pt)")
STATES = re.compile(r"(?:(.*zero_pp_rank_)(\d+)_)?mp_rank_(\d+)_model_states\.pt")
BESIDE = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


class _Inert:
    """Stands for an object of DeepSpeed that holds settings. It does nothing."""


ALLOWED: list[tuple[Any, str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]

FOREIGN = {"FSDP": "*.distcp", "Megatron": "latest_checkpointed_iteration.txt", "Megatron-LM": "mp_rank_*"}
MOST_PARTS = 100_000


@dataclass
class Gathered:
    """The weights of a checkpoint. `same` names weights that are another one under a second name."""

    kind: str
    tensors: Tensors
    same: Mapping[str, str] = field(default_factory=dict)
    files: int = 1
    buffers: frozenset[str] = frozenset()  # what the checkpoint itself calls buffers


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
        raise ModelError(f"{folder} is no checkpoint of a layout that is read here: {_said(problem)}.") from None
    must_be_plain(found.tensors, folder)
    return found


def _gather(folder: Path, tag: str | None) -> Gathered:
    if tag is not None or (folder / "latest").is_file() or any(map(OPTIM.fullmatch, _names(folder))):
        return _deepspeed(_tagged(folder, tag))
    if (files := _pieces(folder)) is not None:
        return _merged(folder, *files)
    if any(STATES.fullmatch(n) for n in _names(folder)):
        return _deepspeed(folder)
    inside = [p.name for p in sorted(folder.iterdir()) if p.is_dir() and (p / "latest").is_file()]
    hint = f" There are checkpoints in {', '.join(inside)}: name one of these folders." if inside else ""
    for program, sign in FOREIGN.items():
        if next(folder.glob(sign), None) is not None:
            hint += f" It is a checkpoint of {program}: put it together with that program first."
    raise ModelError(
        f"{folder} holds no checkpoint: neither model.safetensors nor pytorch_model.bin, whole or in pieces, nor the "
        f"file 'latest' of DeepSpeed.{hint}"
    )


def _said(problem: BaseException) -> str:
    """The first line of an error, or its kind."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:200].rstrip(".")


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


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
    found = [m for n in _names(folder) if (m := PART.fullmatch(n))]
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
        raise ModelError(f"{path} is no index of weights: {_said(problem)}.") from None
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


def read_pickled(path: Path) -> Any:
    """What a file of torch holds, if it is weights and plain values alone."""
    import torch

    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as records:
                odd = any(r.compress_type or r.file_size > r.compress_size for r in records.infolist())
                if odd or len(set(records.namelist())) < len(records.namelist()):
                    raise ModelError(f"{path} holds compressed or doubled records, which torch never writes.")
        with torch.serialization.safe_globals(ALLOWED):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(f"{path} is missing.") from None
    except pickle.UnpicklingError as problem:
        named = re.search(r"GLOBAL ([\w.]+)", str(problem).partition("WeightsUnpickler error")[2])
        what = f"an object of kind {named[1]}" if named else "something"
        raise ModelError(
            f"{path} holds {what} that is not weights. Reading it could run any code, so it is not read."
        ) from None
    except TrailmarkError:
        raise
    except Exception as problem:  # a damaged file may raise anything
        raise ModelError(f"{path} is damaged: {_said(problem)}.") from None


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def _tagged(folder: Path, tag: str | None) -> Path:
    """The folder of the step that is wanted: `tag`, or the one that 'latest' names."""
    if tag is None and not (folder / "latest").is_file():
        return folder
    with (folder / "latest").open("rb") if tag is None else io.BytesIO(tag.encode("utf-8", "replace")) as file:
        name = file.read(1000).decode("utf-8", "replace").strip()
    if name in ("", "..") or not name.isprintable() or Path(name).name != name or not (folder / name).is_dir():
        here = ", ".join(p.name for p in sorted(folder.iterdir()) if p.is_dir()) or "none"
        said = f"--tag {name[:80]}" if tag else f"'latest' names {name[:80]!r}"
        raise ModelError(f"{folder}: {said}, and there is no such folder. Found: {here}.")
    return folder / name


def _deepspeed(folder: Path) -> Gathered:
    optim = [m for n in _names(folder) if (m := OPTIM.fullmatch(n))]
    states = [m for n in _names(folder) if (m := STATES.fullmatch(n))]
    if any(int(m[4]) for m in optim) or any(int(m[3]) for m in states):
        raise ModelError(
            f"{folder} was written by processes that split the layers (mp_rank above 0): such checkpoints are not "
            "read. Put them together with the program that wrote them."
        )
    if not optim:
        if not states:
            raise ModelError(f"{folder} holds no file of DeepSpeed (*_model_states.pt).")
        held = _model_states(folder, states[0][0])
        return Gathered("DeepSpeed without ZeRO", held["module"], held.get("shared_params") or {})
    first = _zero_states(folder, optim[0][0])
    counts, stage = first["partition_count"], first["zero_stage"]
    listed = isinstance(counts, list) and all(isinstance(n, int) and n > 0 for n in counts)
    world = max(counts, default=0) if listed else counts
    if not isinstance(world, int) or not 0 < world <= MOST_PARTS or stage not in (1, 2, 3):
        raise ModelError(f"{folder / optim[0][0]}: it says {world!r} parts of stage {stage!r}, which cannot be.")
    stage = int(stage)
    own = f"{optim[0][1]}{{}}{optim[0][3]}{optim[0][4]}{optim[0][5]}"
    _all_there(folder, [own.format(k) for k in range(world)], len(optim))
    if stage <= 2:
        _all_there(folder, ["mp_rank_00_model_states.pt"])
        held = [_model_states(folder, "mp_rank_00_model_states.pt")]
    else:
        names = [f"zero_pp_rank_{k}_mp_rank_00_model_states.pt" for k in range(world)]
        _all_there(folder, names)
        held = [_model_states(folder, name) for name in names]
    parts = [_zero_states(folder, own.format(k)) for k in range(world)]
    try:
        trained = _from_row(parts, held[0]) if stage <= 2 else _from_parts(parts, held)
    except Exception as problem:  # a damaged file may raise anything
        raise ModelError(f"{folder} has another layout than DeepSpeed's of ZeRO stage {stage}: {problem!r}.") from None
    if trained is None:
        raise ModelError(
            f"{folder}: the parts have another size than its list of weights says: they do not belong together."
        )
    every = {n: t for n, t in held[0]["module"].items() if stage <= 2 or n in held[0]["buffer_names"]}
    every |= _frozen(held) | trained
    same = {a: b for h in held for a, b in (h.get("shared_params") or {}).items() if b in every}
    every = {n: t.float() if t.is_floating_point() else t for n, t in every.items()}
    return Gathered(f"DeepSpeed ZeRO {stage}", every, same, world, frozenset(map(str, held[0]["buffer_names"])))


def _all_there(folder: Path, names: Sequence[str], held: int = 0) -> None:
    if missing := [n for n in names if not (folder / n).is_file()]:
        raise ModelError(
            f"{folder} is not complete: {missing[0]} is missing, one of the {len(names)} files that its "
            f"{len(names)} processes wrote. Copy it there."
        )
    if held > len(names):
        raise ModelError(
            f"{folder} holds the parts of {held} processes, and was last written by {len(names)}: remove older files."
        )


def _model_states(folder: Path, name: str) -> dict[str, Any]:
    held = read_pickled(folder / name)
    if not isinstance(held, dict) or not isinstance(held.get("module"), dict) or "buffer_names" not in held:
        raise ModelError(f"{folder / name} is no file of model states of DeepSpeed.")
    return held


def _zero_states(folder: Path, name: str) -> dict[str, Any]:
    held = read_pickled(folder / name)
    found = held.get("optimizer_state_dict") if isinstance(held, dict) else None
    if not isinstance(found, dict) or not {"zero_stage", "partition_count"} <= found.keys():
        raise ModelError(f"{folder / name} is no file of ZeRO's optimiser.")
    return found


def _from_row(parts: Sequence[Mapping[str, Any]], held: Mapping[str, Any]) -> Tensors | None:
    """Stages 1 and 2: the parts of a group, one after the other, are the row of its weights. None if sizes differ."""
    import torch

    out: Tensors = {}
    for g, shapes in enumerate(held["param_shapes"]):
        row = torch.cat([p["single_partition_of_fp32_groups"][g].flatten() for p in parts])
        padded = parts[0].get("param_alignment_paddings")
        gaps = padded[g] if padded else [0] * len(shapes)
        at = 0
        for gap, (name, shape) in zip(gaps, shapes.items(), strict=True):
            size = math.prod(shape)
            if at + size > len(row):
                return None
            out[name] = row[at : at + size].view(tuple(shape))
            at += size + gap
        if len(row) - at >= 2 * len(parts):  # a row is padded to a multiple of twice the number of processes
            return None
    return out


def _from_parts(parts: Sequence[Mapping[str, Any]], held: Sequence[Mapping[str, Any]]) -> Tensors | None:
    """Stage 3: every process has the same share of each weight. None if sizes differ."""
    import torch

    rows = [torch.cat([g.flatten() for g in p["fp32_flat_groups"]]) for p in parts]
    out: Tensors = {}
    at = 0
    for shapes in held[0]["param_shapes"]:
        for name, shape in shapes.items():
            size = math.prod(shape)
            share = math.ceil(size / len(parts))
            whole = torch.cat([row[at : at + share] for row in rows])
            if len(whole) < size:
                return None
            out[name] = whole[:size].view(tuple(shape))
            at += share
    return out if all(len(row) == at for row in rows) else None


def _frozen(held: Sequence[Mapping[str, Any]]) -> Tensors:
    """Weights that were not trained. In stage 3 each process has a share."""
    import torch

    out: Tensors = {}
    for name, shape in (held[0].get("frozen_param_shapes") or {}).items():
        pieces = [h["frozen_param_fragments"][name].flatten() for h in held]
        out[name] = torch.cat(pieces)[: math.prod(shape)].view(tuple(shape))
    return out


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
        raise ModelError(f"{source}: its config.json describes no model: {_said(problem)}.") from None
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
        raise ModelError(f"{source}: its weights do not fit its config.json: {_said(problem)}.") from None


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
            f"--push {name}: {_said(problem)}. ({folder} is complete: `hf upload {name} {folder}` sends it later.)"
        ) from None
    return str(url)
