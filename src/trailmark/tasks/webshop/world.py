"""One visit to the shop.

    search[words]   works on every page; shows page 1 of at most 50 results
    click[text]     a button, a product's number or an option's value of this page, in any case

A reply is "Thought: …" and "Action: …" (`actions="react"`: what stands behind the first "Action: "), or the action
alone ("bare"). An action that is neither, or cannot be done on this page, changes nothing and costs a step. Buy Now
ends the visit and pays (`reward.py`); every other step pays 0. A visit of `horizon` steps without a purchase is
truncated and has the reward 0.

Options are kept between an item and its sub-pages. They are lost on the way back to the results and by a search. If a
value is there under two option names, the last one gets it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trailmark.errors import TaskError
from trailmark.tasks.base import Observation, Step, World
from trailmark.tasks.webshop import pages
from trailmark.tasks.webshop.goals import best_options
from trailmark.tasks.webshop.products import Product
from trailmark.tasks.webshop.reward import Goal, Paid, pay
from trailmark.types import Outcome, Scored, Task

if TYPE_CHECKING:
    from trailmark.tasks.webshop.source import WebShop

MOST = 50  # results of a search
ASK_AGAIN = "That was not an action. Write a line that begins with 'Action: ' and names search[words] or click[text]."
_PARTS = re.compile(r"(.+)\[(.+)\]")
ASIN, OPTION = "asin ", "option "  # what a text that can be clicked is, if it is no button
Place = Literal["search", "results", "item", "sub-page"]


class Action(NamedTuple):
    """`name[argument]`; the argument in lower case."""

    name: str
    argument: str


def parse_reply(text: str) -> str | None:
    """What stands behind the first "Action: " of a reply; None if there is none."""
    _, found, action = text.partition("Action: ")
    return action if found else None


def parse_action(text: str) -> Action | None:
    """The name is what stands before the last "[", and has its case. A line break ends the action."""
    found = _PARTS.match(text)
    return None if found is None else Action(found[1], found[2].lower())


class WebShopWorld(World):
    """One visit. Teachers may read `goal`, `place`, `product`, `options` and `steps`."""

    def __init__(self, source: WebShop):
        self.source = source
        self.over = True

    def reset(self, task: Task) -> Observation:
        self.goal: Goal = self.source.goal_of(task)
        self.place: Place = "search"
        self.results: list[int] = []
        self.page = 1
        self.product: Product | None = None
        self.options: dict[str, str] = {}
        self.steps, self.over = 0, False
        self.text = pages.search_page(self.goal.instruction)
        self._clickable: Mapping[str, str] | None = None
        return Observation(self.source.introduced(self.text))

    def copy(self) -> WebShopWorld:
        """An independent world in the same state."""
        twin = WebShopWorld(self.source)
        vars(twin).update(vars(self))
        if hasattr(self, "options"):
            twin.options = dict(self.options)
        return twin

    def step(self, action: str) -> Step:
        if self.over:
            raise TaskError("this webshop play is over; call reset before the next step.")
        self.steps += 1
        said: str | None = action
        if self.source.actions == "react" and (said := parse_reply(action)) is None:
            return self._answer(ASK_AGAIN, {"known": False, "action": None})
        did = parse_action(said or "")
        known = True
        if did is not None and did.name == "search":
            self._search(did.argument)
        elif did is not None and did.name == "click" and (what := self.clickable().get(did.argument)) is not None:
            if what == pages.BUY:
                return self._buy(said)
            self._click(what, did.argument)
        else:
            known = False
        return self._answer(self.text, {"known": known, "action": said})

    def clickable(self) -> Mapping[str, str]:
        """What can be clicked on this page, in lower case, and what it is."""
        if self._clickable is None:
            self._clickable = self._find_clickable()
        return self._clickable

    def _find_clickable(self) -> Mapping[str, str]:
        if self.place == "search":
            return {}  # the original's Search button does nothing without words
        if self.place == "results":
            buttons = (pages.BACK, pages.PREVIOUS, pages.NEXT) if self.page > 1 else (pages.BACK, pages.NEXT)
            found = {b.lower(): b for b in buttons}
            asins = (self.source.catalogue.products[i].asin for i in self._window())
            return {asin.lower(): ASIN + asin for asin in asins} | found
        if self.place == "sub-page" or self.product is None:
            return {b.lower(): b for b in (pages.BACK, pages.PREVIOUS)}
        return self.source.item(self.product.asin).clickable

    def oracle(self) -> str | None:
        """The next step towards buying the goal's own product. None if it is not in the catalogue, or a search for its
        title, or the beginning of it, does not find it."""
        action = self._best()
        return action if action is None or self.source.actions == "bare" else f"Action: {action}"

    def example_actions(self) -> list[str]:
        """Possible replies here, sensible and not."""
        sure = ["search[shoes]", *(f"click[{c}]" for c in list(self.clickable())[:12]), "click[nothing]", "buy"]
        return sure if self.source.actions == "bare" else [*(f"Action: {a}" for a in sure), "no idea"]

    # --- what an action does

    def _search(self, words: str) -> None:
        self.results = self.source.catalogue.search(words, MOST)
        self._list(1)

    def _list(self, page: int) -> None:
        self.place, self.page, self.product, self.options = "results", page, None, {}
        found = [self.source.catalogue.products[i] for i in self._window()]
        self.text = pages.results_page(self.goal.instruction, found, page, len(self.results))
        self._clickable = None

    def _click(self, what: str, argument: str) -> None:
        if what == pages.BACK:
            self.place, self.product, self.options, self.results = "search", None, {}, []
            self.text = pages.search_page(self.goal.instruction)
        elif what == pages.NEXT:
            return self._list(self.page + 1)
        elif what == pages.PREVIOUS and self.place == "results":
            return self._list(self.page - 1)
        elif what == pages.PREVIOUS and self.place == "item":
            return self._list(self.page)
        elif what in pages.SUB_PAGES and self.product is not None:
            self.place = "sub-page"
            self.text = pages.product_page(self.goal.instruction, pages.sub_page_texts(self.product, what))
        else:
            if what.startswith(ASIN):
                self.product = self.source.catalogue.get(what.removeprefix(ASIN))
            elif what.startswith(OPTION):
                self.options = {**self.options, what.removeprefix(OPTION): argument}
            assert self.product is not None
            self.place = "item"
            self.text = pages.product_page(self.goal.instruction, self.source.item(self.product.asin).texts)
        self._clickable = None

    def _buy(self, said: str | None) -> Step:
        assert self.product is not None
        catalogue = self.source.catalogue
        price = catalogue.prices[catalogue.number[self.product.asin]]
        paid = pay(self.goal, self.product, self.source.tag(self.product.title), price, self.options)
        self.text = pages.done_page(self.product.asin, self.options, paid.reward)
        return self._answer(self.text, {"known": True, "action": said}, paid)

    # --- answers

    def _window(self) -> list[int]:
        return self.results[(self.page - 1) * pages.WINDOW : self.page * pages.WINDOW]

    def _answer(self, text: str, info: dict[str, Any], paid: Paid | None = None) -> Step:
        truncated = paid is None and self.steps >= self.source.horizon
        self.over = paid is not None or truncated
        info["steps"] = self.steps
        reward = 0.0 if paid is None else paid.reward
        outcome: Outcome | None = None
        if self.over:
            parts = {"bought": float(paid is not None)}
            if paid is not None:
                attributes = _share(paid.attributes, len(self.goal.attributes))
                options = _share(paid.options, len(self.goal.options))
                parts |= {"type": paid.r_type, "attributes": attributes, "options": options, "price": float(paid.price)}
            outcome = Scored(reward, reward == 1.0, parts)
        return Step(Observation(self.source.headed(text)), reward, paid is not None, truncated, outcome, info)

    def _best(self) -> str | None:
        catalogue = self.source.catalogue
        at = catalogue.number.get(self.goal.asin)
        if at is None:
            return None
        if self.product is not None and self.product.asin == self.goal.asin:
            if self.place == "sub-page":
                return f"click[{pages.PREVIOUS}]"
            wanted = best_options(self.product, self.goal.options)
            missing = [v for v in wanted.values() if v not in self.options.values()]
            return f"click[{missing[0] if missing else pages.BUY}]"
        if at in self.results and self.place == "results":
            there = self.results.index(at) // pages.WINDOW + 1
            turn = pages.NEXT if there > self.page else pages.PREVIOUS
            return f"click[{self.goal.asin if there == self.page else turn}]"
        words = re.sub(r"[\[\]]+", " ", self.goal.title).split()
        tried = (" ".join(words[:n]) for n in (4, 8, len(words)))  # a short search, if it is enough
        return next((f"search[{query}]" for query in tried if at in catalogue.search(query, MOST)), None)


def _share(n: int, of: int) -> float:
    return n / of if of else 1.0
