"""LPR as a skeleton: eight stages from solutions to DPO, with public names only, and the numbers of its definition.

The solver is a script that makes mistakes with a known probability, so the true value of every state is known.
"""

import json
import math
import random
import re

import numpy as np
import pytest
import torch
from tabular import TabularLM

from trailmark import formats
from trailmark.config import LearnerConfig, ModelConfig, OptimConfig, RunConfig
from trailmark.credit.returns import discounted
from trailmark.credit.shaping import place, whiten
from trailmark.episodes import by_group, won
from trailmark.formats.scored import pair_sides, tie_pairs
from trailmark.learn.learner import Learner, Update
from trailmark.methods.base import Method
from trailmark.methods.collect import collect_starts
from trailmark.methods.offline_configs import PreferenceRecipe
from trailmark.methods.pipeline import training_stage
from trailmark.models.load import load_model
from trailmark.objectives.classify import Classify
from trailmark.objectives.pairwise import Pairwise
from trailmark.rollout.branch import Point, branch_starts
from trailmark.rollout.play import start_all
from trailmark.runs.stages import Stage, run_stages
from trailmark.runs.store import read_metrics, read_segment
from trailmark.samples import class_sample
from trailmark.score.classes import over_steps, step_scores
from trailmark.seats.config import ScriptedSeat
from trailmark.seats.open_seats import OpenSeats
from trailmark.seats.pinned_models import pin_models
from trailmark.steps import mark_steps
from trailmark.tasks.arith import Arith
from trailmark.types import Annotation, Episode, Sample, Scored, Task, Turn

TINY = ModelConfig.model_validate(
    {"name": "tiny", "dtype": "float64", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 96}}
)
WRONG = 0.4  # how often the solver is one off in a step, up or down: two mistakes may cancel
K = 3  # completions of a state


def careless(prompt, draw):
    """Goes on with a solution: one operation a line, then the answer."""
    question, *done = prompt.split("\n")
    first, *operations = re.findall(r"[+-]?\d+", question.removesuffix("=?"))
    lines = [line for line in done if line]
    value, new = int(lines[-1].split("=")[1]) if lines else int(first), []
    for operation in operations[len(lines) :]:
        now = value + int(operation) + (draw.random() < WRONG) * draw.choice((-1, 1))
        new.append(f"{value}{operation}={now}")
        value = now
    return "\n".join([*new, f"#### {value}"])


# --- the method -----------------------------------------------------------------------------------------------------


def sample_states(episodes, start, ratio, draw):
    """The ends of steps, without the last step, each with probability `ratio`, from a share `start` of the steps on."""
    points = []
    for e in episodes:
        ends = [end for _, end in e.turns[0].steps[:-1]]
        points += [Point(e, 0, end) for end in ends[math.floor(start * len(ends)) :] if draw.random() < ratio]
    return points


class HeadRecipe(RunConfig):
    data: str


class StepHead(Method):
    """Trains a head of K + 1 classes at the ends of steps: how many of K completions were right."""

    Config = HeadRecipe

    def __init__(self, config, run):
        super().__init__(config, run)
        lm = load_model(config.model)
        lm.add_head("step", K + 1)
        self.learner = Learner({"policy": lm}, config.learner, total=config.steps)
        found = formats.read("episodes", config.data, lm.tokenizer)
        known = {a.episode: a for a in found.annotations}
        self.samples = []
        for e in found.episodes:
            row, turn = e.sequence(0), e.turns[0]
            ends = [len(row) - len(turn.tokens) + end - 1 for _, end in turn.steps]
            labels = {at: int(v) for at, v in zip(ends, known[e.id].values, strict=True) if v >= 0}
            self.samples.append(class_sample(row, labels, e.id, e.group))

    def updates(self, step):
        yield Update(self.samples, Classify(head="step"))


def process_pairs(group, rewards, best_of=10, most=10, margin=0.5):
    """Right ones against wrong ones, the hardest first; right ones against right ones that are worse by the margin."""
    right = [e for e in group if won(e) and e.id in rewards]
    best = sorted(right, key=lambda e: -rewards[e.id])[:best_of]
    chosen = [e for e in right if e in best]
    wrong = sorted((e for e in group if not won(e) and e.id in rewards), key=lambda e: -rewards[e.id])[:most]
    worse = [(c, p) for c in chosen for p in right if rewards[c.id] - rewards[p.id] > margin]
    return [(c, r) for c in chosen for r in wrong] + worse


