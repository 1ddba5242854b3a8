"""EPO as a skeleton: two strategists of one model advise two frozen agents, a judge names the turns that decided, and
two rounds of stages train on them. With public names only, and the numbers of its definition."""

import json
import math
import re
from collections import Counter

import numpy as np
import pytest

from trailmark import formats
from trailmark.ask.client import Unreadable
from trailmark.config import LearnerConfig, ModelConfig, OptimConfig, RunConfig, SamplingConfig
from trailmark.credit.returns import discounted, max_abs_normalise
from trailmark.credit.turns import outcome_of
from trailmark.engines.scripted import ScriptedEngine
from trailmark.learn.learner import Learner, Update
from trailmark.methods.base import Method
from trailmark.methods.collect import collect_starts
from trailmark.methods.pipeline import training_stage
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.rollout.judging import judge_episodes
from trailmark.rollout.play import start_all
from trailmark.runs.stages import Stage, run_stages
from trailmark.runs.store import read_metrics, read_segment
from trailmark.samples import build_samples, turn_values
from trailmark.score.base import Judge, Verdict
from trailmark.score.config import ModelJudgeConfig
from trailmark.score.judge import ModelJudge, read_object
from trailmark.seats.config import LocalSeat, check_seats, filled
from trailmark.seats.open_seats import OpenSeats
from trailmark.seats.pinned_models import pin_models
from trailmark.tasks.base import Observation, Step
from trailmark.types import Annotation, Scored, Task

SHAPE = {"layers": 1, "width": 32, "heads": 2, "context": 512}
STRATEGIST = ModelConfig.model_validate({"name": "tiny", "dtype": "float64", "shape": SHAPE})
AGENT = STRATEGIST.model_copy(update={"seed": 5})
SIDES, TURNS = ("a", "b"), 6


# --- the world --------------------------------------------------------------------------------------------------------


class Bargain:
    """Two sides speak in turn, three times each. Nobody here knows who got what he wanted: a judge says so."""

    name, markov, judged, judge = "bargain", True, True, None

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"deal-{k}", data={"price": 10 + k}) for k in range(n or 2)]

    def make(self):
        return Table2()


class Table2:
    def reset(self, task):
        self.said = [f"The price is {task.data['price']}."]
        return self.shown()

    def step(self, action):
        self.said.append(f"{SIDES[(len(self.said) - 1) % 2]}: {action}")
        return Step(self.shown(), 0.0, len(self.said) > TURNS, False)

    def shown(self):
        return Observation("\n".join(self.said), seat=f"agent_{SIDES[(len(self.said) - 1) % 2]}")


class Goals(Judge):
    """A goal of 0 to 10 for each side, by what its agent said."""

    name = source = fingerprint = "goals"
    repeatable = True

    async def judge(self, plays):
        return [Verdict({s: Scored(goal(p.episode, s) / 10) for s in SIDES}) for p in plays]


def goal(e, side):
    return sum(sum(t.text.encode()) for t in e.turns if t.seat == f"agent_{side}") % 11


# --- the method -------------------------------------------------------------------------------------------------------


async def self_play(desk):
    """Before an agent speaks, its strategist writes a strategy. The other side never sees it."""
    while not desk.over:
        shown, side = desk.observation.text, desk.observation.seat[-1]
        strategy = await desk.ask(f"strategist_{side}", messages=[{"role": "user", "content": shown}])
        said = await desk.ask(f"agent_{side}", text=f"{shown}\nAdvice: {strategy.text}\n{side}:")
        await desk.act(said.text)


def open_seats(strategist):
    """Both strategists are the model that is trained; both agents are one frozen model."""
    short = SamplingConfig(max_tokens=5)
    seats = {f"strategist_{s}": LocalSeat(trained=True, side=s, sampling=short) for s in SIDES}
    seats |= {f"agent_{s}": LocalSeat(model=AGENT, side=s, sampling=short) for s in SIDES}
    check_seats(seats, trains=2)
    lm = load_model(pin_models(strategist))
    return OpenSeats(filled(seats, None, None), {f"strategist_{s}": lm for s in SIDES})


