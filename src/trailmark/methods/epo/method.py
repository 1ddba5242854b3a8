"""EPO: a strategist learns, by reinforcement, to advise an agent that stays as it is.

At each turn the strategist S writes a short strategy a_t, and the agent acts on it. A judge names the turns whose
strategies decided a finished play. Each turn is then worth what follows from it, and S is trained on all its turns:

    L = - mean over trajectories of (1/T) sum_t w_t (1/k_t) sum_i log S(a_t,i | all before)

    config.py      the keys of recipes                     play.py     who speaks when, and what each is told
    judge.py       which turns were critical               shape.py    from marks and outcomes to weights
    data.py        files of weighted trajectories          rounds.py   collect, judge, shape, train, and again
    this file      training on such files

The paper's equations, and where they are:

    a_t = S(sys, G, h_<t, a_<t, x_t)           the strategist        `methods/epo/play.py:to_strategist`
    y_t = D(sys, G, h_<t, a_<=t, x_t)          the agent             `methods/epo/play.py:to_agent`
    both sides, the partner blind              dialogue              `methods/epo/play.py:dialogue`
    a thought before each action               web, household        `methods/epo/play.py:thought`
    the indexes of critical turns              process reward        `methods/epo/judge.py:CriticalTurns`
    points in the standing offer rose          judge by rule         `tasks/negotiation/deals.py:risen`
    r_t = 1 if critical, outcome if last       rewards of turns      `credit/marks.py:marked_rewards`
    G_t = sum_{k>=t} gamma^(k-t) r_k           returns               `credit/returns.py:discounted`
    w_t = G_t / max_j |G_j|, or others         weights               `credit/marks.py:turn_weights`
    w and 1/(T k_t) on tokens                  means                 `samples.py:build_samples`
    -(w log p), summed                         loss                  `objectives/weighted_logp.py:WeightedLogp.terms`
    leave one out at each turn                 unbiased              `credit/groups.py:leave_one_out_turns`
    min(rho w, clip(rho) w), rho of a turn     turn-level PPO        `objectives/clipped.py:Clipped.terms`
    collect, judge, shape, train, again        iterative self-play   `methods/epo/rounds.py:EpoRoundsMethod`

`objective: epo` is the loss above. It is biased where the strategist's words decide when a play stops, because 1/T and
1/k_t depend on later choices (`bench/turn_credit.py` prints how much). `objective: unbiased` sums over turns and tokens
and divides by a constant; with weights of kind `turns` or `group` and gamma 1 its expected gradient is that of the
expected outcome. `objective: ppo` clips one ratio a turn.

What differs from the reference: the loss is a mean over the trajectories of an optimiser step, not a sum over a
micro-batch, so the batch size changes no learning rate. Weights stay with their turns by construction: no run of labels
is counted, so any template, a cut conversation and one of a hundred turns keep them. A file with an answer without a
score is refused here; method `sft` imitates it. The judge changes nothing in the data. Log-probs are those of the model
at temperature 1 (`epo`), or of the law that the turns were drawn with (`unbiased`, `ppo`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trailmark.errors import DataError, RecipeError
from trailmark.learn.learner import Learner, Update
from trailmark.learn.watch import summary
from trailmark.memory import need_rows
from trailmark.methods.base import Method, ModelInMemory, name_in_run
from trailmark.methods.batches import Batches
from trailmark.methods.collect import collect_starts
from trailmark.methods.epo.config import EpoRecipe
from trailmark.methods.epo.data import Trajectories, samples_of, sources_of
from trailmark.methods.epo.play import ADVISERS, protocol_of
from trailmark.models.load import load_model
from trailmark.objectives.base import Objective
from trailmark.objectives.clipped import Clipped
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.rollout.play import Protocol, play, start_all
from trailmark.runs.data_files import must_be_file
from trailmark.runs.store import Run
from trailmark.samples import Mean, scored
from trailmark.seats.config import AnyKind, LocalSeat, check_seats, filled, trained_seats
from trailmark.seats.open_seats import OpenSeats
from trailmark.tasks import keep_judge
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Episode, Sample, Task


class EpoMethod(Method):
    Config, self_play = EpoRecipe, True

    def __init__(self, config: EpoRecipe, run: Run):
        if not config.files and config.dataset is None:
            raise RecipeError("data: name a file of trajectories whose turns have a score (or dataset: NAME)")
        need_rows(config.batch, "batch")
        self.source = self.open_source(config) if config.task else None
        policy = load_model(config.model)
        policy.name = name_in_run(policy.name, run)
        self.max_len = min(policy.context, config.max_len or policy.context)
        sources = sources_of(config.files, config.dataset, config.dataset_dir, config.max_samples)
        self.rows = Trajectories(sources, config.format, policy.tokenizer, config.learn, self.max_len, config.skip_zero)
        self.batches = Batches(self.rows, config.batch, config.seed, config.steps, config.epochs)
        super().__init__(config.model_copy(update={"steps": self.batches.steps}), run)
        self.learner = Learner({"policy": policy}, config.learner, total=self.config.steps)
        self.objective = objective_of(config)
        self.opened = None
        if self.source is not None:
            keep_judge(self.source, run.path)
            self.opened = opened_seats(config, self.source, policy)

    def updates(self, step: int) -> Iterator[Update]:
        yield Update(self.unscored_samples(step), self.objective)

    def unscored_samples(self, step: int) -> list[Sample]:
        c = self.config
        mean: Mean = "constant" if c.objective == "unbiased" else "turn"
        samples = samples_of(self.batches.take(step), mean, c.sampling.max_tokens)
        if c.objective == "ppo" and any(np.isnan(s.streams["old"][s.streams["weight"] != 0]).any() for s in samples):
            raise DataError("objective ppo: a turn has no log-probs of its own: it was not drawn by a model of ours.")
        return samples

    def metrics(self) -> Mapping[str, float]:
        return {"rows": len(self.rows), **self.rows.counts}

    def evaluate(self, step: int) -> Mapping[str, float]:
        if self.opened is None or self.source is None:
            return {}
        self.opened.publish(step)
        episodes = self.keep_plays(step, lambda: plays_of(self.config, self.source, self.opened))
        good, dropped = scored(episodes)
        return {**summary(good), **dropped}

    # -- about a run ----------------------------------------------------------------------------------------------

    @classmethod
    def seats_of(cls, config: Any) -> dict[str, AnyKind]:
        """Without a world, the strategist alone."""
        given = config.seats or {"strategist": LocalSeat(trained=True)}
        check_seats(given, shared=True)
        if config.task is not None and "agent" not in given:
            raise RecipeError("seats: there is nobody to advise: add a seat agent, such as {kind: http, …}.")
        known = [*ADVISERS, *ADVISERS.values()]
        if strange := next((n for n in given if n not in known), None):
            raise RecipeError(f"seats.{strange}: nobody asks this seat; EPO's seats are {', '.join(known)}.")
        if wrong := next((n for n in trained_seats(given) if n not in ADVISERS.values()), None):
            raise RecipeError(f"seats.{wrong}.trained: EPO trains strategists alone; agents stay as they are.")
        return filled(given, config.sampling, config.engine)

    @classmethod
    def protocol(cls, config: Any, source: TaskSource) -> Protocol:
        return protocol_of(config.strategy, config.prompts, source)

    @classmethod
    def check_asked(cls, config: Any, source: TaskSource) -> None:
        """A partner and its strategist are asked only in a world of two seats."""
        first = source.make().reset(draw_tasks(source, "train", 1, config.seed)[0])
        asked = ADVISERS if first.seat else {"agent": "strategist"}
        for name in cls.seats_of(config):
            if name not in asked and name not in asked.values():
                raise RecipeError(
                    f"seats.{name}: task '{source.name}' has no seat for a partner: leave it out, or choose a world of "
                    "two seats (negotiation: partner: seat)."
                )

    @classmethod
    def check(cls, config: Any) -> list[str]:
        for path in config.files:
            must_be_file(Path(path), "data")
        return [f"data: {path}" for path in config.files] or [f"dataset: {config.dataset}"]

    @classmethod
    def models_in_memory(cls, config: Any) -> list[ModelInMemory]:
        """The strategist, and the frozen models beside it."""
        engine = config.engine if config.task else None
        found = [ModelInMemory("policy", config.model, config.learner.optim, engine)]
        for name, seat in (cls.seats_of(config) if config.task else {}).items():
            if isinstance(seat, LocalSeat) and not seat.trained and seat.model is not None:
                found.append(ModelInMemory(name, seat.model, None, seat.engine))
        return found


def objective_of(config: EpoRecipe) -> Objective:
    if config.objective == "ppo":
        return Clipped(ratio="turn", low=config.clip, high=config.clip)
    return WeightedLogp(law=config.objective == "unbiased")


def opened_seats(config: Any, source: TaskSource, policy: Any) -> OpenSeats:
    """All seats; the strategists are the model that is trained."""
    seats = EpoMethod.seats_of(config)
    EpoMethod.check_asked(config, source)
    opened = OpenSeats(seats, dict.fromkeys(trained_seats(seats), policy), config.seed)
    opened.bind(source)
    return opened


def plays_of(
    config: Any, source: TaskSource, opened: OpenSeats, strategy: str | None = None, path: Path | None = None
) -> list[Episode]:
    """The plays of an evaluation. `strategy` takes the place of the recipe's; in `path` each is kept as it ends."""
    tasks: Sequence[Task] = draw_tasks(source, config.eval.split, config.eval.n, config.seed)
    protocol = protocol_of(strategy or config.strategy, config.prompts, source)
    how = {"seed": config.seed + 1, "prefix": "eval:"}
    if path is not None:
        starts = start_all(tasks, 1, **how)
        return collect_starts(path, source, starts, opened.seats, protocol, failures=config.failures)
    return play(source, tasks, opened.seats, protocol, failures=config.failures, **how)
