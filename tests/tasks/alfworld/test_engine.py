"""The native engine on a small world of our own: the admissible commands equal a check of the
conditions on every combination."""

import itertools
import random
import re

import pytest

from trailmark.errors import DataError
from trailmark.tasks.alfworld.engine import NOTHING, parse_game
from trailmark.tasks.alfworld.pddl import All, Atom, Every, Exists, Not, Some, parse_domain, parse_problem

DOMAIN = """\
(define (domain shed)
 (:requirements :adl :typing)
 (:types agent spot tool box)
 (:predicates (at ?a - agent ?s - spot) (stands ?b - box ?s - spot) (lid ?b - box) (up ?b - box) (in ?t - tool ?b - box)
              (has ?a - agent ?t - tool) (busy ?a - agent) (lit ?s - spot) (worn ?t - tool)
              (tidy ?b - box) (heavy ?t - tool))
 (:action go :parameters (?a - agent ?from - spot ?to - spot ?b - box)
   :precondition (and (at ?a ?from) (stands ?b ?to))
   :effect (and (not (at ?a ?from)) (at ?a ?to)))
 (:action lift :parameters (?a - agent ?s - spot ?b - box)
   :precondition (and (lid ?b) (at ?a ?s) (stands ?b ?s) (not (up ?b))) :effect (up ?b))
 (:action drop :parameters (?a - agent ?s - spot ?b - box)
   :precondition (and (lid ?b) (at ?a ?s) (stands ?b ?s) (up ?b)) :effect (not (up ?b)))
 (:action take :parameters (?a - agent ?s - spot ?t - tool ?b - box)
   :precondition (and (at ?a ?s) (stands ?b ?s) (in ?t ?b) (not (busy ?a)) (or (not (lid ?b)) (up ?b)))
   :effect (and (not (in ?t ?b)) (has ?a ?t) (busy ?a) (not (tidy ?b))))
 (:action put :parameters (?a - agent ?s - spot ?t - tool ?b - box)
   :precondition (and (has ?a ?t) (at ?a ?s) (stands ?b ?s) (or (not (lid ?b)) (up ?b)))
   :effect (and (in ?t ?b) (not (has ?a ?t)) (not (busy ?a))))
 (:action see :parameters (?a - agent ?t - tool)
   :precondition (or (has ?a ?t) (exists (?b - box ?s - spot) (and (in ?t ?b) (stands ?b ?s) (at ?a ?s) (up ?b))))
   :effect (worn ?t))
 (:action lamp :parameters (?a - agent ?s - spot)
   :precondition (at ?a ?s)
   :effect (and (when (lit ?s) (not (lit ?s))) (when (not (lit ?s)) (lit ?s))))
 (:action sort :parameters (?a - agent ?b - box)
   :precondition (and (exists (?s - spot) (and (at ?a ?s) (stands ?b ?s) (lit ?s)))
                      (forall (?t - tool) (or (not (in ?t ?b)) (not (heavy ?t)))))
   :effect (and (tidy ?b) (forall (?t - tool) (when (in ?t ?b) (not (worn ?t))))))
 (:action sun :parameters (?a - agent ?b - box) :precondition (and (at ?a spot_bar_2) (up ?b)) :effect (worn ?a))
 (:action mirror :parameters (?a - agent ?t ?u - tool)
   :precondition (and (has ?a ?t) (in ?u crate_bar_1) (not (= ?t ?u)) (not (exists (?b - box) (tidy ?b))))
   :effect (lit ?u))
 (:action rest :parameters (?a - agent) :precondition () :effect (worn ?a))
)
"""
PROBLEM = """\
(define (problem p) (:domain shed)
 (:objects me - agent
   spot_bar_1 spot_bar_2 spot_bar_3 - spot
   saw_bar_1 saw_bar_2 axe_bar_1 - tool
   crate_bar_1 crate_bar_2 chest_bar_1 - box)
 (:init (at me spot_bar_3) (stands crate_bar_1 spot_bar_1) (stands crate_bar_2 spot_bar_1)
        (stands chest_bar_1 spot_bar_2)
        (lid chest_bar_1) (in saw_bar_1 crate_bar_1) (in saw_bar_2 chest_bar_1)
        (in axe_bar_1 crate_bar_2) (heavy axe_bar_1))
 (:goal (and (exists (?b - box) (exists (?t - tool) (and (in ?t ?b) (lid ?b)
                 (exists (?u - tool) (and (in ?u ?b) (not (= ?t ?u)))))))
             (exists (?b - box) (tidy ?b)))))
"""
WORDS = """\
grammar :: \"\"\"
{
 "intro": [{"rhs": "A shed.\\n\\n#task#"}],
 "task": [{"rhs": "Your task is to: tidy up."}],
 "inside": [{"condition": "lid(b:box) & up(b:box)", "rhs": "The {b.name} is open: [{t.name | in(t:tool, b:box)}]."},
            {"condition": "lid(b:box)", "rhs": "The {b.name} is shut."},
            {"rhs": "In the {b.name}: [{t.name | in(t:tool, b:box)}]."}],
 "missing": [{"condition": "not_in(t:tool, b:box)", "rhs": "Taken out before: [{t.name | not_in(t:tool, b:box)}]."},
             {"rhs": "Hm."}],
 "list_empty": [{"rhs": "nothing"}], "list_separator": [{"rhs": ", "}], "list_last_separator": [{"rhs": " and "}]
}
\"\"\";
action go { template :: "go to {b}"; feedback :: "You go. #inside#"; }
action lift { template :: "open {b}"; feedback :: "#inside#"; }
action drop { template :: "close {b}"; feedback :: "#inside#"; }
action take { template :: "take {t} from {b}"; feedback :: "You have the {t.name}. #inside#"; }
action put { template :: "put {t} into {b}"; feedback :: "#inside#"; }
action see { template :: "look at {t}"; feedback :: "A {t.name}."; }
action lamp { template :: "lamp"; feedback :: "Click."; }
action sort { template :: "sort {b}"; feedback :: "#missing#"; }
action sun { template :: "sun {b}"; feedback :: "Warm."; }
action mirror { template :: "hold {t} to {u}"; feedback :: "Bright."; }
action rest { template :: "rest"; feedback :: "You rest."; }
"""


