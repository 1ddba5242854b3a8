import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trailmark.config import RunConfig
from trailmark.errors import DataError, RecipeError, RunError
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.episode_json import from_json, to_json
from trailmark.runs.launch import launch
from trailmark.runs.store import (
    Run,
    append_line,
    read_annotations,
    read_episodes,
    read_metrics,
    read_segment,
    segments,
    truncate_metrics,
    truncate_segments,
    write_segment,
)
from trailmark.types import Annotation, Episode, Failed, Invalid, Parent, Player, SamplingLaw, Scored, Task, Turn

SMALL = Episode("e0", Task("t0"), "g0", (Turn("policy", (1, 2), (3,)),), {"policy": Scored(1.0)})
LINE = (
    '{"id":"e0","task":{"id":"t0"},"group":"g0","turns":[{"seat":"policy","prompt":[1,2],"tokens":[3]}],'
    '"outcomes":{"policy":{"kind":"scored","reward":1.0}}}'
)


def episode(name: str, **more) -> Episode:
    return Episode(name, Task("t"), "g", (), {"policy": Scored(0.5)}, **more)


# --- lines -------------------------------------------------------------------------------------------------------


def test_a_small_episode_is_this_line():
    assert to_json(SMALL) == LINE
    assert from_json(LINE) == SMALL


def test_a_full_episode_is_this_line():
    law = SamplingLaw(0.7, 0.9, 5, (4, 5), 1, (2,))
    turn = Turn(
        "a", (), (4, 5), (-0.5, -0.0), (-0.25, 0.0), law, (9,), 0, ((0, 1), (1, 2)), "stopped", "né\n", "go", -1.5, 3
    )
    whole = Episode(
        "e", Task("t", 7, {"x": [1, {"y": None}]}, {"gold": "ü"}), "g", (Turn("a", (1,), ()), turn),
        {"a": Scored(0.0, False), "b": Invalid("no answer"), "c": Failed("boom")}, True, True,
        {"a": Player("trained", "tiny", "main", 3)}, Parent("d", 1, 2), 11, {"why": True},
    )  # fmt: skip
    assert to_json(whole) == (
        '{"id":"e","task":{"id":"t","seed":7,"data":{"x":[1,{"y":null}]},"meta":{"gold":"ü"}},"group":"g","turns":['
        '{"seat":"a","prompt":[1],"tokens":[]},{"seat":"a","prompt":[],"tokens":[4,5],"logp":[-0.5,-0.0],'
        '"logq":[-0.25,0.0],"law":{"temperature":0.7,"top_p":0.9,"top_k":5,"allowed":[4,5],"min_tokens":1,'
        '"stop_ids":[2]},"forced":[9],"continues":0,"steps":[[0,1],[1,2]],"stop":"stopped","text":"né\\n","action":"go",'
        '"reward":-1.5,"version":3}],"outcomes":{"a":{"kind":"scored","reward":0.0,"success":false},'
        '"b":{"kind":"invalid","reason":"no answer"},"c":{"kind":"failed","error":"boom"}},"terminated":true,'
        '"truncated":true,"players":{"a":{"kind":"trained","model":"tiny","revision":"main","version":3}},'
        '"parent":{"episode":"d","turn":1,"token":2},"seed":11,"info":{"why":true}}'
    )
    assert from_json(to_json(whole)) == whole


def test_numpy_numbers_and_sign_of_zero():
    odd = Turn("a", (), (np.int64(3),), (np.float32(-0.5),), reward=-0.0)  # type: ignore[arg-type]
    back = from_json(to_json(Episode("e", Task("t"), "g", (odd,), {})))
    assert back.turns[0].logp == (-0.5,) and back.turns[0].tokens == (3,)
    assert str(back.turns[0].reward) == "-0.0"


