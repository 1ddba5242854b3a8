"""All stages over two small packages: offline and with a server, complete and stopped in between."""

import json
import os
import signal
import sys

import forked
import pytest
from data_fixtures import packages, rows, script, teaching, tree, write_tree
from typer.testing import CliRunner

from trailmark import formats
from trailmark.commands.app import app
from trailmark.formats.conversations import read_messages
from trailmark.methods.reflect.decisions import FIVE, read_decisions
from trailmark.methods.reflect.explore.explorer import Explorer
from trailmark.methods.reflect.explore.make import STAGES
from trailmark.methods.reflect.explore.records import Record, read_records
from trailmark.methods.reflect.explore.split import place
from trailmark.methods.reflect.formats import ACTION, ANALYZE, split
from trailmark.models.tiny import tiny_tokenizer
from trailmark.tasks.labels import CHOICES

TINY = tiny_tokenizer()


def run(*words):
    return CliRunner().invoke(app, ["data", "auto-explore", *map(str, words)])


def make(tmp_path, *words, out="out"):
    sources = packages(tmp_path) if not (tmp_path / "kettle").exists() else [tmp_path / "kettle", tmp_path / "garden"]
    done = run(*sources, "--out", tmp_path / out, "--split", "exact", *words)
    assert done.exit_code == 0, done.output
    return tmp_path / out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("offline"))


def test_offline_data_set(made):
    files = {p.name for p in made.iterdir()}
    assert files == {".lock", "repos", "tasks.jsonl", "tasks_filtered.jsonl", "trajectories.jsonl", "train.jsonl",
                     "validate.jsonl", "test.jsonl", "sft", "settings.json", "reports", "stages"}  # fmt: skip
    assert set(tree(made / "repos")) == {
        "kettle/README.md", "kettle/decision.py", "kettle/src/kettle/boil.py", "kettle/src/kettle/pour.py",
        "kettle/src/kettle/taps.csv", "garden/guide/soil.rst", "garden/guide/paths.rst", "garden/beds.py",
    }  # fmt: skip
    records = read_records(made / "trajectories.jsonl")
    assert len(records) == 15 and all(r.targets == [r.target] for r in records)
    parts = {p: read_records(made / f"{p}.jsonl") for p in ("train", "validate", "test")}
    assert {p: len(r) for p, r in parts.items()} == {"train": 10, "validate": 3, "test": 2}
    assert sorted(r.key for part in parts.values() for r in part) == sorted(r.key for r in records)
    for r in records:
        good, *bad = r.walks
        assert (good.info, [c for _, c in good.steps], good.found) == ("positive0", r.optimal_path, r.target)
        assert [w.info for w in bad] == [f"negative{k}" for k in range(len(bad))]
        for w in bad:
            *prefix, (thought, command) = w.steps
            assert [c for _, c in prefix[:-1]] == r.optimal_path[:-2] and not any(said for said, _ in prefix)
            assert prefix[-1][1].startswith("cat ") and prefix[-1][1] != r.optimal_path[-2] == command
            assert "is the wrong file. Next: " + command in thought
    assert {len(r.walks) - 1 for r in records if r.target.startswith("src/")} == {2}  # two other files there
    assert {len(r.walks) - 1 for r in records if r.target == "beds.py"} == {0}  # the only file of its folder
    report = rows_of_report(made, "walks")
    assert report["left_out"] == {"negative walk: no other file in the folder": 2}


def rows_of_report(made, stage):
    return json.loads((made / "reports" / f"{stage}.json").read_text())


def test_what_the_offline_teacher_says(made):
    told = {(d.trajectory, d.step, d.command()): d.reflection for d in read_decisions(made) if "src/" in d.state}
    assert told["positive0", 0, "cd src"] == "We are at the root. Nothing has been looked at yet. Next: cd src"
    assert told["positive0", 1, "cd kettle"] == "We are in src/. The last step, cd src, led on. Next: cd kettle"
    assert told["positive0", 3, "id boil.py"] == "We are in src/kettle/. boil.py answers the question. Next: id boil.py"
    assert told["negative0", 3, "cat boil.py"].endswith("is the wrong file. Next: cat boil.py")


