"""VR-CLI's reward as a judge: by how much an answer improves the perplexity of its row's gold text.

Beside the reward it notes what could explain an improvement without reasoning, for every play: how much of the plan was
copied from the prompt, how long it is, what no plan at all would have earned, and whether the answer has a marker.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.chat import must_render
from trailmark.errors import DataError, JudgeError, RecipeError, TaskError
from trailmark.methods.vrcli.baselines import BaselineFile, BaselineRow
from trailmark.methods.vrcli.config import LikelihoodJudgeConfig
from trailmark.methods.vrcli.plan_controls import own_gain, plans_of_others, words_at_random
from trailmark.methods.vrcli.words import copied_share, correlation, words_of
from trailmark.score.base import Judge, Play, Verdict, digest, filled, scored
from trailmark.score.likelihood import (
    Context,
    Likelihood,
    TextScorer,
    after_markers,
    gain_reward,
    gold_row,
    improvement,
    smallest_reward,
)
from trailmark.texts import encode
from trailmark.types import Annotation, Episode, Invalid, Outcome, Scored, Task

if TYPE_CHECKING:
    from trailmark.config import ModelConfig
    from trailmark.models.lm import LM

NEAR, NEAR_HALF = 0.01, 2.0  # percent by which improvements may differ, by the precision of the weights
EXACT = ("torch.float32", "torch.float64")
BOUNDED = ("stepped", "clipped", "binary")  # kinds whose least reward does not depend on other answers
FRAME = 64  # more tokens than a chat template writes around a message


@dataclass(frozen=True, slots=True)
class Scores:
    """The improvements of one play: by its plan, by no plan, and by its plan for another story (contrastive)."""

    base: Likelihood
    now: Likelihood | None  # None: the reader cannot hold the plan
    empty: float
    other: float = 0.0

    @property
    def percent(self) -> float:
        return _gain(self.base, self.now)


class LikelihoodJudge(Judge):
    """The baseline of each row is stored in a file. `model` is a loaded model, or one to load when the first play is
    judged. With `config.server` a server scores, and only the tokenizer of the model is loaded."""

    def __init__(
        self,
        config: LikelihoodJudgeConfig | None = None,
        model: ModelConfig | LM | None = None,
        cache: str | Path | None = None,
    ):
        self.config = c = config or LikelihoodJudgeConfig()
        reader = c.model or model
        if reader is None:
            raise RecipeError("reward of kind likelihood: no model reads the gold text; set reward.model.")
        named = reader.name if c.server is None else c.server.model
        self.name = f"likelihood of {c.gold} under {named}"
        self.source = f"likelihood {named}"
        self._shared = cache or c.cache
        self.scorer = TextScorer(reader, self._shared, c.server)
        self.repeatable = c.server is None
        self._world: Any = None
        self._others: dict[str, Task] = {}
        unread = {"success", "model", "cache", "server", "baselines", "no_marker", "weight", "seed"}
        settings = c.model_dump(mode="json", exclude=unread)
        if c.empty is None:
            del settings["empty"]
        if c.no_marker != "whole":
            settings["no_marker"] = c.no_marker
        if c.reward == "contrastive":
            settings |= {"weight": c.weight, "seed": c.seed}
        weights = _weights_of(reader) if c.server is None else f"served {named}"  # the path of weights does not count
        self.fingerprint = digest(json.dumps([weights, settings]))

    # -- before the first play -------------------------------------------------------------------------------------

    def bind(self, source: Any) -> None:
        self._world = source
        self.scorer.files = getattr(source, "files", {})

    def keep(self, folder: str | Path) -> None:
        self.scorer.check()
        super().keep(folder)
        if self._shared is None:
            self.scorer.keep(Path(folder) / "likelihoods.jsonl")
        if self.config.baselines is not None:
            known = [self._as_play(None, task) for task in getattr(self._world, "rows", ())]
            self._file.check([self._row(play) for play in known])

    def must_read(self, rows: Sequence[Task], longest: int) -> None:
        self.must_render(rows)
        self.must_fit(longest)

    def must_render(self, tasks: Sequence[Task]) -> None:
        """Refuse rows that cannot be read: without a gold text, without a key of a template, or with messages that the
        reader's chat template refuses."""
        plays = [replace(self._as_play(None, task), answer="-") for task in tasks]
        asked = [(p, context) for p in plays for context in (self._row(p).context, self._with_plan(p)[0])]
        file = lambda p: self._world.files.get(p.episode.task.id)
        name = lambda p: f"row '{p.episode.task.id}', as {self.scorer.lm.name} would read it"
        rows = ((name(p), file(p), context) for p, context in asked if not isinstance(context, str))
        must_render(self.scorer.tokenizer, rows)

    def must_fit(self, longest: int) -> None:
        """Refuse rows that the reader cannot hold with a plan of `longest` tokens: a run would end at the first such
        plan. Most rows are surely short enough, and are not rendered."""
        room = self.scorer.context
        if room is None:
            return
        tokenizer = self.scorer.tokenizer
        for task in self._world.rows:
            context, gold = self._with_plan(replace(self._as_play(None, task), answer="-"))
            texts = [context] if isinstance(context, str) else [str(m["content"]) for m in context]
            most = longest + FRAME * (len(texts) + 1)
            if most + sum(len(t.encode()) for t in (*texts, gold)) <= room:
                continue
            if most + sum(len(encode(tokenizer, t)) for t in (*texts, gold)) <= room:
                continue
            size = gold_row(tokenizer, context, gold, self.config.tokens).end
            if size + longest > room:
                raise DataError(
                    f"row '{task.id}' has {size} tokens with its gold text, and the model that reads it holds {room}: "
                    f"a plan of up to {longest} tokens does not fit. Shorten the row, lower sampling.max_tokens, or "
                    "choose a reader with a longer context (reward.model).",
                    self._world.files.get(task.id),
                )

    @cached_property
    def _file(self) -> BaselineFile:
        assert self.config.baselines is not None
        return BaselineFile(self.config.baselines, self.scorer, self.config.tokens)

    # -- judging ---------------------------------------------------------------------------------------------------

    async def judge(self, plays: Sequence[Play]) -> list[Verdict]:
        plans = [replace(p, answer=after_markers(p.answer, self.config.markers)) for p in plays]
        base = self._baselines(plays)
        now = self._now(plans)
        if self.config.baselines is not None:
            self._file.must_match([p.episode.task.id for p in plays], base, [n or b for b, n in zip(base, now)])
        nothing = [self._with_plan(replace(p, answer="")) for p in plays]
        empty = self.scorer.likelihoods(nothing, self.config.tokens, [p.episode.task.id for p in plays])
        others = self._for_another_story(plans) if self.config.reward == "contrastive" else [0.0] * len(plays)
        found = [Scores(b, n, improvement(b, e), o) for b, n, e, o in zip(base, now, empty, others)]
        return self._verdicts(plays, plans, found)

    def compare(self, episodes: Sequence[Episode]) -> list[Annotation]:
        """For plays of an evaluation: by how much other texts in the place of their plans would improve."""
        good = [e for e in episodes if isinstance(e.outcome, Scored)]
        plays = [self._as_play(Play(e, "", e.turns[-1].text, {}), e.task) for e in good]
        plans = [after_markers(p.answer, self.config.markers) for p in plays]
        rows = [e.task.id for e in good]
        if len(set(rows)) < 2:
            return []
        texts = {
            "other_plan": plans_of_others(rows, plans, self.config.seed),
            "random_words": [
                words_at_random(information_of(p), len(words_of(plan)), self.config.seed, row)
                for p, plan, row in zip(plays, plans, rows)
            ],
        }
        base, out = self._baselines(plays), []
        for name, given in texts.items():
            now = self._now([replace(p, answer=text) for p, text in zip(plays, given)])
            gains = [_gain(b, n) for b, n in zip(base, now)]
            out += [
                Annotation(e.id, f"{name}_improvement", "episode", (gain,), None, self.stamp)
                for e, gain in zip(good, gains)
                if math.isfinite(gain)
            ]
        return out

    def metrics(self, notes: Sequence[Annotation]) -> dict[str, float]:
        values: dict[str, dict[str, float]] = {}
        for a in notes:
            values.setdefault(a.name, {})[a.episode] = a.values[0]
        means = ("improvement", "empty_improvement", "other_improvement", "other_plan_improvement",
                 "random_words_improvement", "copied", "marker", "plan_words")  # fmt: skip
        out = {name: sum(values[name].values()) / len(values[name]) for name in means if name in values}
        if "marker" in out:
            out["marker_rate"] = out.pop("marker")
        words, gains = values.get("plan_words", {}), values.get("improvement", {})
        both = [e for e in words if e in gains]
        if (found := correlation([words[e] for e in both], [gains[e] for e in both])) is not None:
            out["length_correlation"] = found
        if other := values.get("other_plan_improvement"):
            mine = {e: gain for e, gain in values.get("improvement", {}).items() if e in other}
            out |= own_gain(list(mine.values()), [other[e] for e in mine])
        return out

    def by_improvement(self) -> LikelihoodJudge:
        """The same judge, whose rewards are the improvements themselves: 0.25 for 25 percent."""
        other = copy.copy(self)
        other.config = self.config.model_copy(update={"reward": "linear", "no_marker": "whole", "success": None})
        other.fingerprint = digest(f"{self.fingerprint} improvement")
        return other

    def afresh(self) -> LikelihoodJudge:
        other, before = copy.copy(self), self.scorer
        other.config = self.config.model_copy(update={"baselines": None, "cache": None})
        other.scorer = TextScorer(before.model, None, before.server, before.key)
        other.scorer.files = before.files
        return other

    def agrees(self, stored: Outcome | Mapping[str, Outcome], verdict: Verdict) -> bool:
        """Likelihoods differ a little from batch to batch, so a reward may be that of an improvement nearby."""
        c, given = self.config, verdict.outcome
        if not isinstance(stored, Scored) or not isinstance(given, Scored):
            return type(stored) is type(given)
        if stored != scored(stored.reward, c.success):
            return False
        notes = {a.name: a.values[0] for a in verdict.notes}
        if c.no_marker != "whole" and not notes.get("marker", 1.0):
            return c.reward not in BOUNDED or stored.reward == given.reward  # the least of its group, which is not here
        near = NEAR if str(getattr(self.scorer.lm, "dtype", "")) in EXACT else NEAR_HALF
        steps = [(least, reward) for least, reward in c.steps]
        other = notes.get("other_improvement", 0.0)
        ends = [gain_reward(notes["improvement"] + d, c.reward, steps, other - d, c.weight) for d in (-near, near)]
        return min(ends) <= stored.reward <= max(ends)

    def read_by(self, reader: TextScorer, tasks: Sequence[Task]) -> list[float]:
        """By how many percent each gold text is likelier if another model reads it, without a plan."""
        rows = [self._row(self._as_play(None, task)) for task in tasks]
        base = self._baselines([self._as_play(None, task) for task in tasks])
        now = reader.likelihoods([(row.context, row.gold) for row in rows], self.config.tokens)
        if odd := next((row.id for row, b, n in zip(rows, base, now) if b.tokens != n.tokens), None):
            raise JudgeError(f"row '{odd}': {reader.lm.name} reads other tokens: choose one with the same tokenizer.")
        return [improvement(b, n) for b, n in zip(base, now)]

    # -- texts -----------------------------------------------------------------------------------------------------

    def _gold(self, play: Play) -> str:
        gold = play.row.get(self.config.gold)
        if not isinstance(gold, str) or not gold:
            file = getattr(self._world, "files", {}).get(play.episode.task.id)
            raise JudgeError(
                f"{f'{file}: ' if file else ''}{play.where} has no text '{self.config.gold}' (reward.gold) whose "
                "likelihood could be computed."
            )
        return gold

    def _row(self, play: Play) -> BaselineRow:
        return BaselineRow(play.episode.task.id, self._context(self.config.context, play), self._gold(play))

    def _with_plan(self, plan: Play) -> tuple[Context, str]:
        c = self.config
        template = c.plan if c.empty is None or plan.answer.strip() else c.empty
        return self._context(template, plan), self._gold(plan)

    def _context(self, template: str, play: Play) -> Context:
        """The template replaces the user's last message. Earlier messages stay as they are."""
        text = filled(template, play)
        if not (self.config.chat or play.messages):
            return text
        return [*play.messages[:-1], {"role": "user", "content": text}]

    def _baselines(self, plays: Sequence[Play]) -> list[Likelihood]:
        rows = [self._row(play) for play in plays]
        if self.config.baselines is not None:
            return self._file.get(rows)
        pairs, names = [(row.context, row.gold) for row in rows], [row.id for row in rows]
        return self.scorer.likelihoods(pairs, self.config.tokens, names)

    def _now(self, plans: Sequence[Play]) -> list[Likelihood | None]:
        """The likelihood of each gold text with its plan. `must_fit` leaves room for every plan, but a text may have
        more tokens than were written: a character that was cut in half becomes another one."""
        names = [p.episode.task.id for p in plans]
        return self.scorer.fresh_where_fits([self._with_plan(p) for p in plans], self.config.tokens, names)

    # -- contrastive -----------------------------------------------------------------------------------------------

    def _for_another_story(self, plans: Sequence[Play]) -> list[float]:
        """By how much each plan improves the gold text of another story."""
        away = [self._as_play(plan, self._other(plan.episode.task)) for plan in plans]
        base = self._baselines(away)
        return [_gain(b, n) for b, n in zip(base, self._now(away))]

    def _other(self, task: Task) -> Task:
        """A training row of another story, the same one for all plays of a row: its seed is the row's id. So the reward
        of a play does not depend on the batch."""
        if task.id not in self._others:
            if self._world is None:
                raise JudgeError("reward contrastive: the judge does not know other rows: call bind(source) first.")
            mine = (task.data.get("story_id"), task.data.get(self.config.gold))
            try:
                rows = sorted(self._world.tasks("train"), key=lambda t: t.id)
            except TaskError:  # a file of test rows is evaluated
                rows = sorted(self._world.tasks("all"), key=lambda t: t.id)
            away = [t for t in rows if t.id != task.id and t.data.get(self.config.gold) != mine[1]]
            away = [t for t in away if mine[0] is None or t.data.get("story_id") != mine[0]]
            if not away:
                raise JudgeError(f"reward contrastive: row '{task.id}' has no row of another story beside it.")
            self._others[task.id] = random.Random(f"contrast {self.config.seed} {task.id}").choice(away)
        return self._others[task.id]

    def _as_play(self, plan: Play | None, task: Task) -> Play:
        """A row as it would be shown, with the answer of another play."""
        first = self._world.make().reset(task)
        episode = nobody(task) if plan is None else replace(plan.episode, task=task)
        answer = "" if plan is None else plan.answer
        return Play(episode, first.text, answer, {**task.data, **task.meta}, first.messages)

    # -- verdicts --------------------------------------------------------------------------------------------------

    def _verdicts(self, plays: Sequence[Play], plans: Sequence[Play], found: Sequence[Scores]) -> list[Verdict]:
        c = self.config
        marked = [any(m in p.answer for m in c.markers) for p in plays]
        valid = [ok or c.no_marker == "whole" for ok in marked]
        rewards = [self._reward(s) for s in found]
        steps = [(least, reward) for least, reward in c.steps]
        out = []
        for k, (play, scores) in enumerate(zip(plays, found)):
            if not math.isfinite(scores.percent) or not math.isfinite(scores.other):
                out.append(Verdict(Invalid(self._no_number(scores))))
                continue
            reward = rewards[k]
            if not valid[k]:
                of = lambda p: p.episode.task.id
                others = [r for p, ok, r in zip(plays, valid, rewards) if ok and of(p) == of(play) and math.isfinite(r)]
                reward = smallest_reward(c.reward, steps, others)
            out.append(Verdict(scored(reward, c.success), self._notes(plans[k], scores, marked[k])))
        return out

    def _reward(self, s: Scores) -> float:
        c = self.config
        if s.now is None:
            return math.nan
        if c.reward == "nll":
            return s.base.nll - s.now.nll  # not taken back out of the percentage, which rounds to 100
        steps = [(least, reward) for least, reward in c.steps]
        return gain_reward(s.percent, c.reward, steps, s.other, c.weight)

    def _no_number(self, s: Scores) -> str:
        if s.now is None:
            return f"the plan is too long for the model that reads '{self.config.gold}'"
        if math.isfinite(s.percent):
            return f"the likelihood of another story's '{self.config.gold}' with this plan is no number"
        return f"the likelihood of '{self.config.gold}' is no number: {s.base.logp:g} before, {s.now.logp:g} now"

    def _notes(self, plan: Play, s: Scores, marked: bool) -> tuple[Annotation, ...]:
        assert s.now is not None
        found = {"improvement": s.percent, "baseline_nll": s.base.nll, "nll": s.now.nll}
        found |= {"plan_words": float(len(plan.answer.split()))}
        if math.isfinite(s.empty):
            found["empty_improvement"] = s.empty + 0.0  # no minus before a zero
        copied = copied_share(plan.answer, information_of(plan))
        if copied is not None:
            found["copied"] = copied
        if self.config.markers:
            found["marker"] = float(marked)
        if self.config.reward == "contrastive":
            found["other_improvement"] = s.other
        return tuple(Annotation(plan.episode.id, k, "episode", (v,), None, self.stamp) for k, v in found.items())


def information_of(play: Play) -> str:
    """What the policy knew, without the instruction."""
    known = play.row.get("information")
    return known if isinstance(known, str) else play.prompt


def _gain(base: Likelihood, now: Likelihood | None) -> float:
    return math.nan if now is None else improvement(base, now)


def nobody(task: Task) -> Any:
    from trailmark.types import Episode

    return Episode("", task, "", (), {"self": Invalid("not played")})


def _weights_of(reader: ModelConfig | LM) -> str:
    from trailmark.config import ModelConfig
    from trailmark.models.adapters import weights_print

    return weights_print(reader) if isinstance(reader, ModelConfig) else reader.fingerprint()
