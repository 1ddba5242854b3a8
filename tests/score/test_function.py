"""A person's own function: found by name, called with what it asks for, and never believed when it gives no number."""

import asyncio
import math

import numpy as np
import pytest
import torch

from trailmark.errors import JudgeError, RecipeError, TrailmarkError
from trailmark.functions import load_function
from trailmark.score.base import Judge, Play
from trailmark.score.function import FunctionJudge
from trailmark.score.likelihood import TextScorer
from trailmark.score.open_judge import open_judge
from trailmark.types import Episode, Invalid, Scored, Task

PLAYS = [
    Play(Episode(f"e{k}", Task(f"t{k}"), "g", (), {"self": Invalid("")}), f"prompt {k}", "x" * k, {"gold": k * 10})
    for k in range(4)
]


def rewards(text, tmp_path, name="score", plays=PLAYS, **more):
    file = tmp_path / "mine.py"
    file.write_text(text)
    judge = open_judge({"kind": "function", "path": f"{file}:{name}", **more})
    return [v.outcome.reward for v in asyncio.run(judge.judge(plays))]


@pytest.mark.parametrize(
    "text, want",
    [
        ("def score(prompt, answer, row): return len(answer) + row['gold']", [0, 11, 22, 33]),
        ("def score(row, prompt): return row['gold'] + len(prompt)", [8, 18, 28, 38]),
        ("def score(answer): return answer == 'xx'", [0, 0, 1, 0]),
        ("def score(prompts, answers, rows): return [len(a) for a in answers]", [0, 1, 2, 3]),
        ("def score(answers, rows): import numpy; return numpy.array([len(a) for a in answers]) / 2", [0, 0.5, 1, 1.5]),
        (
            "import asyncio\nasync def score(prompt, answer, row):\n    await asyncio.sleep(0.01)\n"
            "    return len(answer)",
            [0, 1, 2, 3],
        ),
        ("async def score(rows): return [r['gold'] for r in rows]", [0, 10, 20, 30]),
        ("def score(prompt, answer, row, weight=2): return weight * len(answer)", [0, 2, 4, 6]),
        ("def score(**all): return len(all['answer'])", [0, 1, 2, 3]),
        ("import torch\ndef score(answer): return torch.tensor(float(len(answer)))", [0, 1, 2, 3]),
        ("class Fine:\n    def __call__(self, answer): return 1\nscore = Fine()", [1, 1, 1, 1]),
    ],
)
def test_one_signature(text, want, tmp_path):
    assert rewards(text, tmp_path) == want


@pytest.mark.parametrize(
    "text, said",
    [
        ("def score(answer): return float('nan')", r"mine.py:score returned nan for row 't0': it must return a finite"),
        ("def score(answer): return 1e999", "returned inf"),
        ("def score(answer): return 10 ** 400", "must return a finite number"),
        ("def score(answer): return None", r"mine.py:score returned None for row 't0': it must return a number"),
        ("def score(answer): return '1'", "returned str '1' for row 't0'"),
        ("def score(answer): return [1.0]", "returned list"),
        ("def score(answer, row): return 1 if row['gold'] < 20 else None", "returned None for row 't2'"),
        ("def score(answers): return [1.0, 2.0]", r"returned 2 numbers for 4 rows, the first row 't0'"),
        ("def score(answers): return 1.0", "must return a list of numbers"),
        ("def score(answers): return [1, 2, float('nan'), 4]", "returned nan for row 't2'"),
        ("def score(answer):\n    return 1 / len(answer)", r"mine.py:2 failed with ZeroDivisionError.*row 't0'"),
        ("async def score(answer):\n\n    raise KeyError('a')", r"mine.py:3 failed with KeyError"),
        ("import sys\ndef score(answer): sys.exit(3)", "SystemExit"),
        ("def score(answer, reference): return 1", "has the parameter 'reference'"),
        ("def score(answer, rows): return 1", "mixes one and many"),
        ("def score(): return 1", "takes nothing"),
        ("def score(answer): return 1\ndef other(answer): return 1", None),
        ("def mark(answer): return 1", r"has no function 'score'.*Known: mark"),
        ("def score(answer) return 1", r"mine.py:1 failed with SyntaxError"),
        ("x = 1\nraise ValueError('no data')", r"mine.py:2 failed with ValueError: no data"),
        ("class score: pass", "must derive from"),
    ],
)
def test_what_is_no_reward(text, said, tmp_path):
    if said is None:
        assert rewards(text, tmp_path) == [1.0] * 4
        return
    with pytest.raises(TrailmarkError, match=said) as caught:
        rewards(text, tmp_path)
    assert "\n" not in str(caught.value) and "mine.py" in str(caught.value)


