"""Gold texts scored through a real server of ours equal those scored here, and a server that fails costs nothing."""

import asyncio
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.commands.serve import serving
from trailmark.config import ModelConfig, ServerConfig
from trailmark.engines.http import About
from trailmark.engines.local import LocalEngine
from trailmark.errors import DataError, JudgeError
from trailmark.methods.vrcli.baselines import BaselineFile, BaselineRow
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig
from trailmark.methods.vrcli.judge import LikelihoodJudge
from trailmark.models.load import load_model
from trailmark.runs.store import read_episodes, segments
from trailmark.score.base import Play
from trailmark.score.likelihood import TextScorer
from trailmark.types import Episode, Invalid, Task

SHAPE = {"layers": 1, "width": 32, "heads": 2, "context": 256}
SCORER = {"name": "tiny", "shape": SHAPE, "seed": 2}
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
ROWS = [(TALK, "Because of the rain."), (TALK, "a"), (TALK, "\nNobody knows."), (TALK, "<|im_end|> is text here."),
        (TALK[1:], "\n"), ("A plain context. ", "They went home.")]  # fmt: skip
RECIPE = str(Path(__file__).parents[2] / "recipes/prompts-grpo.yaml")
SMALL = ["prompts_per_step=3", "n=3", "sampling.max_tokens=6", "engine.max_num_seqs=9", "engine.max_len=96",
    "eval.every=0",
         "checkpoint.every=1", "model={name: tiny, shape: {layers: 1, width: 32, heads: 2, context: 96}}"]  # fmt: skip


def served(seed=2):
    lm = load_model(ModelConfig.model_validate({**SCORER, "seed": seed}))
    return serving(LocalEngine(lm, slots=4, max_len=256), "wise")


@pytest.fixture(scope="module")
def url():
    with served() as url:
        yield url


@pytest.fixture(scope="module")
def here():
    return TextScorer(load_model(ModelConfig.model_validate(SCORER)).freeze())


def scorer_at(url, cache=None, name="wise", **more):
    server = ServerConfig(address=url, model=name, retries=0, backoff=0.01, deadline=20, **more)
    return TextScorer(ModelConfig.model_validate(SCORER), cache, server)


