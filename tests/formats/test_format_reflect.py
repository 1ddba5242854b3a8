import pytest
from format_files import FEW, TINY, TRAINED, more, put, say, take, texts, there_and_back
from hypothesis import assume, given
from hypothesis import strategies as st

from trailmark import formats
from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import DataError
from trailmark.methods.reflect.formats import ACTION, ANALYZE, SftStep, split
from trailmark.rollout.play import Seat, play, solo
from trailmark.tasks.taxi import Taxi

STEP = SftStep("You are at A.\n", "B is east.", "Choose:\n0. south\n2. east\n", "2")


def write_sft_files(folder, steps):
    made = [step.texts() for step in steps]
    kinds = ("sft", "sft_policy", "sft_reflection")
    return {kind: put(folder, [{"text": texts[kind]} for texts in made], True, kind) for kind in kinds}


def test_files_by_hand(tmp_path):
    bad = SftStep("You hit a wall.\n", "That was wrong.", "Choose:\n1. north\n", "1", positive=False)
    paths = write_sft_files(tmp_path, [STEP, bad])
    told = {name: [r["text"] for r in take(path)] for name, path in paths.items()}
    assert told["sft"][0] == "You are at A.\nChoose:\n0. south\n2. east\n # Action:\n2"
    assert told["sft_reflection"][0] == "You are at A.\n # Analyze:\nB is east."
    assert told["sft_policy"][0] == ("You are at A.\n # Analyze:\nB is east.Choose:\n0. south\n2. east\n # Action:\n2")
    assert [len(told[n]) for n in ("sft", "sft_policy", "sft_reflection")] == [2, 2, 2]

    (thought, _) = formats.read("reflect-reflector", paths["sft_reflection"], TINY).episodes
    assert (thought.turns[0].seat, say(thought.turns[0].tokens)) == ("reflector", "B is east.<|im_end|>")
    (choice, _) = formats.read("reflect-policy", paths["sft_policy"], TINY).episodes
    assert (choice.turns[0].seat, say(choice.turns[0].tokens)) == ("policy", "2")  # one token without an end
    assert say(choice.turns[0].prompt) == told["sft_policy"][0][:-1]


@FEW
@given(st.lists(st.builds(SftStep, texts, texts, texts, st.sampled_from(["0", "17", "z"])), min_size=1, max_size=3))
def test_parts_come_back(tmp_path_factory, steps):
    assume(all(ANALYZE not in s.reflection for s in steps))
    paths = write_sft_files(tmp_path_factory.mktemp("five"), steps)
    thoughts = formats.read("reflect-reflector", paths["sft_reflection"], TINY).episodes
    choices = formats.read("reflect-policy", paths["sft_policy"], TINY).episodes
    assert [e.turns[0].text for e in thoughts] == [s.reflection for s in steps]
    assert [e.task.data["prompt"] for e in thoughts] == [s.before + ANALYZE for s in steps]
    assert [e.turns[0].text for e in choices] == [s.label for s in steps]


@FEW
@given(st.lists(st.tuples(texts, texts, more), min_size=1, max_size=3),
       st.sampled_from(["reflect-policy", "reflect-reflector"]),
       st.sampled_from([TINY, TRAINED]))  # fmt: skip
def test_there_and_back(rows, name, tokenizer):
    marker = ACTION if name == "reflect-policy" else ANALYZE
    made = [{"text": a + marker + b + "!", **rest} for a, b, rest in rows]
    found = there_and_back(name, made, tokenizer)
    for e, row in zip(found.episodes, made):
        at = row["text"].rindex(marker) + len(marker)  # the last marker splits the text
        assert (e.task.data["prompt"], e.turns[0].text) == (row["text"][:at], row["text"][at:])


def test_what_could_not_be_read_back_is_refused(tmp_path):
    for step in (SftStep("a", f"b{ANALYZE}c", "d", "1"), SftStep("a", "b", "d", f"1{ACTION}")):
        with pytest.raises(DataError, match="must follow the marker"):
            step.texts()
    with pytest.raises(DataError, match=r"in.jsonl:1: key 'text': the text has no marker ' # Action:\\n'"):
        formats.read("reflect-policy", put(tmp_path, [{"text": "a # Action:2"}], lines=True), TINY)
    assert split("a # Action:\n # Action:\n1", ACTION) == ("a # Action:\n # Action:\n", "1")


def test_played_turns_become_rows(tmp_path):
    engine = ScriptedEngine(lambda prompt, draw: "1", TINY)
    source = Taxi(horizon=3)
    (e,) = play(source, source.tasks(n=1), [Seat("policy", engine)], solo(suffix=ACTION))
    formats.write("reflect-policy", tmp_path / "sft.jsonl", [e], TINY)
    back = formats.read("reflect-policy", tmp_path / "sft.jsonl", TINY).episodes
    assert len(back) == len(e.turns) > 1
    assert [b.turns[0].prompt + b.turns[0].tokens for b in back] == [t.prompt + t.tokens for t in e.turns]
