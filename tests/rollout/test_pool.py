"""One door to play: episodes as they finish, each once, the same whoever plays them; and the batch played ahead."""

import asyncio
import contextlib
from functools import partial

import pytest
from rollout_talk import TOKENIZER, Talk

from trailmark.engines.scripted import ScriptedEngine
from trailmark.rollout.play import Seat, play, play_all, play_starts, start_all
from trailmark.rollout.pool import Ahead, LocalPool


def seats(policy=lambda prompt, draw: f"word {draw.randrange(9)}"):
    return [Seat("policy", ScriptedEngine(policy, TOKENIZER), max_tokens=20, kind="scripted")]


def listed(playing):
    async def all_of_them():
        return [e async for e in playing]

    return asyncio.run(all_of_them())


def test_episodes_come_as_they_finish():
    """The last start is the first to finish: the others wait until it is there."""
    over, starts = asyncio.Event(), start_all(Talk().tasks(n=3))

    async def as_they_finish():
        seen = []

        async def protocol(desk):
            if desk.start is not starts[2]:
                await over.wait()
            while not desk.over:
                await desk.act((await desk.ask("policy", text=desk.observation.text)).text)

        async for e in play_all(Talk(), starts, seats(), protocol):
            seen.append(e.id)
            over.set()
        return seen

    assert asyncio.run(as_they_finish()) == [starts[2].id, starts[0].id, starts[1].id]


class Elsewhere:
    """Plays each start in a world and a process of its own choice: backwards, and the first answer of each is lost."""

    def __init__(self):
        self.inner, self.played, self.closed = LocalPool(1), [], False

    async def play(self, game, start):
        await asyncio.sleep(0.001 * (9 - len(self.played)))
        for _ in range(2):
            self.played.append(start.id)
            found = await self.inner.play(game, start)
        return found

    def close(self):
        self.closed = True


def test_who_plays_a_start_cannot_change_it():
    starts, pool = start_all(Talk().tasks(n=4), 2, seed=3), Elsewhere()
    here = play_starts(Talk(), starts, seats())
    there = listed(play_all(Talk(), starts, seats(), pool=pool))
    assert sorted(pool.played) == sorted([s.id for s in starts] * 2) and pool.closed
    assert sorted(there, key=lambda e: e.id) == sorted(here, key=lambda e: e.id) and len(there) == 8
    assert [e.id for e in here] == [s.id for s in starts]
    assert here == play(Talk(), Talk().tasks(n=4), seats(), n=2, seed=3)


def test_a_reader_that_stops_ends_the_plays():
    """Nothing is played on behind its back, and no error of the others is left behind."""
    asked, starts = [], start_all(Talk().tasks(n=3))

    async def one():
        playing = play_all(Talk(), starts, seats(lambda *_: asked.append(1) or "x"), at_once=1)
        async with contextlib.aclosing(playing):
            async for e in playing:
                return e

    assert asyncio.run(one()).id == starts[0].id and len(asked) < 3 * 2
    with pytest.raises(ZeroDivisionError):
        play_starts(Talk(), starts, seats(), each=lambda e: 1 / 0)


def test_the_batch_that_is_played_ahead_is_a_step_older():
    """The weights of each batch, as the step after which they were published."""
    assert versions(True) == [0, 0, 1, 2] and versions(False) == [0, 1, 2, 3]


def versions(on):
    ahead, now, found = Ahead(None, on), [], []
    for step in range(1, 5):
        made = ahead.batch(step, 4, lambda k: (k, now[-1]), partial(now.append, step - 1))
        assert made[0] == step
        found.append(made[1])
    assert ahead.wait() is None
    return found
