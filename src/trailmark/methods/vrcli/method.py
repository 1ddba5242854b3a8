"""VR-CLI: policy gradients on plans that are paid by the likelihood of a gold text, and a comparison at the end which
rules out other explanations of an improvement.

The paper's equations, and where they are (x is what the policy reads, y the gold text, a the plan; the reader G is
frozen; training itself is `policy_gradient`):

    a, what follows the last marker of an answer                  `score/likelihood.py:after_markers`
    sum_t log p_G(y_t | x, y_<t), over the scored tokens of y     `score/likelihood.py:likelihoods`
    PPL_G(y | x) = exp(-1/|y| sum_t log p_G(y_t | x, y_<t))       `score/gold.py:Likelihood.perplexity`
    I(x, y, a) = 100 (1 - PPL_G(y | x, a) / PPL_G(y | x))         `score/likelihood.py:improvement`
    R(I): 0, 0.5, 0.9 or 1, by the size of I                      `score/likelihood.py:gain_reward`
    all of these for the plans of a batch: their rewards          `methods/vrcli/judge.py:LikelihoodJudge.judge`
    A_i = (R_i - mean R) / std R, of the plans of one row (GRPO)  `credit/groups.py:group_relative`
    -1/N sum min(rho A, clip(rho, 1 - c, 1 + c) A) + beta KL      `objectives/clipped.py:Clipped.terms`
    1/N: in each answer, then over answers (`mean: sequence`)     `samples.py:build_samples`
    KL is k3                                                      `objectives/kl.py:kl`
    P(A beats B) = s_A / (s_A + s_B), of judges' votes            `methods/vrcli/pairwise.py:strengths`

Each row of the comparison is a file evaluation/NAME.jsonl:

    start          plans of the policy before training
    trained        plans of the trained policy
    other-plan     the trained policy's plan for another row: as long, as well written, about something else
    random-words   as many words as the trained policy's plan has, drawn from the row's own prompt: copying alone
    no-plan        nothing: what the instruction to follow a plan does by itself
    gold           the gold text as plan: how well the reader uses a plan that says everything
    NAME           a plan made of the row's own keys (`final.plans`)
    NAME           a model that reads the gold text without a plan (`final.readers`)

The rewards in these files are improvements, 0.25 for 25 percent. results.json has three numbers of each: `improvement`
in percent, `words_in_prompt` (the share of a plan's words that stand there) and `words` (of a plan). Of `trained` it
also has by how much it is above `other-plan`, with an interval; a warning says so if it is not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from trailmark.config import ModelConfig
from trailmark.errors import RecipeError
from trailmark.learn.loop import Evaluation
from trailmark.methods.policy_gradient import PolicyGradientMethod
from trailmark.methods.vrcli.config import VrcliRecipe
from trailmark.methods.vrcli.judge import LikelihoodJudge, nobody
from trailmark.methods.vrcli.plan_controls import not_about_the_row, own_gain, plans_of_others, words_at_random
from trailmark.methods.vrcli.words import words_of
from trailmark.rollout.judging import as_play, give_verdicts
from trailmark.run_async import wait
from trailmark.runs.atomic_files import atomic_write
from trailmark.runs.store import Run, read_segment
from trailmark.score.base import filled
from trailmark.score.likelihood import TextScorer, after_markers
from trailmark.seats.model_names import locate
from trailmark.tasks.base import TaskSource, declared, draw_tasks
from trailmark.texts import encode
from trailmark.types import Episode, Player, Scored, Task

NAMES = ("start", "trained", "other-plan", "random-words", "no-plan", "gold")


class VrcliMethod(PolicyGradientMethod):
    Config = VrcliRecipe

    def __init__(self, config: VrcliRecipe, run: Run):
        super().__init__(config, run)
        judge = declared(self.source).judge
        if not isinstance(judge, LikelihoodJudge):
            raise RecipeError("method vrcli needs reward: {kind: likelihood, …}: its plans make a gold text likelier.")
        for key, given in (("readers", config.final.readers), ("plans", config.final.plans)):
            taken = {*NAMES, *(config.final.readers if key == "plans" else ())}
            if name := next((name for name in given if name in taken), None):
                raise RecipeError(f"final.{key}.{name}: the comparison has a row of this name already: choose another.")
        for task in self.compared():  # a template that a row cannot fill is found now, not at the end
            for template in config.final.plans.values():
                self.written(template, [nobody(task)])
        self.judge = judge.by_improvement()

    @classmethod
    def played_rows(cls, config: Any, source: TaskSource) -> list[Task]:
        final = config.final
        return [*super().played_rows(config, source), *draw_tasks(source, final.split, final.n, config.seed)]

    # -- the comparison --------------------------------------------------------------------------------------------

    def evaluations(self, step: int, last: bool) -> Sequence[Evaluation]:
        if not last:
            return (Evaluation("start", lambda: self.planned(0), moves=False),) if step == 0 else ()
        rows = {
            "trained": lambda: self.planned(step),
            "other-plan": lambda: self.instead(self.shifted),
            "random-words": lambda: self.instead(self.drawn_words),
            "no-plan": lambda: self.instead(lambda played: [""] * len(played)),
            "gold": lambda: self.instead(lambda played: [str(e.task.data[self.judge.config.gold]) for e in played]),
            **{name: partial(self.instead, partial(self.written, t)) for name, t in self.config.final.plans.items()},
            **{name: self.reader(model) for name, model in self.config.final.readers.items()},
        }
        return tuple(Evaluation(name, play) for name, play in rows.items())

    def compared(self) -> Sequence[Task]:
        final = self.config.final
        return draw_tasks(self.source, final.split, final.n, self.config.seed)

    def planned(self, version: int) -> list[Episode]:
        """Plans of the policy as it is now, paid by their improvement."""
        source = declared(self.source)
        before, source.judge = source.judge, self.judge
        try:
            return self.play(self.compared(), 1, self.config.seed + 1, "final:", version)
        finally:
            source.judge = before

    def instead(self, texts: Callable[[list[Episode]], list[str]]) -> list[Episode]:
        """The trained policy's plays with other plans, paid by their improvement."""
        played = read_segment(self.run.path / "evaluation" / "trained.jsonl")
        made = {k: self.with_text(e, text) for k, (e, text) in enumerate(zip(played, texts(played), strict=True))}
        first = {k: self.source.make().reset(e.task) for k, e in made.items()}
        wait(give_verdicts(made, first, self.judge, declared(self.source).judge_notes))
        return list(made.values())

    def with_text(self, e: Episode, text: str) -> Episode:
        """A play whose answer somebody else has written."""
        turn = e.turns[-1]
        tokens = tuple(encode(self.opened.tokenizer, text))
        zeros = (0.0,) * len(tokens)
        turn = replace(turn, tokens=tokens, logp=zeros, logq=zeros, text=text, action=text, reward=0.0, stop="stopped")
        info = {k: v for k, v in e.info.items() if k != "judge"}
        players = {name: Player("scripted", "a rule") for name in e.players}
        return replace(e, turns=(turn,), outcomes={s: Scored(0.0) for s in e.outcomes}, players=players, info=info)

    def reader(self, model: str) -> Callable[[], list[Episode]]:
        def read() -> list[Episode]:
            settings = self.judge.config.model or self.config.model
            found = ModelConfig.model_validate({"name": locate(model).folder, "dtype": settings.dtype})
            made = self.instead(lambda played: [""] * len(played))
            gains = self.judge.read_by(TextScorer(found), [e.task for e in made])
            return [self.with_reward(e, gain / 100) for e, gain in zip(made, gains)]

        return read

    def with_reward(self, e: Episode, reward: float) -> Episode:
        turns = (*e.turns[:-1], replace(e.turns[-1], reward=reward))
        return replace(e, turns=turns, outcomes={s: Scored(reward) for s in e.outcomes})

    # -- plans that explain less -----------------------------------------------------------------------------------

    def plan(self, e: Episode) -> str:
        return after_markers(e.turns[-1].text, self.judge.config.markers)

    def shifted(self, played: list[Episode]) -> list[str]:
        """The plan of the next row in an order drawn by seed."""
        return plans_of_others([e.task.id for e in played], [self.plan(e) for e in played], self.config.seed)

    def drawn_words(self, played: list[Episode]) -> list[str]:
        size = lambda e: len(words_of(self.plan(e)))
        return [words_at_random(information_of(e), size(e), self.config.seed, e.task.id) for e in played]

    def written(self, template: str, played: list[Episode]) -> list[str]:
        """The plans of `final.plans`: a template that is filled with the keys of each row."""
        return [filled(template, as_play(e, self.source.make().reset(e.task))) for e in played]

    # -- results ---------------------------------------------------------------------------------------------------

    @classmethod
    def train(cls, config: Any, run: Run, resume: bool = False) -> dict[str, float]:
        last = super().train(config, run, resume)
        markers = getattr(config.task.reward, "markers", [])
        rows = []
        files = {name: read_segment(run.path / "evaluation" / f"{name}.jsonl")
                 for name in (*NAMES, *config.final.plans, *config.final.readers)}  # fmt: skip
        gains = {name: improvements(played) for name, played in files.items()}
        common = [row for row in gains["trained"] if row in gains["other-plan"]]
        own = own_gain([gains["trained"][r] for r in common], [gains["other-plan"][r] for r in common])
        for name, played in files.items():
            found = numbers(played, markers) | (own if name == "trained" else {})
            rows += [{"arm": name, "metric": metric, "value": value} for metric, value in found.items()]
        means = {r["arm"]: r["value"] for r in rows if r["metric"] == "improvement"}
        if warning := not_about_the_row({**own, "improvement": means["trained"],
                                      "other_plan_improvement": means["other-plan"],
                                      "random_words_improvement": means["random-words"],
                                      "empty_improvement": means["no-plan"]}):  # fmt: skip
            print(f"warning: {warning}.", file=sys.stderr)
        atomic_write(run.path / "results.json", (json.dumps(rows, indent=1) + "\n").encode(), "results")
        return last


def improvements(played: Sequence[Episode]) -> dict[str, float]:
    """The improvement in percent of each row that has one."""
    return {e.task.id: 100 * e.outcome.reward for e in played if isinstance(e.outcome, Scored)}


def information_of(e: Episode) -> str:
    """What the policy knew, without the instruction."""
    return str(e.task.data.get("information") or e.task.data["prompt"])


def numbers(played: Sequence[Episode], markers: Sequence[str]) -> dict[str, float]:
    """Means over the plays that have a score."""
    scored = [(e, e.outcome.reward) for e in played if isinstance(e.outcome, Scored)]
    good = [e for e, _ in scored]
    plans = [words_of(after_markers(e.turns[-1].text, markers)) for e in good]
    known = [set(words_of(information_of(e))) for e in good]
    copied = [np.mean([w in k for w in p]) for p, k in zip(plans, known) if p]
    mean = lambda values: float(np.mean(values)) if len(values) else 0.0
    return {"improvement": 100 * mean([reward for _, reward in scored]), "words_in_prompt": mean(copied),
            "words": mean([len(p) for p in plans])}  # fmt: skip
