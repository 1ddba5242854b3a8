"""Roads of README.md, docs/lpr.md and docs/from, gone at full length on one core: they reach the success that the page
calls a floor.

A command is run as it stands on its page; a page that changes its command changes this test. About a quarter of an hour
in all.
"""

import json
import re
import shlex
import shutil
import sys

import pytest
from from_pages import ROOT, own_questions, serve_up_to_the_port, shell

from trailmark.runs.store import read_metrics, read_segment

README, REFLECT, OREO, LPR, VRCLI = (
    (ROOT / n).read_text()
    for n in ("README.md", *(f"docs/from/{page}.md" for page in ("reflect-rl", "oreo", "lpr", "vrcli")))
)
OREO_PAGE, LPR_PAGE, VRCLI_PAGE = ((ROOT / f"docs/{page}.md").read_text() for page in ("oreo", "lpr", "vrcli"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

sys.path.insert(0, str(ROOT / "tests/data"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "recipes", "recipes")
    return tmp_path


def follow(page, *beginnings):
    """Run the commands of a page that begin so, in this order, each as it stands there; what the last one says."""
    lines = [line.split(" # ")[0].strip() for line in re.findall(r"^trailmark .*$", page, re.M)]
    said = ""
    for start in beginnings:
        command = next(line for line in lines if line.startswith(f"trailmark {start}"))
        words = shlex.split(command, comments=True)[1:]
        said = shell(*words, *(["--json"] if words[0] == "eval" else []))
    return said


def named(said):
    """Success by row of an evaluation, from its line of JSON."""
    return {
        row["name"]: row["metrics"]["success"]["value"] for row in json.loads(said.strip().splitlines()[-1])["rows"]
    }


def successes(said):
    return list(named(said).values())


def won(file):
    return sum(bool(e.outcome.success) for e in read_segment(file))


def floor(page, pattern):
    """The number that a page promises."""
    return float(re.search(pattern, page.replace("\n", " "))[1])


def test_the_taxi_from_lessons_on_record(here):
    train, look = "train recipes/reflect-taxi-full.yaml teacher.name=file", "eval --episodes runs/taxi-file"
    said = follow(REFLECT, "data taxi", train, look)
    assert won("runs/taxi-file/evaluation/reflect-rl.jsonl") >= floor(
        REFLECT, r"three minutes of one core; the floor is (\d+)"
    )
    copied = json.loads(said.strip().splitlines()[-1])["rows"][0]["metrics"]["followed"]["value"]
    assert copied >= floor(REFLECT, r"the floor of `followed` is (0\.\d+)")


def test_repositories_from_questions_to_play(here):
    from data_fixtures import packages

    packages(here / "repos")
    recipe = "train recipes/reflect-explore.yaml"
    found = follow(REFLECT, "data auto-explore", f"{recipe} sft", f"{recipe} load", "eval runs/explore-rl random")
    learnt, by_chance = (named(found)[name] for name in ("runs/explore-rl", "random"))
    assert learnt >= floor(REFLECT, r"where chance finds it in .*?; the floor is (0\.\d+)") > by_chance


def test_arith_with_oreo(here):
    said = follow(OREO, "data gold arith", "train recipes/arith-sft.yaml", "train recipes/oreo-arith-data.yaml",
                  "train recipes/oreo-arith.yaml", "eval runs/arith-sft-careless")  # fmt: skip
    before, after = successes(said)
    assert after >= floor(OREO, r"the floor after OREO is (0\.\d+)") > before


def test_arith_with_lpr(here):
    said = follow(LPR, "train recipes/lpr-arith.yaml", "eval runs/lpr-arith/sft")
    assert named(said)["runs/lpr-arith/policy-1"] >= floor(LPR, r"the floor after pDPO is (0\.\d+)")
    last = read_metrics(here / "runs/lpr-arith/prm-1")[-1]
    assert last["eval/accuracy"] >= floor(LPR, r"its floor is (0\.\d+)")


def test_the_readme_s_first_run(here):
    said = follow(README, "data gold arith", "train recipes/arith-sft.yaml", "train recipes/arith-grpo.yaml",
                  "train recipes/arith-grpo.yaml steps=200", "eval runs/arith-sft/checkpoints")  # fmt: skip
    before, after, whole = successes(said)
    assert after >= floor(README, r"the floor after GRPO is (0\.\d+)") > before and whole >= 0.85
    follow(README, "report runs/arith-grpo", "inspect runs/arith-grpo")
    assert "verified" in shell("verify", "runs/arith-grpo")
    serve_up_to_the_port(["serve", "runs/arith-grpo", "--port", "8000"])


def test_the_readme_s_own_task(here):
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "class Guess" in block)
    (here / "guess.py").write_text(code)
    follow(README, "tasks check guess:Guess", "train recipes/taxi-policy-gradient.yaml task=")
    assert successes(shell("eval", "runs/guess", "--n", "50", "--json")) == [1.0]  # "then it is always right"


def test_the_readme_s_own_reward(here):
    """In a folder without recipes: those that come with Trailmark are found."""
    shutil.rmtree("recipes")
    section = README.split("## A reward of your own")[1]
    rows, function, _ = re.findall(r"^```\w*\n(.*?)^```$", section, re.S | re.M)
    (here / "rows.jsonl").write_text(rows)
    (here / "my_file.py").write_text(function)
    follow(README, "train recipes/prompts-grpo.yaml data=")
    curve = read_metrics(here / "runs/prompts-grpo")
    least = floor(README, r"on its held-out prompt; the floor is (0\.\d+)")
    assert curve[-1]["eval/reward"] >= least > curve[0]["reward"]


def test_the_page_s_own_questions(here):
    """docs/lpr.md, in a folder without recipes: guesses are right in a third of the held-out questions."""
    shutil.rmtree("recipes")
    section = own_questions(here)
    untrained = named(follow(section, "eval tiny"))["tiny"]
    learnt = named(follow(section, "train my-lpr.yaml", "eval runs/my-lpr"))
    least = floor(LPR_PAGE, r"the floor after pDPO is (0\.\d+)")
    assert untrained == 0 and learnt["runs/my-lpr/policy-1"] >= least > 1 / 3


def test_the_quickstart_of_vrcli(here):
    """Plans are useful after training, and neither their length nor their words explain it."""
    result = json.loads(shell("quickstart", "--method", "vrcli", "--json").strip().splitlines()[-1])
    gain = {row["name"]: row["metrics"]["reward"] for row in result["rows"]}
    assert gain["VR-CLI"]["low"] > floor(VRCLI_PAGE, r"the interval of VR-CLI's row lies above (0\.\d+)")  # 0.2 to 0.3
    others = ("before training", "VR-CLI's plan for another row", "random words of the prompt")
    assert all(gain[name]["high"] < 0 for name in others)
    assert gain["SFT, no plan"]["low"] > 0.2


def test_the_quickstart(here):
    result = json.loads(shell("quickstart", "--json").strip().splitlines()[-1])
    rows = {r["name"]: r["metrics"]["success"]["value"] for r in result["rows"]}
    assert (
        rows["Reflect-RL"]
        >= floor(README, r"the floor of the success of Reflect-RL \(`make test-slow`\) is (0\.\d+)")
        > rows["SFT only"]
    )


def test_plans_from_a_planted_hint(here):
    road = [f"train recipes/vrcli-{name}" for name in ("hint-scorer.yaml", "hint-sft.yaml", "hint.yaml")]
    follow(VRCLI, "data hints", *road)
    rows = json.loads((here / "runs/vrcli-hint/results.json").read_text())
    gain = {r["arm"]: r["value"] for r in rows if r["metric"] == "improvement"}
    assert gain["trained"] >= floor(VRCLI, r"the floor after training is (\d+) %")
    assert max(gain["start"], gain["other-plan"], gain["random-words"]) < 0 < gain["trained"]


def test_the_quickstart_of_oreo(here):
    result = json.loads(shell("quickstart", "--method", "oreo", "--json").strip().splitlines()[-1])
    rows = {r["name"]: r["metrics"]["success"]["value"] for r in result["rows"]}
    least = floor(OREO_PAGE, r"the floor of both \(`make test-slow`\) is (0\.\d+)")
    assert min(rows["OREO"], rows["rejection sampling"]) >= least > rows["SFT"]


def test_the_quickstart_of_lpr(here):
    result = json.loads(shell("quickstart", "--method", "lpr", "--out", "runs/lpr", "--json").strip().splitlines()[-1])
    rows = {r["name"]: r["metrics"]["success"]["value"] for r in result["rows"]}
    ways = ("best of 8 by the reward model", "most votes of 8", "one answer")
    best, votes, one = (rows[f"SFT, {how}"] for how in ways)
    least = floor(LPR_PAGE, r"Its floor \(`make test-slow`\): the start is right in (0\.\d+)")
    assert best > votes > one >= least and rows["pDPO, one answer"] >= one
