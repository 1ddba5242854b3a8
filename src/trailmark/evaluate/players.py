"""From a MODEL on the command line to played episodes, with what its run's recipe says wherever the person said
nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark.config import ModelConfig, SamplingConfig, resolve
from trailmark.errors import TrailmarkError
from trailmark.seats.locate import Located, is_address, locate
from trailmark.tasks.base import draw_tasks
from trailmark.types import Episode, Task

if TYPE_CHECKING:
    from trailmark.methods.base import Method
    from trailmark.rollout.play import Seat


@dataclass(frozen=True)
class Wish:
    """What was asked for; None: as the recipe has it."""

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
    beside: str | None = None  # the MODEL whose run says task, split and starts for one that lies in no run


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
        made.append((f", {key}={value}", replace(wish, options=[*wish.options, f"{key}={word}"], split=split or wish.split)))
    return made


def method_of(recipe: Mapping[str, Any], task: Mapping[str, Any] | None = None) -> tuple[type[Method], Any]:
    """The method of a run's recipe, and its config; with `task` in place of the recipe's."""
    from trailmark.methods import get_method

    method = get_method(str(recipe["method"]))
    return method, resolve({**recipe, **({} if task is None else {"task": task})}, method.Config)


def plays_alone(recipe: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> bool:
    """Whether one model of a run plays its task alone. `options` are set in the task beside those of the recipe."""
    from trailmark.tasks import get_task

    method, config = method_of(recipe)
    if recipe.get("seats") or len(method.seats_of(config)) != 1:
        return False
    if (task := getattr(config, "task", None)) is None:
        return True
    return method.protocol(config, get_task(task.name, **{**task.options, **(options or {})})) is None


def play_model(name: str, wish: Wish) -> tuple[list[Episode], dict[str, Any]]:
    """The episodes, and a plain record of how they were made (with the policy's tokenizer, where a reflector sits
    beside it, and rows that belong `beside` the model's own: whoever prints it takes these out). `name` may also be the
    address of a server, "random" or "oracle"."""
    from trailmark.tasks import get_task, task_options

    found = locate(name)
    folder, recipe = found.folder, found.recipe
    alone = not recipe or wish.task is not None or wish.chat or plays_alone(recipe, task_options(wish.options))
    if wish.search is not None and (name in ("random", "oracle") or not alone):
        raise TrailmarkError(
            f"eval --search cannot search what {name} plays: it needs one model that plays a task alone."
        )
    if not alone:
        return play_seats(found, wish)
    like = recipe or (locate(wish.beside).recipe if wish.beside else {})
    own = like.get("task") or {}
    if wish.task is None and "name" not in own:
        raise TrailmarkError("eval: which task? Such as --task taxi mode=pickup.")
    task = wish.task or own["name"]
    options = ({} if wish.task not in (None, own.get("name")) else own.get("options") or {}) | task_options(
        wish.options
    )
    evaluated = like.get("eval") or {}
    split = wish.split or evaluated.get("split", "test")
    n = wish.n or evaluated.get("n")
    seed = like.get("seed", 0) if wish.seed is None else wish.seed
    said = {"temperature": wish.temperature, "top_p": wish.top_p, "max_tokens": wish.max_tokens}
    sampling = resolve(
        {**(recipe.get("sampling") or {}), **{k: v for k, v in said.items() if v is not None}}, SamplingConfig
    )
    source = get_task(task, **options)
    about = {"model": folder, "task": task, "options": options, "split": split, "n": n, "samples": wish.samples,
             "seed": seed, "sampling": sampling.model_dump()}  # fmt: skip
    starts = partial(starts_like, like if wish.task is None else {}, source, split, n, seed)
    if name in ("random", "oracle"):
        from trailmark.methods.reflect_play import oracle_player, random_player
        from trailmark.models.tiny import tiny_tokenizer

        player = random_player if name == "random" else oracle_player
        every = [t for t in starts() for _ in range(wish.samples)]
        return player(source, seed + 1, tiny_tokenizer(), every), about

    from trailmark.evaluate.prompted import Prompted, lists_actions
    from trailmark.evaluate.run import evaluate

    remote = is_address(name)
    if remote:
        seat = remote_seat(name, wish, sampling)
    else:
        seat = local_seat(found, wish, sampling, source)
    tasks = starts()  # now that the world knows the tokenizer, as in training
    if remote and not wish.chat and not lists_actions(source, split, seed):
        seat = searched_seat(source, seat, wish)
        played = evaluate(source, [seat], tasks=tasks, samples=wish.samples, seed=seed)
        return played.episodes, {**about, "search": wish.search, "value": wish.value}
    if wish.search is not None:
        from trailmark.evaluate.searched import play_searched

        return play_searched(source, seat, wish, about)
    if not (remote or wish.chat):
        return evaluate(source, [seat], tasks=tasks, samples=wish.samples, seed=seed).episodes, about
    prompted = Prompted(wish.react)
    report = evaluate(source, [seat], prompted.protocol(), tasks=tasks, samples=wish.samples, seed=seed)
    turns = sum(t.action is not None for e in report.episodes for t in e.turns)
    drawn = sum(prompted.guessed.values())
    return prompted.noted(report.episodes), {**about, "react": wish.react, "decisions": turns, "guessed": drawn}


def remote_seat(url: str, wish: Wish, sampling: SamplingConfig) -> Seat:
    """A model behind an address, which must answer."""
    from trailmark.rollout.play import Seat
    from trailmark.seats.config import HttpSeat
    from trailmark.seats.table import UNNAMED, open_server, sampling_law

    given = HttpSeat(address=url, model=wish.served or UNNAMED, headers=_pairs(wish.headers, "--header"),
                     query=_pairs(wish.query, "--query"), api_key_env=wish.key_env)  # fmt: skip
    return Seat("policy", open_server(given, ""), sampling_law(sampling), sampling.max_tokens, kind="remote")


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """NAME=VALUE of an option. VALUE may be env:VARIABLE, so that a key (Azure's `api-key`) need not stand on a command
    line."""
    for word in words:
        if "=" not in word:
            raise TrailmarkError(f"{option} '{word}': expected NAME=VALUE, such as api-version=2024-10-21.")
    return {k.strip(): v for k, _, v in (w.partition("=") for w in words)}


def local_seat(found: Located, wish: Wish, sampling: SamplingConfig, source: Any) -> Seat:
    """A model in this process, with the engine of its run's recipe; `source` takes its labels from it."""
    from trailmark.seats.config import LocalSeat
    from trailmark.seats.table import Table

    model = ModelConfig.model_validate({"name": found.folder, "device": wish.device, "dtype": found.dtype})
    table = Table({"policy": LocalSeat(model=model, engine=found.engine, sampling=sampling)})
    table.bind(source)
    return table.seats[0]


def searched_seat(source: Any, seat: Seat, wish: Wish) -> Seat:
    """The seat of a server as a wish has it: plain, or with a search over its answers."""
    if wish.search is None:
        return seat
    from trailmark.evaluate.searched import answer_search
    from trailmark.rollout.search import parse_plan

    ends = tuple(source.step_ends)
    return answer_search(seat, parse_plan(wish.search, step_ends=ends, budget=wish.budget), wish.value)


def starts_like(recipe: Mapping[str, Any], source: Any, split: str, n: int | None, seed: int) -> Sequence[Task]:
    """The starts that a run's own evaluation plays; of no run, those of the world."""
    if not recipe:
        return draw_tasks(source, split, n, seed)
    method, config = method_of(recipe)
    return method.starts(config, source, split, n, seed)


def play_seats(found: Located, wish: Wish) -> tuple[list[Episode], dict[str, Any]]:
    """A run whose method seats several players: all of them from one checkpoint, as the run itself evaluates."""
    from trailmark.evaluate.run import evaluate
    from trailmark.seats.table import Table, stored_seats
    from trailmark.tasks import get_task, task_options

    task = found.section("task")
    options = (task.get("options") or {}) | task_options(wish.options)
    method, config = method_of(found.recipe, {**task, "options": options})
    source = get_task(config.task.name, **options)
    stored = stored_seats(
        method.seats_of(config), found.checkpoint or Path(found.folder).parent, config.model, wish.device
    )
    table = Table({name: redrawn(seat, wish) for name, seat in stored.items()}, seed=config.seed)
    table.bind(source)
    split, n = wish.split or config.eval.split, wish.n or config.eval.n
    seed = config.seed if wish.seed is None else wish.seed
    tasks, protocol = method.starts(config, source, split, n, seed), method.evaluation_protocol(config, source)
    report = evaluate(source, table.seats, protocol, tasks=tasks, samples=wish.samples, seed=seed)
    about = {"model": found.folder, "task": config.task.name, "options": options, "split": split, "n": n,
             "samples": wish.samples, "seed": seed, "seats": [s.name for s in table.seats],
             "tokenizer": table.tokenizer}  # fmt: skip
    return report.episodes, about


def redrawn(seat: Any, wish: Wish) -> Any:
    """A seat in this process as a wish has it drawn."""
    said = {"temperature": wish.temperature, "top_p": wish.top_p}
    more = {k: v for k, v in said.items() if v is not None}
    if seat.kind != "local" or not more:
        return seat
    return seat.model_copy(update={"sampling": seat.sampling.model_copy(update=more)})
