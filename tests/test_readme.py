"""What the README shows works as it stands."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import forked

from trailmark.methods import method_names
from trailmark.tasks import task_names

ROOT = Path(__file__).parent.parent


def test_a_task_of_your_own(tmp_path):
    readme = (ROOT / "README.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", readme, re.S)
    (tmp_path / "guess.py").write_text(code)
    command = "from trailmark.commands.app import main; main()"
    words = [
        "train",
        str(ROOT / "recipes/taxi-policy-gradient.yaml"),
        'task={name: "guess:Guess"}',
        "out=runs/guess",
        "steps=2",
        "eval.every=2",
    ]
    for line in (words, ["tasks", "check", "guess:Guess"]):
        done = forked.run([sys.executable, "-c", command, *line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "make test" in readme and (ROOT / ".ci/run").read_text().strip().endswith("make test")


def test_a_reward_of_your_own(tmp_path):
    """The command as it stands, for a few steps, in a new interpreter."""
    section = (ROOT / "README.md").read_text().split("## A reward of your own")[1]
    rows, function, command = re.findall(r"^```\w*\n(.*?)^```$", section, re.S | re.M)
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "my_file.py").write_text(function)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    words = [*command.split()[1:], "steps=12", "eval.every=4"]
    run = [sys.executable, "-c", "from trailmark.commands.app import main; main()", *words]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(x) for x in (tmp_path / "runs/prompts-grpo/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 12 and metrics[-1]["reward"] > 1.5 * metrics[0]["reward"] > 0


def test_the_same_reward_from_python(tmp_path):
    *_, code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rewards.md").read_text(), re.S)
    assert len([line for line in code.splitlines() if line.strip()]) < 30
    words = ("sun", "moon", "sea", "hill", "rain")
    rows = [{"prompt": f"Sing of the {w}: ", "vowels": "aeiou"} for w in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "mine.py").write_text(code)
    done = forked.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    curve = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(curve) == 30 and sum(curve[-3:]) > 2 * sum(curve[:3]) > 0


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`((?:tests|recipes|docs|bench)/[\w./-]+)`", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name


def test_the_table_of_folders_has_every_folder_method_and_task():
    table = (ROOT / "README.md").read_text().split("| folder | what it holds |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.M))
    named = [n for first in rows for n in re.findall(r"`([\w./]+)`", first)]
    package = ROOT / "src/trailmark"
    assert [n for n in named if not (package / n).exists()] == []
    folders = {f"{f.parent.name}/" for f in package.glob("*/__init__.py")}
    assert folders - set(named) == set()
    words = lambda row: set(re.findall(r"`([\w-]+)`", rows[f"`{row}/`"]))
    assert set(task_names()) - words("tasks") == {"gym"} and "Gymnasium" in rows["`tasks/`"]
    parts = {"reflect_imitation", "oreo_rounds", "epo_rounds"}  # stages and rounds of methods that are named
    assert set(method_names()) - words("methods") == parts


def test_the_api_page_and_its_notebook():
    """The page runs from top to bottom, and the notebook has the same code."""
    page = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.S)
    cells = [c for c in json.loads((ROOT / "docs/api.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    assert ["".join(c["source"]) for c in cells] == [code.strip("\n") for code in page]
    done = forked.run([sys.executable, "-c", "\n".join(page)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "->" in done.stdout


def test_links_of_the_docs_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_floors_that_slow_tests_look_for_stand_on_their_pages():
    pages = {"README": "README.md", "REFLECT": "docs/from/reflect-rl.md"}
    for name in ("oreo", "lpr", "vrcli"):
        pages |= {name.upper(): f"docs/from/{name}.md", f"{name.upper()}_PAGE": f"docs/{name}.md"}
    tree = ast.parse((ROOT / "tests/docs/test_floors.py").read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "floor"]
    wanted = [(ast.unparse(c.args[0]), ast.literal_eval(c.args[1])) for c in calls]
    assert len(wanted) >= 11
    for page, pattern in wanted:
        assert re.search(pattern, (ROOT / pages[page]).read_text().replace("\n", " ")), (page, pattern)


def test_every_extra_that_can_be_installed_is_used():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = "".join(p.read_text() for p in (ROOT / "src").rglob("*.py"))
    tests = "".join(p.read_text() for p in (ROOT / "tests").rglob("*.py") if p.name != Path(__file__).name)
    for extra in sorted(set(extras) - {"dev"}):
        for package in extras[extra]:
            module = re.match(r"[\w-]+", package)[0].replace("-", "_")
            text = tests if extra == "peer" else sources
            assert re.search(rf"\b(import|from) {module}\b|[\"']{module}[\"'.]", text), f"{extra}: {package}"
