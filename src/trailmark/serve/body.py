"""Request bodies: check them field by field, then turn them into engine requests.

The fields are OpenAI's, and vLLM's where OpenAI has no name (`min_tokens`, `stop_token_ids`, `ignore_eos`,
`allowed_token_ids`, `prompt_logprobs`, `return_token_ids`). `key` and `search` are our own: `key` and `seed` together
name a draw, as in `engines.base.Request`. An unknown field is refused unless its value asks for nothing.

Everything has a limit: the whole body before its fields are checked (`bounded`), and each field.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from trailmark.engines.base import Request
from trailmark.errors import nearest
from trailmark.rollout.bos import prompt_ids
from trailmark.serve.errors import ApiError, refused
from trailmark.steps import LINES
from trailmark.texts import encode
from trailmark.types import SamplingLaw, Tokens

# Limits of a body: nesting, keys of an object, letters of a key, lists and objects in all.
DEPTH, KEYS, KEY, PARTS = 32, 256, 256, 1 << 16
ROWS, IDS, MESSAGES = 4096, 1 << 20, 2048  # most texts or states of a request, ids of a list, messages
STOPS, STOP_IDS, STOP, NAME = 32, 1024, 1024, 4096  # most stop texts and ids, letters of a stop text, letters of a name
MOST = 2**31

# The variables of chat templates that a request may set, and most letters of their values as JSON.
VARIABLES = {
    "enable_thinking", "thinking", "thinking_budget", "thinking_mode", "reasoning_effort", "preserve_thinking",
    "clear_thinking", "truncate_history_thinking", "keep_past_thinking", "force_reasoning", "date_string",
    "current_date", "today", "documents", "citations", "controls", "safety_mode", "builtin_tools", "custom_tools",
    "available_tools", "tools_in_user_message", "xml_tools", "python_tools", "add_vision_id", "model_identity",
    "custom_instructions", "system_message",
}  # fmt: skip
VALUES = 1 << 16
OPENING_OR_TEXT = re.compile(rb'[\[{]|"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)

Id = Annotated[int, Field(ge=0, lt=MOST)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=IDS, fail_fast=True)]
Name = Annotated[str, Field(max_length=NAME)]
StopText = Annotated[str, Field(min_length=1, max_length=STOP)]
COLD = 1e-5  # lower temperatures would overflow; they are treated as 0 (arg max)

# Fields that do not change an answer, and values with which other fields ask for nothing.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id", "priority",
    "spaces_between_special_tokens", "skip_special_tokens", "return_tokens_as_token_ids", "continuous_usage_stats",
}  # fmt: skip
NEUTRAL: dict[str, Any] = {
    "best_of": 1, "repetition_penalty": 1, "length_penalty": 1, "tool_choice": "none",
    "modalities": ["text"], "parallel_tool_calls": True,
}  # fmt: skip

B = TypeVar("B", bound="Body")


def form(given: Any) -> str:
    """Which of several forms a field has. Only this form is then checked; a long list would fail in all the others."""
    if not isinstance(given, list):
        return "text"
    first = given[0] if given else None
    return "texts" if isinstance(first, str) else "rows" if isinstance(first, list) else "ids"


def state_form(given: Any) -> str:
    talk = isinstance(given, list) and given and isinstance(given[0], dict | Message)
    return "talk" if talk else "ids" if isinstance(given, list) else "text"


Rows = Annotated[list[Ids], Field(min_length=1, max_length=ROWS, fail_fast=True)]
Lines = Annotated[list[str], Field(min_length=1, max_length=ROWS, fail_fast=True)]
Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Lines, Tag("texts")]
    | Annotated[Rows, Tag("rows")],
    Discriminator(form),
]
Sequences = Annotated[
    Annotated[Ids, Tag("ids")] | Annotated[Rows, Tag("rows")],
    Discriminator(lambda given: "rows" if form(given) == "rows" else "ids"),
]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    model: Name | None = None
    add_special_tokens: bool = True  # true: a text prompt gets one BOS if the tokenizer adds one; false: it gets none

    @model_validator(mode="after")
    def _known(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            if name not in HARMLESS and value not in (0, "", [], {}, NEUTRAL.get(name)):
                near = nearest(name, type(self).model_fields)
                raise ValueError(f"'{name}' is not supported here.{near if 'Did' in near else ''}")
        return self


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[dict[str, Any]], Field(max_length=ROWS, fail_fast=True), Tag("parts")],
        Discriminator(lambda given: "parts" if isinstance(given, list) else "text"),
    ]

    def plain(self) -> dict[str, Any]:
        """The message with its content as one text, as templates need it."""
        text = self.content
        if not isinstance(text, str):
            if any(p.get("type") != "text" or not isinstance(p.get("text"), str) for p in text):
                raise ApiError(400, "a message may hold only text: parts of type 'text'.", "messages")
            text = "".join(p["text"] for p in text)
        return {**(self.model_extra or {}), "role": self.role, "content": text}

    @property
    def letters(self) -> int:
        more = sum(len(str(v)) for v in (self.model_extra or {}).values())
        return more + len(self.content if isinstance(self.content, str) else str(self.content))


Messages = Annotated[list[Message], Field(min_length=1, max_length=MESSAGES, fail_fast=True)]
State = Annotated[
    Annotated[str, Tag("text")] | Annotated[Ids, Tag("ids")] | Annotated[Messages, Tag("talk")],
    Discriminator(state_form),
]


class StreamOptions(BaseModel):
    include_usage: bool = False


class SearchBody(BaseModel):
    """How to search for an answer: see `rollout/search.py`. `by`: the server's value model, or the policy's
    log-probs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    beam: int | None = Field(None, ge=1, le=64)
    best_of: int | None = Field(None, ge=1, le=128)
    rounds: int = Field(20, ge=1, le=1000)
    budget: int | None = Field(None, ge=1, lt=MOST)
    step_ends: Annotated[list[StopText], Field(min_length=1, max_length=STOPS, fail_fast=True)] = list(LINES)
    by: Literal["value", "logp"] = "value"
    tree: bool = False

    @model_validator(mode="after")
    def _one_kind(self) -> SearchBody:
        if (self.beam is None) == (self.best_of is None):
            raise ValueError("give either beam or best_of")
        return self


