"""The rows of a reward model, place by place, and its evaluation against plain loops over a head's outputs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trailmark import formats
from trailmark.config import LearnerConfig, resolve
from trailmark.errors import DataError
from trailmark.formats import on_demand, turns
from trailmark.learn.learner import Learner
from trailmark.methods.offline_configs import RewardModelRecipe
from trailmark.methods.reward_model import (
    HEAD,
    RewardModelMethod,
    judged,
    load_head,
    make_objective,
    read_answers,
    tied,
)
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives.classify import Classify
from trailmark.objectives.ranking import Ranking
from trailmark.objectives.value import Value
from trailmark.plan import make_plan
from trailmark.runs.store import Run
from trailmark.steps import mark_steps, without_end
from trailmark.types import Annotation, Invalid

WORDS = tiny_tokenizer()
TINY = {"name": "tiny", "dtype": "float64", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 64}}
ROWS = [("p\n", "a\nb", 1), ("p\n", "a\nc", 0), ("q\n", "d\ne", 1), ("p\n", "f\ng", 1)]


def config(**more):
    given = {"method": "reward_model", "out": "nowhere", "model": TINY, "steps": 2, "batch": 4, "data": "x"}
    return resolve({**given, **more}, RewardModelRecipe)


@pytest.fixture
def answers(tmp_path):
    path = tmp_path / "scored.jsonl"
    path.write_text("".join(json.dumps(dict(zip(("prompt", "response", "reward"), r))) + "\n" for r in ROWS))
    found = formats.read("trajectories", path, WORDS).episodes
    return [without_end(mark_steps(e, "policy", WORDS, "newline"), "policy", WORDS) for e in found]


def stored(folder, episodes, values=(), name="data.jsonl", **more):
    """A file of these episodes, with values as labels of the steps of their first turns."""
    notes = [Annotation(e.id, more.get("label", "label"), "step", v, 0) for e, v in zip(episodes, values) if v]
    formats.write("episodes", folder / name, episodes, None, annotations=notes)
    return str(folder / name)


def read(c, *files, limit=64):
    return read_answers(c, files, WORDS, limit)


def test_a_label_lies_at_the_last_token_of_its_step(tmp_path, answers):
    """Every letter is a token: "p\\n" and "a\\n" and "b", so steps end at places 3 and 4, before the end token."""
    file = stored(tmp_path, answers, [(2.0, 3.0), (-1.0, 1.0), None, (0.0, -1.0)])
    rows, skipped = read(config(), file)
    where = [(np.nonzero(s.streams["class_weight"])[0].tolist(), s.mass) for (s,) in rows]
    assert where == [([3, 4], {"class_weight": 2.0}), ([4], {"class_weight": 1.0}), ([3], {"class_weight": 1.0})]
    assert [s.streams["label"].tolist() for (s,) in rows] == [
        [0, 0, 0, 2, 3, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert skipped == {"unlabelled": 1} and [s.episode for (s,) in rows] == ["0/0", "0/1", "0/2"]
    (s,) = rows[0]
    assert WORDS.decode(s.tokens) == "p\na\nb" + WORDS.eos_token


def test_targets_of_a_scalar(tmp_path, answers):
    file = stored(tmp_path, answers, [(2.0, 3.0), (0.5, -1.0)])
    rows, _ = read(config(kind="scalar"), file)
    assert rows[0][0].streams["returns"].tolist() == pytest.approx([0, 0, 0, 2 / 3, 1, 0])
    assert rows[1][0].streams["returns"].tolist() == pytest.approx([0, 0, 0, 0.5 / 3, 0, 0])
    assert rows[1][0].mass == {"value_weight": 1.0}
    (double,) = read(config(kind="scalar", outputs=7), file)[0][0]
    assert double.streams["returns"][4] == 0.5
    with pytest.raises(DataError) as found:
        read(config(kind="scalar", outputs=3), file)
    assert str(found.value) == "episode '0/0': the label 3 is no class from 0 to 2: set outputs."


def test_another_annotation_may_hold_the_labels(tmp_path, answers):
    file = stored(tmp_path, answers[:2], [(1.0, 1.0), (0.0, 0.0)], label="value")
    assert len(read(config(label="value"), file)[0]) == 2
    with pytest.raises(DataError) as found:
        read(config(), file)
    assert str(found.value) == (
        f"{file}: holds no row to learn from: kind classes needs a step with an annotation 'label'."
    )


def test_a_label_may_be_of_a_later_turn(tmp_path, answers):
    """The second turn goes on from the first: its labels lie behind all that was said before."""
    first = answers[0].turns[0]
    e = replace(answers[0], turns=(first, replace(first, prompt=(5, 6, 7), continues=0)))
    formats.write("episodes", tmp_path / "two.jsonl", [e], None,
                  annotations=[Annotation(e.id, "label", "step", (-1.0, 2.0), 1)])  # fmt: skip
    (((s,),), _) = read(config(), str(tmp_path / "two.jsonl"))
    assert len(s.tokens) == 6 + 3 + 4 and np.nonzero(s.streams["class_weight"])[0].tolist() == [11]


def test_pairs_of_answers_of_one_question(tmp_path, answers):
    """Right ones of p are 0/0 and 0/2, the wrong one 0/1; q has no wrong one."""
    file = stored(tmp_path, answers)
    rows, lost = read(config(kind="pairwise"), file)
    said = lambda rows: [[WORDS.decode(s.tokens[2:-1]) for s in row] for row in rows]
    assert said(rows) == [["a\nb", "a\nc"], ["f\ng", "a\nc"]] and lost == {}
    for row in rows:
        assert [s.role for s in row] == ["chosen", "rejected"] and [s.mass["weight"] for s in row] == [1.0, 0.0]
        assert all(np.nonzero(s.streams["weight"])[0].tolist() == [len(s.tokens) - 2] for s in row)
    (tmp_path / "pairs.jsonl").write_text(
        '{"chosen": "0/2", "rejected": "0/0"}\n{"chosen": "0/2", "rejected": "9/9"}\n'
    )
    rows, lost = read(config(kind="pairwise", pair_file=str(tmp_path / "pairs.jsonl")), file)
    assert said(rows) == [["f\ng", "a\nb"]] and lost == {"pairs_without_episode": 1}
    with pytest.raises(DataError, match="kind pairwise needs two answers to compare"):
        read(config(kind="pairwise"), stored(tmp_path, answers[2:], name="right.jsonl"))
    (tmp_path / "listed.jsonl").write_text('{"prompt": "p\\n", "chosen": "x", "rejected": "y"}\n')
    rows, _ = read(config(kind="pairwise", format="pairs"), str(tmp_path / "listed.jsonl"))
    assert said(rows) == [["x", "y"]]


def test_a_pair_that_is_drawn_twice_is_two(tmp_path, answers):
    rows, _ = read(config(kind="pairwise"), stored(tmp_path, answers))
    assert [(s.unit, s.role) for s in tied([rows[0], rows[0]])] == [
        ("0", "chosen"), ("0", "rejected"), ("1", "chosen"), ("1", "rejected"),
    ]  # fmt: skip
    alone, _ = read(config(kind="outcome"), stored(tmp_path, answers))
    assert {s.unit for s in tied(alone)} == {""}


def test_outcomes_of_what_was_judged(tmp_path, answers):
    none = replace(answers[2], outcomes={"self": Invalid("no answer")})
    cut = replace(answers[3], turns=(replace(answers[3].turns[0], stop="length"),))
    rows, skipped = read(config(kind="outcome"), stored(tmp_path, [*answers[:2], none, cut]))
    places = [np.nonzero(s.streams["class_weight"])[0].tolist() for (s,) in rows]
    assert places == [[4], [4], [5]]  # of an answer that was cut, behind its last token
    assert [s.streams["label"].sum() for (s,) in rows] == [1, 0, 1] and sum(skipped.values()) == 1
    with pytest.raises(DataError) as found:
        read(config(kind="outcome", seat="judge"), stored(tmp_path, answers))
    assert str(found.value) == "episode '0/0' has no turn of seat 'judge'."


def test_several_files_are_one_and_each_must_hold_something(tmp_path, answers):
    one = stored(tmp_path, answers[:2], [(1.0, 2.0), (0.0, 0.0)])
    two = stored(tmp_path, answers[:1], [(3.0, 3.0)], name="more.jsonl")
    rows, _ = read(config(), one, two)
    assert [(s.episode, int(s.streams["label"].max())) for (s,) in rows] == [("0/0", 2), ("0/1", 0), ("0/0", 3)]
    told = config(kind="outcome", format="trajectories")
    twice, _ = read(told, *[str(tmp_path / "scored.jsonl")] * 2)
    assert [s.episode for (s,) in twice[3:6]] == ["0/2", "1:0/0", "1:0/1"] and len(twice) == 8
    rows, skipped = read(config(), one, two, limit=6)
    assert len(rows) == 3 and skipped == {}
    with pytest.raises(DataError, match="data.jsonl: holds no row"):
        read(config(), one, two, limit=5)


def test_answers_are_encoded_when_they_are_asked_for(tmp_path, answers, monkeypatch):
    """A large file is gone over without encoding what surely fits, and gives the rows of a reading at once."""
    file, told = str(tmp_path / "scored.jsonl"), config(kind="outcome", format="trajectories")
    seen, plain = [], turns._encode
    monkeypatch.setattr(turns, "_encode", lambda *a: seen.append(a[1]) or plain(*a))
    rows, _ = read(told, file, limit=64)
    assert seen == [] and len(rows) == 4
    assert rows[2][0].tokens.tolist() == WORDS("q\nd\ne" + WORDS.eos_token)["input_ids"] and len(seen) == 1
    assert rows[2][0] is rows[2][0]  # kept: a small file is encoded once
    assert [s.episode for (s,) in rows] == ["0/0", "0/1", "1/0", "0/2"] and len(seen) == 4
    read(told, file, limit=6)
    assert len(seen) == 8  # each might not fit, so each is encoded to know


def test_a_large_file_is_not_held_in_memory(tmp_path, answers, monkeypatch):
    monkeypatch.setattr(on_demand, "LIMIT", 0)
    file = stored(tmp_path, answers, [(2.0, 3.0), (1.0, 1.0)])
    rows, _ = read(config(), file)
    (first,), (again,) = rows[0], rows[0]
    assert first is not again and first.streams["label"].tolist() == again.streams["label"].tolist()
    Path(file).write_text(Path(file).read_text() + "\n")
    with pytest.raises(DataError, match="was changed while it was being read"):
        rows[1]


def test_every_mistake_of_a_file_is_found_at_the_start(tmp_path, answers):
    file = stored(tmp_path, answers, [(2.0, 3.0), (1.0, 9.0)])
    with pytest.raises(DataError, match="'0/1': the label 9 is no class from 0 to 3"):
        read(config(), file)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "p", "response": "a", "reward": 1}\n{"prompt": "p", "response": 3, "reward": 1}\n')
    with pytest.raises(DataError, match=f"{bad}:2: key 'response': must be text"):
        read(config(kind="outcome", format="trajectories"), str(bad))
    judged_steps = tmp_path / "steps.jsonl"
    judged_steps.write_text('{"question": "p", "steps": ["a", "b"], "labels": [1, 0]}\n')
    (row,), _ = read(config(format="step-labels"), str(judged_steps))
    assert row[0].mass == {"class_weight": 2.0}


def test_objectives_and_heads():
    for kind, cls, outputs in (("classes", Classify, 5), ("outcome", Classify, 2), ("pairwise", Ranking, 1),
                               ("scalar", Value, 1)):  # fmt: skip
        c = config(kind=kind, outputs=5)
        assert isinstance(make_objective(c), cls) and load_head(c).heads[HEAD].weight.shape == (outputs, 16)
        assert not load_head(c).heads[HEAD].weight.any()


def test_epochs_are_steps_and_batches_are_drawn_as_planned(tmp_path, answers):
    """Four rows in batches of 3: two epochs are ceil(8 / 3) steps, of 3, 3 and 2 rows. Five letters and the end
    token, or labels, a row."""
    file = stored(tmp_path, answers, [(2.0, 3.0)] * 4)
    c = config(data=file, epochs=2, batch=3, out=str(tmp_path / "run"))
    method = RewardModelMethod(c, Run.create(tmp_path / "run", "method: x\n"))
    assert method.config.steps == 3 and method.metrics() == {"rows": 4}
    (update,) = method.updates(1)
    drawn = method.unscored_samples(1)
    assert len(drawn) == 3 and [s.tokens.tolist() for s in update.samples] == [s.tokens.tolist() for s in drawn]
    for probe in (False, True):
        (part,) = make_plan(c, probe).parts
        assert (part.steps, part.tokens.learnt, part.tokens.longest) == (3, 16, 6)
        assert part.tokens.trained == pytest.approx(16 / 3)
        assert not any("not known" in w for w in part.warnings)
    (scalar,) = make_plan(config(data=file, kind="scalar", batch=3), False).parts
    (pairs,) = make_plan(config(data=file, kind="pairwise", batch=1), False).parts
    assert scalar.tokens.trained == 6 and pairs.tokens.trained == 2


@pytest.mark.parametrize("kind", ["classes", "outcome", "pairwise", "scalar"])
def test_an_evaluation_is_that_of_a_loop(tmp_path, answers, make_lm, kind):
    lm = make_lm("llama", dtype=torch.float64)
    lm.add_head(HEAD, {"classes": 4, "outcome": 2}.get(kind, 1), zero=False, seed=2)
    file = stored(tmp_path, answers, [(2.0, 3.0), (1.0, 0.0), (0.0, -1.0), (3.0, 1.0)])
    rows, _ = read(config(kind=kind), file)
    got = judged(Learner({"value": lm}, LearnerConfig(), {"value": LearnerConfig().optim}), tied(rows), kind)

    def says(s, at):
        with torch.no_grad():
            out = lm.base(torch.tensor(s.tokens[None]), output_hidden_states=True).hidden_states[-1][0, at]
            return (lm.heads[HEAD].weight @ out).tolist()

    right, loss = [], []
    for row in rows:
        if kind == "pairwise":
            (a,), (b,) = (says(s, len(s.tokens) - 2) for s in row)
            right.append(a > b)
            loss.append(math.log(1 + math.exp(b - a)))
            continue
        s, name = row[0], "value_weight" if kind == "scalar" else "class_weight"
        for at in np.nonzero(s.streams[name])[0]:
            out = says(s, at)
            if kind == "scalar":
                right.append((out[0] >= 0.5) == (s.streams["returns"][at] >= 0.5))
                loss.append((out[0] - s.streams["returns"][at]) ** 2)
            else:
                label = s.streams["label"][at]
                right.append(out.index(max(out)) == label)
                loss.append(math.log(sum(map(math.exp, out))) - out[label])
    name = {"pairwise": "ranking", "scalar": "value"}.get(kind, "cross_entropy")
    assert len(loss) == {"pairwise": 2, "outcome": 4}.get(kind, 7)
    assert got == {"accuracy": pytest.approx(np.mean(right)), name: pytest.approx(np.mean(loss), abs=1e-6)}


def test_a_dry_run_counts_the_rows_of_each_file(tmp_path):
    """Its files hold episodes, which are no conversations."""
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for k, file in enumerate(files):
        file.write_text('{"kind": "episode"}\n' * (k + 1))
    given = {"method": "reward_model", "out": str(tmp_path / "run"), "model": {"name": "tiny"}}
    check = lambda data: RewardModelMethod.check(resolve({**given, "data": data}, RewardModelRecipe))
    assert check(str(files[0])) == [f"data: {files[0]}, 1 rows"]
    gone = str(tmp_path / "gone.jsonl")
    assert check([str(files[1]), gone]) == [f"data: {files[1]}, 2 rows", f"data: {gone}, which is not here yet"]
