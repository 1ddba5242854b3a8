"""The road of LPR on folders that were written by hand: which stages, what they read and make, and their refusals."""

import json
from dataclasses import replace

import numpy as np
import pytest

from trailmark import formats
from trailmark.config import resolve
from trailmark.data.gold import worked
from trailmark.errors import DataError, RecipeError, RunError
from trailmark.formats.turns import Reader, Starts, plain
from trailmark.methods.lpr.commands import records_of
from trailmark.methods.lpr.config import LprRecipe
from trailmark.methods.lpr.method import LprMethod
from trailmark.methods.lpr.round import Round, shard_name
from trailmark.methods.lpr.states import must_be_shown, told_starts
from trailmark.rollout.branch import Point
from trailmark.runs.episode_json import to_json
from trailmark.runs.stages import record_of
from trailmark.runs.store import Run, read_segment
from trailmark.score import classes
from trailmark.steps import mark_steps, without_end
from trailmark.tasks import get_task
from trailmark.types import Annotation, Episode, Parent, Scored, Task

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 64}}


def road(folder, **more):
    given = {"method": "lpr", "out": str(folder), "model": TINY, "steps": 1}
    return Round(resolve({**given, **more}, LprRecipe), Run(folder))


def stages(r):
    return LprMethod.stages(r.config, r.run)


def stage(r, kind):
    return next(s for s in stages(r) if s.name == f"{kind}-1")


def solution(r, name, text, right, group="g"):
    turn = plain(Reader(r.tokenizer, "policy", Starts()), "q\n", text)
    e = Episode(name, Task(f"task {group}"), group, (turn,), {"self": Scored(float(right), right)})
    return without_end(mark_steps(e, "policy", r.tokenizer, "newline"), "policy", r.tokenizer)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def put(r, solutions, scores=None):
    """The folders that the stage `pairs` reads."""
    r.at("cleaned").mkdir(parents=True)
    formats.write("episodes", r.at("cleaned") / "all.jsonl", solutions, None)
    if scores is not None:
        outputs = {(e.id, 0): np.array(s) for e, s in zip(solutions, scores)}
        notes = classes.output_notes(outputs, "m")
        write(r.at("scores") / "scores.jsonl", "".join(to_json(a) + "\n" for a in notes))


def made(stage, folder):
    folder.mkdir(parents=True, exist_ok=True)
    return stage.make(folder)


def lines(folder):
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]


# --- which stages, and what they name --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "classes"),
    [
        ({}, [2, 3]),
        ({"complete": {"n": 1}}, [1]),
        ({"complete": {"n": 2}}, [2]),
        ({"complete": {"n": 5}}, [2, 3, 4, 5]),
        ({"labels": {"binary": True}}, [1]),
        ({"prm": {"kind": "outcome"}}, [1]),
        ({"prm": {"kind": "pairwise"}}, None),
        ({"prm": {"kind": "scalar"}}, None),
        ({"read": {"classes": [3]}}, [3]),
    ],
)
def test_the_classes_that_are_read(tmp_path, more, classes):
    assert road(tmp_path, **more).read().classes == classes


@pytest.mark.parametrize(
    ("more", "prm"),
    [
        ({}, True),
        ({"pairs": {"process": False}}, False),
        ({"pairs": {"process": False, "states": {}}}, True),
        ({"pairs": {"steps": {}}}, False),
        ({"pairs": {"steps": {"by": "score"}}}, True),
        ({"preference": None, "rl": {}}, True),
        ({"preference": None, "rl": {"rewards": {"right": 1.0, "alpha": 0}}}, False),
        ({"preference": None, "rl": {"rewards": {"model": "elsewhere"}}}, False),
    ],
)
def test_who_needs_a_reward_model(tmp_path, more, prm):
    r = road(tmp_path, **more)
    assert r.needs_prm() is prm and ("prm-1" in [s.name for s in stages(r)]) is prm


