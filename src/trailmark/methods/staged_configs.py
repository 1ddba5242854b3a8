"""The recipes of methods that train several times, each time as a stage: Reflect-RL, rounds of OREO, LPR. Those of one
training: `configs.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trailmark.config import (
    Config,
    EngineConfig,
    NamesFile,
    NamesModel,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    Seed,
    resolve,
)
from trailmark.errors import RecipeError
from trailmark.methods import configs
from trailmark.methods.configs import OreoRecipe, ReadConfig, TaskConfig
from trailmark.score.classes import Over
from trailmark.seats.config import SeatConfig, seats_section
from trailmark.steps import Split

Head = Literal["listed", "alphabet", "vocabulary"]
Shuffle = Literal["none", "permute", "alphabet"]

# --- reflect ----------------------------------------------------------------------------------------------------


class ReflectCritic(Config):
    kind: Literal["none", "shared", "separate"] = Field(
        "none",
        description="shared: a head on the policy's model, whose gradient stops at the head; separate: a second model",
    )
    head: Literal["linear", "mlp"] = Field("linear", description="the network that reads the last token's hidden state")
    every: PositiveInt = Field(5, description="policy updates between two trainings of the critic")
    passes: PositiveInt = Field(5, description="passes over the data in one training")
    optim: OptimConfig = Field(OptimConfig(lr=2e-4), description="the critic's optimiser and schedule")


class RlConfig(Config):
    algorithm: Literal["pg", "ppo"] = Field("pg", description="pg: policy gradient; ppo: clipped surrogate")
    starts: PositiveInt = Field(32, description="episodes of one step")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus on the label")
    baseline: Literal["none", "batch"] = Field(
        "none", description="what is subtracted from the return if there is no critic: nothing, or the batch mean"
    )
    clip: float = Field(0.1, gt=0, lt=1, description="the ratio is clipped to 1 - clip and 1 + clip (ppo)")
    epochs: PositiveInt = Field(3, description="optimiser steps on one batch (ppo)")
    critic: ReflectCritic = Field(ReflectCritic(), description="the model that estimates the value of a state")
    replay: NonNegativeInt = Field(50, description="size of the replay memory of successful episodes; 0: no replay")
    replay_batch: PositiveInt = Field(16, description="replayed episodes in one step")


class CurriculumConfig(Config):
    kind: Literal["none", "modes", "depth"] = Field(
        "none",
        description="modes: the taxi's pickup, dropoff and full, a third of the steps each; depth: by target depth",
    )
    index: NonNegativeInt | None = Field(None, description="train on this level only; none: all levels in order")
    merge_first_two: bool = Field(False, description="merge the two shallowest levels (depth)")
    keep: PositiveInt = Field(3, description="most levels; deeper ones are merged into the last (depth)")


class TeacherConfig(Config):
    name: str = Field("bfs", description="who writes reflections and actions: 'bfs' computes the taxi's shortest path")
    path: Annotated[str | None, NamesFile()] = Field(
        None, description="the folder that teacher 'file' reads, written by `trailmark data`"
    )
    starts: PositiveInt = Field(40, description="starts that the teacher plays; with curriculum modes: of each mode")
    perturb: float = Field(
        0.5, ge=0, le=1, description="share of random moves, so that lessons also show how to recover"
    )
    label: Literal["oracle", "behaviour"] = Field("oracle", description="which action is imitated")


class ImitationConfig(Config):
    reflector: NonNegativeInt = Field(200, description="training steps on reflections; 0: skip this stage")
    policy: NonNegativeInt = Field(100, description="training steps on actions; 0: skip this stage")
    epochs: PositiveInt | None = Field(
        None, description="passes over the lessons; replaces the steps of each stage that is not skipped"
    )
    batch: PositiveInt = Field(32, description="lessons in one step")
    optim: OptimConfig = Field(OptimConfig(lr=2e-3), description="optimiser and schedule of both stages")


class LoadConfig(Config):
    """Players from earlier runs. Each is a run, a checkpoint or a model folder."""

    policy: Annotated[str | None, NamesModel("policy", stored=True)] = Field(
        None, description="the policy to start from; none: model"
    )
    reflector: Annotated[str | None, NamesModel("reflector", stored=True)] = Field(
        None, description="a trained reflector; none: model"
    )


class ReflectFinal(Config):
    """The evaluations after imitation and at the end. Their episodes are kept by name."""

    split: str | None = Field(None, description="split to play; none: 'all' if the task has it, else eval.split")
    n: PositiveInt | None = Field(None, description="starts of each level; none: all")
    samples: PositiveInt = Field(1, description="plays of each start")
    references: bool = Field(False, description="also play a random player, and the oracle if the world has one")


class PlayersRecipe(RunConfig):
    """The keys that imitation and play of Reflect-RL share."""

    task: TaskConfig = Field(TaskConfig(), description="the world")
    reflect: bool = Field(True, description="use the reflector; false: the policy alone")
    load: LoadConfig = Field(LoadConfig(), description="players from earlier runs")
    teacher: TeacherConfig = Field(TeacherConfig(), description="who shows how")
    curriculum: CurriculumConfig = Field(
        CurriculumConfig(), description="the order in which parts of the world are played"
    )
    head: Head = Field(
        "listed", description="the tokens that a label is sampled from: listed labels, all labels, all tokens"
    )
    labels: Literal["alphabet", "all"] = Field(
        "alphabet",
        description="alphabet: the labels that are one token; all: the other labels become new tokens",
    )
    shuffle: Shuffle = Field(
        "none", description="rename labels at each decision: permute the listed ones, or draw from the whole alphabet"
    )
    reflect_prob: float = Field(
        1.0, ge=0, le=1, description="share of training decisions that get a reflection; the others get none"
    )
    thought: PositiveInt = Field(32, description="most tokens of a reflection")
    instruction: str = Field("", description="text before the prompts of both players, if there is a reflector")
    final: ReflectFinal = Field(ReflectFinal(), description="evaluation after imitation and at the end")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")

    @model_validator(mode="after")
    def _labels(self) -> PlayersRecipe:
        if self.labels == "all" and self.model.quant != "none":
            raise ValueError(
                "labels: all changes the model's embedding, which is not possible in a quantised model: set "
                "model.quant to none"
            )
        return self


class ReflectRecipe(PlayersRecipe):
    steps: NonNegativeInt = Field(100, description="steps of play; 0: imitation alone")
    epochs: PositiveInt | None = Field(None, description="passes over the starts of the task, in play; replaces steps")
    sft: ImitationConfig = Field(ImitationConfig(), description="imitation: the stages before play")
    rl: RlConfig = Field(RlConfig(), description="reinforcement learning; its optimiser is learner.optim")

    @model_validator(mode="after")
    def _fits(self) -> ReflectRecipe:
        if self.rl.algorithm == "ppo" and self.rl.critic.kind == "none" and self.rl.baseline == "none":
            raise ValueError("rl.algorithm ppo needs rl.critic.kind shared or separate (or rl.baseline batch)")
        if self.steps == 0 and not self.sft.policy and not (self.reflect and self.sft.reflector):
            raise ValueError("steps, sft.reflector and sft.policy are 0: there is nothing to do")
        return self


class ImitationRecipe(PlayersRecipe):
    """The recipe of one imitation stage. Method `reflect` writes it."""

    seat: Literal["reflector", "policy"] = Field("policy", description="who imitates")
    batch: PositiveInt = Field(32, description="lessons in one step")
    epochs: PositiveInt | None = Field(None, description="passes over the lessons; replaces steps")


# --- oreo_rounds ------------------------------------------------------------------------------------------------


class CollectConfig(Config):
    starts: PositiveInt = Field(64, description="starts of one round")
    n: PositiveInt = Field(10, description="episodes of each start; with balanced: the most")
    balanced: PositiveInt | None = Field(
        None, description="keep at most this many right and this many wrong episodes of each start; none: keep all"
    )
    split: str = Field("train", description="of the task")
    sampling: SamplingConfig = Field(SamplingConfig(max_tokens=256), description="how the policy draws")


class RoundsRecipe(OreoRecipe):
    objective: Literal["oreo", "rejection", "dpo", "ipo", "kto"] = Field(
        "oreo", description="how a round is trained: oreo, or an objective of method preference"
    )
    beta: float | None = Field(None, gt=0, description="temperature; none: 0.03 for oreo, 0.1 for dpo, ipo and kto")
    pairs: PositiveInt | None = Field(None, description="most pairs of one group (dpo, ipo); none: all")
    desirable: float = Field(1.0, ge=0, description="weight of successes (kto)")
    undesirable: float = Field(1.0, ge=0, description="weight of failures (kto)")
    data: Annotated[str | list[str], NamesFile()] = Field("", description="not used: each round collects its own")
    format: str = Field("episodes", description="format of the collected episodes")
    steps: PositiveInt = Field(3, description="rounds")
    training: NonNegativeInt = Field(
        100, description="optimiser steps of a round (epochs, if given, count instead); 0: only collect"
    )
    collect: CollectConfig = Field(CollectConfig(), description="how the episodes of a round are collected")
    task: TaskConfig = Field(TaskConfig(), description="the world")
    anchor: Literal["previous", "start"] = Field("previous", description="the reference of a round")
    critic_from: Literal["previous", "fresh"] = Field("previous", description="where a round's value starts")
    learn_from: Literal["new", "all"] = Field(
        "new", description="the episodes that a round learns from: new, or all so far"
    )

    @model_validator(mode="after")
    def _has_a_value(self) -> RoundsRecipe:
        if self.final.search and self.objective != "oreo":
            raise ValueError(f"final.search needs a value, and objective {self.objective} learns none")
        return self


# --- lpr ----------------------------------------------------------------------------------------------------------


class LprGiven(Config):
    """Files from elsewhere in the place of what a stage would make, in the first round. The formats are those of the
    reference implementation (docs/lpr.md), or episodes of ours (*.jsonl)."""

    solutions: str | None = Field(None, description="records {text, label, response, pred, id}")
    states: str | list[str] | None = Field(None, description="such records with inter_states; one file or its shards")
    completions: str | None = Field(None, description="records of completed states, with ids QUESTION_STATE")
    scores: str | None = Field(None, description="records {index, response, ending_logits}")
    pairs: str | None = Field(None, description="records {chosen, reject, id}")


class LprTeacher(Config):
    """Who writes the first solutions: the seat `teacher`, or the task itself. The right ones are imitated."""

    gold: bool = Field(False, description="the task's own worked solutions, in the place of a seat `teacher`")
    starts: PositiveInt | None = Field(None, description="questions; none: all of the split")
    n: PositiveInt = Field(1, description="solutions of each")
    options: Annotated[dict[str, Any], NamesFile()] = Field(
        {}, description="options of the task for the teacher alone, such as shots: 1; the policy is not shown these"
    )
    sampling: SamplingConfig | None = Field(None, description="how they are drawn; none: as its seat says")
    replay: bool = Field(
        False, description="imitate them again beside the policy's best answers (preference.objective: rejection)"
    )


class LprSample(Config):
    """Solutions of the policy."""

    starts: PositiveInt | None = Field(None, description="questions; none: all of the split")
    n: PositiveInt = Field(10, description="solutions of each question")
    split: str = Field("train", description="of the task")
    sampling: SamplingConfig | None = Field(None, description="how they are drawn; none: as the recipe's sampling")
    models: list[str] = Field(
        [], description="sample these models, too: runs, checkpoints, folders (a checkpoint-* of a run each, say)"
    )


class LprClean(Config):
    """Which solutions are kept, and how they are cut into steps."""

    split: Split = Field("newline", description="how a solution is cut into steps")
    react: Literal["any", "finish", "strict"] = Field(
        "any",
        description="finish: one line with Finish[The answer is …], the last; strict: lines that name no step are also "
        "put behind the one before, and short steps are left out",
    )
    clean: Annotated[str | None, NamesFile(function=True)] = Field(
        None, description="package.module:function or file.py:function: text -> cleaned text, or None to drop it"
    )
    min_steps: NonNegativeInt = Field(0, description="shorter solutions are dropped")
    distinct: bool = Field(False, description="of equal solutions of a question only the first is kept")


class LprStates(Config):
    """Which states (beginnings of solutions that end with a step) are completed. The last step is never one."""

    start: float = Field(0.2, ge=0, le=1, description="share of the steps from which on states are taken")
    end: float = Field(1.0, ge=0, le=1, description="share of the steps up to which they are taken")
    ratio: float = Field(0.4, ge=0, le=1, description="probability with which each of them is taken")
    min_steps: NonNegativeInt = Field(0, description="solutions of fewer steps have no states")
    types: list[str] | None = Field(None, description="only states that end with a step of these types; none: all")
    remove_action: bool = Field(False, description="no states that end with an Action")
    shards: PositiveInt = Field(1, description="files over which the questions are spread")


class LprComplete(Config):
    """How states are completed."""

    k: PositiveInt = Field(3, description="completions of a state; its value is how many of them are right")
    sampling: SamplingConfig | None = Field(None, description="how they are drawn; none: as the recipe's sampling")
    shards: list[NonNegativeInt] | None = Field(None, description="only states of these shards; none: all")
    duplicates: Literal["keep", "discard"] = Field("keep", description="states two of whose completions are equal")
    min_chars: NonNegativeInt = Field(
        0, description="states whose last step says less than so many characters behind its name are discarded"
    )


class LprLabels(Config):
    """What the process reward model learns from."""

    full: bool = Field(True, description="whole solutions, too: the best class if right, else class 0")
    dedupe: bool = Field(True, description="equal texts of a question are one example; different values are averaged")
    balance: bool = Field(False, description="as many examples of right solutions as of wrong ones")
    binary: bool = Field(False, description="two classes: some completion is right, or none")
    replay: float = Field(0.0, ge=0, le=1, description="share of earlier examples that are learnt again")
    replay_data: list[str] = Field([], description="files of earlier examples; those of earlier rounds are added")
    dev_shards: list[NonNegativeInt] = Field([], description="shards that are held out to evaluate on")


class LprRead(ReadConfig):
    """How a solution's reward is read off the scores of its steps."""

    classes: list[NonNegativeInt] | None = Field(
        None, description="the classes whose probabilities are summed; none: two or more right completions"
    )
    over: Over = Field("product", description="one number over all steps")


