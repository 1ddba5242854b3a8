"""EPO's training on files: string scores as they are, what is refused, cutting, the numbers of the loss."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trailmark import formats
from trailmark.config import resolve
from trailmark.errors import DataError, RecipeError
from trailmark.formats.rows import RowFile
from trailmark.formats.turns import Reader, Starts
from trailmark.methods import get_config, get_method
from trailmark.methods.epo.data import (
    Source,
    Trajectories,
    Trajectory,
    out_of_turn,
    room,
    row_trajectory,
    samples_of,
    shortened,
    sources_of,
)
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.launch import launch
from trailmark.runs.store import Run, read_metrics
from trailmark.types import Annotation, Episode, Scored, Task, Turn

TINY = tiny_tokenizer()
MODEL = {"name": "tiny", "dtype": "float64", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 512}}


def talk(*said, system=None, **rest):
    messages = [] if system is None else [{"from": "system", "value": system}]
    for k, (text, score) in enumerate(said):
        messages.append({"from": "human", "value": f"ask {k}"})
        messages.append({"from": "gpt", "value": text} | ({} if score is None else {"score": score}))
    return {"conversations": messages, **rest}


ROWS = [
    talk(("Strategy: ask", "0.9801"), ("Strategy: trade", "1.0"), system="be nice"),
    talk(("Strategy: push", 0.5)),
    talk(("a", "-0.25"), ("bb", "0"), ("ccc", "1e-1")),
]


def put(tmp_path, rows, name="rl.json"):
    path = tmp_path / name
    path.write_text(json.dumps(rows, indent=4), "utf-8")
    return path


def recipe(tmp_path, rows=ROWS, **more):
    data = {} if "dataset" in more else {"data": str(put(tmp_path, rows))}
    raw = {"method": "epo", "out": str(tmp_path / "run"), "model": MODEL, "steps": 3, "batch": 3, **data}
    raw["learner"] = {"optim": {"lr": 1e-2}}
    return resolve({**raw, **more}, get_config("epo"))


def train(config, name="epo"):
    launch(get_method(name), config)
    return read_metrics(Run.open(config.out).path)


def loss_of(lm, trajectories):
    """-(1/N) sum_traj (1/T) sum_t w_t mean_i log p, in a loop over the tokens of each sequence."""
    total = 0.0
    for t in trajectories:
        e = t.episode
        for k, (turn, w) in enumerate(zip(e.turns, t.weights, strict=True)):
            ids = torch.tensor([e.sequence(k)])
            logp = lm.model(ids).logits[0].log_softmax(-1).detach()
            own = [float(logp[len(e.sequence(k)) - len(turn.tokens) + i - 1, x]) for i, x in enumerate(turn.tokens)]
            total -= w * np.mean(own) / len(e.turns)
    return total / len(trajectories)


def test_string_scores_train_as_they_are(tmp_path):
    config = recipe(tmp_path)
    rows = train(config)
    held = Trajectories([Source(tmp_path / "rl.json")], "sharegpt", TINY, ["strategist"], 512)
    assert [t.weights for t in held] == [(0.9801, 1.0), (0.5,), (-0.25, 0.0, 0.1)]
    assert rows[0]["policy"] == pytest.approx(loss_of(load_model(config.model), held), abs=1e-9)
    assert rows[2]["policy"] < rows[0]["policy"] and rows[0]["rows"] == 3


def test_the_size_of_a_micro_batch_changes_nothing(tmp_path):
    found = []
    for k, micro in enumerate((None, 1)):
        exact = {**MODEL, "shape": {**MODEL["shape"], "family": "gpt2"}}  # whose norms are of the weights' dtype
        learner = {"optim": {"lr": 1e-2}, "micro_tokens": micro}
        config = recipe(tmp_path, out=str(tmp_path / f"run{k}"), learner=learner, model=exact)
        train(config)
        found.append(load_model(config.model.model_copy(update={"name": f"{config.out}/checkpoints/000003/policy"})))
    for (_, a), (_, b) in zip(found[0].parameters(), found[1].parameters()):
        assert torch.allclose(a, b, atol=1e-6)


def test_weights_of_zero_change_no_weight(tmp_path):
    config = recipe(tmp_path, [talk(("a", "0"), ("b", 0.0)), talk(("c", "0.0"))])
    rows = train(config)
    start = load_model(config.model)
    end = load_model(config.model.model_copy(update={"name": f"{config.out}/checkpoints/000003/policy"}))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(start.parameters(), end.parameters()))
    assert rows[0]["policy"] == 0 and rows[0]["skipped_zero"] == 0
    with pytest.raises(DataError, match="no trajectory that can be learnt from .2 zero."):
        train(recipe(tmp_path, [talk(("a", 0)), talk(("c", "0"))], out=str(tmp_path / "again"), skip_zero=True))


def test_an_unscored_file_is_refused_by_epo_and_accepted_by_sft(tmp_path):
    rows = [talk(("a", None), ("b", None)), talk(("c", None))]
    with pytest.raises(DataError) as error:
        train(recipe(tmp_path, rows))
    assert str(error.value).startswith(f"{tmp_path}/rl.json: key '[0].conversations[1].score': has no score")
    raw = {"method": "sft", "data": str(tmp_path / "rl.json"), "out": str(tmp_path / "sft"), "model": MODEL, "steps": 2}
    assert train(resolve(raw, get_config("sft")), "sft")[0]["nll"] > 0
    scored = {**raw, "data": str(put(tmp_path, ROWS, "scored.json")), "out": str(tmp_path / "sft2")}
    assert train(resolve(scored, get_config("sft")), "sft")[0]["nll"] > 0  # the scores are not read


@pytest.mark.parametrize(
    ("edit", "key", "says"),
    [
        (lambda m: m[3].update(score="high"), "[1].conversations[3].score", "must be a finite number, not 'high'"),
        (lambda m: m[3].update(score=None), "[1].conversations[3].score", "has no score"),
        (lambda m: m[3].pop("score"), "[1].conversations[3].score", "has no score"),
        (lambda m: m[3].update(score="nan"), "[1].conversations[3].score", "finite"),
        (lambda m: m[2].update(score="1"), "[1].conversations[2].score", "on a message from 'human'"),
    ],
)
def test_a_bad_score_names_its_row_and_key(tmp_path, edit, key, says):
    rows = [talk(("a", 1), ("b", 1)), talk(("a", 1), ("b", 1))]
    edit(rows[1]["conversations"])
    with pytest.raises(DataError) as error:
        train(recipe(tmp_path, rows))
    assert str(error.value).startswith(f"{tmp_path}/rl.json: key '{key}': ") and says in str(error.value)


def test_rows_whose_speakers_do_not_take_turns_are_dropped_and_counted(tmp_path):
    bad = [talk(("a", 1)), talk(("a", 1)), talk(("a", 1)), talk(("a", 1))]
    bad[0]["conversations"].append({"from": "human", "value": "and?"})
    bad[1]["conversations"].insert(0, {"from": "gpt", "value": "hi", "score": 1})
    bad[2]["conversations"][0]["from"] = "user"
    bad[3]["conversations"].insert(2, {"from": "gpt", "value": "hi", "score": 1})
    held = Trajectories([Source(put(tmp_path, [*bad, *ROWS]))], "sharegpt", TINY, ["strategist"], 512)
    assert len(held) == 3 and held.counts["skipped_roles"] == 4
    with pytest.raises(DataError, match="no row can be used; the first: .* the last message is not the model's"):
        Trajectories([Source(put(tmp_path, bad))], "sharegpt", TINY, ["strategist"], 512)


def test_data_sets_by_name(tmp_path):
    put(tmp_path, ROWS, "a.json"), put(tmp_path, [*ROWS[:1], talk(("x", None))], "b.json")
    told = [{"role": "you", "text": "q"}, {"role": "model", "text": "a", "score": "0.75"}]
    put(tmp_path, [{"talk": told}], "c.json")
    tags = {"role_tag": "role", "content_tag": "text", "user_tag": "you", "assistant_tag": "model"}
    ours = {"formatting": "sharegpt"}
    info = {"one": {**ours, "file_name": "a.json"}, "two": {**ours, "file_name": "b.json"},
            "three": {**ours, "file_name": "c.json", "columns": {"messages": "talk"}, "tags": tags}}  # fmt: skip
    put(tmp_path, info, "dataset_info.json")
    config = recipe(tmp_path, dataset="one,three", dataset_dir=str(tmp_path))
    assert train(config)[0]["rows"] == 4
    sources = sources_of([], "one,two,three", str(tmp_path), 1)
    held = Trajectories(sources, "sharegpt", TINY, ["strategist"], 512)  # of each set its first row, before mistakes
    assert [t.weights for t in held] == [(0.9801, 1.0), (0.9801, 1.0), (0.75,)]
    with pytest.raises(DataError, match=r"key '\[1\].conversations\[1\].score'"):
        Trajectories(sources_of([], "one,two", str(tmp_path), 2), "sharegpt", TINY, ["strategist"], 512)
    with pytest.raises(RecipeError, match="data and dataset are both given"):
        recipe(tmp_path, dataset="one", data="x.json")
    with pytest.raises(DataError, match="a name is missing at a comma"):
        train(recipe(tmp_path, dataset="one,", dataset_dir=str(tmp_path), out=str(tmp_path / "no")))


def test_our_own_episodes_with_scores(tmp_path):
    made = Trajectories([Source(put(tmp_path, ROWS))], "sharegpt", TINY, ["strategist"], 512)
    episodes = [t.episode for t in made]
    notes = [Annotation(t.episode.id, "score", "turn", (w,), k) for t in made for k, w in enumerate(t.weights)]
    formats.write("episodes", tmp_path / "own.jsonl", episodes, None, annotations=notes)
    held = Trajectories([Source(tmp_path / "own.jsonl")], "episodes", None, ["strategist"], 512)
    assert [(t.weights, t.episode) for t in held] == [(t.weights, t.episode) for t in made]
    formats.write("sharegpt", tmp_path / "back.json", episodes, TINY, annotations=notes)
    back = json.loads((tmp_path / "back.json").read_text())
    assert [m["score"] for r in back for m in r["conversations"] if m["from"] == "gpt"] == [
        "0.9801", "1.0", 0.5, "-0.25", "0", "1e-1"]  # fmt: skip
    formats.write("episodes", tmp_path / "bare.jsonl", episodes, None, annotations=notes[1:])
    says = r"bare.jsonl:1: turn 0 of seat 'strategist' in episode .* has no annotation 'score'"
    with pytest.raises(DataError, match=says):
        Trajectories([Source(tmp_path / "bare.jsonl")], "episodes", None, ["strategist"], 512)


def test_turns_after_a_system_message_keep_their_scores():
    row = talk(*((f"hm</think>text {k}", f"{k / 64}") for k in range(60)), system="s")
    for template in ("chatml", "rewrites"):
        tokenizer = tiny_tokenizer()
        if template == "rewrites":  # an old answer is shown without its thought, so each turn is a sequence of its own
            tokenizer.chat_template = tokenizer.chat_template.replace(
                "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
            )
        t = row_trajectory(Reader(tokenizer, "strategist", Starts()), row_of(row))
        assert t.weights == tuple(k / 64 for k in range(60)) and len(t.episode.turns) == 60
        samples = samples_of([t])
        assert len(samples) == (1 if template == "chatml" else 60)
        for s in samples:
            for k in set(s.streams["turn"].tolist()) - {-1}:
                on = s.streams["turn"] == k
                assert set(s.streams["advantage"][on]) == {k / 64}
                assert s.streams["weight"][on].sum() == pytest.approx(1 / 60)
                text = tokenizer.decode(s.tokens[on])
                assert text.startswith(f"hm</think>text {k}") and text.endswith("<|im_end|>")


def row_of(value):
    from pathlib import Path

    from trailmark.formats.rows import Row

    return Row(value, Path("x.json"), None, 0)


# --- cutting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("s", "t", "c", "want"),
    [
        (10, 10, 30, (10, 10)), (3, 20, 30, (3, 20)), (25, 25, 50, (25, 25)),
        (60, 10, 30, (20, 10)),  # 2t < c: the whole answer
        (10, 60, 30, (10, 20)),  # 2s < c: the whole question
        (60, 30, 30, (20, 10)), (60, 30, 2, (2, 0)), (60, 30, 0, (0, 0)), (40, 41, 30, (15, 15)),
    ],
)  # fmt: skip
def test_the_rule_of_the_original(s, t, c, want):
    assert room(s, t, c) == want


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60), st.integers(1, 300))
def test_segments_and_weights_stay_together(sizes, limit):
    turns = [Turn("p", (1,) * s, (k + 2,) * t, logp=(0.0,) * t, logq=(0.0,) * t, continues=k - 1 if k else None)
             for k, (s, t) in enumerate(sizes)]  # fmt: skip
    e = Episode("e", Task("t"), "g", tuple(turns), {"": Scored(1.0)})
    whole = Trajectory(e, "p", tuple(float(k + 2) for k in range(len(turns))))
    kept = shortened(whole, limit)
    if kept is None:
        s, t = sizes[0]
        assert room(s, t, limit)[1] == 0
        return
    assert len(kept.weights) == len(kept.episode.turns) and all(t.tokens for t in kept.episode.turns)
    assert sum(len(t.prompt) + len(t.tokens) for t in kept.episode.turns) <= limit
    (sample,) = samples_of([kept])
    on = sample.streams["weight"] > 0
    assert (sample.streams["advantage"][on] == sample.tokens[on]).all()  # each token was written by the turn it weighs
    assert sample.streams["weight"].sum() == pytest.approx(1.0) and sample.mass["weight"] == pytest.approx(1.0)
    n = len(kept.weights)
    for k, turn in enumerate(kept.episode.turns):
        assert sample.streams["weight"][sample.streams["turn"] == k] == pytest.approx(1 / (n * len(turn.tokens)))
    if len(kept.weights) == len(turns) and kept.episode.turns[-1] == turns[-1]:
        assert kept is whole


def test_cut_rows_are_counted_and_rows_without_an_answer_left_are_dropped(tmp_path):
    long = talk(("x" * 30, 1), ("y" * 400, "0.5"), ("z", 0.25))
    none = talk(("a" * 3, 1))
    none["conversations"][0]["value"] = "b" * 4000
    held = Trajectories([Source(put(tmp_path, [long, none]))], "sharegpt", TINY, ["strategist"], 160)
    first = held[0]
    assert first.weights == (1.0, 0.5) and len(first.episode.sequence(1)) == 160
    assert held.counts["cut"] + held.counts["skipped_no_turn"] == 2
    assert out_of_turn(row_of(long)) == ""


def test_ppo_needs_turns_that_a_model_drew(tmp_path):
    with pytest.raises(RecipeError, match="objective ppo needs the log-probs of played turns"):
        recipe(tmp_path, objective="ppo")
    made = Trajectories([Source(put(tmp_path, ROWS))], "sharegpt", TINY, ["strategist"], 512)
    notes = [Annotation(t.episode.id, "score", "turn", (w,), k) for t in made for k, w in enumerate(t.weights)]
    formats.write("episodes", tmp_path / "own.jsonl", [t.episode for t in made], None, annotations=notes)
    config = recipe(tmp_path, objective="ppo", data=str(tmp_path / "own.jsonl"), format="episodes")
    with pytest.raises(DataError, match="objective ppo: a turn has no log-probs"):
        train(config)
    assert len(RowFile(tmp_path / "rl.json")) == 3 and math.isfinite(1.0)
