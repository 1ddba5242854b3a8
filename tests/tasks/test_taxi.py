"""Every number of DangerousTaxi: the random policies by dynamic programming, the oracle by playing all starts."""

import numpy as np
import pytest

from trailmark.errors import TaskError
from trailmark.tasks.check import check_task
from trailmark.tasks.taxi import (
    ABOARD,
    ACTIONS,
    LABELS,
    MENU,
    WALLS,
    Taxi,
    decode,
    draw,
    dynamics,
    encode,
    optimal_action,
    optimal_actions,
    optimal_length,
    start_of,
    starts,
)
from trailmark.types import Scored, Task

MODES = ("pickup", "dropoff", "full")
NEXT = np.array([[t for t, _, _ in row] for row in dynamics()])
MOVES = np.arange(500)[:, None] != NEXT
AT_GOAL = {
    m: np.array([decode(s)[2] == (ABOARD if m == "pickup" else decode(s)[3]) for s in range(500)]) for m in MODES
}


def success_rate(mode, policy, horizon=15, first_bump_fatal=True):
    """P(goal within `horizon`) averaged over the starts, by backward induction on
    p_k(s) = sum_a policy(a|s) [s' != s] (goal(s') or p_{k-1}(s'))."""
    goal, p = AT_GOAL[mode], np.zeros(500)
    for k in range(1, horizon + 1):
        after = np.where(goal, 1.0, p)
        lives = np.where(MOVES, after[NEXT], 0.0 if first_bump_fatal or k < horizon else p[:, None])
        p = (policy * lives).sum(1)
    return np.mean([p[start_of(s, mode)] for s in starts()])


def play(source, actions, state, mode=None):
    world = source.make()
    first = world.reset(Task("t", 0, {"state": state} | ({"mode": mode} if mode else {})))
    return first, [world.step(a) for a in actions]


def test_encoding_and_starts():
    assert [encode(*decode(s)) for s in range(500)] == list(range(500))
    assert encode(3, 1, 2, 0) == 328
    assert len(starts()) == 300 and len(set(starts())) == 300


def test_dynamics_equal_gymnasiums_taxi():
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make("Taxi-v4").unwrapped  # its defaults, no rain and a steady passenger, are the v3 rules
    same = sum(env.P[s][a] == [(1.0, *dynamics()[s][a])] for s in range(500) for a in range(6))
    assert same == 3000
    assert [s for s in range(500) if env.initial_state_distrib[s] > 0] == list(starts())


@pytest.mark.parametrize(
    "mode, least, total, most, within_15",
    [("pickup", 1, 1671, 9, 300), ("dropoff", 5, 2250, 9, 300), ("full", 6, 3921, 18, 242)],
)
def test_shortest_plays(mode, least, total, most, within_15):
    n = [optimal_length(start_of(s, mode), mode) for s in starts()]
    assert (min(n), sum(n), max(n), sum(k <= 15 for k in n)) == (least, total, most, within_15)
    assert round(sum(n) / 300, 2) == {"pickup": 5.57, "dropoff": 7.5, "full": 13.07}[mode]


def test_optimal_actions_shorten_the_way_and_only_they_do():
    for mode in MODES:
        for s in (s for s in range(500) if not AT_GOAL[mode][s]):
            down = [a for a in range(6) if optimal_length(int(NEXT[s, a]), mode) == optimal_length(s, mode) - 1]
            assert list(optimal_actions(s, mode)) == down and optimal_action(s, mode) == down[0]
    assert optimal_action(encode(0, 0, ABOARD, 1), "pickup") is None


def test_south_is_a_quarter_of_the_optimal_actions():
    counts = np.zeros(6)
    for s in starts():
        while (a := optimal_action(s)) is not None:
            counts[a] += 1
            s = dynamics()[s][a][0]
    assert counts.sum() == 3921 and counts[0] == 1008  # 25.7 %


def test_uniform_policy_success():
    """1.0 % / 0.006 % / 0 %, and 1.6 % / 0.009 % / 0 % when the first bump is overlooked."""
    uniform = np.full((500, 6), 1 / 6)
    rates = [success_rate(m, uniform) for m in MODES]
    assert rates == pytest.approx([0.01018134, 6.05341e-05, 6.11521e-07], rel=1e-5)
    rates = [success_rate(m, uniform, first_bump_fatal=False) for m in MODES]
    assert rates == pytest.approx([0.01567490, 9.32947e-05, 9.39440e-07], rel=1e-5)


