"""Play a MODEL of the command line. Settings that the user did not give come from the recipe of the model's run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.ask.store import content_key
from trailmark.config import ModelConfig, SamplingConfig, resolve
from trailmark.errors import TrailmarkError, nearest
from trailmark.failures import must_be_few, unanswered
from trailmark.seats.locate import Located, is_address, locate
from trailmark.seats.names import fix_options
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, Task

if TYPE_CHECKING:
    from trailmark.evaluate.run import Kept
    from trailmark.methods.base import Method
    from trailmark.rollout.play import Seat
    from trailmark.seats.config import HttpSeat

Wanted = tuple[str, dict[str, Any], str, int | None, int]  # task, options, split, number of starts, seed


@dataclass(frozen=True)
class Wish:
    """The options of the command line. None: as in the recipe."""

    task: str | None = None
    options: Sequence[str] = ()
    split: str | None = None
    n: int | None = None
    samples: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    device: str = "auto"
    chat: bool = False
    react: bool = False
    served: str | None = None
    headers: Sequence[str] = ()
    query: Sequence[str] = ()
    key_env: str | None = None
    search: str | None = None
    value: str | None = None
    budget: int | None = None
    tree: bool = False
    beside: str | None = None  # a MODEL whose run gives task, split and starts to a model without a run
    whole: bool = False  # every question of the file, whatever the recipe's eval.n says (--leaderboard)
    out: Path | None = None  # the plays of a server are kept next to this file until all of them are there
    failures: float = 0.0  # share of them that may fail
    put: Sequence[str] = ()  # SEAT=MODEL: another model in a seat of the run


def varied(wish: Wish, vary: str | None) -> list[tuple[str, Wish]]:
    """The wish with each value of a task's option, `KEY=A,B,…`, and how a row is called. A value may end in @SPLIT."""
    if vary is None:
        return [("", wish)]
    key, equals, values = vary.partition("=")
    if not equals or not key.isidentifier() or not all(values.split(",")):
        raise TrailmarkError(f"--vary '{vary}': expected KEY=VALUE,VALUE, such as order=ABCD,DCBA.")
    made = []
    for value in dict.fromkeys(values.split(",")):
        word, _, split = value.partition("@")
        one = replace(wish, options=[*wish.options, f"{key}={word}"], split=split or wish.split)
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

    said = [f"{what} since the run began" for what in changed_files(run, config)]
    if source.judge is not None and (why := source.judge.changed(run / "judge")):
        said.append(f"{why}: rewards of this evaluation cannot be compared with those of the run")
    return said


def play_model(name: str, wish: Wish) -> tuple[list[Episode], dict[str, Any]]:
    """Returns the episodes, and a plain record of how they were made. The record may also hold the policy's tokenizer
    (if there is a reflector), further rows (`beside`) and the judge's `notes`; the caller removes these before
    printing. `name` may also be the address of a server, "random" or "oracle"."""
    from trailmark.rollout.judged import noting
    from trailmark.tasks import get_task, task_options

    found = locate(name)
    recipe = found.recipe
    alone = not recipe or wish.task is not None or wish.chat or plays_alone(recipe, task_options(wish.options))
    if wish.search is not None and (name in ("random", "oracle") or not alone):
        raise TrailmarkError(
            f"eval --search cannot search what {name} plays: it needs one model that plays a task alone."
        )
    if wish.put and (not recipe or wish.task is not None or wish.chat or wish.search is not None):
        raise TrailmarkError(
            "eval --put changes the seats of a run that plays its own task: name a run, and leave out --task, --chat "
            "and --search."
        )
    if not alone or wish.put:
        return play_seats(found, wish)
    own = bool(recipe) and (wish.task is not None or bool(found.section("task")))
    whose = found if own or wish.beside is None else locate(wish.beside)
    if recipe and not own:  # a run without a task plays that of the other run, with its settings
        found = replace(found, recipe={**recipe, **{k: whose.section(k) for k in ("sampling", "engine")}})
    like, run = whose.recipe, whose.run
    wanted = task, options, *_ = _wanted(wish, like)
    source = get_task(task, **fix_options(options, run if wish.task is None else None))
    if wish.whole:
        must_ask_all(source, wanted[2])
    with noting(source) as notes:
        episodes, about = _play_alone(found, wish, source, wanted, like)
    if run is not None and wish.task is None and (changed := changed_since(run, method_of(like)[1], source)):
        about["warnings"] = changed
    return episodes, about | {"notes": notes}


