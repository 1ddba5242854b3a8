"""A soak of `trailmark serve`: ordinary requests through OpenAI's client, hostile ones and vanishing clients among
them.

    python bench/soak.py [--requests 10000] [--hostile 100] [--vanishing 200] [--seconds 30] [--quick]

A tiny model, so that what is measured is the server. All of it goes on at once: 16 clients, and beside them a process
that asks for /health on a new connection twenty times a second. A request is *lost* if it has no whole answer, or one
to something else than was asked. Memory is what the server's process holds (VmRSS): when every kind of request was met
once, in the middle, and at the end.

Then, on a server with a longer queue, how long requests of one token wait while one other client asks for as much as it
can (`LOADS`), for `--seconds` each. Each must be answered within `BOUND_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
from common import RESULTS, commit, device, one_thread, versions

CLIENTS, POLL_S, FLAT = 16, 0.05, 0.10
BOUND_S = 2.0  # longest wait of a request of one token, whatever one other client asks for
QUEUE = 64 * 64  # sequences: a search with 64 beams has as many candidates
SAY = [{"role": "user", "content": "Where to?"}]
CHAT, TEXT, JSON = "/v1/chat/completions", "/v1/completions", {"Content-Type": "application/json"}
SCORE, VALUES = "/v1/score", "/v1/values"
HOSTILE: dict[str, tuple[str, Any]] = {
    "a stop text of a megabyte": (TEXT, {"prompt": "a", "stop": "ab" * 500_000, "stream": True}),
    "32 stop texts of 200 kB": (TEXT, {"prompt": "a", "stop": ["ab" * 100_000] * 32}),
    "log-probs without end": (CHAT, {"messages": SAY, "n": 128, "logprobs": True, "top_logprobs": 20}),
    "250,000 empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 250_000}),
    "a role of 7 MB": (CHAT, {"messages": [{"role": "u" * (7 << 20), "content": "hi"}]}),
    "a message of 7 MB": (CHAT, {"messages": [{"role": "user", "content": "u" * (7 << 20)}]}),
    "400,000 fields": (CHAT, {"messages": SAY, **{f"x{k}": 1 for k in range(400_000)}}),
    "2.5 million ids": (TEXT, {"prompt": [1] * 2_500_000 + ["a"]}),
    "a million prompts": (TEXT, {"prompt": ["a"] * 1_500_000}),
    "deep JSON": (TEXT, b"[" * (7 << 20)),
}


ONE_TOKEN = {"prompt": "b", "max_tokens": 1}
REPEATED = {"prompt": "a" * 600, "n": 128, "max_tokens": 1, "prompt_logprobs": 5}


def objects(many: int) -> dict[str, Any]:
    """A request for JSON that is one of many objects of ten keys."""
    kinds = [{"type": "object", "properties": {f"k{i}{j}": {"type": "number"} for j in range(10)}} for i in range(many)]
    form = {"type": "json_schema", "json_schema": {"name": "m", "schema": {"anyOf": kinds}}}
    return {"prompt": "a", "max_tokens": 900, "n": 16, "response_format": form}


# What the other client asks, how often at the same time, and whether it reads the answers.
LOADS: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "nothing": (TEXT, {}, 0, True),
    "a search with 64 beams and 1,000 rounds": (
        TEXT,
        {"prompt": "a", "max_tokens": 900, "ignore_eos": True,
         "search": {"beam": 64, "rounds": 1000, "by": "logp", "step_ends": list("aeiou\n")}}, 1, True),
    "requests that fill the queue": (
        TEXT, {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "n": 8}, QUEUE // 8, True),
    "3,840 long prompts of 30 requests": (
        TEXT, {"prompt": [f"{k} {'a' * 900}" for k in range(128)], "max_tokens": 1}, 30, True),
    "log-probs of a prompt, 128 times": (TEXT, REPEATED, 8, True),
    "large answers that 60 connections do not read": (TEXT, REPEATED, 60, False),
    "20 requests of 4,096 long texts": (TEXT, {"prompt": ["ab " * 300] * 4096, "max_tokens": 1}, 20, True),
    "20 streams of 4,096 texts": (TEXT, {"prompt": ["ab "] * 4096, "max_tokens": 2, "stream": True}, 20, True),
    "20 requests of 2,600 texts that are too long": (
        TEXT, {"prompt": ["ab " * 1000] * 2600, "max_tokens": 1}, 20, True),
    "20 requests to score 4,096 texts": (SCORE, {"prompt": "a" * 500, "completion": ["b" * 500] * 4096}, 20, True),
    "8 requests for 4,096 values": (VALUES, {"states": ["a" * 1000] * 4096}, 8, True),
    "10 requests for JSON of one of 40 objects": (TEXT, objects(40), 10, True),
    "10 requests for JSON of one of 150 objects": (TEXT, objects(150), 10, True),
}  # fmt: skip


def make_model(folder: Path) -> None:
    from trailmark.models.tiny import build, tiny_config, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    build(tiny_config("llama", vocab=len(tokenizer), layers=1, width=32, context=1024)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_value_model(folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    make_model(folder)
    save_file({"value.weight": torch.zeros(1, 32)}, folder / "heads.safetensors")
    return folder


@contextlib.contextmanager
def served(folder: Path, *words: str) -> Any:
    """The address and the process of a server, and the file with its every line."""
    log = folder / "log"
    command = [sys.executable, "-m", "trailmark", "serve", str(folder), "--port", "0", "--name", "m", *words]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        while (found := re.search(r"at (http://\S+)/v1", log.read_text())) is None:
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield found[1], process, log
    finally:
        process.terminate()
        process.wait(60)


def memory(process: subprocess.Popen) -> float:
    """Megabytes that the process holds."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def ordinary(client: openai.AsyncOpenAI, k: int) -> None:
    """One request of a kind that depends on its number; raises unless the answer is whole."""
    most = 4 + k % 8
    extra: dict[str, Any] = {"ignore_eos": True}
    if k % 5 == 0:
        stream = await client.completions.create(
            model="m",
            prompt=f"number {k}",
            max_tokens=most,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        used = [c.usage.completion_tokens async for c in stream if c.usage]
        assert used == [most]
    elif k % 5 in (1, 2):
        done = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": f"number {k}"}],
            max_tokens=most,
            n=1 + k % 3,
            logprobs=k % 2 == 0,
            extra_body=extra,
        )
        assert done.usage and done.usage.completion_tokens == most * (1 + k % 3) and len(done.choices) == 1 + k % 3
    else:
        tops = 5 if k % 5 == 3 else None
        whole = await client.completions.create(
            model="m", prompt=[f"number {k}", "b"], max_tokens=most, logprobs=tops, stop=["\0\0never"], extra_body=extra
        )
        assert len(whole.choices) == 2 and whole.usage and whole.usage.completion_tokens == 2 * most
        assert tops is None or len(whole.choices[1].logprobs.tokens) == most  # type: ignore[union-attr]


