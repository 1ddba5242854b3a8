"""What OREO and the preference methods read, leave out, cut into steps, pair and collect."""

import json

import numpy as np
import pytest

from trailmark.engines.scripted import ScriptedEngine
from trailmark.episodes import by_group, won
from trailmark.errors import DataError
from trailmark.formats import read
from trailmark.methods.offline import read_scored
from trailmark.methods.oreo.data import (
    balanced,
    collect,
    collect_balanced,
    trajectory_samples,
)
from trailmark.methods.preference import labelled_samples, pair_samples, preference_pairs, stored_pairs
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat
from trailmark.runs.store import read_segment
from trailmark.tasks.base import Observation, Step
from trailmark.types import Episode, Failed, Invalid, Scored, Task, Turn

TOKENIZER = tiny_tokenizer()


def lines(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return [str(path)]


def episode(name, group, reward, success=None):
    return Episode(name, Task(group), group, (Turn("policy", (1,), (2, 3)),), {"self": Scored(reward, success)})


# --- reading ------------------------------------------------------------------------------------------------------


def test_rows_that_teach_nothing_are_left_out_and_counted(tmp_path):
    files = lines(
        tmp_path / "t.jsonl",
        [
            {"prompt": "1+1=", "response": "2", "reward": 1},
            {"prompt": "1+2=", "response": "", "reward": 0},
            {"prompt": "x" * 60, "response": "2", "reward": 1},
            {"prompt": "1+3=", "response": "y" * 60, "reward": 1},
            {"prompt": "1+4=", "response": "5"},
            {"prompt": "1+5=", "response": "6", "reward": 0.0},
        ],
    )
    found = read_scored(files, "trajectories", TOKENIZER, "policy", 50)
    assert [e.task.data["prompt"] for e in found.episodes] == ["1+1=", "1+5="]
    assert found.skipped == {"empty": 1, "too_long": 2, "no_reward": 1}
    assert all(np.isfinite(x).all() for s in trajectory_samples(found.episodes) for x in s.streams.values())


def test_an_agent_that_never_acts(tmp_path):
    say = lambda *said: [{"role": r, "content": c} for r, c in zip(("user", "assistant") * 4, said)]
    rows = [
        {"conversations": say("Be good.", "OK", "You see a door.", "open it", "It is open.", "go"), "reward": 1},
        {"conversations": say("Be good.", "OK", "You see a door."), "reward": 0},
    ]
    path = tmp_path / "agent.json"
    path.write_text(json.dumps(rows))
    found = read_scored([str(path)], "agent", TOKENIZER, "policy", 500)
    assert len(found.episodes) == 1 and found.skipped == {"no_action": 1}
    (sample,) = trajectory_samples(found.episodes)
    acted = [t for t, w in zip(sample.tokens, sample.streams["action"]) if w]
    assert TOKENIZER.decode(acted) == "open it<|im_end|>go<|im_end|>"  # neither "OK" nor an observation
    with pytest.raises(DataError, match=r"agent\.json.*no row can be used"):
        path.write_text(json.dumps(rows[1:]))
        read_scored([str(path)], "agent", TOKENIZER, "policy", 500)


def test_a_broken_row_is_an_error_all_the_same(tmp_path):
    files = lines(tmp_path / "t.jsonl", [{"prompt": "a", "response": "b", "reward": 1}, {"prompt": "a", "reward": 1}])
    with pytest.raises(DataError, match=r"t\.jsonl:2.*'response'"):
        read_scored(files, "trajectories", TOKENIZER, "policy", 50)
    files = lines(tmp_path / "u.jsonl", [{"prompt": "a", "response": "b" * 90, "reward": 1}])
    with pytest.raises(DataError, match="1 too_long"):
        read_scored(files, "trajectories", TOKENIZER, "policy", 50)


def test_turns_that_share_no_sequence_are_refused(tmp_path):
    from trailmark.formats import write

    turns = (Turn("policy", (1,), (2,)), Turn("policy", (1, 5), (3,)))
    write("episodes", tmp_path / "e.jsonl", [Episode("e0", Task("t"), "g", turns, {"self": Scored(1.0)})], TOKENIZER)
    with pytest.raises(DataError, match="one growing conversation"):
        read_scored([str(tmp_path / "e.jsonl")], "episodes", TOKENIZER, "policy", 50)
    one = (Turn("policy", (1,), (2,)), Turn("policy", (5,), (3,), continues=0))
    both = [Episode(f"e{k}", Task("t"), "g", t, {"self": Scored(1.0)}) for k, t in enumerate((turns, one))]
    write("episodes", tmp_path / "both.jsonl", both, TOKENIZER)
    found = read_scored([str(tmp_path / "both.jsonl")], "episodes", TOKENIZER, "policy", 50)
    assert [e.id for e in found.episodes] == ["e1"] and found.skipped == {"several_sequences": 1}
    with pytest.raises(DataError, match="1 several_sequences, 1 too_long"):
        read_scored([str(tmp_path / "both.jsonl")], "episodes", TOKENIZER, "policy", 2)


def test_several_files_of_one_kind(tmp_path):
    row = [{"prompt": "a", "response": "b", "reward": 1}]
    files = lines(tmp_path / "a.jsonl", row) + lines(tmp_path / "b.jsonl", row)
    assert len({e.id for e in read_scored(files, "trajectories", TOKENIZER, "policy", 50).episodes}) == 2


def test_one_bos_and_stored_tokens_as_they_are(tmp_path):
    """A tokenizer that adds a BOS adds one, also where the text brings it; what has tokens is never encoded again."""
    from tokenizers import processors

    from trailmark.formats import write

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert tokenizer("a")["input_ids"] == [bos, *tokenizer("a", add_special_tokens=False)["input_ids"]]
    rows = [{"prompt": p, "response": "b", "reward": 1} for p in ("a", "<|endoftext|>a")]
    found = read_scored(lines(tmp_path / "t.jsonl", rows), "trajectories", tokenizer, "policy", 50)
    for s in trajectory_samples(found.episodes):
        assert s.tokens.tolist().count(bos) == 1 and s.tokens[0] == bos
    odd = Episode("e", Task("t"), "g", (Turn("policy", (65, 66), (3, 3, 9), text="never"),), {"self": Scored(1.0)})
    write("episodes", tmp_path / "e.jsonl", [odd], tokenizer)
    (same,) = read_scored([str(tmp_path / "e.jsonl")], "episodes", tokenizer, "policy", 50).episodes
    assert trajectory_samples([same])[0].tokens.tolist() == [65, 66, 3, 3, 9]


# --- masks --------------------------------------------------------------------------------------------------------


def test_masks_of_the_specification():
    """S S S A A S S A A A: a state is the moment before an action, which we write at the action itself."""
    turns = (Turn("policy", (7, 7, 7), (1, 1)), Turn("policy", (7, 7), (1, 1, 1), continues=0))
    e = Episode("e", Task("t"), "g", turns, {"self": Scored(1.0)})
    (token,), (step,) = trajectory_samples([e]), trajectory_samples([e], states="step")
    assert (token.streams["action"] > 0).astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert (
        token.streams["weight"].tolist() == token.streams["action"].tolist() == [0, 0, 0, 0.2, 0.2, 0, 0, 0.2, 0.2, 0.2]
    )
    assert step.streams["weight"].tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0.5, 0, 0]
    assert step.streams["action"].tolist() == token.streams["action"].tolist()
    assert token.streams["first"].tolist() == token.streams["won"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert token.mass == step.mass == {"action": 1.0, "weight": 1.0, "first": 1.0, "won": 1.0}
    (whole,) = trajectory_samples([e], states="step", mean="token", mul=2.0, add=-1.0)
    assert whole.mass["weight"] == 2.0 and whole.streams["weight"].sum() == 2.0 and whole.streams["reward"].max() == 1.0
    (lost,) = trajectory_samples([Episode("e", Task("t"), "g", turns, {"self": Scored(0.0)})], mul=2.0, add=-1.0)
    assert lost.mass["won"] == 0.0 and set(lost.streams["reward"][lost.streams["action"] > 0]) == {-1.0}


def test_masked_text_is_the_response_and_its_end(tmp_path):
    files = lines(tmp_path / "t.jsonl", [{"prompt": "what? ", "response": "this\nthat", "reward": 1}])
    (s,) = trajectory_samples(read_scored(files, "trajectories", TOKENIZER, "policy", 50).episodes)
    assert TOKENIZER.decode(s.tokens[s.streams["action"] > 0]) == "this\nthat<|im_end|>"


# --- steps --------------------------------------------------------------------------------------------------------


# --- builders -----------------------------------------------------------------------------------------------------


def some(group, good, bad):
    return [episode(f"{group}/{k}", group, float(k < good)) for k in range(good + bad)]


@pytest.mark.parametrize(
    ("good", "bad", "cap", "count"), [(3, 4, None, 12), (3, 4, 6, 6), (2, 1, 6, 2), (5, 0, 6, 0), (0, 5, 6, 0)]
)
def test_pairs(good, bad, cap, count):
    pairs = preference_pairs(some("a", good, bad), cap)
    assert len(pairs) == len({(a.id, b.id) for a, b in pairs}) == count == min(cap or 99, good * bad)
    assert all(won(a) and not won(b) for a, b in pairs)


def test_pairs_stay_in_their_group_and_depend_on_the_seed():
    both = some("a", 4, 4) + some("b", 4, 4) + some("c", 2, 0)
    pairs = preference_pairs(both, 5, seed=1)
    assert len(pairs) == 10 and all(a.group == b.group for a, b in pairs) and {a.group for a, _ in pairs} == {"a", "b"}
    assert pairs == preference_pairs(both, 5, seed=1) != preference_pairs(both, 5, seed=2)
    assert [len(g) for g in by_group(both).values()] == [8, 8, 2] and sum(map(won, both)) == 10
    samples = pair_samples(pairs)
    assert [s.role for s in samples[:2]] == ["chosen", "rejected"] and len({s.unit for s in samples}) == 10
    assert sum(s.mass["weight"] for s in samples) == 10


def test_labels_for_kto():
    samples = labelled_samples(some("a", 1, 2))
    assert [s.role for s in samples] == ["desirable", "undesirable", "undesirable"]
    assert all(s.mass == {"weight": 1.0} and s.streams["weight"].tolist() == [0, 1, 1] for s in samples)


def test_stored_pairs(tmp_path):
    path = tmp_path / "p.jsonl"
    lines(path, [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e", "rejected": "f" * 99}])
    found = read_scored([str(path)], "pairs", TOKENIZER, "policy", 50)
    assert found.skipped == {"too_long": 1} and len(found.episodes) == 3
    ((a, b),) = stored_pairs(found.episodes)
    assert (a.turns[0].text, b.turns[0].text) == ("b", "c")
    assert len(stored_pairs(read("pairs", path, TOKENIZER).episodes)) == 2


def test_success_is_what_the_world_says():
    assert won(episode("e", "g", 0.2)) and not won(episode("e", "g", 0.0)) and not won(episode("e", "g", -1.0))
    assert not won(episode("e", "g", 0.2, success=False)) and won(episode("e", "g", 0.0, success=True))
    assert not won(Episode("e", Task("t"), "g", (), {"self": Invalid("x")}))


# --- collection ---------------------------------------------------------------------------------------------------


class Coin:
    """Says 'yes' is right; what a scripted player says with probability p of its task."""

    name, markov = "coin", True

    def tasks(self, split="train", n=None, seed=0):
        return [Task(f"p{p}", data={"p": p}) for p in (0.0, 0.1, 0.5, 0.9, 1.0)]

    def make(self):
        return self.__class__()

    def reset(self, task):
        return Observation(str(task.data["p"]))

    def step(self, action):
        return Step(Observation(""), float(action == "yes"), True, False, Scored(float(action == "yes")))


def seats():
    policy = lambda prompt, draw: "yes" if draw.random() < float(prompt) else "no"
    return [Seat("policy", ScriptedEngine(policy, TOKENIZER))]


def test_collect(tmp_path):
    episodes = read_segment(collect(tmp_path / "1.jsonl", Coin(), Coin().tasks(), seats(), n=6, seed=3, prefix="1:"))
    assert [e.group for e in episodes[:6]] == ["1:p0.0"] * 6 and len(episodes) == 30
    assert len({e.id for e in episodes}) == 30
    assert [sum(won(e) for e in g) for g in by_group(episodes).values()][::4] == [0, 6]


def test_balanced_collection(tmp_path):
    """p = 0: four wrong ones, none right. p = 1: one right one (max(wrong, 1)). Between: never more right than
    wrong."""
    played = []

    class Counted(Coin):
        def step(self, action):
            played.append(action)
            return super().step(action)

    episodes = read_segment(
        collect_balanced(tmp_path / "1.jsonl", Counted(), Coin().tasks(), seats(), rounds=16, want=4)
    )
    counts = {g: (sum(map(won, plays)), sum(not won(e) for e in plays)) for g, plays in by_group(episodes).items()}
    assert counts["p0.0"] == (0, 4) and counts["p1.0"] == (1, 0)
    assert counts["p0.5"] == (4, 4)
    for good, bad in counts.values():
        assert good <= max(bad, 1) and good <= 4 and bad <= 4
    assert len(played) < 5 * 16  # a task that has enough is not played on
    assert len({e.id for e in episodes}) == len(episodes)
    assert read_segment(collect_balanced(tmp_path / "2.jsonl", Coin(), Coin().tasks(), seats())) == episodes


class Stopped(BaseException):
    """Nobody catches it on the way. (A KeyboardInterrupt would also break the event loop in the middle.)"""


@pytest.mark.parametrize("way", [collect, collect_balanced])
def test_a_collection_that_was_stopped_plays_the_rest_only(tmp_path, way):
    """Stopped in its fourteenth play, in the middle of writing a line: thirteen plays are kept, and the bytes are those
    of a collection that was never stopped."""
    whole = way(tmp_path / "whole" / "1.jsonl", Coin(), Coin().tasks(), seats())
    played, path = [], tmp_path / "1.jsonl"

    class Stops(Coin):
        stop = True

        def step(self, action):
            if self.stop and len(played) == 13:
                raise Stopped
            played.append(action)
            return super().step(action)

    with pytest.raises(Stopped):
        way(path, Stops(), Coin().tasks(), seats())
    kept = path.with_name("1.partial.jsonl")
    assert len(kept.read_bytes().splitlines()) == 13 and not path.exists()
    kept.write_bytes(kept.read_bytes() + b'{"id": "half')
    Stops.stop = False
    way(path, Stops(), Coin().tasks(), seats())
    total = []

    class Counts(Coin):
        def step(self, action):
            total.append(action)
            return super().step(action)

    way(tmp_path / "count.jsonl", Counts(), Coin().tasks(), seats())
    assert path.read_bytes() == whole.read_bytes() and not kept.exists() and len(played) == len(total)


@pytest.mark.parametrize(
    ("good", "bad", "kept"),
    [(9, 9, (4, 4)), (9, 2, (2, 2)), (9, 0, (1, 0)), (2, 9, (2, 4)), (0, 9, (0, 4)), (0, 0, (0, 0))],
)
def test_balanced_counts(good, bad, kept):
    plays = some("a", good, bad)
    chosen = balanced([*plays, Episode("f", Task("t"), "a", (), {"self": Failed("x")})], 4, seed=5)
    assert (sum(map(won, chosen)), sum(not won(e) for e in chosen)) == kept
    assert len({e.id for e in chosen}) == len(chosen) and chosen == [e for e in plays if e in chosen]