def test_scores_from_elsewhere_need_no_model_and_scores_of_steps_need_completions(tmp_path):
    names = lambda **more: [s.name.removesuffix("-1") for s in stages(road(tmp_path, **more))]
    assert names(files={"solutions": "s", "scores": "x"}) == ["solutions", "cleaned", "scores", "pairs", "policy"]
    both = {"files": {"scores": "x"}, "rl": {"algorithm": "grpo", "n": 2}}  # reinforcement reads the model itself
    assert "prm" in names(**both) and names(**both)[-1] == "rl"
    assert names(prm={"kind": "pairwise"}, pairs={"steps": {"by": "score"}}) == [
        "solutions", "cleaned", "states", "completions", "prm", "scores", "pairs", "policy",
    ]  # fmt: skip


def test_pairs_from_elsewhere_need_no_model_but_reinforcement_may(tmp_path):
    names = lambda **more: [s.name for s in stages(road(tmp_path, **{"files": {"pairs": "p"}, **more}))]
    assert names() == ["pairs-1", "policy-1"]
    assert names(rl={"rewards": {"right": 1.0, "alpha": 0}}) == ["pairs-1", "policy-1", "rl-1"]
    paid = names(rl={"algorithm": "grpo", "n": 2})  # what its steps earn is said by the round's reward model
    assert paid[:2] == ["solutions-1", "cleaned-1"]
    assert paid[-5:] == ["prm-1", "scores-1", "pairs-1", "policy-1", "rl-1"]
    both = {"pairs": "p", "solutions": "s"}
    assert names(files=both) == ["solutions-1", "cleaned-1", "pairs-1", "policy-1"]
    assert names(files=both, pairs={"steps": {}}) == ["solutions-1", "cleaned-1", "pairs-1", "policy-1"]
    later = names(steps=2)
    assert "prm-1" not in later and "prm-2" in later
    for more in ({"preference": None, "rl": {}}, {"preference": {"objective": "rejection"}}):
        with pytest.raises(RecipeError, match="files.pairs needs section preference, with another objective"):
            names(**more)


def test_a_file_is_encoded_again_for_another_tokenizer_and_another_task(tmp_path):
    files = {"solutions": "s"}
    one = stage(road(tmp_path, files=files), "solutions")
    other = stage(road(tmp_path, files=files, model={"name": "elsewhere"}), "solutions")
    task = stage(road(tmp_path, files=files, task={"name": "arith", "options": {"level": 3}}), "solutions")
    assert "model" in one.settings and other.settings["model"] == {"name": "elsewhere"}
    assert task.settings != one.settings and one.inputs == {"file 0": "s"}
    pairs = [stage(road(tmp_path, files={"pairs": "p"}, model={"name": m}), "pairs") for m in ("tiny", "elsewhere")]
    assert pairs[0].settings != pairs[1].settings


def test_scores_of_completions_belong_to_pairs_by_score_alone(tmp_path):
    """With reinforcement there are scores either way: they are made again when pairs begin to need those of steps."""
    scores = lambda by: stage(road(tmp_path, pairs={"steps": {"by": by}}, rl={}), "scores")
    assert scores("outcome").settings == {} and scores("score").settings["pairs"] == {"steps": {"by": "score"}}
    assert "completions-1" in scores("score").inputs and "completions-1" not in scores("outcome").inputs


def test_each_round_begins_with_the_last_policy(tmp_path):
    at = lambda r, k: Round(r.config, r.run, k)
    r = road(tmp_path, steps=3)
    names = [at(r, k).policy().name.replace(str(tmp_path), "") for k in (1, 2, 3)]
    assert names == ["tiny", "/policy-1", "/policy-2"]
    r = road(tmp_path, steps=2, rl={"algorithm": "grpo", "n": 2}, teacher={"gold": True})
    assert [at(r, k).ends_with for k in (0, 1, 2)] == ["sft", "rl-1", "rl-2"]
    assert at(r, 2).policy(after_preference=True).name == str(tmp_path / "policy-2")
    assert at(r, 2).policy_stages == ["rl-1"] and road(tmp_path).policy_stages == []
    second = next(s for s in stages(r) if s.name == "solutions-2")
    assert second.inputs == {"rl-1": tmp_path / "rl-1"} and "name" not in second.settings["model"]
    alone = road(tmp_path, steps=2, preference=None, rl={"algorithm": "grpo", "n": 2})
    assert at(alone, 2).policy(after_preference=True).name == str(tmp_path / "rl-1")
    checked = LprMethod.check(road(tmp_path, steps=2, pairs={"process": False}).config)
    assert checked == [
        "stages: solutions-1, cleaned-1, pairs-1, policy-1, solutions-2, cleaned-2, pairs-2, policy-2"
    ]


