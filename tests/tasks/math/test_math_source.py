"""Problems from files, prompts, the world and its steps."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest

from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import DataError, TaskError
from trailmark.evaluate.run import evaluate
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat
from trailmark.steps import LINES, SENTENCES, split_steps
from trailmark.tasks import get_task
from trailmark.tasks.check import check_task
from trailmark.tasks.math.prompts import DEEPSEEK_BOS, messages, prompt
from trailmark.types import Scored, Task

GSM = [
    {"question": f"Ann has {k} pens and buys {k} more. How many has she?",
    "answer": f"She has {k}+{k} = <<{k}+{k}={2 * k}>>{2 * k} pens.\n#### {2 * k}"}
    for k in range(1, 11)
]  # fmt: skip
MATH = [
    {"problem": "Solve $2x=1$.", "level": "Level 1", "type": "Algebra", "solution": r"So $x=\boxed{\frac{1}{2}}$."},
    {
        "problem": "Solve $x^2=9$.",
        "level": "Level 5",
        "type": "Algebra",
        "solution": r"$x=\boxed{3}$ or $x=\boxed{-3}$.",
        "answer": "-3",
    },
    {"problem": "No answer.", "level": "Level 5", "type": "Algebra", "solution": r"There are $\boxed{}$ of them."},
]
SVAMP = [
    {
        "Body": "There are 8 cups",
        "Question": "How many are 2 packs?",
        "Answer": 16.0,
        "Equation": "( 8.0 * 2.0 )",
        "Type": "Multiplication",
        "ID": "c-1",
    }
]
ASDIV = [
    {
        "body": "Two cats meet one cat.",
        "question": "How many cats are there?",
        "answer": "3 (cats)",
        "formula": "2+1=3",
        "solution_type": "Addition",
    }
]


def lines(rows):
    return "".join(json.dumps(r) + "\n" for r in rows)


@pytest.fixture
def data(tmp_path):
    (tmp_path / "gsm8k_train.jsonl.gz").write_bytes(gzip.compress(lines(GSM).encode()))
    (tmp_path / "gsm8k_test.jsonl").write_text(lines(GSM[:3]))
    (tmp_path / "math_train.jsonl").write_text(lines(MATH))
    (tmp_path / "svamp_test.json").write_text(json.dumps(SVAMP))
    (tmp_path / "asdiv_test.jsonl").write_text(lines(ASDIV))
    return tmp_path


def test_gsm8k(data):
    source = get_task("math", dataset="gsm8k", path=str(data), style="plain")
    ready = source.checker.pool.started  # the first source of a process checks the parser
    tasks = source.tasks("train")
    assert [t.id for t in tasks] == [f"gsm8k-train-{k}" for k in range(10)] and len(source.tasks("test")) == 3
    assert tasks[1].data["answer"] == "4" and tasks[1].meta["gold"] == "She has 2+2 = 4 pens.\n#### 4"
    world = source.make()
    assert world.reset(tasks[1]).text == "Ann has 2 pens and buys 2 more. How many has she?\n"
    step = world.step("She has 4.\n#### 4")
    assert step.terminated and step.outcome == Scored(1.0, True) and step.info == {"answer": "4", "reason": "equal"}
    world.reset(tasks[1])
    step = world.step("#### 400")
    assert step.outcome == Scored(0.0, False) and step.info == {"answer": "400", "reason": "different"}
    with pytest.raises(TaskError, match="call reset"):
        world.step("#### 4")
    assert source.checker.pool.started == ready  # numbers are compared here, not in another process


def test_starts_are_drawn_by_seed_each_once(data):
    source = get_task("math", path=str(data))
    ids = [t.id for t in source.tasks("train", 10, seed=3)]
    assert len(set(ids)) == 10 and ids == [t.id for t in source.tasks("train", 10, seed=3)]
    assert ids != [t.id for t in source.tasks("train", 10, seed=4)]
    assert sorted(t.id for t in source.tasks("train", 20)) == sorted(2 * ids)


def test_a_part_of_train_is_kept_for_validation(data):
    source = get_task("math", path=str(data), val=3)
    train, val = ({t.id.rpartition("-")[2] for t in source.tasks(s)} for s in ("train", "val"))
    assert val == {"7", "8", "9"} and not train & val and len(train) == 7
    with pytest.raises(TaskError, match="val=10 leaves nothing"):
        get_task("math", path=str(data), val=10).tasks("train")


def test_math_takes_all_boxes_of_the_solution_and_skips_what_has_no_answer(data):
    source = get_task("math", dataset="math", path=str(data), workers=1)
    tasks = source.tasks("train")
    assert [t.data["answer"] for t in tasks] == [r"\frac{1}{2}", "3, -3"] and source.skipped == {"train": 1}
    world = source.make()
    for task, action, right in [
        (0, r"\boxed{0.5}", 1),
        (0, r"\boxed{2}", 0),
        (1, r"\boxed{\pm 3}", 1),
        (1, r"\boxed{3}", 0),
    ]:
        world.reset(tasks[task])
        assert world.step(action).reward == right
    assert [t.id for t in get_task("math", dataset="math", path=str(data), level=5).tasks("train")] == ["math-train-1"]
    assert source.step_ends == SENTENCES


def test_svamp_and_asdiv(data):
    (svamp,) = get_task("math", dataset="svamp", path=str(data)).tasks("test")
    assert svamp.data["question"] == "There are 8 cups. How many are 2 packs?" and svamp.data["answer"] == "16"
    source = get_task("math", dataset="asdiv", path=str(data), style="deepseek-math")
    (asdiv,) = source.tasks("test")
    assert asdiv.meta["gold"] == "2+1=3\nThe final answer is $\\boxed{3 (cats)}$."
    world = source.make()
    for action in (asdiv.meta["gold"], r"\boxed{3}", r"\boxed{3\text{ cats}}", "The answer is 3 cats."):
        world.reset(asdiv)
        assert world.step(action).reward == 1


def test_folders_as_math_was_published(tmp_path):
    for kind, name, row in (("algebra", "1", MATH[0]), ("algebra", "10", MATH[1]), ("geometry", "2", MATH[0])):
        (tmp_path / "test" / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "test" / kind / f"{name}.json").write_text(json.dumps(row))
    assert len(get_task("math", dataset="math", path=str(tmp_path)).tasks("test")) == 3
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_text(lines(GSM))
    assert len(get_task("math", path=str(tmp_path / "other")).tasks("train")) == 10


@pytest.mark.parametrize(
    ("options", "split", "said"),
    [
        ({"dataset": "gsm9k"}, "train", "no dataset 'gsm9k'. Did you mean 'gsm8k'?"),
        ({"style": "qwen"}, "train", "no prompt style 'qwen'. Did you mean 'qwen-math'?"),
        ({"rules": "loose"}, "train", "no rules 'loose'"),
        ({"level": 3}, "train", "only MATH has levels, not gsm8k"),
        ({"path": "nowhere"}, "train", "no file or folder nowhere"),
        ({}, "trian", "no split 'trian' of gsm8k. Did you mean 'train'?"),
        ({"path": "gsm8k_train.jsonl.gz"}, "test", "is not split 'test' by its name"),
        ({"dataset": "math", "level": 3}, "train", "no problem of"),
        ({"val": -1}, "train", "val >= 0"),
    ],
)
def test_mistakes_are_named(data, monkeypatch, options, split, said):
    monkeypatch.chdir(data)
    with pytest.raises(TaskError, match=said.replace("?", r"\?")):
        get_task("math", **{"path": str(data), **options}).tasks(split)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"question": "a"}\n', r"gsm8k_train.jsonl:1: key 'answer': is missing"),
        ('{"question": "a", "answer": "b"}\n', r":1: key 'answer': has no line '#### number'"),
        ('{"question": "a", "answr": "#### 1"}\n', r":1: key 'answr': is not known. Did you mean 'answer'"),
        ('{"question": 1, "answer": "#### 1"}\n', r"key 'question': must be text"),
        ("{\n", r":1: is not JSON"),
        ("", "holds no problem"),
        ("[1]", r"must be an object"),
    ],
)
def test_bad_rows_are_named(tmp_path, text, said):
    (tmp_path / "gsm8k_train.jsonl").write_text(text)
    with pytest.raises(DataError, match=said):
        get_task("math", path=str(tmp_path)).tasks("train")
    (tmp_path / "gsm8k_test.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        get_task("math", path=str(tmp_path)).tasks("test")


def test_the_hub_needs_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match="needs the datasets library: pip install datasets; or give path="):
        get_task("math").tasks("train")


def test_the_hub_by_name(monkeypatch):
    asked = []

    class Hub:
        @staticmethod
        def load_dataset(name, config, split, revision):
            asked.append((name, config, split, revision))
            if split == "lost":
                raise ValueError("unknown split\nmore")
            return GSM if "gsm" in name else MATH

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    assert len(get_task("math").tasks("train")) == 10 and asked == [("openai/gsm8k", "main", "train", None)]
    assert len(get_task("math", dataset="math", hub="some/copy:all", revision="v1").tasks("test")) == 2
    assert asked[-1] == ("some/copy", "all", "test", "v1")
    with pytest.raises(
        TaskError, match="'openai/gsm8k' split 'lost' cannot be loaded from the hub: unknown split. Or give path="
    ):
        get_task("math").tasks("lost")


def test_it_keeps_the_promises_of_a_task(data):
    report = check_task(get_task("math", path=str(data)), episodes=4)
    assert report.ok, report


def test_prompts():
    assert prompt("1+1?", "plain", "hash") == "1+1?\n"
    qwen = prompt("1+1?", "qwen-math", "boxed")
    assert qwen.startswith(
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    )
    assert qwen.endswith("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert "#### 0" in prompt("1+1?", "qwen-math", "hash") and "boxed" not in prompt("1+1?", "qwen-math", "hash")
    deep = prompt("1+1?", "deepseek-math", "hash")
    assert deep.startswith(DEEPSEEK_BOS + "User: 1+1?\nPlease reason") and deep.endswith("\\boxed{}.\n\nAssistant:")
    assert [m["role"] for m in messages("?", "qwen-math", "hash")] == ["system", "user"]


def bos_tokenizer(adds):
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": DEEPSEEK_BOS})
    if adds:
        template = processors.TemplateProcessing(
            single=f"{DEEPSEEK_BOS} $A", special_tokens=[(DEEPSEEK_BOS, tokenizer.bos_token_id)]
        )
        tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


@pytest.mark.parametrize("adds", [False, True])
def test_exactly_one_bos_reaches_the_engine(data, adds):
    tokenizer, seen = bos_tokenizer(adds), []

    class Watch(ScriptedEngine):
        async def sample(self, request):
            seen.append(request.prompt)
            return await super().sample(request)

    source = get_task("math", path=str(data), style="deepseek-math")
    evaluate(source, [Seat("policy", Watch(lambda *_: r" \boxed{4}", tokenizer))], split="test")
    assert [ids.count(tokenizer.bos_token_id) for ids in seen] == [1, 1, 1] and all(
        i[0] == tokenizer.bos_token_id for i in seen
    )


def test_evaluation_counts_and_votes(data):
    """Canned answers: right for the first problem twice in three, in different spellings; never for the others."""
    said = iter(["#### 2", "#### 2.0", "#### 5"] + ["#### 0"] * 6)
    engine = ScriptedEngine(lambda *_: next(said), tiny_tokenizer())
    report = evaluate(get_task("math", path=str(data)), [Seat("policy", engine)], split="test", samples=3)
    metrics = report.row["metrics"]
    assert metrics["success"]["value"] == pytest.approx(2 / 9) and metrics["pass@3"]["value"] == pytest.approx(1 / 3)
    assert metrics["maj@3"]["value"] == pytest.approx(1 / 3)  # 2 and 2.0 are one answer


@pytest.mark.parametrize(
    ("text", "ends", "steps"),
    [
        ("a\nb\nc", LINES, ["a\n", "b\n", "c"]),
        ("a\n\nb\n", LINES, ["a\n\n", "b\n"]),
        ("\n\na", LINES, ["\n\na"]),
        ("It is 3.5 cm. Then $x=2.$ So 1.5", SENTENCES, ["It is 3.5 cm. ", "Then $x=2.$ ", "So 1.5"]),
        ("It is 3.5 cm. Then", LINES, ["It is 3.5 cm. Then"]),
        ("One. \nTwo.", SENTENCES, ["One. \n", "Two."]),
        ("", SENTENCES, []),
        ("end. ", SENTENCES, ["end. "]),
    ],
)
def test_steps(text, ends, steps):
    assert split_steps(text, ends) == steps and "".join(steps) == text


@pytest.mark.data
@pytest.mark.skipif("TRAILMARK_DATA" not in os.environ, reason="no real data")
@pytest.mark.parametrize(
    ("dataset", "split", "count", "skipped"),
    [("gsm8k", "train", 7473, 0), ("math", "train", 7498, 2), ("svamp", "test", 1000, 0), ("asdiv", "test", 2215, 0)],
)
def test_every_gold_solution_of_the_real_data_is_right(dataset, split, count, skipped):
    source = get_task("math", dataset=dataset, path=str(Path(os.environ["TRAILMARK_DATA"]) / "math"))
    world, wrong = source.make(), []
    tasks = source.tasks(split)
    for task in tasks:
        world.reset(task)
        step = world.step(task.meta["gold"])
        wrong += [] if step.reward == 1 else [(task.id, task.data["answer"], step.info)]
        assert "".join(split_steps(task.meta["gold"], source.step_ends)) == task.meta["gold"]
    assert not wrong and len(tasks) == count and source.skipped == {split: skipped}
    assert isinstance(tasks[0], Task)
