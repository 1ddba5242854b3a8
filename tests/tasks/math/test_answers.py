"""The answer checker against labels written by hand, and against hostile input."""

import os
import signal
import threading
from fractions import Fraction

import pytest
from math_pairs import HOSTILE, PAIRS, RESPONSES

from trailmark.errors import TaskError
from trailmark.tasks import get_task
from trailmark.tasks.math import pool as pools
from trailmark.tasks.math.check import Checker, vote
from trailmark.tasks.math.extract import boxed_spans, final_answer
from trailmark.tasks.math.numbers import Number, read_number
from trailmark.tasks.math.pool import Pool

CUT_OFF = [
    h for h in HOSTILE if "!" in h or h[:2] in ("9*", "9^", "2^", "\\s", "\\i", "\\p", "x^", "a ", "1+")
]  # each in a new process


@pytest.fixture(scope="module")
def checker():
    made = Checker(pool=Pool(1))
    yield made
    made.pool.close()


def test_there_are_enough_labels():
    assert len(PAIRS) + len(RESPONSES) >= 200 and len({p[:2] for p in PAIRS}) == len(PAIRS)
    right = sum(p[2] for p in PAIRS)
    assert min(right, len(PAIRS) - right) >= 100


def test_labelled_pairs(checker):
    wrong = [(g, a, right, v.reason) for g, a, right in PAIRS if (v := checker.same(g, a)).right != right]
    assert not wrong and checker.pool.lost == 0


def test_labelled_responses(checker):
    wrong = [(t, g, v) for t, g, marker, right in RESPONSES if (v := checker.check(t, g, "", marker)).right != right]
    assert not wrong


def test_plain_numbers_need_no_process():
    checker = Checker()
    for k in range(2000):
        assert checker.check(f"so it is\n#### {k * 7}", str(k * 7), marker="hash").right
        assert not checker.check(rf"\boxed{{\frac{{{k}}}{{3}}}}", str(k + 1)).right
    assert checker.pool.started == 0


@pytest.mark.parametrize(
    "text", ["1e301", "10^{301}", "1" * 201, "1__0", "0x10", "1,23", "--1", "1.2.3", "٣", "1/0", "nan", "inf", ""]
)
def test_what_is_no_plain_number(text):
    found = read_number(text)
    assert found is None or (text == "٣" and found.value == 3)


def test_numbers_are_exact():
    assert read_number("-1,234.50%") == Number(Fraction(-2469, 2), True, True)
    assert read_number(r"2\frac{1}{4}") == Number(Fraction(9, 4))
    assert read_number(r"0.1\overline{6}") == Number(Fraction(1, 6), True)
    assert read_number(r"3\times10^{-4}") == Number(Fraction(3, 10**4))


@pytest.fixture(scope="module")
def hurried():
    made = Checker(pool=Pool(1, seconds=0.3))
    yield made
    made.pool.close()


@pytest.mark.parametrize("text", [h for h in HOSTILE if h not in CUT_OFF], ids=lambda h: repr(h[:12]))
def test_hostile_answers_are_wrong_and_do_not_hang(hurried, text):
    for response in (text, f"\\boxed{{{text}}}", f"#### {text}"):
        verdict = hurried.check(response, "17")
        assert not verdict.right
        assert verdict.reason in ("different", "no answer") or verdict.reason.startswith("unknown")


@pytest.mark.slow
def test_every_hostile_answer():
    one = Checker(pool=Pool(1, seconds=0.5))
    for text in HOSTILE:
        for rules in ("strict", "lenient"):
            one.rules = rules
            assert not one.check(f"\\boxed{{{text}}}", r"\sqrt{2}").right
    assert one.check(r"\boxed{2\sqrt{2}}", r"\sqrt{8}").right
    one.pool.close()


def test_time_is_up_with_a_reason(hurried):
    before = hurried.pool.lost
    verdict = hurried.check(r"\boxed{9**9**9}", "3")
    assert verdict == hurried.check(r"\boxed{9**9**9}", "3")  # remembered
    assert (verdict.right, verdict.answer) == (False, "9**9**9")
    assert verdict.reason == "unknown: it took too long to compare" and hurried.pool.lost == before + 1
    assert hurried.check(r"\boxed{2\sqrt{2}}", r"\sqrt{8}").right  # the next one is judged


def test_a_worker_that_dies_or_hangs_is_replaced(monkeypatch):
    """Killed while idle, killed at work, and stopped so that it never answers."""
    monkeypatch.setattr(pools, "PATIENCE", 2.0)
    pool = Pool(1, seconds=0.3)
    question = {"gold": "2x", "answer": "x+x", "how": "equal"}
    assert pool.ask(question) == {"equal": True}

    def process():
        worker = pool._idle.get()
        pool._idle.put(worker)
        return worker.process

    process().kill()
    process().wait()
    assert pool.ask(question) == {"equal": True} and (pool.started, pool.lost) == (2, 0)
    os.kill(process().pid, signal.SIGSTOP)
    assert pool.ask(question) == {"error": "time"} and pool.lost == 1
    assert pool.ask(question) == {"equal": True} and pool.started == 3
    os.kill(process().pid, signal.SIGSTOP)
    killer = threading.Timer(0.5, os.kill, (process().pid, signal.SIGKILL))
    killer.start()
    assert pool.ask(question) == {"error": "crash"} and pool.lost == 2
    assert pool.ask(question) == {"equal": True}
    pool.close()


