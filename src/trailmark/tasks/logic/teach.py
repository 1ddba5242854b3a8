"""A scripted teacher: ReAct solutions of ProntoQA and ProofWriter questions, by proof.

    Thought 1: I want to know whether "Max is sour." is true. It is given that Max is a tumpus.
    Action 1: Use the rule "Tumpuses are not sour."
    Observation 1: Max is not sour.
    Thought 2: This is the opposite of "Max is sour." So the statement is false.
    Action 2: Finish[The answer is B.]

Mistakes are plausible, and a careless teacher makes them (`careless`, the probability at each inference):

    backwards  a rule is used in the wrong direction; the proof goes on soundly behind it (right answer, wrong step)
    leap       the proof stops too early and claims the end of it (the answer may be right or wrong, the step is wrong)
    misread    a "not" is overlooked or put in where it matters: at the last inference (wrong answer, one wrong step)
    slip       all steps are right, and the letter at the end is wrong
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from trailmark.answers import LETTERS
from trailmark.errors import TaskError
from trailmark.tasks.logic.prover import (
    ANY,
    Inference,
    Rule,
    Statement,
    Theory,
    Unread,
    decide,
    read_statement,
    read_theory,
    sentence,
    sentences,
)
from trailmark.tasks.logic.rows import Question

TAUGHT = ("prontoqa", "proofwriter")
WORDS = {True: "true", False: "false", None: "unknown"}


@dataclass(frozen=True)
class Solution:
    """The text, which begins with "Thought 1: "; the answer in it (True, False, None: unknown); the mistakes made, by
    the number of their step's lines (Observation k), in order."""

    text: str
    answer: bool | None
    mistakes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Problem:
    theory: Theory
    goal: Statement
    answer: bool | None
    proof: tuple[Inference, ...]
    known: dict[Statement, Inference]


def read_problem(q: Question) -> Problem:
    """A question in the prover's terms. It raises TaskError if a sentence is not in the language."""
    try:
        theory = read_theory(q.context)
        goal = read_statement((sentences(q.question) or [""])[-1])
    except Unread as problem:
        raise TaskError(f"question '{q.id}' has a sentence that the prover cannot read: {problem}") from None
    answer, steps, known = decide(theory, goal)
    return Problem(theory, goal, answer, tuple(steps), known)


def letter_of(answer: bool | None, options: Sequence[str]) -> str:
    """The letter of the option that says so."""
    wanted = {"unknown", "uncertain"} if answer is None else {WORDS[answer]}
    found = [k for k, o in enumerate(options) if o.strip().lower() in wanted]
    if len(found) != 1:
        raise TaskError(f"no option, or several, of {list(options)} say '{WORDS[answer]}'.")
    return LETTERS[found[0]]


def solution(p: Problem, options: Sequence[str], rng: random.Random | None = None, careless: float = 0.0) -> Solution:
    """A worked solution. With `careless` each inference goes wrong with this probability."""
    writer = _Writer(p, options)
    draw = rng or random.Random(0)
    if p.answer is None:
        if draw.random() < careless:
            return writer.leap(draw.random() < 0.5)
        return writer.unknown()
    for k, step in enumerate(p.proof):
        if draw.random() >= careless:
            writer.infer(step)
            continue
        last = k == len(p.proof) - 1
        kinds = [*(["backwards"] if writer.can_go_back() else []), "leap", *(["misread"] if last else [])]
        kind = draw.choice(kinds)
        if kind == "leap":
            return writer.leap(draw.random() < 0.5)
        if kind == "misread":
            return writer.misread(step)
        writer.backwards(draw)
        writer.infer(step)
    if draw.random() < careless / 4:
        return writer.finish(p.answer, slip=True)
    return writer.finish(p.answer)


