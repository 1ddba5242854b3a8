"""The page of a run: what is in it, that it opens for unfinished runs, and how it behaves in Chromium."""

import json
import re
import shutil
from pathlib import Path

import pytest
from report_chrome import BINARY, Chrome
from report_runs import EVIL, RECIPE, WORDS, add_evaluation, episode, ids, make_run
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import dump
from trailmark.episodes import evenly
from trailmark.marked_yaml import parse
from trailmark.methods import get_method
from trailmark.report import write_report
from trailmark.report.concerns import concerns
from trailmark.report.episodes import LONGEST, Texts, on_tokens, starts
from trailmark.report.page import build
from trailmark.report.pieces import Pieces
from trailmark.report.plots import smooth
from trailmark.report.tables import POINTS, curves
from trailmark.runs.store import Run, write_segment
from trailmark.types import Annotation, SamplingLaw, Turn


def call(*words):
    return CliRunner().invoke(app, [str(w) for w in words])


def data_of(page):
    text = page.read_text("utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


# --- what is computed ----------------------------------------------------------------------------------------------


def test_pieces_join_to_the_text_and_a_character_of_several_tokens_belongs_to_the_last():
    pieces = Pieces(default=WORDS)
    assert pieces.of("policy", ids("ab é!")) == ["a", "b", " ", "", "é", "!"]
    assert "".join(pieces.of("policy", ids("naïve 中🙂 text\n"))) == "naïve 中🙂 text\n"
    assert pieces.of("policy", ids("é")[:1]) == ["\ufffd"]  # half a character at the end


def test_pieces_of_another_tokenizer_are_not_believed():
    pieces = Pieces(default=WORDS)
    assert pieces.fits(Turn("policy", (), ids("yes"), text="yes"))
    assert not pieces.fits(Turn("reflector", (), ids("yes"), text="no"))
    assert pieces.of("reflector", ids("yes")) is None and pieces.of("policy", ids("yes")) == ["y", "e", "s"]
    assert Pieces().of("policy", (1, 2)) is None


def test_a_tokenizer_that_marks_words_by_their_space_keeps_it():
    from tokenizers import Tokenizer, decoders, models

    core = Tokenizer(models.WordLevel({"▁Hello": 0, "▁world": 1, "!": 2}, unk_token="!"))
    core.decoder = decoders.Metaspace()
    assert Pieces(default=core).of("policy", (0, 1, 2)) == ["Hello", " world", "!"]
    assert Pieces(default=core).of("policy", (1, 2), before=(0,)) == [" world", "!"]


def shown_credit(data):
    """Source -> episode -> the advantage of each turn, as the page has it."""
    return {
        s["name"]: (s["credit"], {e["id"]: [t["a"] for t in e["turns"]] for e in s["episodes"]})
        for s in data["sources"]
    }


def test_credit_is_what_was_stored_whatever_the_recipe_says(tmp_path):
    """The numbers on the page are those of the annotations: planted ones, which no rule gives, and under any recipe."""
    run = make_run(tmp_path / "r", done=2, steps=2)
    add_evaluation(run, "000002", 1, 1)
    name, numbers = shown_credit(build(run.path))["iteration 2"]
    assert name == "return to go" and numbers["2:0"] == [
        None,
        1.0,
        None,
        4.0,
    ]  # -1 + 4 / 2, and 4; the reflector is frozen
    planted = [Annotation(f"2:{k}", "advantage", "turn", (k + 0.125,), 3, "planted") for k in range(4)]
    planted[0] = Annotation("2:0", "advantage", "token", (77.5,), 3, "planted")
    run.annotate(2, planted)
    for credit, gamma in (("returns", 0.5), ("group", 1.0), ("leave_one_out", 0.1)):
        run.recipe_file.write_text(RECIPE.format(steps=2).replace("returns", credit).replace("0.5", str(gamma)))
        name, numbers = shown_credit(build(run.path))["iteration 2"]
        assert name == "planted" and numbers == {
            f"2:{k}": [None, None, None, 77.5 if k == 0 else k + 0.125] for k in range(4)
        }
        assert shown_credit(build(run.path))["evaluation after step 2"] == (None, {"000002:0": [None] * 4})


def test_credit_that_was_not_stored_is_not_made_up(tmp_path):
    run = make_run(tmp_path / "r", done=2, steps=2)
    shutil.rmtree(run.path / "annotations")
    for name, numbers in shown_credit(build(run.path)).values():
        assert name is None and all(a is None for turns in numbers.values() for a in turns)


def test_annotations_land_on_tokens():
    t = Turn("policy", (1,), (5, 6, 7, 8), steps=((0, 1), (1, 4)))
    note = lambda level, values, turn=2: Annotation("e", "v", level, values, turn)
    assert on_tokens(t, 2, [note("token", (1.0, 2.0, 3.0, 4.0))]) == [1, 2, 3, 4]
    assert on_tokens(t, 2, [note("step", (1.0, 2.0))]) == [1, 2, 2, 2]
    assert (
        on_tokens(t, 2, [note("turn", (3.0,))]) == [3] * 4
        and on_tokens(t, 2, [note("episode", (3.0,), None)]) == [3] * 4
    )
    assert on_tokens(t, 1, [note("turn", (3.0,))]) is None and on_tokens(t, 2, [note("token", (1.0,))]) is None


def test_equal_worlds_are_one_start_whatever_they_are_called():
    a, b, c = episode("a", 0), episode("b", 0), episode("c", 1)
    renamed = type(b.task)("later-17", data=b.task.data)
    b = type(b)(b.id, renamed, b.group, b.turns, b.outcomes)
    assert starts([a, b, c]) == {"start-0": "start-0", "later-17": "start-0", "start-1": "start-1"}


def test_curves_pair_training_with_evaluation_and_are_thinned():
    rows = [{"step": 1, "x": 1, "loss": 2.0, "eval/x": 3, "note": "no number"}, {"step": 2, "x": 5}]
    assert curves(rows, [{"step": 1, "seconds": 9}]) == [
        {"name": "loss", "train": [[1, 2.0]], "eval": []},
        {"name": "x", "train": [[1, 1], [2, 5]], "eval": [[1, 3]]},
        {"name": "time/seconds", "train": [[1, 9]], "eval": []},
    ]
    many = curves([{"step": s, "x": float(s)} for s in range(1, 2 * POINTS + 1)])[0]["train"]
    assert len(many) == POINTS and many[0] == [2, 1.5] and many[-1] == [2 * POINTS, 2 * POINTS - 0.5]
    assert smooth([1.0, 3.0], 0.5) == [1.0, 3.5 / 1.5]
    assert evenly(list(range(10)), 4) == [0, 3, 6, 9] and evenly([1, 2], 4) == [1, 2]


def test_concerns_name_what_is_wrong():
    line = lambda values: [[i + 1, v] for i, v in enumerate(values)]
    panel = lambda name, values: {"name": name, "train": line(values), "eval": []}
    say = lambda panels, episodes=(), recipe=None, state="finished": [
        c["text"] for c in concerns(panels, episodes, recipe or {"steps": 9}, state, 9, {})
    ]
    assert say([panel("success", [i / 20 for i in range(20)]), panel("grad_norm", [1.0] * 20)]) == []
    assert say([panel("failed", [0, 2, 0, 1])]) == [
        "3 episodes failed (a crash of a world, an engine or a judge), in no average: 2 steps, the first 2."
    ]
    assert say([panel("success", [0.1, 0.2] * 10)]) == [
        "Success has not moved: 15.0% over the first 4 steps, 15.0% over the last 4."
    ]
    assert say([panel("grad_norm", [1.0] * 12 + [30.0] + [1.0])])[0].startswith(
        "grad_norm spikes in 1 step: 30 at step 13"
    )
    assert say([panel("kl_old", [0.0001] * 12 + [0.04])]) == []  # too small to count
    assert say([panel("kl_old", [0.0001] * 12 + [0.4])])[0].startswith("kl_old spikes")
    assert say([panel("entropy", [2.0] * 9 + [0.01] * 3)])[0].startswith("Entropy has collapsed from 2 to 0.01")
    assert "no process works on it" in say([], state="stopped")[0] and "got no better" in say([], state="early")[0]
    e = episode("e")
    assert say([], [e, e], {"credit": "group"})[-1].startswith(
        "In 1 of 1 groups on this page all episodes earned the same"
    )


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("reflect", "thought"),
        ("policy_gradient", "sampling.max_tokens"),
        ("oreo_rounds", "collect.sampling.max_tokens"),
        (None, "max_tokens"),  # a recipe that cannot be read
    ],
)
def test_turns_that_are_cut_off_name_the_key_of_their_recipe(method, key):
    """The recipe is the method's own, with all its defaults."""
    written = "" if method is None else dump(get_method(method).Config(method=method, steps=10_000))
    recipe = parse(written, "recipe.yaml")[0] or {}
    cut, whole = (Turn("reflector", (1,), (2,), stop=stop) for stop in ("length", "stopped"))
    chosen = Turn("policy", (1,), (2,), law=SamplingLaw(allowed=(2, 3)), stop="label")  # a label is not cut off
    e = episode("e")
    said = lambda *turns: [
        c["text"] for c in concerns([], [type(e)("e", e.task, "g", turns, e.outcomes)], recipe, "finished", 9, {})
    ]
    assert said(cut, chosen, whole, chosen) == [
        f"50% of the turns were cut off at their length limit: raise the recipe's '{key}'?"
    ]
    assert said(cut, *[whole] * 9) == []