async def hostile(client: httpx.AsyncClient, name: str) -> None:
    path, body = HOSTILE[name]
    if not isinstance(body, bytes):
        HOSTILE[name] = path, (body := json.dumps(body, separators=(",", ":")).encode())
    answer = await client.post(path, content=body, headers=JSON)
    assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"], answer.text[:200]


def vanish(url: str, k: int) -> None:
    """A client that is gone: in the middle of its headers, of its body, or of its answer."""
    body = json.dumps({"prompt": "a", "max_tokens": 500, "n": 4, "ignore_eos": True, "stream": k % 2 == 0}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as gone:
        gone.sendall(whole[: (30, len(whole) - 9, len(whole))[k % 3]])
        time.sleep(0.02)


def poll(url: str, body: str | None = None) -> None:
    """A process of its own: seconds that /health (with a body: a completion) took, or what went wrong, until the
    standard input is closed."""
    host, port = url.removeprefix("http://").split(":")
    took: list[float | str] = []
    os.set_blocking(0, False)
    print(flush=True)
    while sys.stdin.read(1) != "x":
        began = time.perf_counter()
        try:
            asked = http.client.HTTPConnection(host, int(port), timeout=60)
            asked.request("POST" if body else "GET", TEXT if body else "/health", body, JSON if body else {})
            answer = asked.getresponse()
            status = answer.status
            answer.read()
            took.append(time.perf_counter() - began if status == 200 else f"status {status}")
            asked.close()
        except OSError as problem:
            took.append(repr(problem))
        time.sleep(POLL_S)
    print(json.dumps(took))


def summary(took: list[float | str]) -> dict[str, Any]:
    good = [x for x in took if not isinstance(x, str)]
    if not good:
        return {"asked": len(took), "unanswered": len(took)}
    cuts = statistics.quantiles(good * 2, n=100, method="inclusive")
    ms = lambda x: round(1000 * x, 1)
    return {"asked": len(took), "unanswered": len(took) - len(good), "p50_ms": ms(cuts[49]), "p99_ms": ms(cuts[98]),
            "max_ms": ms(max(good))}  # fmt: skip


async def soak(url: str, process: subprocess.Popen, requests: int, attacks: int, gone: int) -> dict[str, Any]:
    names = list(HOSTILE)
    jobs: list[tuple[str, int]] = [("ordinary", k) for k in range(requests)]
    jobs += [("hostile", k) for k in range(attacks)] + [("vanish", k) for k in range(gone)]
    random.Random(0).shuffle(jobs)
    lost: Counter[str] = Counter()
    done, sizes = 0, {}
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    raw = httpx.AsyncClient(base_url=url, timeout=120)

    async def one(kind: str, k: int) -> None:
        try:
            if kind == "ordinary":
                await ordinary(client, k)
            elif kind == "hostile":
                await hostile(raw, names[k % len(names)])
            else:
                await asyncio.to_thread(vanish, url, k)
        except Exception as problem:
            lost[f"{kind}: {type(problem).__name__}: {str(problem)[:120]}"] += 1

    async def worker(waiting: Any) -> None:
        nonlocal done
        for kind, k in waiting:
            await one(kind, k)
            done += 1
            if done == len(jobs) // 2:
                sizes["middle"] = memory(process)

    async with client, raw:
        for k in range(300):  # whatever is set up at the first request of a kind is set up now
            await one("ordinary", k)
        for k in range(len(names)):
            await one("hostile", k)
        for k in range(6):
            await one("vanish", k)
        await asyncio.gather(*(one("ordinary", k) for k in range(64)))
        sizes["start"] = memory(process)
        asking = subprocess.Popen(
            [sys.executable, __file__, "--poll", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        began = time.perf_counter()
        waiting = iter(jobs)
        await asyncio.gather(*(worker(waiting) for _ in range(CLIENTS)))
        took = time.perf_counter() - began
        await asyncio.sleep(1)
        took_health = json.loads(asking.communicate("x", 120)[0])
        sizes["end"] = memory(process)
        left = (await raw.get("/health")).json()["sequences"]
    growth = max(sizes["middle"], sizes["end"]) / sizes["start"] - 1
    return {
        "requests": requests, "hostile": attacks, "vanishing": gone, "lost": sum(lost.values()), "why": dict(lost),
        "seconds": round(took, 1), "per_second": round(requests / took, 1),
        "memory_mb": {k: round(sizes[k], 1) for k in ("start", "middle", "end")}, "growth": round(growth, 4),
        "health": summary(took_health), "sequences_left": left,
    }  # fmt: skip


async def other_client(url: str, path: str, body: dict[str, Any], reads: bool) -> None:
    """Ask again and again; or ask once, and do not read the answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    host, port = url.removeprefix("http://").split(":")
    while True:
        made = socket.socket()
        made.setblocking(False)
        if not reads:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_connect(made, (host, int(port)))
            reader, writer = await asyncio.open_connection(sock=made, limit=1 << 12)
            with contextlib.closing(writer):
                writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                while not reads or await reader.read(1 << 16):
                    await asyncio.sleep(0 if reads else 3600)
        await asyncio.sleep(0.1)


async def waits(url: str, process: subprocess.Popen, name: str, seconds: float) -> dict[str, Any]:
    """How long requests of one token wait under one of `LOADS`, and what the server holds in memory meanwhile."""
    path, body, many, reads = LOADS[name]
    before = most = memory(process)
    others = [asyncio.create_task(other_client(url, path, body, reads)) for _ in range(many)]
    await asyncio.sleep(min(2.0, seconds))
    asking = subprocess.Popen(
        [sys.executable, __file__, "--poll", url, "--body", json.dumps(ONE_TOKEN)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    await asyncio.to_thread(asking.stdout.readline)  # type: ignore[union-attr]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await asyncio.sleep(0.1)
        most = max(most, memory(process))
    took = json.loads((await asyncio.to_thread(asking.communicate, "x", 120))[0])
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while (await client.get("/health")).json()["sequences"]:
            await asyncio.sleep(0.1)
    return {"load": name, **summary(took), "memory_mb": round(most, 1), "more_mb": round(most - before, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--hostile", type=int, default=100)
    parser.add_argument("--vanishing", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30, help="of each load of the second part")
    parser.add_argument("--quick", action="store_true", help="a fiftieth of it, to see that it runs; nothing is kept")
    parser.add_argument("--poll", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--body", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.poll:
        return poll(args.poll, args.body)
    one_thread()
    size = [args.requests, args.hostile, args.vanishing]
    if args.quick:
        size = [n // 50 for n in size]
    measured = commit()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with served(Path(folder)) as (url, process, log):
            row = asyncio.run(soak(url, process, *size))
            row["log_bytes"] = log.stat().st_size
        value = make_value_model(Path(folder) / "value")
        with served(Path(folder), "--queue", str(QUEUE), "--value", str(value)) as (url, process, _):
            seconds = args.seconds / 10 if args.quick else args.seconds
            one_token = [asyncio.run(waits(url, process, name, seconds)) for name in LOADS]
    good = not row["lost"] and not row["health"]["unanswered"] and row["growth"] <= FLAT and not row["sequences_left"]
    in_time = all(not w["unanswered"] and w["max_ms"] <= 1000 * BOUND_S for w in one_token)
    row |= {"one_token": one_token, "bound_s": BOUND_S, "in_time": in_time}
    good = good and in_time
    row = {"name": "soak", "good": good, **row, "device": device(), "versions": versions(), "commit": measured}
    print(json.dumps(row), flush=True)
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "soak.json").write_text(json.dumps(row, indent=1) + "\n")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
