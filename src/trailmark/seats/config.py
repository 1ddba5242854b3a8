"""The `seats:` section of a recipe. A seat says three independent things: which `model` plays, whether it is `trained`,
and where it samples (`kind`). It imports without torch.

seats:
  adviser: {kind: local, trained: true}                        # the model of the recipe, which is trained
  actor:   {kind: http, address: http://127.0.0.1:8000, model: tiny, sampling: {max_tokens: 20}}
  critic:  {kind: local, model: {name: runs/other}}            # a frozen model in this process
  oracle:  {kind: scripted, function: my_file.py:answer}       # answer(prompt, draw) -> text
  guest:   {kind: person}                                      # a person at the terminal
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trailmark.config import Config, EngineConfig, ModelConfig, NamesFile, NamesModel, SamplingConfig, ServerConfig
from trailmark.errors import RecipeError


class AnySeat(Config):
    """What every kind of seat has."""

    takes_weights: ClassVar[bool] = False  # whether the place where it samples can be published to

    trained: bool = Field(False, description="this seat is trained: it uses the recipe's `model`")
    sampling: SamplingConfig | None = Field(
        None, description="how this seat samples tokens; none: the recipe's `sampling`"
    )
    side: str = Field("", description="the side that this seat plays for, in a world of several sides")


class LocalSeat(AnySeat):
    """A model in this process."""

    takes_weights: ClassVar[bool] = True

    kind: Literal["local"] = Field("local", description="a model in this process")
    model: ModelConfig | None = Field(None, description="the model of a seat that is not trained")
    engine: EngineConfig | None = Field(None, description="the engine of this seat; none: the recipe's `engine`")


class HttpSeat(AnySeat, ServerConfig):
    """A model behind a server."""

    kind: Literal["http"] = Field("http", description="a server")
    speaks: Literal["chat", "text"] = Field(
        "chat",
        description="chat: the server gets messages and applies its template; text: it gets tokens; set tokenizer",
    )
    tokenizer: Annotated[str | None, NamesModel()] = Field(
        None, description="the server's tokenizer: tiny, a folder, a run or a name on the hub"
    )
    exact: bool = Field(False, description="refuse answers without token ids and log-probs")


class ScriptedSeat(AnySeat):
    """A Python function in place of a model."""

    kind: Literal["scripted"] = Field("scripted", description="a Python function")
    function: Annotated[str, NamesFile(function=True)] = Field(
        min_length=3,
        description="package.module:function or file.py:function; called with (prompt, draw), it returns text",
    )


class PersonSeat(AnySeat):
    """A person at the terminal."""

    kind: Literal["person"] = Field("person", description="a person at the terminal")


AnyKind = LocalSeat | HttpSeat | ScriptedSeat | PersonSeat
SeatConfig = Annotated[AnyKind, Field(discriminator="kind")]
Seats = Mapping[str, AnyKind]


def check_seats(seats: Seats, trains: int = 1, shared: bool = False) -> None:
    """Raise an error if a seat cannot be filled. `trains` is the number of models that the method trains; `shared`:
    several trained seats may be one model, as in self-play."""
    _one_model(seats, trains)
    for name, seat in seats.items():
        if seat.trained and not seat.takes_weights:
            raise RecipeError(
                f"seats.{name}.trained: {_WHO[type(seat)]} takes no weights, so it cannot be trained: set kind: local, "
                "or trained: false."
            )
        if not isinstance(seat, LocalSeat):
            if isinstance(seat, HttpSeat) and seat.speaks == "text" and seat.tokenizer is None:
                raise RecipeError(
                    f"seats.{name}: a server that is asked in tokens (speaks: text) needs a tokenizer here: "
                    f"set seats.{name}.tokenizer, or speaks: chat."
                )
            continue
        if seat.trained and seat.model is not None:
            raise RecipeError(
                f"seats.{name}.model: this seat is trained, and what is trained is the recipe's `model`: "
                "leave it out here."
            )
        if not seat.trained and seat.model is None:
            raise RecipeError(
                f"seats.{name}: this seat has no model: set seats.{name}.model.name, or trained: true for the "
                "model of the recipe."
            )
    learns = trained_seats(seats)
    if len(learns) > trains and not shared:
        what = "one model" if trains == 1 else f"{trains} models"
        raise RecipeError(
            f"seats: {' and '.join(learns)} are trained, and this method trains {what}: set trained: false for "
            "the others."
        )
    if seats and not learns:
        here = next((name for name, seat in seats.items() if isinstance(seat, LocalSeat)), None)
        cure = f"set seats.{here}.trained: true and leave its model out" if here else (
            "only a model in this process can be, so add a seat {kind: local, trained: true}"
        )  # fmt: skip
        raise RecipeError(f"seats: none of {', '.join(seats)} is trained: {cure}.")


_WHO: dict[type, str] = {HttpSeat: "a server", ScriptedSeat: "a Python function", PersonSeat: "a person"}


def _one_model(seats: Seats, trains: int) -> None:
    """Trained seats that name models of their own must not name more than the method trains."""
    named = {n: s.model for n, s in seats.items() if isinstance(s, LocalSeat) and s.trained and s.model is not None}
    each = {model.model_dump_json(): name for name, model in reversed(named.items())}
    if len(each) > trains:
        told = " and ".join(f"{name} ({named[name].name})" for name in sorted(each.values(), key=list(named).index))
        raise RecipeError(
            f"seats: {told} are trained from different models, and what is trained is the recipe's `model`: leave "
            "their models out, or set trained: false for the others."
        )


def filled(seats: Seats, sampling: SamplingConfig | None, engine: EngineConfig | None) -> dict[str, AnyKind]:
    """The seats, with the recipe's general settings filled in where a seat has none of its own."""
    out: dict[str, AnyKind] = {}
    for name, seat in seats.items():
        more: dict[str, Any] = {} if seat.sampling else {"sampling": sampling or SamplingConfig()}
        if isinstance(seat, LocalSeat) and seat.engine is None:
            more["engine"] = engine or EngineConfig()
        out[name] = seat.model_copy(update=more)
    return out


def described(seats: Seats) -> list[str]:
    """A line for each seat, for people to read."""
    kinds = {
        LocalSeat: lambda s: "the model that is trained" if s.trained else f"{s.model.name}, frozen",
        HttpSeat: lambda s: f"{s.model} at {s.address} ({s.speaks})",
        ScriptedSeat: lambda s: s.function,
        PersonSeat: lambda s: "a person",
    }
    return [f"seat {name}: {kinds[type(seat)](seat)}" for name, seat in seats.items()]


def trained_seats(seats: Seats) -> list[str]:
    return [name for name, seat in seats.items() if seat.trained]


def seats_section(description: str = "the seats by name; empty: the trained model plays alone") -> Any:
    """The field of a recipe's config: `seats: dict[str, SeatConfig] = seats_section()`."""
    return Field({}, description=description)
