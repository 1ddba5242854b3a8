"""Prompts of one's own with a reward of one's own: every command works on such a run, and says what is wrong with the
function."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "score"))
from judging import name, serving_judge

from trailmark.commands.app import app
from trailmark.runs.store import read_annotations, read_episodes, read_segment, segments, write_segment
from trailmark.types import Annotation, Scored

RECIPE = str(Path(__file__).parents[2] / "recipes/prompts-grpo.yaml")
SMALL = [
    "steps=3", "prompts_per_step=3", "n=3", "sampling.max_tokens=6", "engine.max_num_seqs=9", "engine.max_len=96",
    "eval.every=2",
    "eval.n=2", "checkpoint.every=1", "checkpoint.keep_last=9",
    "model={name: tiny, shape: {layers: 1, width: 32, heads: 2, context: 96}}",
]  # fmt: skip
FUNCTION = "def score(prompt, answer, row):\n    return sum(c in row['vowels'] for c in answer) / max(1, len(answer))\n"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"Sing of the {w}: ", "vowels": "aeiou", "gold": f"the {w}"}
        for w in ["sun", "moon", "sea", "hill", "rain"]
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path("my_file.py").write_text(FUNCTION)

    def call(*words, code=0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        return done.output

    return call


def train(shell, out, *words, code=0):
    return shell("train", RECIPE, "data=rows.jsonl", "reward=my_file.py:score", f"out={out}", *SMALL, *words, code=code)


def test_every_command_works_on_such_a_run(shell):
    said = train(shell, "run", "--dry-run")
    assert "name: prompts" in said and "path: rows.jsonl" in said and "path: my_file.py:score" in said
    assert "first start" in said and not Path("run").exists()
    train(shell, "run")
    episodes = list(read_episodes("run/episodes"))
    assert len(episodes) == 27
    for e in episodes:
        text = e.turns[0].text
        want = sum(c in "aeiou" for c in text) / max(1, len(text))
        assert e.outcome.reward == e.turns[0].reward == want
    notes = list(read_annotations("run/annotations/reward"))
    mark = episodes[0].info["judge"]
    assert {n.source for n in notes} == {f"{mark['source']}@{mark['fingerprint']}"}
    assert mark["name"] == "my_file.py:score" and mark["source"] == "function my_file.py:score"
    assert [(n.episode, n.values) for n in notes] == [(e.id, (e.outcome.reward,)) for e in episodes]
    said = shell("eval", "run")
    assert "prompts test" in said
    row = json.loads(said.splitlines()[-1])["rows"][0]
    stored = read_segment("run/evaluation/000003.jsonl")
    assert row["metrics"]["reward"]["value"] == pytest.approx(sum(e.outcome.reward for e in stored) / len(stored))
    assert "run: verified" in shell("verify", "run")
    shell("report", "run", "--no-plots")
    assert "scored" in shell("inspect", "run/episodes")


def test_a_run_that_stopped_goes_on_as_if_it_had_not(shell):
    train(shell, "whole")
    train(shell, "part", "steps=1", "eval.every=0")
    Path("part").rename("gone")
    train(shell, "part", "steps=2")
    train(shell, "part", "--resume")
    assert "identical" in shell("diff", "whole", "part")


def test_a_function_that_changed_is_refused(shell):
    train(shell, "run", "steps=2")
    held = lambda: {
        p: p.read_bytes() for p in Path("run").rglob("*") if p.is_file() and p.name not in (".lock", "recipe.yaml")
    }
    before = held()
    Path("my_file.py").write_text(FUNCTION + "# another\n")
    said = train(shell, "run", "--resume", code=2)
    assert "my_file.py:score has changed since this run began" in said and "run/judge/judge.json" in said
    assert before == held()
    Path("my_file.py").write_text(FUNCTION)
    train(shell, "run", "--resume")
    Path("my_file.py").write_text(FUNCTION + "# another\n")
    Path("run/judge/judge.json").unlink()  # told so: the run goes on with the new one
    train(shell, "run", "--resume", "steps=4")
    said = shell("verify", "run")
    assert "my_file.py:score has changed since 27 of the plays" in " ".join(said.split())


@pytest.mark.parametrize(
    "body, said",
    [
        ("return float('nan')", "my_file.py:score returned nan for row '"),
        ("return None", "my_file.py:score returned None for row '"),
        ("return 1 / 0", "my_file.py:2 failed with ZeroDivisionError"),
    ],
)
def test_a_function_that_gives_no_number_loses_nothing(shell, body, said):
    train(shell, "run", "steps=1")
    Path("my_file.py").write_text(f"def score(prompt, answer, row):\n    {body}\n")
    Path("run/judge/judge.json").unlink()
    assert said in train(shell, "run", "--resume", code=2)
    assert [p.name for p in segments("run/episodes")] == ["000001.jsonl"]
    train(shell, "fresh", code=2)
    assert not Path("fresh/recipe.yaml").exists()
    Path("my_file.py").write_text(FUNCTION)
    Path("run/judge/judge.json").unlink()
    train(shell, "run", "--resume")
    assert len(segments("run/episodes")) == 3


def test_mistakes_in_the_recipe(shell):
    for word, said in (
        ("reward=3", "key 'reward': expected a mapping, found the whole number 3"),
        ("reward=other.py:score", "there is no file other.py"),
        ("reward=my_file.py:scor", "Did you mean 'score'?"),
        ("reward={kind: oracle}", "key 'reward': has the unknown 'kind' 'oracle'"),
        ("task.name=taxi", "key 'data' is short for task prompts"),
        ("rewards=my_file.py:score", "key 'rewards': is not known. Did you mean 'reward'?"),
        ("data=other.jsonl", "other.jsonl: cannot be read"),
    ):
        assert said in train(shell, "run", word, code=2) and not Path("run/recipe.yaml").exists()
    Path("plain.yaml").write_text(
        "method: policy_gradient\nout: run\ntask: {name: prompts, options: {path: rows.jsonl}}\n"
    )
    assert "name who gives the reward" in shell("train", "plain.yaml", code=2)
    assert "judges its plays itself: leave out 'reward'" in shell(
        "train", "plain.yaml", "task={name: taxi}", "reward=my_file.py:score", code=2
    )


def test_a_person_is_judged_too(shell):
    done = CliRunner().invoke(app, ["play", "prompts", "path=rows.jsonl", "reward=my_file.py:score"], input="aeix\n")
    assert done.exit_code == 0 and "return 0.75" in done.output, done.output
    (e,) = read_segment("play-prompts-1.jsonl")
    assert e.outcome == Scored(0.75) and e.turns[0].reward == 0.75 and e.info["judge"]["name"] == "my_file.py:score"
    (note,) = read_segment("play-prompts-1.annotations.jsonl", Annotation)
    assert (note.episode, note.name, note.values) == (e.id, "reward", (0.75,))
    assert "name who gives the reward" in shell("play", "prompts", "path=rows.jsonl", code=2)


def test_verify_sees_what_was_edited(shell):
    train(shell, "run", "steps=1")
    (note, *rest) = read_annotations("run/annotations/reward")
    write_segment("run/annotations/reward", 1, [type(note)(note.episode, note.name, note.level, (9.0,)), *rest])
    assert "the annotation 'reward' differs from the outcome" in " ".join(shell("verify", "run", code=1).split())
    write_segment("run/annotations/reward", 1, [note, *rest])
    shell("verify", "run")
    first, *others = read_segment("run/episodes/000001.jsonl")
    turn = dataclasses.replace(first.turns[0], reward=7.5)
    edited = dataclasses.replace(first, turns=(turn,), outcomes={"self": Scored(7.5)})
    write_segment("run/episodes", 1, [edited, *others])
    write_segment("run/annotations/reward", 1, [type(note)(note.episode, note.name, note.level, (7.5,)), *rest])
    said = " ".join(shell("verify", "run", code=1).split())
    assert "the judge now gives another reward than is stored" in said and "stored reward 7.5, now reward " in said


def test_a_language_model_gives_the_reward_and_is_asked_nothing_twice(shell):
    answer = lambda messages: json.dumps({"id": name(messages), "score": 1 + len(messages[0]["content"]) % 5})
    with serving_judge(answer) as (url, asked):
        server = f"{{address: '{url}', model: wise}}"
        words = [
            "--resume",
            f"reward={{kind: model, server: {server}, rubric: 'Judge answer <1> to {{prompt}}: {{answer}}'}}",
        ]
        shell("train", RECIPE, "data=rows.jsonl", "out=run", *SMALL, *words[1:])
        first, total = len(read_segment("run/episodes/000001.jsonl")), sum(asked.values())
        rewards = {e.id: e.outcome.reward for e in read_episodes("run/episodes")}
        assert set(rewards.values()) <= {0.1, 0.2, 0.3, 0.4, 0.5} and 0 < total <= 27 + 2 * 2 and first == 9
        for p in segments("run/episodes")[1:]:
            p.unlink()
        for p in Path("run/checkpoints").iterdir():  # as if it had been killed in its second step
            if p.name != "000001":
                for f in sorted(p.rglob("*"), reverse=True):
                    f.unlink() if f.is_file() else f.rmdir()
                p.rmdir()
        shell("train", RECIPE, "data=rows.jsonl", "out=run", *SMALL, *words)
        assert sum(asked.values()) == total  # every answer was in run/judge/answers.jsonl
    assert len(Path("run/judge/answers.jsonl").read_text().splitlines()) == total
    assert {n.episode: n.values[0] / 10 for n in read_annotations("run/annotations/judge_score")} == rewards
    assert "verified" in shell("verify", "run")


def test_the_likelihood_of_a_gold_text_as_reward(shell):
    train(shell, "run", "reward={kind: likelihood, reward: linear}", "steps=2", "eval.every=0")
    notes = {a.episode: a.values[0] for a in read_annotations("run/annotations/improvement")}
    assert {k: v / 100 for k, v in notes.items()} == {e.id: e.outcome.reward for e in read_episodes("run/episodes")}
    assert len(set(notes.values())) > 9
    shell("eval", "run", "--n", "1")
