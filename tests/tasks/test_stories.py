"""Rows, prompts, plans and lengths of VR-CLI, against texts written by hand."""

import asyncio
import json
from dataclasses import replace

import pytest

from trailmark.errors import DataError
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig
from trailmark.methods.vrcli.judge import LikelihoodJudge
from trailmark.score.base import Play
from trailmark.score.likelihood import after_markers
from trailmark.tasks.prompts import Prompts
from trailmark.tasks.stories import prompts as p
from trailmark.tasks.stories.lengths import fit, target_length
from trailmark.tasks.stories.plans import marker_rate, plan_of
from trailmark.tasks.stories.rows import FIELDS, StoryRow, TalkRow, read_rows
from trailmark.types import Episode, Invalid, Task

STORY = {
    "story_text": " The fox ran.\n", "last_n_chapters": 1, "prior_plot_summary": "A fox stole a hen.",
    "high_level_plot_summary": "The fox repents.", "character_sheets": {"Fox": "Sly.", "Hen": "Brave."},
    "next_chapter_synopsis": "The fox meets a hen.", "next_chapter_header": "III — The Hen ",
    "next_chapter": "III — The Hen\n\nAt dawn it rained.", "chapter_index": 2, "story_id": "fox",
}  # fmt: skip
INFORMATION = """You are given the most recent chapter, a plan of the whole story, a summary of the story so far, \
character sheets and a synopsis of the next chapter. At the end stands the header of the next chapter, with which the \
chapter begins.

### Plan of the Whole Story ###
The fox repents.

### Summary of the Story So Far ###
A fox stole a hen.

### Character Sheets ###
## Fox ##
Sly.
## Hen ##
Brave.

### Most Recent Chapter ###
The fox ran.

### Synopsis of the Next Chapter ###
The fox meets a hen.

### Header of the Next Chapter ###
III — The Hen"""
WRITE = "Write the next chapter from the information above. Begin with the header."
THOUGHTS = (
    "Write the next chapter from the information above and from the preliminary thoughts about it. "
    "Begin with the header."
)


def write(path, *rows):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    return path


@pytest.fixture
def story(tmp_path):
    (row,) = read_rows(write(tmp_path / "rows.jsonl", STORY))
    return row


def text(messages):
    assert [m["role"] for m in messages] == ["system", "user"] and messages[0]["content"] == p.SYSTEM
    return messages[1]["content"]


def test_the_five_prompts(story):
    made = p.pieces(story)
    plan = "\n\n### Detailed Plan ###\nThey talk."
    wish = " Write at least 400 words, and finish with <END_OF_CHAPTER>."
    assert text(p.baseline(made)) == f"{INFORMATION}\n\n### Instruction ###\n{WRITE}"
    assert text(p.with_plan(made, "They talk.")) == f"{INFORMATION}{plan}\n\n### Instruction ###\n{THOUGHTS}"
    assert text(p.with_plan(made, "")) == f"{INFORMATION}\n\n### Instruction ###\n{THOUGHTS}"
    assert text(p.baseline_generation(made, 400)) == f"{INFORMATION}\n\n### Instruction ###\n{WRITE}{wish}"
    assert text(p.plan_generation(made, "They talk.", 400)) == (
        f"{INFORMATION}{plan}\n\n### Instruction ###\n{THOUGHTS}{wish}"
    )
    reason = text(p.reasoning(made))
    assert reason == f"{INFORMATION}\n\n### Instruction ###\n{p.REASON}"
    for mark in ("<citation>", "</citation>", "<reasoning>", "</reasoning>", '"In summary:"'):
        assert mark in p.REASON


