"""A visit to the shop: every page's text, what can be clicked where, and how a visit ends."""

import pytest
from small_catalogue import GOALS, PRODUCTS, write

from trailmark.errors import TaskError
from trailmark.formats import own_episodes
from trailmark.tasks import get_task
from trailmark.tasks.check import check_task
from trailmark.tasks.webshop.world import ASK_AGAIN, parse_action, parse_reply
from trailmark.types import Scored, Task


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "shop")


def visit(folder, number=0, moves=(), **options):
    """The first page of a goal, and the steps of these actions."""
    source = get_task("webshop", catalogue=str(folder), **{"actions": "bare", "opening": "none"} | options)
    world = source.make()
    first = world.reset(source.tasks("all")[number])
    return world, first, [world.step(m) for m in moves]


def pages(folder, number, *actions):
    _, first, steps = visit(folder, number, actions)
    return [first.state, *(s.observation.state for s in steps)]


GOAL = "Instruction: [SEP] a lamp"
LAMPS = "B05 [SEP] Desk Lamp [SEP] $100.0"


def test_the_pages_of_a_lamp(folder):
    seen = pages(folder, 6, "search[Reading lamp]", "click[B04]", "click[Description]", "click[< Prev]",
                 "click[Features]", "click[< Prev]", "click[Reviews]", "click[< Prev]", "click[buy now]")  # fmt: skip
    item = (f"{GOAL} [SEP] Back to Search [SEP] < Prev [SEP] Reading Lamp [SEP] Price: $985.0 [SEP] Rating: N.A. [SEP] "
            "Description [SEP] Features [SEP] Reviews [SEP] Buy Now")  # fmt: skip
    sub = f"{GOAL} [SEP] Back to Search [SEP] < Prev"
    assert seen == [
        "WebShop [SEP] Instruction: [SEP] a lamp [SEP] Search",
        f"{GOAL} [SEP] Back to Search [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] B04 [SEP] Reading Lamp [SEP] "
        f"$985.0 [SEP] {LAMPS}",
        item,
        sub,  # there is no description
        item,
        sub,
        item,
        f'{sub} [SEP] "Bright" [SEP] 5 [SEP] I can read again.',
        item,
        "Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk interface.) [SEP] "
        "Purchased [SEP] asin [SEP] B04 [SEP] options [SEP] {} [SEP] attrs [SEP] None [SEP] category [SEP] None [SEP] "
        "query [SEP] None [SEP] product category [SEP] None [SEP] Target [SEP] asin [SEP] options [SEP] attrs [SEP] "
        "price upper [SEP] instuction text [SEP] category [SEP] product category [SEP] query [SEP] Goal [SEP] None "
        "[SEP] Reward [SEP] Your score (min 0.0, max 1.0) [SEP] 1.0 [SEP] Reward Details [SEP] None",
    ]


def test_the_pages_of_a_bed_with_options(folder):
    seen = pages(folder, 0, "search[oak]", "click[b01]", "click[King]", "click[features]", "click[back to search]")
    options = "size [SEP] queen [SEP] king [SEP] color [SEP] oak brown [SEP] white"
    assert f"[SEP] < Prev [SEP] {options} [SEP] Oak Bed Frame [SEP] Price: $95.0" in seen[2]
    assert seen[3] == seen[2]  # a chosen option is not marked
    assert seen[4].endswith("[SEP] < Prev [SEP] Strong and quiet [SEP] Ten years old")
    assert seen[5] == seen[0]


def test_pages_of_results_go_on_for_ever(folder):
    seen = pages(folder, 6, "search[pillow]", "click[next >]", "click[next >]", "click[< prev]", "click[c11]")
    assert "Page 1 (Total results: 12) [SEP] Next > [SEP] C00 [SEP] Pillow Number 0 [SEP] $20.0 [SEP] C01" in seen[1]
    turn = "Back to Search [SEP] Page 2 (Total results: 12) [SEP] < Prev [SEP] Next >"
    last = "C10 [SEP] Pillow Number 10 [SEP] $20.0 [SEP] C11 [SEP] Pillow Number 11 [SEP] $20.0"
    assert seen[2] == f"{GOAL} [SEP] {turn} [SEP] {last}"
    assert seen[3] == f"{GOAL} [SEP] Back to Search [SEP] Page 3 (Total results: 12) [SEP] < Prev [SEP] Next >"
    assert "(Total results: 0)" in pages(folder, 6, "search[zeppelin]")[1]
    assert seen[4] == seen[2] and "Pillow Number 11 [SEP] Price: $20.0" in seen[5]


