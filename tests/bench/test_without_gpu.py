"""A benchmark of GPUs on a machine without one: one sentence, and no row among the results of a card."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
SMALL = ["gpu_growth", "gpu_sampling", "gpu_sft", "gpu_step", "gpu_training", "gpu_vrcli"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.mark.parametrize("name", [*SMALL, "gpu_waits", "gpu_unsloth"])
def test_it_says_so_in_one_sentence(monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [f"bench/{name}.py"])
    monkeypatch.delitem(sys.modules, "gpu_training", raising=False)  # it reads --small when it is imported
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
    rehearse = ": --small rehearses it on a CPU" if name in SMALL else ""
    assert ended.value.code == f"{name}.py measures a GPU, and this machine has none{rehearse}"


@pytest.mark.parametrize("name", ["gpu_training", "gpu_sft", "gpu_step"])
def test_a_peer_that_is_missing_is_named(monkeypatch, name):
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "datasets" else own(n, *a))
    monkeypatch.setattr(sys, "argv", [f"bench/{name}.py", "--small"])
    monkeypatch.delitem(sys.modules, "gpu_training", raising=False)
    with pytest.raises(SystemExit, match=r"compares with other programs: pip install .*datasets.*, or --no-trl"):
        runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")


def test_a_rehearsal_is_not_kept_as_a_result(monkeypatch, tmp_path, capsys):
    common = runpy.run_path(str(BENCH / "common.py"))
    monkeypatch.setitem(common["keep_in"].__globals__, "RESULTS", tmp_path)
    common["keep"]({"name": "gpu_engine/update", "ours": 1.0})
    common["keep"]({"name": "sampling/short", "ours": 2.0})
    monkeypatch.setattr(sys, "argv", ["bench/sampling.py", "--quick"])
    common["keep"]({"name": "sampling/short", "ours": 9.0})
    (tmp_path / "elsewhere").mkdir()
    common["keep_in"]({"name": "gpu_sft/2048", "ours": 3.0}, tmp_path / "elsewhere" / "gpu_sft.jsonl")
    assert len(capsys.readouterr().out.splitlines()) == 4
    kept = {p.name: json.loads(p.read_text())["ours"] for p in tmp_path.rglob("*.jsonl")}
    assert kept == {"sampling.jsonl": 2.0, "gpu_sft.jsonl": 3.0}
