"""Negotiations as a task: two sides talk about items until one accepts, walks away, or the turns are over.

Each side knows its own points alone. The partner is a rule of the world (`partner: scripted`), or a seat of its own
(`partner: seat`): a model, a server, a function or a person. The reward comes from the rule, so no judge is needed:
points / 36 (CaSiNo) or points / 10 (DealOrNoDeal). Without a deal that is 5 / 36, and a true 0.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from trailmark.errors import TaskError, nearest
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.tasks.dialogue import Line, View
from trailmark.tasks.negotiation.casino import ITEMS, read_casino, read_deals
from trailmark.tasks.negotiation.deals import Move, Scene, State, after, points, read_move, risen, scene_of
from trailmark.tasks.negotiation.players import STYLES, partner_says
from trailmark.tasks.splits import SPLITS, split_of
from trailmark.types import Episode, Scored, Task

NAMES = ("Ann", "Bob")
ACTORS = ("agent", "partner")  # their seats, and their sides
RULES = (
    "Say what you like. The last line may be one of these moves:\n"
    "Offer: 2 {a}, 1 {b} (what you get; the other one gets the rest)\nAccept\nReject\nWalk away"
)


class NegotiationWorld(World):
    """Side 0 is the agent, side 1 the partner."""

    def __init__(self, scripted: bool, max_turns: int):
        self.scripted, self.max_turns = scripted, max_turns
        self.over = True

    def reset(self, task: Task) -> Observation:
        try:
            self.scene, self.first = scene_of(task.data), int(task.data["first"])
        except (KeyError, TypeError, ValueError) as problem:
            raise TaskError(f"task '{task.id}' is no negotiation: {problem}.") from None
        self.task, self.state, self.over = task, State(), False
        self.said: list[tuple[int, str, Move]] = []
        if self.scripted and self.side == 1:
            self._partner()
        return self._seen()

    @property
    def side(self) -> int:
        """Whose turn it is."""
        return (self.first + len(self.said)) % 2

    def step(self, action: str) -> Step:
        if self.over:
            raise TaskError("this negotiation is over; call reset before the next step.")
        wrong = self._say(self.side, action)
        if self.scripted and not self._ended():
            self._partner()
        info = {"not_understood": wrong} if wrong else {}
        if not self._ended():
            return Step(self._seen(), 0.0, False, False, info=info)
        self.over = True
        outcomes = {ACTORS[k]: self._outcome(k) for k in range(2)}
        paid = {name: o.reward for name, o in outcomes.items()}
        end = self.state.over
        if self.scripted:
            return Step(self._seen(), paid[ACTORS[0]], end, not end, outcomes[ACTORS[0]], info)
        return Step(self._seen(), paid, end, not end, outcomes, info)

    def _say(self, side: int, text: str) -> str:
        move = read_move(text, self.scene)
        self.said.append((side, text, move))
        self.state = after(self.state, side, move, self.scene)
        return move.wrong

    def _partner(self) -> None:
        draw = random.Random(f"partner {self.task.seed} {self.task.id} {len(self.said)}")
        talk = [(side, text) for side, text, _ in self.said]
        self._say(1, partner_says(self.scene, 1, talk, str(self.task.data.get("style", "fair")), draw))

    def _ended(self) -> bool:
        return self.state.over or len(self.said) >= self.max_turns

    def _outcome(self, side: int) -> Scored:
        got, deal = points(self.state, self.scene)[side], self.state.deal is not None
        reward = got / self.scene.full
        return Scored(reward, deal, {"points": float(got), "goal": 10 * reward, "deal": float(deal)})

    def _seen(self) -> Observation:
        seat = "" if self.scripted else ACTORS[self.side]
        return Observation(self.view(ACTORS[self.side] if not self.scripted else ACTORS[0]).text, seat=seat)

    def view(self, seat: str) -> View:
        """What a side may see (`tasks/dialogue.py`)."""
        me = ACTORS.index(seat)
        s, worth = self.scene, self.scene.values[me]
        scene = [
            f"Items: {', '.join(f'{n} {i}' for n, i in zip(s.counts, s.items))}.",
            f"Your points for each: {', '.join(f'{i} {v}' for i, v in zip(s.items, worth))}.",
            f"Without a deal: {s.walk} points.",
            *(f"Why {i}: {why}" for i, why in zip(s.items, s.reasons[me] if s.reasons else ()) if why),
            f"You are {NAMES[me]}, and talk with {NAMES[1 - me]}.",
        ]
        lines = tuple(Line(ACTORS[k], NAMES[k], " / ".join(text.splitlines())) for k, text, _ in self.said)
        rules = RULES.format(a=s.items[0], b=s.items[1])
        return View(seat, NAMES[me], NAMES[1 - me], "\n".join(scene), rules, lines)

    def example_actions(self) -> list[str]:
        a, b = self.scene.items[:2]
        return ["What do you need most?", f"Offer: 1 {a}, 1 {b}", "Accept", "Reject", "Walk away", f"Offer: 99 {a}"]


class Negotiation(TaskSource):
    """The task source.

    kind      casino (3 firewood, food and water; points 5, 4, 3) or deal (books, hats and balls; 10 points each side)
    path      a file of human dialogues of this kind: their scenes are played; none: scenes are made
    partner   scripted: a rule of the world; seat: a seat `partner`
    style     of the scripted partner: soft, fair, tough, or mixed: each start has one
    reasons   whether the people's reasons for what they need are shown (CaSiNo files)
    max_turns of both sides together
    """

    name, markov, additive = "negotiation", True, True

    def __init__(
        self,
        kind: Literal["casino", "deal"] = "casino",
        path: str | None = None,
        partner: Literal["scripted", "seat"] = "scripted",
        style: str = "mixed",
        reasons: bool = False,
        max_turns: int = 12,
    ):
        for what, value, known in (
            ("kind", kind, ("casino", "deal")), ("partner", partner, ("scripted", "seat")),
            ("style", style, (*STYLES, "mixed")),
        ):  # fmt: skip
            if value not in known:
                raise TaskError(
                    f"negotiation: {what} is '{value}', and may be {', '.join(known)}.{nearest(str(value), known)}"
                )
        if type(max_turns) is not int or not 2 <= max_turns <= 200:
            raise TaskError(f"negotiation: max_turns is {max_turns!r}, and may be a whole number from 2 to 200.")
        self.kind, self.path, self.scripted, self.style = kind, path, partner == "scripted", style
        self.reasons, self.max_turns, self.finite = reasons, max_turns, path is not None

    def make(self) -> NegotiationWorld:
        return NegotiationWorld(self.scripted, self.max_turns)

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> Sequence[Task]:
        if split not in SPLITS and split != "all":
            raise TaskError(f"negotiation has the splits {', '.join(SPLITS)} and all, not '{split}'.")
        if self.path is not None:
            mine = [(name, s) for name, s in self._scenes if split in ("all", split_of(name))]
            if not mine:
                raise TaskError(f"{self.path} has no dialogue for split '{split}'.")
            draw = random.Random(f"negotiation {seed}")
            picked = mine if n is None else draw.sample(mine, n) if n <= len(mine) else draw.choices(mine, k=n)
            return [self._task(name, s, seed) for name, s in picked]
        if n is None:
            raise TaskError("negotiation makes its scenes, so their number is not limited: say how many (n).")
        out, k = list[Task](), 0
        while len(out) < n:
            name = f"{seed}-{k}"
            if split in ("all", split_of(name)):
                out.append(self._task(name, self._made(name), seed))
            k += 1
        return out

    def _task(self, name: str, scene: Scene, seed: int) -> Task:
        draw = random.Random(f"start {self.kind} {name}")
        style = draw.choice(sorted(STYLES)) if self.style == "mixed" else self.style
        data: dict[str, Any] = {**scene.data(), "first": draw.randrange(2), "style": style}
        if not self.reasons:
            data.pop("reasons")
        return Task(f"{self.kind}-{name}", seed, data)

    def _made(self, name: str) -> Scene:
        draw = random.Random(f"scene {self.kind} {name}")
        if self.kind == "casino":
            worth = [tuple(draw.sample((5, 4, 3), 3)) for _ in range(2)]
            return Scene("casino", ITEMS, (3, 3, 3), (worth[0], worth[1]))
        return draw.choice(DEALS)

    @cached_property
    def _scenes(self) -> list[tuple[str, Scene]]:
        assert self.path is not None
        read = read_casino if self.kind == "casino" else read_deals
        found: dict[str, Scene] = {}
        for d in read(Path(self.path)):
            key = d.name if self.kind == "casino" else _key(d.scene)  # two rows of one dialogue are one scene
            found.setdefault(key, d.scene)
        return list(found.items())

    def critical(self, episode: Episode, side: str = "") -> list[int]:
        """The numbers of a side's actions (from 0) that raised its points in the standing offer: what a judge by rule
        calls decisive."""
        world, me = NegotiationWorld(self.scripted, self.max_turns), 1 if side == ACTORS[1] else 0
        world.reset(episode.task)
        for turn in episode.turns:
            if turn.action is not None:
                world.step(turn.action)
        return risen(world.scene, [(k, move) for k, _, move in world.said], me)


def _key(scene: Scene) -> str:
    a, b = sorted(scene.values)
    return "-".join("".join(map(str, part)) for part in (scene.counts, a, b))


def _divisions() -> list[Scene]:
    """The scenes of DealOrNoDeal: 5 to 7 items of three kinds, 10 points for each side, no kind worthless to both, and
    one that both want."""
    found = []
    for counts in itertools.product(range(1, 5), repeat=3):
        if 5 <= sum(counts) <= 7:
            each = itertools.product(*(range(10 // n + 1) for n in counts))
            worth = [v for v in each if sum(k * n for k, n in zip(v, counts)) == 10]
            pairs = itertools.product(worth, repeat=2)
            found += [Scene("deal", ("book", "hat", "ball"), counts, (a, b)) for a, b in pairs
                      if all(x + y for x, y in zip(a, b)) and any(x * y for x, y in zip(a, b))]  # fmt: skip
    return found


DEALS = _divisions()
