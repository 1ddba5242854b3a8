"""A long collection in a world with a judge: killed half-way, it loses neither an episode nor what the judge noted."""

import asyncio
import json

import pytest

from trailmark import formats
from trailmark.engines.scripted import ScriptedEngine
from trailmark.methods.collect import collect_starts
from trailmark.models.tiny import tiny_tokenizer
from trailmark.rollout.branch import Point, branch_starts
from trailmark.rollout.play import Seat, start_all
from trailmark.score.base import Judge, Verdict
from trailmark.tasks.prompts import Prompts
from trailmark.types import Annotation, Scored


class Killed(BaseException):
    pass


class Marks(Judge):
    name = source = "marks"

    def __init__(self, left):
        self.left, self.asked = left, []

    async def judge(self, plays):
        self.left -= len(plays)
        if self.left < 0:
            raise Killed
        self.asked += [p.episode.id for p in plays]
        note = lambda p: Annotation(p.episode.id, "letters", "episode", (float(len(p.answer)),), None, self.stamp)
        return [Verdict(Scored(1.0), (note(p),)) for p in plays]


def test_killed_half_way_nothing_is_lost(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p{k}", "id": str(k)}) + "\n" for k in range(9))
    )
    source = Prompts(str(tmp_path / "rows.jsonl"))

    async def slowly(prompt, draw):
        await asyncio.sleep(0.01 * int(prompt[1:2]))
        return "x" * (1 + int(prompt[1:2]))

    seats = [Seat("policy", ScriptedEngine(slowly, tiny_tokenizer()))]
    starts = start_all(source.tasks("all"))
    path, first, second = tmp_path / "all.jsonl", Marks(4), Marks(99)
    with pytest.raises(Killed):
        collect_starts(path, source, starts, seats, judge=first)
    assert 0 < len(first.asked) <= 4 and not path.exists()
    made = collect_starts(path, source, starts, seats, judge=second)
    assert sorted(first.asked + second.asked) == sorted(e.id for e in made) and len(made) == 9
    found = formats.read("episodes", path, None)
    assert found.episodes == made
    assert [(a.episode, a.name, a.values[0]) for a in found.annotations] == [
        row for k, e in enumerate(made) for row in ((e.id, "reward", 1.0), (e.id, "letters", k + 1.0))
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.annotations.jsonl", "all.jsonl", "rows.jsonl"]
    more = collect_starts(
        tmp_path / "more.jsonl", source, branch_starts([Point(made[3], 0, 2)], 2), seats, judge=Marks(9)
    )
    assert [(e.parent.episode, e.parent.token, e.turns[0].forced) for e in more] == [
        (made[3].id, 2, made[3].turns[0].tokens[:2])
    ] * 2
