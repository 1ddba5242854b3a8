"""Negotiators that are rules: the partner that the world may play itself, and functions for seats of recipes.

`partner_says` decides by the state of the world. `advised`, `deaf` and `strategist` are called with a prompt, as models
are, and read it: the points, the talk, and an advice. An agent does what an advice says only if it knows such a move
and only with a chance (`OBEYS`), so what an adviser gains is not the agent's obedience alone; `deaf` never listens.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trailmark.tasks.negotiation.deals import Scene, Share, State, after, read_move, standing, written

STYLES = {"soft": (0.75, 0.10), "fair": (0.85, 0.08), "tough": (0.95, 0.05)}  # first demand, and less at each turn
OBEYS = 0.8
ASK = re.compile(r"what do you (need|want)|which .* (need|want|prefer)", re.I)
NEEDS = re.compile(r"\bi need (\w+) most\b", re.I)
Said = Sequence[tuple[int, str]]  # (side, text)


def partner_says(scene: Scene, side: int, said: Said, style: str, draw: random.Random) -> str:
    """The next turn of a side that knows its own points alone, and listens to what the other says it needs."""
    start, less = STYLES[style]
    mine = sum(who == side for who, _ in said)
    best = scene.points(side, scene.counts)
    least = max((start - less * mine) * best, scene.walk + 1)
    state = state_of(scene, said)
    now = standing(state, side, scene)
    if now is not None and state.offer is not None and state.offer[0] != side and now >= least:
        return "That works for me.\nAccept"
    asked = bool(said) and said[-1][0] != side and ASK.search(said[-1][1])
    words = f"I need {top_item(scene, side)} most." if asked else draw.choice(["How about this?", "Let us see.", "Hm."])
    return f"{words}\n{written(offer_for(scene, side, least, heard(scene, said, side), draw), scene)}"


def state_of(scene: Scene, said: Said) -> State:
    state = State()
    for side, text in said:
        state = after(state, side, read_move(text, scene), scene)
    return state


def top_item(scene: Scene, side: int) -> str:
    return max(zip(scene.values[side], scene.items))[1]


def heard(scene: Scene, said: Said, side: int) -> Share:
    """What an item seems to be worth to the other side: more, if it said that it needs it most."""
    named = [m[1].lower() for who, text in said if who != side for m in NEEDS.finditer(text)]
    return tuple(6 if named and i == named[-1] else 4 for i in scene.items)


def offer_for(scene: Scene, side: int, least: float, theirs: Share, draw: random.Random) -> Share:
    """Of the shares that are worth at least `least`, the one that leaves the other side most."""
    every = list(itertools.product(*(range(n + 1) for n in scene.counts)))
    good = [s for s in every if scene.points(side, s) >= least] or [scene.counts]
    left = lambda s: sum(v * k for v, k in zip(theirs, scene.rest(s)))
    most = max(map(left, good))
    return draw.choice([s for s in good if left(s) == most])


# --- players that read a prompt --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a prompt says: the scene with the reader's points (those of the other side are not known: 0), the talk, of
    which the reader is side 0, and the advice for this turn."""

    scene: Scene
    said: tuple[tuple[int, str], ...]
    advice: str


def read_prompt(prompt: str) -> Seen:
    items = re.findall(r"(\d+) (\w+)", _last(r"^Items: (.*)\.$", prompt))
    worth = dict(re.findall(r"(\w+) (\d+)", _last(r"^Your points for each: (.*)\.$", prompt)))
    me, other = re.findall(r"You are (\w+), and talk with (\w+)\.", prompt)[-1]
    names = tuple(i for _, i in items)
    mine = tuple(int(worth[i]) for i in names)
    kind = "casino" if "Without a deal: 5" in prompt else "deal"
    scene = Scene(kind, names, tuple(int(n) for n, _ in items), (mine, (0,) * len(mine)))
    talk = re.findall(rf"^({me}|{other}): (.*)$", prompt, re.M)
    said = tuple((int(name == other), text.replace(" / ", "\n")) for name, text in talk)
    return Seen(scene, said, _last(r"^Advice[^\n:]*: (.*)$", prompt))


def _last(pattern: str, text: str) -> str:
    found = re.findall(pattern, text, re.M)
    return found[-1] if found else ""


def advised(prompt: str, draw: random.Random) -> str:
    """A negotiator who mostly does what an advice says, if it names a move that he knows."""
    seen = read_prompt(prompt)
    wanted = advice_of(seen.advice)
    if wanted is None or draw.random() >= OBEYS:
        wanted = draw.choice(list(MOVES))
    return says(wanted, seen, draw)


def deaf(prompt: str, draw: random.Random) -> str:
    """The same negotiator without ears for advice."""
    return says(draw.choice(list(MOVES)), read_prompt(prompt), draw)


MOVES = {  # what an advice may name, by the words that mean it
    "ask": ("ask", "question", "learn"),
    "tell": ("tell", "share", "reveal", "need"),
    "demand": ("demand", "firm", "more", "push"),
    "trade": ("trade", "swap", "propose"),
    "fair": ("fair", "concede", "split"),
    "accept": ("accept", "agree", "close"),
}


def advice_of(text: str) -> str | None:
    """The first move that a text names."""
    words = re.findall(r"[a-z]+", text.lower())
    return next((move for w in words for move, names in MOVES.items() if w in names), None)


def says(move: str, seen: Seen, draw: random.Random) -> str:
    scene, said = seen.scene, seen.said
    state = state_of(scene, said)
    if move == "accept":
        return "Good.\nAccept" if state.offer is not None and state.offer[0] == 1 else "Let us find a deal."
    if move == "ask":
        return "What do you need most?"
    if move == "tell":
        return f"I need {top_item(scene, 0)} most."
    best = scene.points(0, scene.counts)
    share = {"demand": 0.85, "trade": 0.65, "fair": 0.5}[move]
    theirs = heard(scene, said, 0) if move == "trade" else (1,) * len(scene.items)
    return f"I would like this.\n{written(offer_for(scene, 0, share * best, theirs, draw), scene)}"


def anything(prompt: str, draw: random.Random) -> str:
    """A strategist without a plan: any of the moves that `advised` knows."""
    return draw.choice(list(MOVES))


def strategist(prompt: str, draw: random.Random) -> str:
    """A plan that works: ask what the other needs, propose a trade, accept what is good enough."""
    told = len(re.findall(r"<\|im_start\|>assistant\n", prompt)) or len(re.findall(r"^Strategy:", prompt, re.M)) + 1
    return f"Strategy: {('ask', 'tell', 'trade', 'trade', 'fair')[min(told, 5) - 1]}"
