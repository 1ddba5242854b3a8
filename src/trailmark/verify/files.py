"""Files of a run: the recipe resolves, metrics have no gaps, episodes can be read, checkpoints load and agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.errors import TrailmarkError
from trailmark.plain_files import open_plain, read_json
from trailmark.runs.annotations import misfits, without_credit
from trailmark.runs.data_files import changed_files
from trailmark.runs.store import read_metrics
from trailmark.verify.evidence import Evidence, Missing
from trailmark.verify.report import Check, Findings


def check_recipe(ev: Evidence) -> Check:
    found = Findings("recipe")
    try:
        found.numbers["method"] = ev.config.method
        found.notes += [f"{what} since the run began" for what in changed_files(ev.run.path, ev.config)]
    except Missing as problem:
        found.defect(str(problem))
    return found.result("the recipe resolves")


def check_records(ev: Evidence) -> Check:
    """The steps of the metrics are 1, 2, 3, … (there may be an evaluation before them, as step 0); every line of every
    segment that was read is an episode; and the annotations fit."""
    found = Findings("records")
    for problem in ev.unreadable:
        found.defect("episodes cannot be read", problem)
    try:
        rows = read_metrics(ev.run.path)
    except TrailmarkError as problem:
        found.defect("the metrics cannot be read", str(problem))
        rows = []
    steps = [r.get("step") for r in rows if r is not rows[0] or r.get("step") != 0]
    if steps != list(range(1, len(steps) + 1)):
        at = next((i for i, s in enumerate(steps, 1) if s != i), 0)
        found.defect("the metrics have a gap or a step twice", f"line {at} is of step {steps[at - 1]}")
    for r in rows:
        for name, value in r.items():
            if isinstance(value, float) and not math.isfinite(value):
                found.defect("a metric is not finite", f"'{name}' at step {r.get('step')}")
    newest = max(ev.checkpoints, default=0)
    if newest > len(steps) and rows:
        found.defect("a checkpoint is of a step that has no metrics", f"checkpoint {newest}, metrics to {len(steps)}")
    for path in ev.files:
        with open_plain(path) as f:
            f.seek(0, 2)
            if f.tell() and (f.seek(-1, 2), f.read(1))[1] != b"\n" and int(path.stem) not in ev.read:
                found.defect("a segment of episodes is cut off", path.name)
    for path in ev.files:
        if (episodes := ev.read.get(int(path.stem))) is not None:
            for problem in misfits(path, episodes):
                found.defect("an annotation is damaged or does not fit its episode", problem.rstrip("."))
            if bare := without_credit(path, episodes):
                found.notes.append(bare)
    numbers = [int(p.stem) for p in ev.files]
    found.numbers = {"steps": len(steps), "segments": len(numbers), "segments_read": len(ev.read),
                     "episodes": sum(map(len, ev.read.values()))}  # fmt: skip
    return found.result(f"{len(steps)} steps without a gap, {len(ev.read)} of {len(numbers)} segments read")


def check_checkpoint(ev: Evidence) -> Check:
    """The newest checkpoint loads in transformers and gives the logits of our own model with its weights. All other
    checkpoints are complete."""
    found = Findings("checkpoint")
    if not ev.checkpoints:
        return found.skip("the run has no checkpoint yet")
    step, root = list(ev.checkpoints.items())[-1]
    for folder in ev.checkpoints.values():
        _whole(found, folder)
    state = _state(found, root)
    if state is not None and state.get("step") != step:
        found.defect("state.json is of another step than its folder", f"{root.name} says {state.get('step')}")
    folder = ev.weights.folder(step)
    found.numbers = {"checkpoints": list(ev.checkpoints), "newest": step}
    if folder is None:
        found.defect("the checkpoint holds no model", root.name)
        return found.result("")
    lm = ev.weights.at(step)
    if lm is None:
        found.defect("the checkpoint cannot be loaded", ev.weights.broken.get(step, ev.weights.problem))
        return found.result("")
    try:
        gap, scale = _against_transformers(folder, lm)
    except Exception as problem:  # a damaged file raises anything
        found.defect(
            "the checkpoint cannot be loaded by transformers", f"{root.name}: {type(problem).__name__}: {problem}"
        )
        return found.result("")
    allowed = {"float64": 1e-5, "float32": 1e-3}.get(str(lm.dtype).removeprefix("torch."), 0.1) * scale
    if not gap <= allowed:
        found.defect(
            f"transformers computes other logits from the checkpoint than we do: off by {gap:.2g}, "
            f"allowed {allowed:.2g}"
        )
    found.numbers["logits_off"] = gap
    return found.result(f"checkpoint {step} loads in transformers and gives our logits to {gap:.1g}")


def _state(found: Findings, root: Path) -> dict[str, Any] | None:
    try:
        return read_json(root / "state.json")
    except (OSError, ValueError) as problem:
        found.defect("state.json cannot be read", f"{root.name}: {problem}")
        return None


def _whole(found: Findings, root: Path) -> None:
    """Every tensor file can be opened, is complete, and holds finite numbers."""
    from safetensors import SafetensorError

    from trailmark.models.checked import load_plain

    for path in sorted(root.rglob("*.safetensors")):
        where = str(path.relative_to(root.parent))
        try:
            tensors = load_plain(path)
        except (SafetensorError, OSError, ValueError) as problem:
            found.defect("a tensor file is damaged (truncated?)", f"{where}: {problem}")
            continue
        if bad := [n for n, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]:
            found.defect("a tensor is not finite", f"{where}: {bad[0]}")


def _against_transformers(folder: Path, lm: Any) -> tuple[float, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from trailmark.models.attention import Layout
    from trailmark.models.load import load_config

    own = {"config": load_config(str(folder))} if (folder / "config.json").is_file() else {}  # an adapter has none
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=lm.dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False, **own
    )
    theirs = theirs.to(lm.device).eval()
    n = min(48, lm.context)
    ids = torch.as_tensor(np.random.default_rng(0).integers(0, lm.vocab, (1, n)), device=lm.device)
    pos = torch.arange(n, device=lm.device)[None]
    lm.train(False)
    with torch.no_grad():
        own = lm.logits(lm.hidden(ids, Layout(torch.full_like(ids, n), pos), pos)).float()
        other = theirs(input_ids=ids, position_ids=pos, use_cache=False).logits.float()
    return float((own - other).abs().max()), max(1.0, float(other.abs().max()))
