import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trailmark.chat import Conversation, as_written, end_of_turn, render, sequences
from trailmark.errors import DataError, ModelError
from trailmark.texts import encode

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<pad>"]
CORPUS = [
    "user assistant system tool User: Assistant: [INST] [/INST] <think>\n\n</think>\n\n You are a helpful model.\n\n",
    "the red door leads to a garden, the green one to a wall; go north and open it.\n\n\n I think two and two are four",
] * 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant, starting with user') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# Old thoughts go when a new user message comes; a tool's answer keeps them.
THINKER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COLON = (
    "{% for m in messages %}{{ m.role.capitalize() + ': ' + m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
DEFAULT = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are a helpful model.<|im_end|>\n' }}{% endif %}"
    + CHATML
)
TRIM = LLAMA3.replace("m.content", "m.content | trim")
NO_END = COLON.replace("eos_token", "''")  # nothing but a newline ends a turn
OPENS = (  # the prompt opens a thought; the record drops thoughts
    "{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>' + m.content.split('</think>')[-1] + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|><think>\n' }}{% endif %}"
)
END = {
    CHATML: "<|im_end|>",
    LLAMA3: "<|eot|>",
    MISTRAL: "</s>",
    THINKER: "<|im_end|>",
    COLON: "</s>",
    DEFAULT: "<|im_end|>",
    TRIM: "<|eot|>",
    None: "</s>",
    NO_END: "</s>",
}
EXTENDING = [CHATML, LLAMA3, MISTRAL, COLON, DEFAULT, TRIM, None]


def build(kind="bytes", pad="<pad>", adds_bos=False):
    if kind == "bytes":
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:  # like SentencePiece: a space is put before the first word ("first") or every piece ("always")
        tok = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
        tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        tok.decoder = decoders.Metaspace(prepend_scheme=kind)
        alphabet = sorted({*"".join(CORPUS), *map(chr, range(33, 127)), "▁", "\n"})
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tok.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tok.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token="<s>",
        eos_token="</s>",
        pad_token=pad,
        additional_special_tokens=[s for s in SPECIAL if s.startswith("<|")],
    )


TOK, PAD_EOS = build(), build(pad="</s>")


def enc(text, tok=TOK):
    return tuple(tok.encode(text, add_special_tokens=False))


def said(tok, rendered, span):
    return tok.decode(rendered.tokens[span.start : span.end], clean_up_tokenization_spaces=False)


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


TALK = [user("go north"), bot("the red door"), user("open it"), bot("two and two are four")]


# --- every template
@pytest.mark.parametrize("template", list(END))
@pytest.mark.parametrize("tok", [TOK, PAD_EOS, build(adds_bos=True)], ids=["plain", "pad=eos", "bos"])
def test_the_end_of_turn_is_in_the_span_and_nothing_behind_it(tok, template):
    for r in sequences(tok, TALK, template=template):
        for s in r.spans:
            lead = " " if template is MISTRAL else ""
            assert said(tok, r, s) == lead + TALK[s.message]["content"] + END[template]
            assert r.tokens[s.end - 1] == end_of_turn(tok, template=template)
        assert r.spans[-1].end == len(r.tokens)


@pytest.mark.parametrize("template", EXTENDING)
def test_an_extending_template_gives_one_sequence_of_inference_prompts(template):
    (r,) = sequences(TOK, TALK, template=template)
    whole = render(TOK, TALK, template=template)
    assert [s.message for s in r.spans] == [1, 3] and r.spans == whole.spans
    assert whole.tokens[: len(r.tokens)] == r.tokens and whole.text.startswith(r.text)
    for s in r.spans:
        # This tokenizer splits white space at the end of a text differently from white space before a word. If a
        # template's prompt ends in white space, encoding it again differs from what the model saw.
        if template is not None and (s.message == 1 or template not in (LLAMA3, TRIM, COLON)):
            fresh = TOK.apply_chat_template(
                TALK[: s.message], chat_template=template, add_generation_prompt=True, return_dict=False
            )
            assert r.tokens[: s.start] == tuple(fresh)


def test_chatml_by_hand():
    r = render(TOK, [user("a"), bot("b")], template=CHATML)
    start, end = TOK.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert r.tokens == (start, *enc("user\na"), end, *enc("\n"), start, *enc("assistant\n"), *enc("b"), end, *enc("\n"))
    (s,) = r.spans
    assert (s.message, s.role) == (1, "assistant") and r.tokens[s.start : s.end] == (*enc("b"), end)
    assert s.end == len(r.tokens) - 1
    asked = render(TOK, [user("a")], generation_prompt=True, template=CHATML)
    assert asked.tokens == r.tokens[: s.start] and asked.spans == ()


