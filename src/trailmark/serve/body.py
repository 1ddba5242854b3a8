"""Request bodies: checked field by field, then turned into what the engine is asked.

The fields are OpenAI's, and vLLM's where those have no name for a thing (`min_tokens`, `stop_token_ids`, `ignore_eos`,
`allowed_token_ids`, `prompt_logprobs`, `return_token_ids`). `key` is our own: together with `seed` it names a draw, as in
`engines.base.Request`; so is `search`. A field we do not know is refused unless it asks for nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from trailmark.chat import Conversation
from trailmark.engines.base import Request
from trailmark.errors import nearest
from trailmark.rollout.bos import adds_bos
from trailmark.rollout.play import stop_ids
from trailmark.serve.errors import ApiError, refused
from trailmark.types import SamplingLaw, Tokens

Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(min_length=1)]
Texts = str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
COLD = 1e-5  # temperatures below would overflow; they are arg max to every purpose

# Fields that change nothing about an answer, and values with which others ask for nothing.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "priority",
    "spaces_between_special_tokens", "skip_special_tokens", "return_tokens_as_token_ids", "continuous_usage_stats",
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "best_of": 1, "repetition_penalty": 1, "length_penalty": 1, "response_format": {"type": "text"}, "tool_choice": "none",
    "add_generation_prompt": True, "modalities": ["text"], "parallel_tool_calls": True,
}  # fmt: skip

B = TypeVar("B", bound="Body")


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    add_special_tokens: bool = True  # one BOS in front of a text prompt, where the tokenizer puts one; false: none is added

    @model_validator(mode="after")
    def _known(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if name not in HARMLESS and value not in (0, "", [], {}, NEUTRAL.get(name)):
                near = nearest(name, type(self).model_fields)
                raise ValueError(f"'{name}' is not supported here.{near if 'Did' in near else ''}")
        return self


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[dict[str, Any]]

    def plain(self) -> dict[str, Any]:
        """The message with its content as one text: what templates read."""
        text = self.content
        if not isinstance(text, str):
            if any(p.get("type") != "text" or not isinstance(p.get("text"), str) for p in text):
                raise ApiError(400, "a message may hold text only: parts of type 'text'.", "messages")
            text = "".join(p["text"] for p in text)
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class StreamOptions(BaseModel):
    include_usage: bool = False


class SearchBody(BaseModel):
    """How to search for an answer: see `rollout/search.py`. `by` the server's value model, or by the policy's own log-probs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    beam: int | None = Field(None, ge=1, le=64)
    best_of: int | None = Field(None, ge=1, le=128)
    rounds: int = Field(20, ge=1, le=1000)
    budget: int | None = Field(None, ge=1)
    step_ends: Annotated[list[str], Field(min_length=1, max_length=32)] = ["\n"]
    by: Literal["value", "logp"] = "value"
    tree: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> SearchBody:
        if (self.beam is None) == (self.best_of is None) or "" in self.step_ends:
            raise ValueError("give either beam or best_of, and no empty text among step_ends")
        return self


class Sampling(Body):
    """What both ways of asking for samples share."""

    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_tokens: int = Field(0, ge=0)
    max_tokens: int | None = Field(None, ge=0)
    stop: str | Annotated[list[str], Field(max_length=32)] = []
    stop_token_ids: list[Id] = []
    ignore_eos: bool = False
    allowed_token_ids: Ids | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    key: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = False
    search: SearchBody | None = None

    @field_validator("stop")
    @classmethod
    def _stop(cls, v: str | list[str]) -> str | list[str]:
        if "" in ([v] if isinstance(v, str) else v):
            raise ValueError("an empty text would stop everything")
        return v

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def requests(self, prompts: Sequence[Tokens], tokenizer: Any, budget: int, chat: bool) -> list[Request]:
        ends = () if self.ignore_eos else stop_ids(tokenizer, chat)
        ends = tuple(dict.fromkeys((*ends, *self.stop_token_ids)))
        allowed = None if self.allowed_token_ids is None else tuple(dict.fromkeys(self.allowed_token_ids))
        if self.min_tokens > budget:
            raise ApiError(400, f"min_tokens {self.min_tokens} is more than max_tokens {budget}.", "min_tokens")
        if self.min_tokens and allowed is not None and set(allowed) <= set(ends):
            raise ApiError(400, "min_tokens bans all of allowed_token_ids: each ends the text.", "allowed_token_ids")
        law = SamplingLaw(
            self.temperature if self.temperature >= COLD else 0.0,
            self.top_p,
            max(0, self.top_k),
            allowed,
            self.min_tokens,
            ends if self.min_tokens else (),
        )
        seed = secrets.randbits(31) if self.seed is None else self.seed
        keys = [self.key if i == 0 else f"{self.key}\0{i}" for i in range(len(prompts))]
        return [Request(p, law, self.n, budget, ends, self.stops, seed, k) for p, k in zip(prompts, keys)]


