"""Exact values: by hand for the bandit, and dynamic programming against enumeration for the rest."""

import math

import numpy as np
import pytest

from trailmark.errors import TaskError
from trailmark.tasks.check import check_task
from trailmark.tasks.solved import (
    END,
    Solved,
    bandit,
    chain,
    evaluate,
    paths,
    solve,
    solve_soft,
    tree,
    visits,
)
from trailmark.types import Scored

PROBLEMS = {
    "tree": tree(4, 3, seed=1),
    "inner": tree(3, 2, seed=2, inner=True),
    "early": tree(5, 2, seed=3, inner=True, early=True),
    "chain": chain(6, 3, seed=4),
    "bandit": bandit(5, seed=5),
}
ALL = pytest.mark.parametrize("p", PROBLEMS.values(), ids=PROBLEMS.keys())


def random_policy(p, seed=0):
    pi = np.random.default_rng(seed).random(p.next.shape) + 0.05
    return pi / pi.sum(1, keepdims=True)


def test_bandit_by_hand():
    p = bandit(rewards=[1.0, 0.0])
    ref = np.array([[0.25, 0.75]])
    v, q = solve(p.next, p.reward)
    assert v.tolist() == [1.0] and q.tolist() == [[1.0, 0.0]]
    v, q = evaluate(p.next, p.reward, ref)
    assert v.tolist() == [0.25]
    v, q, pi = solve_soft(p.next, p.reward, ref, beta=0.5)
    mass = 0.25 * math.exp(2) + 0.75
    assert v[0] == pytest.approx(0.5 * math.log(mass), abs=1e-15)
    assert pi[0] == pytest.approx([0.25 * math.exp(2) / mass, 0.75 / mass], abs=1e-15)


@ALL
@pytest.mark.parametrize("beta", [0.03, 0.5, 10.0])
def test_soft_consistency(p, beta):
    """V*(s) - V*(s') = r - beta log(pi*/ref) for every pair, and pi* is a distribution."""
    ref = random_policy(p)
    v, _, pi = solve_soft(p.next, p.reward, ref, beta)
    after = np.where(p.next == END, 0.0, v[p.next])
    sure = pi > 1e-300
    residual = (v[:, None] - after - p.reward)[sure] + beta * np.log(pi[sure] / ref[sure])
    assert np.abs(residual).max() < 1e-12
    assert np.abs(pi.sum(1) - 1).max() < 1e-12


@ALL
def test_soft_optimum_is_worth_its_value_and_no_policy_more(p):
    ref, beta = random_policy(p), 0.3
    v, _, pi = solve_soft(p.next, p.reward, ref, beta)
    assert evaluate(p.next, p.reward, pi, ref, beta)[0] == pytest.approx(v, abs=1e-12)
    for seed in range(5):
        other = random_policy(p, seed + 1)
        assert (evaluate(p.next, p.reward, other, ref, beta)[0] <= v + 1e-12).all()


@ALL
def test_soft_value_tends_to_the_optimum(p):
    """V* - soft V is between 0 and beta times the steps times log(1 / min ref)."""
    v, _ = solve(p.next, p.reward)
    for beta in (1e-1, 1e-3, 1e-5):
        soft = solve_soft(p.next, p.reward, p.uniform, beta)[0]
        gap = v - soft
        assert gap.min() > -1e-12 and gap.max() <= beta * 6 * math.log(p.next.shape[1]) + 1e-12
    hot = solve_soft(p.next, p.reward, p.uniform, 1e5)[0]
    assert hot == pytest.approx(evaluate(p.next, p.reward, p.uniform)[0], abs=1e-4)


def test_soft_with_a_reference_that_never_takes_the_best():
    p = bandit(rewards=[5.0, 1.0, 0.0])
    v, _, pi = solve_soft(p.next, p.reward, np.array([[0.0, 0.5, 0.5]]), 1e-3)
    assert pi[0].tolist() == [0.0, 1.0, 0.0] and v[0] == pytest.approx(1 + 1e-3 * math.log(0.5))


