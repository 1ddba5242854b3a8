"""A language model as judge, over real connections: slow, dying, talkative, killed half-way. Nothing is asked twice,
and no failure becomes a number."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import pytest

sys.path.append(str(Path(__file__).parent))
from judging import judge_at, name, number, plays, serving_judge

from trailmark.ask.client import Unreadable
from trailmark.ask.store import Store
from trailmark.commands.serve import serving
from trailmark.engines.base import Completion
from trailmark.engines.http import HttpEngine
from trailmark.engines.local import LocalEngine
from trailmark.errors import JudgeError
from trailmark.score.config import ModelJudgeConfig
from trailmark.score.judge import ModelJudge, objects, read_mark
from trailmark.score.open_judge import open_judge
from trailmark.types import Failed, Scored


def ask(judge, n):
    return [v.outcome for v in asyncio.run(judge.judge(plays(n)))]


def mark(messages):
    return json.dumps({"id": name(messages), "score": number(messages)[0], "reason": "because"})


def test_marks_become_rewards_from_0_to_1(tmp_path):
    with serving_judge(mark) as (url, asked):
        judge = judge_at(
            url, tmp_path / "answers.jsonl", low=-5, high=15, success=0.5, rubric="Compare with {gold}: {answer}"
        )
        verdicts = asyncio.run(judge.judge(plays(8)))
        assert [v.outcome for v in verdicts] == [Scored((k + 5) / 20, (k + 5) / 20 >= 0.5) for k in range(8)]
        note = verdicts[3].notes[0]
        assert (note.episode, note.name, note.values, note.source) == ("e3", "judge_score", (3.0,), judge.stamp)
        assert set(asked.values()) == {1} and judge.asked == 8
        question = json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])["question"]
        k = int(question[len("Compare with ") :].partition(":")[0])
        # braces of an answer stay as they are
        assert question.startswith(f"Compare with {k}: answer <{k}> {{answer}}\n")
        again = judge_at(
            url, tmp_path / "answers.jsonl", low=-5, high=15, success=0.5, rubric="Compare with {gold}: {answer}"
        )
        assert asyncio.run(again.judge(plays(8))) == verdicts and again.asked == 0 and set(asked.values()) == {1}
        assert again.fingerprint == judge.fingerprint != judge_at(url, rubric="Another").fingerprint


def test_the_same_question_is_asked_once_even_at_once():
    with serving_judge(lambda m: (time.sleep(0.1), mark(m))[1]) as (url, asked):
        judge = judge_at(url)
        same = [plays(2)[1]] * 6
        assert [v.outcome for v in asyncio.run(judge.judge(same))] == [Scored(0.1)] * 6
        assert dict(asked) == {(1, 0): 1}


def test_prose_is_asked_again_and_then_fails():
    def answer(messages):
        k, times = number(messages)
        if k == 0:
            return f"Let me think {{a}} about it.\n```json\n{mark(messages)}\n```\nI hope {{this}} helps!"
        if k == 1:
            return "It is a fine answer, I would say nine of ten." if times == 0 else mark(messages)
        if k == 2:
            return "I cannot give marks."
        if k == 3:
            return json.dumps({"id": "another-episode", "score": 9})
        if k == 4:
            return json.dumps({"id": name(messages), "score": 99}) if times < 2 else mark(messages)
        return json.dumps({"score": str(k)})  # no id, and a number as text

    with serving_judge(answer) as (url, asked):
        found = ask(judge_at(url), 6)
    assert found[0] == Scored(0.0) and found[1] == Scored(0.1) and found[4] == Scored(0.4) and found[5] == Scored(0.5)
    assert isinstance(found[2], Failed)
    assert "gave no mark when asked 3 times: Your answer holds no JSON" in found[2].error
    assert isinstance(found[3], Failed) and "is for 'another-episode', not for '" in found[3].error
    assert sorted(k for k in asked if k[0] in (1, 2)) == [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert set(asked.values()) == {1}


def test_a_server_that_stumbles_is_asked_again_and_one_that_dies_fails_plays(tmp_path):
    down = {"until": 2}

    def answer(messages):
        if number(messages)[0] == 1 and down["until"] > 0:
            down["until"] -= 1
            return 503
        return 500 if number(messages)[0] == 2 else mark(messages)

    with serving_judge(answer) as (url, asked):
        found = ask(judge_at(url, tmp_path / "a.jsonl"), 4)
        assert [found[k] for k in (0, 1, 3)] == [Scored(0.0), Scored(0.1), Scored(0.3)]
        assert isinstance(found[2], Failed) and "judge 'wise'" in found[2].error and "500" in found[2].error
        assert asked[1, 0] == 3
    gone = judge_at(url, tmp_path / "a.jsonl")  # nobody listens there any more: what is known is still known
    found = ask(gone, 5)
    assert [found[k] for k in (0, 1, 3)] == [Scored(0.0), Scored(0.1), Scored(0.3)]
    assert all(isinstance(found[k], Failed) for k in (2, 4))


def test_a_slow_server_is_asked_many_at_a_time():
    busy, most, lock = [0], [0], threading.Lock()

    def answer(messages):
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        time.sleep(0.15)
        with lock:
            busy[0] -= 1
        return mark(messages)

    with serving_judge(answer) as (url, _):
        start = time.monotonic()
        assert ask(judge_at(url, at_once=4), 10) == [Scored(k / 10) for k in range(10)]
        assert most[0] == 4 and time.monotonic() - start < 10 * 0.15 * 0.9


RUN = """
import asyncio, sys
sys.path.insert(0, sys.argv[3])
from judging import judge_at, plays
found = asyncio.run(judge_at(sys.argv[1], sys.argv[2], at_once=3, high=20).judge(plays(12)))
print([v.outcome.reward for v in found])
"""


def test_killed_half_way_it_asks_nothing_twice_and_loses_nothing(tmp_path):
    cache, gate = tmp_path / "answers.jsonl", threading.Event()

    def answer(messages):
        k = number(messages)[0]
        if k >= 5 and not gate.is_set():
            gate.wait(60)
        return mark(messages)

    command = [sys.executable, "-c", RUN]
    with serving_judge(answer) as (url, asked):
        args = [url, str(cache), str(Path(__file__).parent)]
        first = forked.Popen([*command, *args], stdout=subprocess.PIPE, env=os.environ)
        while not cache.exists() or cache.read_bytes().count(b"\n") < 5:
            assert first.poll() is None
            time.sleep(0.02)
        while sum(asked.values()) < 8:  # three more are on their way
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
        first.wait()
        with cache.open("ab") as f:
            f.write(b'{"key": "half a li')  # the kill fell into a write
        before = dict(asked)
        gate.set()
        done = forked.run([*command, *args], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [k / 20 for k in range(12)]
    assert all(asked[k, 0] == 1 for k in range(5)), "what was answered was asked again"
    assert {k for (k, _), n in before.items() if n} == set(range(8)) and set(asked) == {(k, 0) for k in range(12)}
    lines = [json.loads(line) for line in cache.read_text().splitlines()]
    assert len(lines) == len({row["key"] for row in lines}) == 12


def test_reading_json_out_of_anything():
    assert objects('{"a": {"b": 1}} and {"c": 2}') == [{"a": {"b": 1}}, {"c": 2}]
    assert objects("no { json } here") == [] and objects('{"a": 1} {"cut": ') == [{"a": 1}]
    assert read_mark('First I thought {"score": 2}. Now {"id": "x", "score": 3}', "x", 0, 10) == 3.0
    for text, said in (
        ('{"score": null}', "not a number"),
        ('{"score": true}', "not a number"),
        ('{"score": "9/10"}', "not a number"),
        ('{"score": NaN}', "not from 0 to 10"),
        ('{"score": -1}', "not from 0 to 10"),
        ('{"mark": 3}', "no JSON object with a score"),
        ('{"id": "y", "score": 3}', "is for 'y'"),
        ("{" * 100_000, "no JSON"),
    ):
        with pytest.raises(Unreadable, match=said):
            read_mark(text, "x", 0, 10)


def test_our_own_server_and_a_local_model_say_the_same(make_lm):
    """A tiny model gives no marks. Both ways it is asked the same tokens, and both end as failed, never as a zero."""
    lm = make_lm("llama", pad_is_eos=False, context=4096)
    config = ModelJudgeConfig.model_validate({"model": {"name": "tiny"}, "max_tokens": 12, "again": 1})
    here = ModelJudge(config, LocalEngine(lm, 4, 2048))
    with serving(LocalEngine(lm, 4, 2048), "tiny-llama") as url:
        there = ModelJudge(config, HttpEngine(url, "tiny-llama"))
        mine, theirs = asyncio.run(here.judge(plays(2))), asyncio.run(there.judge(plays(2)))
    assert mine == theirs and all(isinstance(v.outcome, Failed) for v in mine) and here.asked == there.asked == 4
    assert here.client.store._known == there.client.store._known


def test_a_local_judge_is_opened_from_its_section(tmp_path):
    section = {
        "kind": "model",
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 1024}},
    }
    judge = open_judge({**section, "max_tokens": 4, "again": 0})
    judge.keep(tmp_path / "judge")
    assert judge.name == "tiny"
    assert isinstance(asyncio.run(judge.judge(plays(1)))[0].outcome, Failed)
    kept = [json.loads(x) for x in (tmp_path / "judge" / "answers.jsonl").read_text().splitlines()]
    assert len({k["key"] for k in kept}) == 1 and kept[-1]["unread"]


def test_a_template_that_asks_for_what_no_row_has():
    with serving_judge(mark) as (url, _):
        with pytest.raises(JudgeError, match=r"row 't0' has no key 'nope'.* It has: .*gold"):
            ask(judge_at(url, rubric="Compare with {nope}."), 1)
        assert ask(judge_at(url, rubric=r"Is it \boxed{nope}?"), 1) == [Scored(0.0)]


def test_a_server_of_another_model_is_told_before_anything_is_played(make_lm, tmp_path):
    with serving(LocalEngine(make_lm("llama"), 2, 128), name="small") as url:
        wrong = open_judge({"kind": "model", "server": {"address": url, "model": "large"}})
        with pytest.raises(JudgeError, match=r"reward.server: .* serves 'small', but no model 'large'"):
            wrong.keep(tmp_path / "judge")
        assert not (tmp_path / "judge").exists()
        open_judge({"kind": "model", "server": {"address": url, "model": "small"}}).keep(tmp_path / "judge")


def test_of_several_objects_the_one_for_the_question_counts():
    from trailmark.score.judge import read_object

    right, other = '{"id": "q1", "score": 7}', '{"id": "q2", "score": 1}'
    assert read_object(f"{right} and {other}", "q1", "score")["score"] == 7
    assert read_object('{"score": 3}', "q1", "score")["score"] == 3
    with pytest.raises(Unreadable, match="is for 'q2'"):
        read_object(other, "q1", "score")


def test_a_judge_that_is_mended_is_asked_again(tmp_path):
    """Prose three times is a failed play; with the same cache and a judge that answers, the play gets its mark."""
    judge = open_judge({"kind": "model", "server": {"address": "http://127.0.0.1:9", "model": "m"}, "again": 2})
    judge.client.store = Store(tmp_path / "answers.jsonl")
    said = ["I cannot say."]

    async def answer(question, draw):
        return Completion((), (), (), said[0], "stopped")

    judge.client.say = answer
    assert isinstance(asyncio.run(judge.judge(plays(1)))[0].outcome, Failed)
    assert judge.asked == 3
    asyncio.run(judge.judge(plays(1)))
    assert judge.asked == 3  # not again in this process
    mended = open_judge({"kind": "model", "server": {"address": "http://127.0.0.1:9", "model": "m"}, "again": 2})
    mended.client.store = Store(tmp_path / "answers.jsonl")
    said[0] = '{"score": 9}'
    mended.client.say = answer
    assert asyncio.run(mended.judge(plays(1)))[0].outcome.reward == 0.9
    again = open_judge({"kind": "model", "server": {"address": "http://127.0.0.1:9", "model": "m"}, "again": 2})
    again.client.store = Store(tmp_path / "answers.jsonl")
    assert asyncio.run(again.judge(plays(1)))[0].outcome.reward == 0.9 and again.asked == 0


def test_a_judge_that_can_write_only_marks(make_lm):
    """A model that has learnt nothing writes a mark, for the play that it is shown. Only a reason may be too long."""
    pytest.importorskip("llguidance")
    lm = make_lm("llama", context=2048)
    how = {"model": {"name": "tiny"}, "max_tokens": 120, "again": 0, "temperature": 1.0}
    free = ModelJudge(ModelJudgeConfig.model_validate(how), LocalEngine(lm, 4, 2048))
    bound = ModelJudge(ModelJudgeConfig.model_validate({**how, "constrained": True}), LocalEngine(lm, 4, 2048))
    assert free.fingerprint != bound.fingerprint and all(isinstance(o, Failed) for o in ask(free, 3))
    found, rows = ask(bound, 6), [bound.client.store[k] for k in bound.client.store]
    assert sum(isinstance(o, Scored) and 0 <= o.reward <= 1 for o in found) == sum(r["stop"] == "stopped" for r in rows)
    for row in rows:
        asked = re.findall(r'"id": "(\w+)"', row["question"])[-1]
        assert re.match(rf'{{"id": "{asked}", "score": [0-9.e+-]+', row["text"])


def test_a_judge_of_another_form_needs_its_schema():
    class Other(ModelJudge):
        def form(self, name):
            return "Say it."

    how = {"server": {"address": "http://127.0.0.1:9", "model": "m"}, "constrained": True}
    with pytest.raises(JudgeError, match="reward.constrained: Other has no `schema`: define one"):
        Other(ModelJudgeConfig.model_validate(how))