def _play_alone(
    found: Located, wish: Wish, source: Any, wanted: Wanted, like: Mapping[str, Any]
) -> tuple[list[Episode], dict[str, Any]]:
    """Let one model play a task. Starts and settings come from the recipe `like`, unless the wish says otherwise."""
    name, folder, recipe = found.name, found.folder, found.recipe
    task, options, split, n, seed = wanted
    said = {"temperature": wish.temperature, "top_p": wish.top_p, "max_tokens": wish.max_tokens}
    given = {k: v for k, v in said.items() if v is not None}
    sampling = resolve({**(recipe.get("sampling") or {}), **given}, SamplingConfig)
    about = {"model": folder, "task": task, "options": options, "split": split, "n": n, "samples": wish.samples,
             "seed": seed, "sampling": sampling.model_dump()}  # fmt: skip
    starts = partial(starts_like, like if wish.task is None else {}, source, split, n, seed)
    if name in ("random", "oracle"):
        from trailmark.models.tiny import tiny_tokenizer
        from trailmark.seats.reference_players import oracle_player, random_player

        player = random_player if name == "random" else oracle_player
        every = [t for t in starts() for _ in range(wish.samples)]
        return all_answered(name, player(source, seed + 1, tiny_tokenizer(), every), wish), about

    from trailmark.evaluate.prompted import Prompted, lists_actions
    from trailmark.evaluate.run import evaluate

    remote = is_address(name)
    if remote:
        seat = remote_seat(name, wish, sampling)
    else:
        seat = local_seat(found, wish, sampling, source)
    kept = kept_plays(name, wish, about, source, [seat])
    tasks = starts()  # after `bind`: the world may need the tokenizer, as in training
    if remote and not wish.chat and not lists_actions(source, split, seed):
        seat = searched_seat(source, seat, wish)
        played = evaluate(source, [seat], tasks=tasks, samples=wish.samples, seed=seed, kept=kept)
        return played.episodes, {**about, "search": wish.search, "value": wish.value}
    if wish.search is not None:
        from trailmark.evaluate.searched import play_searched

        about.pop("kept", None)
        chosen, plain, about = play_searched(source, seat, wish, about)
        all_answered(name, list({e.id: e for e in (*plain, *chosen)}.values()), wish)
        return chosen, about
    if not (remote or wish.chat):
        return evaluate(source, [seat], tasks=tasks, samples=wish.samples, seed=seed, kept=kept).episodes, about
    prompted = Prompted(wish.react)
    kept = kept and replace(kept, noted=lambda e: prompted.noted([e])[0])
    report = evaluate(source, [seat], prompted.protocol(), tasks=tasks, samples=wish.samples, seed=seed, kept=kept)
    turns = sum(t.action is not None for e in report.episodes for t in e.turns)
    noted = prompted.noted(report.episodes)
    drawn = sum(e.info["guessed"] for e in noted)
    return noted, {**about, "react": wish.react, "decisions": turns, "guessed": drawn}


def all_answered(name: str, played: list[Episode], wish: Wish) -> list[Episode]:
    """Plays that are not kept one by one: an error if servers did not answer in too many of them."""
    lost = list(unanswered(played).values())
    must_be_few(f"plays of {name}", lost, len(played), wish.failures, "--failures", then="Nothing was kept.")
    return played


