"""OREO: offline reinforcement learning from scored trajectories.

A policy pi and a value V are trained until they satisfy the soft Bellman equation on the stored trajectories:

    V(s_t) = R - beta sum_{i>=t} log pi(a_i|s_i) / ref(a_i|s_i)       for every state s_t of every trajectory

Each step takes a batch of trajectories. The value moves towards the right-hand side, and the policy moves so that the
two sides meet (`objectives/soft_bellman.py` has the variants). Both losses are computed from the models before the
step. The reference `ref` is the policy before training, or another model. The baselines that learn from the same file
are in method `preference`.

What differs from the reference implementation: a trajectory that is too long is left out, not cut and credited. Prompts
are never trained on, on whichever side the padding is. Rewards are used as they are in the file unless the recipe
rescales them (the reference's default is 2r - 1). Both models, both optimisers and the KL coefficient are in every
checkpoint. Medians of log weights are over the batch.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trailmark.config import ModelConfig, OptimConfig
from trailmark.errors import ModelError
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Evaluation
from trailmark.methods import oreo_data
from trailmark.methods.base import Held, trained_seat
from trailmark.methods.configs import OreoCritic, OreoRecipe
from trailmark.methods.offline import OfflineMethod, Trajectories
from trailmark.models.adapters import is_adapter
from trailmark.models.lm import LM
from trailmark.models.load import load_model
from trailmark.models.readout import Readout
from trailmark.objectives import SoftBellman
from trailmark.rollout.search import parse_plan
from trailmark.rollout.search_episodes import search_episodes
from trailmark.score.values import HeadValues
from trailmark.steps import mark_steps
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, Sample


class OreoMethod(OfflineMethod):
    Config = OreoRecipe

    def make_rows(self, config: Any, episodes: Trajectories, tokenizer: Any) -> tuple[Sequence[Any], dict[str, int]]:
        """Trajectories. They are split into steps if only steps have a value."""
        if states(config) == "step":
            return episodes.then(lambda e: mark_steps(e, config.seat, tokenizer, config.split)), {}
        return episodes, {}

    def make_reference(self) -> str:
        """If only the value is trained, the policy never changes and is its own reference."""
        return "policy" if self.config.ref is None and self.config.critic_only else super().make_reference()

    def make_learner(self) -> Learner:
        c = self.config
        self.models["critic"] = load_critic(c.model, c.critic, self.run.path / "critic-import")
        self.frozen = math.ceil(c.freeze * c.steps)
        trains = {"critic": c.critic.optim or c.learner.optim}
        if not c.critic_only:
            trains["policy"] = c.learner.optim
        return Learner(self.models, c.learner, trains, {"critic": c.steps, "policy": c.steps - self.frozen})

    def make_objective(self) -> SoftBellman:
        c = self.config
        return SoftBellman(
            part="both",
            level=c.level,
            beta=c.beta or 0.03,
            ref=self.ref,
            actions="action",
            lagged=c.target == "ema" and not c.critic_only,
            alpha=c.kl.alpha,
            kl=c.kl.kind,
            kl_target=c.kl.target,
            kl_lr=c.kl.lr,
            kl_start=c.kl.start,
            clip_log=c.clip_log,
            importance=c.importance != "none",
            hinge=c.hinge,
        )

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        samples = self.drawn(step)
        if c.target == "ema" and "policy" in self.learner.optimisers:
            with self.learner.optimisers["policy"].averaged():
                samples = self.learner.fill(samples, policy_logp=Readout("", law=False, where="action"))
        if c.critic_only or step <= self.frozen:
            objective = self.objective.model_copy(update={"alpha": 0.0, "kl_target": None})
            yield Update(samples, objective, ("critic",))
        else:
            yield Update(samples, self.objective, ("critic", "policy"))

    def drawn(self, step: int) -> list[Sample]:
        c, chosen = self.config, self.batches.take(step)
        mean: Literal["token", "sequence"] = "token" if c.importance == "batch" else "sequence"
        return oreo_data.trajectory_samples(chosen, c.seat, states(c), mean, c.reward.mul, c.reward.add)

    @classmethod
    def holds(cls, config: Any) -> list[Held]:
        """The policy and its reference, and the value, which is a model of its own."""
        found = super().holds(config)
        if config.critic_only:
            found = [replace(h, optim=None) for h in found if h.name != "ref" or config.ref is not None]
        return [*found, critic_held(config.model, config.critic, config.learner.optim)]

    def evaluations(self, step: int, last: bool) -> Sequence[Evaluation]:
        """At the end: also searches with the learnt value."""
        searches = self.config.final.search if last else ()
        return [
            *super().evaluations(step, last),
            *(Evaluation(text.replace(":", "-"), partial(self.searched, text, step)) for text in searches),
        ]

    def searched(self, text: str, step: int) -> list[Episode]:
        c = self.config
        assert self.source is not None and self.engine is not None
        self.engine.publish(step, self.models["policy"])
        seat = trained_seat(self.engine, c.seat, c.sampling.model_copy(update={"temperature": c.final.temperature}))
        plan = parse_plan(text, step_ends=tuple(self.source.step_ends))
        values = HeadValues(self.models["critic"], fixed=c.engine.fixed, amp=c.learner.amp == "bf16")
        tasks = draw_tasks(self.source, c.eval.split, c.eval.n, c.seed)
        return search_episodes(self.source, seat, plan, values, tasks, c.seed + 1)[0]


def states(c: OreoRecipe) -> Literal["token", "step"]:
    return c.states or ("step" if c.level == "step" else "token")


# --- the value's model --------------------------------------------------------------------------------------------

HEADS = ("value_head.weight", "score.weight")  # OpenRLHF's names


def critic_held(model: ModelConfig, critic: OreoCritic, optim: OptimConfig) -> Held:
    """The value model as `load_critic` loads it. `optim` is that of the policy."""
    own = model.model_copy(update={"name": critic.name or model.name, "lora": critic.lora})
    return Held("critic", own, critic.optim or optim, output=False)


def load_critic(model: ModelConfig, critic: OreoCritic, scratch: Path) -> LM:
    """Load a value model: a copy of the initial policy with a head of zeros, or a model from a folder (with its head,
    if it has one)."""
    name = critic.name or model.name
    if critic.name and (found := foreign_head(Path(critic.name))):
        name = str(import_critic(Path(critic.name), scratch, found))
    lm = load_model(model.model_copy(update={"name": name, "lora": critic.lora}))
    if "value" not in lm.heads:
        lm.add_head("value")
    return lm


def foreign_head(folder: Path) -> str:
    """The name of the value head in a folder that OpenRLHF wrote, or None."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        if path.name != "heads.safetensors":
            with safe_open(path, "np") as stored:
                names = [n.removeprefix("base_model.model.") for n in list(stored.keys())]
            plain = {n.replace(".lora_A", "").replace(".lora_B", "") for n in names}
            if found := next((h for h in HEADS if h in plain), ""):
                return found
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ModelError(
            f"{folder}: its weights are pickle files, which Trailmark does not read: save them as safetensors first"
        )
    return ""


