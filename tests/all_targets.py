"""`make test-all`: every target that this machine can run, one after the other, and one table at the end."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

TARGETS = ("test", "test-kill", "test-hostile", "test-slow", "test-peer", "test-data", "test-vllm")


def missing(target: str) -> str:
    """Why a target cannot run here; "" if it can."""
    if target == "test-data" and not os.environ.get("DATA_ROOT"):
        return "DATA_ROOT is not set"
    if target == "test-vllm" and shutil.disk_usage(".").free < 8 << 30:
        return "less than 8 GB of disk are free"
    return ""


def counted(said: str) -> str:
    """What pytest counted: its last line of results."""
    found = re.findall(r"(\d+ (?:passed|failed|skipped|error)[^\n]*?) in ", said)
    return re.sub(r"\x1b\[[\d;]*m", "", found[-1]) if found else "no result"


def main() -> int:
    logs, rows, bad = Path("test-logs"), [], 0
    logs.mkdir(exist_ok=True)
    for target in TARGETS:
        if why := missing(target):
            rows.append((target, "not run", why, ""))
            continue
        print(f"make {target} …", flush=True)
        begun = time.monotonic()
        words = ["make", target, *([f"DATA_ROOT={os.environ['DATA_ROOT']}"] if target == "test-data" else [])]
        done = subprocess.run(words, capture_output=True, text=True)
        (logs / f"{target}.txt").write_text(done.stdout + done.stderr)
        minutes = f"{(time.monotonic() - begun) / 60:.1f} min"
        rows.append((target, "green" if done.returncode == 0 else "RED", counted(done.stdout), minutes))
        bad += done.returncode != 0
    wide = [max(len(r[i]) for r in rows) for i in range(4)]
    print("\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, wide)).rstrip() for row in rows))
    print(f"The output of each is in {logs}/.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
