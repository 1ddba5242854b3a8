"""The whole road of LPR: its stages, what they make, what makes them again, what enters from elsewhere, and kills."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from trailmark import formats
from trailmark.commands.app import app
from trailmark.commands.serve import serving
from trailmark.config import ModelConfig, resolve
from trailmark.engines.local import LocalEngine
from trailmark.errors import DataError, ModelError, RecipeError, RunError
from trailmark.methods.lpr.commands import records_of
from trailmark.methods.lpr.config import LprRecipe
from trailmark.methods.lpr.method import LprMethod
from trailmark.methods.lpr.round import Round
from trailmark.methods.pipeline import some
from trailmark.models.load import load_model
from trailmark.run_async import wait
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_metrics, read_segment
from trailmark.score.value_models import locate_value
from trailmark.score.values import HeadValues
from trailmark.steps import step_types
from trailmark.types import Annotation, Scored

SOLVER = Path(__file__).with_name("lpr_careless.py")
WRONG = 0.4
RECIPE = {
    "method": "lpr",
    "steps": 1,
    "seed": 0,
    "model": {"name": "tiny", "dtype": "float64", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 96}},
    "task": {"name": "arith", "options": {"level": 2}},
    "seats": {"policy": {"kind": "scripted", "function": f"{SOLVER}:careless"}},
    "sample": {"prompts": 6, "n": 12},
    "sampling": {"max_tokens": 40},
    "engine": {"max_num_seqs": 8, "max_len": 96},
    "clean": {"distinct": False},
    "states": {"start": 0.0, "ratio": 1.0, "shards": 2},
    "labels": {"dev_shards": [0]},
    "prm": {"steps": 25, "batch": 24, "learner": {"optim": {"lr": 1e-2}}},
    "pairs": {"margin": 0.001, "best_of": None, "max_wrong": None},
    "preference": {"steps": 2, "batch": 16},
}


def config(out, **more):
    return resolve({**RECIPE, "out": str(out), **more}, LprRecipe)


def go(out, resume=False, only=None, **more):
    c = config(out, **more)
    launch(LprMethod if only is None else some(LprMethod, only), c, resume)
    return Round(c, Run.open(out))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return go(tmp_path_factory.mktemp("lpr") / "run")


def summary(road, name):
    return json.loads((road.root / "stages" / f"{name}.json").read_text())["summary"]


def test_the_stages_of_a_round(made):
    names = [s.name for s in LprMethod.stages(made.config, made.run)]
    assert names == [
        f"{n}-1"
        for n in (
            "solutions",
            "cleaned",
            "states",
            "completions",
            "values",
            "examples",
            "prm",
            "scores",
            "pairs",
            "policy",
        )
    ]
    assert summary(made, "solutions-1") == {"solutions": 72, "questions": 6}
    assert summary(made, "cleaned-1")["steps"] == 3 * 72 and summary(made, "states-1")["states"] == 2 * 72
    assert summary(made, "completions-1")["completions"] == 3 * 144
    (row,) = read_metrics(made.root)
    assert row["step"] == 1 and row["policy/rows"] == row["pairs/pairs"] == row["pairs/distinct pairs"]
    assert read_metrics(made.root / "policy-1")[0]["pair"] == pytest.approx(math.log(2), abs=1e-12)


def test_values_are_the_solvers_own(made):
    """Behind the last operation a state is worth 3 or 0; before it a sound one 1 - WRONG, one that is off WRONG / 2."""
    values = {a.episode: a.values for a in read_segment(made.root / "values-1/values.jsonl", Annotation)}
    first = {True: [], False: []}
    for e in made.solved():
        begin, _, answer = e.turns[0].text.split("\n")
        right = int(answer.removeprefix("#### ")) == e.task.data["answer"]
        assert e.outcome.success == right and values[e.id][1:] == (3.0 * right, -1)
        a, op, rest = begin[0], begin[1], begin[2:]
        first[int(rest.split("=")[1]) == int(a) + int(op + rest.split("=")[0])].append(values[e.id][0])
    for sound, p in ((True, 1 - WRONG), (False, WRONG / 2)):
        v = np.array(first[sound])
        assert len(v) > 10 and abs(v.mean() / 3 - p) <= 3 * math.sqrt(p * (1 - p) / (3 * len(v)))


def test_held_out_questions_are_those_of_the_shard(made):
    train, dev = (formats.read("episodes", made.root / f"examples-1/{name}.jsonl", None) for name in ("train", "dev"))
    groups = [{e.group for e in part.episodes} for part in (train, dev)]
    assert len(groups[0]) == len(groups[1]) == 3 and not groups[0] & groups[1]
    assert groups[1] == {e.group for e in made.solved() if e.id in {s["episode"] for s in made.shard([0])}}
    last = read_metrics(made.root / "prm-1")[-1]
    assert (
        last["eval/accuracy"] > 0.25 and last["cross_entropy"] < read_metrics(made.root / "prm-1")[0]["cross_entropy"]
    )


def test_scores_of_all_steps_in_one_pass_are_those_of_prefixes(made):
    """A process reward model reads every step at once, and a server of values reads them one by one, to 1e-5."""
    folder = str(locate_value(made.root / "prm-1"))
    lm = load_model(ModelConfig(name=folder, dtype="float64")).freeze()
    values = HeadValues(lm, classes=[2, 3])
    rewards, outputs = made.rewards(made.solved())
    for e in made.solved()[:6]:
        turn = e.turns[0]
        ways = wait(values.values([turn.prompt + turn.tokens[:end] for _, end in turn.steps]))
        p = np.exp(outputs[e.id, 0])
        each = p[:, 2:].sum(-1) / p.sum(-1)
        assert each == pytest.approx(ways, abs=1e-5) and rewards[e.id] == pytest.approx(math.prod(each), abs=1e-9)
    fixed = HeadValues(lm, classes=[2, 3], fixed=False)
    assert wait(fixed.values([turn.prompt + turn.tokens])) == pytest.approx(
        wait(values.values([turn.prompt + turn.tokens])), abs=1e-9
    )


def test_pairs_are_those_of_the_rewards(made):
    rewards, _ = made.rewards(made.solved())
    known = {e.id: e for e in made.solved()}
    lines = [json.loads(line) for line in (made.root / "pairs-1/pairs.jsonl").read_text().splitlines()]
    assert len({(p["chosen"], p["rejected"]) for p in lines}) == len(lines) > 20
    wanted = set()
    for c in known.values():
        for r in known.values():
            if c.group == r.group and c.outcome.success and c.id != r.id:
                gap = rewards[c.id] - rewards[r.id]
                if not r.outcome.success or gap > 0.001:
                    wanted.add((c.id, r.id))
    assert {(p["chosen"], p["rejected"]) for p in lines} == wanted
    assert {p["kind"] for p in lines} == {"outcome", "process"}
    assert all(p["chosen_reward"] == rewards[p["chosen"]] for p in lines)


def test_a_rerun_does_nothing_and_a_change_makes_what_it_concerns(made, tmp_path, capsys):
    root = tmp_path / "run"
    shutil.copytree(made.root, root)
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name not in ("recipe.yaml", ".lock")}
    go(root, resume=True)
    assert capsys.readouterr().err == "" and {p: p.read_bytes() for p in before} == before
    go(root, resume=True, pairs={**RECIPE["pairs"], "margin": 9.0})
    said = capsys.readouterr().err
    assert "stage 'pairs-1' is made again: key 'pairs.margin' was 0.001 and is 9.0" in said
    assert "stage 'policy-1' is made again" in said and "scores" not in said and "prm" not in said
    lines = [json.loads(line) for line in (root / "pairs-1/pairs.jsonl").read_text().splitlines()]
    assert {p["kind"] for p in lines} == {"outcome"} and (root / "replaced/pairs-1-1").is_dir()
    (root / "states-1/states.1-of-2.jsonl").unlink()  # a shard that is gone
    with pytest.raises(RunError, match=r"states.1-of-2.jsonl of stage 'states-1' is gone"):
        go(root, resume=True)


def test_questions_may_be_barred_and_states_are_mixed_in_at_a_ratio(made, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(made.root, root)
    lines = lambda r: [json.loads(line) for line in (r.root / "pairs-1/pairs.jsonl").read_text().splitlines()]
    known = {e.id: e.task.id for e in made.solved()}
    one = next(known[p["chosen"]] for p in lines(made) if p["kind"] == "process")
    (tmp_path / "barred.json").write_text(json.dumps([one]))
    barred = {**RECIPE["pairs"], "exclude": str(tmp_path / "barred.json"), "states": {"margin": 0.0001, "ratio": 0.5}}
    road = go(root, resume=True, only=["pairs-1"], pairs=barred)
    allowed = [p for p in lines(made) if p["kind"] == "outcome" or known[p["chosen"]] != one]
    whole = [p for p in lines(road) if p["kind"] != "state"]
    assert whole == allowed and len(lines(made)) > len(allowed)
    states = [p for p in lines(road) if p["kind"] == "state"]
    assert len(states) == len(whole) // 2 and all("chosen_end" in p and "rejected_end" in p for p in states)


def test_only_what_is_needed_is_made(tmp_path):
    names = lambda **more: [
        s.name.removesuffix("-1") for s in LprMethod.stages(config(tmp_path / "x", **more), Run(tmp_path / "x"))
    ]
    outcome = {"process": False}
    assert names(pairs=outcome) == ["solutions", "cleaned", "pairs", "policy"]
    assert names(pairs=outcome, prm={"kind": "outcome"}) == names(pairs=outcome)
    assert names(prm={"kind": "outcome"}) == ["solutions", "cleaned", "prm", "scores", "pairs", "policy"]
    assert names(pairs={"steps": {}}) == ["solutions", "cleaned", "states", "completions", "pairs", "policy"]
    rl = {"algorithm": "grpo", "n": 2, "steps": 1, "rewards": {"right": 1.0}}
    assert names(preference=None, rl=rl)[-2:] == ["scores", "rl"] and "pairs" not in names(preference=None, rl=rl)
    assert names(preference=None, rl={**rl, "rewards": {"right": 1.0, "alpha": 0.0}}) == ["solutions", "cleaned", "rl"]
    assert len(names(steps=2)) == 20 and names(files={"pairs": "p.json"}) == ["pairs", "policy"]


def test_steps_behind_one_state(tmp_path):
    """True step-level DPO: the state is given, and the step that was written behind it is all that is trained."""
    road = go(tmp_path / "run", pairs={"steps": {}})
    known = {e.id: e for e in road.completed()}
    lines = [json.loads(line) for line in (road.root / "pairs-1/pairs.jsonl").read_text().splitlines()]
    assert lines and read_metrics(road.root / "policy-1")[0]["rows"] == len(lines)
    for p in lines:
        a, b = known[p["chosen"]], known[p["rejected"]]
        assert a.parent == b.parent and a.outcome.success and not b.outcome.success
        assert (
            a.turns[0].forced == b.turns[0].forced != ()
            and a.turns[0].tokens[: p["chosen_end"]] != b.turns[0].tokens[: p["rejected_end"]]
        )
        text = a.turns[0].text[len(road.tokenizer.decode(a.turns[0].forced)) :]
        assert road.tokenizer.decode(a.turns[0].tokens[: p["chosen_end"]]).rstrip("\n") == text.split("\n")[0]


def test_two_rounds_with_a_teacher_replay_and_reinforcement(tmp_path):
    """The second round begins with what the first one taught, and its reward model goes on from the first."""
    seats = {**RECIPE["seats"], "teacher": {"kind": "scripted", "function": f"{SOLVER}:careless"}}
    rl = {"algorithm": "grpo", "steps": 1, "prompts_per_step": 2, "n": 2, "rewards": {"right": 1.0}}
    road = go(
        tmp_path / "run",
        steps=2,
        seats=seats,
        teacher={"prompts": 4, "n": 2},
        rl=rl,
        labels={"replay": 0.5},
        sft={"steps": 2, "batch": 4},
        sample={"prompts": 4, "n": 8},
        states={"start": 0.0, "ratio": 0.5},
        pairs={"margin": 0.01, "states": {"margin": 0.0001}},
        prm={"steps": 2, "batch": 8},
        preference={"steps": 1, "batch": 8},
    )
    assert [row["step"] for row in read_metrics(road.root)] == [1, 2]
    first, second = (json.loads((road.root / f"stages/prm-{k}.json").read_text()) for k in (1, 2))
    assert "begin" not in first["settings"] and second["settings"]["begin"] == "{root}/prm-1"
    assert second["settings"]["model"]["name"] == "{root}/rl-1" and first["settings"]["model"]["name"] == "{root}/sft"
    was, now = summary(road, "examples-1"), summary(road, "examples-2")
    assert now["replayed"] == was["train examples"] // 2
    ids = [{e.id for e in Round(road.config, road.run, k).solved()} for k in (1, 2)]
    assert ids[0] and ids[1] and not ids[0] & ids[1]
    assert summary(road, "pairs-1")["state pairs"] > 0
    assert all(e.outcome.success for e in read_segment(road.root / "lessons/all.jsonl"))
    assert (road.root / "rl-2/checkpoints/000001/policy/config.json").is_file()


def test_the_policy_completes_states_behind_their_own_tokens(tmp_path):
    """A model that knows nothing writes; what it wrote up to a state is forced on its completions, token by token."""
    road = go(
        tmp_path / "run",
        seats={},
        sample={"prompts": 8, "n": 4},
        only=[f"{n}-1" for n in ("solutions", "cleaned", "states", "completions", "values")],
    )
    states, known = road.shard(None), {e.id: e for e in road.solved()}
    assert len(states) >= 3 and len(road.completed()) == 3 * len(states)
    for e in road.completed():
        origin, turn = known[e.parent.episode].turns[0], e.turns[0]
        assert (turn.prompt, turn.forced) == (origin.prompt, origin.tokens[: e.parent.token])
        assert turn.version == 0 and len(turn.forced + turn.tokens) <= 40
    assert summary(road, "values-1")["value 3"] == 0


def test_worked_solutions_of_a_task_are_lessons(tmp_path):
    """The task writes them with mistakes; the right ones are kept, cut into ReAct steps, in the policy's tokens."""
    task = {"name": "puzzle", "options": {"level": 1, "form": "react", "errors": 0.3}}
    more = {"seats": {}, "teacher": {"gold": True, "prompts": 40}, "clean": {"split": "react", "react": "finish"}}
    road = go(tmp_path / "run", task=task, only=["lessons"], **more)
    lessons, told = read_segment(road.root / "lessons/all.jsonl"), summary(road, "lessons")
    assert told["written"] == 40 == told["solutions"] + told["left out: wrong"]
    assert told["solutions"] == len(lessons) > 10
    for e in lessons:
        turn = e.turns[0]
        said = [road.tokenizer.decode(turn.tokens[a:b]) for a, b in turn.steps]
        assert e.outcome.success and turn.text == e.task.meta["gold"] == "\n".join(said)
        kinds = step_types(e, 0, road.tokenizer)
        assert kinds == ["Thought"] * (len(kinds) - 1) + ["Action"] and len(kinds) >= 2
    with pytest.raises(DataError, match="has no worked solution: name a seat teacher"):
        go(tmp_path / "none", task={"name": "taxi"}, teacher={"gold": True, "prompts": 1}, seats={}, only=["lessons"])
    with pytest.raises(RecipeError, match="teacher.gold takes the place of the seat teacher"):
        config(tmp_path / "both", teacher={"gold": True}, seats={"teacher": RECIPE["seats"]["policy"]})


