"""Search against problems whose every value is known, and against plain runs."""

import asyncio
import dataclasses
import json
import math
import random
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tabular import TabularLM
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.engines.base import Completion, EngineError, Request, draw_key, run
from trailmark.engines.local import LocalEngine
from trailmark.errors import ModelError, TrailmarkError
from trailmark.models.forward import view
from trailmark.models.layout import lay_out
from trailmark.models.readout import Readout
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat, play
from trailmark.rollout.search import Plan, Searcher, parse_plan, search
from trailmark.rollout.search_episodes import best_by_value
from trailmark.score.value_models import load_values, locate_value
from trailmark.score.values import HeadValues, Line, LogProb
from trailmark.tasks import get_task
from trailmark.tasks.solved import END, chain, evaluate, solve, tree
from trailmark.types import Sample, SamplingLaw, Scored


class Letters:
    """A tokenizer of one letter a line, so that every letter is a step. The last id begins a text."""

    eos_token_id = None

    def __init__(self, actions):
        self.words = [f"{chr(97 + a)}\n" for a in range(actions)] + ["^"]

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)


class Table:
    """An engine that draws from a tabular model."""

    name, version = "table", 0

    def __init__(self, lm, tokenizer):
        self.lm, self.tokenizer, self.drawn = lm, tokenizer, 0

    async def sample(self, request):
        await asyncio.sleep(0)
        return [self._one(request, k) for k in range(request.n)]

    def _one(self, request, k):
        draw, tokens, logp = random.Random(str(draw_key(request.seed, request.key, k))), (), ()
        while True:
            row = self.lm.model.logits[self.lm.row[request.prompt + tokens]].detach()[:-1].log_softmax(-1)
            a = draw.choices(range(len(row)), row.exp().tolist())[0]
            tokens, logp = (*tokens, a), (*logp, float(row[a]))
            self.drawn += 1
            text = self.tokenizer.decode(tokens)
            if any(s in text for s in request.stop_strings):
                return Completion(tokens, logp, logp, text[:-1], "stopped")
            if len(tokens) >= request.max_tokens:
                return Completion(tokens, logp, logp, text, "length")


def tabled(problem, depth, pi=None):
    """The problem as a table of next letters (uniform, or `pi`) with a head that knows V* of every prefix, leaves
    included."""
    actions = problem.next.shape[1]
    best = solve(problem.next, problem.reward)[0]
    rows = {(actions,): (0, 0.0)}
    level = [(actions,)]
    for _ in range(depth):
        after = []
        for prefix in level:
            s, paid = rows[prefix]
            for a in range(actions):
                rows[(*prefix, a)] = (int(problem.next[s, a]), paid + float(problem.reward[s, a]))
                after.append((*prefix, a))
        level = after
    lm = TabularLM(list(rows), actions + 1)
    head = lm.add_head("value")
    pi = problem.uniform if pi is None else pi
    lm.set_policy({p: [*pi[s], 0.0] for p, (s, _) in rows.items() if s != END})
    with torch.no_grad():
        for prefix, (s, paid) in rows.items():
            head.weight[0, lm.row[prefix]] = paid + (0.0 if s == END else best[s])
    return lm, Table(lm, Letters(actions)), best[0]


class Looked:
    """The same numbers as `HeadValues` reads from a table, looked up: a pass over a table is slow."""

    def __init__(self, lm):
        self.lm = lm

    async def score(self, lines):
        return [float(self.lm.heads["value"].weight[0, self.lm.row[x.prompt + x.tokens]].detach()) for x in lines]


def asked(actions, depth, n, seed=0):
    return [Request((actions,), max_tokens=depth, seed=seed, key=f"problem {k}") for k in range(n)]


def worth(problem, tokens):
    return problem.walk("".join(chr(97 + t) for t in tokens))[1]


