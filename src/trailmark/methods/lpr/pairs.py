"""LPR's pairs: right against wrong answers, right answers ranked by their process, states, and steps behind one state.

Answers of one question come in the order in which they were written. `reward` is what the process reward model says of
the whole (a product over steps, say), None where nobody scored them.

    outcome   every right answer with every wrong one
    process   the `best_of` best right ones (in their old order) with the `max_wrong` best wrong ones, the hardest
              first; and a right one above each right one that is worth less by more than `margin`
    state     beginnings of answers, ranked by the product up to there
    step      two continuations of one state: what stands before is given and not trained
    value     beginnings of answers, ranked by how many of their completions were right

Rewards of solutions are read off what the reward model said of their steps at the end of this file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.episodes import by_group, won
from trailmark.errors import DataError
from trailmark.methods.lpr.config import LprPairs, LprRead, LprValuePairs
from trailmark.methods.lpr.vectors import same_groups, text_vectors
from trailmark.models.lm import LM
from trailmark.score.classes import Outputs, class_numbers, over_steps
from trailmark.steps import step_types
from trailmark.types import Annotation, Episode

KINDS = ("outcome", "process", "state", "step", "value", "worse")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a question, or one beginning of it: `end` is the token at which it stops, None: it is whole."""

    id: str
    right: bool
    reward: float | None = None
    steps: int = 0
    end: int | None = None
    start: int = 0  # tokens that are given and not trained


@dataclass(frozen=True, slots=True)
class Chosen:
    """A pair: which one is better, and why it was made."""

    chosen: Answer
    rejected: Answer
    kind: str

    def line(self) -> dict[str, Any]:
        """As a line of a pair file (`methods/preference.py`)."""
        out: dict[str, Any] = {"chosen": self.chosen.id, "rejected": self.rejected.id, "kind": self.kind}
        for side, a in (("chosen", self.chosen), ("rejected", self.rejected)):
            out |= {f"{side}_prefix": a.start} if a.start else {}
            out |= {} if a.end is None else {f"{side}_end": a.end}
            out |= {} if a.reward is None else {f"{side}_reward": a.reward}
        return out


def question_pairs(question: str, answers: Sequence[Answer], s: LprPairs, excluded: Iterable[str] = ()) -> list[Chosen]:
    """The pairs of one question: D_o ("outcome") and D_p. `excluded` are the questions of which no two right answers
    are compared."""
    right = [a for a in answers if a.right and a.steps >= s.min_right_steps]
    wrong = [a for a in answers if not a.right and a.steps >= s.min_wrong_steps]
    if not s.process:
        made = [Chosen(c, r, "outcome") for c in right for r in wrong]
    else:
        right, wrong = (_scored(side) for side in (right, wrong))
        chosen = chosen_right(right, s)
        outcome = [Chosen(c, r, "outcome") for c in chosen for r in best(wrong, s.max_wrong)]  # D_o
        # D_p: r_p(a) - r_p(b) > margin
        ranked = [] if question in excluded else margin_pairs(chosen, right, s.margin) * s.up_sampling
        parts = {"after": outcome + ranked, "before": ranked + outcome, "only": ranked, "none": outcome}
        made = parts[s.right_pairs]
    return made


def _scored(answers: Sequence[Answer]) -> list[Answer]:
    return [a for a in answers if a.reward is not None]


def reward_of(a: Answer) -> float:
    assert a.reward is not None
    return a.reward


def best(answers: Sequence[Answer], most: int | None) -> list[Answer]:
    """The answers of the highest rewards, the highest first; of equals the one that came first."""
    order = sorted(range(len(answers)), key=lambda i: (-reward_of(answers[i]), i))
    return [answers[i] for i in order[:most]]


def chosen_right(right: Sequence[Answer], s: LprPairs) -> list[Answer]:
    """The `best_of` best right answers, in the order in which they were written."""
    kept = {a.id for a in best(right, s.best_of)}
    return [a for a in right if a.id in kept]


def margin_pairs(
    chosen: Sequence[Answer], others: Sequence[Answer], margin: float, kind: str = "process"
) -> list[Chosen]:
    """Each chosen one above every other one that is worth less by more than the margin."""
    same = lambda a, b: (a.id, a.end, a.start) == (b.id, b.end, b.start)
    return [
        Chosen(c, p, kind) for c in chosen for p in others if not same(c, p) and reward_of(c) - reward_of(p) > margin
    ]


