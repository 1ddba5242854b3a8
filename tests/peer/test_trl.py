"""The same batch through TRL's trainers and through ours: one loss, one gradient.

TRL gets an ordinary transformers model with the same weights (eager or SDPA attention, padded rows, its own dataset
preparation and collation); we get the model behind our attention entry, in every layout and several micro-batch splits.
So what is compared is the whole way: masks, denominators, attention, log-probs, losses and the backward pass.

    pip install -e '.[dev,peer]' && pytest -m peer tests/peer -s      # -s prints the measured differences
"""

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from trailmark.config import LearnerConfig
from trailmark.errors import LearnError
from trailmark.learn.learner import Learner
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import build, tiny_config, tiny_tokenizer
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.kto import Kto
from trailmark.objectives.pairwise import Pairwise
from trailmark.objectives.sft import Sft
from trailmark.samples import build_samples, pair
from trailmark.types import Episode, SamplingLaw, Scored, Task, Turn

pytestmark = pytest.mark.peer

TOLERANCE = 1e-5
WHOLE = 10_000
SPLITS = [
    (WHOLE, "rows"),
    (1, "rows"),
    (70, "rows"),
    (WHOLE, "left"),
    (WHOLE, "flat"),
    (WHOLE, "tree"),
    (1, "tree"),
    (60, "tree"),
]
FAMILIES = [("gpt2", "eager"), ("gpt2", "sdpa"), ("llama", "eager"), ("llama", "sdpa")]
LONGEST = 24  # completions of the GRPO batches are shorter: Dr. GRPO divides by this
ARGS = {
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "seed": 0,
}


@pytest.fixture(scope="module", autouse=True)
def trl():
    found = pytest.importorskip("trl", "1.16.0")
    pytest.importorskip("datasets").disable_progress_bars()
    return found


# ---------------------------------------------------------------------------------------------------------- two models


def weights(family, seed):
    """A tiny model that is far from uniform: at their usual start its gradients would be too small to compare."""
    tokenizer = tiny_tokenizer(pad_is_eos=True)
    kv_heads = None if family == "gpt2" else 2
    model = build(tiny_config(family, vocab=len(tokenizer), kv_heads=kv_heads, context=128), seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.12 * torch.randn(p.shape, generator=draw))
    return model


class Pair:
    """One set of weights as our LM and as an ordinary transformers model, and the same for a reference."""

    def __init__(self, family, attention, folder):
        from transformers import AutoModelForCausalLM

        self.family, self.tokenizer = family, tiny_tokenizer(pad_is_eos=True)
        assert self.tokenizer.pad_token_id == self.tokenizer.eos_token_id
        self.ours, self.theirs = {}, {}
        for name, seed in (("policy", 1), ("ref", 2)):
            model = weights(family, seed)
            model.save_pretrained(folder / name)
            self.ours[name] = LM(model, self.tokenizer, name)
            self.theirs[name] = AutoModelForCausalLM.from_pretrained(
                folder / name, attn_implementation=attention, dtype=torch.float32
            )
            assert self.theirs[name].config._attn_implementation == attention
        self.ours["ref"].freeze()
        self.reference_path = str(folder / "ref")

    def learner(self, budget=WHOLE, layout="tree"):
        return Learner(self.ours, LearnerConfig(micro_tokens=budget).model_copy(update={"layout": layout}))

    def gradient(self, samples, objective, budget, layout):
        lm = self.ours["policy"]
        for _, p in lm.parameters():
            p.grad = None
        terms = self.learner(budget, layout).gradient(samples, objective)
        return terms, {n: p.grad.clone() for n, p in lm.parameters()}


@pytest.fixture(params=FAMILIES, ids=lambda x: "-".join(x))
def models(request, tmp_path):
    return Pair(*request.param, tmp_path)


@pytest.fixture(params=["gpt2", "llama"])
def one_each(request, tmp_path):
    return Pair(request.param, {"gpt2": "eager", "llama": "sdpa"}[request.param], tmp_path)


