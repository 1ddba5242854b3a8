"""Order puzzles: closures, policies and exact values against plain enumerations, and what renaming does not change."""

import random
from itertools import pairwise, permutations, product

import pytest

from trailmark.errors import TaskError
from trailmark.tasks import get_task
from trailmark.tasks.puzzle import Puzzle, Walker, exact_soundness, exact_value, make_puzzle, read_puzzle
from trailmark.tasks.puzzle.orders import LEVELS, SPLITS, read_lines, split_of, true_step_values, written
from trailmark.tasks.puzzle.policies import item_of, neighbours
from trailmark.tasks.puzzle.source import soundness
from trailmark.types import Episode, Scored, Task, Turn

HAND = read_puzzle("mq gm gC km mu qB hq hA im iD\nk?\n")[0]
LOOSE = Walker(errors=0.2, detours=0.1, leaps=0.1, slips=0.2, free=3)


@pytest.mark.parametrize("seed", range(10))
def test_what_comes_after_is_what_a_way_leads_to(seed):
    """Any clues, cycles too, against Warshall's loops; the path against all ways in order of their length."""
    draw = random.Random(seed)
    clues = tuple({tuple(draw.sample("abcdAB", 2)) for _ in range(8)})
    puzzle = Puzzle("a", clues)
    items = sorted({x for pair in clues for x in pair})
    reach = {(a, b): (a, b) in clues for a in items for b in items}
    for k, a, b in product(items, repeat=3):
        reach[a, b] |= reach[a, k] and reach[k, b]
    assert {(a, b) for a in items for b in puzzle.after[a]} == {pair for pair, yes in reach.items() if yes}
    assert not puzzle.entails("z", "a") and not puzzle.entails("a", "z")
    right = [k for k, x in enumerate("ABCD") if reach.get(("a", x))]
    if len(right) != 1:
        with pytest.raises(TaskError, match=f"{len(right)} options come after 'a': there must be one."):
            _ = puzzle.label
        return
    rest = [x for x in items if x != "a"]
    ways = [("a", *inner, "ABCD"[right[0]]) for n in range(5) for inner in permutations(rest, n)]
    good = [w for w in ways if all(pair in clues for pair in pairwise(w))]
    assert puzzle.label == right[0] and len(puzzle.path) == len(good[0]) and puzzle.path in good


def test_the_parts_of_a_puzzle():
    """Ups lead nowhere, downs come after nothing, and each wrong option comes after a down of its own."""
    for level, seed in product(LEVELS, range(8)):
        p = make_puzzle(random.Random(seed), level)
        later, path = {b for _, b in p.clues}, p.path
        downs = {a for a, _ in p.clues} - later - {p.start}
        ups = later - {a for a, _ in p.clues} - set("ABCD")
        assert len(ups) == LEVELS[level][1] and len(downs) == 3
        wrong = [x for x in "ABCD" if x != path[-1]]
        assert sorted(b for a, b in p.clues if a in downs and b in wrong) == wrong
        for d in downs:
            assert {b for a, b in p.clues if a == d} - set(wrong) <= set(path[1:-1])
            assert not any(d in later_ for later_ in p.after.values())
        for at in path[:-1]:
            ahead, up, down = neighbours(p, at)
            assert ahead == [(at, path[path.index(at) + 1])] and set(up) <= ups and set(down) == downs


def states(puzzle, policy, most):
    """Every beginning of at most so many lines that the policy may write."""
    now = [()]
    for _ in range(most):
        yield from now
        now = [(*s, line) for s in now if not (s and s[-1].startswith("Finish")) for line in policy.next(puzzle, s)]
    yield from now


def test_a_value_is_the_mean_of_the_values_behind_the_next_line():
    seen = {}
    for begun in states(HAND, LOOSE, 3):
        value, unseen = exact_value(HAND, begun, LOOSE)
        assert unseen == 0.0 and 0 <= value <= 1
        if begun and begun[-1].startswith("Finish"):
            assert value == float(begun[-1] == "Finish[B]")
            continue
        found = LOOSE.next(HAND, begun)
        assert sum(found.values()) == pytest.approx(1, abs=1e-12)
        mean = sum(p * exact_value(HAND, (*begun, line), LOOSE)[0] for line, p in found.items())
        assert value == pytest.approx(mean, abs=1e-12)
        key = LOOSE.key(HAND, begun)  # the same key: the same next lines, and the same value
        assert seen.setdefault(key, (found, pytest.approx(value, abs=1e-12))) == (found, value)
    assert len(seen) > 10


@pytest.mark.parametrize("turn", [1, 5])
def test_names_of_items_do_not_matter(turn):
    """Other letters and other options: the same values and the same true steps."""
    puzzle = make_puzzle(random.Random(turn), 2)
    letters = "abcdefghijkl"
    other = dict(zip(letters, letters[turn:] + letters[:turn])) | dict(zip("ABCD", "BCDA"))
    say = lambda line: f"Finish[{other[line[7]]}]" if line.startswith("Finish") else "".join(other[x] for x in line)
    renamed = Puzzle(other[puzzle.start], tuple((other[a], other[b]) for a, b in puzzle.clues))
    policy = Walker(errors=0.3, detours=0.1, slips=0.1, free=3)
    for begun in list(states(puzzle, policy, 2)):
        moved = tuple(map(say, begun))
        assert exact_value(renamed, moved, policy)[0] == pytest.approx(exact_value(puzzle, begun, policy)[0], abs=1e-12)
        if not (begun and begun[-1].startswith("Finish")):
            a, b = exact_soundness(puzzle, begun, policy), exact_soundness(renamed, moved, policy)
            assert a == pytest.approx(b, abs=1e-12)
        for direct in (False, True):
            truth = [true_step_values(q, "\n".join(x), direct=direct) for q, x in ((puzzle, begun), (renamed, moved))]
            assert truth[0] == truth[1]


