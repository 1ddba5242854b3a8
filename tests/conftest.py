import asyncio
import functools
import gc
import os
import signal
import socketserver
import ssl
import tempfile
import types

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()  # where it is remembered which code a person has run

import pytest
import torch
import typer.testing
import uvicorn.server
from hypothesis import settings

torch.set_num_threads(1)
# No test pulls the plug: nothing need wait until the disk has it. (Processes of tests do wait.)
os.fsync = lambda fd: None
# The options of all commands are read from their signatures once, as in a process, and not at every call of a test.
typer.testing._get_command = functools.cache(typer.testing._get_command)
# So are the certificates, which every client of HTTP reads when it is made.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# A stand-in of a server sends an answer in two pieces: the second one need not wait 40 ms for a receipt of the first.
# The server ends at once, and not half a second later.
socketserver.StreamRequestHandler.disable_nagle_algorithm = True
socketserver.BaseServer.serve_forever.__defaults__ = (0.01,)
# uvicorn looks every 100 ms whether it is to end, and waits as long again: here 5 ms.
uvicorn.server.asyncio = types.SimpleNamespace(**vars(asyncio) | {"sleep": lambda s: asyncio.sleep(s / 20)})

# `make test` tries the same examples every time; `make fuzz` (tests/fuzz.py) draws new ones.
settings.register_profile("test", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))


def pytest_collection_finish(session):
    """What is loaded by now stays, so Python need not look through it for garbage again and again, nor so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


@pytest.fixture
def make_lm():
    """Tiny models by family, wrapped and ready: make_lm("gpt2", dtype=torch.float64)."""
    from trailmark.models.lm import LM
    from trailmark.models.tiny import build, tiny_config, tiny_tokenizer

    def make(family="gpt2", dtype=torch.float32, seed=0, pad_is_eos=True, window=None, **shape):
        tokenizer = tiny_tokenizer(pad_is_eos=pad_is_eos)
        shape.setdefault("kv_heads", None if family == "gpt2" else 2)
        config = tiny_config(family, vocab=len(tokenizer), window=window, **shape)
        return LM(build(config, seed, dtype), tokenizer, f"tiny-{family}")

    return make


@pytest.fixture
def real_tokenizer():
    """Published tokenizers by name, from the folder TRAILMARK_DATA."""
    from transformers import AutoTokenizer

    folder = os.environ.get("TRAILMARK_DATA")
    if not folder:
        pytest.skip("TRAILMARK_DATA is not set")
    return lambda name: AutoTokenizer.from_pretrained(f"{folder}/tokenizers/{name}")


@pytest.fixture
def signals_heard():
    """SIGTERM, SIGINT and SIGHUP as in a terminal. (nohup and jobs in the background ignore some of them.)"""
    plain = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = {s: signal.signal(s, how) for s, how in plain.items() if signal.getsignal(s) is signal.SIG_IGN}
    yield
    for s, before in ignored.items():
        signal.signal(s, before)


@pytest.fixture(scope="class")
def hurried_templates():
    """A chat template may compute for 0.4 s, and not for two: many that never end are tested."""
    from trailmark import templates

    templates.WORKER.end()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "SECONDS", 0.4)
        yield
    templates.WORKER.end()


@pytest.fixture(autouse=True)
def nobody_said():
    """What the recipes of one test name is nothing to the next one, in whatever order they run."""
    yield
    from trailmark.trust import _Said

    _Said.of_runs.clear()
    _Said.of_files.clear()
