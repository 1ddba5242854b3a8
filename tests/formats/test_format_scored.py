import pytest
from format_files import BOS, FEW, TINY, TRAINED, more, put, say, take, texts, there_and_back
from hypothesis import assume, given
from hypothesis import strategies as st

from trailmark import formats
from trailmark.chat import as_written
from trailmark.errors import DataError
from trailmark.formats.scored import tie_pairs
from trailmark.texts import encode, mark
from trailmark.types import Invalid, Scored

rewards = st.sampled_from(
    [{}, {"reward": None}, {"reward": 0}, {"reward": 1}, {"reward": 0.25}, {"reward": True}, {"reward": "1.50"}]
)
OK = [
    {"role": "user", "content": "rules"},
    {"role": "assistant", "content": "OK"},
    {"role": "user", "content": "a room"},
    {"role": "assistant", "content": "OK"},
    {"role": "user", "content": "a door"},
    {"role": "assistant", "content": "open"},
]


def test_trajectories_by_hand(tmp_path):
    rows = [
        {"prompt": "1+1=", "response": "2", "reward": 1},
        {"prompt": "1+2=", "response": "4<|im_end|>", "reward": 0},  # the text already has its end
        {"prompt": "1+1=", "response": "3"},
    ]
    a, b, c = formats.read("trajectories", put(tmp_path, rows, lines=True), TINY).episodes
    assert [(e.id, e.group, say(e.turns[0].prompt), say(e.turns[0].tokens)) for e in (a, b, c)] == [
        ("0/0", "0", "1+1=", "2<|im_end|>"),
        ("1/0", "1", "1+2=", "4<|im_end|>"),
        ("0/1", "0", "1+1=", "3<|im_end|>"),
    ]
    assert [e.outcome for e in (a, b, c)] == [Scored(1.0), Scored(0.0), Invalid("no reward in the file")]
    assert (a.turns[0].reward, a.terminated, a.turns[0].text, b.turns[0].text) == (1.0, True, "2", "4<|im_end|>")


@FEW
@given(st.lists(st.tuples(texts, texts, rewards, more), min_size=1, max_size=4), st.sampled_from([TINY, TRAINED, BOS]))
def test_trajectories_there_and_back(rows, tokenizer):
    assume(all(prompt for prompt, *_ in rows))
    made = [{"prompt": p, "response": r, **reward, **rest} for p, r, reward, rest in rows]
    found = there_and_back("trajectories", made, tokenizer)
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token
    for e, row in zip(found.episodes, made):
        (turn,) = e.turns
        given = as_written(tokenizer, row["prompt"])
        given = mark(bos) + given if tokenizer is BOS and not given.startswith(bos) else given
        assert turn.prompt == tuple(encode(tokenizer, given))  # as at inference
        assert say(turn.tokens, tokenizer) == row["response"].removesuffix(eos) + eos
        assert tokenizer is not BOS or turn.prompt[:1] == (tokenizer.bos_token_id,)


def test_never_two_bos(tmp_path):
    rows = [{"prompt": "<s>go", "response": "1"}, {"prompt": "go", "response": "1"}]
    a, b = formats.read("trajectories", put(tmp_path, rows), BOS).episodes
    assert a.turns[0].prompt == b.turns[0].prompt and say(a.turns[0].prompt, BOS) == "<s>go"
    (c, _) = formats.read("trajectories", put(tmp_path, rows), TRAINED).episodes
    assert say(c.turns[0].prompt, TRAINED) == "<s>go"  # it comes from the text


def test_an_empty_prompt_is_nothing_to_answer(tmp_path):
    path = put(tmp_path, [{"prompt": "", "response": "1"}], lines=True)
    with pytest.raises(DataError, match=r"in.jsonl:1: the prompt has no tokens"):
        formats.read("trajectories", path, TINY)


@pytest.mark.parametrize(
    "row, says",
    [
        ('{"prompt": "a", "response": "b", "rewrd": 1}', "key 'rewrd': is not known. Did you mean 'reward'?"),
        ('{"prompt": "a", "respons": "b"}', "key 'respons': is not known. Did you mean 'response'?"),
        ('{"prompt": "a"}', "key 'response': is missing. Found: prompt."),
        ('{"prompt": "a", "response": null}', "key 'response': must be text, not None."),
        ('{"prompt": "a", "response": "b", "reward": "good"}', "key 'reward': must be a finite number, not 'good'."),
        ('{"prompt": "a", "response": "b", "reward": 1e999}', "key 'reward': must be a finite number, not inf."),
        ('{"prompt": "a", "response": "b", "reward": NaN}', "is not JSON: NaN is not a number."),
        ('{"prompt": "a", "prompt": "b"}', "is not JSON: key 'prompt' appears twice."),
        ('{"prompt": "a", "response": "\\ud800"}', "is not JSON: 'utf-8' codec can't encode"),
        ('{"prompt": "a", ', "is not JSON: "),
        ("3", "must be an object, not 3."),
        ("[1]", "must be an object, not [1]."),
    ],
)
def test_errors_name_the_line(tmp_path, row, says):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n\n' + row + "\n")
    with pytest.raises(DataError) as error:
        formats.read("trajectories", path, TINY)
    assert str(error.value).startswith(f"{path}:3: {says}") and error.value.line == 3
    found = formats.read("trajectories", path, TINY, skip_bad=True)
    assert len(found.episodes) == 1 and found.skipped == (str(error.value),)


