"""Every command of docs/from/reflect-rl.md and docs/reflect.md is run, small; every key of their tables is one of
ours."""

import contextlib
import inspect
import json
import re
import shlex
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from from_pages import ROOT, commands, first_cell, keys_of, load_the_study, serve_up_to_the_port, shell, table, value_at
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import load_recipe, resolve
from trailmark.methods.reflect.method import ReflectRecipe
from trailmark.tasks.alfworld import Alfworld
from trailmark.tasks.auto_explore.source import AutoExplore
from trailmark.tasks.taxi import Taxi

PAGE, LESSONS = ((ROOT / name).read_text() for name in ("docs/from/reflect-rl.md", "docs/reflect.md"))
COMMANDS = list(dict.fromkeys(commands(PAGE + LESSONS)))
SERVERS = ("http://localhost:1234", "https://NAME.openai.azure.com", "https://api.openai.com")
SHAPE = {"family": "llama", "layers": 1, "width": 16, "heads": 2, "context": 2048}
TINY = {"model.shape": json.dumps(SHAPE), "steps": "3", "sft.reflector": "1", "sft.policy": "1", "sft.batch": "2",
        "rl.prompts_per_step": "2", "rl.replay_batch": "1", "final.n": "1", "engine.max_num_seqs": "4",
        "teacher.prompts": "2",
        "checkpoint.every": "1", "task.options.horizon": "4", "eval.n": "2"}  # fmt: skip
SFT = {"model.shape": json.dumps(SHAPE), "steps": "1", "batch": "2"}
FEW = {"--n": "2", "--samples": "1", "--max-tokens": "4", "--starts": "2"}

sys.path[:0] = [str(ROOT / "tests/tasks/alfworld"), str(ROOT / "tests/data")]


def on_the_page(start):
    """The words of the first command that begins so, as it stands there."""
    return next(shlex.split(c)[1:] for c in COMMANDS if c.startswith(f"trailmark {start}"))


def train(words, out):
    """A training command at toy size: what it says itself stays, except how many steps."""
    said = dict(w.split("=", 1) for w in words[2:])
    said |= {k: "1" for k in ("sft.reflector", "sft.policy") if int(said.get(k, 0)) > 1}
    kept = [f"{k}={v}" for k, v in said.items() if k not in ("steps", "out")]
    tiny = SFT if "reflect-sft" in words[1] else TINY
    few = [f"{k}={v}" for k, v in tiny.items() if k not in said or k == "steps"]
    return shell(*words[:2], *kept, *few, f"out={out}")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """What the commands find: recipes, repositories, games, data, and runs of two chained stages."""
    from data_fixtures import packages
    from small_home import write_download

    here = tmp_path_factory.mktemp("from-reflect")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        shutil.copytree(ROOT / "recipes", "recipes")
        packages(here / "repos")
        write_download(here / "data/alfworld", ["train", "valid_seen"])
        shell("data", "auto-explore", "repos/kettle", "repos/garden", "--split", "exact", "--out", "data/auto-explore")
        shell(
            "data",
            "taxi",
            "mode=full",
            "history=none",
            "menu=false",
            "walls=false",
            "--starts",
            "2",
            "--out",
            "data/taxi",
        )
        train(on_the_page("train recipes/reflect-explore.yaml sft"), "runs/explore-sft")
        train(on_the_page("train recipes/reflect-explore.yaml load"), "runs/explore-rl")
        shutil.copytree("runs/explore-sft", "runs/reflect-explore")
        train(on_the_page("train recipes/reflect-taxi-full.yaml teacher"), "runs/taxi-file")
        train(["train", "recipes/reflect-taxi-full.yaml"], "runs/reflect-taxi-full")
        yield here


@contextlib.contextmanager
def server():
    """A teacher for data and a player for evaluations, behind every route."""
    from data_fixtures import script

    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(self.path)
            plays = "Action: " in body["messages"][0]["content"]
            message = {"role": "assistant", "content": "Action: 0" if plays else script(body["messages"])}
            data = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{found.server_port}", asked
    finally:
        found.shutdown()
        found.server_close()


def smaller(words, tmp_path):
    """The same command with few plays, and what it writes put aside."""
    out = [w.replace("Tomato-None-Microwave", "Mug-None-Cabinet") for w in words]
    for option, few in FEW.items():
        if option in out:
            out[out.index(option) + 1] = few
    for option in ("--out", "--log"):
        if option in out:
            out[out.index(option) + 1] = str(tmp_path / Path(out[out.index(option) + 1]).name)
    if out[0] == "data" and out[1] in ("sft", "records"):
        out[3] = str(tmp_path / Path(out[3]).name)
    if out[0] == "eval" and "--episodes" not in out:
        out += [] if "--n" in out else ["--n", "2"]
        out += ["horizon=4"] if not any(w.startswith("horizon=") for w in out) else []
    if out[0] == "verify":
        out += ["--limit", "4"]
    return out


def earlier(command):
    """The stages of a data set that come before this one on the page."""
    if "--stage" not in command:
        return []
    return [c for c in COMMANDS[: COMMANDS.index(command)] if "--stage" in c]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.removeprefix("trailmark ")[:70])
