"""WebShop as a task: buy, among the products of a catalogue, what an instruction asks for."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from trailmark.errors import DataError, TaskError, nearest
from trailmark.formats.rows import as_number
from trailmark.plain_files import read_json
from trailmark.tasks.base import TaskSource
from trailmark.tasks.splits import drawn
from trailmark.tasks.webshop import pages
from trailmark.tasks.webshop.goals import Goals, Written, met_by
from trailmark.tasks.webshop.nouns import get_tagger
from trailmark.tasks.webshop.products import Catalogue
from trailmark.tasks.webshop.reward import Goal
from trailmark.tasks.webshop.world import OPTION, WebShopWorld
from trailmark.types import Task

Actions = Literal["react", "bare"]
Opening = Literal["joined", "apart", "none"]
Kind = Literal["all", "human", "synthetic"]
Unmet = Literal["leave out", "keep", "refuse"]

ORDER_SEED = 233  # the original shuffles its goals with it; a session's number is the place afterwards
PRODUCTS = ("products*.jsonl", "products*.jsonl.gz", "items_shuffle*.jsonl", "items_shuffle*.json")
GOALS = ("goals*.jsonl", "goals*.jsonl.gz", "items_human_ins*.json", "items_ins_v2*.json")
ATTRIBUTES = ("items_ins_v2*.json",)
UNMET = "goals that no product meets"
INSTRUCTION = """\
You are shopping on the web. You are told what to buy; in each turn you see a page and do one thing.

Every turn has to look like this:

Thought: what you make of the page, and what you want to do
Action: one action

These are the actions:
search[words] looks for products; it works on every page
click[text] clicks a button, the number of a product or the value of an option that is on the page

Choose the options that are asked for, then click[Buy Now]. If an action is not possible, the page stays as it is. You \
have {horizon} actions."""


class Item(NamedTuple):
    texts: str  # of its page
    clickable: Mapping[str, str]


class WebShop(TaskSource):
    """The task source.

    catalogue   a folder with products and goals, or a file of products: our form or the original's (`products.py`)
    goals       the file of goals; default: goals*.jsonl, items_human_ins*.json or items_ins_v2*.json of the folder,
                else the instructions in the products' own rows
    kind        "human" or "synthetic": only such goals
    per_product one synthetic goal per product, its options drawn by the seed; else one per combination of options
    unmet       goals that no product of the catalogue meets: "leave out" (they are counted), "keep" or "refuse"
    ids         {split: [number, …]} or {split: file.json}: splits by the numbers of the original's sessions
    horizon     actions before a visit is cut off
    tagger      the nouns of titles: "words", a file.json or "my_module:function" (`nouns.py`)
    seed        of the prices and the caps
    lengths     lengths of products in a search: "exact" or "lucene" (`search.py`)
    actions     "react": a reply says "Action: search[…]"; "bare": it is the action
    opening     where the instruction to the agent stands: "joined" to the first page, "apart" in a message of its own
                that is answered with "OK", or "none"

    Splits are those of the goals' rows ("test" also means "visible_test"); rows without one fall into train, val and
    test by a hash of their product. "all" is every goal. Without `n`: all goals in order. With `n`: drawn by seed, none
    twice before all were drawn once.
    """

    name = "webshop"
    markov = False
    finite = True
    additive = True

    def __init__(
        self,
        catalogue: str,
        goals: str | None = None,
        kind: Kind = "all",
        per_product: bool = False,
        unmet: Unmet = "leave out",
        ids: Mapping[str, Any] | None = None,
        horizon: int = 10,
        tagger: str = "words",
        seed: int = 0,
        lengths: str = "exact",
        actions: Actions = "react",
        opening: Opening = "joined",
    ):
        for key, value, known in (
            ("kind", kind, get_args(Kind)),
            ("unmet", unmet, get_args(Unmet)),
            ("actions", actions, get_args(Actions)),
            ("opening", opening, get_args(Opening)),
        ):
            if value not in known:
                raise TaskError(f"webshop has no {key} '{value}'.{nearest(str(value), known)}")
        if not isinstance(horizon, int) or horizon < 1:
            raise TaskError(f"webshop needs a horizon of at least 1, not {horizon}.")
        self.actions: Actions = actions
        self.opening: Opening = opening
        self.horizon, self.seed = horizon, seed
        self.tag = get_tagger(tagger)
        products = _file(Path(catalogue), PRODUCTS, "products")
        found = None if goals is None else _file(Path(goals), (), "goals")
        attributes = None
        if products.name.startswith("items_shuffle"):
            beside = _only(products.parent, ATTRIBUTES, "attributes")
            attributes = {} if beside is None else _object(beside)
        if found is None and Path(catalogue).is_dir():
            found = _only(Path(catalogue), GOALS, "goals")
        self.catalogue = Catalogue(products, attributes, seed, lengths)
        every = Goals(self.catalogue, found, self.tag, per_product, seed)
        self.skipped = every.skipped
        numbered = [*every.all]
        random.Random(ORDER_SEED).shuffle(numbered)
        tried = [] if unmet == "keep" else every.all
        self.unmet = [w for w in tried if met_by(w.goal, self.catalogue, self.tag) is None]
        if unmet == "refuse" and self.unmet:
            first = self.unmet[0]
            raise first.row.bad(
                f"no product of {self.catalogue.path.name} meets goal '{first.id}', nor {len(self.unmet) - 1} other "
                "goals: mend them, or leave them out with unmet='leave out'.", "asin",
            )  # fmt: skip
        out = {w.id for w in self.unmet}
        kinds = ("human", "synthetic") if kind == "all" else (kind,)
        self.written = [w for w in every.all if w.id not in out and ("human" if w.human else "synthetic") in kinds]
        if not self.written:
            raise DataError(f"of {len(every.all)} goals ({kind}) no product meets one.", every.path)
        self.ids = None if ids is None else {s: _numbered(s, v, numbered, out) for s, v in ids.items()}
        self._items: dict[str, Item] = {}

    def splits(self) -> dict[str, list[Written]]:
        if self.ids is not None:
            return self.ids
        found: dict[str, list[Written]] = {}
        for w in self.written:
            found.setdefault(w.split, []).append(w)
        return found

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        known = self.splits()
        if split == "test" and "test" not in known and "visible_test" in known:
            split = "visible_test"
        if split != "all" and split not in known:
            raise TaskError(f"webshop has no split '{split}'.{nearest(split, ['all', *known])}")
        goals = self.written if split == "all" else known[split]
        picks = goals if n is None else drawn(goals, n, random.Random(f"webshop {split} {seed}"))
        times: dict[str, int] = {}
        out = []
        for w in picks:
            times[w.id] = times.get(w.id, 0) + 1
            again = "" if times[w.id] == 1 else f"~{times[w.id]}"
            out.append(Task(f"webshop/{w.id}{again}", seed, w.goal.data(), {"human": w.human}))
        return out

    def make(self) -> WebShopWorld:
        return WebShopWorld(self)

    def left_out_of(self, split: str) -> list[str]:
        missing = sum(split in ("all", w.split) for w in self.unmet) if self.ids is None else 0
        counted = {UNMET: missing, **self.skipped, **self.catalogue.dropped}
        return [f"{count} {what} were left out." for what, count in counted.items() if count]

    def goal_of(self, task: Task) -> Goal:
        """A task's data, checked."""
        data = task.data
        try:
            title, cap = str(data["title"]), data["cap"]
            goal = Goal(
                str(data["asin"]), str(data["instruction"]), tuple(map(str, data["attributes"])),
                tuple(map(str, data["options"])), None if cap is None else as_number(cap), title, str(data["query"]),
                str(data["product_category"]), tuple(self.tag(title)),
            )  # fmt: skip
        except (KeyError, TypeError) as problem:
            raise TaskError(f"task '{task.id}' is no goal of webshop: its data lacks {problem}.") from None
        if not goal.attributes or (cap is not None and goal.cap is None):
            why = "it needs attributes, and a cap that is a price or null."
            raise TaskError(f"task '{task.id}' is no goal of webshop: {why}")
        return goal

    @property
    def first_messages(self) -> list[dict[str, str]]:  # type: ignore[override]
        """The messages before the first page, if there are any."""
        if self.opening != "apart":
            return []
        return [{"role": "user", "content": self.instruction}, {"role": "assistant", "content": "OK"}]

    @property
    def instruction(self) -> str:
        text = INSTRUCTION.format(horizon=self.horizon)
        return text if self.actions == "react" else text.replace(_REACT, "Every turn is one action.\n\n")

    def introduced(self, page: str) -> str:
        return f"{self.instruction}\n\n{self.headed(page)}" if self.opening == "joined" else self.headed(page)

    def headed(self, page: str) -> str:
        return f"Observation:\n{page}" if self.actions == "react" else page

    def item(self, asin: str) -> Item:
        """The page of a product, made once."""
        found = self._items.get(asin)
        if found is None:
            if len(self._items) >= 10_000:
                self._items.clear()
            product = self.catalogue.products[self.catalogue.number[asin]]
            buttons = (pages.BACK, pages.PREVIOUS, *pages.SUB_PAGES, pages.BUY)
            values = {v: OPTION + name for name, of in product.options.items() for v in of}
            found = Item(pages.item_texts(product), values | {b.lower(): b for b in buttons})
            self._items[asin] = found
        return found