@contextlib.contextmanager
def between(url):
    """A stand-in for the network: it passes requests on to `state["url"]`, loses numbers, or breaks the connection."""
    state = {"url": url, "does": "pass", "asked": 0}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.answer(httpx.get(state["url"] + self.path))

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state["asked"] += 1
            if state["does"] == "break":
                return  # the connection ends without an answer
            headers = {"Content-Type": self.headers["Content-Type"]}
            found = httpx.post(state["url"] + self.path, content=body, headers=headers, timeout=60)
            data = found.json()
            if state["does"] == "lose" and self.path == "/v1/score":
                data["data"][0]["token_logprobs"].pop()
            self.answer(found, data)

        def answer(self, found, data=None):
            raw = found.content if data is None else json.dumps(data).encode()
            self.send_response(found.status_code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state["address"] = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("rule", ["text", "turn", "template"])
def test_the_server_reads_what_the_model_here_reads(url, here, rule):
    there = scorer_at(url)
    found, want = there.likelihoods(ROWS, rule), here.likelihoods(ROWS, rule)
    assert [f.tokens for f in found] == [w.tokens for w in want]
    assert [f.logp for f in found] == pytest.approx([w.logp for w in want], abs=1e-4)
    as_vllm = scorer_at(url)  # the same server, asked as vLLM is: prompt log-probs of a completion
    as_vllm.lm.engine._about = About("vllm", ("wise",))
    other = as_vllm.likelihoods(ROWS, rule)
    assert [o.tokens for o in other] == [w.tokens for w in want]
    assert [o.logp for o in other] == pytest.approx([w.logp for w in want], abs=1e-4)


def test_the_reward_through_a_server_is_the_reward(url, here, tmp_path):
    """One code path for baseline and reward: improvements agree, and each baseline is asked for once."""
    settings = {"plan": "{prompt} Plan: {answer}", "reward": "linear", "chat": True, "model": SCORER}
    server = {"address": url, "model": "wise", "retries": 0}
    near = LikelihoodJudge(LikelihoodJudgeConfig.model_validate(settings), here.lm)
    far = LikelihoodJudge(LikelihoodJudgeConfig.model_validate({**settings, "server": server}))
    far.keep(tmp_path)
    plays = []
    for k, answer in enumerate(["", "a plan", "go home", "In the rain they went home."]):
        e = Episode(f"e{k}", Task(f"t{k % 2}"), "g", (), {"self": Invalid("")})
        plays.append(Play(e, f"Story {k % 2}.", answer, {"gold": "Home."}))
    mine, theirs = (asyncio.run(judge.judge(plays)) for judge in (near, far))
    assert [v.outcome.reward for v in theirs] == pytest.approx([v.outcome.reward for v in mine], abs=1e-5)
    assert len({round(v.outcome.reward, 6) for v in mine}) == 4
    notes = lambda found: [n for v in found for n in v.notes]
    assert [(n.name, n.episode) for n in notes(theirs)] == [(n.name, n.episode) for n in notes(mine)]
    for a, b in zip(notes(theirs), notes(mine)):
        assert a.values == pytest.approx(b.values, abs=2e-3)
    assert theirs[0].outcome.reward != 0 and far.source == "likelihood wise"
    lines = (tmp_path / "likelihoods.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 + 2  # the probe, two baselines, two scores without a plan


def test_a_server_of_another_model_or_tokenizer_is_refused(url, tmp_path):
    with pytest.raises(JudgeError, match=r"reward.server: http.* serves 'wise', but no model 'clever'\.$"):
        scorer_at(url, name="clever").check()
    lm = load_model(ModelConfig.model_validate(SCORER))
    lm.tokenizer.add_tokens(["the", "night"])  # so the ids of a text differ
    with pytest.raises(JudgeError, match=r"'wise' at http.* encodes a text as \[.*and the tokenizer here as"):
        TextScorer(lm, None, ServerConfig(address=url, model="wise", retries=0)).check()
    cache = tmp_path / "kept.jsonl"
    scorer_at(url, cache).likelihood("x", "y")
    scorer_at(url, cache).likelihood("x", "y")
    before = cache.read_bytes()
    with served(seed=3) as other, pytest.raises(JudgeError, match="kept.jsonl holds likelihoods of another model that"):
        scorer_at(other, cache).likelihood("x", "z")
    assert cache.read_bytes() == before


def test_baselines_of_a_server(url, here, tmp_path):
    """The file knows the served model by what it reads, not only by its name."""
    row, path = BaselineRow("a", TALK, "Because of the rain."), tmp_path / "b.jsonl"
    (found,) = BaselineFile(path, scorer_at(url)).get([row])
    assert found.logp == pytest.approx(here.likelihood(TALK, row.gold).logp, abs=1e-4)
    again = BaselineFile(path, scorer_at(url))
    assert again.get([row]) == [found] and again.computed == 0
    before = path.read_bytes()
    with served(seed=3) as other, pytest.raises(DataError, match="b.jsonl: .* of another model served as 'wise': use"):
        BaselineFile(path, scorer_at(other))
    with pytest.raises(DataError, match=r"b.jsonl: these baselines are of another model \(served wise, now "):
        BaselineFile(path, here)
    assert path.read_bytes() == before


def test_a_row_that_is_too_long_is_named(url, here):
    """By a model here, and by a server that says how much it reads."""
    for scorer in (here, scorer_at(url)):
        scorer.likelihood("x" * 200, "y")
        with pytest.raises(DataError, match=r"^row 'b' has 302 tokens .*, and the model reads 256: choose"):
            scorer.likelihoods([("x", "y"), ("x" * 300, "y")], names=["a", "b"])


def test_fewer_numbers_than_asked(url, tmp_path):
    with between(url) as network:
        there = scorer_at(network["address"], tmp_path / "kept.jsonl", concurrency=2)
        there.likelihoods(ROWS[:2])
        network["does"] = "lose"
        with pytest.raises(JudgeError, match=r"^reward.server: 'wise' scored \d+ tokens where \d+ were asked for\.$"):
            there.likelihoods(ROWS)
        there.files = {"b": Path("rows.jsonl")}
        said = r"^reward.server: rows.jsonl: row 'b': 'wise' scored \d+ tokens where \d+ were asked for\.$"
        with pytest.raises(JudgeError, match=said):
            there.likelihoods([ROWS[0], ROWS[-1]], names=["a", "b"])  # "a" is known already
        network["does"] = "pass"
        kept = (tmp_path / "kept.jsonl").read_text().splitlines()
        there.likelihoods(ROWS)
        assert len(kept) == 3 and (tmp_path / "kept.jsonl").read_text().splitlines()[:3] == kept


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["sun", "moon", "sea", "hill", "rain"]
    rows = [{"prompt": f"Sing of the {w}: ", "gold": f"a {w}!", "id": w} for w in words]
    Path("rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    def call(*words, code=0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        return " ".join(done.output.split())

    return call


def test_a_run_whose_server_fails_goes_on_as_if_it_had_not(shell, url):
    """It dies, loses numbers, and comes back with other weights: one sentence each, and nothing is lost."""
    with between(url) as network:
        server = f"{{address: '{network['address']}', model: wise, retries: 0}}"
        reward = f"reward={{kind: likelihood, reward: linear, model: {json.dumps(SCORER)}, server: {server}}}"
        train = lambda out, *words, code=0: shell(
            "train", RECIPE, "data=rows.jsonl", reward, f"out={out}", *SMALL, *words, code=code
        )
        train("whole", "steps=3")
        train("part", "steps=1")
        held = lambda: {p: p.read_bytes() for p in Path("part/episodes").iterdir()}
        before = held()
        network["does"] = "break"
        assert "error: reward.server: http" in train("part", "steps=3", "--resume", code=1)
        network["does"] = "lose"
        said = train("part", "steps=3", "--resume", code=2)
        assert "reward.server: 'wise' scored" in said and "were asked for." in said
        with served(seed=3) as other:
            network |= {"url": other, "does": "pass"}
            said = train("part", "steps=3", "--resume", code=2)
            assert "part/judge/likelihoods.jsonl holds likelihoods of another model that was served as 'wise'" in said
        assert held() == before and len(segments("part/episodes")) == 1
        network["url"] = url
        train("part", "steps=3", "--resume")
        assert "identical" in shell("diff", "whole", "part")


def test_a_function_with_a_scorer_behind_a_server(shell, url, here):
    Path("mine.py").write_text(
        "def gain(prompt, answer, row, scorer):\n"
        "    return scorer.improvement(prompt, prompt + answer, row['gold']) / 100\n"
    )
    server = f"{{address: '{url}', model: wise}}"
    reward = f"reward={{kind: function, path: mine.py:gain, model: {json.dumps(SCORER)}, server: {server}}}"
    shell("train", RECIPE, "data=rows.jsonl", reward, "out=run", *SMALL, "steps=1")
    for e in read_episodes("run/episodes"):
        prompt, answer = f"Sing of the {e.task.id}: ", e.turns[0].text
        want = here.improvement(prompt, prompt + answer, f"a {e.task.id}!") / 100
        assert e.outcome.reward == pytest.approx(want, abs=1e-5)


def test_the_command(shell, url, here):
    said = [("Why?", "It rained."), ("Who?", "The hen."), ("When?", "At dawn.")]
    talks = [{"id": f"r{k}", "messages": [{"role": "user", "content": x}, {"role": "assistant", "content": y}]}
             for k, (x, y) in enumerate(said)]  # fmt: skip
    Path("talks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))
    shell("data", "stories", "talks.jsonl", "--out", "out")
    words = ["improvement", "out/test.jsonl", "--model", "tiny", "--control", "gold", "--json"]
    lm = load_model(ModelConfig(name="tiny"))
    with serving(LocalEngine(lm, slots=4, max_len=256), "wise") as there:
        far = json.loads(shell(*words, "--server", there, "--served", "wise"))["arms"]["gold"]
        assert f"--server: {there} serves 'wise', but no model 'tiny'" in shell(*words, "--server", there, code=2)
    near = json.loads(shell(*words))["arms"]["gold"]
    assert far["improvement"]["value"] == pytest.approx(near["improvement"]["value"], abs=1e-3)
    assert far["plans"] == 1 and near["improvement"]["value"] != 0
    assert "--served is the model's name on a server" in shell(*words, "--served", "wise", code=2)
