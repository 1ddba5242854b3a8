"""A method of one's own (sixth_method.py), written with public names alone: every command works on its runs, a killed
run goes on, and mistakes are told in a sentence."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import forked
import httpx
import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.commands.serve import serving
from trailmark.config import ModelConfig
from trailmark.engines.local import LocalEngine
from trailmark.methods.sft import conversation_samples
from trailmark.models.load import load_model
from trailmark.runs.store import read_annotations, read_episodes, read_metrics, read_segment
from trailmark.seats.model_names import load_tokenizer

HERE = Path(__file__).parent
FILE, PAGE = HERE / "sixth_method.py", HERE.parents[1] / "docs/write-a-method.md"
TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 128}}
WORDS = ["sun", "moon", "sea", "hill", "rain", "wind"]
ROWS = [{"prompt": f"Sing of the {w}.", "id": w, "letters": 20} for w in WORDS]
HINTS = [{"prompt": f"Sing of the {w}.", "response": f"say {w}"} for w in WORDS]


def blocks(kind):
    """The code blocks of the page."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.S)


FUNCTION = blocks("python")[0]  # the judge of the page; every other block is of the method


def write_files(folder, url):
    """The files of a user, as the page has them; smaller sizes."""
    for name, rows in (("rows.jsonl", ROWS), ("hints.jsonl", HINTS)):
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "my_file.py").write_text(FUNCTION)
    recipe = yaml.safe_load(blocks("yaml")[0])
    recipe |= {
        "out": "run",
        "steps": 3,
        "model": TINY,
        "engine": {"max_num_seqs": 6, "max_len": 128},
        "eval": {"every": 3, "n": 2},
    }
    recipe |= {"checkpoint": {"every": 1, "keep_last": 9}, "imitation": recipe["imitation"] | {"steps": 2, "batch": 2}}
    recipe["seats"]["adviser"]["sampling"] = {"max_tokens": 5}
    recipe["seats"]["actor"] |= {"address": url, "sampling": {"max_tokens": 6}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    shutil.copy(FILE, folder)


@pytest.fixture(scope="module")
def url():
    with serving(LocalEngine(load_model(ModelConfig.model_validate({**TINY, "seed": 5})), 6, 128), "small") as url:
        yield url


@pytest.fixture(scope="module")
def whole(tmp_path_factory, url):
    """The folder of a user, who is in it, with a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("sixth")
    write_files(folder, url)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        sys.modules.pop("sixth_method", None)
        shell("train", "recipe.yaml")
        yield folder


def shell(*words, code=0):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return " ".join(done.output.split())


def refused(*words):
    """The one sentence of a command that ends with exit code 2."""
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output
    (line,) = [s for s in done.stderr.splitlines() if s.startswith("error: ")]
    return line


def held(folder):
    """The files of a run that count."""
    files = [
        p
        for p in Path(folder).rglob("*")
        if p.is_file() and p.name not in ("recipe.yaml", "report.html", "verify.json")
    ]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if not p.name.endswith(".lock")}


# --- the file and the page -----------------------------------------------------------------------------------------


def test_it_is_short_and_uses_public_names_alone():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 150 and max(map(len, text.splitlines())) <= 120
    tree = ast.parse(text)
    names = [
        n
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for n in (*node.module.split("."), *(a.name for a in node.names))
    ]
    names += [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert [n for n in names if n.startswith("_") and n != "__init__"] == []
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert "trailmark" in names and not {"setattr", "getattr", "__dict__"} & used


def test_the_page_shows_what_is_run():
    text = FILE.read_text()
    for code in blocks("python")[1:]:
        assert code in text, code
    shown = [[json.loads(line) for line in block.splitlines()] for block in blocks("json")]
    assert len(blocks("python")) > 8 and shown == [ROWS[:4], HINTS[:4]]
    commands = [line.split()[1] for block in blocks("sh") for line in block.splitlines()]
    assert set(commands) == {"train", "eval", "report", "inspect", "verify", "serve"}


def test_the_files_of_the_page_are_all_that_a_user_needs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (rows, hints), (recipe,) = blocks("json"), blocks("yaml")
    files = {"rows.jsonl": rows, "hints.jsonl": hints, "my_file.py": FUNCTION, "recipe.yaml": recipe}
    for name, text in files.items():
        Path(name).write_text(text)
    shutil.copy(FILE, tmp_path)
    assert "# hints: 4 to imitate for 20 steps" in shell("train", "recipe.yaml", "--dry-run")


# --- every command -------------------------------------------------------------------------------------------------


def test_a_dry_run_says_who_sits_where_and_makes_nothing(whole, url):
    said = shell("train", "recipe.yaml", "out=dry", "--dry-run")
    assert f"# seat actor: small at {url} (chat)" in said and "# seat adviser: the model that is trained" in said
    assert "# hints: 6 to imitate for 2 steps" in said and not Path("dry").exists()


def test_the_adviser_is_taught_and_then_earns_what_its_hints_led_to(whole):
    # The first stage: a run of its own. Its schedule falls to 0, and it imitates behind the prompts of play.
    imitated = read_metrics("run/policy")
    assert [row["lr"] for row in imitated] == [0.01, 0.005] and imitated[1]["loss"] < imitated[0]["loss"]
    episodes = list(read_episodes("run/episodes"))
    assert len(episodes) == 3 * 2 * 3 and [len(e.turns) for e in episodes] == [2] * 18
    tokenizer = load_tokenizer("run")
    lessons = conversation_samples(tokenizer, "run/lessons/lessons.jsonl", False, 128)
    taught = {tuple(s.tokens[: int((s.streams["weight"] == 0).sum())].tolist()) for (s,) in lessons}
    assert {e.turns[0].prompt for e in episodes} <= taught
    # The judge pays the answer, and the hint gets what its answer earned against the other hints for the same prompt.
    rewards = {}
    for e in episodes:
        hint, answer = e.turns
        assert (hint.seat, hint.action, hint.reward) == ("adviser", None, 0.0)
        assert (answer.seat, answer.action) == ("actor", answer.text)
        rewards[e.id] = len(set(answer.text)) / 20
        assert e.outcome.reward == answer.reward == rewards[e.id] and e.info["judge"]["name"] == "my_file.py:score"
        players = {name: (p.kind, p.model) for name, p in e.players.items()}
        assert players == {
            "adviser": ("trained", "policy/checkpoints/000002/policy"),
            "actor": ("remote", "small"),
        }
    assert len(set(rewards.values())) > 3
    advantages = {a.episode: (a.turn, a.values) for a in read_annotations("run/annotations/advantage")}
    for e in episodes:
        others = [rewards[o.id] for o in episodes if o.group == e.group and o.id != e.id]
        turn, (value,) = advantages[e.id]
        assert turn == 0 and value == pytest.approx(rewards[e.id] - sum(others) / 2, abs=1e-12)
    assert all(row["sampler_gap"] < 1e-5 for row in read_metrics("run"))


def test_evaluations_on_the_way_and_at_the_end(whole):
    on_the_way = read_segment("run/evaluation/000003.jsonl")
    said = shell("eval", "run", "--out", "again.jsonl", "--json")
    row = json.loads(said)["rows"][0]
    want = sum(e.outcome.reward for e in on_the_way) / 2
    assert row["scored"] == 2 and row["metrics"]["reward"]["value"] == pytest.approx(want)
    assert read_metrics("run")[-1]["eval/reward"] == pytest.approx(want)
    told = lambda file: [
        [(t.prompt, t.tokens, t.logp, t.text, t.action, t.reward) for t in e.turns] for e in read_segment(file)
    ]
    assert told("again.jsonl") == told("run/evaluation/000003.jsonl")
    every = read_segment("run/evaluation/all-prompts.jsonl")
    assert [e.task.id for e in every] == WORDS and {e.players["adviser"].version for e in every} == {3}


def test_report_inspect_and_verify(whole):
    shell("report", "run", "--no-plots")
    page = Path("run/report.html").read_text()
    assert "against the other hints" in page and "adviser" in page
    first = next(read_episodes("run/episodes"))
    said = shell("inspect", "run", "--episode", first.id)
    assert "adviser" in said and "actor" in said and "against the other hints" in said
    said = shell("verify", "run")
    assert "run: verified" in said and "the same rewards, ends and prompts" in said
    assert "versions 0, 1, 2: stored and recomputed log-probs differ" in said  # version 0 is what the stage made
    assert "verified" in shell("verify", "run/policy")


def test_serve_answers_with_the_adviser(whole):
    command = [sys.executable, "-m", "trailmark", "serve", "run", "--port", "0"]
    process = forked.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        body = {"model": "run", "prompt": "Sing of the sun.\nA hint: ", "max_tokens": 5, "temperature": 0}
        got = httpx.post(f"{found[0]}/completions", json=body, timeout=60).json()
        assert got["usage"]["completion_tokens"] <= 5 and isinstance(got["choices"][0]["text"], str)
        assert "as its run was prompted" in process.stdout.readline()
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_killed_in_its_stage_and_in_its_run_it_is_the_same_run(whole):
    train = [sys.executable, "-m", "trailmark", "train", "recipe.yaml", "out=killed"]
    for words, point in (([], "checkpoint.state"), (["--resume"], "checkpoint.renamed#3")):
        env = {**os.environ, "TRAILMARK_KILL_AT": point}
        dead = forked.run([*train, *words], env=env, capture_output=True, text=True)
        assert dead.returncode == -signal.SIGKILL, dead.stderr
        made = Path("killed/stages/policy.json").exists()
        assert made == bool(words), "the first kill is in the stage, the second one in the run"
    assert [row["step"] for row in read_metrics("killed")] == [1, 2]
    shell("train", "recipe.yaml", "out=killed", "--resume")
    assert shell("diff", "run", "killed") == "identical"
    here, there = (f'"{run}/lessons/lessons.jsonl"' for run in ("run", "killed"))
    assert shell("diff", "run/policy", "killed/policy", code=1) == f"recipe.yaml: key 'data': {here} and {there}"
    for path in Path("run/evaluation").iterdir():
        assert path.read_bytes() == (Path("killed/evaluation") / path.name).read_bytes()


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seats.actor={kind: local}"], "seats.actor: this seat has no model: set seats.actor.model.name"),
        (
            ["seats.actor={kind: local, trained: true}"],
            "adviser and actor are trained, and this method trains one model",
        ),
        (
            ["seats={adviser: {kind: local, trained: true}}"],
            "seats: this method needs 'adviser', which is trained, and 'actor'",
        ),
        (["seats.actor.model=large"], "no model 'large'. Set seats.actor.model, or another seats.actor.address"),
        (["hints=gone.jsonl"], "stage 'lessons' needs gone.jsonl as its input 'hints'"),
        (["task.options.reward=my_file.py:scor"], "my_file.py has no function 'scor'. Did you mean 'score'?"),
        (["task.options.test=0"], "no row for split 'test': give it more rows, or change task.options.test."),
    ],
)
def test_what_is_refused_before_anything_is_made(whole, words, said):
    assert said in refused("train", "recipe.yaml", "out=refused", *words)
    assert not Path("refused/recipe.yaml").exists() and not Path("refused/policy").exists()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("def score(prompt, answer, row):\n    return float('nan')\n", "bad.py:score returned nan for row '"),
        ("def score(prompt, answer, row):\n    return None\n", "bad.py:score returned None for row '"),
        (
            "def score(prompts, answers, rows):\n    return [1.0]\n",
            "bad.py:score returned 1 numbers for 6 rows, the first row '",
        ),
    ],
)
def test_a_function_that_gives_no_number_loses_no_stage(whole, function, said):
    Path("bad.py").write_text(function)
    shutil.rmtree("odd", ignore_errors=True)
    words = [
        "train",
        "recipe.yaml",
        "out=odd",
        "task.options.reward=bad.py:score",
        "steps=1",
        "imitation.steps=1",
        "eval.every=0",
    ]
    assert said in refused(*words)
    before = held("odd/stages")
    assert "policy.json" in " ".join(before) and not Path("odd/metrics.jsonl").exists()
    Path("bad.py").write_text(FUNCTION)  # mended, the run goes on from its stages
    shell(*words, "--resume")
    assert held("odd/stages").items() >= before.items() and len(read_metrics("odd")) == 1


def test_a_stage_whose_input_was_edited(whole):
    shutil.copytree("run", "edited", ignore=shutil.ignore_patterns(".*.lock", ".lock"))
    lessons = Path("edited/lessons/lessons.jsonl")
    text = lessons.read_text()
    lessons.write_text(text.replace("say sun", "say SUN"))
    before = held("edited")
    said = refused("train", "recipe.yaml", "out=edited", "--resume")
    assert "lessons.jsonl of stage 'lessons' was changed after it was made: put it back" in said
    assert held("edited") == before
    lessons.write_text(text)
    assert "edited is complete" in shell("train", "recipe.yaml", "out=edited", "--resume")
    # A file of the user's may change: its stages are made again, and what was made from it before is kept.
    weights = Path("edited/checkpoints/000003/policy/model.safetensors").read_bytes()
    other = Path("hints.jsonl").read_text().replace("say sun", "say SUN")
    Path("other.jsonl").write_text(other)
    said = shell(
        "train",
        "recipe.yaml",
        "out=edited",
        "--resume",
        "hints=other.jsonl",
        "steps=1",
        "imitation.steps=1",
        "eval.every=3",
    )
    assert "stage 'lessons' is made again: input 'hints' has changed" in said
    assert "the run begins again: its stage" in said
    assert Path("edited/replaced/run-1/checkpoints/000003/policy/model.safetensors").read_bytes() == weights
    assert "say SUN" in Path("edited/lessons/lessons.jsonl").read_text() and len(read_metrics("edited")) == 1
