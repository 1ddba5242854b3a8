"""Between text and turns. Text is encoded once, here; what is written back is the text that was read.

An imported episode keeps its text beside its tokens: `task.data` holds what was there before the first turn (a `prompt`,
or `messages`), `info["messages"]` the conversation from there on, `Turn.text` what was said, and `info["row"]` whatever
else the row said. `info["format"]` names the format it came from. Of an episode that was played the text is what its
tokens say.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trailmark import chat
from trailmark.errors import DataError, ModelError
from trailmark.types import Annotation, Episode, Invalid, Scored, Task, Tokens, Turn

NO_REWARD = Invalid("no reward in the file")


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file held; `skipped` says what was wrong with the rows left out."""

    episodes: list[Episode]
    annotations: list[Annotation] = field(default_factory=list)
    skipped: tuple[str, ...] = ()


# --- text -> turns -----------------------------------------------------------------------------------------------


def talk(tokenizer: Any, messages: Sequence[chat.Message], seat: str, given: Collection[int] = ()) -> tuple[Turn, ...]:
    """A turn for every message of the assistant, but those in `given`, which are context like any other."""
    found: dict[int, tuple[Tokens, Tokens, int | None]] = {}
    for sequence in chat.sequences(tokenizer, messages, template=_template(tokenizer)):
        at, before = 0, None
        for span in sequence.spans:
            if span.message not in given:
                prompt, written = sequence.tokens[at : span.start], sequence.tokens[span.start : span.end]
                found[span.message] = prompt, written, before
                at, before = span.end, span.message
    number = {message: i for i, message in enumerate(sorted(found))}
    return tuple(
        Turn(
            seat,
            prompt,
            written,
            continues=None if before is None else number[before],
            stop="stop",
            text=messages[m]["content"],
        )
        for m, (prompt, written, before) in sorted(found.items())
    )


def plain(tokenizer: Any, prompt: str, response: str, seat: str, end: bool = True, steps: Sequence[int] = ()) -> Turn:
    """Text as it is: the prompt, behind a BOS if the tokenizer adds one and the text does not bring it; the response; and
    one eos if it `end`s. No token reaches over the border. `steps` are the characters of the response at which reasoning
    steps begin; they become spans that cover the turn, each token in the step in which it ends."""
    eos, said = tokenizer.eos_token or "", response
    if end and not eos:
        raise ModelError("this tokenizer has no eos token, so a response cannot end; set eos_token")
    if tokenizer.bos_token and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        prompt = tokenizer.bos_token + prompt.removeprefix(tokenizer.bos_token)
    if end:
        response = response.removesuffix(eos) + eos
    before, head = prompt, _encode(tokenizer, prompt)[0]
    ids, ends = _encode(tokenizer, before + response, bool(steps))
    if ids[: len(head)] != head:  # encoded behind a special token: alone, some tokenizers would put a space in front
        before, cut = eos, len(_encode(tokenizer, eos)[0])
        ids, ends = _encode(tokenizer, before + response, bool(steps))
    else:
        cut = len(head)
    tokens, ends = tuple(ids[cut:]), [e - len(before) for e in ends[cut:]]
    if not head or not tokens:
        raise DataError(f"the {'prompt' if not head else 'response'} has no tokens: there is nothing to learn from")
    borders = [0, *(bisect_right(ends, at) for at in steps[1:]), len(tokens)] if steps else []
    return Turn(
        seat, tuple(head), tokens, steps=tuple(zip(borders, borders[1:])), stop="stop" if end else "", text=said
    )


def _encode(tokenizer: Any, text: str, offsets: bool = False) -> tuple[list[int], list[int]]:
    """Ids and, if wanted, where in the text each token ends."""
    if offsets and not tokenizer.is_fast:
        raise ModelError("steps are found by the offsets of tokens, which only a fast tokenizer knows")
    found = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=offsets)
    return found["input_ids"], [b for _, b in found["offset_mapping"]] if offsets else []


def _template(tokenizer: Any) -> str | None:
    return "own" if tokenizer.chat_template else None


# --- turns -> episodes -------------------------------------------------------------------------------------------


