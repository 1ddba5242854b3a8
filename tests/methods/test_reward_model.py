"""Reward models: what each kind learns from, its numbers on hand-made files, and who can use them afterwards."""

import json
import math

import numpy as np
import pytest
import torch

from trailmark import formats
from trailmark.config import ModelConfig, resolve
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import DataError, ModelError, RecipeError
from trailmark.methods.offline_configs import RewardModelRecipe
from trailmark.methods.reward_model import RewardModelMethod, read_answers
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat
from trailmark.rollout.search_episodes import best_by_value
from trailmark.run_async import wait
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics
from trailmark.score.classes import class_numbers, step_outputs
from trailmark.score.value_models import load_values
from trailmark.score.values import Line
from trailmark.seats.pinned_models import pin_models
from trailmark.steps import mark_steps, token_border, without_end
from trailmark.types import Annotation

TINY = {"name": "tiny", "dtype": "float64", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 64}}
WORDS = tiny_tokenizer()


def config(tmp_path, **more):
    given = {"method": "reward_model", "out": str(tmp_path / "run"), "model": TINY, "steps": 3, "batch": 8}
    return resolve({**given, "learner": {"optim": {"lr": 3e-3}}, **more}, RewardModelRecipe)


@pytest.fixture
def solutions(tmp_path):
    """Answers of two steps: a right one goes over 'good', a wrong one over 'bad'. The first step's label is 2 or 1."""
    rows = []
    for k in range(8):
        for word, reward in (("good", 1), ("bad", 0)):
            rows.append({"prompt": f"{k}?\n", "response": f"{word}\nso {k}", "reward": reward})
    path = tmp_path / "scored.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = [
        without_end(mark_steps(e, "policy", WORDS, "newline"), "policy", WORDS)
        for e in formats.read("trajectories", path, WORDS).episodes
    ]
    notes = [
        Annotation(e.id, "label", "step", (2.0, 3.0) if "good" in e.turns[0].text else (1.0, -1.0), 0) for e in found
    ]
    formats.write("episodes", tmp_path / "labelled.jsonl", found, None, annotations=notes)
    return tmp_path


def test_no_step_holds_the_token_that_ends_a_turn(solutions):
    e = formats.read("episodes", solutions / "labelled.jsonl", None).episodes[0]
    turn = e.turns[0]
    assert turn.tokens[-1] == WORDS.eos_token_id and turn.steps[-1][1] == len(turn.tokens) - 1
    assert [WORDS.decode(turn.tokens[a:b]) for a, b in turn.steps] == ["good\n", "so 0"]
    assert token_border(WORDS, turn.tokens, turn.text, 5) == turn.steps[0][1] == 5
    assert token_border(WORDS, turn.tokens, turn.text, 0) == 0


def test_classes_learn_every_label_in_one_pass(solutions):
    """The first loss is ln 4. Every label is learnt, and reading every step at once is reading prefixes."""
    c = config(
        solutions,
        data=str(solutions / "labelled.jsonl"),
        eval_data=str(solutions / "labelled.jsonl"),
        eval={"every": 40},
        steps=40,
        batch=16,
        learner={"optim": {"lr": 1e-2}},
        read={"classes": [2, 3], "over": "min"},
    )
    launch(RewardModelMethod, c)
    rows = read_metrics(solutions / "run")
    assert rows[0]["cross_entropy"] == pytest.approx(math.log(4), abs=1e-12) and rows[0]["rows"] == 16
    assert rows[-1]["eval/accuracy"] == 1.0 and rows[-1]["eval/cross_entropy"] < 0.2
    values = load_values(solutions / "run", WORDS, dtype="float64")
    assert (values.head, values.over, values.classes) == ("step", "min", [2, 3])
    found = formats.read("episodes", solutions / "labelled.jsonl", None)
    outs = step_outputs(values.lm, found.episodes)
    for e in found.episodes[:4]:
        turn, each = e.turns[0], class_numbers(outs[e.id, 0], [2, 3])
        prefixes = [turn.prompt + turn.tokens[:end] for _, end in turn.steps]
        assert each == pytest.approx(wait(values.values(prefixes)), abs=1e-9)
        line = Line(turn.prompt, turn.tokens[:-1], ends=tuple(end for _, end in turn.steps))
        assert wait(values.score([line])) == [pytest.approx(min(each), abs=1e-9)]
        assert (min(each) > 0.5) == ("good" in turn.text)
    other = tiny_tokenizer(["another"])
    with pytest.raises(ModelError, match="has another tokenizer than the policy"):
        load_values(solutions / "run", other)


