"""The pages of evidence say what their files say, and no single seed is a verdict."""

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence"


@pytest.mark.parametrize("page", ["oreo.md", "reflect.md"])
def test_single_seeds_are_no_verdicts(page):
    text = (EVIDENCE / page).read_text()
    verdicts = re.findall(r"^\| .+ > .+ \| [+-]\d\.\d+ \[.*\] \| (.+) \|$", text, re.M)
    assert len(verdicts) >= 8 and set(verdicts) == {"one seed"}


def test_the_loss_of_rejection_first_rises_as_the_page_says():
    with tarfile.open(EVIDENCE / "files" / "oreo-arith-hard.txz") as held:
        inside = held.extractfile("runs/studies/oreo-arith-hard/runs/rejection/seed-0/metrics.jsonl")
        rows = [json.loads(line) for line in io.TextIOWrapper(inside)]
    first = [f"{r['nll']:.3f}" for r in rows[:4]]
    assert first == ["0.036", "0.048", "0.071", "0.085"] and f"{rows[-1]['nll']:.3f}" == "0.015"
    page = (EVIDENCE / "oreo.md").read_text()
    assert ", ".join(first) in page and "knows this arithmetic so little" not in page


def stored(study, file):
    """The rows of a file of a study's runs."""
    with tarfile.open(EVIDENCE / "files" / f"{study}.txz") as held:
        inside = held.extractfile(f"runs/studies/{study}/runs/{file}")
        return [json.loads(line) for line in io.TextIOWrapper(inside)]


@pytest.mark.parametrize(("study", "world"), [("reflect-alfworld", "ALFWorld"), ("reflect-explore", "AutoExplore")])
def test_the_page_says_that_the_teachers_words_name_the_action_and_how_often_it_is_copied(study, world):
    page, short = (EVIDENCE / "reflect.md").read_text(), (ROOT / "docs" / "reflect.md").read_text()
    played = stored(study, "Reflect-RL/seed-0/evaluation/reflect-sft.jsonl")
    said = [t["text"] for e in played for t in e["turns"] if t["seat"] == "reflector"]
    assert all("Next: " in text for text in said) and "*The words name the action.*" in page
    # the rates need SmolLM2's tokenizer: the command is on the page
    rate = re.search(rf"^  \| {world}, SFT, reflecting \| {len(said):,} \| [\d,]+ \| (0\.9\d)", page, re.M)
    assert rate and rate[1] in short and "end with `Next: ` and the teacher's command" in short


@pytest.mark.parametrize("study", ["reflect-alfworld", "reflect-explore"])
def test_the_page_says_that_the_plain_arm_had_not_converged(study):
    nll = [r["policy/nll"] for r in stored(study, "SFT_+_RL/seed-0/metrics.jsonl") if "policy/nll" in r]
    means = [f"{sum(nll[i : i + 20]) / 20:.3f}" for i in range(0, len(nll), 20)]
    page = " ".join((EVIDENCE / "reflect.md").read_text().split())
    assert ", ".join(means) in page and "*The plain arm had not converged.*" in page


def test_the_page_says_how_far_the_warm_up_of_its_runs_went_past_the_rate():
    rates = [r["lr"] for r in stored("oreo-alfworld", "rejection/seed-0/metrics.jsonl")]
    assert max(rates) == rates[1] == pytest.approx(2e-4 * 2 / 1.2)
    page = " ".join((EVIDENCE / "oreo.md").read_text().split())
    assert "the second step had 1.67 times the set rate (3.33e-4 for 2e-4)" in page and "so each nine times" in page


def test_the_plans_that_need_no_policy():
    """The table of evidence/vrcli.md, from the file beside it; and the order that a reader of plans must have."""
    rows = [json.loads(x) for x in (EVIDENCE / "files" / "vrcli-controls.jsonl").read_text().splitlines()]
    gain = {}
    for r in rows:
        gain.setdefault(r["arm"], {})[r["id"]] = 100 * (1 - r["ppl"] / r["baseline_ppl"])
        assert r["improvement"] == pytest.approx(gain[r["arm"]][r["id"]], abs=1e-9)
    page = (EVIDENCE / "vrcli.md").read_text()
    rows_of = {"gold": "the gold text", "synopsis": "the synopsis", "other": "the gold text of a", "empty": "nothing"}
    for arm, said in rows_of.items():
        mean, helped = sum(gain[arm].values()) / 20, sum(x > 1e-9 for x in gain[arm].values())
        paid = sum(0.0 if x < 0.05 else 0.5 if x < 1 else 0.9 if x < 2 else 1.0 for x in gain[arm].values()) / 20
        row = rf"^\| {said}.*\| {mean + 0.0:.2f} \[[^|]* \| {paid:.2f} \|[^|]*\| {helped} of 20 \|"
        assert re.search(row, page, re.M), arm
    assert all(gain["gold"][i] > max(gain[a][i] for a in ("synopsis", "other", "empty")) for i in gain["gold"])
    assert set(gain["empty"].values()) == {0.0} and len(gain["gold"]) == 20


def test_every_method_page_cites_its_paper():
    papers = {"docs/reflect.md": "2402.12621", "docs/oreo.md": "2412.16145"}
    cited = (ROOT / "CITATION.cff").read_text()
    for page, number in papers.items():
        assert all(f"arxiv.org/abs/{number}" in text for text in ((ROOT / page).read_text(), cited))
    assert cited.count("type: conference-paper") == 5
    assert all(
        f"arxiv.org/abs/{n}" in (ROOT / "README.md").read_text() for n in re.findall(r"abs/(\d{4}\.\d{5})", cited)
    )
