"""A world or a reward function that never returns costs its own play, and no other."""

import asyncio
import copy
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from rollout_talk import TOKENIZER, Talk, TalkWorld

from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import JudgeError, TaskError
from trailmark.rollout.play import Seat, play
from trailmark.score.function import FunctionJudge
from trailmark.score.open_judge import open_judge
from trailmark.tasks import get_task
from trailmark.time_limits import TimeLimits, TooLong, awaited_within, within
from trailmark.types import Failed, Scored

SEAT = [Seat("policy", ScriptedEngine(lambda prompt, draw: f"word {draw.randrange(9)}", TOKENIZER), max_tokens=20)]
NEVER = threading.Event()  # nobody sets it


class Stuck(Talk):
    """`stuck` are the (task, phase) whose call never returns."""

    def __init__(self, stuck=(), slow=False, limits=TimeLimits()):
        super().__init__()
        self.stuck, self.slow, self.time_limits, self.threads = stuck, slow, limits, set()

    def make(self):
        return StuckWorld(self)


class StuckWorld(TalkWorld):
    def reset(self, task):
        self.source.threads.add(threading.current_thread())
        if (task.id, "reset") in self.source.stuck:
            NEVER.wait()
        return super().reset(task)

    def step(self, action):
        self.source.threads.add(threading.current_thread())
        if (self.task.id, "step") in self.source.stuck and len(self.heard) == 1:
            NEVER.wait()
        return super().step(action)


@pytest.mark.parametrize("slow", [False, True])
def test_a_world_that_never_returns_fails_its_own_play(slow, monkeypatch):
    """A call that never returns has a hundredth of its limit. The others have a minute: the machine may be loaded."""
    source = Stuck({("talk-0", "reset"), ("talk-1", "step")}, slow, TimeLimits(reset=4, step=5))

    async def hurried(seconds, what, function, *args):
        world = function.__self__
        never = args[0].id == "talk-0" if what == "reset" else world.task.id == "talk-1" and len(world.heard) == 1
        return await within(seconds / 100 if never else 60, what, function, *args)

    monkeypatch.setattr("trailmark.time_limits.within", hurried)
    first, second, third = play(source, source.tasks(n=3), SEAT)
    assert first.outcome == Failed("reset took longer than 0.04 s") and first.turns == ()
    assert second.outcome == Failed("step took longer than 0.05 s")
    assert [t.action is None for t in second.turns] == [False, True]
    assert isinstance(third.outcome, Scored)
    alive = lambda: [t for t in source.threads if t.is_alive() and t is not threading.current_thread()]
    while len(alive()) > 2:  # the other calls have returned, and their threads end
        time.sleep(0.01)
    assert len(alive()) == 2 and all(t.daemon for t in alive())  # the process need not wait for them


@pytest.mark.parametrize("slow", [False, True])
def test_a_limit_that_is_kept_changes_nothing(slow):
    without = play(Stuck(slow=slow), Talk().tasks(), SEAT, n=3, seed=4)
    assert play(Stuck(slow=slow, limits=TimeLimits(60, 60)), Talk().tasks(), SEAT, n=3, seed=4) == without
    assert all(isinstance(e.outcome, Scored) for e in without)


def test_worlds_that_do_not_wait_are_called_one_after_the_other_also_with_a_limit():
    """Such worlds may share what is not made for threads."""
    inside, most = [], []

    class Shared(StuckWorld):
        def step(self, action):
            inside.append(1)
            most.append(len(inside))
            found = super().step(action)
            inside.pop()
            return found

    source = Stuck(limits=TimeLimits(step=60))
    source.make = lambda: Shared(source)
    play(source, source.tasks(), SEAT, n=4)
    assert len(most) > 20 and set(most) == {1}


def test_what_a_limited_call_raises_is_raised():
    def broken():
        raise KeyError("no such room")

    async def asked():
        with pytest.raises(KeyError, match="no such room"):
            await within(60, "step", broken)
        assert await within(60, "step", lambda a: a + 1, 2) == 3
        with pytest.raises(TimeoutError, match="its own"):
            await within(60, "step", raises)
        with pytest.raises(TooLong, match="^judge took longer than 0.01 s$"):
            await awaited_within(0.01, "judge", asyncio.Event().wait())

    def raises():
        raise TimeoutError("its own")

    asyncio.run(asked())


def test_a_process_ends_although_a_world_does_not():
    code = """
        import asyncio, threading
        from trailmark.time_limits import TooLong, within
        try:
            asyncio.run(within(0.05, "step", threading.Event().wait))
        except TooLong as problem:
            print(problem)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "step took longer than 0.05 s\n"), done.stderr


REWARDS = """
    import asyncio, threading
    NEVER = threading.Event()
    def score(answer, row):
        if row.get("stuck"): NEVER.wait()
        return len(answer)
    async def awaits(answer, row):
        if row.get("stuck"): await asyncio.Event().wait()
        return len(answer)
    def together(answers, rows):
        if any(r.get("stuck") for r in rows): NEVER.wait()
        return [len(a) for a in answers]
"""


@pytest.mark.parametrize(("name", "lost"), [("score", 1), ("awaits", 1), ("together", 3)])
def test_a_reward_that_never_comes_is_no_zero(tmp_path, monkeypatch, name, lost):
    """A call that never returns has a hundredth of its limit. The others have a minute: the machine may be loaded."""
    call = FunctionJudge._call

    def hurried(self, given, where):
        judge, never = copy.copy(self), any(r.get("stuck") for r in given.get("rows", [given.get("row")]))
        judge.time_limit = self.time_limit / 100 if never else 60
        return call(judge, given, where)

    monkeypatch.setattr(FunctionJudge, "_call", hurried)
    (tmp_path / "mine.py").write_text(textwrap.dedent(REWARDS))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "stuck": true}\n{"prompt": "c"}\n')
    reward = {"kind": "function", "path": f"{tmp_path}/mine.py:{name}", "time_limit": 5}
    source = get_task("prompts", path=str(tmp_path / "rows.jsonl"), reward=reward)
    found = [e.outcome for e in play(source, source.tasks("all"), SEAT)]
    assert found[1] == Failed(f"reward {tmp_path}/mine.py:{name} took longer than 0.05 s")
    assert sum(isinstance(o, Failed) for o in found) == lost and (lost == 3 or found[0] == Scored(6.0))


def test_a_class_that_judges_all_plays_limits_its_own_time(tmp_path):
    text = "from trailmark.score.base import Judge\nclass Mine(Judge):\n    async def judge(self, plays): ...\n"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(JudgeError, match="reward.time_limit: class .*mine.py:Mine judges all plays at once"):
        open_judge({"kind": "function", "path": f"{tmp_path}/mine.py:Mine", "time_limit": 1.0})


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"stp": 2}, "time_limits has no 'stp': write the seconds of reset, of step or of both"),
        ({"step": 0}, "time_limits.step is 0: it must be a number of seconds above 0"),
        ({"reset": "2 s"}, "time_limits.reset is '2 s'"),
        (2, "time_limits cannot be 2"),
    ],
)
def test_a_limit_that_is_none(limits, said):
    with pytest.raises(TaskError, match=said):
        get_task("taxi", time_limits=limits)
    assert get_task("taxi", time_limits={"step": 2}).time_limits == TimeLimits(step=2)
