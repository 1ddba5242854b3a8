"""Products and goals: what is read, drawn and refused."""

import json
import random

import pytest
from small_catalogue import GOALS, PRODUCTS, product, write

from trailmark.errors import DataError, TaskError
from trailmark.formats.rows import Row
from trailmark.tasks import get_task
from trailmark.tasks.webshop.goals import cap_of
from trailmark.tasks.webshop.products import Catalogue, price_of, product_of


def shop(folder, **options):
    return get_task("webshop", catalogue=str(folder), **options)


def test_a_product_as_it_is_searched_and_shown(tmp_path):
    bed = product_of(Row(PRODUCTS[0], tmp_path))
    assert bed.contents == "oak bed frame a bed of oak. strong and quiet size: queen, king, and color: oak brown, white"
    assert bed.tag == "$95.0" and product_of(Row(PRODUCTS[1], tmp_path)).tag == "$40.0 to $60.0"
    assert product_of(Row(PRODUCTS[4], tmp_path)).pricing == (100.0,)
    assert bed.texts == ("oak bed frame", "strong and quiet ten years old", "a bed of oak.")


def test_a_row_of_the_original(tmp_path):
    raw = {
        "asin": "B01", "name": "Oak Bed", "full_description": None, "small_description": ["Strong"], "query": " Beds ",
        "product_category": "Home", "pricing": "$1,040.50$2,000.00", "images": [], "brand": "x",
        "customization_options": {"Size": [{"value": " 3/4 Queen "}], "Color": None},
    }  # fmt: skip
    found = product_of(Row(raw, tmp_path), {"B01": {"attributes": ["solid wood"]}})
    assert found.options == {"size": ("3 | 4 queen",)} and found.attributes == ("solid wood",) and found.query == "beds"
    assert found.pricing == (1040.5, 2000.0) and found.tag == "$1040.5 to $2000.0"
    assert product_of(Row(raw | {"pricing": None}, tmp_path)).attributes == ("DUMMY_ATTR",)


def test_prices_are_drawn_once_by_the_seed(tmp_path):
    folder = write(tmp_path / "shop")
    first, again, other = (Catalogue(folder / "products.jsonl", seed=s) for s in (0, 0, 1))
    assert first.prices == again.prices and first.prices[1] != other.prices[1]
    assert 40 <= first.prices[1] <= 60 and first.prices[0] == other.prices[0] == 95
    turned = product_of(Row(product("B02", "x", pricing=[60.0, 40.0]), tmp_path))
    assert price_of(turned, 0) == first.prices[1]


def test_caps():
    draw = random.Random(3)
    assert {cap_of(95.0, draw) for _ in range(99)} == {110.0, 120.0, 130.0}  # the larger of two of 100 to 130
    assert {cap_of(100.0, draw) for _ in range(99)} == {120.0, 130.0, 140.0}  # 100 is not above 100
    assert {cap_of(970.0, draw) for _ in range(9)} == {990.0}
    assert cap_of(980.0, draw) is None and cap_of(2000.0, draw) is None


def test_goals_of_all_combinations_and_of_people(tmp_path):
    source = shop(write(tmp_path / "shop"))
    goals = {w.id: w.goal for w in source.written}
    assert list(goals) == [f"B01-0-{k}" for k in range(4)] + ["B02-0-0", "B03-0-0", "B04-0-0"]
    assert [g.options for g in goals.values()][:4] == [
        ("oak brown", "queen"), ("oak brown", "king"), ("white", "queen"), ("white", "king"),
    ]  # fmt: skip
    cap = goals["B01-0-0"].cap
    assert cap in (110, 120, 130) and goals["B01-0-3"].cap == cap
    assert goals["B01-0-0"].instruction == (
        f"Find me solid wood beds with color: oak brown, and size: queen, and price lower than {cap:.2f} dollars"
    )
    assert goals["B03-0-0"].instruction.startswith("a bed for my cat that I can wash, and price lower than ")
    assert goals["B04-0-0"].cap is None and goals["B04-0-0"].instruction == "a lamp"
    assert source.skipped == {"goals without attributes": 1}
    assert "1 goals without attributes were left out." in source.left_out_of("all")
    assert [len(source.tasks(s)) for s in ("all", "train", "test")] == [7, 5, 2]


def test_kinds_and_one_goal_per_product(tmp_path):
    folder = write(tmp_path / "shop")
    assert {w.goal.asin for w in shop(folder, kind="human").written} == {"B03", "B04"}
    alone = shop(folder, kind="synthetic", per_product=True)
    assert [w.goal.asin for w in alone.written] == ["B01", "B02"]
    assert alone.written[0].goal == shop(folder, kind="synthetic", per_product=True).written[0].goal
    drawn = {shop(folder, per_product=True, seed=s).written[0].goal.options for s in range(12)}
    assert len(drawn) > 1


