"""From episodes to samples: one token sequence per chain of turns. The masks come from who wrote which token.

The kind of mean is stored in the weights. With T turns of k_t written tokens in an episode:

mean        weight of a token        mass of an episode     the loss is
token       1                        sum_t k_t              the mean over all tokens of the batch
sequence    1 / sum_t k_t            1                      the mean over tokens, then over episodes
turn        1 / (T k_t)              1                      the mean over tokens, then turns, then episodes
constant    1 / length               1                      the sum over tokens / length, then over episodes
decision    1 / k_t                  T                      the mean over tokens, then over all turns of the batch
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from trailmark.errors import LearnError
from trailmark.types import Annotation, Episode, Failed, Sample, SamplingLaw, Scored

Mean = Literal["token", "sequence", "turn", "constant", "decision"]
PerTurn = Mapping[str, Sequence[float | Sequence[float]]]  # episode id -> one entry per turn of the seat


def scored(episodes: Sequence[Episode], side: str | None = None) -> tuple[list[Episode], dict[str, int]]:
    """The scored episodes, and how many were left out as invalid or failed."""
    kept, dropped = [], {"invalid": 0, "failed": 0}
    for e in episodes:
        outcome = e.outcome if side is None else e.outcomes[side]
        if isinstance(outcome, Scored):
            kept.append(e)
        else:
            dropped["failed" if isinstance(outcome, Failed) else "invalid"] += 1
    return kept, dropped


def chains(episode: Episode, seat: str) -> list[list[int]]:
    """The seat's turns grouped into sequences: each turn after the one it continues."""
    found: list[list[int]] = []
    for i, turn in enumerate(episode.turns):
        if turn.seat != seat:
            continue
        for chain in found:
            if turn.continues is not None and chain[-1] == turn.continues:
                chain.append(i)
                break
        else:
            found.append([i])
    return found


