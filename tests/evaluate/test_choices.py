"""Choosing among samples, several orders of options, transfer, and the leaderboard's file."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark import formats
from trailmark.commands.app import app
from trailmark.errors import DataError, ModelError, RunError
from trailmark.evaluate.choices import best_of, choose_row, steps_of, vote
from trailmark.evaluate.run import summarise
from trailmark.tasks.logic.choices import chosen_option, order_row, predictions, write_predictions
from trailmark.types import Annotation, Episode, Invalid, Scored, Task, Turn

LABELS = {"p": 1, "q": 0}


def sample(start, k, letter, label=None, order=None, row=0):
    """One play of a question with four options; an empty letter is a blank."""
    label = LABELS[start] if label is None else label
    data = {"question": start, "options": ["w", "x", "y", "z"], "label": label, "row": row}
    data |= {"order": order} if order else {}
    text = f"so\nAction 1: Finish[The answer is {letter}.]" if letter else "I do not know"
    right = bool(letter) and "ABCD".index(letter) == label
    outcome = Invalid("hidden") if label == -1 else Scored(float(right), right)
    turn = Turn("policy", (1,), (2, 3), text=text)
    return Episode(f"{start}:{k}", Task(start, data=data), start, (turn,), {"self": outcome})


P = [sample("p", k, letter) for k, letter in enumerate(["", "A", "", "B", "B", ""])]  # B is right
Q = [sample("q", k, letter) for k, letter in enumerate(["C", "A", "A", "C", "", "D"])]  # A is right; C came first


def test_blanks_do_not_vote_and_ties_go_to_the_first():
    assert vote(P).id == "p:3" and vote(Q).id == "q:0" and vote([P[0], P[2]]) is None
    row = summarise([*P, *Q])["metrics"]
    assert row["sc@6"]["value"] == 0.5 and row["success"]["value"] == pytest.approx(4 / 12)
    assert row["maj@6"]["value"] == pytest.approx((1 + 0.5) / 2)  # maj@k breaks ties at random
    arith = [Episode(f"e{k}", Task("t"), "g", (Turn("policy", (1,), (2,), text="#### 1"),), {"self": Scored(1.0, True)})
             for k in range(2)]  # fmt: skip
    assert "sc@2" not in summarise(arith)["metrics"]


STEPS = [[0.9], [0.9, 0.8], [], [0.5, 0.9], [0.9, 0.9], [0.1],  # p
         [0.6, 0.6], [0.9, 0.2], [0.5, 0.5], [], [1.0, 0.1], [0.6, 0.6]]  # fmt: skip


@pytest.mark.parametrize(
    ("over", "p", "q"),
    [("product", "p:0", "q:0"), ("min", "p:0", "q:0"), ("geomean", "p:0", "q:0"), ("last", "p:0", "q:0"),
     ("mean", "p:0", "q:0"), ("sum", "p:4", "q:0")],
)  # fmt: skip
def test_best_of_by_hand(over, p, q):
    # p: products .9 .72 - .45 .81 .1; q: .36 .18 .25 - .1 .36 (a tie: the first); last of q: .6 .2 .5 - .1 .6
    chosen, unscored = best_of([*P, *Q], STEPS, over)
    assert {s: e.id for s, e in chosen.items()} == {"p": p, "q": q} and unscored == 2


def test_a_row_of_choices():
    steps = [[0.1 if e.outcome.reward == 0 else 0.9] for e in [*P, *Q]]  # scores that know the truth
    row = choose_row([*P, *Q], steps, "min", "six")
    values = {k: v["value"] for k, v in row["metrics"].items()}
    assert values == {"single": pytest.approx(1 / 3), "sc@6": 0.5, "best@6 (min)": 1.0, "pass@6": 1.0}
    none = choose_row([*P, *Q], [[]] * 6 + steps[6:], "product")
    assert none["metrics"]["best@6 (product)"]["value"] == 0.5 and none["unscored"] == 6
    assert "6 of 12" in none["warning"]
    with pytest.raises(DataError, match="1 lists of step scores for 6"):
        best_of(P, [[1.0]])
    with pytest.raises(DataError, match="nothing to choose from"):
        choose_row([sample("p", 0, "A", label=-1)], [[1.0]])
    with pytest.raises(ModelError, match="geometric mean"):
        best_of(P, [[-1.0]] * 6, "geomean")


def test_step_scores_beside_the_episodes(tmp_path):
    played = [*P, *Q]
    notes = [Annotation(e.id, "step_score", "step", tuple(s), 0, "prm") for e, s in zip(played, STEPS) if s]
    assert steps_of(played, notes, "step_score") == STEPS
    with pytest.raises(DataError, match=r"no annotation of steps 'x' \(found: step_score\)"):
        steps_of(played, notes, "x")
    formats.write("episodes", tmp_path / "all.jsonl", played, None, annotations=notes)
    words = ["eval", "--episodes", str(tmp_path / "all.jsonl"), "--best-by", "step_score", "--json"]
    done = CliRunner().invoke(app, words)
    row = json.loads(done.stdout)["rows"][-1]
    assert done.exit_code == 0 and row["metrics"]["best@6 (product)"]["value"] == 0.0 and row["unscored"] == 2
    done = CliRunner().invoke(app, [*words, "--over", "sum"])
    assert json.loads(done.stdout)["rows"][-1]["metrics"]["best@6 (sum)"]["value"] == 0.5  # p:4 is right, q:0 is not
    for more, says in (["--over", "mode"], "no rule"), (["--best-by", "x"], "no annotation of steps"):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 2 and says in done.output
    assert CliRunner().invoke(app, ["eval", "tiny", "--task", "puzzle", "--best-by", "x"]).exit_code == 2


def test_agreement_between_orders_by_hand():
    # Original labels: p is x (1), q is w (0). In the order DCBA option x is shown as C, and w as D.
    first = [sample("p", 0, "B"), sample("q", 0, "C")]
    turned = [sample("p", 0, "C", label=2, order="DCBA"), sample("q", 0, "D", label=3, order="DCBA")]
    third = [sample("p", 0, "D", label=2, order="CABD"), sample("q", 0, "", label=1, order="CABD")]
    assert [chosen_option(e) for e in turned] == [1, 0] and [chosen_option(e) for e in third] == [3, None]
    row = order_row({"ABCD": first, "DCBA": turned, "CABD": third})
    values = {k: v["value"] for k, v in row["metrics"].items()}
    want = {"agreement": pytest.approx((1 / 3 + 0) / 2), "constant": 0.0, "always right": 0.0, "ever right": 1.0}
    assert values == want
    two = {k: v["value"] for k, v in order_row({"ABCD": first, "DCBA": turned})["metrics"].items()}
    assert two == {"agreement": 0.5, "constant": 0.5, "always right": 0.5, "ever right": 1.0}
    with pytest.raises(DataError, match="at least two"):
        order_row({"ABCD": first})


def test_predictions_are_in_the_order_of_the_file(tmp_path):
    played = [sample("a", 0, "C", label=-1, row=2), sample("a", 1, "A", label=-1, row=2),
              sample("b", 0, "", label=-1, row=0), sample("c", 0, "A", label=-1, row=3, order="DCBA"),
              sample("d", 0, "B", label=-1, row=1)]  # fmt: skip
    found, blank = predictions(played, 4)
    assert found.tolist() == [0, 1, 2, 3] and blank == 1
    assert write_predictions(tmp_path / "x.npy", played, 4) == 1
    assert np.load(tmp_path / "x.npy", allow_pickle=False).tolist() == [0, 1, 2, 3]
    with pytest.raises(RunError, match="exists"):
        write_predictions(tmp_path / "x.npy", played, 4)
    with pytest.raises(DataError, match="1 of 5 questions have no answer"):
        write_predictions(tmp_path / "y.npy", played, 5)
    assert not (tmp_path / "y.npy").exists()
    with pytest.raises(DataError, match="has no row among the 2"):
        predictions(played, 2)
    row = summarise(played)
    assert row["hidden"] == 5 and row["invalid"] == 0 and row["metrics"] == {} and "5 of 5 questions" in row["warning"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logic")
    rows = [{"context": f"c{k}", "question": "q", "answers": ["w", "x", "y", "z"], "label": k} for k in range(3)]
    rows.append({"context": "c", "question": "q", "answers": ["w", "w", "y", "z"], "label": 0, "id_string": "twice"})
    dump = lambda name, some: (folder / name).write_text("".join(json.dumps(r) + "\n" for r in some))
    dump("reclor_val.jsonl", rows)
    dump("reclor_test.jsonl", [{k: v for k, v in r.items() if k != "label"} for r in rows[:3]])
    dump("logiqa2_dev.jsonl", rows[:2])
    return folder


def call(*words):
    return CliRunner().invoke(app, [*words, "--max-tokens", "4", "--json"])


def test_orders_sets_and_a_leaderboard_from_the_command_line(data, tmp_path):
    words = ["eval", "tiny", "--task", "logic", f"path={data}", "dataset=reclor", "--split", "val"]
    done = call(*words, "--vary", "order=ABCD,DCBA", "--out", str(tmp_path / "o.jsonl"))
    rows = json.loads(done.stdout)["rows"]
    assert [r["name"] for r in rows] == ["tiny, order=ABCD", "tiny, order=DCBA", "tiny, all orders"]
    assert [r["episodes"] for r in rows] == [3, 3, 6] and rows[2]["metrics"]["agreement"]["value"] == 0.0
    ids = [json.loads(line)["id"] for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(ids) == len(set(ids)) == 6 and done.exit_code == 0
    done = call(*words, "--vary", "dataset=reclor@val,logiqa2@dev")
    rows = json.loads(done.stdout)["rows"]
    assert [(r["name"], r["episodes"]) for r in rows] == [
        ("tiny, dataset=reclor@val", 3), ("tiny, dataset=logiqa2@dev", 2),
    ]  # fmt: skip
    said = CliRunner().invoke(app, [*words, "--max-tokens", "2"]).stdout
    assert "1 questions left out (repeated options: twice)" in said
    again = "note: tiny: split 'val' has 3 starts, fewer than asked for: some were played again."
    for n, samples in ((5, 1), (3, 2)):
        more = ("--n", str(n), "--samples", str(samples), "--max-tokens", "2")
        said = CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "200"}).stdout
        assert (again in said) == (n == 5)
    test = [*words[:-1], "test", "--leaderboard", str(tmp_path / "p.npy")]
    done = call(*test)
    assert done.exit_code == 0 and np.load(tmp_path / "p.npy").tolist() == [0, 0, 0]
    assert json.loads(done.stdout)["rows"][0]["hidden"] == 3
    for more in ([], ["--n", "2"]):
        assert call(*test, *more).exit_code == 2  # the file exists
    assert call(*words, "--vary", "order").exit_code == 2 and call(*words, "--vary", "order=A,,B").exit_code == 2
