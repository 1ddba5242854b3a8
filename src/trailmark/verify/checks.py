"""All checks in order. A check that raises has failed, and the others still run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from trailmark.errors import TrailmarkError
from trailmark.verify import data, files, masks, numerics, replay
from trailmark.verify.evidence import Build, Evidence, Missing
from trailmark.verify.report import Check, Report

CHECKS: dict[str, Callable[[Evidence], Check]] = {
    "recipe": files.check_recipe,
    "records": files.check_records,
    "checkpoint": files.check_checkpoint,
    "turns": masks.check_turns,
    "masks": masks.check_masks,
    "groups": data.check_groups,
    "rewards": data.check_rewards,
    "step one": numerics.check_step_one,
    "sampler": numerics.check_sampler,
    "one gradient": numerics.check_gradient,
    "replay": replay.check_replay,
}


def certify(path: str | Path, build: Build | None = None, limit: int = 64) -> Report:
    evidence = Evidence(path, build, limit)
    checks = []
    for name, check in CHECKS.items():
        try:
            checks.append(check(evidence))
        except Missing as reason:
            checks.append(Check(name, "skip", str(reason)))
        except TrailmarkError as problem:
            checks.append(Check(name, "fail", str(problem)))
        except Exception as problem:  # the run's data broke a check: that is a finding, not a crash
            checks.append(Check(name, "fail", f"the check broke on this run: {type(problem).__name__}: {problem}"))
    try:
        method = str(evidence.config.method)
    except Missing:
        method = ""
    known = {name: version(name) for name in ("torch", "transformers", "numpy")}
    return Report(str(path), method, tuple(checks), known)