def test_outcome_pairwise_and_scalar_by_their_first_losses(solutions):
    """Heads begin at 0: ln 2 for two classes and for a pair, the mean square of 2/3, 1 and 1/3 for a scalar."""
    first = {"outcome": math.log(2), "pairwise": math.log(2), "scalar": (4 / 9 + 1 + 1 / 9) / 3}
    name = {"outcome": "cross_entropy", "pairwise": "ranking", "scalar": "value"}
    for kind, start in first.items():
        given = (
            {"data": str(solutions / "labelled.jsonl")}
            if kind == "scalar"
            else {"data": str(solutions / "scored.jsonl"), "format": "trajectories"}
        )
        c = config(
            solutions,
            kind=kind,
            out=str(solutions / kind),
            steps=30,
            batch=16,
            eval={"every": 30},
            eval_data=given["data"],
            learner={"optim": {"lr": 1e-2}},
            **given,
        )
        launch(RewardModelMethod, c)
        rows = read_metrics(solutions / kind)
        assert rows[0][name[kind]] == pytest.approx(start, abs=1e-12)
        assert rows[-1]["eval/accuracy"] == 1.0 and rows[-1][f"eval/{name[kind]}"] < rows[0][name[kind]]
        assert rows[0]["rows"] == {"pairwise": 8}.get(kind, 16)


def test_an_answer_is_judged_behind_its_text(solutions):
    c = config(solutions, kind="outcome", data="x", format="trajectories")
    rows, _ = read_answers(c, [str(solutions / "scored.jsonl")], WORDS, 64)
    (sample,) = rows[0]
    (at,) = np.nonzero(sample.streams["class_weight"])[0]
    assert at == len(sample.tokens) - 2 and sample.tokens[-1] == WORDS.eos_token_id
    assert sample.streams["label"][at] == 1 and rows[1][0].streams["label"].sum() == 0


def test_a_reward_model_goes_on_from_another(solutions):
    c = config(solutions, data=str(solutions / "labelled.jsonl"), steps=20, batch=16)
    launch(RewardModelMethod, c)
    before = read_metrics(solutions / "run")[-1]["cross_entropy"]
    more = config(solutions, data=c.data, out=str(solutions / "more"), steps=1, batch=16, begin=str(solutions / "run"))
    launch(RewardModelMethod, more)
    assert read_metrics(solutions / "more")[0]["cross_entropy"] < before < math.log(4)
    other = config(solutions, kind="outcome", data=c.data, out=str(solutions / "other"), begin=str(solutions / "run"))
    with pytest.raises(ModelError, match="has 4 outputs, and kind outcome needs 2"):
        launch(RewardModelMethod, other)
    lm = load_model(pin_models(ModelConfig(name=str(solutions / "run/checkpoints/000020/value"), dtype="float64")))
    assert lm.heads["step"].weight.shape == (4, 32)


