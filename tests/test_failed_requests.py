"""Whatever asks a server: if the server dies half-way or refuses the key, the work is not done, says how many requests
failed and why, exits 1, and asks only for these the next time."""

import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import typer
from data_fixtures import packages
from data_fixtures import script as explores
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.engines import http_client
from trailmark.methods import method_names
from trailmark.methods.lpr.method import LprMethod
from trailmark.tasks.base import Observation, Step, TaskSource, World
from trailmark.types import Task


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, value):
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        self.answer(200, {"data": [{"id": "m", "owned_by": "vllm"}]})

    def do_POST(self):
        there = self.server
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if not raw:  # who asked has gone
            return None
        body = json.loads(raw)
        probe = "messages" not in body and (isinstance(body["prompt"], str) or there.probed is None)
        with there.guard:
            if probe and not isinstance(body["prompt"], str):
                there.probed = body["prompt"]
            dead = there.left is not None and there.left <= 0 and not probe
            empty = dead and there.empty
            if there.left is not None and not probe:
                there.left -= 1
            (there.failed if dead or there.refuses else there.answered).append(json.dumps(body, sort_keys=True))
            there.ends -= not probe
            if there.ends == 0 and not probe:
                os.kill(os.getpid(), signal.SIGTERM)
        if there.refuses:
            return self.answer(401, {"error": {"message": "the API key is wrong"}})
        if empty:
            return self.answer(200, {"choices": []})
        if dead:
            self.close_connection = True
            return None
        if "messages" not in body:
            ids = body["prompt"] if isinstance(body["prompt"], list) else []
            listed = [None, *({str(t): {"logprob": -1.0 - t / 1e4}} for t in ids[1:])]
            return self.answer(200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": listed}]})
        said = {"role": "assistant", "content": says(body["messages"])}
        return self.answer(200, {"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]})


def says(messages):
    text, last = messages[0]["content"], messages[-1]["content"]
    if "Spoil it." in last:
        return "Thought 1: I misread it.\nAction 1: Finish[The answer is A.]"
    if "Options:" in str(messages):
        return " I see.\nThought 2: And so.\nAction 1: Finish[The answer is B.]"
    if '"indexes"' in text:
        return '{"indexes": [1]}'
    if "Compare them" in text:
        return json.dumps({"id": text.rsplit('"id": "', 1)[1].split('"')[0], "good": "A"})
    if '"score"' in text:
        return json.dumps({"id": text.rsplit('"id": "', 1)[1].split('"')[0], "score": 7})
    if "QUERY1" in last or "Answer with its label" in last:
        return explores(messages)
    if "Rate from 1 to 5" in last:
        return "5"
    return "Ann went home with a lamp. She saw Tom. Action: 1"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http_client, "LONGEST_WAIT", 0.0)
    there = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    there.handle_error = lambda *_: None
    there.daemon_threads, there.guard = True, threading.Lock()
    there.ends = 0  # answers after which the process is told to end
    there.empty = False  # a server that fails: it answers without an answer, in place of no more
    there.left, there.refuses, there.answered, there.failed, there.probed = None, False, [], [], None
    there.url = f"http://127.0.0.1:{there.server_address[1]}"
    thread = threading.Thread(target=there.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield there
    there.shutdown()
    there.server_close()
    thread.join(5)


def dump(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


# --- what asks a server: each gives the words of a command, and those that let it go on in spite of failures


def data(name, *more):
    return lambda at, url: (
        [
            "data",
            *name,
            "--out",
            at / "out",
            "--teacher",
            url,
            "--model",
            "m",
            "--retries",
            "0",
            "--at-once",
            "1",
            *more,
        ],
        ["--failures", "0.9"],
    )


def taxi(at, url):
    return data(["taxi"], "--starts", "3")(at, url)


def explore(at, url):
    return data(["auto-explore", *map(str, packages(at)[:1])], "--files", "3", "--split", "exact")(at, url)


def books(at, url):
    chapters = [{"book": "b", "chapter": k + 1, "text": f"Ann had {k} lamps. Tom said no. " * 9} for k in range(5)]
    return data(["books", str(dump(at / "books.jsonl", chapters))])(at, url)


def stories(at):
    texts = [
        f"The {word} rained." for word in ("sky", "moon", "sea", "hill", "tree", "road", "sun", "bird", "fox", "day")
    ]
    talks = [{"id": f"r{k}", "split": "test", "messages": [{"role": "user", "content": f"Why {k}?"},
              {"role": "assistant", "content": text}]} for k, text in enumerate(texts)]  # fmt: skip
    done = CliRunner().invoke(app, ["data", "stories", str(dump(at / "talks.jsonl", talks)), "--out", str(at / "s"),
                                    "--by", "given"])  # fmt: skip
    assert done.exit_code in (0, 2), done.output
    if done.exit_code:
        for row in talks:
            row.pop("split")
        dump(at / "talks.jsonl", talks)
        done = CliRunner().invoke(
            app, ["data", "stories", str(at / "talks.jsonl"), "--out", str(at / "s"), "--test", "0.8"]
        )
        assert done.exit_code == 0, done.output
    return at / "s/test.jsonl"


def write(at, url):
    return ["write", stories(at), f"b={url}", "--out", at / "out", "--at-once", "1", "--samples", "3"], [
        "--failures",
        "0.9",
    ]


def judge(at, url):
    rows = stories(at)
    ids = [json.loads(x)["id"] for x in rows.read_text().splitlines()]
    systems = [f"{n}={dump(at / f'{n}.jsonl', [{'id': i, 'text': f'{n} {i}'} for i in ids])}" for n in ("x", "y")]
    (at / "c.json").write_text('{"good": "which is better"}')
    words = [
        "judge",
        rows,
        *systems,
        "--server",
        url,
        "--out",
        at / "out.csv",
        "--criteria",
        at / "c.json",
        "--retries",
        "0",
    ]
    return [*words, "--at-once", "1"], ["--failures", "0.9"]


def improvement(at, url):
    words = ["improvement", stories(at), "--model", "tiny", "--control", "gold", "--control", "empty", "--server", url]
    return [*words, "--served", "m", "--cache", at / "cache.jsonl", "--out", at / "out.jsonl"], ["--failures", "0.9"]


def evaluated(at, url):
    return ["eval", url, "--task", "arith", "--n", "12", "--out", at / "out.jsonl"], ["--failures", "0.9"]


def prompted(at, url):
    return ["eval", url, "--task", "taxi", "horizon=1", "--chat", "--n", "9", "--out", at / "out.jsonl"], [
        "--failures",
        "0.9",
    ]


def selected(at, url):
    said = [{"from": "human", "value": "go"}, {"from": "gpt", "value": "Strategy: ask"}]
    (at / "plays.json").write_text(json.dumps([{"conversations": [*said, *said], "score": k / 9} for k in range(9)]))
    words = ["data", "select", at / "plays.json", at / "out.jsonl", "--server", url, "--served", "m", "--retries", "0"]
    return [*words, "--at-once", "1"], ["--failures", "0.9"]


COMMANDS = {"data taxi": taxi, "data auto-explore": explore, "data books": books, "write": write, "judge": judge,
            "improvement": improvement, "eval": evaluated, "eval --chat": prompted,
            "data select": selected}  # fmt: skip
SAME = {"data alfworld": "data taxi"}  # the same code, for a world that needs games


def lpr(stage, *before):
    def words(at, url):
        row = {"context": "c", "options": ["x", "y"], "label": 1}
        dump(at / "q_train.jsonl", [{**row, "question": f"q{k}", "id": f"{k}"} for k in range(3)])
        seat = {"kind": "http", "address": url, "model": "m", "retries": 0, "concurrency": 1}
        taught = {"teacher": {"n": 3}, "sft": {"steps": 1}}
        recipe = {
            "method": "lpr", "out": str(at / "run"), "steps": 1, "sample": {"n": 3}, "sampling": {"max_tokens": 200},
            "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 1024}},
            "task": {"name": "logic", "options": {"dataset": "choice", "path": str(at / "q_train.jsonl")}},
            "seats": {"policy": seat, "teacher" if stage == "written" else "worsener": seat},
            **(taught if stage == "written" else {"worsen": {"instruction": "Spoil it."}}),
            "clean": {"split": "react"}, "states": {"start": 0.0, "ratio": 1.0}, "preference": {"steps": 1},
            "pairs": {"process": stage != "rewritten"},
        }  # fmt: skip
        (at / "r.yaml").write_text(json.dumps(recipe))
        for name in before:
            done = CliRunner().invoke(app, ["stages", str(at / "r.yaml"), "--only", name])
            assert done.exit_code == 0, done.output
        return ["stages", at / "r.yaml", "--only", stage], ["failures=0.95"]

    return words


def judged(**more):
    """A training whose plays, or whose evaluations, a server judges."""

    def words(at, url):
        rows = [{"prompt": f"p{k}", "id": f"{k}"} for k in range(4)]
        dump(at / "p.jsonl", rows)
        dump(at / "v.jsonl", [{"prompt": f"v{k}", "id": f"v{k}"} for k in range(6)])
        server = {"address": url, "model": "m", "retries": 0, "concurrency": 1}
        options = {"path": str(at / "p.jsonl"), "val": str(at / "v.jsonl"),
                   "reward": {"kind": "model", "rubric": "Good?", "server": server}}  # fmt: skip
        told = [{"prompt": row["prompt"], "response": f"r{n}", "reward": n} for row in rows for n in (0, 1)]
        learns = {"data": str(dump(at / "d.jsonl", told)), "format": "trajectories"}
        recipe = {
            "out": str(at / "run"), "steps": 1, "task": {"name": "prompts", "options": options},
            "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}},
            **(learns if more["method"] in ("oreo", "preference") else {}), **more,
        }  # fmt: skip
        (at / "r.yaml").write_text(json.dumps(recipe))
        resume = ["--resume"] if (at / "run/recipe.yaml").exists() else []
        return ["train", at / "r.yaml", *resume], ["failures=0.95"]

    return words


def played(*more):
    """An evaluation of a run, whose plays a server judges."""

    def words(at, url):
        made, _ = PLAYS(at, url)
        assert call(made)[0] == 0
        return ["eval", at / "run", "--split", "val", "--out", at / "out.jsonl", *more], ["--failures", "0.95"]

    return words


class Rooms(TaskSource, World):
    """A world with a list of actions that a judge judges."""

    name, markov, finite, judged = "rooms", True, True, True

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"room {k}", seed, {"k": k}) for k in range(6)][:n]

    def make(self):
        return Rooms()

    def reset(self, task):
        return Observation(f"room {task.data['k']}\n", "0. stay\n1. go\n", ("0", "1"), ("stay", "go"))

    def step(self, action):
        return Step(Observation("end"), 0.0, True, False)


def rooms(url):
    server = {"address": url, "model": "m", "retries": 0, "concurrency": 1}
    return {"name": f"{__name__}:Rooms", "options": {"reward": {"kind": "model", "rubric": "Good?", "server": server}}}


def reflects(at, url):
    """Reflect-RL in a world that a server judges."""
    recipe = {
        "method": "reflect", "out": str(at / "run"), "steps": 1, "task": rooms(url), "reflect": False,
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}},
        "sft": {"reflector": 0, "policy": 0}, "rl": {"prompts_per_step": 4}, "final": {"split": "train", "n": 1},
    }  # fmt: skip
    (at / "r.yaml").write_text(json.dumps(recipe))
    return ["train", at / "r.yaml"], ["failures=0.95"]


