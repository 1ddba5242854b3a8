"""Every family of docs/models.md, through the learner and the engine, against transformers."""

import re
from pathlib import Path

import pytest
import torch

from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.models.families import FAMILIES, build_family, check, plain
from trailmark.types import SamplingLaw

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_and_log_probs_are_those_of_transformers(name):
    found = check(name)
    assert not found.refused and found.layout == "tree" and found.decoding == "equal"
    # norms of most families compute in float32 whatever the weights are, and so do capped scores
    assert found.gradient < 1e-6 and found.logp < (1e-6 if "soft caps" in name else 1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_generate(name):
    lm = build_family(name)
    prompts = [tuple(range(5, 5 + n)) for n in (3, 11, 20)]
    done = run(LocalEngine(lm, 2, 64), [Request(p, SamplingLaw(temperature=0.0), 1, 12, key=str(p)) for p in prompts])
    with plain(lm) as base, torch.no_grad():
        for prompt, (mine,) in zip(prompts, done, strict=True):
            ids = list(prompt)
            for _ in range(12):
                ids.append(int(base(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            assert list(mine.tokens) == ids[len(prompt) :]


def test_a_wrong_gradient_would_show(monkeypatch):
    """The check itself can fail: a layout whose rows see too little is found."""
    from trailmark.models import attention

    own = attention.Layout.mask

    def narrow(self, window):
        seen = own(self, window).clone()
        seen[..., 0] = False
        seen[..., 0, 0] = True
        return seen

    monkeypatch.setattr(attention.Layout, "mask", narrow)
    found = check("Qwen2")
    assert found.refused or found.gradient > 1e-3


def test_the_page_lists_them_all():
    listed = re.findall(r"^\| ([^|]+) \| tree \|", PAGE.read_text(), re.M)
    assert listed == list(FAMILIES)
