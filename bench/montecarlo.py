"""Monte-Carlo completions of states, whose tokens are computed once, against computing them again for each completion.

    python bench/montecarlo.py [--repeats 5] [--quick]

States are beginnings of answers: 64 to 192 tokens with their question. k completions of 16 tokens are drawn from each,
as `lpr` plays them. The other side is the same engine, which computes the prompt of every completion; both decode all
completions at the same time. They draw the same tokens, which is checked; how many prompts each computed is counted.
"""

from __future__ import annotations

import argparse
from collections import deque
from typing import Any

import numpy as np
from common import compare, one_thread

from trailmark.engines.local import LocalEngine
from trailmark.models.lm import LM
from trailmark.models.tiny import build, tiny_config, tiny_tokenizer
from trailmark.rollout.branch import Point, branch_starts
from trailmark.rollout.play import Desk, Seat, play_starts
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.types import Episode, SamplingLaw, Scored, Task, Turn

SHAPES = {"0.2M": {"layers": 2, "width": 64, "heads": 4}, "2.5M": {"layers": 4, "width": 224, "heads": 4}}
NEW = 16
ASK = "17+25-9=?\n"


class OneAnswer(TaskSource, World):
    """A question that any answer ends."""

    name, markov = "one answer", True

    def make(self) -> World:
        return self

    def reset(self, task: Task) -> Observation:
        return Observation(ASK)

    def step(self, action: str) -> Step:
        return Step(Observation(""), 1.0, True, False, Scored(1.0, True))


class Again(LocalEngine):
    """Computes a prompt for each that asks, also where another asks for the same."""

    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **how)
        scheduler, prefill = self.scheduler, self.scheduler.prefill

        def each() -> None:
            left, later = scheduler.waiting, deque[Any]()
            while left:
                now, rest = dict[Any, Any](), deque[Any]()
                for job in left:  # of equal prompts one at a time
                    if job.request.prompt in now:
                        rest.append(job)
                    else:
                        now[job.request.prompt] = job
                scheduler.waiting, left = deque(now.values()), rest
                prefill()
                later += scheduler.waiting
            scheduler.waiting = later

        scheduler.prefill = each  # type: ignore[method-assign]


def states(lm: LM, count: int) -> list[Point]:
    """Answers of random tokens, each to be entered somewhere in its second half."""
    draw, ask = np.random.default_rng(count), tuple(lm.tokenizer(ASK)["input_ids"])
    out = []
    for n in range(count):
        size = int(draw.integers(64, 193))
        said = tuple(int(t) for t in draw.integers(20, 200, size))
        turn = Turn("policy", ask, said, stop="length", text="x")
        e = Episode(f"e{n}", Task(f"t{n}"), f"t{n}", (turn,), {"self": Scored(1.0)})
        out.append(Point(e, 0, size - len(ask)))
    return out


def completions(size: str, count: int, k: int, repeats: int) -> None:
    tokenizer = tiny_tokenizer()
    lm = LM(build(tiny_config("llama", vocab=len(tokenizer), context=256, **SHAPES[size]), 0), tokenizer, size)
    ours, again = (kind(lm, slots=min(64, count * k), max_len=256, fixed=False) for kind in (LocalEngine, Again))
    law = SamplingLaw(min_tokens=10_000, stop_ids=(0,))
    starts = branch_starts(states(lm, count), k, seed=1)

    def play(engine: LocalEngine) -> dict[str, tuple[int, ...]]:
        made = {}
        seat = Seat("policy", engine, law, 10_000)
        for e in play_starts(OneAnswer(), starts, [seat], last_words, at_once=len(starts)):
            if len(e.turns) != 1 or len(e.turns[0].tokens) != NEW:
                raise SystemExit(f"{e.id}: {e.outcome}")
            made[e.id] = e.turns[0].tokens
        return made

    a, b = play(ours), play(again)
    computed = ours.counts.prefills, again.counts.prefills
    if a != b or computed != (count, count * k):
        raise SystemExit(f"the two sides differ: {computed} prompts, equal tokens: {a == b}")
    tokens = lambda engine: float(sum(map(len, play(engine).values())))
    compare(f"montecarlo/{size} {count} states k {k}", lambda: tokens(ours), lambda: tokens(again), "each prompt again",
            "tokens/s", repeats, f"{count} prompts computed, not {count * k}; the same tokens")  # fmt: skip


async def last_words(desk: Desk) -> None:
    """Goes on for NEW tokens behind the state, however long it is."""
    parent = desk.start.parent
    assert parent is not None
    turn = await desk.ask("policy", text=desk.observation.text, max_tokens=parent.token + NEW)
    await desk.act(turn.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few states, to see that it runs")
    args = parser.parse_args()
    one_thread()
    if args.quick:
        completions("0.2M", 4, 3, 2)
        return
    for size, k in (("0.2M", 3), ("0.2M", 8), ("2.5M", 3), ("2.5M", 8)):
        completions(size, 16, k, args.repeats)


if __name__ == "__main__":
    main()