def rounds(at, url):
    dump(at / "p.jsonl", [{"prompt": f"p{k}", "id": f"{k}"} for k in range(4)])
    reward = {
        "kind": "model",
        "rubric": "Good?",
        "server": {"address": url, "model": "m", "retries": 0, "concurrency": 1},
    }
    recipe = {
        "method": "oreo_rounds", "out": str(at / "run"), "steps": 1, "training": 0, "collect": {"prompts": 4, "n": 3},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}},
        "task": {"name": "prompts", "options": {"path": str(at / "p.jsonl"), "reward": reward}},
        "eval": {"split": "all"},
    }  # fmt: skip
    (at / "r.yaml").write_text(json.dumps(recipe))
    resume = ["--resume"] if (at / "run/recipe.yaml").exists() else []
    return ["train", at / "r.yaml", *resume], ["failures=0.95"]


def advised(stage, *before):
    """A round of EPO: a server is the agent that is advised, or the judge."""

    def words(at, url):
        server = {"address": url, "model": "m", "retries": 0, "concurrency": 1}
        script = {"kind": "scripted", "function": "trailmark.tasks.negotiation.players:deaf"}
        strategist = {"kind": "local", "trained": True, "sampling": {"max_tokens": 3}}
        asks = stage == "judge-1"
        recipe = {
            "method": "epo_rounds", "out": str(at / "run"), "steps": 1, "training": 1,
            "collect": {"prompts": 4, "n": 2}, "eval": {"every": int(stage == "start"), "n": 4},
            "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 1024}},
            "task": {"name": "negotiation", "options": {"max_turns": 2}},
            "prompts": {"strategist": "{scene}", "agent": "{scene}"},
            "seats": {"strategist": strategist, "agent": script if asks else {"kind": "http", **server}},
            "judge": {"kind": "model", "model": {"server": server}} if asks else {"kind": "none"},
        }  # fmt: skip
        (at / "r.yaml").write_text(json.dumps(recipe))
        for name in before:
            assert call(["stages", at / "r.yaml", "--only", name])[0] == 0
        return ["stages", at / "r.yaml", "--only", stage], ["failures=0.95"]

    return words


