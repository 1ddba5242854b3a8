"""A pipeline of two stages: made once, gone on with, made again where something changed, refused where something was
edited."""

import json
import os
import sys
from hashlib import sha256
from pathlib import Path

import forked
import pytest

from trailmark.errors import RecipeError, RunBusy, RunError
from trailmark.runs.atomic_files import hold
from trailmark.runs.stages import Stage, run_stages

SCRIPT = """
import sys
from pathlib import Path
from trailmark.runs.stages import Stage, run_stages

ROOT = Path(sys.argv[1])
SETTINGS = {"n": int(sys.argv[2])}

def numbers(folder):
    with open(ROOT / "calls.txt", "a") as f:
        f.write("numbers\\n")
    for k in range(SETTINGS["n"]):
        if not (folder / f"{k}.txt").exists():
            (folder / f"{k}.txt").write_text(str(k * k))
    return {"files": SETTINGS["n"]}

def total(folder):
    with open(ROOT / "calls.txt", "a") as f:
        f.write("total\\n")
    found = sum(int(p.read_text()) for p in (ROOT / "pipe/numbers").glob("*.txt"))
    (folder / "total.txt").write_text(str(found))
    return {"total": found}

def stages():
    return [Stage("numbers", numbers, SETTINGS, {"seed": ROOT / "seed.txt"}),
            Stage("total", total, {}, {"numbers": ROOT / "pipe/numbers"})]

if __name__ == "__main__":
    print(run_stages(ROOT / "pipe", stages()))
"""


def start(root, n=3, kill=None):
    env = {**os.environ, **({"TRAILMARK_KILL_AT": kill} if kill else {})}
    return forked.run([sys.executable, root / "pipeline.py", root, str(n)], env=env, capture_output=True, text=True)


def outputs(root):
    files = (p for p in (root / "pipe").rglob("*") if p.is_file() and not p.name.endswith(".lock"))
    return {p.relative_to(root / "pipe").as_posix(): p.read_bytes() for p in files}


@pytest.fixture
def pipe(tmp_path):
    """run(n): the pipeline of SCRIPT in this process; what it said; the calls of `make` so far."""
    (tmp_path / "seed.txt").write_text("7")
    (tmp_path / "pipeline.py").write_text(SCRIPT)
    calls, said = [], []

    def numbers(n):
        def make(folder):
            calls.append("numbers")
            for k in range(n):
                (folder / f"{k}.txt").write_text(str(k * k))
            return {"files": n}

        return make

    def total(folder):
        calls.append("total")
        found = sum(int(p.read_text()) for p in (tmp_path / "pipe/numbers").glob("*.txt"))
        (folder / "total.txt").write_text(str(found))
        return {"total": found}

    def run(n=3, **more):
        first = Stage("numbers", numbers(n), {"n": n}, {"seed": tmp_path / "seed.txt"})
        second = Stage("total", total, {}, {"numbers": tmp_path / "pipe/numbers"})
        return run_stages(tmp_path / "pipe", [first, second], said.append, **more)

    run.calls, run.said, run.root, run.folder = calls, said, tmp_path, tmp_path / "pipe"
    return run


def test_done_is_skipped_and_says_what_it_was_made_of(pipe):
    assert pipe() == pipe() == {"numbers": {"files": 3}, "total": {"total": 0 + 1 + 4}}
    assert pipe.calls == ["numbers", "total"] and pipe.said == []
    record = json.loads((pipe.folder / "stages/numbers.json").read_text())
    of = lambda text: sha256(text.encode()).hexdigest()
    assert record == {
        "stage": "numbers", "settings": {"n": 3}, "inputs": {"seed": {"": of("7")}}, "files": {},
        "summary": {"files": 3}, "outputs": {"0.txt": of("0"), "1.txt": of("1"), "2.txt": of("4")},
    }  # fmt: skip
    assert sorted(p.name for p in pipe.folder.iterdir()) == ["numbers", "stages", "total"]
    assert sorted(p.name for p in (pipe.folder / "stages").iterdir()) == [
        ".numbers.lock", ".total.lock", "numbers.json", "total.json",
    ]  # fmt: skip


