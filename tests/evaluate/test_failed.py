"""Failed episodes are shown beside the success, may count as lost, and never make an empty result look like a
result."""

import json
import os
import pty
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import forked
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.evaluate.run import summarise
from trailmark.evaluate.stored_episodes import compare
from trailmark.evaluate.tables import format_interval
from trailmark.report.tables import evaluation_row
from trailmark.runs.episode_json import to_json
from trailmark.types import Episode, Failed, Invalid, Scored, Task, Turn


def episode(k, outcome, group=None):
    return Episode(
        f"{k}", Task(group or f"t{k}"), group or f"t{k}", (Turn("policy", (1,), (2, 3)),), {"self": outcome}, seed=1
    )


WON, LOST, BROKEN = Scored(1.0, True), Scored(0.0, False), Failed("engine: the prompt has 2048 tokens, and 1024 fit")
PLAYED = [
    *(episode(k, WON) for k in range(6)),
    *(episode(k, LOST) for k in (6, 7)),
    episode(8, BROKEN),
    episode(9, BROKEN),
]


def shell(*words):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert "Traceback" not in done.output, done.output
    return done


def write(path, episodes):
    path.write_text("".join(to_json(e) + "\n" for e in episodes))
    return path


def test_failed_counts_apart_or_as_lost():
    apart, lost = summarise(PLAYED), summarise(PLAYED, failed="lost")
    assert apart["metrics"]["success"]["value"] == 0.75 and apart["metrics"]["success"]["n"] == 8
    assert lost["metrics"]["success"]["value"] == 0.6 and lost["metrics"]["success"]["n"] == 10
    assert (apart["failed_as"], lost["failed_as"], lost["failed"], lost["scored"]) == ("apart", "lost", 2, 8)
    assert apart["metrics"]["success"]["failed"] == lost["metrics"]["success"]["failed"] == 2
    assert apart["metrics"]["reward"] == lost["metrics"]["reward"]  # a crash has no reward
    assert "2 of 10 episodes failed" in apart["warning"] and "1024 fit" in apart["warning"]
    assert "counted as lost" in lost["warning"] and "warning" not in summarise(PLAYED[:8])
    assert format_interval(apart["metrics"]["success"]).endswith("] (2 failed!)")
    no_notion = [episode(0, Scored(0.5)), episode(1, BROKEN)]
    assert "success" not in summarise(no_notion, failed="lost")["metrics"]
    assert "1 of 2 episodes are invalid" in summarise([episode(0, WON), episode(1, Invalid("x"))])["warning"]


def test_failed_tries_count_in_pass_at_k_as_lost():
    tries = [
        episode(f"{t}{k}", o, t) for t, os in (("a", (WON, BROKEN)), ("b", (LOST, LOST))) for k, o in enumerate(os)
    ]
    assert summarise(tries)["metrics"]["pass@1"]["value"] == 0.0  # start a is left out
    assert summarise(tries, failed="lost")["metrics"]["pass@1"]["value"] == 0.25


def test_the_table_and_the_json_warn_beside_the_success(tmp_path):
    file = write(tmp_path / "e.jsonl", PLAYED)
    for words, value, said in ([], 0.75, "in no average"), (["--failed", "lost"], 0.6, "counted as lost"):
        done = shell("eval", "--episodes", file, *words)
        result = json.loads(done.stdout.splitlines()[-1])
        assert done.exit_code == 0 and result["rows"][0]["metrics"]["success"]["value"] == value
        assert result["failed_as"] == (words or [0, "apart"])[1] == result["rows"][0]["failed_as"]
        assert (
            "(2 failed!)" in done.stdout
            and said in result["rows"][0]["warning"]
            and "warning: e: 2 of 10" in done.stdout
        )
    assert shell("eval", "--episodes", file, "--failed", "won").exit_code == 2


def test_compare_warns_and_counts_as_lost(tmp_path):
    a, b = (
        write(tmp_path / "a.jsonl", PLAYED),
        write(tmp_path / "b.jsonl", PLAYED[:8] + [episode(k, WON) for k in (8, 9)]),
    )
    apart, lost = (
        json.loads(shell("compare", a, b, "--json", "--failed", how).stdout)["differences"][0]
        for how in ("apart", "lost")
    )
    assert (apart["starts"], apart["value"]) == (8, 0.0) and (lost["starts"], lost["value"]) == (10, 0.2)
    done = shell("compare", a, b)
    assert "warning: a: 2 of 10 episodes failed" in done.stdout and "say nothing about other seeds" in done.stdout
    sets = {"a": PLAYED, "b": PLAYED}
    assert [d.starts for d in compare(sets, ["success", "reward"], failed="lost")] == [10, 8]


def test_the_report_says_how_many_failed_beside_the_success():
    row = evaluation_row("x", PLAYED)
    assert row["success"] == 0.75 and row["failed"] == 2 and "2 of 10 episodes failed" in row["warning"]
    assert evaluation_row("x", PLAYED, "lost")["success"] == 0.6 and evaluation_row("x", PLAYED, "lost")["n"] == 10


