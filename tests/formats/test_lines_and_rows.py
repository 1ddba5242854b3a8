"""Lines of a file by place, rows of JSON with their errors, and what is written back: every value by hand."""

import json
import os
import re

import pytest

from trailmark.errors import DataError
from trailmark.formats import line_file as lines_module
from trailmark.formats.line_file import Lines
from trailmark.formats.rows import Row, RowFile, as_number, dump, each, parse_line, put_number

MIXED = b"\xef\xbb\xbf[a\n\n \t\r\nb\r\n\xc3\xa9\nlast"


def file_of(folder, data, name="rows.jsonl"):
    path = folder / name
    path.write_bytes(data)
    return path


def refused(call, sentence):
    with pytest.raises(DataError) as found:
        call()
    assert str(found.value) == sentence
    return found.value


# --- lines --------------------------------------------------------------------------------------------------------


def test_places_of_lines_by_hand(tmp_path):
    found = Lines(file_of(tmp_path, MIXED))
    assert list(found.numbers) == [1, 4, 5, 6] and len(found) == 4
    assert [found[i] for i in range(4)] == [b"[a", b"b\r", "é".encode(), b"last"]
    assert found.opens == "[" and not found.ended and found.whole() == MIXED.decode("utf-8-sig")
    every = Lines(tmp_path / "rows.jsonl", blank=True)  # our own files: the bytes as they are
    assert list(every) == MIXED.split(b"\n") and list(every.numbers) == [1, 2, 3, 4, 5, 6]
    empty = Lines(file_of(tmp_path, b"", "empty"))
    assert (len(empty), list(empty), empty.opens, empty.ended) == (0, [], "", True)


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_any_block_gives_the_lines_of_a_split(tmp_path, monkeypatch, block):
    monkeypatch.setattr(lines_module, "BLOCK", block)
    data = b"\n".join(b"x" * (k * 5 % 7) for k in range(40)) + b"\n"
    found = Lines(file_of(tmp_path, data))
    want = [line for line in data.split(b"\n") if line]
    assert list(found) == want == [found[i] for i in range(len(found))]
    assert [data.split(b"\n")[n - 1] for n in found.numbers] == want


def test_another_file_under_the_name_is_not_read_and_a_changed_one_is_refused(tmp_path):
    path = file_of(tmp_path, b"1\n2\n")
    held = Lines(path)
    os.replace(file_of(tmp_path, b"other\n", "new"), path)
    assert list(held) == [b"1", b"2"]
    held = Lines(path)
    with path.open("ab") as file:
        file.write(b"3\n")
    says = (
        f"{path}: was changed while it was being read: put it back as it was and go on with --resume, or begin another "
        "run with out=DIR."
    )
    refused(lambda: held[0], says)
    refused(lambda: list(held), says)


def test_what_is_no_file_of_lines(tmp_path):
    refused(lambda: Lines(tmp_path / "none"), f"{tmp_path / 'none'}: cannot be read (No such file or directory).")
    path = file_of(tmp_path, b"ok\n\xff\n")
    refused(lambda: Lines(path), f"{path}: is not UTF-8 text.")
    (tmp_path / "run" / "episodes").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    empty = tmp_path / "empty"
    refused(lambda: Lines(empty), f"{empty}: is a folder, and rows are read from a file: name a file of JSON lines.")
    for name in ("000002.jsonl", "000001.jsonl", "000001.annotations.jsonl"):
        file_of(tmp_path / "run" / "episodes", b"{}\n", name)
    inner = tmp_path / "run" / "episodes"
    refused(
        lambda: Lines(inner),
        f"{inner}: is a folder, and rows are read from a file: name one of its files, such as {inner}/000001.jsonl.",
    )
    file_of(tmp_path / "run", b"", "recipe.yaml")
    refused(
        lambda: Lines(tmp_path / "run"),
        f"{tmp_path}/run: is the folder of a run, and rows are read from a file: name one of its files, such as "
        f"{inner}/000001.jsonl (format: episodes, where there is such a key; trailmark convert makes other files of "
        "it).",
    )


# --- rows ---------------------------------------------------------------------------------------------------------


def test_rows_of_a_list_and_of_lines_know_their_places(tmp_path):
    of_lines = RowFile(file_of(tmp_path, b'\n{"a": 1}\n\n{"a": 2}\n'))
    assert [(r.value["a"], r.line, r.item) for r in (of_lines[0], of_lines[1])] == [(1, 2, None), (2, 4, None)]
    of_list = RowFile(file_of(tmp_path, b' [{"a": 1},\n {"a": 2}]', "list.json"))
    assert [(of_list[i].value["a"], of_list[i].line, of_list[i].item) for i in range(len(of_list))] == [
        (1, None, 0), (2, None, 1)
    ]  # fmt: skip
    assert str(of_list[1].bad("is odd.", "a")) == f"{tmp_path}/list.json: key '[1].a': is odd."
    assert str(of_list[1].bad("is odd.")) == f"{tmp_path}/list.json: key '[1]': is odd."
    assert str(of_lines[1].bad("is odd.", "a.b")) == f"{tmp_path}/rows.jsonl:4: key 'a.b': is odd."


