"""A process reward model as the scorer of a search and of a server: it reads the same places as in training."""

import json
import math
import urllib.request

import pytest

from trailmark.commands.serve import serving
from trailmark.config import ModelConfig, resolve
from trailmark.engines.base import Request
from trailmark.engines.local import LocalEngine
from trailmark.engines.scripted import ScriptedEngine
from trailmark.formats.turns import Reader, Starts, plain
from trailmark.methods.offline_configs import RewardModelRecipe
from trailmark.methods.reward_model import RewardModelMethod
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.play import Seat
from trailmark.rollout.search import Plan, answer_ends, search
from trailmark.rollout.search_episodes import best_by_value
from trailmark.runs.episode_json import to_json
from trailmark.runs.launch import launch
from trailmark.score.classes import class_numbers, step_outputs
from trailmark.score.value_models import load_values
from trailmark.steps import mark_steps, step_types, without_end
from trailmark.types import Annotation, Episode, Scored, Task

TINY = {"name": "tiny", "dtype": "float64", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 256}}
WORDS = tiny_tokenizer()
SAID = (
    " I look.\nAction 1: Use a rule.\nObservation 1: It is so.\nThought 2: Good.\nAction 2: Finish[The answer is A.]",
    " I look.\nand look again\n\nAction 1: Finish[The answer is B.]",
)


def solution(k, text, marked=True):
    turn = plain(Reader(WORDS, "policy", Starts()), "Which?\nThought 1:", text)
    e = Episode(f"q/{k}", Task("q"), "q", (turn,), {"self": Scored(1.0, True)})
    return without_end(mark_steps(e, "policy", WORDS, "react"), "policy", WORDS) if marked else e


def trained(folder, **read):
    """A reward model of ReAct steps, trained for two steps."""
    made = [solution(k, text) for k, text in enumerate(SAID)]
    notes = [Annotation(e.id, "label", "step", (3.0 - i,) * len(e.turns[0].steps), 0) for i, e in enumerate(made)]
    (folder / "labelled.jsonl").write_text("".join(to_json(e) + "\n" for e in made))
    (folder / "labelled.annotations.jsonl").write_text("".join(to_json(a) + "\n" for a in notes))
    given = {"method": "reward_model", "out": str(folder / "prm"), "model": TINY, "steps": 2, "batch": 2}
    given |= {"data": str(folder / "labelled.jsonl"), "read": {"classes": [2, 3], **read}}
    launch(RewardModelMethod, resolve({**given, "learner": {"optim": {"lr": 1e-2}}}, RewardModelRecipe))
    return load_values(folder / "prm", WORDS, dtype="float64")


@pytest.mark.parametrize(
    ("skip", "offset", "over", "raw"),
    [
        ([], 0, "product", False),
        (["Action"], 0, "product", False),
        ([], 1, "product", False),
        (["Action"], 0, "last", False),  # the last step that is not skipped
        ([], 1, "last", False),
        ([], 0, "sum", True),
    ],
)
def test_best_of_reads_the_steps_that_were_learnt(tmp_path, skip, offset, over, raw):
    """ReAct steps, read behind their last token, without the kinds and the last steps that take no part."""
    values = trained(tmp_path, over=over, split="react", skip=skip, offset=offset, raw=raw)
    wanted = {}
    for k, text in enumerate(SAID):
        e = solution(k, text)
        said = step_outputs(values.lm, [e])[e.id, 0]
        each = said[:, 3].tolist() if raw else class_numbers(said, [2, 3]).tolist()
        kinds = step_types(e, 0, WORDS)
        assert len(kinds) == (5, 2)[k]
        taken = [v for v, kind in list(zip(each, kinds))[: len(kinds) - offset] if kind not in skip]
        wanted[e.id] = {"product": math.prod(taken), "last": taken[-1], "sum": sum(taken)}[over]
    bare = [solution(k, text, marked=False) for k, text in enumerate(SAID)]
    (best,) = best_by_value(bare, values, Seat("policy", ScriptedEngine(lambda prompt, draw: "", WORDS)))
    assert best.id == max(wanted, key=wanted.get)
    assert best.info["search"]["score"] == pytest.approx(wanted[best.id], abs=1e-9)


def test_a_beam_reads_named_steps_before_their_newline(tmp_path):
    """A beam stops behind a newline, and the model of named steps has learnt to read before it."""
    values = trained(tmp_path, over="product", split="react", offset=1)
    text = SAID[0]
    tokens = tuple(WORDS(text, add_special_tokens=False).input_ids)
    prompt = tuple(WORDS("Which?\nThought 1:", add_special_tokens=False).input_ids)
    size = lambda said: len(WORDS(said, add_special_tokens=False).input_ids)
    ends = [size(text[: text.index(m)]) for m in ("\nAction 1", "\nObservation", "\nThought", "\nAction 2")]
    assert answer_ends(values, WORDS, prompt, tokens, text, ("\n",)) == tuple(ends)
    begun = text[: text.index("Observation")]
    some = tuple(WORDS(begun, add_special_tokens=False).input_ids)
    assert answer_ends(values, WORDS, prompt, some, begun, ("\n",), whole=False) == tuple(ends[:2])
    asked = []
    values.score, score = lambda lines: asked.extend(lines) or score(lines), values.score
    engine = ScriptedEngine(lambda prompt, draw: f"Thought 2: I see {draw.randrange(99)}.\n", WORDS)
    search(engine, [Request(prompt, max_tokens=200)], values, Plan("beam", 2, rounds=2))
    assert {len(x.ends) for x in asked} == {1, 2}  # the first line goes on what the prompt opened
    assert all(WORDS.decode(x.tokens)[-1] == "\n" and WORDS.decode(x.tokens[: x.ends[-1]])[-1] == "." for x in asked)


def test_a_server_chooses_over_all_steps(tmp_path):
    """`serve --value` with a process reward model: the score of the best answer is the product over its lines."""
    values = trained(tmp_path, over="product")
    policy = load_model(ModelConfig.model_validate({**TINY, "seed": 3}))
    body = {"model": "m", "prompt": "Which?\n", "max_tokens": 40, "temperature": 1.0, "seed": 1,
            "search": {"best_of": 3}, "allowed_token_ids": WORDS("ab\n").input_ids}  # fmt: skip
    with serving(LocalEngine(policy, 4, 256), "m", values=values) as url:
        ask = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        choice = json.loads(urllib.request.urlopen(ask, timeout=60).read())["choices"][0]
    assert "\n" in choice["text"].strip("\n")
    turn = plain(Reader(WORDS, "policy", Starts()), "Which?\n", choice["text"])
    e = Episode("q/0", Task("q"), "q", (turn,), {"self": Scored(1.0, True)})
    e = without_end(mark_steps(e, "policy", WORDS, "newline"), "policy", WORDS)
    each = class_numbers(step_outputs(values.lm, [e])["q/0", 0], [2, 3])
    assert len(each) > 1 and choice["search"]["finished"] == 3
    assert choice["search"]["score"] == pytest.approx(math.prod(each), abs=1e-9)
