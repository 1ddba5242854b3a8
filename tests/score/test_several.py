"""Several named rewards: their weighted sum, by hand; a part without a number is no part of 0."""

import asyncio
import textwrap

import pytest
from judging import judge_at, plays, serving_judge

from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import JudgeError, RecipeError
from trailmark.evaluate.run import evaluate, summarise, value_of
from trailmark.learn.watch import summary
from trailmark.models.tiny import tiny_tokenizer
from trailmark.report.episodes import outcome_view
from trailmark.rollout.play import Seat
from trailmark.runs.episode_json import from_json, to_json
from trailmark.score.base import Judge, Verdict
from trailmark.score.config import FunctionJudgeConfig, judge_config
from trailmark.score.function import FunctionJudge
from trailmark.score.open_judge import open_judge
from trailmark.score.several import SeveralJudge, weighted
from trailmark.tasks.base import Observation, Step
from trailmark.types import Annotation, Episode, Failed, Invalid, Scored, Task


class Says(Judge):
    """Gives these outcomes, with a note about each."""

    def __init__(self, *outcomes, name="says"):
        self.outcomes, self.name, self.source, self.fingerprint = outcomes, name, name, name

    async def judge(self, asked):
        note = lambda p: (Annotation(p.episode.id, "seen", "episode", (1.0,), None, self.name),)
        return [Verdict(o, note(p)) for p, o in zip(asked, self.outcomes, strict=True)]

    def metrics(self, notes):
        return {"seen": sum(a.values[0] for a in notes if a.name == "seen")}


def several(success=None, **parts):
    judges = {name: Says(*outcomes, name=name) for name, (_, *outcomes) in parts.items()}
    return SeveralJudge(judges, {name: weight for name, (weight, *_) in parts.items()}, success)


def outcomes(judge, n):
    return [v.outcome for v in asyncio.run(judge.judge(plays(n)))]


def test_the_reward_is_the_weighted_sum_by_hand():
    judge = several(right=(1.0, Scored(1.0), Scored(0.0)), brief=(0.5, Scored(0.25), Scored(-3.0)),
                    words=(0.0, Scored(12.0), Scored(7.0)))  # fmt: skip
    assert outcomes(judge, 2) == [
        Scored(1.125, None, {"right": 1.0, "brief": 0.25, "words": 12.0}),
        Scored(-1.5, None, {"right": 0.0, "brief": -3.0, "words": 7.0}),
    ]
    assert judge.name == "1 right + 0.5 brief + 0 words"


def test_the_sum_is_rounded_once():
    """Ten times 0.1 is 1, and a large number does not swallow a small one, in any order."""
    assert weighted({str(k): 1.0 for k in range(10)}, {str(k): 0.1 for k in range(10)}) == 1.0
    parts = {"a": 1e16, "b": 1.0, "c": -1e16}
    for names in ("abc", "cab", "bca"):
        assert weighted(dict.fromkeys(names, 1.0), {n: parts[n] for n in names}) == 1.0
    assert weighted({"a": 1.0}, {"a": 0.1}) == 0.1 and weighted({"a": -2.0}, {"a": 0.3}) == -0.6
    with pytest.raises(JudgeError, match="is no finite number: use smaller weights"):
        weighted({"a": 1e308}, {"a": 1e308})


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_part_that_fails_fails_the_play_also_if_it_is_only_a_metric(weight):
    judge = several(right=(1.0, Scored(1.0), Scored(1.0), Invalid("no answer")),
                    style=(weight, Failed("judge 'm': no mark"), Scored(2.0), Failed("gone")))  # fmt: skip
    failed, good, both = outcomes(judge, 3)
    assert failed == Failed("reward 'style': judge 'm': no mark") and both == Failed("reward 'style': gone")
    assert good == Scored(1.0 + 2.0 * weight, None, {"right": 1.0, "style": 2.0})
    assert outcomes(several(a=(weight, Invalid("leaked")), b=(1.0, Scored(1.0))), 1) == [Invalid("reward 'a': leaked")]


def test_a_play_is_a_success_if_it_is_one_to_every_part_that_says_so():
    won = lambda *said, success=None: outcomes(
        several(success, **{f"p{k}": (1.0, Scored(1.0, s)) for k, s in enumerate(said)}), 1)[0].success  # fmt: skip
    assert (won(None, None), won(True, None), won(True, True), won(True, False)) == (None, True, True, False)
    assert (won(False, None, success=2.0), won(True, True, success=2.5)) == (True, False)  # of the sum


