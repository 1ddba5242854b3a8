"""Messages -> tokens and spans, for any chat template.

Training must see what a sampler sees. For the assistant message i:

    prompt_i  = template(messages[:i], add_generation_prompt=True)     what the model is given
    written_i = what template(messages[:i+1]) has after prompt_i, up to and including the end-of-turn token

`prompt_i`, `written_i` and the text after them are encoded one after another, as inference does. So no token crosses a
border, and training prompts equal those of `Conversation` token by token. The span of message i is `written_i`. It
includes the end-of-turn token. It leaves out the newline that some templates put after it, because no sampler writes
that newline. Spans come from where texts begin and end, never from token values. If a template writes no end-of-turn
token, the eos is used.

A template *extends* if prompt_j begins with prompt_i + written_i for i < j. Templates that rewrite history (for
example, that drop old thoughts) do not extend. Then `sequences` and `Conversation` start a new sequence.

The only BOS is the one that the template writes. If it writes none there is none, as at inference; put `{{ bos_token
}}` into the template if the model needs one. `template` is always "own" (the tokenizer's), a Jinja text, or None for
plain text: contents joined without headers, an eos after each assistant message, a BOS in front if the tokenizer adds
one. Further keywords (`tools`, `enable_thinking`, ...) go to the template.

Only the template writes control tokens. A message is content (`texts.py`): a `<|im_end|>` in it is ten characters.
Below, prompts and written parts are *guarded* texts; `Rendered.text` is the plain text.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trailmark.errors import DataError, ModelError
from trailmark.templates import TemplateProblem, apply_template
from trailmark.texts import PROBE, Marked, controls_of, mark
from trailmark.token_bounds import Bounds
from trailmark.types import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Message = Mapping[str, Any]
Messages = Sequence[Message]
Jinja = str | None
PLAIN = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN_BOS = "{% if not messages[0].content.startswith(bos_token) %}{{ bos_token }}{% endif %}" + PLAIN


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens [start, end) that the model wrote as message `message`."""

    message: int
    role: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rendered:
    tokens: Tokens
    spans: tuple[Span, ...]
    text: Marked  # the template's control tokens are marked, so encoding it again gives the same tokens


@dataclass(frozen=True, slots=True)
class _Turn:
    message: int
    prompt: str
    full: str  # prompt + written
    end: str  # the end-of-turn token, the last of `written`


class _Template:
    def __init__(self, tokenizer: Tokenizer, template: Jinja, options: Mapping[str, Any]):
        if template == "own" and not tokenizer.chat_template:
            raise ModelError("this tokenizer has no chat template; give template=None for plain text, or a Jinja text")
        if template is None:
            adds_bos = tokenizer.bos_token and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
            template = PLAIN_BOS if adds_bos else PLAIN
        self.tokenizer: Any = tokenizer
        self.controls = controls_of(tokenizer, template)
        self.options = self.controls.guard_all(options)
        self.template = None if template == "own" else template
        known = {w for w in (*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens) if w.strip()}
        self.special = re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))) or "(?!)")

    def text(self, messages: Messages, prompt: bool = False) -> str:
        if not messages:
            raise DataError("a conversation needs a message before the assistant's first one")
        try:
            told = [self.controls.guard_message(m, i) for i, m in enumerate(messages)]
            return apply_template(self.tokenizer, told, prompt, self.template, self.options)
        except (TemplateProblem, TypeError, ValueError, LookupError) as e:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise DataError(f"the chat template refuses the messages ({roles}): {e}") from e

    def frame(self, before: Messages) -> tuple[str, str, str, str]:
        """Four texts around an assistant's content: what comes before, what comes after, the part of that before the
        end-of-turn token, and the end-of-turn token."""
        head, found, tail = self.text([*before, {"role": "assistant", "content": PROBE}]).rpartition(PROBE)
        if not found:
            raise ModelError("the chat template does not show what the assistant says")
        if end := self.special.search(tail):
            return head, tail, tail[: end.start()], end.group()
        if not self.tokenizer.eos_token:
            raise ModelError("neither the chat template nor the tokenizer has a token that ends a turn; set eos_token")
        return head, tail, "", self.tokenizer.eos_token

    def turns(self, messages: Messages) -> list[_Turn]:
        return [self.turn(messages, i) for i, m in enumerate(messages) if m.get("role") == "assistant"]

    def turn(self, messages: Messages, i: int) -> _Turn:
        prompt, shown = self.text(messages[:i], prompt=True), self.text(messages[: i + 1])
        head, tail, lead, end = self.frame(messages[:i])
        opened, content = prompt.removeprefix(head), messages[i].get("content")
        if shown.startswith(prompt) and shown.endswith(tail):
            body = shown[len(prompt) : len(shown) - len(tail)]
        elif prompt.startswith(head) and isinstance(content, str) and content.startswith(opened):
            # The prompt opens a thought that the template drops from the record.
            body = self.controls.guard(content.removeprefix(opened))
        else:
            shown_prompt = str(self.controls.shown(prompt[-40:]))
            raise DataError(
                f"message {i}: the chat template prompts with {shown_prompt!r}, but does not show the assistant's "
                "message after it: what would the model have written?"
            )
        return _Turn(i, prompt, prompt + body + lead + end, end)

    def encode(self, text: str, after: str = "") -> list[int]:
        """The tokens of `text` after the special token `after`. Without it, some tokenizers would add a space in
        front."""
        ids = self.controls.encode(*self.controls.unguard(after + text))[0]
        return ids[len(self.encode(after)) :] if after else ids

    def with_spans(self, text: str, turns: Sequence[_Turn]) -> Rendered:
        """`text` with a span for each of `turns`. Each turn's full text is a prefix of `text` and of the next
        prompt."""
        tokens: list[int] = []
        spans, at, after = [], 0, ""
        for t in turns:
            given = self.encode(text[at : len(t.prompt)], after)
            both = self.encode(text[at : len(t.full)], after)
            written = both[len(given) :]
            if both[: len(given)] != given:  # a token would cross the border: no sampler can have written it
                written = self.encode(text[len(t.prompt) : len(t.full)], t.end)
            tokens += given + written
            spans.append(Span(t.message, "assistant", len(tokens) - len(written), len(tokens)))
            if len(tokens) == len(written):
                raise DataError(f"message {t.message}: there is no token before the assistant's first one")
            at, after = len(t.full), t.end
        return Rendered((*tokens, *self.encode(text[at:], after)), tuple(spans), self.controls.shown(text))


