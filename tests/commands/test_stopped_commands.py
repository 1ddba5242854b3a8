"""Every long command can be ended by a signal: it says how it goes on, and then makes what it would have made."""

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark import fault_points
from trailmark.commands.app import app
from trailmark.methods import quickstart
from trailmark.runs.diff import diff_runs

pytestmark = pytest.mark.usefixtures("signals_heard")

TINY = "model: {name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 128}}\n"
TINY += "engine: {max_num_seqs: 8, max_len: 128}\n"
REFLECT = """
method: reflect
out: OUT
steps: 2
task: {name: taxi, options: {mode: pickup, history: none, menu: false, walls: false}}
teacher: {prompts: 2}
sft: {reflector: 2, policy: 2, batch: 2}
rl: {prompts_per_step: 2}
final: {n: 2}
thought: 12
"""
LPR = f"""
method: lpr
out: OUT
steps: 1
task: {{name: arith, options: {{level: 2}}}}
seats: {{policy: {{kind: scripted, function: "{Path(__file__).parents[1]}/methods/lpr_careless.py:careless"}}}}
sample: {{prompts: 3, n: 8}}
sampling: {{max_tokens: 40}}
clean: {{distinct: false}}
states: {{start: 0.0, ratio: 1.0, shards: 2}}
labels: {{dev_shards: [0]}}
prm: {{steps: 3, batch: 8}}
pairs: {{margin: 0.001, best_of: null, max_wrong: null}}
preference: {{steps: 2, batch: 4}}
"""
ROUNDS = """
method: oreo_rounds
out: OUT
steps: 2
training: 2
batch: 8
task: {name: solved, options: {kind: bandit, form: turns, rewards: [0, 0, 0, 1]}}
collect: {prompts: 2, n: 8, sampling: {max_tokens: 4}}
"""
STUDY = """
recipe: bandit.yaml
arms: {group: {set: {credit: group}}, returns: {set: {credit: returns}}}
seeds: [0]
budget: {steps: 3}
measures: {learning: {metric: success, last: 3}}
"""
BANDIT = """
method: policy_gradient
out: OUT
prompts_per_step: 2
n: 2
task: {name: solved, options: {kind: bandit, rewards: [0, 0, 1]}}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipes = {"reflect": REFLECT, "lpr": LPR, "oreo_rounds": ROUNDS, "bandit": BANDIT}
    for name, text in recipes.items():
        Path(f"{name}.yaml").write_text(text + TINY)
    Path("study.yaml").write_text(STUDY)
    return monkeypatch


def shell(*words):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert "Traceback" not in done.stderr, done.stderr
    return done


def stopped(monkeypatch, point, *words, sign="SIGTERM"):
    """What the command says when a signal comes at that point of it."""
    fault_points._reached.clear()
    with monkeypatch.context() as m:
        m.setenv("TRAILMARK_KILL_AT", point)
        m.setenv("TRAILMARK_KILL_WITH", sign)
        done = shell(*words)
    assert done.exit_code == 128 + signal.Signals[sign], done.output
    return done.stderr


def made(folder, *left_out):
    """Every file by name, without records of time and place."""
    skipped = (".lock", "timings.jsonl", "recipe.yaml", "report.html", *left_out)
    files = (p for p in Path(folder).rglob("*") if p.is_file())
    kept = (p for p in files if not p.name.endswith(skipped) and not {"checkpoints", "ahead"} & set(p.parts))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in kept}


STAGES = {
    "reflect": {"stage.begun#2": "stage 'policy'", "checkpoint.begin#1": "stage 'reflector'", "segment.half#2": ""},
    "lpr": {"collected.after#5": "stage 'solutions-1'", "stage.begun#4": "", "checkpoint.begin#2": "stage 'policy-1'"},
    "oreo_rounds": {"collected.after#3": "stage 'collect-1'", "metrics.after#1": "stage 'round-1'"},
}


@pytest.mark.parametrize("method", STAGES)
def test_training_in_stages(here, method):
    """Which stage was ended, how to go on, and that it is then the same run."""
    train = ["train", f"{method}.yaml"]
    whole = shell(*train, "out=whole")
    assert whole.exit_code == 0, whole.output
    for k, (point, says) in enumerate(STAGES[method].items()):
        said = stopped(here, point, *train, f"out=run{k}")
        assert said.rstrip().endswith(f"go on with: trailmark train {method}.yaml out=run{k} --resume."), said
        assert says in said
        assert shell(*train, f"out=run{k}", "--resume").exit_code == 0
        assert diff_runs("whole", f"run{k}") == [] and made("whole", ".json") == made(f"run{k}", ".json")


def test_a_study(here):
    assert shell("study", "study.yaml", "--out", "whole").exit_code == 0
    said = stopped(here, "metrics.after#5", "study", "study.yaml", "--out", "s", sign="SIGHUP")
    assert "stopped by SIGHUP; step 2 is done and its checkpoint is written; stage 'runs/returns/seed-0' of s" in said
    assert "give the same command again: it keeps what is finished" in said
    assert shell("study", "study.yaml", "--out", "s").exit_code == 0
    assert json.loads(Path("s/study.json").read_text()) == json.loads(Path("whole/study.json").read_text())


def test_a_quickstart(here):
    short = {
        "sft": ["steps=2", "batch=2", "model.shape.layers=1", "model.shape.width=16", "model.shape.heads=2"],
        "data": ["collect.prompts=2", "collect.n=2", "collect.sampling.max_tokens=4"],
        "rejection": ["data=rows.jsonl", "format=trajectories", "steps=1", "batch=1", "eval.n=4"],
        "oreo": ["steps=1", "batch=2", "eval.n=4"],
    }
    here.setattr(quickstart, "further", short.__getitem__)
    here.setattr("trailmark.methods.oreo.quickstart.SUMS", 20)
    here.setattr("trailmark.report.plots._save", lambda figure, path: path)  # drawing takes a second
    Path("rows.jsonl").write_text('{"prompt": "1+1?\\n", "response": "2", "reward": 1}\n')
    words = ["quickstart", "--method", "oreo", "--out", "q"]
    for point in ("file.half", "collected.after#2", "checkpoint.begin#2"):
        again = ["--resume"] if Path("q").exists() else []
        said = stopped(here, point, *words, *again, sign="SIGINT")
        assert "stopped by the keyboard" in said and "trailmark quickstart --method oreo --out q --seed 0" in said
    assert shell(*words, "--resume").exit_code == 0 and Path("q/quickstart.json").is_file()


@pytest.mark.parametrize(
    ("words", "point"),
    [
        (["data", "taxi", "--starts", "4", "--out"], "play.after#2"),
        (["data", "hints", "--train", "8", "--val", "2", "--test", "2", "--lessons", "8", "--out"], "stage.begun"),
    ],
)
def test_data(here, words, point):
    assert shell(*words, "whole").exit_code == 0
    said = stopped(here, point, *words, "d")
    assert "stopped by SIGTERM" in said and "give the same command again: it keeps what is finished." in said
    assert shell(*words, "d").exit_code == 0
    assert made("whole") == made("d")


def test_an_evaluation_says_that_its_plays_are_not_kept(here):
    here.setattr("trailmark.evaluate.players.play_model", lambda *a: signal.raise_signal(signal.SIGTERM))
    done = shell("eval", "random", "--task", "arith")
    assert done.exit_code == 143
    assert done.stderr.endswith("stopped by SIGTERM; its plays are not kept; give the same command again.\n")


def test_an_evaluation_writes_nothing(here):
    assert shell("train", "bandit.yaml", "steps=1", "out=run").exit_code == 0
    words = ["eval", "run", "--n", "2", "--out", "played.jsonl"]
    said = stopped(here, "file.half", *words)
    assert said.endswith("stopped by SIGTERM; give the same command again.\n") and not Path("played.jsonl").exists()
    assert not list(Path().glob(".*.tmp")) and shell(*words).exit_code == 0