@pytest.mark.parametrize("seed", range(4))
def test_a_wide_beam_with_the_exact_value_finds_the_best_leaf(seed):
    problem = tree(depth=4, actions=3, seed=seed, inner=True)
    lm, engine, best = tabled(problem, 4)
    wide = search(engine, asked(3, 4, 3), Looked(lm), Plan("beam", 20))
    assert [worth(problem, f.best.tokens) for f in wide] == pytest.approx([best] * 3)
    assert [f.best.score for f in wide] == pytest.approx([best] * 3)
    lines = [Line((3,), f.best.tokens[:n]) for f in wide for n in range(1, 5)]
    assert asyncio.run(HeadValues(lm).score(lines)) == asyncio.run(Looked(lm).score(lines))
    narrow = search(engine, asked(3, 4, 60), Looked(lm), Plan("beam", 1))
    got = [worth(problem, f.best.tokens) for f in narrow]
    expected = evaluate(problem.next, problem.reward, problem.uniform)[0][0]
    assert max(got) <= best + 1e-9 and abs(np.mean(got) - expected) < 4 * np.std(got) / math.sqrt(60)


class OneTokenShort:
    """The trap of the published search: the value of the text without its last token."""

    def __init__(self, values):
        self.values = values

    async def score(self, lines):
        return await self.values.score([dataclasses.replace(x, tokens=x.tokens[:-1]) for x in lines])


def test_the_last_token_is_seen():
    """Only the last of three letters decides. A scorer that does not see it can but guess."""
    seed = next(s for s in range(100) if chain(3, 4, s).reward[4].sum() == 1)
    problem = chain(3, 4, seed)
    lm, engine, best = tabled(problem, 3)
    won = {}
    for name, scorer in (("seen", Looked(lm)), ("unseen", OneTokenShort(Looked(lm)))):
        for plan in (Plan("beam", 16), Plan("best_of", 24)):
            found = search(engine, asked(4, 3, 40), scorer, plan)
            won[name, plan.kind] = np.mean([worth(problem, f.best.tokens) for f in found])
    assert best == 1 and won["seen", "beam"] == 1 and won["seen", "best_of"] > 0.95
    assert max(won["unseen", "beam"], won["unseen", "best_of"]) < 0.5  # chance: 1/4


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_best_of_n_succeeds_as_often_as_one_of_n_does(n):
    problem = tree(depth=3, actions=2, seed=3)
    lm, engine, best = tabled(problem, 3)
    p = evaluate(problem.next, problem.reward, problem.uniform)[0][0]  # leaves pay 0 or 1
    starts = 600
    found = search(engine, asked(2, 3, starts, seed=n), Looked(lm), Plan("best_of", n))
    expected, rate = 1 - (1 - p) ** n, np.mean([worth(problem, f.best.tokens) for f in found])
    assert best == 1 and 0.05 < p < 0.6
    assert abs(rate - expected) < 4 * math.sqrt(expected * (1 - expected) / starts) + 1e-9


def test_a_beam_by_log_prob_prefers_what_the_policy_prefers():
    problem = tree(depth=3, actions=2, seed=0)
    pi = np.tile([0.9, 0.1], (problem.next.shape[0], 1))
    _, engine, _ = tabled(problem, 3, pi)
    found = search(engine, asked(2, 3, 20), LogProb(), Plan("beam", 6))
    assert all(f.best.tokens == (0, 0, 0) and f.best.score == pytest.approx(3 * math.log(0.9)) for f in found)


class Script:
    """An engine that says what a function of the text so far and a lot says, one letter a token; "|" ends a turn."""

    name, version = "script", 0
    END = ord("|")

    def __init__(self, say):
        self.say, self.tokenizer, self.asked = say, self, []

    def decode(self, ids):
        return "".join(map(chr, ids))

    async def sample(self, request):
        self.asked.append(request)
        out = []
        for k in range(request.n):
            text = self.say(self.decode(request.prompt), random.Random(str(draw_key(request.seed, request.key, k))))
            tokens, stop, said = [], "length", ""
            for c in text:
                tokens.append(ord(c))
                said = self.decode(tokens)
                if c == "|" or any(s in said for s in request.stop_strings):
                    stop = "stopped"
                    break
                if len(tokens) >= request.max_tokens:
                    break
            zeros = (0.0,) * len(tokens)
            cut = [at for s in (*request.stop_strings, "|") if (at := said.find(s)) >= 0]
            out.append(Completion(tuple(tokens), zeros, zeros, said[: min(cut)] if cut else said, stop))
        await asyncio.sleep(0)
        return out