def render(
    tokenizer: Tokenizer, messages: Messages, generation_prompt: bool = False, *, template: Jinja = "own", **options
) -> Rendered:
    """The conversation as the template shows it now. An assistant message has a span if it stands here as it was
    written, after the context in which it was written. A message that the template rewrote has no span."""
    t = _Template(tokenizer, template, options)
    text, kept = t.text(messages, generation_prompt), []
    for turn in t.turns(messages):
        if text.startswith(turn.full) and (not kept or turn.prompt.startswith(kept[-1].full)):
            kept.append(turn)
    return t.with_spans(text, kept)


NO_SYSTEM = ". It takes them without the system message"
NO_ROLE = "files without it: `trailmark data stories --no-system-role`"


class Refusals:
    """Says whether a template takes conversations, without encoding them."""

    def __init__(self, tokenizer: Tokenizer, template: Jinja = "own"):
        self._template = _Template(tokenizer, template, {})

    def why(self, messages: Messages) -> str:
        """Why an answer to these messages cannot be asked for; "" if it can."""
        try:
            self._template.text(messages, prompt=True)
            self._template.frame(messages)
        except (DataError, ModelError) as problem:
            return problem.text.rstrip(".") if isinstance(problem, DataError) else str(problem).rstrip(".")
        return ""

    def system_alone(self, messages: Messages) -> bool:
        """Whether only the system message is refused."""
        rest = [m for m in messages if m.get("role") != "system"]
        return 0 < len(rest) < len(messages) and not self.why(rest)


def must_render(tokenizer: Tokenizer, rows: Iterable[tuple[str, Any, Messages]]) -> None:
    """Refuse a row (its name, file and messages) if the chat template refuses its messages."""
    refuses = Refusals(tokenizer, "own" if tokenizer.chat_template else None)
    for name, file, messages in rows:
        if not (why := refuses.why(messages)):
            continue
        hint = ". Set task.options.system=false for that, or make" if refuses.system_alone(messages) else ""
        raise DataError(f"{name}: {why}{hint and f'{NO_SYSTEM}{hint} {NO_ROLE}'}.", file)


@dataclass(frozen=True, slots=True)
class Answered:
    """`answer` is where the answer stands in `tokens`, without what ends it. The turn ends before `end`."""

    tokens: Tokens
    answer: tuple[int, int]
    end: int