def test_long_prompts_are_cut_and_equal_ones_kept_once():
    texts = Texts()
    assert (texts.put("a"), texts.put("b"), texts.put("a")) == (0, 1, 0) and texts.size == 2
    long = texts.all[texts.put("x" * (LONGEST + 5))]
    assert "[… 5 characters left out …]" in long and len(long) < LONGEST + 50


# --- the file ------------------------------------------------------------------------------------------------------


def test_report_command_writes_page_and_plots(tmp_path):
    run = make_run(tmp_path / "run")
    add_evaluation(run, "sft", 2)
    add_evaluation(run, "rl", 9)
    add_evaluation(run, "000040", 5)
    done = call("report", run.path)
    assert (done.exit_code, done.stdout) == (0, f"{run.path / 'report.html'}\n")
    data = data_of(run.path / "report.html")
    assert (data["state"], data["step"], data["iterations"], data["checkpoints"]) == ("finished", 40, 3, [40])
    rows = {r["name"]: r for r in data["evaluation"]}
    # Wilson's interval of 9 in 10, by hand: (0.9 + 0.19207 ± 1.96 sqrt(0.009 + 0.0096036)) / 1.38415
    assert list(rows) == ["after step 40", "rl", "sft"] and rows["rl"]["wins"] == 9
    assert (rows["rl"]["low"], rows["rl"]["high"]) == (
        pytest.approx(0.59585, abs=1e-5),
        pytest.approx(0.98212, abs=1e-5),
    )
    names = {p.name for p in (run.path / "plots").iterdir()}
    assert {"all.png", "reward.png", "success.png", "time-seconds.png"} <= names
    assert (run.path / "plots/reward.png").read_bytes().startswith(b"\x89PNG")
    first = data["sources"][0]["episodes"][0]
    assert [t["seat"] for t in first["turns"]] == ["reflector", "policy"] * 2
    reflector, policy = first["turns"][2], first["turns"][3]
    assert (
        not reflector["on"] and reflector["steps"] == [[0, 7], [7, 14]] and "".join(reflector["w"]) == " Nearly there."
    )
    assert policy["on"] and policy["n"] == {"value": [0.5]} and policy["law"] == "4 tokens allowed"
    assert data["texts"][first["turns"][0]["f"]] == " Well."
    assert not any(t["on"] for e in data["sources"][-1]["episodes"] for t in e["turns"])  # an evaluation trains nothing
    assert first["start"] == data["sources"][-1]["episodes"][0]["start"] == "start-0"


