"""Which tokens `method: sft` trains, with masks worked out by hand. The tokenizer has one token for each byte, and one
for each of its control tokens, so a mask can be read off the text: ┃ stands before and after what is trained."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from trailmark.commands.app import app
from trailmark.config import ModelConfig
from trailmark.engines.base import Request, run
from trailmark.engines.local import LocalEngine
from trailmark.errors import DataError
from trailmark.methods.configs import SftRecipe
from trailmark.methods.sft import SftMethod, conversation_samples
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.recipe import resolve
from trailmark.runs.launch import launch
from trailmark.types import SamplingLaw
from trailmark.verify import verify

TALK = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "\nSo."},
]
LLAMA3 = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Earlier answers are shown without what stands before "?": the history is rewritten.
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content[-1:] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BY_HAND = {
    "chatml": (
        None,
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n┃\nSo.<|im_end|>┃",
    ),
    "llama3": (
        LLAMA3,
        "<|endoftext|><|im_start|>user\n\nHi.<|im_end|><|im_start|>assistant\n\nYes?<|im_end|>"
        "<|im_start|>user\n\nWhy?<|im_end|><|im_start|>assistant\n\n┃\nSo.<|im_end|>┃",
    ),
    "mistral": (MISTRAL, "[INST] Hi. [/INST]Yes?<|im_end|>[INST] Why? [/INST]┃\nSo.<|im_end|>┃"),
    "rewrites": (
        REWRITES,
        "<|im_start|>user\nHi.<|im_end|><|im_start|>assistant\n?<|im_end|>"
        "<|im_start|>user\nWhy?<|im_end|><|im_start|>assistant\n┃\nSo.<|im_end|>┃",
    ),
}


def ids(tok, text):
    """A token for each control word, and for each byte of the rest."""
    pieces = re.split(r"(<\|\w+\|>)", text)
    known = set(tok.get_added_vocab())
    return [t for p in pieces for t in ([tok.convert_tokens_to_ids(p)] if p in known else tok(p)["input_ids"])]


def by_hand(tok, shown):
    """Tokens and weights of a text with ┃ around what is trained."""
    tokens, weights = [], []
    for k, piece in enumerate(shown.split("┃")):
        made = ids(tok, piece)
        tokens += made
        weights += [k % 2] * len(made)
    return tokens, weights


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def tokenizer(template, pad_is_eos=False):
    tok = tiny_tokenizer(pad_is_eos=pad_is_eos)
    tok.chat_template = template or tok.chat_template
    return tok


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize("name", BY_HAND)
def test_the_last_message_and_its_end_are_trained(tmp_path, name, pad_is_eos):
    template, shown = BY_HAND[name]
    tok = tokenizer(template, pad_is_eos)
    path = write(tmp_path / "talk.jsonl", [{"messages": TALK}])
    ((sample,),) = conversation_samples(tok, path, True, 512, "last")
    tokens, weights = by_hand(tok, shown)
    assert sample.tokens.tolist() == tokens and sample.streams["weight"].tolist() == weights
    assert sample.mass == {"weight": 5.0}  # a newline, S, o, the dot, and the end


def test_all_tokens_but_the_first_are_trained(tmp_path):
    tok = tokenizer(None)
    ((sample,),) = conversation_samples(tok, write(tmp_path / "t.jsonl", [{"messages": TALK}]), True, 512, "all")
    assert sample.tokens.tolist() == by_hand(tok, BY_HAND["chatml"][1])[0]
    assert sample.streams["weight"].tolist() == [0] + [1] * (len(sample.tokens) - 1)


def test_without_the_switch_every_answer_is_trained(tmp_path):
    tok = tokenizer(None)
    ((sample,),) = conversation_samples(tok, write(tmp_path / "t.jsonl", [{"messages": TALK}]), True, 512)
    shown = BY_HAND["chatml"][1].replace("Yes?<|im_end|>", "┃Yes?<|im_end|>┃")
    assert sample.streams["weight"].tolist() == by_hand(tok, shown)[1]


STORIES = [
    {"id": f"s{k}", "story_id": f"book{k}", "chapter_index": 2, "next_chapter": f"Part {k}\nAnn left {k}.",
     "next_chapter_header": f"Part {k}", "next_chapter_synopsis": "She goes.", "story_text": "Ann sat.",
     "last_n_chapters": 1, "prior_plot_summary": "Ann came.", "high_level_plot_summary": "Ann's life.",
     "character_sheets": {"Ann": "Tall."}}
    for k in range(3)
]  # fmt: skip


def test_stories_become_conversations_of_which_the_chapter_is_trained(tmp_path):
    rows = write(tmp_path / "rows.jsonl", STORIES)
    done = CliRunner().invoke(app, ["data", "stories", rows, "--out", str(tmp_path / "out"), "--over", "0"])
    assert done.exit_code == 0, done.output
    for template in (None, LLAMA3, "{{ bos_token }}" + MISTRAL.replace("'user'", "'user' or m.role == 'system'")):
        tok = tokenizer(template)
        tok.bos_token = "<|endoftext|>"
        for split in ("train", "val", "test"):
            (row,) = map(json.loads, (tmp_path / f"out/sft_{split}.jsonl").read_text().splitlines())
            ((s,),) = conversation_samples(tok, str(tmp_path / f"out/sft_{split}.jsonl"), True, 4096, "last")
            gold = row["messages"][-1]["content"]
            k = row["id"][1]
            assert gold == f"Part {k}\nAnn left {k}."
            n = len(gold.encode()) + 1
            assert s.streams["weight"].tolist() == [0] * (len(s.tokens) - n) + [1] * n
            assert s.tokens[-n:].tolist() == ids(tok, gold + "<|im_end|>")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": TALK[:3]}, "key 'messages': the last message is from 'user', and trained: last needs one from"),
        ({"messages": [TALK[0], {"role": "assistant", "content": " \n"}]}, "the gold text, is empty"),
        ({"prompt": "Hi.", "response": ""}, "key 'response': the last message, the gold text, is empty"),
        (STORIES[0], "key 'next_chapter': is a field of a story: `trailmark data stories` makes conversations"),
    ],
)
def test_rows_without_a_gold_text(tmp_path, row, says):
    path = write(tmp_path / "t.jsonl", [{"messages": TALK}, row])
    with pytest.raises(DataError) as e:
        conversation_samples(tokenizer(None), path, True, 512, "last")
    assert f"{path}:2" in str(e.value) and says in str(e.value)


def test_a_run_learns_the_end_and_leaves_the_prompt_alone(tmp_path):
    """Two rows are overfitted: the model then writes the gold text and stops by itself. `verify` knows the mask."""
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "no"},
                      {"role": "user", "content": "b"}, {"role": "assistant", "content": "xyz"}]},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "uvw"}]},
    ]  # fmt: skip
    config = resolve(
        {"method": "sft", "data": write(tmp_path / "t.jsonl", rows), "eval_data": str(tmp_path / "t.jsonl"),
         "trained": "last", "out": str(tmp_path / "run"), "steps": 60, "batch": 2, "eval": {"every": 20},
         "model": {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 96}},
         "learner": {"optim": {"lr": 0.01}}, "checkpoint": {"every": 20, "metric": "eval/nll", "mode": "min"}},
        SftRecipe,
    )  # fmt: skip
    launch(SftMethod, config)
    metrics = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    nll = [m["eval/nll"] for m in metrics if "eval/nll" in m]
    assert nll[-1] < 0.1 < nll[0]
    lm = load_model(ModelConfig(name=str(tmp_path / "run/checkpoints/000060/policy")))
    tok = lm.tokenizer
    prompt = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
    asked = tuple(ids(tok, prompt + "<|im_start|>assistant\n"))
    ((said,),) = run(LocalEngine(lm, 1, 96), [Request(asked, SamplingLaw(0.0), 1, 16, (tok.eos_token_id,))])
    assert (said.text, said.stop, said.tokens[-1]) == ("xyz", "stopped", tok.eos_token_id)
    masks = verify(tmp_path / "run")["masks"]
    assert masks.status == "pass" and "the last message, with its end" in masks.what
    assert np.isclose(masks.numbers["trained"], 8)


def test_verify_knows_a_run_on_all_tokens(tmp_path, monkeypatch):
    config = resolve(
        {"method": "sft", "data": write(tmp_path / "t.jsonl", [{"messages": TALK}] * 2), "trained": "all",
         "out": str(tmp_path / "run"), "steps": 1, "batch": 2,
         "model": {"name": "tiny", "shape": {"layers": 1, "width": 16, "heads": 2, "context": 128}}},
        SftRecipe,
    )  # fmt: skip
    launch(SftMethod, config)
    masks = verify(tmp_path / "run")["masks"]
    size = len(by_hand(tokenizer(None), BY_HAND["chatml"][1])[0])
    assert masks.status == "pass" and masks.numbers == {"rows": 2, "tokens": 2 * size, "trained": 2 * (size - 1)}
    own = SftMethod.imitated.__func__

    def only_answers(cls, config, *rest):
        return own(cls, config.model_copy(update={"trained": "answers"}), *rest)

    monkeypatch.setattr(SftMethod, "imitated", classmethod(only_answers))
    masks = verify(tmp_path / "run")["masks"]
    assert masks.status == "fail" and "a token is left out" in masks.what
