"""Facts into sentences: lists, conditions, their order, and what is refused."""

import json

import pytest

from trailmark.errors import DataError
from trailmark.tasks.alfworld.grammar import Grammar, Symbol, parse_grammar, parse_nodes, thing_names

LISTS = {
    "list_empty": [{"rhs": "nothing"}],
    "list_separator": [{"rhs": ", "}],
    "list_last_separator": [{"rhs": ", and "}],
}


class Room:
    """A world of given facts, all things of kind 'thing' except boxes."""

    def __init__(self, *facts):
        self.facts = set(facts)

    def true(self, fact):
        return fact in self.facts

    def rows(self, predicate, at, thing):
        return sorted(f for f in self.facts if f[0] == predicate and (at is None or f[at] == thing))

    def value(self, thing, what):
        return {"name": thing.upper(), "id": thing, "type": "", "definite": "the", "indefinite": "a"}[what]

    def is_a(self, thing, kind):
        return kind == "object" or kind == ("box" if thing.startswith("box") else "thing")


def grammar(**rules) -> Grammar:
    return parse_grammar(f'grammar :: """{json.dumps({**LISTS, **rules})}""";')


def write(rhs, *facts, env=None, **rules):
    return grammar(s=[{"rhs": rhs}], **rules).write((Symbol("s"),), env or {}, Room(*facts))


IN = "[{o.indefinite + ' ' + o.name | in(o:thing, r:box)}]"


def test_lists():
    env = {"r": "box1", "r:box": "box1"}
    assert write(f"In it: {IN}.", env=env) == "In it: nothing."
    assert write(f"In it: {IN}.", ("in", "egg", "box1"), env=env) == "In it: a EGG."
    two = [("in", "egg", "box1"), ("in", "cup", "box1"), ("in", "pan", "box2")]
    assert write(f"In it: {IN}.", *two, env=env) == "In it: a CUP, and a EGG."
    assert write(f"In it: {IN}.", *two, ("in", "ant", "box1"), env=env) == "In it: a ANT, a CUP, and a EGG."


def test_without_brackets_nothing_is_between():
    assert write("{o.name | in(o:thing, r:box)}!", ("in", "b", "box1"), ("in", "a", "box1")) == "AB!"


def test_order_is_that_of_nested_sorted_facts():
    facts = [("at", "box2"), ("at", "box1"), ("in", "z", "box1"), ("in", "a", "box2"), ("in", "c", "box1")]
    said = write("[{o.id | at(r:box) & in(o:thing, r:box)}]", *facts)
    assert said == "c, z, and a"


def test_a_thing_stands_for_one_variable_only():
    facts = [("by", "a", "b"), ("by", "b", "b"), ("by", "b", "a")]
    assert write("[{x.id + y.id | by(x:thing, y:thing)}]", *facts) == "ab, and ba"
    assert write("[{x.id | by(x:thing, x:thing)}]", *facts) == "b"


def test_types_and_their_root():
    facts = [("in", "box2", "box1"), ("in", "egg", "box1")]
    assert write("[{o.id | in(o:thing, r:box)}]", *facts) == "egg"
    assert write("[{o.id | in(o:object, r:box)}]", *facts) == "box2, and egg"


def test_first_rule_that_applies():
    rules = [
        {"condition": "open(r:box) & in(o:thing, r:box)", "rhs": "full"},
        {"condition": "open(r:box)", "rhs": "open"},
    ]
    g = grammar(s=[*rules, {"rhs": "shut"}], t=rules)
    env = {"r": "box1", "r:box": "box1"}
    assert g.write((Symbol("s"),), env, Room(("open", "box1"), ("in", "egg", "box1"))) == "full"
    assert g.write((Symbol("s"),), env, Room(("open", "box1"), ("in", "egg", "box2"))) == "open"
    assert g.write((Symbol("s"),), env, Room(("open", "box2"))) == "shut"
    with pytest.raises(DataError, match="no rule of '#t#' applies here"):
        g.write((Symbol("t"),), env, Room())


