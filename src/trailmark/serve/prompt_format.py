"""How a conversation becomes a prompt: in the form in which the model's run was prompted.

    template   by the tokenizer's chat template
    text       the user's message is the prompt itself. If all prompts of the run end with the same white space, it is
               added where it is missing ("7+1-6=?" becomes "7+1-6=?\\n"). Only a single message is accepted
    plain      contents joined as they are, with an end of text after each of the assistant's: SFT with `chat: false`,
               and models without a template

A run's own prompts decide: those in its stored episodes, or those that its task would show, or its file of lessons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trailmark.chat import PROBE, Conversation, sequences
from trailmark.errors import TrailmarkError
from trailmark.rollout.bos import adds_bos
from trailmark.rollout.encode import encode
from trailmark.rollout.play import stop_ids
from trailmark.serve.errors import ApiError
from trailmark.templates import apply_template
from trailmark.types import Tokens

if TYPE_CHECKING:
    from trailmark.seats.model_names import Located

Kind = Literal["template", "text", "plain"]
ROWS = 64  # prompts that are read
Told = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PromptFormat:
    kind: Kind
    ending: str = ""
    bos: Tokens = ()  # before a text prompt
    why: str = ""  # how the format was found

    def prompt(self, tokenizer: Any, messages: Told, options: Mapping[str, Any] | None = None) -> Tokens:
        """`options` are variables of the template."""
        if self.kind == "text":
            return self._text(tokenizer, messages)
        if self.kind == "template":
            talk = Conversation(tokenizer, template="own", **(options or {}))
        else:
            talk, messages = Conversation(tokenizer, template=None), self._ended(messages)
        talk.add(*messages)
        return talk.prompt()[0]

    def with_answer(self, tokenizer: Any, messages: Told, answer: Any) -> tuple[Tokens, int]:
        """The prompt, followed by the tokens that the assistant would write for this text, without the end of its turn;
        and where they begin."""
        if not isinstance(answer, str):
            raise ApiError(400, "after messages a completion must be a text.", "completion")
        if self.kind == "text":
            before = self._text(tokenizer, messages)
            return before + tuple(encode(tokenizer, answer)), len(before)
        own = self.kind == "template"
        conversation = [*(messages if own else self._ended(messages)), {"role": "assistant", "content": answer}]
        for row in sequences(tokenizer, conversation, template="own" if own else None):
            if row.spans[-1].message == len(messages):
                span = row.spans[-1]
                return row.tokens[: span.end - 1], span.start
        raise ApiError(400, "the chat template does not show the completion.", "completion")

    def stops(self, tokenizer: Any) -> Tokens:
        return stop_ids(tokenizer, chat=self.kind != "text")

    def describe(self) -> str:
        how = {
            "template": "chat by the model's template",
            "text": f"a user's message is the prompt itself, ending in {self.ending!r}",
            "plain": "messages are joined as plain text",
        }[self.kind]
        return f"{how} ({self.why})" if self.why else how

    def _text(self, tokenizer: Any, messages: Told) -> Tokens:
        if len(messages) != 1 or messages[0].get("role") != "user":
            roles = ", ".join(str(m.get("role")) for m in messages[:6])
            raise ApiError(
                400,
                "this model was trained on prompts of raw text, without a chat template: send one user message, "
                f"which is the whole prompt, or use /v1/completions (these were: {roles}).",
                "messages",
                "unsupported_conversation",
            )
        return self.bos + tuple(encode(tokenizer, self._end(messages[0]["content"])))

    def _ended(self, messages: Told) -> list[Mapping[str, Any]]:
        return [{**m, "content": self._end(m["content"])} if m.get("role") == "user" else m for m in messages]

    def _end(self, content: str) -> str:
        return content if content.endswith(self.ending) else content.rstrip() + self.ending


def plain_format(tokenizer: Any) -> PromptFormat:
    """The format of a model that is not in a run."""
    if getattr(tokenizer, "chat_template", None):
        return PromptFormat("template")
    return PromptFormat("plain", why="the tokenizer has no chat template")


def format_of_run(home: Located, tokenizer: Any) -> PromptFormat:
    if home.run is None:
        return plain_format(tokenizer)
    if _imitates(home):
        return _lessons(home, tokenizer)
    return _stored(home.run, str(home.recipe.get("seat", "policy")), tokenizer) or _shown(home, tokenizer)


def _imitates(home: Located) -> bool:
    """Whether the method of the run imitates a file of lessons."""
    from trailmark.methods import get_method

    try:
        return get_method(home.method).imitates
    except TrailmarkError:  # the method's code is missing; the run can still be served
        return False


def _lessons(home: Located, tokenizer: Any) -> PromptFormat:
    """For imitation: the recipe says whether the template was used, and the file how prompts end."""
    if home.recipe.get("chat", True) and getattr(tokenizer, "chat_template", None):
        return PromptFormat("template", why="as its run was trained")
    from trailmark.formats.conversations import read_rows

    path = str(home.recipe.get("data", ""))
    try:
        rows = [messages for _, messages in islice(read_rows(path), ROWS)]
    except (TrailmarkError, OSError) as problem:
        return PromptFormat("plain", why=f"as its run was trained; it is unknown how its prompts ended: {problem}")
    before = [a["content"] for m in rows for a, b in pairwise(m) if b["role"] == "assistant" and a["role"] == "user"]
    return PromptFormat("plain", _ending(before), why="as its run was trained")


def _stored(run: Path, seat: str, tokenizer: Any) -> PromptFormat | None:
    """The format of prompts that the run has stored."""
    turns = list(islice(_turns(run, seat), ROWS))
    first = [t for t in turns if t.continues is None]
    if not first:
        return None
    texts = [tokenizer.decode(t.prompt) for t in first]
    why = "as its run was prompted"
    if getattr(tokenizer, "chat_template", None):
        opened = apply_template(tokenizer, [{"role": "user", "content": PROBE}], prompt=True).rpartition(PROBE)[2]
        if opened.strip() and all(t.endswith(opened) for t in texts):
            return PromptFormat("template", why=why)
    if any(t.continues is not None for t in turns):
        return PromptFormat("plain", why=why)
    start = getattr(tokenizer, "bos_token_id", None)
    bos = (start,) if start is not None and all(t.prompt[0] == start for t in first) else ()
    return PromptFormat("text", _ending(texts), bos, why)


def _turns(run: Path, seat: str) -> Any:
    from trailmark.runs.annotations import named_episodes
    from trailmark.runs.store import read_segment, segments

    for folder in ("episodes", "evaluation"):
        place = run / folder
        for file in sorted([*segments(place), *named_episodes(place)])[:4] if place.is_dir() else ():
            try:
                episodes = read_segment(file)
            except TrailmarkError:  # half written, or not an episode
                continue
            for e in episodes:
                mine = {name for name, p in e.players.items() if p.kind == "trained"} or {seat}
                yield from (t for t in e.turns if t.seat in mine and t.prompt)


def _shown(home: Located, tokenizer: Any) -> PromptFormat:
    """The format of what the run's task shows at its first starts."""
    from trailmark.tasks import get_task

    task = home.recipe.get("task")
    if not isinstance(task, dict) or "name" not in task:
        return _unknown(tokenizer, "its run does not say how it was prompted")
    try:
        source = get_task(task["name"], **(task.get("options") or {}))
        source.bind(tokenizer)
        if not source.markov:
            return plain_format(tokenizer)
        starts = source.tasks("train", 8, 0)
        bos = (int(tokenizer.bos_token_id),) if adds_bos(tokenizer) else ()
        return PromptFormat("text", _ending([source.make().reset(s).text for s in starts]), bos, "as its task prompts")
    except Exception as problem:  # a world may raise anything; the server can still work
        return _unknown(tokenizer, f"its task does not show a prompt: {problem}")


def _unknown(tokenizer: Any, why: str) -> PromptFormat:
    return PromptFormat(plain_format(tokenizer).kind, why=why)


def _ending(texts: Sequence[str]) -> str:
    """The white space that all texts end with."""
    ends = [t[len(t.rstrip()) :] for t in texts if t.strip()]
    shortest = min(ends, key=len, default="")
    return next(shortest[k:] for k in range(len(shortest) + 1) if all(x.endswith(shortest[k:]) for x in ends))
