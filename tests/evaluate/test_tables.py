"""Tables in a terminal."""

from rich.console import Console

from trailmark.evaluate.tables import grid


def test_a_title_that_is_wider_than_its_table_keeps_its_words(capsys):
    title = "64 held-out rows; reward is the improvement of perplexity (0.25: 25 %), 95 % intervals"
    Console(width=40).print(grid(["", "reward"], [["VR-CLI", "0.281"], ["before", "-0.936"]], title, 40))
    said = capsys.readouterr().out
    above = said.partition("┏")[0]
    assert " ".join(above.split()) == title and max(map(len, said.splitlines())) <= 40


def test_one_long_word_of_a_title_loses_its_middle(capsys):
    Console(width=40).print(grid(["", "reward"], [["a", "0.281"]], "runs/" + "x" * 60 + "/end: rewards", 40))
    above = capsys.readouterr().out.partition("┏")[0].split()
    assert above[0].startswith("runs") and above[0].endswith("/end:") and "…" in above[0] and above[1] == "rewards"
