"""The reinforcement half of Reflect-RL: stages of a curriculum, a memory of successes, a critic, and the losses.

Undiscounted: G_t = sum_{k>=t} r_k is the reward still to come (the reference's cost to go with the other sign).

    pg    L = -(1/N) sum_n A_n log pi(a_n | prompt_n)
    ppo   L = -(1/N) sum_n min(rho_n A_n, clip(rho_n, 1 - c, 1 + c) A_n),   rho = pi / pi_old, several epochs

over the N decisions handed in, with A = G - V (critic), G - mean G (baseline: batch), or G. pi and pi_old are under the law a
label was drawn from, so rho is exactly 1 in the first epoch; of remembered plays pi_old is what they were drawn with.

What differs from the reference: the entropy of the label is a term of the loss with its own gradient, and never part of a
return, so that it shifts no reported success; the critic reads the whole prompt (the reference's sees 20 tokens), starts at
V = 0 and regresses G itself, not G / 100; a curriculum always advances, also when there are fewer steps than records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trailmark.credit import turn_returns
from trailmark.errors import TaskError
from trailmark.methods.configs import CurriculumConfig, RlConfig
from trailmark.methods.configs import ReflectCritic as CriticConfig
from trailmark.methods.sft import batch_rows
from trailmark.models.attention import Decoding, Layout
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.objectives import Clipped, Objective, WeightedLogp
from trailmark.samples import annotate_turns, build_samples
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Annotation, Episode, Sample, Scored, Task

MODES = ("pickup", "dropoff", "full")


# --- curriculum ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A part of the world: the starts of one mode, or those of some depths. With neither it is the whole world."""

    name: str = ""
    mode: str | None = None
    depths: frozenset[int] | None = None
    size: int = 1

    def holds(self, task: Task) -> bool:
        return self.depths is None or bool(self.depths & set(depths(task)))

    def mark(self, task: Task) -> Task:
        data = task.data if self.mode is None else {**task.data, "mode": self.mode}
        meta = {**task.meta, "stage": self.name} if self.name else task.meta
        name = task.id if self.mode is None else f"{self.mode}/{task.id}"
        return dataclasses.replace(task, id=name, data=data, meta=meta)

    def starts(self, source: TaskSource, split: str, n: int | None, seed: int) -> list[Task]:
        """`n` starts of a split that belong to the stage (None: all)."""
        found = draw_tasks(source, split, None if self.depths is not None else n, seed)
        return [self.mark(t) for t in found if self.holds(t)][:n]

    def batch(self, source: TaskSource, n: int, seed: int, step: int, first: int) -> list[Task]:
        """The starts of RL step `step`; of a stage with an end, whole shuffled passes since it began after step `first`."""
        if self.depths is None:
            return [self.mark(t) for t in draw_tasks(source, "train", n, seed * 1_000_003 + step)]
        mine = self.starts(source, "train", None, seed)
        picks = [mine[r] for r in batch_rows(len(mine), n, step - first, seed)]
        return [dataclasses.replace(t, seed=seed * 1_000_003 + step) for t in picks]  # what a world draws is drawn anew


@dataclass(frozen=True)
class Part:
    """A stage as a source of its own, for a teacher to play in."""

    source: Any
    stage: Stage

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        return self.stage.starts(self.source, split, n, seed)

    def make(self) -> Any:
        return self.source.make()


def depths(task: Task) -> list[int]:
    """How deep the targets of a start lie: said as `depth`, or the number of "/" in each of its targets."""
    for place in (task.meta, task.data):
        if "depth" in place:
            said = place["depth"]
            return [int(d) for d in (said if isinstance(said, list | tuple) else [said])]
        found = place.get("targets") or place.get("target")
        if found:
            return [str(t).count("/") for t in ([found] if isinstance(found, str) else found)]
    raise TaskError(f"start '{task.id}' says neither depth nor target, so there is no curriculum by depth.")


def make_stages(config: CurriculumConfig, source: TaskSource) -> list[Stage]:
    if config.kind == "none":
        return [Stage()]
    if config.kind == "modes":
        if "mode" not in draw_tasks(source, "train", 1, 0)[0].data:
            raise TaskError(f"curriculum modes: the starts of task '{source.name}' have no mode; that is for the taxi.")
        return [Stage(m, m) for m in MODES]
    groups = depth_groups([d for t in draw_tasks(source, "train", None, 0) for d in depths(t)], config)
    return [Stage(f"depth {'+'.join(map(str, sorted(g)))}", None, frozenset(g), n) for g, n in groups]


def starts_of(stages: Sequence[Stage], source: TaskSource, split: str, n: int | None, seed: int) -> list[Task]:
    """`n` starts of each stage: what an evaluation plays."""
    return [t for stage in stages for t in stage.starts(source, split, n, seed)]


def depth_groups(found: Sequence[int], config: CurriculumConfig) -> list[tuple[set[int], int]]:
    """Depths that form one stage, shallow first, each with its number of records; a record with targets at two depths counts
    in both."""
    groups = [{d} for d in sorted(set(found))]
    if config.merge_first_two and len(groups) > 1:
        groups[:2] = [groups[0] | groups[1]]
    if len(groups) > config.keep:
        groups[config.keep - 1 :] = [set().union(*groups[config.keep - 1 :])]
    return [(g, sum(d in g for d in found)) for g in groups]


