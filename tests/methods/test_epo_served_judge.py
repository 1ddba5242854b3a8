"""`trailmark data select` against a real server that is slow, fails, answers prose and wrong numbers, and a kill."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from judging import serving_judge
from typer.testing import CliRunner

from trailmark.commands.app import app

N = 24


def items(path):
    made = []
    for k in range(N):
        said = [{"from": "human", "value": f"You play answer <{k}>."}, {"from": "gpt", "value": f"Strategy: {k}"},
                {"from": "human", "value": "and?"}, {"from": "gpt", "value": f"Strategy: again {k}"}]  # fmt: skip
        made.append({"conversations": said, "score": k % 11})
    path.write_text(json.dumps(made))
    return made


def of(messages):
    return int(messages[0]["content"].split("answer <")[1].split(">")[0])


def right(k):
    return [1] if k % 3 == 0 else [1, 3] if k % 3 == 1 else []


def reply(messages):
    """Slow; every fourth play is first answered with what cannot be read, each in a way of its own."""
    k, first = of(messages), len(messages) == 1
    time.sleep(0.02)
    if k % 4 == 1 and first:
        odd = ("I like the first one.", '{"indexes": [0]}', '{"indexes": [1, 9]}', '{"indexes": [1', "[1, 3]",
               "{'indexes': [1]}")  # fmt: skip
        return odd[k // 4]
    return f"Well {{so}}:\n{json.dumps({'indexes': right(k), 'reasoning': 'because {it} is [3]'})}"


def command(tmp_path, url):
    return ["data", "select", str(tmp_path / "in.json"), str(tmp_path / "out.json"), "--server", url, "--most", "10",
            "--at-once", "2"]  # fmt: skip


def test_right_labels_nothing_lost_and_nothing_asked_twice_after_a_kill(tmp_path):
    given = items(tmp_path / "in.json")
    with serving_judge(reply) as (url, asked):
        words = [sys.executable, "-m", "trailmark", *command(tmp_path, url)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        answers = tmp_path / "out.json.answers.jsonl"
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            if answers.exists() and answers.read_text().count("\n") >= 6:
                break
            time.sleep(0.005)
        process.kill()
        process.wait()
        kept = answers.read_text().count("\n")
        assert kept >= 6
        done = CliRunner().invoke(app, command(tmp_path, url))
        assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "out.json").read_text())
    assert [i["location"] for i in made] == [right(k) for k in range(N)]
    assert [[m["value"] for m in i["conversations"]] for i in made] == [
        [m["value"] for m in i["conversations"]] for i in given
    ]
    questions = N + sum(k % 4 == 1 for k in range(N))
    assert len(asked) == questions and sum(asked.values()) <= questions + 2  # those in flight when it was killed


def test_a_server_that_fails_leaves_what_it_answered_and_ends_with_one_sentence(tmp_path):
    items(tmp_path / "in.json")
    broken = [True]
    with serving_judge(lambda m: 400 if of(m) == 7 and broken[0] else reply(m)) as (url, asked):
        done = CliRunner().invoke(app, command(tmp_path, url))
        assert done.exit_code == 1 and "1 of 24 plays at the judge failed" in done.output, done.output
        assert not (tmp_path / "out.json").exists() and "--failures" in done.output
        before = sum(asked.values())
        done = CliRunner().invoke(app, [*command(tmp_path, url), "--failures", "0.1"])
        assert done.exit_code == 0 and "1 unjudged" in done.output and sum(asked.values()) == before + 1
        made = json.loads((tmp_path / "out.json").read_text())
        assert [k for k, i in enumerate(made) if "location" not in i] == [7]
        shaped = CliRunner().invoke(app, ["data", "shape", str(tmp_path / "out.json"), str(tmp_path / "rl.json")])
        assert shaped.exit_code == 2 and "key '[7].location': is missing: this item was not judged" in shaped.output
        broken[0] = False
        done = CliRunner().invoke(app, command(tmp_path, url))
        assert done.exit_code == 0 and "0 unjudged" in done.output and sum(asked.values()) == before + 2
    shape = ["data", "shape", str(tmp_path / "out.json"), str(tmp_path / "rl.json"), "--most", "10"]
    assert CliRunner().invoke(app, shape).exit_code == 0
    about = json.loads(Path(tmp_path / "rl.json.shape").read_text())
    assert about["trajectories"] == N and about["largest"] > 1
    again = CliRunner().invoke(app, shape)
    assert again.exit_code == 2 and "rl.json" in again.output  # it is never overwritten
    wrong = CliRunner().invoke(app, [*shape[:3], str(tmp_path / "x.json"), "--normalise", "all"])
    assert wrong.exit_code == 2 and "normalise" in wrong.output