def test_the_five_files(made):
    decisions = read_decisions(made)
    positives = [d for d in decisions if d.positive]
    assert 0 < len(positives) < len(decisions)
    for wanted in ("oracle", "behaviour"):
        folder = made / "sft" / wanted
        assert {p.name for p in folder.iterdir()} == {f"{name}.jsonl" for name in FIVE}
        for name in FIVE:
            told = positives if name.endswith("positive") else decisions
            marker = ANALYZE if "reflection" in name else ACTION
            got = rows(folder / f"{name}.jsonl")
            assert [(r["task"], r["trajectory"], r["step"]) for r in got] == [
                (d.task, d.trajectory, d.step) for d in told
            ]
            answers = [split(r["text"], marker)[1] for r in got]
            label = (lambda d: d.oracle) if wanted == "oracle" else (lambda d: d.action)
            assert answers == [d.reflection if marker == ANALYZE else label(d) for d in told]
            format = "reflect-reflector" if marker == ANALYZE else "reflect-policy"
            read = formats.read(format, folder / f"{name}.jsonl", TINY).episodes
            assert [e.turns[0].text for e in read] == answers
            assert all("spoiler" not in r["text"].lower() for r in got)


def test_methods_read_them(tmp_path, made):
    """`method: reflect` by the teacher `file`; `method: sft` after `convert`."""
    out = make(tmp_path, "--tokenizer", "tiny")
    recipe = {
        "method": "reflect", "out": str(tmp_path / "run"), "steps": 3, "sft": {"reflector": 1, "policy": 1, "batch": 4},
        "task": {"name": "auto-explore", "options": {"tasks": str(out / "train.jsonl"), "repos": str(out / "repos"),
        "horizon": 2}},
        "teacher": {"name": "file", "path": str(out)}, "rl": {"prompts_per_step": 2}, "thought": 32,
        "eval": {"every": 0},
        "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 4096}},
        "engine": {"max_num_seqs": 4, "max_len": 4096},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "recipe.yaml")])
    assert done.exit_code == 0, done.output
    assert len(rows(tmp_path / "run" / "metrics.jsonl")) == 3
    file = made / "sft" / "oracle" / "sft.jsonl"
    words = ["convert", str(file), str(tmp_path / "plain.jsonl"), "--from", "reflect-policy", "--to", "trajectories"]
    assert CliRunner().invoke(app, [*words, "--tokenizer", "tiny"]).exit_code == 0
    talks = read_messages(tmp_path / "plain.jsonl")
    assert [[m["content"] for m in t] for t in talks] == [list(split(r["text"], ACTION)) for r in rows(file)]


@pytest.mark.parametrize(
    "options", [(), ("--shuffle-labels",), ("--tokenizer", "tiny"), ("--tokenizer", "tiny", "--shuffle-labels")]
)
def test_every_row_replays(tmp_path, made, options):
    """Label -> command -> the state on record, step by step; with shuffled labels they come from the whole alphabet."""
    out = made if not options else make(tmp_path, *options)
    tokenizer = TINY if "tiny" in options else None
    explorer = Explorer(out / "repos", out / "train.jsonl", tokenizer=tokenizer, shuffle="--shuffle-labels" in options)
    records = {r.key: r for r in read_records(out / "train.jsonl")}
    decisions, used = read_decisions(out), set()
    assert decisions
    for d in decisions:
        walk = next(w for w in records[d.task].walks if w.info == d.trajectory)
        seeker = explorer.start(records[d.task], [c for _, c in walk.steps[: d.step]], d.trajectory)
        assert (seeker.seen.state, seeker.seen.menu) == (d.state, d.menu)
        assert f"{d.action}. {walk.steps[d.step][1]}\n" in d.menu
        assert seeker.best_label == d.oracle and seeker.do(d.action) == walk.steps[d.step][1] == d.command()
        used |= set(d.labels)
    alphabet = {x for x in CHOICES if len(x) == 1} if tokenizer else set(CHOICES)
    assert used <= alphabet and (len(used) > 50) == ("--shuffle-labels" in options)