def stage_starts(sizes: Sequence[int], steps: int) -> list[int]:
    """After how many of `steps` each stage begins: in proportion to what it holds, and at least a step for each as long as
    there are steps."""
    out, before = [0], 0
    for i in range(1, len(sizes)):
        before += sizes[i - 1]
        wanted = max(out[-1] + 1, steps * before // sum(sizes))
        out.append(min(wanted, steps - (len(sizes) - i)) if steps >= len(sizes) else wanted)
    return out


# --- memory --------------------------------------------------------------------------------------------------------


@dataclass
class Replay:
    """The last `size` plays that were won. A new stage begins with an empty one."""

    size: int
    held: list[Episode] = field(default_factory=list)

    def add(self, episodes: Sequence[Episode]) -> None:
        won = [e for e in episodes if isinstance(e.outcome, Scored) and e.outcome.success]
        self.held = [*self.held, *won][-self.size :] if self.size else []

    def draw(self, n: int, seed: Sequence[int]) -> list[Episode]:
        """`n` of them with replacement."""
        picks = np.random.default_rng(list(seed)).integers(0, len(self.held), n) if self.held else []
        return [self.held[i] for i in picks]


# --- critic --------------------------------------------------------------------------------------------------------


class MlpHead(nn.Sequential):
    """Linear, LayerNorm, ReLU, Linear; the last one starts at 0, and so does V."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype, seed: int):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = [nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1)]
        super().__init__(*layers)
        nn.init.zeros_(layers[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(layers[-1].bias)  # type: ignore[arg-type]
        self.to(device=device, dtype=dtype)

    @property
    def weight(self) -> Tensor:
        """Whose dtype the states take on."""
        return self[0].weight  # type: ignore[return-value]


class _SharedBody(nn.Module):
    """The policy's body seen from the critic: nothing of it is trained or saved here."""

    def __init__(self, policy: LM):
        super().__init__()
        self.policy = policy

    @property
    def config(self) -> Any:
        return self.policy.base.config

    def get_input_embeddings(self) -> Any:
        return self.policy.base.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.policy.base.get_output_embeddings()

    def save_pretrained(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    def tie_weights(self) -> None:
        return None


class SharedCritic(LM):
    """A head on the policy's last hidden state. No gradient reaches the body, and dropout is off in it."""

    def __init__(self, policy: LM):
        super().__init__(_SharedBody(policy), policy.tokenizer, f"{policy.name} (critic)", sharing=policy.sharing)
        self.policy = policy

    def hidden(self, ids: Tensor, layout: Layout | Decoding, pos: Tensor) -> Tensor:
        training = self.policy.model.training
        self.policy.train(False)
        try:
            with torch.no_grad():
                return self.policy.hidden(ids, layout, pos)
        finally:
            self.policy.train(training)


def make_critic(config: CriticConfig, policy: LM, own: LM | None, seed: int) -> LM:
    """`own` is the separate model, None for a shared body."""
    lm = SharedCritic(policy) if own is None else own
    lm.add_head("value")
    if config.head == "mlp":
        real = torch.float64 if lm.dtype == torch.float64 else torch.float32
        lm.heads["value"] = MlpHead(lm.width, lm.device, real, seed)
    return lm


# --- from episodes to samples --------------------------------------------------------------------------------------


def returns_to_go(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Of every decision of the policy."""
    return {e.id: list(turn_returns(e, "policy")) for e in episodes}


def decisions(episodes: Sequence[Episode], learner: Any, config: RlConfig, fresh: bool) -> list[Sample]:
    """One sample for each decision, with its advantage. `fresh` plays were drawn by the policy as it is: what they were drawn
    with is computed in the packing that training uses, so that the first ratio is 1 to the last bit."""
    samples = build_samples(episodes, "policy", {"returns": returns_to_go(episodes)})
    fills = {"old": Readout("")} if fresh and config.algorithm == "ppo" else {}
    if config.critic.kind != "none":
        fills["value"] = Readout("", "head", model="critic", head="value")
    samples = learner.fill(samples, **fills) if fills and samples else samples
    base = 0.0
    if config.baseline == "batch" and config.critic.kind == "none" and fresh:
        base = float(np.mean(np.concatenate([s.streams["returns"][s.streams["weight"] != 0] for s in samples])))
    return [_advantaged(s, base) for s in samples]


def _advantaged(s: Sample, base: float) -> Sample:
    streams = dict(s.streams)
    value = streams.get("value", base)
    streams["advantage"] = (streams["returns"] - value) * (streams["weight"] != 0)
    streams["value_weight"] = streams["weight"]
    return dataclasses.replace(s, streams=streams, mass={**s.mass, "value_weight": s.mass["weight"]})


def credit_notes(samples: Sequence[Sample], episodes: Sequence[Episode], config: RlConfig) -> list[Annotation]:
    """The advantages that fresh plays are trained with, and the critic's values where there is one."""
    if config.critic.kind == "none":
        less = "" if config.baseline == "none" else ", less the mean of the batch"
        return annotate_turns(samples, episodes, "policy", "advantage", f"return to go{less}")
    notes = annotate_turns(samples, episodes, "policy", "advantage", "return to go, less the critic's value")
    return [*notes, *annotate_turns(samples, episodes, "policy", "value", f"{config.critic.kind} critic")]


def objective(config: RlConfig, fresh: bool) -> Objective:
    """Remembered plays carry no entropy term: they are not what the policy does now."""
    entropy = config.entropy if fresh else 0.0
    if config.algorithm == "pg":
        return WeightedLogp(entropy=entropy, gap=fresh)
    return Clipped(low=config.clip, high=config.clip, entropy=entropy)
