"""One episode in a repository: the current folder, the files looked at, the costs.

    cd DIR    go into a folder, or up
    cat FILE  look at the beginning of a file; it is offered once
    id FILE   say that this is the file; the episode ends

Replies. A label, or the text of a listed command, does what the menu says; "12. cd src" counts as "12". Any other reply
that begins with cd, ls, cat, head, tail or id is a command of its own (`cat src/a.py`). Every other reply does nothing,
and the answer begins with "Warning". If a command cannot be carried out, the answer begins with "Error".

Costs. The reward is the negative cost. A step costs 1, plus `error_cost` or `warning_cost` if the answer is one. The
last step costs H more, or H less if a target was identified: n steps to success cost n - H, to a wrong id n + H, and
reaching the horizon 2 H. Success is identifying a target, also with the last step.

`first_step` ends every episode after one step: the first command of a best path costs -100 - H.

Leave-out. Every entry is missing from the episode with probability `leaveout`, except the targets and the folders above
them. Everything under a missing folder is missing too. The draw depends only on the task, folder by folder. So nothing
is copied, and folders that are not visited are not drawn.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from trailmark.errors import TaskError
from trailmark.tasks.auto_explore.commands import Offer, Wrong, head_arguments, one_path, quote, resolve, split
from trailmark.tasks.auto_explore.contents import MOST_BYTES, NotText, decode
from trailmark.tasks.auto_explore.oracle import best_command, label_of
from trailmark.tasks.auto_explore.repo import Entry, Refused, Snapshot
from trailmark.tasks.base import Observation, Step, World
from trailmark.tasks.labels import NEXT_PAGE, PREVIOUS_PAGE, pages, shuffled
from trailmark.types import Scored, Task

if TYPE_CHECKING:
    from trailmark.tasks.auto_explore.source import AutoExplore

UP = Offer("cd ..", "cd", "..")
NEXT, PREVIOUS = Offer(NEXT_PAGE, "page", "+"), Offer(PREVIOUS_PAGE, "page", "-")
FIRST_STEP_BONUS = 100.0
SEEN_AT_MOST = 4096  # most files whose shown text is cached


class View(NamedTuple):
    """A folder as this episode has it."""

    entries: dict[str, Entry]  # by name
    listing: str
    offers: tuple[Offer, ...]


class Row(NamedTuple):
    """An entry with the text it adds to a folder's listing and menu."""

    entry: Entry
    line: str
    offers: tuple[Offer, ...]


def row(e: Entry) -> Row:
    word = quote(e.name)
    if e.kind is None:
        return Row(e, f"{e.name}/\n", (Offer(f"cd {word}", "cd", e.path),))
    offers = (Offer(f"cat {word}", "cat", e.path), Offer(f"id {word}", "id", e.path)) if e.kind else ()
    return Row(e, f"{e.name}\n", offers)


def view(path: str, rows: list[Row]) -> View:
    offers = [UP] if path else []
    for r in rows:
        offers += r.offers
    return View({r.entry.name: r.entry for r in rows}, "".join([r.line for r in rows]), tuple(offers))


class Library:
    """A snapshot with cached results: whole views, and the shown beginnings of files."""

    def __init__(self, files: Snapshot):
        self.files = files
        self._rows: dict[str, list[Row]] = {}
        self._views: dict[str, View] = {}
        self._shown: dict[str, str] = {}
        self._readable: dict[str, bool] = {}

    def whole(self, path: str) -> View:
        made = self._views.get(path)
        if made is None:
            made = self._views[path] = view(path, self.rows(path))
        return made

    def rows(self, path: str) -> list[Row]:
        made = self._rows.get(path)
        if made is None:
            made = self._rows[path] = [row(e) for e in self.files.folders[path]]
        return made

    def forget(self) -> None:
        """Drop the cached texts: the limits have changed."""
        self._shown.clear()

    def text(self, path: str) -> tuple[str, bool]:
        """A file's text, and whether its end is missing. `Refused` or `NotText` if there is none to show."""
        data, more = self.files.read(path, MOST_BYTES)
        return decode(data, more), more

    def readable(self, path: str) -> bool:
        """Whether a file exists and has text to show."""
        if path not in self._readable:
            try:
                self.text(path)
            except (Refused, NotText):
                self._readable[path] = False
            else:
                self._readable[path] = True
        return self._readable[path]

    def show(self, source: AutoExplore, path: str, kind: str) -> str:
        """The answer to `cat`."""
        made = self._shown.get(path)
        if made is None:
            try:
                text, more = self.text(path)
            except (Refused, NotText) as why:
                made = f"Error: {path} {why}.\n"
            else:
                made = shown(source, path, kind, text, more)
            if len(self._shown) >= SEEN_AT_MOST:
                self._shown.pop(next(iter(self._shown)))
            self._shown[path] = made
        return made


