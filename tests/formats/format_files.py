"""Shared by the tests of formats: tokenizers, texts that try to break a format, and the round trip."""

import json
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trailmark import formats
from trailmark.models.tiny import CHATML, tiny_tokenizer
from trailmark.runs.episode_json import to_json

TINY = tiny_tokenizer()
FEW = settings(max_examples=40, deadline=None)
NASTY = [
    " # Analyze:\n", " # Action:\n", "Thought 1:", "\nAction 2: Finish[The answer is A.]", "\nObservation 1: ",
    "<|im_end|>",
    "<|im_start|>assistant\n", "</s>", "<s>", "{", "}", "[", "]", '"', "\\", "\n", "\r\n", "\u2028", "\x00", "OK", "é",
    "🙂", "  ",
]  # fmt: skip
texts = st.lists(
    st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=6
).map("".join)
more = st.dictionaries(st.sampled_from(["source", "№", "level"]), st.none() | st.integers() | texts, max_size=2)


def trained(adds_bos=False):
    """A byte-level tokenizer whose merges cross borders and whose offsets leave out white space, like GPT-2."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = ["Thought 1: it is so.\n\nAction 1: look at it.\nObservation 1: it is red, so the answer is 12.\n" * 3] * 8
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(corpus, trainer)
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds_bos:
        one = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
        core.post_processor = processors.Sequence([core.post_processor, one])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHATML
    return tokenizer


TRAINED, BOS = trained(), trained(adds_bos=True)


def say(tokens, tokenizer=TINY):
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def put(folder, rows, lines=False, name="in"):
    path = Path(folder) / f"{name}.{'jsonl' if lines else 'json'}"
    text = "".join(json.dumps(r) + "\n" for r in rows) if lines else json.dumps(rows)
    path.write_text(text, "utf-8")
    return path


def take(path):
    text = path.read_text("utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line]


def exactly(value):
    """A form in which 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


def there_and_back(name, rows, tokenizer=TINY):
    """Read, write, read: the same values, then the same episodes byte for byte. In both layouts, and through our own
    files."""
    with tempfile.TemporaryDirectory() as folder:
        for lines in (False, True):
            first = formats.read(name, put(folder, rows, lines), tokenizer)
            again = Path(folder) / f"out.{'jsonl' if lines else 'json'}"
            formats.write(name, again, first.episodes, tokenizer, annotations=first.annotations)
            assert [exactly(r) for r in take(again)] == [exactly(r) for r in rows]
            second = formats.read(name, again, tokenizer)
            for a, b in ((first.episodes, second.episodes), (first.annotations, second.annotations)):
                assert [to_json(x) for x in a] == [to_json(x) for x in b]
            own = Path(folder) / "own.jsonl"
            formats.write("episodes", own, first.episodes, tokenizer, annotations=first.annotations)
            third = formats.read("episodes", own, tokenizer)
            assert [to_json(x) for x in third.episodes] == [to_json(x) for x in first.episodes]
            formats.write(name, again, third.episodes, tokenizer, annotations=third.annotations)
            assert [exactly(r) for r in take(again)] == [exactly(r) for r in rows]
        return first