def strategies(e, seat="strategist"):
    return [i for i, t in enumerate(e.turns) if t.seat.startswith(seat) and t.tokens]


class CriticalTurns(ModelJudge):
    """Asks which strategies decided a play that is over."""

    def question(self, play):
        lines = [f"{i} {t.seat}: {t.text!r}" for i, t in enumerate(play.episode.turns)]
        ends = {s: o.reward for s, o in play.episode.outcomes.items()}
        return f"{self.config.rubric}\n{play.prompt}\n" + "\n".join(lines) + f"\nOutcomes: {ends}"

    def form(self, name):
        return f'Reply with {{"id": "{name}", "indexes": [the numbers of these strategies], "reasoning": "why"}}'

    def read(self, text, name, play):
        found, mine = read_object(text, name, "indexes")["indexes"], strategies(play.episode)
        if not isinstance(found, list) or not set(found) <= set(mine):
            raise Unreadable(f"The indexes of strategies are {mine}")
        notes = [Annotation(play.episode.id, "critical", "turn", (float(i in found),), i, self.stamp) for i in mine]
        return Verdict(play.episode.outcomes, tuple(notes))


def turn_weights(e, seat, critical, gamma=0.99):
    """A strategy that decided is worth 1, else the last is worth the outcome; returns are divided by the largest."""
    mine, outcome = strategies(e, seat), outcome_of(e, seat).reward
    paid = [1.0 if critical[e.id, i] else outcome if i == mine[-1] else 0.0 for i in mine]
    return max_abs_normalise(discounted(paid, gamma))


class EpoRecipe(RunConfig):
    data: str


class EpoTraining(Method):
    """One round: the turns of both strategists with the weights that lie beside the episodes."""

    Config = EpoRecipe

    def __init__(self, config, run):
        super().__init__(config, run)
        lm = load_model(config.model)
        self.learner = Learner({"policy": lm}, config.learner, total=config.steps)
        found = formats.read("episodes", config.data, lm.tokenizer)
        self.samples = []
        for seat in (f"strategist_{s}" for s in SIDES):
            weights = turn_values(found.annotations, found.episodes, seat, "weight")
            self.samples += build_samples(found.episodes, seat, {"advantage": weights}, mean="turn")

    def updates(self, step):
        yield Update(self.samples, WeightedLogp(law=False))


def round_stages(root, number, judge):
    """Play, label, shape and train. The next round is played by what this one trained."""
    play, label, shape, train = (root / f"{name}-{number}" for name in ("play", "label", "shape", "train"))
    before = STRATEGIST if number == 1 else ModelConfig(name=str(root / f"train-{number - 1}"), dtype="float64")
    source = Bargain()

    def played(folder):
        opened = open_seats(before)
        opened.publish(number - 1)
        starts = start_all(source.tasks(), 2, seed=number, prefix=f"{number}:")
        made = collect_starts(folder / "all.jsonl", source, starts, opened.seats, self_play, judge=Goals())
        return {"goal": float(np.mean([o.reward for e in made for o in e.outcomes.values()]))}

    def labelled(folder):
        judge.keep(folder / "judge")
        episodes = read_segment(play / "all.jsonl")
        notes = [n for v in judge_episodes(source, episodes, judge) for n in v.notes]
        formats.write("episodes", folder / "all.jsonl", episodes, None, annotations=notes)
        return {"critical": sum(n.values[0] for n in notes)}

    def shaped(folder):
        found = formats.read("episodes", label / "all.jsonl", None)
        critical = {(n.episode, n.turn): n.values[0] for n in found.annotations}
        notes = []
        for e in found.episodes:
            for seat in (f"strategist_{s}" for s in SIDES):
                each = zip(strategies(e, seat), turn_weights(e, seat, critical))
                notes += [Annotation(e.id, "weight", "turn", (float(w),), i, "epo") for i, w in each]
        formats.write("episodes", folder / "all.jsonl", found.episodes, None, annotations=notes)

    learner = LearnerConfig(optim=OptimConfig(lr=1e-3))
    config = EpoRecipe(method="epo", data=str(shape / "all.jsonl"), model=before, steps=2, learner=learner)
    start = {} if number == 1 else {"train": root / f"train-{number - 1}"}
    return [
        Stage(play.name, played, {"seed": number}, start),
        Stage(label.name, labelled, {"judge": judge.fingerprint}, {"play": play}),
        Stage(shape.name, shaped, {"gamma": 0.99}, {"label": label}),
        training_stage(train.name, config, root, inputs={"shape": shape, **start}, method=EpoTraining),
    ]


