import re

import pytest
from report_runs import add_evaluation, episode, make_run, turn
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.report.terminal import _plain
from trailmark.runs.episode_json import to_json
from trailmark.runs.store import write_segment
from trailmark.types import Annotation


def call(*words):
    return CliRunner().invoke(app, ["inspect", *map(str, words)])


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_a_line_for_each_episode(run):
    done = call(run.episodes_dir / "000001.jsonl", "--no-color")
    assert done.exit_code == 0 and done.stdout.splitlines() == [
        "1:0  no success -3  4 turns  36 written (2 trained on)  terminated",
        "1:1  success 3  4 turns  36 written (2 trained on)  terminated",
        "1:2  no success -3  4 turns  36 written (2 trained on)  terminated",
        "1:3  success 3  4 turns  36 written (2 trained on)  terminated",
        "1:broken  failed: engine: gone  1 turn  20 written (0 trained on)",
    ]
    assert len(call(run.path).stdout.splitlines()) == 13  # of a run: all its iterations
    only = call(run.episodes_dir / "000040.jsonl", "--seat", "policy", "--no-color").stdout.splitlines()
    assert only[0] == "40:0  success 3  2 turns  2 written (2 trained on)  terminated"


def test_one_episode_in_detail(run):
    done = call(run.path, "--episode", "40:0", "--no-color")
    out = done.stdout
    assert done.exit_code == 0 and "\x1b" not in out
    assert "turn 0  reflector  frozen tiny version 0  stop: stop" in out
    assert "  prompt, 20 tokens\n    Map 0: T..P\n    Thought:\n  forced, 6 tokens\n     Well.\n" in out
    assert "  written, 20 tokens, not trained on\n    Go north, then east.\n" in out
    assert "turn 2  reflector  frozen tiny version 0  continues turn 0  stop: length" in out
    assert " Nearly│ there." in out  # two steps
    row = next(line.split() for line in out.splitlines() if re.match(r"\s+0\s+'1'", line))
    # token 0 of the last turn: id 16, step 0, trained, log-prob -0.1, half of it under the law, return 4, value 0.5
    assert row == ["0", "'1'", "16", "0", "yes", "-0.100", "-0.050", "4.000", "0.500"]
    assert "  action '1'  reward 4" in out and "colours: advantage (return to go)" in out
    seen = call(run.path, "--episode", "40:0", "--no-color", "--seat", "policy", "--no-tokens").stdout
    assert "reflector" not in seen and "log-prob" not in seen and "turn 3  policy" in seen


@pytest.mark.parametrize(
    "by, background",
    [
        ("advantage", "44;111;209"),  # the largest absolute value, and negative: full blue
        ("logp", "32;8;23"),  # -0.1 of -6 nats: 0.15 + 0.85 / 60 of the colour
        ("mask", "42;157;92"),
        ("step", "35;96;165"),
    ],
)
def test_colours(tmp_path, by, background):
    e, file = episode("only", win=False), tmp_path / "episodes/000001.jsonl"
    file.parent.mkdir()
    write_segment(tmp_path / "annotations/advantage", 1, [Annotation("only", "advantage", "turn", (-3.0,), 0)])
    wordy = turn("policy", "Go", "abcdefghij", reward=-3.0, action="x")
    file.write_text(to_json(type(e)("only", e.task, "g", (wordy,), e.outcomes, players=e.players)) + "\n")
    out = call(file, "--tokenizer", "tiny", "--color", "--by", by, "--no-tokens").stdout
    assert f"48;2;{background}ma" in out.split("written, 10 tokens")[1]


def test_annotated_advantages_win(run):
    notes = [Annotation("40:1", "advantage", "turn", (7.5,), turn=3)]
    write_segment(run.annotations_dir("advantage"), 40, notes)
    out = call(run.path, "--episode", "40:1", "--no-color").stdout
    assert "colours: advantage (annotated)" in out and re.search(r"'1'\s+16\s+0\s+yes\s+-0.100\s+-0.050\s+7.500", out)


def test_credit_that_was_not_stored_is_said_to_be_missing(run):
    for path in (run.path / "annotations/advantage").iterdir():
        path.unlink()
    out = call(run.path, "--episode", "40:0", "--no-color").stdout
    assert "no colours: credit was not stored; the rewards are shown below each turn" in out
    row = next(line.split() for line in out.splitlines() if re.match(r"\s+0\s+'1'", line))
    assert row == ["0", "'1'", "16", "0", "yes", "-0.100", "-0.050", "0.500"]  # no advantage; the value is still there
    assert "action '1'  reward 4" in out
    add_evaluation(run, "000040", 1, 2)
    out = call(run.path / "evaluation/000040.jsonl", "--episode", "000040:0", "--no-color").stdout
    assert "an evaluation trains nothing, so it has no credit" in out