class By:
    """Scores by a function of what was written."""

    def __init__(self, rule):
        self.rule, self.calls = rule, []

    async def score(self, lines):
        self.calls.append([x.tokens for x in lines])
        return [self.rule("".join(map(chr, x.tokens))) for x in lines]


def ask(text="?", **more):
    return Request(tuple(map(ord, text)), **{"max_tokens": 60, "stop_ids": (Script.END,), **more})


def one(say, rule, plan, **more):
    return search(Script(say), [ask(**more)], By(rule), plan)[0]


def test_what_is_finished_goes_to_the_pool_whatever_its_score():
    """Finished answers score low, open ones high: they are found all the same, and the search ends."""
    say = lambda text, lot: "bad|" if lot.random() < 0.5 and len(text) > 1 else "go\n" if len(text) < 12 else "end|"
    found = one(say, lambda t: len(t) - 100 * t.endswith("bad"), Plan("beam", 3))
    assert (
        found.why == "finished" and found.best.text.endswith("end") and any(t.text.endswith("bad") for t in found.pool)
    )
    assert found.best.tokens[-1] == Script.END and found.best.stop == "stopped"


def test_the_token_that_ends_an_answer_is_not_scored():
    by = By(len)
    (found,) = search(Script(lambda *_: "ab|"), [ask()], by, Plan("best_of", 2))
    assert by.calls == [[(97, 98), (97, 98)]] and found.best.tokens == (97, 98, Script.END) and found.best.text == "ab"


def test_rounds_end_a_search_that_finishes_nothing():
    found = one(lambda *_: "again\n", len, Plan("beam", 2, rounds=20), max_tokens=1000)
    assert (found.best, found.pool, found.rounds, found.why) == (None, [], 20, "rounds")
    searcher = Searcher(Script(lambda *_: "again\n"), By(len), Plan("beam", 2, rounds=3))
    (done,) = asyncio.run(searcher.sample(ask()))
    assert (done.tokens, done.text, done.stop) == ((), "", "forced_end")


def test_an_answer_that_is_too_long_is_finished():
    found = one(lambda *_: "abc\n", len, Plan("beam", 2), max_tokens=10)
    assert found.why == "finished" and {len(t.tokens) for t in found.pool} == {10} and found.best.stop == "length"
    exact = one(lambda *_: "abc\n", len, Plan("beam", 2), max_tokens=8)  # a step that ends where the answer must
    assert exact.why == "finished" and exact.best.text == "abc\nabc\n" and exact.best.stop == "length"


@pytest.mark.parametrize("budget", [1, 2, 7, 24, 100, 333])
@pytest.mark.parametrize("kind", ["beam", "best_of"])
def test_a_budget_is_never_passed(budget, kind):
    say = lambda text, lot: "".join(lot.choice(["yes\n", "no\n", "well then\n", "so|"]) for _ in range(30))
    found = one(say, len, Plan(kind, 3, budget=budget, tree=True))
    assert found.tokens <= budget and sum(n.tokens for n in found.tree) == found.tokens
    assert all(t.stop == "stopped" or len(t.tokens) == 60 for t in found.pool)  # what the budget cut is no answer
    assert (found.best is None) == (not found.pool)


def test_the_same_text_is_not_kept_twice():
    script = Script(lambda text, lot: "a\n" if text == "?" else lot.choice(["b|", "c|"]))
    (found,) = search(script, [ask()], By(len), Plan("beam", 3, tree=True))
    assert len(script.asked) == 2  # one open text after the first round, not three of the same
    assert [n.state for n in found.tree[:3]] == ["kept", "double", "double"]


def test_several_stop_strings_and_steps():
    say = lambda text, lot: "One. Two.$ Three\nDONE rest"[len(text) - 1 :]
    found = one(say, len, Plan("beam", 1, step_ends=("\n", ". ", ".$ "), tree=True), stop_strings=("DONE",))
    assert [n.text for n in found.tree] == ["One. ", "Two.$ ", "Three\n", ""]
    assert found.best.text == "One. Two.$ Three\n" and found.best.stop == "stop_string"


