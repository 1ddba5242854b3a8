import hashlib
import os

import pytest


@pytest.fixture
def repo(tmp_path):
    """A small repository with all that is difficult about names."""
    root = tmp_path / "repo"
    files = {
        "README.md": "The readme.\n",
        "setup.py": "import this\n",
        "notes.xyz": "of another kind\n",
        "my file.py": "x = 1\n",
        "src/core.py": "def core():\n    return 1\n",
        "src/deep/inner.py": "y = 2\n",
        "src/data.csv": "".join(f"{i},{i * i}\n" for i in range(20)),
        "docs/guide.rst": "Guide\n",
        ".hidden/secret.py": "no\n",
        ".env.py": "no\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def digest():
    """A hash of everything in a folder: names, kinds, modes, contents and times of change."""

    def of(root):
        made = hashlib.sha256()
        for folder, names, files in os.walk(root):
            names.sort()
            for name in sorted([*names, *files]):
                path = os.path.join(folder, name)
                about = os.lstat(path)
                made.update(f"{path}\0{about.st_mode}\0{about.st_size}\0{about.st_mtime_ns}\0".encode())
                if name in files and os.path.isfile(path) and not os.path.islink(path):
                    with open(path, "rb") as f:
                        made.update(f.read())
        return made.hexdigest()

    return of
