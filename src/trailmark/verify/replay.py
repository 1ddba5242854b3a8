"""Replay stored actions: the world must give the same answers and show the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trailmark.credit.turns import side_of
from trailmark.engines.base import Completion, Engine, EngineError, Request
from trailmark.errors import DataError, TrailmarkError
from trailmark.rollout.judging import as_played, judge_episodes, judged_rewards
from trailmark.rollout.play import Seat, Start, play_starts
from trailmark.runs.annotations import annotation_files
from trailmark.runs.store import read_segment
from trailmark.score.base import Judge, Play, Verdict
from trailmark.score.several import weighted
from trailmark.types import Annotation, Episode, Failed, Scored
from trailmark.verify.evidence import Evidence
from trailmark.verify.report import Check, Findings


class _Silent(Engine):
    """An engine of which only the tokenizer is used."""

    name, version = "stored", 0

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    async def sample(self, request: Request) -> list[Completion]:
        raise EngineError("the replay goes on after the stored play was over")

    async def score(self, tokens: Sequence[int], start: int = 1) -> list[float]:
        raise EngineError("this engine scores nothing")


class _AsStored(Judge):
    """A judge that repeats the stored verdict, so that a replay asks no real judge."""

    def __init__(self, episode: Episode):
        self.episode = episode

    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        sides = self.episode.info.get("judge", {}).get("sides")
        return [Verdict(self.episode.outcomes if sides else self.episode.outcome) for _ in plays]


def check_replay(ev: Evidence) -> Check:
    found = Findings("replay")
    source = ev.source
    episodes = ev.sample_episodes(lambda e: isinstance(e.outcome, Scored))
    if not episodes:
        return found.skip("no play was scored")
    steps = 0
    for e in episodes:
        steps += _rewards(found, source, e)
    compared = _prompts(ev, found, episodes)
    found.numbers = {"episodes": len(episodes), "steps": steps, "prompts_compared": compared}
    if judged := [e for e in episodes if "judge" in e.info]:
        found.numbers |= {"judged": len(judged), "judged_again": _verdicts(ev, found, judged)}
    what = "rewards, ends and prompts" if compared else "rewards and ends"
    return found.result(f"{len(episodes)} plays of {steps} steps replayed: the same {what}")


def _rewards(found: Findings, source: Any, e: Episode) -> int:
    """Replay the stored actions in a new world; returns their number."""
    where, played, step = f"episode '{e.id}'", 0, None
    try:
        world = source.make()
        world.reset(e.task)
        for i, turn in enumerate(as_played(e)):
            if turn.action is None:
                continue
            if step is not None and step.over:
                found.defect("the world is over before the stored play is", f"{where}, turn {i}")
                return played
            step = world.step(turn.action)
            played += 1
            reward, others = step.paid(side_of(e, turn.seat))
            if (reward, others) != (turn.reward, dict(turn.rewards)):
                found.defect("a replayed reward differs from the stored one (edited?)",
                             f"{where}, turn {i}: stored {turn.reward:g}, now {reward:g}")  # fmt: skip
    except Exception as problem:  # a world may raise anything
        found.defect("the world cannot be replayed", f"{where}: {type(problem).__name__}: {problem}")
        return played
    if step is None or not step.over:
        found.defect("the stored play ends before the world does", where)
    else:
        got = dict(e.outcomes) if step.outcome is None and "judge" in e.info else step.outcome
        now = dict(got) if isinstance(got, dict) else dict.fromkeys(e.outcomes, got)
        if now != dict(e.outcomes):
            found.defect(
                "a replayed outcome differs from the stored one (edited?)", f"{where}: stored {e.outcome}, now {got}"
            )
        if (step.terminated, step.truncated) != (e.terminated, e.truncated):
            found.defect("terminated or truncated differ from the replay", where)
    return played


def _prompts(ev: Evidence, found: Findings, episodes: Sequence[Episode]) -> int:
    """Replay the stored turns with the run's protocol: each prompt must equal the stored one, token by token. A method
    gives its protocol by `protocol(config, source)`; a seat that plays alone, and a world that says whose turn it is,
    have the default protocol."""
    tokenizer = ev.weights.any().tokenizer
    own = ev.method.protocol(ev.config, ev.source)
    alone = [e for e in episodes if len({t.seat for t in e.turns}) == 1 or _world_says(ev.source, e)]
    if own is None and (left := len(episodes) - len(alone)):
        found.notes.append(
            f"prompts of {left} plays with several seats were not compared: the method names no protocol, and the "
            "world does not say who speaks when"
        )
    chosen = list(episodes) if own is not None else alone
    engine = _Silent(tokenizer)
    for e in chosen:
        names = list(dict.fromkeys(t.seat for t in e.turns))
        served = {t.seat for t in e.turns if not t.prompt}  # turns of a chat server do not store their prompt
        seats = [Seat(n, engine, speaks="chat" if n in served else None, side=side_of(e, n)) for n in names]
        start = Start(e.task, e.group, e.id, e.seed, e.parent, as_played(e), players=e.players)
        (again,) = play_starts(ev.source, [start], seats, own, judge=_AsStored(e))
        if isinstance(again.outcome, Failed):
            found.defect("a stored play cannot be repeated: another prompt or reward", again.outcome.error)
    return len(chosen)


def _world_says(source: Any, e: Episode) -> bool:
    """Whether the world says whose turn it is, and in each turn of the play that seat acted."""
    try:
        world = source.make()
        seen = world.reset(e.task)
        for turn in as_played(e):
            if turn.action is None or seen.seat != turn.seat:
                return False
            seen = world.step(turn.action).observation
    except Exception:  # a world may raise anything; the replay of its rewards says so
        return False
    return True


def _verdicts(ev: Evidence, found: Findings, episodes: Sequence[Episode]) -> int:
    """Check the judges' rewards. The annotation beside an episode must equal its reward, and the turn that acted last
    must carry it. A judge that costs nothing must give the same verdict again. Returns how many plays it judged."""
    noted = _noted(ev, found)
    for e in episodes:
        where, reward = f"episode '{e.id}'", e.outcome.reward if isinstance(e.outcome, Scored) else None
        if e.id not in noted and noted:
            found.defect("a judged episode has no annotation 'reward'", where)
        elif noted and noted[e.id] != reward:
            found.defect(
                "the annotation 'reward' differs from the outcome (edited?)", f"{where}: {noted[e.id]}, {reward}"
            )
        weights = e.info["judge"].get("weights")
        for o in e.outcomes.values() if weights else ():
            if isinstance(o, Scored) and (o.parts.keys() != weights.keys() or weighted(weights, o.parts) != o.reward):
                found.defect("the reward is not the weighted sum of its parts (edited?)", f"{where}: {o.reward:g}")
        own = as_played(e)
        if any(own[i].reward + judged != e.turns[i].reward for i, judged in judged_rewards(e).items()):
            found.defect("the last act does not carry the judge's reward (edited?)", where)
    judge = ev.source.judge
    if judge is None or not judge.repeatable:
        found.notes.append("the judge was not asked again: its answers may cost money, or differ")
        return 0
    same = [e for e in episodes if e.info["judge"].get("fingerprint") == judge.fingerprint]
    if len(same) < len(episodes):
        found.notes.append(
            f"{judge.name} has changed since {len(episodes) - len(same)} of the plays: not asked about these"
        )
    judge = judge.afresh()
    try:
        verdicts = judge_episodes(ev.source, same, judge)
    except TrailmarkError as problem:
        found.defect("the judge cannot be asked again", str(problem))
        return 0
    for e, verdict in zip(same, verdicts):
        stored = dict(e.outcomes) if isinstance(verdict.outcome, Mapping) else e.outcome
        if not judge.agrees(stored, verdict):
            found.defect(
                "the judge now gives another reward than is stored (edited?)",
                f"episode '{e.id}': stored {e.outcome}, now {verdict.outcome}",
            )
    return len(same)


def _noted(ev: Evidence, found: Findings) -> dict[str, float]:
    out: dict[str, float] = {}
    files = [p for segment in ev.files for p in annotation_files(segment)]
    files = [p for p in files if p.parent.name == "reward" or p.name.endswith(".annotations.jsonl")]
    if not files:
        found.notes.append("the run has no annotations of rewards")
    for path in files:
        try:
            out |= {a.episode: a.values[0] for a in read_segment(path, Annotation) if a.name == "reward" and a.values}
        except DataError as problem:
            found.defect("annotations cannot be read", str(problem))
    return out