def test_the_tree_tells_the_whole_story():
    say = lambda text, lot: lot.choice("abc") + ("\n" if len(text) < 6 else "|")
    found = one(say, lambda t: t.count("b"), Plan("beam", 2, tree=True))
    nodes = {n.id: n for n in found.tree}
    assert sorted(nodes) == list(range(len(nodes)))
    at, words = nodes[found.best.node], []
    assert at.state == "finished" and at.score == found.best.score
    while at is not None:
        words.append(at.text)
        above = nodes.get(at.parent)
        assert above is None or (above.state == "kept" and above.round == at.round - 1)
        at = above
    assert "".join(reversed(words)) == found.best.text
    json.dumps(found.plain(), allow_nan=False)
    assert [n.round for n in found.tree].count(0) == 2 and all(a.round <= b.round for a, b in pairwise(found.tree))


def test_many_problems_are_searched_together():
    script = Script(lambda text, lot: "x\n" if len(text) < 4 else "y|")
    by = By(len)
    found = search(script, [ask(key=str(k)) for k in range(10)], by, Plan("beam", 2))
    assert len(found) == 10 and all(f.best.text == "x\nx\ny" for f in found)
    assert [len(r.prompt) for r in script.asked] == sorted(len(r.prompt) for r in script.asked)  # round by round


@pytest.mark.parametrize("text", ["beam", "beam:0", "beam:x", "bem:3", "actions:-1", "", "best_of:99999"])
def test_what_is_no_plan(text):
    with pytest.raises(TrailmarkError, match="expected beam:B, best_of:N or actions:K"):
        parse_plan(text)


def test_plans():
    assert parse_plan("beam:3", budget=9) == Plan("beam", 3, budget=9)
    for bad in (dict(rounds=0), dict(budget=0), dict(step_ends=("",))):
        with pytest.raises(TrailmarkError):
            Plan("beam", 2, **bad)
    greedy = ask(law=SamplingLaw(temperature=0))
    with pytest.raises(EngineError, match="actions:2 needs a temperature above 0"):
        search(Script(lambda *_: "a|"), [greedy], By(len), Plan("actions", 2))
    assert search(Script(lambda *_: "a|"), [greedy], By(len), Plan("actions", 1))[0].best.text == "a"
    with pytest.raises(EngineError, match="answered nan"):
        search(Script(lambda *_: "a|"), [ask()], By(lambda t: math.nan), Plan("best_of", 2))


@pytest.fixture(scope="module")
def lm():
    from trailmark.models.lm import LM
    from trailmark.models.tiny import build, tiny_config

    tokenizer = tiny_tokenizer()
    made = LM(build(tiny_config("llama", vocab=len(tokenizer), kv_heads=2, context=256), 0), tokenizer, "tiny")
    made.add_head("value", zero=False, seed=1)
    made.add_head("step", outputs=3, zero=False, seed=2)
    return made


def test_one_action_is_the_plain_run(lm):
    source = get_task("taxi", mode="pickup", horizon=5)
    tasks = source.tasks("train", 4)
    engine = LocalEngine(lm, 4, 256)
    plain = play(source, tasks, [Seat("policy", engine)], seed=3)
    for kind in ("actions", "best_of"):
        searcher = Searcher(engine, HeadValues(lm), Plan(kind, 1))
        assert play(source, tasks, [Seat("policy", searcher)], seed=3) == plain


def test_the_action_with_the_highest_value_is_played(lm):
    """The first of K candidates is the plain draw; what is played is the arg max over all of them."""
    source = get_task("taxi", mode="pickup", horizon=4)
    engine = LocalEngine(lm, 4, 256)
    values, seen = HeadValues(lm), []

    class Watched:
        async def score(self, lines):
            seen.append((lines, await values.score(lines)))
            return seen[-1][1]

    searcher = Searcher(engine, Watched(), Plan("actions", 5), keep=True)
    (episode,) = play(source, source.tasks("train", 1), [Seat("policy", searcher)], seed=3)
    assert len(seen) == len(episode.turns) == len(searcher.found)
    for turn, (lines, scores) in zip(episode.turns, seen):
        assert len(lines) == 5 and turn.tokens == lines[int(np.argmax(scores))].tokens
    (plain,) = play(source, source.tasks("train", 1), [Seat("policy", engine)], seed=3)
    assert seen[0][0][0].tokens == plain.turns[0].tokens