def shown(source: AutoExplore, path: str, kind: str, text: str, more: bool = False) -> str:
    body, note = source.limits.cut(text, kind)
    if more and not note:
        note = f"(cut: the first {MOST_BYTES} bytes are shown)"
    body += "" if body.endswith("\n") or not body else "\n"
    return f"Success: the content of {path}:\n{body}{note}{note and chr(10)}"


class ExploreWorld(World):
    """One player. Teachers may read `cwd`, `catted`, `targets`, `history`, `steps`, `seen` and `commands`."""

    def __init__(self, source: AutoExplore):
        self.source, self.over = source, True

    def reset(self, task: Task) -> Observation:
        source = self.source
        start = source.start(task)
        self.library, self.targets, self.leaveout = start.library, start.targets, start.leaveout
        self.seed = f"{task.seed}\0{task.id}"
        self.query = start.query
        if source.easy and start.targets:
            self.query = f"Find the file {random.Random(f'easy {self.seed}').choice(sorted(start.targets))}."
        self.kept = {above for t in start.targets for above in _with_parents(t)}
        self.labels_draw = random.Random(f"labels {self.seed}") if source.shuffle_labels else None
        self.head = f"# Task\n{self.query}\n# Current folder\n"
        self.views: dict[str, View] = {}
        self.cwd, self.page, self.steps, self.total, self.over = "", 0, 0, 0.0, False
        self.catted: set[str] = set()
        self.history: list[str] = []
        self.past, self.result, self.identified = "", "", None
        return self._see()

    def step(self, action: str) -> Step:
        if self.over:
            raise TaskError("this exploration is over; call reset before the next step.")
        source, first = self.source, self.steps == 0
        command, answer = self._do(action)
        self.result = f"{command}\n{answer}" if command else answer
        self.steps += 1
        cost = 1.0
        if answer.startswith("Error"):
            cost += source.error_cost
        elif answer.startswith("Warning"):
            cost += source.warning_cost
        found = self.identified is not None and self.identified in self.targets
        terminated = self.identified is not None
        if source.first_step and first:
            terminated = True
            if command in self._first_best():
                found, cost = True, -FIRST_STEP_BONUS
        truncated = not terminated and self.steps >= source.horizon
        self.over = terminated or truncated
        if self.over and self.targets:
            cost += -source.horizon if found else source.horizon
        self.total += cost
        info = {"command": command, "cost": cost}
        if not self.over:
            return Step(self._see(), -cost, False, False, None, info)
        info |= {"identified": self.identified, "steps": self.steps, "total_cost": self.total}
        outcome = Scored(-self.total, found if self.targets else None)
        return Step(self._see(), -cost, terminated, truncated, outcome, info)

    def oracle(self) -> str | None:
        """The label of the best next command, or of the page turn towards it. None if the play has no target or is
        over."""
        if not self.targets or self.over:
            return None
        return label_of(self.seen, best_command(self), self.commands)

    def _first_best(self) -> set[str]:
        """The commands at the root that begin a best path to some target."""
        ways = [t.partition("/") for t in self.targets]
        return {f"{'cd' if deeper else 'cat'} {quote(name)}" for name, _, deeper in ways}

    # --- doing ---------------------------------------------------------------------------------------------------

    def _do(self, action: str) -> tuple[str, str]:
        """Carry out a reply. Returns its command ("" if it is not a command) and the answer."""
        offer = self.by_label.get(action)
        if offer is None:
            reply = action.strip()
            offer = self.by_label.get(reply) or self._listed(reply)
            if offer is None:
                return self._free(reply)
        if offer.verb == "page":
            self.page += 1 if offer is NEXT else -1
            return offer.text, f"Success: page {self.page + 1} of the commands.\n"
        self._remember(offer.text)
        return offer.text, self._carry_out(offer.verb, offer.path)

    def _listed(self, reply: str) -> Offer | None:
        for offer in (*self.offers, *self.by_label.values()):
            if offer.text == reply:
                return offer
        return self.by_label.get(reply.strip(".").partition(".")[0])

    def _remember(self, command: str) -> None:
        self.history.append(command)
        self.past += command + "\n"
        self.page = 0

    def _carry_out(self, verb: str, path: str) -> str:
        if verb == "cd":
            self.cwd = self.cwd.rpartition("/")[0] if path == ".." else path
            return f"Success: the current folder is {self.cwd + '/' if self.cwd else 'the root'}.\n"
        if verb == "id":
            self.identified = path
            return f"Success: {path} is identified.\n"
        self.catted.add(path)
        return self.library.show(self.source, path, self._entry(path).kind or "")

    def _free(self, reply: str) -> tuple[str, str]:
        """A command that is not in the menu."""
        try:
            words = split(reply)
            if not words:
                said = "".join(c if c.isprintable() else " " for c in reply[:60])
                return "", f"Warning: '{said}' is neither a label nor a command; nothing was done.\n"
            command = " ".join(quote(w) for w in words)
            self._remember(command)
        except Wrong as why:
            return "", f"{why}\n"
        try:
            return command, self._own(words[0], words[1:])
        except Wrong as why:
            return command, f"{why}\n"

    def _own(self, verb: str, words: list[str]) -> str:
        lines = 0
        if verb in ("head", "tail"):
            lines, words = head_arguments(words)
        written = one_path(verb, words, "" if verb in ("cd", "ls") else None)
        path = "" if verb == "cd" and not words else resolve(self.cwd, written)
        if verb in ("cd", "ls"):
            if path and self._entry(path).kind is not None:
                raise Wrong(f"Error: {path} is not a folder.")
            return self._carry_out("cd", path) if verb == "cd" else f"Success:\n{self._view(path).listing}"
        kind = self._entry(path).kind if path else None
        if kind is None:
            raise Wrong(f"Error: {path or 'the root'} is a folder.")
        if not kind:
            raise Wrong(f"Error: {path} is not a kind of file that can be read here.")
        return self._part(verb, path, kind, lines) if lines or verb in ("head", "tail") else self._carry_out(verb, path)

    def _part(self, verb: str, path: str, kind: str, lines: int) -> str:
        try:
            text, more = self.library.text(path)
        except (Refused, NotText) as why:
            raise Wrong(f"Error: {path} {why}.") from None
        if verb == "tail" and more:
            raise Wrong(f"Error: {path} is too large to show its end.")
        all_lines = text.splitlines(keepends=True)
        part = all_lines[:lines] if verb == "head" else all_lines[max(0, len(all_lines) - lines) :]
        return shown(self.source, path, kind, "".join(part))

    # --- seeing --------------------------------------------------------------------------------------------------

    def _view(self, path: str) -> View:
        if not self.leaveout:
            return self.library.whole(path)
        made = self.views.get(path)
        if made is None:
            draw, p, kept = random.Random(f"leave out {self.seed}\0{path}").random, self.leaveout, self.kept
            rows = [r for r in self.library.rows(path) if draw() >= p or r.entry.path in kept]
            made = self.views[path] = view(path, rows)
        return made

    def _entry(self, path: str) -> Entry:
        """The entry of a path, if every folder on the way exists in this episode."""
        at, found = "", None
        for part in path.split("/"):
            if found is not None and found.kind is not None:
                raise Wrong(f"Error: {at} is not a folder.")
            found = self._view(at).entries.get(part)
            if found is None:
                raise Wrong("Error: there is no such file or folder.")
            at = found.path
        assert found is not None
        return found

    def _see(self) -> Observation:
        here = self._view(self.cwd)
        offers = here.offers
        if self.catted:
            offers = tuple(o for o in offers if o.verb != "cat" or o.path not in self.catted)
        self.offers = offers
        state = (
            f"{self.head}{self.cwd}{self.cwd and '/'}\n# Entries of the folder\n{here.listing}"
            f"# Commands so far\n{self.past}# Result of the last command\n{self.result}"
        )
        if self.over:
            self.by_label: dict[str, Offer] = {}
        self.seen = Observation(state) if self.over else self._menu(state, offers)
        return self.seen

    def _menu(self, state: str, offers: tuple[Offer, ...]) -> Observation:
        labels = self.source.labels
        if self.labels_draw is not None:
            labels = shuffled(labels, len(offers), self.labels_draw)
        texts = tuple([o.text for o in offers])
        if len(offers) <= len(labels):
            self.by_label = dict(zip(labels, offers))
            menu = "".join([f"{label}. {text}\n" for label, text in zip(labels, texts)])
            return Observation(state, f"# Commands\n{menu}", labels[: len(texts)], texts)
        cut = pages(texts, labels)
        page, room = cut[self.page], len(labels) - 2
        ways = {NEXT_PAGE: NEXT, PREVIOUS_PAGE: PREVIOUS}
        here = offers[self.page * room : (self.page + 1) * room]
        self.by_label = dict(zip(page.labels, (*here, *(ways[a] for a in page.actions[len(here) :]))))
        menu = "".join(f"{label}. {text}\n" for label, text in zip(page.labels, page.actions))
        return Observation(state, f"# Commands (page {self.page + 1} of {len(cut)})\n{menu}", page.labels, page.actions)

    @property
    def commands(self) -> tuple[str, ...]:
        """All commands offered in this folder now, on all pages."""
        return tuple(o.text for o in self.offers)


def _with_parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]