@ALL
def test_enumeration_agrees_with_dynamic_programming(p):
    pi = random_policy(p)
    plays = paths(p.next, p.reward, pi)
    assert len({x.actions for x in plays}) == len(plays)
    assert sum(x.probability for x in plays) == pytest.approx(1, abs=1e-12)
    v, q = evaluate(p.next, p.reward, pi)
    assert sum(x.probability * x.total for x in plays) == pytest.approx(v[0], abs=1e-12)
    assert max(x.total for x in plays) == pytest.approx(solve(p.next, p.reward)[0][0], abs=1e-12)
    d = visits(p.next, pi)
    assert (d[:, None] * pi * p.reward).sum() == pytest.approx(v[0], abs=1e-12)
    assert (d[:, None] * pi * (p.next == END)).sum() == pytest.approx(1, abs=1e-12)
    assert (pi * (q - v[:, None])).sum(1) == pytest.approx(0, abs=1e-12)  # advantages average to 0


def test_shapes_of_problems():
    assert PROBLEMS["tree"].next.shape == (1 + 3 + 9 + 27, 3)
    assert len(paths(PROBLEMS["tree"].next, PROBLEMS["tree"].reward, PROBLEMS["tree"].uniform)) == 81
    early = PROBLEMS["early"]
    assert len({len(x.actions) for x in paths(early.next, early.reward, early.uniform)}) > 1
    for seed in range(20):
        ends = tree(2, 2, seed).reward[1:]
        assert set(ends.ravel()) == {0.0, 1.0}
    assert (tree(4, 2, 7).reward == tree(4, 2, 7).reward).all()


def test_chain_has_one_deciding_letter():
    p = PROBLEMS["chain"]
    v, q = evaluate(p.next, p.reward, p.uniform)
    assert v[0] == pytest.approx(1 / 3)
    reached = visits(p.next, p.uniform) > 0
    deciding = [s for s in range(len(v)) if reached[s] and np.ptp(q[s]) > 1e-12]
    assert len(deciding) == 1 and sorted(q[deciding[0]]) == pytest.approx([0, 0, 1])


def test_wrong_shapes_are_refused():
    p = bandit(3)
    with pytest.raises(AssertionError, match="reward has shape"):
        solve(p.next, p.reward[:, :2])
    with pytest.raises(AssertionError, match="sum to 1"):
        evaluate(p.next, p.reward, np.ones((1, 3)))
    with pytest.raises(AssertionError, match="go up"):
        solve(np.array([[0]]), np.zeros((1, 1)))


@pytest.mark.parametrize("kind", ["tree", "chain", "bandit"])
def test_worlds_pay_what_the_table_says(kind):
    turns, answer = Solved(kind, problems=2, seed=3), Solved(kind, form="answer", problems=2, seed=3)
    for task in turns.tasks():
        p = turns.problems[task.data["problem"]]
        best = solve(p.next, p.reward)[0][0]
        for path in paths(p.next, p.reward, p.uniform):
            text = "".join(p.letters[a] for a in path.actions)
            world, whole = turns.make(), answer.make()
            world.reset(task)
            steps = [world.step(x) for x in text]
            assert [s.over for s in steps] == [False] * (len(text) - 1) + [True]
            assert sum(s.reward for s in steps) == pytest.approx(path.total)
            whole.reset(task)
            once = whole.step(text)
            assert once.over and once.reward == path.total
            assert once.outcome == steps[-1].outcome == Scored(path.total, bool(path.total >= best - 1e-9))


def test_texts():
    source = Solved("tree", depth=2, actions=3)
    world = source.make()
    first = world.reset(source.tasks()[0])
    assert (first.state, first.menu, first.labels) == ("tree 0: ", "\na b c? ", ("a", "b", "c"))
    assert world.step("b").observation.state == "tree 0: b"
    bad = world.step("z")
    assert bad.terminated and bad.reward == 0 and bad.info == {"legal": False}
    whole = Solved("tree", form="answer", depth=2, actions=3).make()
    assert whole.reset(source.tasks()[0]).text == "tree 0: "
    assert whole.step("a").outcome == Scored(0.0, False)  # not a whole play


def test_mistakes_are_explained():
    with pytest.raises(TaskError, match="Did you mean 'depth'"):
        Solved("tree", depht=3)
    with pytest.raises(TaskError, match="no kind 'trees'"):
        Solved("trees")
    with pytest.raises(TaskError, match="actions=40"):
        Solved("bandit", actions=40)


@pytest.mark.parametrize("form", ["turns", "answer"])
def test_checker_passes(form):
    for kind in ("tree", "chain", "bandit"):
        assert check_task(Solved(kind, form=form, problems=3)).problems == []
    assert check_task(Solved("tree", form=form, depth=4, inner=True, early=True)).problems == []
