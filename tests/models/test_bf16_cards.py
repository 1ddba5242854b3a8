"""A GPU that only imitates bfloat16 is refused in one sentence that names the key; any other is used."""

import contextlib

import pytest
import torch

from trailmark.config import EngineConfig, LearnerConfig, ModelConfig
from trailmark.errors import ModelError
from trailmark.learn.learner import Learner
from trailmark.models import load
from trailmark.models.hardware import check_bf16
from trailmark.models.load import load_model
from trailmark.seats.open import open_engine


@pytest.fixture
def card(monkeypatch):
    """The lowest level that knows a card: its name, and what it computes."""
    able = {"bf16": False}
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: able["bf16"])
    return able


def test_only_a_gpu_is_asked(card):
    for device in ("cpu", torch.device("cpu"), "mps"):
        check_bf16(device, "model.dtype", "float32")
    for device in ("cuda", "cuda:1", torch.device("cuda", 0)):
        with pytest.raises(ModelError, match="^model.dtype: Tesla T4 does not compute in bfloat16: set model.dtype"):
            check_bf16(device, "model.dtype", "float32")
    card["bf16"] = True
    check_bf16("cuda", "model.dtype", "float32")


def test_model_engine_and_learner_ask(card, make_lm, monkeypatch):
    monkeypatch.setattr(load, "pick_device", lambda wish: "cuda")
    with pytest.raises(ModelError, match="set model.dtype to float32 or float16$"):
        load_model(ModelConfig(name="tiny", dtype="bfloat16"))
    lm = make_lm("llama")
    monkeypatch.setattr(type(lm), "device", property(lambda self: torch.device("cuda")))
    with pytest.raises(ModelError, match="set engine.dtype to float32 or float16$"):
        open_engine(lm, EngineConfig(dtype="bfloat16"))
    with pytest.raises(ModelError, match="set learner.amp to none$"):
        Learner({"policy": lm}, LearnerConfig(amp="bf16"))
