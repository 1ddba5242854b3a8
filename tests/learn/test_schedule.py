"""The factor on the learning rate, over every length of a run."""

import math

import pytest

from trailmark.config import OptimConfig
from trailmark.learn.optim import rate


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.01, 0.03, 0.1, 0.25, 0.5, 0.99, 1, 3, 500])
def test_no_step_of_any_run_is_larger_than_the_learning_rate_asked_for(schedule, warmup):
    config = OptimConfig(schedule=schedule, warmup=warmup, final=0.1)
    for total in range(1, 401):
        warm = warmup * total if warmup < 1 else warmup
        factors = [rate(config, step, total) for step in range(total)]
        assert all(0 < f <= 1 for f in factors), total
        rising, falling = factors[: math.ceil(warm)], factors[math.ceil(warm) :]
        assert rising == sorted(rising) and falling == sorted(falling, reverse=True), total
        assert all(f == min(1.0, (k + 1) / max(warm, 1)) for k, f in enumerate(rising)), total
        if schedule == "constant":
            assert set(falling) <= {1.0}, total


def test_a_warm_up_of_one_and_a_fifth_steps_by_hand():
    config = OptimConfig(schedule="linear", warmup=0.03)
    factors = [rate(config, step, 40) for step in (0, 1, 2, 39)]
    assert factors == pytest.approx([1 / 1.2, 1.0, 1 - 0.8 / 38.8, 1 - 37.8 / 38.8], abs=1e-12)
