"""Who speaks when: before an agent acts, its strategist writes a strategy.

dialogue   each side's agent is shown the talk with its own past strategies inlined, and the current one as advice; the
           other side sees none of them
thought    the agent's answer begins with the strategist's thought
none       the agents alone

A world of two seats calls its actors `agent` and `partner`; their strategists are the seats `strategist` and
`partner_strategist`. A partner without a strategist plays alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trailmark.errors import RecipeError
from trailmark.methods.epo.config import STRATEGIST, THOUGHT, PromptsConfig
from trailmark.rollout.play import Desk, Protocol, solo
from trailmark.tasks.base import TaskSource
from trailmark.tasks.dialogue import View

ADVISERS = {"agent": "strategist", "partner": "partner_strategist"}


def protocol_of(strategy: str, prompts: PromptsConfig, source: TaskSource) -> Protocol:
    if strategy != "thought" and hasattr(source.make(), "view"):
        return dialogue(prompts, advice=strategy == "dialogue")
    if strategy == "dialogue":
        raise RecipeError(
            f"strategy: task '{source.name}' is no world of people who talk: set strategy: thought, or none."
        )
    opening = source.first_messages
    return thought(prompts, opening) if strategy == "thought" else solo("agent", source.markov, opening=opening)


def dialogue(prompts: PromptsConfig, advice: bool = True) -> Protocol:
    async def play_one(desk: Desk) -> None:
        given: dict[str, dict[int, str]] = {}  # strategies of each actor, by the line that followed
        while not desk.over:
            actor = desk.observation.seat or "agent"
            view, mine = desk.world.view(actor), given.setdefault(actor, {})  # type: ignore[attr-defined]
            if advice and ADVISERS.get(actor) in desk.seats:
                asked = to_strategist(view, max(mine, default=None), prompts)
                turn = await desk.ask(ADVISERS[actor], messages=[{"role": "user", "content": asked}])
                mine[len(view.lines)] = one_line(turn.text)
            said = await desk.ask(
                actor, messages=[{"role": "user", "content": to_agent(view, mine, prompts)}], fresh=True
            )
            await desk.act(said.text)

    return play_one


def to_strategist(view: View, before: int | None, prompts: PromptsConfig) -> str:
    """The next message to a strategist: first the instructions and what was said by then, later what was said since its
    last strategy, of which `before` is the line that followed."""
    new = "\n".join(map(str, view.lines[before or 0 :]))
    if before is not None:
        return new
    return f"{filled(prompts.strategist or STRATEGIST, view)}{new and f'{chr(10)}{chr(10)}{new}'}"


def to_agent(view: View, strategies: Mapping[int, str], prompts: PromptsConfig) -> str:
    """What an agent is shown: the talk with its own strategies before the lines that followed them, and the current
    one as advice."""
    lines = []
    for k, line in enumerate(view.lines):
        if k in strategies:
            lines.append(f"{view.name} strategy: {strategies[k]}")
        lines.append(str(line))
    if (now := strategies.get(len(view.lines))) is not None:
        lines.append(prompts.advice.replace("{strategy}", now))
    return filled(prompts.agent, view) + "".join(f"\n{line}" for line in lines) + f"\n{view.name}:"


def filled(template: str, view: View) -> str:
    """A template with the parts of a view. A part is never searched for names again."""
    parts = {"{name}": view.name, "{other}": view.other, "{scene}": view.scene, "{rules}": view.rules}
    out, rest = "", template
    while rest:
        at = {rest.find(name): name for name in parts if name in rest}
        if not at:
            return out + rest
        first = min(at)
        out, rest = out + rest[:first] + parts[at[first]], rest[first + len(at[first]) :]
    return out


def one_line(text: str) -> str:
    """A strategy as one line, without its marker."""
    return " ".join(text.split()).removeprefix("Strategy:").strip()


def thought(prompts: PromptsConfig, opening: Sequence[Mapping[str, str]] = ()) -> Protocol:
    told = [{"role": "user", "content": prompts.strategist or THOUGHT}, {"role": "assistant", "content": "OK"}]

    async def play_one(desk: Desk) -> None:
        action: str | None = None
        while not desk.over:
            seen = desk.observation.text
            shown = seen if action is None else f"Agent1: {action}\n{seen}"
            asked = [*(told if action is None else []), {"role": "user", "content": shown}]
            turn = await desk.ask("strategist", messages=asked)
            before = [*opening] if action is None else []
            now = [*before, {"role": "user", "content": seen}]
            said = await desk.ask("agent", messages=now, prefix=f"{turn.text.strip()}\n")
            action = said.text.removeprefix(f"{turn.text.strip()}\n").strip()
            await desk.act(said.text)

    return play_one