def import_critic(source: Path, target: Path, head: str) -> Path:
    """Convert an OpenRLHF critic to a folder of ours, with its head in heads.safetensors. In an adapter the head is
    adapted too: its base is zero and is not stored, so the head is scale * B @ A, and no other base head may be
    added."""
    from safetensors.torch import load_file, save_file

    if (target / "heads.safetensors").is_file():
        return target
    half = target.with_name(f".{target.name}.partial")
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(source, half, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json"))
    tensors: dict[str, Any] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors.update(load_file(path))
    plain = head.removesuffix(".weight")
    mine = {n: tensors.pop(n) for n in list(tensors) if plain in n.split(".")}
    if is_adapter(source):
        settings = json.loads((source / "adapter_config.json").read_text())
        scale = settings["lora_alpha"] / (math.sqrt(settings["r"]) if settings.get("use_rslora") else settings["r"])
        a, b = (next(t for n, t in mine.items() if f"lora_{k}" in n).float() for k in "AB")
        weight = scale * (b @ a)
        if isinstance(settings.get("target_modules"), list):
            settings["target_modules"] = [m for m in settings["target_modules"] if m != plain]
        settings["task_type"] = "CAUSAL_LM"
        (half / "adapter_config.json").write_text(json.dumps(settings, indent=2))
        save_file(tensors, half / "adapter_model.safetensors")
    else:
        weight = next(iter(mine.values())).float()
        save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})
    save_file({"value.weight": weight.contiguous()}, half / "heads.safetensors")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(target)
    half.rename(target)
    return target
