"""A run whose world has two sides and a judge that gives each its outcome: it is replayed, and an edit is found."""

import dataclasses
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.runs.store import read_segment, write_segment
from trailmark.types import Scored

WORLD = """
from trailmark.score.base import Judge, Verdict
from trailmark.tasks.base import Observation, Step
from trailmark.types import Scored, Task


class Sums(Judge):
    name = source = fingerprint = "sums"
    repeatable = True

    async def judge(self, plays):
        said = lambda p: [sum(t.tokens) for t in p.episode.turns if t.seat == "buyer"]
        return [Verdict({"a": Scored(sum(said(p)) / 100), "b": Scored(-2.0)}) for p in plays]


class Bargain:
    name, markov, judged, judge = "bargain", True, True, Sums()

    def tasks(self, split="train", n=None, seed=0):
        return [Task(str(k)) for k in range(n or 2)]

    def make(self):
        return World()


class World:
    def reset(self, task):
        self.said = 0
        return Observation("begin", seat="buyer")

    def step(self, action):
        self.said += 1
        shown = Observation(f"turn {self.said}", seat=("buyer", "seller")[self.said % 2])
        return Step(shown, 0.25, self.said == 4, False)


def answer(prompt, draw):
    return draw.choice(["yes", "no", "perhaps"])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("bargain_world.py").write_text(WORLD)
    sys.modules.pop("bargain_world", None)
    recipe = {
        "method": "policy_gradient", "task": {"name": "bargain_world:Bargain"}, "steps": 1, "prompts_per_step": 2,
        "n": 2,
        "out": "run", "credit": "returns", "objective": {"kind": "weighted_logp"}, "sampling": {"max_tokens": 4},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}},
        "engine": {"max_num_seqs": 4, "max_len": 64},
        "seats": {
            "buyer": {"kind": "local", "trained": True, "side": "a"},
            "seller": {"kind": "scripted", "function": "bargain_world.py:answer", "side": "b"},
        },
    }  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = CliRunner().invoke(app, ["train", "recipe.yaml"])
    assert done.exit_code == 0, done.output
    return Path("run")


def verify(code):
    done = CliRunner().invoke(app, ["verify", "run"])
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return " ".join(done.output.split())


def test_outcomes_by_side_are_replayed_and_an_edit_is_found(run):
    episodes = read_segment(run / "episodes/000001.jsonl")
    for e in episodes:
        mine = sum(sum(t.tokens) for t in e.turns if t.seat == "buyer") / 100
        assert e.outcomes == {"a": Scored(mine), "b": Scored(-2.0)}
        assert [t.reward for t in e.turns] == [0.25, 0.25, 0.25 + mine, -1.75]
    said = verify(0)
    assert "run: verified" in said and "the same rewards, ends and prompts" in said and "not compared" not in said
    first = dataclasses.replace(episodes[0], outcomes={**episodes[0].outcomes, "b": Scored(-3.0)})
    write_segment(run / "episodes", 1, [first, *episodes[1:]])
    assert "the judge now gives another reward than is stored" in verify(1)


def test_prompts_are_compared_where_the_world_says_who_speaks(run):
    """The method has no protocol, and two seats played: the world itself says whose turn it is."""
    first, *rest = read_segment(run / "episodes/000001.jsonl")
    turns = list(first.turns)
    turns[2] = dataclasses.replace(turns[2], prompt=(*turns[2].prompt[:-1], turns[2].prompt[-1] + 1))
    write_segment(run / "episodes", 1, [dataclasses.replace(first, turns=tuple(turns)), *rest])
    assert "a stored play cannot be repeated: another prompt or reward" in verify(1)


def test_what_was_not_compared_is_said(run):
    """A turn that did not act: neither the world nor the method says when it speaks."""
    episodes = read_segment(run / "episodes/000001.jsonl")
    word = lambda e: dataclasses.replace(e.turns[1], action=None, reward=0.0)
    write_segment(run / "episodes", 1, [dataclasses.replace(e, turns=(word(e), *e.turns)) for e in episodes])
    done = CliRunner().invoke(app, ["verify", "run"])
    said = " ".join(done.output.split())
    assert "prompts of 4 plays with several seats were not compared: the method names no protocol" in said
