"""Reading PDDL: valid text is read exactly; anything else is refused with file, line and word."""

import pytest

from trailmark.errors import DataError
from trailmark.tasks.alfworld.pddl import (
    All,
    Atom,
    Effect,
    Every,
    Exists,
    Not,
    Some,
    parse_domain,
    parse_problem,
)

DOMAIN = """\
; a door that remembers
(define (domain House)
 (:requirements :adl :typing :action-costs)
 (:types room door - place  place key)
 (:predicates (Open ?d - door) (in ?k - key ?r - room) (seen ?p))
 (:functions (total-cost) - number)
 (:action Push
   :parameters (?d - door ?k - key)
   :precondition (and (not (Open ?d)) (exists (?r - room) (in ?k ?r)) (or (seen ?d) (= ?k Gold)))
   :effect (and (Open ?d) (increase (total-cost) 1) (when (seen ?d) (not (seen ?d)))
                (forall (?r - room) (when (in ?k ?r) (seen ?r)))))
 (:action wait :parameters () :precondition () :effect (and))
)
"""
PROBLEM = """\
(define (problem p) (:domain house)
 (:objects hall - room
    gold - key d1 d2 - door)
 (:init (in gold hall) (seen d1)
    (= (total-cost) 0) (in gold hall))
 (:goal (and (open d1) (forall (?d - door) (open ?d)))))
"""


def test_domain_in_full():
    domain = parse_domain(DOMAIN)
    assert domain.types == {"object": "object", "room": "place", "door": "place", "place": "object", "key": "object"}
    assert domain.predicates == {"=": 2, "open": 1, "in": 2, "seen": 1}
    assert list(domain.kinds("door")) == ["door", "place", "object"]
    push, wait = domain.actions
    assert push.name == "push" and push.parameters == (("?d", "door"), ("?k", "key"))
    assert push.condition == All(
        (
            Not(Atom("open", ("?d",))),
            Exists((("?r", "room"),), Atom("in", ("?k", "?r"))),
            Some((Atom("seen", ("?d",)), Atom("=", ("?k", "gold")))),
        )
    )
    assert push.effects == (
        Effect((), All(), Atom("open", ("?d",)), True),
        Effect((), Atom("seen", ("?d",)), Atom("seen", ("?d",)), False),
        Effect((("?r", "room"),), Atom("in", ("?k", "?r")), Atom("seen", ("?r",)), True),
    )
    assert wait.condition == All() and wait.effects == ()


def test_problem_in_full():
    problem = parse_problem(PROBLEM, parse_domain(DOMAIN))
    assert problem.objects == {"hall": "room", "gold": "key", "d1": "door", "d2": "door"}
    assert problem.init == (("in", "gold", "hall"), ("seen", "d1"))  # costs left out, each fact once
    assert problem.goal == All((Atom("open", ("d1",)), Every((("?d", "door"),), Atom("open", ("?d",)))))


def test_a_comma_belongs_to_its_word():
    text = DOMAIN.replace("(exists (?r - room) (in ?k ?r))", "(exists (?r - room, ?q - room) (in ?k ?r))")
    condition = parse_domain(text).actions[0].condition
    assert isinstance(condition, All) and condition.parts[1].variables == (("?r", "room,"), ("?q", "room"))


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("(in gold hall) (seen d1)", "(in gold hall) (sen d1)", 4, "unknown predicate 'sen'. Did you mean 'seen'?"),
        ("(seen d1)", "(seen d1 hall)", 4, "'seen' has 1 arguments, not 2: (seen d1 hall)."),
        ("(seen d1)", "(seen silver)", 4, "unknown object 'silver'."),
        ("(seen d1)", "(seen (d1))", 4, "'(d1)' is not the name of an object."),
        ("(seen d1)", "seen", 4, "'seen' is not a fact."),
        ("gold - key", "gold - metal", 3, "object 'gold' is of the unknown type 'metal'."),
        ("gold - key", "gold -", 3, "object 'gold' is of the unknown type 'd1'."),
        ("(open d1)", "(imply (open d1) (open d2))", 6, "unknown predicate 'imply'."),
        ("(open d1)", "(open ?x)", 6, "variable '?x' is not declared."),
        ("(forall (?d - door)", "(forall (?d - gate)", 6, "unknown type 'gate'."),
        (" (:goal", " (:constraints", 6, "section ':constraints' is not supported in a problem."),
        (" (:init", " (:goal (open d1)) (:metric", 1, "the problem has no ':init'."),
        ("(open ?d)))))", "(open ?d))))", 1, "'(' is never closed."),
        ("(open ?d)))))", "(open ?d))))))", 6, "')' is outside of '(define …)'."),
        ("(define", "(defined", 1, "'defined' should be 'define'."),
    ],
)
def test_broken_problem(old, new, line, said):
    assert old in PROBLEM
    with pytest.raises(DataError) as e:
        parse_problem(PROBLEM.replace(old, new, 1), parse_domain(DOMAIN), "house.pddl")
    assert str(e.value).startswith(f"house.pddl:{line}: {said}")
    assert (e.value.file, e.value.line) == ("house.pddl", line)


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        (":action-costs", ":durative-actions", 3, "requirement ':durative-actions' is not supported."),
        ("(:functions", "(:derived", 6, "section ':derived' is not supported in a domain."),
        ("?k - key)\n   :precond", "?k - lock)\n   :precond", 8, "unknown type 'lock'."),
        ("room door - place", "room door - spot", 4, "type 'room' is of the unknown type 'spot'."),
        (":parameters (?d", ":parameters (d", 8, "'d' should be a variable, '?d'."),
        ("(not (Open ?d)) (ex", "(not (Open ?d) (seen ?d)) (ex", 9, "'not' takes 1 part, not 2."),
        ("(exists (?r - room) (in", "(exists ?r (in", 9, "'?r' is not a list of variables."),
        ("(and (Open ?d) (inc", "(and (Opened ?d) (inc", 10, "unknown predicate 'opened'. Did you mean 'open'?"),
        (":precondition (and", ":vars (and", 9, "':vars' is not supported in an action."),
        (":parameters () :pre", "() :pre", 12, "an action is '(:action name"),
    ],
)
def test_broken_domain(old, new, line, said):
    assert old in DOMAIN
    with pytest.raises(DataError) as e:
        parse_domain(DOMAIN.replace(old, new, 1), "house.pddl")
    assert str(e.value).startswith(f"house.pddl:{line}: {said}")


@pytest.mark.parametrize(
    "text", ["", "  ; nothing\n", "word", "(define", "((define))", "(define ())", "(define (:init 1"]
)
def test_no_text_gives_a_traceback(text):
    with pytest.raises(DataError):
        parse_problem(text, parse_domain(DOMAIN))


def test_cut_anywhere_is_a_data_error():
    domain = parse_domain(DOMAIN)
    for end in range(len(PROBLEM.rstrip()) - 1):
        with pytest.raises(DataError):
            parse_problem(PROBLEM[:end], domain)
    for end in range(0, len(DOMAIN.rstrip()) - 1, 3):
        with pytest.raises(DataError):
            parse_domain(DOMAIN[:end])
