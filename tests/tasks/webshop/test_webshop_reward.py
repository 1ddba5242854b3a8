"""What purchases pay, worked out by hand from the rules in `reward.py`'s docstring.

The goal asks for an "easy clean" sofa in "grey" for at most 50; its title has four nouns. The purchase is that sofa,
bought for 50. Each case changes a few things and says r_type, the matched attributes, the matched options, whether the
price is right, and over how many."""

import dataclasses
from fractions import Fraction

import pytest

from trailmark.tasks.webshop.products import Product
from trailmark.tasks.webshop.reward import COLOURS, Goal, colour_of, pay

GOAL = Goal(
    asin="A", instruction="", attributes=("easy clean",), options=("grey",), cap=50.0, title="", query="sofas",
    product_category="Home › Furniture › Sofas", nouns=("oak", "sofa", "couch", "seat"),
)  # fmt: skip
PRODUCT = Product(
    asin="A", title="", description="", bullets=(), pricing=(50.0,), tag="$50.0", options={},
    attributes=("easy clean",), query="sofas", product_category="Home › Furniture › Sofas",
)  # fmt: skip
OTHER = {"query": "beds", "product_category": "Garden › Beds › Raised"}
TEN = tuple("abcdefghij")


def texts(title="", bullets=(), description=""):
    return {"attributes": (), "texts": (title.lower(), " ".join(bullets).lower(), description.lower())}


def shared(k, of):
    """Nouns: `of` different ones in the goal's title, of which the product's title has `k`."""
    all_of = tuple(f"n{i}" for i in range(of))
    return {"nouns": all_of}, all_of[:k]


def kind(name, k, of, product, want, **goal):
    """Only r_type changes: the other parts are 3 of 3."""
    nouns, found = shared(k, of)
    return (name, nouns | goal, product, {"nouns": found}, (want, 1, 1, True, 3))


def attribute(name, wanted, product, met, **more):
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    return (name, {"attributes": wanted, "options": ()}, product, more, (1, met, 0, True, len(wanted) + 1))


def option(name, wanted, chosen, met, **more):
    """Only the matched options change: attribute and price are right."""
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    chosen = {str(i): c for i, c in enumerate([chosen] if isinstance(chosen, str) else chosen)}
    return (name, {"options": wanted}, {}, {"chosen": chosen} | more, (1, 1, met, True, len(wanted) + 2))