def shed(domain=DOMAIN, problem=PROBLEM, words=WORDS, **more):
    return parse_game(domain, problem, words, id="shed", where="shed.tw-pddl", **more)


def test_a_play():
    play = shed(walkthrough=("go to crate 2",), task_type="tidy").start()
    assert play.observation == "A shed.\n\nYour task is to: tidy up."
    assert play.commands() == ("go to chest 1", "go to crate 1", "go to crate 2", "lamp", "rest")
    told = [
        ("go to chest 1", "You go. The chest 1 is shut."),
        ("take saw 1 from chest 1", NOTHING),
        ("open chest 1", "The chest 1 is open: saw 1."),
        ("go to crate 2", "You go. In the crate 2: saw 2."),
        (" take saw 2 from crate 2\n", "You have the saw 2. In the crate 2: nothing."),
        ("take axe 1 from crate 1", NOTHING),
        ("lamp", "Click."),
        ("sort crate 1", NOTHING),
        ("sort crate 2", "Taken out before: saw 2."),
        ("go to chest 1", "You go. The chest 1 is open: saw 1."),
        ("put saw 2 into chest 1", "The chest 1 is open: saw 2."),  # t is what was put, also in the list
    ]
    for command, text in told:
        assert (command, play.step(command), play.observation) == (command, text, text)
    assert (play.won, play.score, play.done, play.moves) == (True, 1, True, 8)
    play.step("take saw 1 from chest 1")
    assert (play.won, play.score, play.done, play.moves) == (False, 0, False, 9)  # about now, not about the past


def test_going_where_one_is_is_not_on_offer():
    play = shed().start()
    play.step("go to crate 1")
    assert "go to crate 1" not in play.commands() and "go to crate 2" not in play.commands()  # both stand here
    assert play.step("go to crate 2") == NOTHING


