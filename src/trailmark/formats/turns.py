"""From text to turns and back. Text is encoded once, here; what is written back is the text that was read.

An imported episode keeps its text beside its tokens. `task.data` holds what came before the first turn (a `prompt`, or
`messages`), `info["messages"]` the conversation from there on, `Turn.text` what was said, and `info["row"]` the other
fields of the row. `info["format"]` names the format it came from. The text of a played episode is decoded from its
tokens.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from trailmark import chat
from trailmark.errors import DataError, ModelError
from trailmark.steps import token_borders
from trailmark.texts import Marked, encode, encode_with_places, mark
from trailmark.types import Annotation, Episode, Invalid, Scored, Task, Tokens, Turn

NO_REWARD = Invalid("no reward in the file")


@dataclass(frozen=True, slots=True)
class Imported:
    """The contents of a file or a row; `skipped` says what was wrong with the rows left out."""

    episodes: list[Episode]
    annotations: list[Annotation] = field(default_factory=list)
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """What is needed to turn rows into episodes: tokenizer, seat, and names. One with `bounds` only measures: it does
    not encode, its turns have as many tokens as they can have at most, and it raises `Unsure` where that cannot be
    said, or where encoding could fail."""

    tokenizer: Any
    seat: str
    starts: Starts
    bounds: chat.ChatBounds | None = None


def measuring(r: Reader) -> Reader:
    """A reader that only measures, with the same names."""
    return replace(r, bounds=chat.ChatBounds(r.tokenizer, _template(r.tokenizer)))


class Unsure(Exception):
    """A row must be encoded to know whether and how it fits."""


@dataclass(frozen=True, slots=True)
class Writer:
    """What is needed to turn episodes into rows: the seat whose view is written (None: the only one), and the
    annotations."""

    tokenizer: Any
    seat: str | None = None
    annotations: Sequence[Annotation] = ()


# --- text -> turns -----------------------------------------------------------------------------------------------


def conversation_turns(r: Reader, messages: Sequence[chat.Message], given: Collection[int] = ()) -> tuple[Turn, ...]:
    """A turn for every message of the assistant, except those in `given`, which are context."""
    if r.bounds is not None:
        return _measured_turns(r, r.bounds, messages, given)
    found: dict[int, tuple[Tokens, Tokens, int | None]] = {}
    for sequence in chat.sequences(r.tokenizer, messages, template=_template(r.tokenizer)):
        at, before = 0, None
        for span in sequence.spans:
            if span.message not in given:
                prompt, written = sequence.tokens[at : span.start], sequence.tokens[span.start : span.end]
                found[span.message] = prompt, written, before
                at, before = span.end, span.message
    number = {message: i for i, message in enumerate(sorted(found))}
    return tuple(
        Turn(
            r.seat,
            prompt,
            written,
            continues=None if before is None else number[before],
            stop="stopped",
            text=messages[m]["content"],
        )
        for m, (prompt, written, before) in sorted(found.items())
    )


def plain(r: Reader, prompt: str, response: str, end: bool = True, steps: Sequence[int] = ()) -> Turn:
    """Text as it is: the prompt (`chat.as_written`), after a BOS if the tokenizer adds one and the text has none; the
    response; and one eos if `end` is true. No token crosses the border. `steps` are the characters of the response at
    which reasoning steps begin. They become spans that cover the turn; a token belongs to the step in which it ends."""
    tokenizer, text = r.tokenizer, response
    eos = tokenizer.eos_token or ""
    if end and not eos:
        raise ModelError("this tokenizer has no eos token, so a response cannot end; set eos_token")
    if steps and not tokenizer.is_fast:
        raise ModelError("steps are found by the offsets of tokens, which need a fast tokenizer")
    if r.bounds is not None:
        asked, answer = _sure(r.bounds.texts.most(prompt)), _sure(r.bounds.texts.most(response))
        both: Any = range(asked + 1), range(answer + 1)  # with a BOS and an end
        return Turn(r.seat, *both, stop="stopped" if end else "", text=text)
    start = chat.as_written(tokenizer, prompt)
    if adds_bos(tokenizer) and not prompt.startswith(tokenizer.bos_token):
        start = mark(tokenizer.bos_token) + start
    written = Marked(response.removesuffix(eos)) + mark(eos) if end else Marked(response)
    before, head = start, encode(tokenizer, start)
    cut = len(head)
    ids, ends = _encode(tokenizer, before + written, bool(steps))
    if ids[:cut] != head:  # encoded after a special token: alone, some tokenizers would add a space in front
        before, cut = mark(eos), len(encode(tokenizer, mark(eos)))
        ids, ends = _encode(tokenizer, before + written, bool(steps))
    tokens, ends = tuple(ids[cut:]), [e - len(before) for e in ends[cut:]]
    if not head or not tokens:
        raise DataError(f"the {'prompt' if not head else 'response'} has no tokens: there is nothing to learn from")
    borders = [0, *token_borders(ends, steps[1:]), len(tokens)] if steps else []
    spans = tuple(pairwise(borders))
    return Turn(r.seat, tuple(head), tokens, steps=spans, stop="stopped" if end else "", text=text)


def _sure(most: int | None) -> int:
    if most is None:
        raise Unsure
    return most


def _measured_turns(
    r: Reader, bounds: chat.ChatBounds, messages: Sequence[chat.Message], given: Collection[int]
) -> tuple[Turn, ...]:
    """One turn. Whether several are one sequence depends on what a template makes of the texts."""
    answers = [m for i, m in enumerate(messages) if m["role"] == "assistant" and i not in given]
    if len(answers) != 1 or answers[0] is not messages[-1]:
        raise Unsure
    tokens: Any = range(_sure(bounds.most(messages)))
    return (Turn(r.seat, tokens, (0,), stop="stopped", text=answers[0]["content"]),)


def _encode(tokenizer: Any, text: str, ends: bool) -> tuple[list[int], list[int]]:
    """Ids and, if asked, the end of each token in the text."""
    if not ends:
        return encode(tokenizer, text), []
    ids, places = encode_with_places(tokenizer, text)
    return ids, [b for _, b in places]


def adds_bos(tokenizer: Any) -> bool:
    return bool(tokenizer.bos_token) and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]


def _template(tokenizer: Any) -> str | None:
    return "own" if tokenizer.chat_template else None


# --- turns -> episodes -------------------------------------------------------------------------------------------


class Starts:
    """Names: rows with the same start are one task and one group, and their episodes are numbered. The file's name
    does not matter, so `prefix` must differ between files that are combined. Starts are told apart by a hash, so that
    a large file's prompts need not be kept."""

    def __init__(self, prefix: str = ""):
        self.prefix, self.seen, self.counts = prefix, dict[bytes, int](), array("q")

    def name(self, start: Any, task: str | None = None) -> tuple[str, str]:
        """The ids of the task and of the next episode."""
        return self.named(*self.number(start, task), task)

    def number(self, start: Any, task: str | None) -> tuple[int, int]:
        """The number of a start, and how many episodes it had before."""
        number = self.seen.setdefault(_hash(json.dumps(start) if task is None else task), len(self.seen))
        if number == len(self.counts):
            self.counts.append(0)
        self.counts[number] += 1
        return number, self.counts[number] - 1

    def named(self, number: int, count: int, task: str | None) -> tuple[str, str]:
        name = self.prefix + (str(number) if task is None else task)
        return name, f"{name}/{count}"

    def holds(self, task: str) -> bool:
        """Whether a task of this name was met."""
        return _hash(task) in self.seen


