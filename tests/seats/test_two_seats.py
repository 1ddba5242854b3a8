"""An adviser that is trained and an actor behind a served chat model, in recipes of a method that knows neither: train,
dry run, resume, eval, verify, play, and what is refused."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.commands.serve import serving
from trailmark.config import ModelConfig
from trailmark.engines.local import LocalEngine
from trailmark.evaluate.players import method_of
from trailmark.methods import get_method
from trailmark.models.load import load_model
from trailmark.runs.diff import diff_runs
from trailmark.runs.store import read_annotations, read_episodes, read_metrics, read_segment
from trailmark.seats.model_names import locate
from trailmark.types import Scored

HERE = Path(__file__).parent
TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 256}}
PAGE = (HERE.parents[1] / "docs" / "seats.md").read_text()
METHOD = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Advised" in block)


def test_an_adviser_of_one_run_before_an_actor_of_another(room, url):
    """`eval --put` puts any model into any seat: each turn has the log-probs of the model that was put there."""
    shell("train", "recipe.yaml", "eval.every=0", "out=first")
    actor = f"seats.actor={json.dumps({'kind': 'local', 'model': TINY})}"
    shell("train", "recipe.yaml", "eval.every=0", "out=second", actor, "model.seed=9", "sampling.max_tokens=3")
    first, second = (f"{run}/checkpoints/000002/policy" for run in ("first", "second"))

    def written_by(file, seat, model):
        engine = LocalEngine(load_model(ModelConfig(name=model)), 4, 256)
        each = [(e, i) for e in read_segment(file) for i, t in enumerate(e.turns) if t.seat == seat]
        turns = [(e.context(i) + e.turns[i].forced, e.turns[i]) for e, i in each]
        assert len(turns) > 2
        return all(engine.score_rows([[*before, *t.tokens]], [len(before)])[0] == pytest.approx(t.logp, abs=1e-5)
                   for before, t in turns)  # fmt: skip

    shell("eval", "second", "--out", "own.jsonl")
    assert written_by("own.jsonl", "adviser", second) and not written_by("own.jsonl", "adviser", first)
    told = shell("eval", "second", "--put", "adviser=first", "--out", "mixed.jsonl", "--json")
    assert json.loads(told.stdout)["put"] == ["adviser=first"]
    assert written_by("mixed.jsonl", "adviser", first) and not written_by("mixed.jsonl", "adviser", second)
    assert read_segment("mixed.jsonl")[0].players["adviser"].model == first
    assert all(len(t.tokens) <= 3 for e in read_segment("mixed.jsonl") for t in e.turns)  # as the second run samples
    shell("eval", "second", "--put", "actor=first", "--put", f"adviser={second}", "--out", "turned.jsonl")
    assert written_by("turned.jsonl", "actor", first) and written_by("turned.jsonl", "adviser", second)
    shell("eval", "second", "--put", f"actor={url}", "--out", "served.jsonl")
    assert read_segment("served.jsonl")[0].players["actor"].kind == "remote"
    for put, said in (("actr=first", "the run has no seat 'actr' (seats: adviser, actor). Did you mean 'actor'?"),
                      ("actor", "--put 'actor': expected SEAT=MODEL"),
                      ("actor=first/checkpoints/000009", "there is no first/checkpoints/000009")):  # fmt: skip
        assert said in " ".join(shell("eval", "second", "--put", put, code=2).output.split())
    plain = " ".join(shell("eval", "tiny", "--put", "a=first", code=2).output.split())
    assert "--put changes the seats of a run" in plain


LENGTHS = """from test_seats_at_desk import Haggle, HaggleWorld

class Lengths(Haggle):
    def make(self):
        return World(False)

class World(HaggleWorld):
    def step(self, action):
        return super().step(str(len(action) % 7))