def test_command(place, monkeypatch, tmp_path, command):
    monkeypatch.chdir(place)
    monkeypatch.setenv("AZURE_OPENAI_KEY", "k"), monkeypatch.setenv("OPENAI_API_KEY", "k")
    program, *words = shlex.split(command)
    assert program == "trailmark"
    if words[0] == "train" and "--dry-run" in words:
        assert "# model: " in shell(*words)
    elif words[0] == "train":
        train(words, tmp_path / "run")
    elif words[0] == "study":
        load_the_study(words)
    elif words[0] == "serve":
        serve_up_to_the_port(words)
    elif any(s in command for s in SERVERS):
        with server() as (url, asked):
            shell(*smaller([re.sub("|".join(SERVERS), url, w) for w in words], tmp_path))
        route = (
            "/openai/deployments/gpt-4/chat/completions?api-version=2024-10-21"
            if "azure" in command
            else "/v1/chat/completions"
        )
        assert asked and set(asked) == {route}
    elif words[0] == "prune":
        shutil.copytree(words[1], tmp_path / "run")
        shell("prune", str(tmp_path / "run"), *words[2:])
        assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    elif words[0] == "report":
        shell(*words, "--out", str(tmp_path / "report.html"), "--no-plots")
    elif words[0] == "verify":
        done = CliRunner().invoke(app, [*smaller(words, tmp_path), "--json"])
        checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
        bad = {name for name, c in checks.items() if c["status"] == "fail"}
        assert bad <= {"rewards"}, done.output  # two plays may well have one reward
        assert checks["replay"]["numbers"]["prompts_compared"] > 0
    else:
        for before in earlier(command):
            shell(*smaller(shlex.split(before)[1:], tmp_path))
        shell(*smaller(words, tmp_path))


def test_alfworld_is_trained_and_verified(place, monkeypatch, tmp_path):
    """Real stages in the small home, from the data of the page's own command; every prompt is repeated by verify."""
    monkeypatch.chdir(place)
    lessons = str(tmp_path / "lessons")
    shell("data", "alfworld", "games=data/alfworld", "--tokenizer", "tiny", "--starts", "2", "--out", lessons)
    # fmt: off
    train(["train", "recipes/reflect-alfworld-gpu.yaml", "model.name=tiny", "model.lora=null", "learner.amp=none",
           "engine.dtype=float32", f"teacher.path={lessons}", "engine.max_len=2048", "checkpoint.keep_last=9",
           "task.options.step_cost=0.01"], tmp_path / "run")
    # fmt: on
    from trailmark.verify import verify

    report = verify(tmp_path / "run", limit=4)
    assert {c.name for c in report.checks if c.status == "fail"} <= {"rewards"}
    assert report["replay"].status == report["sampler"].status == "pass"


OPTIONS = {k for kind in (Taxi, AutoExplore, Alfworld) for k in inspect.signature(kind).parameters}


@pytest.mark.parametrize("line", table(PAGE, "Flags"), ids=first_cell)
def test_every_key_is_a_key_of_a_recipe(line):
    ours, noted = keys_of(line)
    for key in ours + noted:
        name = key.split("=", 1)[0]
        needed = ["model.lora.rank=64"] if name.startswith("model.lora.") else ["rl.baseline=batch"]
        config = resolve(load_recipe(ROOT / "recipes/reflect-explore.yaml", [*needed, key]), ReflectRecipe)
        if name.startswith("task.options."):
            assert name.removeprefix("task.options.") in OPTIONS, name
            continue
        assert value_at(config, name) is not None, key


def test_the_page_knows_every_entry_point_and_flag():
    for name in (
        "filter_repo",
        "gen_task",
        "filter_task",
        "reflection_negative",
        "split_data",
        "gen_sft",
        "data_gen.taxi.reflection",
        "data_gen.alfworld.reflection",
        "supervised_pretrain.py",
        "rl_finetune.py",
        "visualization.plot",
        "evaluation.evaluate ",
        "auto_explore_gpt",
        "evaluate_gpt",
        "clean_checkpoints",
        "ensemble_logs",
        "--env",
        "--load_dir",
        "--reflect",
        "--reflect_load_dir",
        "--shuffle_action",
        "--shrink_head",
        "--depth_curriculum",
        "--merge_first_two",
        "--save_steps",
        "--task_file",
        "--max_steps",
        "--per_device_eval_batch_size",
        "--eval_reps",
        "--scenario",
        "--extra",
        "--runs",
        "--horizon",
        "--react",
        "--random",
        "--repo_dir",
        "--few_data",
        "--curriculum_index",
        "--first_step",
        "--easy",
        "--with_prompt",
        "--with_history",
        "--disable_dropout",
        "--sandbox_dir",
        "--cache_dir",
        "--leaveout_prob",
        "--entropy_coef",
        "--use_critic",
        "--shared_critic",
        "--reflect_prob",
        "--taxi_curriculum",
        "--disable_alfworld",
    ):
        assert name in PAGE, name
