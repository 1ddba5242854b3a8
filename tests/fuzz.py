"""The property tests with new examples, round after round, until the time is up: `make fuzz FUZZ_SECONDS=600`.

Each round draws with a seed of its own. A failure prints the example that Hypothesis shrank it to, and the command that
repeats it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    seconds = float(os.environ.get("FUZZ_SECONDS", "300"))
    draw = random.Random(os.environ.get("FUZZ_SEED"))  # None: from the system
    files = sorted(
        str(p.relative_to(HERE.parent)) for p in HERE.rglob("test_*.py") if "from hypothesis import" in p.read_text()
    )
    settings = {**os.environ, "HYPOTHESIS_PROFILE": "fuzz"}
    end, rounds = time.monotonic() + seconds, 0
    while rounds == 0 or time.monotonic() < end:
        seed = draw.randrange(2**32)
        command = ["-m", "pytest", "-m", "hypothesis", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}", *files]
        print(f"round {rounds + 1}, seed {seed}", flush=True)
        done = subprocess.run([sys.executable, *command], cwd=HERE.parent, env=settings, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-20000:], done.stderr[-5000:], sep="\n")
            print(f"To repeat it:\n  HYPOTHESIS_PROFILE=fuzz {sys.executable} {' '.join(command)}")
            return 1
        rounds += 1
        print(done.stdout.strip().splitlines()[-1], flush=True)
    print(f"{rounds} rounds, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
