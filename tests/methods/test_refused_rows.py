"""A row that a model cannot be shown is found before the first step, with its name and what to do. No play is lost."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.methods import online
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.store import read_episodes, read_segment
from trailmark.types import Scored

REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if 'zebra' in m.content %}{{ raise_exception('no zebras') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY = "{name: tiny, tokenizer: gemma, shape: {layers: 1, width: 16, heads: 2, context: 512}}"
WORDS = ["steps=2", "prompts_per_step=2", "n=2", "sampling.max_tokens=4", "engine={max_num_seqs: 4, max_len: 400}",
    f"model={TINY}",
         "eval.every=1", "eval.n=null", "checkpoint.every=0", "out=run"]  # fmt: skip
RECIPES = Path(__file__).parents[2] / "recipes"
SYSTEM, HINT = "System role not supported", "set task.options.system=false"


def say(role, content):
    return {"role": role, "content": content}


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = REFUSES
    tokenizer.save_pretrained("gemma")
    Path("reward.py").write_text("def score(answer):\n    return float(len(answer) % 3)\n")

    def call(*words, code=0):
        done = CliRunner().invoke(app, list(map(str, words)))
        assert done.exit_code == code and "Traceback" not in done.output, done.output
        return " ".join(done.output.split())

    return call


def write(name, rows):
    Path(name).write_text("".join(json.dumps(r) + "\n" for r in rows))


def prompts(odd):
    """Eight rows, of which one is odd; `split` says where it is."""
    rows = [{"id": f"r{k}", "prompt": [say("user", f"Say {k}.")], "gold": f"{k}", "split": "train"} for k in range(8)]
    rows[3] |= odd
    rows[7]["split"] = "test"
    write("rows.jsonl", rows)


def train(shell, *words, code=0):
    return shell("train", RECIPES / "prompts-grpo.yaml", "data=rows.jsonl", "reward=reward.py:score", *WORDS, *words,
                 code=code)  # fmt: skip


WITH_SYSTEM = [say("system", "Be brief."), say("user", "Say three.")]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_template_that_refuses_system_messages_is_told_at_the_start(shell, split):
    prompts({"prompt": WITH_SYSTEM, "split": split})
    said = train(shell, code=2)
    assert "rows.jsonl: row 'r3': the chat template refuses the messages (system, user): System role not supp" in said
    assert "It takes them without the system message. Set task.options.system=false for that, or make files" in said
    assert "trailmark data stories --no-system-role" in said and not Path("run/episodes").exists()
    train(shell, "task.options.system=false")
    assert all(isinstance(e.outcome, Scored) for e in read_episodes("run/episodes"))
    shown = {e.task.id: len(e.turns[0].prompt) for e in read_segment("run/evaluation/000002.jsonl")}
    assert ("r3" in shown) == (split == "test")


SCORED = {"data": "scored.jsonl", "format": "trajectories", "eval": {"every": 1, "split": "train"}}
PLAYS = {"step_rl": {"prompts_per_step": 8}, "oreo_rounds": {"eval": {"split": "all"}}, "lpr": {}, "preference": SCORED,
         "oreo": SCORED}  # fmt: skip


@pytest.mark.parametrize("method", PLAYS)
def test_every_method_that_plays_rows_tells_it_at_the_start(shell, method):
    prompts({"prompt": WITH_SYSTEM})
    write("scored.jsonl", [{"prompt": "p", "response": f"r{k}", "reward": k} for k in (0, 1)])
    task = {"name": "prompts", "options": {"path": "rows.jsonl", "reward": "reward.py:score"}}
    Path("r.yaml").write_text(json.dumps({"method": method, "task": task, **PLAYS[method]}))
    said = shell("train", "r.yaml", f"model={TINY}", "steps=1", "out=run", code=2)
    assert "row 'r3'" in said and SYSTEM in said and "task.options.system=false" in said
    assert not list(Path(".").glob("run/**/*.jsonl"))


def test_a_row_that_is_refused_for_another_reason_is_named_as_well(shell):
    prompts({"prompt": [say("user", "A zebra?")]})
    said = train(shell, code=2)
    assert "row 'r3': the chat template refuses the messages (user): no zebras." in said
    assert "system=false" not in said
    prompts({"prompt": [say("system", "Be brief.")]})
    assert "row 'r3' has system messages alone" in train(shell, "task.options.system=false", code=2)


def test_a_row_that_is_too_long_for_an_evaluation_is_told_at_the_start(shell):
    prompts({"prompt": [say("user", "long " * 500)], "split": "test"})
    assert "row 'r3': the prompt has" in train(shell, code=2)


@pytest.mark.parametrize("odd, says", [
    ({"gold": ""}, "row 'r3' has no text 'gold'"), ({"prompt": WITH_SYSTEM}, SYSTEM), ({"hint": None}, "no key 'hint'"),
], ids=["gold", "system", "template"])  # fmt: skip
def test_a_row_that_the_reader_of_gold_texts_cannot_be_shown(shell, monkeypatch, odd, says):
    monkeypatch.setattr(online, "play", lambda *a, **k: pytest.fail("it played"))
    rows = [{"id": f"r{k}", "prompt": [say("user", f"Say {k}.")], "gold": f"{k}", "hint": "x"} for k in range(8)]
    rows[3] = {k: v for k, v in {**rows[3], **odd}.items() if v is not None}
    write("rows.jsonl", rows)
    plain = "{name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 512}}"
    reward = f"{{kind: likelihood, context: '{{prompt}}{{hint}}', plan: '{{prompt}}{{answer}}', model: {TINY}}}"
    said = shell("train", RECIPES / "prompts-grpo.yaml", "data=rows.jsonl", f"reward={reward}", *WORDS,
                 f"model={plain}", code=2)  # fmt: skip
    assert says in said and "r3" in said and not Path("run/episodes").exists()


def test_an_evaluation_of_such_rows_is_refused(shell):
    prompts({})
    train(shell)
    prompts({"prompt": WITH_SYSTEM, "split": "test"})
    said = shell("eval", "run", "--split", "test", code=2)
    assert "row 'r3'" in said and SYSTEM in said


def test_a_conversation_to_imitate_names_line_and_switch(shell):
    rows = [{"messages": [say("user", f"{k}?"), say("assistant", f"{k}.")]} for k in range(4)]
    rows[2]["messages"].insert(0, say("system", "Be brief."))
    write("talks.jsonl", rows)
    Path("sft.yaml").write_text("method: sft\n")
    said = shell("train", "sft.yaml", "data=talks.jsonl", f"model={TINY}", "steps=1", "out=sft", code=2)
    assert "talks.jsonl:3" in said and SYSTEM in said and "`trailmark data stories --no-system-role`" in said


# --- rows of one's own ---------------------------------------------------------------------------------------------

TALKS = [
    {"messages": [say("user", f"Why {k}?"), say("assistant", f"Since {k} it was.")], "level": k, "tags": {"a": [k]}}
    for k in range(9)
]


def read(name):
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_further_keys_of_a_row_reach_the_reward(shell):
    write("talks.jsonl", TALKS)
    shell("data", "stories", "talks.jsonl", "--out", "made")
    made = [r for split in ("train", "val", "test") for r in read(f"made/{split}.jsonl")]
    assert sorted(r["level"] for r in made) == list(range(9)) and all(r["tags"] == {"a": [r["level"]]} for r in made)
    Path("by_level.py").write_text("def score(answer, row):\n    return float(row['level'] + row['tags']['a'][0])\n")
    shell("train", RECIPES / "vrcli-laptop.yaml", "data=made/train.jsonl", "task.options.val=made/val.jsonl", *WORDS,
          "reward=by_level.py:score", "model.shape.context=1024", "engine.max_len=800")  # fmt: skip
    assert all(e.outcome.reward == 2 * e.task.data["level"] for e in read_episodes("run/episodes"))
    story = {"next_chapter": "One two.", "story_id": "b", "mood": "sad"}
    write("story.jsonl", [{**story, "story_id": b, "chapter_index": 2, "next_chapter": f"{b} two."} for b in "bcd"])
    shell("data", "stories", "story.jsonl", "--out", "told", "--over", "1")
    assert {r["mood"] for r in read("told/train.jsonl")} == {"sad"}
    write("talks.jsonl", [*TALKS, {**TALKS[0], "gold": "x"}])
    said = shell("data", "stories", "talks.jsonl", "--out", "other", code=2)
    assert "talks.jsonl:10: key 'gold': the files made of these rows have a key of this name" in said


def test_ready_files_of_the_three_splits_are_taken_as_they_are(shell):
    for name, part in (("train", TALKS[:5]), ("dev", TALKS[5:7]), ("test", TALKS[7:])):
        write(f"{name}.jsonl", part)
    shell("data", "stories", "train.jsonl", "--val", "dev.jsonl", "--test", "test.jsonl", "--out", "made")
    levels = lambda split: [r["level"] for r in read(f"made/{split}.jsonl")]
    assert (levels("train"), levels("val"), levels("test")) == ([0, 1, 2, 3, 4], [5, 6], [7, 8])
    shell("data", "stories", "train.jsonl", "--val", "0.2", "--test", "test.jsonl", "--out", "drawn")
    drawn = [[r["level"] for r in read(f"drawn/{split}.jsonl")] for split in ("train", "val", "test")]
    assert [len(x) for x in drawn] == [4, 1, 2] and drawn[2] == [7, 8]
    assert sorted(drawn[0] + drawn[1]) == [0, 1, 2, 3, 4]
    for words, says in (
        (["--val", "none.jsonl"], "--val 'none.jsonl': expected a share such as 0.1, or a file that exists."),
        (["--val", "1.5"], "--val 1.5: a share goes from 0 to 0.9."),
        (["--val", "train.jsonl", "--test", "test.jsonl"], "so one row would be in two splits"),
        (["--val", "dev.jsonl", "--by", "given"], "--by given reads the splits from one file"),
    ):
        assert says in shell("data", "stories", "train.jsonl", *words, "--out", "bad", code=2)


def test_repeated_rows_can_be_dropped(shell):
    write("talks.jsonl", [*TALKS, TALKS[2], {**TALKS[3], "id": "again"}])
    assert "--drop-duplicates keeps the first of equal rows" in shell("data", "stories", "talks.jsonl", code=2)
    said = shell("data", "stories", "talks.jsonl", "--out", "made", "--drop-duplicates")
    made = [r["level"] for split in ("train", "val", "test") for r in read(f"made/{split}.jsonl")]
    assert sorted(made) == list(range(9)) and "2 that repeat another row" in said
    write("dev.jsonl", TALKS[5:7])
    shell("data", "stories", "talks.jsonl", "--val", "dev.jsonl", "--out", "apart", "--drop-duplicates")
    assert sorted(r["level"] for r in read("apart/val.jsonl")) == [5, 6]
    assert not {5, 6} & {r["level"] for s in ("train", "test") for r in read(f"apart/{s}.jsonl")}


def test_the_instruction_of_a_reasoning_prompt_is_ones_own(shell):
    write("talks.jsonl", TALKS)
    asks = 'Think about it. Close with one sentence that begins with "In summary:".'
    shell("data", "stories", "talks.jsonl", "--out", "made", "--instruction", asks)
    for r in read("made/train.jsonl"):
        assert r["prompt"][-1]["content"] == f"Why {r['level']}?\n\n### Instruction ###\n{asks}"
    shell("data", "stories", "talks.jsonl", "--out", "bare", "--instruction", "")
    assert {r["prompt"][-1]["content"] for r in read("bare/train.jsonl")} <= {f"Why {k}?" for k in range(9)}


def test_the_instruction_of_a_logic_question_is_ones_own(shell):
    from trailmark.tasks import get_task
    from trailmark.tasks.logic.prompts import REACT

    write("logic.jsonl", [{"context": "c", "question": "q", "options": ["a", "b"], "label": 0}])
    shown = lambda **o: (s := get_task("logic", path="logic.jsonl", **o)).make().reset(s.tasks()[0]).text
    ours = shown()
    assert shown(instruction="Answer.") == ours.replace(REACT, "Answer.") and ours.startswith(REACT)
    assert shown(instruction="") == ours.removeprefix(f"{REACT}\n\n")
    source = get_task("logic", path="logic.jsonl", chat=True, instruction="Answer.")
    assert source.messages(source.tasks()[0])[0]["content"].startswith("Answer.\n\nContext:")
