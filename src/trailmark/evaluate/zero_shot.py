"""Play with models that were not trained here: they get instructions in words, and their answers are text that must be
read.

    plain    one message: state and menu -> thoughts, a plan, and "Action: " with a label or a command
    react    two: state -> an analysis; state, analysis and menu -> "Action: " with a label or a command

Starts and horizon are those of trained players, and every decision starts a new conversation, as theirs does.
`read_action` finds the action that is meant. If a reply names no action, or several, a listed label is drawn at random
and counted as `guessed`. So a model that says nothing useful plays at random, and its row shows that. The same protocol
works with a model in this process and with a server; our own server samples the same tokens. Worlds that list no
actions do not need this: there the answer is the action (`rollout.play.solo`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trailmark import chat
from trailmark.errors import TrailmarkError
from trailmark.evaluate.read_action import read_reply
from trailmark.rollout.play import Desk, Protocol
from trailmark.tasks.base import Observation, TaskSource, draw_tasks
from trailmark.types import Episode

SYSTEM = (
    "You act in a small world, one action at a time. End your answer with a line 'Action: ' and the label you choose, "
    "or the action itself as it is listed."
)
THINK = "Look at what was done and seen so far, and say in a few sentences what it means and what to do next."
CHOOSE = "Choose one of the listed actions. Answer with 'Action: ' and its label or its text."
BOTH = (
    "Say what the situation is, why, and your plan; then answer with 'Action: ' and the label or the text of one "
    "listed action."
)

Messages = Sequence[Mapping[str, str]]


def read_choice(text: str, labels: Sequence[str], draw: random.Random, actions: Sequence[str] = ()) -> tuple[str, bool]:
    """The label that a reply means (`actions` maps labels to actions), and whether it was drawn at random."""
    found = read_reply(text, labels, actions)
    return (draw.choice(list(labels)), True) if found is None else (found, False)


@dataclass
class ZeroShot:
    """The protocol. It counts the decisions of each episode that were drawn at random."""

    react: bool = False
    guessed: dict[str, int] = field(default_factory=dict)

    def protocol(self) -> Protocol:
        async def play_one(desk: Desk) -> None:
            self.guessed[desk.start.id] = 0
            while not desk.over:
                seen = desk.observation
                if not seen.labels:
                    raise TrailmarkError(
                        "this world lists no actions, so there is no label to choose: play it without --chat"
                    )
                reply = await self.decide(desk, seen.state, seen.menu or menu_of(seen))
                lot = random.Random(f"{desk.start.seed} {desk.start.id} {len(desk.turns)}")
                label, blind = read_choice(reply, seen.labels, lot, seen.actions)
                self.guessed[desk.start.id] += blind
                await desk.act(label)

        return play_one

    async def decide(self, desk: Desk, state: str, menu: str) -> str:
        system = {"role": "system", "content": SYSTEM}
        user = lambda text: {"role": "user", "content": text}
        if not self.react:
            return await self.say(desk, [system, user(f"{state}\n{menu}\n{BOTH}")])
        analysis = await self.say(desk, [system, user(f"{state}\n{THINK}")])
        return await self.say(desk, [system, user(f"{state}\n{analysis}\n{menu}\n{CHOOSE}")])

    async def say(self, desk: Desk, messages: Messages) -> str:
        """The policy's answer to messages, in a new conversation. For a model in this process they are formatted with
        its chat template, or as plain lines if it has none."""
        seat = desk.seats["policy"]
        if seat.hears_messages:
            return (await desk.ask("policy", messages=messages, fresh=True)).text
        tokenizer = seat.engine.tokenizer
        if getattr(tokenizer, "chat_template", None):
            text: str = chat.render(tokenizer, messages, generation_prompt=True).text
        else:
            text = "".join(m["content"] + "\n" for m in messages)
        return (await desk.ask("policy", text=text)).text

    def noted(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes, each with the number of its decisions that were drawn at random."""
        drawn = lambda e: self.guessed.get(e.id, e.info.get("guessed", 0))  # it may be of an earlier process
        return [replace(e, info={**e.info, "guessed": drawn(e)}) for e in episodes]


def lists_actions(source: TaskSource, split: str, seed: int) -> bool:
    """Whether a world lists labels to choose from. Only its first start is checked."""
    return bool(source.make().reset(draw_tasks(source, split, 1, seed)[0]).labels)


def menu_of(seen: Observation) -> str:
    """A menu for a world that shows none, because an untrained model cannot know what the labels mean."""
    meant = seen.actions or seen.labels
    return "".join(f"{x}\n" if x == a else f"{x}. {a}\n" for x, a in zip(seen.labels, meant))
