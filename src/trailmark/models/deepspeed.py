"""Checkpoints of DeepSpeed: the weights out of the files that every process wrote.

ZeRO keeps the weights of a group as one long row of float32 numbers, cut into as many parts as there were processes.
Stages 1 and 2 cut the row of all weights. Stage 3 cuts every weight by itself, and pads its last part.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import ModelError
from trailmark.models.pickled import Gathered, file_names, read_pickled

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

OPTIM = re.compile(r"(.*zero_pp_rank_)(\d+)(_mp_rank_)(\d+)(_optim_states\.pt)")
STATES = re.compile(r"(?:(.*zero_pp_rank_)(\d+)_)?mp_rank_(\d+)_model_states\.pt")
MOST_PARTS = 100_000


def tagged(folder: Path, tag: str | None) -> Path:
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


def gather(folder: Path) -> Gathered:
    optim = [m for n in file_names(folder) if (m := OPTIM.fullmatch(n))]
    states = [m for n in file_names(folder) if (m := STATES.fullmatch(n))]
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
