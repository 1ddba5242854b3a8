"""Every command gets odd input in the place of its files, runs and numbers: it answers in a sentence, not a
traceback."""

import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.report import plots

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
prompts_per_step: 1
n: 2
task: {name: arith, options: {level: 1}}
sampling: {max_tokens: 2}
model: {name: tiny, shape: {layers: 1, width: 16, heads: 2, context: 64}}
engine: {max_num_seqs: 2}
eval: {every: 1, n: 2}
"""
# a server and a person at the keyboard would wait; a quickstart takes no file but its folder
LEFT_OUT = {"quickstart", "serve", "play"}


MAIN = typer.main.get_command(app)  # built once: that takes longer than most refusals


def commands(group, above=()):
    """Every command: its words and what it takes."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*above, name))
        elif name not in LEFT_OUT:
            yield (*above, name), command


COMMANDS = dict(commands(MAIN))


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Odd files and odd runs by name, in a folder."""
    home = tmp_path_factory.mktemp("odd")
    (home / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 2)
    for name, text in (("sft.yaml", SFT), ("played.yaml", PLAYED)):
        (home / name).write_text(text)
    with pytest.MonkeyPatch.context() as m:
        m.chdir(home)
        for name in ("sft.yaml", "played.yaml"):
            done = CliRunner().invoke(app, ["train", name])
            assert done.exit_code == 0, done.output
    for name, data in FILES.items():
        (home / name).write_bytes(data)
    (home / "folder" / "inside").mkdir(parents=True)
    for name, change in RUNS.items():
        shutil.copytree(home / "played", home / name)
        for path, data in change.items():
            there = home / name / path
            if data is None or data is dict:
                (shutil.rmtree if there.is_dir() else Path.unlink)(there)
            if data is dict:
                there.mkdir()
            elif data is not None:
                there.write_bytes(data)
    return home


FILES = {
    "empty": b"",
    "blank": b"\n\n \n",
    "nul": b"a\0b\n" * 9,
    "bom": b"\xff\xfe{\0}\0",
    "latin": b'{"prompt": "caf\xe9"}\n',
    "list": b"[1, 2]\n",
    "number": b"7\n",
    "null": b"null\n",
    "objects": b"{}\n{}\n",
    "cut": b'{"id": "a", "te',
    "nan": b'{"id": NaN, "text": 1e999, "reward": -Infinity}\n',
    "row": b'{"id": "a", "prompt": "b", "text": "c", "response": "d", "reward": 1}',
    "wrong.yaml": b"method: [sft\n",
    "tabs.yaml": b"\tmethod: sft\n",
    "huge.yaml": b"method: sft\nsteps: 99999999999999999999999\n",
}
RUNS: dict[str, dict[str, Any]] = {  # files of a run that are gone, a folder (dict), or hold these bytes
    "no-recipe": {"recipe.yaml": None},
    "no-metrics": {"metrics.jsonl": None},
    "no-checkpoint": {"checkpoints": None},
    "list-recipe": {"recipe.yaml": b"[1, 2]\n"},
    "binary-recipe": {"recipe.yaml": b"\xff\0\xfe"},
    "other-recipe": {"recipe.yaml": SFT.encode()},
    "many-digits": {"metrics.jsonl": b'{"step": 1, "reward": 1' + b"0" * 400 + b"}\n"},
    "huge-metrics": {"metrics.jsonl": b'{"step": 1, "reward": 1e308}\n{"step": 2, "reward": -1e308}\n'},
    "odd-state": {"checkpoints/000001/state.json": b"[]"},
    "odd-episodes": {"episodes/000001.jsonl": b'{"id": 7}\n'},
    "folders": {"metrics.jsonl": dict, "versions.json": dict},
}
KINDS = [*FILES, *RUNS, "folder", "nothing-here", "/dev/null", "x" * 300, ""]


def words_for(command, thing):
    """The command's words with `thing` in the place of every file, and of every other argument."""
    words = []
    for p in command.params:
        if p.param_type_name == "argument":
            named = "=" in (p.metavar or "")
            words += [f"{'ab'[k]}={thing}" if named else thing for k in range(2 if p.nargs == -1 else 1)]
        elif p.required:
            other = {"out": "out-here", "server": "http://127.0.0.1:9"}
            words += [p.opts[0], other.get(p.name, thing)]
    return words


@pytest.fixture
def told(capsys):
    def told(*words):
        with pytest.raises(SystemExit) as ended:
            MAIN.main(list(words), prog_name="trailmark")
        said = capsys.readouterr().err
        assert "Traceback" not in said and "bug of trailmark" not in said, (words, said[-2000:])
        assert ended.value.code in (None, 0, 1, 2), (words, said)

    return told


@pytest.fixture
def here(odd, tmp_path, monkeypatch):
    shutil.copytree(odd, tmp_path / "odd")
    monkeypatch.chdir(tmp_path / "odd")
    monkeypatch.setattr(plots, "_save", lambda figure, path: path)  # drawing takes a second each


@pytest.mark.parametrize("name", COMMANDS, ids="-".join)
def test_no_command_answers_with_a_traceback(here, told, name):
    for words in dict.fromkeys(tuple(words_for(COMMANDS[name], thing)) for thing in KINDS):
        if words:
            told(*name, *words)


@pytest.mark.parametrize("name", COMMANDS, ids="-".join)
def test_numbers_that_make_no_sense(here, told, name):
    """Each option that is a number, with each of these in its place."""
    hints = get_type_hints(COMMANDS[name].callback)
    for p in COMMANDS[name].params:
        if p.param_type_name == "option" and {int, float} & {hints[p.name], *get_args(hints[p.name])}:
            for number in ("-1", "nan", "9" * 30):
                told(*name, *words_for(COMMANDS[name], "row"), p.opts[0], number)
