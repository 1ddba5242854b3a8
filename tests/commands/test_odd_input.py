"""Every command gets odd input in the place of its files, runs and numbers: it answers in a sentence, not a
traceback."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from trailmark.commands.app import app

SFT = """
method: sft
data: rows.jsonl
out: run
steps: 1
batch: 2
model: {name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 64}}
"""
PLAYED = """
method: policy_gradient
out: played
steps: 1
starts: 1
n: 2
task: {name: arith, options: {level: 1}}
sampling: {max_tokens: 2}
model: {name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 64}}
engine: {slots: 2}
eval: {every: 1, n: 2}
"""
# a server and a person at the keyboard would wait; a quickstart takes no file but its folder
LEFT_OUT = {"quickstart", "serve", "play"}


def commands(group=None, above=()):
    """Every command: its words and its click command."""
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*above, name))
        elif name not in LEFT_OUT:
            yield (*above, name), command


COMMANDS = dict(commands())


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Odd things by name, in a folder."""
    home = tmp_path_factory.mktemp("odd")
    files = {
        "empty": b"", "blank": b"\n\n \n", "nul": b"a\0b\n" * 9, "latin": b'{"prompt": "caf\xe9"}\n', "bom": b"\xff\xfe{\0}\0",
        "list": b"[1, 2]\n", "number": b"7\n", "null": b"null\n", "objects": b"{}\n{}\n", "cut": b'{"id": "a", "te',
        "nan": b'{"id": NaN, "text": 1e999, "reward": -Infinity}\n', "deep": b"[" * 5000, "text.yaml": b"method: [sft\n",
        "huge.yaml": b"method: sft\nsteps: 99999999999999999999999\n", "tabs.yaml": b"\tmethod: sft\n",
    }  # fmt: skip
    for name, data in files.items():
        (home / name).write_bytes(data)
    (home / "folder" / "inside").mkdir(parents=True)
    (home / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 2)
    for name, text in (("sft.yaml", SFT), ("played.yaml", PLAYED)):
        (home / name).write_text(text)
    with pytest.MonkeyPatch.context() as m:
        m.chdir(home)
        for name in ("sft.yaml", "played.yaml"):
            done = CliRunner().invoke(app, ["train", name])
            assert done.exit_code == 0, done.output

    def half(name, *gone, **written):
        """A copy of a run without some of its files, and with others."""
        shutil.copytree(home / "played", home / name)
        for path in gone:
            (shutil.rmtree if (home / name / path).is_dir() else Path.unlink)(home / name / path)
        for path, data in written.items():
            (home / name / path.replace("__", "/").replace("_json", ".json")).write_bytes(data)

    half("only-recipe", "metrics.jsonl", "timings.jsonl", "checkpoints", "episodes", "evaluation", "annotations")
    half("no-recipe", "recipe.yaml")
    half("no-metrics", "metrics.jsonl")
    half("no-checkpoint", "checkpoints")
    half("binary-recipe")
    (home / "binary-recipe/recipe.yaml").write_bytes(b"\xff\0\xfe")
    half("list-recipe")
    (home / "list-recipe/recipe.yaml").write_bytes(b"[1, 2]\n")
    half("other-method")
    (home / "other-method/recipe.yaml").write_text((home / "run/recipe.yaml").read_text())
    half("odd-metrics", metrics_jsonl=b'{"step": "one"}\n{"step": null, "reward": [1]}\n')
    half("huge-metrics", metrics_jsonl=b'{"step": 1, "reward": 1e308}\n{"step": 2, "reward": -1e308}\n')
    half("odd-state", checkpoints__000001__state_json=b"[]")
    half("odd-episodes", episodes__000001_jsonl=b'{"id": 7}\n')
    half("folders")
    for name in ("metrics.jsonl", "versions.json"):
        (home / "folders" / name).unlink()
        (home / "folders" / name).mkdir()
    (home / "stub.jsonl").write_text(json.dumps({"id": "a", "prompt": "b", "text": "c", "response": "d", "reward": 1}))
    return home


KINDS = [
    "empty", "blank", "nul", "latin", "bom", "list", "number", "null", "objects", "cut", "nan", "deep", "text.yaml",
    "huge.yaml", "tabs.yaml", "folder", "stub.jsonl", "nothing-here", "only-recipe", "no-recipe", "no-metrics",
    "no-checkpoint", "binary-recipe", "list-recipe", "other-method", "odd-metrics", "huge-metrics", "odd-state",
    "odd-episodes", "folders", "sft.yaml", "run", "/dev/null", "x" * 300, "",
]  # fmt: skip


def words_for(command, thing):
    """The command's words with `thing` in the place of every file, and of every other argument."""
    words = []
    for p in command.params:
        if p.param_type_name == "argument":
            said = p.name in ("variants", "systems", "answers", "files") and "=" in (p.metavar or "")
            words += [f"{'ab'[k]}={thing}" if said else thing for k in range(2 if p.nargs == -1 else 1)]
        elif p.required:
            words += [
                p.opts[0],
                "out-here" if p.name == "out" else "http://127.0.0.1:9" if p.name == "server" else thing,
            ]
    return words


def told(words):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert "Traceback" not in done.stderr and "bug of trailmark" not in done.stderr, (words, done.stderr[-2000:])
    assert done.exit_code in (0, 1, 2), (words, done.output)
    return done


def content(home):
    return {p: p.read_bytes() for p in home.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize("name", COMMANDS, ids="-".join)
def test_no_command_answers_with_a_traceback(odd, tmp_path, monkeypatch, name):
    home = tmp_path / "odd"
    shutil.copytree(odd, home)
    monkeypatch.chdir(home)
    for thing in KINDS:
        told([*name, *words_for(COMMANDS[name], thing)])


@pytest.mark.parametrize("name", COMMANDS, ids="-".join)
def test_numbers_that_make_no_sense(odd, tmp_path, monkeypatch, name):
    """Each option of a number, with each of these in its place."""
    home = tmp_path / "odd"
    shutil.copytree(odd, home)
    monkeypatch.chdir(home)
    for p in COMMANDS[name].params:
        if p.param_type_name == "option" and p.type.name in ("integer", "float", "integer range", "float range"):
            for number in ("-1", "0", "nan", "1e999", "9" * 30, "x", ""):
                told([*name, *words_for(COMMANDS[name], "stub.jsonl"), p.opts[0], number])
