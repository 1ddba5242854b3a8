import sys

import pytest

from trailmark.errors import TaskError
from trailmark.tasks import get_task
from trailmark.tasks.check import check_task
from trailmark.tasks.gym import Gym
from trailmark.types import Scored

gymnasium = pytest.importorskip("gymnasium")


class Doors(gymnasium.Env):
    """Three doors, one drawn by seed pays 2 and ends; every other costs 1. Says which doors were tried."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.prize, self.tried = int(self.np_random.integers(3)), []
        return "Three doors.", {}

    def step(self, action):
        assert action in (5, 6, 7)
        self.tried.append(action - 5)
        won = action - 5 == self.prize
        return f"Tried {self.tried}.", 2 if won else -1, won, False, {"prize": self.prize, "env": self}


class Picture(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(2), {}

    def step(self, action):
        return self.np_random.random(2), 0.0, False, False, {}


def show_picture(seen):
    return f"{seen[0]:.3f} {seen[1]:.3f}"


@pytest.fixture(scope="module", autouse=True)
def registered():
    gymnasium.register("TrailmarkDoors-v0", Doors, max_episode_steps=4)
    gymnasium.register("TrailmarkPicture-v0", Picture)
    yield
    for name in ("TrailmarkDoors-v0", "TrailmarkPicture-v0"):
        del gymnasium.registry[name]


def test_text_environment():
    source = Gym("TrailmarkDoors-v0", names=["left", "middle", "right"], success=1.0)
    world, task = source.make(), source.tasks(n=1)[0]
    first = world.reset(task)
    assert first.state == "Three doors.\n"
    assert first.menu == "Choose one action:\n0. left\n1. middle\n2. right\n"
    prize = world.env.unwrapped.prize
    wrong, right = str((prize + 1) % 3), str(prize)
    step = world.step(wrong)
    assert (step.reward, step.over, step.observation.state) == (-1.0, False, f"Tried [{wrong}].\n")
    assert step.info == {"prize": prize}  # only what is plain
    step = world.step(right)
    assert step.terminated and not step.truncated and step.outcome == Scored(1.0, True)
    world.reset(task)
    steps = [world.step(wrong) for _ in range(4)]  # the environment's own TimeLimit
    assert steps[-1].truncated and not steps[-1].terminated and steps[-1].outcome == Scored(-4.0, False)
    with pytest.raises(TaskError, match="no action '9'"):
        world.reset(task)
        world.step("9")


def test_seeds_decide_the_start():
    source = Gym("TrailmarkDoors-v0")
    world, prizes = source.make(), []
    for task in source.tasks(n=30):
        world.reset(task)
        prizes.append(world.env.unwrapped.prize)
    assert set(prizes) == {0, 1, 2}
    assert [t.seed for t in source.tasks(n=5)] != [t.seed for t in source.tasks("test", n=5)]


def test_own_limit_and_unsaid_success():
    source = get_task("gym", id="TrailmarkDoors-v0", max_steps=1)
    world = source.make()
    task = source.tasks(n=1)[0]
    world.reset(task)
    step = world.step(str((world.env.unwrapped.prize + 1) % 3))
    assert step.truncated and step.outcome == Scored(-1.0, None)
    world.reset(task)
    assert not world.step(str(world.env.unwrapped.prize)).truncated


def test_numbers_are_shown_as_they_are_written():
    lake = get_task("gym", id="FrozenLake-v1", success=1.0, kwargs={"is_slippery": False})
    world = lake.make()
    assert world.reset(lake.tasks(n=1)[0]).state == "0\n"
    steps = [world.step(a) for a in "112212"]
    assert [s.observation.state for s in steps] == ["4\n", "8\n", "9\n", "10\n", "14\n", "15\n"]
    assert steps[-1].outcome == Scored(1.0, True)
    taxi = get_task("gym", id="Taxi-v4")
    assert 0 <= int(taxi.make().reset(taxi.tasks(n=1)[0]).state) < 500


def test_render():
    with pytest.raises(TaskError, match="not text; give render"):
        Gym("TrailmarkPicture-v0")
    source = Gym("TrailmarkPicture-v0", render=show_picture, max_steps=3)
    assert len(source.make().reset(source.tasks(n=1)[0]).state) == len("0.123 0.456\n")
    by_path = get_task("gym", id="TrailmarkPicture-v0", render=f"{__name__}:show_picture", max_steps=3)
    task = source.tasks(n=1)[0]
    assert by_path.make().reset(task) == source.make().reset(task)
    with pytest.raises(TaskError, match="Did you mean 'show_picture'"):
        get_task("gym", id="TrailmarkPicture-v0", render=f"{__name__}:show_pictures")


def test_mistakes_are_explained(monkeypatch):
    with pytest.raises(TaskError, match="needs the option 'id'"):
        get_task("gym")
    with pytest.raises(TaskError, match="cannot make 'NoSuchThing-v0'"):
        Gym("NoSuchThing-v0")
    with pytest.raises(TaskError, match="3 actions, but 1 names"):
        Gym("TrailmarkDoors-v0", names=["left"])
    with pytest.raises(TaskError, match="only Discrete and Text"):
        Gym("Pendulum-v1", render=str)
    with pytest.raises(TaskError, match="option 'max_steps' must be a number, not 'a'"):
        Gym("FrozenLake-v1", max_steps="a")  # type: ignore
    with pytest.raises(TaskError, match="render of 'FrozenLake-v1' raised TypeError"):
        source = Gym("FrozenLake-v1", render=lambda: "")  # type: ignore
        source.make().reset(source.tasks(n=1)[0])
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(TaskError, match="pip install gymnasium"):
        Gym("FrozenLake-v1")


def test_checker_passes():
    for source in (
        Gym("TrailmarkDoors-v0"),
        Gym("TrailmarkPicture-v0", render=show_picture, max_steps=3),
        Gym("FrozenLake-v1"),
        Gym("Taxi-v4"),
    ):
        assert check_task(source).problems == []
