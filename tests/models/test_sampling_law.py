"""The sampling law by brute force, and the noise that draws from it: exact where it can be, else chi-square.

Every draw here is a function of fixed keys, so a p-value is a constant and cannot flake."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chi2_contingency

from trailmark.engines.base import draw_key
from trailmark.models import sampling
from trailmark.models.forward import _number
from trailmark.models.readout import Readout
from trailmark.models.sampling import NEVER, entropy, gumbel, law_logits, working
from trailmark.types import SamplingLaw

VOCAB = 9
rng = np.random.default_rng(21)
LOGITS = rng.normal(scale=1.7, size=(40, VOCAB))


def brute(z, law, written):
    """The law's distribution of one row, in the order of `SamplingLaw`'s docstring."""
    scores = {v: float(z[v]) for v in range(len(z))}
    if law.allowed is not None:
        scores = {v: x for v, x in scores.items() if v in law.allowed}
    if written < law.min_tokens:
        scores = {v: x for v, x in scores.items() if v not in law.stop_ids}
    if law.temperature == 0:
        best = max(scores, key=lambda v: (scores[v], -v))
        return np.eye(len(z))[best]
    scores = {v: x / law.temperature for v, x in scores.items()}
    order = sorted(scores, key=lambda v: -scores[v])
    if law.top_k:
        order = order[: law.top_k]
    top = scores[order[0]]
    mass = {v: math.exp(scores[v] - top) for v in order}
    p = {v: m / sum(mass.values()) for v, m in mass.items()}
    if law.top_p < 1:
        size = next(n for n in range(1, len(order) + 1) if n == len(order) or sum(p[v] for v in order[:n]) >= law.top_p)
        order = order[:size]
    out = np.zeros(len(z))
    for v in order:
        out[v] = p[v] / sum(p[u] for u in order)
    return out


def under(z, law, written=0, dtype=torch.float64):
    z = np.atleast_2d(z)
    many = np.broadcast_to(np.asarray(written), (len(z),))
    return law_logits(torch.tensor(z, dtype=dtype), [law], np.zeros(len(z), int), many)


def distribution(z, law, written=0):
    return under(z, law, written).softmax(-1).numpy()


TEMPERATURES, TOP_P, TOP_K = (0.0, 0.4, 1.0, 2.5), (0.05, 0.5, 0.9, 1.0), (0, 1, 3, VOCAB, 50)
KEPT = (None, (1, 4, 5, 7), (3,))
COMBOS = list(itertools.product(TEMPERATURES, TOP_P, TOP_K, KEPT, (0, 2)))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_every_combination_by_brute_force(temperature):
    for t, top_p, top_k, allowed, least in COMBOS:
        if t != temperature or (allowed == (3,) and least):
            continue  # banning the only allowed token leaves nothing to draw
        stops = (4, 0) if least else ()
        law = SamplingLaw(t, top_p, top_k, allowed, least, stops)
        written = np.arange(len(LOGITS)) % 4
        want = np.array([brute(z, law, n) for z, n in zip(LOGITS, written)])
        got = distribution(LOGITS, law, written)
        np.testing.assert_allclose(got, want, atol=1e-14, err_msg=str(law))
        assert ((got == 0) == (want == 0)).all(), law


def test_nucleus_is_the_smallest_set_by_enumeration():
    """Of all subsets with mass at least top_p the kept one is a smallest, and of those the one with the most mass."""
    law = SamplingLaw(top_p=0.7)
    for z in LOGITS[:8]:
        p = np.exp(z) / np.exp(z).sum()
        sets = [
            s for n in range(1, VOCAB + 1) for s in itertools.combinations(range(VOCAB), n) if p[list(s)].sum() >= 0.7
        ]
        size = min(map(len, sets))
        best = max((s for s in sets if len(s) == size), key=lambda s: p[list(s)].sum())
        assert np.nonzero(distribution(z, law)[0])[0].tolist() == list(best)


def test_mass_exactly_reached():
    """Eight equal logits have mass 1/8 each without rounding: top_p = m/8 keeps m, and a hair more keeps m + 1."""
    flat = np.zeros(8)
    for m in range(1, 8):
        assert (distribution(flat, SamplingLaw(top_p=m / 8)) > 0).sum() == m
        assert (distribution(flat, SamplingLaw(top_p=m / 8 + 1e-12)) > 0).sum() == m + 1
    kept = distribution(flat, SamplingLaw(top_p=3 / 8))
    assert sorted(kept[0].tolist()) == [0.0] * 5 + [1 / 3] * 3
    # Two tokens of mass exactly 1/2 and one of mass 0: the third never comes in.
    assert distribution([0.0, 0.0, -np.inf], SamplingLaw(top_p=0.5)).max() == 1
    assert distribution([0.0, 0.0, -np.inf], SamplingLaw(top_p=0.75)).tolist() == [[0.5, 0.5, 0.0]]


def test_order_of_operations():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    z = np.log(p)
    # Temperature before top_p: squared, the masses are .25 .09 .0225 .0025 / .365, and the first alone has 0.685.
    assert distribution(z, SamplingLaw(temperature=0.5, top_p=0.6))[0].tolist() == [1, 0, 0, 0]
    assert (distribution(z, SamplingLaw(top_p=0.6))[0] > 0).tolist() == [True, True, False, False]
    # top_k before top_p: of two tokens the first has 0.625 of the mass, of four 0.5.
    assert distribution(z, SamplingLaw(top_k=2, top_p=0.6))[0].tolist() == [1, 0, 0, 0]
    # allowed before top_k: the two largest of the allowed three, not the allowed one of the two largest.
    got = distribution(z, SamplingLaw(allowed=(1, 2, 3), top_k=2))[0]
    np.testing.assert_allclose(got, [0, 2 / 3, 1 / 3, 0], atol=1e-15)
    # A banned stop is gone before top_k, before top_p and before the arg max.
    stop = dict(min_tokens=2, stop_ids=(0,))
    np.testing.assert_allclose(distribution(z, SamplingLaw(top_k=2, **stop), 1)[0], [0, 2 / 3, 1 / 3, 0], atol=1e-15)
    np.testing.assert_allclose(distribution(z, SamplingLaw(top_p=0.6, **stop), 1)[0], [0, 1, 0, 0], atol=1e-15)
    assert distribution(z, SamplingLaw(temperature=0, **stop), 1)[0].tolist() == [0, 1, 0, 0]
    assert distribution(z, SamplingLaw(temperature=0, **stop), 2)[0].tolist() == [1, 0, 0, 0]


def test_stops_are_banned_while_fewer_than_min_tokens_are_written():
    law = SamplingLaw(min_tokens=3, stop_ids=(1, 6))
    for z in LOGITS[:5]:
        rows = under(np.tile(z, (5, 1)), law, np.arange(5))
        for n in range(5):
            banned = np.nonzero(torch.isinf(rows[n]).numpy())[0].tolist()
            assert banned == ([1, 6] if n < 3 else [])
        assert rows[3:].numpy().tolist() == [z.tolist()] * 2
    assert (under(LOGITS, SamplingLaw(min_tokens=3)) == torch.tensor(LOGITS)).all()  # nothing to ban


def test_greedy():
    rows = under(LOGITS, SamplingLaw(temperature=0, top_p=0.3, top_k=4))
    best = LOGITS.argmax(1)
    assert (rows.numpy()[np.arange(40), best] == 0).all() and (torch.isinf(rows).sum(1) == VOCAB - 1).all()
    assert (rows.log_softmax(-1).numpy()[np.arange(40), best] == 0).all()  # certain, exactly
    assert entropy(rows).abs().max() == 0
    assert distribution([1.0, 3.0, 3.0], SamplingLaw(temperature=0)).tolist() == [[0, 1, 0]]


def test_rows_under_different_laws():
    """Each row gets its own law, -1 none; the input is left as it was."""
    laws = [
        SamplingLaw(),
        SamplingLaw(temperature=0.5),
        SamplingLaw(allowed=(2, 3)),
        SamplingLaw(min_tokens=2, stop_ids=(0,)),
    ]
    index, written = rng.integers(-1, 4, 40), rng.integers(0, 4, 40)
    given = torch.tensor(LOGITS)
    got = law_logits(given, laws, index, written)
    assert (given.numpy() == LOGITS).all()
    for r in range(40):
        want = brute(LOGITS[r], laws[index[r]] if index[r] >= 0 else SamplingLaw(), int(written[r]))
        np.testing.assert_allclose(got[r].softmax(-1).numpy(), want, atol=1e-14)
        if index[r] <= 0:
            assert (got[r] == given[r]).all()


def test_gradient_stays_inside_the_law():
    """d log q(token) / dz = (1[token] - q) / T on kept tokens, 0 elsewhere."""
    law = SamplingLaw(temperature=0.8, top_p=0.9, top_k=5, allowed=(0, 1, 2, 4, 5, 6, 8))
    for z in LOGITS[:10]:
        q = brute(z, law, 0)
        token = int(q.argmax())
        leaf = torch.tensor(z[None], requires_grad=True)
        law_logits(leaf, [law], np.zeros(1, int), np.zeros(1, int)).log_softmax(-1)[0, token].backward()
        np.testing.assert_allclose(leaf.grad[0].numpy(), ((np.arange(VOCAB) == token) - q) / 0.8, atol=1e-14)
        assert (leaf.grad[0].numpy()[q == 0] == 0).all()


def test_entropy_against_the_sum():
    law = SamplingLaw(temperature=0.7, top_p=0.8)
    h = entropy(under(LOGITS, law))
    for r, z in enumerate(LOGITS):
        q = brute(z, law, 0)
        assert h[r].item() == pytest.approx(-float((q[q > 0] * np.log(q[q > 0])).sum()), abs=1e-14)


def test_log_probs_of_a_large_vocabulary_have_no_bias_in_float32():
    """Against float64: the learner's log-probs, their gradient, and the most likely tokens. log_softmax is 1e-6 off."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 49_152, generator=draw)
    logits[:, 7] = NEVER
    logits[0, 9] = 90.0  # nearly certain
    token = torch.randint(8, 49_152, (64,), generator=draw)
    token[0] = 9
    leaf = logits.clone().requires_grad_()
    got = _number(Readout("logp"), leaf, token)
    exact = logits.double().log_softmax(-1)
    gap = got.detach().double() - exact.gather(1, token[:, None])[:, 0]
    assert abs(gap[1:].mean()) < 2e-7 and gap.abs().max() < 2e-6 and got[0] == 0
    (got * torch.arange(64)).sum().backward()
    want = -torch.arange(64)[:, None] * exact.exp()
    want[torch.arange(64), token] += torch.arange(64)
    np.testing.assert_allclose(leaf.grad.numpy(), want.numpy(), atol=1e-4)
    ids, top = _number(Readout("top", "top", top=5), logits, token).unbind(1)
    assert (ids.long() == exact.topk(5).indices).all()
    assert abs((top[1:].double() - exact.topk(5).values[1:]).mean()) < 2e-7
    above = exact > exact.gather(1, token[:, None])
    assert (_number(Readout("rank", "rank"), logits, token) == above.sum(-1) + 1).all()


