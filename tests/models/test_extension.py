"""New tokens after stored prefixes attend as a plain loop says, with windows, soft caps and shared heads."""

import math
from types import SimpleNamespace

import pytest
import torch

from trailmark.models.attention import Extension, How, Prefill, Slots

HAD, NEW, COLUMNS, D = [5, 0, 3, 7], [2, 4, 1, 3], 7, 4  # by row: stored tokens, new tokens


def made(kv=2, heads=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows, width = len(HAD), max(NEW)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    before = (normal(rows, kv, COLUMNS, D), normal(rows, kv, COLUMNS, D))
    return before, normal(rows, heads, width, D), normal(rows, kv, width, D), normal(rows, kv, width, D)


def layout_of(before):
    """Padding of a row repeats its last position, as `Prefiller.extend` gives it."""
    pos = torch.tensor([[min(h + t, h + n - 1) for t in range(max(NEW))] for h, n in zip(HAD, NEW)])
    return Extension({3: before}, torch.tensor(HAD), pos, max(h + n for h, n in zip(HAD, NEW)))


def looped(before, q, k, v, row, t, head, scale, window, cap):
    """The output of one new token: a softmax over the stored tokens and the new ones up to itself."""
    shared = head // (q.shape[1] // k.shape[1])
    keys = [before[0][row, shared, j] for j in range(HAD[row])] + [k[row, shared, j] for j in range(t + 1)]
    values = [before[1][row, shared, j] for j in range(HAD[row])] + [v[row, shared, j] for j in range(t + 1)]
    here = HAD[row] + t
    weights = []
    for j, key in enumerate(keys):
        score = sum(float(a) * float(b) for a, b in zip(q[row, head, t], key)) * (D**-0.5 if scale is None else scale)
        score = score if cap is None else cap * math.tanh(score / cap)
        weights.append(math.exp(score) if window is None or here - j < window else 0.0)
    return [sum(w * float(x[d]) for w, x in zip(weights, values)) / sum(weights) for d in range(D)]


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("kv, heads, scale", [(2, 4, None), (1, 3, 0.3), (2, 2, 1.0)])
def test_against_a_loop(kv, heads, scale, window, cap):
    before, q, k, v = made(kv, heads)
    got = layout_of(before).attend(SimpleNamespace(layer_idx=3), q, k, v, How(scale, window, cap))
    for row, new in enumerate(NEW):
        for t in range(new):
            for head in range(heads):
                want = looped(before, q, k, v, row, t, head, scale, window, cap)
                assert got[row, head, t].tolist() == pytest.approx(want, abs=1e-12)


def test_what_stands_behind_a_prefix_or_in_padding_changes_nothing():
    before, q, k, v = made()
    module = SimpleNamespace(layer_idx=3)
    want = layout_of(before).attend(module, q, k, v, How())
    for row, (had, new) in enumerate(zip(HAD, NEW)):
        for x in before:
            x[row, :, had:] = 1e3
        for x in (k, v):
            x[row, :, new:] = 1e3
    got = layout_of(before).attend(module, q, k, v, How())
    for row, new in enumerate(NEW):
        assert torch.equal(got[row, :, :new], want[row, :, :new])
    k[2, 0, 0] += 1
    other = layout_of(before).attend(module, q, k, v, How())
    changed = [row for row, new in enumerate(NEW) if not torch.equal(got[row, :, :new], other[row, :, :new])]
    assert changed == [2]


def test_prefix_and_new_tokens_are_kept_together():
    before, q, k, v = made()
    layout = layout_of(before)
    layout.attend(SimpleNamespace(layer_idx=3), q, k, v, How())
    assert list(layout.kept) == [3]
    for old, new, kept in zip(before, (k, v), layout.kept[3], strict=True):
        assert kept.shape == (4, 2, 10, D)
        for row, (had, n) in enumerate(zip(HAD, NEW)):
            assert torch.equal(kept[row, :, :had], old[row, :, :had])
            assert torch.equal(kept[row, :, had : had + n], new[row, :, :n])


def test_masks_by_hand():
    layout = Extension({0: (torch.zeros(1, 1, 2, 1),) * 2}, torch.tensor([2]), torch.tensor([[2, 3]]), 4)
    assert layout.mask(None)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert layout.mask(2)[0, 0].int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert layout.mask(2) is layout.mask(2)  # built once for all layers


def test_slots_give_back_what_was_written():
    g = torch.Generator().manual_seed(0)
    kept = {n: tuple(torch.randn(3, 2, 5, D, generator=g) for _ in range(2)) for n in (0, 1)}
    slots = Slots(4, 8)
    slots.write([3, 1], kept, [0, 2])
    slots.write([0], kept, [1])
    found = slots.read([1, 0, 3], 4)
    for n, both in found.items():
        for got, want in zip(both, kept[n], strict=True):
            assert torch.equal(got, want[[2, 1, 0], :, :4])
    assert torch.equal(slots.keys[0][2], torch.zeros(2, 8, D))
    assert torch.equal(slots.values[1][:, :, 5:], torch.zeros(4, 2, 3, D))


def test_plain_rows_are_computed_without_a_mask_and_the_same():
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 6, D, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    pos = torch.arange(6)[None].expand(2, -1)
    end = torch.tensor([[6] * 6, [4] * 4 + [5, 6]])
    module = SimpleNamespace(layer_idx=0)
    for window, cap in ((None, None), (2, None), (None, 0.5), (6, None)):
        a = Prefill(end, pos, plain=True).attend(module, q, k, v, How(None, window, cap))
        b = Prefill(end, pos).attend(module, q, k, v, How(None, window, cap))
        assert torch.allclose(a[0], b[0], atol=1e-12) and torch.allclose(a[1, :, :4], b[1, :, :4], atol=1e-12)
