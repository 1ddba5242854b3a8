"""One gradient, whatever the split, the packing, the padding side, the order: GPT-2 to 1e-10, Llama to 1e-6 (float64,
before clipping), with two components of different counts."""

import numpy as np
import pytest
import torch

from trailmark.config import LearnerConfig
from trailmark.learn.learner import Learner
from trailmark.models.layout import lay_out, micro_batches, trie
from trailmark.models.layout_check import check_layout, richest_layout
from trailmark.models.readout import Readout
from trailmark.objectives.base import Objective, Term
from trailmark.types import Sample, SamplingLaw


class Two(Objective):
    """A policy term averaged over sequences and a value term averaged over states, with an entropy bonus."""

    kind: str = "two"

    def readouts(self):
        return [Readout("logp"), Readout("entropy", "entropy"), Readout("value", "head", where="value_weight")]

    def terms(self, view):
        w, v = view["weight"], view["value_weight"]
        policy = -(w * view["advantage"] * view["logp"]).sum()
        return [
            Term("policy", policy),
            Term("entropy", (w * view["entropy"]).sum(), coef=-0.01),
            Term("value", (v * (view["value"] - view["advantage"]) ** 2).sum(), weight="value_weight", coef=0.5),
        ]


def batch(seed=0, vocab=250, rows=11):
    """Groups that share prompts, a row that is another's prefix, a duplicate, restricted and tempered turns."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, vocab, n) for n in (3, 12, 7)]
    laws = (SamplingLaw(temperature=0.8), SamplingLaw(allowed=tuple(range(0, 250, 5)), temperature=1.3))
    out = []
    for k in range(rows):
        prompt, n = prompts[k % 3], int(draw.integers(2, 14))
        tokens = np.concatenate([prompt, draw.choice(np.arange(0, 250, 5), n)])
        law = np.full(len(tokens), -1)
        law[len(prompt) :] = k % 3 - 1
        weight, states, advantage = np.zeros((3, len(tokens)))
        weight[len(prompt) :] = 1 / n
        states[len(prompt) :: 2] = 1
        advantage[len(prompt) :] = draw.normal(size=n)
        out.append(
            Sample(
                tokens,
                {"weight": weight, "value_weight": states, "advantage": advantage, "law": law},
                {"weight": 1.0, "value_weight": float(states.sum())},
                laws,
            )
        )
    short = out[0].tokens[:-1]
    out.append(
        Sample(
            short, {n: s[: len(short)] for n, s in out[0].streams.items()}, {"weight": 0.5, "value_weight": 1.0}, laws
        )
    )
    return [*out, out[4]]


def gradient(lm, samples, budget, layout):
    learner = Learner({"policy": lm}, LearnerConfig(micro_tokens=budget).model_copy(update={"layout": layout}))
    for _, p in lm.parameters():
        p.grad = None
    terms = learner.gradient(samples, Two())
    return terms, {n: p.grad.clone() for n, p in lm.parameters()}


@pytest.mark.parametrize(
    ("family", "tol"), [("gpt2", 1e-10), ("llama", 1e-6), ("mistral", 1e-6), ("qwen2", 1e-6), ("gemma", 1e-6)]
)
def test_one_gradient(make_lm, family, tol):
    lm = make_lm(family, dtype=torch.float64, window=5 if family == "mistral" else None)
    lm.add_head("value", zero=False)
    samples = batch()
    want_terms, want = gradient(lm, samples, 10**6, "rows")
    cases = [(budget, layout) for layout in ("rows", "left", "flat", "tree") for budget in (1, 60, 10**6)]
    shuffled = [samples[i] for i in np.random.default_rng(1).permutation(len(samples))]
    for given in (samples, shuffled):
        for budget, layout in cases:
            terms, got = gradient(lm, given, budget, layout)
            assert terms == pytest.approx(want_terms, abs=tol)
            worst = max(float((got[n] - want[n]).abs().max()) for n in want)
            assert worst <= tol, (layout, budget, worst)
    # Accumulation by hand: the two halves' gradients, each with the whole batch's masses, add up.
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3  # and there is something to compare


def test_gradient_checkpointing_and_lora_change_nothing(make_lm):
    lm = make_lm("llama", dtype=torch.float64)
    lm.add_head("value", zero=False)
    samples = batch()
    _, want = gradient(lm, samples, 100, "tree")
    lm.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, got = gradient(lm, samples, 100, "tree")
    assert max(float((got[n] - want[n]).abs().max()) for n in want) <= 1e-6


def test_trie_is_brute_force():
    """j <= i < end[j] exactly when j is an ancestor of i (or i itself), on random tries."""
    draw = np.random.default_rng(0)
    for _ in range(100):
        rows = [draw.integers(0, 3, draw.integers(1, 9)) for _ in range(draw.integers(1, 8))]
        tokens, end, pos, nodes = trie(rows)
        assert len(tokens) == len({tuple(r[: k + 1]) for r in rows for k in range(len(r))})
        for row, path in zip(rows, nodes):
            assert tokens[path].tolist() == row.tolist() and pos[path].tolist() == list(range(len(row)))
            for depth, i in enumerate(path):
                seen = [j for j in range(len(tokens)) if j <= i < end[j]]
                assert seen == sorted(path[: depth + 1].tolist())


def test_units_stay_together_and_budget_holds():
    samples = [Sample(np.arange(5) + k, unit=f"u{k // 2}", role="chosen") for k in range(10)]
    parts = micro_batches(samples, 20, "flat")
    assert sorted(len(p.samples) for p in parts) == [2, 4, 4] and all(p.computed <= 20 for p in parts)
    for p in parts:
        assert all(sum(s.unit == t.unit for t in p.samples) == 2 for s in p.samples)
    left, right = (
        lay_out(samples[:2] + [Sample(np.arange(9))], "left"),
        lay_out(samples[:2] + [Sample(np.arange(9))], "rows"),
    )
    assert left.ids[0].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4] and right.ids[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0]


@pytest.mark.parametrize("shape", ["flat", "tree"])
def test_pieces_that_share_nothing_stand_in_lines(shape):
    """On a CPU a line costs its square: each piece whole in one line, every token where `where` says, and a row still
    sees its own path and nothing else. The budget holds, in two parts if it must; without one, and on a GPU, all is one
    line."""
    draw = np.random.default_rng(0)
    heads = [draw.integers(0, 9, 60) + 10 * k for k in range(6)]
    samples = [Sample(np.r_[h, draw.integers(0, 9, draw.integers(5, 30))]) for h in heads for _ in range(4)]
    (packed,) = micro_batches(samples, 3000, shape)
    rows, width = packed.ids.shape
    assert rows > 1 and packed.computed <= 3000
    for n, s in enumerate(packed.samples):
        place = packed.where[packed.row == n]
        line, at = np.unique(place // width), place % width
        assert len(line) == 1 and packed.ids.reshape(-1)[place].tolist() == s.tokens.tolist()
        assert packed.pos.reshape(-1)[place].tolist() == list(range(len(s.tokens)))
        end = packed.end[line[0]]
        for depth, i in enumerate(at):
            assert [j for j in range(width) if j <= i < end[j]] == at[: depth + 1].tolist()
    used = np.unique(packed.where)
    spare = np.setdiff1d(np.arange(packed.computed), used)
    assert (packed.end.reshape(-1)[spare] == spare % width + 1).all()  # padding is seen by none
    assert lay_out(samples, shape).ids.shape[0] == micro_batches(samples, 3000, shape, 128)[0].ids.shape[0] == 1
    tight = micro_batches(samples, len(used), shape)
    assert sum(len(p.samples) for p in tight) == len(samples)
    assert len(tight) == 2 and all(len(p.ids) > 1 and p.computed <= len(used) for p in tight)  # no room to waste


def test_a_header_that_all_share_does_not_make_one_long_line():
    """Four shared tokens in front of everything: computed again for each group, while the groups' own prompts stay
    shared."""
    draw = np.random.default_rng(0)
    heads = [np.r_[1, 2, 3, 4, draw.integers(0, 99, 50)] for _ in range(8)]
    samples = [Sample(np.r_[h, draw.integers(0, 99, 20)]) for h in heads for _ in range(8)]
    (packed,) = micro_batches(samples, 10_000, "tree")
    assert packed.ids.shape[1] < 500 and packed.computed < 1.1 * 8 * (54 + 8 * 20)  # rows would be 64 x 74
    for n, s in enumerate(packed.samples):
        place = packed.where[packed.row == n]
        assert packed.ids.reshape(-1)[place].tolist() == s.tokens.tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2"])
def test_probe_passes_where_the_tree_is_exact(make_lm, family):
    lm = make_lm(family, window=6 if family in ("mistral", "gemma2") else None)
    assert check_layout(lm, "tree") == check_layout(lm, "flat") == check_layout(lm, "left") == ""


def test_probe_finds_leaks_and_wrong_positions(make_lm, monkeypatch):
    lm = make_lm("llama")
    own = type(lm.base.base_model).forward

    def conv(self, *args, **kwargs):  # a mixer that looks at its neighbour by index
        out = own(self, *args, **kwargs)
        h = out.last_hidden_state
        out.last_hidden_state = h + 1e-3 * torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        return out

    def whisper(self, *args, **kwargs):  # something of everything, too small for the numbers to show
        out = own(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + 1e-9 * out.last_hidden_state.mean(1, keepdim=True)
        return out

    monkeypatch.setattr(type(lm.base.base_model), "forward", whisper)
    assert "gradient" in check_layout(lm, "tree")
    monkeypatch.setattr(type(lm.base.base_model), "forward", conv)
    assert "differ" in check_layout(lm, "tree")
    assert richest_layout(lm)[0] == "rows" and "tree packing is not exact" in richest_layout(lm)[1][0]
    monkeypatch.undo()

    def no_positions(self, *args, position_ids=None, **kwargs):
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(lm.base.base_model), "forward", no_positions)
    assert "differ" in check_layout(lm, "tree")
