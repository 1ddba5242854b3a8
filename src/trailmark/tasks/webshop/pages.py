"""The pages of the shop as the original's text mode shows them: their visible texts, joined by " [SEP] ".

    search    WebShop, Instruction:, the goal, Search
    results   Instruction:, the goal, Back to Search, Page n (Total results: m), [< Prev], Next >, and for each of ten
              products its number, title and price
    item      Instruction:, the goal, Back to Search, < Prev, each option's name and values, title, Price, Rating,
              Description, Features, Reviews, Buy Now. A chosen option is not marked
    sub-page  Instruction:, the goal, Back to Search, < Prev, the texts
    done      what was bought, and the reward

A text that is empty is not on the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from trailmark.tasks.webshop.products import Product

SEPARATOR = " [SEP] "
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
WINDOW = 10  # products on a page
NO_REVIEWS = "No reviews found"


def joined(texts: Iterable[str]) -> str:
    return SEPARATOR.join(t.strip() for t in texts if t)


def search_page(goal: str) -> str:
    return joined(("WebShop", "Instruction:", goal, "Search"))


def results_page(goal: str, products: Sequence[Product], page: int, total: int) -> str:
    """Page `page`, from 1, which shows these products."""
    turn = (PREVIOUS, NEXT) if page > 1 else (NEXT,)
    rows = (text for p in products for text in (p.asin, p.title, p.tag))
    return joined(("Instruction:", goal, BACK, f"Page {page} (Total results: {total})", *turn, *rows))


def item_texts(product: Product) -> str:
    """The item page without its first texts."""
    options = (text for name, values in product.options.items() for text in (name, *values))
    return joined((*options, product.title, f"Price: {product.tag}", f"Rating: {product.rating}", *SUB_PAGES, BUY))


def sub_page_texts(product: Product, name: str) -> str:
    if name == "Description":
        return joined((product.description,))
    if name == "Features":
        return joined(product.bullets)
    return joined(text for review in product.reviews for text in review) or NO_REVIEWS


def product_page(goal: str, texts: str) -> str:
    return joined(("Instruction:", goal, BACK, PREVIOUS, texts))


def done_page(asin: str, options: Mapping[str, str], reward: float) -> str:
    chosen = json.dumps(dict(options), sort_keys=True)
    for c in "<>&'":  # as a web page writes JSON
        chosen = chosen.replace(c, f"\\u{ord(c):04x}")
    kinds = ("attrs", "category", "query", "product category")
    return joined((
        "Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)", "Purchased",
        "asin", asin, "options", chosen, *(text for kind in kinds for text in (kind, "None")), "Target", "asin",
        "options", "attrs", "price upper", "instuction text", "category", "product category", "query", "Goal", "None",
        "Reward", "Your score (min 0.0, max 1.0)", str(reward), "Reward Details", "None",
    ))  # fmt: skip
