"""What every benchmark shares: ours and a peer's timed in turns in one process, and one JSON object per measurement.

On a CPU, where all runs in one thread, seconds are those that the process was computing: what else the machine does is
not counted. What counts is the ratio of neighbouring runs: `ratio` is the median of it over the repeats, `spread` its
smallest and largest value.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIELDS = ("name", "ours", "peer", "peer_name", "ratio", "unit", "device", "versions", "commit", "repeats", "spread")


def one_thread() -> None:
    """One thread of torch: two, while another process holds a core, are many times slower."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def clock() -> float:
    import torch

    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def compare(
    name: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    peer_name: str,
    unit: str,
    repeats: int = 7,
    what: str = "",
) -> dict[str, Any]:
    """Call both in turns. Each call returns how much it did (tokens, decisions, updates); more a second is better."""
    commit()
    ours(), peer()  # the first call of anything warms up
    mine, theirs = [], []
    for k in range(repeats):
        for side in (("ours", "peer"), ("peer", "ours"))[k % 2]:
            began = clock()
            done = ours() if side == "ours" else peer()
            rate = done / (clock() - began)
            (mine if side == "ours" else theirs).append(rate)
    ratios = [a / b for a, b in zip(mine, theirs)]
    return record(name, statistics.median(mine), statistics.median(theirs), peer_name, statistics.median(ratios), unit,
                  repeats, [min(ratios), max(ratios)], what)  # fmt: skip


def record(
    name: str,
    ours: float,
    peer: float,
    peer_name: str,
    ratio: float,
    unit: str,
    repeats: int,
    spread: list[float],
    what: str = "",
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Print one measurement and append it to the results of its benchmark (the part of the name before '/'). `more`:
    further keys."""
    row = {
        "name": name, "ours": _short(ours), "peer": _short(peer), "peer_name": peer_name, "ratio": _short(ratio),
        "unit": unit,
        "device": device(), "versions": versions(), "commit": commit(), "repeats": repeats,
        "spread": [_short(s) for s in spread],
        "what": what,
    }  # fmt: skip
    return keep({**row, **(more or {})})


def alone(name: str, ours: float | list[float], unit: str, what: str = "") -> dict[str, Any]:
    """A number of ours that nobody else has. Of several measurements it is the median, with the smallest and the
    largest."""
    each = ours if isinstance(ours, list) else [ours]
    row = {
        "name": name,
        "ours": _short(statistics.median(each)),
        "unit": unit,
        "device": device(),
        "versions": versions(),
        "commit": commit(),
    }
    if len(each) > 1:
        row |= {"repeats": len(each), "spread": [_short(min(each)), _short(max(each))]}
    return keep({**row, "what": what})


def keep(row: dict[str, Any]) -> dict[str, Any]:
    RESULTS.mkdir(exist_ok=True)
    return keep_in(row, RESULTS / f"{row['name'].partition('/')[0]}.jsonl")


def keep_in(row: dict[str, Any], file: str | Path) -> dict[str, Any]:
    """Print a row and append it to a file of results. A rehearsal (`--quick`, or a benchmark of GPUs on a CPU) is
    printed only: docs/benchmarks.md shows the newest row of every name."""
    import torch

    print(json.dumps(row), flush=True)
    rehearsal = "--quick" in sys.argv or (row["name"].startswith("gpu_") and not torch.cuda.is_available())
    if not (rehearsal and Path(file).resolve().parent == RESULTS.resolve()):
        with Path(file).open("a") as f:
            f.write(json.dumps(row) + "\n")
    return row


def need_peer(*packages: str) -> None:
    """End with one sentence if a program to compare with is not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        install = " ".join(name.replace("_", "-") for name in missing)
        raise SystemExit(f"{Path(sys.argv[0]).name} compares with other programs: pip install {install}, or --no-trl")


def need_gpu(small: bool | None = None) -> None:
    """End with one sentence if there is no GPU. `small`: whether this is a rehearsal; None: there is none."""
    import torch

    if not torch.cuda.is_available() and not small:
        more = "" if small is None else ": --small rehearses it on a CPU"
        raise SystemExit(f"{Path(sys.argv[0]).name} measures a GPU, and this machine has none{more}")


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = ""
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor() or 'CPU'}, {torch.get_num_threads()} thread"


def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in ("torch", "transformers", "trl"):
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


@functools.cache
def commit() -> str:
    """The commit that was measured, asked once; a '+' says that files had changed since."""
    here = Path(__file__).parent
    ask = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True, cwd=here)
    name = ask("rev-parse", "--short", "HEAD").stdout.strip()
    return name + "+" * bool(ask("diff", "--quiet", "HEAD", "--", "../src", ".").returncode)