def test_each_side_gets_its_own_sum():
    sides = {"buyer": Scored(2.0), "seller": Scored(4.0)}
    judge = several(price=(0.5, sides), kind=(1.0, Scored(1.0)))
    (play,) = plays(1)
    play.episode.outcomes.clear()
    play.episode.outcomes.update(dict.fromkeys(sides, Invalid("")))
    (verdict,) = asyncio.run(judge.judge([play]))
    assert verdict.outcome == {
        "buyer": Scored(2.0, None, {"price": 2.0, "kind": 1.0}),
        "seller": Scored(3.0, None, {"price": 4.0, "kind": 1.0}),
    }


def test_notes_and_metrics_have_the_name_of_their_part():
    judge = several(a=(1.0, Scored(1.0), Scored(2.0)), b=(1.0, Scored(3.0), Failed("gone")))
    notes = [n for v in asyncio.run(judge.judge(plays(2))) for n in v.notes]
    assert [(n.name, n.source) for n in notes] == [("a.seen", "a"), ("b.seen", "b")] * 2
    assert judge.metrics(notes) == {"a/seen": 2.0, "b/seen": 2.0}


def test_each_part_is_logged_by_its_name():
    e = lambda k, outcome: Episode(f"e{k}", Task(f"t{k}"), "g", (), {"self": outcome})
    episodes = [e(0, Scored(1.5, True, {"a": 1.0, "b": 0.5})), e(1, Scored(0.5, False, {"a": 0.0, "b": 0.5})),
                e(2, Failed("gone"))]  # fmt: skip
    assert [from_json(to_json(x)) for x in episodes] == episodes
    assert '"parts":{"a":1.0,"b":0.5}' in to_json(episodes[0])
    assert summary(episodes[:2]) == {"reward": 1.0, "turns": 0.0, "written_tokens": 0, "reward/a": 0.5,
                                     "reward/b": 0.5, "success": 0.5}  # fmt: skip
    found = summarise(episodes)["metrics"]
    assert (found["reward/a"]["value"], found["reward/b"]["value"], found["reward/b"]["n"]) == (0.5, 0.5, 2)
    assert value_of(episodes[0], "reward/b") == 0.5 and value_of(episodes[0], "reward/c") is None
    assert outcome_view(episodes[0].outcome)["parts"] == {"a": 1.0, "b": 0.5}
    assert "parts" not in to_json(e(3, Scored(1.0))) and "parts" not in outcome_view(Scored(1.0))


class Tries:
    """Each play is paid 0.5 and has a metric of the task's own; the play of the last start has one more."""

    name, markov = "tries", True

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"t{k}", seed, {"k": k}) for k in range(n or 3)]

    def make(self):
        return TriesWorld()


class TriesWorld:
    def reset(self, task):
        self.k = task.data["k"]
        return Observation("Try: ")

    def step(self, action):
        named = {"tries": float(self.k)} | ({"late": 1.0} if self.k == 2 else {})
        return Step(Observation(""), 0.5, True, False, Scored(0.5, True, named))


def test_a_task_names_metrics_of_its_own_which_are_never_paid():
    seat = Seat("policy", ScriptedEngine(lambda prompt, draw: "now", tiny_tokenizer()))
    played = evaluate(Tries(), [seat], n=3, samples=2, seed=1)
    assert [t.reward for e in played.episodes for t in e.turns] == [0.5] * 6
    found = played.row["metrics"]
    assert (found["reward"]["value"], found["reward/tries"]["value"], found["reward/late"]["value"]) == (0.5, 1.0, 1.0)
    assert (found["reward/tries"]["n"], found["reward/late"]["n"]) == (3, 1)  # starts that have it
    logged = summary(played.episodes)
    assert (logged["reward"], logged["reward/tries"], logged["reward/late"]) == (0.5, 1.0, 1.0)
    assert outcome_view(played.episodes[-1].outcome)["parts"] == {"tries": 2.0, "late": 1.0}