class NamedSchema(BaseModel):
    json_schema: Annotated[dict[str, Any], Field(alias="schema")] = {}


class ResponseFormat(BaseModel):
    """The form of the answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def schema_text(self) -> str:
        if self.type == "text":
            return ""
        named = self.json_schema if self.type == "json_schema" else None
        return json.dumps(named.json_schema if named is not None else {"type": "object"})


class Sampling(Body):
    """The fields that completions and chat share."""

    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=MOST)
    min_tokens: int = Field(0, ge=0, lt=MOST)
    max_tokens: int | None = Field(None, ge=0, lt=MOST)
    stop: Annotated[
        Annotated[StopText, Tag("text")]
        | Annotated[list[StopText], Field(max_length=STOPS, fail_fast=True), Tag("texts")],
        Discriminator(lambda given: "texts" if isinstance(given, list) else "text"),
    ] = []
    stop_token_ids: Annotated[list[Id], Field(max_length=STOP_IDS, fail_fast=True)] = []
    ignore_eos: bool = False
    allowed_token_ids: Ids | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    key: Name = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool = False
    search: SearchBody | None = None
    response_format: ResponseFormat | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def top(self) -> int:
        """The number of alternatives to report for each token."""
        return 0

    def requests(
        self, prompts: Sequence[Tokens], ends: Tokens, budget: int, stops: Sequence[str] = ()
    ) -> list[Request]:
        """`ends` and `stops` end a text here, unless the request says otherwise."""
        ends = () if self.ignore_eos else ends
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
        strings = self.stops if "stop" in self.model_fields_set else tuple(stops)
        schema = self.response_format.schema_text if self.response_format is not None else ""
        if schema and self.search is not None:
            raise ApiError(400, "a search cannot keep to a schema: leave out response_format.", "response_format")
        return [Request(p, law, self.n, budget, ends, strings, seed, k, schema) for p, k in zip(prompts, keys)]


class CompletionBody(Sampling):
    prompt: Texts
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @property
    def top(self) -> int:
        return self.logprobs or 0

    def prompts(self, tokenizer: Any) -> Iterator[Tokens]:
        return (encoded(p, tokenizer, self.add_special_tokens) for p in listed(self.prompt))


class ChatBody(Sampling):
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, lt=MOST)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] = {}
    continue_final_message: bool = False  # the last message is the beginning of the answer
    add_generation_prompt: bool = True

    @property
    def top(self) -> int:
        return self.top_logprobs

    @model_validator(mode="after")
    def _continues(self) -> ChatBody:
        given = "add_generation_prompt" in self.model_fields_set
        if given and self.add_generation_prompt == self.continue_final_message:
            raise ValueError("'add_generation_prompt' must be the opposite of 'continue_final_message'")
        if self.continue_final_message and (len(self.messages) < 2 or self.messages[-1].role != "assistant"):
            raise ValueError("'continue_final_message' needs a last message of the assistant, behind others")
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _options(cls, v: dict[str, Any]) -> dict[str, Any]:
        # A request may only set variables that chat templates commonly read. The server decides everything else.
        if bad := [k for k in v if k not in VARIABLES]:
            near = nearest(bad[0], VARIABLES)
            raise ValueError(f"'{bad[0]}' cannot be set by a request.{near if 'Did' in near else ''}")
        try:
            size = len(json.dumps(v))
        except (ValueError, RecursionError):  # a number of thousands of digits
            size = VALUES + 1
        if size > VALUES:
            raise ValueError(f"more than {VALUES} letters of values")
        return v


class ScoreBody(Body):
    """Sequences as `tokens` (from `start` on; the first token has no probability), or completions after a prompt or
    messages."""

    tokens: Sequences | None = None
    start: int = Field(1, ge=1, lt=MOST)
    prompt: Texts | None = None
    messages: Messages | None = None
    completion: Texts | None = None

    @model_validator(mode="after")
    def _one_form(self) -> ScoreBody:
        given = [name for name in ("tokens", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1 or (self.completion is None) != (self.tokens is not None):
            raise ValueError("give either 'tokens', or 'prompt' and 'completion', or 'messages' and 'completion'.")
        return self


class ValuesBody(Body):
    """The states to value: texts, token ids, or conversations."""

    states: Annotated[list[State], Field(min_length=1, max_length=ROWS, fail_fast=True)]


def listed(given: str | Sequence[Any]) -> list[Any]:
    """A single text or list of ids as a list of one."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def encoded(given: str | Sequence[int], tokenizer: Any, specials: bool = False) -> Tokens:
    """A text is content: a control token in it is encoded as characters. To send control tokens, give token ids."""
    if isinstance(given, str):
        given = prompt_ids(tokenizer, given) if specials else encode(tokenizer, given)
    return tuple(given)