def test_uniform_over_moves_success():
    """11 % / 2.5 % / 0.1 %."""
    rates = [success_rate(m, MOVES / MOVES.sum(1, keepdims=True)) for m in MODES]
    assert rates == pytest.approx([0.1098729, 0.02519152, 0.001041090], rel=1e-5)


@pytest.mark.parametrize("first_bump_fatal", [True, False])
def test_the_world_agrees_with_the_chain(first_bump_fatal):
    """Enumerate all action strings of length 4 from ten starts in the world itself; compare with the induction."""
    source = Taxi("pickup", horizon=4, history="none", first_bump_fatal=first_bump_fatal)
    world, some = source.make(), starts()[::30]
    near = sum(optimal_length(s, "pickup") <= 4 for s in some)
    assert near >= 2

    def wins(state, actions):
        world.reset(Task("t", 0, {"state": state}))
        step = None
        for a in actions:
            step = world.step(str(a))
        if step is not None and step.over:
            return float(step.outcome.success)
        return sum(wins(state, (*actions, a)) for a in range(6)) / 6

    goal, p = AT_GOAL["pickup"], np.zeros(500)
    for k in range(1, 5):
        bump = p[:, None] if k == 4 and not first_bump_fatal else 0.0
        p = np.where(MOVES, np.where(goal, 1.0, p)[NEXT], bump).mean(1)
    assert [wins(s, ()) for s in some] == pytest.approx([p[s] for s in some], abs=1e-12)


@pytest.mark.parametrize("mode, success, mean", [("pickup", 300, 0.7715), ("dropoff", 300, 0.675), ("full", 242, 1.26)])
def test_oracle(mode, success, mean):
    source, total, won = Taxi(mode, history="none"), 0.0, 0
    world = source.make()
    for task in source.tasks("all"):
        world.reset(task)
        step, rewards = None, []
        while step is None or not step.over:
            step = world.step(str(optimal_action(world.state, mode)))
            rewards.append(step.reward)
        assert isinstance(step.outcome, Scored)
        assert step.outcome.reward == pytest.approx(sum(rewards), abs=1e-12)
        assert step.outcome.success == (step.outcome.reward > (1 if mode == "full" else 0))
        assert step.truncated != step.terminated
        total, won = total + step.outcome.reward, won + bool(step.outcome.success)
    assert won == success
    assert total / 300 == pytest.approx(mean, abs=5e-3)


def test_a_no_op_is_fatal():
    corner = encode(0, 0, 2, 1)
    for action in ("1", "3", "4", "5", "9", "south"):
        _, (step,) = play(Taxi(), [action], corner)
        assert (step.reward, step.terminated, step.truncated) == (-0.5, True, False)
        assert step.outcome == Scored(-0.5, False)


def test_the_reference_overlooks_a_first_bump():
    source, corner = Taxi(first_bump_fatal=False), encode(0, 0, 2, 1)
    _, (first, second) = play(source, ["1", "1"], corner)
    assert (first.reward, first.over, second.reward, second.terminated) == (-0.05, False, -0.5, True)
    _, (first, second) = play(source, ["5", "0"], corner)
    assert (first.reward, first.over, second.reward, second.over) == (-0.5, False, -0.05, False)


def test_bonus_is_paid_once_and_a_wrong_corner_is_legal():
    _, steps = play(Taxi("full"), ["4", "5", "4", "0"], encode(0, 0, 0, 1))
    assert [s.reward for s in steps] == [1.0, -0.05, -0.05, -0.05] and not steps[-1].over
    _, steps = play(Taxi("pickup"), ["4"], encode(0, 0, 0, 1))
    assert steps[0].outcome == Scored(1.0, True) and steps[0].terminated
    _, steps = play(Taxi("dropoff"), ["5", "4"], encode(3, 3, 0, 1))  # taken to the passenger, who is aboard
    assert [s.reward for s in steps] == [-0.05, -0.05] and not steps[-1].over