def test_what_is_denied_was_taken_away():
    play = shed().start()
    for command in ("go to crate 2", "lamp"):
        play.step(command)
    assert play.step("sort crate 2") == "Hm."
    play.step("take saw 2 from crate 2")
    assert play.step("sort crate 2") == "Taken out before: saw 2."
    play.step("put saw 2 into crate 2")
    assert play.step("sort crate 2") == "Hm."


def test_effects_under_conditions():
    play = shed().start()
    play.step("lamp")
    assert ("lit", "spot_bar_3") in play.facts
    play.step("lamp")
    assert ("lit", "spot_bar_3") not in play.facts
    for command in ("go to crate 2", "take saw 2 from crate 2", "look at saw 2", "put saw 2 into crate 2", "lamp"):
        play.step(command)
    assert ("worn", "saw_bar_1") in play.facts
    play.step("sort crate 2")
    assert ("worn", "saw_bar_1") not in play.facts and ("tidy", "crate_bar_1") in play.facts


def holds(f, b, facts, types):
    """A formula by its definition: the oracle."""
    if isinstance(f, Atom):
        args = [b.get(x, x) for x in f.args]
        return args[0] == args[1] if f.predicate == "=" else (f.predicate, *args) in facts
    if isinstance(f, Not):
        return not holds(f.part, b, facts, types)
    if isinstance(f, All | Some):
        return (all if isinstance(f, All) else any)(holds(p, b, facts, types) for p in f.parts)
    assert isinstance(f, Exists | Every)
    pools = [[x for x in types if types[x] == kind] for _, kind in f.variables]
    tries = (holds(f.body, {**b, **dict(zip(dict(f.variables), v))}, facts, types) for v in itertools.product(*pools))
    return (any if isinstance(f, Exists) else all)(tries)


def oracle(domain, problem, names, facts):
    """Every action on every combination of things whose condition holds and that could change something: what it is
    called, and the facts after it."""
    templates = dict(re.findall(r'action (\w+) \{ template :: "([^"]*)"', WORDS))
    out = {}
    for action in domain.actions:
        pools = [[x for x, kind in problem.objects.items() if kind == want] for _, want in action.parameters]
        for values in itertools.product(*pools):
            b = dict(zip(dict(action.parameters), values))
            if not holds(action.condition, b, facts, problem.objects):
                continue
            adds, deletes = set(), set()
            for e in action.effects:
                own = [[x for x, kind in problem.objects.items() if kind == want] for _, want in e.variables]
                for more in itertools.product(*own):
                    c = {**b, **dict(zip(dict(e.variables), more))}
                    if holds(e.when, c, facts, problem.objects):
                        (adds if e.value else deletes).add((e.atom.predicate, *(c[x] for x in e.atom.args)))
            if action.name == "go" and b["?from"] == b["?to"]:
                continue  # the only action here that can never change anything
            command = re.sub(r"\{(\w+)\}", lambda m, b=b: names[b[f"?{m.group(1)}"]], templates[action.name])
            out[command] = (facts - deletes) | adds
    return out


def test_what_can_be_done_and_what_it_does_by_definition():
    domain = parse_domain(DOMAIN)
    problem = parse_problem(PROBLEM, domain)
    draw, wins, seen = random.Random(0), 0, set()
    for _ in range(6):
        play = shed().start()
        for _ in range(60):
            expected = oracle(domain, problem, play.game.names, play.facts)
            assert play.commands() == tuple(sorted(expected))
            command = draw.choice(play.commands())
            seen.add(command.split()[0])
            play.step(command)
            assert play.facts == expected[command]
            assert play.won == holds(problem.goal, {}, play.facts, problem.objects)
            wins += play.won
    assert wins > 0 and seen == {"go", "open", "close", "take", "put", "look", "lamp", "sort", "rest", "sun", "hold"}


def test_copies_go_their_own_ways():
    game = shed()
    play = game.start()
    play.step("go to crate 1")
    one, two = play.copy(), play.copy()
    before = play.facts
    walks = []
    for seed in range(10):
        pair = []
        for start in (one, two):
            p, draw, said = start.copy(), random.Random(seed), []
            for _ in range(30):
                command = draw.choice(p.commands())
                said += [command, p.step(command), p.commands(), p.won, p.moves]
            pair.append((said, p.facts))
        assert pair[0] == pair[1]
        walks.append(pair[0][0])
    assert len({str(w) for w in walks}) == 10
    assert (
        play.facts
        == one.facts
        == two.facts
        == before
        == shed().start().facts
        ^ {
            ("at", "me", "spot_bar_1"),
            ("at", "me", "spot_bar_3"),
        }
    )
    assert (play.moves, play.observation) == (1, "You go. In the crate 1: axe 1.")
    assert game.start().commands() == shed().start().commands()


