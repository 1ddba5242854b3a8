"""A headless Chromium over its debugging pipe: enough to open a page, press keys, read values and take pictures.

python tests/report/report_chrome.py PAGE.html PICTURE.png [WIDTH [HEIGHT]]
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
]  # fmt: skip
KEYS = {"ArrowLeft": 37, "ArrowRight": 39}


class Chrome:
    """`requests` holds every address that the pages asked for, `errors` the errors of their consoles."""

    def __init__(self, profile: Path, patience: float = 120):
        assert BINARY, "no Chromium on PATH"
        self.patience, self._next, self._rest = patience, 0, b""
        self.requests: list[str] = []
        self.errors: list[str] = []
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads its orders at 3 and answers at 4.
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, BINARY, *QUIET, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def close(self) -> None:
        os.close(self._write)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._read)

    def _message(self) -> dict:
        end = time.monotonic() + self.patience
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "Chromium has gone"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(line)
        about = found.get("params", {})
        match found.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(about["exceptionDetails"].get("exception", about)))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.errors.append(str(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.errors.append(about["entry"]["text"])
        return found

    def call(self, method: str, **params: object) -> dict:
        self._next += 1
        order: dict = {"id": self._next, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while (found := self._message()).get("id") != self._next:
            pass
        assert "error" not in found, found
        return found["result"]

    def open(self, page: Path, width: int = 1280, height: int = 1000, dark: bool = False) -> None:
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=page.resolve().as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], modifiers=8 * shift,
            )  # fmt: skip

    def picture(self, file: Path, whole: bool = True) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        file.write_bytes(base64.b64decode(found["data"]))

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Chrome(Path(folder))
        browser.open(Path(sys.argv[1]), *map(int, sys.argv[3:5]))
        browser.picture(Path(sys.argv[2]), whole=len(sys.argv) < 5)
        browser.close()
