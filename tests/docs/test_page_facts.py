"""Facts that pages and recipes state, computed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trailmark.methods.preference import pair_samples
from trailmark.recipe import load_yaml
from trailmark.types import Episode, Scored, Task, Turn

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_a_page_that_uses_folders_of_the_reader_says_where_to_get_them(tmp_path):
    pages = [page for page in PAGES if "repos/kettle" in page.read_text()]
    made = ROOT / "tests/data/data_fixtures.py"
    subprocess.run([sys.executable, made, "repos"], cwd=tmp_path, check=True)
    assert pages and (tmp_path / "repos/kettle").is_dir() and (tmp_path / "repos/garden").is_dir()
    for page in pages:
        text = page.read_text()
        assert "python tests/data/data_fixtures.py repos" in text, page
        assert {*re.findall(r"\brepos/\w+", text)} <= {"repos/kettle", "repos/garden"}, page


def test_the_recipe_of_minicpm_says_how_often_it_reads_the_plays():
    recipe = ROOT / "recipes/oreo-minicpm-alfworld-sft.yaml"
    read, text = load_yaml(recipe).raw, recipe.read_text()
    turns = read["steps"] * read["batch"]
    plays, own = (int(found.replace(",", "")) for found in re.findall(r"over (?:the )?(\d,\d+)", text))
    assert f"{turns / own:.2f} over the {own:,}" in text
    assert "two\n" in text and f"{turns / plays:.2f}" == "2.00"


@pytest.mark.parametrize(("per", "weight"), [("answer", 1.0), ("token", 0.25)])
def test_ipo_takes_the_sums_that_the_page_says(per, weight):
    page = (ROOT / "docs/oreo.md").read_text()
    assert "IPO, like DPO, takes the sum of the log-ratios over an answer; `per: token` takes their mean" in page
    turn = Turn("policy", (1, 2), (3, 4, 5, 6), logp=(-1.0,) * 4, stop="stopped", text="")
    sides = tuple(Episode(name, Task("t"), "t", (turn,), {"self": Scored(1.0)}) for name in ("good", "bad"))
    for sample in pair_samples([sides], per=per):
        assert sorted(sample.streams["weight"].tolist()) == [0, 0] + [weight] * 4


CORRECTED = {
    "studies/lpr-puzzle-notes.md": (r"one policy, drawn twice", r"had no ceiling", r"DPO, beta 1\.0, 3e-4"),
    "studies/lpr-puzzle.md": (r"no\w* .* about DPO and pDPO may be read", r"\(lpr-converged\.md\)"),
    "studies/lpr-converged.md": (r"\| SFT, any of 8 right \|", r"p, corrected \(Holm\)", r"seeds 20, 21, 22, 23, 24"),
    "studies/vrcli-laptop.md": (r"\| random guest \|", r"\| last guest \|", r"is the ceiling of `trained`"),
    "evidence/vrcli.md": (r"is not shown to help", r"\+0\.96 \[-0\.23, 2\.27\]", r"reward"),
    "from/lpr.md": (r"process DPO \(pDPO\)", r"options are not all different is left out by default"),
}


@pytest.mark.parametrize("page", CORRECTED)
def test_a_corrected_page_says_what_was_wrong(page):
    text = (ROOT / "docs" / page).read_text()
    assert [fact for fact in CORRECTED[page] if not re.search(fact, text)] == []
