"""EPO in rounds on negotiations: who sees what, stages that go on after a kill, a judge that is asked nothing twice."""

import json
import re

import pytest

from trailmark import formats
from trailmark.config import resolve
from trailmark.credit.marks import turn_weights
from trailmark.credit.returns import discounted
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import RecipeError
from trailmark.methods import get_config, get_method
from trailmark.methods.epo import rounds
from trailmark.methods.epo.config import PromptsConfig
from trailmark.methods.epo.play import filled, protocol_of, to_agent, to_strategist
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat, play
from trailmark.runs.launch import launch
from trailmark.runs.store import read_metrics, read_segment
from trailmark.score.judge import ModelJudge
from trailmark.tasks import get_task
from trailmark.tasks.dialogue import Line, View
from trailmark.types import Annotation

TINY = tiny_tokenizer()
PLAYERS = "trailmark.tasks.negotiation.players"
LEARNS = {"kind": "local", "trained": True}
SHORT = {"strategist": "{scene}\nStrategy?", "agent": "{scene}\n", "advice": "Advice: {strategy}"}


def recipe(out, **more):
    raw = {
        "method": "epo_rounds", "out": str(out), "steps": 2, "training": 2, "batch": 4, "prompts": SHORT,
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 2048}},
        "task": {"name": "negotiation", "options": {"max_turns": 4}},
        "seats": {
            "strategist": {"kind": "local", "trained": True, "sampling": {"max_tokens": 3}},
            "agent": {"kind": "scripted", "function": f"{PLAYERS}:advised", "sampling": {"max_tokens": 120}},
        },
        "collect": {"prompts": 2, "n": 2}, "judge": {"kind": "rule"}, "eval": {"every": 1, "n": 2},
    }  # fmt: skip
    return resolve({**raw, **more}, get_config("epo_rounds"))


def run(config):
    return launch(get_method("epo_rounds"), config, resume=True)


# --- who is told what -------------------------------------------------------------------------------------------------


def view(*said):
    return View("agent", "Ann", "Bob", "scene of {other}", "rules", tuple(Line(s, n, t) for s, n, t in said))


A, B = ("agent", "Ann", 'a "quoted" word'), ("partner", "Bob", "Turn #2: b")


def test_the_prompts_of_both_players():
    asked = "Help {name} against {other}. {scene}"
    prompts = PromptsConfig(strategist=asked, agent="{scene} {rules}", advice="({strategy})")
    assert to_strategist(view(), None, prompts) == "Help Ann against Bob. scene of {other}"
    assert to_strategist(view(B), None, prompts).endswith("\n\nBob: Turn #2: b")
    assert to_strategist(view(B, A, B), 1, prompts) == f"Ann: {A[2]}\nBob: Turn #2: b"  # since its last strategy
    told = {0: "ask", 2: "trade"}
    assert to_agent(view(A, B), told, prompts).splitlines() == [
        "scene of {other} rules", "Ann strategy: ask", f"Ann: {A[2]}", "Bob: Turn #2: b", "(trade)", "Ann:",
    ]  # fmt: skip
    assert "strategy" not in to_agent(view(A, B), {}, prompts)
    assert filled("{name}{name}{x}", view()) == "AnnAnn{x}"


def test_the_partner_sees_no_strategy_and_each_side_its_own():
    source, prompts, heard = get_task("negotiation", partner="seat", max_turns=6), PromptsConfig(**SHORT), []

    def speaker(name):
        def say(prompt, draw):
            heard.append((name, prompt))
            return f"words {len(heard)}"

        return say

    seats = {"strategist": "agent", "agent": "agent", "partner_strategist": "partner", "partner": "partner"}
    made = [Seat(n, ScriptedEngine(speaker(n), TINY, n), max_tokens=99, side=s) for n, s in seats.items()]
    (e,) = play(source, source.tasks("train", 1, 0), made, protocol_of("dialogue", prompts, source))
    assert len(e.turns) == 12 and set(e.outcomes) == {"agent", "partner"}
    secret = {s: {t.text for t in e.turns if t.seat == s} for s in seats}
    for name, prompt in heard:
        other = "partner" if "partner" not in name else ""
        theirs = secret["partner_strategist" if other else "strategist"]
        assert not [s for s in theirs if re.search(rf"{s}\b", prompt)]
    mine = [p for n, p in heard if n == "agent"][-1]
    own = [t.text for t in e.turns if t.seat == "strategist"]
    assert re.findall(r"^(?:Ann strategy|Advice): (.*)$", mine, re.M) == own
    talks = [p for n, p in heard if n == "strategist"]
    assert talks[-1].count("<|im_start|>assistant") == 3 and talks[-1].startswith(talks[0])  # one conversation


