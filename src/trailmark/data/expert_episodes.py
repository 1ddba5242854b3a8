"""Published expert plays of ALFWorld as episodes, each played again in the task's own mode and dialect.

    told = read_trajectories("expert_trajs_train.jsonl.xz")
    found = as_episodes(told.trajectories, Alfworld("data/alfworld", mode="text", dialect="put"), tokenizer)

The world plays them again. So prompts, rewards and end are those of a policy that gave the same answers, token by
token. Log-probabilities are unknown and left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from trailmark.engines.scripted import ScriptedEngine
from trailmark.errors import TaskError
from trailmark.rollout.play import Desk, Seat, Start, play_all
from trailmark.run_async import wait
from trailmark.tasks.alfworld.source import Alfworld
from trailmark.tasks.alfworld.trajectories import Trajectory, game_names, replies
from trailmark.types import Episode, Failed, Invalid, Player, Scored


@dataclass(frozen=True, slots=True)
class Made:
    """The episodes; `skipped` says which trajectories could not be played, and why."""

    episodes: list[Episode]
    skipped: tuple[str, ...] = ()


def as_episodes(
    trajectories: Iterable[Trajectory],
    source: Alfworld,
    tokenizer: Any,
    *,
    seat: str = "policy",
    suffix: str = "",
    prefix: str = "",
) -> Made:
    """The same plays in the mode and dialect of `source`. With labels, `suffix` follows each prompt as in `solo`. A
    play that the horizon cuts off is `truncated`, as for a policy. So is a play that ends before it is won."""
    names, numbers = game_names(source.games), dict[str, int]()
    episodes, skipped = [], []
    for t in trajectories:
        id = names.get(t.game)
        if id is None:
            skipped.append(f"{t.where}: there is no game '{t.game}' in {source.games.path}.")
            continue
        number = numbers[id] = numbers.get(id, -1) + 1
        made = _episode(t, id, source, tokenizer, seat, suffix, (prefix, number))
        if isinstance(made.outcome, Failed):
            raise TaskError(f"{t.where}: {made.outcome.error}")
        episodes.append(made)
    return Made(episodes, tuple(skipped))


def _episode(
    t: Trajectory, id: str, source: Alfworld, tokenizer: Any, seat: str, suffix: str, name: tuple[str, int]
) -> Episode:
    voice: list[str] = []
    total = [0.0]
    actor = Seat(seat, ScriptedEngine(lambda prompt, draw: voice.pop(), tokenizer), max_tokens=1 << 20, kind="scripted")

    async def act(desk: Desk, said: str) -> None:
        voice.append(said)
        if source.mode == "labels":
            turn = await desk.ask(seat, text=desk.observation.text + suffix, allowed=desk.observation.labels)
        else:
            opening = source.first_messages if not desk.turns else []
            turn = await desk.ask(seat, messages=[*opening, {"role": "user", "content": desk.observation.text}])
        total[0] += (await desk.act(turn.text)).paid()[0]

    async def tell(desk: Desk) -> None:
        for move in t.moves:
            for said in replies(move, source, desk.world):
                if desk.over:
                    return
                await act(desk, said)

    task = source.task(id)
    start = Start(task, f"{name[0]}{task.id}", f"{name[0]}{task.id}/{name[1]}")
    (made,) = wait(play_all(source, [start], [actor], tell))
    turns = tuple(replace(turn, logp=(), logq=()) for turn in made.turns)
    made = replace(made, turns=turns, players={seat: Player("scripted", "expert trajectory")}, info={"from": t.where})
    if isinstance(made.outcome, Invalid):  # the recording stopped before the world ended
        return replace(made, outcomes={"self": Scored(total[0], False)}, truncated=True)
    return made
