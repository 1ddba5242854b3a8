"""The products of a catalogue, and files of them.

A row is an object of JSON: a line of a file .jsonl, or an item of a list. Two forms are read:

    ours           asin, Title, Description, BulletPoints, pricing (numbers), options ({name: [value, …]}), Attributes,
                   query, product_category; and Price, Rating, Reviews, contents, instructions if there are any
    the original's asin, name, full_description, small_description, pricing ("$9.99$12.99"), customization_options;
                   attributes come from its file items_ins_v2*.json

A price of a range is drawn once per product: uniform, by the seed and the product. A reversed range is turned. Products
without a price cost 100, as in the original.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trailmark.errors import DataError
from trailmark.formats.on_demand import OnDemand
from trailmark.formats.rows import Row, RowFile, as_number
from trailmark.tasks.row_files import file_rows
from trailmark.tasks.webshop.search import IndexWriter

NO_PRICE = 100.0
NO_ATTRIBUTES = "DUMMY_ATTR"  # the original's only attribute of a product that has none
REQUIRED = ("asin", "Title", "query", "product_category")
OPTIONAL = ("Description", "BulletPoints", "pricing", "options", "Attributes", "Price", "Rating", "Reviews", "contents")
RAW = ("name", "full_description", "small_description", "customization_options")


@dataclass(frozen=True, slots=True)
class Product:
    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    pricing: tuple[float, ...]  # one price, or a range
    tag: str  # the price as it is shown
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    query: str
    product_category: str
    rating: str = "N.A."
    reviews: tuple[tuple[str, ...], ...] = ()  # the texts of each
    contents: str = ""  # what is searched
    texts: tuple[str, ...] = field(default=(), repr=False)  # in lower case, where attributes are looked for

    @property
    def size(self) -> int:
        """About the bytes that it takes."""
        return 2000 + 2 * len(self.contents) + 4 * sum(map(len, self.texts))


def product_of(row: Row, attributes: Mapping[str, Any] | None = None) -> Product:
    """The product of a row. An error names the row and the key."""
    value = row.value
    if isinstance(value, dict) and "name" in value and "Title" not in value:
        value = _from_original(row, attributes or {})
    value = row.fields(value, "", REQUIRED, OPTIONAL)
    asin, title = row.text(value["asin"], "asin").strip(), row.text(value["Title"], "Title")
    if not asin:
        raise row.bad("must not be empty.", "asin")
    description = row.text(value.get("Description") or "", "Description")
    bullets = _texts(row, value.get("BulletPoints"), "BulletPoints")
    options = _options(row, value.get("options"))
    pricing = _pricing(row, value.get("pricing"))
    rating = value.get("Rating")
    joined = " ".join([title, description, bullets[0] if bullets else ""])
    spoken = ", and ".join(f"{name}: {', '.join(values)}" for name, values in options.items())
    return Product(
        asin=asin,
        title=title,
        description=description,
        bullets=bullets,
        pricing=pricing,
        tag=row.text(value.get("Price") or " to ".join(f"${p}" for p in pricing), "Price"),
        options=options,
        attributes=_texts(row, value.get("Attributes"), "Attributes"),
        query=row.text(value["query"], "query").lower().strip(),
        product_category=row.text(value["product_category"], "product_category"),
        rating="N.A." if rating in (None, "") else str(rating),
        reviews=_reviews(row, value.get("Reviews")),
        contents=row.text(value.get("contents") or f"{joined} {spoken}".lower(), "contents"),
        texts=(title.lower(), " ".join(bullets).lower(), description.lower()),
    )


def price_of(product: Product, seed: int) -> float:
    """Its price; one of its range, by the seed."""
    low, high = product.pricing[0], product.pricing[-1]
    if low == high:
        return low
    return random.Random(f"webshop price {seed} {product.asin}").uniform(min(low, high), max(low, high))


class Catalogue:
    """The products of a file by the numbers of their rows, with prices and a search. Products of lines that are not
    compressed stay in their file, up to a limit of memory: of a large catalogue, index and prices are in memory."""

    def __init__(self, path: Path, attributes: Mapping[str, Any] | None = None, seed: int = 0, lengths: str = "exact"):
        self.path = path
        self.rows: Sequence[Row] | RowFile = RowFile(path) if path.suffix in (".json", ".jsonl") else [*file_rows(path)]
        self.number: dict[str, int] = {}  # of each asin
        self.dropped: Counter[str] = Counter()
        self.prices: list[float] = []
        self.products = OnDemand(len(self.rows), lambda i: product_of(self.rows[i], attributes), lambda p: p.size)
        writer = IndexWriter(lengths)
        for i in range(len(self.rows)):
            product = product_of(self.rows[i], attributes)
            if product.asin in self.number:
                self.dropped["products that were there before"] += 1
                self.prices.append(0.0)
                writer.skip()
                continue
            self.number[product.asin] = i
            self.prices.append(price_of(product, seed))
            self.products.keep(i, product)
            writer.add(product.contents)
        if not self.number:
            raise DataError("holds no products.", path)
        self.index = writer.index()

    def __len__(self) -> int:
        return len(self.number)

    def search(self, query: str, n: int = 50) -> list[int]:
        """The numbers of the products that fit best, at most `n`."""
        return self.index.search(query, n)

    def get(self, asin: str) -> Product | None:
        at = self.number.get(asin)
        return None if at is None else self.products[at]


def _texts(row: Row, value: Any, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise row.bad(f"must be a list of texts, not {repr(value)[:60]}.", key)
    return tuple(value)


def _pricing(row: Row, value: Any) -> tuple[float, ...]:
    if value is None or value == []:
        return (NO_PRICE,)
    found = [as_number(v) for v in value] if isinstance(value, list) else [None]
    if any(v is None or v < 0 for v in found):
        raise row.bad(f"must be a list of one or two prices, not {repr(value)[:60]}.", "pricing")
    return tuple(v for v in found[:2] if v is not None)


def _options(row: Row, value: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict | None):
        raise row.bad(f"must be an object of names and values, not {repr(value)[:60]}.", "options")
    out = {}
    for name, values in (value or {}).items():
        out[name.strip().lower()] = tuple(v.strip().lower() for v in _texts(row, values, f"options.{name}"))
    return out


def _reviews(row: Row, value: Any) -> tuple[tuple[str, ...], ...]:
    out = []
    for i, one in enumerate(value or () if isinstance(value, list | None) else [value]):
        if not isinstance(one, dict):
            raise row.bad(f"must be an object, not {repr(one)[:60]}.", f"Reviews.{i}")
        score, body = one.get("score", one.get("stars", "")), one.get("body", one.get("review", ""))
        out.append((f'"{one.get("title", "")}"', str(score), str(body)))
    return tuple(out)


def _from_original(row: Row, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the original's items_shuffle*.json in our form."""
    value = row.fields(row.value, "", ("asin", "name", "query", "product_category"), RAW)
    bullets = value.get("small_description") or []
    options = value.get("customization_options") or {}
    if not isinstance(options, dict):
        raise row.bad(f"must be an object, not {repr(options)[:60]}.", "customization_options")
    made: dict[str, list[str]] = {}
    for name, choices in options.items():
        if choices is None:
            continue
        values = [c.get("value") if isinstance(c, dict) else None for c in choices if isinstance(choices, list)]
        if not isinstance(choices, list) or not all(isinstance(v, str) for v in values):
            raise row.bad("must be a list of objects with a text 'value'.", f"customization_options.{name}")
        made[name] = [str(v).strip().replace("/", " | ") for v in values]
    pricing = value.get("pricing") or ""
    prices = [re.sub(r"[^\d.]", "", p) for p in str(pricing).split("$")[1:]]
    known = attributes.get(value["asin"]) if isinstance(value["asin"], str) else None
    return {
        "asin": value["asin"],
        "Title": value["name"],
        "Description": value.get("full_description"),
        "BulletPoints": bullets if isinstance(bullets, list) else [bullets],
        "pricing": prices,
        "options": made,
        "Attributes": known.get("attributes", [NO_ATTRIBUTES]) if isinstance(known, dict) else [NO_ATTRIBUTES],
        "query": value["query"],
        "product_category": value["product_category"],
    }
