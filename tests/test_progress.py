import io
import json
import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from trailmark import progress
from trailmark.errors import RecipeError
from trailmark.progress import Phases, Progress, duration, rates, short_count, sparkline
from trailmark.runs.store import Run
from trailmark.trackers import Trackers, open_trackers


@pytest.fixture
def hands(monkeypatch):
    """A clock that is moved by hand."""
    now = SimpleNamespace(t=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.t)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now.t)
    return now


def test_numbers_for_people():
    assert [duration(s) for s in (4.2, 65, 3725, -1)] == ["4 s", "1:05", "1:02:05", "0 s"]
    assert [short_count(x) for x in (950, 999.6, 1234, 34_000, 1.5e6)] == ["950", "1.0k", "1.2k", "34k", "1.5M"]
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█" and sparkline([2, 2]) == "▄▄" and sparkline([]) == ""
    assert sparkline([float("nan"), 0, 1]) == "▁█"


def test_phases_count_who_took_the_time(hands):
    def make():
        for k in (1, 2):
            hands.t += 10
            yield k

    phases = Phases()
    for k in phases.through("collect", make()):
        with phases.phase("learn", tokens=100 * k):
            hands.t += 1
    phases.add("collect", 0, tokens=40)
    assert phases.numbers == {"collect_seconds": 20.0, "learn_seconds": 2.0, "learn_tokens": 300, "collect_tokens": 40}
    assert rates(phases.numbers) == {"collect": 2.0, "learn": 150.0}
    assert rates({"seconds": 2.0, "learn_seconds": 0.0, "learn_tokens": 5}) == {}


def test_plain_lines_when_nobody_watches(hands, capsys):
    with Progress(100, 10, "demo") as p:
        for step in range(11, 101):
            hands.t += 2
            p.update(
                step,
                {"reward": step / 100, "lr": 1.0, "eval/success": 0.5},
                {"learn_seconds": 2.0, "learn_tokens": 3000},
            )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "demo 11/100  reward 0.11  eval/success 0.5  learn 1.5k tok/s  2:58 left"
    assert (
        lines[1].startswith("demo 17/100") and lines[-1] == "demo 100/100  reward 1  eval/success 0.5  learn 1.5k tok/s"
    )
    assert len(lines) == 1 + 14 + 1  # the first, one every six steps of two seconds, the last


def test_the_view(hands):
    p = Progress(10, 0, "demo")
    for step in range(1, 6):
        hands.t += 60
        extra = {"eval/reward": 0.75, "eval/turns": 3.0} if step == 4 else {}
        p.update(
            step,
            {"reward": float(step), "entropy": 0.5, "grad_norm": 3.0, **extra},
            {"collect_seconds": 2.0, "collect_tokens": 90},
        )
    screen = io.StringIO()
    Console(file=screen, width=80).print(p.view())
    text = screen.getvalue()
    assert "5/10" in text and "5:00 5:00 left" in text and "collect 45 tok/s" in text
    assert "▁▃▅▇█" in text and "evaluation at step 4  reward 0.75" in text and "grad_norm" not in text


def test_a_terminal_gets_the_live_view():
    code = (
        "from trailmark.progress import Progress\n"
        "with Progress(3, 0, 'demo') as p:\n"
        "    for s in (1, 2, 3): p.update(s, {'reward': s / 4})\n"
    )
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, env=env, timeout=120)
    os.close(theirs)
    seen = b""
    try:
        while more := os.read(ours, 65536):
            seen += more
    except OSError:
        pass  # the reader has closed the pipe
    os.close(ours)
    text = seen.decode()
    assert "╭" in text and "3/3" in text and "0.75" in text and "demo 3/3" not in text


# --- trackers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", "method: demo\nname: demo\n") as made:
        yield made


def test_unknown_and_missing_trackers_are_sentences(run, monkeypatch):
    with pytest.raises(RecipeError, match=r"no tracker 'tensorbord'. Did you mean 'tensorboard'\?"):
        open_trackers(["tensorbord"], run)
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
        with pytest.raises(RecipeError, match=rf"'{name}' is not installed .*pip install 'trailmark\[trackers\]'"):
            open_trackers([name], run)
    assert open_trackers([], run).open == {}


