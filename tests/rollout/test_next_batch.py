"""A batch that is played in a thread: taken once, by its own step, with its errors."""

import threading

import pytest
import torch

from trailmark.rollout.pool import Ahead


def test_a_batch_is_taken_once_and_by_its_step_only():
    ahead = Ahead(torch.device("cpu"))
    assert ahead.wait() is None and ahead.take(1) is None
    ahead.start(2, lambda: ["played", threading.current_thread().name])
    assert ahead.take(1) is None and ahead.take(3) is None  # it stays
    step, (word, name) = ahead.wait()
    assert (step, word) == (2, "played") and name.startswith("trailmark-play")
    assert ahead.wait() == (2, ["played", name]) and ahead.take(2) == ["played", name]
    assert ahead.take(2) is None and ahead.wait() is None


def test_it_is_played_while_the_caller_goes_on():
    ahead, go, begun = Ahead(None), threading.Event(), threading.Event()

    def play():
        begun.set()
        assert go.wait(20)
        return "made"

    ahead.start(5, play)
    assert begun.wait(20) and ahead._work is not None and not ahead._work.done()
    go.set()
    assert ahead.take(5) == "made"


def test_an_error_is_told_where_the_batch_is_needed():
    ahead = Ahead(None)

    def fails():
        raise ValueError("the world broke")

    ahead.start(4, fails)
    assert ahead.take(3) is None
    for look in (ahead.wait, lambda: ahead.take(4)):
        with pytest.raises(ValueError, match="the world broke"):
            look()


def test_a_batch_of_an_earlier_process():
    ahead = Ahead(None)
    ahead.ready(7, ([], []))  # an empty batch is a batch
    assert ahead.wait() == (7, ([], [])) and ahead.take(7) == ([], []) and ahead.take(7) is None


def test_batches_are_played_one_after_the_other():
    ahead, order = Ahead(None), []
    for step in range(1, 6):
        ahead.start(step, lambda step=step: order.append(step) or step * 10)
        assert ahead.take(step) == step * 10
    assert order == [1, 2, 3, 4, 5]
