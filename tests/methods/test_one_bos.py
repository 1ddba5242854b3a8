"""A tokenizer that puts a BOS before every text, as Llama's does: a prompt has exactly one, whoever builds it."""

import json

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from trailmark import chat, formats
from trailmark.config import ModelConfig, resolve
from trailmark.engines.local import LocalEngine
from trailmark.methods.reflect import method as reflect
from trailmark.methods.reflect.imitation import Players
from trailmark.methods.reflect.lessons import Lesson
from trailmark.methods.reflect.play import two_players
from trailmark.methods.sft import conversation_samples
from trailmark.models.load import load_model
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.play import Seat, play
from trailmark.serve.body import CompletionBody, ScoreBody, ValuesBody
from trailmark.serve.prompt_format import plain_format
from trailmark.serve.score import score_rows
from trailmark.serve.search import value_rows
from trailmark.tasks import get_task
from trailmark.texts import mark
from trailmark.types import Task

SHAPE = {"layers": 1, "width": 16, "heads": 2, "context": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    core = tiny_tokenizer().backend_tokenizer
    core.add_special_tokens(["<s>"])
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = "{{ bos_token }}" + tiny_tokenizer().chat_template
    folder = tmp_path_factory.mktemp("llama")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lm(folder):
    made = load_model(ModelConfig(name="tiny", tokenizer=str(folder), shape=SHAPE))
    assert made.tokenizer("a")["input_ids"][0] == made.tokenizer.bos_token_id  # it adds one: else this shows nothing
    return made


def one(tokenizer, ids):
    ids = [int(t) for t in ids]
    return ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("given", ["1+1=?\n", "<s>1+1=?\n"])
def test_text_prompts(lm, tmp_path, given):
    t, prompt_format = lm.tokenizer, plain_format(lm.tokenizer)
    assert one(t, prompt_ids(t, given)) and t.decode(prompt_ids(t, given)[1:]) == "1+1=?\n"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": given, "response": "2", "reward": 1}) + "\n")
    ((sample,),) = conversation_samples(t, str(path), False, 64)
    assert one(t, sample.tokens)
    (e,) = formats.read("trajectories", path, t).episodes
    assert one(t, e.turns[0].prompt) and tuple(sample.tokens) == e.turns[0].prompt + e.turns[0].tokens
    body = CompletionBody.model_validate({"prompt": given})
    assert [one(t, p) for p in body.prompts(t)] == [True]
    assert [
        one(t, r)
        for r, _ in score_rows(ScoreBody.model_validate({"prompt": given, "completion": "2"}), t, prompt_format)
    ] == [True]
    assert [one(t, r) for r in value_rows(ValuesBody.model_validate({"states": [given]}), t, prompt_format)] == [True]
    bare = CompletionBody.model_validate({"prompt": "1+1=?\n", "add_special_tokens": False})
    assert t.bos_token_id not in next(bare.prompts(t))  # who says so gets none


def test_conversations_have_the_template_s(lm, tmp_path):
    talk = [
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And?"},
    ]
    assert one(lm.tokenizer, chat.render(lm.tokenizer, talk, True).tokens)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": talk[:2]}) + "\n")
    for use_chat in (True, False):
        ((sample,),) = conversation_samples(lm.tokenizer, str(path), use_chat, 128)
        assert one(lm.tokenizer, sample.tokens)


def test_files_of_reflect_rl(lm, tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"text": "state\n # Analyze:\ngo on"}) + "\n")
    ((sample,),) = conversation_samples(lm.tokenizer, str(path), True, 128)
    assert one(lm.tokenizer, sample.tokens)


def test_plays_of_worlds_and_of_mathematics(lm, tmp_path):
    (tmp_path / "gsm8k_train.jsonl").write_text(json.dumps({"question": "One and one?", "answer": "#### 2"}) + "\n")
    seat = Seat("policy", LocalEngine(lm, 2, 512), max_tokens=2)
    for source in (
        get_task("taxi", horizon=2),
        get_task("math", dataset="gsm8k", path=str(tmp_path), style="plain"),
        get_task("math", dataset="gsm8k", path=str(tmp_path), style="plain", bos="<s>"),
        get_task("arith", level=1),
    ):
        (e,) = play(source, source.tasks("train", 1), [seat])
        assert e.turns and all(one(lm.tokenizer, t.prompt) for t in e.turns if t.continues is None), source.name


def test_reflector_and_policy_in_lessons_and_in_play(folder):
    config = resolve({
        "method": "reflect", "steps": 2, "sft": {"reflector": 1, "policy": 1}, "thought": 60, "teacher": {"prompts": 1},
        "task": {"name": "taxi", "options": {"mode": "pickup", "horizon": 2}}, "engine": {"max_num_seqs": 2,
        "max_len": 512},
        "model": {"name": "tiny", "tokenizer": str(folder), "shape": SHAPE},
    }, reflect.ReflectRecipe)  # fmt: skip
    method = Players(config, None, ["reflector", "policy"])
    (e,) = play(method.source, method.source.tasks("all", 1), method.opened.seats, two_players(method.talk))
    seen = method.source.make().reset(method.source.tasks("all", 1)[0])
    lesson = Lesson(seen.state, seen.menu, e.turns[0].text.split("# Action:")[0], "0", "0")
    for which, turn in (("reflector", e.turns[0]), ("policy", e.turns[1])):
        assert one(method.models[which].tokenizer, turn.prompt)
        if which == "reflector":
            assert tuple(method.sample(lesson, which, "1 0").tokens[: len(turn.prompt)]) == turn.prompt


@pytest.mark.parametrize("bos", ["", "<s>"])
def test_a_prompt_with_a_frame_of_its_own_keeps_its_control_tokens(lm, bos):
    t = lm.tokenizer
    text = mark(bos) + mark("<|im_start|>user\n") + "1+1=? <|im_end|>" + mark("<|im_end|>\n")
    ids, start, end = prompt_ids(t, text), *t.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (
        one(t, ids) and ids[1] == start and ids.count(end) == 1 and t.decode(ids[1:]) == str(text).removeprefix("<s>")
    )


def test_a_style_with_another_models_bos_writes_one(lm, tmp_path):
    source = get_task("math", dataset="asdiv", path=str(tmp_path), style="deepseek-math")
    source.bind(lm.tokenizer)
    task = Task("t", 0, {"question": "2 hens?"}, {})
    text = source.prompt(task)
    assert text.startswith("User: 2 hens?") and one(lm.tokenizer, prompt_ids(lm.tokenizer, text))
    its_own = tiny_tokenizer()  # the module's model keeps its vocabulary
    its_own.add_special_tokens({"additional_special_tokens": ["<｜begin▁of▁sentence｜>"]})
    source.bind(its_own)
    assert source.prompt(task).startswith("<｜begin▁of▁sentence｜>User:")