CASES = [
    # --- the type: the exact purchase, and o at 0, 0.1 and 0.2
    ("the exact purchase", {}, {}, {}, (1, 1, 1, True, 3)),
    kind("another query and category, all nouns", 4, 4, OTHER, 1),
    kind("o = 1/4 is above 0.2", 1, 4, OTHER, 1),
    kind("o = 3/14 is above 0.2", 3, 14, OTHER, 1),
    kind("o = 1/5 is not above 0.2", 1, 5, OTHER, Fraction(1, 2)),
    kind("o = 2/10 is not above 0.2", 2, 10, OTHER, Fraction(1, 2)),
    kind("o = 1/5, same query", 1, 5, {"product_category": "Garden"}, 1),
    kind("o = 1/5, same category", 1, 5, {"query": "beds"}, 1),
    kind("o = 1/10 is not below 0.1, same query", 1, 10, {}, 1),
    kind("o = 1/10 is not below 0.1", 1, 10, OTHER, Fraction(1, 2)),
    kind("o = 2/20 is not below 0.1", 2, 20, OTHER, Fraction(1, 2)),
    kind("o = 1/11 is below 0.1, though the query is the same", 1, 11, {}, Fraction(1, 10)),
    kind("o = 1/11, another query and category", 1, 11, OTHER, Fraction(1, 10)),
    kind("o = 2/21 is below 0.1", 2, 21, OTHER, Fraction(1, 10)),
    kind("o = 0, though query and category are the same", 0, 4, {}, 0),
    kind("o = 0, another query and category", 0, 4, OTHER, 0),
    kind("o = 0, same category", 0, 4, {"query": "beds"}, 0),
    kind("no nouns in the goal's title: o = 0.2, same query", 0, 0, {}, 1),
    kind("no nouns in the goal's title: o = 0.2, same category", 0, 0, {"query": "beds"}, 1),
    kind("no nouns in the goal's title: o = 0.2", 0, 0, OTHER, Fraction(1, 2)),
    ("a noun five times and shared: 1/5", {"nouns": ("sofa",) * 5}, OTHER, {"nouns": ("sofa",)},
     (Fraction(1, 2), 1, 1, True, 3)),
    ("a noun four times and shared: 1/4", {"nouns": ("sofa",) * 4}, OTHER, {"nouns": ("sofa",)}, (1, 1, 1, True, 3)),
    ("three equal nouns and one: 1/4 shared once", {"nouns": ("sofa", "sofa", "sofa", "oak")}, OTHER,
     {"nouns": ("sofa", "sofa")}, (1, 1, 1, True, 3)),
    ("repeats in the product's title do not count", {"nouns": TEN}, OTHER, {"nouns": ("a", "a", "a")},
     (Fraction(1, 2), 1, 1, True, 3)),
    ("one noun eleven times: even the exact purchase", {"nouns": ("sofa",) * 11}, {}, {"nouns": ("sofa",) * 11},
     (Fraction(1, 10), 1, 1, True, 3)),
    kind("one part of the category", 1, 5, {"query": "beds", "product_category": "Home › Beds"}, Fraction(1, 2)),
    kind("two parts in another order", 1, 5, {"query": "beds", "product_category": "Sofas › Home"}, 1),
    kind("a part that is there twice is one", 1, 5, {"query": "beds", "product_category": "Home › Home"},
         Fraction(1, 2), product_category="Home › Home › Sofas"),
    kind("spaces around parts", 1, 5, {"query": "beds", "product_category": " Home›Furniture "}, 1),
    kind("parts in another case", 1, 5, {"query": "beds", "product_category": "home › furniture › sofas"},
         Fraction(1, 2)),
    kind("no category on either side is one part", 1, 5, {"query": "beds", "product_category": ""}, Fraction(1, 2),
         product_category=""),
    kind("no query on either side is the same", 1, 5, OTHER | {"query": ""}, 1, query=""),
    # --- attributes
    attribute("an attribute of the product", "easy clean", {}, 1),
    attribute("nowhere", "easy clean", texts(), 0),
    attribute("in the title, in any case", "easy clean", texts("Easy Clean Sofa"), 1),
    attribute("a goal attribute is not lowered", "Easy Clean", texts("Easy Clean Sofa"), 0),
    attribute("in the description", "easy clean", texts(description="It is EASY CLEAN."), 1),
    attribute("in a bullet", "easy clean", texts(bullets=("soft", "easy clean")), 1),
    attribute("across two bullets, joined by a space", "easy clean", texts(bullets=("so easy", "clean it")), 1),
    attribute("not across title and description", "easy clean", texts("so easy", (), "clean it"), 0),
    attribute("inside a word", "wood", texts("Plywood Shelf"), 1),
    attribute("words in another order", "clean easy", {}, 1),
    attribute("one of two words", "clean", {}, 1),
    attribute("a third word more", "so easy clean", {}, 1),
    attribute("one of two", ("easy clean", "long lasting"), {}, 1),
    attribute("two of three", ("easy clean", "long lasting", "soft"), {"attributes": ("soft", "easy clean")}, 2),
    attribute("the same one twice", ("easy clean", "easy clean"), {}, 2),
    attribute("12/14 = 85.7: 86", "abcdefg", {"attributes": ("abcdefx",)}, 1),
    attribute("34/40 = 85", "a" * 17 + "bbb", {"attributes": ("a" * 17 + "ccc",)}, 0),
    attribute("22/26 = 84.6: 85", "a" * 11 + "bb", {"attributes": ("a" * 11 + "cc",)}, 0),
    attribute("342/400 = 85.5: 86, to the even one", "a" * 171 + "b" * 29, {"attributes": ("a" * 171 + "c" * 29,)}, 1),
    attribute("340/398 = 85.4: 85", "a" * 170 + "b" * 29, {"attributes": ("a" * 170 + "c" * 29,)}, 0),
    attribute("a letter of ten: 100 - 100 * 2/20 = 90", "easy clean", {"attributes": ("easy cleam",)}, 1),
    attribute("three letters shared of five: 100 - 100 * 4/20", "easy clean", {"attributes": ("easy klein",)}, 0),
    attribute("a long shared part: 100 - 100 * 2/32 = 94", "stainless steel a",
              {"attributes": ("stainless steel bottle",)}, 1),
    attribute("characters 128 to 255 are removed", "café", {"attributes": ("caf",)}, 1),
    attribute("other characters stay", "中文", {"attributes": ("中文",)}, 1),
    attribute("a hyphen is a space", "non-slip", {"attributes": ("non slip",)}, 1),
    attribute("upper case in the product's attribute", "easy clean", {"attributes": ("EASY CLEAN",)}, 1),
    attribute("nothing left to compare", "é", {"attributes": ("é",)}, 0),
    attribute("nothing left to compare, but in the title", "é", texts("Café"), 1),
    # --- options
    option("nothing chosen", "grey", [], 0),
    option("another colour", "grey", "black", 0),
    option("grey comes before light", "grey", "light grey", 1),
    option("charcoal comes before grey", "grey", "charcoal grey", 0),
    option("blue comes before navy", "blue", "navy blue", 1),
    option("blue comes before green", "green", "blue green", 0),
    option("a colour word inside a word", "tan", "tangerine", 1),
    option("colours replace sizes too", "2 rose pieces", "rose petals", 1),
    option("one word of two", "strawberry shake", "strawberry", 1),
    option("x of xx: 100 - 100 * 1/15 = 93", "xx-large", "x-large", 1),
    option("small is in x-small", "x-small", "small", 1),
    option("large and small: 100 - 100 * 8/10", "large", "small", 0),
    option("8 is in 8.5", "8.5", "8", 1),
    option("7.5 and 8.5: 100 - 100 * 2/6", "8.5", "7.5", 0),
    option("packs of 1 and 4: 100 - 100 * 2/34 = 94", "9 ounce (pack of 4)", "9 ounce (pack of 1)", 1),
    option("both of two", ("grey", "8"), ["grey", "8"], 2),
    option("one of two", ("grey", "8"), ["grey", "9"], 1),
    option("in another order", ("8", "grey"), ["grey", "8"], 2),
    option("one choice for two of the same colour", ("grey", "light grey"), "grey", 2),
    option("the same one twice", ("grey", "grey"), "grey", 2),
    option("more chosen than asked", "grey", ["9", "grey", "wide"], 1),
    option("none asked, one chosen", (), "grey", 0),
    option("nothing left to compare", "é", "é", 0),
    option("punctuation alone", "#", "#", 0),
    option("a number and punctuation", "1#", "1#", 1),
    option("another number", "1#", "2#", 0),
    # --- the price
    ("one cent too dear", {}, {}, {"price": 50.01}, (1, 1, 1, False, 3)),
    ("the same for nothing", {}, {}, {"price": 0.0}, (1, 1, 1, True, 3)),
    ("no cap", {"cap": None}, {}, {"price": 1e9}, (1, 1, 1, True, 3)),
    ("too dear and nothing else asked", {"options": ()}, {}, {"price": 51.0}, (1, 1, 0, False, 2)),
    ("too dear, nothing right", {}, texts(), {"price": 51.0, "chosen": {}}, (1, 0, 0, False, 3)),
    # --- together
    ("half the type, half of the rest", {"nouns": ("sofa",) * 5, "attributes": ("easy clean", "soft"),
     "options": ("grey", "8")}, OTHER, {"nouns": ("sofa",), "price": 51.0}, (Fraction(1, 2), 1, 1, False, 5)),
    ("a tenth of the type, no option", {"nouns": ("sofa",) * 11}, {}, {"nouns": ("sofa",), "chosen": {}},
     (Fraction(1, 10), 1, 0, True, 3)),
    ("no type, all the rest", {}, {}, {"nouns": ("lamp",)}, (0, 1, 1, True, 3)),
    ("no type, nothing", {}, texts(), {"nouns": (), "chosen": {}, "price": 51.0}, (0, 0, 0, False, 3)),
    ("half the type, four of seven", {"nouns": ("sofa",) * 5, "attributes": ("easy clean", "soft", "new"),
     "options": ("grey", "8", "wide")}, OTHER, {"nouns": ("sofa",), "chosen": {"color": "grey", "fit": "wide"}},
     (Fraction(1, 2), 1, 2, True, 7)),
]  # fmt: skip