def test_the_recipes_of_trainings(tmp_path):
    more = {"complete": {"n": 4}, "seed": 5, "rl": {"n": 2, "rewards": {"right": 1.0}}, "clean": {"split": "sentence"}}
    r = road(tmp_path, **more, read={"skip": ["Action"]}, labels={"dev_shards": [0]})
    of = {s.name: s.settings for s in stages(r)}
    prm = of["prm-1"]
    assert prm["data"] == "{root}/examples-1/train.jsonl" and prm["eval_data"] == "{root}/examples-1/dev.jsonl"
    assert (prm["outputs"], prm["seed"]) == (5, 5)
    assert prm["read"] == {"classes": [2, 3, 4], "over": "product", "skip": ["Action"], "split": "sentence"}
    assert of["policy-1"]["pair_file"] == "{root}/pairs-1/pairs.jsonl"
    assert of["policy-1"]["data"] == ["{root}/cleaned-1/all.jsonl"]
    assert of["rl-1"]["model"]["name"] == "{root}/policy-1"
    assert of["rl-1"]["rewards"] == {
        "model": "{root}/prm-1", "classes": [2, 3, 4], "skip": ["Action"], "right": 1.0, "split": "sentence",
    }  # fmt: skip
    best = {s.name: s.settings for s in stages(road(tmp_path, preference={"objective": "rejection"}))}
    assert best["policy-1"]["data"] == "{root}/pairs-1/chosen.jsonl" and "pair_file" not in best["policy-1"]
    steps = {s.name: s.settings for s in stages(road(tmp_path, pairs={"steps": {}}))}
    assert steps["policy-1"]["data"] == ["{root}/completions-1/all.jsonl"]
    binary = {s.name: s.settings for s in stages(road(tmp_path, labels={"binary": True}))}
    assert binary["prm-1"]["outputs"] == 2 and binary["prm-1"]["read"]["classes"] == [1]


def test_a_training_has_the_learner_of_the_recipe_but_for_what_its_section_says(tmp_path):
    own = {"learner": {"optim": {"lr": 1e-2, "groups": {"head": {"lr": 0.5}}}}, "eval": {"every": 7}}
    shared = {"amp": "bf16", "micro_tokens": 99, "optim": {"lr": 1e-3, "weight_decay": 0.01}}
    r = road(tmp_path, learner=shared, eval={"split": "val", "n": 5}, preference=own, rl={"learner": {"ema": 0.9}})
    of = {s.name: s.settings for s in stages(r)}
    assert of["policy-1"]["learner"] == {
        "amp": "bf16", "micro_tokens": 99,
        "optim": {"lr": 1e-2, "weight_decay": 0.01, "groups": {"head": {"lr": 0.5}}},
    }  # fmt: skip
    assert of["policy-1"]["eval"] == {"every": 7, "split": "val", "n": 5}
    assert of["prm-1"]["learner"] == shared and of["rl-1"]["learner"] == {**shared, "ema": 0.9}


def test_the_teachers_solutions_are_imitated_again_beside_the_best_ones(tmp_path):
    more = {"teacher": {"gold": True, "replay": True}, "preference": {"objective": "rejection"}}
    of = {s.name: s for s in stages(road(tmp_path, **more))}
    assert of["policy-1"].settings["data"] == ["{root}/pairs-1/chosen.jsonl", "{root}/lessons/all.jsonl"]
    assert of["policy-1"].inputs["lessons/all.jsonl"] == tmp_path / "lessons/all.jsonl"
    with pytest.raises(RecipeError, match="teacher.replay belongs to preference.objective rejection"):
        road(tmp_path, teacher={"gold": True, "replay": True})
    with pytest.raises(RecipeError, match="teacher.replay: there is no teacher"):
        road(tmp_path, teacher={"replay": True}, preference={"objective": "rejection"})