ints, text = st.integers(-(2**70), 2**70), st.text(st.characters(), max_size=6)
floats = st.floats(allow_nan=False, allow_infinity=False)
surrogate = st.text(st.characters(categories=("Cs", "L")), max_size=4)
anything = st.recursive(
    st.none() | st.booleans() | ints | floats | text | surrogate,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(text, x, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(text | surrogate, anything, max_size=3)
tokens = st.lists(ints, max_size=4).map(tuple)
laws = st.builds(
    SamplingLaw,
    st.floats(0, 1e9),
    st.floats(1e-9, 1),
    st.integers(0, 2**31),
    st.none() | tokens.filter(bool),
    ints,
    tokens,
)


@st.composite
def turns(draw, index: int) -> Turn:
    wrote = draw(tokens)
    n = len(wrote)
    numbers = st.lists(floats, min_size=n, max_size=n).map(tuple) | st.just(())
    span = st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda s: (min(s), max(s)))
    return Turn(
        draw(text), draw(tokens), wrote, draw(numbers), draw(numbers), draw(laws), draw(tokens),
        draw(st.none() | st.integers(0, index - 1)) if index else None, draw(st.lists(span, max_size=2).map(tuple)),
        draw(st.sampled_from(["stopped", "length", ""])), draw(text), draw(st.none() | text), draw(floats), draw(ints),
    )  # fmt: skip


@st.composite
def episodes(draw) -> Episode:
    outcome = st.builds(Scored, floats, st.none() | st.booleans()) | st.builds(Invalid, text) | st.builds(Failed, text)
    kinds = st.sampled_from(["trained", "frozen", "remote", "scripted", "person"])
    return Episode(
        draw(text), Task(draw(text), draw(ints), draw(objects), draw(objects)), draw(text),
        tuple(draw(turns(i)) for i in range(draw(st.integers(0, 3)))), draw(st.dictionaries(text, outcome, max_size=2)),
        draw(st.booleans()), draw(st.booleans()), draw(st.dictionaries(text, st.builds(Player, kinds), max_size=2)),
        draw(st.none() | st.builds(Parent, text, ints, ints)), draw(ints), draw(objects),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(episodes())
def test_lines_round_trip_byte_for_byte(e):
    line = to_json(e)
    data = line.encode()  # every line is UTF-8
    assert b"\n" not in data
    back = from_json(data)
    assert to_json(back) == line
    assert (back.turns, back.outcomes, back.parent) == (e.turns, e.outcomes, e.parent)


@settings(max_examples=50, deadline=None)
@given(st.builds(Annotation, text, text, st.sampled_from(["token", "step", "turn", "episode"]),
                 st.lists(floats, max_size=4).map(tuple), st.none() | ints, text))  # fmt: skip
def test_annotations_round_trip(a):
    line = to_json(a)
    assert from_json(line, None, None, Annotation) == a
    assert to_json(from_json(line, None, None, Annotation)) == line


def test_surrogates_are_kept_and_pairs_joined():
    assert from_json(to_json(episode("a\ud800b"))).id == "a\ud800b"
    assert from_json(to_json(episode("\ud83d\ude00"))).id == "😀"


@pytest.mark.parametrize(
    ("bad", "key", "what"),
    [
        (Turn("a", (), (1,), (float("nan"),)), "turns.0.logp.0", "is nan; only finite numbers"),
        (Turn("a", (), (), reward=float("inf")), "turns.0.reward", "is inf"),
        (Turn("a", (), (1,), (-0.5, -0.5)), "turns.0.logp", "2 numbers for 1 tokens"),
        (Turn("a", (), (True,)), "turns.0.tokens.0", "must be a whole number, not True"),
        (Turn("a", (), (), continues=0), "turns.0.continues", "can only continue an earlier"),
        (Turn("a", (), (1,), steps=((0, 2),)), "turns.0.steps", "[0, 2] outside 1 tokens"),
        (Turn("a", (), (), stop="stoped"), "turns.0.stop", "Did you mean 'stopped'?"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_written_is_refused(bad, key, what):
    with pytest.raises(DataError) as e:
        to_json(Episode("e7", Task("t"), "g", (bad,), {}))
    assert f"key '{key}'" in str(e.value) and what in str(e.value) and "episode 'e7' was not written" in str(e.value)


def test_info_must_be_json():
    for info, what in [({"a": {1: 2}}, "keys must be text"), ({"a": {"b": {3}}}, "is a set"), ({"a": [np.nan]}, "nan")]:
        with pytest.raises(DataError, match=what):
            to_json(episode("e", info=info))


@pytest.mark.parametrize(
    ("old", "new", "key", "what"),
    [
        ('"group":"g0",', "", "group", "is missing"),
        ('"group"', '"gruop"', "gruop", "is not known. Did you mean 'group'?"),
        ('"seat"', '"saet"', "turns.0.saet", "Did you mean 'seat'?"),
        ("[1,2]", "[1,2.5]", "turns.0.prompt.1", "must be a whole number, not 2.5"),
        ("[1,2]", '"12"', "turns.0.prompt", "must be a list"),
        ('"scored"', '"scord"', "outcomes.policy.kind", "Did you mean 'scored'?"),
        ("1.0", "NaN", "", "holds NaN"),
        ("1.0", "1e999", "outcomes.policy.reward", "is inf"),
        ('"group":"g0"', '"group":"g0","id":"e1"', "id", "stands twice"),
        ('{"id":"t0"}', "3", "task", "must be an object, not 3"),
        ("}}}", "}}", "", "not valid JSON"),
        (LINE, "", "", "not valid JSON"),
        (LINE, "[" * 100_000, "", "nested too deeply"),
        (LINE, "[]", "", "must be an object"),
    ],
)
def test_odd_rows_name_file_line_and_key(tmp_path, old, new, key, what):
    assert old in LINE
    file = tmp_path / "000000.jsonl"
    file.write_text(LINE + "\n" + LINE.replace(old, new) + "\n" + LINE + "\n")
    with pytest.raises(DataError) as e:
        read_segment(file)
    assert str(e.value).startswith(f"{file}:2: " + (f"key '{key}': " if key else "")) and what in str(e.value)
    assert (e.value.file, e.value.line) == (file, 2)


def test_a_cut_last_line_and_bad_utf8_are_named(tmp_path):
    file = tmp_path / "000000.jsonl"
    for cut in (len(LINE) + 20, 2 * len(LINE) + 1):
        file.write_text((LINE + "\n" + LINE)[:cut])
        with pytest.raises(DataError, match=r"000000.jsonl:2: line 2 is cut off"):
            read_segment(file)
    file.write_bytes(b'{"id":"\xff"}\n')
    with pytest.raises(DataError, match=r"000000.jsonl:1: the line is not valid JSON"):
        read_segment(file)


# --- segments and metrics ----------------------------------------------------------------------------------------


def test_segments_are_read_in_order_and_temporaries_ignored(tmp_path):
    for i in (10, 2, 1_000_000):
        write_segment(tmp_path / "e", i, [episode(f"{i}a"), episode(f"{i}b")])
    (tmp_path / "e" / ".000011.jsonl.1-2.tmp").write_text("{")
    (tmp_path / "e" / "notes.txt").write_text("mine")
    assert [p.name for p in segments(tmp_path / "e")] == ["000002.jsonl", "000010.jsonl", "1000000.jsonl"]
    assert [e.id for e in read_episodes(tmp_path / "e")] == ["2a", "2b", "10a", "10b", "1000000a", "1000000b"]
    truncate_segments(tmp_path / "e", 10)
    assert [e.id for e in read_episodes(tmp_path / "e")] == ["2a", "2b"]
    with pytest.raises(DataError, match="nowhere: cannot be listed"):
        list(read_episodes(tmp_path / "nowhere"))


def test_a_reader_stops_where_a_resumed_run_took_back_what_it_lists(tmp_path):
    for step in (1, 2, 3):
        write_segment(tmp_path / "e", step, [episode(f"a{step}")])
    reading = read_episodes(tmp_path / "e")
    assert next(reading).id == "a1"
    truncate_segments(tmp_path / "e", 2)
    assert list(reading) == []
    (tmp_path / "e/000002.jsonl").mkdir()
    with pytest.raises(DataError, match=r"000002\.jsonl"):
        list(read_episodes(tmp_path / "e"))


def test_annotations_lie_beside(tmp_path):
    with Run.create(tmp_path / "r", "method: x\n") as run:
        marks = [Annotation("e0", "mc", "step", (0.5, 1.0), 0, "k=8")]
        path = write_segment(run.annotations_dir("mc"), 3, marks)
        assert path == tmp_path / "r/annotations/mc/000003.jsonl"
        assert path.read_text() == (
            '{"episode":"e0","name":"mc","level":"step","values":[0.5,1.0],"turn":0,"source":"k=8"}\n'
        )
        assert list(read_annotations(run.annotations_dir("mc"))) == marks
        with pytest.raises(DataError, match=r"annotation name '\.\./x'"):
            run.annotations_dir("../x")


def test_metrics_are_lines_and_clock_times_lie_apart(tmp_path):
    run = Run.create(tmp_path / "r", "method: x\n")
    run.log(1, {"loss": 0.1, "none": None}, {"seconds": 3.5})
    run.log(2, {"loss": np.float32(0.5)})
    run.sync()
    assert run.metrics_file.read_bytes() == b'{"step":1,"loss":0.1,"none":null}\n{"step":2,"loss":0.5}\n'
    assert run.timings_file.read_bytes() == b'{"step":1,"seconds":3.5}\n'
    with run.metrics_file.open("ab") as f:
        f.write(b'{"step":3,"lo')
    assert [r["step"] for r in read_metrics(run.path)] == [1, 2]
    truncate_metrics(run, 5)  # nothing after step 5, but the broken line goes
    run.log(3, {"loss": 1.0}, {"seconds": 1.0})
    assert [r["step"] for r in read_metrics(run.path)] == [1, 2, 3]
    truncate_metrics(run, 1)
    assert run.metrics_file.read_bytes() == b'{"step":1,"loss":0.1,"none":null}\n'
    assert run.timings_file.read_bytes() == b'{"step":1,"seconds":3.5}\n'
    with pytest.raises(DataError, match=r"key 'loss': is nan.*a line of metrics.jsonl was not written"):
        run.log(4, {"loss": float("nan")})
    assert len(read_metrics(run.path)) == 1


def test_a_broken_line_inside_metrics_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2: the line is not valid JSON"):
        read_metrics(tmp_path)


# --- runs --------------------------------------------------------------------------------------------------------


def test_an_existing_run_is_not_touched(tmp_path):
    Run.create(tmp_path / "r", "method: x\n").close()
    with pytest.raises(RunError, match=r"r holds a run: go on with --resume, or choose another directory with out="):
        Run.create(tmp_path / "r", "method: y\n")
    assert Run.open(tmp_path / "r").recipe == "method: x\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="mine is not empty"):
        Run.create(tmp_path / "mine", "method: y\n")
    with pytest.raises(RunError, match=r"mine/thesis.tex: not a directory|mine/thesis.tex: file exists"):
        Run.create(tmp_path / "mine" / "thesis.tex", "method: y\n")


def test_a_creation_that_died_can_be_repeated(tmp_path):
    (tmp_path / "r" / "episodes").mkdir(parents=True)
    (tmp_path / "r" / ".recipe.yaml.2147483639-2.tmp").write_text("meth")
    with pytest.raises(RunError, match=r"r is not a run: it holds no recipe.yaml"):
        Run.open(tmp_path / "r")
    with Run.create(tmp_path / "r", "method: x\n"):
        assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [".lock", "checkpoints", "episodes", "recipe.yaml"]


def test_two_processes_do_not_train_in_one_directory(tmp_path):
    run = Run.create(tmp_path / "r", "method: x\n")
    Run.open(tmp_path / "r")  # reading needs no lock
    code = "import sys; from trailmark.runs.store import Run; Run.open(sys.argv[1], lock=True)"
    other = forked.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True)
    assert f"r is in use by process {os.getpid()}: wait for it or stop it first." in other.stderr
    run.close()
    assert forked.run([sys.executable, "-c", code, str(run.path)]).returncode == 0


# --- faults ------------------------------------------------------------------------------------------------------

FULL_DISK = """
import resource, sys
from pathlib import Path
from trailmark.errors import RunError
from trailmark.runs.store import Run, write_segment
from trailmark.types import Episode, Scored, Task
make = lambda name: Episode(name, Task("t"), "g", (), {"policy": Scored(0.5)})
run = Run.open(sys.argv[1], lock=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for job in (lambda: write_segment(run.episodes_dir, 1, [make(f"new{i}") for i in range(1000)]),
            lambda: write_segment(run.episodes_dir, 0, [make(f"new{i}") for i in range(1000)]),
            lambda: [run.log(i, {"x": 0.5}) for i in range(1, 1000)]):
    try:
        job()
    except RunError as e:
        print(e)
"""


def test_a_full_disk_loses_nothing(tmp_path):
    with Run.create(tmp_path / "r", "method: x\n") as run:
        write_segment(run.episodes_dir, 0, [episode("old")])
    done = forked.run([sys.executable, "-c", FULL_DISK, str(run.path)], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith(f"cannot write {run.episodes_dir / '000001.jsonl'}: a limit on the size of files")
    assert said[1].startswith(f"cannot write {run.episodes_dir / '000000.jsonl'}:")
    assert said[2].startswith(f"cannot write {run.metrics_file}: ") and said[2].endswith("goes on with --resume.")
    assert [p.name for p in run.episodes_dir.iterdir()] == ["000000.jsonl"]
    assert [e.id for e in read_episodes(run.episodes_dir)] == ["old"]
    data = run.metrics_file.read_bytes()
    assert data.endswith(b"}\n") and 1900 < len(data) <= 2000
    assert [r["step"] for r in read_metrics(run.path)] == list(range(1, data.count(b"\n") + 1))


def test_errors_of_the_disk_are_sentences(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    atomic_write(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*/a: the disk is full; make room"):
        atomic_write(tmp_path / "a", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old")]
    with pytest.raises(RunError, match="no such file or directory"):
        append_line(tmp_path / "b" / "c", {})


KILLED = """
import sys
from trailmark.runs.store import Run, write_segment
from trailmark.types import Episode, Scored, Task
run = Run.open(sys.argv[1], lock=True)
for i in range(1, 4):
    write_segment(run.episodes_dir, i, [Episode(f"{i}-{j}", Task("t"), "g", (), {"p": Scored(0.5)}) for j in range(2)])
    run.log(i, {"x": 0.5}, {"s": 1.0})
print("alive")
"""


@pytest.mark.parametrize(
    ("at", "whole", "steps", "temporaries"),
    [
        ("segment.before#2", 1, 1, 0),
        ("segment.half#2", 1, 1, 1),
        ("segment.synced#2", 1, 1, 1),
        ("segment.renamed#2", 2, 1, 0),
        ("segment.half", 0, 0, 1),
        ("timings.before#2", 2, 1, 0),
        ("metrics.before#2", 2, 1, 0),
        ("metrics.after#2", 2, 2, 0),
        ("metrics.after#9", 3, 3, 0),
    ],
)
def test_killed_anywhere_a_reader_sees_whole_segments(tmp_path, at, whole, steps, temporaries):
    Run.create(tmp_path / "r", "method: x\n").close()
    run = Run.open(tmp_path / "r")
    env = {**os.environ, "TRAILMARK_KILL_AT": at}
    done = forked.run([sys.executable, "-c", KILLED, str(run.path)], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == ((0, "alive\n") if at.endswith("#9") else (-9, ""))
    assert [e.id for e in read_episodes(run.episodes_dir)] == [f"{i}-{j}" for i in range(1, whole + 1) for j in (0, 1)]
    assert [r["step"] for r in read_metrics(run.path)] == list(range(1, steps + 1))
    assert len(list(run.episodes_dir.glob(".*.tmp"))) == temporaries
    with Run.open(run.path, lock=True):  # the lock died with the process; its temporaries are swept
        assert not list(run.episodes_dir.glob(".*.tmp"))
    env.pop("TRAILMARK_KILL_AT")
    again = forked.run([sys.executable, "-c", KILLED, str(run.path)], capture_output=True, text=True, env=env)
    assert again.stdout == "alive\n"
    assert [
        json.loads(line)["id"] for p in segments(run.episodes_dir) for line in Path(p).read_text().splitlines()
    ] == [f"{i}-{j}" for i in (1, 2, 3) for j in (0, 1)]


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path):
    mine = tmp_path / "home"
    (mine / "deep").mkdir(parents=True)
    (mine / "deep" / ".letter.tmp").write_text("mine")
    with pytest.raises(RunError, match="home is not empty"):
        Run.create(mine, "method: sft\n")
    assert sorted(p.name for p in mine.rglob("*")) == [".letter.tmp", "deep"]


def test_a_creation_that_was_killed_may_be_used(tmp_path):
    (tmp_path / "r" / "episodes").mkdir(parents=True)
    (tmp_path / "r" / ".recipe.yaml.2147483639-23.tmp").write_text("meth")
    run = Run.create(tmp_path / "r", "method: sft\n")
    assert run.recipe_file.read_text() == "method: sft\n" and not list(run.path.glob("*.tmp"))
    run.close()


def test_a_file_that_a_living_process_writes_is_not_swept(tmp_path):
    Run.create(tmp_path / "r", "method: sft\n").close()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        theirs, dead = (tmp_path / "r" / f".finished.json.{pid}-1.tmp" for pid in (other.pid, 2**31 - 9))
        for temp in (theirs, dead):
            temp.write_text("{}")
        Run.open(tmp_path / "r", lock=True).close()
        assert theirs.exists() and not dead.exists()
        other.communicate(b"\n")
    Run.open(tmp_path / "r", lock=True).close()
    assert not theirs.exists()


# --- a run that is taken back --------------------------------------------------------------------------------------


def there(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_mistake_before_the_first_step_leaves_nothing_that_the_run_made(tmp_path):
    """Whatever the method put beside the recipe goes with it, so the same command can be given again."""
    config = RunConfig(method="mine", name="r", out=str(tmp_path / "r"))
    other = tmp_path / "weights"
    other.mkdir()
    (other / "big.bin").write_text("x")

    def imports_then_fails(config, run, resume):
        (run.path / "critic-import" / "deep").mkdir(parents=True)
        (run.path / "critic-import" / "deep" / "heads.safetensors").write_text("x")
        (run.path / "linked").symlink_to(other)
        write_segment(run.path / "evaluation", 1, [SMALL])
        raise RecipeError("no such task")

    for _ in range(2):
        with pytest.raises(RecipeError, match="no such task"):
            launch(SimpleNamespace(train=imports_then_fails, staged=()), config)
        assert there(tmp_path / "r") == []
    assert there(other) == ["big.bin"]
    assert launch(SimpleNamespace(train=lambda config, run, resume: there(run.path), staged=()), config) == [
        ".lock", "checkpoints", "episodes", "recipe.yaml", "versions.json",
    ]  # fmt: skip


def test_what_was_there_before_is_not_taken_back(tmp_path):
    (tmp_path / "r" / "episodes").mkdir(parents=True)  # of a creation that was killed
    with Run.create(tmp_path / "r", "method: x\n") as run:
        run.discard_if_empty()
        assert there(run.path) == [".lock", "episodes"]
    with Run.create(tmp_path / "r", "method: x\n") as run:
        (run.path / "critic-import").mkdir()
        (run.path / "critic-import" / "heads.safetensors").write_text("x")
        (run.path / "notes.txt").write_text("mine")
    before = there(run.path)
    with Run.open(tmp_path / "r", lock=True) as again:
        (again.path / "evaluation").mkdir()
        again.discard_if_empty()
        assert there(again.path) == before and again.recipe == "method: x\n"
    again.discard_if_empty()  # not locked any more: nobody's to take back
    assert there(again.path) == before


@pytest.mark.parametrize("what", ["metrics", "episodes", "checkpoints"])
def test_a_run_in_which_something_happened_is_kept(tmp_path, what):
    with Run.create(tmp_path / "r", "method: x\n") as run:
        (run.path / "critic-import").mkdir()
        if what == "metrics":
            run.log(1, {"x": 0.5}, {"seconds": 1.0})
        elif what == "episodes":
            write_segment(run.episodes_dir, 1, [SMALL])
        else:
            (run.checkpoints_dir / "000001").mkdir()
        before = there(run.path)
        run.discard_if_empty()
        assert there(run.path) == before
