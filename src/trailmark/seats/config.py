"""The `seats:` section of a recipe: who sits where. No torch here, so that a mistake in it is told at once.

seats:
  adviser: {kind: local, trained: true}                        # the model of the recipe, which is trained
  actor:   {kind: http, address: http://127.0.0.1:8000, model: tiny, sampling: {max_tokens: 20}}
  critic:  {kind: local, model: {name: runs/other}}            # a frozen model in this process
  oracle:  {kind: scripted, function: my_file.py:answer}       # answer(prompt, draw) -> text
  guest:   {kind: person}                                      # whoever sits at the terminal
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from trailmark.config import Config, EngineConfig, ModelConfig, NamesFile, NamesModel, SamplingConfig, ServerConfig
from trailmark.errors import RecipeError


class AnySeat(Config):
    """What every kind of seat has."""

    sampling: SamplingConfig | None = Field(
        None, description="how its tokens are drawn; none: as the recipe's `sampling`"
    )
    side: str = Field("", description="whose rewards and outcome are its own, in a world of several sides")


class LocalSeat(AnySeat):
    """A model in this process."""

    kind: Literal["local"] = Field("local", description="a model in this process")
    trained: bool = Field(False, description="this is the model that is trained, as the recipe's `model` has it")
    model: ModelConfig | None = Field(None, description="of a seat that is not trained: which model")
    engine: EngineConfig | None = Field(None, description="how it writes; none: as the recipe's `engine`")


class HttpSeat(AnySeat, ServerConfig):
    """A model behind a server."""

    kind: Literal["http"] = Field("http", description="a server")
    speaks: Literal["chat", "text"] = Field(
        "chat",
        description="chat: it gets messages and applies its template; text: it gets tokens, and needs a tokenizer here",
    )
    tokenizer: Annotated[str | None, NamesModel()] = Field(
        None, description="the model's tokenizer, here: tiny, a folder, a run or a name on the hub"
    )
    exact: bool = Field(False, description="refuse answers without token ids and log-probs")


class ScriptedSeat(AnySeat):
    """A Python function in the place of a model."""

    kind: Literal["scripted"] = Field("scripted", description="a Python function")
    function: Annotated[str, NamesFile(function=True)] = Field(
        min_length=3,
        description="package.module:function or file.py:function; it is called with (prompt, draw) and gives text",
    )


class PersonSeat(AnySeat):
    """Whoever sits at the terminal."""

    kind: Literal["person"] = Field("person", description="a person at the terminal")


AnyKind = LocalSeat | HttpSeat | ScriptedSeat | PersonSeat
SeatConfig = Annotated[AnyKind, Field(discriminator="kind")]
Seats = Mapping[str, AnyKind]


def check_seats(seats: Seats, trains: int = 1) -> None:
    """Refuse seats that cannot be filled; `trains` is how many models the method trains."""
    for name, seat in seats.items():
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
    if len(learns) > trains:
        what = "one model" if trains == 1 else f"{trains} models"
        raise RecipeError(
            f"seats: {' and '.join(learns)} are trained, and this method trains {what}: set trained: false for "
            "the others."
        )
    if seats and not learns:
        raise RecipeError(f"seats: none of {', '.join(seats)} is trained: set seats.{next(iter(seats))}.trained: true.")


def filled(seats: Seats, sampling: SamplingConfig | None, engine: EngineConfig | None) -> dict[str, AnyKind]:
    """The seats with what a recipe says for all of them, where they say nothing themselves."""
    out: dict[str, AnyKind] = {}
    for name, seat in seats.items():
        more: dict[str, Any] = {} if seat.sampling else {"sampling": sampling or SamplingConfig()}
        if isinstance(seat, LocalSeat) and seat.engine is None:
            more["engine"] = engine or EngineConfig()
        out[name] = seat.model_copy(update=more)
    return out


def described(seats: Seats) -> list[str]:
    """A line for each seat, for people."""
    kinds = {
        LocalSeat: lambda s: "the model that is trained" if s.trained else f"{s.model.name}, frozen",
        HttpSeat: lambda s: f"{s.model} at {s.address} ({s.speaks})",
        ScriptedSeat: lambda s: s.function,
        PersonSeat: lambda s: "a person",
    }
    return [f"seat {name}: {kinds[type(seat)](seat)}" for name, seat in seats.items()]


def trained_seats(seats: Seats) -> list[str]:
    return [name for name, seat in seats.items() if isinstance(seat, LocalSeat) and seat.trained]


def seats_section(description: str = "who sits where; empty: the trained model plays alone") -> Any:
    """The field of a recipe's config: `seats: dict[str, SeatConfig] = seats_section()`."""
    return Field({}, description=description)
