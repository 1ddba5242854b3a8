import pytest
import torch

from trailmark.engines.local import LocalEngine


@pytest.fixture
def tiny(make_lm):
    return LocalEngine(make_lm("gpt2", dtype=torch.float64, width=32, layers=2, context=512), slots=8, fixed=False)
