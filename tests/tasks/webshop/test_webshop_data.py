"""The catalogue of 1,000 real products, and recorded visits of people."""

import os
from collections import Counter
from pathlib import Path

import pytest

from trailmark.formats.rows import Row
from trailmark.tasks import get_task
from trailmark.tasks.row_files import file_rows
from trailmark.tasks.webshop.nouns import words
from trailmark.tasks.webshop.products import product_of
from trailmark.tasks.webshop.reward import COLOURS, Paid, matching_options, type_factor
from trailmark.tasks.webshop.sessions import read_visits

pytestmark = pytest.mark.data


@pytest.fixture(scope="module")
def folder():
    if "TRAILMARK_DATA" not in os.environ:
        pytest.skip("TRAILMARK_DATA names no folder")
    return Path(os.environ["TRAILMARK_DATA"]) / "webshop"


@pytest.fixture(scope="module")
def source(folder):
    return get_task("webshop", catalogue=str(folder))


def test_the_colours_are_those_of_the_file(folder):
    assert list(COLOURS) == (folder / "colours.txt").read_text().split()


def test_what_is_searched_is_what_the_original_indexed(folder):
    for row in file_rows(folder / "products_1000.jsonl.gz"):
        bare = Row({k: v for k, v in row.value.items() if k not in ("contents", "Price")}, row.file, row.line)
        assert product_of(bare).contents == row.value["contents"] and product_of(bare).tag == row.value["Price"]


def test_the_exact_purchase_pays_1_for_every_goal_that_can_be_met(source):
    assert len(source.catalogue) == 1000 and Counter(w.human for w in source.written) == {False: 5514, True: 13}
    assert source.unmet == []
    world = source.make()
    for task in source.tasks("all"):
        world.reset(task)
        while not world.over:
            step = world.step(world.oracle())
        assert step.outcome.success and step.reward == 1.0, task.id


def test_the_rewards_of_recorded_visits(folder):
    """The bought products are in no catalogue of ours. What the log says of the type, the attributes and the price is
    taken; the options are matched again; type, sum and product are ours."""
    paid = 0
    for visit in read_visits(folder / "human_sessions_50.jsonl.gz"):
        if visit.reward is None:
            continue
        goal, log = visit.goal, visit.parts
        r_type = type_factor(log["query_match"], log["category_match"], log["title_score"])
        options = matching_options(list(visit.bought["options"].values()), goal["goal_options"])
        if goal["goal_options"]:
            assert options == pytest.approx(log["r_option"] * len(goal["goal_options"]))
        assert log["r_price"] == (visit.bought["price"] <= goal["price_upper"]) and r_type == log["r_type"]
        attributes = round(log["r_att"] * len(goal["attributes"]))
        most = len(goal["attributes"]) + len(goal["goal_options"]) + 1
        assert Paid(r_type, attributes, options, log["r_price"], most).reward == pytest.approx(visit.reward, abs=1e-12)
        paid += 1
    assert paid == 50


def test_how_often_the_default_tagger_may_agree_with_the_original(folder):
    """The recorded overlap is a whole number over as many nouns as the goal's title has."""
    visits = [v for v in read_visits(folder / "human_sessions_50.jsonl.gz") if v.reward is not None]
    shared = [v.parts["title_score"] * len(words(v.goal["name"])) for v in visits]
    assert sum(abs(s - round(s)) < 1e-6 for s in shared) == 18


def test_recorded_visits_are_actions(folder):
    visits = read_visits(folder / "human_sessions_50.jsonl.gz")
    assert len(visits) == 51 and [v.reward is None for v in visits].count(True) == 1
    first = visits[0]
    assert first.actions == (
        "search[living room furniture]", "click[Back to Search]", "search[living room and kitchen furniture]",
        "click[B09LYLKLVX]", "click[Buy Now]",
    )  # fmt: skip
    assert all(v.actions[-1] == "click[Buy Now]" for v in visits if v.reward is not None)
    assert all(v.actions[0].startswith("search[") for v in visits[:50])


def test_goals_of_visits_are_goals(folder, source, tmp_path):
    import json

    (tmp_path / "goals.jsonl").write_text(
        "".join(json.dumps(v.goal) + "\n" for v in read_visits(folder / "human_sessions_50.jsonl.gz"))
    )
    found = get_task("webshop", catalogue=str(folder), goals=str(tmp_path / "goals.jsonl"), unmet="keep")
    assert len(found.written) == 51 and all(w.human for w in found.written)
