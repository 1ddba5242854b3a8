"""Preferences and filters over a file of scored trajectories: DPO, IPO, hinge, KTO, and rejection sampling.

    rejection         imitate the successes
    dpo, ipo, hinge   pairs of a success and a failure of one prompt, built here, or read: from a file of format
                      `pairs`, of episodes that are sides of pairs (`formats.scored.pair_sides`), or of lines that name
                      two episodes of the data (`pair_file`). Tokens are kept as they were written
    kto               successes and failures without pairs

A line of `pair_file` is {"chosen": ID, "rejected": ID}. With "chosen_prefix": N the first N tokens of that answer are
given and not trained, and with "chosen_end": M it is trained up to its token M (so for "rejected"). Steps behind one
state are compared this way.

The reference of DPO, IPO, hinge and KTO is the policy before training, or `ref`.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row, each
from trailmark.formats.scored import SIDES, tie_pairs
from trailmark.learn.learner import Update
from trailmark.methods.configs import PAIRED, PreferenceRecipe
from trailmark.methods.offline import OfflineMethod, successes, won
from trailmark.methods.sft import batch_rows
from trailmark.models.readout import Readout
from trailmark.objectives import Kto, Objective, Pairwise, Sft
from trailmark.samples import build_samples, pair
from trailmark.types import Episode, Sample

Pair = tuple[Episode, Episode]


class PreferenceMethod(OfflineMethod):
    Config = PreferenceRecipe

    def make_reference(self) -> str:
        return "" if self.config.objective == "rejection" else super().make_reference()

    def make_rows(self, config: Any, episodes: Sequence[Episode], tokenizer: Any) -> tuple[list[Any], dict[str, int]]:
        """The rows to train on: pairs, successes, or all trajectories."""
        c = config
        if c.pair_file:
            return listed_pairs(episodes, c.pair_file, c.seat)
        if c.objective in PAIRED:
            given = c.format == "pairs" or all("pair" in e.info for e in episodes)
            made = stored_pairs(episodes) if given else preference_pairs(episodes, c.pairs, c.seed)
            groups = 0 if given else len(by_group(episodes)) - len({a.group for a, _ in made})
            if not made:
                raise DataError(
                    "no prompt has both a success and a failure: there are no pairs to learn from.", c.files[0]
                )
            return made, {"groups_of_one_kind": groups} if groups else {}
        if c.objective == "rejection":
            won = successes(episodes)
            if not won:
                raise DataError("has no successful trajectory to imitate.", c.files[0])
            return won, {"lost": len(episodes) - len(won)} if len(won) < len(episodes) else {}
        good = len(successes(episodes))
        if 0 < c.desirable * good < c.undesirable * (bad := len(episodes) - good):
            warnings.warn(
                f"objective kto: {bad} failures outweigh {good} successes, which can lower the probability of all "
                f"that the model writes; undesirable={c.desirable * good / bad:.2g} balances them",
                stacklevel=2,
            )
        return list(episodes), {}

    def make_objective(self) -> Objective:
        c = self.config
        beta = c.beta or 0.1
        if c.objective == "rejection":
            return Sft()
        if c.objective == "kto":
            return Kto(beta=beta, desirable=c.desirable, undesirable=c.undesirable, ref=self.ref, max_len=self.max_len)
        return Pairwise(loss="sigmoid" if c.objective == "dpo" else c.objective, beta=beta, smooth=c.smooth)

    def updates(self, step: int) -> Iterator[Update]:
        c = self.config
        chosen = [self.rows[r] for r in batch_rows(len(self.rows), c.batch, step, c.seed)]
        make: dict[str, Any] = {"rejection": answer_samples, "kto": labelled_samples}
        pairs = partial(pair_samples, per=c.per)
        samples = make.get(c.objective, pairs)(chosen, c.seat)
        if self.ref:
            samples = self.learner.fill(samples, ref=Readout("", model=self.ref, law=False))
        yield Update(samples, self.objective)


# --- pairs -----------------------------------------------------------------------------------------------------------


def preference_pairs(episodes: Sequence[Episode], cap: int | None = None, seed: int = 0) -> list[Pair]:
    """All pairs of a success and a failure of the same group, or `cap` of them, drawn without replacement. A group with
    only successes or only failures gives no pairs."""
    out: list[Pair] = []
    for name, group in by_group(episodes).items():
        good, bad = [e for e in group if won(e)], [e for e in group if not won(e)]
        pairs = list(product(good, bad))
        if cap is not None and len(pairs) > cap:
            pairs = random.Random(f"pairs {seed} {name}").sample(pairs, cap)
        out += pairs
    return out


def stored_pairs(episodes: Sequence[Episode]) -> list[Pair]:
    """The pairs of a file of format `pairs`. If one side of a pair was left out, the pair is left out."""
    sides = Counter(e.info.get("pair") for e in episodes)
    return tie_pairs([e for e in episodes if sides[e.info.get("pair")] == 2])


def listed_pairs(episodes: Sequence[Episode], path: str, seat: str) -> tuple[list[Pair], dict[str, int]]:
    """The pairs that a file names. Those with an episode that could not be used are left out and counted."""
    known = {e.id: e for e in episodes}
    keys = [f"{side}{part}" for side in SIDES for part in ("_prefix", "_end")]
    notes = ["kind", *(f"{side}_reward" for side in SIDES)]  # what lpr says beside it

    def read(row: Row) -> Pair | None:
        v = row.fields(row.value, "", list(SIDES), [*keys, *notes])
        for key in keys:
            if not isinstance(v.get(key, 0), int) or isinstance(v.get(key), bool):
                raise row.bad(f"must be a number of tokens, not {repr(v[key])[:60]}.", key)
        sides = [known.get(row.text(v[side], side)) for side in SIDES]
        if sides[0] is None or sides[1] is None:
            return None
        try:
            chosen, rejected = (
                trained_part(e, seat, v.get(f"{side}_prefix", 0), v.get(f"{side}_end"))
                for side, e in zip(SIDES, sides)
                if e
            )
        except DataError as problem:
            raise row.bad(str(problem)) from None
        return chosen, rejected

    found = each(path, read)[0]
    made = [p for p in found if p is not None]
    if not made:
        raise DataError(
            f"names no two episodes of the data ({len(found)} lines): there are no pairs to learn from.", path
        )
    lost = len(found) - len(made)
    return made, {"pairs_without_episode": lost} if lost else {}


def trained_part(e: Episode, seat: str, start: int = 0, end: int | None = None) -> Episode:
    """The episode in which the first `start` tokens of the seat's last turn were given, and nothing stands behind its
    token `end`: only what lies between is trained."""
    if start == 0 and end is None:
        return e
    at = max(i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens)
    t = e.turns[at]
    end = len(t.tokens) if end is None else end
    if not 0 <= start < end <= len(t.tokens):
        raise DataError(f"episode '{e.id}' has {len(t.tokens)} tokens: there is nothing between {start} and {end}.")
    stop = t.stop if end == len(t.tokens) else ""
    part = replace(
        t, forced=t.forced + t.tokens[:start], tokens=t.tokens[start:end], logp=t.logp[start:end],
        logq=t.logq[start:end], steps=(), stop=stop,
    )  # fmt: skip
    return replace(e, turns=(*e.turns[:at], part))


def by_group(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    groups: dict[str, list[Episode]] = {}
    for e in episodes:
        groups.setdefault(e.group, []).append(e)
    return groups


# --- samples ---------------------------------------------------------------------------------------------------------


def answer_samples(episodes: Sequence[Episode], seat: str = "policy") -> list[Sample]:
    """One sample per trajectory with weight 1 on every action. So a sum over a row is a sum over its actions."""
    rows = build_samples(episodes, seat, mean="token")
    keep = lambda s: {"weight": s.streams["weight"]}
    return [Sample(s.tokens, keep(s), s.mass, episode=s.episode, group=s.group) for s in rows]


def pair_samples(pairs: Sequence[Pair], seat: str = "policy", per: str = "answer") -> list[Sample]:
    """Two samples for each pair. `per` token: the weights of a side sum to 1, so that its sums are means."""
    sides = [answer_samples([p[k] for p in pairs], seat) for k in (0, 1)]
    if per == "token":
        mean = lambda s: replace(s, streams={"weight": s.streams["weight"] / s.streams["weight"].sum()})
        sides = [[mean(s) for s in side] for side in sides]
    return [s for n, both in enumerate(zip(*sides, strict=True)) for s in pair(*both, unit=f"pair {n}")]


def labelled_samples(episodes: Sequence[Episode], seat: str = "policy") -> list[Sample]:
    """Samples for KTO: the role says success or failure, and each row has mass 1."""
    rows = zip(answer_samples(episodes, seat), episodes, strict=True)
    return [replace(s, mass={"weight": 1.0}, role="desirable" if won(e) else "undesirable") for s, e in rows]