@pytest.mark.parametrize(
    ("notes", "why"),
    [
        ((2.0,), "has 1 values for 2 steps"),
        ((4.0, 0.0), "the label 4 is no class from 0 to 3"),
        ((0.5, 0.0), "the label 0.5 is no class"),
        ((-1.0, -1.0), r"labelled.jsonl.*needs a step with an annotation 'label'"),
    ],
)
def test_labels_that_cannot_be_learnt(solutions, notes, why):
    found = formats.read("episodes", solutions / "labelled.jsonl", None).episodes[:1]
    marked = [Annotation(found[0].id, "label", "step", notes, 0)]
    formats.write("episodes", solutions / "labelled.jsonl", found, None, annotations=marked)
    with pytest.raises(DataError, match=why):
        launch(RewardModelMethod, config(solutions, data=str(solutions / "labelled.jsonl")))
    assert not (solutions / "run" / "recipe.yaml").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"format": "nothing"}, "format 'nothing' is not known"),
        ({"format": "pairs"}, "pairs are for kind pairwise"),
        ({"read": {"classes": [4]}}, "there is no class 4: kind classes has 4"),
        ({"kind": "outcome", "read": {"classes": [2]}}, "there is no class 2: kind outcome has 2"),
    ],
)
def test_recipes_that_cannot_be(tmp_path, more, why):
    with pytest.raises(RecipeError, match=why):
        config(tmp_path, data="x", **more)


def test_long_answers_are_left_out_and_counted(solutions):
    c = config(solutions, data="x", kind="outcome", format="trajectories")
    _, skipped = read_answers(c, [str(solutions / "scored.jsonl")], WORDS, 12)
    rows, none = read_answers(c, [str(solutions / "scored.jsonl")], WORDS, 64)
    assert none == {} and skipped == {"too_long": 8} and len(rows) == 16  # 'good' is one letter longer than 'bad'


def test_step_scores_do_not_depend_on_padding_or_packing(solutions, make_lm):
    """In padded rows, packed rows and a tree each step reads as in its answer alone, padded on either side."""
    lm = make_lm("llama", dtype=torch.float64)
    lm.add_head("step", 4, zero=False, seed=1)
    found = formats.read("episodes", solutions / "labelled.jsonl", None).episodes
    alone = {e.id: step_outputs(lm, [e])[e.id, 0] for e in found}
    for shape in ("rows", "flat", "tree", "fixed"):
        outs = step_outputs(lm, found, shape=shape)
        for e in found:
            assert outs[e.id, 0] == pytest.approx(alone[e.id], abs=1e-5)
    row, turn = found[0].sequence(0), found[0].turns[0]
    ends = [len(row) - len(turn.tokens) + end - 1 for _, end in turn.steps]
    lm.base.set_attn_implementation("sdpa")
    for left in (0, 5):
        ids = torch.tensor([[0] * left + list(row) + [0] * (5 - left)])
        mask = torch.tensor([[0] * left + [1] * len(row) + [0] * (5 - left)])
        place = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            out = lm.base(ids, attention_mask=mask, position_ids=place, output_hidden_states=True)
        read = (out.hidden_states[-1][0] @ lm.heads["step"].weight.T)[[left + at for at in ends]]
        assert read.detach().numpy() == pytest.approx(alone[found[0].id], abs=1e-5)


def test_the_best_of_several_answers_is_chosen_over_all_steps(solutions):
    """A reward model that is read over steps judges an answer by all of them, not by its end alone."""
    read = {"classes": [2, 3], "over": "product"}
    c = config(solutions, data=str(solutions / "labelled.jsonl"), steps=10, batch=16, read=read)
    launch(RewardModelMethod, c)
    values = load_values(solutions / "run", WORDS, dtype="float64")
    found = formats.read("episodes", solutions / "labelled.jsonl", None).episodes[:2]
    seat = Seat("policy", ScriptedEngine(lambda prompt, draw: "", WORDS))
    (best,) = best_by_value(found, values, seat)
    outs = step_outputs(values.lm, found)
    products = {e.id: math.prod(class_numbers(outs[e.id, 0], [2, 3])) for e in found}
    assert best.id == max(products, key=products.get)
    assert best.info["search"]["score"] == pytest.approx(products[best.id], abs=1e-9)