def answered(
    tokenizer: Tokenizer, messages: Messages, answer: str, *, template: Jinja = "own", **options: Any
) -> Answered:
    """The conversation with `answer` as the assistant's next message, character by character: templates that trim
    messages do not trim it. It is encoded apart from what comes before and after it. So the context never changes its
    tokens. What the template writes before every answer (a space) belongs to it: the model must write that, too."""
    t = _Template(tokenizer, template, options)
    prompt = t.text(messages, prompt=True)
    head, tail, lead, end = t.frame(messages)
    if prompt.startswith(head):  # the prompt may open a thought
        opened = str(t.controls.shown(prompt[len(head) :]))
        thinks, answer = answer.startswith(opened), answer.removeprefix(opened)
        prompt = head = prompt if thinks else head
    if not head.startswith(prompt):
        raise DataError(
            f"the chat template prompts with {str(t.controls.shown(prompt[-40:]))!r}, but does not show an answer "
            "after it: it cannot be scored"
        )
    body = head[len(prompt) :] + t.controls.guard(answer)
    given, both = t.encode(prompt), t.encode(prompt + body)
    said = both[len(given) :] if both[: len(given)] == given else t.encode(body, end)
    over = len(given) + len(said)
    ending = t.encode(lead + end, end)
    behind = t.encode(tail.removeprefix(lead + end), end)
    return Answered((*given, *said, *ending, *behind), (len(given), over), over + len(ending))


def sequences(tokenizer: Tokenizer, messages: Messages, *, template: Jinja = "own", **options: Any) -> list[Rendered]:
    """The conversation as training sequences, as few as possible. Every assistant message has one span, after the exact
    context that inference shows. If the template extends there is one sequence. Each ends with its last span."""
    t = _Template(tokenizer, template, options)
    chains: list[list[_Turn]] = []
    for turn in t.turns(messages):
        chain = next((c for c in chains if turn.prompt.startswith(c[-1].full)), None)
        if chain is None:
            chains.append(chain := [])
        chain.append(turn)
    if not chains:
        raise DataError("there is no message of the assistant: nothing would be trained")
    return [t.with_spans(chain[-1].full, chain) for chain in chains]


class ChatBounds:
    """How many tokens conversations have at most, without rendering or encoding them."""

    def __init__(self, tokenizer: Tokenizer, template: Jinja = "own"):
        self.tokenizer, self.template, self.texts = tokenizer, template, Bounds(tokenizer)
        self._frames: dict[tuple[str, ...], int | None] = {}

    def most(self, messages: Messages) -> int | None:
        """A number that the tokens of each of `sequences` surely do not exceed. None if that cannot be said, or if
        `sequences` might refuse these messages. The template is asked once for each order of roles, with short texts.
        It may treat some contents in a way of its own: tags such as <think>, and white space at the edges. Messages
        with such contents, and with further fields, get None."""
        total = 0
        for m in messages:
            text = m["content"]
            if len(m) > 2 or "<" in text or text[:1].isspace() or text[-1:].isspace():
                return None
            if (size := self.texts.most(text)) is None:
                return None
            total += size
        roles = tuple([m["role"] for m in messages])
        if roles not in self._frames:
            self._frames[roles] = self._frame(roles)
        frame = self._frames[roles]
        return None if frame is None else 2 * frame + total

    def _frame(self, roles: tuple[str, ...]) -> int | None:
        """The tokens of a conversation of short texts; None if the template refuses these roles."""
        try:
            made = sequences(self.tokenizer, [{"role": r, "content": "a"} for r in roles], template=self.template)
        except DataError:
            return None
        return max(len(s.tokens) for s in made)


def as_written(tokenizer: Tokenizer, prompt: str) -> Marked:
    """Mark the control tokens of a prompt that a file holds as the model sees it, with the template's text.

    A BOS at the start is one. If the whole prompt is a user message, or a system and a user message, followed by the
    assistant's header, then these headers are control tokens too. They may have the form of the tokenizer's template or
    of ChatML. Everything else in the prompt is content."""
    bos = tokenizer.bos_token or ""
    start = mark(bos) if bos and prompt.startswith(bos) else Marked("")
    for frame in _frames(tokenizer):
        for before, body in ((Marked(""), prompt), (start, prompt.removeprefix(start))):
            if (said := _inside(frame, body)) is not None:
                out = before + mark(frame[0])
                for content, after in zip(said, frame[1:]):
                    out = out + content + mark(after)
                return out
    return start + prompt.removeprefix(start)


def _inside(frame: Sequence[str], text: str) -> list[str] | None:
    """The contents between the pieces of a frame, or None if `text` does not fit. Inner pieces match where first
    found."""
    first, *middle, last = frame
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return None
    rest, said = text[len(first) : len(text) - len(last)], []
    for piece in middle:
        content, found, rest = rest.partition(piece)
        if not found:
            return None
        said.append(content)
    return [*said, rest]


