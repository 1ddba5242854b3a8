"""Play a MODEL of the command line. Settings that the user did not give come from the recipe of the model's run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark import registry
from trailmark.ask.store import content_key
from trailmark.config import ModelConfig, SamplingConfig, resolve
from trailmark.errors import TrailmarkError, nearest
from trailmark.evaluate.options import CountOptions, PlayOptions
from trailmark.failures import must_be_few, unanswered
from trailmark.score.config import pin_options
from trailmark.seats.model_names import Located, is_address, locate
from trailmark.tasks.base import draw_tasks
from trailmark.types import Annotation, Episode, Task

if TYPE_CHECKING:
    from trailmark.evaluate.run import Kept
    from trailmark.methods.base import Method
    from trailmark.rollout.play import Seat
    from trailmark.seats.config import HttpSeat


@dataclass
class Played:
    """What a model played. `about` says how, for the line of JSON."""

    about: dict[str, Any]
    source: Any
    episodes: list[Episode] = field(default_factory=list)
    notes: Sequence[Annotation] = ()  # of the judge
    beside: Sequence[dict[str, Any]] = ()  # further rows of a table
    stored: Path | None = None  # the plays of a server, until all of them are there
    tokenizer: Any = None  # of the policy, if another seat advises it
    board: Any = None  # the leaderboard that wants its answers

    def rows(self, name: str, count: CountOptions) -> list[dict[str, Any]]:
        from trailmark.evaluate.run import stage_rows

        commands = None if self.tokenizer is None else self.source.commands
        return stage_rows(self.episodes, name, count.side, count.seat, count.failed.value, self.tokenizer, commands)


def varied(wish: PlayOptions) -> list[tuple[str, PlayOptions]]:
    """The wish with each value of the task's option `--vary KEY=A,B,…`, and how a row is called. A value may end in
    @SPLIT."""
    if wish.vary is None:
        return [("", wish)]
    key, equals, values = wish.vary.partition("=")
    if not equals or not key.isidentifier() or not all(values.split(",")):
        raise TrailmarkError(f"--vary '{wish.vary}': expected KEY=VALUE,VALUE, such as order=ABCD,DCBA.")
    made = []
    for value in dict.fromkeys(values.split(",")):
        word, _, split = value.partition("@")
        one = replace(wish, words=[*wish.words, f"{key}={word}"], split=split or wish.split)
        made.append((f", {key}={value}", one))
    return made


def with_task(names: Sequence[str]) -> str:
    """The first of several models whose run has a task, else the first one: the others play its starts."""
    return next((name for name in names if locate(name).section("task")), names[0])


def method_of(recipe: Mapping[str, Any], task: Mapping[str, Any] | None = None) -> tuple[type[Method], Any]:
    """The method of a run's recipe, and its config, with `task` in place of the recipe's task."""
    from trailmark.methods import get_method

    method = get_method(str(recipe["method"]))
    return method, resolve({**recipe, **({} if task is None else {"task": task})}, method.Config)


def plays_alone(recipe: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> bool:
    """Whether one model of a run plays its task alone. `options` are added to the task's options in the recipe."""
    from trailmark.tasks import get_task

    method, config = method_of(recipe)
    if recipe.get("seats") or len(method.seats_of(config)) != 1:
        return False
    if (task := getattr(config, "task", None)) is None:
        return True
    return method.protocol(config, get_task(task.name, **{**task.options, **(options or {})})) is None


def changed_since(run: Path, config: Any, source: Any) -> list[str]:
    """One sentence for each thing that has changed since the run: its judge, a data file, a function of a seat."""
    from trailmark.runs.data_files import changed_files

    changes = [f"{what} since the run began" for what in changed_files(run, config)]
    if source.judge is not None and (why := source.judge.changed(run / "judge")):
        changes.append(f"{why}: rewards of this evaluation cannot be compared with those of the run")
    return changes