def studied(at, url):
    judged(method="policy_gradient", prompts_per_step=4, n=2)(at, url)
    study = {"recipe": str(at / "r.yaml"), "arms": {"one": {}}, "seeds": [0], "budget": {"steps": 1},
             "measures": {"reward": {"metric": "reward"}}}  # fmt: skip
    (at / "s.yaml").write_text(json.dumps(study))
    return ["study", at / "s.yaml", "--out", at / "run"], ["set.failures=0.95"]


EVERY = {"every": 1, "split": "val"}
PLAYS = judged(method="policy_gradient", prompts_per_step=1, n=2)
STAGES = {
    "lpr written": lpr("written"),
    "lpr solutions": lpr("solutions"),
    "lpr completions": lpr("completions", "solutions", "cleaned", "states"),
    "lpr rewritten": lpr("rewritten", "solutions", "cleaned"),
    "oreo_rounds collect": rounds,
    "epo_rounds start": advised("start"),
    "epo_rounds collect": advised("collect-1"),
    "epo_rounds judge": advised("judge-1", "collect-1"),
    **{f"{name} steps": judged(method=name, prompts_per_step=4, n=2) for name in ("policy_gradient", "step_rl")},
    **{f"{name} eval": judged(method=name, eval=EVERY) for name in ("oreo", "preference")},
    "policy_gradient eval": judged(method="policy_gradient", prompts_per_step=1, n=2, eval=EVERY),
    "eval of a run": played(),
    "reflect steps": reflects,
    "policy_gradient in a study": studied,
}
ALL = {**COMMANDS, **STAGES}