def backward(trainer, batches, **kwargs):
    """The trainer's own loss over its batches, and the gradient that its optimiser would see."""
    trainer.model.train()
    trainer.model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, batch, **kwargs)
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def same(request, models, samples, objective, want, grads, scale=1.0):
    """Ours equals `want` and `grads` in every split; `scale`: theirs = scale * ours. Returns our terms."""
    biggest = max(float(g.abs().max()) for g in grads.values())
    assert biggest > 1000 * TOLERANCE, "gradients this small show nothing"
    off_loss = off_grad = 0.0
    for budget, layout in SPLITS:
        terms, mine = models.gradient(samples, objective, budget, layout)
        assert mine.keys() == grads.keys()
        off_loss = max(off_loss, abs(scale * terms["loss"] - want))
        off_grad = max(off_grad, *(float((scale * mine[n] - grads[n]).abs().max()) for n in grads))
    measured = f"loss {want:+.6f} off {off_loss:.1e}   gradient up to {biggest:.2f} off {off_grad:.1e}"
    print(f"\n  {request.node.name:52s} {measured}", end="")
    assert off_loss <= TOLERANCE and off_grad <= TOLERANCE
    return terms


def episode(name, turns, group="g"):
    return Episode(name, Task(name), group, tuple(turns), {"self": Scored(0.0)}, True)


# ----------------------------------------------------------------------------------------------------------------- SFT

TEXTS = [
    ("What is 2 + 2?", " It is 4."),
    ("What is 2 + 2?", " Four"),
    ("Count", " one two three four five six"),
    ("A turn<|im_end|>and another", " that ends<|im_end|> twice"),
]


def sft_trainer(models, folder, rows=TEXTS, **more):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"prompt": p, "completion": c} for p, c in rows])
    args = SFTConfig(
        str(folder),
        completion_only_loss=True,
        max_length=None,
        shuffle_dataset=False,
        per_device_train_batch_size=len(rows),
        **ARGS,
        **more,
    )
    return SFTTrainer(models.theirs["policy"], args=args, train_dataset=data, processing_class=models.tokenizer)


def texts(models, rows=TEXTS):
    encode, eos = (lambda s: tuple(models.tokenizer.encode(s))), models.tokenizer.eos_token_id
    return [episode(str(k), [Turn("policy", encode(p), (*encode(c), eos))]) for k, (p, c) in enumerate(rows)]


def test_sft(request, models, tmp_path):
    sft(request, models, tmp_path, TEXTS)


def test_sft_without_a_prompt(one_each):
    """A first token has nothing before it: where they leave it out without a word, we ask for a prompt."""
    with pytest.raises(LearnError, match="has no prompt"):
        build_samples(texts(one_each, [("", "no prompt at all")]), "policy")


def sft(request, models, tmp_path, rows):
    trainer = sft_trainer(models, tmp_path, rows)
    batch = trainer.data_collator([trainer.train_dataset[k] for k in range(len(rows))])
    samples = build_samples(texts(models, rows), "policy", mean="token")
    for s, ids, labels, mask in zip(samples, batch["input_ids"], batch["labels"], batch["attention_mask"].bool()):
        assert s.tokens.tolist() == ids[mask].tolist()
        assert (s.streams["weight"][1:] != 0).tolist() == (labels[mask][1:] != -100).tolist()
    want, grads = backward(trainer, [batch])
    same(request, models, samples, Sft(), want, grads)


def test_sft_accumulated(request, one_each, tmp_path):
    """Two unequal micro-batches of theirs, normalised by the tokens of both, are one batch of ours."""
    trainer = sft_trainer(one_each, tmp_path, gradient_accumulation_steps=2)
    trainer.current_gradient_accumulation_steps = 2
    rows = [trainer.train_dataset[k] for k in range(len(TEXTS))]
    batches = [trainer.data_collator(rows[:1]), trainer.data_collator(rows[1:])]
    count = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    want, grads = backward(trainer, batches, num_items_in_batch=count)
    same(request, one_each, build_samples(texts(one_each), "policy", mean="token"), Sft(), want, grads)