class Starts:
    """Names: rows that begin alike are one task and one group; its episodes are numbered. The file's name plays no part,
    so `prefix` must differ where several files meet."""

    def __init__(self, prefix: str = ""):
        self.prefix, self.seen = prefix, dict[str, tuple[str, int]]()

    def name(self, start: Any, task: str | None = None) -> tuple[str, str]:
        """The ids of the task and of the next episode."""
        key = json.dumps(start) if task is None else task
        task, count = self.seen.get(key, (self.prefix + (str(len(self.seen)) if task is None else task), 0))
        self.seen[key] = task, count + 1
        return task, f"{task}/{count}"


def episode(
    name: tuple[str, str],
    data: Mapping[str, Any],
    turns: Sequence[Turn],
    reward: float | None,
    info: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
) -> Episode:
    """A whole play; its reward came with the last turn."""
    *early, last = turns
    outcome = NO_REWARD if reward is None else Scored(reward)
    task = Task(name[0], data=data, meta=meta or {})
    turns = (*early, replace(last, reward=reward or 0.0))
    return Episode(name[1], task, name[0], turns, {"self": outcome}, terminated=True, info=info)


def conversation(
    tokenizer: Any,
    starts: Starts,
    messages: Sequence[dict[str, Any]],
    seat: str,
    reward: float | None,
    info: Mapping[str, Any],
    given: Collection[int] = (),
) -> Episode:
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant" and i not in given), None)
    if first is None:
        raise DataError("no message of the assistant: nothing would be trained")
    turns = talk(tokenizer, messages, seat, given)
    name = starts.name([(m["role"], m["content"]) for m in messages[:first]])
    more = {**info, "messages": [dict(m) for m in messages[first:]]}
    return episode(name, {"messages": [dict(m) for m in messages[:first]]}, turns, reward, more)


# --- episodes -> text --------------------------------------------------------------------------------------------


def row_of(e: Episode, name: str) -> dict[str, Any]:
    """What else the row said, if it came from this format."""
    return dict(e.info.get("row", {})) if e.info.get("format") == name else {}


def reward_of(e: Episode) -> float | None:
    return e.outcome.reward if isinstance(e.outcome, Scored) else None


def turns_of(e: Episode, seat: str | None) -> list[int]:
    """The turns of the seat; without a name the episode must have only one."""
    seats = list(dict.fromkeys(t.seat for t in e.turns))
    if seat is None and len(seats) > 1:
        raise DataError(f"episode '{e.id}' has the seats {', '.join(seats)}: say whose view is to be written.")
    mine = [i for i, t in enumerate(e.turns) if seat in (None, t.seat)]
    if not mine:
        raise DataError(f"episode '{e.id}' has no turn{'' if seat is None else f' of seat {seat!r}'}.")
    return mine


def prompt_of(e: Episode, turn: int, tokenizer: Any) -> str:
    if "format" in e.info and "prompt" in e.task.data:
        return e.task.data["prompt"]
    return tokenizer.decode(e.context(turn), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def messages_of(e: Episode, tokenizer: Any, seat: str | None) -> list[dict[str, Any]]:
    """The conversation as one seat saw it. Of a played one: what each prompt says, without what the template adds."""
    mine = turns_of(e, seat)
    if "messages" in e.info and "messages" in e.task.data:
        return [dict(m) for m in (*e.task.data["messages"], *e.info["messages"])]
    messages: list[dict[str, Any]] = []
    for i in mine:
        seen = tokenizer.decode(e.context(i), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for roles in [["user"]] if messages else [["user"], ["system", "user"]]:
            asked = [*messages, *({"role": r, "content": chat.PROBE} for r in roles)]
            shown = chat.render(tokenizer, asked, True, template=_template(tokenizer)).text
            if told := re.fullmatch("(.*?)".join(map(re.escape, shown.split(chat.PROBE))), seen, re.DOTALL):
                messages += [{"role": r, "content": c} for r, c in zip(roles, told.groups())]
                break
        else:
            raise DataError(f"episode '{e.id}': turn {i} was not asked in a conversation of this chat template.")
        messages.append({"role": "assistant", "content": e.turns[i].text})
    return messages