class LprAccept(Config):
    """Right answers are accepted by chance in place of a margin."""

    beta: float = Field(0.5, gt=0, description="temperature: small takes the best ones, large takes any")
    ratio: float = Field(0.5, gt=0, le=1, description="share of the right answers that are accepted")


class LprStatePairs(Config):
    best_of: PositiveInt = Field(10, description="states of a question that are chosen")
    ratio: float | None = Field(None, gt=0, description="most of them for each pair of whole answers; none: all")
    margin: float = Field(0.5, ge=0, description="a chosen one is worth more than the other by more than this")


class LprStepPairs(Config):
    by: Literal["outcome", "score"] = Field(
        "outcome", description="a right completion above a wrong one, or by the score of the step"
    )
    margin: float = Field(0.5, ge=0, description="of scores")
    whole: bool = Field(False, description="train the whole completion, in place of its first step alone")


class LprValuePairs(Config):
    """Pairs of states by how many of their completions are right, without a reward model."""

    diff: float = Field(1.0, gt=0, description="the chosen state has at least so many more right completions")
    decay: float = Field(1.0, gt=0, le=1, description="the difference counts decay^steps where states end steps apart")
    max_gap: float = Field(1.0, ge=0, le=1, description="most difference of the shares of a solution that they are")
    floor: NonNegativeInt | None = Field(
        None, description="a state behind one with so few right completions is worth no more than it; none: as it is"
    )
    clip: PositiveInt | None = Field(None, description="steps from this number on count as this one; none: no limit")
    most: PositiveInt | None = Field(None, description="rejected states of a chosen one, the best first; none: all")
    same: float | None = Field(
        None,
        gt=0,
        le=1,
        description="steps of a question with this cosine or more are one: they share the mean of their values, and "
        "without any they have the mean of what is behind them; none: every state for itself",
    )
    encoder: Annotated[str | None, NamesModel()] = Field(
        None, description="the model whose hidden states are the vectors of steps (same); none: the policy"
    )