def test_names_of_shards():
    assert [shard_name(0, 1), shard_name(0, 12), shard_name(11, 12)] == [
        "states.jsonl", "states.0-of-12.jsonl", "states.11-of-12.jsonl",
    ]  # fmt: skip


def test_shards_are_read_by_their_numbers(tmp_path):
    """Shard 10 comes behind shard 9, and an empty one holds nothing."""
    r = road(tmp_path)
    for i in range(11):
        write(r.at("states") / shard_name(i, 11), "" if i == 3 else json.dumps({"n": i}) + "\n")
    assert [s["n"] for s in r.shard(None)] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert [s["n"] for s in r.shard([10, 2])] == [2, 10] and r.shard([]) == []
    with pytest.raises(DataError) as found:
        Round(r.config, r.run, 2).shard()
    assert str(found.value) == f"{tmp_path / 'states-2'}: holds no states."
    some = road(tmp_path, states={"shards": 4}, complete={"shards": [2]}, labels={"dev_shards": [0, 2]})
    assert some.annotated() == [0, 2] and r.annotated() is None


# --- pairs -----------------------------------------------------------------------------------------------------------

LOW, HIGH = [0.5, 0.5, 0.5], [1.0, 0.5, 0.5]


def test_pairs_of_rewards_that_were_written_down(tmp_path):
    """Products 1/4, 1/8 and 1/4 of right ones, 1/8 of a wrong one; a margin of 0.1 ranks a and c above b."""
    task = {"name": "arith", "options": {"level": 3}}  # it has enough questions: level 1 looks long for a thousand
    r = road(tmp_path, prm={"kind": "scalar"}, pairs={"margin": 0.1, "best_of": 2}, task=task)
    said = [("a", True, HIGH), ("b", True, LOW), ("c", True, HIGH), ("w", False, LOW)]
    put(r, [solution(r, n, f"{n}\nx\ny", right) for n, right, _ in said], [s for *_, s in said])
    told = made(stage(r, "pairs"), r.at("pairs"))
    assert [p["chosen"] + p["rejected"] for p in lines(r.at("pairs"))] == ["aw", "cw", "ab", "cb"]
    assert told == {"pairs": 4, "distinct pairs": 4, "outcome pairs": 2, "process pairs": 2, "questions": 1,
                    "unscored answers": 0, "chosen answers": 2}  # fmt: skip
    assert [e.id for e in read_segment(r.at("pairs") / "chosen.jsonl")] == ["a", "c"]
    write(tmp_path / "barred.json", '["task g"]')
    exclude = {"margin": 0.1, "exclude": str(tmp_path / "barred.json")}
    barred = road(tmp_path, prm={"kind": "scalar"}, pairs=exclude, task=task)
    made(stage(barred, "pairs"), tmp_path / "second")
    assert [p["chosen"] + p["rejected"] for p in lines(tmp_path / "second")] == ["aw", "bw", "cw"]


def test_short_right_answers_are_not_imitated_either(tmp_path):
    r = road(tmp_path, pairs={"process": False, "min_right_steps": 3})
    put(r, [solution(r, "a", "a\nx\ny", True), solution(r, "b", "b\nx", True), solution(r, "w", "w\nx", False)])
    made(stage(r, "pairs"), r.at("pairs"))
    assert [p["chosen"] + p["rejected"] for p in lines(r.at("pairs"))] == ["aw"]
    assert [e.id for e in read_segment(r.at("pairs") / "chosen.jsonl")] == ["a"]


