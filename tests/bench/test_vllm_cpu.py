"""The comparison with vLLM on a CPU, rehearsed with a stand-in for vLLM."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delenv("TRAILMARK_VLLM", raising=False)
    return runpy.run_path(str(BENCH / "vllm_cpu.py"))


def test_a_rehearsal_with_a_stand_in(script, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(sys, "argv", ["bench/vllm_cpu.py", "--quick", "--vllm", str(tmp_path / "python")])
    before = torch.get_num_threads(), os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    script["main"]()
    first, *lines = capfd.readouterr().out.splitlines()
    assert first == f"There is no vLLM at {tmp_path}/python: a stand-in answers, and `make bench-vllm` installs vLLM."
    rows = {r["name"].partition("/")[2]: r for r in map(json.loads, lines)}
    assert list(rows) == [
        name
        for dtype in ("float32", "bfloat16")
        for name in (
            f"greedy tokens, {dtype}, 1 thread",
            *(
                f"{case}, {dtype}, 1 thread, against {peer}"
                for case in ("2 distinct", "2 x 2")
                for peer in ("generate", "vLLM")
            ),
        )
    ]
    assert rows["greedy tokens, float32, 1 thread"]["ours"] == 4
    assert set(rows["2 x 2, float32, 1 thread, against vLLM"]["seconds"]) == {"ours", "generate", "vLLM"}
    assert before == (torch.get_num_threads(), os.sched_getaffinity(0) if before[1] else None)


def test_without_vllm_it_says_so_in_one_sentence(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["bench/vllm_cpu.py", "--vllm", str(tmp_path / "python")])
    with pytest.raises(SystemExit, match=r"there is none at .*: make bench-vllm installs it, --quick rehearses"):
        script["main"]()


def test_a_vllm_that_ends_is_quoted(script):
    with pytest.raises(SystemExit, match=r"^vLLM has ended: .*vllm_side\.py: error: unrecognized arguments: --odd$"):
        script["Vllm"](sys.executable, ["--odd"], 1)


def test_sides_that_do_other_work_are_noticed(script, monkeypatch):
    monkeypatch.setitem(script["turns"].__globals__, "REST", 0)
    side = lambda *texts: lambda job: {"seconds": 1.0, "computing": 1.0, "texts": [list(t) for t in texts]}
    sides = {"ours": side((1, 2), (3, 4)), "vLLM": side((1, 2), (3, 5))}
    assert script["alike"](sides, [(1,), (2,)]) == 1
    job = {"prompts": [(1,), (2,)], "n": 1, "tokens": 3, "greedy": False, "seed": 0}
    with pytest.raises(AssertionError, match=r"ours wrote texts of \{2\} tokens, not of 3"):
        script["turns"](sides, job, 0)