def lpr(root, tasks=6, n=8, margin=1e-3, seed=0):
    """The stages of one round."""
    source = Arith(level=2)
    opened = OpenSeats({"policy": ScriptedSeat(function=f"{__file__}:careless")}, seed=seed)
    at = {name: root / name for name in ("solutions", "states", "completions", "values", "head", "scores", "pairs")}

    def solutions(folder):
        starts = start_all(source.tasks("train", tasks, seed), n, seed)
        return {"episodes": len(collect_starts(folder / "all.jsonl", source, starts, opened.seats))}

    def solved():
        found = read_segment(at["solutions"] / "all.jsonl")
        return [mark_steps(e, "policy", opened.tokenizer, "newline") for e in found]

    def states(folder):
        points = sample_states(solved(), 0.0, 1.0, random.Random(seed))
        (folder / "points.json").write_text(json.dumps([(p.episode.id, p.token) for p in points]))
        return {"states": len(points)}

    def points():
        known = {e.id: e for e in solved()}
        return [Point(known[e], 0, t) for e, t in json.loads((at["states"] / "points.json").read_text())]

    def completions(folder):
        starts = branch_starts(points(), K, seed + 1)
        return {"episodes": len(collect_starts(folder / "all.jsonl", source, starts, opened.seats))}

    def values(folder):
        made, episodes = read_segment(at["completions"] / "all.jsonl"), solved()
        right = {}
        for e in made:
            key = (e.parent.episode, e.parent.token)
            right[key] = right.get(key, 0) + won(e)
        notes = []
        for e in episodes:
            ends = [end for _, end in e.turns[0].steps]
            found = [right.get((e.id, end), -1) for end in ends[:-1]] + [K * won(e)]
            notes.append(Annotation(e.id, "value", "step", tuple(map(float, found)), 0, "completions"))
        formats.write("episodes", folder / "all.jsonl", episodes, None, annotations=notes)
        return {"states": len(right)}

    def scores(folder):
        lm = load_model(pin_models(ModelConfig(name=str(at["head"]), dtype="float64")))
        notes, episodes = step_scores(lm, solved(), head="step", classes=(2, 3)), solved()
        formats.write("episodes", folder / "all.jsonl", episodes, None, annotations=notes)
        return {"product": {n.episode: over_steps(n.values, "product") for n in notes}}

    def pairs(folder):
        found = formats.read("episodes", at["scores"] / "all.jsonl", None)
        rewards = {n.episode: over_steps(n.values, "product") for n in found.annotations}
        made = [p for g in by_group(found.episodes).values() for p in process_pairs(g, rewards, margin=margin)]
        formats.write("episodes", folder / "all.jsonl", pair_sides(made), None)
        return {"pairs": len(made), "both right": sum(won(b) for _, b in made)}

    learner = LearnerConfig(optim=OptimConfig(lr=3e-3))
    head = HeadRecipe(method="lpr", data=str(at["values"] / "all.jsonl"), model=TINY, steps=12, learner=learner)
    dpo = PreferenceRecipe(
        method="preference", data=str(at["pairs"] / "all.jsonl"), format="episodes", model=TINY, steps=2, batch=256,
        learner=LearnerConfig(optim=OptimConfig(lr=3e-4)),
    )  # fmt: skip
    settings = {"seed": seed}
    return [
        Stage("solutions", solutions, {**settings, "tasks": tasks, "n": n}),
        Stage("states", states, settings, {"solutions": at["solutions"]}),
        Stage("completions", completions, {**settings, "k": K}, {"states": at["states"]}),
        Stage("values", values, {}, {"completions": at["completions"], "solutions": at["solutions"]}),
        training_stage("head", head, root, method=StepHead, inputs={"values": at["values"]}),
        Stage("scores", scores, {"classes": [2, 3]}, {"head": at["head"]}),
        Stage("pairs", pairs, {"margin": margin}, {"scores": at["scores"]}),
        training_stage("dpo", dpo, root, inputs={"pairs": at["pairs"]}),
    ]


# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("lpr")
    return root, run_stages(root, lpr(root))


