"""The rows of each step: whole epochs, the same after a resume, and made ahead without a difference."""

import threading

import pytest

from trailmark.methods.batches import Batches, batch_rows


@pytest.mark.parametrize("rows, batch", [(1, 1), (1, 5), (5, 2), (6, 3), (4, 9), (7, 7)])
def test_every_epoch_holds_every_row_once(rows, batch):
    steps = 3 * rows
    laid = [r for step in range(1, steps + 1) for r in batch_rows(rows, batch, step, 11)]
    assert len(laid) == steps * batch
    epochs = [laid[k : k + rows] for k in range(0, len(laid) - rows + 1, rows)]
    assert all(sorted(e) == list(range(rows)) for e in epochs) and len(epochs) == 3 * batch
    assert rows < 4 or (len({tuple(e) for e in epochs}) > 1 and laid != [
        r for step in range(1, steps + 1) for r in batch_rows(rows, batch, step, 12)
    ])  # fmt: skip


class Counted:
    """Rows that say which were made, and in which thread."""

    def __init__(self, length, bad=None):
        self.length, self.bad, self.made, self.threads = length, bad, [], set()

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if i == self.bad:
            raise ValueError(f"row {i} is odd")
        self.made.append(i)
        self.threads.add(threading.current_thread().name)
        return f"row {i}"


def test_steps_in_any_order_are_those_of_their_number():
    rows = Counted(10)
    draws = Batches(rows, 3, 5, 8)
    for step in (1, 2, 3, 7, 8, 2, 1, 8):
        assert draws.take(step) == [f"row {r}" for r in batch_rows(10, 3, step, 5)]
    assert any("trailmark-rows" in name for name in rows.threads)


def test_rows_are_made_once_and_none_after_the_last_step():
    rows = Counted(12)
    draws = Batches(rows, 4, 0, 3)
    for step in (1, 2, 3):
        draws.take(step)
    assert sorted(rows.made) == list(range(12)) and draws._ahead is None


def test_a_list_is_there_already():
    draws = Batches([f"row {r}" for r in range(5)], 2, 1, 9)
    assert draws.take(4) == [f"row {r}" for r in batch_rows(5, 2, 4, 1)]
    assert draws._thread is None and draws._ahead is None


def test_an_error_made_ahead_is_told_at_its_own_step():
    order = [r for step in (1, 2, 3) for r in batch_rows(6, 2, step, 3)]
    draws = Batches(Counted(6, bad=order[2]), 2, 3, 3)
    assert draws.take(1) == [f"row {r}" for r in order[:2]]
    with pytest.raises(ValueError, match=f"row {order[2]} is odd"):
        draws.take(2)
    assert draws.take(3) == [f"row {r}" for r in order[4:]]
