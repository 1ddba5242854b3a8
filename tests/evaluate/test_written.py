"""`trailmark write`: four variants of reasoning and writing, on two rows, with models of one layer."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from trailmark.ask.client import Client
from trailmark.chat import render
from trailmark.commands.app import app
from trailmark.commands.serve import serving
from trailmark.config import ModelConfig, ModelShape
from trailmark.engines.base import EngineError
from trailmark.engines.local import LocalEngine
from trailmark.methods.vrcli import written
from trailmark.methods.vrcli.plans import read_scored_rows, writing
from trailmark.models.load import load_model
from trailmark.tasks.stories import prompts
from trailmark.tasks.stories.plans import plan_of
from trailmark.tasks.stories.rows import read_rows


def call(*words, code=0):
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == code, done.output
    return " ".join((done.output if code else done.stdout).split())


def lines(path):
    return [json.loads(x) for x in path.read_text().splitlines()]


STORIES = [
    {"id": f"s{k}", "story_id": f"book{k}", "chapter_index": 2, "next_chapter": f"Part {k}\n" + "Ann left. " * (k + 2),
     "next_chapter_header": f"Part {k}", "next_chapter_synopsis": "She goes.", "story_text": "Ann sat down."}
    for k in range(3)
]  # fmt: skip
TALKS = [
    {"id": f"t{k}", "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": f"So {k}."}]}
    for k in range(3)
]


def model(path, seed):
    lm = load_model(ModelConfig(name="tiny", seed=seed, shape=ModelShape(layers=1, width=16, heads=2, context=2048)))
    lm.model.save_pretrained(path)
    lm.tokenizer.save_pretrained(path)



@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Rows of stories and talks, and a base model, a fine-tuned one and a trained one."""
    here = tmp_path_factory.mktemp("written")
    for kind, rows in (("stories", STORIES), ("talks", TALKS)):
        (here / f"{kind}.rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        call("data", "stories", here / f"{kind}.rows.jsonl", "--out", here / kind, "--over", 0)
        every = "".join((here / kind / f"{s}.jsonl").read_text() for s in ("train", "val"))
        (here / f"{kind}.jsonl").write_text(every)
    for k, name in enumerate(("base", "sft", "rl")):
        model(here / name, k)
    return here


def four(place, out, *more, rows="stories.jsonl"):
    base = place / "base"
    variants = [f"b={base}", f"br={base},{base}", f"sft={place / 'sft'}", f"rl={place / 'rl'},{base}"]
    said = call("write", place / rows, *variants, "--out", out, "--plan-tokens", 6, "--json", *more)
    return json.loads(said)["variants"]


NAMES = ["b.jsonl", "br.jsonl", "br.plans.jsonl", "rl.jsonl", "rl.plans.jsonl", "sft.jsonl"]


@pytest.fixture(scope="module")
def made(place):
    out = place / "made"
    return out, four(place, out)


def test_four_variants(place, made):
    out, about = made
    assert sorted(p.name for p in out.glob("*.jsonl") if p.name != "answers.jsonl") == NAMES
    assert {n: (a["texts"], a.get("plans")) for n, a in about.items()} == {
        "b": (2, None), "br": (2, 2), "sft": (2, None), "rl": (2, 2)}  # fmt: skip
    rows = read_scored_rows(place / "stories.jsonl")
    for name in ("b", "br", "sft", "rl"):
        texts = lines(out / f"{name}.jsonl")
        assert [t["id"] for t in texts] == list(rows)
        for t in texts:
            gold = len(rows[t["id"]]["gold"].encode())  # a token for each byte
            assert gold // 2 <= t["tokens"] <= (3 * gold + 1) // 2 and t["text"].strip()
            assert "<END_OF_CHAPTER>" not in t["text"] and t["stop"] in ("stopped", "stop_string", "length")
    plans = {p["id"]: p for p in lines(out / "rl.plans.jsonl")}
    assert all(1 <= p["tokens"] <= 6 for p in plans.values())
    assert [t["plan"] for t in lines(out / "rl.jsonl")] == [plan_of(plans[i]["text"]) for i in rows]
    assert lines(out / "rl.plans.jsonl") != lines(out / "br.plans.jsonl")  # other planners
    assert [t["text"] for t in lines(out / "b.jsonl")] != [t["text"] for t in lines(out / "sft.jsonl")]


def test_the_files_are_what_the_other_commands_read(place, made):
    out, _ = made
    plans = f"br={out / 'br.plans.jsonl'}"
    said = call("improvement", place / "stories.jsonl", plans, "--model", place / "base", "--json")
    assert json.loads(said)["arms"]["br"]["plans"] == 2
    rows = place / "stories.rows.jsonl"
    files = [f"{n}={out / f'{n}.jsonl'}" for n in ("b", "br", "sft", "rl")] + [f"reas={out / 'br.plans.jsonl'}"]
    table = json.loads(call("chapters", *files, "--rows", rows, "--json"))["systems"]
    assert {n: a["texts"] for n, a in table.items()} == {"b": 2, "br": 2, "sft": 2, "rl": 2, "reas": 2}


def test_a_command_that_was_stopped_goes_on_to_the_same_bytes(place, made, tmp_path, monkeypatch):
    out, _ = made
    own, asked = Client.say, []

    async def dies(self, question, draw):
        asked.append(question)
        if len(asked) == 5:
            raise EngineError("the power went out")
        return await own(self, question, draw)

    monkeypatch.setattr(Client, "say", dies)
    base = place / "base"
    words = ["write", place / "stories.jsonl", f"b={base}", f"br={base},{base}", f"sft={place / 'sft'}",
             f"rl={place / 'rl'},{base}", "--out", tmp_path / "w", "--plan-tokens", "6", "--at-once", 1]  # fmt: skip
    said = call(*words, code=1)
    assert "1 of 2 br texts failed (the first: row 's" in said
    assert "the power went out. What was answered is kept" in said
    assert not (tmp_path / "w/br.jsonl").exists() and (tmp_path / "w/b.jsonl").exists()
    call(*words)
    assert len(asked) == 13  # twelve answers, and the one that failed; none was asked twice
    assert all((tmp_path / "w" / n).read_bytes() == (out / n).read_bytes() for n in NAMES)
    before = len(asked)
    call(*words)
    assert len(asked) == before
    call(*words[:-2], "--seed", 1)  # another seed: everything is drawn again, and the old files are put aside
    assert len(asked) == before + 12 and (tmp_path / "w/replaced/b-texts-1/b.jsonl").is_file()


def test_prompts_are_those_of_the_prompt_builder(place):
    """`writing` from a prepared row equals the generation prompts made from the row itself."""
    rows = read_scored_rows(place / "stories.jsonl")
    for row in read_rows(place / "stories.rows.jsonl"):
        if row.id in rows:
            parts = prompts.pieces(row)
            assert writing(rows[row.id], None, 300) == prompts.baseline_generation(parts, 300)
            assert writing(rows[row.id], "A plan.", 300) == prompts.plan_generation(parts, "A plan.", 300)
            assert writing(rows[row.id], "", 300) == prompts.plan_generation(parts, "", 300)
    talks = read_scored_rows(place / "talks.jsonl")
    (first, *_) = talks.values()
    assert writing(first, None, 300)[-1]["content"] == first["information"]  # a talk asks for no chapter
    assert writing(first, "P", 300)[-1]["content"] == first["information"] + "\n\n### Detailed Plan ###\nP"


def test_a_server_writes_what_the_model_in_this_process_writes(place, tmp_path):
    lm = load_model(ModelConfig(name=str(place / "base")))
    here = {k: call("write", place / "talks.jsonl", f"x={place / 'base'},{place / 'base'}", "--out", tmp_path / "here",
                    "--plan-tokens", 5, "--samples", 2, "--length", 8) for k in "x"}  # fmt: skip
    with serving(LocalEngine(lm, 4, 2048), "base") as url:
        words = ["write", place / "talks.jsonl", f"x={url},{url}", "--plan-tokens", 5, "--samples", 2, "--length", 8]
        there = call(*words, "--out", tmp_path / "there")
        assert "x-texts: 4 texts" in here["x"] and "x-texts: 4 texts" in there
        for name in ("x.plans.jsonl", "x.jsonl"):
            assert lines(tmp_path / "here" / name) == lines(tmp_path / "there" / name)
        assert len({(t["id"], t["sample"]) for t in lines(tmp_path / "here/x.jsonl")}) == 4
        said = call(*words, "--out", tmp_path / "no", "--served", "nobody", code=2)
        assert "no model 'nobody'" in said
    said = call(*words, "--out", tmp_path / "gone", code=1)
    assert "cannot be reached" in said and not list((tmp_path / "gone").glob("x*"))


def test_what_is_refused(place, tmp_path):
    rows, base = place / "stories.jsonl", place / "base"
    out = ["--out", tmp_path / "o"]
    assert "is neither NAME=WRITER nor" in call("write", rows, "b", *out, code=2)
    assert "is neither NAME=WRITER nor" in call("write", rows, "b=x,y,z", *out, code=2)
    assert "two variants are called 'b'" in call("write", rows, f"b={base}", f"b={base}", *out, code=2)
    assert "is no name for a variant" in call("write", rows, f"../b={base}", *out, code=2)
    prompt = next(iter(read_scored_rows(rows).values()))["prompt"]
    size = len(render(load_model(ModelConfig(name=str(base))).tokenizer, prompt, generation_prompt=True).tokens)
    said = call("write", rows, f"b={base},{base}", *out, code=2)  # 2048 tokens of plan in a context of 2048
    assert f"the prompt has {size} tokens and the answer may have 2048, and {base} reads 2048" in said
    assert str(rows) in said and "row 's" in said and not list((tmp_path / "o").glob("b*"))
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "prompt": "x"}\n')
    assert "row 'a' has no 'gold'" in call("write", tmp_path / "bad.jsonl", f"b={base}", *out, code=2)