# ----------------------------------------------------------------------------------------------------------------- DPO

PREFERENCES = [
    ("What is 2 + 2?", " It is 4.", " It is 5, surely."),
    ("What is 2 + 2?", " Four", " It is 4?<|im_end|> no"),
    ("Count to six", " one two three four five six", " one"),
    ("Say<|im_end|>it", " no", " yes, and then much more than that"),
]
EQUAL = [
    ("What is 2 + 2?", " It is 4.", " It is 5."),
    ("What is 2 + 2?", " so: four", " is: 4!!!"),
    ("Count to three", " one, two", " three 21"),
]


def dpo(request, models, folder, rows, objective, scale=1.0, lora=None, **config):
    """Their loss on the preferences against ours, theirs = scale * ours; with `lora` the base is the reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in rows])
    args = DPOConfig(str(folder), max_length=None, per_device_train_batch_size=len(rows), **ARGS, **config)
    reference = None if lora else models.theirs["ref"]
    trainer = DPOTrainer(
        models.theirs["policy"],
        reference,
        args=args,
        train_dataset=data,
        processing_class=models.tokenizer,
        peft_config=lora,
    )
    if lora:
        adapt(models, lora, trainer.model)
    batch = trainer.data_collator([trainer.train_dataset[k] for k in range(len(rows))])
    want, grads = backward(trainer, [batch])

    encode, eos = (lambda s: tuple(models.tokenizer.encode(s))), models.tokenizer.eos_token_id
    turn = lambda row, side: Turn("policy", encode(row[0]), (*encode(row[side]), eos))
    sides = [
        build_samples([episode(str(k), [turn(row, side)]) for k, row in enumerate(rows)], "policy") for side in (1, 2)
    ]
    for s, ids, mask in zip(sides[0] + sides[1], batch["input_ids"], batch["completion_mask"].bool()):
        assert s.tokens[s.streams["weight"] != 0].tolist() == ids[mask].tolist()
    samples = [s for k, (a, b) in enumerate(zip(*sides)) for s in pair(a, b, f"pair {k}")]
    samples = models.learner().fill(samples, ref=Readout("", model="policy/base" if lora else "ref", law=False))
    terms = same(request, models, samples, objective, want, grads, scale)
    for mine, theirs in [("accuracy", "accuracies"), ("chosen_reward", "chosen"), ("rejected_reward", "rejected")]:
        if scale == 1.0:
            assert terms[mine] == pytest.approx(trainer._metrics["train"][f"rewards/{theirs}"][-1], abs=TOLERANCE)
    return terms


def adapt(models, lora, theirs):
    """The same random adapter on both sides (one that has just been made does nothing)."""
    from peft import get_peft_model

    lm = models.ours["policy"]
    ours = get_peft_model(lm.base, dataclasses.replace(lora, base_model_name_or_path=None))
    models.ours["policy"] = LM(ours, models.tokenizer, lm.name)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for (n, p), (m, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert n == m and p.requires_grad == q.requires_grad
            if p.requires_grad:
                p.copy_(0.1 * torch.randn(p.shape, generator=draw))
                q.copy_(p)


@pytest.mark.parametrize("loss", ["sigmoid", "hinge"])
def test_dpo(request, models, tmp_path, loss):
    terms = dpo(request, models, tmp_path, PREFERENCES, Pairwise(loss=loss, beta=0.1), loss_type=[loss], beta=0.1)
    assert abs(terms["chosen_reward"] - terms["rejected_reward"]) > 0.1  # the reference is another model


def test_ipo(request, one_each, tmp_path):
    """Theirs divides each side's log-ratio by its length, ours sums it. For sides of equal length n, theirs is ours
    with 1/(2 beta) stretched by n, over n^2."""
    n = len(EQUAL[0][1]) + 1
    assert {len(text) + 1 for row in EQUAL for text in row[1:]} == {n}
    ours = Pairwise(loss="ipo", beta=0.1 / n)
    dpo(request, one_each, tmp_path, EQUAL, ours, scale=1 / n**2, loss_type=["ipo"], beta=0.1)


def test_dpo_smoothed(request, one_each, tmp_path):
    """Their `aot` sorts margins over the batch; of a single pair it is label smoothing."""
    ours = Pairwise(smooth=0.2, beta=0.3)
    dpo(request, one_each, tmp_path, PREFERENCES[:1], ours, loss_type=["aot"], beta=0.3, label_smoothing=0.2)


def test_dpo_robust(request, one_each, tmp_path):
    """[(1 - e) L - e L'] / (1 - 2 e) is smoothing by -e / (1 - 2 e)."""
    e = 0.1
    ours = Pairwise(smooth=-e / (1 - 2 * e), beta=0.1)
    dpo(request, one_each, tmp_path, PREFERENCES, ours, loss_type=["robust"], beta=0.1, label_smoothing=e)


def test_dpo_lora(request, one_each, tmp_path):
    """An adapter is trained and the base model is the reference, on both sides without a second copy of the weights."""
    peft = pytest.importorskip("peft")
    names = ["c_attn", "c_fc"] if one_each.family == "gpt2" else ["q_proj", "v_proj", "up_proj"]
    lora = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=names,
        task_type="CAUSAL_LM",
        fan_in_fan_out=one_each.family == "gpt2",
    )
    ours = Pairwise(beta=0.1)
    terms = dpo(request, one_each, tmp_path, PREFERENCES, ours, lora=lora, loss_type=["sigmoid"], beta=0.1)
    assert abs(terms["chosen_reward"] - terms["rejected_reward"]) > 0.01