class CompletionBody(Sampling):
    prompt: Texts
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    def prompts(self, tokenizer: Any) -> list[Tokens]:
        return [encoded(p, tokenizer, self.add_special_tokens) for p in listed(self.prompt)]


class ChatBody(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: dict[str, bool | int | str] = {}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _options(cls, v: dict[str, Any]) -> dict[str, Any]:
        # How messages become text is the server's business; what a template does with them may be asked.
        taken = {"chat_template", "tokenize", "add_generation_prompt", "conversation", "continue_final_message", "self"}
        if bad := [k for k in v if k in taken or k.startswith("return_") or not k.isidentifier()]:
            raise ValueError(f"'{bad[0]}' cannot be set from here")
        return v

    def prompt(self, tokenizer: Any) -> Tokens:
        talk = conversation(tokenizer, **self.chat_template_kwargs)
        talk.add(*(m.plain() for m in self.messages))
        return talk.prompt()[0]


class ScoreBody(Body):
    """Sequences as `tokens` (from `start` on, the first has no probability), or completions behind a prompt or messages."""

    tokens: Ids | Annotated[list[Ids], Field(min_length=1)] | None = None
    start: int = Field(1, ge=1)
    prompt: Texts | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    completion: Texts | None = None

    @model_validator(mode="after")
    def _one_form(self) -> ScoreBody:
        given = [name for name in ("tokens", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1 or (self.completion is None) != (self.tokens is not None):
            raise ValueError("give either 'tokens', or 'prompt' and 'completion', or 'messages' and 'completion'.")
        return self


class ValuesBody(Body):
    """What is to be valued: texts, token ids, or conversations."""

    states: Annotated[
        list[str | Ids | Annotated[list[Message], Field(min_length=1)]], Field(min_length=1, max_length=4096)
    ]


def conversation(tokenizer: Any, **options: Any) -> Conversation:
    return Conversation(tokenizer, template="own" if getattr(tokenizer, "chat_template", None) else None, **options)


def listed(given: str | Sequence[Any]) -> list[Any]:
    """A single text or list of ids as a list of one."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def encoded(given: str | Sequence[int], tokenizer: Any, specials: bool = False) -> Tokens:
    if isinstance(given, str):
        bos = specials and adds_bos(tokenizer)
        text = given.removeprefix(tokenizer.bos_token) if bos else given  # never a second one
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        given = [tokenizer.bos_token_id, *ids] if bos else ids
    return tuple(given)


def read(kind: type[B], data: bytes) -> B:
    """Bytes -> a checked body; a field that is null is as good as left out."""
    try:
        raw: Any = from_json(data, allow_inf_nan=False)
    except ValueError as problem:
        raise ApiError(400, f"the body is not valid JSON: {problem}.", code="invalid_json") from None
    if not isinstance(raw, Mapping):
        raise ApiError(400, "the body must be a JSON object.", code="invalid_json")
    try:
        return kind.model_validate({k: v for k, v in raw.items() if v is not None})
    except ValidationError as problem:
        raise refused(problem) from None