def has_many_parts(data: bytes) -> bool:
    """Whether JSON has too many lists and objects. The parser makes all of them in one call, in which no other thread
    runs."""
    if data.count(b"[") + data.count(b"{") <= PARTS:
        return False
    openings = (m for m in OPENING_OR_TEXT.finditer(data) if data[m.start()] != ord('"'))
    return next(itertools.islice(openings, PARTS, None), None) is not None


def bounded(raw: Any) -> None:
    """Refuse a body that is nested too deep, or has objects with too many or too long keys. The later checks look only
    at single fields."""
    level, depth = [raw], 0
    while level:
        depth += 1
        if depth > DEPTH:
            raise ApiError(400, f"the body is nested deeper than {DEPTH}.", code="too_large")
        for part in level:
            if isinstance(part, dict) and (len(part) > KEYS or max(map(len, part), default=0) > KEY):
                message = f"an object has more than {KEYS} keys, or one of more than {KEY} letters."
                raise ApiError(400, message, code="too_large")
        inside = (x for part in level for x in (part.values() if isinstance(part, dict) else part))
        level = [x for x in inside if type(x) in (dict, list)]


def read(kind: type[B], data: bytes) -> B:
    """Bytes -> a checked body. A field that is null counts as left out."""
    if has_many_parts(data):
        raise ApiError(400, f"the body has more than {PARTS} parts.", code="too_large")
    try:
        raw: Any = from_json(data, allow_inf_nan=False)
    except ValueError as problem:
        raise ApiError(400, f"the body is not valid JSON: {problem}.", code="invalid_json") from None
    if not isinstance(raw, Mapping):
        raise ApiError(400, "the body must be a JSON object.", code="invalid_json")
    bounded(raw)
    try:
        return kind.model_validate({k: v for k, v in raw.items() if v is not None})
    except ValidationError as problem:
        raise refused(problem) from None
