"""The seats of a recipe with an open engine for each. Trained weights are published to their engines.

opened = OpenSeats(seats, {"adviser": lm}, seed=config.seed)
opened.bind(source)                      # gives a tokenizer to a world that asks for one
opened.publish(step)                     # the engines of trained seats take over the current weights
play(source, tasks, opened.seats, protocol)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trailmark import registry
from trailmark.config import EngineConfig, ModelConfig, SamplingConfig
from trailmark.engines.base import publish
from trailmark.engines.weights import Weights
from trailmark.errors import RecipeError
from trailmark.functions import load_function
from trailmark.seats.config import AnyKind, HttpSeat, LocalSeat, ScriptedSeat, Seats, trained_seats
from trailmark.seats.model_names import locate, models_in, stored_model
from trailmark.seats.pinned_models import pin_part
from trailmark.seats.seat import Seat
from trailmark.types import SamplingLaw

if TYPE_CHECKING:
    from trailmark.models.lm import LM

NO_PERSON = "seats.{name}: a person can sit at the table of `trailmark play`, not here."
# functions that read a line from a person, and show a text
Terminal = tuple[Callable[[], str | None], Callable[[str], None]]


class OpenSeats:
    """`models` are the models that a method has loaded itself, by seat: above all those it trains. `seats` are in the
    order of the recipe, but the trained one comes first. It acts if neither world nor protocol says who acts, and its
    side's outcome is the outcome of the episode."""

    def __init__(
        self,
        seats: Seats,
        models: Mapping[str, LM] | None = None,
        seed: int = 0,
        terminal: Terminal | None = None,
        apart: bool = False,
    ):
        """`apart`: engines of the method's own models hold a copy of the weights, which only `publish` changes."""
        self.apart = apart
        self.configs, self.models = dict(seats), dict(models or {})
        self._loaded: dict[str, LM] = {}
        self.engines: dict[str, Any] = {}
        for name, seat in self.configs.items():
            if isinstance(seat, LocalSeat):
                self.engines[name] = self._local(name, seat)
        for name, seat in self.configs.items():
            if isinstance(seat, HttpSeat):
                self.engines[name] = _opener(seat)(seat, f"seats.{name}", seed)
            elif isinstance(seat, ScriptedSeat):
                function = load_function(seat.function, f"seats.{name}.function")[0]
                self.engines[name] = _opener(seat)(function, self.tokenizer, seat.function)
            elif not isinstance(seat, LocalSeat):
                if terminal is None:
                    raise RecipeError(NO_PERSON.format(name=name))
                self.engines[name] = _opener(seat)(self.tokenizer, *terminal)
        trained = trained_seats(self.configs)
        self.seats = [self.seat(n) for n in sorted(self.configs, key=lambda n: n not in trained)]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the first model in this process. Without a model: the tiny tokenizer."""
        first = next((e.tokenizer for e in self.engines.values() if e.tokenizer is not None), None)
        if first is None:
            from trailmark.models.tiny import tiny_tokenizer

            first = tiny_tokenizer()
        return first

    def seat(self, name: str, sampling: SamplingConfig | None = None) -> Seat:
        """One seat, with its own sampling settings or with `sampling`."""
        config = self.configs[name]
        s = sampling or config.sampling or SamplingConfig()
        kind = "trained" if config.trained else {"local": "frozen", "http": "remote"}.get(config.kind, config.kind)
        speaks = config.speaks if isinstance(config, HttpSeat) else None
        law, stop = sampling_law(s), tuple(s.stop)
        engine = self.engines[name]
        return Seat(name, engine, law, s.max_tokens, stop, kind, speaks, config.side)  # type: ignore[arg-type]

    def bind(self, source: Any, seat: str | None = None) -> None:
        """Some worlds need a tokenizer: their actions are labels of one token, or they count tokens. They have a method
        `bind`, which gets the tokenizer of `seat`, or of the trained seat."""
        name = seat or next(iter(trained_seats(self.configs)), None)
        own = self.engines[name].tokenizer if name else None
        if hasattr(source, "bind"):
            source.bind(self.tokenizer if own is None else own)

    def publish(self, version: int) -> None:
        """Give the current weights of the method's models to their engines."""
        for engine, lm in {id(self.engines[n]): (self.engines[n], lm) for n, lm in self.models.items()}.values():
            publish(engine, version, Weights(lm))

    def _local(self, name: str, seat: LocalSeat) -> Any:
        from trailmark.models.load import load_untrained

        settings = seat.engine or EngineConfig()
        if name in self.models:  # two seats of one model, as in self-play, share one engine
            own = [n for n, lm in self.models.items() if lm is self.models[name] and n in self.engines]
            same = [n for n in own if getattr(self.configs[n], "engine", None) == seat.engine]
            return self.engines[same[0]] if same else _opener(seat)(self.models[name], settings, self.apart)
        if seat.model is None:
            raise RecipeError(f"seats.{name}: this seat has no model: set seats.{name}.model.name.")
        key = seat.model.model_dump_json()
        if key not in self._loaded:  # two seats with one model share its weights
            self._loaded[key] = load_untrained(seat.model, f"seats.{name}.model")
        return _opener(seat)(self._loaded[key], settings)


def _opener(seat: AnyKind) -> Callable[..., Any]:
    """The function that opens the engine of a kind of seat (`seats/provides.py`)."""
    return registry.load("engines", seat.kind)


def stored_seats(seats: Seats, checkpoint: Path, model: ModelConfig, device: str | None = None) -> dict[str, AnyKind]:
    """The seats of a run with the weights of one of its checkpoints. This holds for a trained seat, and for any model
    that the checkpoint stores under the name of its seat. Other models are those that the run began with. `model` is
    the recipe's section."""
    held, out = models_in(checkpoint), {}
    for name, seat in seats.items():
        if isinstance(seat, LocalSeat) and (seat.trained or seat.model is None or name in held):
            folder = held.get(name) or Path(locate(str(checkpoint), "policy" if "policy" in held else name).folder)
            update = {"lora": None, "device": device or model.device}
            stored = stored_model(seat.model or model, folder).model_copy(update=update)
            seat = seat.model_copy(update={"model": stored})
        out[name] = seat
    return pin_part(out, "seats", checkpoint.parent.parent)


def sampling_law(s: SamplingConfig) -> SamplingLaw:
    return SamplingLaw(s.temperature, s.top_p, s.top_k, min_tokens=s.min_tokens)


def check_servers(seats: Seats) -> None:
    """Check that every server of the seats answers and serves the model that its seat names."""
    check_players(seats)
    for name, seat in seats.items():
        if isinstance(seat, HttpSeat):
            _opener(seat)(seat, f"seats.{name}")


def check_players(seats: Seats) -> None:
    """Check the seats that need no model: functions of scripted seats must load, and a person cannot train."""
    for name, seat in seats.items():
        if isinstance(seat, ScriptedSeat):
            load_function(seat.function, f"seats.{name}.function")
        elif not isinstance(seat, LocalSeat | HttpSeat):
            raise RecipeError(NO_PERSON.format(name=name))