def state_pairs(states: Sequence[Answer], best_of: int, margin: float) -> list[Chosen]:
    """Beginnings of answers: the `best_of` best above each that is worth less by more than the margin."""
    known = _scored(states)
    return margin_pairs(best(known, best_of), known, margin, "state")


def some_of(pairs: Sequence[Chosen], most: int | None, draw: random.Random) -> list[Chosen]:
    """At most so many of the pairs, drawn by chance and in their order."""
    if most is None or len(pairs) <= most:
        return list(pairs)
    return [pairs[i] for i in sorted(draw.sample(range(len(pairs)), most))]


def step_pairs(
    continuations: Sequence[Answer], margin: float | None, shares: Mapping[str, float] | None = None
) -> list[Chosen]:
    """Continuations of one state: right ones above wrong ones, or, with a margin, by what their step is worth. Where
    several wrote the same step, `shares` says how many of them are right, and more are above fewer."""
    if margin is not None:
        known = _scored(continuations)
        return margin_pairs(known, known, margin, "step")
    share = lambda a: float(a.right) if shares is None else shares[a.id]
    return [Chosen(c, r, "step") for c in continuations for r in continuations if share(c) > share(r)]


def all_pairs(
    episodes: Sequence[Episode],
    completed: Sequence[Episode] | None,
    values: Sequence[Annotation],
    rewards: Mapping[str, float],
    outputs: Outputs,
    s: LprPairs,
    read: LprRead,
    tokenizer: Any,
    excluded: Collection[str],
) -> tuple[list[Chosen], list[Episode], dict[str, int]]:
    """The pairs of all questions, the right answers that are worth imitating, and what the pairs are made of. `ways`
    are completions of states: if they are given, the pairs are of steps alone. `values` are those of states, for
    pairs of states by their values."""
    questions = {
        name: [Answer(e.id, won(e), rewards.get(e.id), sum(len(t.steps) for t in e.turns)) for e in group]
        for name, group in by_group(episodes).items()
    }
    ids = {e.group: str(e.task.meta.get("id", e.task.id)) for e in episodes}
    made: list[Chosen] = []
    if completed is not None:
        made = pairs_of_steps(completed, outputs, s, read)
    elif s.values is not None:
        made = pairs_by_value(episodes, values, s.values)
    else:
        kinds = {e.group: kind_of(e) for e in episodes}
        for name, answers in questions.items():
            mine = s.model_copy(update={"margin": s.margins.get(kinds[name], s.margin)}) if s.margins else s
            made += question_pairs(name, answers, mine, {name} if ids[name] in excluded or name in excluded else ())
    if s.states is not None:
        partial_ones = pairs_of_states(episodes, outputs, s, read, tokenizer)
        most = None if s.states.ratio is None else math.floor(s.states.ratio * len(made))
        made += some_of(partial_ones, most, random.Random(f"states {s.seed}"))
    made = [p for p in made if _within(p, s)]
    known = {e.id: e for e in episodes}
    chosen: list[Episode] = []
    for answers in questions.values():
        right = [a for a in answers if a.right and a.steps >= s.min_right_steps]
        ranked = chosen_right(_scored(right), s) if s.process and rewards else right
        chosen += [known[a.id] for a in ranked]
    return made, chosen, {**counts(made, questions), "chosen answers": len(chosen)}


def kind_of(e: Episode) -> str:
    """The type of a question, or the data set that it is from."""
    told = (where.get(key) for key in ("type", "dataset") for where in (e.task.meta, e.task.data))
    return next((str(kind) for kind in told if kind is not None), "")


def worse_pairs(versions: Sequence[tuple[Episode, str]]) -> list[Chosen]:
    """Solutions above what somebody made worse of them."""
    return [Chosen(Answer(e.id, True), Answer(name, False), "worse") for e, name in versions]


def _within(p: Chosen, s: LprPairs) -> bool:
    """Whether the rewards of a pair are on the sides of the limits where they should be."""
    good = s.min_chosen is None or (p.chosen.reward is not None and p.chosen.reward >= s.min_chosen)
    return good and (
        s.max_rejected is None or (p.rejected.reward is not None and p.rejected.reward <= s.max_rejected)
    )


