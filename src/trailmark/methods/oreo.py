"""OREO: offline reinforcement learning from scored trajectories, and the baselines that learn from the same file.

A policy pi and a value V are trained until they satisfy the soft Bellman equation on what is stored:

    V(s_t) = R - beta sum_{i>=t} log pi(a_i|s_i) / ref(a_i|s_i)       for every state s_t of every trajectory

Each step takes a batch of trajectories. The value moves towards the right side, the policy so that the sides meet
(`objectives/soft_bellman.py` has the variants); both losses are taken where both models stand before the step. The reference
`ref` is the policy as it starts, or another model. `objective` chooses a baseline instead: rejection sampling (imitate the
successes), DPO and IPO (pairs of a success and a failure of one prompt), KTO (good and bad ones, unpaired).

What differs from the reference implementation: a trajectory that is too long is left out, not cut and credited; prompts are not
trained on whatever the padding; rewards are as they stand in the file unless told otherwise (there 2r - 1 is the default);
both models, both optimisers and the KL coefficient are in every checkpoint; medians of log weights are over the batch.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trailmark.config import ModelConfig, SamplingConfig
from trailmark.engines.local import LocalEngine, local_engine
from trailmark.errors import DataError, ModelError, RecipeError
from trailmark.formats.rows import each
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Plain, train
from trailmark.memory import need_rows
from trailmark.methods import oreo_data
from trailmark.methods.configs import OreoCritic as CriticConfig
from trailmark.methods.configs import OreoRecipe as Config
from trailmark.methods.online import bound_task, summary
from trailmark.methods.reflect_play import keep_evaluation
from trailmark.methods.sft import batch_rows
from trailmark.models.adapters import is_adapter
from trailmark.models.lm import LM
from trailmark.models.load import load_model, load_reference
from trailmark.models.readout import Readout
from trailmark.objectives import Kto, Objective, Pairwise, Sft, SoftBellman
from trailmark.rollout.play import Seat, play
from trailmark.rollout.search import parse_plan
from trailmark.runs.store import Run, read_segment, write_segment
from trailmark.samples import scored
from trailmark.score.values import HeadValues
from trailmark.tasks import get_task
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, SamplingLaw


class OreoMethod(Plain):
    def __init__(self, config: Config, run: Run):
        need_rows(config.batch, "batch")
        policy = load_model(config.model)
        self.run = run
        self.max_len = min(policy.context, config.max_len or policy.context)
        found = oreo_data.read_scored(config.files, config.format, policy.tokenizer, config.seat, self.max_len)
        self.rows, skipped = rows(config, found.episodes, policy.tokenizer)
        self.counts = {"rows": len(self.rows)} | {f"skipped_{k}": n for k, n in {**found.skipped, **skipped}.items()}
        if config.epochs is not None:
            config = config.model_copy(update={"steps": math.ceil(config.epochs * len(self.rows) / config.batch)})
        self.config = config
        self.models: dict[str, LM] = {"policy": policy}
        self.ref = "" if config.objective == "rejection" else self._reference()
        self.learner = self._learner(run)
        self.objective = make_objective(config, self.ref, self.max_len)
        self.source = get_task(config.task.name, **config.task.options) if config.task else None
        self.engine = local_engine(policy, config.engine) if config.task else None
        if self.source is not None:
            bound_task(self.source, policy.tokenizer)

    def _reference(self) -> str:
        """The name under which the learner knows the reference. One that a LoRA run has inside costs no second copy."""
        c = self.config
        if c.ref is None and c.objective == "oreo" and c.critic_only:
            return "policy"
        if (ref := load_reference(c.model, c.ref)) is None:
            return "policy/base"
        self.models["ref"] = ref
        return "ref"

    def _learner(self, run: Run) -> Learner:
        c = self.config
        if c.objective != "oreo":
            return Learner(self.models, c.learner, total=c.steps)
        self.models["critic"] = load_critic(c.model, c.critic, run.path / "critic-import")
        self.frozen = math.ceil(c.freeze * c.steps)
        trains = {"critic": c.critic.optim or c.learner.optim}
        if not c.critic_only:
            trains["policy"] = c.learner.optim
        return Learner(self.models, c.learner, trains, {"critic": c.steps, "policy": c.steps - self.frozen})

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        chosen = [self.rows[r] for r in batch_rows(len(self.rows), c.batch, step, c.seed)]
        if c.objective == "oreo":
            yield self._oreo(step, chosen)
            return
        make: dict[str, Any] = {"rejection": oreo_data.answer_samples, "kto": oreo_data.labelled_samples}
        samples = make.get(c.objective, oreo_data.pair_samples)(chosen, c.seat)
        if self.ref:
            samples = self.learner.fill(samples, ref=Readout("", model=self.ref, law=False))
        yield Update(samples, self.objective)

    def _oreo(self, step: int, chosen: Sequence[Any]) -> Update:
        c = self.config
        mean: Literal["token", "sequence"] = "token" if c.importance == "batch" else "sequence"
        samples = oreo_data.trajectory_samples(chosen, c.seat, states(c), mean, c.reward.mul, c.reward.add)
        if c.target == "ema" and "policy" in self.learner.optimisers:
            with self.learner.optimisers["policy"].averaged():
                samples = self.learner.fill(samples, policy_logp=Readout("", law=False, where="action"))
        if c.critic_only or step <= self.frozen:
            return Update(samples, self.objective.model_copy(update={"alpha": 0.0, "kl_target": None}), ("critic",))
        return Update(samples, self.objective, ("critic", "policy"))

    def metrics(self) -> Mapping[str, float]:
        return self.counts

    def evaluate(self, step: int) -> Mapping[str, float]:
        if self.source is None or self.engine is None:
            return {}
        self.engine.publish(step, self.models["policy"])
        episodes = self.play(self.engine)
        write_segment(self.run.path / "evaluation", step, episodes)
        good, dropped = scored(episodes)
        return {**summary(good), **dropped}

    def play(self, engine: LocalEngine) -> list[Episode]:
        """The evaluation's starts, played with the evaluation's draws."""
        c = self.config
        assert self.source is not None
        tasks = draw_tasks(self.source, c.eval.split, c.eval.n, c.seed)
        return play(self.source, tasks, [player(engine, c.seat, c.sampling)], seed=c.seed + 1, prefix="eval:")

    def finish(self) -> None:
        """The evaluations at the end that are not there yet; searches also where the run has gone on since they were made."""
        c, folder = self.config, self.run.path / "evaluation"
        if c.final.start and not (folder / "start.jsonl").exists():
            keep_evaluation(self.run, "start", self.play(local_engine(load_model(c.model), c.engine)))
        for text in c.final.search:
            name = text.replace(":", "-")
            path = folder / f"{name}.jsonl"
            if not path.exists() or {e.players[c.seat].version for e in read_segment(path)} != {c.steps}:
                keep_evaluation(self.run, name, self._searched(text))

    def _searched(self, text: str) -> list[Episode]:
        from trailmark.evaluate.searched import search_episodes

        c = self.config
        assert self.source is not None and self.engine is not None
        self.engine.publish(c.steps, self.models["policy"])
        seat = player(self.engine, c.seat, c.sampling.model_copy(update={"temperature": c.final.temperature}))
        plan = parse_plan(text, step_ends=tuple(getattr(self.source, "step_ends", ("\n",))))
        how: dict[str, Any] = {"split": c.eval.split, "n": c.eval.n, "seed": c.seed}
        values = HeadValues(self.models["critic"], fixed=c.engine.fixed, amp=c.learner.amp == "bf16")
        return search_episodes(self.source, seat, plan, values, **how)[0]


def states(c: Config) -> Literal["token", "step"]:
    return c.states or ("step" if c.level == "step" else "token")


def rows(c: Config, episodes: Sequence[Any], tokenizer: Any) -> tuple[list[Any], dict[str, int]]:
    """What a batch is drawn from: trajectories, or pairs of them; and how many could not be used."""
    if c.objective == "oreo":
        if states(c) == "step":
            episodes = [oreo_data.mark_steps(e, c.seat, tokenizer, c.split) for e in episodes]
        return list(episodes), {}
    if c.objective in ("dpo", "ipo"):
        given = c.format == "pairs"
        made = oreo_data.stored_pairs(episodes) if given else oreo_data.preference_pairs(episodes, c.pairs, c.seed)
        groups = 0 if given else len(oreo_data.by_group(episodes)) - len({a.group for a, _ in made})
        if not made:
            raise DataError("no prompt has both a success and a failure: there are no pairs to learn from.", c.files[0])
        return made, {"groups_of_one_kind": groups} if groups else {}
    if c.objective == "rejection":
        won = oreo_data.successes(episodes)
        if not won:
            raise DataError("holds no success to imitate.", c.files[0])
        return won, {"lost": len(episodes) - len(won)} if len(won) < len(episodes) else {}
    good = len(oreo_data.successes(episodes))
    if 0 < c.desirable * good < c.undesirable * (bad := len(episodes) - good):
        warnings.warn(
            f"objective kto: {bad} failures outweigh {good} successes, which can drive everything down that the model writes; "
            f"undesirable={c.desirable * good / bad:.2g} balances them",
            stacklevel=2,
        )
    return list(episodes), {}


def make_objective(c: Config, ref: str, max_len: int) -> Objective:
    beta = c.beta or (0.03 if c.objective == "oreo" else 0.1)
    if c.objective == "rejection":
        return Sft()
    if c.objective == "kto":
        return Kto(beta=beta, desirable=c.desirable, undesirable=c.undesirable, ref=ref, max_len=max_len)
    if c.objective in ("dpo", "ipo"):
        return Pairwise(loss="ipo" if c.objective == "ipo" else "sigmoid", beta=beta)
    return SoftBellman(
        part="both",
        level=c.level,
        beta=beta,
        ref=ref,
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


def player(engine: LocalEngine, name: str, s: SamplingConfig) -> Seat:
    law = SamplingLaw(s.temperature, s.top_p, s.top_k, min_tokens=s.min_tokens)
    return Seat(name, engine, law, s.max_tokens, tuple(s.stop), "trained")


# --- the value's model --------------------------------------------------------------------------------------------

HEADS = ("value_head.weight", "score.weight")  # as OpenRLHF has called it


def load_critic(model: ModelConfig, critic: CriticConfig, scratch: Path) -> LM:
    """A value model: the policy's start with a head of zeros, or what lies in a folder (with its head, if it has one)."""
    name = critic.name or model.name
    if critic.name and (found := foreign_head(Path(critic.name))):
        name = str(import_critic(Path(critic.name), scratch, found))
    lm = load_model(model.model_copy(update={"name": name, "lora": critic.lora}))
    if "value" not in lm.heads:
        lm.add_head("value")
    return lm