def fake(log):
    """A module that looks like trackio and wandb and writes down what it is told."""
    note = lambda name: lambda *a, **k: log.append((name, *a, *([k] if k else []))) or made
    made = SimpleNamespace(log=note("log"), finish=note("finish"), init=note("init"))
    return made


def test_trackers_hear_every_step(run, monkeypatch):
    for name in ("trackio", "wandb"):
        log: list = []
        monkeypatch.setitem(sys.modules, name, fake(log))
        trackers = open_trackers([name], run, {"name": "demo", "steps": 2}, resumed_at=0)
        trackers.log(1, {"reward": 0.5, "note": "text"})
        trackers.close()
        assert (
            log[0][0] == "init" and log[0][1]["name"] == "demo" and log[0][1]["config"] == {"name": "demo", "steps": 2}
        )
        assert log[1:] == [("log", {"reward": 0.5}, {"step": 1}), ("finish",)]


def test_a_dashboard_that_is_away_does_not_stop_the_run(capsys):
    heard = []
    broken = SimpleNamespace(log=lambda *_: 1 / 0, close=lambda: heard.append("broken closed"))
    good = SimpleNamespace(log=lambda s, m: heard.append((s, m)), close=lambda: heard.append("closed"))
    trackers = Trackers({"wandb": broken, "tensorboard": good})
    trackers.log(1, {"x": 1})
    trackers.log(2, {"x": 2})
    trackers.close()
    assert heard == [(1, {"x": 1}), (2, {"x": 2}), "closed"]
    assert (
        capsys.readouterr().err
        == "tracker 'wandb' failed and is not used any more: ZeroDivisionError: division by zero\n"
    )


def test_tensorboard_files_hold_the_numbers(run):
    pytest.importorskip("tensorboard", reason="the extra 'trackers' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(["tensorboard"], run)
    for step in (1, 2):
        trackers.log(step, json.loads(f'{{"reward": {step}.5}}'))
    trackers.close()
    found = EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("reward")] == [(1, 1.5), (2, 2.5)]


@pytest.mark.parametrize("every", [10, 25, 50, 7])
def test_the_time_left_does_not_jump_at_an_evaluation(hands, every):
    """Steps of 0.1 s, evaluations of 5 s, a slow first step, and a disk that stalls twice: 6 -> 57 -> 6 s before."""
    total = 200
    took = {
        k: 0.1 + (5.0 if k % every == 0 or k == total else 0.0) + 3.0 * (k == 1) + 2.0 * (k in (63, 141))
        for k in range(1, total + 1)
    }
    p = Progress(total)
    guesses = {}
    for step in range(1, total + 1):
        hands.t += took[step]
        p._keep(step, {"loss": 1.0, **({"eval/success": 0.5} if took[step] > 5 else {})}, None)
        guesses[step] = p.left()
    truth = {step: sum(took[k] for k in range(step + 1, total + 1)) for step in took}
    known = range(2 * every, total)  # two evaluations have been seen
    assert all(0.75 * truth[s] - 0.5 <= guesses[s] <= 1.25 * truth[s] + 0.5 for s in known), [
        (s, guesses[s], truth[s]) for s in known if not 0.75 * truth[s] - 0.5 <= guesses[s] <= 1.25 * truth[s] + 0.5
    ]
    for s in known[1:]:  # it falls from step to step, and hardly ever rises
        assert guesses[s] - guesses[s - 1] <= 0.1 * guesses[s - 1] + 0.1
    assert guesses[2] <= 2 * 0.1 * 198 and guesses[total] == 0.0  # the slow first step is not the pace


def test_the_time_left_follows_a_pace_that_changes(hands):
    p = Progress(1000)
    for step in range(1, 501):
        hands.t += 0.1 if step < 400 else 0.4
        p._keep(step, {}, None)
    assert p.left() == pytest.approx(200.0)  # not the mean since the beginning
    assert Progress(10).left() is None