def test_pages(tmp_path):
    """More commands than labels: the turns of pages are decisions too, and a play of the labels gives what is on
    record."""
    text = 'def f():\n    """Says how the part with the number {i} is put together."""\n' + "    # plain words\n" * 12
    write_tree(tmp_path / "many", {f"part{i:02d}.py": text.replace("{i}", str(i)) for i in range(40)})
    done = run(
        tmp_path / "many", "--out", tmp_path / "out", "--tokenizer", "tiny", "--split", "exact", "--negatives", "1"
    )
    assert done.exit_code == 0, done.output
    explorer = Explorer(tmp_path / "out" / "repos", tmp_path / "out" / "train.jsonl", tokenizer=TINY)
    decisions = read_decisions(tmp_path / "out")
    for r in read_records(tmp_path / "out" / "train.jsonl"):
        told = [d for d in decisions if d.task == r.key and d.trajectory == "positive0"]
        assert [d.step for d in told] == list(range(len(told)))
        seeker = explorer.start(r)
        for d in told:
            assert (d.state, d.menu, d.oracle) == (seeker.seen.state, seeker.seen.menu, d.action)
            seeker.do(d.action)
        assert seeker.world.identified == r.target
        turn = ["next page"] if int(r.target[4:6]) >= 30 else []  # 60 places on a page, two commands for each file
        look, point = r.optimal_path
        assert [d.command() for d in told] == [*turn, look, *turn, point]
    assert sum(d.command() == "next page" for d in decisions) > 5
    assert all(d.reflection.endswith(d.command()) for d in decisions if d.command() != "next page")


def test_the_same_command_goes_on_and_another_makes_its_stages_again(tmp_path):
    out = make(tmp_path)
    before = tree(out)
    assert tree(make(tmp_path)) == before
    assert tree(make(tmp_path, out="again"), but=["settings.json", ".lock"]) == tree(
        out, but=["settings.json", ".lock"]
    )
    again = run(tmp_path / "kettle", tmp_path / "garden", "--out", out, "--split", "exact", "--negatives", "1")
    assert again.exit_code == 0 and "stage 'walks' is made again: key 'negatives' was 2 and is 1." in again.output
    assert "stage 'tasks' is made again" not in again.output  # its settings are the same
    assert "stage 'sft' is made again: input 'train.jsonl' has changed." in again.output
    kept = {
        n.removeprefix("replaced/walks-1/"): v for n, v in tree(out).items() if n.startswith("replaced/walks-1/tra")
    }
    assert kept == {"trajectories.jsonl": before["trajectories.jsonl"]}
    fresh = tree(make(tmp_path, "--negatives", "1", out="fresh"), but=[".lock"])
    assert {n: v for n, v in tree(out, but=[".lock"]).items() if not n.startswith("replaced/")} == fresh
    other = CliRunner().invoke(app, ["data", "taxi", "--out", str(out)])
    assert other.exit_code == 2 and 'was begun with kind "auto-explore", not "taxi"' in other.stderr


def test_an_output_that_was_edited_is_refused(tmp_path):
    out = make(tmp_path)
    text = (out / "tasks.jsonl").read_text()
    (out / "tasks.jsonl").write_text(text.replace('"seed":', '"seeds":') + "\n")
    before = tree(out)
    for words in ((), ("--stage", "walks")):
        again = run(tmp_path / "kettle", tmp_path / "garden", "--out", out, "--split", "exact", *words)
        assert (
            again.exit_code == 2 and f"{out}/tasks.jsonl of stage 'tasks' was changed after it was made" in again.stderr
        )
    assert tree(out) == before
    (out / "tasks.jsonl").unlink()
    (out / "stages" / "tasks.json").unlink()  # as the sentence says
    make(tmp_path)
    assert (out / "tasks.jsonl").read_text() == text


