"""The sections of a recipe that methods share. The machinery is in recipe.py; a method's recipe is a `RunConfig`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from trailmark import MOST_SEED
from trailmark.recipe import Config, Loaded, dump, load_recipe, resolve

__all__ = [
    "CheckpointConfig", "Config", "EngineConfig", "EvalConfig", "GroupConfig", "LearnerConfig", "Loaded", "LoraConfig",
    "ModelConfig", "ModelShape", "NamesFile", "NamesModel", "OptimConfig", "RunConfig", "SamplingConfig",
    "ServerConfig", "dump", "load_recipe", "resolve",
]  # fmt: skip

Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class NamesModel:
    """Marks a recipe key whose text names a model: a name on the hub, a folder, a run or a checkpoint. A checkpoint may
    hold several models; `seat` says which one is meant. With `stored`, the model must be in a local folder.
    `seats/pinned_models.py` finds these keys in the recipe of any method."""

    seat: str = "policy"
    stored: bool = False


@dataclass(frozen=True)
class NamesFile:
    """Marks a recipe key whose text names a file or a folder that a run reads. The value may also be a list or a
    mapping of such texts. With `function`, the text is `my_file.py:name`. `runs/data_files.py` finds these keys in the
    recipe of any method, and notices if a file has changed."""

    function: bool = False


class ModelShape(Config):
    """The shape of a tiny model to create, or of a model that is not downloaded yet (for `--dry-run`)."""

    family: Literal["gpt2", "llama", "qwen2", "mistral", "gemma"] = Field("llama", description="architecture")
    layers: PositiveInt = Field(2, description="transformer blocks")
    width: PositiveInt = Field(64, description="size of the residual stream")
    heads: PositiveInt = Field(4, description="query heads; divides width")
    kv_heads: PositiveInt | None = Field(None, description="key and value heads; divides heads; none: as many as heads")
    ffn: PositiveInt | None = Field(None, description="hidden size of the feed-forward block; none: 4 times width")
    vocab: PositiveInt | None = Field(None, description="rows of the embedding; none: the tokenizer's")
    context: PositiveInt = Field(512, description="most tokens of one sequence")
    tied: bool | None = Field(None, description="the output layer is the embedding; none: as usual in the family")

    @model_validator(mode="after")
    def _divides(self) -> ModelShape:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self


class LoraConfig(Config):
    """Low-rank adapters in place of training all weights."""

    rank: PositiveInt = Field(16, description="rank of each adapter")
    alpha: float = Field(32.0, gt=0, description="the adapter is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input")
    targets: Literal["all-linear"] | list[str] = Field("all-linear", description="all linear layers, or module names")


class ModelConfig(Config):
    """Which model to use, and how to load it."""

    name: Annotated[str, NamesModel()] = Field(
        "tiny", min_length=1, description="'tiny', 'smollm2', a folder, a run, a checkpoint or a name on the hub"
    )
    revision: str | None = Field(None, description="commit or tag on the hub")
    shape: ModelShape | None = Field(None, description="shape of a tiny model, or of a model that is not downloaded")
    tokenizer: str | None = Field(None, description="tokenizer to use in place of the model's own")
    dtype: Dtype = Field("float32", description="dtype of the weights")
    quant: Literal["none", "int8", "int4"] = Field("none", description="quantisation of frozen weights")
    lora: LoraConfig | None = Field(None, description="train low-rank adapters only, not all weights")
    gradient_checkpointing: bool = Field(False, description="recompute activations to save memory")
    device: str = Field("auto", description="auto, cpu, cuda, mps or npu; with a number, such as cuda:1")
    seed: Seed = Field(0, description="random seed for new weights: tiny models, heads, adapters")

    @field_validator("device")
    @classmethod
    def _device(cls, v: str) -> str:
        if not re.fullmatch(r"auto|cpu|(cuda|mps|npu)(:\d+)?", v):
            raise ValueError(f"expected auto, cpu, cuda, mps or npu (or such as cuda:1), found the text '{v}'")
        return v


class SamplingConfig(Config):
    """How tokens are sampled."""

    temperature: float = Field(1.0, ge=0, description="0: always the most likely token")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the smallest set of tokens with this mass")
    top_k: NonNegativeInt = Field(0, description="keep this many tokens; 0: all")
    max_tokens: PositiveInt = Field(64, description="most tokens written in one turn")
    min_tokens: NonNegativeInt = Field(0, description="fewest tokens before a turn may end")
    stop: list[str] = Field([], description="texts that end a turn")

    @model_validator(mode="after")
    def _range(self) -> SamplingConfig:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self


class EngineConfig(Config):
    """The engine that generates text in this process."""

    kind: Literal["local"] = Field("local", description="torch, in process")
    max_num_seqs: PositiveInt = Field(16, description="sequences generated at the same time")
    max_len: PositiveInt | None = Field(
        None, description="longest sequence; none: 1024, or the model's context if that is less"
    )
    batch_invariant: bool = Field(
        True, description="compute with fixed shapes, so that a result does not depend on the rest of the batch"
    )
    dtype: Dtype | None = Field(None, description="dtype of the engine's copy of the weights; none: the model's dtype")


class ServerConfig(Config):
    """A model behind a server that speaks OpenAI's protocol: Trailmark's own, vLLM, SGLang, llama.cpp or a hosted
    API."""

    address: str = Field(
        pattern="^https?://", description="the server's address without /v1, or the full address of its chat endpoint"
    )
    model: str = Field(min_length=1, description="the model's name on the server")
    headers: dict[str, str] = Field({}, description="HTTP headers of every request; env:VARIABLE reads a secret")
    query: dict[str, str] = Field({}, description="query parameters of every request")
    api_key_env: str | None = Field(None, description="environment variable that holds the bearer key")
    concurrency: PositiveInt = Field(32, description="requests in flight at once")
    deadline: PositiveFloat = Field(120.0, description="seconds for one request, retries included")
    retries: NonNegativeInt = Field(5, description="retries after a refused connection, 429 or 5xx")
    backoff: PositiveFloat = Field(0.5, description="seconds before the first retry; doubles each time")


class GroupConfig(Config):
    """Settings of one group of parameters, where they differ from the others."""

    lr: float | None = Field(None, ge=0, description="learning rate; none: optim.lr")
    weight_decay: float | None = Field(None, ge=0, description="weight decay; none: optim.weight_decay")


class OptimConfig(Config):
    """The AdamW optimiser and its learning-rate schedule."""

    lr: float = Field(1e-4, ge=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of the two moments")
    eps: float = Field(1e-8, gt=0, description="added to the square root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    clip: float | None = Field(1.0, gt=0, description="largest norm of the gradient; none: no limit")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after the warmup")
    warmup: float = Field(0.0, ge=0, description="steps of warmup; below 1: a fraction of all steps")
    final: float = Field(0.0, ge=0, le=1, description="fraction of lr at the end of a schedule")
    bits: Literal[32, 8] = Field(32, description="bits of the optimiser's moments; 8 needs bitsandbytes and a GPU")
    groups: dict[str, GroupConfig] = Field(
        {}, description="settings by a pattern of parameter names, such as 'value_head.*'"
    )

    @field_validator("betas")
    @classmethod
    def _betas(cls, v: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= b < 1 for b in v):
            raise ValueError(f"expected two numbers from 0 to below 1, found {list(v)}")
        return v

    @field_validator("warmup")
    @classmethod
    def _warmup(cls, v: float) -> float:
        if v >= 1 and v != int(v):
            raise ValueError(f"expected a fraction below 1 or a whole number of steps, found {v}")
        return v


class LearnerConfig(Config):
    """How the learner turns a batch into an optimiser step."""

    optim: OptimConfig = Field(OptimConfig(), description="optimiser and schedule")
    micro_tokens: PositiveInt | None = Field(
        None, description="most tokens of one micro-batch; none: as many as a GPU holds, 8192 elsewhere"
    )
    offload: list[Literal["optimiser", "frozen"]] = Field(
        [], description="what to keep in CPU memory while the GPU does not need it"
    )
    layout: Literal["auto", "tree", "flat", "rows"] = Field(
        "auto", description="tree: shared prefixes; flat: packed; rows: padded"
    )
    ema: float | None = Field(None, gt=0, lt=1, description="decay of an exponential moving average of the weights")
    amp: Literal["none", "bf16"] = Field("none", description="precision of the forward pass (autocast)")


class CheckpointConfig(Config):
    """When checkpoints are written, and which ones are kept."""

    every: NonNegativeInt = Field(0, description="steps between checkpoints; 0: only at the end")
    minutes: float = Field(
        5.0, ge=0, description="minutes between extra checkpoints, of which only the newest is kept; 0: none"
    )
    keep_last: PositiveInt = Field(2, description="newest checkpoints kept")
    keep_best: NonNegativeInt = Field(1, description="best checkpoints kept")
    metric: str = Field("eval/reward", description="the metric that decides which checkpoint is best")
    mode: Literal["max", "min"] = Field("max", description="whether a higher or a lower metric is better")


class EvalConfig(Config):
    """Evaluation during training."""

    every: NonNegativeInt = Field(0, description="steps between evaluations; 0: none")
    split: str = Field("test", description="split of the task")
    n: PositiveInt | None = Field(64, description="number of starts to play; none: all of the split")
    first: bool = Field(False, description="also evaluate before the first step, as step 0 of the metrics")
    patience: PositiveInt | None = Field(
        None, description="stop training after this many evaluations without a better one"
    )


class RunConfig(Config):
    """The keys of every method's recipe."""

    method: str = Field(description="name of the method")
    name: str = Field("run", description="a title for reports and trackers")
    out: str = Field("runs/run", min_length=1, description="run directory")
    seed: Seed = Field(0, description="random seed of the run")
    steps: PositiveInt = Field(100, description="number of steps; the method says what one step is")
    model: ModelConfig = Field(ModelConfig(), description="the model that is trained")
    learner: LearnerConfig = Field(LearnerConfig(), description="how the model is trained")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="which checkpoints are kept")
    eval: EvalConfig = Field(EvalConfig(), description="evaluation during training")
    failures: float = Field(
        0.0, ge=0, le=1, description="share of plays that may fail at a server; a step or stage with more is not done"
    )
    trackers: list[str] = Field([], description="further places to send metrics to: tensorboard, trackio, wandb")