def test_tokens_are_those_that_were_drawn(lm):
    """Log-probs of the answer, drawn step by step, are those of the whole sequence."""
    engine = LocalEngine(lm, 8, 256)
    ends = tuple(chr(c) for c in range(97, 110))
    request = Request(
        tuple(lm.tokenizer.encode("How many?")), max_tokens=40, seed=1, key="q", stop_ids=(lm.tokenizer.eos_token_id,)
    )
    (found,) = search(engine, [request], HeadValues(lm), Plan("beam", 3, ends))
    assert found.rounds > 2 and found.best is not None
    whole = asyncio.run(engine.score(request.prompt + found.best.tokens, len(request.prompt)))
    assert found.best.logp == pytest.approx(whole, abs=1e-4) and found.best.logq == found.best.logp


def test_a_model_that_holds_no_more_ends_the_answer(lm):
    engine = LocalEngine(lm, 4, 32)
    request = Request(tuple(lm.tokenizer.encode("How many?")), max_tokens=100, seed=1, key="q")
    (found,) = search(engine, [request], HeadValues(lm), Plan("beam", 2, tuple(map(chr, range(97, 123)))))
    assert found.why == "finished" and {len(t.tokens) + len(request.prompt) for t in found.pool} == {32}


def test_values_are_read_at_the_last_token_and_do_not_depend_on_neighbours(lm):
    from trailmark.models.attention import Layout

    rng = random.Random(0)
    rows = [tuple(rng.randrange(200) for _ in range(rng.randrange(1, 70))) for _ in range(23)]
    values = HeadValues(lm)
    together = asyncio.run(values.values(rows))
    assert together == [asyncio.run(values.values([row]))[0] for row in rows]
    for row, value in zip(rows, together):
        ids = torch.tensor([row])
        pos = torch.arange(len(row))[None]
        with torch.no_grad():
            hidden = lm.hidden(ids, Layout(torch.full_like(ids, len(row)), pos), pos)
            assert float(lm.heads["value"](hidden)[0, -1, 0]) == pytest.approx(value, abs=1e-5)
    changed = asyncio.run(values.values([(*rows[0][:-1], 201)]))[0]
    assert changed != together[0]


@pytest.mark.parametrize("over, sharing", [("last", "tree"), ("min", "tree"), ("last", "flat"), ("last", "rows")])
def test_values_of_a_trie_are_the_same(lm, over, sharing, monkeypatch):
    monkeypatch.setattr(lm, "sharing", sharing)
    rng = random.Random(1)
    lines = []
    for _ in range(6):
        prompt = tuple(rng.randrange(200) for _ in range(rng.randrange(1, 40)))
        for _ in range(5):
            written = tuple(rng.randrange(200) for _ in range(rng.randrange(1, 9)))
            lines.append(Line(prompt, written, ends=(1, len(written))))
    lines += lines[:4]  # candidates are often the same
    rng.shuffle(lines)
    one_by_one = asyncio.run(HeadValues(lm, over=over).score(lines))
    shared = HeadValues(lm, over=over, fixed=False)
    together = asyncio.run(shared.score(lines))
    assert together == pytest.approx(one_by_one, abs=1e-5) and len(set(together)) > 20
    with pytest.raises(ModelError, match="is unknown to"):
        asyncio.run(shared.values([(1, 10**6)]))


def test_values_in_bfloat16_are_those_that_the_learner_reads(lm):
    rng = random.Random(2)
    rows = [tuple(rng.randrange(200) for _ in range(32)) for _ in range(4)]
    packed = lay_out([Sample(np.array(row), {"weight": np.ones(32)}) for row in rows], "rows")
    for amp in (False, True):
        learnt = view({"policy": lm}, packed, [Readout("v", "head", at="after")], amp=amp).read["v"].view(4, 32)[:, -1]
        assert asyncio.run(HeadValues(lm, amp=amp).values(rows)) == pytest.approx(learnt.tolist(), abs=1e-5)
    plain = asyncio.run(HeadValues(lm).values(rows))
    assert plain != pytest.approx(learnt.tolist(), abs=1e-5)