class LprPairs(Config):
    """Which pairs are made."""

    process: bool = Field(True, description="rank by process; false: every right answer with every wrong one")
    best_of: PositiveInt | None = Field(10, description="right answers of a question that are chosen; none: all")
    max_wrong: PositiveInt | None = Field(10, description="wrong answers of a question, the hardest first; none: all")
    margin: float = Field(0.5, ge=0, description="a right answer above another is worth more by more than this")
    margins: dict[str, float] = Field(
        {}, description="other margins for questions of a type or data set, such as {gsm8k: 0.5, math: 0.3}"
    )
    right_pairs: Literal["after", "before", "only", "none"] = Field(
        "after", description="pairs of two right answers: behind the others, before them, nothing else, or none"
    )
    up_sampling: PositiveInt = Field(1, description="how often pairs of two right answers are repeated")
    all_right: bool = Field(False, description="any right answer may be above another, not the chosen ones alone")
    among_wrong: bool = Field(False, description="wrong answers are ranked among each other, too")
    drop_losers: bool = Field(False, description="a right answer that loses to another is not set against wrong ones")
    reject_surplus: bool = Field(False, description="right answers that were not chosen are rejected like wrong ones")
    hard_only: bool = Field(False, description="right answers are compared only where some answer is wrong")
    accept: LprAccept | None = Field(None, description="accept right answers by chance, in place of the margin")
    min_right_steps: NonNegativeInt = Field(0, description="shorter right answers take no part")
    min_wrong_steps: NonNegativeInt = Field(0, description="shorter wrong answers take no part")
    exclude: Annotated[str | None, NamesFile()] = Field(
        None, description="JSON list of the questions of which no two right answers are compared"
    )
    states: LprStatePairs | None = Field(None, description="also pairs of states")
    steps: LprStepPairs | None = Field(None, description="pairs of steps behind one state, in the place of all others")
    values: LprValuePairs | None = Field(None, description="pairs of states by value, in the place of all others")
    min_chosen: float | None = Field(None, description="chosen answers with a lower reward make no pair; none: any")
    max_rejected: float | None = Field(None, description="rejected ones with a higher reward make no pair; none: any")
    aliased: bool = Field(
        False, description="all pairs of a question become its last one, as in the reference implementation"
    )
    seed: Seed = Field(0, description="of what is accepted by chance")