@pytest.mark.parametrize("speaks", ["text", "chat"])
def test_a_server_writes_solutions_and_completions(tmp_path, speaks):
    """What a server writes enters in tokens of the policy. A chat server is shown the question, and its answer begins
    with the words of the state."""
    served = ModelConfig.model_validate({**RECIPE["model"], "seed": 5})
    with serving(LocalEngine(load_model(served), 8, 96), "small") as url:
        seat = {"kind": "http", "address": url, "model": "small", "speaks": speaks}
        seats = {"policy": {**seat, **({"tokenizer": "tiny"} if speaks == "text" else {})}}
        only = [f"{n}-1" for n in ("solutions", "cleaned", "states", "completions", "values")]
        road = go(tmp_path / "run", seats=seats, sample={"prompts": 8, "n": 6}, only=only)
    known, states = {e.id: e for e in road.solved()}, road.shard(None)
    assert {e.players["policy"].kind for e in known.values()} == {"remote"} and len(states) >= 3
    for e in known.values():
        turn = e.turns[0]
        assert road.tokenizer.decode(turn.prompt) == e.task.data["question"] + "\n"
        assert road.tokenizer.decode(turn.tokens).removesuffix(road.tokenizer.eos_token) == turn.text
    assert len(road.completed()) == 3 * len(states)
    for e in road.completed():
        begun = road.tokenizer.decode(known[e.parent.episode].turns[0].tokens[: e.parent.token])
        assert e.turns[0].text.startswith(begun) and isinstance(e.outcome, Scored)
    assert summary(road, "values-1")["states"] >= 1