CUTS = {
    "high_level_plot_summary": ["\n\n### Plan of the Whole Story ###\nThe fox repents.", " a plan of the whole story,"],
    "prior_plot_summary": [
        "\n\n### Summary of the Story So Far ###\nA fox stole a hen.", " a summary of the story so far,",
    ],
    "character_sheets": ["\n\n### Character Sheets ###\n## Fox ##\nSly.\n## Hen ##\nBrave."],
    "last_n_chapters": ["\n\n### Most Recent Chapter ###\nThe fox ran.", " the most recent chapter,"],
    "next_chapter_synopsis": ["\n\n### Synopsis of the Next Chapter ###\nThe fox meets a hen."],
}  # fmt: skip
REWORDED = {
    "character_sheets": (" a summary of the story so far, character sheets and", " a summary of the story so far and"),
    "next_chapter_synopsis": (
        ", character sheets and a synopsis of the next chapter.", " and character sheets.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_a_switch_or_a_missing_field_removes_exactly_its_section_and_its_phrase(name, story, tmp_path):
    wanted = INFORMATION
    for part in CUTS[name]:
        assert wanted.count(part) == 1
        wanted = wanted.replace(part, "")
    if name in REWORDED:
        assert wanted.count(REWORDED[name][0]) == 1
        wanted = wanted.replace(*REWORDED[name])
    assert p.pieces(story, replace(p.Show(), **{name: False})).information == wanted
    field = "story_text" if name == "last_n_chapters" else name
    (without,) = read_rows(write(tmp_path / "less.jsonl", {k: v for k, v in STORY.items() if k != field}))
    assert p.pieces(without).information == wanted


def test_only_the_gold_text_is_needed(tmp_path):
    (row,) = read_rows(write(tmp_path / "rows.jsonl", {"next_chapter": "It rained."}))
    want = "You are given the header of the next chapter, with which the chapter begins."
    want += "\n\n### Header of the Next Chapter ###\n"
    assert p.pieces(row).information == want


def test_how_the_previous_text_is_called(story):
    called = lambda n: p.pieces(replace(story, last_n_chapters=n)).information
    assert "the last 3 chapters," in called(3) and "### Last 3 Chapters ###\nThe fox ran." in called(3)
    for other in ("all", 0, -1):
        assert "the entire story so far," in called(other) and "### Entire Story So Far ###\n" in called(other)
    assert called(None) == p.pieces(story, p.Show(last_n_chapters=False)).information


def test_one_switch_drops_the_system_message_everywhere(story):
    made = p.pieces(story, p.Show(system_role=False))
    kinds = [p.reasoning(made), p.baseline(made), p.with_plan(made, "x"), p.baseline_generation(made, 1),
             p.plan_generation(made, "x", 1)]  # fmt: skip
    assert all([m["role"] for m in k] == ["user"] for k in kinds)
    assert kinds[1][0]["content"] == text(p.baseline(p.pieces(story)))


def test_an_identical_instruction_makes_an_empty_plan_the_baseline(story):
    same = p.pieces(story, p.Show(identical=True))
    assert p.with_plan(same, "") == p.baseline(same) != p.with_plan(p.pieces(story), "")


def test_the_judges_templates_are_the_same_prompts(story):
    made = p.pieces(story)
    fill = lambda template, answer="": template.format(answer=answer, **made.fields())
    assert fill(p.CONTEXT) == text(p.baseline(made))
    assert fill(p.PLAN, "a {b} c") == text(p.with_plan(made, "a {b} c"))
    assert fill(p.EMPTY) == text(p.with_plan(made, ""))


TALK = [
    {"role": "system", "content": "Be funny."}, {"role": "user", "content": "Knock knock."},
    {"role": "assistant", "content": "Who's there?"}, {"role": "user", "content": "Hen."},
    {"role": "assistant", "content": "Hen who?"},
]  # fmt: skip


def test_a_talk(tmp_path):
    (row,) = read_rows(write(tmp_path / "rows.jsonl", {"messages": TALK}))
    assert isinstance(row, TalkRow) and row.gold == "Hen who?"
    made = p.pieces(row)
    assert p.baseline(made) == p.with_plan(made, "") == TALK[:-1]
    assert p.reasoning(made)[:-1] == TALK[:-2]
    assert p.reasoning(made)[-1]["content"] == f"Hen.\n\n### Instruction ###\n{p.REASON_TALK}"
    assert p.with_plan(made, "Ask.")[-1]["content"] == "Hen.\n\n### Detailed Plan ###\nAsk."
    assert p.baseline(p.pieces(row, p.Show(system_role=False))) == TALK[1:-1]
    assert all("Hen who?" not in m["content"] for m in p.reasoning(made))


def test_ids_come_from_the_content_or_are_given(tmp_path):
    twin = {**STORY, "next_chapter": "III — The Hen\n\nIt snowed."}  # the same synopsis
    a, b = read_rows(write(tmp_path / "a.jsonl", STORY, twin))
    c, d = read_rows(write(tmp_path / "b.jsonl", twin, {**STORY, "split": "val"}))
    assert (a.id, b.id) == (d.id, c.id) and a.id != b.id and d.split == "val"
    (named,) = read_rows(write(tmp_path / "c.jsonl", {**STORY, "id": 7}))
    assert named.id == "7" and named.plain() == {"id": "7", **STORY}
    again = write(tmp_path / "d.jsonl", named.plain())
    assert replace(read_rows(again)[0], where="") == replace(named, where="") and set(STORY) == set(FIELDS)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"messages": TALK[:-1]}], "rows.jsonl:1: key 'messages': the last message is from 'user'"),
        ([{"messages": TALK}, {"messages": [TALK[1], {"role": "assistant", "content": " \n"}]}],
         "rows.jsonl:2: key 'messages': the gold text, the last message, is empty."),
        ([{"messages": TALK[-1:]}], "rows.jsonl:1: key 'messages': the message before the gold text must"),
        ([{"messages": [{"role": "tool", "content": "x"}, *TALK]}], "1: key 'messages[0].role': must be system"),
        ([{"messages": []}], "rows.jsonl:1: key 'messages': must be a list that is not empty"),
        ([{"messages": [{"role": "user"}]}], "rows.jsonl:1: key 'messages[0].content': is missing"),
        ([STORY, {**STORY, "next_chapter": "  "}], "rows.jsonl:2: key 'next_chapter': the gold text is empty."),
        ([{"synopsis": "x"}], "rows.jsonl:1: key 'next_chapter': is missing"),
        ([{**STORY, "character_sheets": ["Fox"]}], "rows.jsonl:1: key 'character_sheets': must be an object"),
        ([{**STORY, "chapter_index": "2"}], "rows.jsonl:1: key 'chapter_index': must be a whole number"),
        ([{"next_chapter": "x", "next_chapter_sinopsis": "y"}], "key 'next_chapter_sinopsis': is not known."),
        ([STORY, STORY], "line 2 and line 1 have the same id"),
        ([STORY, {"messages": TALK}], "line 2 is another kind of row than line 1"),
        ([], "holds no rows"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(rows, says, tmp_path):
    with pytest.raises(DataError) as said:
        read_rows(write(tmp_path / "rows.jsonl", *rows))
    assert says in str(said.value)


@pytest.mark.parametrize(
    ("answer", "plan"),
    [
        ("", ""),
        ("  no marker here ", "no marker here"),
        ("a In summary: b", "b"),
        ("In summary: a In summary: b ", "b"),
        ("In summary: a. In summary, b", "b"),
        ("In summary, a. In summary: b", "b"),
        ("In summary: a. Detailed Plan: b", "b"),
        ("Detailed Plan: a In summary: b", "b"),
        ("reasons In summary:  ", ""),
        ("in summary: a", "in summary: a"),
    ],
)
def test_plans(answer, plan):
    assert plan_of(answer) == plan == after_markers(answer, ["In summary:", "In summary,", "Detailed Plan:"])


def test_the_share_of_answers_with_a_marker():
    assert marker_rate(["In summary: a", "b", "Detailed Plan:", "in summary: c"]) == 0.5


def test_the_wanted_length():
    assert target_length(1000) == p_target(400, 500, 1500)
    assert target_length(800) == p_target(300, 400, 1200)  # 300 words exactly
    assert target_length(801) == p_target(400, 400, 1202) and target_length(1) == p_target(100, 0, 2)


def p_target(words, low, high):
    from trailmark.tasks.stories.lengths import Target

    return Target(words, low, high)


def words(messages):
    return sum(len(m["content"].split()) for m in messages)


def test_a_long_prompt_loses_the_start_of_the_previous_chapter_and_nothing_else(story):
    short = words(p.reasoning(p.pieces(story)))
    long = replace(story, story_text=" ".join(f"w{k}" for k in range(3 * short)))
    most = short + 20
    cut = fit(long, p.Show(), most, words)
    assert isinstance(cut, StoryRow)
    told = p.reasoning(p.pieces(cut))
    assert words(told) == most
    kept = cut.story_text.split()
    assert kept == long.story_text.split()[-len(kept) :] and len(kept) == 20 + 3  # three words were in the short one
    assert p.reasoning(p.pieces(replace(cut, story_text=story.story_text))) == p.reasoning(p.pieces(story))
    assert fit(story, p.Show(), short, words) is story


def test_a_prompt_that_cannot_be_cut_is_refused(story, tmp_path):
    with pytest.raises(
        DataError, match=r"line 1: the prompt has \d+ tokens without the previous chapter, and at most 50"
    ):
        fit(story, p.Show(), 50, words)
    (talk,) = read_rows(write(tmp_path / "t.jsonl", {"messages": TALK}))
    with pytest.raises(DataError, match=r"line 1: the prompt has \d+ tokens, and at most 10 are allowed"):
        fit(talk, p.Show(), 10, words)


def test_the_judge_uses_another_template_for_an_empty_plan(story):
    """With an identical instruction an empty plan is worth exactly nothing; with a heading it would not be."""
    from trailmark.config import ModelConfig
    from trailmark.models.load import load_model

    shape = {"layers": 1, "width": 16, "heads": 2, "context": 2048}
    lm = load_model(ModelConfig.model_validate({"name": "tiny", "shape": shape, "dtype": "float64"})).freeze()
    made = p.pieces(story, p.Show(identical=True))
    row = {"gold": story.gold, **made.fields()}
    messages = tuple(p.reasoning(made))
    play = lambda answer: Play(Episode("e", Task("t"), "g", (), {"self": Invalid("")}), "", answer, row, messages)
    config = {"context": p.CONTEXT, "plan": p.PLAN, "markers": ["In summary:"], "reward": "linear"}

    def improved(answer, **more):
        judge = LikelihoodJudge(LikelihoodJudgeConfig.model_validate({**config, **more}), lm)
        (verdict,) = asyncio.run(judge.judge([play(answer)]))
        return verdict.outcome.reward

    assert improved("thoughts In summary: ", empty=p.EMPTY) == 0.0 == improved(" ", empty=p.EMPTY)
    assert improved("thoughts In summary: ") != 0.0
    assert improved("In summary: rain", empty=p.EMPTY) == improved("In summary: rain") != 0.0


def test_a_second_file_is_the_split_val(tmp_path):
    train = write(
        tmp_path / "train.jsonl",
        {"id": "a", "prompt": "a", "split": "train"},
        {"id": "b", "prompt": "b", "split": "val"},
    )
    val = write(tmp_path / "val.jsonl", {"id": "c", "prompt": "c", "split": "val"})
    source = Prompts(str(train), val=str(val))
    named = lambda split: [t.id for t in source.tasks(split)]
    assert named("train") == ["a"] and named("val") == ["b", "c"] and named("all") == ["a", "b", "c"]
    with pytest.raises(DataError, match="val.jsonl: row 'c' is in .*val.jsonl too"):
        Prompts(str(val), val=str(val))
