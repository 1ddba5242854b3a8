"""Votes of small files: what a tie, a lone system, a prior and a constant metric do, and what the command prints."""

import gzip
import itertools
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError
from trailmark.methods.vrcli import pairwise as p


def one(a, b, won, *flags):
    return p.Comparison(tuple(sorted((a, b))), {"overall": won}, frozenset(flags))


def votes(a, b, wins, losses, ties=0):
    return [one(a, b, w) for w in [a] * wins + [b] * losses + [""] * ties]


def test_the_sign_test_is_a_sum_over_all_outcomes():
    """Every sequence of n fair coins: how often the rarer side is as rare as it was."""
    for n in range(1, 9):
        rare = [min(sum(coins), n - sum(coins)) for coins in itertools.product((0, 1), repeat=n)]
        for wins in range(n + 1):
            share = sum(k <= min(wins, n - wins) for k in rare) / 2**n
            assert p.Score("a", "b", wins, n - wins, 3).p == pytest.approx(share, abs=1e-12)
    assert p.Score("a", "b", 0, 0, 4).p == 1.0


def test_a_pair_of_ties_has_a_win_rate_and_no_preference():
    s = p.Score("a", "b", 0, 0, 4)
    assert math.isnan(s.preference.value) and s.preference.low is None and s.preference.n == 0
    assert s.win_rate.value == 0.0 and s.win_rate.low == 0.0 and s.win_rate.n == 4


def test_the_order_of_the_names_and_of_the_rows_does_not_matter():
    found = [*votes("rl", "base", 3, 1, 2), *votes("sft", "rl", 2, 2)]
    for a, b in (("rl", "base"), ("sft", "rl"), ("sft", "base")):
        s, t = p.score(found, a, b, "overall"), p.score(found, b, a, "overall")
        assert (s.wins, s.losses, s.ties, s.p) == (t.losses, t.wins, t.ties, t.p)
    names = p.systems(found)
    table = p.wins_table(found, "overall", names)
    assert names == ["base", "rl", "sft"] and table.tolist() == [[0, 1, 0], [3, 0, 2], [0, 2, 0]]
    assert (p.wins_table(found[::-1], "overall", names) == table).all()
    turned = p.wins_table(found, "overall", names[::-1])
    assert (turned == table[::-1, ::-1]).all()
    assert p.strengths(turned)[0][::-1] == pytest.approx(p.strengths(table)[0])
    assert p.strengths(7 * table)[0] == pytest.approx(p.strengths(table)[0])  # shares count, not numbers


def test_strengths_are_the_most_likely_ones():
    """No small step to other strengths makes the wins likelier."""
    table = np.array([[0, 4, 1], [2, 0, 3], [2, 1, 0.0]])

    def likelihood(s):
        return sum(table[i, j] * math.log(s[i] / (s[i] + s[j])) for i, j in itertools.permutations(range(3), 2))

    s = p.strengths(table)[0]
    for k, factor in itertools.product(range(3), (0.98, 1.02)):
        moved = s.copy()
        moved[k] *= factor
        assert likelihood(moved) < likelihood(s)


def test_a_chain_of_wins_is_needed_for_a_fit():
    """`finite` against a search of all chains, for every table of three systems with or without a win."""
    for bits in itertools.product((0, 1), repeat=6):
        table = np.zeros((3, 3))
        for (i, j), bit in zip(itertools.permutations(range(3), 2), bits):
            table[i, j] = bit
        beats = lambda i, j, t=table: bool(t[i, j] or any(t[i, k] and t[k, j] for k in range(3)))
        assert p.finite(table) == all(beats(i, j) for i, j in itertools.permutations(range(3), 2))


def test_a_prior_pulls_to_the_middle():
    table = np.array([[0, 9], [3, 0.0]])
    for prior in (0.0, 0.5, 2.0):
        s, used = p.strengths(table, prior)
        assert used == prior and s == pytest.approx([100 * (9 + prior) / (12 + 2 * prior),
                                                     100 * (3 + prior) / (12 + 2 * prior)])  # fmt: skip


def test_a_system_with_few_votes_keeps_its_interval():
    """sft is in three of eighteen votes, so some draws of the bootstrap hold none of them."""
    found = [*votes("rl", "base", 10, 5), *votes("rl", "sft", 2, 1)]
    made, used = p.strengths_with_intervals(found, "overall", draws=200)
    assert used == 0 and [made[n].value for n in ("base", "rl", "sft")] == pytest.approx([25, 50, 25])
    for interval in made.values():
        assert 0 < interval.low < interval.value < interval.high < 100 and interval.n == 18
    assert made == p.strengths_with_intervals(found, "overall", draws=200)[0]


def test_a_system_with_ties_alone_is_as_strong_as_whom_it_met():
    made, used = p.strengths_with_intervals([*votes("a", "b", 3, 3), *votes("b", "c", 0, 0, 5)], "overall", draws=20)
    assert used == 0.5 and [made[n].value for n in "abc"] == pytest.approx([100 / 3] * 3, abs=1e-6)
    even, used = p.strengths_with_intervals(votes("a", "b", 0, 0, 4), "overall", draws=5)
    assert used == 0.5 and [(i.value, i.low, i.high) for i in even.values()] == [(50.0, None, None)] * 2


