"""The `seats:` section: what it refuses, and that the table it opens plays with models here, behind a server, scripts
and people."""

import json
import sys
from pathlib import Path

import pytest

from trailmark.commands.serve import serving
from trailmark.config import Config, ModelConfig, SamplingConfig, resolve
from trailmark.engines.base import EngineError
from trailmark.engines.local import LocalEngine
from trailmark.errors import RecipeError
from trailmark.functions import load_function
from trailmark.learn.checkpoint import save_model
from trailmark.models.load import load_model
from trailmark.rollout.play import play
from trailmark.seats.config import (
    HttpSeat,
    LocalSeat,
    PersonSeat,
    ScriptedSeat,
    SeatConfig,
    check_seats,
    filled,
    seats_section,
)
from trailmark.seats.open_seats import OpenSeats, stored_seats
from trailmark.types import Scored

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from rollout_talk import TOKENIZER, Talk, encode

TINY = {"name": "tiny", "shape": {"layers": 1, "width": 32, "heads": 2, "context": 512}}


class Recipe(Config):
    seats: dict[str, SeatConfig] = seats_section()


def seats(**given):
    return resolve({"seats": given}, Recipe).seats


@pytest.fixture(scope="module")
def lm():
    return load_model(ModelConfig.model_validate(TINY))


@pytest.fixture(scope="module")
def url(lm):
    with serving(LocalEngine(lm, 4, 256), "tiny") as url:
        yield url


TRAINED = {"kind": "local", "trained": True}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"actor": {"kind": "local"}}, "seats.actor: this seat has no model: set seats.actor.model.name"),
        ({"a": TRAINED, "b": TRAINED}, "seats: a and b are trained, and this method trains one model"),
        ({"a": {"kind": "person"}}, "seats: none of a is trained: only a model in this process can be, so add a seat"),
        ({"a": {"kind": "person"}, "b": {"kind": "local", "model": {"name": "tiny"}}},
         "none of a, b is trained: set seats.b.trained: true and leave its model out"),
        ({"a": {**TRAINED, "model": TINY}}, "seats.a.model: this seat is trained"),
        (
            {"a": TRAINED, "b": {"kind": "http", "address": "http://x", "model": "m", "speaks": "text"}},
            "seats.b.tokenizer",
        ),
    ],
)
def test_seats_that_cannot_be_filled(given, said):
    with pytest.raises(RecipeError, match=said.replace(".", r"\.")):
        check_seats(seats(**given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": {"kind": "http", "model": "m"}}, r"key 'seats.a.address': is missing"),
        ({"a": {"kind": "htpp"}}, r"key 'seats.a': has the unknown 'kind' 'htpp'. Did you mean 'http'"),
        ({"a": {"kind": "local", "trian": True}}, r"key 'seats.a.trian': is not known. Did you mean 'trained'"),
        ({"a": {"kind": "http", "address": "host:80", "model": "m"}}, r"key 'seats.a.address'"),
    ],
)
def test_sections_that_cannot_be_read(given, said):
    with pytest.raises(RecipeError, match=said):
        seats(**given)


async def advised(desk):
    """An adviser speaks, then an actor answers it and acts."""
    while not desk.over:
        advice = await desk.ask("adviser", text=desk.observation.text + "\n")
        user = {"role": "user", "content": f"{desk.observation.text} {advice.text}"}
        await desk.act((await desk.ask("actor", messages=[user])).text)