def kept_plays(name: str, wish: Wish, about: dict[str, Any], source: Any, seats: Sequence[Seat]) -> Kept | None:
    """Where plays are kept until all of them are there, if a server plays or judges: another file for other settings.
    Adds the place to `about`."""
    from trailmark.evaluate.run import Kept

    judged = getattr(getattr(source.judge, "config", None), "server", None) is not None
    if wish.out is None or not (judged or any(s.kind == "remote" for s in seats)):
        return None
    asked = {**about, "name": name, "chat": wish.chat, "react": wish.react, "served": wish.served,
             "query": list(wish.query), "search": wish.search, "value": wish.value, "budget": wish.budget}  # fmt: skip
    about["kept"] = wish.out.with_name(f"{wish.out.stem}.{content_key(asked)[:12]}.jsonl")
    if judged:
        source.judge.keep(judge_of(about["kept"]))  # what it answered about plays that are not stored yet
    return Kept(about["kept"], wish.failures, f"plays of {name}")


def judge_of(kept: Path) -> Path:
    """The folder of a judge's answers, beside the plays that are kept."""
    return kept.with_suffix(".judge")


def _wanted(wish: Wish, like: Mapping[str, Any]) -> Wanted:
    """Task, options, split, number of starts and seed: as the wish says, else as the recipe `like` does."""
    from trailmark.tasks import task_options

    own, evaluated = like.get("task") or {}, like.get("eval") or {}
    if wish.task is None and "name" not in own:
        raise TrailmarkError("eval: which task? Such as --task taxi mode=pickup.")
    options = own.get("options") or {} if wish.task in (None, own.get("name")) else {}
    options = asked_whole(wish, wish.task or own["name"], options | task_options(wish.options))
    split, n = wish.split or evaluated.get("split", "test"), wish.n or evaluated.get("n")
    seed = like.get("seed", 0) if wish.seed is None else wish.seed
    return wish.task or own["name"], options, split, None if wish.whole else n, seed