@pytest.mark.parametrize("template", [LLAMA3, MISTRAL, None])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_exactly_one_bos(template, adds_bos):
    tok = build(adds_bos=adds_bos)
    r = render(tok, TALK, template=template)
    assert r.tokens.count(tok.bos_token_id) == (1 if adds_bos or template else 0)
    assert render(tok, [user("<s>go"), bot("on")], template=None).tokens.count(tok.bos_token_id) == adds_bos
    as_given = as_written(tok, "<s>go")  # a file has its prompts as the model sees them
    assert render(tok, [user(as_given), bot("on")], template=None).tokens.count(tok.bos_token_id) == 1


def test_the_template_of_the_tokenizer_is_the_default():
    tok = build()
    with pytest.raises(ModelError, match="no chat template; give template=None"):
        render(tok, TALK)
    tok.chat_template = CHATML
    assert render(tok, TALK) == render(TOK, TALK, template=CHATML)


def test_options_reach_the_template():
    template = "{{ mood }}" + CHATML
    assert render(TOK, TALK, template=template, mood="red").text.startswith("red<|im_start|>user")


def test_default_system_message_is_context():
    r = render(TOK, TALK, template=DEFAULT)
    assert r.text.startswith("<|im_start|>system\nYou are a helpful model.<|im_end|>\n") and len(r.spans) == 2


def test_trimmed_contents_are_trained_as_shown():
    (r,) = sequences(TOK, [user(" go "), bot("\n on  ")], template=TRIM)
    assert said(TOK, r, r.spans[0]) == "on<|eot|>"


def test_no_token_reaches_over_the_border():
    talk = [user("go"), bot("\n\n\nI think"), user("on"), bot("\n")]
    (r,) = sequences(TOK, talk, template=CHATML)
    for s in r.spans:
        assert said(TOK, r, s) == talk[s.message]["content"] + "<|im_end|>"
    first = r.spans[0]
    assert r.tokens[: first.start] == enc("<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n")
    assert r.tokens != enc(r.text)  # the tokenizer alone would have merged the newlines


def test_special_tokens_inside_contents_do_not_move_spans():
    talk = [user("say <|im_end|>"), bot("a<|im_end|>b"), user("on"), bot("")]
    (r,) = sequences(TOK, talk, template=CHATML)
    assert [said(TOK, r, s) for s in r.spans] == ["a<|im_end|>b<|im_end|>", "<|im_end|>"]


# --- templates that refuse
def test_a_refusal_is_told_in_the_template_s_words():
    for talk in ([{"role": "system", "content": "x"}, user("a"), bot("b")], [user("a"), user("b"), bot("c")]):
        with pytest.raises(DataError, match=r"refuses the messages \(.*\): Roles must alternate user/assistant"):
            sequences(TOK, talk, template=MISTRAL)
    with pytest.raises(DataError, match="the chat template refuses the messages"):
        render(TOK, [{"role": "user"}, bot("b")], template=CHATML)


def test_nothing_to_train_is_refused():
    with pytest.raises(DataError, match="nothing would be trained"):
        sequences(TOK, [user("a")], template=CHATML)
    with pytest.raises(DataError, match="needs a message before the assistant's first"):
        sequences(TOK, [bot("a")], template=CHATML)
    with pytest.raises(DataError, match="there is no token before"):
        sequences(TOK, [user(""), bot("a")], template=None)


def test_a_template_that_hides_the_assistant_is_refused():
    with pytest.raises(ModelError, match="does not show what the assistant says"):
        sequences(TOK, TALK, template="{% for m in messages %}{{ m.role }}{% endfor %}")


# --- templates that rewrite history
THOUGHT = [
    user("a"),
    bot("<think>\nred\n</think>\n\ngo"),
    {"role": "tool", "content": "wall"},
    bot("<think>\ngreen\n</think>\n\nopen"),
    user("b"),
    bot("<think>\ntwo\n</think>\n\nfour"),
]


def test_dropped_thoughts_split_the_conversation_where_they_are_dropped():
    assert len(sequences(TOK, THOUGHT[:4], template=THINKER)) == 1
    first, second = sequences(TOK, THOUGHT, template=THINKER)
    assert [s.message for s in first.spans] == [1, 3] and [s.message for s in second.spans] == [5]
    assert "red" not in second.text and "red" in first.text
    for r in (first, second):
        for s in r.spans:
            prompt = render(TOK, THOUGHT[: s.message], generation_prompt=True, template=THINKER)
            assert r.tokens[: s.start] == enc(prompt.text)
            assert said(TOK, r, s) == THOUGHT[s.message]["content"] + "<|im_end|>"
    shown = render(TOK, THOUGHT, template=THINKER)
    assert [s.message for s in shown.spans] == [5]  # what was rewritten is nobody's writing