def _hash(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def episode(
    name: tuple[str, str],
    data: Mapping[str, Any],
    turns: Sequence[Turn],
    reward: float | None,
    info: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
) -> Episode:
    """A whole episode; its reward belongs to the last turn."""
    *early, last = turns
    outcome = NO_REWARD if reward is None else Scored(reward)
    task = Task(name[0], data=data, meta=meta or {})
    turns = (*early, replace(last, reward=reward or 0.0))
    return Episode(name[1], task, name[0], turns, {"self": outcome}, terminated=True, info=info)


def conversation(
    r: Reader,
    messages: Sequence[dict[str, Any]],
    reward: float | None,
    info: Mapping[str, Any],
    given: Collection[int] = (),
) -> Episode:
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant" and i not in given), None)
    if first is None:
        raise DataError("there is no message of the assistant: nothing would be trained")
    turns = conversation_turns(r, messages, given)
    name = r.starts.name([(m["role"], m["content"]) for m in messages[:first]])
    more = {**info, "messages": [dict(m) for m in messages[first:]]}
    return episode(name, {"messages": [dict(m) for m in messages[:first]]}, turns, reward, more)


# --- episodes -> text --------------------------------------------------------------------------------------------


def differ(n: int) -> str:
    """A sentence about records whose judgement is not what their text says."""
    return f"{n} records say another answer (pred) than their text: the text counts."


def row_of(e: Episode, name: str) -> dict[str, Any]:
    """The other fields of the row, if the episode came from this format."""
    return dict(e.info.get("row", {})) if e.info.get("format") == name else {}


def reward_of(e: Episode) -> float | None:
    return e.outcome.reward if isinstance(e.outcome, Scored) else None


def turns_of(w: Writer, e: Episode) -> list[int]:
    """The turns of the seat in which it was heard. Without a seat's name the episode must have only one seat."""
    seat, seats = w.seat, list(dict.fromkeys(t.seat for t in e.turns))
    if seat is None and len(seats) > 1:
        raise DataError(f"episode '{e.id}' has the seats {', '.join(seats)}: say whose view should be written.")
    mine = [i for i, t in enumerate(e.turns) if seat in (None, t.seat) and t.stop != "failed"]
    if not mine:
        raise DataError(f"episode '{e.id}' has no turn{'' if seat is None else f' of seat {seat!r}'}.")
    return mine


def turn_of(w: Writer, e: Episode) -> int:
    """The only turn, for formats with one turn per row."""
    if len(mine := turns_of(w, e)) > 1:
        raise DataError(
            f"episode '{e.id}' has {len(mine)} turns and a row holds one: write it as 'agent' or 'sharegpt'."
        )
    return mine[0]


def prompt_of(w: Writer, e: Episode, turn: int) -> str:
    return e.task.data["prompt"] if "format" in e.info and "prompt" in e.task.data else _decode(w, e, turn)


def _decode(w: Writer, e: Episode, turn: int) -> str:
    return w.tokenizer.decode(e.context(turn), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def messages_of(w: Writer, e: Episode) -> list[dict[str, Any]]:
    """The conversation as one seat saw it. For a played episode: the text of each prompt, without what the template
    adds. Plain text that was read (a prompt and a response) is a question and its answer."""
    mine = turns_of(w, e)
    if "messages" in e.info and "messages" in e.task.data:
        return [dict(m) for m in (*e.task.data["messages"], *e.info["messages"])]
    messages: list[dict[str, Any]] = []
    for i in mine:
        seen = _decode(w, e, i)
        for roles in [["user"]] if messages else [["user"], ["system", "user"]]:
            asked = [*messages, *({"role": r, "content": chat.PROBE} for r in roles)]
            pattern = chat.render(w.tokenizer, asked, True, template=_template(w.tokenizer)).text
            if match := re.fullmatch("(.*?)".join(map(re.escape, pattern.split(chat.PROBE))), seen, re.DOTALL):
                messages += [{"role": r, "content": c} for r, c in zip(roles, match.groups())]
                break
        else:
            if "format" in e.info and "prompt" in e.task.data and len(e.turns) == 1:
                answer = e.turns[i].text
                return [{"role": "user", "content": prompt_of(w, e, i)}, {"role": "assistant", "content": answer}]
            raise DataError(f"episode '{e.id}': turn {i} is not part of a conversation of this chat template.")
        messages.append({"role": "assistant", "content": e.turns[i].text})
    return messages