def call(words):
    if words[0] == "train" and (words[1].parent / "run/recipe.yaml").exists() and "--resume" not in words:
        words = [*words, "--resume"]
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert "Traceback" not in done.output, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, " ".join(done.output.split())


def made(at):
    """The finished outputs: what a later command would read."""
    names = ("out/oracle", "out/train.jsonl", "out/rows.jsonl", "out/b.jsonl", "out.csv", "out.jsonl",
             "run/*/all.jsonl", "run/*/000.jsonl", "run/checkpoints/000001",
             "run/stages/collect-1.json", "run/judge-1/critical.jsonl",
             "run/start/untrained.jsonl", "run/study.json")  # fmt: skip
    return sorted(str(p) for name in names for p in at.glob(name))


@pytest.mark.parametrize("name", ALL)
def test_a_server_that_dies_half_way_is_no_finished_stage(name, server, tmp_path):
    words, _ = ALL[name](tmp_path, server.url)
    server.answered.clear()
    server.left, before = 3, made(tmp_path)
    code, said = call(words)
    assert code == 1 and "cannot be reached" in said and "failed" in said, said
    assert made(tmp_path) == before and server.failed
    asked = [x for x in server.answered if '"messages"' in x or '"prompt": [' in x]
    assert len(asked) >= 3
    server.left = None
    server.answered.clear()
    code, said = call(words)
    assert code == 0 and made(tmp_path) != before, said
    again = [x for x in server.answered if x in asked and x != asked[0]]  # the first may be the probe of a model
    assert not again and server.answered
    server.answered.clear()
    assert call(words)[0] == 0 or name.startswith(("eval", "improvement"))  # these refuse to write over their file
    assert not [x for x in server.answered if '"messages"' in x]