def test_search_works_on_every_page_and_options_are_lost(folder):
    world, _, steps = visit(folder, 0, ["search[oak]", "click[b01]", "click[king]", "click[description]"])
    assert world.options == {"size": "king"} and steps[-1].observation.state.endswith("[SEP] A bed of oak.")
    world.step("click[< prev]")
    assert world.options == {"size": "king"} and world.place == "item"
    world.step("click[queen]")
    assert world.options == {"size": "queen"}
    assert "Page 1 (Total results: 1)" in world.step("click[< prev]").observation.state and world.options == {}
    world.step("click[b01]")
    world.step("click[white]")
    world.step("search[cat]")
    assert world.options == {} and world.place == "results"
    assert world.over


def test_what_cannot_be_done_changes_nothing_and_costs_a_step(folder):
    world, first, _ = visit(folder, 0)
    for action in ("", "search", "search[]", "click[search]", "click[b01]", "Search[oak]", " search[oak]", "buy[b01]",
                   "click[buy now]", "click[< prev]"):  # fmt: skip
        step = world.step(action)
        assert step.observation == first and not step.info["known"] and step.reward == 0
    assert step.truncated and not step.terminated and step.outcome == Scored(0.0, False, {"bought": 0.0})
    with pytest.raises(TaskError, match="is over; call reset"):
        world.step("search[oak]")


def test_replies_and_actions():
    assert parse_reply("Thought: Action? no.\nAction: click[a]\nAction: click[b]") == "click[a]\nAction: click[b]"
    assert parse_reply("Action:click[a]") is None is parse_reply("action: click[a]")
    assert parse_reply("Action:  click[a]") == " click[a]"
    assert parse_action("click[Buy Now]") == ("click", "buy now") == parse_action("click[buy now] and go\nmore]")
    assert parse_action("click[a[b]") == ("click[a", "b") and parse_action("search[a]b]") == ("search", "a]b")
    assert parse_action("click[]") is None is parse_action("[a]") and parse_action("\nclick[a]") is None


def test_replies_with_a_thought(folder):
    world, first, steps = visit(folder, 6, ["search[lamp]", "Thought: x\nAction: search[lamp]"], actions="react",
                                opening="joined")  # fmt: skip
    shown = "Observation:\nWebShop [SEP] Instruction: [SEP] a lamp [SEP] Search"
    assert first.state == f"{world.source.instruction}\n\n{shown}" and "You have 10 actions." in first.state
    assert steps[0].observation.state == f"Observation:\n{ASK_AGAIN}" and steps[0].info["action"] is None
    assert steps[1].observation.state.startswith(f"Observation:\n{GOAL} [SEP] Back to Search") and world.steps == 2
    source = get_task("webshop", catalogue=str(folder), opening="apart")
    assert [m["role"] for m in source.first_messages] == ["user", "assistant"]
    assert source.first_messages[0]["content"] == source.instruction
    assert source.make().reset(source.tasks("all")[6]).state.startswith("Observation:\nWebShop")
    assert "Action:" not in get_task("webshop", catalogue=str(folder), actions="bare").instruction


def test_a_purchase_in_the_last_step_counts(folder):
    wait = ["search[bed]"] * 8
    _, _, steps = visit(folder, 1, [*wait, "click[b03]", "click[buy now]"])
    assert not steps[-2].over and steps[-1].terminated and not steps[-1].truncated
    # one of B01's three nouns and its query are those of no cat bed: o = 1/3; the price is the only other match
    assert steps[-1].outcome == Scored(0.25, False, {"bought": 1, "type": 1, "attributes": 0, "options": 0, "price": 1})
    _, _, steps = visit(folder, 1, [*wait, "click[b03]", "click[features]"])
    assert steps[-1].truncated and steps[-1].outcome.reward == 0


