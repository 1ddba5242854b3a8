"""Reason, then write: models make plans for the rows of `trailmark data stories`, and chapters (or answers) from them.

VR-CLI compares four variants. A variant is a planner, or none, and a writer:

    B      base            the base model writes directly
    BR     base, base      the base model reasons, and writes from its plan
    SFT    sft             a fine-tuned model writes directly
    RL     rl, base        the trained model reasons, and the base model writes from its plan

    DIR/NAME.plans.jsonl   id, sample, text (the whole answer; the plan is what follows its marker), tokens, stop
    DIR/NAME.jsonl         id, sample, text, tokens, stop (`length`: it was cut at the limit), plan
    DIR/answers.jsonl      every answer as soon as it is there, so nothing is asked twice

`trailmark improvement` reads the plans, `trailmark chapters` and `trailmark judge` the texts. Draws depend only on
the seed, the row and the sample. So a command that was stopped goes on to the same files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trailmark.ask.answers import Answers, request_key
from trailmark.ask.server import run_limited
from trailmark.chat import render
from trailmark.config import EngineConfig, ModelConfig
from trailmark.data.stages import Counts, DataFolder, data_folder
from trailmark.engines.base import Completion, EngineError, Request
from trailmark.errors import DataError, TrailmarkError
from trailmark.failures import PATIENCE, gone, must_be_few, too_many
from trailmark.methods.vrcli.plans import markers_of, read_scored_rows, writing
from trailmark.methods.vrcli.stories.setup import write_lines
from trailmark.plain_files import read_plain
from trailmark.progress import Progress
from trailmark.rollout.play import stop_ids
from trailmark.run_async import wait
from trailmark.runs.stages import Stage
from trailmark.seats.config import HttpSeat
from trailmark.seats.locate import is_address, locate
from trailmark.tasks.stories.lengths import Target, target_length
from trailmark.tasks.stories.plans import MARKERS, has_marker, plan_of
from trailmark.tasks.stories.prompts import END
from trailmark.texts import encode
from trailmark.types import SamplingLaw

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
        self._engine: Any = None
        self._lm: Any = None
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

    @property
    def lm(self) -> Any:
        if self._lm is None:
            from trailmark.models.load import load_model

            self._lm = load_model(self.config).freeze()
        return self._lm

    @property
    def context(self) -> int | None:
        return None if self.remote else self.lm.context

    def size(self, messages: Sequence[Mapping[str, str]]) -> int:
        """The tokens of a prompt; 0 if only the server knows them."""
        return 0 if self.remote else len(self._prompt(messages))

    def open(self, longest: int) -> None:
        """Get ready for sequences of up to so many tokens."""
        if not self.remote:
            from trailmark.engines.local import local_engine

            self._engine = local_engine(self.lm, EngineConfig(slots=self.slots, max_len=longest))
        elif self._engine is None:
            from trailmark.seats.open import UNNAMED, open_server

            s = self.servers
            seat = HttpSeat(address=self.name, model=s.served or UNNAMED, headers=dict(s.headers), query=dict(s.query),
                            api_key_env=s.key_env, deadline=s.deadline)  # fmt: skip
            self._engine = open_server(seat, "")

    async def say(
        self, messages: Sequence[Mapping[str, str]], law: SamplingLaw, most: int, stops: tuple[str, ...], seed: int,
        key: str,
    ) -> Completion:  # fmt: skip
        if self.remote:
            (done,) = await self._engine.chat(messages, law, most, stops, seed, key)
            return done
        ends = stop_ids(self.tokenizer, chat=bool(self.tokenizer.chat_template))
        if law.min_tokens:
            law = SamplingLaw(law.temperature, law.top_p, law.top_k, min_tokens=law.min_tokens, stop_ids=ends)
        (done,) = await self._engine.sample(Request(self._prompt(messages), law, 1, most, ends, stops, seed, key))
        return done

    def _prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        template = "own" if self.tokenizer.chat_template else None
        return render(self.tokenizer, messages, generation_prompt=True, template=template).tokens


def write(
    rows: Path, out: Path, variants: Sequence[Variant], how: How, n: int | None = None, servers: Servers = Servers(),
    device: str = "auto", slots: int = 8, say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Plans and texts of every variant, in `out`. Returns what was made, by variant."""
    found = dict(list(read_scored_rows(rows).items())[:n])
    words = None
    if how.tokenizer:
        from trailmark.seats.locate import load_tokenizer

        words = load_tokenizer(how.tokenizer)
    names = dict.fromkeys(m for v in variants for m in (v.planner, v.writer) if m)
    speakers = {name: Speaker(name, servers, words, device, slots) for name in names}
    given = asdict(how) | {"markers": None if how.markers is None else list(how.markers)}
    settings = {"kind": "written", **given, "n": n, **{v.name: [v.planner, v.writer] for v in variants}}
    with data_folder(out, settings) as place:
        work = _Work(rows, out, found, how, speakers, Answers(out / "answers.jsonl"), slots, servers.failures)
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
    """One question to a model. `draw` names its random draws."""

    draw: str
    row: str
    sample: int
    messages: Sequence[Mapping[str, str]]
    law: SamplingLaw
    most: int
    stops: tuple[str, ...] = ()
    plan: str | None = None