def test_eight_stages_are_made_once(made):
    root, done = made
    assert list(done) == ["solutions", "states", "completions", "values", "head", "scores", "pairs", "dpo"]
    assert done["solutions"]["episodes"] == 48 and done["states"]["states"] == 96  # two steps each before the answer
    assert done["completions"]["episodes"] == 96 * K and done["values"]["states"] == 96
    said = []
    assert run_stages(root, lpr(root), say=said.append) == done and said == []
    assert run_stages(root, lpr(root, margin=0.5)[:7], say=said.append)["pairs"]["pairs"] <= done["pairs"]["pairs"]
    assert len(said) == 1 and "stage 'pairs' is made again: key 'margin' was 0.001 and is 0.5" in said[0]


def test_values_are_counts_of_completions_that_were_right(made):
    """Behind the last operation v is 3 or 0. Before it a sound state is worth 1 - WRONG, and one with a mistake
    WRONG / 2: the second must cancel the first. A whole solution is worth 3 if it is right."""
    found = formats.read("episodes", made[0] / "values" / "all.jsonl", None)
    first = {True: [], False: []}
    for e, note in zip(found.episodes, found.annotations, strict=True):
        begin, end, answer = e.turns[0].text.split("\n")
        right = int(answer.removeprefix("#### ")) == e.task.data["answer"]
        assert note.values[1:] == (3.0 * right, 3.0 * right) and right == e.outcome.success
        assert int(end.split("=")[1]) == int(answer.removeprefix("#### "))
        first[sound(begin)].append(note.values[0])
    for is_sound, p in ((True, 1 - WRONG), (False, WRONG / 2)):
        v = np.array(first[is_sound])
        assert len(v) > 12 and set(v) <= {0, 1, 2, 3}
        assert abs(v.mean() / K - p) <= 3 * math.sqrt(p * (1 - p) / (K * len(v)))


def sound(line):
    a, operation, b, said = re.fullmatch(r"(-?\d+)([+-])(\d+)=(-?\d+)", line).groups()
    return int(said) == int(a) + int(operation + b)


def test_the_head_learns_and_is_read_at_the_ends_of_steps(made):
    """It begins at ln 4, and a score of a step in one pass is that of a pass over the text up to there."""
    root, done = made
    rows = read_metrics(root / "head")
    assert rows[0]["cross_entropy"] == pytest.approx(math.log(4), abs=1e-12)
    assert rows[-1]["cross_entropy"] < 0.9 * rows[0]["cross_entropy"]
    lm = load_model(pin_models(ModelConfig(name=str(root / "head"), dtype="float64"))).freeze()
    lm.base.set_attn_implementation("sdpa")
    found = formats.read("episodes", root / "scores" / "all.jsonl", None)
    for e, note in zip(found.episodes, found.annotations, strict=True):
        row, turn = list(e.sequence(0)), e.turns[0]
        for (_, end), score in zip(turn.steps, note.values, strict=True):
            upto = torch.tensor([row[: len(row) - len(turn.tokens) + end]])
            with torch.no_grad():
                hidden = lm.base(input_ids=upto, output_hidden_states=True).hidden_states[-1][0, -1]
            p = (lm.heads["step"].weight @ hidden).softmax(-1)
            assert score == pytest.approx(float(p[2] + p[3]), abs=1e-9)
        assert done["scores"]["product"][e.id] == pytest.approx(math.prod(note.values), abs=1e-12)


def test_dpo_starts_at_ln_2_with_the_pairs_of_the_file(made):
    root, done = made
    assert done["pairs"]["both right"] > 0 and done["pairs"]["pairs"] > done["pairs"]["both right"]
    rows = read_metrics(root / "dpo")
    assert rows[0]["rows"] == done["pairs"]["pairs"] and rows[0]["pair"] == pytest.approx(math.log(2), abs=1e-12)
    assert rows[-1]["pair"] < math.log(2)
    sides = read_segment(root / "pairs" / "all.jsonl")
    solutions = {e.id: e for e in read_segment(root / "solutions" / "all.jsonl")}
    rewards = done["scores"]["product"]
    origin = lambda e: e.id.split(" ")[0]
    for chosen, rejected in tie_pairs(sides):
        assert won(chosen) and (not won(rejected) or rewards[origin(chosen)] - rewards[origin(rejected)] > 1e-3)
    for e in sides:  # the tokens that were written, and not the text encoded again
        assert e.turns[0].tokens == solutions[origin(e)].turns[0].tokens