def foreign_head(folder: Path) -> str:
    """The name of a value head among the weights of a folder, where a critic of OpenRLHF has it, or nothing."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        if path.name != "heads.safetensors":
            with safe_open(path, "np") as stored:
                names = [n.removeprefix("base_model.model.") for n in list(stored.keys())]
            plain = {n.replace(".lora_A", "").replace(".lora_B", "") for n in names}
            if found := next((h for h in HEADS if h in plain), ""):
                return found
    if not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin")):
        raise ModelError(f"{folder}: its weights are pickles, which are not read: save them as safetensors first")
    return ""


def import_critic(source: Path, target: Path, head: str) -> Path:
    """An OpenRLHF critic as a folder of ours: the head goes to heads.safetensors. In an adapter the head is adapted too and its
    base was zero and is not stored, so it is scale * B @ A; a base head of any other origin must not be added."""
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


# --- commands -----------------------------------------------------------------------------------------------------


def check(config: Config) -> list[str]:
    """What a dry run can say of the data, which need not be there yet."""

    def rows_of(path: str) -> str:
        return f"{len(each(path, lambda row: row)[0])} rows" if Path(path).is_file() else "which is not here yet"

    return [f"data: {path}, {rows_of(path)}" for path in config.files if path]


def run(config: Config, run: Run, resume: bool = False) -> dict[str, float]:
    if not config.files or not all(config.files):
        raise RecipeError("data: name a file of scored trajectories")
    method = OreoMethod(config, run)
    last = train(method, method.config, run, resume)
    method.finish()
    return last
