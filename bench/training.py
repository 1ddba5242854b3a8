"""Our learner against TRL on the same batch and the same weights: loss and backward pass, and a whole optimiser step.

    python bench/training.py [--repeats 7] [--sizes 0.2M,2.5M,135M] [--quick]        # needs the extra `peer`

TRL gets an ordinary transformers model (SDPA), rows padded as its own collators pad them; we get the same rows as
samples, in the layout that `layout: auto` chooses. Before anything is timed the two losses must agree. Counted are
tokens of all rows, shared ones as often as they occur, without padding.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import compare, one_thread

from trailmark.config import LearnerConfig, OptimConfig
from trailmark.learn.learner import Learner, Update
from trailmark.models.forward import choose_shape
from trailmark.models.lm import LM
from trailmark.models.readout import Readout
from trailmark.models.tiny import build, tiny_config, tiny_tokenizer
from trailmark.objectives.base import Objective
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.sft import Sft
from trailmark.samples import build_samples
from trailmark.types import Episode, Sample, Scored, Task, Turn

PEER = "TRL"
SHAPES: dict[str, dict[str, Any]] = {
    "0.2M": {"layers": 2, "width": 64, "heads": 4},
    "2.5M": {"layers": 4, "width": 224, "heads": 4},
    # SmolLM2-135M's
    "135M": {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49152, "tied": True},
}
LARGE = "135M"  # a gradient takes seconds, so its batches are smaller
ARGS = {
    "bf16": False,
    "fp16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
}
GROUPS = {  # groups, members, prompt from-to, written from-to
    "short prompts": (8, 8, (12, 40), (4, 48)),
    "shared long prompts": (4, 16, (256, 256), (16, 48)),
    "turns of labels": (8, 8, (60, 96), (1, 1)),
}
LARGE_GROUPS = {"shared long prompts": (1, 8, (256, 256), (16, 48))}


def pair(size: str) -> tuple[LM, Any]:
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    config = tiny_config("llama", **{"vocab": len(tokenizer), "context": 512, **SHAPES[size]})
    ours = build(config, 0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", trust_remote_code=False)
    theirs.load_state_dict(ours.state_dict())
    return LM(ours, tokenizer, size), theirs


def groups_of(size: str) -> dict[str, tuple[int, int, tuple[int, int], tuple[int, int]]]:
    return LARGE_GROUPS if size == LARGE else GROUPS


def episodes(size: str, kind: str) -> list[Episode]:
    groups, members, prompt, written = groups_of(size)[kind]
    draw = np.random.default_rng(0)
    token = lambda low, high: tuple(int(t) for t in draw.integers(0, 250, draw.integers(low, high + 1)))
    out = []
    for g in range(groups):
        shared = token(*prompt)
        for m in range(members):
            out.append(
                Episode(
                    f"{g}/{m}", Task(str(g)), str(g), (Turn("policy", shared, token(*written)),), {"self": Scored(0.0)}
                )
            )
    return out


def timed(
    name: str,
    lm: LM,
    samples: list[Sample],
    objective: Objective,
    theirs: Any,
    loss: Callable[[], Any],
    repeats: int,
    what: str,
) -> None:
    """Gradient against gradient, then step against step."""
    tokens = float(sum(len(s.tokens) for s in samples))
    learner = Learner({"policy": lm}, LearnerConfig(optim=OptimConfig(lr=1e-6)), total=10**6)
    want, got = loss().item(), learner.gradient(samples, objective)["loss"]
    assert abs(want - got) <= 1e-5 * max(1.0, abs(want)), f"{name}: they compute {want}, we {got}"
    what += f", {choose_shape('auto', lm)} layout"

    def ours() -> float:
        learner.gradient(samples, objective)
        return tokens

    def peer() -> float:
        theirs.zero_grad()
        loss().backward()
        return tokens

    compare(f"training/{name}", ours, peer, PEER, "tokens/s", repeats, what + ", loss and backward pass")
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def our_step() -> float:
        learner.update(Update(samples, objective))
        return tokens

    def peer_step() -> float:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adam.step()
        theirs.zero_grad()
        return tokens

    compare(f"training/{name} step", our_step, peer_step, PEER, "tokens/s", repeats, what + ", with clipping and AdamW")


def grpo(size: str, kind: str, repeats: int) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad

    lm, theirs = pair(size)
    played = episodes(size, kind)
    advantage = {e.id: [float(a)] for e, a in zip(played, np.random.default_rng(1).normal(size=len(played)))}
    samples = build_samples(played, "policy", {"advantage": advantage}, mean="sequence")
    samples = Learner({"policy": lm}, LearnerConfig()).fill(samples, old=Readout(""))
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(folder, max_completion_length=64, per_device_train_batch_size=len(played),
            num_generations=groups_of(size)[kind][1],
                          beta=0.0, loss_type="grpo", temperature=1.0, **ARGS)  # fmt: skip
        trainer = GRPOTrainer(theirs, lambda completions, **_: [0.0] * len(completions), args,
                              Dataset.from_dict({"prompt": ["a", "b"]}),
                              processing_class=copy.deepcopy(lm.tokenizer))  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    turns = [e.turns[0] for e in played]
    left = lambda rows: pad([torch.tensor(r) for r in rows], 0, padding_side="left")
    right = lambda rows: pad([torch.tensor(r) for r in rows], 0)
    inputs = {
        "prompt_ids": left([t.prompt for t in turns]), "prompt_mask": left([[1] * len(t.prompt) for t in turns]),
        "completion_ids": right([t.tokens for t in turns]),
        "completion_mask": right([[1] * len(t.tokens) for t in turns]),
        "old_per_token_logps": right([s.streams["old"][len(t.prompt) :].tolist() for s, t in zip(samples, turns)]),
        "advantages": torch.tensor([advantage[e.id][0] for e in played]),
        "num_items_in_batch": torch.tensor(sum(len(t.tokens) for t in turns)),
    }  # fmt: skip
    trainer.model.train()

    def loss() -> Any:
        for values in trainer._metrics["train"].values():  # what it would log is not kept for ever
            values.clear()
        return trainer.compute_loss(trainer.model, inputs)

    groups, members, *_ = groups_of(size)[kind]
    timed(f"GRPO {size} {kind}", lm, samples, Clipped(), theirs, loss, repeats, f"{groups} groups of {members}")


def sft(size: str, repeats: int) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    lm, theirs = pair(size)
    draw = np.random.default_rng(3)
    word = lambda n: "".join(draw.choice(list("abcdefgh "), n))
    number = 8 if size == LARGE else 32
    texts = [(word(draw.integers(20, 60)), word(draw.integers(10, 90))) for _ in range(number)]
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, completion_only_loss=True, max_length=None, per_device_train_batch_size=len(texts), **ARGS
        )
        data = Dataset.from_list([{"prompt": p, "completion": c} for p, c in texts])
        trainer = SFTTrainer(theirs, args=args, train_dataset=data, processing_class=lm.tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[k] for k in range(len(texts))])
    encode, eos = (lambda s: tuple(lm.tokenizer.encode(s))), lm.tokenizer.eos_token_id
    made = [Episode(str(k), Task(str(k)), str(k), (Turn("policy", encode(p), (*encode(c), eos)),),
        {"self": Scored(0.0)})
            for k, (p, c) in enumerate(texts)]  # fmt: skip
    trainer.model.train()

    def loss() -> Any:
        for values in trainer._metrics["train"].values():
            values.clear()
        return trainer.compute_loss(trainer.model, dict(batch))

    timed(f"SFT {size}", lm, build_samples(made, "policy"), Sft(), theirs, loss, repeats, f"{number} ragged rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", default=",".join(SHAPES), help="which models")
    parser.add_argument("--quick", action="store_true", help="the smallest model only, to see that it runs")
    args = parser.parse_args()
    one_thread()
    for size in ("0.2M",) if args.quick else args.sizes.split(","):
        for kind in groups_of(size):
            grpo(size, kind, args.repeats)
        sft(size, args.repeats)


if __name__ == "__main__":
    main()
