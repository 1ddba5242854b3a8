"""Files laid out as the published Reflect-RL code writes them: `convert` reads them, and `method: sft` trains on each
unchanged."""

import json
from pathlib import Path

import pytest
from format_files import TINY, take
from typer.testing import CliRunner

from trailmark import formats
from trailmark.commands.app import app
from trailmark.methods.sft import conversation_samples
from trailmark.models.tiny import tiny_tokenizer

# Taxi has one more newline before the marker. ALFWorld has its own name for the reflector's file. AutoExplore has
# labels of several digits, and a file whose text holds a marker. Rows have only a text, letters are escaped, and the
# last line has no newline.
BEFORE = {
    "taxi": "Current state:\n+---------+\n|D: |P: :T|\n+---------+\n\n",
    "alfworld": "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Your task is to: put a "
    "tomato in microwave.\n",
    "auto_explore": "# Task:\nWo steht das \u201eTee\u201c-Rezept?\n# Execution Results:\ncat notes.md\nA note on # "
    "Action:\nand more\n",
}
CHOICES = {
    "taxi": "Choose one of the following actions:\n0. south\n1. north\n2. east\n3. west\n4. pick up\n5. drop off\n",
    "alfworld": "Please choose an action:\nAction 0: go to fridge 1\nAction 1: look\n",
    "auto_explore": "# Command options:\n0. cd ..\n17. cat README.md\n173. id README.md\n",
}
LABELS = {"taxi": ["4", "0"], "alfworld": ["0", "1"], "auto_explore": ["173", "17"]}
THOUGHT = ["The passenger waits; going on is right.", "That was a mistake \u2014 go back first."]


def write(folder: Path, scenario: str) -> dict[str, Path]:
    """The published names, two rows each, the second after a mistake."""
    before, list_, labels = BEFORE[scenario], CHOICES[scenario], LABELS[scenario]
    analyze, action = " # Analyze:\n", " # Action:\n"
    texts = {
        "sft": [before + list_ + action + x for x in labels],
        "sft_reflectioner" if scenario == "alfworld" else "sft_reflection": [before + analyze + r for r in THOUGHT],
        "sft_policy": [before + analyze + r + list_ + action + x for r, x in zip(THOUGHT, labels)],
    }
    if scenario == "auto_explore":
        texts |= {f"{name}_positive": texts[name][:1] for name in ("sft_reflection", "sft_policy")}
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.jsonl" for name in texts}
    for name, rows in texts.items():
        paths[name].write_text("\n".join(json.dumps({"text": t}) for t in rows))
    return paths


def answers(scenario, name):
    found = THOUGHT if "reflection" in name else LABELS[scenario]
    return found[:1] if name.endswith("positive") else found


@pytest.mark.parametrize("scenario", BEFORE)
def test_convert_there_and_back(tmp_path, scenario):
    for name, path in write(tmp_path, scenario).items():
        kind = "reflect-reflector" if "reflection" in name else "reflect-policy"
        middle, back = tmp_path / f"{name}-episodes.jsonl", tmp_path / f"{name}-back.jsonl"
        for a, b, x, y in ((path, middle, kind, "episodes"), (middle, back, "episodes", kind)):
            done = CliRunner().invoke(app, ["convert", str(a), str(b), "--from", x, "--to", y, "--tokenizer", "tiny"])
            assert done.exit_code == 0, done.output
        assert take(back) == take(path)
        assert [e.turns[0].text for e in formats.read("episodes", middle, TINY).episodes] == answers(scenario, name)


@pytest.mark.parametrize("scenario", BEFORE)
def test_sft_trains_the_text_after_the_last_marker_and_the_end_of_a_reflection(tmp_path, scenario):
    tokenizer = tiny_tokenizer(["17", "173"])
    for name, path in write(tmp_path, scenario).items():
        samples = [s for row in conversation_samples(tokenizer, str(path), True, 4096) for s in row]
        trained = [tokenizer.decode(s.tokens[s.streams["weight"] != 0]) for s in samples]
        end = "<|im_end|>" if "reflection" in name else ""
        assert trained == [a + end for a in answers(scenario, name)], name
        whole = [tokenizer.decode(s.tokens).removesuffix("<|im_end|>") for s in samples]
        assert whole == [row["text"] for row in take(path)]  # nothing is added, nothing is lost


def test_each_of_our_own_five_files_is_trained_on_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell = CliRunner()
    done = shell.invoke(app, ["data", "taxi", "mode=pickup", "--starts", "2", "--out", "taxi"])
    assert done.exit_code == 0, done.output
    recipe = str(Path(__file__).parents[2] / "recipes/reflect-sft.yaml")
    shape = "model.shape={layers: 1, width: 16, heads: 2, context: 1024}"
    for path in sorted(Path("taxi/oracle").iterdir()):
        words = ["train", recipe, f"data={path}", f"out=runs/{path.stem}", "steps=1", "batch=2", shape]
        done = shell.invoke(app, words)
        assert done.exit_code == 0, done.output
        done = shell.invoke(app, ["verify", f"runs/{path.stem}", "--json"])
        masks = next(c for c in json.loads(done.stdout)["checks"] if c["name"] == "masks")
        assert masks["status"] == "pass", done.output
    done = shell.invoke(
        app, ["train", recipe, "data=taxi/oracle/sft.jsonl", "out=runs/small", "model.shape.context=64"]
    )
    rows = len(take(Path("taxi/oracle/sft.jsonl")))
    assert (
        done.exit_code == 2
        and f"{rows} of {rows} rows are too long" in done.output
        and "model.shape.context=" in done.output
    )


def test_a_text_without_a_marker_is_refused_by_its_line(tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text('{"text": "a # Action:\\n1"}\n{"text": "nothing to learn"}\n')
    with pytest.raises(formats.DataError, match=r"sft.jsonl:2: key 'text': has neither ' # Analyze"):
        conversation_samples(TINY, str(path), True, 64)
    path.write_text('{"text": "a # Action:\\n1"}\n{"text": "a # Analyze:\\nb"}\n')
    with pytest.raises(formats.DataError, match="holds 1 reflections and 1 actions"):
        conversation_samples(TINY, str(path), True, 64)