# ----------------------------------------------------------------------------------------------------------------- KTO

JUDGED = [
    ("What is 2 + 2?", " It is 4.", True),
    ("And 2 + 3?", " It is 4?<|im_end|> no", False),
    ("Count to six", " one two three four five six", True),
    ("Say<|im_end|>it", " yes, and then much more than that", False),
    ("Short", " no", False),
]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.4)])
@pytest.mark.parametrize("trained", ["policy", "ref"])
def test_kto(request, one_each, tmp_path, weights, trained):
    """Theirs finds the reference point in a micro-batch, so one holds the whole batch; ours is the same in any split.
    Of the two models, one as the policy has it below 0, where it is clamped, the other above."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    models = one_each
    if trained == "ref":
        for side in (models.ours, models.theirs):
            side["policy"], side["ref"] = side["ref"], side["policy"]
        for p in models.ours["policy"].model.parameters():
            p.requires_grad_(True)
        models.ours["ref"].freeze()
    data = Dataset.from_list([{"prompt": p, "completion": c, "label": good} for p, c, good in JUDGED])
    args = KTOConfig(
        str(tmp_path),
        max_length=None,
        per_device_train_batch_size=len(JUDGED),
        beta=0.1,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        **ARGS,
    )
    trainer = KTOTrainer(
        models.theirs["policy"], models.theirs["ref"], args=args, train_dataset=data, processing_class=models.tokenizer
    )
    batch = trainer.data_collator([trainer.train_dataset[k] for k in range(len(JUDGED))])
    want, grads = backward(trainer, [batch])

    rows = build_samples(texts(models, [row[:2] for row in JUDGED]), "policy")
    for s, ids, mask in zip(rows, batch["input_ids"], batch["completion_mask"].bool()):
        assert s.tokens[s.streams["weight"] != 0].tolist() == ids[mask].tolist()
    role = lambda good: "desirable" if good else "undesirable"
    samples = [dataclasses.replace(s, mass={"weight": 1.0}, role=role(good)) for s, (_, _, good) in zip(rows, JUDGED)]
    samples = models.learner().fill(samples, ref=Readout("", model="ref", law=False))
    objective = Kto(beta=0.1, desirable=weights[0], undesirable=weights[1])
    terms = same(request, models, samples, objective, want, grads)
    z = trainer._metrics["train"]["kl"][-1]
    assert terms["reference_point"] == pytest.approx(z, abs=10 * TOLERANCE)
    assert (z > 1) == (trained == "ref")


# ---------------------------------------------------------------------------------------------------------------- GRPO

MEANS = {"grpo": "sequence", "bnpo": "token", "dr_grpo": "constant", "dapo": "token"}


class Group:
    """Six completions of two prompts, of ragged lengths: five end in eos (which is also the pad), one has eos inside,
    one is cut; with `tools`, some are interrupted by tokens that the policy did not write. `old` is the policy's
    log-prob off by a random amount, so that a good part of the ratios is clipped."""

    def __init__(self, models, scalar=True, law=None, tools=False):
        draw, eos = np.random.default_rng(7), models.tokenizer.eos_token_id
        token = lambda n: tuple(int(t) for t in draw.integers(0, 256, n))
        # Theirs gives no positions, so GPT-2 would place left-padded prompts wrongly: its prompts are equally long.
        prompts = [token(9), token(9) if models.family == "gpt2" else token(4)]
        lengths = [1, 12, 23, 5, 17, 8]
        self.law = law or SamplingLaw()
        self.episodes, self.advantage = [], {}
        for k, n in enumerate(lengths):
            words = list(token(n))
            if k == 2:
                words[n // 2] = eos
            if k != 4:
                words[-1] = eos
            prompt, cut = prompts[k // 3], n // 3
            if tools and n > 5:
                told, rest = tuple(words[cut : 2 * cut]), tuple(words[2 * cut :])
                spans = [
                    Turn("policy", prompt, tuple(words[:cut]), law=self.law),
                    Turn("policy", told, rest, law=self.law, continues=0),
                ]
            else:
                spans = [Turn("policy", prompt, tuple(words), law=self.law)]
            self.episodes.append(episode(f"e{k}", spans, f"g{k // 3}"))
            whole = float(draw.normal())
            self.advantage[f"e{k}"] = [whole if scalar else draw.normal(size=len(t.tokens)) for t in spans]
        self.prompts = [prompts[k // 3] for k in range(len(lengths))]
        self.scalar = scalar
        scored = models.learner().fill(self.samples("token"), now=Readout(""))
        off = [0.3 * draw.normal(size=len(s.tokens)) * (s.streams["weight"] != 0) for s in scored]
        self.old = [(s.streams["now"] + o).astype(np.float32).astype(float) for s, o in zip(scored, off)]

    def samples(self, mean):
        made = build_samples(self.episodes, "policy", {"advantage": self.advantage}, mean=mean, length=LONGEST)
        if hasattr(self, "old"):
            for s, old in zip(made, self.old):
                s.streams["old"][:] = old
        return made

    def inputs(self, trainer):
        """What their trainer is given after generation: prompts padded on the left, completions on the right."""
        from trl.trainer.utils import pad

        samples = self.samples("token")
        tail = lambda s, p, name: torch.as_tensor(s.streams[name][len(p) :])
        right = lambda rows, value=0: pad([torch.as_tensor(r) for r in rows], value)
        fill = trainer.processing_class.pad_token_id
        both = list(zip(samples, self.prompts))
        out = {
            "prompt_ids": pad([torch.tensor(p) for p in self.prompts], fill, padding_side="left"),
            "prompt_mask": pad([torch.ones(len(p), dtype=torch.long) for p in self.prompts], 0, padding_side="left"),
            "completion_ids": right([s.tokens[len(p) :] for s, p in both], fill),
            "completion_mask": right([np.ones(len(s.tokens) - len(p), np.int64) for s, p in both]),
            "tool_mask": right([(tail(s, p, "weight") != 0).long() for s, p in both]),
            "old_per_token_logps": right([tail(s, p, "old").float() for s, p in both]),
        }
        if self.scalar:
            out["advantages"] = torch.tensor([self.advantage[e.id][0] for e in self.episodes], dtype=torch.float32)
        else:
            out["advantages"] = right([tail(s, p, "advantage").float() for s, p in both])
        if torch.equal(out["tool_mask"], out["completion_mask"]):
            del out["tool_mask"]
        if trainer.ref_model is not None:
            with torch.no_grad():
                out["ref_per_token_logps"], _, _ = trainer._get_per_token_logps_and_entropies(
                    trainer.ref_model,
                    torch.cat([out["prompt_ids"], out["completion_ids"]], 1),
                    torch.cat([out["prompt_mask"], out["completion_mask"]], 1),
                    out["completion_ids"].shape[1],
                )
        out["num_items_in_batch"] = out.get("tool_mask", out["completion_mask"]).sum()
        return out


def grpo(request, models, folder, group, objective, parts=1, **config):
    """Their loss on the group (in `parts` accumulated micro-batches) against ours."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    size = len(group.episodes)
    policy = models.theirs["policy"]
    policy.config._name_or_path = models.reference_path  # where their trainer finds its reference
    args = GRPOConfig(
        str(folder),
        max_completion_length=LONGEST,
        per_device_train_batch_size=size // parts,
        num_generations=3,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts,
        epsilon=objective.low,
        epsilon_high=objective.high,
        beta=objective.beta,
        use_bias_correction_kl=objective.kl == "k3_weighted",
        temperature=group.law.temperature,
        **ARGS,
        **config,
    )
    trainer = GRPOTrainer(
        policy,
        lambda completions, **_: [0.0] * len(completions),
        args,
        Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=copy.deepcopy(models.tokenizer),
    )
    trainer.current_gradient_accumulation_steps = parts  # the training loop sets it before each window
    whole = group.inputs(trainer)
    spans = [slice(k * size // parts, (k + 1) * size // parts) for k in range(parts)]
    batches = [{n: v if v.ndim == 0 else v[span] for n, v in whole.items()} for span in spans]
    want, grads = backward(trainer, batches)
    samples = group.samples(MEANS[config["loss_type"]])
    if objective.beta:
        samples = models.learner().fill(samples, ref=Readout("", model="ref"))
        for s, p, theirs in zip(samples, group.prompts, whole["ref_per_token_logps"]):
            mine = s.streams["ref"][len(p) :]
            on = s.streams["weight"][len(p) :] != 0
            assert mine[on] == pytest.approx(theirs.numpy()[: len(mine)][on], abs=TOLERANCE)
    terms = same(request, models, samples, objective, want, grads)
    assert terms["clip_fraction"] > 0.02
    if objective.ratio == "token" and parts == 1 and MEANS[config["loss_type"]] == "token":
        metrics = {n: v[-1] for n, v in trainer._metrics["train"].items()}
        assert terms["clip_fraction"] == pytest.approx(metrics["clip_ratio/region_mean"], abs=TOLERANCE)
        assert terms["clip_fraction"] < 0.6  # so both branches of the minimum are taken
        if objective.beta:
            assert terms["kl"] == pytest.approx(metrics["kl"], abs=TOLERANCE) and terms["kl"] > 0.1
        if objective.entropy:
            assert terms["entropy"] == pytest.approx(metrics["entropy"], abs=TOLERANCE)


@pytest.mark.parametrize("advantages", ["scalar", "per_token"])
@pytest.mark.parametrize(("beta", "kl"), [(0.0, "k3"), (0.04, "k3"), (0.04, "k3_weighted")])
@pytest.mark.parametrize("loss_type", MEANS)
def test_grpo(request, one_each, tmp_path, loss_type, beta, kl, advantages):
    """`k3_weighted` is what their trainer does unless told otherwise."""
    group = Group(one_each, scalar=advantages == "scalar")
    grpo(request, one_each, tmp_path, group, Clipped(beta=beta, kl=kl), loss_type=loss_type)


@pytest.mark.parametrize("loss_type", MEANS)
def test_grpo_other_attention(request, tmp_path, loss_type):
    """The two pairings of family and attention that `one_each` leaves out."""
    for family, attention in (("gpt2", "sdpa"), ("llama", "eager")):
        models = Pair(family, attention, tmp_path / family)
        grpo(request, models, tmp_path, Group(models), Clipped(beta=0.04), loss_type=loss_type)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_grpo_accumulated(request, one_each, tmp_path, loss_type):
    """Two micro-batches of theirs are one batch of ours. Not so for bnpo: theirs averages over the tokens of each
    micro-batch, and changes with the split."""
    grpo(request, one_each, tmp_path, Group(one_each, scalar=False), Clipped(beta=0.04), parts=2, loss_type=loss_type)


@pytest.mark.parametrize("loss_type", MEANS)
def test_grpo_tokens_in_between(request, one_each, tmp_path, loss_type):
    """Tool results inside a completion are seen, not trained, not counted: two turns of ours, a tool mask of theirs."""
    group = Group(one_each, scalar=False, tools=True)
    grpo(request, one_each, tmp_path, group, Clipped(beta=0.04), loss_type=loss_type)


def test_grpo_temperature(request, one_each, tmp_path):
    """Ratios and KL are under the law the tokens were drawn from."""
    group = Group(one_each, law=SamplingLaw(temperature=0.7))
    grpo(request, one_each, tmp_path, group, Clipped(beta=0.04), loss_type="bnpo")


def test_grpo_clip_higher(request, one_each, tmp_path):
    grpo(request, one_each, tmp_path, Group(one_each), Clipped(low=0.1, high=0.28), loss_type="dapo")


@pytest.mark.parametrize("tools", [False, True])
def test_gspo(request, one_each, tmp_path, tools):
    """One ratio per sequence; the KL is not weighted by it."""
    group, objective = Group(one_each, tools=tools), Clipped(low=0.02, high=0.02, beta=0.04, ratio="sequence")
    grpo(request, one_each, tmp_path, group, objective, loss_type="grpo", importance_sampling_level="sequence")


def test_grpo_entropy_bonus(request, one_each, tmp_path):
    """Theirs is a mean over tokens whatever the loss, so it is ours where the loss is one too."""
    grpo(request, one_each, tmp_path, Group(one_each), Clipped(entropy=0.05), loss_type="bnpo", entropy_coef=0.05)


# --- a saved model ---------------------------------------------------------------------------------------------------


def test_a_trained_model_stops_in_trl_where_it_stops_here(tmp_path, monkeypatch):
    """Answers that TRL's GRPO draws from a checkpoint: it is told nothing about how they end."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from typer.testing import CliRunner

    from trailmark.commands.app import app

    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "Say it: ", "response": "yes"}\n')
    Path("r.yaml").write_text(
        "method: sft\ndata: rows.jsonl\nchat: false\nsteps: 40\nbatch: 4\nout: run\nlearner: {optim: {lr: 1e-2}}\n"
        "model: {shape: {family: llama, layers: 1, width: 32, heads: 2, context: 64}}\n"
    )
    said = CliRunner().invoke(app, ["train", "r.yaml"])
    assert said.exit_code == 0, said.output
    (folder,) = Path("run/checkpoints").glob("*/policy")
    drawn = []

    def paid(completions, completion_ids, **_):
        drawn.extend(zip(completions, completion_ids))
        return [0.0] * len(completions)

    config = GRPOConfig("trl", max_completion_length=20, per_device_train_batch_size=4, num_generations=4, max_steps=1,
                        temperature=0.01, report_to="none", save_strategy="no", use_cpu=True)  # fmt: skip
    rows = Dataset.from_dict({"prompt": ["Say it: "] * 4})
    GRPOTrainer(str(folder), paid, config, rows).train()
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    assert len(drawn) == 4 and {text for text, _ in drawn} == {"yes"}
    assert {(len(ids), ids[-1]) for _, ids in drawn} == {(4, end)}
