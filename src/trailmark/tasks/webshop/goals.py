"""The goals of a catalogue: what a shopper is asked to buy.

Rows of goals come from a file of rows (ours, or goals as the original's sessions hold them), from the original's
items_human_ins*.json or items_ins_v2*.json (objects by asin), or from the products' own rows (`instructions`).

    human       one goal; its options are given, as a list or as an object whose values count
    synthetic   one goal for each combination of the product's options; "… with color: red, and size: 8"

A goal without attributes is skipped. A cap is drawn per row: the larger of two of the first four multiples of 10 above
the product's price, up to 990; with fewer than two of them there is none. A row with `price_upper` keeps it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.rows import Row
from trailmark.plain_files import read_json
from trailmark.tasks.row_files import file_rows
from trailmark.tasks.splits import split_of
from trailmark.tasks.webshop.nouns import Tagger
from trailmark.tasks.webshop.products import Catalogue, Product
from trailmark.tasks.webshop.reward import Goal, colour_of, matching_options, pay
from trailmark.tasks.webshop.similarity import alike

NO_CAP = 1_000_000  # the original's price of a goal without one
CAPS = tuple(range(10, 1000, 10))
MOST_TRIED = 20_000  # in a larger catalogue only a goal's own product is tried
WITHOUT = "goals without attributes"
ELSEWHERE = "goals of products that are not in the catalogue"


@dataclass(frozen=True, slots=True)
class Written:
    """A goal, and where it was written."""

    goal: Goal
    row: Row
    id: str
    split: str
    human: bool


def cap_of(price: float, draw: random.Random) -> float | None:
    above = [float(c) for c in CAPS if c > price][:4]
    return max(draw.sample(above, 2)) if len(above) >= 2 else None


def best_options(product: Product, wanted: Sequence[str]) -> dict[str, str]:
    """The choice, one value of each option at most, that matches the most of the wanted options."""
    colours = [colour_of(w) for w in wanted]
    ways: dict[frozenset[int], dict[str, str]] = {frozenset(): {}}
    for name, values in product.options.items():
        for met, chosen in list(ways.items()):
            for value in values:
                more = met | {i for i, w in enumerate(colours) if alike(colour_of(value), w)}
                if more not in ways:
                    ways[more] = {**chosen, name: value}
    return ways[max(ways, key=len)]


def met_by(goal: Goal, catalogue: Catalogue, tag: Tagger) -> int | None:
    """The number of a product that pays 1; the goal's own if it does."""
    own = catalogue.number.get(goal.asin)
    others = catalogue.number.values() if len(catalogue) <= MOST_TRIED else ()
    for i in itertools.chain(() if own is None else (own,), others):
        if goal.cap is None or catalogue.prices[i] <= goal.cap:
            product = catalogue.products[i]
            chosen = best_options(product, goal.options)
            if matching_options([*chosen.values()], goal.options) < len(goal.options):
                continue
            if pay(goal, product, tag(product.title), catalogue.prices[i], chosen).reward == 1.0:
                return i
    return None


