"""Mistakes in judges, seats and files: each is one sentence that names its key, and nothing is begun."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig
from trailmark.methods.offline import OfflineMethod
from trailmark.methods.offline_configs import OfflineRecipe
from trailmark.models.load import load_model
from trailmark.runs.store import read_episodes, read_segment
from trailmark.score.config import judge_config
from trailmark.types import Annotation

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/prompts-grpo.yaml")
TINY = "{name: tiny, shape: {layers: 1, width: 32, heads: 2, context: 96}}"
SMALL = ["steps=1", "prompts_per_step=2", "n=2", "sampling.max_tokens=4", "engine.max_num_seqs=4",
    "engine.max_len=96", "eval.n=2",
         "checkpoint.every=1", f"model={TINY}"]  # fmt: skip
FUNCTION = "def score(prompt, answer, row):\n    return float(len(answer))\n"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": f"Sing of the {w}: ", "gold": f"the {w}"} for w in ["sun", "moon", "sea", "hill"]]
    Path("rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    Path("my_file.py").write_text(FUNCTION)

    def call(*words, code=0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code and "Traceback" not in done.output, done.output
        return done.output

    return call


def train(shell, *words, out="run", code=0):
    return shell("train", RECIPE, "data=rows.jsonl", "reward=my_file.py:score", f"out={out}", *SMALL, *words, code=code)


def one_sentence(said):
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


# --- judges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reward, said",
    [
        ("{}", "key 'reward': needs a key 'kind' that says what it is: function, likelihood, model, several."),
        ("{kind: oracle}", "key 'reward': has the unknown 'kind' 'oracle'. Known: function, likelihood, model, "
         "several."),
        ("{kind: model}", "key 'reward': a judge of kind model needs either server or model: who is asked?"),
        ("{kind: model, model: {name: tiny}, rubrik: x}", "key 'reward.rubrik': is not known. Did you mean 'rubric'?"),
        ("{kind: model, model: {nam: tiny}}", "key 'reward.model.nam': is not known. Did you mean 'name'?"),
        ("{kind: function}", "key 'reward.path': is missing."),
        ("{kind: model, server: {address: here, model: x}}",
         "key 'reward.server.address': expected an address that begins with http:// or https://, found the text "
         "'here'."),
    ],
)  # fmt: skip
def test_a_wrong_judge_is_one_sentence_with_its_own_key(shell, reward, said):
    assert (
        one_sentence(train(shell, f"reward={reward}", code=2)).endswith(f"{said}\n")
        and not Path("run/recipe.yaml").exists()
    )
    Path("plain.yaml").write_text(yaml.safe_dump({
        "method": "policy_gradient", "out": "run", "model": yaml.safe_load(TINY),
        "task": {"name": "prompts", "options": {"path": "rows.jsonl", "reward": yaml.safe_load(reward)}},
    }))  # fmt: skip
    assert one_sentence(shell("train", "plain.yaml", code=2)) == f"error: task 'prompts': {said}\n"


def test_weights_are_what_a_judge_is_known_by(shell, tmp_path):
    section = lambda name, **more: {"kind": "likelihood", "model": {"name": str(name), **more}}
    from trailmark.score.open_judge import open_judge

    lm = load_model(ModelConfig.model_validate(yaml.safe_load(TINY)))
    other = load_model(ModelConfig.model_validate({**yaml.safe_load(TINY), "seed": 1}))
    for folder, model in (("a", lm), ("moved", lm), ("b", other)):
        model.model.save_pretrained(tmp_path / folder)
    prints = {name: open_judge(section(tmp_path / name)).fingerprint for name in ("a", "moved", "b")}
    assert prints["a"] == prints["moved"] != prints["b"]
    tiny = lambda **more: open_judge(section("tiny", **more)).fingerprint
    assert tiny() == tiny() != tiny(seed=1)
    asked = {
        n: open_judge({"kind": "model", "model": {"name": str(tmp_path / n)}}).fingerprint for n in ("a", "moved", "b")
    }
    assert asked["a"] == asked["moved"] != asked["b"]
    Path("with_scorer.py").write_text("def score(answer, scorer):\n    return 0.0\n")
    scored = lambda n: {"kind": "function", "path": "with_scorer.py:score", "model": {"name": str(tmp_path / n)}}
    given = {n: open_judge(scored(n)).fingerprint for n in ("a", "moved", "b")}
    assert given["a"] == given["moved"] != given["b"]
    open_judge(section(tmp_path / "a")).keep("kept")
    other.model.save_pretrained(tmp_path / "a")
    assert "has changed since this run began" in open_judge(section(tmp_path / "a")).changed("kept")


def test_a_recipe_may_set_the_steps_of_a_likelihood():
    assert judge_config({"kind": "likelihood", "steps": [[1.5, 0.25], [3, 1]]}).steps == [(1.5, 0.25), (3.0, 1.0)]


def test_a_class_of_ones_own_is_known_by_its_file(shell):
    text = (
        "from trailmark.score.base import Judge, Verdict, scored\n\n\nclass Mine(Judge):\n"
        "    async def judge(self, plays):\n        return [Verdict(scored(1.0, None)) for _ in plays]\n"
    )
    Path("own.py").write_text(text)
    train(shell, "reward=own.py:Mine")
    Path("own.py").write_text(text.replace("1.0", "2.0"))
    assert "has changed since this run began" in train(shell, "reward=own.py:Mine", "--resume", "steps=2", code=2)


@pytest.mark.parametrize(
    "gives, said",
    [
        ("None", "reward: judge 'Mine' returned None: it must return a list of verdicts."),
        ("[None for p in plays]", "reward: judge 'Mine' gave None for row '"),
        ("[Verdict(scored(1.0, None)) for p in plays[1:]]", "reward: judge 'Mine' gave 3 verdicts for 4 plays."),
        ("[Verdict(scored(float('nan'), None)) for p in plays]", "reward: judge 'Mine' gave the reward nan for row '"),
        ("[Verdict('good') for p in plays]", "reward: judge 'Mine' gave 'good' as the outcome of row '"),
        ("[plays[9] for p in plays]", "reward: judge 'Mine' raised IndexError: "),
        ("[Verdict(scored(1.0, None), (Annotation('else', 'x', 'episode', (1.0,)),)) for p in plays]",
         "reward: judge 'Mine' answered for episode 'else' where '1:"),
        ("[Verdict(scored(1.0, None), (Annotation(p.episode.id, 'x', 'episode', (float('inf'),)),)) for p in plays]",
         "reward: judge 'Mine' noted [inf] as 'x' of row '"),
    ],
)  # fmt: skip
def test_a_class_that_judges_wrongly_is_one_sentence(shell, gives, said):
    Path("own.py").write_text(
        "from trailmark.score.base import Judge, Verdict, scored\nfrom trailmark.types import Annotation\n\n\n"
        "class Mine(Judge):\n"
        f"    async def judge(self, plays):\n        return {gives}\n"
    )
    assert one_sentence(train(shell, "reward=own.py:Mine", code=2)).startswith(f"error: {said}")
    assert not Path("run/recipe.yaml").exists()


def test_the_run_that_training_starts_from_also_reads_for_the_judge(shell):
    """A judge without a model reads with the one that training starts from: also where that is a run."""
    train(shell, out="first")
    words = ["reward={kind: likelihood, reward: linear}", "model={name: first}"]
    train(shell, *words)
    assert json.loads(Path("run/models.json").read_text())["task.options.reward.model.name"]["name"] == "first"
    first = load_model(ModelConfig(name="first/checkpoints/000001/policy"))
    from trailmark.score.likelihood import TextScorer, improvement

    scorer = TextScorer(first)
    for e in read_episodes("run/episodes"):
        base, now = scorer.likelihoods([(e.task.data["prompt"], e.task.data["gold"]),
                                        (e.task.data["prompt"] + e.turns[0].action, e.task.data["gold"])])  # fmt: skip
        assert e.outcome.reward == pytest.approx(improvement(base, now) / 100, abs=1e-6)
    row = json.loads(shell("eval", "run", "--n", "1", "--json"))
    assert row["rows"][0]["scored"] == 1 and "warnings" not in row
    train(shell, *words, "--resume", "steps=2")
    assert "verified" in shell("verify", "run")


def test_eval_says_when_the_reward_is_another_one(shell):
    train(shell)
    assert "warnings" not in json.loads(shell("eval", "run", "--json"))
    Path("my_file.py").write_text(FUNCTION.replace("float(", "2 * float("))
    shown = shell("eval", "run", "--trust")
    said = "function my_file.py:score has changed since this run began (fingerprint "
    lines = [x for x in shown.splitlines() if x.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith(f"warning: {said}") and "cannot be compared" in lines[0]
    (told,) = json.loads(shown.splitlines()[-1])["warnings"]
    assert told.startswith(said)
    Path("my_file.py").write_text(FUNCTION)
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text() + '{"prompt": "Sing of the rain: "}\n')
    (told,) = json.loads(shell("eval", "run", "--json"))["warnings"]
    assert told.startswith("data: rows.jsonl has changed (") and told.endswith(" since the run began")


def test_what_a_judge_notes_lies_beside_every_play_that_it_judged(shell):
    Path("noting.py").write_text(
        "from trailmark.score.base import Judge, Verdict, scored\nfrom trailmark.types import Annotation\n\n\n"
        "class Mine(Judge):\n"
        "    async def judge(self, plays):\n"
        "        return [Verdict(scored(float(len(p.answer)), 1.0),\n"
        "                (Annotation(p.episode.id, 'vowels', 'episode',\n"
        "                            (float(sum(c in 'aeiou' for c in p.answer)),)),))\n"
        "                for p in plays]\n"
    )
    train(shell, "reward=noting.py:Mine", "eval.every=1")
    told = json.loads(shell("eval", "run", "--out", "again.jsonl", "--json"))
    assert "notes" not in told
    for file in ("run/evaluation/000001.jsonl", "again.jsonl"):
        episodes = read_segment(file)
        notes = {
            (a.episode, a.name): a.values[0]
            for a in read_segment(Path(file).with_suffix(".annotations.jsonl"), Annotation)
        }
        want = {(e.id, "reward"): float(len(e.turns[0].action)) for e in episodes}
        want |= {(e.id, "vowels"): float(sum(c in "aeiou" for c in e.turns[0].action)) for e in episodes}
        assert notes == want and len(episodes) == 1
    rows = json.loads(shell("eval", "--episodes", "run/evaluation", "--json"))["rows"]
    assert [r["name"] for r in rows] == ["evaluation"]  # annotations are no episodes
    shell("report", "run", "--no-plots")
    page = Path("run/report.html").read_text()
    assert '"vowels"' in page
    Path("rounds.yaml").write_text(yaml.safe_dump({
        "method": "oreo_rounds", "out": "rounds", "steps": 1, "training": 0, "model": yaml.safe_load(TINY),
        "task": {"name": "prompts", "options": {"path": "rows.jsonl", "reward": "noting.py:Mine"}},
        "collect": {"prompts": 2, "n": 2, "sampling": {"max_tokens": 4}}, "engine": {"max_num_seqs": 4, "max_len": 96},
    }))  # fmt: skip
    shell("train", "rounds.yaml")
    notes = read_segment("rounds/episodes/000001.annotations.jsonl", Annotation)
    assert {(a.episode, a.values[0]) for a in notes if a.name == "reward"} == {
        (e.id, e.outcome.reward) for e in read_episodes("rounds/episodes")
    }


# --- seats -----------------------------------------------------------------------------------------------------------


def test_a_seat_that_nobody_asks(shell):
    seats = "seats={policy: {kind: local, trained: true}, guest: {kind: scripted, function: 'my_file.py:score'}}"
    for more in ((), ("--dry-run",)):
        said = train(shell, seats, *more, code=2).splitlines()[-1]
        assert said == (
            "error: seats.guest: nobody asks this seat: in task 'prompts' method policy_gradient asks policy. "
            "Leave it out, or name it as one of these."
        )
    assert not Path("run/recipe.yaml").exists()


METHOD = """
from trailmark.methods.policy_gradient import PolicyGradientMethod