# --- a judge that is a script ----------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


class Script:
    """Names the second strategy of side a, and the last of side b in every other play. It thinks aloud, writes braces,
    and first names an agent's turn. After `dies_after` answers it is killed."""

    def __init__(self):
        self.answers, self.dies_after = Counter(), math.inf

    def __call__(self, prompt, draw):
        if self.answers.total() >= self.dies_after:
            raise Killed
        first, again = prompt.split("<|im_start|>user\n")[1:2], prompt.count("<|im_start|>user") > 1
        name = re.findall(r'"id": "(\w+)"', prompt)[-1]
        turns = {side: [int(i) for i in re.findall(rf"^(\d+) strategist_{side}:", first[0], re.M)] for side in SIDES}
        chosen = [turns["a"][1]] + [turns["b"][-1]] * ("10" in first[0].split("\n")[1])
        self.answers[name, again] += 1
        if not again:
            return json.dumps({"id": name, "indexes": [turns["a"][1] + 1]})  # what the agent said
        said = {"id": name, "indexes": chosen, "reasoning": "so {it} is"}
        return f"Let me think {{aloud}}. ```json\n{json.dumps(said)}\n```"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root, script = tmp_path_factory.mktemp("epo"), Script()
    tokenizer = tiny_tokenizer()

    def stages():
        config = ModelJudgeConfig(model=AGENT, rubric="Which strategies were critically important?", max_tokens=400)
        judge = CriticalTurns(config, ScriptedEngine(script, tokenizer, "wise"))
        return [s for number in (1, 2) for s in round_stages(root, number, judge)]

    script.dies_after = 6
    with pytest.raises(Killed):
        run_stages(root, stages())
    script.dies_after = math.inf
    return root, run_stages(root, stages()), script, stages


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_two_rounds_are_made_and_the_judge_is_asked_nothing_twice(made):
    root, done, script, stages = made
    assert list(done) == [f"{name}-{k}" for k in (1, 2) for name in ("play", "label", "shape", "train")]
    kept = [(root / f"label-{k}/judge/answers.jsonl").read_text().splitlines() for k in (1, 2)]
    assert list(map(len, kept)) == [8, 8]  # 4 plays in each round, each asked again once
    assert len(script.answers) == 16 and set(script.answers.values()) == {1}
    said = []
    assert run_stages(root, stages(), say=said.append) == done and said == [] and script.answers.total() == 16


def test_who_sits_where_and_who_sees_what(made):
    root = made[0]
    frozen, start = load_model(AGENT), load_model(STRATEGIST)
    assert open_seats(STRATEGIST).engines["agent_a"].lm.fingerprint() == frozen.fingerprint()  # after both rounds
    trained = [load_model(pin_models(ModelConfig(name=str(root / f"train-{k}"), dtype="float64"))) for k in (1, 2)]
    assert len({start.fingerprint(), *(lm.fingerprint() for lm in trained)}) == 3
    for number in (1, 2):
        for e in read_segment(root / f"play-{number}/all.jsonl"):
            assert [t.seat for t in e.turns] == [f"{who}_{s}" for s in "ababab" for who in ("strategist", "agent")]
            assert {n: (p.kind, p.side) for n, p in e.players.items()} == {
                f"{who}_{s}": (kind, s) for s in SIDES for who, kind in (("strategist", "trained"), ("agent", "frozen"))
            }
            assert e.players["strategist_a"].version == e.players["strategist_b"].version == number - 1
            said = [f"The price is {e.task.data['price']}."]
            for strategist, agent in zip(e.turns[::2], e.turns[1::2]):
                side, shown = agent.seat[-1], "\n".join(said)
                asked = f"{shown}\nAdvice: {strategist.text}\n{side}:"  # its own advice and no other
                assert start.tokenizer.decode(agent.prompt) == asked
                said.append(f"{side}: {agent.action}")
            outcomes = {s: Scored(goal(e, s) / 10) for s in SIDES}
            assert e.outcomes == outcomes and [t.reward for t in e.turns[-3::2]] == [outcomes[s].reward for s in SIDES]


