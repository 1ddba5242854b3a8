"""How Reflect-RL's two players talk: their prompts, the labels they may say, and what is cut if a prompt is too long.

Prompts, with the world's text as `state` and the list of actions as `menu`:

    reflector   state + " # Analyze:\n"                                      -> reflection, until its end of text
    policy      state + " # Analyze:\n" + reflection + menu + " # Action:\n"  -> one label
    without     state + menu + " # Action:\n"                                -> one label

*Labels.* `head` says which tokens a label is sampled from: the labels in the menu, the whole label alphabet (as in the
reference: a label that is not listed can be said, and wastes a step), or the vocabulary. All label scores come from one
forward pass. `shuffle` renames the listed actions at every decision, so that a label means only what the menu says.
Imitation and reinforcement learning use the same function for this.

*Too long.* The task statement is at the top of a state and the latest events are at its end, so the middle is cut. (The
reference cuts on the left, and so loses the statement first.)
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.errors import RecipeError, TaskError
from trailmark.methods.reflect.config import Head, Shuffle
from trailmark.rollout.bos import prompt_ids
from trailmark.rollout.play import Desk, Protocol
from trailmark.tasks.labels import CHOICES, alphabet, menu_labels, relabel

ANALYZE, ACTION = " # Analyze:\n", " # Action:\n"
CUT = "\n[...]\n"
ROOM = 1024  # for an engine that does not say its longest sequence
Advice = Callable[[str, str], str]


@dataclass(frozen=True)
class Talk:
    """What imitation, play and evaluation agree on. `alphabet` are the labels that can be sampled at all. `share` of
    the decisions get a reflection. `limit` tokens fit a prompt and its answer (None: what the engine holds)."""

    reflect: bool = True
    head: Head = "listed"
    shuffle: Shuffle = "none"
    share: float = 1.0
    alphabet: tuple[str, ...] = ()
    limit: int | None = None
    thought: int = 32
    instruction: str = ""

    def reflector_prompt(self, tokenizer: Any, state: str, limit: int) -> str:
        return fit(tokenizer, self.instruction + state, ANALYZE, limit - self.thought) + ANALYZE

    def policy_prompt(self, tokenizer: Any, state: str, thought: str | None, menu: str, limit: int) -> str:
        """The policy's prompt. `thought` None: without a reflection. A reflection may have more tokens for the policy
        than it had for the reflector; if it leaves no room for the state, its end is cut."""
        rest = menu + ACTION if thought is None else ANALYZE + thought + menu + ACTION
        if thought and len((CUT + rest).encode(errors="replace")) + 3 >= limit:
            size = lambda n: len(prompt_ids(tokenizer, CUT + ANALYZE + thought[:n] + menu + ACTION))
            rest = ANALYZE + thought[: _longest(len(thought), lambda n: size(n) + 3 <= limit)] + menu + ACTION
        return fit(tokenizer, (self.instruction if self.reflect else "") + state, rest, limit - 1) + rest


def coin(name: str, share: float) -> bool:
    """True with probability `share`; always the same for the same name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") < share * 2**32