def test_a_thought_begins_the_answer_of_the_agent():
    from test_epo_thought import Chores

    source, heard = Chores(), []
    engine = lambda text: ScriptedEngine(lambda prompt, draw: heard.append(prompt) or text, TINY)
    said = {"strategist": "Thought: go on", "agent": "Action: do it"}
    seats = [Seat(name, engine(text), max_tokens=99) for name, text in said.items()]
    (e,) = play(source, source.tasks(), seats, protocol_of("thought", PromptsConfig(), source))
    assert [t.action for t in e.turns] == [None, "Thought: go on\nAction: do it"] * 2
    assert heard[1].endswith("<|im_start|>assistant\nThought: go on\n") and "Agent1: Action: do it\nsaw 1" in heard[2]
    assert e.turns[1].forced and "Action: do it" in TINY.decode(e.turns[1].tokens)
    with pytest.raises(RecipeError, match="task 'chores' is no world of people who talk"):
        protocol_of("dialogue", PromptsConfig(), source)


# --- rounds -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    teach = {"function": f"{PLAYERS}:anything", "prompts": 2, "steps": 2}
    config = recipe(tmp_path_factory.mktemp("epo") / "run", teach=teach)
    run(config)
    return config


def files(out):
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*"))
            if p.suffix in (".jsonl", ".safetensors") and "timings" not in p.name}  # fmt: skip


def test_the_numbers_of_each_round(made, tmp_path):
    from pathlib import Path

    out = Path(made.out)
    rows = read_metrics(out)
    assert [r["step"] for r in rows] == [1, 2]
    assert {"start/alone/reward/goal", "start/untrained/reward/goal", "lessons/reward", "policy"} <= rows[0].keys()
    for r in rows:
        assert {"collect/reward", "judge/critical", "shape/weight", "eval/reward/goal", "eval/reward"} <= r.keys()
    weights = [load_model(made.model.model_copy(update={"name": str(p / "policy")})).fingerprint()
               for p in (*(out / f"{n}/checkpoints/000002" for n in ("policy", "train-1", "train-2")),)]  # fmt: skip
    assert len(set(weights)) == 3
    again = read_segment(out / "start/alone.jsonl")
    assert {t.seat for e in again for t in e.turns} == {"agent"}