class _Writer:
    def __init__(self, p: Problem, options: Sequence[str]):
        self.p, self.options = p, options
        self.lines: list[str] = []
        self.number, self.mistakes = 0, list[tuple[str, int]]()
        self.said = set(p.theory.facts)

    def _step(self, thought: str, action: str, observation: str = "") -> None:
        self.number += 1
        start = f'I want to know whether "{_quoted(self.p.goal)}" is true. ' if self.number == 1 else ""
        self.lines += [f"Thought {self.number}: {start}{thought}", f"Action {self.number}: {action}"]
        if observation:
            self.lines.append(f"Observation {self.number}: {observation}")

    def _use(self, premises: Sequence[Statement], rule: Rule, conclusion: Statement) -> None:
        given = " ".join(sentence(s) for s in premises)
        lead = "It is given that: " if all(s in self.p.theory.facts for s in premises) else "I know that: "
        self._step(lead + given, f'Use the rule "{rule.text}"', sentence(conclusion))
        self.said.add(conclusion)

    def infer(self, step: Inference) -> None:
        assert step.rule is not None
        self._use(step.premises, step.rule, step.conclusion)

    # --- mistakes ---

    def _backward_choices(self) -> list[tuple[Rule, Statement, Statement]]:
        """Rules with one condition whose conclusion is known, and whose condition does not follow from anything."""
        out = []
        for rule in self.p.theory.rules:
            if len(rule.conditions) != 1:
                continue
            for s in sorted(self.said):
                if rule.conclusion.about(s.subject) == s:
                    wrong = rule.conditions[0].about(s.subject)
                    taken = wrong in self.p.known or wrong in self.said or self.p.goal in (wrong, wrong.negated)
                    if not taken:
                        out.append((rule, s, wrong))
        return out

    def can_go_back(self) -> bool:
        return bool(self._backward_choices())

    def backwards(self, draw: random.Random) -> None:
        rule, known, wrong = draw.choice(self._backward_choices())
        self._use([known], rule, wrong)
        self.mistakes.append(("backwards", self.number))

    def leap(self, answer: bool) -> Solution:
        claimed = self.p.goal if answer else self.p.goal.negated
        self._step("The rest is plain to see.", "Put together what is known so far.", sentence(claimed))
        self.mistakes.append(("leap", self.number))
        return self.finish(answer)

    def misread(self, step: Inference) -> Solution:
        assert step.rule is not None
        self._use(step.premises, step.rule, step.conclusion.negated)
        self.mistakes.append(("misread", self.number))
        return self.finish(not self.p.answer)

    # --- ends ---

    def unknown(self) -> Solution:
        """What could lead to the goal, and what is missing for it."""
        p = self.p
        near = [r for r in p.theory.rules if _could_say(r.conclusion, p.goal)]
        if not near:
            self._step("No fact says so, and no fact says the opposite.", "Look for rules that speak about it.",
                       "There is no such rule.")  # fmt: skip
        for rule in near[:3]:
            bound = ANY in (rule.conclusion.subject, rule.conclusion.object) or not any(
                ANY in (c.subject, c.object) for c in rule.conditions
            )
            conditions = [c.about(p.goal.subject) for c in rule.conditions] if bound else []
            missing = next((c for c in conditions if c not in p.known), None)
            said = "nobody meets its conditions." if missing is None else f'it is not known that "{_quoted(missing)}".'
            self._step("A rule could lead there.", f'Try the rule "{rule.text}"', f"This does not work: {said}")
        return self.finish(None)

    def finish(self, answer: bool | None, slip: bool = False) -> Solution:
        goal = _quoted(self.p.goal)
        if answer is None:
            thought = f'Neither "{goal}" nor its opposite follows. So the statement is unknown.'
        elif (self.p.goal if answer else self.p.goal.negated) in self.said:
            found = "what I asked for" if answer else f'the opposite of "{goal}"'
            lead = "This is" if self.number else "Among the facts I find"
            thought = f"{lead} {found}. So the statement is {WORDS[answer]}."
        else:
            thought = f"So the statement is {WORDS[answer]}."
        told = answer
        if slip:
            told = not answer
            self.mistakes.append(("slip", self.number + 1))
        self._step(thought, f"Finish[The answer is {letter_of(told, self.options)}.]")
        return Solution("\n".join(self.lines), told, tuple(self.mistakes))


def _quoted(s: Statement) -> str:
    return sentence(s).rstrip(".")


def _could_say(conclusion: Statement, goal: Statement) -> bool:
    return conclusion.about(goal.subject)[:3] == goal[:3]