def test_a_system_that_always_won_has_an_unknown_interval():
    """Four wins of four and half a vote each way: 4.5 / 5. Every draw of the bootstrap is the same four wins, which
    does not mean that 90 is certain."""
    made, used = p.strengths_with_intervals(votes("a", "b", 4, 0), "overall", draws=50)
    assert used == 0.5 and made["a"].value == pytest.approx(90) and made["a"].low is made["a"].high is None


def test_anova_by_hand():
    """Means 2 and 4 around 3: between 2·1 + 2·1 = 4 with 1 freedom, within (1+1+1+1) / 2 = 2, so F = 2."""
    f, chance = p.anova([np.array([1.0, 3.0]), np.array([3.0, 5.0])])
    assert f == pytest.approx(2.0)
    assert chance == pytest.approx(1 - math.sqrt(2 / (2 + 2)))  # F(1, 2) is t² with two freedoms
    assert p.anova([np.array([1.0, 1.0]), np.array([2.0, 2.0])]) == (math.inf, 0.0)
    assert p.anova([np.array([1.0, 1.0]), np.array([1.0, 1.0])]) == (0.0, 1.0)  # nothing differs at all


@pytest.fixture
def judged(tmp_path):
    lines = ["overall,options,scifi"]
    lines += [f'{w},"base,rl",{f}' for w, f in (("rl", "True"), ("rl", "False"), ("base", "False"), ("same", "True"))]
    (tmp_path / "votes.csv").write_text("\n".join([*lines, 'same,"rl,sft",False']) + "\n")
    values = {"words": ((1, 3), (3, 5)), "paragraphs": ((1, 1), (1, 1))}
    rows = [f"{s},{cat},{v}" for cat, each in values.items() for s, some in zip(("rl", "sft"), each) for v in some]
    (tmp_path / "metrics.csv").write_text("\n".join(["key,cat,val", *rows]) + "\n")
    return tmp_path


def call(folder, *words, code=0):
    done = CliRunner().invoke(app, ["votes", str(folder / "votes.csv"), *map(str, words)], env={"COLUMNS": "300"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def refuse(word):
    raise AssertionError(word)


def test_the_json_is_json(judged):
    """A pair of ties has no preference, and an empty subset no rate: both are null."""
    said = call(judged, "--json", "--metrics", judged / "metrics.csv", "--compare", "rl,sft")
    found = json.loads(said, parse_constant=refuse)
    tied, played = found["files"][0]["pairs"][::-1]
    assert (tied["first"], tied["second"], tied["overall"]["ties"]) == ("sft", "rl", 1)
    assert tied["overall"]["preference"] is None and tied["subsets"] == {"scifi": None}
    assert played["overall"]["wins"] == 2 and played["overall"]["win_rate"] == 0.5
    assert played["subsets"] == {"scifi": 0.5} and found["files"][0]["prior"] == 0.5
    rl, sft = {"words": 2.0, "paragraphs": 1.0}, {"words": 4.0, "paragraphs": 1.0}
    assert found["metrics"]["means"] == {"rl": rl, "sft": sft}
    tests = found["metrics"]["anova"]["rl,sft"]
    assert tests["words"] == pytest.approx(1 - math.sqrt(0.5)) and tests["paragraphs"] == 1.0


def test_the_tables(judged):
    said = call(judged, "--metrics", judged / "metrics.csv", "--compare", "rl,sft")
    for part in ("66.67 (2-1)", "– (0-0)", "prior 0.5 votes", "p rl,sft", "0.29"):
        assert part in said
    with (judged / "metrics.csv").open("a") as f:
        f.write("sft,rouge,7\n")  # a metric that the first system does not have
    said = call(judged, "--metrics", judged / "metrics.csv", "--compare", "rl,sft")
    assert "│ rouge │ – │ 7 │ – │" in said


def test_what_cannot_be_tested_is_one_sentence(judged):
    metrics = judged / "metrics.csv"
    ask = lambda *words: call(judged, "--metrics", metrics, *words, code=2)
    assert "votes: --compare 'rl' names one system: name two or more, such as a,b." in ask("--compare", "rl")
    assert "has no system 'dpo': rl, sft" in ask("--compare", "rl,dpo")
    metrics.write_text("key,cat,val\nrl,words,1\nsft,words,2\n")
    assert "each has one value of 'words': a test needs more." in ask("--compare", "rl,sft")
    metrics.write_text("key,cat,val\n")
    assert "metrics.csv: holds no metric" in ask()
    metrics.write_text("key,cat,val\nrl,words,many\n")
    assert "metrics.csv:2: val is 'many', and must be a number" in ask()
    metrics.write_text("key,cat\nrl,words\n")
    assert "needs the columns key, cat and val" in ask()
    assert "'humour' is no dimension of" in call(judged, "--dimension", "humour", code=2)


def test_files_that_are_no_votes(tmp_path):
    path = tmp_path / "v.csv"
    for text, says in (
        ("", "holds no comparison"), ("overall,options\n", "holds no comparison"),
        ("overall,scifi\nrl,True\n", "needs a column 'options'"), ('options,scifi\n"a,b",True\n', "needs a column"),
        ('overall,options\na,"a,a"\n', "options must name two systems"),
        ('overall,options\na,"a,"\n', "options must name two systems"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(DataError, match=says):
            p.read_comparisons(path)
    with pytest.raises(DataError, match="cannot be read"):
        p.read_comparisons(tmp_path / "none.csv")
    packed = tmp_path / "v.csv.gz"
    packed.write_bytes(gzip.compress(b'overall,options\n same ,"b, a"\n'))
    assert p.read_comparisons(packed) == [one("a", "b", "")]
