"""A run whose rewards are the largest numbers there are has a report like any other."""

import json
from dataclasses import replace

import pytest
import report_runs
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.report.tables import POINTS, curves
from trailmark.runs.episode_json import to_json
from trailmark.types import Scored

MOST = 1e308


@pytest.mark.parametrize("rewards", [(MOST, -MOST), (MOST, MOST), (MOST,), (1.0, -MOST)])
def test_a_report_of_the_largest_rewards(tmp_path, rewards):
    run = report_runs.make_run(tmp_path / "run")
    lines = [json.dumps({"step": k + 1, "reward": r, "eval/reward": r}) for k, r in enumerate(rewards)]
    run.metrics_file.write_text("\n".join(lines) + "\n")
    episodes = [
        replace(report_runs.episode(f"e{k}"), outcomes={"self": Scored(r, True)}) for k, r in enumerate(rewards)
    ]
    (run.path / "evaluation").mkdir()
    (run.path / "evaluation/end.jsonl").write_text("".join(to_json(e) + "\n" for e in episodes))
    done = CliRunner().invoke(app, ["report", str(run.path)])
    assert done.exit_code == 0, done.stderr
    assert (run.path / "plots/reward.png").is_file() and (run.path / "report.html").is_file()


def test_a_long_curve_of_the_largest_rewards_is_thinned():
    (panel,) = curves([{"step": k, "reward": MOST} for k in range(2 * POINTS)])
    assert len(panel["train"]) == POINTS and panel["train"][0][1] == MOST
