"""A headless Chromium, driven over the two pipes of its DevTools protocol: no port, no driver program, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
PATIENCE_S = 600.0


class Page:
    """One browser with one tab. Use as a context manager."""

    def __init__(self, profile: Path, *, width: int = 1400, height: int = 900):
        command_in, self._out = os.pipe()
        self._in, answers_out = os.pipe()
        # The protocol fixes descriptors 3 and 4; the shell puts the pipes there whatever their numbers are here.
        script = f'exec "$0" "$@" 3<&{command_in} 4>&{answers_out}'
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
            "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
        ]  # fmt: skip
        with (profile.parent / "chromium.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", script, CHROMIUM or "chromium", *flags], pass_fds=(command_in, answers_out), stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        os.close(command_in)
        os.close(answers_out)
        self._number, self._buffer, self._session = 0, b"", ""
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network"):
            self._call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._session = ""
        self._call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, dark: bool) -> None:
        """What the person at the browser likes."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Until ``expression`` is true in the page; its value. Fails with the page's text."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            value = self.evaluate(f"document.body && ({expression})")
            if value:
                return value
            time.sleep(0.2)
        raise AssertionError(f"never true: {expression}\n{self.evaluate('document.body.innerText')}")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        data = self._call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended; see chromium.log")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))