class Goals:
    """The goals of a file, in its order. `skipped` counts the rows that are none."""

    def __init__(self, catalogue: Catalogue, path: Path | None, tag: Tagger, per_product: bool = False, seed: int = 0):
        self.catalogue, self.tag, self.per_product, self.seed = catalogue, tag, per_product, seed
        self.path = catalogue.path if path is None else path
        self.skipped: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()  # rows of each product so far
        self.all: list[Written] = []
        for row, value in self._values(path):
            self.all += self._goals(row, value)
        if not self.all:
            why = "; ".join(f"{n} {what}" for what, n in self.skipped.items()) or "no instructions"
            raise DataError(f"holds no goals ({why}): name a file of goals with goals=FILE.", self.path)

    def _values(self, path: Path | None) -> Iterator[tuple[Row, Any]]:
        """Rows of goals, with the product's asin in each."""
        if path is None:
            for i in self.catalogue.number.values():
                row = self.catalogue.rows[i]
                for value in _of_product(row, row.value, "instructions"):
                    yield row, {"asin": row.value["asin"], **value}
        elif path.suffix == ".json" and isinstance(table := _table(path), dict):
            for asin in self.catalogue.number:
                row = Row(table.get(asin), path)
                for value in _of_product(row, {"instructions": row.value}, asin):
                    yield row, {**value, "asin": asin}
            self.skipped[ELSEWHERE] += len(table.keys() - self.catalogue.number.keys())
        else:
            yield from ((row, row.value) for row in file_rows(path))
        self.skipped = +self.skipped

    def _goals(self, row: Row, value: Any) -> Iterator[Written]:
        value = row.fields(value, "", ("asin",))
        asin = row.text(value["asin"], "asin")
        product = self.catalogue.get(asin)
        where = "instruction" if "instruction" in value else "instruction_text"
        text = row.text(value.get(where), where)
        key = "instruction_attributes" if "instruction_attributes" in value else "attributes"
        attributes = tuple(_listed(row, value.get(key), key))
        if not attributes:
            self.skipped[WITHOUT] += 1
            return
        title = value.get("title", value.get("name", None if product is None else product.title))
        about = {
            "title": title,
            "query": value.get("query", None if product is None else product.query),
            "product_category": value.get("product_category", None if product is None else product.product_category),
        }
        for name, found in about.items():
            if found is None:
                raise row.bad(f"names '{asin}', which is not in {self.catalogue.path}; a goal without a product there "
                              f"needs its own '{name}'.", "asin")  # fmt: skip
            row.text(found, name)
        human = value.get("human") is True or "goal_options" in value or (
            "instruction_options" in value and "human" not in value
        )  # fmt: skip
        cap, said = self._cap(row, value, asin, product)
        number = self._rows[asin]
        self._rows[asin] += 1
        for k, (options, also) in enumerate(self._options(row, value, asin, product, human)):
            instruction = f"{text.strip('.') if human else text}{also}{said}"
            goal = Goal(asin, instruction, attributes, options, cap, about["title"], about["query"].lower().strip(),
                        about["product_category"], tuple(self.tag(about["title"])))  # fmt: skip
            split = row.text(value.get("split") or split_of(asin), "split")
            yield Written(goal, row, f"{asin}-{number}-{k}", split, human)

    def _cap(self, row: Row, value: Mapping[str, Any], asin: str, product: Product | None) -> tuple[float | None, str]:
        """The most that it may cost, and how the instruction says so."""
        if "price_upper" in value:
            cap = row.number(value["price_upper"], "price_upper")
            if cap is None or cap <= 0:
                raise row.bad(f"must be a price above 0, not {value['price_upper']!r}.", "price_upper")
            return None if cap >= NO_CAP else cap, ""
        if product is None:
            why = f"is missing: '{asin}' is not in {self.catalogue.path}, so no cap can be drawn."
            raise row.bad(why, "price_upper")
        price = self.catalogue.prices[self.catalogue.number[asin]]
        cap = cap_of(price, random.Random(f"webshop cap {self.seed} {asin} {self._rows[asin]}"))
        return cap, "" if cap is None else f", and price lower than {cap:.2f} dollars"

    def _options(
        self, row: Row, value: Mapping[str, Any], asin: str, product: Product | None, human: bool
    ) -> Iterator[tuple[tuple[str, ...], str]]:
        """The options of each goal of a row, and how the instruction names them."""
        if human:
            key = "goal_options" if "goal_options" in value else "instruction_options"
            given = value.get(key)
            yield tuple(_listed(row, [*given.values()] if isinstance(given, dict) else given, key)), ""
            return
        choices = {} if product is None else dict(product.options)
        if "options" in value:
            if not isinstance(value["options"], dict):
                raise row.bad("must be an object of names and values.", "options")
            choices = {name: tuple(_listed(row, v, f"options.{name}")) for name, v in value["options"].items()}
        names = sorted(choices)
        combinations = list(itertools.product(*(choices[name] for name in names)))
        if self.per_product and combinations:
            combinations = random.Random(f"webshop options {self.seed} {asin}").sample(combinations, 1)
        for combination in combinations:
            said = ", and ".join(f"{name}: {v}" for name, v in zip(names, combination))
            yield combination, f" with {said}" if said else ""


def _of_product(row: Row, holder: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """The rows of goals in a product's row, or in an object's entry: a list of human ones, or a synthetic one."""
    value = holder.get("instructions")
    if isinstance(value, list):
        for one in value:
            yield {**row.fields(one, key, ("instruction",)), "human": True}
    elif isinstance(value, dict):
        if "instruction" in value:
            yield {"instruction_attributes": [], **{k: v for k, v in value.items() if k != "attributes"}}
    elif value is not None:
        raise row.bad(f"must be a list or an object, not {repr(value)[:60]}.", key)
    elif holder.get("instruction_text") is not None:
        yield {k: holder[k] for k in ("instruction_text", "instruction_attributes") if k in holder}


def _listed(row: Row, value: Any, key: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise row.bad(f"must be a list of texts, not {repr(value)[:60]}.", key)
    return value


def _table(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot be read: {problem}.", path) from None
