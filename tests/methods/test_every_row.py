"""One epoch uses every row exactly once, whatever the method, in an order of its own; a resumed run goes on with the
next row. RECIPES has every method of the registry."""

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import resolve
from trailmark.errors import RecipeError
from trailmark.learn.learner import Learner
from trailmark.methods import get_config, get_method, method_names
from trailmark.methods.lpr.round import Round
from trailmark.methods.reflect.imitation import ImitationMethod
from trailmark.runs.diff import diff_runs
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_episodes, read_metrics, read_segment, segments

ROWS, BATCH = 7, 3  # an epoch is three steps, of which the last has one row
TINY = {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}}
WORLD = """
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.types import Scored, Task

class Make(TaskSource, World):
    name, markov, finite = "rooms", True, True

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"room {k}", seed, {"k": k}) for k in range(7)][:n]

    def make(self):
        return Make()

    def reset(self, task):
        return Observation(f"room {task.data['k']}\\n", "0. stay\\n1. go\\n", ("0", "1"), ("stay", "go"))

    def step(self, action):
        return Step(Observation("end"), float(action == "1"), True, False, Scored(float(action == "1"), action == "1"))
"""
PROMPTS = {"name": "prompts", "options": {"path": "rows.jsonl", "test": 0.0, "reward": {"kind": "function",
           "path": "reward.py:score"}}}  # fmt: skip
LIKELIHOOD = {"kind": "likelihood", "context": "{prompt}", "plan": "{prompt}{answer}", "model": TINY}
LIKELY = {"name": "prompts", "options": {"path": "rows.jsonl", "val": "val.jsonl", "test": 0.0, "reward": LIKELIHOOD}}
PLAYED = {
    "engine": {"max_num_seqs": 12, "max_len": 96},
    "sampling": {"max_tokens": 4},
    "prompts_per_step": BATCH,
    "n": 2,
}
SCORED = {"data": "scored.jsonl", "format": "trajectories", "batch": BATCH}
QUESTIONS = {"name": "math", "options": {"dataset": "gsm8k", "path": "gsm8k", "style": "plain"}}
SEATS = {"strategist": {"kind": "local", "trained": True, "sampling": {"max_tokens": 2}},
         "agent": {"kind": "scripted", "function": "agent.py:act"}}  # fmt: skip
