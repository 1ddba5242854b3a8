"""The mask audit: exactly the tokens that the trained seat wrote are trained.

There are two questions. Do the stored turns say correctly who wrote which token (`check_turns`)? Do the samples made
from them put weight on exactly those tokens (`check_masks`)? The second check derives every position again from the
fields of `Turn`. So a builder of samples is checked against the data and not against itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from trailmark.episodes import evenly
from trailmark.formats.conversations import read_messages
from trailmark.formats.marked_text import read_texts
from trailmark.rollout.play import stop_ids
from trailmark.types import Episode, Sample, Turn
from trailmark.verify.evidence import Evidence, Missing
from trailmark.verify.report import Check, Findings


def check_turns(ev: Evidence) -> Check:
    """Every written token has its log-probs, is allowed by its law, and matches the turn's text. A turn that stopped
    holds the token (or text) it stopped at."""
    found = Findings("turns")
    episodes, tokenizer = ev.sample_episodes(), ev.weights.any().tokenizer
    ends, turns = set(stop_ids(tokenizer, chat=True)), 0
    for e in episodes:
        for i, turn in enumerate(e.turns):
            kind = e.players[turn.seat].kind if turn.seat in e.players else "trained"
            if turn.stop and not turn.tokens and kind not in ("trained", "frozen"):
                continue  # a server that gives text alone, a script or a person
            if turn.stop not in ("", "failed"):  # an engine wrote the turn
                turns += 1
                for defect in turn_defects(turn, tokenizer, ends):
                    found.defect(defect, f"episode '{e.id}', turn {i}")
    found.numbers = {"episodes": len(episodes), "turns": turns}
    return found.result(f"{turns} turns: tokens, log-probs, texts and ends agree") if turns else found.skip(
        "no turn was written by an engine"
    )  # fmt: skip


def turn_defects(turn: Turn, tokenizer: Any, ends: set[int]) -> list[str]:
    out = []
    n, allowed = len(turn.tokens), turn.law.allowed
    if not n:
        return ["a turn without a written token"]
    if any(len(x) not in (0, n) for x in (turn.logp, turn.logq)):
        out.append("written tokens and their log-probs differ in number")
    if allowed is not None and not set(turn.tokens) <= set(allowed):
        out.append("a written token is not among those allowed: the border of prompt and turn is off")
    ended = turn.ended and turn.tokens[-1] in ends
    text = tokenizer.decode([*turn.forced, *(turn.tokens[:-1] if ended else turn.tokens)])
    if not text.startswith(turn.text):
        out.append(
            "written tokens do not say the turn's text: the border of prompt and turn is off, or the text was edited"
        )
    elif ended or turn.cut_off or turn.stop == "label":
        if text != turn.text:
            out.append("written tokens say more than the turn's text: the end of the turn is off")
    elif text == turn.text:
        out.append(
            "the turn stopped, but the token it stopped at is not among its tokens: an end that is never trained"
        )
    return out


def check_masks(ev: Evidence) -> Check:
    found = Findings("masks")
    if ev.conversations:
        return _conversations(ev, found)
    mean, length = ev.mean
    episodes, samples, tokens, trained = ev.sample_episodes(), 0, 0, 0
    for seat, mine in ev.trained(episodes):
        made = ev.build(mine, seat, None, mean, length)
        by_episode: dict[str, list[Sample]] = {}
        for s in made:
            by_episode.setdefault(s.episode, []).append(s)
        for e in mine:
            for defect in sample_defects(e, seat, by_episode.pop(e.id, []), mean, length):
                found.defect(defect, f"episode '{e.id}'")
        for stray in by_episode:
            found.defect("a sample of no episode", f"'{stray}'")
        samples += len(made)
        tokens += sum(len(s.tokens) for s in made)
        trained += sum(int((s.streams["weight"] != 0).sum()) for s in made)
    found.numbers = {"episodes": len(episodes), "samples": samples, "tokens": tokens, "trained": trained, "mean": mean}
    if not samples:
        return found.skip("no episode has tokens of a trained seat")
    return found.result(f"{trained} of {tokens} tokens are trained: those that were written, and no other")


def sample_defects(e: Episode, seat: str, samples: list[Sample], mean: str, length: int) -> list[str]:
    """The kinds of defects in the samples of one seat of one episode."""
    out: list[str] = []
    turns = [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
    seen: Counter[int] = Counter()
    for s in samples:
        weight, turn = s.streams["weight"], s.streams["turn"]
        if ((weight != 0) & (turn < 0)).any():
            out.append("tokens that the seat did not write are in the loss (prompt, forced, or padding)")
        if ((weight == 0) & (turn >= 0)).any():
            out.append("written tokens are left out of the loss")
        if not np.isfinite(weight).all():
            out.append("a weight is not finite")
        for k in np.unique(turn[turn >= 0]).tolist():
            at = np.nonzero(turn == k)[0]
            seen[k] += 1
            if k >= len(turns):
                out.append("a sample counts a turn that is not there")
                continue
            out += _span_defects(e, turns[k], s, at)
        used = int(np.nonzero(turn >= 0)[0].max(initial=-1)) + 1
        if used < len(s.tokens):
            out.append("a sample goes on behind the last written token (padding?)")
        spent, mass = float(weight.sum()), s.mass.get("weight", 0.0)
        if mean != "constant" and abs(spent - mass) > 1e-9 * max(1.0, abs(mass)):
            out.append(f"the weights of a sample do not add up to its mass, as mean '{mean}' says")
    if [seen[k] for k in range(len(turns))] != [1] * len(turns):
        out.append("a turn is not trained exactly once: it is missing, or in two samples")
    total = sum(s.mass.get("weight", 0.0) for s in samples)
    sizes = [len(e.turns[i].tokens) for i in turns]
    wanted = {"token": float(sum(sizes)), "decision": float(len(sizes))}.get(mean, 1.0)
    if abs(total - wanted) > 1e-9 * max(1.0, wanted):
        out.append(f"the mass of an episode is not what mean '{mean}' says")
    per = {"token": lambda n: 1.0, "sequence": lambda n: 1 / sum(sizes), "turn": lambda n: 1 / (len(sizes) * n),
           "decision": lambda n: 1 / n}.get(mean, lambda n: 1 / length)  # fmt: skip
    for s in samples:
        for k, n in enumerate(sizes):
            if not np.allclose(s.streams["weight"][s.streams["turn"] == k], per(n), rtol=1e-9):
                out.append(f"the weight of a token is not what mean '{mean}' says")
                break
    return list(dict.fromkeys(out))


def _span_defects(e: Episode, i: int, s: Sample, at: np.ndarray) -> list[str]:
    """Turn `i` stands at positions `at` of a sample: right after what it saw, with its own tokens, law and
    log-probs."""
    turn = e.turns[i]
    before, parent = [*turn.prompt, *turn.forced], turn.continues
    while parent is not None:
        p = e.turns[parent]
        before, parent = [*p.prompt, *p.forced, *p.tokens, *before], p.continues
    start, stop = len(before), len(before) + len(turn.tokens)
    if at.tolist() != list(range(start, stop)):
        off = int(at[0]) - start
        how = f" (it begins {abs(off)} token{'s' * (abs(off) > 1)} {'late' if off > 0 else 'early'})" if off else ""
        return [f"the mask is not on the written tokens{how}"]
    out = []
    if s.tokens[:stop].tolist() != [*before, *turn.tokens]:
        out.append("the tokens of a sample are not those of the episode")
    if turn.logq and s.streams["old"][at].tolist() != list(turn.logq):
        out.append("the log-probs of a sample are not those stored with the turn")
    if any(s.laws[k] != turn.law for k in np.unique(s.streams["law"][at]).tolist()):
        out.append("the law of a sample is not that of the turn")
    if turn.ended and s.streams["weight"][stop - 1] == 0:
        out.append("the end of the turn is not trained")
    return out


def _conversations(ev: Evidence, found: Findings) -> Check:
    """Imitation: the trained spans of a row are what its assistant says, each with its end of turn."""
    rows = evenly(list(zip(read_messages(_data(ev)), ev.rows())), ev.limit)
    tokenizer = ev.weights.any().tokenizer
    ends = set(stop_ids(tokenizer, chat=ev.config.chat))
    texts = read_texts(ev.config.data)
    endless = texts is not None and not texts[0][3]  # a label is one token without an end
    tokens = trained = 0
    which = getattr(ev.config, "trained", "answers")
    for k, (messages, samples) in enumerate(rows):
        answers = [m for m in messages if m["role"] == "assistant"]
        wanted = sorted("".join(m["content"].split()) for m in (answers[-1:] if which == "last" else answers))
        said, where = [], f"row {k + 1} of the rows read from {ev.config.data}"
        for s in samples:
            weight = s.streams["weight"]
            tokens, trained = tokens + len(weight), trained + int((weight != 0).sum())
            if abs(float(weight.sum()) - s.mass["weight"]) > 1e-9:
                found.defect("the weights of a sample do not add up to its mass", where)
            if weight[0] != 0:
                found.defect("a first token is trained, but nothing comes before it", where)
            if which == "all":
                if not weight[1:].all():
                    found.defect("a token is left out, and all of them should be trained", where)
                continue
            edges = np.nonzero(np.diff(np.r_[0, weight != 0, 0]))[0].reshape(-1, 2)
            for a, b in edges.tolist():
                if endless:
                    b += 1
                elif int(s.tokens[b - 1]) not in ends:
                    found.defect("a trained span does not end with the end of the turn", where)
                    b += 1
                said.append("".join(tokenizer.decode(s.tokens[a : b - 1]).split()))
        if which == "all":
            continue
        said.sort()
        opened = len(said) == len(wanted) and all(w.endswith(x) for w, x in zip(wanted, said))
        if said != wanted and "".join(said) != "".join(wanted) and not opened:
            found.defect("trained tokens are not what the assistant says (the mask is off, or holds a prompt)", where)
    found.numbers = {"rows": len(rows), "tokens": tokens, "trained": trained}
    what = {"answers": "what the assistant says, with its ends", "last": "the last message, with its end",
            "all": "all but the first of each sequence"}[which]  # fmt: skip
    return found.result(f"{trained} of {tokens} tokens are trained: {what}")


def _data(ev: Evidence) -> str:
    ev.rows()  # raises Missing if the file is gone
    if not ev.config.data:
        raise Missing("the recipe names no data")
    return ev.config.data
