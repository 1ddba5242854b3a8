"""Worlds that cannot judge themselves: a judge is asked before anybody sees the episode."""

import asyncio
import json

import pytest

from trailmark.credit.turns import turn_returns
from trailmark.engines.base import Completion
from trailmark.errors import DataError, JudgeError, TaskError
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.branch import Point, branch
from trailmark.rollout.judging import as_played, judge_episodes
from trailmark.rollout.play import Seat, play, play_starts, start_all
from trailmark.score.base import Judge, Verdict
from trailmark.score.function import FunctionJudge
from trailmark.tasks import get_task
from trailmark.tasks.base import Observation, Step
from trailmark.tasks.check import check_task
from trailmark.types import Annotation, Failed, Invalid, Scored, Task

TOKENIZER = tiny_tokenizer()


class Counting:
    """An engine that says how many tokens it was shown, and in which words."""

    name, version, tokenizer = "counting", 0, TOKENIZER

    async def sample(self, request):
        text = f"{len(request.prompt)} of {TOKENIZER.decode(request.prompt)[-20:]}"
        ids = tuple(TOKENIZER.encode(text))
        return [Completion(ids, (0.0,) * len(ids), (0.0,) * len(ids), text, "stopped")]


ROWS = [
    {"prompt": "first", "gold": 1},
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "second"}],
        "gold": 2,
        "id": "two",
    },
    {"prompt": "third", "gold": 3},
]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    return path


def length(prompt, answer, row):
    return len(answer) + row["gold"] / 10


def test_the_reward_is_on_the_last_act_and_the_episode_says_who_judged(rows):
    source = get_task("prompts", path=str(rows))
    tasks, notes = source.tasks("all"), []
    judge = FunctionJudge(length, success=10.0)
    episodes = play(source, tasks, [Seat("policy", Counting())], n=2, judge=judge, notes=notes)
    assert len(episodes) == 6 and [e.task.id for e in episodes[::2]] == ["1", "two", "3"]
    for e in episodes:
        (turn,) = e.turns
        want = len(turn.text) + e.task.data["gold"] / 10
        assert e.outcome == Scored(want, want >= 10) and turn.reward == want and e.terminated
        assert e.info["judge"] == {"name": judge.name, "source": judge.source, "fingerprint": judge.fingerprint}
        assert as_played(e)[0].reward == 0.0
    assert notes == [Annotation(e.id, "reward", "episode", (e.outcome.reward,), None, judge.stamp) for e in episodes]
    shown = [TOKENIZER.decode(e.turns[0].prompt) for e in episodes[::2]]
    assert shown[0] == "first" and shown[2] == "third"  # texts as they stand, messages through the template
    assert "<|im_start|>system\nBe brief.<|im_end|>" in shown[1] and shown[1].endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("together", [False, True])
def test_a_function_that_changes_its_row_changes_no_other_reward_and_no_episode(tmp_path, together):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "marks": [5]}\n{"prompt": "b", "marks": [5]}\n')

    def one(row):
        row["marks"].append(0)
        return len(row["marks"])

    def many(rows):
        return [one(row) for row in rows]

    source = get_task("prompts", path=str(path))
    seats, judge = [Seat("policy", Counting())], FunctionJudge(many if together else one)
    for _ in range(2):
        episodes = play(source, source.tasks("all"), seats, n=2, judge=judge)
        assert [e.outcome.reward for e in episodes] == [2.0] * 4
        assert [e.task.data["marks"] for e in episodes] == [[5]] * 4


def test_chat_prompts(rows):
    source = get_task("prompts", path=str(rows), chat=True)
    (e,) = play(source, source.tasks("all")[:1], [Seat("policy", Counting())], judge=FunctionJudge(length))
    assert TOKENIZER.decode(e.turns[0].prompt) == "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n"


def test_without_a_judge_nothing_is_played(rows):
    source = get_task("prompts", path=str(rows))
    with pytest.raises(TaskError, match=r"task 'prompts' cannot judge.*reward: my_file.py:score"):
        play(source, source.tasks("all"), [Seat("policy", Counting())])


def test_the_sources_own_judge(rows, tmp_path):
    (tmp_path / "mine.py").write_text("def score(answer): return 2.5\n")
    source = get_task("prompts", path=str(rows), reward=f"{tmp_path}/mine.py:score")
    assert {e.outcome for e in play(source, source.tasks("all"), [Seat("policy", Counting())])} == {Scored(2.5)}


class Marks(Judge):
    """Gives what it was told to give."""

    name = source = "marks"

    def __init__(self, verdicts):
        self.verdicts, self.asked = verdicts, []

    async def judge(self, plays):
        self.asked.append(len(plays))
        return self.verdicts(plays)


