"""docs/api.ipynb in a real kernel, whose cells run inside a running event loop; a script's do not."""

import asyncio
import json
from pathlib import Path

import pytest

from trailmark.run_async import wait

ROOT = Path(__file__).parents[2]


async def seven():
    await asyncio.sleep(0)
    return 7


async def bad():
    raise LookupError("as it was")


def test_ordinary_code_waits_with_and_without_a_running_loop():
    async def cell():
        with pytest.raises(LookupError, match="as it was"):
            wait(bad())
        return wait(seven())

    assert wait(seven()) == 7 and asyncio.run(cell()) == 7


def test_the_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    from jupyter_client.manager import start_new_kernel

    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    cells = json.loads((ROOT / "docs/api.ipynb").read_text())["cells"]
    manager, client = start_new_kernel(cwd=str(tmp_path))
    said = []

    def hear(message):
        content = message["content"]
        said.append(content.get("text") or "\n".join(content.get("traceback", ())))

    try:
        for cell in [c for c in cells if c["cell_type"] == "code"]:
            reply = client.execute_interactive("".join(cell["source"]), output_hook=hear, timeout=120)
            assert reply["content"]["status"] == "ok", "".join(said)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    before, after = next(line for line in "".join(said).splitlines() if " -> " in line).split(" -> ")
    assert float(before) < 0.6 and float(after) > 0.9  # what it teaches is learnt