def test_nothing_scored_is_exit_code_1_with_the_reason(tmp_path):
    file = write(tmp_path / "all.jsonl", PLAYED[8:])
    done = shell("eval", "--episodes", file)
    assert done.exit_code == 1 and "nothing was scored for all" in done.stderr and "1024 fit" in done.stderr
    lost = shell("eval", "--episodes", file, "--failed", "lost")  # a model whose plays all failed has won none
    assert lost.exit_code == 0 and "0.000 [0.000, " in lost.stdout and "counted as lost" in lost.stdout
    assert json.loads(lost.stdout.splitlines()[-1])["rows"][0]["metrics"]["success"]["value"] == 0.0
    empty = write(tmp_path / "empty.jsonl", [])
    done = shell("eval", "--episodes", empty)
    assert done.exit_code == 1 and "there are no episodes" in done.stderr
    done = shell("compare", file, file)
    assert done.exit_code == 1 and "nothing was scored" in done.stderr


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_dead_server_is_exit_code_1_at_once(tmp_path):
    url, out = f"http://127.0.0.1:{free_port()}", tmp_path / "out.jsonl"
    for words in ([url], ["random", url]):
        done = shell("eval", *words, "mode=pickup", "--task", "taxi", "--n", "300", "--out", out)
        assert done.exit_code == 1 and f"{url} cannot be reached" in done.stderr and not out.exists()


def test_a_server_that_refuses_every_request_is_exit_code_1(tmp_path):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(400, "the prompt is too long")

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out = tmp_path / "out.jsonl"
    try:
        done = shell(
            "eval", f"http://127.0.0.1:{server.server_port}", "mode=pickup", "--task", "taxi", "--n", "3", "--out", out
        )
    finally:
        server.shutdown()
    assert done.exit_code == 1 and "3 of 3 plays of http://" in done.stderr and "answered 400" in done.stderr
    assert not out.exists()  # nothing that a second try would stumble over


def on_a_terminal(words, columns):
    """What a person sees: the command on a terminal of so many columns."""
    mine, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    done = forked.Popen(
        [sys.executable, "-m", "trailmark", *map(str, words)], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(mine, 65536)
        except OSError:
            break
        if not piece:
            break
        said += piece
    os.close(mine)
    return done.wait(), re.sub(r"\x1b\[[0-9;]*m", "", said.decode())


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_whole_words_and_no_json(tmp_path, columns):
    name = tmp_path / "a-rather-long-name-of-an-evaluation-with-reflection-and-no-negatives-at-all.jsonl"
    code, said = on_a_terminal(["eval", "--episodes", write(name, PLAYED)], columns)
    lines = said.splitlines()
    assert code == 0 and '{"command"' not in said
    assert all(len(line) <= columns for line in lines), max(lines, key=len)
    assert "0.750 [0.409, 0.929] (2 failed!)" in said and "8 + 2 failed" in said and "tokens" in said
    code, said = on_a_terminal(["eval", "--episodes", name, "--json"], columns)
    assert json.loads(said)["rows"][0]["scored"] == 8


def test_a_study_says_how_many_failed_and_may_count_them_as_lost(tmp_path):
    from trailmark.evaluate.measures import Budget, Measure, collect
    from trailmark.evaluate.study import Arm, Spec
    from trailmark.evaluate.tables import study_markdown

    for seed in (0, 1):
        run = tmp_path / "runs" / "a" / f"seed-{seed}"
        (run / "evaluation").mkdir(parents=True)
        write(run / "evaluation" / "end.jsonl", PLAYED)
        (run / "metrics.jsonl").write_text('{"step":1}\n')
    spec = Spec("a", tmp_path, (), "a", ("seed",), 0, Arm())
    read = {how: Measure(episodes="evaluation/end.jsonl", failed=how) for how in ("apart", "lost")}
    found = collect(read, Budget(steps=1), [spec], [], [0, 1], tmp_path)
    cells = found["arms"][0]["values"]
    assert (cells["apart"]["value"], cells["lost"]["value"], cells["apart"]["failed"]) == (0.75, 0.6, 4)
    assert "arm 'a', seed 1: 2 failed episodes count as lost in lost." in found["notes"]
    assert "measures.apart.failed=lost" in " ".join(found["notes"]) and found["measures"]["lost"]["failed"] == "lost"
    assert "(4 failed!)" in study_markdown({**found, "claims": []})


def test_the_tables_of_compare_and_study_fit_80_columns(tmp_path):
    from rich.console import Console

    from trailmark.evaluate.tables import difference_table, study_tables

    cell = {"value": 0.5, "low": 0.123, "high": 0.987, "method": "t", "n": 3, "seeds": [0.5]}
    measures = {m: {} for m in ("pickup", "dropoff", "full", "all three stages")}
    claim = "Reflect-RL, no negatives > Reflect-RL, advice shuffled on all three stages"
    result = {"name": "reflect-taxi", "measures": measures, "claims": [{**cell, "claim": claim, "verdict": "holds"}],
              "arms": [{"name": "Reflect-RL with a rather long name and another part of it",
              "values": dict.fromkeys(measures, cell)}]}  # fmt: skip
    difference = {**cell, "a": "studies/reflect-taxi/runs/reflect", "b": "studies/reflect-taxi/runs/plain",
                  "metric": "success",
                  "starts": 300, "sign_p": 0.0123, "verdict": "holds"}  # fmt: skip
    for width in (80, 100, 300):
        with open(tmp_path / f"{width}.txt", "w") as f:
            for item in [*study_tables(result, width), *difference_table([difference], width)]:
                Console(file=f, width=width).print(item)
        text = (tmp_path / f"{width}.txt").read_text()
        assert all(len(line) <= width for line in text.splitlines())
        assert text.count(" 0.500 [0.123, 0.987]") == 4 and text.count("+0.500 [+0.123, +0.987]") == 2
        assert ("…" in text) == (width < 300) or "studi…" in text
        words = {w for line in text.splitlines() for w in line.replace("│", " ").split()}
        assert {"Reflect-RL,", "shuffled", "negatives", "holds", "difference"} <= words  # no word is broken
