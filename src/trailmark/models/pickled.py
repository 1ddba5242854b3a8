"""The only place that reads pickles, and it reads weights alone.

torch refuses everything in a file but tensors, plain values and the few names of `ALLOWED`, for which harmless
stand-ins are put. A file that would grow while it is read is refused: it holds compressed records.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.errors import ModelError, TrailmarkError, first_line

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]


class _Inert:
    """Stands for an object of DeepSpeed that holds settings. It does nothing."""


ALLOWED: list[tuple[Any, str]] = [
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


@dataclass
class Gathered:
    """The weights of a checkpoint. `same` names weights that are another one under a second name."""

    kind: str
    tensors: Tensors
    same: Mapping[str, str] = field(default_factory=dict)
    files: int = 1
    buffers: frozenset[str] = frozenset()  # what the checkpoint itself calls buffers


def file_names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


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
        raise ModelError(f"{path} is damaged: {first_line(problem)}.") from None
