"""What the CPU or the GPU is, and whether it computes in bfloat16."""

from __future__ import annotations

import functools
import itertools
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from trailmark.errors import ModelError


def check_bf16(device: Any, key: str, instead: str) -> None:
    """Refuse bfloat16 on a GPU that only imitates it: its kernels fail there, or are many times slower. On a CPU that
    imitates it the numbers are right, so one line says that it is slow."""
    if str(device) == "cpu":
        tell_bf16()
    if not str(device).startswith("cuda"):
        return
    with torch.cuda.device(device):
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ModelError(
                f"{key}: {torch.cuda.get_device_name()} does not compute in bfloat16: set {key} to {instead}"
            )


@functools.cache
def vendor() -> str:
    """The maker of the CPU, as it names itself: AuthenticAMD, GenuineIntel."""
    return _cpu().get("vendor_id") or platform.processor()


def flags() -> frozenset[str]:
    """The instruction sets of the CPU, by the names of Linux; empty if the system does not say."""
    return frozenset((_cpu().get("flags") or _cpu().get("Features") or "").split())


@functools.cache
def tell_bf16() -> None:
    """One line if this CPU is known to have no instructions for bfloat16."""
    if flags() and not flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
        print("this CPU has no instructions for bfloat16 (avx512_bf16, amx_bf16): float32 is faster here",
              file=sys.stderr)  # fmt: skip


@functools.cache
def _cpu() -> dict[str, str]:
    try:
        with Path("/proc/cpuinfo").open() as file:
            rows = (line.split(":", 1) for line in itertools.takewhile(str.strip, file) if ":" in line)
            return {name.strip(): value.strip() for name, value in rows}
    except OSError:
        return {}
