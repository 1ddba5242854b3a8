"""SIGTERM, SIGINT and SIGHUP end training after its step, with a checkpoint, and wall-clock time writes checkpoints."""

import json
import signal

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.learn import loop
from trailmark.methods.sft import SftMethod
from trailmark.runs import checkpoints
from trailmark.runs.diff import diff_runs
from trailmark.runs.store import read_metrics

pytestmark = pytest.mark.usefixtures("signals_heard")

RECIPE = """
method: sft
data: rows.jsonl
out: {out}
steps: 5
batch: 2
model: {{name: tiny, shape: {{layers: 1, width: 32, heads: 2, context: 64}}}}
learner: {{optim: {{lr: 1e-3, schedule: cosine}}}}
"""
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


@pytest.fixture
def trail(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"prompt": f"{a}+1=", "response": str(a + 1)}) + "\n" for a in range(6))
    (tmp_path / "rows.jsonl").write_text(rows)
    for name in ("whole", "run"):
        (tmp_path / f"{name}.yaml").write_text(RECIPE.format(out=f"runs/{name}"))
    return lambda *words: CliRunner().invoke(app, list(words))


def signalled(monkeypatch, at, *signs):
    """Send signals to this process inside step `at`, as another process would."""
    updates = SftMethod.updates

    def sent(self, step):
        yield from updates(self, step)
        for sign in signs if step == at else ():
            signal.raise_signal(sign)

    monkeypatch.setattr(SftMethod, "updates", sent)


def steps(folder):
    return [int(p.name) for p in checkpoints.listed(folder / "checkpoints")]


@pytest.mark.parametrize("sign", CODES)
def test_a_signal_ends_the_step_and_keeps_it(trail, tmp_path, monkeypatch, sign):
    assert trail("train", "whole.yaml").exit_code == 0
    before = signal.getsignal(sign)
    with monkeypatch.context() as m:
        signalled(m, 3, sign)
        done = trail("train", "run.yaml")
    assert done.exit_code == CODES[sign], done.output
    assert "step 3 is done and its checkpoint is written" in done.stderr
    assert "go on with: trailmark train run.yaml --resume" in done.stderr and "Traceback" not in done.stderr
    assert steps(tmp_path / "runs/run") == [3] and signal.getsignal(sign) is before
    assert trail("train", "run.yaml", "--resume").exit_code == 0
    assert diff_runs("runs/whole", "runs/run") == []


def test_the_first_and_the_last_step(trail, tmp_path, monkeypatch):
    """Also the last step is followed by evaluations, so a signal in it ends the run there."""
    for at in (1, 5):
        with monkeypatch.context() as m:
            signalled(m, at, signal.SIGTERM)
            done = trail("train", "run.yaml", f"out=runs/{at}")
        assert done.exit_code == 143 and steps(tmp_path / f"runs/{at}") == [at]


def test_the_checkpoint_of_a_signal_takes_no_place_of_others(trail, tmp_path, monkeypatch):
    words = ["checkpoint={every: 2, keep_last: 2}"]
    assert trail("train", "whole.yaml", "steps=6", *words).exit_code == 0
    for at, kept in ((3, [2, 3]), (5, [2, 4, 5])):
        with monkeypatch.context() as m:
            signalled(m, at, signal.SIGTERM)
            assert trail("train", "run.yaml", "steps=6", *words, *["--resume"] * (at > 3)).exit_code == 143
        assert steps(tmp_path / "runs/run") == kept
    assert trail("train", "run.yaml", "steps=6", *words, "--resume").exit_code == 0
    assert steps(tmp_path / "runs/run") == [4, 6] and diff_runs("runs/whole", "runs/run") == []


def test_a_second_signal_ends_at_once(trail, tmp_path, monkeypatch):
    """Without the rest of the step and without a checkpoint. One that was sent twice at once is one signal."""

    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", ended)
    signalled(monkeypatch, 3, signal.SIGTERM, signal.SIGINT)
    for apart, code, kept in ((0.0, 130, []), (60.0, 143, [3])):
        monkeypatch.setattr("trailmark.stopping.APART", apart)
        done = trail("train", "run.yaml", f"out=runs/{code}")
        assert done.exit_code == code, done.output
        assert steps(tmp_path / f"runs/{code}") == kept