def test_a_folder_that_is_not_ours_is_refused(tmp_path):
    packages(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert "is not empty" in run(tmp_path / "kettle", "--out", tmp_path / "mine").stderr


def test_stage_by_stage(tmp_path):
    whole, out = make(tmp_path), tmp_path / "staged"
    early = run(*packages(tmp_path), "--out", out, "--split", "exact", "--stage", "walks")
    assert early.exit_code == 2 and "stage 'walks' needs 'repos', which is not done yet" in early.stderr
    for stage in STAGES:
        make(tmp_path, "--stage", stage, out="staged")
    assert tree(out, but=[".lock"]) == tree(whole, but=[".lock"])


def test_tasks_from_a_file(tmp_path, made):
    """The reference's JSON as a start: its own walks are kept, and more are added."""
    packages(tmp_path)
    done = CliRunner().invoke(app, ["data", "records", str(made / "trajectories.jsonl"), str(tmp_path / "data.json")])
    assert done.exit_code == 0 and "15 records" in done.output
    out = make(tmp_path, "--tasks", tmp_path / "data.json")
    old, new = read_records(made / "trajectories.jsonl"), read_records(out / "trajectories.jsonl")
    assert [r.query for r in new] == [r.query for r in old]
    for a, b in zip(old, new):
        assert b.walks[: len(a.walks)] == a.walks and sum(w.positive for w in b.walks) == 2
    again = ["data", "sft", str(made / "train.jsonl"), str(tmp_path / "sft"), "--repos", str(made / "repos")]
    assert CliRunner().invoke(app, again).exit_code == 0
    assert tree(tmp_path / "sft") == tree(made / "sft")
    assert "exists" in CliRunner().invoke(app, again).stderr


def test_other_targets_that_the_filter_took_away(tmp_path):
    rows = [
        {
            "repo": "kettle",
            "query": "How hot?",
            "target": ["src/kettle/boil.py", "tests/test_boil.py", "src/kettle/pour.py"],
        },
        {"repo": "kettle", "query": "Which cup?", "target": "decision.py"},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    out = make(tmp_path, "--tasks", tmp_path / "t.jsonl")
    hot, _ = read_records(out / "trajectories.jsonl")
    assert hot.targets == ["src/kettle/boil.py", "src/kettle/pour.py"]
    assert {w.steps[-2][1] for w in hot.walks if not w.positive} == {"cat taps.csv"}  # the other two are no mistake


def test_a_horizon_that_is_too_short(tmp_path):
    """Walks that do not fit are counted: the way to src/kettle and a mistake there are three steps, and then all is
    over."""
    out = make(tmp_path, "--horizon", "3")
    walks = rows_of_report(out, "walks")["left_out"]
    records = read_records(out / "tasks_filtered.jsonl")
    deep = [r for r in records if r.depth == 2]
    assert walks["negative walk: longer than the horizon"] == 2 * len(deep) > 0
    assert walks["record in which no file was pointed out"] == len(deep)
    assert max(r.depth for r in read_records(out / "trajectories.jsonl")) == 1
    done = run(tmp_path / "kettle", "--out", tmp_path / "one", "--horizon", "1")
    assert done.exit_code == 2 and "pointed out no file in any record" in done.stderr


def test_no_record_in_train(tmp_path):
    packages(tmp_path)
    name = next(
        f"Question {i}?" for i in range(99) if place(0, Record("kettle", f"Question {i}?", "decision.py").key) > 0.7
    )
    (tmp_path / "t.jsonl").write_text(json.dumps({"repo": "kettle", "query": name, "target": "decision.py"}))
    done = run(tmp_path / "kettle", "--out", tmp_path / "out", "--tasks", tmp_path / "t.jsonl")
    assert (
        done.exit_code == 2
        and "none of 1 records falls into train: make more questions, or --split exact" in done.stderr
    )


def test_walks_that_do_not_replay_are_counted(tmp_path, made):
    lines = (made / "train.jsonl").read_text().replace('"cmd": "cd guide"', '"cmd": "cd gone"')
    (tmp_path / "t.jsonl").write_text(lines)
    words = ["data", "sft", str(tmp_path / "t.jsonl"), str(tmp_path / "sft"), "--repos", str(made / "repos")]
    done = CliRunner().invoke(app, words)
    broken = sum("cd guide" in str(w.steps) for r in read_records(made / "train.jsonl") for w in r.walks)
    assert broken and f"{broken} walk that does not replay" in done.output


@pytest.mark.parametrize("words, said", [
    ((), "which repositories?"),
    (("nowhere",), "'nowhere' is neither a folder nor a package"),
    (("a==1==2==",), "package"),
    (("kettle", "--teacher", "http://127.0.0.1:9"), "needs --model"),
    (("kettle", "--teacher", "gpt-4"), "neither 'offline' nor an address"),
    (("kettle", "--stage", "walk"), "no stage 'walk'. Did you mean 'walks'"),
    (("kettle", "--split", "even"), "no split method 'even'"),
    (("kettle", "kettle"), "two repositories are called 'kettle'"),
    (("kettle", "--tasks", "gone.jsonl"), "needs gone.jsonl as its input 'tasks'"),
    (("bare",), "holds no file that could be read"),
])  # fmt: skip
def test_mistakes(tmp_path, monkeypatch, words, said):
    packages(tmp_path)
    write_tree(tmp_path / "bare", {"Makefile": "all:\n", "tests/a.py": "x = 1\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAILMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    done = run(*words, "--out", "out")
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.output


# --- with a server ---------------------------------------------------------------------------------------------------


def server_words(server, *more):
    return ["--teacher", server.url, "--model", "m", "--retries", "1", "--deadline", "5", *more]


def test_a_server_as_teacher(tmp_path):
    with teaching() as server:
        out = make(tmp_path, *server_words(server))
        assert {b["model"] for _, _, b in server.asked} == {"m"}
        before = len(server.asked)
        assert tree(make(tmp_path, *server_words(server)))
        assert len(server.asked) == before  # all is done
    records = read_records(out / "trajectories.jsonl")
    assert {r.model for r in records} == {"m"} and {r.kind for r in records} == {"code", "text", "data"}
    assert any(r.targets != [r.target] for r in records)  # it pointed out other files: they count from then on
    decisions = read_decisions(out)
    assert any(d.action != d.oracle for d in decisions)  # and it is not always right
    behaviour, oracle = (rows(out / "sft" / w / "sft.jsonl") for w in ("behaviour", "oracle"))
    assert [r["text"] for r in behaviour] != [r["text"] for r in oracle]
    assert {len(r["text"]) - r["text"].rindex(ACTION) - len(ACTION) for r in behaviour} == {1}


def test_a_server_that_misbehaves(tmp_path):
    """Whatever fails is counted by its reason; if so much may fail, the data set is made of the rest."""
    with teaching() as server:
        server.faults = [400, "garbage", "garbage", "garbage", "nonsense", "fine", 500, "empty", "hollow", "closed",
                         "garbage",
                         "fine", "fine", "fine", 400, "nonsense", "nonsense", "fine", "nonsense"]  # fmt: skip
        out = make(tmp_path, *server_words(server, "--at-once", "1", "--failures", "0.5"))
    tasks, walks = rows_of_report(out, "tasks"), rows_of_report(out, "walks")
    assert tasks["left_out"]["file: status 400 from the server"] == 1
    assert tasks["left_out"]["file: garbage from the server"] == 2
    assert tasks["left_out"]["file: answer without a question"] == 1
    assert sum(n for why, n in walks["left_out"].items() if "walk: " in why) >= 2
    assert rows_of_report(out, "sft")["kept"]["steps"] == len(read_decisions(out)) > 0


def test_what_a_teacher_points_out_is_no_mistake_to_repair(tmp_path):
    """The first file it sees is its answer: from then on a target, and not opened as a wrong one."""
    with teaching() as server:
        out = make(tmp_path, *server_words(server))
    records = read_records(out / "trajectories.jsonl")
    assert any(r.targets != [r.target] for r in records) and any(not w.positive for r in records for w in r.walks)
    for r in records:
        folder = r.target.rpartition("/")[0]
        for w in (w for w in r.walks if not w.positive):
            wrong = w.steps[-2][1].removeprefix("cat ")
            assert (f"{folder}/{wrong}" if folder else wrong) not in r.targets


def test_half_a_letter_is_replaced(tmp_path):
    """A model may answer with what is no text; that must not end the work."""
    with teaching(lambda m: script(m).replace("What", "Wh\ud83dt").replace("known", "kn\ud800wn")) as server:
        out = make(tmp_path, *server_words(server))
    assert {d.reflection for d in read_decisions(out)} == {"Nothing is kn?wn yet; a look at the first file comes next."}
    assert {r.query[:7] for r in read_records(out / "trajectories.jsonl")} == {"Wh?t is"}


def test_a_server_that_talks_nonsense_only(tmp_path):
    packages(tmp_path)
    with teaching() as server:
        server.always = "nonsense"
        done = run(tmp_path / "kettle", "--out", tmp_path / "out", *server_words(server))
        assert done.exit_code == 2 and "made no question at all" in done.stderr and "without a question" in done.stderr
        server.always = 503
        done = run(tmp_path / "garden", "--out", tmp_path / "other", *server_words(server, "--retries", "0"))
        assert done.exit_code == 1 and "3 of 3 questions to 'm' failed: " in done.stderr


POINTS = ["answers.before#2", "tasks.half", "answers.after#9", "five.half#7", "steps.renamed"]


def test_killed_on_the_way(tmp_path):
    """SIGKILL at many points: the files are those of a run that was never stopped, and no question is asked twice."""
    with teaching() as calm:
        whole = make(tmp_path, *server_words(calm, "--at-once", "1"), out="whole")
    with teaching() as server:
        words = [
            str(tmp_path / "kettle"),
            str(tmp_path / "garden"),
            "--out",
            str(tmp_path / "killed"),
            "--split",
            "exact",
        ]
        words += server_words(server, "--at-once", "1")
        command = [sys.executable, "-m", "trailmark", "data", "auto-explore", *words]
        for point in POINTS:
            env = {**os.environ, "TRAILMARK_KILL_AT": point}
            assert forked.run(command, env=env, capture_output=True).returncode == -signal.SIGKILL, point
        lost = 1  # the answer that was not yet stored at answers.before
        torn = tmp_path / "killed" / "answers.jsonl"
        torn.write_bytes(torn.read_bytes() + b'{"key": "half an ans')
        done = run(*words)
        assert done.exit_code == 0, done.output
        asked = [str(body) for _, _, body in server.asked]
        assert len(asked) == len(set(asked)) + lost == len(calm.asked) + lost
    assert tree(tmp_path / "killed", but=[".lock"]) == tree(whole, but=[".lock"])


def test_a_server_that_goes_away(tmp_path):
    """The work stops with a sentence; the same command goes on, and asks only what was not answered."""
    with teaching() as server:
        make(
            tmp_path,
            *server_words(server, "--retries", "0", "--stage", "repos", "--stage", "tasks", "--stage", "filter"),
        )
        server.faults, server.always = ["fine"] * 5, 503
        words = server_words(server, "--retries", "0", "--at-once", "1", "--split", "exact", "--out", tmp_path / "out")
        done = run(tmp_path / "kettle", tmp_path / "garden", *words)
        assert (
            done.exit_code == 1
            and "10 requests in a row failed" in done.stderr
            and "the same command asks only for what failed" in done.stderr
        )
        assert len(server.asked) == 8 + 5 + 10
        answered = [str(b) for _, _, b in server.asked[:13]]
        server.always = "fine"
        make(tmp_path, *server_words(server, "--retries", "0"))
        assert not {str(b) for _, _, b in server.asked[23:]} & set(answered)


def test_settings_of_a_failed_start_do_not_stick(tmp_path):
    packages(tmp_path)
    write_tree(tmp_path / "bare", {"Makefile": "all:\n"})
    assert run(tmp_path / "bare", "--out", tmp_path / "out", "--split", "exact").exit_code == 2
    make(tmp_path)


def test_a_folder_of_someone_else_is_left_as_it_was(tmp_path):
    packages(tmp_path)
    write_tree(tmp_path / "home", {"letters/.draft.tmp": "dear", ".notes.tmp": "mine", "a.txt": "x"})
    before = tree(tmp_path / "home")
    done = run(tmp_path / "kettle", "--out", tmp_path / "home")
    assert done.exit_code == 2 and "holds no data of ours ('.notes.tmp')" in done.stderr
    assert tree(tmp_path / "home") == before


def test_two_at_once_are_told_apart(tmp_path):
    from trailmark.runs.store import Run

    packages(tmp_path)
    (tmp_path / "out").mkdir()
    holder = Run(tmp_path / "out")
    holder.lock()
    done = run(tmp_path / "kettle", "--out", tmp_path / "out")
    holder.close()
    assert done.exit_code == 2 and "is in use by process" in done.stderr


class Scripted:
    """Our own server's engine with a script in the model's place."""

    def __new__(cls, lm):
        from trailmark.engines.base import Completion
        from trailmark.engines.local import LocalEngine
        from trailmark.engines.running import Written

        class Engine(LocalEngine):
            async def sample(self, request, on_token=None, top=0, party=None):
                text = (
                    self.tokenizer.decode(request.prompt)
                    .split("<|im_start|>user\n")[-1]
                    .removesuffix("<|im_start|>assistant\n")
                )
                said = script([{"content": text.split("<|im_end|>")[0]}])
                tokens = (*self.tokenizer.encode(said, add_special_tokens=False), *request.stop_ids[:1])
                zeros = (0.0,) * len(tokens)
                done = Completion(tokens, zeros, zeros, said, "stopped")
                for i, t in enumerate(tokens):
                    on_token(Written(0, t, 0.0, 0.0, (), done if i == len(tokens) - 1 else None))
                return [done]

        return Engine(lm, slots=2, max_len=60_000)


def test_our_own_server_as_teacher(tmp_path, make_lm):
    """`trailmark serve`'s application over a socket: scripted, the same data set as from the other server; with a
    random tiny model every answer is nonsense, which is counted."""
    from trailmark.commands.serve import serving
    from trailmark.engines.local import LocalEngine

    lm = make_lm("llama", context=60_000)
    with serving(Scripted(lm), "m", api_key="k") as url:
        out = make(tmp_path, "--teacher", url, "--model", "m", "--api-key", "k")
    with teaching() as server:
        other = make(tmp_path, *server_words(server), out="other")
    names = ["tasks.jsonl", "trajectories.jsonl", "train.jsonl", "sft/steps.jsonl"]
    assert [(out / n).read_bytes() for n in names] == [(other / n).read_bytes() for n in names]
    with serving(LocalEngine(lm, slots=2, max_len=4096), "m", api_key="k") as url:
        words = ["--teacher", f"{url}/v1", "--model", "m", "--files", "1", "--retries", "0"]
        done = run(tmp_path / "garden", "--out", tmp_path / "noise", *words, "--api-key", "k")
        assert done.exit_code == 2 and "1 file: answer without a question" in done.stderr
        refused = run(tmp_path / "garden", "--out", tmp_path / "refused", *words, "--api-key", "wrong")
        assert (
            refused.exit_code == 1
            and "refuses every question" in refused.stderr
            and "API key is wrong" in refused.stderr
        )
