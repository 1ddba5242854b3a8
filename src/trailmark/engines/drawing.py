"""From the logits of a local engine to the next token of each sample, with its two log-probs.

Sampling is Gumbel-max: the most likely token after noise that is a hash of (draw keys, position, token id). On a GPU a
law that is only a temperature is drawn on the device (`decode_ahead.draw`), any other law here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trailmark.engines.decode_ahead import draw
from trailmark.engines.running import Running
from trailmark.models import compiled
from trailmark.models.gumbel_max import winners
from trailmark.models.lm import LM
from trailmark.models.sampling import NEVER, chosen, gumbel, law_logits, most_likely, working
from trailmark.types import SamplingLaw

NOISE_AHEAD = 16  # tokens whose noise is computed at once on a CPU
FEW = 1 << 12  # logits of a step: for more, noise is computed for one token at a time
OWN = SamplingLaw()  # the model's own distribution


@dataclass
class Counts:
    """What an engine has done."""

    computed: int = 0  # tokens of prompts
    reused: int = 0  # tokens of prompts that were found in a slot
    prefills: int = 0  # distinct prompts
    decoded: int = 0  # tokens drawn


class Drawer:
    """Every list of samples may have gaps (None): rows of logits that belong to nobody, for constant shapes."""

    def __init__(self, lm: LM, on_device: bool):
        self.lm, self.on_device, self.counts = lm, on_device, Counts()
        self._ids = torch.arange(lm.vocab, device=lm.device)
        self._compiled: Callable[..., Tensor] | None = None

    def draw_first(self, logits: Tensor, samples: Sequence[Running], height: int, fixed: bool) -> None:
        """Sample first tokens: many samples may read one row of logits. They are sampled in blocks of constant
        height."""
        for first in range(0, len(samples), height):
            part = samples[first : first + height]
            pad = height - len(part) if fixed else 0
            index = torch.as_tensor([s.prefilled[1] for s in part] + [0] * pad, device=logits.device)
            self.draw(logits[index], [*part, *[None] * pad])

    def draw(self, logits: Tensor, samples: Sequence[Running | None]) -> None:
        """Sample one token for every sample from its row of logits [N, V], and append it with its two log-probs."""
        if not self.on_device:
            self._draw_by_law(logits, samples)
            return self._note_top(logits, samples)
        found: list[list[float]] = []
        if any(s is not None and s.simple for s in samples):  # all rows, so that the shape is constant
            heat = [1.0 if s is None else s.request.law.temperature for s in samples]
            real = torch.promote_types(self.lm.dtype, torch.float32)
            args = *_keys(samples, logits.device), torch.as_tensor(heat, dtype=real, device=logits.device), self._ids
            found = self._on_device(logits, *args).cpu().tolist()
        self.append(logits, samples, found)

    def append(self, logits: Tensor, samples: Sequence[Running | None], found: Sequence[Sequence[float]]) -> list[int]:
        """Append what the device drew: token, log-prob under the model, and under the law, for each row. The rows whose
        law it does not know are drawn here, and returned."""
        here: list[int] = []
        for row, sample in enumerate(samples):
            if sample is not None and sample.simple:
                token, logp, logq = found[row]
                sample.add(int(token), logp, logq)
                self.counts.decoded += 1
            elif sample is not None:
                here.append(row)
        if here:
            at = torch.as_tensor(here, device=logits.device)
            self._draw_by_law(logits[at], [samples[row] for row in here])
        self._note_top(logits, samples)
        return here

    def _on_device(self, *args: Tensor) -> Tensor:
        """`draw`, compiled if the model is, so that it samples as the recorded step does."""
        if self._compiled is None:
            big = self.lm.device.type == "cuda" and self.lm.compiled.worth(self.lm.base)
            self._compiled = compiled.whole(draw, "the drawing of tokens") if big else draw
        return self._compiled(*args)

    def _draw_by_law(self, logits: Tensor, samples: Sequence[Running | None]) -> None:
        laws = [OWN if s is None else s.request.law for s in samples]
        under = own = working(logits)
        if guides := [(row, s.guide) for row, s in enumerate(samples) if s is not None and s.guide]:
            may = torch.ones(logits.shape, dtype=torch.bool)
            for row, guide in guides:
                may[row] = torch.from_numpy(guide.allowed())
            under = logits = own.masked_fill(~may.to(own.device), NEVER)
        one = all(law is laws[0] for law in laws)  # the usual case, without hashing laws
        if not one or not laws[0].plain:
            table = {law: k for k, law in enumerate(dict.fromkeys(laws[:1] if one else laws))}
            index = np.array([0 if one else table[law] for law in laws])
            written = np.array([0 if s is None else len(s.tokens) for s in samples])
            under = law_logits(logits, list(table), index, written)
        listed = {law.allowed for law, s in zip(laws, samples) if s is not None}
        if None in listed:
            token = self._winners(under, samples)
        else:  # noise for labels only
            ids = torch.as_tensor(sorted({t for allowed in listed for t in allowed or ()}), device=own.device)
            token = ids[(under[:, ids] + gumbel(*_keys(samples, own.device), ids, own.dtype)).argmax(-1)]
        logp = chosen(own, token)
        for sample, t, p, q in zip(samples, *_lists(token, logp, logp if under is own else chosen(under, token))):
            if sample is not None:
                sample.add(t, p, q)
                self.counts.decoded += 1

    def _winners(self, under: Tensor, samples: Sequence[Running | None]) -> Tensor:
        """[N] tokens drawn from [N, V] logits. On a CPU little noise costs as much as that of several tokens, so it is
        computed for several. Of much noise, only that of tokens that can win is computed."""
        if under.device.type != "cpu":
            return (under + gumbel(*_keys(samples, under.device), self._ids, under.dtype)).argmax(-1)
        if under.numel() > FEW or NOISE_AHEAD < 2:
            return winners(under, *_keys(samples, under.device))
        spent = [s for s in samples if s is not None and len(s.tokens) >= s.noise_end]
        if spent:
            keys, written = _keys(spent, under.device)
            places = (written[:, None] + torch.arange(NOISE_AHEAD)).view(-1)
            made = gumbel(keys.repeat_interleave(NOISE_AHEAD, 0), places, self._ids, under.dtype)
            for sample, noise in zip(spent, made.view(len(spent), NOISE_AHEAD, -1).numpy()):
                sample.noise, sample.noise_end = noise, len(sample.tokens) + NOISE_AHEAD
        idle = np.zeros(under.shape[1], np.float64 if under.dtype == torch.float64 else np.float32)
        rows = [idle if s is None else s.noise[len(s.tokens) - s.noise_end] for s in samples]
        return (under + torch.from_numpy(np.stack(rows))).argmax(-1)

    def _note_top(self, logits: Tensor, samples: Sequence[Running | None]) -> None:
        wanted = [0 if s is None else s.job.top for s in samples]
        if max(wanted):
            best = most_likely(working(logits), max(wanted))
            for sample, k, ids, values in zip(samples, wanted, *(x.tolist() for x in best)):
                if sample is not None:
                    sample.top = tuple(zip(ids[:k], values[:k]))


def _keys(samples: Sequence[Running | None], device: torch.device) -> tuple[Tensor, Tensor]:
    """The draw keys of samples, and how many tokens each has."""
    keys = np.array([(0, 0) if s is None else s.keys for s in samples])
    written = np.array([0 if s is None else len(s.tokens) for s in samples])
    return torch.as_tensor(keys, device=device), torch.as_tensor(written, device=device)


def _lists(token: Tensor, logp: Tensor, logq: Tensor) -> tuple[list[int], list[float], list[float]]:
    """Three tensors [N] as lists, in one transfer."""
    if token.device.type == "cpu":
        return token.tolist(), logp.tolist(), logq.tolist()
    real = logp.dtype if token.device.type == "mps" else torch.float64
    t, p, q = torch.stack([x.to(real) for x in (token, logp, logq)]).tolist()
    return [int(x) for x in t], p, q