def test_pairs_of_states_are_products_up_to_there(tmp_path):
    """Of a: 1, then 1/2; of w: 1/2, then 1/4. Above by more than 0.4: only a's first step, above three others."""
    r = road(tmp_path, prm={"kind": "scalar"}, pairs={"states": {"margin": 0.4}, "right_pairs": "none"})
    put(r, [solution(r, "a", "a\nx\ny", True), solution(r, "w", "w\nx\ny", False)], [HIGH, LOW])
    made(stage(r, "pairs"), r.at("pairs"))
    found = [p for p in lines(r.at("pairs")) if p["kind"] == "state"]
    ends = [(p["chosen"], p["chosen_end"], p["rejected"], p["rejected_end"]) for p in found]
    assert ends == [("a", 2, "a", 4), ("a", 2, "w", 2), ("a", 2, "w", 4)]
    assert [(p["chosen_reward"], p["rejected_reward"]) for p in found] == [(1.0, 0.5), (1.0, 0.5), (1.0, 0.25)]


@pytest.mark.parametrize(("whole", "ends"), [(False, [2, 2]), (True, [None, None])])
def test_pairs_of_steps_behind_one_state(tmp_path, whole, ends):
    """Equal first steps are one; another state's completions are not compared with them."""
    r = road(tmp_path, pairs={"steps": {"whole": whole}})
    origin = solution(r, "o", "s\na\nb", True)
    put(r, [origin])

    def completion(name, text, right, token=2):
        t = solution(r, name, "s\n" + text, right).turns[0]
        t = replace(t, forced=t.tokens[:2], tokens=t.tokens[2:], steps=())
        return replace(origin, id=name, group=f"o>0.{token}", turns=(t,), parent=Parent("o", 0, token),
                       outcomes={"self": Scored(float(right), right)})  # fmt: skip

    ways = [("0", "x\n1", True), ("1", "y\n2", False), ("2", "x\n3" if not whole else "x\n1", False), ("3", "z", True)]
    every = [*(completion(*w) for w in ways[:3]), completion(*ways[3], token=4)]
    r.at("completions").mkdir()
    formats.write("episodes", r.at("completions") / "all.jsonl", every, None)
    made(stage(r, "pairs"), r.at("pairs"))
    (pair,) = lines(r.at("pairs"))
    assert (pair["chosen"], pair["rejected"], pair["kind"]) == ("0", "1", "step")
    assert [pair.get("chosen_end"), pair.get("rejected_end")] == ends


def test_a_step_that_several_wrote_is_as_good_as_they_are(tmp_path):
    """x was written three times, by two who ended right, and first by one who did not: it is above y."""
    r = road(tmp_path, pairs={"steps": {}})
    origin = solution(r, "o", "s\nt\nu", True)
    put(r, [origin])
    every = []
    for k, (text, right) in enumerate([("x\n1", False), ("x\n2", True), ("y\n3", False), ("x\n4", True)]):
        t = solution(r, str(k), "s\n" + text, right).turns[0]
        t = replace(t, forced=t.tokens[:2], tokens=t.tokens[2:], steps=())
        every.append(replace(origin, id=str(k), group="o>0.2", turns=(t,), parent=Parent("o", 0, 2),
                             outcomes={"self": Scored(float(right), right)}))  # fmt: skip
    r.at("completions").mkdir()
    formats.write("episodes", r.at("completions") / "all.jsonl", every, None)
    made(stage(r, "pairs"), r.at("pairs"))
    assert [(p["chosen"], p["rejected"]) for p in lines(r.at("pairs"))] == [("0", "2")]


def test_no_pair_can_be_made(tmp_path):
    r = road(tmp_path, pairs={"process": False})
    put(r, [solution(r, n, f"{n}\nx", True) for n in "ab"])
    with pytest.raises(DataError) as found:
        made(stage(r, "pairs"), tmp_path / "pairs-1")
    assert str(found.value) == "stage 'pairs-1': no pair can be made of 2 solutions, of which 2 are right."
    assert list((tmp_path / "pairs-1").iterdir()) == []


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(stage, folder):
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.raises(DataError) as found:
        stage.make(folder)
    assert list(folder.iterdir()) == []
    return str(found.value)