def _frames(tokenizer: Tokenizer) -> list[list[str]]:
    """What the tokenizer's template and ChatML write around one message and around two."""
    held = _FRAMES.get(tokenizer)
    if held is None or held[0] != str(tokenizer.chat_template):
        user, frames = {"role": "user", "content": PROBE}, []
        for template in ["own"] * bool(tokenizer.chat_template) + [CHATML]:
            for talk in ([user], [{"role": "system", "content": PROBE}, user]):
                with contextlib.suppress(DataError):
                    pieces = _Template(tokenizer, template, {}).text(talk, prompt=True).split(PROBE)
                    frames += [pieces] if len(pieces) == len(talk) + 1 and all(pieces[1:]) else []
        held = _FRAMES[tokenizer] = str(tokenizer.chat_template), frames
    return held[1]


_FRAMES: weakref.WeakKeyDictionary[Any, tuple[str, list[list[str]]]] = weakref.WeakKeyDictionary()


def end_of_turn(tokenizer: Tokenizer, *, template: Jinja = "own", **options: Any) -> int:
    """The id of the token that ends the assistant's turn. A sampler must stop at it."""
    t = _Template(tokenizer, template, options)
    return t.tokenizer.convert_tokens_to_ids(t.frame([{"role": "user", "content": "?"}])[-1])


class Conversation:
    """A conversation while it is played: an append-only buffer of what one model has seen and written.

    c.add({"role": "user", "content": "..."})
    new, continues = c.prompt()            # append `new` to what the model has seen, or start afresh with it
    c.wrote(tokens, text)                  # its own tokens, kept verbatim at the end of `c.tokens`
    """

    def __init__(self, tokenizer: Tokenizer, *, template: Jinja = "own", **options: Any):
        self._template = _Template(tokenizer, template, options)
        self.messages: list[Message] = []
        self.tokens: Tokens = ()
        self._seen: list[str] = []  # `tokens` as text, with the end of turn: as decoded, and as `wrote` was told
        self._owed, self._end = "", ""  # the part of the end that a cut turn lacks; the end-of-turn token
        self._asked: tuple[str, Tokens, bool] | None = None

    def add(self, *messages: Message) -> None:
        """Add messages of others than this model."""
        self.messages += messages
        self._asked = None

    def prompt(self) -> tuple[Tokens, bool]:
        """The tokens from the end of the last turn to the next generation prompt, and True. At the start, and where the
        template has rewritten what was seen: the whole prompt, and False. Asking twice changes nothing."""
        t, text = self._template, self._template.text(self.messages, prompt=True)
        seen = next((s for s in self._seen if text.startswith(s)), None)
        new = t.encode(text) if seen is None else t.encode(self._owed) + t.encode(text[len(seen) :], self._end)
        self._asked = text, tuple(new), seen is not None
        return tuple(new), seen is not None

    def wrote(self, tokens: Sequence[int], text: str | None = None) -> None:
        """Record the turn just written. `text` is what the history should say, with or without the end of turn; None
        means the text of the tokens. If it differs by more than white space, the next prompt starts anew. Tokens forced
        on the model come first in both. If the turn was cut, the next prompt adds its end of turn."""
        if self._asked is None:
            raise DataError("wrote() was called without prompt(): it is unknown what these tokens answer")
        t, (prompt, new, continues) = self._template, self._asked
        head, _, lead, end = t.frame(self.messages)
        end_id = t.tokenizer.convert_tokens_to_ids(end)
        ended = len(tokens) > 0 and tokens[-1] == end_id
        # Decoded after a special token, because some tokenizers drop a space at the start of a text.
        raw = t.tokenizer.decode([end_id, *tokens], clean_up_tokenization_spaces=False).removeprefix(end)
        if ended:
            raw = raw.removesuffix(end).removesuffix(lead)
        told = raw if text is None else text
        if ended and told.split() != raw.split():
            told = told.removesuffix(end)
        told = told.removesuffix(lead) if ended else told
        # The record holds what the prompt opened (a thought), but not what the template puts before contents (a space).
        opened = prompt.removeprefix(head) if prompt.startswith(head) else ""
        space = head.removeprefix(prompt) if head.startswith(prompt) else ""
        shown = [(space if x.startswith(space) else "", opened + x.removeprefix(space)) for x in (raw, told)]
        before = prompt.removesuffix(opened)
        self._seen = [
            before + put + t.controls.guard(content) + lead + end
            for x, (put, content) in zip((raw, told), shown)
            if x.split() == raw.split()
        ]
        self._owed, self._end = "" if ended else lead + end, end
        self.tokens = (self.tokens if continues else ()) + new + tuple(tokens)
        self.messages.append({"role": "assistant", "content": shown[1][1]})
        self._asked = None