def test_every_play_is_training_data_with_the_weights_and_the_loss_of_the_definition(made):
    """L = -mean over plays of 1/T sum_t w_t mean_i log pi, by the log-probs that the turns were written with."""
    from pathlib import Path

    out = Path(made.out)
    for k in (1, 2):
        found = formats.read("episodes", out / f"shape-{k}/all.jsonl", None)
        played = {e.id: e for e in read_segment(out / f"collect-{k}/all.jsonl")}
        score = {(a.episode, a.turn): a.values[0] for a in found.annotations}
        source = get_task("negotiation", max_turns=4)
        losses = []
        for e in found.episodes:
            assert e == played[e.id] and e.players["strategist"].version == k - 1
            mine = [i for i, t in enumerate(e.turns) if t.seat == "strategist"]
            assert all(e.turns[i].prompt and e.turns[i].logp for i in mine)
            marks = source.critical(e)
            r = [1.0 if n in marks else e.outcome.reward if n == len(mine) - 1 else 0.0 for n in range(len(mine))]
            (want,) = turn_weights([discounted(r, 0.99)], "trajectory")
            assert [score[e.id, i] for i in mine] == pytest.approx(list(want))
            each = [w * sum(e.turns[i].logp) / len(e.turns[i].logp) for i, w in zip(mine, want)]
            losses.append(-sum(each) / len(each))
        first, *_ = read_metrics(out / f"train-{k}")  # one step holds all plays of a round
        assert first["rows"] == len(losses) == made.batch
        assert first["policy"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    how = {"annotations": found.annotations, "seat": "strategist"}
    formats.write("sharegpt", out.parent / "rl.json", found.episodes, TINY, **how)
    rows = json.loads((out.parent / "rl.json").read_text())
    assert len(rows) == len(found.episodes) and "Your points for each" in rows[0]["conversations"][0]["value"]


def test_a_killed_run_is_the_run_that_was_never_stopped(made, tmp_path, monkeypatch):
    from pathlib import Path

    config = made.model_copy(update={"out": str(tmp_path / "again")})
    plain = rounds.judge

    class Killed(BaseException):
        pass

    def dies(config, run, k, folder):
        if k == 2:
            raise Killed
        return plain(config, run, k, folder)

    monkeypatch.setattr(rounds, "judge", dies)
    with pytest.raises(Killed):
        run(config)
    monkeypatch.setattr(rounds, "judge", plain)
    kept = (tmp_path / "again/collect-2/all.jsonl").stat().st_mtime_ns
    run(config)
    assert (tmp_path / "again/collect-2/all.jsonl").stat().st_mtime_ns == kept
    assert files(tmp_path / "again") == files(Path(made.out))


def test_a_model_judges_both_sides_of_self_play_and_is_asked_nothing_twice(tmp_path, monkeypatch):
    asked = []

    def wise(prompt, draw):
        asked.append(prompt)
        last = re.findall(r"have the numbers ([\d, ]+)\.", prompt)[-1].split(", ")
        return "hm" if "goal" in prompt[:5] else json.dumps({"indexes": [int(last[0])], "reasoning": "first"})

    monkeypatch.setattr(ModelJudge, "_open", lambda self: ScriptedEngine(wise, TINY, "wise"))
    both = {
        "strategist": {"kind": "local", "trained": True, "side": "agent", "sampling": {"max_tokens": 3}},
        "partner_strategist": {"kind": "local", "trained": True, "side": "partner", "sampling": {"max_tokens": 3}},
    }
    both |= {n: {"kind": "scripted", "function": f"{PLAYERS}:advised", "side": n, "sampling": {"max_tokens": 99}}
             for n in ("agent", "partner")}  # fmt: skip
    config = recipe(
        tmp_path / "run", steps=1, seats=both, learn=["strategist", "partner_strategist"], eval={"every": 0},
        task={"name": "negotiation", "options": {"partner": "seat", "max_turns": 4}},
        judge={"kind": "model", "model": {"model": {"name": "tiny"}, "max_tokens": 300}},
    )  # fmt: skip
    run(config)
    notes = read_segment(tmp_path / "run/judge-1/critical.jsonl", Annotation)
    episodes = {e.id: e for e in read_segment(tmp_path / "run/collect-1/all.jsonl")}
    assert len(asked) == len(episodes) * 2
    for e in episodes.values():
        for seat in config.learn:
            mine = [i for i, t in enumerate(e.turns) if t.seat == seat]
            values = [a.values[0] for a in notes if a.episode == e.id and a.turn in mine]
            assert values == [1.0] + [0.0] * (len(mine) - 1)
    launch(type("Again", (get_method("epo_rounds"),), {"redo": ("judge-1",)}), config, resume=True)
    assert len(asked) == len(episodes) * 4 or len(asked) == len(episodes) * 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"data": "x.json"}, "rounds collect their own plays"),
        ({"objective": "unbiased"}, "objective unbiased needs shape.normalise: turns .or group. and shape.gamma: 1"),
        ({"shape": {"normalise": "group"}, "collect": {"n": 1}}, "set collect.n to 2 or more"),
        ({"judge": {"kind": "model"}}, "kind model and the section model belong together"),
        ({"shape": {"baseline": 0.5}}, "baseline is for normalise: baseline"),
    ],
)
def test_recipes_that_cannot_be(tmp_path, more, says):
    with pytest.raises(RecipeError, match=says):
        recipe(tmp_path, **more)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"strategy": "none"}, "none asks no strategist"),
        ({"learn": ["agent"]}, "learn: 'agent' is no trained seat"),
        ({"task": {"name": "arith"}, "judge": {"kind": "none"}}, "seats: |no world of people who talk"),
        ({"task": {"name": "arith"}}, "has no rule that names critical turns"),
        ({"seats": {"strategist": LEARNS}}, "there is nobody to advise"),
        ({"seats": {"adviser": LEARNS, "agent": {"kind": "person"}}}, "seats.adviser: nobody asks"),
    ],
)
def test_mistakes_are_told_before_anything_is_played(tmp_path, more, says):
    with pytest.raises(Exception, match=says):
        run(recipe(tmp_path / "run", **more))
