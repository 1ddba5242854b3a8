"""What slots keep over turns: several samples, stop texts, labels, clients that go. The counts are exact, and the
tokens are those of an engine that computes everything."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trailmark.engines import decoder, local
from trailmark.engines.base import EngineError, Request, publish, run
from trailmark.engines.local import LocalEngine
from trailmark.engines.prefill import CPU_PASS, GPU_PREFILL, WORTH, Prefiller, cpu_parts
from trailmark.engines.prefix_cache import LEAST, PrefixCache
from trailmark.models.attention import Slots
from trailmark.types import SamplingLaw

START = tuple(3 + (7 * j) % 50 for j in range(70))


@pytest.fixture
def pair(make_lm, monkeypatch):
    """Two engines of one model on the path of a GPU: the first reuses slots, the second never does."""
    monkeypatch.setattr(local, "AHEAD", True)
    lm = make_lm("llama", dtype=torch.float64)
    engines = [LocalEngine(lm, 8, 256, fixed=False) for _ in range(2)]
    engines[1].decoder.reuse = False
    return engines


def talk(engine, turns, follow, **asked):
    """One conversation. The next prompt goes on from sample `follow(turn)`. Returns all prompts and answers."""
    prompt, prompts, answers = START, [], []
    for turn in range(turns):
        (done,) = run(engine, [Request(prompt, key=f"turn {turn}", **asked)])
        prompts.append(prompt)
        answers.append(done)
        prompt = (*prompt, *done[follow(turn)].tokens, *((5 * turn + j) % 40 + 3 for j in range(4)))
    return prompts, answers


def same(a, b):
    for x, y in zip(a, b, strict=True):
        for p, q in zip(x, y, strict=True):
            assert (p.tokens, p.text, p.stop) == (q.tokens, q.text, q.stop)
            assert p.logp == pytest.approx(q.logp, abs=1e-10) and p.logq == pytest.approx(q.logq, abs=1e-10)


@pytest.mark.parametrize("follow", [lambda t: 0, lambda t: 2, lambda t: t % 3], ids=["first", "last", "each"])
def test_several_samples_go_on_from_the_one_that_was_chosen(pair, follow):
    engine, plain = pair
    prompts, got = talk(engine, 4, follow, n=3, max_tokens=5)
    same(got, talk(plain, 4, follow, n=3, max_tokens=5)[1])
    # The slot of the chosen sample holds its prompt and all of its five tokens but the last.
    assert engine.counts.reused == sum(len(p) + 4 for p in prompts[:-1])
    assert engine.counts.computed == len(START) + 3 * (1 + 4) and plain.counts.computed == sum(map(len, prompts))
    assert engine.counts.prefills == plain.counts.prefills == 4


def test_stop_texts_and_stop_tokens_over_turns(pair):
    engine, plain = pair
    asked = dict(n=2, max_tokens=40, stop_strings=("e", "1", "A", " "), stop_ids=(9,))
    prompts, got = talk(engine, 5, lambda t: t % 2, **asked)
    same(got, talk(plain, 5, lambda t: t % 2, **asked)[1])
    assert any(c.stop == "stopped" and len(c.tokens) > 1 for turn in got for c in turn)
    assert engine.counts.reused > 0 and engine.counts.computed + engine.counts.reused == sum(map(len, prompts))


def test_decisions_among_labels_keep_their_prompts(pair):
    """A label ends with the first token, so its sample never has a slot. The prompt is kept all the same."""
    engine, plain = pair
    law = SamplingLaw(allowed=(5, 6, 7))
    prompts, got = talk(engine, 4, lambda t: 0, n=1, max_tokens=1, law=law)
    same(got, talk(plain, 4, lambda t: 0, n=1, max_tokens=1, law=law)[1])
    assert engine.counts.reused == sum(map(len, prompts[:-1])) and engine.counts.computed == len(START) + 3 * 5
    assert {c.tokens[0] for turn in got for c in turn} <= {5, 6, 7}


@pytest.mark.parametrize("size", [70, 240, 250])
@pytest.mark.parametrize("labels", [True, False])
def test_a_slot_that_waits_while_others_write_keeps_what_it_holds(pair, size, labels):
    """A step writes into every slot. An idle one writes behind what it holds, up to the last column and no further."""
    prompt = tuple(3 + (11 * j) % 50 for j in range(size))
    law, most = (SamplingLaw(allowed=(5, 6, 7)), 1) if labels else (SamplingLaw(), 3)
    answers = []
    for engine in pair:
        (first,) = run(engine, [Request(prompt, law, 1, most, key="first")])
        (other,) = run(engine, [Request(START[:9], max_tokens=60, n=2, key="other")])
        longer = (*prompt, *first[0].tokens, 8)
        answers.append([first, other, *run(engine, [Request(longer, law, 1, most, key="second")])])
    same(*answers)
    assert pair[0].counts.reused == size + most - 1 and pair[1].counts.reused == 0


def test_a_pass_does_not_write_over_what_the_next_pass_reads(make_lm, monkeypatch):
    """Twenty conversations of labels in twenty slots. The second prompts need two passes, and the first of them keeps
    sixteen prompts: not in the slots that the second goes on from."""
    monkeypatch.setattr(local, "AHEAD", True)
    lm, law = make_lm("llama", dtype=torch.float64), SamplingLaw(allowed=(5, 6, 7))
    engines = [LocalEngine(lm, 20, 256, fixed=False, prefill_rows=32) for _ in range(2)]
    engines[1].decoder.reuse = False
    prompts = [tuple(3 + (j * (k + 2)) % 50 for j in range(70)) for k in range(20)]
    answers = []
    for engine in engines:
        first = run(engine, [Request(p, law, max_tokens=1, key=f"first {k}") for k, p in enumerate(prompts)])
        longer = [(*p, *a[0].tokens, *range(3, 6 if k < 4 else 43)) for k, (p, a) in enumerate(zip(prompts, first))]
        asked = [Request(p, law, max_tokens=1, key=f"second {k}") for k, p in enumerate(longer)]
        answers.append([*first, *run(engine, asked)])
    assert engines[0].counts.reused == 20 * 70
    same(*answers)


def test_prompts_of_several_passes_are_all_kept(pair):
    """Two prompts are one pass. Each pass keeps its prompts in slots of its own."""
    engine, _ = pair
    engine.prefiller.given_rows = 2
    prompts = [tuple(3 + (j * (k + 2)) % 50 for j in range(70)) for k in range(8)]
    for more in ((), (8, 9)):
        run(engine, [Request((*p, *more), SamplingLaw(allowed=(5, 6)), max_tokens=1) for p in prompts])
    assert engine.counts.reused == 8 * 70


def test_short_prompts_are_not_worth_keeping(pair):
    engine, _ = pair
    short = START[: decoder.WORTH_KEEPING - 1]
    for prompt in (short, (*short, 5, 6)):
        run(engine, [Request(prompt, SamplingLaw(allowed=(5, 6)), max_tokens=1)])
    assert engine.counts.reused == 0
    run(engine, [Request((*short, 5, 6, 7), SamplingLaw(allowed=(5, 6)), max_tokens=1)])
    assert engine.counts.reused == len(short) + 2  # the second was long enough


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_client_that_goes_leaves_a_slot_that_can_be_used(pair, after):
    engine, plain = pair
    heard = []

    async def leaves():
        def listen(written):
            heard.append(written.token)
            if len(heard) == after:
                task.cancel()

        task = asyncio.create_task(engine.sample(Request(START, max_tokens=60, key="gone"), listen))
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.scheduler._task is not None and not engine.scheduler._task.done():
            await asyncio.sleep(0)

    asyncio.run(leaves())
    assert after <= len(heard) < 60 and engine.decoder.running == [None] * 8
    longer = (*START, *heard, 8, 9)
    asked = [Request(longer, n=2, max_tokens=6, key="next")]
    same(run(engine, asked), run(plain, asked))
    counts = engine.counts
    assert counts.reused >= (len(START) if after > 1 else 0) and counts.computed + counts.reused == 70 + len(longer)


def test_weights_may_not_change_during_a_conversation_and_later_nothing_is_left(pair):
    engine, _ = pair

    async def during():
        task = asyncio.create_task(engine.sample(Request(START, max_tokens=9)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError) as found:
            await engine.publish(1)
        assert str(found.value) == "weights cannot change while sampling is in progress"
        return await task

    (done,) = asyncio.run(during())
    assert engine.version == 0 and engine.decoder.prefixes.find((*START, *done.tokens)) is not None
    publish(engine, 1)
    assert engine.version == 1 and engine.decoder.prefixes.find((*START, *done.tokens)) is None


def test_what_is_found_is_what_a_search_of_all_beginnings_finds():
    draw = np.random.default_rng(0)
    kept, held = PrefixCache(), {}  # beginning -> the first slot that holds it
    base, hits = draw.integers(0, 3, 90), 0
    for _ in range(300):
        row = int(draw.integers(6))
        held = {p: r for p, r in held.items() if r != row}
        if draw.random() < 0.2:
            kept.drop(row)
        else:
            size = int(draw.integers(20, 90))
            tokens = base[:size].copy()
            tokens[draw.integers(size)] += int(draw.random() < 0.3)
            ends = [int(e) for e in draw.integers(1, size + 1, 2)]
            kept.add(row, tokens.tolist(), ends)
            held = {tuple(tokens[:e].tolist()): row for e in ends if e >= LEAST} | held
        prompt = tuple(base[: int(draw.integers(30, 91))].tolist())
        fits = [p for p in held if len(p) < len(prompt) and prompt[: len(p)] == p]
        best = max(fits, key=len, default=None)
        assert kept.find(prompt) == (None if best is None else (held[best], len(best)))
        hits += best is not None
    assert 100 < hits < 300
    kept.clear()
    assert kept.find(tuple(base.tolist())) is None and kept._lengths == {}


# --- passes -------------------------------------------------------------------------------------------------------


def on(device, fixed=False, rows=None, bucket=128):
    return Prefiller(SimpleNamespace(device=torch.device(device)), fixed, not fixed and device == "cuda", bucket, rows)


def prompts_of(*lengths):
    return [(k,) * n for k, n in enumerate(lengths)]


def sizes(parts):
    return [(width, [len(p) for p in part]) for width, part in parts]


def test_a_gpu_takes_the_longest_first_and_leaves_much_shorter_ones():
    full = GPU_PREFILL // 8192
    many = prompts_of(*[8192] * (full + 2), 100, 90)
    assert sizes(on("cuda").parts(many)) == [(8192, [8192] * full), (8192, [8192, 8192]), (128, [100, 90])]
    enough = WORTH // 4096  # rows after which a pass is large enough to leave the others
    some = prompts_of(*[4096] * enough, 3100, 3072)
    assert sizes(on("cuda").parts(some)) == [(4096, [*[4096] * enough, 3100]), (3072, [3072])]
    assert sizes(on("cuda").parts(prompts_of(300, 10, 20))) == [(384, [300, 20, 10])]


def test_other_passes_have_one_width_and_a_number_of_rows_that_depends_on_it():
    assert sizes(on("cpu", True, bucket=32).parts(prompts_of(5, 40, 32, 33, 7, 1, 2))) == [
        (32, [5, 32, 7, 1]), (32, [2]), (64, [40, 33])
    ]  # fmt: skip
    assert sizes(on("cpu", True, 2, 32).parts(prompts_of(5, 6, 7))) == [(32, [5, 6]), (32, [7])]
    fixed, free = on("cuda", True), on("cuda")
    assert [fixed.rows(w) for w in (128, 1024, 4096, 65536)] == [64, 8, 4, 4]
    assert [free.rows(w) for w in (128, 1024, 4096, 65536)] == [256, 64, 16, 4]


@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_is_in_one_pass(seed):
    draw = np.random.default_rng(seed)
    prompts = prompts_of(*(int(n) for n in draw.integers(1, 3000, 40)))
    for parts in (on("cuda").parts(prompts), on("cuda", True).parts(prompts), cpu_parts(prompts)):
        seen = []
        for width, part in parts:
            assert max(map(len, part)) <= width
            seen += part
        assert sorted(seen) == sorted(prompts)
    for width, part in cpu_parts(prompts):
        assert sum(width - len(p) for p in part) <= CPU_PASS or len(part) == 1
    held = {p: (0, int(draw.integers(0, len(p)))) for p in prompts}
    rest = [[len(p) - held[p][1] for p in part] for part in on("cuda").extension_parts(held)]
    flat = [n for part in rest for n in part]
    assert flat == sorted((len(p) - n for p, (_, n) in held.items()), reverse=True)
    assert all(4 * n > part[0] for part in rest for n in part[16:])


BORDERS = (1, 7, 8, 9, 15, 16, 17, 24)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("chunk", [1, 8, 23])
def test_chunks_at_borders(make_lm, family, chunk):
    lm = make_lm(family, dtype=torch.float64)
    draw = np.random.default_rng(0)
    part = [tuple(int(t) for t in draw.integers(3, 60, n)) for n in BORDERS]
    made = Prefiller(lm, False, False, 8, chunk=chunk)
    with torch.no_grad():
        layout, logits = made.compute(part, 24, chunked=True)
        whole, want = made.compute(part, 24, chunked=False)
        alone = [lm.model(torch.tensor([p])).logits[0, -1] for p in part]
    assert torch.allclose(logits, want, atol=1e-10) and torch.allclose(logits, torch.stack(alone), atol=1e-10)
    assert layout.kept.keys() == whole.kept.keys() and len(layout.kept) > 0
    for n, both in layout.kept.items():
        for a, b in zip(both, whole.kept[n], strict=True):
            for r, size in enumerate(BORDERS):
                assert torch.allclose(a[r, :, :size], b[r, :, :size], atol=1e-10)


def test_prompts_that_go_on_from_slots_are_the_whole_prompts(make_lm):
    lm = make_lm("llama", dtype=torch.float64)
    draw = np.random.default_rng(1)
    part = [tuple(int(t) for t in draw.integers(3, 60, n)) for n in (20, 12, 31, 9)]
    held = [(2, 19), (0, 1), (3, 16), (1, 8)]
    made = Prefiller(lm, False, False, 8)
    cache = Slots(5, 32)
    with torch.no_grad():
        whole, want = made.compute(part, 32, chunked=False)
        cache.write([slot for slot, _ in held], whole.kept, [0, 1, 2, 3])
        for slot, n in held:  # what stands behind a beginning must not be read
            for store in (cache.keys, cache.values):
                for layer in store.values():
                    layer[slot, :, n:] = 1e6
        layout, logits = made.extend(part, held, cache)
    assert torch.allclose(logits, want[:4], atol=1e-10)
    for n, both in layout.kept.items():
        for a, b in zip(both, whole.kept[n], strict=True):
            for r, prompt in enumerate(part):
                assert torch.allclose(a[r, :, : len(prompt)], b[r, :, : len(prompt)], atol=1e-10)