class Talk:
    """Two turns, the first of which pays 0.5; the world judges itself when it hears nothing."""

    name, markov, judged = "talk", False, True

    def tasks(self, split="train", n=None, seed=0):
        return [Task(str(k), data={"k": k}) for k in range(n or 3)]

    def make(self):
        world, said = Talk(), []

        def reset(task):
            said.clear()
            return Observation(f"begin {task.data['k']}")

        def step(action):
            said.append(action)
            over = len(said) == 2
            return Step(Observation("go on"), 0.5, over, False)

        world.reset, world.step = reset, step
        return world


def test_verdicts_of_every_kind_and_one_question_for_all():
    kinds = (Scored(2.0), Invalid("leaked"), Failed("no answer"))
    judge = Marks(lambda plays: [Verdict(o) for o in kinds])
    notes = []
    episodes = play(Talk(), Talk().tasks(), [Seat("policy", Counting())], judge=judge, notes=notes)
    assert [e.outcome for e in episodes] == list(kinds) and judge.asked == [3]
    assert [t.reward for t in episodes[0].turns] == [0.5, 2.5] and episodes[0].info["judge"]["world_reward"] == 0.5
    assert [[t.reward for t in e.turns] for e in episodes[1:]] == [[0.5, 0.5]] * 2  # a failure is never a zero
    assert [n.episode for n in notes] == [episodes[0].id]
    assert [t.reward for t in as_played(episodes[0])] == [0.5, 0.5]


def test_episodes_are_handed_on_when_they_are_judged():
    """A long collection is written as it finishes: nobody sees an episode without its verdict, and none is judged
    twice."""

    class Slow(Marks):
        async def judge(self, plays):
            await asyncio.sleep(0.01)
            return await super().judge(plays)

    judge, seen, notes = Slow(lambda plays: [Verdict(Scored(float(len(p.answer)))) for p in plays]), [], []
    starts = start_all(Talk().tasks(n=7))
    seats = [Seat("policy", Counting())]
    made = play_starts(Talk(), starts, seats, at_once=2, judge=judge, notes=notes, each=seen.append)
    assert sorted(e.id for e in seen) == [e.id for e in made] and len(made) == 7
    assert all(isinstance(e.outcome, Scored) for e in seen) and {e.id: e for e in seen} == {e.id: e for e in made}
    assert sum(judge.asked) == 7 == len(notes) and len(judge.asked) > 1


def test_a_judge_that_answers_for_another_episode_or_for_too_few():
    other = Marks(lambda plays: [Verdict(Scored(1.0), (Annotation("e9", "x", "episode", (1.0,)),)) for _ in plays])
    with pytest.raises(JudgeError, match="'marks' answered for episode 'e9' where '0/0' was asked"):
        play(Talk(), Talk().tasks(), [Seat("policy", Counting())], judge=other)
    with pytest.raises(JudgeError, match="gave 1 verdicts for 3 plays"):
        play(Talk(), Talk().tasks(), [Seat("policy", Counting())], judge=Marks(lambda plays: [Verdict(Scored(1.0))]))


def test_a_branch_is_judged_again():
    judge = Marks(lambda plays: [Verdict(Scored(float(len(p.answer)))) for p in plays])
    (e,) = play(Talk(), Talk().tasks(n=1), [Seat("policy", Counting())], judge=judge)
    ((again,),) = branch(Talk(), [Point(e, 1)], [Seat("policy", Counting())], judge=judge)
    assert again.outcome == e.outcome and [t.reward for t in again.turns] == [t.reward for t in e.turns]
    assert judge.asked == [1, 1]


def test_a_world_that_crashes_is_not_judged():
    class Broken(Talk):
        def make(self):
            world = super().make()
            world.step = lambda action: 1 / 0
            return world

    judge = Marks(lambda plays: [])
    episodes = play(Broken(), Talk().tasks(), [Seat("policy", Counting())], judge=judge)
    assert all(isinstance(e.outcome, Failed) for e in episodes) and judge.asked == []


