"""Named evaluations belong to the loop: made when they are due, found again by a resume, made again when the run went
on."""

import numpy as np
import pytest

from trailmark.config import CheckpointConfig, EvalConfig, ModelConfig, ModelShape, RunConfig
from trailmark.errors import RunError
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Evaluation, Training, train
from trailmark.models.load import load_model
from trailmark.objectives.sft import Sft
from trailmark.runs.store import Run, read_metrics, read_segment, write_segment
from trailmark.types import Episode, Failed, Player, Sample, Scored, Task

MODEL = ModelConfig(shape=ModelShape(layers=1, width=16, heads=2, context=32))


def config(steps, **more):
    return RunConfig(method="toy", steps=steps, model=MODEL, checkpoint=CheckpointConfig(every=1), **more)


class Toy(Training):
    """Plays by writing down who played when. `dies` names an evaluation that is killed."""

    def __init__(self, steps, dies=""):
        self.learner = Learner({"policy": load_model(MODEL)}, config(steps).learner, total=steps)
        self.made, self.dies, self.seen = [], dies, 0

    def updates(self, step):
        yield Update([Sample(np.arange(4), {"weight": np.r_[0, 1, 1, 1.0]}, {"weight": 3.0})], Sft())
        self.seen = step

    def evaluate(self, step):
        return {"reward": -float(step)}

    def play(self, name, version, kind="trained"):
        assert self.seen in (0, version)  # the update of the step has been made
        if name == self.dies:
            raise KeyboardInterrupt
        self.made.append(name)
        return [Episode(name, Task("t"), "g", (), {"self": Scored(1.0)}, players={"p": Player(kind, version=version)})]

    def evaluations(self, step, last):
        if not last:
            return [Evaluation("half", lambda: self.play("half", step))] if step == 2 else []
        first = Evaluation("random", lambda: self.play("random", step, "scripted"), moves=False)
        return [Evaluation("end", lambda: self.play("end", step)), first]


def go(run, steps, resume=False, dies="", **more):
    method = Toy(steps, dies)
    train(method, config(steps, **more), run, resume)
    return method.made


def versions(run):
    found = sorted((run.path / "evaluation").glob("*.jsonl"))
    return {p.stem: read_segment(p)[0].players["p"].version for p in found}


def test_made_once_and_again_when_the_run_went_on(tmp_path):
    run = Run.create(tmp_path / "run", "method: toy\n")
    assert go(run, 3) == ["half", "end", "random"] and versions(run) == {"half": 2, "end": 3, "random": 3}
    assert go(run, 3, resume=True) == []
    (run.path / "evaluation/random.jsonl").unlink()
    assert go(run, 3, resume=True) == ["random"]
    assert go(run, 4, resume=True) == ["end"] and versions(run) == {"half": 2, "end": 4, "random": 3}


@pytest.mark.parametrize(("dies", "again"), [("half", ["half", "end", "random"]), ("end", ["end", "random"])])
def test_killed_in_an_evaluation(tmp_path, dies, again):
    """Training that was done stays done: only what is missing is made."""
    run = Run.create(tmp_path / "run", "method: toy\n")
    with pytest.raises(KeyboardInterrupt):
        go(run, 3, dies=dies)
    assert dies not in {p.stem for p in run.path.glob("evaluation/*.jsonl")}
    assert go(run, 3, resume=True) == again and versions(run) == {"half": 2, "end": 3, "random": 3}


def test_a_run_that_stopped_early_is_evaluated_where_it_stands(tmp_path):
    run = Run.create(tmp_path / "run", "method: toy\n")
    early = {"eval": EvalConfig(every=1, patience=1)}
    assert go(run, 9, **early) == ["half", "end", "random"] and versions(run) == {"half": 2, "end": 2, "random": 2}
    assert go(run, 9, resume=True, **early) == []


def test_an_evaluation_in_which_every_episode_failed_ends_the_run_and_says_why(tmp_path):
    """No number stands for it, and the checkpoint before it is still there."""

    class Fails(Toy):
        def evaluate(self, step):
            if step < 2:
                return {"reward": 1.0}
            broken = [
                Episode(f"e{k}", Task("t"), "g", (), {"self": Failed(why)})
                for k, why in enumerate(["door 3 is stuck", "x"])
            ]
            write_segment(self.run.path / "evaluation", step, broken)
            return {"failed": 2}

    with Run.create(tmp_path / "run", "method: toy\n") as run:
        method = Fails(3)
        method.run = run
        with pytest.raises(RunError) as said:
            train(method, config(3, eval=EvalConfig(every=1)), run)
    assert str(said.value) == "step 2: every episode of the evaluation failed; the first: door 3 is stuck"
    assert [p.name for p in sorted((tmp_path / "run/checkpoints").iterdir())] == ["000001"]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]


def test_an_evaluation_in_which_every_episode_is_invalid_has_no_metric_and_the_run_goes_on(tmp_path):
    class Odd(Toy):
        def evaluate(self, step):
            return {"invalid": 2, "failed": 0} if step == 2 else {"reward": float(step), "invalid": 0, "failed": 0}

    with Run.create(tmp_path / "run", "method: toy\n") as run:
        method = Odd(3)
        method.run = run
        train(method, config(3, eval=EvalConfig(every=1)), run)
    assert [row.get("eval/reward") for row in read_metrics(tmp_path / "run")] == [1.0, None, 3.0]