def test_a_value_of_two_options_goes_to_the_last(folder):
    goal = {"asin": "B05", "instruction": "a red lamp", "attributes": ["warm light"], "instruction_options": ["red"]}
    write(folder, goals=[goal])
    world, _, steps = visit(folder, 0, ["search[desk]", "click[b05]", "click[red]", "click[blue]", "click[buy now]"])
    assert world.options == {"light": "red", "color": "blue"} and steps[-1].reward == 1.0
    assert 'options [SEP] {"color": "blue", "light": "red"}' in steps[-1].observation.state


def test_the_oracle_buys_the_goal(folder):
    world, _, _ = visit(folder, 2, actions="react")
    said = []
    while not world.over:
        said.append(world.oracle())
        step = world.step(said[-1])
    assert said == [f"Action: {a}" for a in ("search[Oak Bed Frame]", "click[B01]", "click[queen]", "click[white]",
                                             "click[Buy Now]")]  # fmt: skip
    assert step.outcome.success
    world, _, _ = visit(folder, 2, ["search[pillow]", "click[next >]"])
    assert world.oracle() == "search[Oak Bed Frame]"
    goal = {"asin": "X", "title": "Bed", "query": "beds", "product_category": "", "instruction": "a bed",
            "attributes": ["solid wood"], "price_upper": 100, "goal_options": []}  # fmt: skip
    assert visit(write(folder, goals=[goal]), 0)[0].oracle() is None


def test_a_copy_is_a_world_of_its_own(folder):
    world, _, _ = visit(folder, 0, ["search[oak]", "click[b01]", "click[king]"])
    twin = world.copy()
    twin.step("click[white]")
    world.step("click[< prev]")
    assert twin.options == {"size": "king", "color": "white"} and world.place == "results" and twin.place == "item"
    assert not visit(folder)[0].copy().over


@pytest.mark.parametrize("actions", ["react", "bare"])
def test_it_keeps_the_protocol(folder, actions):
    opening = "apart" if actions == "react" else "none"
    source = get_task("webshop", catalogue=str(folder), actions=actions, opening=opening)
    report = check_task(source, split="all", episodes=5)
    assert report.ok, report
    assert report.counts["ended"] > 0


def test_a_task_that_is_no_goal(folder):
    source = get_task("webshop", catalogue=str(folder))
    good = source.tasks("all")[0]
    for change, want in (
        ({"cap": "x"}, "a cap that is a price or null"), ({"attributes": []}, "it needs attributes"),
        ({"attributes": 3}, "lacks 'int' object is not iterable"),
    ):  # fmt: skip
        with pytest.raises(TaskError, match=want):
            source.make().reset(Task("t", 0, {**good.data, **change}))
    with pytest.raises(TaskError, match="task 't' is no goal of webshop: its data lacks 'title'"):
        source.make().reset(Task("t", 0, {}))


def test_it_is_played_in_the_terminal(folder, tmp_path):
    from typer.testing import CliRunner

    from trailmark.commands.app import app

    out = tmp_path / "e.jsonl"
    typed = "Action: search[reading lamp]\nAction: click[b04]\nAction: click[buy now]\n"
    words = ["play", "webshop", f"catalogue={folder}", "--split", "all", "--start", "7", "--out", str(out)]
    done = CliRunner().invoke(app, words, input=typed)
    assert done.exit_code == 0 and f"won, return 1; 3 steps saved to {out}" in done.output, done.output
    (episode,) = own_episodes.read(out).episodes
    assert episode.outcome.parts["bought"] == 1 and episode.turns[1].action == "Action: click[b04]"


def test_a_search_in_lower_case_and_an_option_with_a_bracket(folder):
    assert len(PRODUCTS) == 17 and GOALS
    odd = PRODUCTS[0] | {"options": {"size": ["king [wide]", "a/b"]}}
    write(folder, [odd], [GOALS[0]])
    world, _, _ = visit(folder, 0, ["search[OAK]", "click[B01]", "click[king [wide]]"])
    assert world.options == {}  # the name is "click[king ", as in the original
    world.step("click[a/b]")
    assert world.options == {"size": "a/b"}
