"""Items made on demand, and episodes read one at a time: in any order the same, and never more memory than allowed."""

import json

import numpy as np
import pytest

from trailmark import formats
from trailmark.errors import DataError
from trailmark.formats import on_demand
from trailmark.formats.episode_file import StoredFile
from trailmark.formats.on_demand import OnDemand
from trailmark.models.tiny import tiny_tokenizer
from trailmark.runs.episode_json import to_json
from trailmark.types import Annotation

TOKENIZER = tiny_tokenizer()


def test_items_are_kept_up_to_a_limit_and_made_again_beyond_it(monkeypatch):
    monkeypatch.setattr(on_demand, "LIMIT", 25)
    asked = []
    found = OnDemand(6, lambda i: asked.append(i) or f"item {i}", lambda item: 10)
    assert list(found) == [f"item {i}" for i in range(6)] == list(found)
    assert asked == [0, 1, 2, 3, 4, 5, 3, 4, 5]  # the third goes over the limit, and is the last that is kept
    assert found[-1] == "item 5" and found[np.int64(2)] == "item 2" and found[1:6:2] == ["item 1", "item 3", "item 5"]
    assert found[4:2] == [] and found[::-1] == [f"item {i}" for i in (5, 4, 3, 2, 1, 0)]
    for i in (6, -7):
        with pytest.raises(IndexError, match=f"item {i} of 6"):
            found[i]


def test_nothing_is_kept_without_a_weight_and_a_change_takes_the_place():
    asked = []
    plain = OnDemand(2, lambda i: asked.append(i) or [i])
    assert plain[0] == plain[0] == [0] and asked == [0, 0]
    heavy = OnDemand(3, lambda i: asked.append(i) or [i], lambda item: 1)
    heavy.keep(1, ["given"])
    asked.clear()
    assert heavy[1] == ["given"] and heavy[0] is heavy[0] and asked == [0]
    changed = heavy.then(lambda item: [*item, "changed"])
    asked.clear()
    assert list(changed) == [[i, "changed"] for i in range(3)] == list(changed) and asked == [0, 1, 2]
    assert len(heavy) == 3 and heavy[0] == [0] and heavy[0] is not heavy[0]  # the first one no longer keeps anything


ROWS = [
    {"prompt": "1+1=", "response": "2", "reward": 1},
    {"prompt": "2+2=", "response": "4", "reward": 1},
    {"prompt": "1+1=", "response": "3", "reward": 0},  # a second play of the first start
    {"prompt": "", "response": "x", "reward": 0},  # nothing to answer
    {"prompt": "1+1=", "response": "größer <|im_end|>", "reward": 0},
]


@pytest.mark.parametrize("fits", [True, False])
def test_rows_read_backwards_are_those_of_the_whole_file(tmp_path, fits):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    whole = formats.read("trajectories", path, TOKENIZER, skip_bad=True)
    stored, seen = StoredFile("trajectories", path, TOKENIZER, "policy"), {}
    wrong = stored.survey(lambda e: fits, lambda i, made: seen.update({i: made.episodes}))
    assert wrong == whole.skipped and len(wrong) == 1 and f"{path}:4" in wrong[0]
    assert sorted(seen) == [0, 1, 2, 4] and [e.id for i in seen for e in seen[i]] == [e.id for e in whole.episodes]
    got = [to_json(e) for i in (4, 2, 1, 0) for e in stored.read(i)]
    assert got == [to_json(e) for e in reversed(whole.episodes)]
    assert len({e.group for e in whole.episodes}) == 2  # three plays of one start, one of another
    # A text that surely fits is only measured. Row 4 holds a control token, so its tokens must be counted.
    measured = [i for i in seen if isinstance(seen[i][0].turns[0].tokens, range)]
    assert measured == ([0, 1, 2] if fits else []) and seen[4] == stored.read(4)
    for i, made in seen.items():
        for a, b in zip(made, stored.read(i), strict=True):
            assert [t.text for t in a.turns] == [t.text for t in b.turns]
            assert all(len(x.tokens) >= len(y.tokens) for x, y in zip(a.turns, b.turns))


def test_our_own_files_line_by_line(tmp_path):
    source = tmp_path / "t.jsonl"
    source.write_text("".join(json.dumps(ROWS[i]) + "\n" for i in (0, 1, 2)))
    episodes = formats.read("trajectories", source, TOKENIZER).episodes
    path = tmp_path / "own.jsonl"
    notes = [Annotation(episodes[1].id, "mark", "episode", (1.0,))]
    formats.write("episodes", path, episodes, None, annotations=notes)
    stored, seen = StoredFile("episodes", path, None, "policy"), []
    assert stored.survey(lambda e: False, lambda i, made: seen.extend(made.episodes)) == () and seen == episodes
    assert [stored.read(i)[0] for i in (2, 0)] == [episodes[2], episodes[0]]
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])  # the first episode is gone, and no note is about it
    StoredFile("episodes", path, None, "policy").survey(lambda e: True, lambda i, made: None)
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])
    with pytest.raises(DataError) as found:
        StoredFile("episodes", path, None, "policy").survey(lambda e: True, lambda i, made: None)
    beside = tmp_path / "own.annotations.jsonl"
    assert str(found.value) == f"{beside}:1: key 'episode': is '{episodes[1].id}', which own.jsonl does not hold."
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError) as found:
        StoredFile("episodes", path, None, "policy").survey(lambda e: True, lambda i, made: None)
    assert str(found.value) == f"{path}:1: line 1 is cut off: it does not end with a newline."
