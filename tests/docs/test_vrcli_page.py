"""Every command of docs/vrcli.md runs as it stands, on the page's own rows and three toy books."""

import contextlib
import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import forked
import yaml
from from_pages import answering, prefers_more_words
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig
from trailmark.methods.vrcli.plans import NEEDED, context
from trailmark.models.load import load_model
from trailmark.runs.store import read_episodes, read_metrics, read_segment
from trailmark.score.likelihood import TextScorer
from trailmark.tasks.stories import plans, prompts

ROOT = Path(__file__).parent.parent.parent
SAYS = [
    "the baker met Ann who was tall",
    "Ann wanted to leave",
    "Bob heard what Ann had done",
    "Cid told Bob the truth",
]


def chapter(book, k):
    mark = lambda n: f"{book}{k}x{n}"  # so that chapters share no run of eight words
    said = [f"On day {mark(n)} {SAYS[(n + k) % 4]}, {mark(n + 50)}, Ann saw Bob and Cid." for n in range(20)]
    return {"book": book, "chapter": k + 1, "heading": f"Part {k + 1}", "text": " ".join(said)}


def test_the_commands_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    page = (ROOT / "docs/vrcli.md").read_text()
    (rows,) = re.findall(r"```json\n(.*?)```", page, re.S)
    (tmp_path / "talks.jsonl").write_text(rows)
    made = [chapter(book, k) for book in ("one", "two", "three") for k in range(6)]
    data = "".join(json.dumps(r) + "\n" for r in made)
    (tmp_path / "novels.jsonl.gz").write_bytes(gzip.compress(data.encode()))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for name, text in re.findall(r"```python\n# (\w+\.py)(.*?)```", page, re.S):
        assert len(text.splitlines()) <= 15
        (tmp_path / name).write_text("#" + text)
    commands = re.findall(r"^trailmark .*$", page, re.M)
    assert len(commands) == 11
    said = {}
    for command in commands:
        words = command.split()[1:] + (["steps=2", "n=2", "eval.every=1"] if " train " in f" {command} " else [])
        if words[0] == "improvement" and "--baselines" not in words:
            (row,) = (tmp_path / "stories/test.jsonl").read_text().splitlines()
            answer = {"id": json.loads(row)["id"], "text": "In summary: a hen."}
            (tmp_path / "plans.jsonl").write_text(json.dumps(answer))
        if words[0] == "chapters":
            for name, text in (("base", "Ann left."), ("rl", "Bob stayed and Cid laughed.")):
                ids = [json.loads(x)["id"] for x in (tmp_path / "books/rows.jsonl").read_text().splitlines()]
                lines = [json.dumps({"id": i, "text": text}) + "\n" for i in ids]
                (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        if words[0] == "write":
            shutil.copytree(tmp_path / "runs/vrcli-laptop/checkpoints/000002/policy", tmp_path / "base")
        with answering(prefers_more_words) if words[0] == "judge" else contextlib.nullcontext("") as url:
            done = CliRunner().invoke(app, [w.replace("http://127.0.0.1:8000", url) for w in words])
        assert done.exit_code == 0, (command, done.output)
        said[command] = done.stdout
    of = lambda start: next(said[c] for c in commands if c.startswith(start))
    assert "rows: 6 rows" in of("trailmark data books")
    assert "train: 2 rows of 1 books" in of("trailmark data stories books")
    metrics = [json.loads(x) for x in (tmp_path / "runs/vrcli-laptop/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "reward" in m] == [1, 2] and all("eval/reward" in m for m in metrics)
    assert "rl,words,5.0" in (tmp_path / "metrics.csv").read_text()
    count = lambda name: len((tmp_path / f"written/{name}.jsonl").read_text().splitlines())
    assert [count(n) for n in ("b", "br", "br.plans", "rl", "rl.plans")] == [1] * 5
    assert len((tmp_path / "votes.csv").read_text().splitlines()) == 2 and "rl > b" in of("trailmark votes")
    baselines = (tmp_path / "baselines.jsonl").read_text().splitlines()
    assert len(baselines) == 1 + len((tmp_path / "stories/train.jsonl").read_text().splitlines())
    _the_reward_of_the_page(tmp_path)


def test_the_equation_by_hand(tmp_path):
    (text,) = re.findall(r"```python\n(# by_hand\.py.*?)```", (ROOT / "docs/vrcli.md").read_text(), re.S)
    (tmp_path / "by_hand.py").write_text(text)
    run = [sys.executable, "by_hand.py"]
    said = forked.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    scorer = TextScorer(load_model(ModelConfig(name="tiny")).freeze())
    ours = scorer.improvement("Why?", "Why? In summary: a hen.", "So.", "text")
    assert abs(float(said) - ours) < 1e-4 and ours != 0


def _the_reward_of_the_page(folder):
    """The page's own reward, run unchanged: each stored reward is the improvement less a tenth for each word."""
    rows = {r["id"]: r for r in map(json.loads, (folder / "stories/train.jsonl").read_text().splitlines())}
    shape = {"family": "llama", "layers": 2, "width": 64, "heads": 4, "context": 1024}
    scorer = TextScorer(load_model(ModelConfig.model_validate({"name": "tiny", "shape": shape})).freeze())
    episodes = list(read_episodes(folder / "runs/mine/episodes"))
    assert len(episodes) == 8
    for e in episodes:
        row, plan = rows[e.task.id], plans.plan_of(e.turns[0].text, ["In summary:"])
        text = prompts.PLAN.format(answer=plan, **{k: row[k] for k in NEEDED})
        after = [*row["prompt"][:-1], {"role": "user", "content": text}]
        want = scorer.improvement(context(row, None), after, row["gold"])
        assert abs(e.outcome.reward - (want - 0.1 * len(plan.split()))) < 1e-3
    for row in read_metrics(folder / "runs/mine"):
        answers = [e.turns[0].text for e in read_segment(folder / f"runs/mine/evaluation/{row['step']:06d}.jsonl")]
        assert row["eval/words"] == sum(len(a.split()) for a in answers) / len(answers)


def test_the_recipe_has_the_templates_of_the_prompts():
    reward = yaml.safe_load((ROOT / "recipes/vrcli-laptop.yaml").read_text())["reward"]
    assert (reward["context"], reward["plan"], reward["empty"]) == (prompts.CONTEXT, prompts.PLAN, prompts.EMPTY)
    assert tuple(reward["markers"]) == plans.MARKERS
