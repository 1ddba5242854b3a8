"""LPR's states: solutions that are cleaned and cut into steps, the states that are completed, what they are worth, and
what a process reward model learns from them.

A state is the beginning of a solution up to the end of a step. k completions of it are drawn; its value is how many of
them are right, from 0 to k. The label of a whole solution is k if it is right, else 0.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from trailmark.answers import LETTERS, read_answer
from trailmark.episodes import won
from trailmark.errors import DataError
from trailmark.formats.turns import Reader, Starts, plain
from trailmark.methods.lpr.config import LprClean, LprComplete, LprLabels, LprStates
from trailmark.methods.lpr.react import NAMED
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.branch import Point, branch_starts
from trailmark.rollout.play import Desk, Protocol, Start
from trailmark.steps import TYPED, mark_steps, step_types, token_border, without_end
from trailmark.types import Annotation, Episode, Failed, Invalid, Scored, Turn

Cleaner = Callable[[str], Any]  # text -> cleaned text or None, alone or with the reason (`tasks/logic/clean.py`)
Place = tuple[str, int, int]  # episode, turn, token: a state

# --- cleaning ------------------------------------------------------------------------------------------------------


def clean_all(
    episodes: Sequence[Episode],
    c: LprClean,
    tokenizer: Any,
    seat: str,
    prompt_of: Callable[[Episode], str],
    cleaner: Cleaner | None,
) -> tuple[list[Episode], Counter[str]]:
    """The solutions that can be used, cut into steps, in tokens of the policy, and how many were left out and why."""
    kept: list[Episode] = []
    out: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for e in episodes:
        why, made = _cleaned(e, c, tokenizer, seat, prompt_of, cleaner)
        if made is not None and c.distinct and (e.group, made.turns[-1].text) in seen:
            why, made = "the same as another solution", None
        if made is None:
            out[why] += 1
        else:
            seen.add((e.group, made.turns[-1].text))
            kept.append(made)
    return kept, out


def _cleaned(
    e: Episode, c: LprClean, tokenizer: Any, seat: str, prompt_of: Callable[[Episode], str], cleaner: Cleaner | None
) -> tuple[str, Episode | None]:
    if isinstance(e.outcome, Failed):
        return "failed", None
    if isinstance(e.outcome, Invalid):
        return f"not judged ({e.outcome.reason})", None
    turn = next((t for t in reversed(e.turns) if t.tokens or t.text), None)
    if turn is None or not turn.text.strip():
        return "empty", None
    try:
        said = turn.text if cleaner is None else cleaner(turn.text)
    except Exception as problem:  # the user's function may raise anything
        name = f"{type(problem).__name__}: {problem}"
        raise DataError(f"clean.clean raised {name}. This was for solution '{e.id}', and it got its text.") from problem
    text, why = (said[0], said[1]) if isinstance(said, tuple) else (said, "")
    if text is not None and not isinstance(text, str):
        raise DataError(f"clean.clean returned {repr(said)[:60]} for solution '{e.id}': it must return a text or None.")
    if text is None or not text.strip():
        return why or "not clean", None
    if not turn.prompt and (opened := opening(prompt_of(e))) and text.lstrip().startswith(opened):
        rest = text.lstrip().removeprefix(opened)  # an answer may begin with what the prompt ends with
        text = rest.lstrip(" ") if prompt_of(e).endswith(" ") else rest
    elif (lead := turn.text[: len(turn.text) - len(turn.text.lstrip(" "))]) and not text.startswith(lead):
        text = lead + text  # behind a prompt that ends with "Thought 1:" a blank is part of the answer
    if len(e.turns) > 1 and (text != turn.text or not turn.prompt):
        raise DataError(
            f"episode '{e.id}' has {len(e.turns)} turns: only an answer of one turn can be cleaned or encoded anew."
        )
    if text != turn.text or not turn.prompt:
        turn = cut_turn(turn, text, tokenizer) or plain(Reader(tokenizer, seat, Starts()), prompt_of(e), text)
        turn = replace(turn, action=e.turns[-1].action, reward=e.turns[-1].reward)
    turns = tuple(replace(t, seat=seat) for t in (*e.turns[:-1], turn))
    made = without_end(mark_steps(replace(e, turns=turns), seat, tokenizer, c.split), seat, tokenizer)
    if not made.turns[-1].steps:
        return "no steps", None
    return ("too short", None) if len(made.turns[-1].steps) < c.min_steps else ("", made)


def unread_answers(episodes: Sequence[Episode]) -> dict[str, int]:
    """How many answers to questions with options name several of them, or none. They count as wrong."""
    words = {"multiple": "name several options", "missing": "name no option", "invalid": "have no closed Finish[…]"}
    counts = [(e, len(options)) for e in episodes if isinstance(options := e.task.data.get("options"), list)]
    why = Counter(read_answer(e.turns[-1].text, n).why for e, n in counts if 2 <= n <= len(LETTERS))
    return {f"answers that {what}": why[key] for key, what in words.items() if why[key]}


def opening(prompt: str) -> str:
    """The name of the step that a prompt opens at its end, such as "Thought 1:", else nothing."""
    last = prompt.rstrip(" ").rpartition("\n")[2]
    return last if NAMED.fullmatch(last) else ""


def cut_turn(turn: Turn, text: str, tokenizer: Any) -> Turn | None:
    """The turn cut so that it says `text` and ends there, in the tokens that were written; None: they do not say it."""
    if not turn.prompt or not turn.text.startswith(text):
        return None
    cut = token_border(tokenizer, turn.tokens, turn.text, len(text))
    if tokenizer.decode(turn.tokens[:cut]) != text:
        return None
    ends = turn.ended and turn.tokens[-1] in tokenizer.all_special_ids
    end = turn.tokens[-1] if ends else tokenizer.eos_token_id
    tokens = turn.tokens[:cut] + (() if end is None else (int(end),))
    return replace(turn, tokens=tokens, text=text, logp=(), logq=(), steps=(), stop="stopped")


# --- states --------------------------------------------------------------------------------------------------------


def sample_states(
    episodes: Sequence[Episode], s: LprStates, tokenizer: Any, seat: str, seed: int
) -> list[list[dict[str, Any]]]:
    """The states of each shard. Every step but the last is drawn or not by a random number of its own, which depends
    only on the seed and on the solution. So an option that leaves states out does not change which others are drawn.
    Questions are spread over shards evenly and in order."""
    questions: dict[str, list[dict[str, Any]]] = {}
    for e in episodes:
        found = questions.setdefault(e.group, [])
        draw = random.Random(f"states {seed} {e.id}")
        for i, t in enumerate(e.turns):
            if t.seat != seat or not t.steps:
                continue
            n = len(t.steps) - 1
            types = step_types(e, i, tokenizer)
            wanted = range(math.floor(n * s.start), math.floor(n * s.end)) if len(t.steps) >= s.min_steps else range(0)
            for k, (_, end) in enumerate(t.steps[:-1]):
                taken = draw.random() < s.ratio
                action = s.remove_action and types[k] == "Action"
                if taken and k in wanted and not action and (s.types is None or types[k] in s.types):
                    place = {"episode": e.id, "turn": i, "token": end}
                    found.append({**place, "step": k, "type": types[k], "index": len(found)})
    listed = list(questions.values())
    cuts = [k * len(listed) // s.shards for k in range(s.shards + 1)]
    return [[state for q in listed[a:b] for state in q] for a, b in pairwise(cuts)]


def place_of(state: Mapping[str, Any]) -> Place:
    return state["episode"], state["turn"], state["token"]


def points_of(states: Iterable[Mapping[str, Any]], episodes: Sequence[Episode]) -> list[Point]:
    known = {e.id: e for e in episodes}
    if lost := next((s for s in states if s["episode"] not in known), None):
        raise DataError(f"a state is of episode '{lost['episode']}', which is not among the solutions.")
    return [Point(known[s["episode"]], s["turn"], s["token"]) for s in states]


# --- values --------------------------------------------------------------------------------------------------------


def state_values(
    states: Sequence[Mapping[str, Any]],
    episodes: Sequence[Episode],
    completions: Sequence[Episode],
    c: LprComplete,
    tokenizer: Any,
) -> tuple[dict[Place, int], Counter[str]]:
    """r_e(state) = sum_i r_f(completion i): how many completions of each state are right. And how many states were
    discarded and why."""
    made: dict[Place, list[Episode]] = {}
    for e in completions:
        if e.parent is None:
            raise DataError(f"completion '{e.id}' does not say which state it completes.")
        made.setdefault((e.parent.episode, e.parent.turn, e.parent.token), []).append(e)
    known = {e.id: e for e in episodes}
    values: dict[Place, int] = {}
    out: Counter[str] = Counter()
    for state in states:
        place = place_of(state)
        good = [e for e in made.get(place, ()) if isinstance(e.outcome, Scored)][: c.n]  # a file may hold more
        said = [written(e, tokenizer) for e in good]
        turn = known[place[0]].turns[place[1]]
        step = turn.tokens[turn.steps[state["step"]][0] : place[2]]
        if len(good) < c.n:
            out[f"fewer than {c.n} completions"] += 1
        elif not all(said):
            out["an empty completion"] += 1
        elif c.duplicates == "discard" and len(set(said)) < len(said):
            out["two equal completions"] += 1
        elif c.min_chars and len(TYPED.sub("", tokenizer.decode(step).strip()).strip()) < c.min_chars:
            out["a last step that says too little"] += 1
        else:
            values[place] = sum(map(won, good))
    return values, out


def written(e: Episode, tokenizer: Any) -> str:
    """What a completion added to its state."""
    turn = e.turns[-1] if e.turns else None
    if turn is None:
        return ""
    if turn.tokens and tokenizer is not None:
        return tokenizer.decode(turn.tokens, skip_special_tokens=True).strip()
    return turn.text.strip()


def value_notes(
    values: Mapping[Place, int], episodes: Sequence[Episode], seat: str, name: str = "value"
) -> list[Annotation]:
    """Values as annotations of steps; -1 where a step's state was not completed."""
    out = []
    for e in episodes:
        for i, t in enumerate(e.turns):
            if t.seat == seat and t.steps:
                each = tuple(float(values.get((e.id, i, end), -1)) for _, end in t.steps)
                if max(each) >= 0:
                    out.append(Annotation(e.id, name, "step", each, i, "completions"))
    return out


