"""What a purchase pays:

    reward = r_type * (n_attr + n_opt + [price <= cap]) / (attributes + options + 1)

    n_attr   goal attributes that are alike an attribute of the product (`similarity.py`), or stand in its title,
             bullets or description in lower case
    n_opt    goal options that are alike a chosen option. In both, the first colour word that occurs replaces the option
    o        distinct nouns that both titles have, over all nouns of the goal's title with repeats; 0.2 if it has none
    r_type   0 if o = 0, 0.1 if o < 0.1, else 1 if the query is the same, two parts of the category are shared or
             o > 0.2, else 0.5

Nouns come from a tagger (`nouns.py`). Given the nouns, the reward is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trailmark.tasks.webshop.products import Product
from trailmark.tasks.webshop.similarity import alike

# The order in which they are tried; the list of the original (princeton-nlp/WebShop, MIT).
_COLOURS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream
    crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather
    indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha
    multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal
    rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise
    violet walnut wheat white wine yellow
"""
COLOURS = tuple(_COLOURS.split())


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be bought. `nouns` are those of the title, with repeats. `cap` is None if any price will do."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    cap: float | None
    title: str
    query: str
    product_category: str
    nouns: tuple[str, ...]

    def data(self) -> dict[str, Any]:
        """As the data of a task. The nouns are found anew."""
        return {
            "asin": self.asin, "instruction": self.instruction, "attributes": list(self.attributes),
            "options": list(self.options), "cap": self.cap, "title": self.title, "query": self.query,
            "product_category": self.product_category,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Paid:
    """The parts of a reward."""

    r_type: float
    attributes: int
    options: int
    price: bool
    most: int  # of attributes, options and the price together

    @property
    def reward(self) -> float:
        return self.r_type * ((self.attributes + self.options + self.price) / self.most)


@lru_cache(1 << 14)
def colour_of(option: str) -> str:
    """The first colour word that occurs in the option; the option itself if none does."""
    return next((c for c in COLOURS if c in option), option)


def matching_options(chosen: Sequence[str], wanted: Sequence[str]) -> int:
    found = [colour_of(c) for c in chosen]
    return sum(any(alike(c, w) for c in found) for w in map(colour_of, wanted))


def matching_attributes(product: Product, wanted: Sequence[str]) -> int:
    return sum(
        any(alike(own, w) for own in product.attributes) or any(w in text for text in product.texts) for w in wanted
    )


def overlap(goal_nouns: Sequence[str], nouns: Sequence[str]) -> float:
    return len(set(goal_nouns) & set(nouns)) / len(goal_nouns) if goal_nouns else 0.2


def parts_of(category: str) -> set[str]:
    return {part.strip() for part in category.split("›")}


def type_factor(same_query: bool, same_category: bool, o: float) -> float:
    if o < 0.1:
        return 0.1 if o else 0.0
    return 1.0 if same_query or same_category or o > 0.2 else 0.5


def pay(goal: Goal, product: Product, nouns: Sequence[str], price: float, chosen: Mapping[str, str]) -> Paid:
    """What the purchase of a product with these nouns in its title, at this price, with these options pays."""
    same_category = len(parts_of(goal.product_category) & parts_of(product.product_category)) >= 2
    return Paid(
        type_factor(goal.query == product.query, same_category, overlap(goal.nouns, nouns)),
        matching_attributes(product, goal.attributes),
        matching_options(list(chosen.values()), goal.options),
        goal.cap is None or price <= goal.cap,
        len(goal.attributes) + len(goal.options) + 1,
    )