def test_a_judge_that_answers_nothing_readable_fails_the_play():
    """A function and a language model together; the model gives one play no mark."""
    said = lambda messages: "I like it." if "<1>" in messages[0]["content"] else '{"score": 5}'
    with serving_judge(said) as (url, _):
        judge = SeveralJudge({"long": FunctionJudge(lambda answer: len(answer)), "style": judge_at(url, again=0)},
                             {"long": 0.1, "style": 2.0})  # fmt: skip
        found = outcomes(judge, 2)
    assert judge.asks_server and not several(a=(1.0,)).asks_server  # `eval` keeps plays that wait for a server
    length = len(plays(1)[0].answer)
    assert found[0].reward == 0.1 * length + 1.0 and found[0].parts == {"long": length, "style": 0.5}
    assert isinstance(found[1], Failed) and found[1].error.startswith("reward 'style': judge 'wise' gave no mark")


def test_one_error_of_the_users_code_ends_the_work_and_names_the_file(tmp_path):
    (tmp_path / "mine.py").write_text("def a(answer): return 1\ndef b(answer): return None\n")
    judge = open_judge({"a": f"{tmp_path}/mine.py:a", "b": f"{tmp_path}/mine.py:b"})
    with pytest.raises(JudgeError, match="mine.py:b returned None for row 't0'"):
        outcomes(judge, 2)


FORMS = """
    {a: my.py:a, b: my.py:b}
    {a: my.py:a, b: {path: my.py:b}}
    {a: {weight: 1, reward: my.py:a}, b: {kind: function, path: my.py:b}}
    {kind: several, of: {a: my.py:a, b: {reward: {path: my.py:b}}}}
"""


@pytest.mark.parametrize("text", textwrap.dedent(FORMS).strip().splitlines())
def test_the_same_rewards_in_other_words(text):
    import yaml

    found = judge_config(yaml.safe_load(text))
    assert found == judge_config({"a": "my.py:a", "b": "my.py:b"})
    assert judge_config(found.model_dump(mode="json")) == found  # as the run's recipe has it
    assert found.of["b"].reward == FunctionJudgeConfig(path="my.py:b") and found.of["b"].weight == 1.0


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"a": {"weigth": 2, "reward": "my.py:a"}}, "key 'reward.a.weigth': is not known. Did you mean 'weight'"),
        ({"a": {"weight": 2}}, "key 'reward.a.reward': is missing"),
        ({"kind": "several", "of": {"a": {"weight": 2}}}, "key 'reward.of.a.reward': is missing"),
        ({"kind": "several", "of": {}}, "key 'reward': of names no reward"),
        ({"a b": "my.py:a"}, "key 'reward': 'a b' is no name of a reward: use letters"),
        (["my.py:a", "my.py:b"], "key 'reward': several rewards have names, such as {right: my_file.py:right}"),
        ({"a": {"weight": "much", "reward": "my.py:a"}}, "key 'reward.a.weight': expected a number"),
        ({"a": {"reward": {"kind": "several", "of": {"b": "my.py:b"}}}}, "has the unknown 'kind' 'several'"),
        ({"rubric": "Is it right?"}, "key 'reward': needs a key 'kind'"),
        ({"kind": "function", "path": "my.py:a", "weight": 2}, "key 'reward.weight': is not known"),
    ],
)
def test_a_mistake_is_named_by_its_key(reward, said):
    with pytest.raises(RecipeError) as caught:
        judge_config(reward)
    assert said in str(caught.value)


def test_a_price_is_two_numbers():
    """As the page writes it; lists of a recipe are tuples of its settings."""
    model = {"kind": "model", "server": {"address": "http://localhost:1", "model": "m"}, "price": [1, 2.5]}
    assert judge_config(model).price == judge_config({"style": model}).of["style"].reward.price == (1.0, 2.5)


def test_another_weight_is_another_judge(tmp_path):
    judge = several(a=(1.0, Scored(1.0)), b=(1.0, Scored(1.0)))
    judge.keep(tmp_path)
    assert several(a=(1.0,), b=(1.0,)).changed(tmp_path) == ""
    assert "has changed since this run began" in several(a=(1.0,), b=(2.0,)).changed(tmp_path)
    other = several(a=(1.0,), b=(1.0,))
    other.parts["b"].fingerprint = "another"
    assert other.changed(tmp_path).startswith("'b': b has changed since this run began")