def test_several_models_are_sampled_in_one_call(made, tmp_path):
    model = str(made.root / "policy-1")
    road = go(tmp_path / "run", only=["solutions-1"], seats={}, sample={"prompts": 2, "n": 2, "models": [model, model]})
    assert [p.name for p in sorted((road.root / "solutions-1").iterdir())] == ["000.jsonl", "001.jsonl", "002.jsonl"]
    every = [read_segment(p) for p in sorted((road.root / "solutions-1").iterdir())]
    assert len({e.id for part in every for e in part}) == 12 and len({e.group for part in every for e in part}) == 2


# --- from elsewhere ------------------------------------------------------------------------------------------------


def records(road, name):
    return records_of(road, f"{name}-1")


def write(path, rows):
    path.write_text(json.dumps(rows))
    return str(path)


def test_records_of_every_stage_leave_and_enter(made, tmp_path):
    """What one road exports enters another, and the same values, scores and pairs come out."""
    files = {
        name: write(tmp_path / f"{name}.json", records(made, name))
        for name in ("cleaned", "states", "completions", "scores")
    }
    one = {"states": {"shards": 1}, "labels": {}}
    given = {"states": files["states"], "completions": files["completions"]}
    valued = go(
        tmp_path / "valued",
        files=given,
        only=[f"{n}-1" for n in ("solutions", "cleaned", "states", "completions", "values")],
        **one,
    )
    again = go(tmp_path / "again", files={"solutions": files["cleaned"], "scores": files["scores"]}, **one)
    texts = {e.id: (e.task.data["question"], e.turns[0].text) for road in (made, valued, again) for e in road.solved()}

    def values(road):
        notes = read_segment(road.root / "values-1/values.jsonl", Annotation)
        return sorted((texts[a.episode], a.values) for a in notes)

    def pairs(road):
        lines = [json.loads(line) for line in (road.root / "pairs-1/pairs.jsonl").read_text().splitlines()]
        return sorted(
            (texts[p["chosen"]], texts[p["rejected"]], p["kind"], round(p["chosen_reward"], 9)) for p in lines
        )

    assert values(valued) == values(made) and pairs(again) == pairs(made)
    assert sorted(again.solved()[0].task.data) == sorted(made.solved()[0].task.data)
    tokens = lambda road: sorted(e.turns[0].prompt + e.turns[0].tokens for e in road.solved())
    assert tokens(again) == tokens(made)
    assert read_metrics(again.root / "policy-1")[0]["rows"] == len(pairs(made))
    last = go(tmp_path / "last", files={"pairs": write(tmp_path / "pairs.json", records(made, "pairs"))})
    assert read_metrics(last.root / "policy-1")[0]["rows"] == len(pairs(made))
    sides = read_segment(last.root / "pairs-1/sides.jsonl")
    assert {e.turns[0].prompt + e.turns[0].tokens for e in sides} <= {*tokens(made)}


