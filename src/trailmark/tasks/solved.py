"""Small text problems whose values are all known exactly.

A problem is a table: state s, action a -> next state `next[s, a]` (END: the play is over) and `reward[s, a]`. Every
action leads to a state with a higher number, so one sweep from the last state to the first solves the problem. There is
no discount. The text of a state is the letters played so far, one letter ("a", "b", ...) per action.

    tree    all letter strings up to a depth; the last letter pays 0 or 1
    chain   many letters; exactly one of them decides whether the end pays 1
    bandit  one letter, each arm its own reward
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any, Literal

import numpy as np

from trailmark.errors import TaskError, nearest
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.types import Scored, Task

END = -1
Form = Literal["turns", "answer"]


@dataclass(frozen=True)
class Path:
    """One whole play: the numbers of its letters, its probability under the given policy, and its return."""

    actions: tuple[int, ...]
    probability: float
    total: float


def _shapes(next: np.ndarray, reward: np.ndarray, *policies: np.ndarray) -> tuple[int, int]:
    assert next.ndim == 2 and next.dtype.kind == "i", f"next must be integers [states, actions], not {next.shape}"
    states, actions = next.shape
    assert reward.shape == next.shape, f"reward has shape {reward.shape}, next {next.shape}"
    assert ((next == END) | (next > np.arange(states)[:, None])).all() and (next < states).all(), "next must go up"
    for pi in policies:
        assert pi.shape == next.shape, f"policy has shape {pi.shape}, next {next.shape}"
        assert (pi >= 0).all() and np.allclose(pi.sum(1), 1, atol=1e-9), "each row of a policy must sum to 1"
    return states, actions


def _after(v: np.ndarray, next_s: np.ndarray) -> np.ndarray:
    return np.where(next_s == END, 0.0, v[next_s])


def solve(next: np.ndarray, reward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """V*(s) [S] and Q*(s, a) [S, A]:  Q*(s, a) = r(s, a) + V*(s'),  V*(s) = max_a Q*(s, a),  V*(END) = 0."""
    states, _ = _shapes(next, reward)
    v, q = np.zeros(states), np.zeros(next.shape)
    for s in range(states - 1, -1, -1):
        q[s] = reward[s] + _after(v, next[s])
        v[s] = q[s].max()
    return v, q


def solve_soft(
    next: np.ndarray, reward: np.ndarray, ref: np.ndarray, beta: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """V* [S], Q* [S, A] and pi* [S, A] of  max_pi E[sum_t r_t - beta log(pi(a_t|s_t) / ref(a_t|s_t))]:

    Q*(s, a) = r(s, a) + V*(s'),   V*(s) = beta log sum_a ref(a|s) exp(Q*(s, a) / beta),
    pi*(a|s) = ref(a|s) exp((Q*(s, a) - V*(s)) / beta).
    """
    states, _ = _shapes(next, reward, ref)
    assert beta > 0, f"beta must be positive, not {beta}"
    v, q, pi = np.zeros(states), np.zeros(next.shape), np.zeros(next.shape)
    for s in range(states - 1, -1, -1):
        q[s] = reward[s] + _after(v, next[s])
        top = q[s][ref[s] > 0].max()  # subtracted before exp, so a small beta does not overflow
        mass = ref[s] * np.exp(np.minimum(q[s] - top, 0.0) / beta)
        v[s] = top + beta * np.log(mass.sum())
        pi[s] = mass / mass.sum()
    return v, q, pi


def evaluate(
    next: np.ndarray, reward: np.ndarray, pi: np.ndarray, ref: np.ndarray | None = None, beta: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """V^pi [S] and Q^pi [S, A] of a tabular policy; V^pi(0) is its expected return.

    Q(s, a) = r(s, a) + V(s'),   V(s) = sum_a pi(a|s) (Q(s, a) - beta log(pi(a|s) / ref(a|s)))
    """
    states, _ = _shapes(next, reward, pi, *(() if ref is None else (ref,)))
    cost = np.zeros(next.shape)
    if ref is not None and beta:
        used = pi > 0
        with np.errstate(divide="ignore"):  # an action that the reference never takes costs infinity
            cost[used] = beta * (np.log(pi[used]) - np.log(ref[used]))
    v, q = np.zeros(states), np.zeros(next.shape)
    for s in range(states - 1, -1, -1):
        q[s] = reward[s] + _after(v, next[s])
        v[s] = (pi[s] * (q[s] - cost[s])).sum()
    return v, q


def visits(next: np.ndarray, pi: np.ndarray) -> np.ndarray:
    """d(s) [S]: the probability that a play of pi visits s.  d(0) = 1,  d(s') = sum over (s, a) -> s' of d(s)
    pi(a|s)."""
    states, actions = _shapes(next, np.zeros(next.shape), pi)
    d = np.zeros(states)
    d[0] = 1.0
    for s in range(states):
        for a in range(actions):
            if next[s, a] != END:
                d[next[s, a]] += d[s] * pi[s, a]
    return d


def paths(next: np.ndarray, reward: np.ndarray, pi: np.ndarray) -> list[Path]:
    """Every whole play with its probability prod_t pi(a_t|s_t) and its return sum_t r_t, in alphabetical order."""
    _, actions = _shapes(next, reward, pi)
    done: list[Path] = []
    open_: list[tuple[int, Path]] = [(0, Path((), 1.0, 0.0))]
    while open_:
        s, p = open_.pop()
        if s == END:
            done.append(p)
            continue
        for a in range(actions - 1, -1, -1):
            more = Path((*p.actions, a), p.probability * float(pi[s, a]), p.total + float(reward[s, a]))
            open_.append((int(next[s, a]), more))
    return done


@dataclass(frozen=True, eq=False)
class Problem:
    """A table with its letters. The solvers take `problem.next` and `problem.reward`."""

    next: np.ndarray  # int [S, A]
    reward: np.ndarray  # float [S, A]

    @property
    def letters(self) -> str:
        return ascii_lowercase[: self.next.shape[1]]

    @property
    def uniform(self) -> np.ndarray:
        return np.full(self.next.shape, 1 / self.next.shape[1])

    def walk(self, text: str, state: int = 0) -> tuple[int, float] | None:
        """The state after the letters of `text` and the sum of their rewards; None if a letter cannot be played."""
        s, total = state, 0.0
        for x in text:
            a = self.letters.find(x)
            if a < 0 or s == END:
                return None
            s, total = int(self.next[s, a]), total + float(self.reward[s, a])
        return s, total


def tree(depth: int = 3, actions: int = 2, seed: int = 0, inner: bool = False, early: bool = False) -> Problem:
    """All strings of `depth` letters; a last letter pays 1 with probability 0.3, else 0, and both occur.
    `inner`: each other letter pays one of -0.2, -0.1, 0, 0.1, 0.2. `early`: with probability 0.25 it ends the play."""
    rng = random.Random(f"tree {seed}")
    next_rows, reward_rows, level = [], [], [0]
    while level:
        level, parents = [], level
        depth -= 1
        for _ in parents:
            ends = [depth == 0 or (early and rng.random() < 0.25) for _ in range(actions)]
            pays = [float(rng.random() < 0.3) if e else rng.choice((-0.2, -0.1, 0, 0.1, 0.2)) if inner else 0.0
                    for e in ends]  # fmt: skip
            row = []
            for e in ends:
                row.append(END if e else parents[-1] + 1 + len(level))
                level += [] if e else [row[-1]]
            next_rows.append(row)
            reward_rows.append(pays)
    nxt, reward = np.array(next_rows), np.array(reward_rows, dtype=float)
    lose, win = rng.sample([tuple(x) for x in np.argwhere(nxt == END)], 2)
    reward[lose], reward[win] = 0.0, 1.0
    return Problem(nxt, reward)


def chain(length: int = 6, actions: int = 2, seed: int = 0) -> Problem:
    """`length` letters. One of them, at a place drawn by seed, must be the right one; then the end pays 1, else 0.
    States 2t (still winning) and 2t + 1 (lost) come before letter t. No play is lost before the deciding letter."""
    rng = random.Random(f"chain {seed}")
    place, right = rng.randrange(length), rng.randrange(actions)
    nxt, reward = np.full((2 * length, actions), END), np.zeros((2 * length, actions))
    for t in range(length):
        for lost in (False, True):
            s = 2 * t + lost
            for a in range(actions):
                fails = lost or (t == place and a != right)
                if t + 1 < length:
                    nxt[s, a] = 2 * (t + 1) + fails
                else:
                    reward[s, a] = float(not fails)
    return Problem(nxt, reward)


def bandit(actions: int = 4, seed: int = 0, rewards: Sequence[float] | None = None) -> Problem:
    """One letter. Rewards as given, or `actions` of them drawn uniformly from 0, 0.1, ..., 1."""
    rng = random.Random(f"bandit {seed}")
    row = [rng.randrange(11) / 10 for _ in range(actions)] if rewards is None else [float(r) for r in rewards]
    return Problem(np.full((1, len(row)), END), np.array([row]))


KINDS = {"tree": tree, "chain": chain, "bandit": bandit}


class SolvedWorld(World):
    """Plays one problem. A letter that does not exist ends the play without further reward."""

    def __init__(self, source: Solved):
        self.source, self.problem, self.over = source, source.problems[0], True

    def reset(self, task: Task) -> Observation:
        number = task.data.get("problem")
        if not isinstance(number, int) or not 0 <= number < len(self.source.problems):
            raise TaskError(f"task '{task.id}' needs data 'problem', a number below {len(self.source.problems)}.")
        self.number, self.problem, self.over = number, self.source.problems[number], False
        self.state, self.text, self.total = 0, "", 0.0
        return self._see()

    def step(self, action: str) -> Step:
        if self.over:
            raise TaskError("this play is over; call reset before the next step.")
        whole = self.source.form == "answer"
        text = action.strip() if whole else action
        walked = self.problem.walk(text, self.state) if whole or len(text) == 1 else None
        if walked is None or (whole and walked[0] != END):
            legal, self.state, reward = False, END, 0.0
        else:
            legal, (self.state, reward) = True, walked
            self.text += text
        self.total += reward
        self.over = self.state == END
        if not self.over:
            return Step(self._see(), reward, False, False)
        won = legal and self.total >= self.source.best[self.number] - 1e-9
        return Step(Observation(self._state()), reward, True, False, Scored(self.total, won), {"legal": legal})

    def _state(self) -> str:
        return f"{self.source.kind} {self.number}: {self.text}"

    def _see(self) -> Observation:
        if self.source.form == "answer":
            return Observation(self._state())
        labels = tuple(self.problem.letters)
        return Observation(self._state(), f"\n{' '.join(labels)}? ", labels, labels)


class Solved(TaskSource):
    """The task source.

    kind      "tree", "chain" or "bandit"
    form      "turns": one letter a turn; the letters so far are shown. "answer": one turn; the action is the whole
              string, and a string that is not exactly a whole play earns 0
    problems  the number of different problems, made with seeds `seed`, `seed` + 1, ...
    shape     the other arguments of `tree`, `chain` or `bandit`

    A play is a success if its return is the best possible. All splits are the same: task i plays problem i modulo
    `problems`; `n=None` plays each once. `source.problems[k]` is the table.
    """

    name = "solved"
    markov = True

    def __init__(self, kind: str = "tree", form: Form = "turns", problems: int = 1, seed: int = 0, **shape: Any):
        if kind not in KINDS:
            raise TaskError(f"solved has no kind '{kind}'.{nearest(kind, KINDS)}")
        if form not in ("turns", "answer"):
            raise TaskError(f"solved has no form '{form}'.{nearest(form, ('turns', 'answer'))}")
        make = KINDS[kind]
        known = set(inspect.signature(make).parameters) - {"seed"}
        for key in shape:
            if key not in known:
                raise TaskError(f"a solved {kind} has no option '{key}'.{nearest(key, known)}")
        sizes = {"problems": problems, "actions": len(shape.get("rewards") or "ab")} | shape
        for key, low, high in (("problems", 1, 10**6), ("actions", 2, 26), ("depth", 1, 20), ("length", 1, 10**6)):
            if not low <= sizes.get(key, low) <= high:
                raise TaskError(f"a solved {kind} cannot have {key}={sizes[key]}: it goes from {low} to {high}.")
        self.kind, self.form, self.seed = kind, form, seed
        self.problems = [make(seed=seed + i, **shape) for i in range(problems)]
        self.best = [float(solve(p.next, p.reward)[0][0]) for p in self.problems]

    def tasks(self, split: str = "train", n: int | None = None, seed: int = 0) -> list[Task]:
        count = len(self.problems)
        return [Task(f"solved-{self.kind}-{self.seed + i % count}-{i}", seed, {"problem": i % count})
                for i in range(count if n is None else n)]  # fmt: skip

    def make(self) -> SolvedWorld:
        return SolvedWorld(self)

    def example_actions(self, task: Task) -> list[str]:
        """Some whole answers (form "answer"): each play of a small problem, and two that are not plays."""
        problem = self.problems[task.data["problem"]]
        plays = paths(problem.next, problem.reward, problem.uniform)[:100]
        return ["".join(problem.letters[a] for a in p.actions) for p in plays] + ["", "zz"]
