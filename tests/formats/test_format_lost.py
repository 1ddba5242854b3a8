"""Fields that a format cannot store are refused or reported, with a count. Nothing is lost silently."""

import json

import pytest
from format_files import TINY
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError
from trailmark.formats.conversations import read_messages

TALK = [{"role": "user", "content": "What is the weather?"}, {"role": "assistant", "content": "Fine."}]
CALL = [{"type": "function", "function": {"name": "weather", "arguments": "{}"}}]


def convert(tmp_path, rows, source="messages", target="trajectories", *more):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    words = [
        "convert",
        str(path),
        str(tmp_path / "out.jsonl"),
        "--from",
        source,
        "--to",
        target,
        "--tokenizer",
        "tiny",
        *more,
    ]
    return CliRunner().invoke(app, words), tmp_path / "out.jsonl"


@pytest.mark.parametrize("field", [{"tool_calls": CALL}, {"function_call": {"name": "f"}}, {"tool_call_id": "1"},
                                   {"name": "Ann"},
                                   {"weight": 0}, {"train": False}, {"loss": False}, {"images": ["a.png"]},
                                   {"thinking": "hm"}])  # fmt: skip
@pytest.mark.parametrize("source", ["messages", "agent"])
def test_a_field_of_a_message_that_would_be_lost_is_refused_and_counted(tmp_path, field, source):
    key = "messages" if source == "messages" else "conversations"
    rows = [{key: TALK}, *[{key: [TALK[0], TALK[1] | field]}] * 2]
    done, out = convert(tmp_path, rows, source, "episodes")
    ((name, _),) = field.items()
    assert done.exit_code == 2 and f"in.jsonl:2: key '{key}[1].{name}': is not read here" in done.output
    assert "2 of 3 rows have this" in done.output and not out.exists()
    done, out = convert(tmp_path, rows, source, "episodes", "--skip-bad")
    assert done.exit_code == 0 and "left out 2 rows" in done.output and len(out.read_text().splitlines()) == 1


@pytest.mark.parametrize("key", ["tools", "system", "functions", "images"])
def test_a_field_of_a_row_that_changes_the_prompt_is_refused(tmp_path, key):
    for source, row in (("messages", {"messages": TALK}), ("trajectories", {"prompt": "a", "response": "b"})):
        done, _ = convert(tmp_path, [row | {key: ["x"]}], source, "episodes")
        assert (
            done.exit_code == 2
            and f"key '{key}': is not read here" in done.output
            and "1 of 1 rows have this" in done.output
        )


def test_contents_in_parts_are_refused(tmp_path):
    done, _ = convert(tmp_path, [{"messages": [TALK[0] | {"content": [{"type": "text", "text": "a"}]}, TALK[1]]}])
    assert done.exit_code == 2 and "key 'messages[0].content': must be text" in done.output


def test_empty_fields_of_exports_are_accepted(tmp_path):
    empty = {"tool_calls": None, "function_call": None, "name": None, "weight": 1, "images": []}
    done, _ = convert(tmp_path, [{"messages": [TALK[0], TALK[1] | empty], "tools": None}], "messages", "episodes")
    assert done.exit_code == 0, done.output


def test_fine_tuning_refuses_them_too(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"messages": [TALK[0], TALK[1] | {"tool_calls": CALL}]}) + "\n")
    with pytest.raises(DataError, match=r"messages\[1\].tool_calls.*1 of 1 rows have this"):
        read_messages(path)


def test_a_system_prompt_that_is_a_message_is_kept(tmp_path):
    talk = [{"role": "system", "content": "Be brief."}, *TALK]
    done, out = convert(tmp_path, [{"messages": talk}], "messages", "agent")
    assert done.exit_code == 0 and json.loads(out.read_text())["conversations"] == talk
    assert TINY.chat_template


def test_keys_that_another_format_cannot_store_are_reported_and_counted(tmp_path):
    rows = [{"messages": [TALK[0] | {"id": 7}, TALK[1]], "source": "web"}, {"messages": TALK, "source": "book"}]
    done, _ = convert(tmp_path, rows, "messages", "agent")
    assert done.exit_code == 0 and "'agent' has no room for: id (1 episodes), source (2 episodes)" in done.output