@pytest.mark.parametrize("name", ALL)
def test_a_key_that_is_refused_is_no_finished_stage(name, server, tmp_path):
    words, _ = ALL[name](tmp_path, server.url)
    server.refuses, before = True, made(tmp_path)
    code, said = call(words)
    assert code == 1 and "answered 401: the API key is wrong" in said, said
    assert made(tmp_path) == before


@pytest.mark.parametrize("name", ALL)
def test_an_answer_without_an_answer_is_a_failed_request(name, server, tmp_path):
    words, _ = ALL[name](tmp_path, server.url)
    server.left, server.empty, before = 3, True, made(tmp_path)
    code, said = call(words)
    assert code == 1 and "failed" in said and "the answer does not have the 1 choices" in said, said
    assert made(tmp_path) == before
    server.left = None
    assert call(words)[0] == 0 and made(tmp_path) != before


MANY = ("improvement", "eval", "eval --chat")  # send many questions at once


@pytest.mark.usefixtures("signals_heard")
@pytest.mark.parametrize("name", [n for n in ALL if n not in MANY])
def test_what_was_answered_before_a_signal_is_not_asked_again(name, server, tmp_path):
    words, _ = ALL[name](tmp_path, server.url)
    server.answered.clear()
    server.ends, before = 4, made(tmp_path)
    code, said = call(words)
    assert code == 143 and "stopped by SIGTERM" in said, said
    stages = ("lpr", "oreo_rounds", "epo_rounds", "eval")
    trains = name in STAGES and not name.startswith(stages)  # these end their step
    assert trains or made(tmp_path) == before
    asked = [x for x in server.answered if '"messages"' in x]
    server.answered.clear()
    assert call(words)[0] == 0 and made(tmp_path) != before
    # answers that came with the signal may be lost (a pair has two questions), and the first may be a probe
    assert not [x for x in server.answered if x in asked[1:2]]
    assert not list(tmp_path.glob("out.*.judge"))


def test_plays_of_a_random_player_that_nobody_judged_are_no_evaluation(server, tmp_path):
    task = rooms(server.url)
    words = ["--trust", "eval", "random", "--task", task["name"], f"reward={json.dumps(task['options']['reward'])}"]
    words += ["--n", "6", "--out", tmp_path / "out.jsonl"]
    server.left = 3
    code, said = call(words)
    assert code == 1 and "3 of 6 plays of random failed" in said and "Nothing was kept" in said, said
    assert not made(tmp_path)
    server.left = None
    assert call(words)[0] == 0 and made(tmp_path)