class _Work:
    def __init__(
        self, path: Path, out: Path, rows: Mapping[str, Row], how: How, speakers: Mapping[str, Speaker],
        answers: Answers, slots: int, failures: float = 0.0,
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
            _Ask(f"plan {i} {k}", i, k, row["prompt"], law, h.plan_tokens)
            for i, row in self.rows.items()
            for k in range(h.samples)
        ]
        counts, made = Counts(), []
        for ask, said in zip(asks, self.answered(f"{v.name} plans", v.planner, asks)):
            if said is None:
                counts.left_out["failed"] += 1
                continue
            made.append({"id": ask.row, "sample": ask.sample, **said})
            counts.kept["plans"] += 1
            counts.kept["with a marker"] += has_marker(said["text"], self.markers(v))
            counts.kept["cut at the limit"] += said["stop"] == "length"
        write_lines(self.out / f"{v.name}.plans.jsonl", made)
        return counts

    def texts(self, v: Variant) -> Counts:
        if v.planner:
            said = self.read(f"{v.name}.plans.jsonl")
            plans = [(p["id"], p["sample"], plan_of(p["text"], self.markers(v))) for p in said]
        else:
            plans = [(i, k, None) for i in self.rows for k in range(self.how.samples)]
        asks = [self.ask_for_text(v.writer, i, k, plan) for i, k, plan in plans]
        counts, made = Counts(), []
        for ask, said in zip(asks, self.answered(f"{v.name} texts", v.writer, asks)):
            if said is None:
                counts.left_out["failed"] += 1
                continue
            if not said["text"].strip():
                counts.left_out["empty texts"] += 1
                continue
            plan = {} if ask.plan is None else {"plan": ask.plan}
            made.append({"id": ask.row, "sample": ask.sample, **said, **plan})
            counts.kept["texts"] += 1
            counts.kept["cut at the limit"] += said["stop"] == "length"
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
        return _Ask(f"text {i} {sample}", i, sample, messages, law, target.max_tokens, stops, plan)

    def target(self, writer: str, gold: str) -> Target:
        """The wanted length of a text: that of the gold text, which begins with the header, or the user's wish."""
        if self.how.length is not None:
            return target_length(self.how.length)
        words = self.speakers[writer].tokenizer
        return target_length(max(1, len(gold.encode()) // 4) if words is None else len(encode(words, gold)))

    def answered(self, title: str, model: str, asks: Sequence[_Ask]) -> list[dict[str, Any] | None]:
        """Text, number of tokens and end of each answer: the stored one, or a new one. None: it failed, and so many may
        fail."""
        speaker = self.speakers[model]
        keys = [self.key(speaker, a) for a in asks]
        if all(self.answers.get(k) is not None for k in keys):
            return [self.stored(k) for k in keys]
        speaker.open(self.longest(speaker, model, asks))

        failed, in_a_row = list[str](), list[str]()

        async def one(item: tuple[str, _Ask]) -> dict[str, Any] | None:
            key, a = item
            if self.answers.get(key) is None:
                try:
                    done = await speaker.say(a.messages, a.law, a.most, a.stops, self.how.seed, a.draw)
                except EngineError as problem:
                    failed.append(str(problem))
                    in_a_row.append(str(problem))
                    if len(in_a_row) >= PATIENCE and too_many(len(failed), len(asks), self.failures):
                        raise gone(title, in_a_row, "--failures") from problem
                    return None
                in_a_row.clear()
                said = {"text": done.text, "tokens": len(done.tokens) or None, "stop": done.stop}
                self.answers.put(key, json.dumps(said))
            return self.stored(key)

        with Progress(max(1, len(asks)), name=title) as bar:
            made = wait(run_limited(list(zip(keys, asks)), one, self.slots, lambda k: bar.update(k, {})))
        first = next((f"row '{a.row}' of {self.path}" for a, said in zip(asks, made) if said is None), "")
        must_be_few(title, failed, len(asks), self.failures, "--failures", first)
        return made

    def key(self, speaker: Speaker, a: _Ask) -> str:
        said = {"model": speaker.print, "messages": list(a.messages), "max_tokens": a.most, "stop": list(a.stops)}
        law = {"temperature": a.law.temperature, "top_p": a.law.top_p, "top_k": a.law.top_k, "least": a.law.min_tokens}
        return request_key({**said, **law, "seed": self.how.seed, "draw": a.draw})

    def stored(self, key: str) -> dict[str, Any]:
        return json.loads(self.answers.get(key) or "{}")

    def longest(self, speaker: Speaker, model: str, asks: Sequence[_Ask]) -> int:
        """The longest sequence. One that the model cannot hold is refused before anything is asked."""
        most = 1
        for a in asks:
            size = speaker.size(a.messages)
            if speaker.context is not None and size + a.most > speaker.context:
                raise DataError(
                    f"row '{a.row}': the prompt has {size} tokens and the answer may have {a.most}, and {model} reads "
                    f"{speaker.context}: shorten the rows (`data stories --max-tokens`), allow fewer tokens "
                    "(--plan-tokens, --length), or take a model with a longer context.",
                    self.path,
                )
            most = max(most, size + a.most)
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
            "cut": Counter(t["stop"] for t in texts)["length"],
        }  # fmt: skip
        if v.planner:
            plans = self.read(f"{v.name}.plans.jsonl")
            markers = self.markers(v)
            share = sum(has_marker(p["text"], markers) for p in plans) / len(plans) if markers else None
            out |= {"plans": len(plans), "markers": share}
        return out
