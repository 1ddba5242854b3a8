"""`trailmark serve MODEL`. Heavy modules are imported after the port is known to be free."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import math
import os
import socket
import sys
import threading
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trailmark import stopping
from trailmark.errors import TrailmarkError

if TYPE_CHECKING:
    import uvicorn

    from trailmark.engines.local import LocalEngine
    from trailmark.seats.model_names import Located
    from trailmark.serve.prompt_format import PromptFormat

TO_HEAR = 5  # seconds in which clients may still read their error


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a run, 'smollm2', 'tiny' or a hub name.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is open to other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="TRAILMARK_API_KEY", help="Key that clients must send as bearer token.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A further host name under which clients may ask, such as a proxy's; '*': any. May be repeated.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name for clients; default: MODEL.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences generated at the same time.")] = 16,
    max_len: Annotated[
        int | None,
        typer.Option(min=2, help="Longest sequence; default: the run's engine.max_len, or the model's context."),
    ] = None,
    queue: Annotated[int, typer.Option(min=0, help="Most sequences that may wait; more get status 429.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps or npu.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64; default: the run's, or float32.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Commit or tag on the hub.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer to use in place of the model's own.")] = None,
    prompts: Annotated[
        str, typer.Option(help="How chats become prompts: auto (as in the run), template, text or plain.")
    ] = "auto",
    fixed: Annotated[bool, typer.Option(help="Fixed shapes: a seed gives the same result at any load.")] = True,
    value: Annotated[
        str | None, typer.Option(metavar="RUN", help="A run or folder with a value model, for search and /v1/values.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that requests may still take when the server is stopped.")
    ] = 10.0,
) -> None:
    """Serve a model over OpenAI's API: completions, chat, scores; with --value, also search. A LoRA checkpoint is
    served with its base."""
    if missing := [m for m in ("fastapi", "uvicorn") if importlib.util.find_spec(m) is None]:
        raise TrailmarkError(f"serve needs {' and '.join(missing)}: pip install 'trailmark[serve]'")
    with listen(host, port) as listening:
        from trailmark.seats.model_names import locate
        from trailmark.serve.app import build_app

        home = locate(model)
        engine, of = opened(home, slots, max_len, fixed, device, dtype, revision, tokenizer)
        prompt_format = chosen(prompts, home, engine.tokenizer)
        values = None
        if value is not None:
            from trailmark.score.value_models import load_values

            values = load_values(value, engine.tokenizer, device, dtype or home.dtype)
        hosts = [host, *(allow_host or ())]
        app = build_app(engine, name or model, api_key, queue, values, prompt_format, home.sampling.stop, hosts)
        at, number = listening.getsockname()[:2]
        at = f"[{at}]" if ":" in at else at
        if not api_key and host not in ("127.0.0.1", "localhost", "::1"):
            typer.echo("warning: anyone who reaches this address can use the model; set --api-key.", err=True)
        typer.echo(
            f"serving '{name or model}' at http://{at}:{number}/v1 ({slots} slots of {engine.max_len} tokens, {of})"
        )
        typer.echo(f"prompts: {prompt_format.describe()}")
        gc.collect()
        gc.freeze()  # a collection that looks at all that is loaded would stop every thread for a third of a second
        server(app, grace).run(sockets=[listening])
        # stopping the server does not wait for a computation whose result is not wanted
        if not app.state.service.close():
            sys.stdout.flush()
            os._exit(0)


def opened(
    home: Located, slots: int, max_len: int | None, fixed: bool, device: str, dtype: str | None,
    revision: str | None, tokenizer: str | None,
) -> tuple[LocalEngine, str]:  # fmt: skip
    """The engine, and where the length of its slots comes from."""
    from trailmark.models.load import load_model
    from trailmark.seats.open import open_engine
    from trailmark.serve.run_settings import longest, served_model

    lm = load_model(served_model(home, device, dtype, revision, tokenizer)).freeze()
    length, of = max_len or home.engine.max_len, "--max-len" if max_len else "as its run has it"
    if length is None:
        length = longest(lm, slots)
        of = "its context" if length == lm.context else f"of its context of {lm.context}: --max-len says otherwise"
    keys: dict[str, Any] = {"max_num_seqs": slots, "max_len": length, "batch_invariant": fixed}
    keys["dtype"] = home.engine.dtype if dtype is None else None
    return open_engine(lm, home.engine.model_copy(update=keys)), of


def chosen(prompts: str, home: Located, tokenizer: Any) -> PromptFormat:
    """How chats become prompts: as the option says, or as in the run."""
    from trailmark.serve.prompt_format import PromptFormat, format_of_run

    if prompts == "auto":
        return format_of_run(home, tokenizer)
    if prompts == "template" and getattr(tokenizer, "chat_template", None):
        return PromptFormat("template")
    if prompts == "text":
        found = format_of_run(home, tokenizer)
        return PromptFormat("text", found.ending, found.bos)
    if prompts == "plain":
        return PromptFormat("plain")
    why = "this model's tokenizer has no chat template" if prompts == "template" else f"'{prompts}' is not known"
    raise TrailmarkError(f"--prompts: {why}: choose auto, template, text or plain.")


def listen(host: str, port: int) -> socket.socket:
    """A socket that holds the port from now on. Clients wait in its backlog until the model is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, proto)  # asyncio sets TCP_NODELAY only where it sees that this is TCP
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
            made.listen(2048)
        except OSError:
            made.close()
            raise
        return made
    except OSError as problem:
        raise TrailmarkError(
            f"cannot listen on {host}:{port} ({problem.strerror or problem}): choose another with --host and --port."
        ) from None


def server(app: Any, grace: float = 10.0) -> uvicorn.Server:
    """A uvicorn server that exits with code 0 when it is stopped. Stopped twice, it ends at once."""
    import uvicorn

    from trailmark.serve.connections import ACCEPTED, IDLE_S, ConnectionLimits, limit_repeated_logs

    asked = stopping.Asked()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # `backlog` below limits how many are accepted at once; this keeps the length of the queue
            for one in sockets or ():
                one.listen(2048)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            with stopping.handling(self.handle_exit), super().capture_signals():  # also of SIGHUP
                yield

        def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
            self.force_exit = self.force_exit or asked.first(sig) is False
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(grace, app.state.service.stop)
            await super().shutdown(sockets)

    settings = uvicorn.Config(
        app,
        http=ConnectionLimits().protocol(),
        ws="none",
        backlog=ACCEPTED,
        timeout_keep_alive=IDLE_S,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(grace) + TO_HEAR,
    )
    limit_repeated_logs()  # now that uvicorn has set up its log
    return Server(settings)


@contextlib.contextmanager
def serving(engine: LocalEngine, *settings: Any, **named: Any) -> Iterator[str]:
    """The address of a server that runs in a thread during the block: for notebooks and tests. The settings are those
    of `build_app`. Meanwhile only the thread may use the engine."""
    from trailmark.serve.app import build_app

    with listen("127.0.0.1", 0) as listening:
        app = build_app(engine, *settings, **named)
        running = server(app, grace=1)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        port = listening.getsockname()[1]
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.should_exit = True
            thread.join(30)
            app.state.service.close()