def test_values_at_the_ends_of_the_rates():
    assert exact_value(HAND, [], Walker())[0] == 1.0 and exact_soundness(HAND, [], Walker()) == 1.0
    assert exact_value(HAND, [], Walker(slips=1.0))[0] == 0.0
    assert exact_value(HAND, [], Walker(leaps=1.0))[0] == pytest.approx(0.25)  # a guess among four
    assert exact_soundness(HAND, [], Walker(leaps=1.0)) == pytest.approx(0.25)
    assert exact_soundness(HAND, [], Walker(errors=1.0)) == 0.0
    assert exact_value(HAND, ["km"], Walker(), most=3)[0] == 0.0  # three lines hold no answer
    assert exact_value(HAND, ["km"], Walker(), most=4)[0] == 1.0
    values = [exact_value(HAND, [], Walker(slips=s / 10))[0] for s in range(11)]
    assert values == pytest.approx([1 - s / 10 for s in range(11)])


def test_what_is_direct_is_sound():
    """Every solution of up to three lines out of eight."""
    lines = ["km", "mq", "qB", "kq", "kB", "mg", "Finish[B]", "Finish[C]"]
    for n in range(1, 4):
        for some in product(lines, repeat=n):
            text = "\n".join(some)
            sound, direct = (true_step_values(HAND, text, direct=d).steps for d in (False, True))
            assert len(sound) == len(direct) == n and all(d <= s for s, d in zip(sound, direct))
            assert sound == tuple(float(x not in ("mg", "Finish[C]")) for x in some)
            for k, x in enumerate(some):
                if x in ("km", "mq", "qB", "kq"):  # clues, and kq by one inference from km and mq
                    assert direct[k] == 1.0
                if x == "kB":  # needs kq, which no clue says
                    assert direct[k] == float("kq" in some[:k])
                if x == "Finish[B]":  # the lines themselves must lead from k to B
                    shown = {y for y, d in zip(some[:k], direct) if d}
                    ways = ({"kB"}, {"kq", "qB"}, {"km", "mq", "qB"})
                    assert direct[k] == float(any(way <= shown for way in ways))


def test_where_a_solution_stands():
    assert item_of(HAND, []) == "k" and item_of(HAND, ["km", "so", "Finish[A]"]) == "m"
    assert item_of(HAND, ["km", "mz"]) == "m"  # z is no item
    assert neighbours(HAND, "u")[0] == [("m", "q")]  # from an up on at the item that it left
    assert neighbours(HAND, "g") == ([("g", "m"), ("g", "C")], [], [])


def test_lines_in_both_forms():
    lines = ["km", "mq", "qB", "Finish[B]"]
    assert written(lines, "short") == "km\nmq\nqB\nFinish[B]"
    assert written(lines, "react") == " km\nThought 2: mq\nThought 3: qB\nAction 4: Finish[The answer is B.]"
    for done in range(1, 4):
        head, tail = written(lines[:done], "react"), written(lines[done:], "react", done)
        assert f"{head}\n{tail}" == written(lines, "react")
    assert read_lines("Finish[The answer is A or B.]\n\n so ", "short") == ["Finish[The answer is A or B.]", "so"]


def test_splits_by_hash():
    texts = [make_puzzle(random.Random(k), 1).text for k in range(600)]
    counts = {s: sum(split_of(t) == s for t in texts) for s in SPLITS}
    assert sum(counts.values()) == 600 and 430 < counts["train"] < 530 and min(counts.values()) > 30
    for split in SPLITS:
        assert all(split_of(t.data["puzzle"]) == split for t in get_task("puzzle", level=2).tasks(split, 10, 3))


def test_the_world_and_its_mistakes():
    source = get_task("puzzle", level=1)
    world, task = source.make(), source.tasks("train", 1, 0)[0]
    world.reset(task)
    step = world.step("I do not know")
    assert (step.reward, step.info, step.terminated) == (0.0, {"answer": "", "reason": "invalid", "sound": 0.0}, True)
    with pytest.raises(TaskError, match="this puzzle is answered; call reset before the next step."):
        world.step("km")
    with pytest.raises(TaskError, match="task 't' needs data 'puzzle', the text of one."):
        world.reset(Task("t"))
    with pytest.raises(TaskError, match="this is no order puzzle: 'km'"):
        world.reset(Task("t", data={"puzzle": "km"}))
    said = lambda text, data: Episode("e", Task("t", data=data), "g", (Turn("policy", (1,), (2,), text=text),),
                                      {"self": Scored(0.0, False)})  # fmt: skip
    assert soundness(said("km\nmg", {"puzzle": HAND.text})) == 0.5 and soundness(said("km", {})) is None
    react = said(" km\nThought 2: mg\nThought 3: gm", {"puzzle": HAND.text, "form": "react"})
    assert soundness(react) == pytest.approx(2 / 3)
    assert soundness(said("", {"puzzle": HAND.text})) is None