def play_model(name: str, wish: PlayOptions) -> Played:
    """`name` may also be the address of a server, "random" or "oracle"."""
    from trailmark.rollout.judging import collecting_notes
    from trailmark.tasks import get_task, task_options

    found = locate(name)
    recipe = found.recipe
    alone = not recipe or wish.task is not None or wish.chat or plays_alone(recipe, task_options(wish.words))
    if wish.search is not None and (name in ("random", "oracle") or not alone):
        raise TrailmarkError(
            f"eval --search cannot search what {name} plays: it needs one model that plays a task alone."
        )
    if wish.put and (not recipe or wish.task is not None or wish.chat or wish.search is not None):
        raise TrailmarkError(
            "eval --put changes the seats of a run that plays its own task: name a run, and leave out --task, --chat "
            "and --search."
        )
    seated = not alone or bool(wish.put)
    own = bool(recipe) and (seated or wish.task is not None or bool(found.section("task")))
    whose = found if own or wish.like is None else locate(wish.like)
    if recipe and not own:  # a run without a task plays that of the other run, with its settings
        found = replace(found, recipe={**recipe, **{k: whose.section(k) for k in ("sampling", "engine")}})
    like = whose.recipe if wish.task is None else {}  # the recipe that says what is not given
    about: dict[str, Any] = {"model": found.folder, **_start(wish, whose.recipe)}
    task, options, split = about["task"], about["options"], about["split"]
    source = get_task(task, **pin_options(options, whose.run if wish.task is None else None))
    made = Played(about, source)
    if wish.leaderboard is not None:
        made.board = registry.load("leaderboards", task)(source, split)
    with collecting_notes(source) as made.notes:
        _play_seats(found, wish, made) if seated else _play_alone(found, wish, made, like)
    if like and whose.run is not None and (changed := changed_since(whose.run, method_of(like)[1], source)):
        about["warnings"] = changed
    return made


def _start(wish: PlayOptions, like: Mapping[str, Any]) -> dict[str, Any]:
    """What is played: as the wish says, else as the recipe `like` does."""
    from trailmark.tasks import task_options

    own, evaluated = like.get("task") or {}, like.get("eval") or {}
    if wish.task is None and "name" not in own:
        raise TrailmarkError("eval: which task? Such as --task taxi mode=pickup.")
    task, n = wish.task or own["name"], wish.n or evaluated.get("n")
    options = own.get("options") or {} if task == own.get("name") else {}
    options = options | task_options(wish.words)
    if wish.leaderboard is not None:
        if task not in (boards := registry.ours("leaderboards")):
            raise TrailmarkError(f"eval: --leaderboard is for task {' or '.join(boards)}, not for '{task}'.")
        options, n = registry.load("leaderboards", task).options(options), None
    return {"task": task, "options": options, "split": wish.split or evaluated.get("split", "test"), "n": n,
            "samples": wish.samples, "seed": like.get("seed", 0) if wish.seed is None else wish.seed}  # fmt: skip