def pairs_by_value(episodes: Sequence[Episode], notes: Sequence[Annotation], s: LprValuePairs) -> list[Chosen]:
    """Pairs of states of one question by how many of their completions were right."""
    told = {(a.episode, a.turn or 0): a.values for a in notes if a.level == "step"}
    made = []
    for group in by_group(episodes).values():
        states: list[tuple[Answer, float]] = []  # each with the share of its solution that it is
        for e in group:
            for i, t in enumerate(e.turns):
                lowest = math.inf
                for n, v in enumerate(told.get((e.id, i), ())):
                    if v < 0:
                        continue
                    value = min(v, lowest)
                    if s.floor is not None and value <= s.floor:
                        lowest = value
                    number = n + 1 if s.clip is None else min(n + 1, s.clip)
                    states.append((Answer(e.id, won(e), value, number, t.steps[n][1]), (n + 1) / len(t.steps)))
        made += value_pairs(states, s)
    return made


def alike_steps(
    lm: LM, episodes: Sequence[Episode], tokenizer: Any, least: float
) -> dict[tuple[str, int], list[int]]:
    """A number for each step of (episode, turn): of one question, steps whose vectors are that near have the same."""
    out: dict[tuple[str, int], list[int]] = {}
    for group in by_group(episodes).values():
        places = [(e, i, span) for e in group for i, t in enumerate(e.turns) for span in t.steps]
        texts = [tokenizer.decode(e.turns[i].tokens[a:b]).strip() for e, i, (a, b) in places]
        for (e, i, _), number in zip(places, same_groups(text_vectors(lm, texts), least)):
            out.setdefault((e.id, i), []).append(number)
    return out


def shared_values(
    episodes: Sequence[Episode], notes: Sequence[Annotation], groups: Mapping[tuple[str, int], Sequence[int]], k: int
) -> list[Annotation]:
    """The values of states with equal steps taken together. `groups` has a number for each step of (episode, turn):
    steps of one question with one number are one step. Its value is the mean of those of its states; without any, the
    mean of the steps behind it, of which an end is worth k if the answer is right and else 0."""
    told = {(a.episode, a.turn or 0): a.values for a in notes if a.level == "step"}
    out = []
    for group in by_group(episodes).values():
        own: dict[int, list[float]] = {}
        behind: dict[int, list[int | float]] = {}  # the steps that follow, and what ends are worth
        for e in group:
            for i in range(len(e.turns)):
                numbers = groups.get((e.id, i), ())
                values = told.get((e.id, i), (-1.0,) * len(numbers))
                for n, number in enumerate(numbers):
                    own.setdefault(number, []).extend([values[n]] if values[n] >= 0 else [])
                    last = n + 1 == len(numbers)
                    behind.setdefault(number, []).append(float(k * won(e)) if last else numbers[n + 1])

        shared = _values_up(own, behind)
        for e in group:
            for i in range(len(e.turns)):
                if numbers := groups.get((e.id, i), ()):
                    each = (*(shared.get(n, -1.0) for n in numbers[:-1]), -1.0)
                    out.append(Annotation(e.id, "value", "step", each, i, "completions"))
    return out


def _values_up(own: Mapping[int, Sequence[float]], behind: Mapping[int, Sequence[int | float]]) -> dict[int, float]:
    """The value of each step: the mean of its own, else of all that stands behind it. Where steps lead back to each
    other, the mean of what is known behind them."""
    known = {number: sum(values) / len(values) for number, values in own.items() if values}
    while True:
        whole, part = dict[int, float](), dict[int, float]()
        for number in behind.keys() - known.keys():
            below = [b if isinstance(b, float) else known.get(b) for b in behind[number]]
            values = [v for v in below if v is not None]
            if values:
                (whole if len(values) == len(below) else part)[number] = sum(values) / len(values)
        if not whole and not part:
            return known
        known |= whole or part


def value_pairs(states: Sequence[tuple[Answer, float]], s: LprValuePairs) -> list[Chosen]:
    """Each state above those that are worth less by at least `diff`, of which far ones count less."""
    made = []
    for c, share in states:
        below = [
            r
            for r, other in states
            if (reward_of(c) - reward_of(r)) * s.decay ** abs(c.steps - r.steps) >= s.diff
            and abs(share - other) <= s.max_gap
        ]
        made += [Chosen(c, r, "value") for r in best(below, s.most)]
    return made