def test_without_a_tokenizer_the_text_is_shown(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text(to_json(episode("a")) + "\n" + '{"id": "cut')
    done = call(file)
    assert done.exit_code == 0 and "Go north, then east." in done.stdout and "name one with --tokenizer" in done.stdout
    assert done.stderr == "some.jsonl: 1 unreadable or unfinished lines left out\n"
    add_evaluation(make_run(tmp_path / "run"), "sft", 1, 2)
    assert "(0 trained on)" in call(tmp_path / "run/evaluation/sft.jsonl", "--no-color").stdout


def test_the_text_of_a_model_does_not_control_the_terminal(tmp_path):
    assert _plain("a\x1b[2Jb\x07\n\x9b") == "a␛[2Jb␇\n␡"
    file = tmp_path / "evil.jsonl"
    file.write_text(to_json(episode("e\x1b[31m", say="[bold]x[/bold] \x1b[2J")) + "\n")
    for more in ([], ["--tokenizer", "tiny"]):
        out = call(file, "--no-color", *more).stdout
        assert "\x1b" not in out and "[bold]x[/bold] ␛[2J" in out


def test_mistakes_are_sentences(run, tmp_path):
    for words, said in [
        ([tmp_path / "none"], "there is no such file or folder."),
        ([tmp_path], "holds no episodes"),
        ([run.path, "--episode", "40:9"], "holds no episode '40:9'. Did you mean '40:"),
        ([run.path, "--episode", "zzz"], "holds no episode 'zzz'. It holds 13, such as '1:0'."),
        ([run.path, "--episode", "40:0", "--seat", "polcy"], "has no seat 'polcy'. Did you mean 'policy'?"),
        ([run.recipe_file], "holds no episode that can be read."),
    ]:
        done = call(*words)
        assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_an_unknown_seat_is_refused_and_the_seats_are_named(run):
    for words in ([run.path], [run.path, "--episode", "40:0"], [run.episodes_dir / "000001.jsonl"]):
        done = call(*words, "--seat", "zzz", "--no-color")
        assert done.exit_code == 2 and done.stdout == "", done.stdout
        assert "no seat 'zzz'" in done.stderr or "no episode has a seat 'zzz'" in done.stderr
        assert "Known: policy, reflector." in done.stderr
    assert "Did you mean 'policy'?" in call(run.path, "--seat", "polcy").stderr
    file = run.episodes_dir / "000001.jsonl"
    for command in (["eval", "--episodes", str(file)], ["compare", str(file), str(file)]):
        done = CliRunner().invoke(app, [*command, "--seat", "zzz"])
        assert done.exit_code == 2 and "no episode has a seat 'zzz'. Known: policy, reflector." in done.stderr


def test_annotations_that_do_not_fit_are_named_with_file_and_line(run):
    file = run.annotations_dir("advantage") / "000040.jsonl"
    good = Annotation("40:1", "advantage", "turn", (7.5,), turn=3)
    bad = [
        Annotation("40:1", "advantage", "token", (1.0, 2.0), turn=1),
        Annotation("41:1", "advantage", "turn", (1.0,), turn=1),
    ]
    write_segment(file.parent, 40, [good, *bad])
    done = call(run.path, "--episode", "40:1", "--no-color")
    assert done.exit_code == 0 and "7.500" in done.stdout
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"warning: {file}:2: has 2 numbers where the tokens of turn 1 of episode '40:1' need ")
    assert lines[1] == f"warning: {file}:3: is about episode '41:1', which 000040.jsonl does not hold."
    file.write_bytes(file.read_bytes()[:-9])
    cut = f"warning: {file}:3: the line is cut off: it does not end with a newline."
    assert cut in call(run.episodes_dir / "000040.jsonl").stderr
    write_segment(file.parent, 40, [good, *bad, *bad, *bad])
    assert "warning: 3 more annotations of 000040.jsonl do not fit" in call(run.path).stderr


def test_what_a_judge_noted_about_an_evaluation_is_shown(run):
    add_evaluation(run, "000040", 1, 2)
    path = run.path / "evaluation/000040.annotations.jsonl"
    path.write_text(to_json(Annotation("000040:0", "judge_score", "episode", (4.25,), None, "judge wise@1")) + "\n")
    out = call(run.path / "evaluation/000040.jsonl", "--episode", "000040:0", "--no-color").stdout
    assert "judge_score" in out and "4.25" in out
    assert call(run.path / "evaluation").exit_code == 0  # it is no file of episodes
