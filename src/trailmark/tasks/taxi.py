"""DangerousTaxi: fetch a passenger on a 5x5 map where a move that changes nothing is fatal.

The dynamics are those of the classic Taxi problem, an exact table of 500 states x 6 actions. This world adds:

    every reward is divided by 20: a move -0.05, delivering +1, a fatal no-op -0.5;
    a no-op (into a wall, a pick-up or drop-off that does nothing, a label that does not exist) ends the play;
    mode "pickup"  ends when the passenger is first aboard, which pays +1;
    mode "dropoff" starts with the passenger aboard, where a shortest pick-up ends, and ends at the delivery;
    mode "full"    pays +1 for the first pick-up only and ends at the delivery; its best return is 2 - 0.05 (n - 2).

Setting the passenger down at a wrong corner is legal. Success is reaching the mode's goal. For horizons up to 20 that
is the same as return > 0, > 0 and > 1. `first_bump_fatal=False` reproduces a published implementation. It overlooks a
no-op on the very first action (the play goes on, at the classic price) and derives success from those thresholds. A
fatal no-op is `terminated`, the horizon is `truncated`; never both.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import ClassVar, Literal, get_args

from trailmark.errors import TaskError, nearest
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.types import Scored, Task

Mode = Literal["pickup", "dropoff", "full"]
History = Literal["none", "actions", "maps"]

ACTIONS = ("south", "north", "east", "west", "pick up", "drop off")
LABELS = tuple("012345")
CORNERS = ((0, 0), (0, 4), (4, 0), (4, 3))  # R, G, Y, B: (row, column)
ABOARD = 4  # the passenger's place when in the taxi
WALLS = ("+---------+", "| : | : : |", "| : | : : |", "| : : : : |", "| | : | : |", "| | : | : |", "+---------+")
MENU = "Choose one action:\n" + "".join(f"{k}. {a}\n" for k, a in zip(LABELS, ACTIONS))
RULES = """\
You drive a taxi on a 5x5 map. Fetch the passenger, then set them down at the destination.
"|" and "-" are walls, ":" can be passed. D destination, P passenger, T empty taxi, O taxi at the passenger's place,
X taxi with the passenger. Pick up where the passenger waits; drop off at a corner.
You have {horizon} actions. A move costs 0.05. {bonus}
An action that changes nothing (into a wall, a useless pick up or drop off) {fatal}ends the game and costs 0.5.

"""
BONUS = {
    "pickup": "Picking up the passenger pays 1 and ends the game.",
    "dropoff": "Delivering the passenger pays 1 and ends the game.",
    "full": "The first pick up pays 1; delivering pays 1 and ends the game.",
}


def encode(row: int, col: int, passenger: int, destination: int) -> int:
    """The state's number, ((row * 5 + col) * 5 + passenger) * 4 + destination; passenger 0-3 a corner, 4 aboard."""
    return ((row * 5 + col) * 5 + passenger) * 4 + destination


def decode(state: int) -> tuple[int, int, int, int]:
    """(row, column, passenger, destination) of a state's number."""
    return state // 100, state // 20 % 5, state // 4 % 5, state % 4


def starts() -> tuple[int, ...]:
    """The 300 starts in order: taxi anywhere, passenger at a corner that is not the destination."""
    return tuple(s for s in range(500) if decode(s)[2] < ABOARD and decode(s)[2] != decode(s)[3])


@cache
def dynamics() -> tuple[tuple[tuple[int, int, bool], ...], ...]:
    """The classic table: `dynamics()[state][action]` is (next state, reward -1 / -10 / 20, delivered)."""
    return tuple(tuple(_classic(s, a) for a in range(6)) for s in range(500))


def _classic(state: int, action: int) -> tuple[int, int, bool]:
    row, col, passenger, destination = decode(state)
    if action < 2:
        row = min(row + 1, 4) if action == 0 else max(row - 1, 0)
    elif action < 4:
        side = 1 if action == 2 else -1
        if WALLS[row + 1][2 * col + 1 + side] == ":":
            col += side
    elif action == 4:
        if passenger == ABOARD or CORNERS[passenger] != (row, col):
            return state, -10, False
        passenger = ABOARD
    else:
        if passenger != ABOARD or (row, col) not in CORNERS:
            return state, -10, False
        passenger = CORNERS.index((row, col))
        if passenger == destination:
            return encode(row, col, passenger, destination), 20, True
    return encode(row, col, passenger, destination), -1, False