_REACT = INSTRUCTION[INSTRUCTION.index("Every turn") : INSTRUCTION.index("These are")]


def _only(folder: Path, patterns: Sequence[str], what: str) -> Path | None:
    """The one file of a folder that fits the first pattern that any file fits."""
    for pattern in patterns:
        if fits := sorted(folder.glob(pattern)):
            if len(fits) > 1:
                raise TaskError(f"{folder} has several files of {what} ({', '.join(p.name for p in fits)}): name one.")
            return fits[0]
    return None


def _file(path: Path, patterns: Sequence[str], what: str) -> Path:
    if path.is_dir():
        found = _only(path, patterns, what)
        if found is None:
            raise TaskError(f"{path} holds no file of {what}{f' ({patterns[0]})' if patterns else ''}: name one.")
        return found
    if not path.exists():
        raise TaskError(f"there is no file or folder {path} to read {what} from.")
    return path


def _object(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as problem:
        raise DataError(f"cannot be read: {problem}.", path) from None
    if not isinstance(found, dict):
        raise DataError("must be an object of products.", path)
    return found


def _numbered(split: str, value: Any, goals: Sequence[Written], out: set[str]) -> list[Written]:
    """The goals of these numbers. One that is there twice is taken once."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (OSError, ValueError) as problem:
            raise DataError(f"cannot be read: {problem}.", Path(value)) from None
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < len(goals) for i in value):
        raise TaskError(f"webshop: ids of split '{split}' must be a list of numbers from 0 to {len(goals) - 1}.")
    found = [goals[i] for i in dict.fromkeys(value) if goals[i].id not in out]
    if not found:
        raise TaskError(f"webshop: ids leave no goal in split '{split}'.")
    return found
