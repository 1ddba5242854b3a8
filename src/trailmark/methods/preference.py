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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import numpy as np

from trailmark.episodes import by_group, won
from trailmark.errors import DataError
from trailmark.formats.on_demand import OnDemand
from trailmark.formats.rows import Row, each
from trailmark.formats.scored import SIDES, tie_pairs
from trailmark.learn.learner import Update
from trailmark.methods.base import ModelInMemory
from trailmark.methods.offline import OfflineMethod, Trajectories
from trailmark.methods.offline_configs import PAIRED, PreferenceRecipe
from trailmark.models.readout import Readout
from trailmark.objectives.base import Objective
from trailmark.objectives.kto import Kto
from trailmark.objectives.pairwise import Pairwise
from trailmark.objectives.sft import Sft
from trailmark.samples import build_samples, pair
from trailmark.types import Episode, Sample

Pair = tuple[Episode, Episode]
T = TypeVar("T")


class PreferenceMethod(OfflineMethod):
    Config = PreferenceRecipe

    @classmethod
    def unread(cls, config: Any) -> tuple[str, ...]:
        """Also the keys of other objectives."""
        pairs, sides = ("beta", "smooth", "per", "pairs"), ("desirable", "undesirable")
        others = {"rejection": (*pairs, *sides), "kto": pairs[1:], **dict.fromkeys(PAIRED, sides)}
        return (*super().unread(config), *others[config.objective])

    def make_reference(self) -> str:
        return "" if self.config.objective == "rejection" else super().make_reference()

    def make_rows(self, config: Any, episodes: Trajectories, tokenizer: Any) -> tuple[Sequence[Any], dict[str, int]]:
        """The rows to train on: pairs, successes, or all trajectories."""
        c = config
        if c.pair_file:
            return listed_pairs(episodes, c.pair_file, c.seat)
        if c.objective in PAIRED:
            given = c.format == "pairs" or min(episodes.pair) >= 0
            made = places_of_stored(episodes) if given else places_of_pairs(episodes, c.pairs, c.seed)
            groups = 0 if given else len(episodes.group_names) - len({episodes.group[a] for a, _ in made})
            if not len(made):
                raise DataError(
                    "no prompt has both a success and a failure: there are no pairs to learn from.", c.files[0]
                )
            both = OnDemand(len(made), lambda k: (episodes[made[k][0]], episodes[made[k][1]]))
            return both, {"groups_of_one_kind": groups} if groups else {}
        good = np.flatnonzero(episodes.won)
        bad = len(episodes) - len(good)
        if c.objective == "rejection":
            if not len(good):
                raise DataError("has no successful trajectory to imitate.", c.files[0])
            return OnDemand(len(good), lambda k: episodes[int(good[k])]), {"lost": bad} if bad else {}
        if 0 < c.desirable * len(good) < c.undesirable * bad:
            warnings.warn(
                f"objective kto: {bad} failures outweigh {len(good)} successes, which can lower the probability of all "
                f"that the model writes; undesirable={c.desirable * len(good) / bad:.2g} balances them",
                stacklevel=2,
            )
        return episodes, {}

    def make_objective(self) -> Objective:
        c = self.config
        beta = c.beta or 0.1
        if c.objective == "rejection":
            return Sft()
        if c.objective == "kto":
            return Kto(beta=beta, desirable=c.desirable, undesirable=c.undesirable, ref=self.ref, max_len=self.max_len)
        return Pairwise(loss="sigmoid" if c.objective == "dpo" else c.objective, beta=beta, smooth=c.smooth)

    def updates(self, step: int) -> Iterator[Update]:
        samples = self.unscored_samples(step)
        if self.ref:
            samples = self.learner.fill(samples, ref=Readout("", model=self.ref, law=False))
        yield Update(samples, self.objective)

    def unscored_samples(self, step: int) -> list[Sample]:
        c = self.config
        make: dict[str, Any] = {"rejection": answer_samples, "kto": labelled_samples}
        return make.get(c.objective, partial(pair_samples, per=c.per))(self.batches.take(step), c.seat)

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """Rejection sampling has no reference."""
        return [h for h in super().models_in_memory(config) if h.name != "ref" or config.objective != "rejection"]


# --- pairs -----------------------------------------------------------------------------------------------------------


def places_of_pairs(
    episodes: Trajectories, cap: int | None = None, seed: int = 0, among: Iterable[int] | None = None
) -> np.ndarray:
    """`preference_pairs` as places in `episodes`, without reading them. `among`: only of these."""
    members: dict[int, list[int]] = {}
    for i in range(len(episodes)) if among is None else among:
        members.setdefault(episodes.group[i], []).append(i)
    names = list(episodes.group_names)
    found = (pairs_of_group(m, [episodes.won[i] for i in m], names[g], cap, seed) for g, m in members.items())
    return np.array([place for both in found for place in both], np.int64).reshape(-1, 2)


