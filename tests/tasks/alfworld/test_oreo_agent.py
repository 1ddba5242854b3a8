"""OREO as an agent: expert plays, imitation, collection, learning from turns, and best-of-K actions here and over
http."""

import json
from pathlib import Path

import pytest
from small_home import ERRANDS, names, write_download
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.commands.serve import serving
from trailmark.config import ModelConfig
from trailmark.engines.local import LocalEngine
from trailmark.methods.offline import read_scored
from trailmark.methods.oreo import data as oreo_data
from trailmark.models.load import load_model
from trailmark.runs.store import read_segment
from trailmark.score.value_models import load_values
from trailmark.tasks.alfworld import Games
from trailmark.tasks.alfworld.dialect import command_in, observation_in
from trailmark.types import Scored

RECIPES = Path(__file__).parents[3] / "recipes"
SHAPE = "model.shape={family: llama, layers: 1, width: 32, heads: 2, context: 4096}"
SMALL = [
    SHAPE,
    "model.gradient_checkpointing=false",
    "learner.amp=none",
    "engine.max_num_seqs=4",
    "task.options.horizon=3",
]


def shell(*words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with games, published plays, and the three stages run in it with a model made from nothing."""
    here = tmp_path_factory.mktemp("agent")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        games = Games(write_download(here / "data/alfworld", ["train", "valid_seen"]))
        rows = []
        for task_type, name in names().items():
            play, talk = games.game(f"train/{name}").start(), []
            talk.append({"from": "human", "value": play.observation})
            for command in ERRANDS[task_type][3]:
                seen = observation_in("put", play.step(command), command)
                talk += [{"from": "gpt", "value": f"Thought: so.\nAction: {command_in('put', command)}"}]
                talk += [{"from": "human", "value": f"Observation: {seen}"}]
            task, trial = name.split("/")
            rows.append({"task": task, "trial": trial, "conversations": talk})
        rows.append({**rows[0], "task": "no-such-game"})
        Path("plays.json").write_text(json.dumps(rows))
        options = ["games=data/alfworld", "dialect=put", "opening=apart"]
        said = shell("data", "experts", "plays.json", "alfworld-experts.jsonl", *options, "horizon=40").output
        assert said == "alfworld-experts.jsonl: 6 plays, 1 left out (without a game)\n"
        shell("train", RECIPES / "oreo-alfworld-sft-gpu.yaml", "steps=30", "batch=3", "model.name=tiny",
              "model.lora=null", "learner.optim.lr=1e-2",
              "eval.every=2", "eval.n=2", "sampling.max_tokens=8", *SMALL)  # fmt: skip
        sft = "model.name=runs/oreo-alfworld-sft/checkpoints/000030/policy"
        shell("train", RECIPES / "oreo-alfworld-data-gpu.yaml", sft, "collect.prompts=2", "collect.n=2",
              "collect.sampling.max_tokens=8", SHAPE, "engine.max_num_seqs=4", "task.options.horizon=3")  # fmt: skip
        for level in ("token", "step"):
            shell("train", RECIPES / "oreo-alfworld-gpu.yaml", sft, "model.lora=null", "critic.lora=null", "epochs=1",
                  "batch=2",
                  f"level={level}", f"out=runs/{level}", "eval.every=2", "eval.n=2", "sampling.max_tokens=8",
                  *SMALL)  # fmt: skip
        yield here


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def test_experts_are_conversations_that_win():
    rows = [json.loads(line) for line in Path("alfworld-experts.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and {r["reward"] for r in rows} == {1}
    said = rows[0]["conversations"]
    assert [m["role"] for m in said[:4]] == ["user", "assistant", "user", "assistant"]
    assert said[0]["content"].startswith("You are an agent in a household") and said[1]["content"] == "OK"
    assert said[2]["content"].startswith("You are in the middle of a room.")
    walk = ERRANDS[next(iter(names()))][3]
    asked = [m["content"] for m in said[3::2]]
    assert asked == [f"Thought: so.\nAction: {command_in('put', c)}" for c in walk]


def test_only_the_agents_words_are_trained():
    """The canned OK and every observation are context; at level step a turn is a step."""
    tokenizer = load_model(ModelConfig(name="runs/oreo-alfworld-sft/checkpoints/000030/policy")).tokenizer
    data = read_scored(["alfworld-experts.jsonl"], "agent", tokenizer, "policy", 4096)
    (first, *_), said = data.episodes, json.loads(Path("alfworld-experts.jsonl").read_text().splitlines()[0])
    (sample,) = oreo_data.trajectory_samples([first])
    acts = sample.streams["action"] != 0
    written = tokenizer.decode(sample.tokens[acts], skip_special_tokens=True)
    assert written == "".join(m["content"] for m in said["conversations"][3::2])
    (steps,) = oreo_data.trajectory_samples([first], states="step")
    assert (steps.streams["weight"] != 0).sum() == len(first.turns) == len(said["conversations"][3::2])


def test_collected_plays_are_one_growing_conversation():
    plays = read_segment(Path("runs/oreo-alfworld-data/episodes/000001.jsonl"))
    assert len(plays) == 4 and len({e.group for e in plays}) == 2
    tokenizer = load_model(ModelConfig(name="runs/oreo-alfworld-sft/checkpoints/000030/policy")).tokenizer
    for e in plays:
        assert [t.continues for t in e.turns] == [None, *range(len(e.turns) - 1)] and isinstance(e.outcome, Scored)
        opening = tokenizer.decode(e.turns[0].prompt)
        assert opening.count("You are an agent in a household") == 1 and "OK" in opening
        assert opening.index("OK") < opening.index("You are in the middle of a room.")


@pytest.mark.parametrize("level", ["token", "step"])
def test_both_levels_learn_from_turns(level):
    last = json.loads(Path(f"runs/{level}/metrics.jsonl").read_text().splitlines()[-1])
    assert last["rows"] == 4 and last["value"] == last["value"] and "eval/success" in last
    assert sorted(p.name for p in Path(f"runs/{level}/checkpoints/000002").iterdir() if p.is_dir()) == [
        "critic",
        "policy",
    ]


def test_best_actions_are_the_same_here_and_over_http():
    """Three ways to the same plays: a value here, a server of values with us choosing, a server that chooses itself."""
    # A seed with which this model writes no control token and no half of a character: as text, those are other tokens.
    common = ["--n", "2", "--seed", "3", "--temperature", "1", "--max-tokens", "8", "--split", "valid_seen", "--json"]
    task = ["--task", "alfworld", "games=data/alfworld", "mode=text", "dialect=put", "opening=apart", "horizon=3"]
    search = ["--search", "actions:3"]
    shell("eval", "runs/token", *search, "--value", "runs/token", *common, "--out", "here.jsonl")
    lm = load_model(ModelConfig(name="runs/token/checkpoints/000002/policy"))
    values = load_values("runs/token", lm.tokenizer)
    with serving(LocalEngine(lm, 4, 4096), "agent", values=values) as url:
        told = ["--served", "agent", *task, *common]
        shell("eval", url, *search, "--value", url, *told, "--out", "chosen.jsonl")
        shell("eval", url, *search, *told, "--out", "there.jsonl")
        shell("eval", url, *told, "--search", "actions:1", "--value", url, "--out", "one.jsonl")
        shell("eval", url, *told, "--out", "plain.jsonl")
        done = CliRunner().invoke(app, ["eval", url, "--search", "beam:2", "--value", url, *told])
        assert done.exit_code == 2 and "of a server needs actions:K" in done.output
    said = lambda name: [[t.text for t in e.turns] for e in read_segment(Path(f"{name}.jsonl"))]
    assert said("here") == said("chosen") == said("there")
    assert said("one") == said("plain") != said("here")
    assert all(len(turns) == 3 for turns in said("here"))


def test_a_server_that_is_away_is_no_lost_game(place):
    done = CliRunner().invoke(app, ["eval", "http://127.0.0.1:9", "--task", "alfworld", "games=data/alfworld",
                                    "mode=text",
                                    "--n", "1", "--split", "valid_seen", "--json"])  # fmt: skip
    assert done.exit_code == 1 and "cannot be reached" in done.stderr and not done.stdout
