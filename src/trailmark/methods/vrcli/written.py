"""Reason, then write: models make plans for the rows of `trailmark data stories`, and chapters (or answers) from them.

VR-CLI compares four variants. A variant is a planner, or none, and a writer:

    B      base            the base model writes directly
    BR     base, base      the base model reasons, and writes from its plan
    SFT    sft             a fine-tuned model writes directly
    RL     rl, base        the trained model reasons, and the base model writes from its plan

    DIR/NAME.plans.jsonl   id, sample, text (the whole answer; the plan is what follows its marker), tokens, stop
    DIR/NAME.jsonl         id, sample, text, tokens, stop (`length`, `context_full`: it was cut off), plan
    DIR/answers.jsonl      every answer as soon as it is there, so nothing is asked twice

`trailmark improvement` reads the plans, `trailmark chapters` and `trailmark judge` the texts. Draws depend only on
the seed, the row and the sample. So a command that was stopped goes on to the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trailmark.ask.client import Client, NoAnswer, Question, ask_each, prompt_of
from trailmark.ask.store import Store
from trailmark.config import EngineConfig, ModelConfig
from trailmark.data.stages import Counts, DataFolder, data_folder
from trailmark.errors import DataError, TrailmarkError
from trailmark.failures import Tries
from trailmark.methods.vrcli.plans import markers_of, read_scored_rows, writing
from trailmark.methods.vrcli.stories.setup import write_lines
from trailmark.plain_files import read_plain
from trailmark.runs.stages import Stage
from trailmark.seats.config import HttpSeat
from trailmark.seats.model_names import is_address, locate
from trailmark.seats.open import UNNAMED, open_engine, open_server
from trailmark.tasks.stories.lengths import Target, target_length
from trailmark.tasks.stories.plans import MARKERS, has_marker, plan_of
from trailmark.tasks.stories.prompts import END
from trailmark.texts import encode
from trailmark.types import CUT_OFF, SamplingLaw

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """Who plans, if anyone does, and who writes: names of models as `trailmark eval` takes them."""

    name: str
    writer: str
    planner: str = ""


def read_variant(word: str) -> Variant:
    """NAME=WRITER or NAME=PLANNER,WRITER."""
    name, sign, who = word.partition("=")
    models = who.split(",")
    if not sign or not name or len(models) > 2 or not all(models):
        raise TrailmarkError(
            f"write: '{word}' is neither NAME=WRITER nor NAME=PLANNER,WRITER, such as rl=runs/rl,base."
        )
    if Path(name).name != name or name.startswith(".") or name.endswith(".plans") or name in ("answers", "settings"):
        raise TrailmarkError(f"write: '{name}' is no name for a variant: it becomes the name of a file.")
    return Variant(name, models[-1], models[0] if len(models) == 2 else "")


@dataclass(frozen=True)
class How:
    """Settings of the sampling. `length` is the wanted length of a text in tokens; None: that of the gold text."""

    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    plan_tokens: int = 2048
    length: int | None = None
    at_least: bool = True  # half of the wanted length must be written
    samples: int = 1
    seed: int = 0
    markers: tuple[str, ...] | None = None  # a plan follows them; None: those of the run that plans, else MARKERS
    tokenizer: str = ""  # counts the tokens of a gold text for a server; empty: four bytes count as a token


@dataclass(frozen=True)
class Servers:
    """How servers are asked; the same for all of them."""

    served: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    key_env: str | None = None
    deadline: float = 600.0
    failures: float = 0.0  # share of the answers that may fail


class Speaker:
    """A model that answers messages: in this process, or behind a server. It is opened when it is first asked."""

    def __init__(self, name: str, servers: Servers, tokenizer: Any = None, device: str = "auto", slots: int = 8):
        self.name, self.servers, self.slots = name, servers, slots
        self.remote = is_address(name)
        self._words = tokenizer
        self.markers: tuple[str, ...] | None = None  # those of its run's reward
        if self.remote:
            self.print = f"server {servers.served or name}"
        else:
            from trailmark.models.adapters import weights_print

            found = locate(name)
            self.config = ModelConfig.model_validate({"name": found.folder, "device": device, "dtype": found.dtype})
            self.print = f"{weights_print(self.config)} {found.dtype}"
            self.markers = markers_of(found.recipe)

    @property
    def tokenizer(self) -> Any:
        """None for a server whose tokenizer is not known."""
        return self._words if self.remote else self.lm.tokenizer

    @cached_property
    def lm(self) -> Any:
        from trailmark.models.load import load_model

        return load_model(self.config).freeze()

    @cached_property
    def server(self) -> Any:
        s = self.servers
        seat = HttpSeat(address=self.name, model=s.served or UNNAMED, headers=dict(s.headers), query=dict(s.query),
                        api_key_env=s.key_env, deadline=s.deadline)  # fmt: skip
        return open_server(seat, "")

    def engine(self, longest: int) -> Any:
        """Ready for sequences of up to so many tokens."""
        if self.remote:
            return self.server
        return open_engine(self.lm, EngineConfig(max_num_seqs=self.slots, max_len=longest), plays=False)


def write(
    rows: Path, out: Path, variants: Sequence[Variant], how: How, n: int | None = None, servers: Servers = Servers(),
    device: str = "auto", slots: int = 8, say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Plans and texts of every variant, in `out`. Returns what was made, by variant."""
    found = dict(list(read_scored_rows(rows).items())[:n])
    words = None
    if how.tokenizer:
        from trailmark.seats.model_names import load_tokenizer

        words = load_tokenizer(how.tokenizer)
    names = dict.fromkeys(m for v in variants for m in (v.planner, v.writer) if m)
    speakers = {name: Speaker(name, servers, words, device, slots) for name in names}
    given = asdict(how) | {"markers": None if how.markers is None else list(how.markers)}
    settings = {"kind": "written", **given, "n": n, **{v.name: [v.planner, v.writer] for v in variants}}
    with data_folder(out, settings) as place:
        answers = Store(out / "answers.jsonl", text="text")
        work = _Work(rows, out, found, how, speakers, answers, slots, servers.failures)
        stages = [s for v in variants for s in _stages(place, work, v, rows, n)]
        place.make(stages, [s.name for s in stages], say)
        return {v.name: work.about(v) for v in variants}


