"""Pairwise judgements: preferences, win rates, strengths, doubled rows; by hand, and on the released votes."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.errors import DataError
from trailmark.methods.vrcli import pairwise as p

HEAD = "plot,overall,options,texts,scifi\n"


def file(tmp_path, *rows, head=HEAD, name="votes.csv"):
    path = tmp_path / name
    path.write_text(head + "".join(r + "\n" for r in rows))
    return path


def rows(a, b, wins, losses, ties, flag="False"):
    won = [a] * wins + [b] * losses + ["same"] * ties
    return [f'{w},{w},"{",".join(sorted((a, b)))}","(0, 1)",{flag}' for w in won]


def test_counts_by_hand(tmp_path):
    found = p.read_comparisons(file(tmp_path, *rows("rl", "base", 3, 1, 2), *rows("rl", "base", 1, 0, 0, "True")))
    assert p.dimensions_of(found) == ["plot", "overall"] and p.subsets_of(found) == ["scifi"]
    s = p.score(found, "rl", "base", "overall")
    assert (s.wins, s.losses, s.ties) == (4, 1, 2)
    assert s.preference.value == 0.8 and s.win_rate.value == pytest.approx(4 / 7)
    assert s.p == pytest.approx(scipy.stats.binomtest(4, 5).pvalue)
    assert p.score(found, "base", "rl", "overall").wins == 1
    assert p.score(found, "rl", "base", "overall", "scifi").wins == 1
    low, high = scipy.stats.binomtest(4, 5).proportion_ci(method="wilson")
    assert (s.preference.low, s.preference.high) == pytest.approx((low, high), abs=1e-9)


def test_strengths_of_two_are_the_share_of_wins_and_of_three_solve_the_equations():
    two, prior = p.strengths(np.array([[0, 13], [4, 0.0]]))
    assert two == pytest.approx([100 * 13 / 17, 100 * 4 / 17]) and prior == 0
    table = np.array([[0, 5, 7], [3, 0, 2], [1, 6, 0.0]])
    s, _ = p.strengths(table)
    for i in range(3):  # wins are what the model expects
        expected = sum((table[i, j] + table[j, i]) * s[i] / (s[i] + s[j]) for j in range(3) if j != i)
        assert expected == pytest.approx(table[i].sum(), abs=1e-8)


def test_a_pair_without_a_loss_stays_finite_and_says_the_prior():
    s, prior = p.strengths(np.array([[0, 20], [0, 0.0]]))
    assert prior == 0.5 and s == pytest.approx([100 * 20.5 / 21, 100 * 0.5 / 21])
    assert not p.finite(np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0.0]]))
    assert p.finite(np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0.0]]))


def test_anova_equals_scipy():
    draw = np.random.default_rng(0)
    groups = [draw.normal(m, 1, n) for m, n in ((0, 9), (0.4, 12), (1, 7))]
    want = scipy.stats.f_oneway(*groups)
    assert p.anova(groups) == pytest.approx((want.statistic, want.pvalue), rel=1e-9)


def test_rows_that_stand_there_twice_are_found(tmp_path):
    each = ["a,words,3", "a,words,5", "a,words,4", "b,words,1", "b,words,1"]
    path = file(tmp_path, *each, "a,rouge,1", "a,rouge,2", "a,rouge,1", "a,rouge,2", head="key,cat,val\n")
    found = p.read_metrics(path)
    assert found.doubled == (("a", "rouge"),) and list(found.values["a", "rouge"]) == [1, 2]
    assert list(found.values["b", "words"]) == [1, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rl,other,\"base,rl\",x,False", "line 2: overall is 'other', and must be base, rl or same"),
        ("rl,rl,base,x,False", "line 2: options must name two systems"),
        ("rl,rl,\"base,rl\",x", "line 2: has 5 columns in its first line"),
        ("rl,rl,\"base,rl,x,False", "is no CSV"),
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_with_its_line(tmp_path, text, said):
    with pytest.raises(DataError) as error:
        p.read_comparisons(file(tmp_path, text))
    assert said in str(error.value).replace("votes.csv:2", "line 2")


def test_the_command(tmp_path):
    path = file(tmp_path, *rows("rl", "base", 13, 4, 3), *rows("rl", "sft", 5, 0, 0), *rows("base", "sft", 4, 1, 1))
    done = CliRunner().invoke(app, ["votes", str(path), "--json"])
    assert done.exit_code == 0, done.output
    got = json.loads(done.output)["files"][0]
    pair = next(r for r in got["pairs"] if {r["first"], r["second"]} == {"rl", "base"})
    assert pair["overall"]["preference"] == pytest.approx(13 / 17) and pair["overall"]["win_rate"] == 13 / 20
    assert got["prior"] == 0 and sum(s["value"] for s in got["strengths"].values()) == pytest.approx(100)
    assert all(s["low"] <= s["value"] <= s["high"] for s in got["strengths"].values())
    shown = CliRunner().invoke(app, ["votes", str(path)])
    assert "76.47 (13-4)" in shown.output
    assert CliRunner().invoke(app, ["votes", str(path), "--dimension", "humour"]).exit_code == 2


def test_each_file_has_its_own_names(tmp_path):
    """Two files of other systems: every table of the second one shows its own pairs."""
    one = file(tmp_path, *rows("rl7", "base7", 3, 1, 0), name="7.csv")
    two = file(tmp_path, *rows("rl3", "base3", 2, 2, 0), *rows("rl3", "sft3", 4, 1, 0), name="3.csv")
    said = CliRunner().invoke(app, ["votes", str(one), str(two)]).stdout
    first, second = said.split(str(two))
    assert first.count("rl7 > base7") == 2 and "rl7 > base7" not in second  # preferences, and win rates
    assert second.count("rl3 > base3") == second.count("sft3 > rl3") == 2
    lines = {line.split("│")[1].strip(): line for line in second.splitlines() if " > " in line and "(" in line}
    assert "50.00 (2-2)" in lines["rl3 > base3"] and "20.00 (1-4)" in lines["sft3 > rl3"]


GOLD = {  # preference of the overall quality in percent, win rate with ties
    "7b": {("basesft_7b", "base7b"): (15.0, 15), ("basewr_7b", "base7b"): (66.7, 60),
           ("basewr_7b", "basesft_7b"): (83.3, 75), ("trained_7b", "basesft_7b"): (90.0, 90),
           ("trained_7b", "base7b"): (76.470588, 65), ("trained_7b", "basewr_7b"): (64.7, 55)},
}  # fmt: skip


@pytest.mark.data
def test_the_released_votes():
    root = Path(os.environ["TRAILMARK_DATA"]) / "stories_votes"
    found = p.read_comparisons(root / "7b_pairwise_annotations.csv")
    assert len(found) == 120
    for (first, second), (preference, rate) in GOLD["7b"].items():
        s = p.score(found, first, second, "overall_quality")
        assert 100 * s.preference.value == pytest.approx(preference, abs=0.06)
        assert 100 * s.win_rate.value == pytest.approx(rate)
    s = p.score(found, "trained_7b", "base7b", "overall_quality")
    assert 100 * s.preference.value == pytest.approx(76.470588, abs=1e-6) and round(s.p, 3) == 0.049
    assert p.score(found, "trained_7b", "base7b", "overall_quality", "scifi").win_rate.value == 1.0
    names = p.systems(found)
    values, _ = p.strengths(p.wins_table(found, "overall_quality", names))
    got = dict(zip(names, np.round(values, 1).tolist()))
    assert got == {"base7b": 17.0, "basesft_7b": 4.3, "basewr_7b": 28.4, "trained_7b": 50.3}
    small = p.read_comparisons(root / "3b_pairwise_annotations.csv")
    values, _ = p.strengths(p.wins_table(small, "overall_quality", p.systems(small)))
    assert sorted(np.round(values, 1).tolist()) == [3.2, 27.8, 29.1, 39.9]


@pytest.mark.data
def test_the_released_metrics():
    found = p.read_metrics(Path(os.environ["TRAILMARK_DATA"]) / "stories_votes" / "raw_automated_metrics.csv.gz")
    assert len(found.doubled) == 24 and {name for _, name in found.doubled} == {"rouge-l-f", "rouge-l-p"}
    assert all(len(v) == 181 for v in found.values.values())
    assert round(float(found.values["rl7", "rouge-l-p"].mean()), 4) == 0.3057
    three = [found.values[k, "rouge-l-p"] for k in ("base7", "basewr7", "rl7")]
    assert round(p.anova(three)[1], 3) == 0.027
    assert p.anova([np.tile(g, 2) for g in three])[1] < 0.001  # with the rows twice, as released
    small = [found.values[k, "pct_unique_tris"] for k in ("base3", "basewr3", "rl3")]
    assert round(p.anova(small)[1], 5) == 3e-5


# Sections 7.1 and 7.2: % that A beats B by dimension (overall quality last), win rates with ties, and RL's by genre
PAIRS = [("sft", "b"), ("br", "b"), ("br", "sft"), ("rl", "sft"), ("rl", "b"), ("rl", "br")]
PREFERRED = {
    "7b": ["5.3 72.2 83.3 89.5 52.9 62.5", "26.3 68.8 84.2 89.5 46.7 61.5", "21.1 57.1 82.4 84.2 81.3 70.6",
           "22.2 68.8 88.2 89.5 52.9 66.7", "35.0 66.7 76.5 88.9 80.0 58.8", "15.0 66.7 83.3 90.0 76.5 64.7"],
    "3b": ["5.6 58.8 83.3 83.3 66.7 57.1", "17.6 52.9 80.0 94.1 52.9 69.2", "17.6 66.7 77.8 86.7 53.8 38.5",
           "22.2 61.1 73.7 92.9 66.7 57.1", "15.0 62.5 78.9 94.4 46.7 42.9", "5.9 60.0 85.0 94.1 52.9 62.5"],
}  # fmt: skip
WIN_RATES = {"7b": "15 60 75 90 65 55", "3b": "5 60 85 80 45 50"}
GENRES = {  # RL against SFT, B and BR
    "7b": {"scifi": "100 100 60", "fantasy": "80 40 60", "romance": "100 40 60", "historical": "80 60 50"},
    "3b": {"scifi": "80 60 60", "fantasy": "80 30 60", "romance": "80 20 40", "historical": "80 50 50"},
}
STRENGTHS = {
    "7b": {"b": 17.0, "sft": 4.3, "br": 28.4, "rl": 50.3},
    "3b": {"b": 27.8, "sft": 3.2, "br": 29.1, "rl": 39.9},
}
MEANS = {  # section 7.4: words, unique words, unseen trigrams, ROUGE-L F and P
    "base3": "1383.1 35.6 83.3 .0972 .2835", "base7": "1486.5 32.7 77.8 .1030 .2863",
    "sft3": "1149.3 25.3 56.0 .0840 .3200", "sft7": "1278.1 23.7 53.8 .0868 .3077",
    "basewr3": "1441.2 34.1 82.8 .0990 .2770", "basewr7": "1568.0 31.8 77.5 .1059 .2822",
    "rl3": "1353.2 34.9 82.5 .0966 .2830", "rl7": "1479.5 33.2 77.2 .1097 .3057",
    "reas3": "845.8 29.8 62.2 .0891 .3805", "reas7": "777.0 30.5 60.7 .0843 .3732",
    "trainreas3": "721.6 25.5 48.8 .0786 .4054", "trainreas7": "796.4 26.8 29.8 .0993 .4547",
}  # fmt: skip
SECTIONS = {  # of reasoning: ROUGE-L P against the previous chapter, the summary, the plan, the sheets and the synopsis
    "reas7": ".229 .162 .180 .244 .114", "trainreas7": ".243 .200 .220 .322 .120",
    "reas3": ".235 .167 .183 .257 .113", "trainreas3": ".248 .178 .195 .243 .186",
}  # fmt: skip


def numbers(text):
    return [float(x) for x in text.split()]


@pytest.mark.data
def test_every_published_number_from_one_command():
    root = Path(os.environ["TRAILMARK_DATA"]) / "stories_votes"
    files = [str(root / f"{size}_pairwise_annotations.csv") for size in ("7b", "3b")]
    words = ["votes", *files, "--metrics", str(root / "raw_automated_metrics.csv.gz"), "--json"]
    said = json.loads(CliRunner().invoke(app, words).stdout)
    for size, found in zip(("7b", "3b"), said["files"]):
        name = {"b": f"base{size}", "sft": f"basesft_{size}", "br": f"basewr_{size}", "rl": f"trained_{size}"}
        pairs = {(r["first"], r["second"]): r for r in found["pairs"]}
        rows = [pairs[name[a], name[b]] for a, b in PAIRS]
        dims = ["plot", "character", "creativity", "development", "language", "overall_quality"]
        for dim, line in zip(dims, PREFERRED[size]):
            assert [100 * r[dim]["preference"] for r in rows] == pytest.approx(numbers(line), abs=0.051)
            assert all(r[dim]["low"] < r[dim]["preference"] < r[dim]["high"] for r in rows)
        assert [100 * r["overall_quality"]["win_rate"] for r in rows] == pytest.approx(numbers(WIN_RATES[size]))
        for genre, line in GENRES[size].items():
            rl = [pairs[name["rl"], name[x]] for x in ("sft", "b", "br")]
            assert [100 * r["subsets"][genre] for r in rl] == pytest.approx(numbers(line))
            ends = [r["subset_intervals"][genre] for r in rl]
            assert all(e["n"] in (5, 10) and 0 <= e["low"] < e["high"] <= 1 for e in ends)
        assert {k: round(found["strengths"][name[k]]["value"], 1) for k in name} == STRENGTHS[size]
    means, ends = said["metrics"]["means"], said["metrics"]["intervals"]
    for system, line in MEANS.items():
        columns = ("num_words", "pct_unique_words", "pct_tri_overlap", "rouge-l-f", "rouge-l-p")
        for column, want, places in zip(columns, numbers(line), (1, 1, 1, 4, 4)):
            assert means[system][column] == pytest.approx(want, abs=0.51 * 10**-places)
            assert ends[system][column][0] < means[system][column] < ends[system][column][1]
    sections = ("story_text", "prior_plot_summary", "high_level_plot_summary", "character_sheets")
    for system, line in SECTIONS.items():
        for section, want in zip((*sections, "next_chapter_synopsis"), numbers(line)):
            assert means[system][f"{section}_rouge_p"] == pytest.approx(want, abs=0.00051)


@pytest.mark.data
def test_a_narrow_terminal_shows_every_number(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    root = Path(os.environ["TRAILMARK_DATA"]) / "stories_votes"
    votes, metrics = root / "7b_pairwise_annotations.csv", root / "raw_automated_metrics.csv.gz"
    words = ["votes", str(votes), "--metrics", str(metrics)]
    said = CliRunner().invoke(app, words).stdout
    assert "…" not in said and max(map(len, said.splitlines()[1:])) <= 80
    each = p.read_metrics(metrics).values["rl7", "rouge-l-p"]
    half = 1.973231 * each.std(ddof=1) / 181**0.5  # Student's t with 180 degrees of freedom
    for part in ("trained_7b > basesft_7b", "76.47 (13-4)", "[52.7, 90.4]", f"0.3057 ± {half:.3g}", "scifi"):
        assert part in said