# --- examples ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Example:
    """A label after a step."""

    episode: str
    turn: int
    step: int
    label: int
    right: bool  # whether the solution that it is of was right
    text: tuple[str, str]  # question and text: equal ones are one example


def examples(
    episodes: Sequence[Episode], notes: Sequence[Annotation], k: int, s: LprLabels, tokenizer: Any, seat: str, seed: int
) -> tuple[list[Example], Counter[str]]:
    """The labels that a reward model learns, and how many were left out and why."""
    known = {(a.episode, a.turn): a.values for a in notes}
    found: list[Example] = []
    for e in episodes:
        for i, t in enumerate(e.turns):
            if t.seat != seat or not t.steps:
                continue
            values = known.get((e.id, i), (-1.0,) * len(t.steps))
            labels = [(n, int(v)) for n, v in enumerate(values[:-1]) if v >= 0]
            if s.full:
                labels.append((len(t.steps) - 1, k * won(e)))
            for n, label in labels:
                text = tokenizer.decode(t.forced + t.tokens[: t.steps[n][1]])
                found.append(Example(e.id, i, n, label, won(e), (e.group, text)))
    out: Counter[str] = Counter()
    found = one_of_each(found, out)
    if s.binary:
        found = [replace(x, label=int(x.label > 0)) for x in found]
    if s.balance:
        found = balanced(found, random.Random(f"balance {seed}"), out)
    return found, out