def asked_whole(wish: Wish, task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task. If every question is asked, those that would be left out are kept."""
    if wish.whole and task != "logic":
        raise TrailmarkError(f"eval: --leaderboard is for task logic, not for '{task}'.")
    keep = wish.whole and options.get("repeats", "leave") == "leave"
    return {**options, **({"repeats": "keep"} if keep else {})}


def must_ask_all(source: Any, split: str) -> None:
    """Refuse a split of which only some questions would be asked."""
    asked, size = len(source.questions(split)), source.size(split)
    if asked < size:
        raise TrailmarkError(
            f"eval: --leaderboard needs an answer to every question, and cut={source.cut} leaves {asked} of {size} to "
            f"'{split}': name a split of the files with --split, and leave out cut."
        )


def remote_seat(url: str, wish: Wish, sampling: SamplingConfig) -> Seat:
    """The seat of a model behind an address. The server must answer."""
    from trailmark.rollout.play import Seat
    from trailmark.seats.open import open_server
    from trailmark.seats.table import sampling_law

    engine = open_server(server(url, wish), "")
    return Seat("policy", engine, sampling_law(sampling), sampling.max_tokens, kind="remote")


def server(url: str, wish: Wish) -> HttpSeat:
    from trailmark.seats.config import HttpSeat
    from trailmark.seats.open import UNNAMED

    return HttpSeat(address=url, model=wish.served or UNNAMED, headers=pairs(wish.headers, "--header"),
                    query=pairs(wish.query, "--query"), api_key_env=wish.key_env)  # fmt: skip


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE options. VALUE may be env:VARIABLE, so that a secret (Azure's `api-key`) need not be on the
    command line."""
    for word in words:
        if "=" not in word:
            raise TrailmarkError(f"{option} '{word}': expected NAME=VALUE, such as api-version=2024-10-21.")
    return {k.strip(): v for k, _, v in (w.partition("=") for w in words)}


def local_seat(found: Located, wish: Wish, sampling: SamplingConfig, source: Any) -> Seat:
    """The seat of a model in this process, with the engine settings of its run. `source` takes its labels from the
    tokenizer."""
    from trailmark.seats.config import LocalSeat
    from trailmark.seats.table import Table

    model = ModelConfig.model_validate({"name": found.folder, "device": wish.device, "dtype": found.dtype})
    table = Table({"policy": LocalSeat(model=model, engine=found.engine, sampling=sampling)})
    table.bind(source)
    return table.seats[0]


def searched_seat(source: Any, seat: Seat, wish: Wish) -> Seat:
    """The seat of a server: plain, or with a search over its answers."""
    if wish.search is None:
        return seat
    from trailmark.evaluate.searched import answer_search
    from trailmark.rollout.search import parse_plan

    ends = tuple(source.step_ends)
    return answer_search(seat, parse_plan(wish.search, step_ends=ends, budget=wish.budget), wish.value)


def starts_like(recipe: Mapping[str, Any], source: Any, split: str, n: int | None, seed: int) -> Sequence[Task]:
    """The starts of the run's own evaluation. Without a run: the starts of the task."""
    if not recipe:
        return draw_tasks(source, split, n, seed)
    method, config = method_of(recipe)
    return method.starts(config, source, split, n, seed)


def play_seats(found: Located, wish: Wish) -> tuple[list[Episode], dict[str, Any]]:
    """Play a run with several seats: all models come from one checkpoint, as in the run's own evaluation."""
    from trailmark.evaluate.run import evaluate
    from trailmark.rollout.judged import noting
    from trailmark.seats.table import Table, stored_seats
    from trailmark.tasks import get_task, task_options

    task = found.section("task")
    options = asked_whole(wish, str(task.get("name")), (task.get("options") or {}) | task_options(wish.options))
    method, config = method_of(found.recipe, {**task, "options": options})
    source = get_task(config.task.name, **fix_options(options, found.run))
    stored = stored_seats(
        method.seats_of(config), found.checkpoint or Path(found.folder).parent, config.model, wish.device
    )
    stored = {**stored, **other_players(stored, wish)}
    table = Table({name: redrawn(seat, wish) for name, seat in stored.items()}, seed=config.seed)
    table.bind(source)
    split, n = wish.split or config.eval.split, None if wish.whole else wish.n or config.eval.n
    if wish.whole:
        must_ask_all(source, split)
    seed = config.seed if wish.seed is None else wish.seed
    tasks, protocol = method.starts(config, source, split, n, seed), method.evaluation_protocol(config, source)
    about = {"model": found.folder, "task": config.task.name, "options": options, "split": split, "n": n,
             "samples": wish.samples, "seed": seed, "seats": [s.name for s in table.seats],
             **({"put": list(wish.put)} if wish.put else {})}  # fmt: skip
    kept = kept_plays(found.name, wish, about | {"law": [wish.temperature, wish.top_p]}, source, table.seats)
    with noting(source) as notes:
        report = evaluate(source, table.seats, protocol, tasks=tasks, samples=wish.samples, seed=seed, kept=kept)
    about |= {"tokenizer": table.tokenizer, "commands": source.commands, "notes": notes}
    about |= {} if kept is None else {"kept": kept.path}
    if found.run is not None and (changed := changed_since(found.run, config, source)):
        about["warnings"] = changed
    return report.episodes, about


def other_players(seats: Mapping[str, Any], wish: Wish) -> dict[str, Any]:
    """The seats that `--put SEAT=MODEL` fills with other models, which sample as the run's recipe says. Of a checkpoint
    with several models, the one of this seat is meant, else its policy."""
    from trailmark.seats.config import LocalSeat

    out: dict[str, Any] = {}
    for word in wish.put:
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


def redrawn(seat: Any, wish: Wish) -> Any:
    """A seat in this process with the sampling settings of the wish."""
    said = {"temperature": wish.temperature, "top_p": wish.top_p}
    more = {k: v for k, v in said.items() if v is not None}
    if seat.kind != "local" or not more:
        return seat
    return seat.model_copy(update={"sampling": seat.sampling.model_copy(update=more)})
