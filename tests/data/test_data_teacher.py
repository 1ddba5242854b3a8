"""A teacher behind a server: its requests, how its answers are read, and all its errors."""

import asyncio
import json

import pytest
from data_fixtures import teaching

from trailmark.ask.client import Refused, Unusable, open_teacher, run_limited
from trailmark.ask.store import Store
from trailmark.errors import DataError, TrailmarkError, Unfinished
from trailmark.methods.reflect.teacher import Exchange, Moment, Server, read_choice
from trailmark.tasks.base import Observation

SEEN = Observation(
    "We are here.\n",
    "List:\n0. cd src\n12. cat a.py\nb. id a.py\n",
    ("0", "12", "b"),
    ("cd src", "cat a.py", "id a.py"),
)
NOW = Moment("A world.", "Think.", SEEN, "12", "rule")


@pytest.mark.parametrize("said, label", [
    ("12", "12"), (" 12.\n", "12"), ("12. cat a.py", "12"), ("cat a.py", "12"), ("b", "b"), ("b.", "b"),
    ("Action: 12", "12"), ("My action is 3 or 12", "12"), ("I take action b now", "b"), ("option 0 it is, not 12", "0"),
    ("", None), ("13", None), ("a bold move", None), ("1", None),
])  # fmt: skip
def test_choices(said, label):
    assert read_choice(said, SEEN) == label


@pytest.fixture
def server():
    with teaching(lambda messages: "Well said.") as server:
        yield server


def quick(server, answers=None, **options):
    how = {"retries": 2, "backoff": 0.001, "deadline": 5.0, **options}
    return Server(open_teacher(server.url, "m", answers, **how))


def think(teacher, moment=NOW):
    return asyncio.run(teacher.reflect(moment))


def test_two_turns(server):
    server.script = lambda messages: "12" if "label" in messages[-1]["content"] else "Well said.  "
    teacher = quick(server)
    past = (Exchange("Before.\n", "We begin.", "cd docs"),)
    now = Moment("A world.", "Think.", SEEN, "12", "rule", past, "the best is 12.")
    thought = think(teacher, now)
    assert (thought, asyncio.run(teacher.choose(now, thought))) == ("Well said.", "12")
    (_, _, first), (path, headers, second) = server.asked
    told = [(m["role"], m["content"]) for m in second["messages"]]
    assert told == [
        ("system", "A world."), ("user", "Before.\nThink."), ("assistant", "We begin."), ("user", "What do you do?"),
        ("assistant", "cd docs"),
        ("user", "We are here.\nThink.\nThis is a spoiler for you alone, and must not be mentioned: the best is 12."),
        ("assistant", "Well said."),
        ("user", SEEN.menu + "Which of these do you do? Answer with its label and nothing else."),
    ]  # fmt: skip
    assert first["messages"] == second["messages"][:-2]  # no list of actions before the choice
    assert path == "/v1/chat/completions" and (second["model"], second["temperature"], second["top_p"]) == (
        "m",
        0.7,
        0.9,
    )
    assert "Authorization" not in headers


def test_keys(server):
    think(quick(server, api_key="k"))
    url = f"{server.url}/openai/deployments/gpt"
    think(Server(open_teacher(url, "gpt", api_key="k", api_version="2024-02-01", backoff=0.001)))
    (_, plain, _), (path, headers, _) = server.asked
    assert plain["Authorization"] == "Bearer k"
    assert path == "/openai/deployments/gpt/chat/completions?api-version=2024-02-01"
    assert headers["api-key"] == "k" and "Authorization" not in headers
    with pytest.raises(TrailmarkError, match="neither 'offline' nor an address"):
        open_teacher("localhost:80", "m")


def test_kept_answers(server, tmp_path):
    """Nothing is asked twice, not even by another process; a torn last line is mended."""
    file = tmp_path / "answers.jsonl"
    teacher = quick(server, file)
    assert think(teacher) == think(teacher) == think(quick(server, file)) == "Well said."
    assert len(server.asked) == 1
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"key": "to')
    stored = Store(file)
    assert [stored[k]["text"] for k in stored] == ["Well said."] and file.read_bytes() == whole
    file.write_bytes(whole + b"broken\n")
    with pytest.raises(DataError, match=r"answers.jsonl:2: "):
        Store(file)
    file.write_text(json.dumps({"key": "a"}) + "\n")
    with pytest.raises(DataError, match="is no line of this file of answers"):
        Store(file, text="text")


