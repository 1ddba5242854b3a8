"""Read the small English of ProntoQA and ProofWriter, and prove by forward chaining.

    Bob is cold. The bear does not chase the lion. Max is a wumpus.                            facts
    Each wumpus is a tumpus. Tumpuses are not sour. Cold, smart things are red.                rules
    If someone is kind and they chase the dog then they like the rabbit.

A statement is (subject, verb, object, positive); the subject of a rule about anything is ANY. The world is open: "not"
must be stated or derived, and what is neither derived nor refuted is unknown. Chaining goes in rounds, so the first
proof that is found is one of the least depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

ANY = "?"
_ANYBODY = {"something", "someone", "it", "they"}
_NEGATED = re.compile(r"^(?:does|do) not (.+)$")


class Unread(Exception):
    """A sentence that is not in the language; the text is the sentence."""


class Statement(NamedTuple):
    subject: str
    verb: str  # "is" or a verb without its s
    object: str
    positive: bool = True

    @property
    def negated(self) -> Statement:
        return self._replace(positive=not self.positive)

    def about(self, subject: str) -> Statement:
        """The statement of a rule for this subject."""
        return Statement(
            subject if self.subject == ANY else self.subject,
            self.verb,
            subject if self.object == ANY else self.object,
            self.positive,
        )

    def __str__(self) -> str:
        return sentence(self)


@dataclass(frozen=True)
class Rule:
    text: str
    conditions: tuple[Statement, ...]
    conclusion: Statement


class Inference(NamedTuple):
    """`conclusion` by `rule` from `premises`; a given fact has no rule and no premises."""

    conclusion: Statement
    rule: Rule | None
    premises: tuple[Statement, ...]


@dataclass(frozen=True)
class Theory:
    facts: tuple[Statement, ...]
    rules: tuple[Rule, ...]


# --- sentences --------------------------------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    return [s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if s]


def read_theory(text: str) -> Theory:
    """The facts and rules of a text. A sentence that cannot be read raises `Unread`."""
    facts: list[Statement] = []
    rules: list[Rule] = []
    for said in sentences(text):
        found = _rule(said)
        if found is None:
            facts.append(read_statement(said))
        else:
            rules.append(found)
    return Theory(tuple(facts), tuple(rules))


def _rule(said: str) -> Rule | None:
    body = said.strip().rstrip(".")
    if m := re.fullmatch(r"If (.+) then (.+)", body):
        conditions: list[Statement] = []
        for part in re.split(r" and ", m[1]):
            try:
                conditions.append(_clause(part))
            except Unread:  # "is quiet and cold"
                if not conditions or conditions[-1].verb != "is" or len(part.split()) > 2:
                    raise Unread(said) from None
                negative = part.startswith("not ")
                conditions.append(Statement(conditions[-1].subject, "is", part.removeprefix("not "), not negative))
        return Rule(said, tuple(conditions), _clause(m[2]))
    if m := re.fullmatch(r"(?:Each|Every) (\w+) is (not )?(.+)", body):
        return Rule(said, (Statement(ANY, "is", m[1]),), Statement(ANY, "is", _noun(m[3]), not m[2]))
    if m := re.fullmatch(r"(?:All )?((?:[\w]+, )*[\w]+) (?:things|people) are (not )?(.+)", body):
        kinds = tuple(Statement(ANY, "is", w.lower()) for w in m[1].split(", "))
        return Rule(said, kinds, Statement(ANY, "is", _noun(m[3]), not m[2]))
    if m := re.fullmatch(r"(?:All )?(\w+) are (not )?(.+)", body):
        return Rule(said, (Statement(ANY, "is", _singular(m[1].lower())),),
                    Statement(ANY, "is", _singular(_noun(m[3])), not m[2]))  # fmt: skip
    return None


def read_statement(said: str) -> Statement:
    found = _clause(said.strip().rstrip("."))
    if found.subject == ANY:
        raise Unread(said)
    return found


def _clause(said: str) -> Statement:
    words = said.strip().rstrip(".").split()
    if not words:
        raise Unread(said)
    if words[0].lower() == "the":
        if len(words) < 3:
            raise Unread(said)
        # A name has one or two words ("the bald eagle"): it ends before the verb.
        size = next((k for k in range(2, min(4, len(words))) if _is_verb(words[k])), 2)
        subject, rest = " ".join(["the", *words[1:size]]), words[size:]
    else:
        subject, rest = words[0], words[1:]
        if subject.lower() in _ANYBODY:
            subject = ANY
        elif not rest or not _is_verb(rest[0]):
            raise Unread(said)
    if not rest or not _is_verb(rest[0]):
        raise Unread(said)
    body = " ".join(rest)
    if m := re.fullmatch(r"(?:is|are) (not )?(.+)", body):
        return Statement(subject, "is", _noun(m[2]), not m[1])
    negative = _NEGATED.match(body)
    verb, _, thing = (negative[1] if negative else body).partition(" ")
    if not thing:
        raise Unread(said)
    target = ANY if thing.lower() in _ANYBODY | {"them"} else thing.lower() if thing.startswith("The ") else thing
    return Statement(subject, verb if negative else verb.removesuffix("s"), target, not negative)


def _is_verb(word: str) -> bool:
    return word in ("is", "are", "does", "do") or word.removesuffix("s") in (
        "chase", "eat", "like", "need", "see", "visit",
    )  # fmt: skip


def _noun(said: str) -> str:
    return re.sub(r"^an? ", "", said.strip())


def _singular(word: str) -> str:
    return word[:-2] if word.endswith("uses") else word


def is_kind(word: str) -> bool:
    """Whether a word of ProntoQA is a kind (a wumpus), not a quality."""
    return word.endswith("pus")


def sentence(s: Statement) -> str:
    """A statement as a sentence of the same English."""
    subject = s.subject[0].upper() + s.subject[1:]
    if s.verb == "is":
        article = ("an " if s.object[0] in "aeiou" else "a ") if is_kind(s.object) else ""
        return f"{subject} is {'' if s.positive else 'not '}{article}{s.object}."
    return f"{subject} {s.verb}s {s.object}." if s.positive else f"{subject} does not {s.verb} {s.object}."


# --- proofs -----------------------------------------------------------------------------------------------------------


def closure(theory: Theory) -> dict[Statement, Inference]:
    """All that follows, each with one inference whose premises come before it."""
    known = {fact: Inference(fact, None, ()) for fact in theory.facts}
    names = sorted(
        {s.subject for s in theory.facts}
        | {n for s in theory.facts if s.verb != "is" for n in [s.object]}
        | {n for r in theory.rules for s in (*r.conditions, r.conclusion) for n in _names(s)}
    )
    while True:
        new: dict[Statement, Inference] = {}
        for rule in theory.rules:
            free = any(ANY in (s.subject, s.object) for s in (*rule.conditions, rule.conclusion))
            for name in names if free else [""]:
                conclusion = rule.conclusion.about(name)
                premises = tuple(c.about(name) for c in rule.conditions)
                if conclusion not in known and conclusion not in new and all(p in known for p in premises):
                    new[conclusion] = Inference(conclusion, rule, premises)
        if not new:
            return known
        known |= new


def _names(s: Statement) -> list[str]:
    return [n for n in (s.subject, s.object if s.verb != "is" else ANY) if n != ANY]


def proof(known: dict[Statement, Inference], goal: Statement) -> list[Inference]:
    """The inferences that lead to the goal, premises first, without the given facts."""
    out: list[Inference] = []

    def add(s: Statement) -> None:
        made = known[s]
        if made.rule is None or made in out:
            return
        for p in made.premises:
            add(p)
        out.append(made)

    add(goal)
    return out


def decide(theory: Theory, goal: Statement) -> tuple[bool | None, list[Inference], dict[Statement, Inference]]:
    """Whether the goal is true, false or unknown (None), the proof, and all that follows. If a theory contradicts
    itself about the goal, what is found in the earlier round counts."""
    known = closure(theory)
    for said in known:  # in the order of the rounds
        if said == goal:
            return True, proof(known, goal), known
        if said == goal.negated:
            return False, proof(known, goal.negated), known
    return None, [], known


def holds(inference: Inference, before: Iterable[Statement], rules: Sequence[Rule]) -> bool:
    """Whether an inference is sound: its rule is given, its premises are among `before`, and they fit the rule."""
    rule, known = inference.rule, set(before)
    if rule is None:
        return inference.conclusion in known
    if rule not in rules or not set(inference.premises) <= known:
        return False
    names = {n for s in (*inference.premises, inference.conclusion) for n in (s.subject, s.object)}
    return any(
        rule.conclusion.about(n) == inference.conclusion and tuple(c.about(n) for c in rule.conditions)
        == inference.premises for n in names
    )  # fmt: skip