"""


@pytest.fixture(scope="module")
def url():
    with serving(LocalEngine(load_model(ModelConfig.model_validate({**TINY, "seed": 5})), 8, 256), "small") as url:
        yield url


@pytest.fixture
def room(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(HERE.parent / "rollout")
    (tmp_path / "advised.py").write_text(METHOD)
    sys.modules.pop("advised", None)
    recipe = {
        "method": "advised", "task": {"name": "rollout_talk:Talk"}, "steps": 2, "prompts_per_step": 2, "n": 2,
        "credit": "returns", "out": "run",
        "objective": {"kind": "weighted_logp"}, "sampling": {"max_tokens": 4}, "engine": {"max_num_seqs": 4,
        "max_len": 256},
        "model": TINY,
        "eval": {"every": 1, "n": 2, "split": "train"}, "checkpoint": {"every": 1},
        "seats": {
            "actor": {"kind": "http", "address": url, "model": "small", "sampling": {"max_tokens": 5}},
            "adviser": {"kind": "local", "trained": True},
        },
    }  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def shell(*words, code=0, **more):
    done = CliRunner().invoke(app, list(map(str, words)), **more)
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return done


def test_an_adviser_is_trained_with_an_actor_behind_a_server(room, url):
    dry = shell("train", "recipe.yaml", "--dry-run").output
    assert f"# seat actor: small at {url} (chat)" in dry and "# seat adviser: the model that is trained" in dry
    shell("train", "recipe.yaml")
    shell("train", "recipe.yaml", "steps=1", "out=parts")
    shell("train", "recipe.yaml", "out=parts", "--resume")
    assert diff_runs("run", "parts") == []
    episodes = list(read_episodes("run/episodes"))
    assert len(episodes) == 8 and all(isinstance(e.outcome, Scored) for e in episodes)
    for e in episodes:
        assert [t.seat for t in e.turns] == ["adviser", "actor"] * (len(e.turns) // 2)
        assert all(t.text.startswith("I say:") and t.action is None and len(t.tokens) <= 4 for t in e.turns[::2])
        assert all(t.action == t.text and len(t.tokens) <= 5 for t in e.turns[1::2])
    # What the run evaluates itself is what `eval` plays.
    rows = json.loads(shell("eval", "run", "--out", "again.jsonl", "--json").stdout)["rows"]
    assert rows[0]["episodes"] == rows[0]["scored"] == 2
    told = lambda file: [
        [(t.prompt, t.tokens, t.logp, t.text, t.action, t.reward) for t in e.turns] for e in read_segment(file)
    ]
    assert told("again.jsonl") == told("run/evaluation/000002.jsonl")
    assert "the same rewards, ends and prompts" in " ".join(shell("verify", "run").output.split())
    assert locate("run").folder == "run/checkpoints/000002/policy"  # what `serve run` serves


def test_a_person_takes_a_seat_of_a_run(room):
    shell("train", "recipe.yaml", "steps=1", "eval.every=0")
    done = shell("play", "run", "--seat", "actor", "--split", "train", input="hello\nworld\n")
    assert "word 0: begin. I say:" in done.output and "2 steps saved to play-run-1.jsonl" in done.output
    (e,) = read_segment("play-run-1.jsonl")
    assert [t.action for t in e.turns] == [None, "hello", None, "world"] and e.players["actor"].kind == "person"
    assert e.players["adviser"].kind == "trained" and isinstance(e.outcome, Scored)
    assert "'run' has no seat 'judge' (seats: actor, adviser)" in shell("play", "run", "--seat", "judge", code=2).output
    assert "Nothing was played" in shell("play", "run", "--seat", "actor", input="").output


def test_a_world_of_two_sides_trains_one_of_them(room):
    """The buyer is trained against a script. Its rewards are those of its side: for its own word, and for the answer to
    it."""
    Path("bert.py").write_text("def answer(prompt, draw):\n    return str(draw.randrange(3))\n")
    seats = {"anna": {"kind": "local", "trained": True, "side": "buyer"},
             "bert": {"kind": "scripted", "function": "bert.py:answer", "side": "seller"}}  # fmt: skip
    words = [
        "method=policy_gradient",
        "task={name: test_seats_at_desk:Haggle}",
        f"seats={json.dumps(seats)}",
        "eval.every=0",
    ]
    shell("train", "recipe.yaml", *words)
    episodes = list(read_episodes("run/episodes"))
    noted = {(a.episode, a.turn): a.values for a in read_annotations("run/annotations/advantage")}
    rewards = []
    for e in episodes:
        assert list(e.outcomes) == ["buyer", "seller"] and [t.seat for t in e.turns] == ["anna", "bert"] * 2
        paid = [t.reward if t.seat == "anna" else t.rewards["buyer"] for t in e.turns]
        assert e.outcome.reward == sum(paid) and e.outcomes["seller"].reward == 40 - sum(paid)
        for turn, ahead in ((0, sum(paid)), (2, sum(paid[2:]))):
            assert noted[e.id, turn] == pytest.approx([ahead] * len(noted[e.id, turn]), abs=1e-12)
        rewards.append(e.outcome.reward)
    assert [row["reward"] for row in read_metrics("run")] == [sum(rewards[:4]) / 4, sum(rewards[4:]) / 4]


def test_a_model_learns_from_both_sides_that_it_plays(room):
    """Self-play: two seats are one model. Each is credited with what its own side was paid; the samples are those of
    both, and so are the tokens of the loss."""
    Path("lengths.py").write_text(LENGTHS)
    local = {"kind": "local", "trained": True}
    seats = {"anna": {**local, "side": "buyer"}, "bert": {**local, "side": "seller"}}
    words = ["method=policy_gradient", "task={name: lengths:Lengths}", f"seats={json.dumps(seats)}"]
    words += ["sampling.min_tokens=1", "credit=group_mean", "n=8", "learner.optim.lr=0.1"]
    shell("train", "recipe.yaml", *words)
    alone = {**seats, "bert": {"kind": "local", "model": TINY, "side": "seller"}}
    shell("train", "recipe.yaml", *words, f"seats={json.dumps(alone)}", "out=alone")
    episodes = read_segment("run/episodes/000001.jsonl")
    assert [e.turns for e in episodes] == [e.turns for e in read_segment("alone/episodes/000001.jsonl")]  # one model
    noted = {(a.episode, a.turn): a.values[0] for a in read_annotations("run/annotations/advantage")}
    other = {(a.episode, a.turn): a.values[0] for a in read_annotations("alone/annotations/advantage")}
    for group in {e.group for e in episodes}:
        mine = [e for e in episodes if e.group == group]
        for seat, side in (("anna", "buyer"), ("bert", "seller")):
            earned = [e.outcomes[side].reward for e in mine]
            want = [r - sum(earned) / len(earned) for r in earned]
            for e, a in zip(mine, want):
                at = [i for i, t in enumerate(e.turns) if t.seat == seat and t.tokens]
                assert [noted[e.id, i] for i in at] == pytest.approx([a] * len(at), abs=1e-9)
                assert [other.get((e.id, i)) for i in at] == [noted[e.id, i] if seat == "anna" else None for i in at]
    for seat in seats:
        assert any(noted[e.id, i] for e in episodes for i, t in enumerate(e.turns) if t.seat == seat and t.tokens)
    assert any("checkpoints" in d.file for d in diff_runs("run", "alone"))  # other weights
    assert {p.kind for e in episodes for p in e.players.values()} == {"trained"}
    held = [h.name for h in get_method("policy_gradient").models_in_memory(method_of(locate("run").recipe)[1])]
    assert held == ["anna"]  # one model in memory
    (row,) = json.loads(shell("eval", "run", "--json").stdout)["rows"]
    assert row["scored"] == 2
    assert "defect" not in shell("verify", "run").output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seats.actor.model=large"], "serves 'small', but no model 'large'. Set seats.actor.model"),
        (["seats.actor={kind: local}"], "seats.actor: this seat has no model: set seats.actor.model.name"),
        (["seats.actor.trained=true"], "seats.actor.trained: a server takes no weights, so it cannot be trained"),
        (
            ["seats.adviser.model={name: tiny}", "seats.actor={kind: local, trained: true, model: {name: runs/a}}"],
            "adviser (tiny) and actor (runs/a) are trained from different models, and what is trained is the recipe's",
        ),
        (["seats={a: {kind: person}, a: {kind: local, trained: true}}"], "'a'"),
        (["seats.actor={kind: person}"], "seats.actor: a person can sit at the table of `trailmark play`, not here"),
        (["seats.actor.address=http://127.0.0.1:9", "seats.actor.retries=0"], "cannot be reached"),
        (
            ["seats.actor={kind: local, model: {name: nowhere/run}}"],
            "model 'nowhere/run' is neither a local folder nor",
        ),
    ],
)
def test_seats_that_are_refused(room, words, said):
    done = shell("train", "recipe.yaml", *words, code=1 if said == "cannot be reached" else 2)
    assert said in done.output and not Path("run/recipe.yaml").exists()