def test_horizon_truncates():
    _, steps = play(Taxi(horizon=3), "010", encode(0, 0, 2, 1))
    assert [s.truncated for s in steps] == [False, False, True] and not steps[-1].terminated
    assert steps[-1].outcome == Scored(-0.15, False)
    with pytest.raises(TaskError, match="over"):
        play(Taxi(horizon=1), "00", encode(0, 0, 2, 1))


def test_map():
    assert draw(encode(3, 1, 2, 0)) == (
        "+---------+\n|D: | : : |\n| : | : : |\n| : : : : |\n| |T: | : |\n|P| : | : |\n+---------+\n"
    )
    assert draw(encode(0, 0, 0, 3))[12:14] == "|O" and draw(encode(0, 0, ABOARD, 0))[12:14] == "|X"
    assert draw(encode(0, 0, 1, 0))[12:14] == "|T"  # the taxi hides the destination
    for s in range(500):  # only marks are ever added to the walls
        assert [c if c in "+-|:\n" else " " for c in draw(s)] == list("\n".join(WALLS) + "\n")


def test_map_is_injective_on_400_states():
    states = [s for s in range(500) if decode(s)[2] != decode(s)[3]]
    assert len(states) == len({draw(s) for s in states}) == 400


def test_prompts():
    start, one = encode(0, 0, 2, 1), encode(1, 0, 2, 1)
    first, steps = play(Taxi(history="none"), "00", start)
    assert first.state == draw(start) and first.menu == MENU
    assert (first.labels, first.actions) == (LABELS, ACTIONS)
    assert MENU.splitlines()[1:] == [f"{i}. {a}" for i, a in enumerate(ACTIONS)]
    first, steps = play(Taxi(history="actions", menu=False), "00", start)
    assert first.text == "Actions so far: none\nMap now:\n" + draw(start)
    assert steps[1].observation.state == "Actions so far: south, south\nMap now:\n" + draw(encode(2, 0, 2, 1))
    first, steps = play(Taxi(history="maps"), "00", start)
    assert first.state == "Map now:\n" + draw(start)
    assert steps[1].observation.state == (
        f"Map at the start:\n{draw(start)}Action: south\n{draw(one)}Action: south\nMap now:\n{draw(encode(2, 0, 2, 1))}"
    )
    world = Taxi(history="maps").make()
    task = Task("t", 0, {"state": start})
    assert world.reset(task) == first and world.step("0") == steps[0] and world.reset(task) == first  # cleared


def test_rules_tell_the_truth():
    text = Taxi("pickup", rules=True, horizon=9).make().reset(Task("t", 0, {"state": 1})).state
    assert "changes nothing" in text and "ends the game and costs 0.5" in text and "9 actions" in text
    text = Taxi(rules=True, first_bump_fatal=False).make().reset(Task("t", 0, {"state": 1})).state
    assert "after the first action ends the game" in text


def test_dropoff_shows_the_map_it_starts_from():
    first, _ = play(Taxi("dropoff", history="maps"), "", encode(3, 3, 0, 1))
    assert first.state == "Map now:\n" + draw(encode(0, 0, ABOARD, 1))


def test_tasks():
    source = Taxi("pickup")
    everything = source.tasks("all")
    assert [t.data["state"] for t in everything] == list(starts())
    a, b = source.tasks("train", 50, seed=1), source.tasks("test", 50, seed=1)
    assert a == source.tasks("train", 80, seed=1)[:50]
    assert [t.data for t in a] != [t.data for t in b]
    first, _ = play(Taxi("full", history="none"), "", encode(3, 3, 0, 1), mode="dropoff")
    assert first.state == draw(encode(0, 0, ABOARD, 1))  # the task's mode goes first


def test_mistakes_are_explained():
    with pytest.raises(TaskError, match="Did you mean 'pickup'"):
        Taxi("pick_up")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="history 'map'"):
        Taxi(history="map")  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="no split 'valid'"):
        Taxi().tasks("valid")
    with pytest.raises(TaskError, match="needs data 'state'"):
        Taxi().make().reset(Task("t"))
    with pytest.raises(TaskError, match="is already over"):
        Taxi("pickup").make().reset(Task("t", 0, {"state": encode(0, 0, ABOARD, 1)}))


def test_checker_passes():
    for mode in MODES:
        for history in ("none", "actions", "maps"):
            assert check_task(Taxi(mode, history=history, rules=True)).problems == []
    assert check_task(Taxi(first_bump_fatal=False)).problems == []
