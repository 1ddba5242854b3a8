"""Replay stored actions: the world must give the same answers and show the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trailmark.engines.base import Completion, EngineError, Request
from trailmark.rollout.play import Seat, Start, play_all
from trailmark.run_async import wait
from trailmark.types import Episode, Failed, Scored
from trailmark.verify.evidence import Evidence
from trailmark.verify.report import Check, Findings


class _Silent:
    """An engine of which only the tokenizer is used."""

    name, version = "stored", 0

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    async def sample(self, request: Request) -> list[Completion]:
        raise EngineError("the replay goes on after the stored play was over")

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        raise EngineError("this engine scores nothing")


def check_replay(ev: Evidence) -> Check:
    found = Findings("replay")
    source = ev.source
    episodes = ev.sample_episodes(lambda e: isinstance(e.outcome, Scored))
    if not episodes:
        return found.skip("no play was scored")
    steps = 0
    for e in episodes:
        steps += _rewards(found, source, e)
    shown = _prompts(ev, found, episodes)
    found.numbers = {"episodes": len(episodes), "steps": steps, "prompts_compared": shown}
    what = "rewards, ends and prompts" if shown else "rewards and ends"
    return found.result(f"{len(episodes)} plays of {steps} steps replayed: the same {what}")


def _rewards(found: Findings, source: Any, e: Episode) -> int:
    """Replay the stored actions in a new world; returns their number."""
    where, told, step = f"episode '{e.id}'", 0, None
    try:
        world = source.make()
        world.reset(e.task)
        for i, turn in enumerate(e.turns):
            if turn.action is None:
                continue
            if step is not None and step.over:
                found.defect("the world is over before the stored play is", f"{where}, turn {i}")
                return told
            step = world.step(turn.action)
            told += 1
            if float(step.reward) != turn.reward:
                found.defect("a replayed reward differs from the stored one (edited?)",
                             f"{where}, turn {i}: stored {turn.reward:g}, now {float(step.reward):g}")  # fmt: skip
    except Exception as problem:  # a world may raise anything
        found.defect("the world cannot be replayed", f"{where}: {type(problem).__name__}: {problem}")
        return told
    if step is None or not step.over:
        found.defect("the stored play ends before the world does", where)
    else:
        got = step.outcome
        now = dict(got) if isinstance(got, dict) else {next(iter(e.outcomes)): got}
        if now != dict(e.outcomes):
            found.defect(
                "a replayed outcome differs from the stored one (edited?)", f"{where}: stored {e.outcome}, now {got}"
            )
        if (step.terminated, step.truncated) != (e.terminated, e.truncated):
            found.defect("terminated or truncated differ from the replay", where)
    return told


def _prompts(ev: Evidence, found: Findings, episodes: Sequence[Episode]) -> int:
    """Replay the stored turns with the run's protocol: each prompt must equal the stored one, token by token. A method
    gives its protocol by `protocol(config, source)`; a seat that plays alone has the default protocol."""
    own = getattr(ev.method, "protocol", None)
    tokenizer = ev.weights.any().tokenizer
    alone = [e for e in episodes if len({t.seat for t in e.turns}) == 1]
    if own is None and len(alone) < len(episodes):
        found.notes.append("prompts of plays with several seats were not compared: the method names no protocol")
    chosen = list(episodes) if own is not None else alone
    engine = _Silent(tokenizer)
    for e in chosen:
        names = list(dict.fromkeys(t.seat for t in e.turns))
        protocol = own(ev.config, ev.source) if own is not None else None  # None: the default protocol
        seats = [Seat(name, engine) for name in names]
        start = Start(e.task, e.group, e.id, e.seed, e.parent, e.turns, players=e.players)
        (again,) = wait(play_all(ev.source, [start], seats, protocol))
        if isinstance(again.outcome, Failed):
            found.defect("a stored play cannot be repeated: another prompt or reward", again.outcome.error)
    return len(chosen)