def test_pairs_with_prefixes_and_partial_sides_enter(tmp_path):
    from trailmark.methods.lpr.formats import read_pairs
    from trailmark.models.tiny import tiny_tokenizer

    words = tiny_tokenizer()
    rows = [
        {"chosen": "a\nb", "reject": "a\nc", "id": 3, "chosen_prefix": "a\n", "reject_prefix": "a\n"},
        {"chosen": "a", "reject": "x\ny", "id": 3, "chosen_full": False, "reject_full": True},
        {"chosen": "a", "reject": "b", "id": 3, "is_full": False},
        {"chosen": "a", "reject": "a", "id": 3},
        {"chosen": "a", "reject": "b", "id": 4},
    ]
    path = write(tmp_path / "pairs.json", rows)
    sides, out = read_pairs(path, {"3": "Q\n"}, words, "policy")
    said = [(words.decode(e.turns[0].forced), words.decode(e.turns[0].tokens)) for e in sides]
    eos = words.eos_token
    assert said == [("a\n", "b" + eos), ("a\n", "c" + eos), ("", "a"), ("", "x\ny" + eos), ("", "a"), ("", "b")]
    assert out == {"pairs of two equal sides": 1, "pairs of a question that is not here": 1}
    assert {words.decode(e.turns[0].prompt) for e in sides} == {"Q\n"}
    write(tmp_path / "pairs.json", [{"chosen": "a", "reject": "a\nb", "id": 3, "reject_prefix": "a\nb"}])
    with pytest.raises(DataError, match=r"\[0\].reject.*nothing to train"):
        read_pairs(path, {"3": "Q\n"}, words, "policy")