def _stages(place: DataFolder, work: _Work, v: Variant, rows: Path, n: int | None) -> list[Stage]:
    how: dict[str, Any] = {k: value for k, value in asdict(work.how).items() if k != "markers"}
    if (markers := work.markers(v)) != MARKERS:
        how["markers"] = list(markers)
    asked = ("temperature", "top_p", "top_k", "plan_tokens", "samples", "seed", "markers")
    planned = {k: how[k] for k in asked if k in how}
    files: dict[str, str | Path] = {"rows": rows}
    made = []
    if v.planner:
        about = DataFolder(place.out, {**planned, "n": n, "planner": work.speakers[v.planner].print})
        made.append(about.stage(f"{v.name}-plans", lambda: work.plans(v), [f"{v.name}.plans.jsonl"], files=files))
    about = DataFolder(place.out, {**how, "n": n, "writer": work.speakers[v.writer].print})
    inputs = [f"{v.name}.plans.jsonl"] if v.planner else []
    made.append(about.stage(f"{v.name}-texts", lambda: work.texts(v), [f"{v.name}.jsonl"], inputs, files=files))
    return made


@dataclass(frozen=True)
class _Ask:
    """One question to a model, about a row."""

    row: str
    sample: int
    question: Question
    plan: str | None = None


class _Work:
    def __init__(
        self, path: Path, out: Path, rows: Mapping[str, Row], how: How, speakers: Mapping[str, Speaker],
        answers: Store, slots: int, failures: float = 0.0,
    ):  # fmt: skip
        self.path, self.out, self.rows, self.how = path, out, rows, how
        self.speakers, self.answers, self.slots, self.failures = speakers, answers, slots, failures

    def markers(self, v: Variant) -> tuple[str, ...]:
        """What a plan follows in the answers of a variant's planner."""
        own = self.speakers[v.planner].markers if v.planner else None
        return next(m for m in (self.how.markers, own, MARKERS) if m is not None)

    def plans(self, v: Variant) -> Counts:
        h = self.how
        law = SamplingLaw(h.temperature, h.top_p, h.top_k)
        asks = [
            _Ask(i, k, Question(row["prompt"], h.plan_tokens, law, (), h.seed, f"plan {i} {k}"))
            for i, row in self.rows.items()
            for k in range(h.samples)
        ]
        counts, made = Counts(), []
        for ask, replies in zip(asks, self.answered(f"{v.name} plans", v.planner, asks)):
            if replies is None:
                counts.left_out["failed"] += 1
                continue
            made.append({"id": ask.row, "sample": ask.sample, **replies})
            counts.kept["plans"] += 1
            counts.kept["with a marker"] += has_marker(replies["text"], self.markers(v))
            counts.kept["cut at the limit"] += replies["stop"] in CUT_OFF
        write_lines(self.out / f"{v.name}.plans.jsonl", made)
        return counts

    def texts(self, v: Variant) -> Counts:
        if v.planner:
            replies = self.read(f"{v.name}.plans.jsonl")
            plans = [(p["id"], p["sample"], plan_of(p["text"], self.markers(v))) for p in replies]
        else:
            plans = [(i, k, None) for i in self.rows for k in range(self.how.samples)]
        asks = [self.ask_for_text(v.writer, i, k, plan) for i, k, plan in plans]
        counts, made = Counts(), []
        for ask, replies in zip(asks, self.answered(f"{v.name} texts", v.writer, asks)):
            if replies is None:
                counts.left_out["failed"] += 1
                continue
            if not replies["text"].strip():
                counts.left_out["empty texts"] += 1
                continue
            plan = {} if ask.plan is None else {"plan": ask.plan}
            made.append({"id": ask.row, "sample": ask.sample, **replies, **plan})
            counts.kept["texts"] += 1
            counts.kept["cut at the limit"] += replies["stop"] in CUT_OFF
        if not made:
            raise DataError(f"variant '{v.name}': {v.writer} wrote nothing but empty texts.", self.path)
        write_lines(self.out / f"{v.name}.jsonl", made)
        return counts

    def ask_for_text(self, writer: str, i: str, sample: int, plan: str | None) -> _Ask:
        h, row = self.how, self.rows[i]
        target = self.target(writer, row["gold"])
        story = "header" in row
        law = SamplingLaw(h.temperature, h.top_p, h.top_k, min_tokens=target.min_tokens if h.at_least else 0)
        messages = writing(row, plan, target.words)
        stops = (END,) if story else ()
        question = Question(messages, target.max_tokens, law, stops, h.seed, f"text {i} {sample}")
        return _Ask(i, sample, question, plan)

    def target(self, writer: str, gold: str) -> Target:
        """The wanted length of a text: that of the gold text, which begins with the header, or the user's wish."""
        if self.how.length is not None:
            return target_length(self.how.length)
        words = self.speakers[writer].tokenizer
        return target_length(max(1, len(gold.encode()) // 4) if words is None else len(encode(words, gold)))

    def answered(self, title: str, model: str, asks: Sequence[_Ask]) -> list[dict[str, Any] | None]:
        """Text, number of tokens and end of each answer: the stored one, or a new one. None: it failed, and so many may
        fail."""
        speaker, tries = self.speakers[model], Tries(title, self.failures, len(asks))
        client = Client(None, self.answers, model, speaker.print, tries=tries)
        if any(client.stored(a.question) is None for a in asks):
            client.engine = speaker.engine(self.longest(speaker, model, asks))

        async def one(a: _Ask) -> dict[str, Any] | None:
            try:
                answer = await client.answer(a.question)
            except NoAnswer:
                return None
            return {"text": answer.text, "tokens": answer.tokens, "stop": answer.stop}

        made = ask_each(title, asks, one, self.slots)
        client.settle(next((f"row '{a.row}' of {self.path}" for a, answer in zip(asks, made) if answer is None), ""))
        return made

    def longest(self, speaker: Speaker, model: str, asks: Sequence[_Ask]) -> int:
        """The longest sequence. One that the model cannot hold is refused before anything is asked."""
        most = 1
        for a in asks if not speaker.remote else ():
            size, written = len(prompt_of(speaker.tokenizer, a.question.messages)), a.question.max_tokens
            if size + written > speaker.lm.context:
                raise DataError(
                    f"row '{a.row}': the prompt has {size} tokens and the answer may have {written}, and {model} reads "
                    f"{speaker.lm.context}: shorten the rows (`data stories --max-tokens`), allow fewer tokens "
                    "(--plan-tokens, --length), or take a model with a longer context.",
                    self.path,
                )
            most = max(most, size + written)
        return most

    def read(self, name: str) -> list[dict[str, Any]]:
        # not splitlines(): a text may hold U+2028 and other ends of lines that JSON does not escape
        return [json.loads(line) for line in str(read_plain(self.out / name), "utf-8").split("\n") if line]

    def about(self, v: Variant) -> dict[str, Any]:
        """What a variant has made."""
        texts = self.read(f"{v.name}.jsonl")
        sizes = [len(t["text"].split()) for t in texts]
        out: dict[str, Any] = {
            "planner": v.planner or None, "writer": v.writer, "texts": len(texts), "words": sum(sizes) / len(sizes),
            "cut": sum(t["stop"] in CUT_OFF for t in texts),
        }  # fmt: skip
        if v.planner:
            plans = self.read(f"{v.name}.plans.jsonl")
            markers = self.markers(v)
            share = sum(has_marker(p["text"], markers) for p in plans) / len(plans) if markers else None
            out |= {"plans": len(plans), "markers": share}
        return out
