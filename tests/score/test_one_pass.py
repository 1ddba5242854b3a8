"""What is read through score/ is what a plain loop over single rows computes, in every layout."""

import asyncio
import math
import random

import numpy as np
import pytest
import torch

from trailmark.engines.local import LocalEngine
from trailmark.errors import DataError, ModelError
from trailmark.models import forward
from trailmark.models.attention import Layout
from trailmark.models.layout import FIXED_ROWS, lay_out, micro_batches
from trailmark.objectives.classify import Classify
from trailmark.score.classes import class_numbers, over_steps, step_scores
from trailmark.score.likelihood import Baselines, Gold, gain_reward, gold_row, improvement, likelihoods
from trailmark.score.values import HeadValues, Line
from trailmark.types import Episode, Sample, SamplingLaw, Scored, Task, Turn

SHAPES = ("tree", "flat", "rows")


@pytest.fixture
def lm(make_lm):
    made = make_lm("gpt2", dtype=torch.float64)
    made.add_head("value", zero=False)
    made.add_head("step", 4, zero=False, seed=1)
    return made


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def alone(lm, row):
    """Hidden states and log-probs of one row, by nothing but the model."""
    ids = torch.tensor([row])
    pos = torch.arange(len(row))[None]
    hidden = lm.hidden(ids, Layout(torch.full_like(ids, len(row)), pos), pos)[0]
    return hidden, lm.logits(hidden).log_softmax(-1)


def play(k, prompt, parts, law):
    turns, before = [], None
    for i, (given, written, steps) in enumerate(parts):
        turns.append(
            Turn("policy", prompt + given if i == 0 else given, written, law=law, continues=before, steps=steps)
        )
        before = i
    return Episode(f"e{k}", Task("t"), "g", tuple(turns), {"self": Scored(1.0)})


@pytest.fixture
def episodes():
    rng = random.Random(0)
    some = lambda a, b: tuple(rng.randrange(4, 200) for _ in range(rng.randrange(a, b)))
    prompt, out = some(20, 21), []
    for k in range(5):
        parts = []
        for _ in range(1 + k % 2):
            written = some(6, 12)
            parts.append((some(1, 5), written, ((0, 2), (2, 5), (5, len(written)))))
        law = SamplingLaw(0.7, allowed=tuple(range(4, 210))) if k == 3 else SamplingLaw()
        out.append(play(k, prompt, parts, law))
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("classes", [None, (2, 3), (0,), (0, 1, 2, 3)])
def test_steps(lm, episodes, shape, classes):
    notes = step_scores(lm, episodes, "step", classes, shape=shape)
    found = {(a.episode, a.turn): a.values for a in notes}
    for e in episodes:
        for i, turn in enumerate(e.turns):
            row = e.sequence(i)
            first = len(row) - len(turn.tokens)
            want = []
            for _, end in turn.steps:
                p = lm.heads["step"](alone(lm, row[: first + end])[0][-1]).softmax(-1)
                want.append(float(sum(p[c] for c in ((3,) if classes is None else classes))))
            assert found[e.id, i] == pytest.approx(want, abs=1e-9)


def test_reductions_by_hand():
    v = [0.5, 0.9, 0.2]
    assert over_steps(v, "product") == pytest.approx(0.09)
    assert over_steps(v, "last") == 0.2 and over_steps(v, "min") == 0.2
    assert over_steps(v, "geomean") == pytest.approx(0.09 ** (1 / 3)) and over_steps([0.0, 1.0], "geomean") == 0.0
    assert over_steps(v, "mean") == pytest.approx(1.6 / 3) and over_steps(v, "sum") == pytest.approx(1.6)
    with pytest.raises(ModelError, match="no step"):
        over_steps([], "product")
    with pytest.raises(ModelError, match="not negative"):
        over_steps([-1.0, 2.0], "geomean")
    logits = np.log([[0.1, 0.2, 0.3, 0.4]])
    assert class_numbers(logits, (2, 3)) == pytest.approx(0.7) and class_numbers(logits) == pytest.approx(0.4)