def test_before_the_first_step_it_ends_at_once(trail, tmp_path, monkeypatch):
    def sent(self, config, run):
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as m:
        m.setattr(SftMethod, "__init__", sent)
        done = trail("train", "run.yaml")
    assert done.exit_code == 143 and "go on with: trailmark train run.yaml --resume" in done.stderr
    assert trail("train", "run.yaml", "--resume").exit_code == 0


def test_minutes_write_checkpoints_and_only_the_newest_of_them_stays(trail, tmp_path, monkeypatch):
    assert trail("train", "whole.yaml", "steps=9", "checkpoint.minutes=0").exit_code == 0
    assert steps(tmp_path / "runs/whole") == [9]
    now, seen = [0.0], []
    updates = SftMethod.updates

    def a_minute(self, step):
        now[0] += 60
        seen.append(steps(tmp_path / "runs/run"))
        yield from updates(self, step)

    monkeypatch.setattr(loop, "clock", lambda: now[0])
    monkeypatch.setattr(SftMethod, "updates", a_minute)
    assert trail("train", "run.yaml", "steps=9", "checkpoint.minutes=3").exit_code == 0
    assert seen == [[], [], [], [3], [3], [3], [6], [6], [6]] and steps(tmp_path / "runs/run") == [9]
    assert [str(d) for d in diff_runs("runs/whole", "runs/run")] == []
    assert read_metrics("runs/whole") == read_metrics("runs/run")


def test_writing_takes_at_most_a_tenth_of_the_time():
    at = [0.0]
    due = loop.Due(1.0, lambda: at[0])
    assert not due.now()
    at[0] = 60.0
    assert due.now()
    with due.saving():
        at[0] += 30.0
    at[0] += 299.0
    assert not due.now()
    at[0] += 1.0
    assert due.now()
    assert not loop.Due(0, lambda: at[0]).now()


def test_five_minutes_are_the_default_and_may_change_when_a_run_goes_on(trail, tmp_path):
    assert trail("train", "run.yaml", "steps=1").exit_code == 0
    assert "minutes: 5" in (tmp_path / "runs/run/recipe.yaml").read_text()
    assert trail("train", "run.yaml", "steps=1", "checkpoint.every=1", "out=runs/b").exit_code == 0
    done = trail("train", "run.yaml", "steps=2", "checkpoint={every: 1, minutes: 7}", "out=runs/b", "--resume")
    assert done.exit_code == 0, done.output


def test_from_python_the_callers_handler_is_asked_and_comes_back(trail, tmp_path, monkeypatch):
    """Whoever handles SIGTERM gets it after the checkpoint; SIGINT is a KeyboardInterrupt."""
    from trailmark.config import load_recipe
    from trailmark.methods import get_method, resolve_recipe
    from trailmark.runs.launch import launch

    heard = []
    mine = lambda sign, frame: heard.append(steps(tmp_path / "runs/run"))
    old = signal.signal(signal.SIGTERM, mine)
    try:
        for at, sign in ((2, signal.SIGTERM), (3, signal.SIGINT)):
            with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt) as stopped:
                signalled(m, at, sign)
                config = resolve_recipe(load_recipe(tmp_path / "run.yaml"))
                launch(get_method("sft"), config, resume=at > 2)
            assert any(f"step {at} is done" in note for note in stopped.value.__notes__)
            assert signal.getsignal(signal.SIGTERM) is mine
        assert heard == [[2]] and steps(tmp_path / "runs/run") == [3]
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_signal_that_is_ignored_stays_ignored(trail, tmp_path, monkeypatch):
    """nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signalled(monkeypatch, 3, signal.SIGHUP)
        assert trail("train", "run.yaml").exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, old)
