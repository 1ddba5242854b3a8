import pytest

from trailmark.errors import DataError
from trailmark.methods.reflect.explore.records import Record
from trailmark.methods.reflect.explore.split import check_by, place, split_records

MANY = [Record("r", f"question {i}", f"f{i}.py") for i in range(1000)]


def names(parts):
    return {r.key: part for part, records in parts.items() for r in records}


def test_by_hash():
    """Shares within the noise of 1,000 draws, the same for the same seed, and nobody moves when others come."""
    parts = split_records(MANY, 3)
    assert [len(parts[p]) for p in ("train", "validate", "test")] == [695, 197, 108]
    assert names(parts) == names(split_records(list(reversed(MANY)), 3)) and len(names(parts)) == 1000
    assert {k: v for k, v in names(parts).items() if k in {r.key for r in MANY[:400]}} == names(
        split_records(MANY[:400], 3)
    )
    assert names(parts) != names(split_records(MANY, 4))
    assert all(r.split == part for part, records in parts.items() for r in records)


def test_exact_shares():
    parts = split_records(MANY, 3, "exact")
    assert [len(p) for p in parts.values()] == [700, 200, 100]
    assert [len(p) for p in split_records(MANY[:10], 3, "exact").values()] == [7, 2, 1]
    low = max(place(3, r.key) for r in parts["train"])
    assert low < min(place(3, r.key) for r in parts["validate"])


def test_as_given():
    told = [
        Record("r", "q", f"{i}.py", split=s) for i, s in enumerate(["train", "valid_seen", "visible_test", "train"])
    ]
    assert [len(p) for p in split_records(told, 0, "given").values()] == [2, 1, 1]
    with pytest.raises(DataError, match="says split 'other'"):
        split_records([Record("r", "q", "t.py", split="other")], 0, "given")
    with pytest.raises(DataError, match="no split method 'hsh'. Did you mean 'hash'"):
        check_by("hsh")
