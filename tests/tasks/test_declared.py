"""Hooks of tasks and worlds are declared with defaults; a class that does not derive from them works all the same."""

import pytest

from trailmark.engines.scripted import ScriptedEngine
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat, play
from trailmark.tasks import get_task, task_names
from trailmark.tasks.base import Observation, Step, TaskSource, World, declared, has_oracle
from trailmark.types import Scored, Task


class Own:
    """Echo, by nobody's base class."""

    name, markov = "own", False
    first_messages = ({"role": "system", "content": "Say it again."},)

    def tasks(self, split="train", n=None, seed=0):
        return [Task("a")]

    def make(self):
        return OwnWorld()


class OwnWorld:
    def reset(self, task):
        return Observation("a")

    def step(self, action):
        return Step(Observation(""), 1.0, True, False, Scored(float(action == "a"), action == "a"))

    def oracle(self):
        return "a"


class Bound(Own):
    labels = ("x",)

    def bind(self, tokenizer):
        self.labels = (tokenizer,)


class Derived(TaskSource):
    name, markov = "derived", True

    def make(self):
        return World()


class DerivedBound(Derived):
    def bind(self, tokenizer):
        self.labels = (tokenizer,)


def test_defaults():
    for source in (Derived(), declared(Own())):
        assert isinstance(source, TaskSource)
        assert (source.slow, source.judged, source.binds) == (False, False, False)
        assert source.judge is source.additive is source.messages is source.menus() is None
        assert source.labels == () and source.step_ends == ("\n",)
        assert source.bind("tokenizer") is None and source.labels == ()
    assert Derived().first_messages == () and declared(Own()).first_messages == Own.first_messages
    with pytest.raises(NotImplementedError, match=r"Derived must define tasks\(split, n, seed\)"):
        Derived().tasks()
    with pytest.raises(NotImplementedError, match=r"World must define step\(action\)"):
        Derived().make().step("x")


def test_what_a_class_of_its_own_has_is_its_own():
    """Also what changes later: labels that it takes from a tokenizer."""
    own = Bound()
    source = declared(own)
    assert source.binds and DerivedBound().binds and source.labels == ("x",)
    source.bind("tokenizer")
    assert source.labels == own.labels == ("tokenizer",)
    source.judge = "judge"
    assert own.judge == source.judge == "judge"
    assert declared(Own()).__doc__ == Own.__doc__
    assert declared(source) is source and isinstance(source, Bound)
    mine = Derived()
    assert declared(mine) is mine


def test_oracles():
    assert has_oracle(Own()) and not has_oracle(Derived()) and not has_oracle(get_task("arith"))
    taxi = get_task("taxi", mode="pickup")
    world = taxi.make()
    world.reset(taxi.tasks("train", 1)[0])
    assert has_oracle(taxi) and world.oracle() in "012345"


def test_a_class_of_its_own_is_played_with_its_hooks():
    seat = Seat("policy", ScriptedEngine(lambda prompt, draw: "a", tiny_tokenizer()), max_tokens=8, kind="scripted")
    (e,) = play(Own(), Own().tasks(), [seat])
    assert e.outcome == Scored(1.0, True) and "Say it again." in tiny_tokenizer().decode(e.turns[0].prompt)


def test_every_task_of_the_library_declares_itself():
    import importlib

    from trailmark import registry

    for name in task_names():
        module, _, attribute = registry.ours("tasks")[name].partition(":")
        assert issubclass(getattr(importlib.import_module(module), attribute), TaskSource), name
