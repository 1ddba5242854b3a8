"""How many bytes a token is counted with: shapes of models by hand."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trailmark.learn import budget
from trailmark.models.layout import _up


def model(device="cpu", dtype=torch.float32, compiled=False, checkpointing=False, width=10, weights=100, **config):
    p = torch.nn.Parameter(torch.zeros(weights, dtype=dtype))
    return SimpleNamespace(
        base=SimpleNamespace(config=SimpleNamespace(**config), is_gradient_checkpointing=checkpointing), width=width,
        dtype=dtype, device=torch.device(device), vocab=50, compiled=SimpleNamespace(worth=lambda base: compiled),
        parameters=lambda: iter([("w", p)]), weight=p,
    )  # fmt: skip


CASES = {  # block = (3 * feed-forward + 8 * width) numbers, half as many again if not compiled
    "gpt2 names": (dict(n_inner=20, num_hidden_layers=2), 2 * (60 + 80) * 1.5 * 4),
    "no name at all": (dict(), 1 * (120 + 80) * 1.5 * 4),
    "null is as missing": (dict(n_inner=None, num_hidden_layers=3), 3 * 200 * 1.5 * 4),
    "experts": (dict(intermediate_size=99, moe_intermediate_size=5, num_experts_per_tok=4), (60 + 80) * 1.5 * 4),
    "experts of full width": (dict(intermediate_size=20, num_experts_per_tok=2), (120 + 80) * 1.5 * 4),
    "half": (dict(intermediate_size=20, dtype=torch.bfloat16), 140 * 1.5 * 2),
    "compiled on a GPU": (dict(intermediate_size=20, device="cuda", compiled=True), 140 * 4),
    "compiled is only for GPUs": (dict(intermediate_size=20, compiled=True), 140 * 1.5 * 4),
    "checkpointing": (
        dict(intermediate_size=20, num_hidden_layers=5, checkpointing=True), 5 * 10 * 4 + 3 * 140 * 1.5 * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_by_hand(case):
    shape, want = CASES[case]
    assert budget.bytes_per_token(model(**shape), True, False) == want


def test_a_frozen_model_keeps_two_blocks_whatever_its_depth():
    for layers in (1, 40):
        assert budget.bytes_per_token(model(intermediate_size=20, num_hidden_layers=layers), False, False) == 1680


def test_mixed_precision_counts_three_bytes_of_a_float():
    lm = model(intermediate_size=20)
    assert budget.bytes_per_token(lm, True, True) == 140 * 1.5 * 3
    half = model(intermediate_size=20, dtype=torch.bfloat16)
    assert budget.bytes_per_token(half, True, True) == budget.bytes_per_token(half, True, False)


def test_places_by_hand(monkeypatch):
    lm = model("cuda", intermediate_size=20)
    logits, each = budget.CHUNK * 50 * 12, 140 * 1.5 * 4
    for tokens, want in ((1500, 1024), (2048, 2048), (2047, 1024), (5, 1024), (10**7, 1 << 17)):
        free = logits + 100 * 12 + tokens * each / budget.SHARE
        monkeypatch.setattr(budget, "free_memory", lambda device, free=free: free + 1)
        assert budget.places({"policy": lm}, {"policy": None}, False) == want
    # A gradient that is there already, and the moments with it, is no longer counted.
    free = logits + 2048 * each / budget.SHARE + 1
    monkeypatch.setattr(budget, "free_memory", lambda device: free)
    assert budget.places({"policy": lm}, {"policy": None}, False) == 1024
    lm.weight.grad = torch.zeros(100)
    assert budget.places({"policy": lm}, {"policy": None}, False) == 2048
    monkeypatch.setattr(budget, "free_memory", lambda device: -5.0)
    assert budget.places({"policy": lm}, {"policy": None}, False) == budget.LEAST
    monkeypatch.setattr(budget, "free_memory", lambda device: None)
    assert budget.places({"policy": lm}, {"policy": None}, False) == budget.PLAIN


@pytest.mark.parametrize("tokens", [1, 2, 3, 1023, 1024, 1025, 4095, 4096, 70000, 1 << 17, 1 << 20])
def test_rounding_is_the_largest_power_of_two_within_bounds(tokens):
    powers = [1 << k for k in range(10, 18)]
    assert budget.rounded(tokens) == max([p for p in powers if p <= tokens], default=1024)


def test_a_token_takes_what_it_took_on_a_gpu():
    """The peaks that `bench/gpu_training.py` measured at Qwen2-0.5B's shape, over the tokens of their micro-batches (a
    length is rounded up): one more token takes what the estimate says, within 5 %."""
    results = Path(__file__).parents[2] / "bench" / "results" / "gpu_training.jsonl"
    peaks = {}
    for row in map(json.loads, results.read_text().splitlines()):
        if found := re.fullmatch(r"(\d+) samples of (\d+) after (\d+)", row["what"].partition(";")[0]):
            rows, written, prompt = map(int, found.groups())
            peaks[_up(prompt + rows * written, 128)] = row["details"]["ours"]["tree"]["gib"] * 2**30
    assert sorted(peaks) == [9216, 12288, 28672]
    qwen = model("cuda", torch.bfloat16, True, width=896, num_hidden_layers=24, intermediate_size=4864)
    for few, many in ((9216, 28672), (12288, 28672)):
        slope = (peaks[many] - peaks[few]) / (many - few)
        assert budget.bytes_per_token(qwen, True, False) == pytest.approx(slope, rel=0.05)