def test_a_changed_setting_is_made_again_with_all_that_follows(pipe):
    pipe()
    before = outputs(pipe.root)
    assert pipe(4)["total"] == {"total": 14} and pipe.calls == ["numbers", "total"] * 2
    assert pipe.said == [
        f"stage 'numbers' is made again: key 'n' was 3 and is 4. What was there lies in "
        f"{pipe.folder}/replaced/numbers-1",
        "stage 'total' is made again: input 'numbers' has changed (3.txt). What was there lies in "
        f"{pipe.folder}/replaced/total-1",
    ]
    now = outputs(pipe.root)
    kept = {n.removeprefix("replaced/").replace("-1/", "/"): v for n, v in now.items() if n.startswith("replaced/")}
    kept = {f"stages/{n.partition('-')[0]}.json" if n.endswith("-1.stage.json") else n: v for n, v in kept.items()}
    assert kept == before
    pipe(3)
    assert {n: v for n, v in outputs(pipe.root).items() if not n.startswith("replaced/")} == before
    assert (pipe.folder / "replaced/numbers-2").is_dir()


def test_a_changed_input_is_named(pipe):
    pipe()
    (pipe.root / "seed.txt").write_text("8")
    pipe()
    assert "stage 'numbers' is made again: input 'seed' has changed." in pipe.said[0]
    (pipe.root / "seed.txt").unlink()
    with pytest.raises(
        RunError, match=r"stage 'numbers' needs .*seed.txt as its input 'seed', and there is no such file"
    ):
        pipe()


@pytest.mark.parametrize("edit", ["changed", "gone"])
def test_an_edited_output_is_refused_and_nothing_is_touched(pipe, edit):
    pipe()
    path = pipe.folder / "numbers/1.txt"
    path.write_text("5") if edit == "changed" else path.unlink()
    (pipe.folder / "numbers/note.md").write_text("a file of mine")
    before = outputs(pipe.root)
    words = "was changed after it was made" if edit == "changed" else "is gone"
    with pytest.raises(
        RunError, match=rf"1.txt of stage 'numbers' {words}: put it back .* move {pipe.folder}/numbers and .* away"
    ):
        pipe(4)
    assert outputs(pipe.root) == before and pipe.calls == ["numbers", "total"]
    path.write_text("1")
    pipe()  # a new file beside the outputs is no edit
    (pipe.folder / "numbers").rename(pipe.root / "away")  # a folder that is gone is made again
    assert pipe()["numbers"] == {"files": 3} and pipe.calls == ["numbers", "total", "numbers"]


def test_files_of_somebody_else_are_refused(pipe):
    (pipe.folder / "numbers").mkdir(parents=True)
    (pipe.folder / "numbers/letter.txt").write_text("dear")
    (pipe.folder / "numbers/.lock").touch()
    with pytest.raises(RunError, match=r"stage 'numbers' writes to .* did not make \('letter.txt'\): move them away"):
        pipe()


def test_another_process_is_busy(pipe):
    pipe()
    fd = hold(pipe.folder / "stages/.total.lock", "this test")
    with pytest.raises(RunBusy, match=rf"stage 'total' in {pipe.folder} is in use by process {os.getpid()}"):
        pipe()
    os.close(fd)
    pipe()


def test_only_one_stage(pipe):
    with pytest.raises(RunError, match="stage 'total' needs 'numbers', which is not done yet"):
        pipe(only=["total"])
    pipe(only=["numbers"])
    assert pipe(only=["total"]) == {"total": {"total": 5}} and pipe.calls == ["numbers", "total"]
    with pytest.raises(RunError, match=r"'numbers', which was made otherwise \(key 'n' was 3 and is 4\)"):
        pipe(4, only=["total"])


def test_a_mistake_before_anything_is_made_leaves_nothing(tmp_path):
    def make(folder):
        raise RecipeError("no such key")

    with pytest.raises(RecipeError):
        run_stages(tmp_path / "pipe", [Stage("a", make)])
    assert [p.name for p in (tmp_path / "pipe").rglob("*")] == ["stages", ".a.lock"]


def test_a_stage_that_grows_goes_on_in_its_folder(tmp_path):
    said = []

    def run(n, word="a"):
        def make(folder):
            have = len(list(folder.glob("*.txt")))
            for k in range(have, n):
                (folder / f"{k}.txt").write_text(f"{word} of {n}")

        run_stages(tmp_path, [Stage("a", make, {"n": n, "word": word}, grows=("n",))], said.append)
        return [p.read_text() for p in sorted((tmp_path / "a").glob("*.txt"))]

    assert run(2) == ["a of 2"] * 2 and run(3) == ["a of 2", "a of 2", "a of 3"]
    assert said == ["stage 'a' goes on: key 'n' was 2 and is 3"]
    assert run(3, "b") == ["b of 3"] * 3


def test_a_stage_of_one_file_and_a_name_with_a_folder(tmp_path):
    made = []
    stage = lambda word: Stage(
        "gold/seed-0", lambda path: made.append(word) or (path.write_text(word) and None), {"word": word}, single=True
    )
    run_stages(tmp_path, [stage("a")])
    assert (tmp_path / "stages/gold/seed-0.json").is_file()
    run_stages(tmp_path, [stage("b")], lambda line: None)
    assert (tmp_path / "gold/seed-0").read_text() == "b" and (tmp_path / "replaced/gold-seed-0-1").read_text() == "a"
    assert json.loads((tmp_path / "replaced/gold-seed-0-1.stage.json").read_text())["settings"] == {"word": "a"}
    assert made == ["a", "b"]