@cache
def lengths(mode: Mode) -> tuple[int, ...]:
    """The fewest actions from each state to the goal of `mode`: aboard ("pickup") or delivered, by a search backwards
    from the goal. 0 if the goal is reached: the passenger is aboard, or is at the destination."""
    table = dynamics()
    met = [decode(s)[2] == (ABOARD if mode == "pickup" else decode(s)[3]) for s in range(500)]
    before: list[list[int]] = [[] for _ in range(500)]
    for s in range(500):
        for t, _, _ in table[s]:
            if not met[s]:
                before[t].append(s)
    far = [0 if m else -1 for m in met]
    queue = [s for s in range(500) if met[s]]
    for t in queue:  # breadth first: the queue grows during the loop
        for s in before[t]:
            if far[s] < 0:
                far[s] = far[t] + 1
                queue.append(s)
    return tuple(far)


def optimal_length(state: int, mode: Mode = "full") -> int:
    """Fewest actions from `state` to the goal of `mode`."""
    return lengths(mode)[state]


def optimal_actions(state: int, mode: Mode = "full") -> tuple[int, ...]:
    """Every action that begins a shortest path to the goal, smallest number first; none if the goal is reached."""
    far = lengths(mode)
    return tuple(a for a, (t, _, _) in enumerate(dynamics()[state]) if t != state and far[t] == far[state] - 1)


def optimal_action(state: int, mode: Mode = "full") -> int | None:
    """The first of `optimal_actions`. Following it gives the alphabetically first shortest path. None if the goal is
    reached (not 0, which is "south")."""
    return next(iter(optimal_actions(state, mode)), None)


def start_of(state: int, mode: Mode) -> int:
    """The first state of a play of `mode`. For "dropoff" it is the state in which a shortest pick-up ends."""
    _, _, passenger, destination = decode(state)
    return encode(*CORNERS[passenger], ABOARD, destination) if mode == "dropoff" and passenger < ABOARD else state


@cache
def draw(state: int, walls: bool = True) -> str:
    """The map in 7 lines. Without `walls`, its 25 cells in 5 lines. Marks are drawn in the order D, P, then the taxi
    (T, O or X); a later mark hides an earlier one."""
    row, col, passenger, destination = decode(state)
    grid: list[list[str]] = [list(line) for line in WALLS] if walls else [["."] * 5 for _ in range(5)]
    marks = [(CORNERS[destination], "D")]
    if passenger < ABOARD:
        marks += [(CORNERS[passenger], "P"), ((row, col), "O" if CORNERS[passenger] == (row, col) else "T")]
    else:
        marks += [((row, col), "X")]
    for (r, c), mark in marks:
        grid[r + 1 if walls else r][2 * c + 1 if walls else c] = mark
    return "".join("".join(line) + "\n" for line in grid)


class TaxiWorld(World):
    """One taxi. `state`, `mode` and `steps` may be read by teachers."""

    def __init__(self, source: Taxi):
        self.source = source
        self.table = dynamics()
        self.state, self.mode, self.over = 0, source.mode, True

    def reset(self, task: Task) -> Observation:
        try:
            state, mode = int(task.data["state"]), task.data.get("mode", self.source.mode)
        except (KeyError, TypeError, ValueError):
            raise TaskError(f"task '{task.id}' needs data 'state', the number of a start.") from None
        if mode not in BONUS or not 0 <= state < 500 or decode(state)[2] == decode(state)[3]:
            raise TaskError(f"task '{task.id}' has state {state} and mode '{mode}', which cannot be played.")
        if mode == "pickup" and decode(state)[2] == ABOARD:
            raise TaskError(f"task '{task.id}' starts with the passenger aboard: mode 'pickup' is already over.")
        self.mode: Mode = mode
        self.state = start_of(state, mode)
        self.steps, self.total, self.over = 0, 0, False  # `total` counts twentieths, so it is exact
        self.paid = mode == "dropoff" or decode(state)[2] == ABOARD
        self.names: list[str] = []
        self.maps = [draw(self.state, self.source.walls)]
        return self._see()

    def oracle(self) -> str:
        """A step of a shortest way."""
        return str(optimal_action(self.state, self.mode))

    def step(self, action: str) -> Step:
        if self.over:
            raise TaskError("this taxi play is over; call reset before the next step.")
        act = LABELS.index(action) if action in LABELS else -1
        after, reward, goal = self.table[self.state][act] if act >= 0 else (self.state, -10, False)
        first = self.steps == 0 and not self.source.first_bump_fatal
        fatal = after == self.state and not first
        if fatal:
            reward = -10
        elif act == 4 and after != self.state and not self.paid:
            reward, self.paid, goal = 20, True, self.mode == "pickup"
        self.state = after
        self.steps += 1
        self.total += reward
        terminated = goal or fatal
        truncated = not terminated and self.steps >= self.source.horizon
        self.over = terminated or truncated
        if self.source.history != "none":
            self.names.append(ACTIONS[act] if act >= 0 else "nothing")
            self.maps.append(draw(after, self.source.walls))
        if not self.over:
            return Step(self._see(), reward / 20, False, False)
        enough = self.source.first_bump_fatal or self.total > (20 if self.mode == "full" else 0)
        outcome = Scored(self.total / 20, goal and enough)
        return Step(self._see(), reward / 20, terminated, truncated, outcome, {"fatal": fatal, "steps": self.steps})

    def _see(self) -> Observation:
        source = self.source
        if source.history == "none":
            return source.look(self.state, self.mode)
        now = source.header(self.mode)
        if source.history == "actions":
            now += "Actions so far: " + (", ".join(self.names) or "none") + "\n"
        elif self.names:
            now += "Map at the start:\n" + self.maps[0]
            now += "".join(f"Action: {a}\n{m}" for a, m in zip(self.names[:-1], self.maps[1:]))
            now += f"Action: {self.names[-1]}\n"
        return Observation(now + "Map now:\n" + self.maps[-1], MENU if source.menu else "", LABELS, ACTIONS)


