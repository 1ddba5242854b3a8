"""The messages of a ShareGPT row: who speaks is under `from`, what is said under `value`. Other programs name the keys
and the speakers otherwise (`Tags`); errors name them as the file does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trailmark.errors import nearest
from trailmark.formats.rows import Row


@dataclass(frozen=True, slots=True)
class Tags:
    """What a file calls its keys and its speakers."""

    messages: str = "conversations"
    role: str = "from"
    content: str = "value"
    user: str = "human"
    assistant: str = "gpt"
    system: str = "system"
    observation: str = "observation"
    function: str = "function_call"

    @property
    def roles(self) -> dict[str, str]:
        """The role of each speaker. A call is the assistant's."""
        return {self.user: "user", self.assistant: "assistant", self.system: "system", self.observation: "tool",
                self.function: "assistant"}  # fmt: skip

    @property
    def speakers(self) -> dict[str, str]:
        """The speaker of each role."""
        return {"user": self.user, "assistant": self.assistant, "system": self.system, "tool": self.observation}


TAGS = Tags()


def read_talk(row: Row, tags: Tags = TAGS, scores: bool = True) -> list[dict[str, Any]]:
    """The messages of a row as {"role", "content"}. Other fields are kept; with `scores`, a score must be a number, and
    only the assistant has one."""
    item = row.fields(row.value, "", [tags.messages], ["score", "location"])
    listed = row.listed(item[tags.messages], tags.messages)
    return [_message(row, m, f"{tags.messages}[{k}]", tags, scores) for k, m in enumerate(listed)]


def _message(row: Row, value: Any, key: str, tags: Tags, scores: bool) -> dict[str, Any]:
    m = row.fields(value, key, [tags.role, tags.content], ["score", "index"])
    tag = row.text(m[tags.role], f"{key}.{tags.role}")
    rest = {k: v for k, v in m.items() if k not in (tags.role, tags.content)}
    if tag not in tags.roles:
        raise row.bad(f"is '{tag}', which is not a known speaker.{nearest(tag, tags.roles)}", f"{key}.{tags.role}")
    role = tags.roles[tag]
    for own in {"role", "content", "tag"} & rest.keys():
        raise row.bad(f"does not belong into a message with '{tags.role}' and '{tags.content}'.", f"{key}.{own}")
    if scores and row.number(m.get("score"), f"{key}.score") is not None and role != "assistant":
        raise row.bad(f"is on a message from '{tag}'; only the model's messages have a score.", f"{key}.score")
    aside = {} if tags.speakers[role] == tag else {"tag": tag}
    return {"role": role, "content": row.text(m[tags.content], f"{key}.{tags.content}"), **aside, **rest}