def test_a_stage_is_made_again_on_demand(pipe):
    """With the same settings it makes the same files, so what reads them stays."""
    pipe()
    (pipe.folder / "numbers/1.txt").write_text("edited")  # what was edited is set aside, too
    assert pipe(only=["numbers"], redo=["numbers"]) == {"numbers": {"files": 3}}
    assert pipe.calls == ["numbers", "total", "numbers"]
    assert "'numbers' is made again: you want it again" in pipe.said[0]
    assert (pipe.folder / "replaced/numbers-1/1.txt").read_text() == "edited"
    pipe()
    assert pipe.calls == ["numbers", "total", "numbers"]


def test_stages_that_share_a_folder_replace_their_own_files(tmp_path):
    write = lambda name, word: lambda folder: (folder / name).write_text(word) and {"n": 1}
    stages = lambda word: [
        Stage("one", write("1.txt", word), {"word": word}, home="both", outputs=("1.txt",)),
        Stage("two", write("2.txt", "x"), home="both", outputs=("2.txt",)),
    ]
    run_stages(tmp_path, stages("a"))
    run_stages(tmp_path, stages("b"), lambda line: None)
    assert [(tmp_path / "both" / f"{k}.txt").read_text() for k in (1, 2)] == ["b", "x"]
    assert [p.name for p in (tmp_path / "replaced/one-1").iterdir()] == ["1.txt"]


def test_a_folder_that_was_moved_is_done(pipe):
    pipe()
    moved = pipe.root / "elsewhere"
    pipe.folder.rename(moved)
    first = Stage("numbers", lambda folder: pytest.fail("made again"), {"n": 3}, {"seed": pipe.root / "seed.txt"})
    second = Stage("total", lambda folder: pytest.fail("made again"), {}, {"numbers": moved / "numbers"})
    run_stages(moved, [first, second])


def killed_anywhere(tmp_path, points):
    """The pipeline made, then made with another setting, killed at each point in either: always the same end, and
    nothing lost."""
    roots = []
    for number, kill in enumerate([None, *points]):
        root = tmp_path / str(number)
        root.mkdir()
        (root / "seed.txt").write_text("7")
        (root / "pipeline.py").write_text(SCRIPT)
        for n in (3, 4):
            died = start(root, n, kill)
            assert died.returncode in ((-9, 0) if kill else (0,)), died.stderr
            done = start(root, n)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == str({"numbers": {"files": n}, "total": {"total": {3: 5, 4: 14}[n]}})
        roots.append(root)
    whole = outputs(roots[0])
    for root, kill in zip(roots[1:], points):
        assert outputs(root) == whole, kill


def test_killed_and_gone_on(tmp_path):
    killed_anywhere(tmp_path, ["stage.made", "stage.moved"])


@pytest.mark.kill
def test_killed_at_every_point(tmp_path):
    places = ["begun.before", "begun.half", "begun.renamed", "stage.begun", "stage.made", "stage.half", "stage.renamed",
              "stage.replaced", "stage.moved"]  # fmt: skip
    killed_anywhere(tmp_path, [f"{place}#{k}" for place in places for k in (1, 2)])


def test_fingerprints_of_runs_leave_out_names_clocks_and_old_checkpoints(tmp_path):
    from trailmark.runs.fingerprints import fingerprint

    def write(name, step="000004", weights="w"):
        run = tmp_path / name
        for k in ("000002", step):
            (run / "checkpoints" / k / "policy").mkdir(parents=True)
            (run / "checkpoints" / k / "state.json").write_text("{}")
            (run / "checkpoints" / k / "policy/model.safetensors").write_text(weights)
        (run / "recipe.yaml").write_text(f"method: sft\nsteps: 4\nout: {run}\nname: {name}\n")
        (run / "timings.jsonl").write_text(name)
        (run / "metrics.jsonl").write_text('{"step": 4}\n')
        return fingerprint(run)

    one = write("one")
    assert list(one) == [
        "recipe.yaml",
        "metrics.jsonl",
        "checkpoints/000004/policy/model.safetensors",
        "checkpoints/000004/state.json",
    ]
    assert write("two") == one and write("three", weights="v") != one
    (tmp_path / "one/checkpoints/000002/state.json").write_text("other")
    assert fingerprint(Path(tmp_path / "one")) == one