def test_working_precision():
    assert working(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert working(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    half = torch.tensor(LOGITS, dtype=torch.bfloat16)
    got = law_logits(half, [SamplingLaw(temperature=0.5)], np.zeros(40, int), np.zeros(40, int))
    assert got.dtype == torch.float32 and (got == half.float() / 0.5).all()


def test_plain():
    assert SamplingLaw().plain and SamplingLaw(stop_ids=(1,)).plain and SamplingLaw(top_p=1.0).plain
    for law in (SamplingLaw(temperature=0.9), SamplingLaw(top_p=0.9), SamplingLaw(top_k=2), SamplingLaw(allowed=(1,)),
                SamplingLaw(min_tokens=1)):  # fmt: skip
        assert not law.plain


# --- noise --------------------------------------------------------------------------------------------------------

N = 60_000
P = np.array([0.31, 0.22, 0.17, 0.12, 0.08, 0.05, 0.03, 0.02])


def ways():
    """Keys and positions as they occur (hashed keys), and as they would be worst: one key with many positions, and key
    words that count."""
    count, zero = torch.arange(N), torch.zeros(N, dtype=torch.int64)
    hashed = torch.tensor([draw_key(0, f"task/{k}", 0) for k in range(N)])
    one = torch.tensor([draw_key(3, "task/0", 1)]).expand(N, 2)
    return {
        "requests": (hashed, zero), "positions": (one, count), "first word": (torch.stack([count, zero + 7], 1), zero),
        "second word": (torch.stack([zero + 7, count], 1), zero), "later": (hashed, zero + 1000),
    }  # fmt: skip


@pytest.fixture(scope="module")
def drawn():
    logits = torch.log(torch.tensor(P))
    return {
        name: (logits + gumbel(k, t, torch.arange(len(P)), torch.float64)).argmax(1).numpy()
        for name, (k, t) in ways().items()
    }


WAYS = ["requests", "positions", "first word", "second word", "later"]


@pytest.mark.parametrize("way", WAYS)
def test_draws_have_the_distribution(drawn, way):
    seen = np.bincount(drawn[way], minlength=len(P))
    statistic = float(((seen - N * P) ** 2 / (N * P)).sum())
    assert chi2.sf(statistic, len(P) - 1) > 1e-3
    assert np.abs(seen / N - P).max() < 4 * math.sqrt(0.25 / N)


@pytest.mark.parametrize("way", WAYS)
def test_neighbouring_draws_are_independent(drawn, way):
    """A table of (draw k, draw k + 1): independent, for keys and positions that follow one another."""
    for step in (1, 2, 16, 256):
        table = np.zeros((len(P), len(P)))
        np.add.at(table, (drawn[way][:-step], drawn[way][step:]), 1)
        assert chi2_contingency(table).pvalue > 1e-3, step


def test_the_samples_and_positions_of_a_request_are_independent():
    logits = torch.log(torch.tensor(P))
    keys = [torch.tensor([draw_key(0, f"task/{k}", n) for k in range(20_000)]) for n in (0, 1)]
    zero = torch.zeros(20_000, dtype=torch.int64)
    first, second, later = (
        (logits + gumbel(k, zero + t, torch.arange(len(P)), torch.float64)).argmax(1).numpy()
        for k, t in ((keys[0], 0), (keys[1], 0), (keys[0], 1))
    )
    for other in (second, later):
        table = np.zeros((len(P), len(P)))
        np.add.at(table, (first, other), 1)
        assert chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_noise_is_gumbel_and_uncorrelated(way):
    keys, positions = (x[:4000] for x in ways()[way])
    g = gumbel(keys, positions, torch.arange(64), torch.float64)
    assert torch.isfinite(g).all()
    u = torch.exp(-torch.exp(-g)).numpy()
    bins = np.histogram(u, bins=128, range=(0, 1))[0]
    assert chi2.sf(float(((bins - u.size / 128) ** 2 / (u.size / 128)).sum()), 127) > 1e-3
    assert g.mean().item() == pytest.approx(np.euler_gamma, abs=4 * math.pi / math.sqrt(6 * u.size))
    c = u - 0.5
    for a, b in (
        (c[:, :-1], c[:, 1:]),
        (c[:-1], c[1:]),
        (c[:, :-2], c[:, 2:]),
        (c[:-1, :-1], c[1:, 1:]),
        (c[:-1, 1:], c[1:, :-1]),
    ):
        assert abs(float((a * b).mean()) * 12) < 4 / math.sqrt(a.size)  # the variance of a uniform is 1/12


def mix(x):
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def test_noise_in_whole_numbers():
    """The same hash in Python's unbounded integers: nothing overflows, whatever the words, the position and the id."""
    words = [(0, 0), (2**32 - 1, 2**32 - 1), (1, 2**31), (0x9E3779B9, 12345), draw_key(5, "x", 2)]
    places = [0, 1, 77, 2**20, 2**31 - 1]
    cases = list(itertools.product(words, places))
    got = gumbel(
        torch.tensor([w for w, _ in cases]), torch.tensor([t for _, t in cases]), torch.arange(300), torch.float64
    )
    for r, ((a, b), t) in enumerate(cases):
        row = mix(a ^ mix((t * 0x9E3779B9 + 0x632BE5AB) % 2**32))
        for v in (0, 1, 2, 150, 299):
            bits = mix(mix((v * 0x9E3779B9 + row) % 2**32) ^ mix(row ^ b))
            assert got[r, v].item() == pytest.approx(-math.log(-math.log((bits + 0.5) / 2**32)), rel=1e-13, abs=1e-13)


def test_same_bits_in_both_precisions():
    keys, positions = (x[:500] for x in ways()["requests"])
    wide, narrow = gumbel(keys, positions, torch.arange(300), torch.float64), gumbel(keys, positions, torch.arange(300))
    assert narrow.dtype == torch.float32 and (wide.to(torch.float32) == narrow).all()
    assert torch.isfinite(narrow).all() and narrow.min() > -4 and narrow.max() < 24
    # The largest and the smallest word that the hash can give are finite too.
    for bits in (0, 2**32 - 1):
        assert math.isfinite(-math.log(-math.log((bits + 0.5) / 2**32)))


def test_a_draw_depends_on_key_position_and_id_alone():
    keys, positions = (x[:50] for x in ways()["requests"])
    whole = gumbel(keys, positions + 3, torch.arange(100))
    assert (gumbel(keys[7:8], positions[7:8] + 3, torch.arange(100)) == whole[7:8]).all()  # not on the batch
    assert (gumbel(keys, positions + 3, torch.arange(40)) == whole[:, :40]).all()  # nor on the vocabulary
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert (gumbel(keys[order], positions + 3, torch.arange(100)) == whole[order]).all()
    one = torch.tensor([1, 0])
    for other in (keys ^ one, keys ^ one.flip(0), keys ^ (one << 31), keys ^ (one.flip(0) << 31), keys.flip(1)):
        assert (gumbel(other, positions + 3, torch.arange(100)) == whole).float().mean() < 1e-3
    assert (gumbel(keys, positions + 4, torch.arange(100)) == whole).float().mean() < 1e-3


def test_draw_keys_differ():
    keys = {draw_key(s, k, n) for s in range(5) for k in ("a", "a/1", "a\0001", "b") for n in range(5)}
    assert len(keys) == 100 and all(0 <= w < 2**32 for pair in keys for w in pair)


def test_excluded_tokens_are_never_drawn():
    keys, positions = (x[:5000] for x in ways()["requests"])
    law = SamplingLaw(temperature=5.0, allowed=(2, 5))
    rows = law_logits(torch.zeros(5000, 8), [law], np.zeros(5000, int), np.zeros(5000, int))
    token = (rows + gumbel(keys, positions, torch.arange(8))).argmax(1)
    assert set(token.tolist()) == {2, 5} and (rows[:, [0, 1, 3, 4, 6, 7]] == NEVER).all()


@pytest.mark.parametrize("others", [(), (SamplingLaw(), SamplingLaw(top_k=2), SamplingLaw(0.0, allowed=(2, 3)))])
def test_many_menus_in_one_pass_are_each_on_their_own(others):
    menus = [SamplingLaw(0.5 + k % 3, allowed=tuple(sorted({k % VOCAB, (2 * k) % VOCAB, 5}))) for k in range(12)]
    laws = [*menus, *others]
    index = np.array([k % len(laws) for k in range(len(LOGITS))])
    written = np.zeros(len(LOGITS), int)
    together = law_logits(torch.tensor(LOGITS), laws, index, written)
    for row, number in enumerate(index):
        alone = law_logits(torch.tensor(LOGITS[row : row + 1]), [laws[number]], np.array([0]), written[:1])
        assert torch.equal(together[row : row + 1], alone)


def test_one_law_for_all_rows_is_that_law_for_each():
    """Label decisions under one law are computed at once: bit for bit what rows with their own lists get."""
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    law, other = SamplingLaw(allowed=(3, 7, 11), temperature=0.7), SamplingLaw(allowed=(1, 2), temperature=1.3)
    zeros = np.zeros(5, int)
    alike = law_logits(logits, [law], zeros, zeros)
    mixed = law_logits(torch.cat([logits, logits]), [law, other], np.repeat([0, 1], 5), np.zeros(10, int))
    assert torch.equal(alike, mixed[:5])
    wanted = torch.full((5, 30), -torch.inf)
    wanted[:, [3, 7, 11]] = logits[:, [3, 7, 11]] / torch.tensor(0.7)
    assert torch.equal(alike, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_little_noise_is_the_noise_of_much(dtype, monkeypatch):
    """On a CPU little noise is computed in 32 bits by numpy, much of it in 64 by torch: bit for bit the same."""
    edges = [(0, 0), (2**32 - 1, 0), (0, 2**32 - 1), (2**32 - 1, 2**32 - 1)]
    keys = torch.tensor([*edges, *(draw_key(3, "k", n) for n in range(60))])
    places, ids = torch.arange(64) * 97, torch.tensor([*range(300), 151_935, 262_143])
    little = gumbel(keys, places, ids, dtype)
    monkeypatch.setattr(sampling, "SMALL", 0)
    much = gumbel(keys, places, ids, dtype)
    assert little.dtype == much.dtype == dtype and torch.equal(little, much)
    assert len(little.unique()) > 0.99 * little.numel() and torch.isfinite(little).all()