def test_a_solution_without_a_label_and_one_that_names_two_are_counted(tmp_path):
    rows = [
        {"text": "q\n", "label": -1, "response": ["x\ny\n#### 1"], "pred": ["1"], "id": 0},
        {"text": "r\n", "label": 1, "response": ["x\ny\nA and B", "x\nB", ""], "pred": ["", "B", ""], "id": 1},
    ]
    c = {"files": {"solutions": write(tmp_path / "s.json", rows)}, "only": ["solutions-1", "cleaned-1"], "seats": {}}
    road = go(tmp_path / "run", **c)
    assert summary(road, "cleaned-1") == {
        "solutions": 2,
        "right": 1,
        "steps": 5,
        "left out: failed": 1,
        "left out: not judged (no reward in the file)": 1,
    }


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("states.0-of-2.json", "[]", "is one of 2 shards, and shard 1 is not among the named files"),
        ("states.json", '[{"text": "q", "response": ["a"', r"states.json.*"),
        ("states.json", '[{"text": "q", "response": ["a\\n#### 1"], "id": 0}]', "can be used: 1 not judged"),
    ],
)
def test_shards_that_are_missing_or_cut(tmp_path, name, text, why):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=why):
        go(tmp_path / "run", files={"states": [str(tmp_path / name)]})
    assert not (tmp_path / "run/cleaned-1").exists()