async def speak(desk):
    hint = await desk.ask("adviser", text=desk.observation.text)
    await desk.act((await desk.ask("actor", text=hint.text + ".")).text)


class Advised(PolicyGradientMethod):
    asked_seats = ("adviser", "actor")

    @classmethod
    def protocol(cls, config, source):
        return speak
"""


def test_a_method_says_whom_it_asks(shell):
    Path("advised.py").write_text(METHOD)
    sys.modules.pop("advised", None)
    Path("words.py").write_text("def answer(prompt, draw):\n    return 'yes'\n")
    seat = "{kind: scripted, function: 'words.py:answer'}"
    words = ["method=advised:Advised", "variant=null", "credit=returns"]
    said = train(
        shell, *words, f"seats={{adviser: {{kind: local, trained: true}}, actor: {seat}, acter: {seat}}}", code=2
    )
    assert "seats.acter: nobody asks this seat" in one_sentence(said) and "asks adviser and actor" in said
    train(shell, *words, f"seats={{adviser: {{kind: local, trained: true}}, actor: {seat}}}")
    missing = "seats={adviser: {kind: local, trained: true}, actor: {kind: local, model: {name: ./nowhere}}}"
    said = one_sentence(train(shell, *words, missing, out="other", code=2))
    assert (
        said.startswith("error: seats.actor.model: ") and "nowhere" in said and not Path("other/recipe.yaml").exists()
    )
    said = one_sentence(train(shell, "reward={kind: likelihood, model: {name: ./nowhere}}", out="other", code=2))
    assert said.startswith("error: reward.model: ") and "nowhere" in said


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_is_found_when_the_row_is_read(shell, number):
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text() + f'{{"prompt": "x", "worth": {number}}}\n')
    said = one_sentence(train(shell, code=2))
    assert (
        said == f"error: rows.jsonl:5: is not JSON: {number} is not a number.\n"
        and not Path("run/recipe.yaml").exists()
    )


def test_a_run_in_the_place_of_data(shell):
    train(shell)
    file = "run/episodes/000001.jsonl"
    oreo = {"method": "oreo", "data": "run", "out": "next", "model": yaml.safe_load(TINY)}
    Path("oreo.yaml").write_text(yaml.safe_dump(oreo))
    Path("sft.yaml").write_text(yaml.safe_dump({**oreo, "method": "sft"}))
    for recipe in ("oreo.yaml", "sft.yaml"):
        for more in ((), ("--dry-run",)):
            said = shell("train", recipe, *more, code=2).splitlines()[-1]
            assert (
                "is the folder of a run, and rows are read from a file: name one of its files" in said and file in said
            )
    assert "is the folder of a run" in train(shell, "data=run", "--dry-run", out="next", code=2)
    Path("empty").mkdir()
    assert "empty: is a folder, and rows are read from a file: name a file of JSON lines." in train(
        shell, "data=empty", out="next", code=2
    )
    assert not Path("next/recipe.yaml").exists()


def test_dpo_is_at_home_in_method_preference(shell):
    Path("oreo.yaml").write_text(yaml.safe_dump({"method": "oreo", "data": "rows.jsonl", "out": "next"}))
    said = one_sentence(shell("train", "oreo.yaml", "objective.kind=dpo", code=2))
    assert "key 'objective': is not known." in said
    said = one_sentence(train(shell, "variant=null", "objective={kind: kto}", code=2))
    assert "kto is an objective of method preference: write method: preference and objective: kto" in said
    Path("p.yaml").write_text(
        yaml.safe_dump({"method": "preference", "data": "rows.jsonl", "objective": {"kind": "dpo"}})
    )
    assert "Write objective: dpo." in one_sentence(shell("train", "p.yaml", code=2))


def test_a_method_author_is_told_what_is_missing(tmp_path):
    class Half(OfflineMethod):
        Config = OfflineRecipe

    half = Half.__new__(Half)
    with pytest.raises(
        NotImplementedError, match=r"Half must define make_rows\(config, episodes, tokenizer\), which returns"
    ):
        half.make_rows(None, [], None)
    with pytest.raises(NotImplementedError, match=r"Half must define make_objective\(\), which returns an Objective"):
        half.make_objective()


# --- found by strangers ----------------------------------------------------------------------------------------------


def test_a_setting_beside_a_reward_that_is_a_text(shell):
    train(shell, "reward.success=2", "steps=1")
    outcomes = [e.outcome for e in read_episodes("run")]
    assert {o.success for o in outcomes} <= {True, False} and all(o.success == (o.reward >= 2) for o in outcomes)
    said = yaml.safe_load(Path("run/recipe.yaml").read_text())["task"]["options"]["reward"]
    assert (said["kind"], said["path"], said["success"]) == ("function", "my_file.py:score", 2)


@pytest.mark.parametrize(
    "body", ["def __init__(self, x): pass", "def __init__(self): raise OSError('no key')"], ids=["needs more", "raises"]
)
def test_a_judge_class_that_cannot_be_made(shell, body):
    Path("bad.py").write_text(f"from trailmark.score.base import Judge\nclass J(Judge):\n    {body}\n")
    said = one_sentence(train(shell, "reward=bad.py:J", code=2))
    assert "reward: class bad.py:J cannot be made: " in said and "bad.py" in said.split(" made: ")[1]


def test_a_helper_that_is_edited_is_an_edited_function(shell):
    Path("helper_k.py").write_text("K = 0.1\n")
    text = "from helper_k import K\ndef score(prompt, answer, row):\n    return K * len(answer)\n"
    Path("my_file.py").write_text(text)
    train(shell)
    Path("helper_k.py").write_text("K = 0.7\n")
    assert "my_file.py:score has changed since this run began" in train(shell, "steps=2", "--resume", code=2)


def test_a_file_that_has_no_row_to_evaluate_on_is_found_at_once(shell):
    Path("rows.jsonl").write_text('{"prompt": "a"}\n')
    assert "error: rows.jsonl has no row for split 'test'" in train(shell, "--dry-run", "eval.every=1", code=2)
    assert "has no row for split 'test'" in one_sentence(train(shell, "eval.every=1", code=2))


@pytest.mark.parametrize(
    "seat, said",
    [
        ("{kind: scripted, function: 'gone.py:f'}", "seats.actor.function: there is no file gone.py."),
        ("{kind: person}", "seats.actor: a person can sit at the table of `trailmark play`, not here."),
    ],
)
def test_seats_that_cannot_play_are_found_by_the_dry_run(shell, seat, said):
    method = """
from trailmark.methods.policy_gradient import PolicyGradientMethod
class Own(PolicyGradientMethod):
    asked_seats = ("policy", "actor")
"""
    Path("own_idle_method.py").write_text(method)
    seats = f"seats={{policy: {{kind: local, trained: true}}, actor: {seat}}}"
    assert said in train(shell, "method=own_idle_method:Own", seats, "--dry-run", code=2)