def test_out_and_no_plots(tmp_path):
    run = make_run(tmp_path / "run")
    assert call("report", run.path, "--out", tmp_path / "deep/page.html", "--no-plots").exit_code == 0
    assert (tmp_path / "deep/page.html").is_file() and not (run.path / "report.html").exists()
    assert not (tmp_path / "deep/plots").exists() and not (run.path / "plots").exists()


def test_no_run_is_a_sentence(tmp_path):
    done = call("report", tmp_path / "none")
    assert done.exit_code == 2 and "is not a run: there is no such directory." in done.stderr


def test_a_running_run_and_one_that_died_can_be_opened(tmp_path):
    run = make_run(tmp_path / "run", steps=100, checkpoint=False)
    with run.metrics_file.open("a") as f:
        f.write('{"step":41,"rew')
    newest = run.episodes_dir / "000040.jsonl"
    newest.write_bytes(newest.read_bytes()[:-40])  # like a copy made on a full disk
    data = build(run.path)
    assert (data["state"], data["step"], data["decoded"]) == ("stopped", 40, False)
    said = [c["text"] for c in data["concerns"]]
    assert "The run ended at step 40 of 100, and no process works on it: continue it with --resume." in said
    assert "metrics.jsonl: 1 unfinished or unreadable line left out." in said
    assert data["sources"][-1]["total"] == 3
    turn = data["sources"][0]["episodes"][0]["turns"][0]
    assert turn["whole"] and turn["w"] == [" Well.Go north, then east."] and "p" not in turn
    with Run.open(run.path, lock=True):
        assert build(run.path)["state"] == "running"
    assert build(run.path, tokenizer="tiny")["decoded"]