def one_of_each(found: Sequence[Example], out: Counter[str]) -> list[Example]:
    """Equal texts of one question as one example. Where labels differ, it has their mean, rounded (halves go up)."""
    same: dict[tuple[str, str], list[Example]] = {}
    for x in found:
        same.setdefault(x.text, []).append(x)
    kept = []
    for group in same.values():
        labels = [x.label for x in group]
        out["equal texts"] += len(group) - 1
        out["equal texts with different labels"] += len(set(labels)) > 1
        kept.append(replace(group[0], label=math.floor(sum(labels) / len(labels) + 0.5)))
    return kept


def balanced(found: Sequence[Example], draw: random.Random, out: Counter[str]) -> list[Example]:
    """As many examples of right solutions as of wrong ones, in their order."""
    sides = [[x for x in found if x.right is side] for side in (True, False)]
    size = min(map(len, sides))
    kept = {id(x) for side in sides for x in draw.sample(side, size)}
    out["more of one kind than of the other"] += len(found) - len(kept)
    return [x for x in found if id(x) in kept]


def label_notes(found: Sequence[Example], episodes: Sequence[Episode]) -> tuple[list[Episode], list[Annotation]]:
    """Examples as annotations `label`, and the episodes that have some."""
    labels: dict[tuple[str, int], dict[int, int]] = {}
    for x in found:
        labels.setdefault((x.episode, x.turn), {})[x.step] = x.label
    kept = {e for e, _ in labels}
    used = [e for e in episodes if e.id in kept]
    notes = [
        Annotation(e.id, "label", "step", tuple(float(mine.get(n, -1)) for n in range(len(t.steps))), i, "values")
        for e in used
        for i, t in enumerate(e.turns)
        if (mine := labels.get((e.id, i)))
    ]
    return used, notes