def test_the_head_that_classify_trains_is_the_one_that_is_read(make_lm, episodes):
    """If no head is named, it is the head of the objective. Older models have only `step`; then that is read."""
    lm = make_lm(dtype=torch.float64)
    lm.add_head("step", 4)
    torch.nn.init.normal_(lm.heads["step"].weight)
    assert step_scores(lm, episodes) == step_scores(lm, episodes, "step")
    assert HeadValues(lm, classes=(2, 3)).head == "step"
    lm.add_head(Classify().head, 4)
    torch.nn.init.normal_(lm.heads["classes"].weight)
    assert step_scores(lm, episodes) == step_scores(lm, episodes, "classes") != step_scores(lm, episodes, "step")
    lm.add_head("value", 1)
    assert HeadValues(lm, classes=(2, 3)).head == "classes" and HeadValues(lm).head == "value"


def test_classes_that_are_not_there(lm, episodes):
    for classes in ((4,), (-1,), (1, 1), ()):
        with pytest.raises(ModelError, match="classes 0 to 3"):
            step_scores(lm, episodes, "step", classes)
    with pytest.raises(ModelError, match="no head 'worth'"):
        step_scores(lm, episodes, "worth")
    assert step_scores(lm, [], "step") == []


@pytest.mark.parametrize("shape", [*SHAPES, "fixed"])
def test_values_of_a_search(lm, shape, monkeypatch):
    monkeypatch.setattr(lm, "sharing", "rows" if shape == "fixed" else shape)
    rng = random.Random(3)
    prompt = tuple(rng.randrange(4, 200) for _ in range(30))
    lines = [Line(prompt, tuple(rng.randrange(4, 200) for _ in range(k)), ends=(1, 3, k)) for k in (4, 5, 9, 40, 7)]
    scorer = HeadValues(lm, "step", "geomean", fixed=shape == "fixed", classes=(1, 3))
    found = asyncio.run(scorer.score(lines))
    for line, value in zip(lines, found):
        at = []
        for end in sorted({*line.ends, len(line.tokens)}):
            p = lm.heads["step"](alone(lm, prompt + line.tokens[:end])[0][-1]).softmax(-1)
            at.append(float(p[1] + p[3]))
        assert value == pytest.approx(math.prod(at) ** (1 / len(at)), abs=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_likelihoods(lm, shape):
    rng = random.Random(5)
    context = tuple(rng.randrange(4, 200) for _ in range(25))
    rows = []
    for k in range(6):
        tokens = context + tuple(rng.randrange(4, 200) for _ in range(5 + k))
        rows.append(Gold((*tokens, 7), len(context) + k % 3, len(tokens)))
    for row, found in zip(rows, likelihoods(lm, rows, shape)):
        logp = alone(lm, row.tokens[: row.end])[1]
        want = sum(float(logp[t - 1, row.tokens[t]]) for t in range(row.start, row.end))
        assert found.tokens == row.end - row.start and found.logp == pytest.approx(want, abs=1e-9)
        assert found.perplexity == pytest.approx(math.exp(-want / found.tokens), abs=1e-9 * found.perplexity)


def test_a_gold_text_behind_its_context(lm):
    tokenizer = lm.tokenizer
    plain = gold_row(tokenizer, "What is it? ", "a cat")
    head = tokenizer.encode("What is it? ")
    assert plain.tokens[: plain.start] == tuple(head) and plain.tokens[plain.end - 1] == tokenizer.eos_token_id
    assert tokenizer.decode(plain.tokens[plain.start : plain.end - 1]) == "a cat"
    assert gold_row(tokenizer, "What is it? ", "a cat", "text").end == plain.end - 1
    with pytest.raises(DataError, match="no tokens"):
        gold_row(tokenizer, "What is it? ", "", "text")
    with pytest.raises(DataError, match="something must precede"):
        likelihoods(lm, [Gold((1, 2), 0, 2)])


def test_the_improvement_of_vr_cli(lm, tmp_path):
    """Golden values of the definition: I = 100 (1 - PPL'/PPL), rewards at 0.05, 1 and 2 percent, bounds inclusive."""
    from trailmark.score.likelihood import Likelihood

    nats = lambda ppl: Likelihood(-math.log(ppl) * 4, 4)
    assert improvement(nats(20.0), nats(19.0)) == pytest.approx(5.0)
    assert improvement(nats(10.0), nats(11.0)) == pytest.approx(-10.0)
    got = [gain_reward(i) for i in (-3.0, 0.0499, 0.05, 0.999, 1.0, 1.99, 2.0, 50.0)]
    assert got == [0.0, 0.0, 0.5, 0.5, 0.9, 0.9, 1.0, 1.0]
    assert [gain_reward(i, "clipped") for i in (-3.0, 4.0)] == [0.0, 4.0]
    assert [gain_reward(i, "binary") for i in (-0.1, 0.0, 0.1)] == [0.0, 0.0, 1.0]
    assert gain_reward(-7.0, "linear") == -0.07
    assert gain_reward(improvement(nats(20.0), nats(19.0)), "nll") == pytest.approx(math.log(20 / 19))
    assert gain_reward(6.0, "stepped", ((5.0, 0.5), (10.0, 1.0))) == 0.5


def test_a_baseline_is_computed_once(lm, make_lm, tmp_path):
    rows = [gold_row(lm.tokenizer, f"Question {k}. ", "the answer") for k in (1, 2, 1)]
    first = Baselines(lm, tmp_path / "baseline.jsonl")
    found = first.get(rows)
    assert first.computed == 2 and found[0] == found[2] != found[1] and found == likelihoods(lm, rows)
    again = Baselines(lm, tmp_path / "baseline.jsonl")
    assert again.get(rows) == found and again.computed == 0
    other = Baselines(make_lm("gpt2", dtype=torch.float64, seed=1), tmp_path / "baseline.jsonl")
    assert other.get(rows[:1]) != found[:1] and other.computed == 1
    (tmp_path / "baseline.jsonl").write_bytes((tmp_path / "baseline.jsonl").read_bytes()[:-9])  # killed while it wrote
    cut = Baselines(lm, tmp_path / "baseline.jsonl")
    assert cut.get(rows) == found and cut.computed == 0 and len(Baselines(lm, tmp_path / "baseline.jsonl").cache) == 2
    (tmp_path / "baseline.jsonl").write_text('{"key": "a", "logp": 1}\nnot json\n')
    with pytest.raises(DataError, match=r"baseline.jsonl:2"):
        Baselines(lm, tmp_path / "baseline.jsonl")


def test_rows_of_an_engine_share_their_prefix(lm, monkeypatch):
    computed = []
    own = forward.view

    def counted(models, packed, *rest, **more):
        computed.append(packed.computed)
        return own(models, packed, *rest, **more)

    monkeypatch.setattr(forward, "view", counted)
    rng = random.Random(7)
    prefix = [rng.randrange(4, 200) for _ in range(50)]
    rows = [prefix + [rng.randrange(4, 200) for _ in range(4)] for _ in range(8)]
    engine = LocalEngine(lm, 2, 128)
    together = engine.score_rows(rows, [0, 1, 50, 51, 1, 1, 1, 1])
    assert sum(computed) < 8 * 54 // 2  # the prefix once, not eight times
    for row, start, got in zip(rows, [0, 1, 50, 51, 1, 1, 1, 1], together):
        logp = alone(lm, row)[1]
        want = [0.0] * (start == 0) + [float(logp[t - 1, row[t]]) for t in range(max(start, 1), len(row))]
        assert got == pytest.approx(want, abs=1e-9)
        assert engine.score_rows([row], [start])[0] == pytest.approx(want, abs=1e-9)
    for (logp, rank, best), t in zip(engine.score_top(rows[0], 3), range(1, 54)):
        row = alone(lm, rows[0])[1][t - 1]
        assert logp == pytest.approx(float(row[rows[0][t]]), abs=1e-9)
        assert rank == 1 + int((row > row[rows[0][t]]).sum())
        assert [i for i, _ in best] == row.topk(3).indices.tolist()
        assert [p for _, p in best] == pytest.approx(row.topk(3).values.tolist(), abs=1e-9)


def test_constant_shapes_say_nothing_about_neighbours(make_lm):
    """Bitwise, in float32: a row's value is the same alone, among others, in any place."""
    lm = make_lm("llama")
    lm.add_head("step", 4, zero=False)
    rng = random.Random(2)
    rows = [tuple(rng.randrange(200) for _ in range(rng.randrange(1, 90))) for _ in range(13)]
    values = HeadValues(lm, classes=(1, 2))
    together = asyncio.run(values.values(rows))
    assert together == [asyncio.run(values.values([row]))[0] for row in rows]
    assert together[::-1] == asyncio.run(values.values(rows[::-1]))
    packs = micro_batches([Sample(np.array(row)) for row in rows], 1, "fixed")
    assert {p.ids.shape[0] for p in packs} == {FIXED_ROWS}
    assert all(p.constant and p.ids.shape[1] % 32 == 0 for p in packs)
    assert sorted(tuple(s.tokens) for p in packs for s in p.samples) == sorted(rows)
    assert not lay_out([Sample(np.array([1, 2]))], "rows").constant