def test_files_from_elsewhere_that_cannot_be(tmp_path):
    row = {"text": "q\n", "label": 1, "response": "a\nb", "pred": "B", "id": 0}
    for name in ("one", "two"):
        write(tmp_path / f"{name}.json", json.dumps([row]))
    files = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    r = road(tmp_path / "run", files={"states": files})
    assert refused(stage(r, "solutions"), r.at("solutions")) == (
        f"{files[1]}: has solution '0/0', as another file has: each question must be in one file."
    )
    write(tmp_path / "scores.json", json.dumps([{"index": 9, "response": "a\nb", "ending_logits": [[1], [2]]}]))
    r = road(tmp_path / "run", files={"scores": str(tmp_path / "scores.json")})
    put(r, [solution(r, "a", "a\nb", True)])
    assert refused(stage(r, "scores"), r.at("scores")) == (
        f"{tmp_path / 'scores.json'}: scores no solution that is here: 1 scores of a solution that is not here."
    )


def test_stages_that_are_left_with_nothing(tmp_path):
    r = road(tmp_path, states={"start": 0.0, "ratio": 1.0}, clean={"min_steps": 9})
    one = solution(r, "a", "a\nb\nc", True)
    r.at("solutions").mkdir(parents=True)
    formats.write("episodes", r.at("solutions") / "000.jsonl", [one], None)
    assert refused(stage(r, "cleaned"), r.at("cleaned")) == (
        "stage 'cleaned-1': none of 1 solutions can be used: 1 too short."
    )
    formats.write("episodes", r.at("cleaned") / "all.jsonl", [one], None)
    assert made(stage(r, "states"), r.at("states")) == {"states": 2, "of type step": 2}
    r.at("completions").mkdir()
    formats.write("episodes", r.at("completions") / "all.jsonl",
                  [replace(one, id="c", parent=Parent("a", 0, 2))], None)  # fmt: skip
    assert refused(stage(r, "values"), r.at("values")) == (
        "stage 'values-1': no state of 2 has a value: 2 fewer than 3 completions."
    )
    write(r.at("values") / "values.jsonl", to_json(Annotation("a", "value", "step", (1.0, 2.0, -1.0), 0)) + "\n")
    told = made(stage(r, "examples"), r.at("examples"))
    assert told == {"train examples": 3, "train class 1": 1, "train class 2": 1, "train class 3": 1}
    alone = road(tmp_path, labels={"balance": True})
    assert refused(stage(alone, "examples"), tmp_path / "again") == (
        "stage 'examples-1': there is no example to learn from: 3 more of one kind than of the other."
    )


def test_records_of_what_is_not_there(tmp_path):
    r = road(tmp_path)
    with pytest.raises(RunError) as found:
        records_of(r, "states-1")
    assert str(found.value) == (
        f"{tmp_path}: stage 'states-1' is not done yet: make it with `trailmark stages`."
    )
    write(record_of(tmp_path, "values-1"), "{}")
    with pytest.raises(RunError) as found:
        records_of(r, "values-1")
    assert str(found.value) == (
        "stage 'values-1' has no such records: export solutions, cleaned, states, completions, scores or pairs."
    )


def test_a_state_of_another_prompt_is_not_completed(tmp_path):
    source = get_task("arith", level=1)
    r = road(tmp_path)
    (task,) = source.tasks("train", 1, 0)
    shown = source.make().reset(task).text
    own = replace(solution(r, "a", "a\nb", True), task=task)
    same = replace(own, turns=(plain(Reader(r.tokenizer, "policy", Starts()), shown, "a\nb"),))
    must_be_shown([], source, r.tokenizer)
    must_be_shown([Point(same, 0, 2)], source, r.tokenizer)
    with pytest.raises(DataError) as found:
        must_be_shown([Point(own, 0, 2)], source, r.tokenizer)
    assert str(found.value) == (
        "episode 'a' was shown another prompt than task 'arith' shows: states of solutions from elsewhere can be "
        "completed only if their prompts are those of the task."
    )
    starts, _ = told_starts([Point(same, 0, 2)], 3, 0, source, "policy", r.tokenizer)
    assert len({s.id for s in starts}) == 3 and all(s.forced == () and s.turns == () for s in starts)
    with pytest.raises(DataError) as found:
        worked(source, replace(task, meta={}), r.tokenizer, "policy")
    assert str(found.value) == (
        f"teacher.gold: task '{task.id}' has no worked solution: name a seat teacher instead."
    )
