"""From logits to the distribution that a token was drawn from. Engine and learner call the same function, so the ratio
of a restricted or tempered policy to itself is 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trailmark.types import SamplingLaw

NEVER = float("-inf")
WIDE = 1 << 14  # tokens from which on a CPU's log_softmax is biased in float32 (docs/design.md)
AT_ONCE = 1 << 20  # logits whose exponentials are summed together: they stay in the CPU's cache


def working(logits: Tensor) -> Tensor:
    """Logits in the dtype that probabilities are computed in: float64 if the model is, else float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def law_logits(
    logits: Tensor, laws: Sequence[SamplingLaw], index: np.ndarray, written: np.ndarray, keep: Tensor | None = None
) -> Tensor:
    """[N, V] logits -> [N, V] logits whose softmax is the law's distribution; -inf where it has no mass.

    index[n] is the law of row n (-1: the model's own), written[n] the number of tokens its turn already has. `keep` [N]
    are tokens that top-k and top-p never cut. A learner's nucleus moves, so without `keep` a token that was drawn could
    get log-prob -inf, and the run would end.
    """
    out = working(logits)
    if all(law.plain for law in laws):
        return out
    if len(index) and index[0] >= 0 and (index == index[0]).all() and _only_lists(laws[index[0]]):
        return _listed(out, [laws[index[0]]])  # the usual case of label decisions, without looking for groups
    changed: list[tuple[Tensor, Tensor]] = []
    numbers = [n for n in np.unique(index).tolist() if n >= 0 and not laws[n].plain]
    listed = {n for n in numbers if _only_lists(laws[n])}
    groups = [(n, index == n) for n in numbers if n not in listed]
    if listed:  # rows with a list of allowed tokens each: all in one pass
        groups.append((-1, np.isin(index, list(listed))))
    for number, mine in groups:
        rows = np.nonzero(mine)[0]
        whole = len(rows) == len(index)
        at = torch.as_tensor(rows, device=out.device)
        part = out if whole else out[at]
        if number < 0:
            part = _listed(part, [laws[n] for n in index[rows]])
        else:
            part = _under(part, laws[number], written[rows], None if keep is None else keep if whole else keep[at])
        if whole:
            return part
        changed.append((at, part))
    if changed:
        out = out.index_copy(0, torch.cat([at for at, _ in changed]), torch.cat([part for _, part in changed]))
    return out


def untruncated(law: SamplingLaw) -> SamplingLaw:
    """The law without top-k and top-p. Between two truncated distributions the KL may be infinite."""
    return dataclasses.replace(law, top_k=0, top_p=1.0)


def _only_lists(law: SamplingLaw) -> bool:
    """Whether a law is only a list of allowed tokens and a temperature."""
    cut = law.top_k or law.top_p < 1.0 or (law.min_tokens and law.stop_ids)
    return law.allowed is not None and law.temperature > 0 and not cut


def _listed(logits: Tensor, laws: Sequence[SamplingLaw]) -> Tensor:
    """`_under` for rows whose laws only list tokens; each row has its own list, or one law is that of all rows."""
    tokens = [t for law in laws for t in law.allowed or ()]
    row = np.repeat(np.arange(len(laws)), [len(law.allowed or ()) for law in laws])
    banned = torch.ones((len(laws), logits.shape[1]), dtype=torch.bool, device=logits.device)
    banned[torch.as_tensor(row, device=logits.device), torch.as_tensor(tokens, device=logits.device)] = False
    heat = torch.as_tensor([law.temperature for law in laws], dtype=logits.dtype, device=logits.device)
    return logits.masked_fill(banned, NEVER) / heat[:, None]


def _under(logits: Tensor, law: SamplingLaw, written: np.ndarray, keep: Tensor | None = None) -> Tensor:
    if law.allowed is not None:
        banned = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
        banned[torch.as_tensor(law.allowed, device=logits.device)] = False
        logits = logits.masked_fill(banned, NEVER)
    if law.min_tokens and law.stop_ids and (early := written < law.min_tokens).any():
        banned = torch.zeros_like(logits, dtype=torch.bool)
        banned[:, torch.as_tensor(law.stop_ids, device=logits.device)] = True
        logits = logits.masked_fill(banned & torch.as_tensor(early, device=logits.device)[:, None], NEVER)
    if law.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, NEVER).scatter(1, best, 0.0)
    logits = logits / law.temperature
    if law.top_k and law.top_k < logits.shape[1]:
        smallest = logits.topk(law.top_k, dim=-1).values[:, -1:]
        cut = logits < smallest
        logits = logits.masked_fill(cut if keep is None else cut.scatter(1, keep[:, None], False), NEVER)
    if law.top_p < 1.0:
        ordered, place = logits.detach().sort(dim=-1, descending=True)
        probability = ordered.softmax(-1)
        # A token stays if the mass before it is below top_p. So the first token always stays.
        out = probability.cumsum(-1) - probability >= law.top_p
        cut = torch.zeros_like(out).scatter(1, place, out)
        logits = logits.masked_fill(cut if keep is None else cut.scatter(1, keep[:, None], False), NEVER)
    return logits


