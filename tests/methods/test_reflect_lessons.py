"""A lesson as a sample: what is trained and what is only shown, in the very words that play uses."""

import pytest

from trailmark.config import resolve
from trailmark.errors import RecipeError
from trailmark.methods.reflect import imitation as reflect_imitation
from trailmark.methods.reflect import method as reflect
from trailmark.methods.reflect.lessons import Lesson
from trailmark.methods.reflect.play import two_players
from trailmark.rollout.play import play
from trailmark.runs.store import Run

BASE = {
    "method": "reflect", "steps": 4, "teacher": {"prompts": 2}, "sft": {"reflector": 1, "policy": 1, "batch": 4},
    "task": {"name": "taxi", "options": {"mode": "pickup", "history": "none", "walls": False}}, "thought": 16,
    "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 256}},
    "engine": {"max_num_seqs": 8, "max_len": 256},
}  # fmt: skip
LESSON = Lesson("map\n", "Choose one action:\n0. south\n1. north\n", "go north", "1", "0")


@pytest.fixture
def make(tmp_path):
    def made(**more):
        config = resolve(
            {**BASE, **more, "out": str(tmp_path / str(len(list(tmp_path.iterdir()))))}, reflect.ReflectRecipe
        )
        seats = ["reflector", "policy"] if config.reflect else ["policy"]
        return reflect_imitation.Players(config, Run.create(config.out, "method: x\n"), seats)

    return made


def parts(run, sample, which="policy"):
    """What is shown, and what carries weight."""
    decode = run.models[which].tokenizer.decode
    on = sample.streams["weight"] != 0
    assert sample.mass["weight"] == on.sum() and not on[: int(on.argmax())].any() and on[int(on.argmax()) :].all()
    return decode(sample.tokens[~on]), decode(sample.tokens[on])


def test_only_the_answer_is_trained(make):
    run = make()
    shown, trained = parts(run, run.sample(LESSON, "policy", "1 0"))
    assert shown == "map\n # Analyze:\ngo northChoose one action:\n0. south\n1. north\n # Action:\n" and trained == "1"
    shown, trained = parts(run, run.sample(LESSON, "reflector", "1 0"), "reflector")
    assert shown == "map\n # Analyze:\n" and trained == "go north<|im_end|>"  # it learns to stop
    taken = make(teacher={"prompts": 2, "label": "behaviour"})
    assert parts(taken, taken.sample(LESSON, "policy", "1 0"))[1] == "0"
    alone = make(reflect=False, steps=4)
    assert parts(alone, alone.sample(LESSON, "policy", "1 0"))[0] == "map\n" + LESSON.menu + " # Action:\n"


def test_a_share_of_lessons_is_heard_without_words(make):
    run = make(reflect_prob=0.75)
    heard = ["go north" in parts(run, run.sample(LESSON, "policy", f"1 {k}"))[0] for k in range(400)]
    assert 260 < sum(heard) < 340
    assert all("# Analyze:" in parts(run, run.sample(LESSON, "policy", f"1 {k}"))[0] for k in range(20))


@pytest.mark.parametrize("shuffle", ["permute", "alphabet"])
def test_labels_of_lessons_are_shuffled_as_in_play(make, shuffle):
    run = make(shuffle=shuffle)
    seen = set()
    for k in range(40):
        shown, label = parts(run, run.sample(LESSON, "policy", f"1 {k}"))
        assert f"{label}. north\n" in shown and shown.count(". ") == 2
        seen.add(label)
    assert seen == ({"0", "1"} if shuffle == "permute" else set("012345"))


def test_a_lesson_and_a_play_have_the_same_prompt(make):
    """The prompt that is imitated on is token for token the one that is played on."""
    run = make(instruction="Think first.\n")
    (e,) = play(run.source, run.source.tasks("all")[:1], run.opened.seats, two_players(run.talk))
    first = run.source.make().reset(run.source.tasks("all")[0])
    lesson = Lesson(first.state, first.menu, e.turns[0].text.split("# Action:")[0], "0", "0")
    for which, turn in (("reflector", e.turns[0]), ("policy", e.turns[1])):
        shown = run.sample(lesson, which, "1 0").tokens[: len(turn.prompt)]
        assert tuple(shown) == turn.prompt
    assert run.models["policy"].tokenizer.decode(e.turns[0].prompt).startswith("Think first.\n")


def test_a_teacher_without_lessons_is_said(make, monkeypatch):
    class Silent:
        words = ()

        def lessons(self, source, starts, perturb, seed):
            return []

    monkeypatch.setattr(reflect_imitation, "get_teacher", lambda name, path: Silent())
    with pytest.raises(RecipeError, match="teacher 'bfs' has no lessons"):
        make()