def test_a_model_of_steps(lm):
    line = Line((1, 2), (3, 4, 5, 6), ends=(2, 4))
    at = {e: asyncio.run(HeadValues(lm, "step").score([Line((1, 2), line.tokens[:e])]))[0] for e in (2, 4)}
    assert 0 < at[2] < 1 and at[2] != at[4]
    for over, expected in (
        ("last", at[4]),
        ("min", min(at.values())),
        ("mean", sum(at.values()) / 2),
        ("product", at[2] * at[4]),
    ):
        assert asyncio.run(HeadValues(lm, "step", over).score([line]))[0] == pytest.approx(expected, rel=1e-4)


def test_what_has_no_value(lm):
    with pytest.raises(ModelError, match="no head 'worth'"):
        HeadValues(lm, "worth")
    for row, said in (
        ((), "an empty sequence"),
        ((1,) * 257, "longer than the 256"),
        ((5000,), "token 5000 is unknown"),
    ):
        with pytest.raises(ModelError, match=said):
            asyncio.run(HeadValues(lm).values([row]))


def test_log_probs():
    line = Line((1,), (2, 3), (-1.0, -3.0))
    assert asyncio.run(LogProb().score([line])) == [-4.0]


@pytest.fixture(scope="module")
def critic(lm, tmp_path_factory):
    """A checkpoint with a policy and a critic beside it, in a folder like a run's."""
    from trailmark.learn.checkpoint import save_model

    run_folder = tmp_path_factory.mktemp("run")
    checkpoint = run_folder / "checkpoints" / "000001"
    save_model(lm, checkpoint / "critic", run_folder / "base")
    heads, lm.heads = lm.heads, torch.nn.ModuleDict()
    save_model(lm, checkpoint / "policy", run_folder / "base")
    lm.heads = heads
    (checkpoint / "state.json").write_text("{}")
    return run_folder


def test_the_value_model_of_a_run(lm, critic, tmp_path):
    found = locate_value(str(critic))
    assert found == critic / "checkpoints" / "000001" / "critic"
    assert found == locate_value(str(found.parent)) == locate_value(str(found))
    loaded = load_values(str(critic), lm.tokenizer, "cpu")
    assert asyncio.run(loaded.values([(1, 2, 3)])) == asyncio.run(HeadValues(lm).values([(1, 2, 3)]))
    for name, said in (
        (tmp_path, "holds no value model"),
        (tmp_path / "no", "no such run"),
        (critic / "checkpoints" / "000001" / "policy", "holds no value"),
    ):
        with pytest.raises(ModelError, match=said):
            locate_value(str(name))
    with pytest.raises(ModelError, match="another tokenizer"):
        load_values(found, tiny_tokenizer(("new",)), "cpu")


@pytest.mark.parametrize("head", ["value_head.weight", "score.weight"])
def test_a_released_value_model_chooses_wherever_one_is_named(lm, critic, tmp_path, head):
    """OpenRLHF stores the head among the weights, under names of its own."""
    ours, theirs = locate_value(str(critic)), tmp_path / "theirs"
    shutil.copytree(ours, theirs)
    (theirs / "heads.safetensors").unlink()
    weights = {**load_file(ours / "model.safetensors"), head: load_file(ours / "heads.safetensors")["value.weight"]}
    save_file(weights, theirs / "model.safetensors", metadata={"format": "pt"})
    before = sorted(p.name for p in theirs.iterdir())
    want = asyncio.run(load_values(ours, lm.tokenizer, "cpu").values([(1, 2, 3)]))
    assert asyncio.run(load_values(theirs, lm.tokenizer, "cpu").values([(1, 2, 3)])) == want != [0.0]
    words = (critic / "checkpoints/000001/policy", "--task", "arith", "--n", 2, "--temperature", 1, "--max-tokens", 6)
    mine, other = (evaluated(*words, "--search", "best_of:3", "--value", v)["rows"] for v in (critic, theirs))
    assert [r["metrics"] for r in mine] == [r["metrics"] for r in other]
    assert sorted(p.name for p in theirs.iterdir()) == before  # a released folder stays as it is