def test_many_threads_at_once():
    one = Checker(pool=Pool(2, seconds=1.0))
    found = {}

    def ask(k):
        found[k] = one.check(rf"\boxed{{{k}x+{k}}}", f"{k}(x+{1 + k % 2})").right

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(2, 22)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {k: k % 2 == 0 for k in range(2, 22)} and one.pool.started <= 2
    one.pool.close()


def test_a_parser_that_does_not_work_is_said_at_the_start(monkeypatch, tmp_path):
    broken = tmp_path / "worker.py"
    broken.write_text('print(\'{"ready": false, "problem": "it does not know that 1/2 is 0.5"}\', flush=True)\n')
    monkeypatch.setattr(pools, "WORKER", broken)
    with pytest.raises(
        TaskError,
        match=r"does not work: it does not know that 1/2 is 0.5 \(math-verify 0.*antlr4-python3-runtime 4.*\); pip "
        r"install",
    ):
        Pool(1).check()
    with pytest.raises(TaskError, match="does not work"):
        get_task("math", path=str(tmp_path))  # before anything is read, whichever the dataset
    broken.write_text("raise SystemExit(3)\n")
    with pytest.raises(TaskError, match="it did not start"):
        Pool(1).check()
    monkeypatch.setattr(pools.importlib.util, "find_spec", lambda name: None if name == "antlr4" else object())
    with pytest.raises(TaskError, match="needs antlr4-python3-runtime: pip install 'trailmark\\[math\\]'"):
        Pool(1).check()


def test_an_antlr_of_another_version_is_named_at_the_start(monkeypatch, tmp_path):
    (tmp_path / "antlr4").mkdir()
    said = "Could not deserialize ATN with version 3 (expected 4)."
    (tmp_path / "antlr4" / "__init__.py").write_text(f"raise Exception({said!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(pools, "_PROVEN", set())
    with pytest.raises(
        TaskError, match="parser of the answer checker does not work: .*deserialize ATN.*antlr4-python3-runtime"
    ):
        get_task("math", path=str(tmp_path))


def test_lenient_rules_have_the_false_positives_of_the_reference():
    one = Checker("lenient", Pool(1))
    strict = Checker("strict", one.pool)
    for response, gold, marker in [
        ("#### 1800", "18", "hash"),
        ("#### 500", "5", "hash"),
        ("pages 2-5", "-5", "hash"),
        (r"so \boxed{7} and then \boxed{3}", "3", "boxed"),
        ("nothing", "", "boxed"),
        ("#### 3.0009", "3", "hash"),
    ]:
        assert one.check(response, gold, "", marker).right, response
    for response, gold, marker in [("#### 1800", "18", "hash"), ("pages 2-5", "-5", "hash"), ("nothing", "", "boxed")]:
        assert not strict.check(response, gold, "", marker).right
    for response, gold in [
        (r"\boxed{50}%", "50"),
        (r"\boxed{\frac{\sqrt2}{2}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{x=5}", "5"),
        ("The answer is 7.", "7"),
    ]:
        assert one.check(response, gold).right, response
    for response, gold in [(r"\boxed{2}", "3"), (r"\boxed{(1,2)}", "(2,1)"), (r"\boxed{x^2}", "x^3"), ("nothing", "5")]:
        assert not one.check(response, gold).right, response
    listed = "Give all roots, separated by commas."
    assert one.check(r"\boxed{1,2}", "2,1", listed).right and not one.check(r"\boxed{1,2}", "1,3", listed).right
    assert one.check(r"\boxed{1\text{and}2}", r"2\text{and}1").right
    one.pool.close()


def test_unknown_rules_are_named():
    with pytest.raises(TaskError, match="no rules 'strct'. Did you mean 'strict'?"):
        Checker("strct")
    with pytest.raises(TaskError, match="workers >= 1"):
        Pool(0)


def test_boxes_are_found_with_balanced_braces():
    text = r"\boxed{\frac{1}{2}} \boxed{\{1\}} \boxed{ \boxed{3} } \boxed{open"
    assert [content for *_, content in boxed_spans(text)] == [r"\frac{1}{2}", r"\{1\}", r" \boxed{3} "]
    assert final_answer("nothing at all") is None and final_answer("") is None


def test_votes_of_equal_answers_are_one():
    assert vote("#### 0.50", "hash") == vote(r"\boxed{\frac{1}{2}}") == "1/2"
    assert vote(r"\boxed{ x + 1 }") == vote("$\\boxed{x+1}$") == "x+1" and vote("who knows") is None


def test_the_case_of_a_letter_and_the_place_of_a_unit_matter():
    """R and r may be two radii of one problem; and 3 cannot be taken from an area."""
    right = lambda said, gold: Checker().check(rf"\boxed{{{said}}}", gold).right
    assert right("3r^2", "3r^2") and not right("3R^2", "3r^2") and not right("3r^2", "3R^2")
    assert right("864 inches^2", "864") and right("(864-3)+3", "864")
    assert not right("(864 inches^2-3)+3", "864")