class Taxi(TaskSource):
    """The task source.

    mode      "pickup", "dropoff" or "full"; a task's own data["mode"] overrides it
    horizon   a play is cut off after so many actions; with 15, 242 of the 300 full starts are solvable, with 18 all
    rules     begin each observation with the rules (they say that a no-op is fatal)
    history   "none": only the map; "actions": names of the actions so far; "maps": the first map, then each action
              and the map after it
    walls     draw them; without them the map is five lines of five letters, and a player finds the walls by playing
    menu      list the six actions; without it prompts are shorter, and the labels stay "0".."5"

    Splits: "all" is the 300 starts in order. "train" and "test" draw uniformly from the same 300 with replacement, by
    seed and split (`n=None`: 300 draws). A start may occur in both, because there are only 300.
    """

    name = "taxi"
    markov = True
    commands: ClassVar[Mapping[str, str]] = dict(zip(LABELS, ACTIONS))

    def __init__(
        self,
        mode: Mode = "full",
        horizon: int = 15,
        rules: bool = False,
        history: History = "actions",
        menu: bool = True,
        first_bump_fatal: bool = True,
        walls: bool = True,
    ):
        if mode not in BONUS:
            raise TaskError(f"taxi has no mode '{mode}'.{nearest(str(mode), BONUS)}")
        if history not in get_args(History):
            raise TaskError(f"taxi has no history '{history}'.{nearest(str(history), get_args(History))}")
        if horizon < 1:
            raise TaskError(f"taxi needs a horizon of at least 1, not {horizon}.")
        self.mode: Mode = mode
        self.history: History = history
        self.horizon, self.rules, self.menu, self.first_bump_fatal = horizon, rules, menu, first_bump_fatal
        self.walls = walls
        self._seen: dict[tuple[int, Mode], Observation] = {}

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        if split == "all":
            picks, stem = list(starts())[:n], f"taxi-{self.mode}-all"
        elif split in ("train", "test"):
            rng = random.Random(f"taxi {split} {seed}")
            picks, stem = rng.choices(starts(), k=300 if n is None else n), f"taxi-{self.mode}-{split}-{seed}"
        else:
            raise TaskError(f"taxi has no split '{split}'.{nearest(split, ('all', 'train', 'test'))}")
        return [Task(f"{stem}-{i}", seed, {"state": s, "mode": self.mode}) for i, s in enumerate(picks)]

    def make(self) -> TaxiWorld:
        return TaxiWorld(self)

    def header(self, mode: Mode) -> str:
        fatal = "" if self.first_bump_fatal else "after the first action "
        return RULES.format(horizon=self.horizon, bonus=BONUS[mode], fatal=fatal) if self.rules else ""

    def look(self, state: int, mode: Mode) -> Observation:
        """The observation without history. There is one object per state, made once."""
        seen = self._seen.get((state, mode))
        if seen is None:
            seen = Observation(self.header(mode) + draw(state, self.walls), MENU if self.menu else "", LABELS, ACTIONS)
            self._seen[state, mode] = seen
        return seen
