"""`trailmark serve MODEL`. Nothing heavy is imported before the port is known to be free."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import socket
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trailmark.errors import ModelError, TrailmarkError

if TYPE_CHECKING:
    import uvicorn

    from trailmark.engines.local import LocalEngine
    from trailmark.rollout.values import HeadValues

TO_HEAR = 5  # seconds in which clients may still read why they got nothing


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a run, 'smollm2', 'tiny' or a hub name.")],
    host: Annotated[str, typer.Option(help="Address to listen on; others can reach 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="TRAILMARK_API_KEY", help="Clients must send it as bearer.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; else MODEL.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences written at once.")] = 16,
    max_len: Annotated[int | None, typer.Option(min=2, help="Longest sequence; else 1024 or the context.")] = None,
    queue: Annotated[int, typer.Option(min=0, help="Sequences that may wait; then 429.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps or npu.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    revision: Annotated[str | None, typer.Option(help="Commit or tag on the hub.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Another tokenizer than the model's own.")] = None,
    fixed: Annotated[bool, typer.Option(help="Fixed shapes: a seed gives the same bits at any load.")] = True,
    value: Annotated[
        str | None, typer.Option(metavar="RUN", help="A run or folder with a value model: search, and /v1/values.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that requests get when the server is stopped.")] = 10.0,
) -> None:
    """Serve a model to OpenAI's clients: completions, chat, scores; with --value, search too. A LoRA checkpoint is served
    with its base."""
    if missing := [m for m in ("fastapi", "uvicorn") if importlib.util.find_spec(m) is None]:
        raise TrailmarkError(f"serve needs {' and '.join(missing)}: pip install 'trailmark[serve]'")
    with listen(host, port) as listening:
        from pydantic import ValidationError

        from trailmark.config import ModelConfig
        from trailmark.engines.local import LocalEngine
        from trailmark.models.load import load_model
        from trailmark.serve.app import build_app

        try:
            config = ModelConfig.model_validate(
                {"name": weights(model), "revision": revision, "tokenizer": tokenizer, "device": device, "dtype": dtype}
            )
        except ValidationError as problem:
            first = problem.errors()[0]
            raise ModelError(f"--{first['loc'][0]}: {first['msg'].removeprefix('Value error, ')}.") from None
        lm = load_model(config)
        engine = LocalEngine(lm.freeze(), slots, max_len, fixed)
        values = None
        if value is not None:
            from trailmark.rollout.values import load_values

            values = load_values(value, lm.tokenizer, device, dtype)
        app = build_app(engine, name or model, api_key, queue, values)
        at, number = listening.getsockname()[:2]
        at = f"[{at}]" if ":" in at else at
        if not api_key and host not in ("127.0.0.1", "localhost", "::1"):
            typer.echo("warning: anyone who reaches this address can use the model; set --api-key.", err=True)
        typer.echo(f"serving '{name or model}' at http://{at}:{number}/v1 ({slots} slots of {engine.max_len} tokens)")
        server(app, grace).run(sockets=[listening])


def weights(model: str) -> str:
    """A run directory stands for the policy of its newest checkpoint."""
    folder = Path(model)
    if not (folder / "checkpoints").is_dir():
        return model
    from trailmark.learn.checkpoint import listed

    found = [p / "policy" for p in listed(folder / "checkpoints") if (p / "policy").is_dir()]
    if not found:
        raise ModelError(f"{folder}: this run has no checkpoint of a policy yet")
    return str(found[-1])


def listen(host: str, port: int) -> socket.socket:
    """A socket that holds the port from now on; clients wait in its backlog until the model is loaded."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
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
    """A uvicorn server that ends with exit code 0 when asked to stop; asked twice, it waits for nobody."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            asyncio.get_running_loop().call_later(grace, app.state.service.stop)
            await super().shutdown(sockets)

    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=math.ceil(grace) + TO_HEAR
    )
    return Server(settings)


@contextlib.contextmanager
def serving(
    engine: LocalEngine,
    name: str | None = None,
    api_key: str | None = None,
    queue: int = 512,
    values: HeadValues | None = None,
) -> Iterator[str]:
    """The address of a server that runs in a thread as long as the block does: for notebooks and tests. The engine is the
    thread's meanwhile."""
    from trailmark.serve.app import build_app

    with listen("127.0.0.1", 0) as listening:
        running = server(build_app(engine, name, api_key, queue, values), grace=1)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        port = listening.getsockname()[1]
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            running.should_exit = True
            thread.join(30)