def test_where_it_is_found(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("SCALE = 3")
    (tmp_path / "mine.py").write_text("from beside import SCALE\ndef score(answer): return SCALE * len(answer)\n")
    monkeypatch.chdir(tmp_path)
    found, file = load_function("mine.py:score")
    assert found("ab") == 6 and file.name == "mine.py"
    assert load_function("math:sqrt")[0](9) == 3
    for path, said in (
        ("none.py:score", "no file none.py"),
        ("no_such_package.x:score", "no module 'no_such_package'"),
        ("math:root", "has no function 'root'"),
        ("mine.py", "reward: 'mine.py' must be my_file.py:function"),
    ):
        with pytest.raises(RecipeError, match=said):
            load_function(path)


def test_a_fingerprint_is_the_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(answer): return 1\n")
    first, again = open_judge(f"{file}:score"), open_judge(f"{file}:score")
    assert first.fingerprint == again.fingerprint and len(first.fingerprint) == 16 and first.repeatable
    assert first.stamp == f"function {file}:score@{first.fingerprint}"
    file.write_text("def score(answer): return 2\n")
    changed = open_judge(f"{file}:score")
    assert changed.fingerprint != first.fingerprint
    # the file of now, not of the first import
    assert [v.outcome.reward for v in asyncio.run(changed.judge(PLAYS))] == [2.0] * 4


def test_success_from_a_reward_on(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(answer): return len(answer) / 3")
    judge = open_judge({"kind": "function", "path": f"{file}:score", "success": 0.6})
    assert [v.outcome for v in asyncio.run(judge.judge(PLAYS))] == [
        Scored(0.0, False), Scored(1 / 3, False), Scored(2 / 3, True), Scored(1.0, True),
    ]  # fmt: skip


def test_a_scorer_where_it_is_asked_for(make_lm, tmp_path):
    lm = make_lm("gpt2", dtype=torch.float64)

    def score(prompt, answer, scorer):
        return scorer.improvement(prompt, prompt + answer, "the end")

    judge = FunctionJudge(score, scorer=TextScorer(lm, tmp_path / "likelihoods.jsonl"))
    assert not judge.repeatable
    found = [v.outcome.reward for v in asyncio.run(judge.judge(PLAYS))]
    assert found[0] == 0.0 and len(set(found)) == 4
    gold = lm.tokenizer.encode("the end") + [lm.tokenizer.eos_token_id]
    for play, got in zip(PLAYS, found):
        ppl = []
        for context in (play.prompt, play.prompt + play.answer):
            row = torch.tensor([lm.tokenizer.encode(context) + gold])
            with torch.no_grad():
                lm.base.set_attn_implementation("eager")
                logp = lm.base(input_ids=row).logits[0].log_softmax(-1)
            at = range(row.shape[1] - len(gold), row.shape[1])
            ppl.append(math.exp(-np.mean([float(logp[t - 1, row[0, t]]) for t in at])))
        assert got == pytest.approx(100 * (1 - ppl[1] / ppl[0]), abs=1e-6)
    with pytest.raises(JudgeError, match="set reward.model"):
        asyncio.run(FunctionJudge(score).judge(PLAYS))


def test_a_judge_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from trailmark.score.base import Judge, Verdict\nfrom trailmark.types import Scored\n"
        "class Mine(Judge):\n    name = source = 'mine'\n"
        "    async def judge(self, plays): return [Verdict(Scored(7.0)) for _ in plays]\n"
    )
    judge = open_judge(f"{tmp_path}/mine.py:Mine")
    assert isinstance(judge, Judge) and asyncio.run(judge.judge(PLAYS))[3].outcome == Scored(7.0)


def test_sections_that_cannot_be():
    for section, said in (
        ({"kind": "oracle"}, "reward': has the unknown 'kind' 'oracle'"),
        ({"kind": "function"}, "key 'reward.path': is missing"),
        ({"kind": "model"}, "either server or model"),
        ({"kind": "model", "model": {"name": "tiny"}, "low": 3, "high": 3}, "must be less than high"),
        ({"kind": "likelihood", "golden": "x"}, "golden"),
    ):
        with pytest.raises(RecipeError, match=said):
            open_judge(section)
    with pytest.raises(RecipeError, match="set reward.model"):
        open_judge({"kind": "likelihood"})


def test_an_exception_that_cannot_be_printed(tmp_path):
    (tmp_path / "f.py").write_text(
        "class Bad(Exception):\n    def __str__(self):\n        raise ValueError\n\n"
        "def score(prompt, answer, row):\n    raise Bad\n"
    )
    from pathlib import Path

    from trailmark.functions import load_function, where_it_failed

    function, file = load_function(f"{tmp_path}/f.py:score")
    try:
        function("", "", {})
    except Exception as problem:
        assert where_it_failed(problem, Path(file)).endswith("f.py:6 failed with Bad: (its message cannot be read)")