def test_a_text_may_hold_any_end_of_line(tmp_path):
    rows = [{"id": "a", "text": "one\u2028two\x85three\x0cfour"}, {"id": "b", "text": "five\u2029"}]
    work = written._Work(tmp_path, tmp_path, {}, written.How(), {}, written.Store(), 1)
    written.write_lines(tmp_path / "rl.jsonl", rows)
    assert work.read("rl.jsonl") == rows


def test_a_plan_follows_the_markers_of_the_run_that_made_it(place, tmp_path, monkeypatch):
    """`reward.markers` of the planner's run say where its plan begins; --marker says it for any planner."""
    said = {"text": "In summary: no. Plan: she leaves.", "tokens": 3, "stop": "stopped"}
    monkeypatch.setattr(written._Work, "answered", lambda self, title, model, asks: [dict(said) for _ in asks])
    reward = {"kind": "likelihood", "markers": ["Plan:"]}
    find = written.locate

    def located(name):
        found = find(name)
        mine = name == str(place / "rl")
        return dataclasses.replace(found, recipe={"task": {"options": {"reward": reward}}}) if mine else found

    monkeypatch.setattr(written, "locate", located)
    about = four(place, tmp_path / "o")
    assert {t["plan"] for t in lines(tmp_path / "o/rl.jsonl")} == {"she leaves."}
    assert {t["plan"] for t in lines(tmp_path / "o/br.jsonl")} == {"no. Plan: she leaves."}
    assert about["rl"]["markers"] == about["br"]["markers"] == 1.0
    reward["markers"] = []  # the whole answer is the plan; the texts are made again
    assert four(place, tmp_path / "o")["rl"]["markers"] is None
    assert {t["plan"] for t in lines(tmp_path / "o/rl.jsonl")} == {said["text"]}
    four(place, tmp_path / "p", "--marker", "she")
    assert {t["plan"] for n in ("rl", "br") for t in lines(tmp_path / f"p/{n}.jsonl")} == {"leaves."}
    assert "this one is empty" in call("write", place / "stories.jsonl", f"b={place / 'base'}", "--marker", " ", code=2)


def test_improvement_reads_plans_as_the_run_of_the_episodes_does(place, tmp_path):
    (tmp_path / "run/evaluation").mkdir(parents=True)
    recipe = "method: vrcli\ntask: {name: prompts, options: {reward: {kind: likelihood, markers: ['Plan:']}}}\n"
    (tmp_path / "run/recipe.yaml").write_text(recipe)
    ids = list(read_scored_rows(place / "stories.jsonl"))
    told = "".join(json.dumps({"id": i, "text": "In summary: no. Plan: she leaves."}) + "\n" for i in ids)
    for file in (tmp_path / "run/evaluation/mine.jsonl", tmp_path / "loose.jsonl"):
        file.write_text(told)

    def plans(file, *more):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        call("improvement", place / "stories.jsonl", f"a={file}", "--model", place / "base", "--out", out, *more)
        return {r["plan"] for r in lines(out) if r["arm"] == "a"}

    assert plans(tmp_path / "run/evaluation/mine.jsonl") == {"she leaves."}
    assert plans(tmp_path / "loose.jsonl") == {"no. Plan: she leaves."}
    assert plans(tmp_path / "loose.jsonl", "--marker", "no.") == {"Plan: she leaves."}