def pairs_of_states(
    episodes: Sequence[Episode], outputs: Outputs, s: LprPairs, read: LprRead, tokenizer: Any
) -> list[Chosen]:
    """Pairs of beginnings: what one is worth is the product of its steps up to there."""
    made = list[Chosen]()
    assert s.states is not None
    for group in by_group(episodes).values():
        states = []
        for e in group:
            if (e.id, 0) not in outputs:
                continue
            numbers, product = step_numbers(outputs[e.id, 0], read), 1.0
            taking = set(taking_part(e, 0, read, tokenizer))
            for n, (_, end) in enumerate(e.turns[0].steps[:-1]):
                product *= numbers[n] if n in taking else 1.0
                states.append(Answer(e.id, won(e), product, n + 1, end))
        made += state_pairs(states, s.states.best_of, s.states.margin)
    return made


def pairs_of_steps(completed: Sequence[Episode], outputs: Outputs, s: LprPairs, read: LprRead) -> list[Chosen]:
    """Pairs of what was written behind one state."""
    made = list[Chosen]()
    assert s.steps is not None
    for group in by_group(completed).values():
        answers, seen, same = [], dict[tuple[int, ...], str](), dict[str, list[bool]]()
        for e in group:
            turn = e.turns[-1]
            if not turn.steps or not turn.prompt:
                continue
            end = None if s.steps.whole else turn.steps[0][1]
            first = seen.setdefault(turn.tokens[:end], e.id)
            same.setdefault(first, []).append(won(e))
            if first != e.id:  # the same step twice: it is not better than itself
                continue
            at = (e.id, len(e.turns) - 1)
            reward = step_numbers(outputs[at], read)[0] if at in outputs else None
            answers.append(Answer(e.id, won(e), reward, len(turn.steps), end))
        shares = {name: sum(each) / len(each) for name, each in same.items()}
        made += step_pairs(answers, s.steps.margin if s.steps.by == "score" else None, shares)
    return made


def distinct(pairs: Sequence[Chosen]) -> int:
    """How many different pairs there are."""
    return len({tuple(sorted(p.line().items(), key=str)) for p in pairs})


def counts(pairs: Sequence[Chosen], questions: Mapping[str, Sequence[Answer]]) -> dict[str, int]:
    """What a pairs file is made of, for people."""
    kinds = {f"{kind} pairs": sum(p.kind == kind for p in pairs) for kind in KINDS}
    unscored = sum(a.reward is None for answers in questions.values() for a in answers)
    return {
        "pairs": len(pairs), "distinct pairs": distinct(pairs), **{k: n for k, n in kinds.items() if n},
        "questions": len(questions), "unscored answers": unscored,
    }  # fmt: skip


# --- rewards -------------------------------------------------------------------------------------------------------


def step_numbers(out: Any, read: LprRead) -> list[float]:
    """The score of each step."""
    if out.ndim == 2 and read.classes is not None and max(read.classes) >= out.shape[1]:
        raise DataError(f"read.classes has {max(read.classes)}, and the scores are of classes 0 to {out.shape[1] - 1}.")
    return class_numbers(out, read.classes, read.raw).tolist()


def taking_part(e: Episode, turn: int, read: LprRead, tokenizer: Any) -> list[int]:
    """The steps of a turn that take part in its reward."""
    types = step_types(e, turn, tokenizer)
    last = len(types) - read.offset
    return [n for n, kind in enumerate(types) if kind not in read.skip and n < last]


def solution_rewards(episodes: Sequence[Episode], outputs: Outputs, read: LprRead, tokenizer: Any) -> dict[str, float]:
    """r_p(tau) = prod_t f(class >= C | x, steps 1..t), or what `over` says in place of the product. A solution none of
    whose steps takes part has none."""
    out = {}
    for e in episodes:
        numbers: list[float] = []
        for i in range(len(e.turns)):
            if (e.id, i) in outputs:
                scores = step_numbers(outputs[e.id, i], read)
                numbers += [scores[n] for n in taking_part(e, i, read, tokenizer)]
        if numbers:
            out[e.id] = over_steps(numbers, read.over)
    return out
