"""A method of one's own: an adviser learns to write hints for an actor, which is somebody else's model on a server.

    stage lessons   written hints become rows to imitate, with the very prompts that play will use
    stage policy    the adviser imitates them: an ordinary run of method `sft`, with its own learner and schedule
    the run         the adviser writes a hint, the actor answers with it, a function judges the answer; of the hints for
                    one prompt, those that earned more than the others are made more likely (REINFORCE, leave one out)

docs/write-a-method.md walks through this file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from trailmark.config import Config, EngineConfig, LearnerConfig, RunConfig, SamplingConfig
from trailmark.credit.groups import leave_one_out
from trailmark.credit.turns import turn_returns
from trailmark.errors import RecipeError, TaskError
from trailmark.formats.conversations import count_rows, read_rows
from trailmark.learn.learner import Learner, Update
from trailmark.learn.loop import Evaluation
from trailmark.learn.watch import spread, summary
from trailmark.methods.base import Method
from trailmark.methods.configs import SftRecipe, TaskConfig
from trailmark.methods.pipeline import recipe_stage, training_stage
from trailmark.objectives.weighted_logp import WeightedLogp
from trailmark.rollout.play import Desk, Protocol, play
from trailmark.runs.stages import Stage
from trailmark.runs.store import Run, write_segment
from trailmark.samples import annotate_turns, build_samples, scored
from trailmark.seats.config import AnyKind, SeatConfig, seats_section, trained_seats
from trailmark.seats.open_seats import OpenSeats
from trailmark.tasks import get_task, keep_judge
from trailmark.tasks.base import TaskSource, draw_tasks
from trailmark.types import Annotation, Episode, Task

ASK = "{prompt}\nA hint: "  # what the adviser is shown


class Imitation(Config):
    steps: PositiveInt = Field(20, description="steps on written hints")
    batch: PositiveInt = Field(4, description="hints in one step")
    learner: LearnerConfig = Field(LearnerConfig(), description="how they are learnt")


class HintRecipe(RunConfig):
    task: TaskConfig = Field(TaskConfig(name="prompts"), description="the prompts, and who judges the answers")
    seats: dict[str, SeatConfig] = seats_section("adviser, which is trained, and actor")
    hints: str = Field(description="JSONL of prompt and response: hints to imitate")
    imitation: Imitation = Field(Imitation(), description="the first stage of training")
    prompts_per_step: PositiveInt = Field(4, description="prompts in one step")
    n: PositiveInt = Field(4, ge=2, description="hints for each prompt")
    sampling: SamplingConfig = Field(SamplingConfig(), description="how tokens are drawn, where a seat does not say")
    engine: EngineConfig = Field(EngineConfig(), description="the adviser's engine")


async def advised(desk: Desk) -> None:
    """The adviser writes a hint. The actor is shown the prompt and the hint, and what it says is the answer."""
    prompt = desk.observation.text
    hint = await desk.ask("adviser", text=ASK.format(prompt=prompt))
    question = {"role": "user", "content": f"{prompt}\nA hint: {hint.text}"}
    answer = await desk.ask("actor", messages=[question])
    await desk.act(answer.text)


def write_lessons(hints: str, folder: Path) -> dict[str, int]:
    """Each written hint behind the prompt that the adviser is shown in play."""
    pairs = [(messages[0]["content"], messages[-1]["content"]) for _, messages in read_rows(hints)]
    rows = [{"prompt": ASK.format(prompt=prompt), "response": hint} for prompt, hint in pairs]
    (folder / "lessons.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"rows": len(rows)}


class HintMethod(Method):
    Config = HintRecipe
    staged = ("hints", "imitation")

    @classmethod
    def check(cls, config: HintRecipe) -> list[str]:
        return [f"hints: {count_rows(config.hints)} to imitate for {config.imitation.steps} steps"]

    @classmethod
    def seats_of(cls, config: HintRecipe) -> dict[str, AnyKind]:
        seats = super().seats_of(config)
        if set(seats) != {"adviser", "actor"} or trained_seats(seats) != ["adviser"]:
            raise RecipeError("seats: this method needs 'adviser', which is trained, and 'actor', which is not.")
        return seats

    @classmethod
    def protocol(cls, config: HintRecipe, source: TaskSource) -> Protocol:
        return advised

    @classmethod
    def stages(cls, config: HintRecipe, run: Run) -> list[Stage]:
        lessons, imitation, write = run.path / "lessons", config.imitation, partial(write_lessons, config.hints)
        recipe = SftRecipe(
            method="sft", name="imitation", seed=config.seed, model=config.model, chat=False, steps=imitation.steps,
            batch=imitation.batch, learner=imitation.learner, data=str(lessons / "lessons.jsonl"),
        )  # fmt: skip
        return [
            recipe_stage("lessons", write, config, run.path, inputs={"hints": config.hints}),
            training_stage("policy", recipe, run.path),
        ]

    def __init__(self, config: HintRecipe, run: Run):
        super().__init__(config, run)
        self.source = get_task(config.task.name, **config.task.options)
        keep_judge(self.source, run.path)
        adviser = self.load_first_model()
        self.opened = OpenSeats(self.seats_of(config), {"adviser": adviser}, config.seed)
        self.learner = Learner({"policy": adviser}, config.learner, total=config.steps)
        self.step_metrics: dict[str, float] = {}

    def play(self, tasks: Sequence[Task], version: int, prefix: str, **more: Any) -> list[Episode]:
        self.opened.publish(version)
        return play(self.source, tasks, self.opened.seats, advised, prefix=prefix, **more)

    def updates(self, step: int) -> Iterator[Update]:
        c, notes = self.config, list[Annotation]()
        tasks = draw_tasks(self.source, "train", c.prompts_per_step, c.seed * 1_000_003 + step)
        episodes = self.play(tasks, step - 1, f"{step}:", n=c.n, seed=c.seed, notes=notes)
        write_segment(self.run.episodes_dir, step, episodes)
        good, dropped = scored(episodes)
        if not good:
            raise TaskError(f"step {step}: no episode was scored; the first: {episodes[0].outcome}")
        earned = [turn_returns(e, "adviser")[0] for e in good]  # the answer was paid, and the hint led to it
        better = leave_one_out(earned, [e.group for e in good])
        samples = build_samples(good, "adviser", {"advantage": {e.id: [a] for e, a in zip(good, better)}})
        notes += annotate_turns(samples, good, "adviser", "advantage", "against the other hints")
        self.run.annotate(step, notes)
        self.step_metrics = {**summary(good), **spread(good), **dropped}
        yield Update(samples, WeightedLogp(gap=True))

    def metrics(self) -> Mapping[str, float]:
        return self.step_metrics

    def evaluate(self, step: int) -> Mapping[str, float]:
        c = self.config
        episodes = self.play(draw_tasks(self.source, c.eval.split, c.eval.n, c.seed), step, "eval:", seed=c.seed + 1)
        write_segment(self.run.path / "evaluation", step, episodes)
        good, dropped = scored(episodes)
        return {**summary(good), **dropped}

    def evaluations(self, step: int, last: bool) -> list[Evaluation]:
        every = lambda: self.play(draw_tasks(self.source, "all", None, 0), step, "all:", seed=self.config.seed + 1)
        return [Evaluation("all-prompts", every)] if last else []
