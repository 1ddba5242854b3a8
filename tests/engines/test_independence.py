"""float32, one thread, fixed slots: bitwise over slot, neighbours and arrival order. float64: the same tokens at any
batch size, log-probs to 1e-9. Greedy is what `model.generate` writes."""

import asyncio

import numpy as np
import pytest
import torch

from trailmark.engines import drawing, prefill
from trailmark.engines.base import EngineError, Request, publish, run
from trailmark.engines.local import LocalEngine
from trailmark.engines.prefill import cpu_parts
from trailmark.types import SamplingLaw

FAMILIES = ["gpt2", "llama", "qwen2", "mistral", "gemma", "gemma2"]


def requests(seed=0, lengths=(3, 17, 33, 40, 5, 31, 32, 64), n=2, max_tokens=24, vocab=250):
    draw = np.random.default_rng(seed)
    laws = [
        SamplingLaw(),
        SamplingLaw(temperature=0.7, top_p=0.9),
        SamplingLaw(top_k=5),
        SamplingLaw(allowed=(5, 6, 7, 8)),
    ]
    return [
        Request(
            tuple(int(t) for t in draw.integers(0, vocab, k)),
            laws[i % len(laws)],
            n,
            max_tokens - 2 * i,
            key=f"r{i}",
            seed=seed,
        )
        for i, k in enumerate(lengths)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_bitwise_over_slot_neighbours_and_arrival(make_lm, family):
    lm = make_lm(family, window=16 if family in ("mistral", "gemma2") else None)
    asked = requests()
    together = run(LocalEngine(lm, slots=8, max_len=128), asked)
    backwards = run(LocalEngine(lm, slots=8, max_len=128), asked[::-1])[::-1]
    alone = [run(LocalEngine(lm, slots=8, max_len=128), [r])[0] for r in asked]
    reused = LocalEngine(lm, slots=8, max_len=128)
    run(reused, requests(seed=9))
    again = run(reused, asked)
    assert together == backwards == alone == again  # tokens, texts and both log-probs, bit for bit


def test_late_arrivals_change_nothing(make_lm):
    lm = make_lm("llama")
    asked = requests()
    engine = LocalEngine(lm, slots=4, max_len=128)

    async def trickle():
        async def later(k, r):
            for _ in range(3 * k):
                await asyncio.sleep(0)
            return await engine.sample(r)

        return list(await asyncio.gather(*(later(k, r) for k, r in enumerate(asked))))

    assert asyncio.run(trickle()) == run(LocalEngine(lm, slots=4, max_len=128), asked)


@pytest.mark.parametrize(("family", "tol"), [("gpt2", 1e-9), ("llama", 1e-6)])
def test_any_batch_size_in_float64(make_lm, family, tol):
    """Llama's norms compute in float32 whatever the weights are, which bounds what float64 can show there."""
    lm = make_lm(family, dtype=torch.float64)
    asked = requests(n=3)
    want = run(LocalEngine(lm, slots=8, max_len=128), asked)
    cases = [(1, True, 1), (3, True, 2), (64, True, 8), (5, False, 3), (16, False, 16), (5, False, None)]
    for slots, fixed, rows in cases:
        got = run(LocalEngine(lm, slots=slots, max_len=128, fixed=fixed, prefill_rows=rows), asked)
        for a, b in zip(sum(want, []), sum(got, [])):
            assert a.tokens == b.tokens and a.text == b.text and a.stop == b.stop
            assert np.allclose(a.logp, b.logp, rtol=0, atol=tol) and np.allclose(a.logq, b.logq, rtol=0, atol=tol)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_generate_writes(make_lm, family):
    lm = make_lm(family, window=16 if family in ("mistral", "gemma2") else None)
    asked = [Request(r.prompt, SamplingLaw(temperature=0), 1, 24) for r in requests()]
    for request, (mine,) in zip(asked, run(LocalEngine(lm, slots=4, max_len=128), asked)):
        ids = torch.tensor([request.prompt])
        theirs = lm.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert list(mine.tokens) == theirs[0, len(request.prompt) :].tolist()
        assert all(q == 0.0 for q in mine.logq)


@pytest.mark.parametrize("family", FAMILIES)
def test_free_shapes_on_a_cpu_write_the_same(make_lm, family):
    """Prompts of other lengths share a pass without a mask, unless a window or a cap needs one."""
    lm = make_lm(family, window=16 if family in ("mistral", "gemma2") else None)
    asked = [Request(r.prompt, SamplingLaw(temperature=0), 1, 12) for r in requests()]
    want, got = (run(LocalEngine(lm, slots=4, max_len=128, fixed=fixed), asked) for fixed in (True, False))
    for (a,), (b,) in zip(want, got):
        assert a.tokens == b.tokens and np.allclose(a.logp, b.logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_samples_that_move_to_other_slots_write_the_same(make_lm, family, monkeypatch):
    """With free shapes a CPU closes the gaps that ended samples leave: only slots in use are computed."""
    lm = make_lm(family, dtype=torch.float64, window=16 if family == "gemma2" else None)
    draw = np.random.default_rng(4)
    asked = [
        Request(tuple(draw.integers(0, 250, 3 + 5 * i).tolist()), n=2, max_tokens=2 + 7 * (i * 5 % 8), key=f"r{i}")
        for i in range(8)
    ]
    moved, computed = [], []
    engine = LocalEngine(lm, slots=16, max_len=128, fixed=False)
    decoder = engine.decoder
    move, step = decoder.cache.move, decoder._next
    monkeypatch.setattr(decoder.cache, "move", lambda a, b, n: (moved.append((a, b)), move(a, b, n)))
    monkeypatch.setattr(decoder, "_next", lambda index, *a: (computed.append(len(index)), step(index, *a))[1])
    got = run(engine, asked)
    want = [run(LocalEngine(lm, slots=2, max_len=128), [r])[0] for r in asked]
    for a, b in zip(sum(want, []), sum(got, [])):
        assert a.tokens == b.tokens
        assert np.allclose(a.logp, b.logp, rtol=0, atol=1e-6)
    assert moved and all(min(a) > max(b) for a, b in moved)
    assert computed[0] == 16 and computed[-1] == 2 and computed == sorted(computed, reverse=True)


def test_noise_of_several_tokens_at_once_is_that_of_one_at_a_time(make_lm, monkeypatch):
    lm, asked = make_lm("llama"), requests()
    at_once = run(LocalEngine(lm, slots=8, max_len=128), asked)
    monkeypatch.setattr(drawing, "NOISE_AHEAD", 1)
    assert run(LocalEngine(lm, slots=8, max_len=128), asked) == at_once


def test_which_prompts_a_cpu_computes_together():
    """The padding of 100, 90, 60 and 40 is 110 tokens: one pass. Ten rows of 100 tokens, or 17 of 60, fill a pass."""
    prompts = [(1,) * n for n in (60, 100, 40, 90)]
    assert [(w, [len(p) for p in part]) for w, part in cpu_parts(prompts)] == [(100, [100, 90, 60, 40])]
    many = [(k,) * n for k in range(40) for n in (60, 100)]
    parts = list(cpu_parts(many))
    assert sorted(p for _, part in parts for p in part) == sorted(many)
    assert [(w, len(part)) for w, part in parts] == [(100, 10)] * 4 + [(60, 17), (60, 17), (60, 6)]
    for width, part in parts:
        assert width == max(map(len, part)) and width * len(part) <= 1024
        assert sum(width - len(p) for p in part) <= 256
    assert list(cpu_parts([(1,) * 5000])) == [(5000, [(1,) * 5000])]


def test_one_prefill_per_distinct_prompt(make_lm):
    engine = LocalEngine(make_lm("gpt2"), slots=4, max_len=128)
    run(engine, [Request((1, 2, 3), n=9, max_tokens=4, key=str(k)) for k in range(5)] + [Request((4, 5), max_tokens=4)])
    assert engine.counts.prefills == 2 and engine.counts.decoded == 46 * 4
    keys = [c.tokens for c in sum(run(engine, [Request((1, 2, 3), n=20, max_tokens=4)]), [])]
    assert len(set(keys)) == 20  # samples of one request are drawn apart


def test_scores_are_what_was_drawn(make_lm):
    lm = make_lm("gpt2", dtype=torch.float64)
    engine = LocalEngine(lm, slots=4, max_len=128)
    for request, done in zip(requests(), run(engine, requests())):
        for c in done:
            scored = engine.score_rows([request.prompt + c.tokens], [len(request.prompt)])[0]
            assert scored == pytest.approx(list(c.logp), abs=1e-12)
            if request.law.plain:
                assert c.logp == c.logq
            if request.law.allowed:
                assert set(c.tokens) <= set(request.law.allowed)


def test_stopping(make_lm):
    lm = make_lm("gpt2")
    engine, tok = LocalEngine(lm, slots=4, max_len=64), lm.tokenizer
    free = run(engine, [Request((1, 2, 3), max_tokens=40, key="k")])[0][0]
    third = free.tokens[2]
    first = free.tokens.index(third)
    by_id = run(engine, [Request((1, 2, 3), max_tokens=40, key="k", stop_ids=(third,))])[0][0]
    assert (
        by_id.tokens == free.tokens[: first + 1] and by_id.stop == "stopped"
    )  # the stopping token is kept among the tokens
    assert by_id.text == tok.decode(free.tokens[:first])
    held = run(engine, [Request((1, 2, 3), SamplingLaw(min_tokens=9, stop_ids=(third,)), 1, 40, (third,), key="k")])[0][
        0
    ]
    assert len(held.tokens) >= 10 - (held.stop == "length") and third not in held.tokens[:9]
    letters = SamplingLaw(allowed=tuple(tok.encode("ab")))
    text = run(engine, [Request((1,), letters, 1, 40, key="t")])[0][0].text
    cut = run(engine, [Request((1,), letters, 1, 40, (), ("ba",), key="t")])[0][0]
    assert cut.text == text[: text.index("ba")] and tok.decode(cut.tokens) == cut.text + "ba"
    assert cut.stop == "stop_string"
    full = run(engine, [Request(tuple(range(60)), max_tokens=40)])[0][0]
    assert len(full.tokens) == 4 and full.stop == "context_full" and full.cut_off


def test_requests_that_cannot_be_served(make_lm):
    engine = LocalEngine(make_lm("gpt2"), slots=4, max_len=16)
    with pytest.raises(EngineError, match="17 tokens and 'tiny-gpt2' holds 16"):
        run(engine, [Request(tuple(range(17)))])
    with pytest.raises(EngineError, match="shorten it or raise engine.max_len$"):
        run(engine, [Request(tuple(range(17)))])
    short = LocalEngine(make_lm("gpt2", context=16), slots=4, max_len=64)  # here a longer engine would not help
    with pytest.raises(EngineError, match="17 tokens .* holds 16: shorten it or use a model with a longer context$"):
        run(short, [Request(tuple(range(17)))])
    with pytest.raises(EngineError, match="empty prompt"):
        run(engine, [Request(())])
    with pytest.raises(EngineError, match="token 100000"):
        run(engine, [Request((100_000,))])
    broken, engine.prefiller.compute = engine.prefiller.compute, lambda *a, **_: 1 / 0
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        run(engine, [Request((1, 2)), Request((3,))])
    engine.prefiller.compute = broken
    assert run(engine, [Request((1, 2), max_tokens=2)])[0][0].stop == "length"  # the engine still works


def test_one_bad_request_harms_no_other(make_lm):
    engine = LocalEngine(make_lm("gpt2"), slots=4, max_len=64)
    bad = [
        (Request((1,), SamplingLaw(allowed=(999,))), "among 0 to 259"),
        (Request((1,), n=0), "at least 1"),
        (Request((1,), max_tokens=0), "at least 1"),
        (Request((1,), SamplingLaw(min_tokens=5), stop_ids=(3,)), "must list the stopping tokens"),
    ]

    async def together():
        good = [engine.sample(Request((1, 2), max_tokens=9, key=str(k))) for k in range(3)]
        return await asyncio.gather(*good, *(engine.sample(r) for r, _ in bad), return_exceptions=True)

    done = asyncio.run(together())
    assert all(len(d[0].tokens) == 9 for d in done[:3])
    for problem, (_, says) in zip(done[3:], bad):
        assert isinstance(problem, EngineError) and says in str(problem)
    publish(engine, 1)


def test_callers_that_go_away_free_their_slots(make_lm):
    engine = LocalEngine(make_lm("gpt2"), slots=4, max_len=512)

    async def leave():
        task = asyncio.create_task(engine.sample(Request((1, 2), n=8, max_tokens=500)))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        return await engine.sample(Request((3,), max_tokens=3))

    assert len(asyncio.run(leave())[0].tokens) == 3
    assert engine.counts.decoded < 100
    assert len(run(engine, [Request((1, 2), max_tokens=4)])[0][0].tokens) == 4  # also after its event loop has ended
    with pytest.raises(EngineError):
        run(engine, [Request((1, 2), max_tokens=400), Request(tuple(range(200)) * 3)])
    publish(engine, 2)


def test_stop_strings_of_many_bytes(make_lm):
    lm = make_lm("gpt2")
    stop = "完了完了完了"
    word = lm.tokenizer.encode(stop)

    def draw(logits, samples):
        for sample in samples:
            if sample is not None:
                sample.add(word[len(sample.tokens) % len(word)], 0.0, 0.0)

    engine = LocalEngine(lm, 4, 128)
    engine.decoder.drawer.draw = draw
    done = run(engine, [Request((1,), max_tokens=60, stop_strings=(stop,))])[0][0]
    assert done.stop == "stop_string" and done.text == "" and len(done.tokens) == len(word)


def test_free_shapes_on_a_gpu_fill_it_whatever_the_lengths(make_lm):
    """Which rows are computed together if a launch costs more than padding. The rule needs no GPU."""
    engine = LocalEngine(make_lm(), slots=2, max_len=128, fixed=False, prefill_rows=3)
    prompts = [tuple(range(1, n + 1)) for n in (5, 70, 33, 6, 40, 31, 2)]
    by_width = [(w, [len(p) for p in part]) for w, part in engine.prefiller.parts(prompts)]
    assert by_width == [(32, [5, 6, 31]), (32, [2]), (96, [70]), (64, [33, 40])]
    engine.prefiller.free = True
    together = [(w, [len(p) for p in part]) for w, part in engine.prefiller.parts(prompts)]
    assert together == [(96, [70, 40, 33]), (32, [31, 6, 5]), (32, [2])]


def test_much_shorter_prompts_have_a_pass_of_their_own_once_one_is_worth_it(make_lm, monkeypatch):
    engine = LocalEngine(make_lm(), slots=2, max_len=128, fixed=False, prefill_rows=9)
    engine.prefiller.free = True
    prompts = [tuple(range(1, n + 1)) for n in (120, 100, 97, 96, 64, 60, 30, 20)]
    lengths = lambda: [(w, [len(p) for p in part]) for w, part in engine.prefiller.parts(prompts)]
    assert lengths() == [(128, [120, 100, 97, 96, 64, 60, 30, 20])]  # little work: one launch
    monkeypatch.setattr(prefill, "WORTH", 2 * 128)
    assert lengths() == [(128, [120, 100, 97]), (96, [96, 64, 60]), (32, [30, 20])]


def test_a_prefill_waits_for_more_prompts_and_changes_no_token(make_lm):
    lm = make_lm()
    asked = [Request(tuple(range(1, 2 + k)), max_tokens=2 + k % 5, key=str(k)) for k in range(23)]
    plain, free = LocalEngine(lm, slots=16, max_len=64), LocalEngine(lm, slots=16, max_len=64, fixed=False)
    free.prefiller.free = True
    passes = []
    scheduler, prefill = free.scheduler, free.scheduler.prefill
    scheduler.prefill = lambda: (passes.append(len(scheduler.waiting)), prefill())

    async def one_after_the_other(engine):
        tasks = []
        for request in asked:
            tasks.append(asyncio.create_task(engine.sample(request)))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    expected, found = asyncio.run(one_after_the_other(plain)), asyncio.run(one_after_the_other(free))
    assert [c[0].tokens for c in found] == [c[0].tokens for c in expected]
    assert max(passes) >= 4 and len(passes) < len(asked) // 2