@pytest.mark.parametrize("name, goal, product, more, want", CASES, ids=[c[0] for c in CASES])
def test_a_purchase(name, goal, product, more, want):
    goal = dataclasses.replace(GOAL, **goal)
    product = dataclasses.replace(PRODUCT, **product)
    chosen = more.get("chosen", {"color": "grey"})
    paid = pay(goal, product, more.get("nouns", GOAL.nouns), more.get("price", 50.0), chosen)
    r_type, attributes, options, price, most = want
    assert (paid.r_type, paid.attributes, paid.options, paid.price, paid.most) == (
        float(r_type), attributes, options, price, most,
    )  # fmt: skip
    assert paid.reward == pytest.approx(float(r_type * Fraction(attributes + options + price, most)), abs=1e-15)


def test_there_are_enough_cases():
    assert len(CASES) >= 80 and len({c[0] for c in CASES}) >= 80
    assert {c[4][0] for c in CASES} == {0, Fraction(1, 10), Fraction(1, 2), 1}


def test_the_first_colour_word_in_the_list_wins():
    assert len(COLOURS) == 102 and COLOURS[0] == "alabaster" and COLOURS[-1] == "yellow"
    assert colour_of("yellow and white") == "white"  # white stands before yellow
    assert colour_of("size 8") == "size 8" and colour_of("") == ""
