"""A run with several named rewards: every command works on it, and it is the same run after a kill."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.runs.store import read_annotations, read_episodes, read_metrics, read_segment, write_segment
from trailmark.types import Scored

RECIPE = str(Path(__file__).parents[2] / "recipes/prompts-grpo.yaml")
SMALL = [
    "data=rows.jsonl", "steps=3", "prompts_per_step=3", "n=3", "sampling.max_tokens=6", "engine.max_num_seqs=9",
    "engine.max_len=96", "eval.every=2", "eval.n=2", "checkpoint.every=1", "checkpoint.keep_last=9",
    "model={name: tiny, shape: {layers: 1, width: 32, heads: 2, context: 96}}",
]  # fmt: skip
REWARD = (
    "reward={vowels: my_file.py:vowels, long: {weight: -0.5, reward: my_file.py:long}, "
    "words: {weight: 0, reward: my_file.py:words}}"
)
FUNCTIONS = """
def vowels(answer): return sum(c in "aeiou" for c in answer) / max(1, len(answer))
def long(answers): return [len(a) / 8 for a in answers]
async def words(answer, row): return len(answer.split())
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Sing of the {w}: "} for w in ["sun", "moon", "sea", "hill", "rain"]]
    Path("rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path("my_file.py").write_text(FUNCTIONS)

    def call(*words, code=0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        return done.output

    return call


def train(shell, out, *words, code=0):
    return shell("train", RECIPE, REWARD, f"out={out}", *SMALL, *words, code=code)


def test_every_command_works_on_such_a_run(shell):
    train(shell, "run")
    for row, played in zip(read_metrics(Path("run")), sorted(Path("run/episodes").iterdir())):
        episodes = read_segment(played)
        for e in episodes:
            text = e.turns[0].text
            parts = {"vowels": sum(c in "aeiou" for c in text) / max(1, len(text)), "long": len(text) / 8,
                     "words": len(text.split())}  # fmt: skip
            total = parts["vowels"] - 0.5 * parts["long"]  # two numbers: rounded once, as the sum is
            assert e.outcome == Scored(total, None, parts) and e.turns[0].reward == total
            assert e.info["judge"]["weights"] == {"vowels": 1.0, "long": -0.5, "words": 0.0}
        for name in ("vowels", "long", "words"):
            mean = sum(e.outcome.parts[name] for e in episodes) / len(episodes)
            assert row[f"reward/{name}"] == pytest.approx(mean)
        assert row["reward"] == pytest.approx(row["reward/vowels"] - 0.5 * row["reward/long"])
    assert "eval/reward/words" in list(read_metrics(Path("run")))[-1]
    row = json.loads(shell("eval", "run").splitlines()[-1])["rows"][0]
    assert {"reward", "reward/vowels", "reward/long", "reward/words"} <= set(row["metrics"])
    assert "run: verified" in shell("verify", "run")
    assert "vowels" in shell("inspect", "run/episodes")
    shell("report", "run")
    assert '"parts": {"vowels"' in (page := Path("run/report.html").read_text()) or '"parts":{"vowels"' in page


def test_a_run_with_several_rewards_goes_on_as_if_it_had_not_stopped(shell):
    train(shell, "whole")
    train(shell, "part", "steps=2")
    train(shell, "part", "--resume")
    assert "identical" in shell("diff", "whole", "part")
    assert sorted(p.name for p in Path("part/judge").iterdir()) == ["judge.json", "long", "vowels", "words"]


def test_a_resumed_run_is_refused_another_weight(shell):
    train(shell, "run", "steps=2")
    said = shell("train", RECIPE, REWARD.replace("-0.5", "0.5"), "out=run", *SMALL, "--resume", code=2)
    assert "has changed since this run began" in said or "weight" in said


def test_verify_sees_a_part_that_was_edited(shell):
    train(shell, "run", "steps=1")
    first, *others = read_segment("run/episodes/000001.jsonl")
    parts = {**first.outcome.parts, "vowels": 5.0}
    edited = dataclasses.replace(first, outcomes={"self": dataclasses.replace(first.outcome, parts=parts)})
    write_segment("run/episodes", 1, [edited, *others])
    said = " ".join(shell("verify", "run", code=1).split())
    assert "the reward is not the weighted sum of its parts" in said


def test_one_reward_alone_is_stored_as_before(shell):
    shell("train", RECIPE, "reward=my_file.py:vowels", "out=run", *SMALL, "steps=1")
    for e in read_episodes("run/episodes"):
        assert e.outcome == Scored(e.turns[0].reward) and set(e.info["judge"]) == {"name", "source", "fingerprint"}
    assert not any(key.startswith("reward/") for key in next(iter(read_metrics(Path("run")))))
    assert {a.name for a in read_annotations("run/annotations/reward")} == {"reward"}