def test_weights_and_the_loss_are_those_of_the_definition(made):
    """L = -mean over trajectories of 1/T sum_t w_t mean_i log pi, by the log-probs that the turns were written with."""
    root = made[0]
    for number in (1, 2):
        found = formats.read("episodes", root / f"shape-{number}/all.jsonl", None)
        labels = formats.read("episodes", root / f"label-{number}/all.jsonl", None).annotations
        weight, losses = {(n.episode, n.turn): n.values[0] for n in found.annotations}, []
        for e in found.episodes:
            chosen = {n.turn for n in labels if n.episode == e.id and n.values[0]}
            assert chosen == ({4, 10} if e.task.data["price"] == 10 else {4})
            for side, mine in (("a", [0, 4, 8]), ("b", [2, 6, 10])):
                r = [1.0 if i in chosen else 0.0 for i in mine]
                r[2] = r[2] or e.outcomes[side].reward
                g = [r[0] + 0.99 * (r[1] + 0.99 * r[2]), r[1] + 0.99 * r[2], r[2]]
                want = [x / (max(g) or 1.0) for x in g]
                assert [weight[e.id, i] for i in mine] == pytest.approx(want, abs=1e-12)
                losses.append(-np.mean([w * np.mean(e.turns[i].logp) for i, w in zip(mine, want)]))
        rows = read_metrics(root / f"train-{number}")
        assert rows[0]["policy"] == pytest.approx(np.mean(losses), abs=1e-9) and rows[1]["policy"] < rows[0]["policy"]


@pytest.mark.parametrize(
    ("r", "g", "w"),
    [
        ((0, 0, 0.7), (0.6861, 0.693, 0.7), (0.9801, 0.99, 1)),
        ((0, 1, 0.7), (1.6761, 1.693, 0.7), (0.99, 1, 0.4135)),
        ((1, 0, 0.1), (1.098, 0.099, 0.1), (1, 0.0902, 0.0911)),
        ((0, 0, 0.1), (0.098, 0.099, 0.1), (0.9801, 0.99, 1)),
        ((1, 1, 1, 1), (3.9404, 2.9701, 1.99, 1), (1, 0.7538, 0.505, 0.2538)),
        ((0, 0, 0), (0, 0, 0), (0, 0, 0)),
    ],
)
def test_the_six_golden_rows(r, g, w):
    returns = discounted(r, 0.99)
    assert returns == pytest.approx(g, abs=6e-5) and max_abs_normalise(returns) == pytest.approx(w, abs=6e-5)


def test_a_normaliser_over_the_whole_data_keeps_the_size_of_an_outcome():
    """By its own largest return an outcome of .1 weighs as much as one of .7; by the largest of all it does not."""
    low, high = discounted([0, 0, 0.1], 0.99), discounted([0, 0, 0.7], 0.99)
    assert max_abs_normalise(low) == pytest.approx(max_abs_normalise(high), abs=1e-12)
    both = max_abs_normalise(np.concatenate([low, high]))
    assert both == pytest.approx(np.array([0.09801, 0.099, 0.1, 0.68607, 0.693, 0.7]) / 0.7, abs=1e-12)