def test_files_that_cannot_be_read(tmp_path):
    for content, says in [
        (b"", "holds no rows"),
        (b"\xff\n", "not UTF-8"),
        (b"[]", "holds no rows"),
        (b"[{},", "is not JSON"),
    ]:
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(DataError, match=says):
            formats.read("trajectories", tmp_path / "x", TINY, skip_bad=True)
    (tmp_path / "x").write_text("1\n2\n")
    with pytest.raises(DataError, match=r"no row can be used; the first: .*x:1: must be an object"):
        formats.read("trajectories", tmp_path / "x", TINY, skip_bad=True)
    with pytest.raises(DataError, match="cannot be read"):
        formats.read("trajectories", tmp_path / "none", TINY)


def test_the_canned_ok_is_context(tmp_path):
    (e,) = formats.read("agent", put(tmp_path, [{"conversations": OK, "reward": True}]), TINY).episodes
    assert [t.text for t in e.turns] == ["OK", "open"] and e.outcome == Scored(1.0)  # a later OK is a decision
    assert say(e.turns[0].prompt) == (
        "<|im_start|>user\nrules<|im_end|>\n<|im_start|>assistant\nOK<|im_end|>\n<|im_start|>user\na room<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [len(e.task.data["messages"]), e.turns[1].continues, e.turns[1].reward] == [3, 0, 1.0]
    with pytest.raises(DataError, match=r"key '\[0\]': there is no message of the assistant"):
        formats.read("agent", put(tmp_path, [{"conversations": OK[:3]}]), TINY)
    found = formats.read("agent", put(tmp_path, [{"conversations": OK}]), TINY)
    formats.write("sharegpt", tmp_path / "s.json", found.episodes, TINY)
    assert [m["value"] for m in take(tmp_path / "s.json")[0]["conversations"]] == [m["content"] for m in OK]


@FEW
@given(
    st.lists(
        st.tuples(st.lists(st.tuples(texts, texts), min_size=2, max_size=3), rewards, more), min_size=1, max_size=3
    )
)
def test_agent_there_and_back(items):
    rows = []
    for talk, reward, rest in items:
        said = [
            m for a, b in talk for m in ({"role": "user", "content": a, **rest}, {"role": "assistant", "content": b})
        ]
        rows.append({"conversations": said, **reward, **rest})
    there_and_back("agent", rows)


@FEW
@given(st.lists(st.tuples(texts, texts, texts, more), min_size=1, max_size=3))
def test_pairs_there_and_back(rows):
    assume(all(prompt for prompt, *_ in rows))
    made = [{"prompt": p, "chosen": a, "rejected": b, **rest} for p, a, b, rest in rows]
    found = there_and_back("pairs", made)
    assert [a.values for a in found.annotations] == [(1.0,), (0.0,)] * len(made)
    assert [(a.turns[0].text, b.turns[0].text) for a, b in tie_pairs(found.episodes)] == [(a, b) for _, a, b, _ in rows]
    for a, b in tie_pairs(found.episodes):
        assert a.turns[0].prompt == b.turns[0].prompt and a.group == b.group and isinstance(a.outcome, Invalid)
    with pytest.raises(DataError, match="lacks its rejected episode"):
        tie_pairs(found.episodes[:-1])


def test_a_conversation_becomes_the_text_the_model_saw(tmp_path):
    row = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    talk = formats.read("messages", put(tmp_path, [row]), TINY)
    formats.write("trajectories", tmp_path / "out.jsonl", talk.episodes, TINY)
    assert take(tmp_path / "out.jsonl") == [
        {"prompt": "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n", "response": "2"}
    ]
    flat = formats.read("trajectories", tmp_path / "out.jsonl", TINY)
    assert flat.episodes[0].sequence(0) == talk.episodes[0].sequence(0)
    with pytest.raises(DataError, match="has 2 turns and a row holds one"):
        two = formats.read("agent", put(tmp_path, [{"conversations": OK}]), TINY)
        formats.write("trajectories", tmp_path / "two.jsonl", two.episodes, TINY)
