import pytest
from format_files import FEW, TINY, more, put, say, texts, there_and_back
from hypothesis import given
from hypothesis import strategies as st

from trailmark import formats
from trailmark.errors import DataError
from trailmark.formats.conversations import count_rows, read_messages
from trailmark.models.tiny import CHATML, tiny_tokenizer
from trailmark.samples import chains

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def test_both_shapes_are_conversations(tmp_path):
    path = put(tmp_path, [ROW, {"prompt": "q", "response": "a", "source": "x"}], lines=True)
    assert read_messages(path) == [ROW["messages"]] * 2 and count_rows(path) == 2


@pytest.mark.parametrize(
    "row, says",
    [
        ({"prompt": "q"}, "key 'response': is missing"),
        ({"mesages": []}, "key 'mesages': is not known. Did you mean 'messages'?"),
        ({"messages": "hi"}, "key 'messages': must be a list that is not empty, not 'hi'"),
        ({"messages": [{"role": "user"}]}, "key 'messages[0].content': is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "key 'messages[0].content': must be text"),
        ({"messages": ROW["messages"][:1]}, "key 'messages': there is no message of the assistant"),
    ],
)
def test_errors(tmp_path, row, says):
    path = put(tmp_path, [ROW, row], lines=True)
    for read in (read_messages, lambda p: formats.read("messages", p, TINY)):
        with pytest.raises(DataError) as error:
            read(path)
        if "prompt" not in row:
            assert str(error.value).startswith(f"{path}:2: {says}")


@FEW
@given(st.lists(st.tuples(st.lists(st.tuples(texts, texts), min_size=1, max_size=3), more), min_size=1, max_size=3))
def test_there_and_back(rows):
    made = []
    for talk, rest in rows:
        said = [
            m for a, b in talk for m in ({"role": "user", "content": a}, {"role": "assistant", "content": b, **rest})
        ]
        made.append({"messages": [{"role": "system", "content": "s"}, *said], **rest})
    for e, row in zip(there_and_back("messages", made).episodes, made):
        whole = TINY.apply_chat_template(row["messages"], tokenize=False).removesuffix("\n")
        assert say(e.sequence(len(e.turns) - 1)) == whole


def test_a_template_that_rewrites_history_starts_new_sequences(tmp_path):
    forgets = tiny_tokenizer()
    forgets.chat_template = CHATML.replace("m['content']", "m['content'] if loop.last or m['role'] == 'user' else '…'")
    row = {"messages": ROW["messages"] + ROW["messages"]}
    (e,) = formats.read("messages", put(tmp_path, [row]), forgets).episodes
    assert chains(e, "policy") == [[0], [1]]
    assert "…<|im_end|>" in say(e.turns[1].prompt) and [t.text for t in e.turns] == ["a", "a"]