def fit(tokenizer: Any, state: str, rest: str, limit: int) -> str:
    """Shorten `state` so that state + rest has at most `limit` tokens: whole lines from the top that take at most half
    of the room, a mark, and as many whole lines from the end as fit (if none fits, as many characters)."""
    # a token is at least one byte, and some tokenizers add a BOS token
    if len((state + rest).encode(errors="replace")) < limit:
        return state
    size = lambda text: len(prompt_ids(tokenizer, text))
    if size(state + rest) <= limit:
        return state
    room = limit - size(CUT + rest)
    if room < 2:
        raise TaskError(
            f"the menu and the text after the state take {size(rest)} tokens, and a prompt may have {limit}: raise "
            "engine.max_len (and the model's context), or choose a world with shorter menus."
        )
    lines = [0, *(i + 1 for i, c in enumerate(state) if c == "\n"), len(state)]
    top = lines[_longest(len(lines) - 1, lambda n: size(state[: lines[n]]) <= room // 2)]
    top = top or _longest(len(state), lambda n: size(state[:n]) <= room // 2)
    head = state[:top].removesuffix("\n") + CUT
    fits = lambda start: size(head + state[start:] + rest) <= limit
    below = [i for i in lines if top < i < len(state)]
    if kept := _longest(len(below), lambda n: fits(below[-n])):
        return head + state[below[-kept] :]
    return head + state[len(state) - _longest(len(state) - top, lambda n: fits(len(state) - n)) :]


def _longest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n up to `most` that fits. If n fits, every smaller one must fit too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# --- labels --------------------------------------------------------------------------------------------------------


def label_words(source: Any) -> tuple[str, ...]:
    """Labels of several digits, which a tiny tokenizer must have as single tokens. Only worlds that ask for the
    policy's tokenizer (`bind`) have such long lists."""
    return tuple(c for c in CHOICES if len(c) > 1) if source.binds else ()


def label_alphabet(source: Any, tokenizer: Any) -> tuple[str, ...]:
    """The labels that this world may list: those it took from the tokenizer (`bind`), or those of its first menu if
    menus never change."""
    if source.binds:
        return tuple(source.labels or alphabet(tokenizer))
    first = source.tasks("train", 1, 0)[0]
    return tuple(source.make().reset(first).labels)


def new_labels(labels: Sequence[str], shuffle: Shuffle, known: Sequence[str], name: str) -> dict[str, str]:
    """A mapping from old to new labels: a permutation of the listed labels, or distinct labels out of all `known`. It
    is the same for the same name."""
    pool = list(labels) if shuffle == "permute" else list(known)
    if len(pool) < len(labels):
        raise TaskError(f"{len(labels)} actions are listed, and there are {len(pool)} labels to draw from.")
    return dict(zip(labels, random.Random(name).sample(pool, len(labels))))


def shuffled_menu(talk: Talk, menu: str, labels: Sequence[str], name: str) -> tuple[str, dict[str, str]]:
    """The menu with new labels, and the mapping from old to new."""
    if talk.shuffle == "none" or not labels:
        return menu, {x: x for x in labels}
    if menu_labels(menu) != tuple(labels):
        raise RecipeError("shuffle: this world's menu does not list each label at the start of a line; set it to none.")
    new = new_labels(labels, talk.shuffle, talk.alphabet, name)
    return relabel(menu, new), new


# --- who speaks when -----------------------------------------------------------------------------------------------


def two_players(talk: Talk, advice: Advice | None = None) -> Protocol:
    """The reflector speaks, then the policy, then the world. `advice(state, reflection)` can replace the reflection, to
    measure its effect."""

    async def protocol(desk: Desk) -> None:
        policy = desk.seats["policy"].engine
        limit = talk.limit or getattr(policy, "max_len", ROOM)
        while not desk.over:
            seen, name = desk.observation, f"{desk.start.seed} {desk.start.id} {len(desk.turns)}"
            thought = await _think(desk, talk, name, limit, advice) if talk.reflect else None
            menu, new = shuffled_menu(talk, seen.menu, seen.labels, f"labels {name}")
            labels = list(new.values()) if talk.head == "listed" else list(talk.alphabet)
            turn = await desk.ask(
                "policy",
                text=talk.policy_prompt(policy.tokenizer, seen.state, thought, menu, limit),
                allowed=None if talk.head == "vocabulary" else labels,
                max_tokens=1,
            )
            old = {b: a for a, b in new.items()}
            strange = turn.text if talk.shuffle == "none" else f"{turn.text} (not listed)"
            await desk.act(old.get(turn.text, strange))

    return protocol


async def _think(desk: Desk, talk: Talk, name: str, limit: int, advice: Advice | None) -> str:
    seen, thought = desk.observation, ""
    if talk.share == 1 or coin(name, talk.share):
        tokenizer = desk.seats["reflector"].engine.tokenizer
        prompt = talk.reflector_prompt(tokenizer, seen.state, limit)
        thought = (await desk.ask("reflector", text=prompt)).text.split(ACTION.strip())[0]
    return thought if advice is None else advice(seen.state, thought)