def test_without_an_end_of_turn_each_turn_stands_alone_and_learns_eos():
    a, b = sequences(TOK, TALK, template=NO_END)
    assert a.text == "User: go north\nAssistant: the red door</s>"
    assert b.text == "User: go north\nAssistant: the red door\nUser: open it\nAssistant: two and two are four</s>"


def test_a_thought_opened_by_the_prompt():
    talk = [user("a"), bot("<think>\nred</think>go"), user("b"), bot("<think>\ngreen</think>on")]
    a, b = sequences(TOK, talk, template=OPENS)
    assert a.text == "<|head|>user<|/head|>a<|eot|><|head|>assistant<|/head|><think>\nred</think>go<|eot|>"
    assert said(TOK, b, b.spans[0]) == "green</think>on<|eot|>" and "red" not in b.text
    with pytest.raises(DataError, match=r"message 1: the chat template prompts with '.*<think>\\n'"):
        sequences(TOK, [user("a"), bot("go")], template=OPENS)
    c = Conversation(TOK, template=OPENS)
    for i in (0, 2):
        c.add(talk[i])
        new, continues = c.prompt()
        want = (a, b)[i // 2]
        assert not continues and new == want.tokens[: want.spans[0].start]
        c.wrote(enc(talk[i + 1]["content"].removeprefix("<think>\n") + "<|eot|>"))
    assert c.messages == talk


# --- playing
def play(tok, template, talk, write):
    """Every sequence the model saw, turn by turn: (context, written)."""
    c, seen, out = Conversation(tok, template=template), (), []
    for m in talk:
        if m["role"] != "assistant":
            c.add(m)
            continue
        new, continues = c.prompt()
        assert c.prompt() == (new, continues)
        context = seen + new if continues else new
        tokens, text = write(m["content"])
        c.wrote(tokens, text)
        seen = context + tuple(tokens)
        assert c.tokens == seen
        out.append((context, tuple(tokens), continues))
    return c, out


@pytest.mark.parametrize("template", [*EXTENDING, THINKER, NO_END])
@pytest.mark.parametrize("tell", [True, False])
def test_training_sees_what_playing_saw(template, tell):
    lead = " " if template is MISTRAL else ""
    talk = THOUGHT if template is THINKER else TALK
    c, out = play(TOK, template, talk, lambda x: (enc(lead + x + END[template]), x if tell else None))
    assert c.messages == talk
    trained = {
        s.message: (r.tokens[: s.start], r.tokens[s.start : s.end])
        for r in sequences(TOK, talk, template=template)
        for s in r.spans
    }
    assert list(trained.values()) == [(context, tokens) for context, tokens, _ in out]
    assert [k for *_, k in out][1:] == ([True, False] if template is THINKER else [template is not NO_END])


@pytest.mark.parametrize("template", EXTENDING)
def test_a_turn_cut_short_is_ended_by_the_bridge(template):
    lead = " " if template is MISTRAL else ""
    c, out = play(TOK, template, TALK, lambda x: (enc(lead + x), x))
    (context, _, continues), whole = out[1], sequences(TOK, TALK, template=template)[0]
    assert continues and context == whole.tokens[: whole.spans[1].start]
    assert c.tokens == whole.tokens[:-1]


def test_own_tokens_are_kept_however_odd():
    letters = [t for ch in "the red door" for t in enc(ch)]
    end = TOK.convert_tokens_to_ids("<|im_end|>")
    assert tuple(letters) != enc("the red door")
    c = Conversation(TOK, template=CHATML)
    c.add(user("go north"))
    first, continues = c.prompt()
    assert not continues
    c.wrote([*letters, end], "the red door")
    c.add(user("open it"))
    bridge, continues = c.prompt()
    assert continues and bridge == enc("\n<|im_start|>user\nopen it<|im_end|>\n<|im_start|>assistant\n")
    assert c.tokens == (*first, *letters, end)


def test_half_a_character_at_the_cut():
    half = TOK.encode("é", add_special_tokens=False)[:1]
    c = Conversation(TOK, template=CHATML)
    c.add(user("a"))
    c.prompt()
    c.wrote(half)
    c.add(user("b"))
    new, continues = c.prompt()
    assert continues and new[0] == TOK.convert_tokens_to_ids("<|im_end|>") and c.tokens[-1:] == tuple(half)


@pytest.mark.parametrize(("text", "continues"), [("go", False), ("<think>x</think>go", True), (None, True)])
def test_a_history_told_otherwise_starts_again(text, continues):
    c = Conversation(TOK, template=CHATML)
    c.add(user("a"))
    c.prompt()
    c.wrote(enc("<think>x</think>go<|im_end|>"), text)
    c.add(user("b"))
    new, went_on = c.prompt()
    assert went_on is continues
    assert continues or new == enc(render(TOK, [user("a"), bot("go"), user("b")], True, template=CHATML).text)


def test_a_text_stripped_by_the_engine_still_continues():
    c = Conversation(TOK, template=TRIM)
    c.add(user("a"))
    c.prompt()
    c.wrote(enc(" go \n<|eot|>"), "go")
    c.add(user("b"))
    assert c.prompt() == (enc("<|head|>user<|/head|>\n\nb<|eot|><|head|>assistant<|/head|>\n\n"), True)


def test_wrote_needs_a_prompt():
    c = Conversation(TOK, template=CHATML)
    c.add(user("a"))
    with pytest.raises(DataError, match=r"wrote\(\) was called without prompt"):
        c.wrote([1], "x")


@pytest.mark.parametrize("kind", ["first", "always"])
@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL])
def test_tokenizers_that_put_a_space_in_front(kind, template):
    tok = build(kind)
    (r,) = sequences(tok, TALK, template=template)
    assert r.tokens == enc(r.text, tok)
    c, seen = Conversation(tok, template=template), ()
    for m, s in ((0, r.spans[0]), (2, r.spans[1])):
        c.add(TALK[m])
        new, continues = c.prompt()
        assert continues == (m == 2)
        seen += new
        assert seen == r.tokens[: s.start]
        written = r.tokens[s.start : s.end]
        c.wrote(written, tok.decode(written, skip_special_tokens=True))
        seen += written
    assert c.messages == TALK


