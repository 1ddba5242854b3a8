"""Every recipe passes a dry run without network, and the laptop ones run two steps."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import load_recipe, resolve
from trailmark.methods import get_method

WORLDS = {
    "reflect-explore",
    "reflect-explore-gpu",
    "reflect-alfworld-gpu",
}  # need data: tests/methods/test_reflect_recipes.py
RECIPES = sorted(p for p in (Path(__file__).parent.parent / "recipes").glob("*.yaml") if p.stem not in WORLDS)
PAPERS = {
    "oreo-qwen-math",
    "preference-qwen-math",
    "oreo-qwen-math-sft",
    "oreo-qwen-math-data",
    "oreo-deepseekmath",
    "oreo-minicpm-alfworld",
    "oreo-minicpm-alfworld-sft",
    "oreo-minicpm-alfworld-data",
    "vrcli-paper-3b",
    "vrcli-paper-7b",
    "lpr-logiqa2",
    "lpr-logiqa2-round2",
    "lpr-logiqa2-ppo",
    "lpr-reclor",
}  # large published models
LAPTOP = {  # recipe -> overrides with which two steps run
    "taxi-policy-gradient": [],
    "bandit-policy-gradient": [],
    "arith-sft": [],
    "puzzle-sft": ["data=arith.jsonl", "model.shape.context=128"],
    "prompts-grpo": ["prompts_per_step=2", "n=2"],
    "vrcli-laptop": ["prompts_per_step=2", "n=2"],
    "vrcli-hint": ["prompts_per_step=2", "n=2", "model.name=tiny", "model.shape.context=2048", "engine.max_len=1024"],
    "vrcli-hint-scorer": ["batch=2"],
    "vrcli-hint-sft": ["batch=2", "model.name=tiny", "model.shape.context=2048"],
    "vrcli-novels-laptop": ["n=2"],
    "arith-grpo": ["model.name=tiny", "prompts_per_step=2", "n=2"],
    "oreo-arith-data": ["model.name=tiny", "collect.prompts=2", "collect.n=2"],
    "oreo-arith": ["model.name=tiny", "data=scored.jsonl", "format=trajectories", "batch=2"],
    "preference-arith": ["model.name=tiny", "data=scored.jsonl", "format=trajectories", "batch=2"],
    "oreo-arith-rounds": ["model.name=tiny", "collect.prompts=2", "collect.n=2", "training=2", "batch=2"],
    "epo-negotiation": [
        "teach.prompts=2",
        "teach.steps=1",
        "collect.prompts=2",
        "collect.n=2",
        "training=1",
        "batch=2",
    ],
    "lpr-arith": [
        "teacher.prompts=4",
        "sft.steps=1",
        "sft.batch=2",
        "sample.prompts=8",
        "sample.n=4",
        "prm.steps=1",
        "prm.batch=4",
        "labels.dev_shards=[]",
        "preference=null",
        "rl={steps: 1, prompts_per_step: 1, rewards: {right: 1.0}}",
    ],
    "lpr-prontoqa": [
        "model.tokenizer=null",
        "task.options.path=questions",
        "teacher.prompts=4",
        "sft.steps=1",
        "sft.batch=2",
        "sample.prompts=8",
        "sample.n=4",
        "sampling.max_tokens=96",
        "clean={split: newline, react: any}",
        "states.ratio=1",
        "states.shards=1",
        "complete.n=1",
        "prm.steps=1",
        "prm.batch=4",
        "labels.dev_shards=[]",
        "model.shape={layers: 1, width: 16, heads: 2, context: 1024}",
        "engine={max_num_seqs: 8, batch_invariant: false}",
        "preference=null",
        "rl={steps: 1, prompts_per_step: 1, rewards: {right: 1.0}}",
    ],
    "lpr-puzzle": [
        "teacher.prompts=300",
        "sft.steps=150",
        "sample.prompts=20",
        "prm.steps=1",
        "preference=null",
        "rl={steps: 1, prompts_per_step: 1, rewards: {right: 1.0}}",
    ],
    "preference-puzzle": ["model.name=tiny", "data=scored.jsonl", "format=trajectories", "batch=2"],
    "step-rl-puzzle": ["model.name=tiny", "rewards={right: 1.0, model: null, classes: null}", "prompts_per_step=2"],
    "reflect-sft": ["data=texts.jsonl"],
    "reflect-taxi": ["sft.reflector=1", "sft.policy=1", "teacher.prompts=2", "rl.prompts_per_step=4", "final.n=5"],
    "reflect-taxi-full": ["sft.reflector=1", "sft.policy=1", "teacher.prompts=2", "rl.prompts_per_step=4", "final.n=5"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the files that recipes name."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_files()
    return folder


def write_files():
    done = CliRunner().invoke(app, ["data", "gold", "arith", "arith.jsonl", "level=2", "--n", "40"])
    assert done.exit_code == 0, done.output
    right = '{"prompt": "1+1=?\\n", "response": "1+1=2\\n#### 2", "reward": 1}\n'
    Path("scored.jsonl").write_text(right * 4 + '{"prompt": "1+1=?\\n", "response": "3", "reward": 0}\n')
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    Path("my_file.py").write_text("def score(answer): return len(answer)")
    Path("texts.jsonl").write_text('{"text": "a map\\n # Action:\\n4"}\n' * 4)
    talk = '{"messages": [{"role": "user", "content": "%d?"}, {"role": "assistant", "content": "No, %d."}]}\n'
    Path("talks.jsonl").write_text("".join(talk % (k, k) for k in range(4)))
    Path("questions").mkdir()
    asked = '{"context": "Max is a %spus. Each %spus is sly.", "question": "True or false? Max is sly.", '
    asked += '"options": ["True", "False"], "answer": "A"}\n'
    Path("questions/prontoqa_dev.jsonl").write_text("".join(asked % (a + b, a + b) for a in "bcdfgz" for b in "aeiouy"))
    done = CliRunner().invoke(app, ["data", "tokenizer", "questions/prontoqa_dev.jsonl", "prontoqa-words"])
    assert done.exit_code == 0 and "from 180 texts" in done.output
    done = CliRunner().invoke(app, ["data", "stories", "talks.jsonl", "--out", "stories"])
    assert done.exit_code == 0, done.output
    shutil.copytree("stories", "novels")
    few = ["--train", "4", "--val", "2", "--test", "1", "--lessons", "6"]
    done = CliRunner().invoke(app, ["data", "hints", *few])
    assert done.exit_code == 0, done.output


@pytest.fixture
def shell(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return CliRunner()


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_dry_run(shell, path):
    done = shell.invoke(app, ["train", str(path), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "# model: " in done.output and f"name: {path.stem.removesuffix('-gpu')}" in done.output
    Path("again.yaml").write_text(done.stdout)
    again = shell.invoke(app, ["train", "again.yaml", "--dry-run"])
    assert again.stdout == done.stdout  # the resolved recipe is a recipe, and resolves to itself


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if "-gpu" not in p.stem and p.stem not in PAPERS], ids=lambda p: p.stem
)
def test_two_steps(shell, path):
    done = shell.invoke(app, ["train", str(path), "steps=2", "eval.every=0", "out=run", *LAPTOP[path.stem]])
    assert done.exit_code == 0, done.output
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2


def test_a_copied_folder_of_recipes_works(tmp_path, monkeypatch):
    """Nothing in it leads out of it but what comes with the package."""
    shutil.copytree(RECIPES[0].parent, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    for path in sorted(Path("elsewhere").glob("*.yaml")):
        loaded = load_recipe(path)
        resolve(loaded, get_method(loaded.method).Config)
    done = CliRunner().invoke(app, ["train", "elsewhere/reflect-taxi.yaml", "--dry-run"])
    assert done.exit_code == 0 and "name: reflect-taxi\n" in done.output and "mode: pickup" in done.output
    Path("own.yaml").write_text("extends: reflect-taxi-fulll\n")
    done = CliRunner().invoke(app, ["train", "own.yaml", "--dry-run"])
    assert (
        done.exit_code == 2 and "own.yaml:1: key 'extends': reflect-taxi-fulll: there is no such recipe" in done.output
    )


def commands():
    """All commands that recipes and pages tell, in one shape: (words, the recipe where it is one that trains)."""
    root = RECIPES[0].parent.parent
    pages = [*(root / "recipes").glob("*.yaml"), root / "README.md", *(root / "docs").rglob("*.md")]
    for page in pages:
        for line in re.findall(r"^(?:#\s+)?(?:\$ )?(trailmark (?:data|train) .*|cat \S+ .*)$", page.read_text(), re.M):
            try:
                yield shlex.split(line, comments=True)
            except ValueError:
                continue


def made_runs():
    """out -> the steps of which a checkpoint is left, over all recipes and all commands that train."""
    root, made = RECIPES[0].parent, {}
    runs = [(p.name, []) for p in root.glob("*.yaml")]
    runs += [
        (Path(w[2]).name, [x for x in w[3:] if not x.startswith("--")])
        for w in commands()
        if w[:2] == ["trailmark", "train"]
    ]
    for name, words in runs:
        if not (root / name).is_file():
            continue
        try:
            config = resolve(load_recipe(root / name, words), get_method(load_recipe(root / name).method).Config)
        except Exception:  # placeholders such as KEY=VALUE
            continue
        if config.method == "lpr" and (kept := (config.preference or {}).get("checkpoint", {}).get("every")):
            made.setdefault(f"{config.out}/policy-1", set()).update(range(kept, 10 * kept, kept))
        every = config.checkpoint.every or config.steps
        made.setdefault(config.out, set()).update({config.steps, *range(every, config.steps + 1, every)})
    return made


def made_stages():
    """The folders that stages of lpr recipes make, and the files in them that others learn from."""
    made = set()
    for path in RECIPES[0].parent.glob("lpr-*.yaml"):
        loaded = load_recipe(path)
        if loaded.method == "lpr":
            config = resolve(loaded, get_method("lpr").Config)
            names = get_method("lpr").check(config)[0].removeprefix("stages: ").split(", ")
            made |= {f"{config.out}/{name}" for name in names}
    return made | {f"{stage}/all.jsonl" for stage in made if "/cleaned-" in stage}


def test_whatever_a_recipe_starts_from_is_made_by_a_recipe_or_a_command():
    runs, written = made_runs(), {word for words in commands() for word in words}
    stages = made_stages()
    assert "runs/lpr-arith/prm-1" in stages and "runs/lpr-arith/cleaned-1/all.jsonl" in stages
    missing = []
    for path in sorted(RECIPES[0].parent.glob("*.yaml")):
        loaded = load_recipe(path)
        config = resolve(loaded, get_method(loaded.method).Config)
        if (name := config.model.name).startswith("runs/") and name not in stages:
            found = re.fullmatch(r"(runs/[\w/-]+)/checkpoints/(\d{6})/policy", name)
            missing += [] if found and int(found[2]) in runs.get(found[1], ()) else [f"{path.name}: {name}"]
        inputs = [getattr(config, "data", ""), getattr(getattr(config, "teacher", None), "path", None) or ""]
        for file in [x for x in inputs if x and x not in stages]:
            if found := re.fullmatch(r"(runs/[\w-]+)/episodes/000001.jsonl", file):
                made = found[1] in runs
            else:
                made = {file, *map(str, Path(file).parents[:-1])} & written
            missing += [] if made else [f"{path.name}: {file}"]
    assert missing == []