def test_a_reward_model_of_another_tokenizer(made, tmp_path, monkeypatch):
    root = tmp_path / "run"
    shutil.copytree(made.root, root)
    shutil.rmtree(root / "scores-1")
    (root / "stages/scores-1.json").unlink()
    from trailmark.models.tiny import tiny_tokenizer

    monkeypatch.setattr(Round, "tokenizer", property(lambda self: tiny_tokenizer(["another"])))
    with pytest.raises(ModelError, match="has another tokenizer than the policy"):
        go(root, resume=True, only=["scores-1"])
    assert not (root / "scores-1").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"preference": None}, "nothing to train the policy with"),
        ({"preference": {"objective": "ppo"}}, "key 'preference'.*objective"),
        ({"preference": {"data": "x"}}, "key 'data' is set by lpr itself"),
        ({"prm": {"stepps": 3}}, "key 'prm'.*stepps.*Did you mean 'steps'"),
        ({"rl": {"algorithm": "grpo"}}, "key 'rl'.*n is 1"),
        ({"complete": {"shards": [2]}}, "complete.shards: there is no shard 2"),
        ({"seats": {"judge": {"kind": "person"}}}, "'judge' has nothing to do here"),
        ({"pairs": {"right_pairs": "all"}}, "pairs.right_pairs"),
    ],
)
def test_recipes_that_cannot_be(tmp_path, more, why):
    with pytest.raises(RecipeError, match=why):
        config(tmp_path / "run", **more)


