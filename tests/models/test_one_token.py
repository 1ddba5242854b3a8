"""A decoding step computed as on a GPU equals the dense one, with and without heads that share keys."""

import pytest
import torch

from trailmark.models.attention import _dense, _one_token


@pytest.mark.parametrize("heads, shared", [(4, 4), (6, 2), (9, 3)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_dense_attention(heads, shared, scale):
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, h, n, 8) for h, n in ((heads, 1), (shared, 12), (shared, 12)))
    mask = (torch.arange(12)[None] <= torch.tensor([0, 3, 5, 11, 7])[:, None])[:, None, None]
    want = _dense(q, k, v, mask, scale, None)
    assert (_one_token(q, k, v, mask, scale, None) - want).abs().max() < 1e-6
    v[:, :, 9:] *= 7  # masked columns do not change a row
    assert (_one_token(q, k, v, mask, scale, None)[[0, 1, 2, 4]] - want[[0, 1, 2, 4]]).abs().max() < 1e-6