def test_a_run_with_nothing_in_it_yet(tmp_path):
    Run.create(tmp_path / "run", "method: sft\nsteps: 5\n").close()
    data = data_of(write_report(tmp_path / "run"))
    assert (data["sources"], data["curves"], data["state"]) == ([], [], "stopped")


def test_the_page_stays_small(tmp_path):
    run = make_run(tmp_path / "run")
    for step in range(2, 20):
        write_segment(run.episodes_dir, step, [episode(f"{step}:{k}", k) for k in range(60)])
    data = build(run.path)
    assert len(data["sources"]) == 8 and sum(len(s["episodes"]) for s in data["sources"]) <= 200
    assert data["sources"][0]["name"] == "iteration 1" and data["sources"][-1]["name"] == "iteration 40"


@pytest.mark.parametrize("checkpoint", [True, False])
def test_nothing_in_the_file_points_anywhere(tmp_path, checkpoint):
    run = make_run(tmp_path / "run", say=EVIL, checkpoint=checkpoint)
    text = write_report(run.path, plots=False).read_text("utf-8")
    assert "<img" not in text and text.count("</script>") == 2
    assert "http" not in text.replace("http-equiv", "")
    page = re.sub(
        r'(id="data">).*?</script>', r"\1", text, flags=re.DOTALL
    )  # the text of a model may look like anything
    assert not re.search(r"\b(src|href|action)\s*=\s*[\"']?(?!data:,|#)\w", page)
    assert "@import" not in page and "url(" not in page and "innerHTML" not in page