def test_symbols_see_the_variables():
    rhs = "[{#tell(o)# | in(o:thing, r:box)}]"
    rules = {"tell(o)": [{"rhs": "{o.definite} {o.name or o.id}"}]}
    assert write(rhs, ("in", "egg", "box1"), ("in", "cup", "box1"), **rules) == "the CUP, and the EGG"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n  Help:\n  look", "Help:\n  look"),  # blanks before a text are dropped, those in it stay
        ("clean the cup; then go", "clean the cup"),
        ("a [list", "a "),
        ("one } two", "one "),
        ('say "this" now', "say this now"),
        ("", ""),
    ],
)
def test_a_text_is_read_up_to_what_can_not_be(text, said):
    assert "".join(parse_nodes(text)) == said


def test_unknown_names_in_a_value():
    with pytest.raises(DataError, match="a text uses 'q'"):
        write("{q.name}")


@pytest.mark.parametrize("value", ["o.__class__", "open('x')", "o.name * 2", "1", "o.name + "])
def test_nothing_is_evaluated(value):
    with pytest.raises(DataError, match="<grammar>:1: "):
        write("{" + value + "}")


DOCUMENT = """\
# words for a box
grammar :: \"\"\"
{
    "intro": [{"rhs": "Hello. #tell#"}],
    "tell": [{"rhs": "[{r.name | at(r:box)}]"}]
}
\"\"\";

action Push {
    template :: "push {r}";
    feedback :: "#push.said#";
    grammar :: \"\"\"
    {
        # a comment
        "push.said": [{"condition": "at(r:box)", "rhs": "It moves."}, {"rhs": "It stays."}],
        "list_empty": [{"rhs": "-"}], "list_separator": [{"rhs": ","}], "list_last_separator": [{"rhs": ","}]
    }
    \"\"\";
}
"""


def test_document():
    g = parse_grammar(DOCUMENT)
    assert list(g.actions) == ["push"]
    assert g.predicates == {"at"}
    env = {"r": "box1", "r:box": "box1"}
    assert g.write(g.actions["push"].template, env, Room()) == "push BOX1"
    assert g.write(g.actions["push"].feedback, env, Room(("at", "box1"))) == "It moves."
    assert g.write((Symbol("intro"),), {}, Room(("at", "box2"), ("at", "box1"))) == "Hello. BOX1,BOX2"


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("Hello. #tell#", "Hello. #tel#", 4, "unknown symbol '#tel#'. Did you mean 'tell'?"),
        ("#push.said#", "#pushed#", 11, "unknown symbol '#pushed#'."),
        ('"list_empty": [{"rhs": "-"}], ', "", 5, "unknown symbol '#list_empty#'."),
        ('"Hello. #tell#"}]', '"Hello. #tell#"}', 5, "these rules are not JSON: "),
        ('[{"rhs": "Hello. #tell#"}]', '"Hello"', 4, "symbol '#intro#' needs a list of rules."),
        ('{"rhs": "Hello. #tell#"}', '{"text": ""}', 4, "a rule of '#intro#' has no text 'rhs'."),
        ("| at(r:box)", "| at r", 5, "'at r' is not a condition such as openable(r:receptacle) (symbol '#tell#')."),
        ('"[{r.name | at(r:box)}]"', '"#intro#"', 4, "symbol '#intro#' leads back to itself: intro -> tell -> intro."),
        ("action Push", "actions Push", 9, "'actions' should be 'action' or 'grammar'."),
        ("template ::", "pattern ::", 10, "action 'push' has the unknown part 'pattern'."),
        ('    template :: "push {r}";\n', "", 18, "action 'push' needs a template and a feedback."),
        ('"#push.said#";', '"#push.said#"', 12, "'grammar' should be ';'."),
    ],
)
def test_broken_grammar(old, new, line, said):
    assert old in DOCUMENT
    with pytest.raises(DataError) as e:
        parse_grammar(DOCUMENT.replace(old, new, 1), "box.twl2")
    assert str(e.value).startswith(f"box.twl2:{line}: {said}")


def test_names_count_down_through_the_sorted_ids():
    ids = ["mug_bar_b", "mug_bar_a", "mug_bar_c", "sink_bar_x", "sink_bar_x_bar_sinkbasin", "agent1", "cd_bar__minus_1"]
    assert thing_names(ids) == {
        "agent1": "agent1 ",
        "cd_bar__minus_1": "cd 1",
        "mug_bar_a": "mug 3",
        "mug_bar_b": "mug 2",
        "mug_bar_c": "mug 1",
        "sink_bar_x": "sink 1",
        "sink_bar_x_bar_sinkbasin": "sinkbasin 1",
    }