@pytest.mark.parametrize("faults, asked", [
    ([500, 503], 3), (["closed", 500], 3), (["garbage"], 2), (["hollow", "empty"], 3), ([429], 2),
])  # fmt: skip
def test_what_passes(server, faults, asked):
    server.faults = list(faults)
    assert think(quick(server)) == "Well said." and len(server.asked) == asked


@pytest.mark.parametrize("always, reason", [
    (500, "status 500 from the server"), ("closed", "no answer from the server"),
    ("garbage", "garbage from the server"),
    ("hollow", "garbage from the server"), ("empty", "garbage from the server"), ("slow", "no answer from the server"),
    (400, "status 400 from the server"),
])  # fmt: skip
def test_what_does_not(server, always, reason, tmp_path):
    server.always = always
    teacher = quick(server, tmp_path / "a", deadline=0.2 if always == "slow" else 5.0)
    with pytest.raises(Unusable) as caught:
        think(teacher)
    assert caught.value.reason == reason and not (tmp_path / "a").exists()  # a failure is not an answer
    server.always = "fine"
    assert think(quick(server)) == "Well said."


def test_one_that_is_gone(server):
    server.always = 503
    teacher = quick(server, retries=0)
    for _ in range(9):
        with pytest.raises(Unusable):
            think(teacher)
    with pytest.raises(Unfinished, match="10 requests in a row failed.*the same command asks only for what failed"):
        think(teacher)
    server.always = 401
    with pytest.raises(Refused, match="refuses every question"):
        think(quick(server))


@pytest.mark.parametrize("said, reason", [
    ("As the Spoiler says, go.", "mentions the spoiler"), ("I know that the best is 12. Go.", "mentions the spoiler"),
    ("a # Analyze:\nb", "marker"), (" # Action:\n3", "empty or holds a marker"),
])  # fmt: skip
def test_reflections_that_are_refused(server, said, reason):
    server.script = lambda messages: said
    with pytest.raises(Unusable, match=reason):
        think(quick(server), Moment("w", "t", SEEN, "12", "r", spoiler="the best is 12."))


def test_the_rest_behind_a_marker_is_cut(server):
    server.script = lambda messages: "Go on. # Action:\n12"
    assert think(quick(server)) == "Go on."


def test_in_order_and_at_once():
    running, most = [], []

    async def work(i):
        running.append(i)
        most.append(len(running))
        await asyncio.sleep(0.001 * (5 - i % 5))
        running.remove(i)
        return i * i

    assert asyncio.run(run_limited(range(20), work, 4)) == [i * i for i in range(20)] and max(most) == 4
    assert asyncio.run(run_limited([], work, 4)) == []

    async def fails(i):
        if i == 2:
            raise Refused("gone")
        await asyncio.sleep(10)

    with pytest.raises(Refused):
        asyncio.run(run_limited(range(20), fails, 4))


def test_the_same_question_at_the_same_time_is_asked_once(server, tmp_path):
    """A server that samples would give two answers, and a run that was stopped would go on with the other one."""
    teacher = quick(server, tmp_path / "answers.jsonl")

    async def together():
        return await asyncio.gather(*(teacher.say([{"role": "user", "content": c}], 9) for c in "aabab"))

    assert asyncio.run(together()) == ["Well said."] * 5
    assert [body["messages"][0]["content"] for _, _, body in server.asked].count("a") == len(server.asked) - 1 == 1
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2 and not teacher.client._asking


def test_a_question_that_failed_is_asked_again_by_who_waited(server):
    server.script = lambda messages: "" if len(server.asked) <= 3 else "Well said."  # three tries without a text
    teacher = quick(server)

    async def together():
        say = lambda: teacher.say([{"role": "user", "content": "a"}], 9)
        return await asyncio.gather(say(), say(), return_exceptions=True)

    first, second = asyncio.run(together())
    assert isinstance(first, Unusable) and second == "Well said." and len(server.asked) == 4