# --- in Chromium ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    if BINARY is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH")
    browser = Chrome(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def opened(chrome, tmp_path):
    """Open the report of a run; in the end only the page was requested, and the console is empty."""
    chrome.requests.clear()
    chrome.errors.clear()
    pages = []

    def show(run, **how):
        pages.append(write_report(run.path, tmp_path / f"{len(pages)}.html", plots=False))
        chrome.open(pages[-1], **how)
        assert chrome.value("document.documentElement.dataset.ready") == "yes", chrome.errors
        return chrome

    yield show
    assert chrome.errors == []
    assert [r for r in chrome.requests if not r.startswith("data:")] == [p.resolve().as_uri() for p in pages]


def text_of(chrome, selector):
    return chrome.value(f"document.querySelector({selector!r}).innerText")


def test_arrow_keys_step_through_an_episode(opened, tmp_path):
    c = opened(make_run(tmp_path / "run"))
    seen = []
    for _ in range(5):
        seen.append((text_of(c, "#where"), text_of(c, "#turn header b"), text_of(c, "#turn .written pre")))
        c.press("ArrowRight")
    assert [s[0].split(",")[0] for s in seen] == [f"turn {k} of 4" for k in (1, 2, 3, 4, 4)]
    assert [s[1] for s in seen] == ["reflector", "policy", "reflector", "policy", "policy"]
    assert [s[2] for s in seen[:4]] == ["Go north, then east.", "2", " Nearly there.", "1"]
    assert c.value("document.querySelectorAll('#strip button')[3].getAttribute('aria-current')") == "true"
    for _ in range(3):
        c.press("ArrowLeft")
    assert text_of(c, "#where").startswith("turn 1 of 4, episode 1 of") and text_of(c, "#turn .forced pre") == " Well."
    c.press("ArrowRight", shift=True)
    assert text_of(c, "#where").startswith("turn 1 of 4, episode 2 of")
    c.value("document.getElementById('next').click()")
    assert text_of(c, "#where").startswith("turn 2 of 4, episode 2 of")
    facts = text_of(c, "#turn .facts")
    assert "action 2" in facts and "reward −1" in facts


def test_colours_say_what_the_legend_says(opened, tmp_path):
    c = opened(make_run(tmp_path / "run"))
    pick = lambda mode: c.value(
        f"(e => {{ e.value = {mode!r}; e.dispatchEvent(new Event('change')); return e.value }})"
        "(document.getElementById('colour'))"
    )
    backs = lambda: c.value("[...document.querySelectorAll('#turn .tok')].map(t => t.style.background || t.className)")
    assert c.value("[...document.getElementById('colour').options].map(o => o.value)") == [
        "advantage", "lp", "lq", "mask", "step", "note value",
    ]  # fmt: skip
    for mode, distinct in (("lp", 9), ("lq", 9), ("mask", 1), ("advantage", 1)):
        assert pick(mode) == mode
        assert len(set(backs())) == distinct, mode
    assert "advantage (return to go)" in text_of(c, "#legend")
    pick("mask")
    assert backs()[0] == "tok off"  # the reflector is frozen
    c.press("ArrowRight")
    assert "--trained" in backs()[0]
    c.press("ArrowRight")
    pick("step")
    assert len(set(backs())) == 2
    c.value("document.querySelector('#turn .tok').click()")
    readout = text_of(c, "#readout")
    assert 'token 1 of 14 · " " · id' in readout and "log-prob model −0.1" in readout and "step 1" in readout


def test_two_plays_of_one_start_stand_side_by_side(opened, tmp_path):
    run = make_run(tmp_path / "run")
    add_evaluation(run, "trained", 9)
    add_evaluation(run, "untrained", 2)
    c = opened(run)
    assert text_of(c, "#evaltable tbody tr:nth-child(1)").split("\t")[:3] == [
        "trained",
        "90.0 % (9/10)",
        "59.6 % – 98.2 %",
    ]
    chosen = c.value("['left', 'right'].map(i => document.getElementById(i).selectedOptions[0].textContent)")
    assert chosen == ["evaluation untrained", "evaluation trained"]  # the better one on the right
    assert c.value("document.getElementById('start').value") == "start-2"  # the first that was lost and then won
    c.value("(e => { e.value = 'start-4'; e.dispatchEvent(new Event('change')) })(document.getElementById('start'))")
    assert "no success, reward −3" in text_of(c, "#a") and "success, reward 3" in text_of(c, "#b")
    boxes = c.value("['a', 'b'].map(i => document.getElementById(i).getBoundingClientRect()).map(r => [r.left, r.top])")
    assert boxes[0][0] < boxes[1][0] and boxes[0][1] == boxes[1][1]


def test_smoothing_and_hover(opened, tmp_path):
    c = opened(make_run(tmp_path / "run"))
    assert c.value("[...document.querySelectorAll('.panel h3')].map(h => h.textContent)")[:2] == ["reward", "success"]
    draw = lambda: c.value("document.querySelector('.panel .line').getAttribute('d')")
    raw = c.value("document.querySelector('.panel .raw').getAttribute('d')")
    assert draw() != raw
    c.value("(e => { e.value = 0; e.dispatchEvent(new Event('input')) })(document.getElementById('smooth'))")
    assert draw() == raw
    c.value(
        "(s => { const b = s.getBoundingClientRect();"
        " s.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + b.width * 54 / 360, clientY: b.top + "
        "9})) })"
        "(document.querySelector('.panel svg'))"
    )
    assert text_of(c, ".panel output") == "step 1 · −0.75 (≈ −0.75) · eval 0.3333 @10"
    assert (
        text_of(c, "#constant")
        == "The same at every step: lr 0.001, time/collect_seconds 0.25, time/collect_tokens 100, time/seconds 0.5."
    )


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_readable_at_both_widths_in_light_and_dark(opened, tmp_path, width, dark):
    run = make_run(tmp_path / "run", say="x" * 400 + " words " * 40)
    add_evaluation(run, "a-name-that-is-as-long-as-a-name-of-an-arm-can-be", 3)
    c = opened(run, width=width, dark=dark)
    assert c.value("document.documentElement.scrollWidth") <= width
    small = c.value(
        "[...document.querySelectorAll('body *')].filter(e => e.offsetParent && [...e.childNodes]"
        ".some(n => n.nodeType === 3 && n.textContent.trim())).map(e => parseFloat(getComputedStyle(e).fontSize))"
        ".reduce((a, b) => Math.min(a, b))"
    )
    assert small >= 12
    assert c.value(CONTRAST) >= 4.5
    assert c.value("[...document.querySelectorAll('select, input')].every(e => e.labels.length || e.ariaLabel)")


CONTRAST = """
(() => { // the least contrast of plain text with the ground it stands on
  const rgb = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => rgb(c).slice(0, 3).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  const ground = e => { for (; e; e = e.parentElement) { const b = getComputedStyle(e).backgroundColor;
    if (b.startsWith("rgb(")) return b; } return "rgb(255, 255, 255)"; };
  let least = 99;
  for (const e of document.querySelectorAll("body *:not(.tok):not(option):not(svg *)")) {
    if (!e.offsetParent || e.disabled) continue;
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const a = light(getComputedStyle(e).color), b = light(ground(e));
    least = Math.min(least, (Math.max(a, b) + .05) / (Math.min(a, b) + .05));
  }
  return least;
})()
"""


def test_what_a_model_writes_is_never_markup(opened, tmp_path):
    run = make_run(tmp_path / "run", say=EVIL)
    run.recipe_file.write_text(run.recipe.replace("name: made", "name: '<b>x</b>'"))
    c = opened(run)
    assert text_of(c, "#turn .written pre") == EVIL.replace("é", "·é").replace("中", "··中").replace("🙂", "···🙂")
    assert text_of(c, "h1") == "<b>x</b>"
    c.press("ArrowRight")
    assert EVIL in text_of(c, "#turn .prompt pre")
    assert c.value("document.querySelectorAll('img, h1 b, pre b').length") == 0
    c = opened(make_run(tmp_path / "whole", say=EVIL, checkpoint=False))
    assert text_of(c, "#turn .written pre") == " Well." + EVIL
    assert c.value("document.querySelectorAll('img, h1 b, pre b').length") == 0
    assert c.value("document.body.dataset.owned") is None


def test_a_running_and_a_dead_run_open(opened, tmp_path):
    run = make_run(tmp_path / "run", steps=100, checkpoint=False)
    with run.metrics_file.open("a") as f:
        f.write('{"step":41,"rew')
    c = opened(run)
    assert text_of(c, "#state") == "not finished" and "no checkpoint yet" in text_of(c, "#about")
    assert text_of(c, "#turn .written pre") == " Well.Go north, then east."
    with Run.open(run.path, lock=True):
        assert text_of(opened(run), "#state") == "running"
    Run.create(tmp_path / "empty", "method: sft\n").close()
    c = opened(Run(tmp_path / "empty"))
    assert c.value("['curves', 'episodes', 'compare', 'evaluation'].every(i => document.getElementById(i).hidden)")


@pytest.fixture(scope="module")
def quickstart_run(tmp_path_factory):
    """The quickstart's own recipe, cut to a few steps: both players, evaluations, a start played by two stages."""
    import trailmark
    from trailmark.config import load_recipe, resolve
    from trailmark.methods.reflect import method as reflect
    from trailmark.runs.launch import launch

    raw = load_recipe(Path(trailmark.__file__).parent / "recipes" / "reflect-taxi.yaml").raw
    short = {
        "sft": {**raw["sft"], "reflector": 3, "policy": 3},
        "steps": 3,
        "final": {"n": 16},
        "out": str(tmp_path_factory.mktemp("quickstart") / "run"),
        "thought": 16,
    }
    launch(reflect.ReflectMethod, resolve({**raw, **short}, reflect.ReflectRecipe))
    return short["out"]


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_of_a_quickstart_run(opened, quickstart_run, width):
    from trailmark.runs.store import Run

    c = opened(Run.open(quickstart_run), width=width)
    assert c.value("document.documentElement.scrollWidth") <= width and c.value(CONTRAST) >= 4.5
    first = text_of(c, "#where")
    seats = set()
    for _ in range(4):
        seats.add(text_of(c, "#turn header b"))
        c.press("ArrowRight")
    assert ("policy" in seats and text_of(c, "#where") != first) or first.startswith("turn 1 of 1")
    assert "reflect-rl" in c.value("document.body.innerText") and "reflect-sft" in c.value("document.body.innerText")


def test_a_policy_that_learnt_only_its_training_starts_is_a_concern():
    from trailmark.report.concerns import concerns

    curve = lambda held, at: [
        {"name": "success", "train": [[k, k / 20] for k in range(20)], "eval": [[3, 0.1], [at, held]]}
    ]
    said = lambda *held: [c["text"] for c in concerns(curve(*held), [], {}, "done", 20, {}) if c["level"] == "warn"]
    (told,) = said(0.39, 19)
    assert "Success is 87.5% over the last training steps and 39.0% in the last evaluation" in told
    assert said(0.85, 19) == [] == said(0.39, 9)  # the steps behind the last evaluation are not compared with it
    assert concerns([{"name": "success", "train": [[1, 0.9]], "eval": []}], [], {}, "done", 1, {}) == []