def test_step_scores_over_a_solution():
    """{2, 3} of logits 0, 0, ln 2, ln 5 is 7/9. Over steps: the product, the least, the last, the geometric mean."""
    lm = TabularLM([(1,), (1, 2), (1, 2, 3)], 8)
    head = lm.add_head("step", 4)
    with torch.no_grad():
        head.weight[2, 1], head.weight[3, 1] = math.log(2), math.log(5)
        head.weight[0, 2] = math.log(6)
    lm.fingerprint = lambda: "table"
    turn = Turn("policy", (1,), (2, 3), steps=((0, 1), (1, 2)))
    e = Episode("e", Task("t"), "g", (turn,), {"self": Scored(1.0)})
    (note,) = step_scores(lm, [e], head="step", classes=(2, 3))
    a, b = 7 / 9, 2 / 9
    assert note.values == pytest.approx((a, b), abs=1e-12)
    want = {"product": a * b, "min": b, "last": b, "geomean": math.sqrt(a * b), "sum": a + b}
    for over, value in want.items():
        assert over_steps(note.values, over) == pytest.approx(value, abs=1e-12)
    assert over_steps([0.5, 0.25, 1.0], "product") == 0.125


def test_pairs_by_margin():
    """3 right x 2 wrong = 6, the hardest wrong one first; right ones above right ones only if the gap is more than the
    margin; fewer pairs with a larger margin."""
    group = [Episode(k, Task("t"), "g", (), {"self": Scored(float(k in "abc"))}) for k in "abcxy"]
    rewards = {"a": 0.2, "b": 0.9, "c": 0.4, "x": 0.1, "y": 0.8}
    names = lambda **more: [c.id + r.id for c, r in process_pairs(group, rewards, **more)]
    assert names(margin=9) == ["ay", "ax", "by", "bx", "cy", "cx"]
    assert names(margin=0.5)[6:] == ["ba"] and names(margin=0.45)[6:] == ["ba", "bc"]
    assert names(margin=0.7)[6:] == []  # 0.9 - 0.2 = 0.7 is not more than 0.7
    assert names(best_of=1, most=1, margin=0.5) == ["by", "ba"]
    assert [len(names(margin=s)) for s in (0.1, 0.3, 0.6, 0.9)] == [9, 8, 7, 6]


@pytest.mark.parametrize(
    ("objective", "want"),
    [
        (Pairwise(beta=0.1), lambda h: math.log(1 + math.exp(-0.1 * h))),
        (Pairwise(beta=0.1, smooth=0.2), lambda h: math.log(1 + math.exp(-0.1 * h)) + 0.2 * 0.1 * h),
        (Pairwise(loss="hinge", beta=0.1), lambda h: max(0.0, 1 - 0.1 * h)),
        (Pairwise(loss="ipo", beta=0.1), lambda h: (h - 5) ** 2),
    ],
)
@pytest.mark.parametrize("h", [0.0, 2.0, -3.0])
def test_preferences_by_their_formulas(objective, want, h):
    """Reference log-probs are chosen so that the margin is h; logp itself is that of a uniform table."""
    lm = TabularLM([], 8)
    streams = lambda gap: {"weight": np.array([0.0, 1.0]), "ref": np.array([0.0, -math.log(8) - gap])}
    rows = [
        Sample(np.array([1, 2]), streams(h), {"weight": 1.0}, unit="p", role="chosen"),
        Sample(np.array([1, 3]), streams(0.0), {"weight": 0.0}, unit="p", role="rejected"),
    ]
    got = Learner({"policy": lm}, LearnerConfig()).gradient(rows, objective)
    assert got["pair"] == pytest.approx(want(h), abs=1e-12)
    assert got["chosen_reward"] == pytest.approx(0.1 * h, abs=1e-12) and got["rejected_reward"] == 0.0


def test_step_rewards_on_tokens():
    """Step rewards 1 and 3 are -1 and 1 when whitened; summed from behind they are 0, 1, 1 on three tokens."""
    normed = whiten([1.0, 3.0], [True, True])
    assert discounted(place(normed, [(0, 1), (1, 3)], 3), 1.0).tolist() == [0.0, 1.0, 1.0]