def test_the_split_is_that_of_the_prompts(tmp_path):
    rows = [{"prompt": f"p{k % 20}", "k": k} for k in range(60)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    source = get_task("prompts", path=str(path), test=0.25)
    test = {t.data["prompt"] for t in source.tasks("test")}
    train = {t.data["prompt"] for t in source.tasks("train")}
    assert len(test) == 5 and len(train) == 15 and not test & train and len(source.tasks("all")) == 60
    path.write_text("".join(json.dumps(r) + "\n" for r in reversed(rows)))
    again = get_task("prompts", path=str(path), test=0.25)
    assert {t.data["prompt"] for t in again.tasks("test")} == test
    drawn = source.tasks("train", 8, 3)
    assert drawn == source.tasks("train", 8, 3) != source.tasks("train", 8, 4) and len({t.id for t in drawn}) == 8
    assert len(source.tasks("test", 500)) == 15
    path.write_text('{"prompt": "a", "split": "test"}\n{"prompt": "b"}\n')
    said = get_task("prompts", path=str(path))
    assert [t.data["prompt"] for t in said.tasks("test")] == ["a"]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "holds no prompts"),
        ("{}\n", "rows.jsonl:1: must be a JSON object with a key 'prompt'"),
        ('{"prompt": "a"}\nnonsense\n', "rows.jsonl:2: is not JSON"),
        ('{"prompt": ""}\n', "must be a text, or a list of messages"),
        ('{"prompt": 3}\n', "must be a text"),
        ('{"prompt": [{"role": "user"}]}\n', "must be a text"),
        ('{"prompt": [{"role": "assistant", "content": "x"}]}\n', "there is nothing to answer"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', "rows.jsonl:2: key 'id': a second row"),
        ('{"prompt": "a", "split": "dev"}\n', "row '1' has split 'dev'"),
    ],
)
def test_files_that_are_no_prompts(text, said, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        get_task("prompts", path=str(path))


def test_the_world_passes_the_check_of_worlds(rows):
    source = get_task("prompts", path=str(rows))
    report = check_task(source)
    assert report.ok and report.counts["tasks"] == 2


class Bargain(Talk):
    """Two sides speak in turn, twice each, and each action pays its side 0.5."""

    def make(self):
        world, said = Bargain(), []

        def reset(task):
            said.clear()
            return Observation("begin", seat="buyer")

        def step(action):
            said.append(action)
            return Step(Observation("go on", seat=("buyer", "seller")[len(said) % 2]), 0.5, len(said) == 4, False)

        world.reset, world.step = reset, step
        return world


TWO = [Seat("buyer", Counting(), side="a"), Seat("seller", Counting(), side="b")]


def test_each_side_has_an_outcome_of_its_own():
    """A judge of two sides: each side's reward is on the turn of that side that acted last, beside what the world
    paid."""
    verdicts = iter([{"a": Scored(2.0), "b": Scored(-1.0)}, {"b": Failed("no answer"), "a": Scored(3.0)}])
    judge, notes = Marks(lambda plays: [Verdict(next(verdicts)) for _ in plays]), []
    first, second = play(Bargain(), Bargain().tasks(n=2), TWO, judge=judge, notes=notes)
    assert first.outcomes == {"a": Scored(2.0), "b": Scored(-1.0)} and second.outcomes["b"] == Failed("no answer")
    assert [t.reward for t in first.turns] == [0.5, 0.5, 2.5, -0.5]
    assert [t.reward for t in second.turns] == [0.5, 0.5, 3.5, 0.5] and list(second.outcomes) == ["a", "b"]
    assert [t.reward for t in as_played(first)] == [t.reward for t in as_played(second)] == [0.5] * 4
    said = [(n.episode, n.name, n.values[0]) for n in notes]
    assert said == [(first.id, "reward", 2.0), (first.id, "reward_b", -1.0), (second.id, "reward", 3.0)]
    assert turn_returns(first, "buyer").tolist() == [3.0, 2.5] and turn_returns(first, "seller").tolist() == [0.0, -0.5]
    ((again,),) = branch(Bargain(), [Point(first, 1)], TWO, judge=Marks(lambda plays: [Verdict(Scored(1.0))]))
    assert again.turns[0] == first.turns[0] and set(again.outcomes.values()) == {Scored(1.0)}
    with pytest.raises(JudgeError, match=r"gave outcomes to 'a', 'c' in row '0', where 'a', 'b' played"):
        play(
            Bargain(), Bargain().tasks(n=1), TWO, judge=Marks(lambda _: [Verdict({"a": Scored(1.0), "c": Scored(1.0)})])
        )


def test_plays_that_are_over_can_be_judged_once_more():
    """Somebody else's opinion of finished plays: it sees what the first judge saw, and changes nothing."""
    episodes = play(
        Talk(), Talk().tasks(n=2), [Seat("policy", Counting())], judge=Marks(lambda p: [Verdict(Scored(1.0))] * 2)
    )
    seen = []
    found = judge_episodes(Talk(), episodes, Marks(lambda plays: seen.extend(plays) or [Verdict(Scored(7.0))] * 2))
    assert [v.outcome for v in found] == [Scored(7.0)] * 2
    assert [(p.prompt, p.answer) for p in seen] == [(f"begin {k}", e.turns[1].action) for k, e in enumerate(episodes)]
    with pytest.raises(JudgeError, match="gave 1 verdicts for 2 plays"):
        judge_episodes(Talk(), episodes, Marks(lambda plays: [Verdict(Scored(7.0))]))