class LprWorsen(Config):
    """Right solutions that the seat `worsener` makes worse: each is the rejected side of a pair with what it was."""

    n: PositiveInt = Field(1, description="worse versions of each right solution")
    most: PositiveInt | None = Field(None, description="right solutions of a question that are made worse; none: all")
    instruction: str = Field(
        "Below are a question and a solution of it that is right. Write the solution again with one mistake in its "
        "reasoning that is easy to overlook, and with what follows from the mistake. Keep the form of the solution. "
        "Write nothing else.",
        min_length=1,
        description="what the worsener is told before the question and the solution",
    )
    sampling: SamplingConfig | None = Field(None, description="how they are drawn; none: as its seat says")


class LprRecipe(RunConfig):
    """The road: solutions, states, completions, values, reward model, scores, pairs, and what is trained on them."""

    steps: PositiveInt = Field(1, description="rounds")
    task: TaskConfig = Field(TaskConfig(name="arith"), description="the questions")
    seats: dict[str, SeatConfig] = seats_section("`policy` writes solutions and completions, `teacher` the first ones")
    sampling: SamplingConfig = Field(SamplingConfig(max_tokens=256), description="how tokens are drawn")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")
    given: LprGiven = Field(LprGiven(), description="files from elsewhere")
    teacher: LprTeacher = Field(LprTeacher(), description="the first solutions, where there is a seat `teacher`")
    sft: dict[str, Any] | None = Field(None, description="imitation of the teacher: keys of method preference")
    sample: LprSample = Field(LprSample(), description="solutions")
    clean: LprClean = Field(LprClean(), description="which are kept")
    states: LprStates = Field(LprStates(), description="states")
    complete: LprComplete = Field(LprComplete(), description="completions")
    labels: LprLabels = Field(LprLabels(), description="examples for the reward model")
    prm: dict[str, Any] = Field({}, description="the reward model's training: keys of method reward_model")
    read: LprRead = Field(LprRead(), description="rewards of solutions")
    pairs: LprPairs = Field(LprPairs(), description="pairs")
    worsen: LprWorsen | None = Field(None, description="also pairs with worse versions, by the seat `worsener`")
    preference: dict[str, Any] | None = Field({}, description="keys of method preference; none: no such training")
    rl: dict[str, Any] | None = Field(None, description="keys of method step_rl; none: no such training")

    @field_validator("sft", "preference", "prm", "rl")
    @classmethod
    def _sections(cls, v: dict[str, Any] | None, info: Any) -> dict[str, Any] | None:
        """Each is checked as the recipe that its training will be."""
        if v is None:
            return None
        kind = {"prm": "reward_model", "rl": "step_rl"}.get(info.field_name, "preference")
        filled: dict[str, Any] = {"method": kind} | ({} if kind == "step_rl" else {"data": "", "format": "episodes"})
        filled |= {"task": {"name": "arith"}} if kind == "preference" else {}  # lpr sets the recipe's own
        ours = {"method", "data", "format", "model", "out", "name", "seed", "seat", "pair_file", "task"}
        ours |= {"outputs", "label"} if kind == "reward_model" else set()
        if own := sorted(set(v) & ours):
            why = " (from complete.k and labels.binary)" if own[0] == "outputs" else ""
            raise ValueError(f"key '{own[0]}' is set by lpr itself{why}: leave it out")
        if kind == "step_rl" and isinstance(v.get("rewards"), dict):  # its reward model is that of the round
            filled["rewards"] = {"model": "prm", **v["rewards"]}
        try:
            resolve({**v, **filled}, configs.RECIPES[kind])
        except RecipeError as e:
            raise ValueError(str(e).replace("recipe: ", "").replace("\n", "; ")) from e
        return v

    @model_validator(mode="after")
    def _fits(self) -> LprRecipe:
        if self.pairs.steps is not None and self.pairs.values is not None:
            raise ValueError("pairs.steps and pairs.values both take the place of all other pairs: leave one out")
        if self.teacher.replay and (self.preference or {}).get("objective") != "rejection":
            raise ValueError("teacher.replay belongs to preference.objective rejection")
        if self.teacher.replay and not (self.teacher.gold or "teacher" in self.seats):
            raise ValueError("teacher.replay: there is no teacher: name a seat teacher, or set teacher.gold")
        if self.preference is None and self.rl is None:
            raise ValueError("preference and rl are both none: there is nothing to train the policy with")
        if self.given.pairs and (self.preference is None or self.preference.get("objective") == "rejection"):
            raise ValueError("given.pairs needs section preference, with another objective than rejection")
        kind, k = self.prm.get("kind", "classes"), self.complete.k
        outputs = {"classes": 2 if self.labels.binary else k + 1, "outcome": 2}.get(kind, 1)
        if wrong := [c for c in self.read.classes or () if c >= outputs]:
            has = f"prm.kind {kind} has {outputs} output{'s' * (outputs > 1)}"
            why = {"classes": "labels.binary has two" if self.labels.binary else f"complete.k {k} has {k + 1}"}
            raise ValueError(
                f"read.classes: there is no class {wrong[0]}: {why.get(kind, has)}. Leave read.classes out, and those "
                "of good steps are taken"
            )
        known = range(self.states.shards)
        for key, shards in (("complete.shards", self.complete.shards), ("labels.dev_shards", self.labels.dev_shards)):
            if wrong := [i for i in shards or () if i not in known]:
                raise ValueError(f"{key}: there is no shard {wrong[0]}: states.shards is {self.states.shards}")
        if self.teacher.gold and "teacher" in self.seats:
            raise ValueError("teacher.gold takes the place of the seat teacher: leave one of them out")
        if unknown := sorted(set(self.seats) - {"policy", "teacher", "worsener"}):
            raise ValueError(
                f"seats: '{unknown[0]}' has nothing to do here: the seats of lpr are policy, teacher and worsener"
            )
        if (self.worsen is None) != ("worsener" not in self.seats):
            raise ValueError("worsen and the seat worsener belong together: set both, or none of them")
        return self


RECIPES: dict[str, type[RunConfig]] = {
    "reflect": ReflectRecipe,
    "reflect_imitation": ImitationRecipe,
    "oreo_rounds": RoundsRecipe,
    "lpr": LprRecipe,
}