# method -> the keys of its recipe
RECIPES = {
    "sft": {"data": "talks.jsonl", "batch": BATCH},
    "preference": {**SCORED, "objective": "rejection"},
    "reward_model": {**SCORED, "kind": "outcome"},
    "oreo": SCORED,
    "policy_gradient": {**PLAYED, "task": PROMPTS},
    "vrcli": {**PLAYED, "task": LIKELY},
    "step_rl": {**PLAYED, "task": PROMPTS, "algorithm": "remax"},
    "reflect": {"task": {"name": "rooms_world:Make"}, "reflect": False, "sft": {"reflector": 0, "policy": 0},
                 "rl": {"prompts_per_step": BATCH}, "final": {"split": "train", "n": 1}, "engine": PLAYED["engine"]},
    "reflect_imitation": {"task": {"name": "taxi", "options": {"mode": "full", "history": "none", "menu": False,
                           "walls": False}}, "teacher": {"prompts": 2}, "reflect": False, "batch": BATCH},
    "epo": {"data": "advised.json", "batch": BATCH},
    "epo_rounds": {"task": PROMPTS, "strategy": "thought", "collect": {"prompts": BATCH, "n": 2}, "training": 1,
                    "prompts": {"strategist": "advise"}, "shape": {"most": 4}, "seats": SEATS,
                    "engine": PLAYED["engine"]},
    "lpr": {"task": QUESTIONS, "sample": {"prompts": BATCH, "n": 2}},
    "oreo_rounds": {"task": QUESTIONS, "collect": {"prompts": BATCH, "n": 2, "sampling": {"max_tokens": 4}}, "steps": 3,
                     "training": 0, "engine": PLAYED["engine"]},
}  # fmt: skip
ROUNDS = ("lpr", "oreo_rounds", "epo_rounds")  # their steps are rounds, and each has new starts


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    lines = lambda name, rows: Path(name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    lines("rows.jsonl", [{"prompt": f"{k} and {k}?", "gold": f"it is {k}", "id": f"r{k}"} for k in range(ROWS)])
    lines("val.jsonl", [{"prompt": "nine?", "gold": "9", "id": "v"}])
    say = lambda role, text: {"role": role, "content": text}
    lines("talks.jsonl", [{"messages": [say("user", f"{k}?"), say("assistant", f"{k}.")]} for k in range(ROWS)])
    lines("scored.jsonl", [{"prompt": f"{k}", "response": f" {k}!", "reward": 1} for k in range(ROWS)])
    turns = lambda k: [{"from": "human", "value": f"{k}?"}, {"from": "gpt", "value": f"{k}.", "score": 1}]
    Path("advised.json").write_text(json.dumps([{"conversations": turns(k)} for k in range(ROWS)]))
    Path("gsm8k").mkdir()
    lines("gsm8k/train.jsonl", [{"question": f"What is {k} + 1?", "answer": f"So.\n#### {k + 1}"} for k in range(ROWS)])
    Path("reward.py").write_text("def score(answer):\n    return float(sum(map(ord, answer)) % 5)\n")
    Path("agent.py").write_text("def act(prompt, draw):\n    return 'so'\n")
    Path("rooms_world.py").write_text(WORLD)
    return tmp_path


def recipe(name, out, **more):
    base = {"method": name, "out": str(out), "model": TINY, "steps": 3, "checkpoint": {"every": 1, "keep_last": 9}}
    return resolve({**base, **RECIPES[name], **more}, get_config(name))


def go(monkeypatch, name, out, resume=False, stop=None, **more):
    """Train, and return the rows of each step. `stop`: as if the run were killed in that step."""
    seen, own = [], Learner.update

    def update(self, u):
        seen.append([tuple(s.tokens.tolist()) for s in u.samples])
        if len(seen) == stop:
            raise KeyboardInterrupt
        return own(self, u)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", update)
        try:
            launch(get_method(name), recipe(name, out, **more), resume)
        except KeyboardInterrupt:
            assert stop
    folder = Path(out) / "episodes"
    if segments(folder):
        return [list(dict.fromkeys(e.task.id for e in read_segment(p))) for p in segments(folder)]
    return seen


def flat(steps):
    return [row for step in steps for row in step]


def test_every_method_is_here():
    assert set(RECIPES) == set(method_names())


@pytest.mark.parametrize("name", [n for n in RECIPES if n not in ROUNDS])
def test_after_one_epoch_every_row_was_used_once_in_an_order_of_its_own(home, monkeypatch, name):
    once = go(monkeypatch, name, "once", epochs=1)
    rows = ROWS
    if name == "reflect_imitation":
        made = ImitationMethod(recipe(name, "look"), Run.create("look", "method: x\n"))
        every = [tuple(made.sample(x, "policy", "").tokens.tolist()) for x in made.lessons]
        assert Counter(flat(once)) == Counter(every)
        rows = len(every)
    else:
        assert len(flat(once)) == rows == len(set(flat(once)))
    assert [len(s) for s in once] == [BATCH] * (rows // BATCH) + [rows % BATCH] * (rows % BATCH > 0)
    assert len(read_metrics("once")) == len(once)
    twice = flat(go(monkeypatch, name, "twice", epochs=2))
    # a row at the end of one epoch may be the first of the next one, and is then played once more in one group
    assert twice[:rows] == flat(once) and set(twice[rows:]) <= set(twice[:rows])
    other = flat(go(monkeypatch, name, "other", epochs=1, seed=1))
    assert other != flat(once) != sorted(flat(once))
    if name != "reflect_imitation":  # another seed has other lessons
        assert sorted(other) == sorted(flat(once))
    if name not in ("vrcli", "policy_gradient", "step_rl", "reflect"):
        assert Counter(twice) == {row: 2 * n for row, n in Counter(flat(once)).items()} and twice[rows:] != twice[:rows]


@pytest.mark.parametrize("name", ["policy_gradient", "vrcli", "step_rl", "reflect"])
def test_no_prompt_is_drawn_again_before_all_others_were(home, monkeypatch, name):
    """Seven steps of three rows are three passes over seven."""
    go(monkeypatch, name, "run", steps=7)
    plays = Counter(e.task.id for e in read_episodes("run/episodes"))
    assert len(plays) == ROWS and set(plays.values()) == {BATCH * (1 if name == "reflect" else PLAYED["n"])}


@pytest.mark.parametrize("name", [n for n in RECIPES if n not in ROUNDS])
def test_a_killed_run_and_one_that_is_made_longer_go_on_with_the_next_row(home, monkeypatch, name):
    go(monkeypatch, name, "whole", steps=5)
    go(monkeypatch, name, "part", steps=3, stop=3)
    go(monkeypatch, name, "part", steps=3, resume=True)
    go(monkeypatch, name, "part", steps=5, resume=True)
    assert diff_runs(Path("whole"), Path("part")) == []


def test_so_do_runs_with_overlap(home, monkeypatch):
    overlap = {"overlap": True, "learner": {"optim": {"lr": 1e-2}}}
    steps = go(monkeypatch, "policy_gradient", "whole", steps=5, **overlap)
    plain = go(monkeypatch, "policy_gradient", "plain", steps=5)
    assert steps == plain and len(set(flat(steps)[:ROWS])) == ROWS
    go(monkeypatch, "policy_gradient", "part", steps=5, stop=4, **overlap)
    assert go(monkeypatch, "policy_gradient", "part", steps=5, resume=True, **overlap) == steps
    assert diff_runs(Path("whole"), Path("part")) == []
    go(monkeypatch, "policy_gradient", "longer", steps=2, **overlap)  # its last step plays nothing ahead
    assert go(monkeypatch, "policy_gradient", "longer", steps=5, resume=True, **overlap) == steps


@pytest.mark.parametrize("name", ROUNDS)
def test_the_rounds_of_a_staged_method_walk_the_rows_too(home, monkeypatch, name):
    """Three rounds of three of seven rows: none comes back before the others were there."""
    if name == "lpr":
        c = recipe(name, "run")
        run = Run.create("run", "method: x\n")
        source = Round(c, run).source()
        found = [t.id for k in (1, 2, 3) for t in Round(c, run, k).asked(source)]
    elif name == "epo_rounds":
        go(monkeypatch, name, "run")
        found = flat(dict.fromkeys(e.task.id for e in read_segment(f"run/collect-{k}/all.jsonl")) for k in (1, 2, 3))
    else:
        found = flat(go(monkeypatch, name, "run"))
    assert len(set(found[:ROWS])) == ROWS


@pytest.mark.parametrize("task", [
    {"name": "math", "options": {"dataset": "gsm8k", "path": "gsm8k", "style": "plain"}},
    {"name": "logic", "options": {"path": "logic.jsonl"}},
    PROMPTS,
], ids=["math", "logic", "prompts"])  # fmt: skip
def test_the_rows_of_every_task_of_rows_are_walked(home, monkeypatch, task):
    choice = [{"context": f"c{k}", "question": f"q{k}", "options": ["a", "b"], "label": 0} for k in range(ROWS)]
    Path("logic.jsonl").write_text("".join(json.dumps(r) + "\n" for r in choice))
    model = {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 1024}}
    engine = {"max_num_seqs": 6, "max_len": 1024}
    found = go(monkeypatch, "policy_gradient", "run", task=task, epochs=1, model=model, engine=engine)
    assert [len(s) for s in found] == [3, 3, 1] and len(set(flat(found))) == ROWS


def test_further_starts_of_a_step_are_rows_that_it_has_not_had(home, monkeypatch):
    Path("reward.py").write_text("def score(answer):\n    return 1.0\n")  # no group teaches anything
    steps = go(monkeypatch, "policy_gradient", "run", steps=2, refill=1)
    assert [len(set(s)) for s in steps] == [6, 6]
    assert steps[0] == go(monkeypatch, "policy_gradient", "again", steps=1, refill=1)[0]


def test_a_task_that_makes_its_starts_has_no_epochs(home):
    for name in ("policy_gradient", "step_rl"):
        with pytest.raises(RecipeError, match="task 'arith' makes its starts, so it has no rows to pass over"):
            launch(get_method(name), recipe(name, "run", epochs=1, task={"name": "arith"}))
    Path("r.yaml").write_text(json.dumps({"method": "policy_gradient", "task": {"name": "arith"}, "epochs": 2}))
    done = CliRunner().invoke(app, ["train", "r.yaml", "--dry-run"])
    assert done.exit_code == 2 and "set steps in place of epochs" in done.output


def test_a_dry_run_says_how_many_steps_the_epochs_are(home):
    Path("r.yaml").write_text(json.dumps(recipe("policy_gradient", "run", epochs=2).model_dump(mode="json")))
    done = CliRunner().invoke(app, ["train", "r.yaml", "--dry-run"])
    assert done.exit_code == 0 and "epochs: 2 passes over 7 rows, 5 steps" in done.output, done.output


@pytest.mark.parametrize("name", [n for n in RECIPES if "minibatches" in get_config(n).model_fields])
def test_minibatches_are_shuffled_anew_in_each_pass(home, monkeypatch, name):
    cut, own = [], Learner.gradient

    def gradient(self, samples, *rest):
        cut.append([s.episode for s in samples])
        return own(self, samples, *rest)

    monkeypatch.setattr(Learner, "gradient", gradient)
    for out in ("run", "again"):
        go(monkeypatch, name, out, steps=1, n=4, minibatches=3, passes=2)
    drawn = [e.id for e in read_episodes("run/episodes")]
    first, second = flat(cut[:3]), flat(cut[3:6])
    assert sorted(first) == sorted(second) == sorted(drawn) and len({tuple(x) for x in (first, second, drawn)}) == 3
    assert cut[:6] == cut[6:] and [len(c) for c in cut[:6]] == [4] * 6
