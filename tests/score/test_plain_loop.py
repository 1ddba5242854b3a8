"""Perplexity and improvement against a plain loop over the full logits: five chat templates, pad = eos and not, gold
texts of one token, and gold texts that begin with a newline. Llama 3's template trims what people say."""

import math

import pytest
import torch

from trailmark.chat import CHATML
from trailmark.score.likelihood import TextScorer, gold_row, improvement

LLAMA3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|pad|>\n\n' + (m.content | trim) + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|pad|>\n\n' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '<|im_end|>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
LLAMA2 = INST.replace("m.content + '<|im_end|>'", "m.content + ' <|im_end|>'")
ENDLESS = (  # no token ends an answer: the eos does
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# the texts around a user's message and after the gold text: up to the end of the turn, and behind it
FRAMES = {
    CHATML: ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "\n"),
    LLAMA3: ("<|im_start|>user<|pad|>\n\n", "<|im_end|><|im_start|>assistant<|pad|>\n\n", "<|im_end|>", ""),
    INST: ("[INST] ", " [/INST]", "<|im_end|>", ""),
    LLAMA2: ("[INST] ", " [/INST]", " <|im_end|>", ""),
    ENDLESS: ("user: ", "\nassistant: ", "<|im_end|>", "\n"),
}
GOLDS = ["y", "\n", "\nThey went home.", "Home.\n", "They went home, and it rained."]
PLAN = "Rain. Plan: they go home."


def perplexity(lm, head, tail):
    """exp of the mean of -log p over `tail`, from all logits of one plain forward pass."""
    ids = head + tail
    with torch.no_grad():
        logits = lm.base(input_ids=torch.tensor([ids])).logits[0].double()
    total = 0.0
    for t in range(len(head), len(ids)):
        row = logits[t - 1]
        total -= float(row[ids[t]] - torch.logsumexp(row, -1))
    return math.exp(total / len(tail))


@pytest.mark.parametrize("rule", ["text", "turn", "template"])
@pytest.mark.parametrize("pad_is_eos", [True, False])
@pytest.mark.parametrize("template", FRAMES, ids=["chatml", "llama3", "inst", "llama2", "endless"])
def test_perplexity_and_improvement(make_lm, template, pad_is_eos, rule):
    lm = make_lm("llama", pad_is_eos=pad_is_eos)
    with torch.no_grad():
        lm.base.get_output_embeddings().weight.mul_(20)  # texts that are not all equally likely
    lm.tokenizer.chat_template = template
    before, after, end, behind = FRAMES[template]
    lead = " " if template in (INST, LLAMA2) else ""  # written before an answer: the model must write it, too
    encode = lambda text: lm.tokenizer.encode(text, add_special_tokens=False)
    want = {}
    lm.base.set_attn_implementation("eager")
    for gold in GOLDS:
        tail = encode(lead) + encode(gold) + {"text": [], "turn": encode(end), "template": encode(end + behind)}[rule]
        want[gold] = [perplexity(lm, encode(before + x + after), tail) for x in ("Rain.", PLAN)] + [len(tail)]
    lm.base.set_attn_implementation("trailmark")
    scorer = TextScorer(lm)
    talk = lambda text: [{"role": "user", "content": text}]
    pairs = [(talk(x), gold) for gold in GOLDS for x in ("Rain.", PLAN)]
    found = scorer.likelihoods(pairs, rule)  # all in one batch, with shared prefixes and rows of all lengths
    for k, gold in enumerate(GOLDS):
        base, now, count = want[gold]
        assert found[2 * k].tokens == found[2 * k + 1].tokens == count
        assert found[2 * k].perplexity == pytest.approx(base, rel=1e-5)
        assert found[2 * k + 1].perplexity == pytest.approx(now, rel=1e-5)
        assert improvement(found[2 * k], found[2 * k + 1]) / 100 == pytest.approx(1 - now / base, abs=1e-5)
        assert abs(1 - now / base) > 1e-3


def test_a_prompt_that_opens_a_thought(make_lm):
    """A gold text without a thought is read after the assistant's header, and one with a thought behind its opening."""
    tokenizer = make_lm("llama").tokenizer
    tokenizer.chat_template = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    head = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    for gold, given in (("So.", head), ("<think>\nHm</think>So.", head + "<think>\n")):
        row = gold_row(tokenizer, [{"role": "user", "content": "Why?"}], gold)
        assert tokenizer.decode(row.tokens[: row.start]) == given
        assert tokenizer.decode(row.tokens) == head + gold + "<|im_end|>\n"
