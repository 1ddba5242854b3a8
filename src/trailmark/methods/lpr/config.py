"""The keys of LPR's recipe. They import without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from trailmark.config import Config, EngineConfig, NamesFile, NamesModel, RunConfig, SamplingConfig, Seed, resolve
from trailmark.errors import RecipeError
from trailmark.methods import get_config
from trailmark.methods.configs import TaskConfig
from trailmark.methods.offline_configs import ReadConfig
from trailmark.score.classes import Over
from trailmark.seats.config import SeatConfig, seats_section
from trailmark.steps import Split


class LprFiles(Config):
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
    prompts: PositiveInt | None = Field(None, description="questions; none: all of the split")
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

    prompts: PositiveInt | None = Field(None, description="questions; none: all of the split")
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

    n: PositiveInt = Field(3, description="completions of a state; its value is how many of them are right")
    sampling: SamplingConfig | None = Field(None, description="how they are drawn; none: as the recipe's sampling")
    shards: list[NonNegativeInt] | None = Field(None, description="only states of these shards; none: all")
    duplicates: Literal["keep", "discard"] = Field("keep", description="states two of whose completions are equal")
    min_chars: NonNegativeInt = Field(
        0, description="states whose last step says less than so many characters behind its name are discarded"
    )


class LprLabels(Config):
    """What the process reward model learns from."""

    full: bool = Field(True, description="whole solutions, too: the best class if right, else class 0")
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
    seed: Seed = Field(0, description="of the pairs of states that are drawn")


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
    """Solutions, states, completions, values, reward model, scores, pairs, and what is trained on them."""

    steps: PositiveInt = Field(1, description="rounds")
    task: TaskConfig = Field(TaskConfig(name="arith"), description="the questions")
    seats: dict[str, SeatConfig] = seats_section("`policy` writes solutions and completions, `teacher` the first ones")
    sampling: SamplingConfig = Field(SamplingConfig(max_tokens=256), description="how tokens are drawn")
    engine: EngineConfig = Field(EngineConfig(), description="who writes the tokens")
    files: LprFiles = Field(LprFiles(), description="files from elsewhere")
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
            why = " (from complete.n and labels.binary)" if own[0] == "outputs" else ""
            raise ValueError(f"key '{own[0]}' is set by lpr itself{why}: leave it out")
        if kind == "step_rl" and isinstance(v.get("rewards"), dict):  # its reward model is that of the round
            filled["rewards"] = {"model": "prm", **v["rewards"]}
        try:
            resolve({**v, **filled}, get_config(kind))
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
        if self.files.pairs and (self.preference is None or self.preference.get("objective") == "rejection"):
            raise ValueError("files.pairs needs section preference, with another objective than rejection")
        kind, k = self.prm.get("kind", "classes"), self.complete.n
        outputs = {"classes": 2 if self.labels.binary else k + 1, "outcome": 2}.get(kind, 1)
        if wrong := [c for c in self.read.classes or () if c >= outputs]:
            has = f"prm.kind {kind} has {outputs} output{'s' * (outputs > 1)}"
            why = {"classes": "labels.binary has two" if self.labels.binary else f"complete.n {k} has {k + 1}"}
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