def test_tasks_are_drawn_in_passes(tmp_path):
    source = shop(write(tmp_path / "shop"))
    ids = [t.id for t in source.tasks("all", 10, seed=4)]
    assert ids == [t.id for t in source.tasks("all", 10, seed=4)] != [t.id for t in source.tasks("all", 10, seed=5)]
    assert len({i.partition("~")[0] for i in ids[:7]}) == 7 and sum("~2" in i for i in ids) == 3
    with pytest.raises(TaskError, match="no split 'tests'. Did you mean 'test'"):
        source.tasks("tests")


def test_goals_as_the_original_writes_them(tmp_path):
    folder = write(tmp_path / "shop", goals=None)
    human = {"B03": [{"instruction": "a bed for a cat.", "instruction_attributes": ["machine washable"],
                      "instruction_options": [], "attributes": ["other"]}], "B99": []}  # fmt: skip
    (folder / "items_human_ins.json").write_text(json.dumps(human))
    source = shop(folder)
    assert [w.goal.attributes for w in source.written] == [("machine washable",)] and source.written[0].human
    assert source.skipped == {"goals of products that are not in the catalogue": 1}
    synthetic = {"B01": {"attributes": ["x"], "instruction": "Find me beds", "instruction_attributes": ["solid wood"]},
                 "B02": {"attributes": []}}  # fmt: skip
    (folder / "items_ins_v2.json").write_text(json.dumps(synthetic))
    assert len(shop(folder, goals=str(folder / "items_ins_v2.json")).written) == 4
    session = {"asin": "X", "name": "Bed", "query": "beds", "product_category": "Home", "instruction_text": "a bed",
               "attributes": ["solid wood"], "goal_options": {"size": "king"}, "price_upper": 100.0}  # fmt: skip
    (folder / "own.jsonl").write_text(json.dumps(session) + "\n")
    (found,) = shop(folder, goals=str(folder / "own.jsonl")).written
    assert found.goal.options == ("king",) and found.goal.cap == 100 and found.goal.instruction == "a bed"


def test_goals_in_the_rows_of_products(tmp_path):
    said = {"instruction": "a cat bed", "instruction_attributes": ["machine washable"]}
    rows = [PRODUCTS[2] | {"instructions": [said]},
            PRODUCTS[1] | {"instruction_text": "Find me beds", "instruction_attributes": ["heavy duty"]}]  # fmt: skip
    source = shop(write(tmp_path / "shop", rows, None))
    assert [(w.goal.asin, w.human) for w in source.written] == [("B03", True), ("B02", False)]
    assert {w.split for w in source.written} <= {"train", "val", "test"}
    with pytest.raises(DataError, match="products.jsonl: holds no goals"):
        shop(write(tmp_path / "none", PRODUCTS[:2], None))


UNMET = {"asin": "B02", "split": "train", "attributes": ["heavy duty"], "human": True}


def test_goals_that_no_product_meets(tmp_path):
    wishes = [
        {"instruction": "pink", "instruction_options": ["pink"]},  # no product has it
        {"instruction": "an accent alone", "instruction_options": ["é"]},  # nothing to compare
        {"instruction": "wooden", "attributes": ["solid gold"]},
        {"instruction": "cheap", "price_upper": 30.0},  # every heavy duty product is dearer
        # another product meets it, B01 at 95
        {"instruction": "oak", "attributes": ["solid wood"], "instruction_options": ["white"], "price_upper": 95},
    ]
    folder = write(tmp_path / "shop", goals=[UNMET | w for w in wishes])
    source = shop(folder)
    assert [w.goal.instruction.partition(",")[0] for w in source.unmet] == [w["instruction"] for w in wishes[:4]]
    assert len(source.written) == 1 and "4 goals that no product meets were left out." in source.left_out_of("train")
    assert len(shop(folder, unmet="keep").written) == 5
    with pytest.raises(DataError, match=r"goals.jsonl:1: key 'asin': no product .* meets goal 'B02-0-0', nor 3 other"):
        shop(folder, unmet="refuse")
    with pytest.raises(DataError, match="of 4 goals .all. no product meets one"):
        shop(write(tmp_path / "none", goals=[UNMET | w for w in wishes[:4]]))


def test_splits_by_the_originals_numbers(tmp_path):
    folder = write(tmp_path / "shop")
    order = [w.id for w in shop(folder).written]
    random.Random(233).shuffle(order)
    (folder / "test.json").write_text("[6, 0, 6]")
    source = shop(folder, ids={"test": str(folder / "test.json"), "train": [1, 2]})
    assert [t.id for t in source.tasks("test")] == [f"webshop/{order[6]}", f"webshop/{order[0]}"]
    assert [t.id for t in source.tasks("train")] == [f"webshop/{order[1]}", f"webshop/{order[2]}"]
    with pytest.raises(TaskError, match="ids of split 'test' must be a list of numbers from 0 to 6"):
        shop(folder, ids={"test": [7]})