def _play_alone(found: Located, wish: PlayOptions, made: Played, like: Mapping[str, Any]) -> None:
    """Let one model play. Starts and settings come from the recipe `like`, unless the wish says otherwise."""
    name, source, about = found.name, made.source, made.about
    split, seed = about["split"], about["seed"]
    asked = {"temperature": wish.temperature, "top_p": wish.top_p, "max_tokens": wish.max_tokens}
    given = {k: v for k, v in asked.items() if v is not None}
    sampling = resolve({**(found.recipe.get("sampling") or {}), **given}, SamplingConfig)
    about["sampling"] = sampling.model_dump()
    if name in ("random", "oracle"):
        from trailmark.models.tiny import tiny_tokenizer
        from trailmark.rollout.reference_players import oracle_player, random_player

        player = random_player if name == "random" else oracle_player
        every = [t for t in starts_like(like, source, about) for _ in range(wish.samples)]
        made.episodes = player(source, seed + 1, tiny_tokenizer(), every)
        must_be_answered(name, made.episodes, wish)
        return

    from trailmark.evaluate.run import evaluate
    from trailmark.evaluate.zero_shot import ZeroShot, lists_actions

    remote = is_address(name)
    seat = remote_seat(name, wish, sampling) if remote else local_seat(found, wish.device, sampling, source)
    # after `bind`: the world may need the tokenizer, as in training
    how: dict[str, Any] = {"tasks": starts_like(like, source, about), "samples": wish.samples, "seed": seed}
    in_words = wish.chat or (remote and lists_actions(source, split, seed))
    if wish.search is not None and (in_words or not remote):
        from trailmark.evaluate.search import play_searched

        plain = play_searched(seat, wish, made)
        must_be_answered(name, list({e.id: e for e in (*plain, *made.episodes)}.values()), wish)
        return
    kept = kept_plays(name, wish, made, [seat])
    made.stored = None if kept is None else kept.path
    if not in_words:
        if remote:
            seat = searched_seat(source, seat, wish)
            about |= {"search": wish.search, "value": wish.value}
        made.episodes = evaluate(source, [seat], kept=kept, **how).episodes
        return
    words = ZeroShot(wish.react)
    kept = kept and replace(kept, noted=lambda e: words.noted([e])[0])
    made.episodes = words.noted(evaluate(source, [seat], words.protocol(), kept=kept, **how).episodes)
    turns = sum(t.action is not None for e in made.episodes for t in e.turns)
    about |= {"react": wish.react, "decisions": turns, "guessed": sum(e.info["guessed"] for e in made.episodes)}


def must_be_answered(name: str, played: list[Episode], wish: PlayOptions) -> None:
    """Plays that are not stored one by one: an error if servers did not answer in too many of them."""
    lost = list(unanswered(played).values())
    must_be_few(f"plays of {name}", lost, len(played), wish.failures, "--failures", then="Nothing was kept.")


def kept_plays(name: str, wish: PlayOptions, made: Played, seats: Sequence[Seat], **more: Any) -> Kept | None:
    """Where plays are stored until all of them are there, if a server plays or judges: another file for other
    settings."""
    from trailmark.evaluate.run import Kept

    judge = made.source.judge
    judged = judge is not None and judge.asks_server
    if wish.out is None or not (judged or any(s.kind == "remote" for s in seats)):
        return None
    asked = {**made.about, **more, "name": name, "chat": wish.chat, "react": wish.react, "served": wish.server.served,
             "query": list(wish.server.query or ()), "search": wish.search, "value": wish.value,
             "budget": wish.budget}  # fmt: skip
    path = wish.out.with_name(f"{wish.out.stem}.{content_key(asked)[:12]}.jsonl")
    if judged:
        judge.keep(judge_of(path))  # its answers about plays that are not stored yet
    return Kept(path, wish.failures, f"plays of {name}")


def judge_of(stored: Path) -> Path:
    """The folder of a judge's answers, beside the plays that are stored."""
    return stored.with_suffix(".judge")


def remote_seat(url: str, wish: PlayOptions, sampling: SamplingConfig) -> Seat:
    """The seat of a model behind an address. The server must answer."""
    from trailmark.rollout.play import Seat
    from trailmark.seats.open import open_server
    from trailmark.seats.open_seats import sampling_law

    engine = open_server(server(url, wish), "")
    return Seat("policy", engine, sampling_law(sampling), sampling.max_tokens, kind="remote")


def server(url: str, wish: PlayOptions) -> HttpSeat:
    from trailmark.seats.config import HttpSeat
    from trailmark.seats.open import UNNAMED

    return HttpSeat.model_validate({"address": url, "model": UNNAMED, **wish.server.section()})


def local_seat(found: Located, device: str, sampling: SamplingConfig, source: Any) -> Seat:
    """The seat of a model in this process, with the engine settings of its run. `source` takes its labels from the
    tokenizer."""
    from trailmark.seats.config import LocalSeat
    from trailmark.seats.open_seats import OpenSeats

    model = ModelConfig.model_validate({"name": found.folder, "device": device, "dtype": found.dtype})
    opened = OpenSeats({"policy": LocalSeat(model=model, engine=found.engine, sampling=sampling)})
    opened.bind(source)
    return opened.seats[0]