@pytest.mark.parametrize("search, judged_plays", [("best_of:2", 11), ("beam:2", 3)])  # of 12, and of 6
def test_a_search_among_plays_that_nobody_judged_is_no_evaluation(search, judged_plays, server, tmp_path):
    words, _ = judged(method="policy_gradient", prompts_per_step=1, n=2)(tmp_path, server.url)
    assert call(words)[0] == 0
    words = ["eval", tmp_path / "run", "--split", "val", "--search", search, "--value", "logp"]
    words += ["--out", tmp_path / "out.jsonl"]
    server.left = judged_plays
    code, said = call(words)
    assert code == 1 and "failed" in said and "Nothing was kept" in said, said
    assert not (tmp_path / "out.jsonl").exists()
    server.left = None
    assert call(words)[0] == 0 and (tmp_path / "out.jsonl").exists()


def test_a_search_at_the_end_of_a_training_that_nobody_judged_is_not_done(server, tmp_path):
    more = {"eval": {"split": "val"}, "final": {"search": ["best_of:2"]}}
    words, _ = judged(method="oreo", **more)(tmp_path, server.url)
    server.left = 3
    code, said = call(words)
    assert code == 1 and "plays failed" in said, said
    found = tmp_path / "run/evaluation/best_of-2.jsonl"
    assert (tmp_path / "run/checkpoints/000001").exists() and not found.exists()
    server.left = None
    assert call(words)[0] == 0 and found.exists()


def test_a_comparison_whose_plays_were_not_judged_is_none(server, tmp_path):
    words, _ = judged(method="policy_gradient", prompts_per_step=1, n=2, eval=EVERY)(tmp_path, server.url)
    assert call(words)[0] == 0
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    recipe = {"method": "sft", "steps": 1, "data": str(dump(tmp_path / "t.jsonl", [talk])),
              "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}}}  # fmt: skip
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/r.yaml").write_text(json.dumps({**recipe, "out": str(tmp_path / "sft/run")}))
    assert call(["train", tmp_path / "sft/r.yaml"])[0] == 0
    server.left = 0
    code, said = call(["compare", tmp_path / "run", tmp_path / "sft/run"])
    assert code == 1 and "6 of 6 plays of" in said and "cannot be reached" in said and "--out" in said, said


@pytest.mark.parametrize("name", ALL)
def test_a_stated_share_of_failures_is_accepted(name, server, tmp_path):
    words, more = ALL[name](tmp_path, server.url)
    server.left = 5
    code, said = call([*words, *more])
    enough = name not in ("data auto-explore", "data books")  # five answers make no data set there
    assert (code == 0 and made(tmp_path)) or not enough, said
    assert "requests in a row" not in said


def test_every_command_and_method_that_asks_a_server_is_walked():
    def commands(group, path=()):
        for name, inner in group.commands.items():
            yield from (
                commands(inner, (*path, name)) if hasattr(inner, "commands") else [(" ".join((*path, name)), inner)]
            )

    marks = {"teacher", "server", "served", "key_env"}
    asks = {name: c for name, c in commands(typer.main.get_command(app)) if marks & {p.name for p in c.params}}
    assert set(asks) == {n for n in (*COMMANDS, *SAME) if "--" not in n}
    assert all("failures" in {p.name for p in c.params} for c in asks.values())
    assert set(LprMethod.asked_seats) == {"policy", "teacher", "worsener"}
    silent = {"sft", "reward_model", "reflect_imitation"}  # play nothing, or before a judge is asked
    silent |= {"vrcli"}  # reads gold texts, all or none of a batch (tests/score/test_served_likelihood.py)
    silent |= {"epo"}  # learns from files; a server may be advised in its evaluations, which are played as a whole
    assert {name.split()[0] for name in STAGES} - {"eval"} == set(method_names()) - silent
