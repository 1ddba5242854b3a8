"""No number of a table is cut, however narrow the screen is."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from trailmark.evaluate.tables import grid
from trailmark.methods.vrcli.commands import improvement, judge, write
from trailmark.terminal import output


@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(output, "screen", lambda: Console(width=80))


def test_a_wide_table_keeps_its_numbers():
    """Also those of an interval, which stand behind a blank."""
    from trailmark.terminal.output import print_table

    cells = [f"{14.353 + k:.3f} [-10.125, {20.5 + k:.3f}]" for k in range(6)]
    table = Table("", *(f"arm {k}" for k in range(12)))
    table.add_row("mean", *cells, *(f"{x} and more: {x}" for x in cells))  # the longer ones are broken between words
    out = io.StringIO()
    print_table(table, Console(file=out, width=80))
    said = out.getvalue()
    assert "…" not in said and all(cell in said for cell in cells)
    assert all(said.count(word) >= 3 for cell in cells for word in (cell.split()[0], cell.split()[2]))


def test_comparisons_keep_their_numbers_on_a_narrow_screen(capsys, monkeypatch):
    monkeypatch.setattr(output, "screen", lambda: Console(width=50))
    head, row = ["metric", "difference", "starts", "sign test"], ["success", "+0.125 [-0.693, +0.512]", "2", "0.004"]
    output.finish({}, False, lambda width: [grid(head, [row], "a against b", width)])
    assert "+0.125 [-0.693, +0.512]" in capsys.readouterr().out


def test_improvement_prints_every_number_at_80_columns(narrow, capsys):
    arm = lambda k: {"plans": 1000 + k, "improvement": {"value": 14.353 + k, "low": -10.125, "high": 20.5},
                     "invalid": 0, "markers": 0.5, "percentiles": {"5": -3.25, "50": 1.5, "95": 30.75}}  # fmt: skip
    improvement._show({"model": "m", "arms": {f"variant-{k}": arm(k) for k in range(9)}})
    said = capsys.readouterr().out
    assert "…" not in said and all(f"{14.353 + k:.3f}" in said for k in range(9))


def test_write_and_judge_print_every_number_at_80_columns(narrow, capsys, tmp_path):
    from types import SimpleNamespace

    one = {"planner": "a/long/name/of/a/planner", "writer": "runs/a-long-name-of-a-writer", "plans": 123456,
           "markers": 1.0, "texts": 654321, "words": 12345.6, "cut": 98765}  # fmt: skip
    write._show({"variant": one}, tmp_path)
    counts = {("a-long-name-of-a-system", "another-long-name-of-it"): {"creativity of it": dict.fromkeys(
        ("wins", "losses", "ties", "swayed"), 1234567)}}  # fmt: skip
    judge._show({"judge": "j"}, SimpleNamespace(counts=counts))
    said = capsys.readouterr().out
    assert all(x in said for x in ("123456", "654321", "12345.6", "98765")) and said.count("1234567") == 4
