"""A world that is talked to, played by a model behind an API: observations are messages, answers are actions.

The server is sent the whole conversation at every turn and applies its own template. Who chooses among several answers:

    --search actions:K --value URL   we do: K answers of the policy's server, each put behind the conversation and valued by the
                                     other server (`trailmark serve MODEL --value RUN`, route /v1/values); the best one is played
    --search actions:K               the policy's server does, by its own value model (`serve --value`); beam:B works so too

A server that cannot be reached, or answers nonsense, makes a `Failed` episode, which is counted apart and is no lost game.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trailmark.engines.base import Completion
from trailmark.engines.wire import EngineGarbage, Wire
from trailmark.errors import TrailmarkError
from trailmark.rollout.play import Desk, Protocol
from trailmark.rollout.search import Plan
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Task, Turn

Messages = list[dict[str, str]]


def lists_actions(source: TaskSource, split: str, seed: int) -> bool:
    """Whether a world shows labels to choose from, as far as its first start tells."""
    return bool(source.make().reset(draw_tasks(source, split, 1, seed)[0]).labels)


@dataclass(frozen=True)
class Choice:
    """How many answers are asked for, and who chooses: a server of values, or (`search`) the policy's own server."""

    k: int = 1
    values: Wire | None = None
    search: Mapping[str, Any] | None = None


def choice_of(plan: Plan | None, value: str | None) -> Choice:
    if plan is None:
        return Choice()
    if value is None:
        kind = "beam" if plan.kind == "beam" else "best_of"
        ends = {"step_ends": list(plan.step_ends)} if plan.kind == "beam" else {}
        return Choice(search={kind: plan.width, **({} if plan.budget is None else {"budget": plan.budget}), **ends})
    if plan.kind != "actions" or not value.startswith(("http://", "https://")):
        raise TrailmarkError(
            "eval of a server chooses here by actions:K and --value URL, the address of a server of values; without --value "
            "the server itself searches (serve --value)."
        )
    return Choice(plan.width, Wire(value, {}, {}, deadline=120.0))


def converse(
    choice: Choice,
    opening: Sequence[Mapping[str, str]] = (),
    markov: bool = False,
    seat: str = "policy",
    told: Callable[[Task], Messages] | None = None,
) -> Protocol:
    """The protocol. Where every observation says all there is to know (`markov`), each is a conversation of its own. `told` are
    the messages of a task whose observation is a whole prompt, template and all: a server has a template of its own."""

    async def play_one(desk: Desk) -> None:
        talk: Messages = [dict(m) for m in opening]
        while not desk.over:
            asked = told(desk.start.task) if told else [*talk, {"role": "user", "content": desk.observation.text}]
            done = await answer(desk, seat, asked, choice)
            law = desk.seats[seat].law
            desk.turns.append(Turn(seat, (), done.tokens, done.logp, done.logq, law, stop=done.stop, text=done.text))
            if not markov:
                talk = [*asked, {"role": "assistant", "content": done.text}]
            await desk.act(done.text)

    return play_one


async def answer(desk: Desk, seat: str, messages: Messages, choice: Choice) -> Completion:
    player = desk.seats[seat]
    engine: Any = player.engine
    key, seed = f"{desk.start.id}\0{len(desk.turns)}", desk.start.seed
    made: list[Completion] = await engine.chat(
        messages, player.law, player.max_tokens, player.stop_strings, seed, key, choice.k, choice.search
    )
    if choice.values is None or len(made) == 1:
        return made[0]
    found = await valued(choice.values, [[*messages, {"role": "assistant", "content": c.text}] for c in made])
    return made[max(range(len(made)), key=lambda i: found[i])]


async def valued(wire: Wire, states: Sequence[Messages]) -> list[float]:
    """The values of conversations that end with an answer, each read where that answer ends."""
    said = await wire.post("/v1/values", {"states": list(states)})
    found = said.get("values") if isinstance(said, dict) else said
    good = isinstance(found, list) and len(found) == len(states) and all(isinstance(v, int | float) for v in found)
    if not good:
        raise EngineGarbage(f"{wire.base_url} was asked for {len(states)} values and answered {str(said)[:80]}")
    return [float(v) for v in found]
