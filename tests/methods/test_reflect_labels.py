"""`labels: all`: what a tokenizer lacks becomes new tokens, which checkpoints keep, with and without adapters."""

import pytest
import torch

from trailmark.config import resolve
from trailmark.errors import RecipeError
from trailmark.methods import get_method
from trailmark.methods.reflect import imitation as reflect_imitation
from trailmark.methods.reflect import method as reflect
from trailmark.methods.reflect.imitation import Players
from trailmark.methods.reflect.lessons import Lesson
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.checkpoints import listed
from trailmark.runs.launch import launch
from trailmark.runs.store import read_episodes, read_metrics
from trailmark.tasks.labels import CHOICES, alphabet
from trailmark.verify import verify


class Walk:
    """The way to the one file of the last folder, whose label has two digits."""

    words = ()

    def lessons(self, source, starts, perturb, seed):
        world = source.make()
        seen = world.reset(source.tasks("all", 1)[0])
        best = world.oracle()
        return [Lesson(seen.state, seen.menu, "go on", best, best, seen.labels, seen.actions)] * 2


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr(reflect_imitation, "get_teacher", lambda name, path: Walk())
    for k in range(14):
        folder = tmp_path / "repo" / f"part{k:02}"
        folder.mkdir(parents=True)
        (folder / "what.txt").write_text(f"The number {k} is kept here.\n")
    tiny_tokenizer().save_pretrained(tmp_path / "letters")  # digits and letters alone: 62 labels
    model = {"name": "tiny", "tokenizer": str(tmp_path / "letters"),
             "shape": {"layers": 1, "width": 16, "heads": 2, "context": 1024}}  # fmt: skip

    options = {"repo": str(tmp_path / "repo"), "query": "Where is 13?", "target": "part13/what.txt"}

    def made(name="run", lora=None, **more):
        return resolve({
            "method": "reflect", "out": str(tmp_path / name), "steps": 1,
            "sft": {"reflector": 1, "policy": 2, "batch": 2},
            "task": {"name": "auto-explore", "options": {**options, "leaveout": 0.0, "horizon": 3}},
            "rl": {"prompts_per_step": 8}, "thought": 6, "final": {"split": "all"}, "model": {**model, "lora": lora},
            "engine": {"max_num_seqs": 4, "max_len": 1024}, "checkpoint": {"every": 1, "keep_last": 9}, "labels": "all",
            **more,
        }, reflect.ReflectRecipe)  # fmt: skip

    return made


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_new_labels_are_trained_saved_and_loaded(tmp_path, recipe, lora):
    config = recipe(lora=lora)
    launch(get_method("reflect"), config)
    policy = [t for e in read_episodes(tmp_path / "run" / "episodes") for t in e.turns if t.seat == "policy"]
    assert {len(t.tokens) for t in policy} == {1}
    for seat in ("policy", "reflector"):
        name = str(listed(tmp_path / "run" / "checkpoints")[-1] / seat)
        lm = load_model(config.model.model_copy(update={"name": name, "tokenizer": None, "lora": None}))
        assert alphabet(lm.tokenizer) == CHOICES and lm.vocab >= len(lm.tokenizer)
        assert lm.adapted is (lora is not None)
        if lora:
            assert all("lora_" in n for n, _ in lm.parameters())
    assert read_metrics(tmp_path / "run/policy")[1]["nll"] > 0
    report = verify(tmp_path / "run", limit=8)
    assert report.ok, [(c.name, c.what) for c in report.checks if c.status == "fail"]
    assert report["replay"].status == "pass" and report["sampler"].status == "pass"


def test_the_new_tokens_of_a_resumed_run_are_the_same(recipe):
    first, second = (load(recipe(lora={"rank": 2})) for load in (loaded, loaded))
    assert torch.equal(first.base.get_input_embeddings().weight, second.base.get_input_embeddings().weight)


def loaded(config):
    from trailmark.tasks import get_task

    return reflect_imitation.load_seat(config, get_task(config.task.name, **config.task.options), "policy", ())


def test_worlds_with_short_menus_need_none(recipe):
    lm = loaded(recipe(task={"name": "taxi"}))
    assert alphabet(lm.tokenizer) == (*"0123456789", *CHOICES[200:])


class Foreign(Walk):
    """Lessons that were made for another tokenizer."""

    def lessons(self, source, starts, perturb, seed):
        return [Lesson("x\n", "# Commands\n13. cd part13\n", "go on", "13", "13")]


def test_lessons_of_another_tokenizer_are_refused_before_training(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(reflect_imitation, "get_teacher", lambda name, path: Foreign())
    with pytest.raises(RecipeError, match="answer with label '13', which is 2 tokens"):
        Players(recipe(labels="alphabet"), None, ["reflector", "policy"])
    Players(recipe(), None, ["reflector", "policy"])


@pytest.mark.parametrize("more", [{"teacher": {"label": "behaviour"}}, {"shuffle": "permute"}])
def test_only_labels_that_are_answered_must_be_tokens(recipe, monkeypatch, more):
    """A lesson whose best action has a label of one token, beside one that has not."""
    teacher = Walk()
    lesson = Lesson("x\n", "# Commands\n1. cd part01\n13. cd part13\n", "go on", "1", "13")
    monkeypatch.setattr(teacher, "lessons", lambda *args: [lesson], raising=False)
    monkeypatch.setattr(reflect_imitation, "get_teacher", lambda name, path: teacher)
    method = Players(recipe(labels="alphabet"), None, ["reflector", "policy"])
    answer = method.sample(method.lessons[0], "policy", "1 0").tokens[-1]
    assert method.models["policy"].tokenizer.decode(answer) == "1"
    with pytest.raises(RecipeError, match="answer with label '13', which is 2 tokens"):
        Players(recipe(labels="alphabet", **more), None, ["reflector", "policy"])
    Players(recipe(labels="alphabet", **more), None, ["reflector"])


def test_a_quantised_base_takes_no_new_tokens(recipe):
    with pytest.raises(RecipeError, match="labels: all changes the model"):
        config = recipe()
        resolve(
            {**config.model_dump(), "model": {**config.model.model_dump(), "name": "gpt2", "quant": "int8"}},
            reflect.ReflectRecipe,
        )