def evaluated(*words):
    done = CliRunner().invoke(app, ["eval", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_eval_with_search(critic, tmp_path):
    policy = critic / "checkpoints" / "000001" / "policy"
    words = (policy, "--task", "arith", "--n", 3, "--temperature", 1, "--max-tokens", 12, "--device", "cpu")
    plain = evaluated(*words, "--out", tmp_path / "plain.jsonl")
    same = evaluated(*words, "--search", "actions:1", "--out", tmp_path / "same.jsonl")
    written = lambda name: [[t["tokens"] for t in json.loads(line)["turns"]] for line in (tmp_path / name).open()]
    assert written("plain.jsonl") == written("same.jsonl") and same["rows"][0]["metrics"] == plain["rows"][0]["metrics"]

    many = evaluated(*words, "--search", "best_of:4", "--value", critic)
    assert [r["episodes"] for r in many["rows"]] == [3, 12] and {"pass@1", "pass@4"} <= many["rows"][1][
        "metrics"
    ].keys()
    assert many["searched_tokens"] == 4 * many["rows"][1]["metrics"]["tokens"]["value"]

    beam = evaluated(
        *words,
        "--search",
        "beam:2",
        "--value",
        critic,
        "--budget",
        40,
        "--tree",
        "--samples",
        2,
        "--out",
        tmp_path / "beam.jsonl",
    )
    assert beam["searched_tokens"] <= 40 and [r["episodes"] for r in beam["rows"]] == [3, 6]
    for line in (tmp_path / "beam.jsonl").open():
        searched = json.loads(line)["info"]["search"]
        assert searched["tokens"] == sum(n["tokens"] for n in searched["decisions"][0]["tree"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--search", "beam:2"), "needs a value to choose by"),
        (("--search", "beam:2", "--value", "nowhere"), "no such run"),
        (("--search", "beam:2", "--value", "logp", "--temperature", 0), "needs a temperature above 0"),
        (("--search", "best_of:2", "--value", "logp", "--budget", 5), "belong to beam and actions"),
        (("--value", "logp"), "belong to --search"),
        (("--search", "wide"), "expected beam:B"),
    ],
)
def test_eval_says_what_is_wrong_with_a_search(words, said):
    done = CliRunner().invoke(app, ["eval", "tiny", "--task", "arith", "--n", "2", *map(str, words)])
    assert done.exit_code == 2 and said in done.stderr


def test_an_empty_pool_is_wrong(lm):
    """Nothing is finished in one round; the world would call an empty answer invalid, and it is wrong."""
    from trailmark.rollout.search_episodes import noted

    source = get_task("arith", invalid_unparsed=True)
    searcher = Searcher(LocalEngine(lm, 4, 256), HeadValues(lm), Plan("beam", 2, ("a", "b"), rounds=1), keep=True)
    law = SamplingLaw(allowed=tuple(lm.tokenizer.encode("ab")))
    (episode,) = play(source, source.tasks("test", 1), [Seat("policy", searcher, law)], seed=1)
    found = searcher.found[f"{episode.id}\x000"]
    assert found.best is None and noted(episode, searcher).outcome == Scored(0.0, False)
    assert noted(episode, searcher).info["search"]["empty"] == 1


def test_best_of_whole_episodes(lm):
    source = get_task("taxi", mode="pickup", horizon=3)
    seat = Seat("policy", LocalEngine(lm, 4, 256))
    episodes = play(source, source.tasks("train", 3), [seat], n=4, seed=1)
    chosen = best_by_value(episodes, HeadValues(lm), seat)
    assert [e.group for e in chosen] == list(dict.fromkeys(e.group for e in episodes))
    for best in chosen:
        rest = [
            asyncio.run(HeadValues(lm).values([e.sequence(len(e.turns) - 1)]))[0]
            for e in episodes
            if e.group == best.group
        ]
        drawn = sum(len(t.tokens) for e in episodes if e.group == best.group for t in e.turns)
        assert best.info["search"] == {"score": pytest.approx(max(rest)), "of": 4, "tokens": drawn}


def test_a_search_is_an_engine_like_any_other(lm):
    engine = LocalEngine(lm, 8, 256)
    searcher = Searcher(engine, LogProb(), Plan("best_of", 2))
    request = Request((1, 2, 3), n=2, max_tokens=5, seed=4, key="k")
    ((first, second),) = run(searcher, [request])
    assert first.tokens != second.tokens
    two = run(engine, [dataclasses.replace(request, n=2)])[0]
    assert first in two and sum(first.logp) == max(sum(c.logp) for c in two)