def preference_pairs(episodes: Sequence[Episode], cap: int | None = None, seed: int = 0) -> list[Pair]:
    """All pairs of a success and a failure of the same group, or `cap` of them, drawn without replacement. A group with
    only successes or only failures gives no pairs."""
    groups = by_group(episodes).items()
    return [p for name, group in groups for p in pairs_of_group(group, [won(e) for e in group], name, cap, seed)]


def pairs_of_group(
    group: Sequence[T], won: Sequence[bool | int], name: str, cap: int | None, seed: int
) -> list[tuple[T, T]]:
    good, bad = ([e for e, w in zip(group, won) if bool(w) == kind] for kind in (True, False))
    pairs = list(product(good, bad))
    if cap is not None and len(pairs) > cap:
        return random.Random(f"pairs {seed} {name}").sample(pairs, cap)
    return pairs


def places_of_stored(episodes: Trajectories) -> np.ndarray:
    """`stored_pairs` as places in `episodes`, without reading them."""
    pair, side = np.array(episodes.pair, np.int64), np.array(episodes.side)
    whole = np.flatnonzero(np.bincount(pair[pair >= 0])[pair] == 2 if (pair >= 0).any() else pair >= 0)
    first: dict[int, list[int]] = {}
    for i in whole.tolist():
        first.setdefault(pair[i], [-1, -1])[side[i]] = i
    if (pair < 0).any() or (side[whole] < 0).any() or any(-1 in both for both in first.values()):
        stored_pairs(episodes)  # says which one is no side of a pair, or lacks its other side
    return np.array(list(first.values()), np.int64).reshape(-1, 2)


def stored_pairs(episodes: Sequence[Episode]) -> list[Pair]:
    """The pairs of a file of format `pairs`. If one side of a pair was left out, the pair is left out."""
    sides = Counter(e.info.get("pair") for e in episodes)
    return tie_pairs([e for e in episodes if sides[e.info.get("pair")] == 2])


def listed_pairs(episodes: Sequence[Episode], path: str, seat: str) -> tuple[Sequence[Pair], dict[str, int]]:
    """The pairs that a file names. Those with an episode that could not be used are left out and counted."""
    known = {e.id: (i, written(e, seat)) for i, e in enumerate(episodes)}
    keys = [f"{side}{part}" for side in SIDES for part in ("_prefix", "_end")]
    notes = ["kind", *(f"{side}_reward" for side in SIDES)]  # what lpr says beside it

    def read(row: Row) -> list[tuple[int, int, int | None]] | None:
        """The place and the trained part of each side."""
        v = row.fields(row.value, "", list(SIDES), [*keys, *notes])
        for key in keys:
            if not isinstance(v.get(key, 0), int) or isinstance(v.get(key), bool):
                raise row.bad(f"must be a number of tokens, not {repr(v[key])[:60]}.", key)
        names = [row.text(v[side], side) for side in SIDES]
        if not all(name in known for name in names):
            return None
        sides = []
        for side, name in zip(SIDES, names):
            (place, tokens), start, end = known[name], v.get(f"{side}_prefix", 0), v.get(f"{side}_end")
            if (why := _nothing_between(name, tokens, start, end)) and (start, end) != (0, None):
                raise row.bad(why)
            sides.append((place, start, end))
        return sides

    found = each(path, read)[0]
    made = [p for p in found if p is not None]
    if not made:
        raise DataError(
            f"names no two episodes of the data ({len(found)} lines): there are no pairs to learn from.", path
        )
    lost = len(found) - len(made)

    def pair_at(k: int) -> Pair:
        chosen, rejected = (trained_part(episodes[place], seat, start, end) for place, start, end in made[k])
        return chosen, rejected

    return OnDemand(len(made), pair_at), {"pairs_without_episode": lost} if lost else {}


def trained_part(e: Episode, seat: str, start: int = 0, end: int | None = None) -> Episode:
    """The episode in which the first `start` tokens of the seat's last turn were given, and nothing stands behind its
    token `end`: only what lies between is trained."""
    if start == 0 and end is None:
        return e
    if why := _nothing_between(e.id, written(e, seat), start, end):
        raise DataError(why)
    at = max(i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens)
    t = e.turns[at]
    end = len(t.tokens) if end is None else end
    stop = t.stop if end == len(t.tokens) else ""
    part = replace(
        t, forced=t.forced + t.tokens[:start], tokens=t.tokens[start:end], logp=t.logp[start:end],
        logq=t.logq[start:end], steps=(), stop=stop,
    )  # fmt: skip
    return replace(e, turns=(*e.turns[:at], part))


def written(e: Episode, seat: str) -> int:
    """The number of tokens of the last turn in which the seat wrote something; 0 if there is none."""
    return next((len(t.tokens) for t in reversed(e.turns) if t.seat == seat and t.tokens), 0)


def _nothing_between(name: str, tokens: int, start: int, end: int | None) -> str:
    """What is wrong with a part of an episode's `tokens` tokens; empty if nothing is."""
    end = tokens if end is None else end
    if 0 <= start < end <= tokens:
        return ""
    return f"episode '{name}' has {tokens} tokens: there is nothing between {start} and {end}."


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
