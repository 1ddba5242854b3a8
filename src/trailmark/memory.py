"""How much memory is free, and a refusal of work that cannot fit before it allocates anything.

A system that runs out of memory kills a process without a message. The estimates here count only what is surely needed
(weights, optimiser state, cached keys and values, rows of a batch), so work that they refuse could not have run.
TRAILMARK_INSIST=1, or `train --insist`, tries it all the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trailmark.errors import TrailmarkError

INSIST = "TRAILMARK_INSIST"
ROW = 2048  # bytes of the smallest row or episode in memory: Python objects, tokens, streams
LAYER = 30_000  # bytes of the objects of one transformer block, without its weights


class TooLarge(TrailmarkError):
    """The work does not fit into the free memory."""


def free_memory(device: Any = "cpu") -> int | None:
    """Free bytes on a device; None if the system does not say."""
    if str(device).startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
    found = [n for n in (_available(), _in_container()) if n is not None]
    return min(found) if found else None


def need(amount: float, what: str, advice: str, device: Any = "cpu") -> None:
    """Refuse `what` if it needs more bytes than are free. `advice` says which key to lower."""
    if os.environ.get(INSIST):
        return
    free = free_memory(device)
    if free is not None and amount > free:
        where = "" if str(device) == "cpu" else f" on {device}"
        raise TooLarge(
            f"{what} would take at least {size(amount)} of memory, and {size(free)} are free{where}: {advice}, "
            f"or insist with {INSIST}=1 in the environment (train: --insist)."
        )


def need_rows(rows: int, key: str) -> None:
    """Refuse a batch whose rows alone do not fit into memory."""
    need(rows * ROW, f"{key}: {rows:,} rows in one step", f"lower {key}")


def need_starts(starts: int, key: str, advice: str = "") -> None:
    """Refuse to draw or play more starts than fit into memory."""
    need(starts * ROW, f"{key}: {starts:,} starts", advice or f"lower {key}")


def size(amount: float) -> str:
    """A number of bytes for people: 950 MB, 1.5 GB, 20 TB."""
    for unit, letter in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if amount >= unit:
            return f"{amount / unit:,.0f} {letter}" if amount >= 10 * unit else f"{amount / unit:.1f} {letter}"
    return f"{amount / 1e3:.0f} kB"


def parameters(shape: Any, vocab: int) -> int:
    """The number of weights of a model of this shape (`config.ModelShape`), without making it. Tied ones count once."""
    w, ffn, kv = shape.width, shape.ffn or 4 * shape.width, shape.kv_heads or shape.heads
    tied = shape.family in ("gpt2", "gemma") if shape.tied is None else shape.tied
    tables = (1 if tied else 2) * vocab * w
    if shape.family == "gpt2":
        block = 4 * w * w + 4 * w + 2 * w * ffn + ffn + w + 4 * w
        return shape.layers * block + tables + shape.context * w + 2 * w
    keys = w // shape.heads * kv
    block = 2 * w * w + 2 * w * keys + 3 * w * ffn + 2 * w + (w + 2 * keys if shape.family == "qwen2" else 0)
    return shape.layers * block + tables + w


def _available() -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:  # not Linux: the total memory, which refuses only what could never fit
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _in_container() -> int | None:
    """The memory that a control group leaves to this process, or None. The kernel's file cache counts as free."""
    root = Path("/sys/fs/cgroup")
    for most, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            left = int((root / most).read_text()) - int((root / used).read_text())
            rows = dict(line.split() for line in (root / stat).read_text().splitlines())
            return max(0, left + int(rows["inactive_file"]) + int(rows["active_file"]))
        except (OSError, ValueError, KeyError):  # there is no such group, or it says "max": no limit
            continue
    return None