def searched_seat(source: Any, seat: Seat, wish: PlayOptions) -> Seat:
    """The seat of a server: plain, or with a search over its answers."""
    if wish.search is None:
        return seat
    from trailmark.evaluate.search import answer_search
    from trailmark.rollout.search import parse_plan

    ends = tuple(source.step_ends)
    return answer_search(seat, parse_plan(wish.search, step_ends=ends, budget=wish.budget), wish.value)


def starts_like(recipe: Mapping[str, Any], source: Any, about: Mapping[str, Any]) -> Sequence[Task]:
    """The starts of the run's own evaluation. Without a run: the starts of the task."""
    where = source, about["split"], about["n"], about["seed"]
    if not recipe:
        return draw_tasks(*where)
    method, config = method_of(recipe)
    return method.starts(config, *where)


def _play_seats(found: Located, wish: PlayOptions, made: Played) -> None:
    """Play a run with several seats: all models come from one checkpoint, as in the run's own evaluation."""
    from trailmark.evaluate.run import evaluate
    from trailmark.seats.open_seats import OpenSeats, stored_seats

    source, about = made.source, made.about
    method, config = method_of(found.recipe, {**found.section("task"), "options": about["options"]})
    stored = stored_seats(
        method.seats_of(config), found.checkpoint or Path(found.folder).parent, config.model, wish.device
    )
    stored = {**stored, **other_players(stored, wish)}
    opened = OpenSeats({name: redrawn(seat, wish) for name, seat in stored.items()}, seed=config.seed)
    opened.bind(source)
    tasks = method.starts(config, source, about["split"], about["n"], about["seed"])
    protocol = method.evaluation_protocol(config, source)
    about |= {"seats": [s.name for s in opened.seats], **({"put": wish.put} if wish.put else {})}
    kept = kept_plays(found.name, wish, made, opened.seats, law=[wish.temperature, wish.top_p])
    report = evaluate(
        source, opened.seats, protocol, tasks=tasks, samples=wish.samples, seed=about["seed"], kept=kept
    )
    made.episodes, made.tokenizer = report.episodes, opened.tokenizer
    made.stored = None if kept is None else kept.path


def other_players(seats: Mapping[str, Any], wish: PlayOptions) -> dict[str, Any]:
    """The seats that `--put SEAT=MODEL` fills with other models, which sample as the run's recipe says. Of a checkpoint
    with several models, the one of this seat is meant, else its policy."""
    from trailmark.seats.config import LocalSeat

    out: dict[str, Any] = {}
    for word in wish.put or ():
        name, _, model = word.partition("=")
        if not model:
            raise TrailmarkError(f"eval --put '{word}': expected SEAT=MODEL, such as agent=runs/other.")
        if (old := seats.get(name)) is None:
            raise TrailmarkError(
                f"eval --put {word}: the run has no seat '{name}' (seats: {', '.join(seats)}).{nearest(name, seats)}"
            )
        same = {"sampling": old.sampling, "side": old.side, "trained": old.trained}
        if is_address(model):
            out[name] = server(model, wish).model_copy(update=same)
            continue
        found = locate(model, name, f"--put {name}", otherwise="policy")
        given = ModelConfig.model_validate({"name": found.folder, "device": wish.device, "dtype": found.dtype})
        engine = old.engine if isinstance(old, LocalSeat) else found.engine
        out[name] = LocalSeat(model=given, engine=engine, **same)
    return out


def redrawn(seat: Any, wish: PlayOptions) -> Any:
    """A seat in this process with the sampling settings of the wish."""
    asked = {"temperature": wish.temperature, "top_p": wish.top_p}
    more = {k: v for k, v in asked.items() if v is not None}
    if seat.kind != "local" or not more:
        return seat
    return seat.model_copy(update={"sampling": seat.sampling.model_copy(update=more)})
