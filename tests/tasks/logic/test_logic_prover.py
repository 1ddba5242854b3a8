"""The prover's English sentence by sentence, and what follows against a plain loop over all instances."""

import random
from itertools import product

import pytest

from trailmark.errors import TaskError
from trailmark.tasks.logic.prover import (
    ANY,
    Inference,
    Rule,
    Statement,
    Theory,
    Unread,
    closure,
    decide,
    holds,
    is_kind,
    proof,
    read_statement,
    read_theory,
    sentence,
    sentences,
)
from trailmark.tasks.logic.rows import Question
from trailmark.tasks.logic.teach import read_problem

S = Statement
any_is = lambda what, yes=True: S(ANY, "is", what, yes)


@pytest.mark.parametrize(
    ("said", "conditions", "conclusion"),
    [
        ("Every wumpus is a tumpus.", [any_is("wumpus")], any_is("tumpus")),
        ("Each impus is not an yumpus.", [any_is("impus")], any_is("yumpus", False)),
        ("Tumpuses are wumpuses.", [any_is("tumpus")], any_is("wumpus")),
        ("Tumpuses are not sour.", [any_is("tumpus")], any_is("sour", False)),
        ("All kind people are big.", [any_is("kind")], any_is("big")),
        ("Red, cold, round things are not nice.", [any_is("red"), any_is("cold"), any_is("round")],
         any_is("nice", False)),
        ("If something is red then it is big.", [any_is("red")], any_is("big")),
        ("If someone is not red then they are not big.", [any_is("red", False)], any_is("big", False)),
        ("If Bob is red and not cold then Bob is big.", [S("Bob", "is", "red"), S("Bob", "is", "cold", False)],
         S("Bob", "is", "big")),
        ("If the dog needs something then it eats the dog.", [S("the dog", "need", ANY)], S(ANY, "eat", "the dog")),
        ("If someone does not like them then the bald eagle visits Bob.", [S(ANY, "like", ANY, False)],
         S("the bald eagle", "visit", "Bob")),
    ],
)  # fmt: skip
def test_rules(said, conditions, conclusion):
    assert read_theory(said) == Theory((), (Rule(said, tuple(conditions), conclusion),))


@pytest.mark.parametrize(
    "said",
    ["Bob.", "The cow.", "The cow is.", "Bob is", "The cow sings loudly.", "Bob chases.", ".", "...", "It is red.",
     "If Bob is red.", "If red and cold then Bob is big.", "If Bob is red and has green eyes then Bob is big.",
     "If Bob is red then something."],
)  # fmt: skip
def test_other_sentences_are_refused(said):
    with pytest.raises(Unread):
        read_theory(f"Max is red. {said}")


def test_a_question_without_a_statement_is_one_sentence():
    for context, asked in (("Max is red. ...", "True? Max is red."), ("Max is red.", ""), ("Max is red.", "True? .")):
        with pytest.raises(TaskError, match="question 'q' has a sentence that the prover cannot read"):
            read_problem(Question(context, asked, ("True", "False"), 0, "q"))


def test_every_statement_is_read_as_it_is_written():
    subjects, verbs = ("Bob", "the cow", "the bald eagle"), ("chase", "eat", "like", "need", "see", "visit")
    made = [S(s, "is", what, yes) for s, what, yes in product(subjects, ("red", "wumpus", "impus"), (True, False))]
    made += [S(s, v, o, yes) for s, v, o, yes in product(subjects, verbs, ("Ann", "the dog"), (True, False))]
    assert [read_statement(sentence(s)) for s in made] == made and len(set(map(sentence, made))) == len(made)
    assert str(S("the cow", "is", "impus", False)) == "The cow is not an impus." and is_kind("impus")
    assert sentence(S("Bob", "is", "red")) == "Bob is red." and not is_kind("red")
    assert all(s.negated.negated == s != s.negated for s in made)
    assert sentences(" One is red.  Two?\nThree! ") == ["One is red.", "Two?", "Three!"] and sentences(" ") == []


def instances(theory):
    """Every rule for every name, as (conditions, conclusion)."""
    names = ["Ann", "Bob", "the cow"]
    return [(tuple(c.about(n) for c in r.conditions), r.conclusion.about(n)) for r in theory.rules for n in names]


@pytest.mark.parametrize("seed", range(12))
def test_what_follows_equals_a_plain_loop(seed):
    draw = random.Random(seed)
    qualities = ["red", "big", "cold", "kind", "round"]
    facts = tuple(S(n, "is", draw.choice(qualities), draw.random() < 0.7) for n in ("Ann", "Bob", "the cow"))
    facts += (S("Ann", "see", "Bob"), S("Bob", "like", "the cow"))
    rules = []
    for k in range(6):
        some = [any_is(q, draw.random() < 0.8) for q in draw.sample(qualities, draw.randint(1, 2))]
        some += [S(ANY, "see", "Bob")] * (draw.random() < 0.2)
        rules.append(Rule(f"r{k}", tuple(some), any_is(draw.choice(qualities), draw.random() < 0.8)))
    theory = Theory(facts, tuple(rules))
    known, depth, round_ = set(facts), dict.fromkeys(facts, 0), 0
    while new := {c for some, c in instances(theory) if c not in known and set(some) <= known}:
        round_ += 1
        depth |= dict.fromkeys(new, round_)
        known |= new
    found = closure(theory)
    assert set(found) == known
    for s, made in found.items():
        if made.rule is not None:  # a proof of the least depth, whose steps are sound one after the other
            assert depth[s] == 1 + max(depth[p] for p in made.premises)
            said = set(facts)
            for step in proof(found, s):
                assert holds(step, said, theory.rules) and step.conclusion not in said
                said.add(step.conclusion)
            assert s in said
    for goal in (S(n, "is", q) for n in ("Ann", "Bob", "the cow") for q in qualities):
        true, false = depth.get(goal), depth.get(goal.negated)
        want = None if true is None and false is None else false is None or (true is not None and true < false)
        if true is None or false is None or true != false:
            assert decide(theory, goal)[0] is want


def test_a_rule_about_whom_somebody_chases_is_sound():
    theory = read_theory("The cow chases Bob. If the cow chases something then the cow is kind.")
    answer, steps, _ = decide(theory, read_statement("The cow is kind."))
    assert answer is True and [holds(i, theory.facts, theory.rules) for i in steps] == [True]


def test_an_inference_with_a_foreign_rule_or_other_premises_is_not_sound():
    theory = read_theory("Max is a wumpus. Rex is a zumpus. Wumpuses are red.")
    (rule,), (max_, rex) = theory.rules, theory.facts
    good = Inference(S("Max", "is", "red"), rule, (max_,))
    assert holds(good, theory.facts, theory.rules)
    assert not holds(good, theory.facts, ()) and not holds(good, [rex], theory.rules)
    assert not holds(good._replace(premises=(rex,)), theory.facts, theory.rules)
    assert not holds(good._replace(conclusion=S("Rex", "is", "red")), theory.facts, theory.rules)
    assert not holds(Inference(S("Max", "is", "red"), None, ()), theory.facts, theory.rules)


def test_a_theory_that_contradicts_itself_says_what_comes_first():
    theory = read_theory("Max is a wumpus. Max is not red. Wumpuses are red.")
    assert decide(theory, read_statement("Max is red."))[0] is False
    assert decide(theory, read_statement("Max is not red."))[0] is True
    assert decide(theory, read_statement("Max is blue."))[:2] == (None, [])