def test_planning_without_words():
    play = shed().start()
    spoken = play.copy()
    for command, action in play.actions():
        other = play.copy()
        other.apply(action)
        assert spoken.copy().step(command) != NOTHING
        assert other.observation == play.observation and other.moves == 1
        assert action.command == command and action.case.holds(play._facts)
    assert [(c, a.name, a.args) for c, a in play.actions()][:2] == [
        ("go to chest 1", "go", ("me", "spot_bar_3", "spot_bar_2", "chest_bar_1")),
        ("go to crate 1", "go", ("me", "spot_bar_3", "spot_bar_1", "crate_bar_2")),
    ]
    assert ("worn", "me") not in play.state and ("at", "me", "spot_bar_3") in play.state


def test_goals_as_cases():
    game = shed()
    both, tidy = game.goals
    assert {c.need for c in tidy} == {frozenset({("tidy", b)}) for b in game.members("box")}
    assert len(both) == 6 and all(len(c.need) == 2 and {f[2] for f in c.need} == {"chest_bar_1"} for c in both)
    assert game.things["saw 2"] == "saw_bar_1" and game.types["saw_bar_1"] == "tool"


def test_domain_and_grammar_are_read_once():
    one, two = shed(), shed()
    assert one.rules is two.rules and one.grammar is two.grammar


def test_a_comma_makes_a_condition_empty():
    with_comma = DOMAIN.replace("(?b - box ?s - spot) (and (in ?t ?b)", "(?b - box, ?s - spot) (and (in ?t ?b)")
    for domain, seen in ((DOMAIN, True), (with_comma, False)):
        play = shed(domain).start()
        play.step("go to chest 1")
        play.step("open chest 1")
        assert ("look at saw 1" in play.commands()) is seen
        play.step("take saw 1 from chest 1")
        assert "look at saw 1" in play.commands()


@pytest.mark.parametrize(
    ("part", "old", "new", "said"),
    [
        ("problem", "(heavy axe_bar_1)", "(heavy axe_bar_9)", "shed.tw-pddl (problem):9: unknown object 'axe_bar_9'."),
        ("domain", "(lit ?s)) (lit ?s)", "(lamp ?s)) (lit ?s)", "shed.tw-pddl (domain):25: unknown predicate 'lamp'."),
        ("words", "You go. #inside#", "You go. #in side#", "shed.tw-pddl (grammar):13: unknown symbol '#in side#'."),
        (
            "words",
            "action rest",
            "action sleep",
            "shed.tw-pddl (grammar): action 'rest' of the domain has no words here.",
        ),
        ("words", '"intro"', '"begin"', "shed.tw-pddl (grammar): there is no symbol '#intro#'"),
        (
            "words",
            '"lamp"',
            '"lamp {s | lit(s:spot)}"',
            "shed.tw-pddl (grammar): the template of action 'lamp' depends on",
        ),
    ],
)
def test_broken_games(part, old, new, said):
    text = {"problem": PROBLEM, "domain": DOMAIN, "words": WORDS}[part]
    assert old in text
    with pytest.raises(DataError) as e:
        shed(**{part: text.replace(old, new, 1)})
    assert str(e.value).startswith(said)


def test_a_goal_too_wide_is_refused():
    many = " ".join(f"t{k}" for k in range(70))
    problem = PROBLEM.replace("axe_bar_1 - tool", f"axe_bar_1 {many} - tool").replace(
        "(exists (?b - box) (tidy ?b))", "(exists (?x ?y ?z - tool) (and (worn ?x) (worn ?y) (worn ?z)))"
    )
    with pytest.raises(DataError, match="more than 50000 combinations"):
        shed(problem=problem).start()