def _biased(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.shape[1] >= WIDE


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and log sum exp of the differences to it: [N, V] -> twice [N, 1]."""
    parts = logits.split(max(1, AT_ONCE // logits.shape[1]))
    best = [x.amax(-1, keepdim=True) for x in parts]
    rest = [(x - b).exp_().sum(-1, keepdim=True).log_() for x, b in zip(parts, best)]
    return torch.cat(best), torch.cat(rest)


class _Chosen(torch.autograd.Function):
    """log softmax(logits)[token], [N, V] and [N, 1] -> [N, 1], in less memory and time than log_softmax needs."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token: Tensor) -> Tensor:  # type: ignore[override]
        best, rest = _sums(logits)
        ctx.save_for_backward(logits, token, best + rest)
        return logits.gather(1, token) - best - rest

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, token, whole = ctx.saved_tensors
        return (logits - whole).exp_().mul_(-grad).scatter_add_(1, token, grad), None


def chosen(logits: Tensor, token: Tensor) -> Tensor:
    """log softmax(logits)[token] per row: [N, V] logits and [N] tokens -> [N]."""
    at = token[:, None]
    return (_Chosen.apply(logits, at) if _biased(logits) else logits.log_softmax(-1).gather(1, at))[:, 0]


def most_likely(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row and their log-probs, twice [N, k]."""
    if not _biased(logits):
        best = logits.log_softmax(-1).topk(k)
        return best.indices, best.values
    best, (top, rest) = logits.topk(k), _sums(logits)
    return best.indices, best.values - top - rest


def entropy(logits: Tensor) -> Tensor:
    """The entropy of softmax(logits) per row; excluded tokens (-inf) count 0."""
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp.masked_fill(logp == NEVER, 0.0)).sum(-1)


_MASK = 0xFFFFFFFF
SMALL = 1 << 20  # up to so many numbers, numpy in 32 bits is faster than torch in 64


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser (xor-shift, multiply) on int64 values. It is bitwise equal on every device."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _mix_in_place(x: np.ndarray) -> np.ndarray:
    """`_mix` of 32-bit unsigned values, in place: products wrap around by themselves."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def small_bits(keys: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The same bits as in `gumbel`: small arrays cost numpy less than torch."""
    row = _mix_in_place(keys[:, :1] ^ _mix_in_place(positions[:, None] * np.uint32(0x9E3779B9) + np.uint32(0x632BE5AB)))
    bits = _mix_in_place((ids * np.uint32(0x9E3779B9))[None, :] + row)
    bits ^= _mix_in_place(row ^ keys[:, 1:])
    return _mix_in_place(bits)


def noise_of(bits: np.ndarray) -> np.ndarray:
    """Gumbel noise in float64 from 32-bit words: -log(-log u)."""
    uniform = (bits + 0.5) / 2.0**32
    noise = torch.from_numpy(uniform)
    for _ in range(2):
        np.negative(noise.log_().numpy(), out=uniform)
    return uniform


def gumbel(keys: Tensor, positions: Tensor, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, len(ids)] Gumbel noise that depends only on (key, position, token id). keys [N, 2]: two 32-bit words each.

    arg max(logits + noise) samples softmax(logits). The noise comes from the key, not from a random stream. So a draw
    does not depend on batch, order or slot, and rounding noise in the logits almost never changes it.
    """
    if keys.device.type == "cpu" and len(keys) * len(ids) <= SMALL:
        bits = small_bits(*(x.numpy().astype(np.uint32) for x in (keys, positions, ids)))
        return torch.from_numpy(noise_of(bits)).to(dtype)
    row = _mix(keys[:, :1] ^ _mix((positions[:, None] * 0x9E3779B9 + 0x632BE5AB) & _MASK))
    bits = _mix(_mix((ids[None, :] * 0x9E3779B9 + row) & _MASK) ^ _mix(row ^ keys[:, 1:]))
    real = torch.float32 if keys.device.type == "mps" else torch.float64  # mps has no float64
    uniform = (bits.to(real) + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform)).to(dtype)