@pytest.mark.parametrize(
    "line, why",
    [
        ('{"a": 1, "a": 2}', "key 'a' appears twice"),
        ('{"b": {"a": 1, "c": 0, "a": 1}}', "key 'a' appears twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ('\ufeff{"a": 1}', "a BOM may only stand at the start of a file"),
        ('{"a": 1', "Expecting ',' delimiter: line 1 column 8 (char 7)"),
    ],
)
def test_strict_json(tmp_path, line, why):
    path = file_of(tmp_path, f'{{"a": 0}}\n{line}\n'.encode())
    refused(lambda: RowFile(path)[1], f"{path}:2: is not JSON: {why}.")


def test_half_a_character_and_a_number_without_an_end(tmp_path):
    path = file_of(tmp_path, b'{"a": "\\ud83d"}\n{"a": "\\ud83d\\ude42"}\n{"a": 1e999}\n')
    rows = RowFile(path)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: is not JSON: 'utf-8' codec can't encode character"):
        rows[0]
    assert rows[1].value == {"a": "🙂"} and rows[2].value == {"a": float("inf")}
    refused(lambda: rows[2].number(rows[2].value["a"], "a"), f"{path}:3: key 'a': must be a finite number, not inf.")
    refused(lambda: parse_line('{"b": 1e999}', path, 3), f"{path}:3: is not JSON: 1e999 is not a number.")
    assert parse_line('{"b": -1.5e3}', path, 3) == {"b": -1500.0}


def test_fields_texts_lists_and_numbers(tmp_path):
    row = Row({}, tmp_path / "x", 7)
    at = f"{tmp_path}/x:7: key"
    assert row.fields({"prompt": 1, "more": 2}, "", ["prompt"], ["reward"]) == {"prompt": 1, "more": 2}
    refused(lambda: row.fields([1], "m", ["a"]), f"{at} 'm': must be an object, not [1].")
    refused(
        lambda: row.fields({"prompt": 1, "rewrd": 2}, "", ["prompt"], ["reward"]),
        f"{at} 'rewrd': is not known. Did you mean 'reward'?",
    )
    assert row.fields({"prompt": 1, "reward": 1, "rewrd": 2}, "", ["prompt"], ["reward"])["rewrd"] == 2
    refused(lambda: row.fields({"x": 1, "y": 2}, "m", ["prompt"]), f"{at} 'm.prompt': is missing. Found: x, y.")
    refused(lambda: row.fields({}, "", ["prompt"]), f"{at} 'prompt': is missing. Found: nothing.")
    refused(lambda: row.text(3, "t"), f"{at} 't': must be text, not 3.")
    refused(lambda: row.text(["z" * 99], "t"), f"{at} 't': must be text, not ['{'z' * 58}.")
    for value in ([], "ab", None):
        refused(lambda v=value: row.listed(v, "l"), f"{at} 'l': must be a list that is not empty, not {value!r}.")
    assert [row.number(v, "n") for v in (None, True, 2, "0.50", " 3 ")] == [None, 1.0, 2.0, 0.5, 3.0]
    refused(lambda: row.number("1_0", "n"), f"{at} 'n': must be a finite number, not '1_0'.")
    assert [as_number(v) for v in ("nan", "inf", 10**400, [1], {}, None, "", "x")] == [None] * 8


def test_rows_that_would_lose_something_are_counted(tmp_path):
    path = file_of(tmp_path, b"".join(b'{"a": %d}\n' % k for k in (1, 5, 2, 6, 7)))
    odd = lambda row: row.bad("is too large.", "a") if row.value["a"] > 4 else None
    seen = []
    refused(
        lambda: RowFile(path).visit(lambda i, row: seen.append(i), refused=odd),
        f"{path}:2: key 'a': is too large. 3 of 5 rows have this (`trailmark convert --skip-bad` leaves them out).",
    )
    assert seen == [0]  # nothing is used after the first
    made, wrong = each(path, lambda row: row.value["a"] * 10, skip_bad=True, refused=odd)
    assert made == [10, 20] and wrong == tuple(f"{path}:{n}: key 'a': is too large." for n in (2, 4, 5))

    def placeless(row):
        raise DataError("the template says no.")

    refused(lambda: each(path, placeless), f"{path}:1: the template says no.")
    refused(
        lambda: each(path, placeless, skip_bad=True),
        f"{path}: no row can be used; the first: {path}:1: the template says no.",
    )


def test_what_is_written_is_what_was_given_or_nothing(tmp_path):
    rows = [{"a": "é", "b": None}, {"a": 1.5}]
    dump(tmp_path / "x.jsonl", rows, "list")  # the name decides
    assert (tmp_path / "x.jsonl").read_text("utf-8") == '{"a": "é", "b": null}\n{"a": 1.5}\n'
    dump(tmp_path / "x.json", rows, "lines")
    dump(tmp_path / "x", rows, "list")
    assert (tmp_path / "x.json").read_text("utf-8") == json.dumps(rows, ensure_ascii=False, indent=4) + "\n"
    assert (tmp_path / "x").read_bytes() == (tmp_path / "x.json").read_bytes()
    dump(tmp_path / "y", rows, "lines")
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x.jsonl").read_bytes()
    refused(lambda: dump(tmp_path / "x", [], "list"), f"{tmp_path}/x: there are no episodes to write.")
    before = (tmp_path / "y").read_bytes()
    for bad in (float("nan"), {1}, "\ud83d"):
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}/y: cannot be written: ")):
            dump(tmp_path / "y", [*rows, {"a": bad}], "lines")
    assert (tmp_path / "y").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "x.json", "x.jsonl", "y"]


@pytest.mark.parametrize(
    "row, value, text, want",
    [
        ({"r": "0.50"}, 0.5, False, {"r": "0.50"}), ({"r": True}, 1.0, False, {"r": True}), ({}, 2.0, False, {"r": 2}),
        ({"r": 1}, 0.25, False, {"r": 0.25}), ({"r": 1}, 2.0, True, {"r": "2.0"}), ({"r": 1}, None, False, {}),
        ({"r": None}, None, False, {"r": None}), ({}, None, True, {}), ({"r": "x"}, 1.0, False, {"r": 1}),
    ],
)  # fmt: skip
def test_a_number_keeps_its_spelling(row, value, text, want):
    put_number(row, "r", value, text)
    assert json.dumps(row) == json.dumps(want)