def test_commands(made, tmp_path, monkeypatch):
    shell = CliRunner()
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "out": str(tmp_path / "run")}))
    said = lambda *words: shell.invoke(app, [*map(str, words)])
    assert said("stages", path, "--only", "states").exit_code == 2
    done = said("stages", path, "sample.prompts=2", "--only", "solutions")
    assert done.exit_code == 0 and done.stdout.strip() == "solutions-1: solutions 24, questions 2"
    done = said("stages", path, "sample.prompts=2", "--only", "cleaned")
    assert done.stdout.startswith("cleaned-1: solutions 24, right ")
    listed = said("stages", path, "sample.prompts=2").stdout.splitlines()
    assert listed[1].split() == ["cleaned-1", "done"] and listed[2].split() == ["states-1", "to", "do"]
    assert "to do again: key 'sample.prompts' was 2 and is 6" in said("stages", path).stdout.splitlines()[0]
    out = said("lpr", "export", "cleaned", path, tmp_path / "out.jsonl", "sample.prompts=2")
    assert out.exit_code == 0 and len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    twice = said("lpr", "export", "cleaned", path, tmp_path / "out.jsonl")
    assert twice.exit_code == 2
    wrong = shell.invoke(app, ["stages", str(path), "--only", "stats"])
    assert wrong.exit_code == 2
    assert said("lpr", "export", "scores", path, tmp_path / "s.json").exit_code == 2


# --- kills ---------------------------------------------------------------------------------------------------------


def killed_at(root, point):
    """A process that runs the road and is killed at a point inside a write; how it ended. It is forked, because to
    import everything anew would take most of the time."""
    if (child := os.fork()) == 0:
        os.environ["TRAILMARK_KILL_AT"] = point
        try:
            go(root)
        finally:
            os._exit(1)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status := os.waitpid(child, 0)[1]) else None


def same_files(a, b):
    """Every file that a stage made, byte for byte; runs by what they hold."""
    runs = {"prm-1", "policy-1"}
    for home in sorted(p for p in a.iterdir() if p.is_dir() and p.name not in ("stages", "replaced", "checkpoints")):
        if home.name in runs:
            assert (
                diff_runs(
                    home,
                    b / home.name,
                    words=lambda r: {
                        k: v for k, v in r.items() if k not in ("data", "eval_data", "pair_file", "model")
                    },
                )
                == []
            )
            continue
        files = {p.relative_to(a): p.read_bytes() for p in home.rglob("*") if p.is_file()}
        assert files == {p.relative_to(b): p.read_bytes() for p in (b / home.name).rglob("*") if p.is_file()}


POINTS = [
    "collected.before#20",
    "segment.half#1",
    *(f"stage.begun#{k}" for k in range(1, 11)),
    *(f"stage.made#{k}" for k in range(1, 11)),
    "convert.half#1",
    "convert.renamed#1",
    "lines.half#1",
    "lines.renamed#2",
    "collected.after#300",
    "annotation.half#1",
    "convert.half#3",
    "checkpoint.weights#1",
    "checkpoint.renamed#1",
    "annotation.renamed#2",
    "lines.half#3",
    "checkpoint.optimiser#2",
]
FEW = [
    "stage.made#3",
    "lines.half#3",
    "checkpoint.weights#1",
]  # in states, in pairs, in the training of the reward model


def dies_and_goes_on(made, root, point):
    assert killed_at(root, point) == signal.SIGKILL
    go(root, resume=True)
    same_files(made.root, root)


def test_killed_in_the_completions_it_goes_on_to_the_same_files(made, tmp_path):
    assert killed_at(tmp_path / "run", "collected.after#100") == signal.SIGKILL
    half = (tmp_path / "run/completions-1/all.partial.jsonl").read_text()
    assert half.count("\n") == 28  # 72 solutions, then these
    go(tmp_path / "run", resume=True)
    same_files(made.root, tmp_path / "run")


@pytest.mark.parametrize("point", FEW)
def test_killed_in_a_stage(made, tmp_path, point):
    dies_and_goes_on(made, tmp_path / "run", point)


@pytest.mark.kill
@pytest.mark.parametrize("point", [p for p in POINTS if p not in FEW])
def test_killed_in_any_stage(made, tmp_path, point):
    dies_and_goes_on(made, tmp_path / "run", point)