def build_samples(
    episodes: Sequence[Episode],
    seat: str,
    values: Mapping[str, PerTurn] | None = None,
    mean: Mean = "token",
    length: int = 1,
    weight: str = "weight",
    max_len: int | None = None,
) -> list[Sample]:
    """Samples of one seat. `values` fill streams: a number per turn is spread over the turn's tokens, a sequence gives
    one number per token. Always there: weight, old (log-prob when drawn, under its law), law, written, turn, step."""
    out: list[Sample] = []
    for e in episodes:
        mine = [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
        if not mine:
            continue
        for name, table in (values or {}).items():
            if e.id not in table or len(table[e.id]) != len(mine):
                raise LearnError(
                    f"episode '{e.id}': '{name}' must have one entry for each of the {len(mine)} turns of seat '{seat}'"
                )
        number = {turn: k for k, turn in enumerate(mine)}
        sizes = np.array([len(e.turns[i].tokens) for i in mine])
        per_turn, total = _weights(sizes, mean, length)
        groups = [[i for i in chain if i in number] for chain in chains(e, seat)]
        groups = [g for g in groups if g]
        for chain in groups:
            sample = _sample(e, chain, number, per_turn, values or {}, weight)
            # A mean's mass is the sum of its weights, so each sequence has its own. A constant's mass is split by
            # length.
            spent = float(sample.streams[weight].sum())
            share = total * spent / float((per_turn * sizes).sum())
            if max_len is not None and len(sample.tokens) > max_len:
                raise LearnError(
                    f"episode '{e.id}': a sequence of {len(sample.tokens)} tokens is longer than the model's {max_len}"
                )
            out.append(Sample(sample.tokens, sample.streams, {weight: float(share)}, sample.laws, e.id, e.group))
    return out


def _weights(sizes: np.ndarray, mean: Mean, length: int) -> tuple[np.ndarray, float]:
    """Weight of a token in each turn, and the mass of the episode."""
    ones = np.ones(len(sizes))
    if mean == "token":
        return ones, float(sizes.sum())
    if mean == "sequence":
        return ones / sizes.sum(), 1.0
    if mean == "turn":
        return ones / (len(sizes) * sizes), 1.0
    if mean == "decision":
        return ones / sizes, float(len(sizes))
    return ones / length, 1.0


def _sample(
    e: Episode,
    chain: list[int],
    number: dict[int, int],
    per_turn: np.ndarray,
    values: Mapping[str, PerTurn],
    weight: str,
) -> Sample:
    tokens = np.array(e.sequence(chain[-1]), np.int64)
    n = len(tokens)
    streams: dict[str, np.ndarray] = {
        weight: np.zeros(n),
        "old": np.zeros(n),
        "law": np.full(n, -1, np.int64),
        "written": np.zeros(n, np.int64),
        "turn": np.full(n, -1, np.int64),
        "step": np.full(n, -1, np.int64),
        **{name: np.zeros(n) for name in values},
    }
    laws: dict[SamplingLaw, int] = {}
    steps = 0
    for i in chain:
        turn, k = e.turns[i], number[i]
        start = len(e.context(i)) + len(turn.forced)
        if start == 0:
            raise LearnError(
                f"episode '{e.id}': turn {i} has no prompt, so its first token has no probability: give it a prompt "
                "(for example a BOS)"
            )
        span = slice(start, start + len(turn.tokens))
        streams[weight][span] = per_turn[k]
        streams["old"][span] = turn.logq or np.nan  # NaN: a server gave no log-probs, so the learner must score them
        streams["law"][span] = laws.setdefault(turn.law, len(laws))
        streams["written"][span] = np.arange(len(turn.tokens))
        streams["turn"][span] = k
        for a, b in turn.steps or ((0, len(turn.tokens)),):
            streams["step"][start + a : start + b] = steps
            steps += 1
        for name, table in values.items():
            value = np.asarray(table[e.id][k], float)
            if value.shape not in ((), (len(turn.tokens),)):
                raise LearnError(
                    f"episode '{e.id}': '{name}' of turn {i} has shape {value.shape}: give one number, or one "
                    f"for each of its {len(turn.tokens)} tokens"
                )
            streams[name][span] = value
    return Sample(tokens, streams, {}, tuple(laws))


def annotate_turns(
    samples: Sequence[Sample], episodes: Sequence[Episode], seat: str, stream: str, source: str
) -> list[Annotation]:
    """A stream of samples as annotations of the turns that they were built from: one number if it is the same on every
    token of a turn, else one for each token. So the numbers that training used are stored and need not be computed
    again."""
    mine = {e.id: [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens] for e in episodes}
    out = []
    for s in samples:
        for k in sorted(set(s.streams["turn"].tolist()) - {-1}):
            values = tuple(s.streams[stream][s.streams["turn"] == k].tolist())
            if all(v == values[0] for v in values):
                out.append(Annotation(s.episode, stream, "turn", values[:1], mine[s.episode][k], source))
            else:
                out.append(Annotation(s.episode, stream, "token", values, mine[s.episode][k], source))
    return out


def turn_values(
    annotations: Iterable[Annotation], episodes: Sequence[Episode], seat: str, name: str
) -> dict[str, list[float | Sequence[float]]]:
    """Annotations called `name` as `values` of `build_samples`: one number per turn of the seat that wrote something,
    or one for each of its tokens. The inverse of `annotate_turns`."""
    known = {(a.episode, a.turn): a for a in annotations if a.name == name and a.level in ("turn", "token")}
    out: dict[str, list[float | Sequence[float]]] = {}
    for e in episodes:
        out[e.id] = []
        for i, t in enumerate(e.turns):
            if t.seat != seat or not t.tokens:
                continue
            if (note := known.get((e.id, i))) is None:
                raise LearnError(f"episode '{e.id}': turn {i} of seat '{seat}' has no annotation '{name}'")
            out[e.id].append(note.values[0] if note.level == "turn" else note.values)
    return out


def class_sample(
    tokens: Sequence[int], labels: Mapping[int, int], episode: str = "", group: str = "", weight: str = "class_weight"
) -> Sample:
    """A sequence for `Classify`: `labels` gives the class after a token, by the token's place. Each label counts once,
    so the loss is the mean over all labels of a batch."""
    mark, label = np.zeros(len(tokens)), np.zeros(len(tokens), np.int64)
    for at, c in labels.items():
        if not 0 <= at < len(tokens):
            raise LearnError(f"episode '{episode}': a label at place {at} of {len(tokens)} tokens")
        mark[at], label[at] = 1.0, c
    streams = {weight: mark, "label": label}
    return Sample(np.array(tokens, np.int64), streams, {weight: float(len(labels))}, episode=episode, group=group)


def pair(chosen: Sample, rejected: Sample, unit: str) -> list[Sample]:
    """Two samples as the two sides of one preference; the pair's mass is 1."""
    return [
        replace(chosen, mass={"weight": 1.0}, unit=unit, role="chosen"),
        replace(rejected, mass={"weight": 0.0}, unit=unit, role="rejected"),
    ]
