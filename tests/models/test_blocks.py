"""Attention by blocks gives what attention with a mask gives: outputs and gradients, for every kind of layout."""

import numpy as np
import pytest
import torch

from trailmark.models import blocks
from trailmark.models.attention import How, Layout, _dense
from trailmark.models.layout import trie


def line(rows, pad=0):
    """end and pos of the trie of these rows, [1, L], with padding behind it."""
    _, end, pos, _ = trie([np.array(r) for r in rows])
    length = len(end)
    return np.append(end, np.arange(pad) + length + 1)[None], np.append(pos, np.zeros(pad, int))[None]


def tree():
    """A prefix of 12, two branches of 6 below it, three leaves of 7 below each; then a row that shares nothing."""
    number = iter(range(100, 10_000))
    new = lambda n: [next(number) for _ in range(n)]
    first, rows = new(12), []
    for _ in range(2):
        branch = new(6)
        rows += [first + branch + new(7) for _ in range(3)]
    return [*rows, new(9)]


def stacked(*lines):
    return np.concatenate([end for end, _ in lines]), np.concatenate([pos for _, pos in lines])


LAYOUTS = {
    "tree": line(tree(), 5),
    "one row": line([range(1, 30)]),
    "rows": stacked(line([range(1, 30)]), line([range(1, 12)], 18)),
    "left": (np.array([[1, 2, 3, *[30] * 26, 30]]), np.array([[0, 0, 0, *range(27)]])),
    "two lines": stacked(line([[1, 2, 3, 4], [1, 2, 9], [1, 7]]), line([range(5)], 1)),
    "leaves": line([[1, 2, 3, n] for n in range(20)]),
}


def test_the_spans_of_a_small_trie_by_hand():
    # abc, then d below b, then e that shares nothing: chains [0, 3), [3, 4), [4, 5)
    end, _ = line([[1, 2, 3], [1, 2, 4], [5]])
    assert end.tolist() == [[4, 4, 3, 4, 5]]
    assert [s[:3] for s in blocks._spans(end[0], 0)] == [(0, 3, 0), (3, 4, 2), (4, 5, 0)]
    assert [s[:3] for s in blocks._spans(end[0], 1000)] == [(0, 5, 0)]  # another call costs too much


def test_padding_is_looked_at_in_runs():
    end = np.append(np.full(10, 10), np.arange(10, 1000) + 1)
    starts = [s.first for s in blocks._spans(end, 0)]
    assert starts == [0, 10, *range(64, 1000, 64)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("call", [0, 20, 200])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_blocks_give_what_a_mask_gives(name, call, window, heads):
    end, pos = LAYOUTS[name]
    plans = blocks.plan(end, pos, window, call)
    if plans is None:
        assert call, "without a cost of calls, blocks are never dearer"
        return
    draw = torch.Generator().manual_seed(0)
    make = lambda h: torch.randn(*end.shape, h, 8, generator=draw, dtype=torch.float64).transpose(1, 2).requires_grad_()
    q, k, v = make(heads[0]), make(heads[1]), make(heads[1])
    weight = torch.randn(q.shape, generator=draw, dtype=torch.float64)
    found = []
    layout = Layout(torch.from_numpy(end), torch.from_numpy(pos))
    for out in (
        blocks.attend(blocks.added(plans, q.dtype), q, k, v, 0.3),
        _dense(q, k, v, layout.mask(window), 0.3, None),
    ):
        found.append([out, *torch.autograd.grad((out * weight).sum(), (q, k, v))])
    for ours, want in zip(*found):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)


def test_a_layout_uses_blocks_where_they_cost_less():
    long = [[*range(200), *range(1000 * k, 1000 * k + 30)] for k in range(1, 9)]
    end, pos = (torch.from_numpy(x) for x in line(long))
    q = torch.zeros(1, 9, end.shape[1], 64)
    layout = Layout(end, pos)
    plans = layout.plans(None, q)
    assert plans is not None and len(plans[0].blocks) > 4
    assert layout.plans(None, q) is plans  # made once for all layers
    assert Layout(end, pos, constant=True).plans(None, q) is None
    small = Layout(*(torch.from_numpy(x) for x in stacked(*[line([range(20)])] * 4)))
    assert small.plans(None, torch.zeros(4, 4, 20, 16)) is None


def test_soft_capped_scores_keep_the_mask():
    end, pos = (torch.from_numpy(x) for x in line([range(300)]))
    layout, q = Layout(end, pos), torch.ones(1, 2, 300, 8)
    layout.attend(torch.nn.Identity(), q, q, q, How(softcap=5.0))
    assert layout._masks and not layout._plans