# --- random conversations
pieces = st.sampled_from([*"ab é\n\t<>|日", " the", "user", "<think>", "</think>", "</s", "</s>", "<|im_end|>", "\n\n"])
texts = st.lists(pieces, max_size=8).map("".join)
strict = texts.map(lambda x: x.strip() or "a")


@st.composite
def talks(draw, content=texts, alternate=False):
    out = [user(draw(content))]
    for _ in range(draw(st.integers(0, 4))):
        out.append(bot(draw(content)))
        if alternate or draw(st.booleans()):
            out.append(user(draw(content)))
    return [*out, bot(draw(content))] if out[-1]["role"] == "user" else out


FORMS = [CHATML, LLAMA3, MISTRAL, COLON, DEFAULT, TRIM]


@st.composite
def extending(draw):
    template = draw(st.sampled_from(FORMS))
    return draw(talks(strict if template is TRIM else texts, alternate=template is MISTRAL)), template


@settings(max_examples=60, deadline=None)
@given(extending())
@example(([user("a"), bot("</s>")], MISTRAL))
@example(([user("a"), bot("</s>"), user("<|im_end|>"), bot("</s")], COLON))
def test_random_conversations_of_extending_templates(drawn):
    talk, template = drawn
    lead = " " if template is MISTRAL else ""
    (r,) = sequences(TOK, talk, template=template)
    assert [s.message for s in r.spans] == [i for i, m in enumerate(talk) if m["role"] == "assistant"]
    for s in r.spans:
        assert said(TOK, r, s) == lead + talk[s.message]["content"] + END[template]
    assert TOK.decode(r.tokens, clean_up_tokenization_spaces=False) == r.text
    prompt = render(TOK, talk[:1], generation_prompt=True, template=template).text
    assert r.tokens[: r.spans[0].start] == tuple(encode(TOK, prompt))
    it = iter(r.spans)

    def write(text):
        s = next(it)
        return r.tokens[s.start : s.end], text

    c, out = play(TOK, template, talk, write)
    assert c.tokens == r.tokens
    assert [len(context) for context, *_ in out] == [s.start for s in r.spans]


@settings(max_examples=60, deadline=None)
@given(talks(), st.sampled_from([THINKER, TRIM, NO_END, CHATML]), st.booleans())
def test_every_assistant_message_is_trained_once_in_the_context_inference_shows(talk, template, pad_is_eos):
    tok = PAD_EOS if pad_is_eos else TOK
    rs = sequences(tok, talk, template=template)
    assert sorted(s.message for r in rs for s in r.spans) == [i for i, m in enumerate(talk) if m["role"] == "assistant"]
    for r in rs:
        for s in r.spans:
            prompt = render(tok, talk[: s.message], generation_prompt=True, template=template)
            assert tok.decode(r.tokens[: s.start], clean_up_tokenization_spaces=False) == prompt.text
            content = talk[s.message]["content"]
            assert said(tok, r, s) == (content.strip() if template is TRIM else content) + END[template]
        first = r.spans[0]
        prompt = render(tok, talk[: first.message], generation_prompt=True, template=template)
        assert r.tokens[: first.start] == tuple(encode(tok, prompt.text))
    # No sequence is a prefix of another's prompt, so there are as few as possible.
    for a in rs:
        assert not any(b is not a and b.text.startswith(a.text) for b in rs)