@pytest.mark.parametrize("change, want", [
    ({"asin": ""}, r"products.jsonl:2: key 'asin': must not be empty"),
    ({"Title": None}, r"products.jsonl:2: key 'Title': must be text, not None"),
    ({"pricing": ["cheap"]}, r"products.jsonl:2: key 'pricing': must be a list of one or two prices"),
    ({"pricing": [-1]}, r"products.jsonl:2: key 'pricing'"),
    ({"options": ["red"]}, r"products.jsonl:2: key 'options': must be an object"),
    ({"options": {"size": "red"}}, r"products.jsonl:2: key 'options.size': must be a list of texts"),
    ({"BulletPoints": "strong"}, r"products.jsonl:2: key 'BulletPoints': must be a list of texts"),
    ({"Reviews": ["good"]}, r"products.jsonl:2: key 'Reviews.0': must be an object"),
])  # fmt: skip
def test_a_bad_product_is_named(tmp_path, change, want):
    with pytest.raises(DataError, match=want):
        shop(write(tmp_path / "shop", [PRODUCTS[0], PRODUCTS[1] | change]))


@pytest.mark.parametrize("change, want", [
    ({"asin": "B99"}, r"goals.jsonl:2: key 'asin': names 'B99', which is not in .*products.jsonl"),
    ({"instruction": 5}, r"goals.jsonl:2: key 'instruction': must be text, not 5"),
    ({"attributes": "solid wood"}, r"goals.jsonl:2: key 'attributes': must be a list of texts"),
    ({"instruction_options": "white", "human": True}, r"goals.jsonl:2: key 'instruction_options'"),
    ({"options": ["white"]}, r"goals.jsonl:2: key 'options': must be an object"),
    ({"price_upper": 0}, r"goals.jsonl:2: key 'price_upper': must be a price above 0, not 0"),
    ({"price_upper": "cheap"}, r"goals.jsonl:2: key 'price_upper': must be a finite number"),
    ({"split": 1}, r"goals.jsonl:2: key 'split': must be text"),
])  # fmt: skip
def test_a_bad_goal_is_named(tmp_path, change, want):
    with pytest.raises(DataError, match=want):
        shop(write(tmp_path / "shop", goals=[GOALS[0], GOALS[1] | change]))


def test_what_else_is_refused(tmp_path):
    folder = write(tmp_path / "shop", [PRODUCTS[0], PRODUCTS[0], PRODUCTS[1]], GOALS[:2])
    assert shop(folder).left_out_of("all") == ["1 products that were there before were left out."]
    for options, want in (
        ({"catalogue": str(tmp_path / "nowhere")}, "there is no file or folder .*nowhere to read products from"),
        ({"catalogue": str(tmp_path)}, "holds no file of products"),
        ({"kind": "humane"}, "no kind 'humane'. Did you mean 'human'"),
        ({"horizon": 0}, "a horizon of at least 1, not 0"),
        ({"actions": "raw"}, "no actions 'raw'"),
        ({"tagger": "spacy"}, "no tagger 'spacy': it is words, a file.json of titles, or my_module:function"),
        ({"tagger": "no_such_module_here:nouns"}, "no_such_module_here"),
    ):
        with pytest.raises(TaskError, match=want):
            get_task("webshop", **{"catalogue": str(folder)} | options)
    (folder / "products2.jsonl").write_text("")
    with pytest.raises(TaskError, match=r"several files of products \(products.jsonl, products2.jsonl\): name one"):
        shop(folder)


def test_taggers(tmp_path):
    folder = write(tmp_path / "shop", goals=GOALS[:2])
    assert shop(folder).tag("The 2 Oak-Beds of Women's 5pcs") == ("oak", "beds", "women's", "5pcs")
    nouns = tmp_path / "nouns.json"
    nouns.write_text(json.dumps({"Oak Bed Frame": ["Bed"], "Steel Bed Frame": []}))
    source = shop(folder, tagger=str(nouns))
    assert [w.goal.nouns for w in source.written][-2:] == [("bed",), ()]
    with pytest.raises(DataError, match="nouns.json: key 'Cat Bed': is not among its titles"):
        shop(write(tmp_path / "more"), tagger=str(nouns))
    nouns.write_text(json.dumps({"Oak Bed Frame": "Bed"}))
    with pytest.raises(DataError, match="nouns.json: key 'Oak Bed Frame': must be a list of words"):
        shop(folder, tagger=str(nouns))


def test_a_tagger_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_tagger_of_titles.py").write_text(
        "def last(title):\n    return title.split()[-1:]\n"
        "def text(title):\n    return title\n"
        "def broken(title):\n    return 1 / 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = write(tmp_path / "shop", goals=GOALS[:2])
    assert shop(folder, tagger="own_tagger_of_titles:last").written[0].goal.nouns == ("frame",)
    with pytest.raises(TaskError, match="must give a list of words, not 'Oak Bed Frame'"):
        shop(folder, tagger="own_tagger_of_titles:text")
    with pytest.raises(TaskError, match="raised ZeroDivisionError for 'Oak Bed Frame': division by zero"):
        shop(folder, tagger="own_tagger_of_titles:broken")


def test_the_exact_purchase_of_every_synthetic_goal_pays_1(tmp_path):
    source = shop(write(tmp_path / "shop"), kind="synthetic")
    for task in source.tasks("all"):
        world = source.make()
        world.reset(task)
        while not world.over:
            step = world.step(world.oracle())
        assert step.reward == 1.0 and step.terminated and step.outcome.success