def replayed(
    episodes: Sequence[Episode], notes: Sequence[Annotation], ratio: float, draw: random.Random, prefix: str
) -> tuple[list[Episode], list[Annotation], int]:
    """floor(ratio N) of the N labels of earlier examples, with ids of their own."""
    places = [(a, n) for a in notes if a.name == "label" for n, v in enumerate(a.values) if v >= 0]
    taken = {(id(a), n) for a, n in draw.sample(places, math.floor(ratio * len(places)))}
    kept = []
    for a in notes:
        values = tuple(v if (id(a), n) in taken else -1.0 for n, v in enumerate(a.values))
        if max(values, default=-1.0) >= 0:
            kept.append(replace(a, episode=prefix + a.episode, values=values))
    names = {a.episode for a in kept}
    again = [replace(e, id=prefix + e.id) for e in episodes if prefix + e.id in names]
    return again, kept, len(taken)


# --- completing --------------------------------------------------------------------------------------------------


def must_be_shown(points: Sequence[Point], source: Any, tokenizer: Any) -> None:
    """A state can be completed if its world shows what it showed then."""
    if points and source.markov and (turn := points[0].episode.turns[0]).prompt:
        now = source.make().reset(points[0].episode.task).text
        if tuple(prompt_ids(tokenizer, now)) != turn.prompt:
            raise DataError(
                f"episode '{points[0].episode.id}' was shown another prompt than task '{source.name}' shows: states of "
                "solutions from elsewhere can be completed only if their prompts are those of the task."
            )


def told_starts(
    points: Sequence[Point], n: int, seed: int, source: Any, seat: str, tokenizer: Any
) -> tuple[list[Start], Protocol]:
    """Completions by a chat server: it is shown the question, and its answer begins with the words of the state."""
    starts = [replace(s, turns=(), forced=(), entered=None) for s in branch_starts(points, n, seed)]
    begun = {
        s.id: tokenizer.decode(p.episode.turns[p.turn].tokens[: p.token])
        for i, p in enumerate(points)
        for s in starts[i * n : (i + 1) * n]
    }

    async def goes_on(desk: Desk) -> None:
        seen = desk.observation
        asked = [*source.first_messages, *(seen.messages or ({"role": "user", "content": seen.text},))]
        turn = await desk.ask(seat, messages=asked, prefix=begun[desk.start.id], fresh=True)
        await desk.act(turn.text)

    return starts, goes_on
