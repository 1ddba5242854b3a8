"""Order puzzles: closures, policies and exact values against plain enumerations, and what renaming does not change."""

import random
from itertools import pairwise, permutations, product

import pytest

from trailmark.errors import TaskError
from trailmark.tasks import get_task
from trailmark.tasks.puzzle.orders import (
    LEVELS,
    Puzzle,
    make_puzzle,
    read_lines,
    read_puzzle,
    true_step_values,
    written,
)
from trailmark.tasks.puzzle.policies import Walker, exact_value, item_of
from trailmark.tasks.puzzle.source import soundness
from trailmark.tasks.splits import SPLITS, split_of
from trailmark.types import Episode, Scored, Task, Turn

HAND = read_puzzle("ab. bfa cD. dC. ebc fBd\ne?\n")[0]
LOOSE = Walker(errors=0.3, leaps=0.1, slips=0.2, free=3)


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_after_is_what_a_way_leads_to(seed):
    """Any clues, cycles too, against Warshall's loops; the path against all ways in order of their length."""
    draw = random.Random(seed)
    some = lambda x, others: draw.choice([y for y in others if y != x])
    puzzle = Puzzle("a", tuple(x + some(x, "abcdAB") + some(x, "abcd..") for x in "abcd"))
    clues = {(x, y) for x, y, _ in puzzle.entries} | {(z, x) for x, _, z in puzzle.entries if z != "."}
    assert set(puzzle.clues) == clues and len(puzzle.clues) == len(clues)
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
    """Downs come after nothing; each leads back to its item or to a wrong option, about half of them to either."""
    back = []
    for level, seed in product(LEVELS, range(30)):
        p = make_puzzle(random.Random(seed), level)
        path, downs = p.path, set(p.later) - set(p.path)
        assert len(path) == LEVELS[level] + 1 and len(downs) == LEVELS[level] and path[-1] in "ABCD"
        assert [p.later[x] for x in path[:-1]] == list(path[1:]) and {p.earlier[x] for x in path[:-1]} == downs
        assert not downs & set(p.earlier) and not any(downs & after for after in p.after.values())
        wrong = set("ABCD") - {path[-1]}
        for x in path[:-1]:
            assert p.later[p.earlier[x]] in wrong | {x}
            back.append(p.later[p.earlier[x]] == x)
    assert 0.4 < sum(back) / len(back) < 0.6


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
    assert len(seen) == 9


@pytest.mark.parametrize("turn", [1, 5])
def test_names_of_items_do_not_matter(turn):
    """Other letters and other options: the same values and the same true steps."""
    puzzle = make_puzzle(random.Random(turn), 2)
    letters = "abcdefghijklmn"
    other = dict(zip(letters, letters[turn:] + letters[:turn])) | dict(zip("ABCD", "BCDA"))
    say = lambda line: f"Finish[{other[line[7]]}]" if line.startswith("Finish") else "".join(other[x] for x in line)
    other["."] = "."
    renamed = Puzzle(other[puzzle.start], tuple("".join(other[x] for x in entry) for entry in puzzle.entries))
    policy = Walker(errors=0.3, slips=0.1, free=3)
    for begun in list(states(puzzle, policy, 2)):
        moved = tuple(map(say, begun))
        assert exact_value(renamed, moved, policy)[0] == pytest.approx(exact_value(puzzle, begun, policy)[0], abs=1e-12)
        for direct in (False, True):
            truth = [true_step_values(q, "\n".join(x), direct=direct) for q, x in ((puzzle, begun), (renamed, moved))]
            assert truth[0] == truth[1]


def test_values_at_the_ends_of_the_rates():
    assert exact_value(HAND, [], Walker())[0] == 1.0
    assert exact_value(HAND, [], Walker(slips=1.0))[0] == 0.0
    assert exact_value(HAND, [], Walker(leaps=1.0))[0] == pytest.approx(0.25)  # a guess among four
    assert exact_value(HAND, ["eb"], Walker(), most=3)[0] == 0.0  # three lines hold no answer
    assert exact_value(HAND, ["eb"], Walker(), most=4)[0] == 1.0
    values = [exact_value(HAND, [], Walker(slips=s / 10))[0] for s in range(11)]
    assert values == pytest.approx([1 - s / 10 for s in range(11)])


def test_what_is_direct_is_sound():
    """Every solution of up to three lines out of eight."""
    lines = ["eb", "bf", "fB", "ef", "eB", "ba", "Finish[B]", "Finish[C]"]
    for n in range(1, 4):
        for some in product(lines, repeat=n):
            text = "\n".join(some)
            sound, direct = (true_step_values(HAND, text, direct=d).steps for d in (False, True))
            assert len(sound) == len(direct) == n and all(d <= s for s, d in zip(sound, direct))
            assert sound == tuple(float(x not in ("ba", "Finish[C]")) for x in some)
            for k, x in enumerate(some):
                if x in ("eb", "bf", "fB", "ef"):  # clues, and ef by one inference from eb and bf
                    assert direct[k] == 1.0
                if x == "eB":  # needs ef, which no clue says
                    assert direct[k] == float("ef" in some[:k])
                if x == "Finish[B]":  # the lines themselves must lead from e to B
                    shown = {y for y, d in zip(some[:k], direct) if d}
                    ways = ({"eB"}, {"ef", "fB"}, {"eb", "bf", "fB"})
                    assert direct[k] == float(any(way <= shown for way in ways))


def test_where_a_solution_stands():
    assert item_of(HAND, []) == "e" and item_of(HAND, ["eb", "so", "Finish[A]"]) == "b"
    assert item_of(HAND, ["eb", "bz"]) == "b" and item_of(HAND, ["eb", "bA"]) == "A"  # z is no item
    assert Walker(errors=0.2).next(HAND, ["eb"]) == {"ba": 0.2, "bf": 0.8}
    assert Walker(errors=0.2).next(HAND, ["eb", "ba"]) == {"ab": 1.0}


def test_lines_in_both_forms():
    lines = ["eb", "bf", "fB", "Finish[B]"]
    assert written(lines, "short") == "eb\nbf\nfB\nFinish[B]"
    assert written(lines, "react") == " eb\nThought 2: bf\nThought 3: fB\nAction 4: Finish[The answer is B.]"
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
        world.step("eb")
    with pytest.raises(TaskError, match="task 't' needs data 'puzzle', the text of one."):
        world.reset(Task("t"))
    with pytest.raises(TaskError, match="this is no order puzzle: 'eb'"):
        world.reset(Task("t", data={"puzzle": "eb"}))
    said = lambda text, data: Episode("e", Task("t", data=data), "g", (Turn("policy", (1,), (2,), text=text),),
                                      {"self": Scored(0.0, False)})  # fmt: skip
    assert soundness(said("eb\nba", {"puzzle": HAND.text})) == 0.5 and soundness(said("eb", {})) is None
    react = said(" eb\nThought 2: ba\nThought 3: ab", {"puzzle": HAND.text, "form": "react"})
    assert soundness(react) == pytest.approx(2 / 3)
    assert soundness(said("", {"puzzle": HAND.text})) is None