def test_an_adviser_here_and_an_actor_behind_a_server(lm, url):
    given = seats(
        actor={"kind": "http", "address": url, "model": "tiny", "sampling": {"max_tokens": 5, "temperature": 0.5}},
        adviser={**TRAINED, "sampling": {"max_tokens": 3}, "engine": {"max_num_seqs": 4, "max_len": 256}},
    )
    check_seats(given)
    given = filled(given, None, None)
    opened = OpenSeats(given, {"adviser": lm}, seed=1)
    assert [(s.name, s.kind, s.max_tokens, s.law.temperature) for s in opened.seats] == [
        ("adviser", "trained", 3, 1.0), ("actor", "remote", 5, 0.5),
    ]  # fmt: skip
    opened.publish(7)
    episodes = play(Talk(), Talk().tasks(n=2), opened.seats, advised)
    for e in episodes:
        assert isinstance(e.outcome, Scored) and [t.seat for t in e.turns] == ["adviser", "actor"] * (len(e.turns) // 2)
        assert {(t.seat, t.version) for t in e.turns} == {("adviser", 7), ("actor", 0)}
        assert all(t.logp and t.tokens for t in e.turns) and all(not t.prompt for t in e.turns if t.seat == "actor")
        assert {n: (p.kind, p.model) for n, p in e.players.items()} == {
            "adviser": ("trained", "tiny"),
            "actor": ("remote", "tiny"),
        }
    assert opened.seat("actor", SamplingConfig(max_tokens=9)).max_tokens == 9

    class Bound:
        def bind(self, tokenizer):
            self.tokenizer = tokenizer

    source = Bound()
    opened.bind(source)
    assert source.tokenizer is lm.tokenizer


def test_a_server_that_is_another_model_or_not_there(lm, url):
    with pytest.raises(
        EngineError, match=r"seats.actor: http://127.* serves 'tiny', but no model 'large'. Set seats.actor.model"
    ):
        OpenSeats({"actor": HttpSeat(address=url, model="large")})
    gone = HttpSeat(address="http://127.0.0.1:9", model="m", retries=0)
    with pytest.raises(
        EngineError, match=r"seats.actor: http://127.0.0.1:9 cannot be reached.* Is the server running\?"
    ):
        OpenSeats({"actor": gone})
    with pytest.raises(EngineError, match=r"seats.actor.headers.x: the environment variable NO_SUCH is not set"):
        OpenSeats({"actor": HttpSeat(address=url, model="tiny", headers={"x": "env:NO_SUCH"})})


def test_scripts_and_people(tmp_path):
    (tmp_path / "mine.py").write_text("def answer(prompt, draw):\n    return 'line 1'\n")
    typed, shown = iter(["", "hello", "again"]), []
    given = {
        "adviser": ScriptedSeat(function=f"{tmp_path}/mine.py:answer"),
        "actor": PersonSeat(sampling=SamplingConfig(max_tokens=8)),
    }
    with pytest.raises(RecipeError, match="seats.actor: a person can sit at the table of `trailmark play`"):
        OpenSeats(given)
    opened = OpenSeats(given, terminal=(lambda: next(typed, None), shown.append))
    short, long = play(Talk(), Talk().tasks(n=2), opened.seats, advised, at_once=1)
    assert [t.action for t in short.turns if t.seat == "actor"] == ["", "hello"] and short.players[
        "actor"
    ].kind == "person"
    assert short.turns[3].tokens == (*encode("hello"), TOKENIZER.eos_token_id) and short.turns[0].text == "line 1"
    assert "word 0: begin. line 1" in shown[0] and "begin" not in shown[1]  # what was shown is not shown again
    assert [t.action for t in long.turns] == [
        None,
        "again",
        None,
        None,  # what the person was shown last
    ] and long.outcome.error == "engine: the person has left"
    for name, said in (
        ("mine.py", "must be my_file.py:function"),
        ("gone.py:f", "there is no file"),
        ("no.such:f", "there is no module 'no'"),
    ):
        with pytest.raises(RecipeError, match=f"seats.x.function: .*{said}"):
            load_function(name, "seats.x.function")


def test_the_seats_of_a_checkpoint(lm, url, tmp_path):
    """What was trained is there under its seat's name, or as the policy; a frozen seat that the checkpoint holds is
    that one."""
    checkpoint = tmp_path / "checkpoints" / "000003"
    save_model(lm, checkpoint / "policy", tmp_path / "base")
    save_model(lm, checkpoint / "reflector", tmp_path / "base")
    (checkpoint / "state.json").write_text("{}")
    section = ModelConfig.model_validate({**TINY, "dtype": "float64", "lora": {"rank": 2}})
    given = {"adviser": LocalSeat(trained=True), "reflector": LocalSeat(model=section),
             "other": LocalSeat(model=section), "actor": HttpSeat(address=url, model="tiny")}  # fmt: skip
    given["third"] = LocalSeat(model=ModelConfig(name=str(tmp_path)))  # a run: here, this one
    made = stored_seats(given, checkpoint, section, "cpu")
    assert made["third"].model.name == str(checkpoint / "policy")
    kept = {"seats.third.model.name": {"name": str(tmp_path), "folder": str(checkpoint / "reflector")}}
    (tmp_path / "models.json").write_text(json.dumps(kept))
    assert stored_seats(given, checkpoint, section, "cpu")["third"].model.name == str(checkpoint / "reflector")
    assert made["adviser"].model.name == str(checkpoint / "policy")
    assert made["reflector"].model.name == str(checkpoint / "reflector")
    assert (made["reflector"].model.dtype, made["reflector"].model.lora, made["reflector"].model.shape) == (
        "float64",
        None,
        None,
    )
    assert made["other"] == given["other"] and made["actor"] == given["actor"]
    two = OpenSeats({"a": made["adviser"], "b": made["adviser"]})
    assert two.engines["a"].lm is two.engines["b"].lm and [s.kind for s in two.seats] == ["trained", "trained"]


def test_two_seats_of_the_model_that_is_trained(lm):
    """Self-play: both seats write with one engine, and weights are published to it once."""
    both = {"one": LocalSeat(trained=True, side="a"), "two": LocalSeat(trained=True, side="b")}
    check_seats(both, trains=2)
    opened = OpenSeats(filled(both, None, None), {"one": lm, "two": lm})
    assert opened.engines["one"] is opened.engines["two"]
    opened.publish(3)
    assert [s.engine.version for s in opened.seats] == [3, 3] and [s.side for s in opened.seats] == ["a", "b"]
