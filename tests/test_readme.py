"""What the README shows works as it stands."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_task_of_your_own(tmp_path):
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
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
        done = subprocess.run([sys.executable, "-c", command, *line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "make test" in readme and (ROOT / ".ci/run").read_text().strip().endswith("make test")


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`((?:tests|recipes|docs|bench)/[\w./-]+)`", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name


def test_the_api_page_and_its_notebook():
    """The page runs from top to bottom, and the notebook has the same code."""
    page = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.S)
    cells = [c for c in json.loads((ROOT / "docs/api.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    assert ["".join(c["source"]) for c in cells] == [code.strip("\n") for code in page]
    done = subprocess.run([sys.executable, "-c", "\n".join(page)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "->" in done.stdout


def test_links_of_the_docs_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
