"""Recipes whose worlds need data: they resolve, their models are known, and each world is played from lessons to RL at
toy size."""

from pathlib import Path

import pytest

from trailmark.config import load_recipe, resolve
from trailmark.methods import get_method
from trailmark.methods.reflect import imitation as reflect_imitation
from trailmark.methods.reflect import method as reflect
from trailmark.methods.reflect.imitation import Players
from trailmark.methods.reflect.lessons import Lesson
from trailmark.models.load import describe
from trailmark.runs.launch import launch
from trailmark.runs.store import read_episodes, read_metrics
from trailmark.types import Scored

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(p.stem for p in FOLDER.glob("reflect-*.yaml") if p.stem != "reflect-sft")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resolves_and_its_model_is_known(name):
    config = resolve(load_recipe(FOLDER / f"{name}.yaml"), reflect.ReflectRecipe)
    assert describe(config.model)["parameters"] > 50_000
    assert 0 < config.learner.optim.lr <= config.sft.optim.lr


def test_the_paper_s_model():
    config = resolve(load_recipe(FOLDER / "reflect-paper-gpu.yaml"), reflect.ReflectRecipe)
    assert describe(config.model) == {"family": "gpt2", "parameters": 1_557_611_200, "context": 1024}
    assert config.model.quant == "int8" and config.head == "alphabet" and config.rl.replay == 50


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repo"
    for name, text in {
        "README.md": "A shop for tea and coffee.\n", "src/prices.py": "def price(x):\n    return 2 * x\n",
        "src/deep/stock.py": "STOCK = {'tea': 3}\n", "docs/hours.txt": "Open from nine to five.\n",
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


class Walk:
    """Two lessons at the root of the fixture."""

    words = ("file", "folder")

    def lessons(self, source, starts, perturb, seed):
        seen = source.make().reset(source.tasks("all", 1)[0])
        return [Lesson(seen.state, seen.menu, "the file is in folder src", seen.labels[1], seen.labels[1], seen.labels,
                       seen.actions)] * 2  # fmt: skip


@pytest.mark.parametrize(("head", "shuffle"), [("listed", "alphabet"), ("listed", "permute"), ("alphabet", "none")])
def test_auto_explore_from_lessons_to_reinforcement(tmp_path, repository, monkeypatch, head, shuffle):
    monkeypatch.setattr(reflect_imitation, "get_teacher", lambda name, path: Walk())
    config = resolve({
        "method": "reflect", "out": str(tmp_path / "run"), "steps": 2, "sft": {"reflector": 2, "policy": 2, "batch": 2},
        "task": {"name": "auto-explore", "options": {"repo": str(repository), "query": "What is in stock?",
                                                     "target": "src/deep/stock.py", "horizon": 5}},
        "rl": {"prompts_per_step": 4, "baseline": "batch"}, "head": head, "shuffle": shuffle, "thought": 18,
        "final": {"split": "all"},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 256}},
        "curriculum": {"kind": "depth"}, "engine": {"max_num_seqs": 8, "max_len": 256},
    }, reflect.ReflectRecipe)  # fmt: skip
    launch(get_method("reflect"), config)
    rows, episodes = read_metrics(tmp_path / "run"), list(read_episodes(tmp_path / "run" / "episodes"))
    assert "nll" in read_metrics(tmp_path / "run/policy")[1] and "success" in rows[1] and len(episodes) == 8
    assert all(isinstance(e.outcome, Scored) for e in episodes)
    policy = [t for e in episodes for t in e.turns if t.seat == "policy"]
    assert all(len(t.prompt) <= 255 and len(t.tokens) == 1 for t in policy)
    if (head, shuffle) == ("listed", "alphabet"):
        assert len({t.text for t in policy}) > 12  # labels from the whole alphabet
        assert len({t.seed for e in episodes for t in [e.task]}) == 2  # what is left out is drawn anew at each step
    if head == "alphabet":
        assert all(len(t.law.allowed) == 252 for t in policy)


def test_a_prompt_that_is_too_long_keeps_the_question(tmp_path, repository, monkeypatch):
    monkeypatch.setattr(reflect_imitation, "get_teacher", lambda name, path: Walk())
    (repository / "src" / "prices.py").write_text("# words and words\n" * 80)
    config = resolve({
        "method": "reflect", "out": str(tmp_path / "run"), "steps": 1, "sft": {"reflector": 2, "policy": 2, "batch": 2},
        "task": {"name": "auto-explore", "options": {"repo": str(repository), "query": "What is in stock?",
                                                     "horizon": 8, "target": "src/deep/stock.py", "max_tokens": 400}},
        "rl": {"prompts_per_step": 12}, "thought": 18, "final": {"split": "all"},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 420}},
        "engine": {"max_num_seqs": 8},
    }, reflect.ReflectRecipe)  # fmt: skip
    launch(get_method("reflect"), config)
    decode = Players(config, None).models["policy"].tokenizer.decode
    prompts = [decode(t.prompt) for e in read_episodes(tmp_path / "run" / "episodes") for t in e.turns]
    assert all("What is in stock?" in p for p in prompts) and any("[...]" in p for p in prompts)


class Guide:
    """The expert of real games, one lesson for each of its steps."""

    words = ("go to", "take", "next")

    def lessons(self, source, starts, perturb, seed):
        out = []
        for task in source.tasks("train", starts, seed):
            world = source.make()
            seen, over = world.reset(task), False
            while not over:
                label = world.oracle()
                act = dict(zip(seen.labels, seen.actions))[label]
                out.append(Lesson(seen.state, seen.menu, f"next: {act}", label, label, seen.labels, seen.actions))
                step = world.step(label)
                seen, over = step.observation, step.over
        return out


@pytest.mark.data
def test_alfworld_from_lessons_to_reinforcement(tmp_path, monkeypatch):
    """Real games in label mode: the expert's labels win, and the method runs through all its stages on them."""
    import os

    folder = os.environ.get("TRAILMARK_DATA")
    if not folder:
        pytest.skip("TRAILMARK_DATA is not set")
    monkeypatch.setattr(reflect_imitation, "get_teacher", lambda name, path: Guide())
    config = resolve({
        "method": "reflect", "out": str(tmp_path / "run"), "steps": 2, "sft": {"reflector": 1, "policy": 2, "batch": 2},
        "task": {"name": "alfworld", "options": {"games": f"{folder}/alfworld"}}, "teacher": {"prompts": 2},
        "rl": {"prompts_per_step": 3}, "shuffle": "permute", "thought": 48,
        "final": {"split": "seen", "n": 3, "references": True},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 2048}},
        "engine": {"max_num_seqs": 4, "max_len": 1920}, "eval": {"every": 2, "n": 2, "split": "seen"},
    }, reflect.ReflectRecipe)  # fmt: skip
    launch(get_method("reflect"), config)
    from trailmark.runs.store import read_segment

    best = read_segment(tmp_path / "run" / "evaluation" / "oracle.jsonl")
    assert len(best) == 3 and all(isinstance(e.outcome, Scored) and e.outcome.success for e in best)
    for e in read_episodes(tmp_path / "run" / "episodes"):
        assert isinstance(e.outcome, Scored) and all(len(t.prompt) < 1920 for t in e.turns)
