"""What the README shows works as it stands."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_task_of_your_own(tmp_path):
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    (tmp_path / "guess.py").write_text(code)
    command = "from trailmark.cli import main; main()"
    words = ["train", str(ROOT / "recipes/taxi-online.yaml"), 'task={name: "guess:Guess"}', "out=runs/guess", "steps=2", "eval.every=2"]
    for line in (words, ["tasks", "check", "guess:Guess"]):
        done = subprocess.run([sys.executable, "-c", command, *line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "make test" in readme and (ROOT / ".ci/run").read_text().strip().endswith("make test")


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`((?:tests|recipes|docs|bench)/[\w./-]+)`", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name
