"""A page in a headless Chromium, watched over Chromium's own debugging pipe: when it was ready, what it complained
about, how it looks.

No driver is needed: https://chromedevtools.github.io/devtools-protocol/ over file descriptors 3 and 4
(--remote-debugging-pipe).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
]
SECONDS = 60.0  # no answer takes longer


def chromium() -> str | None:
    """The browser's path, or None where there is none."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


@dataclass
class Opened:
    """What happened while a page was opened. `seconds` is from its address to its first picture, scripts and load event
    over; `all_seconds` to the last chart of a report, also those that are out of sight."""

    seconds: float = 0.0
    all_seconds: float = 0.0
    # console errors and warnings, uncaught exceptions, the browser's log
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # addresses of everything it loaded


class Browser:
    """One tab. Use it as a context manager."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        profile = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        path = chromium()
        if path is None:
            raise FileNotFoundError("no chromium on this machine")
        # The shell puts the pipe's ends where Chromium expects them.
        line = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", line, path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write), stdin=quiet, stdout=quiet, stderr=quiet)
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._next = b"", 0
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, TimeoutError, EOFError):
            self._call("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)
        os.close(self._read)
        os.close(self._write)
        self._stack.close()

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """The size of the window, and whether the system's scheme is dark, from the next page on."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> Opened:
        """Open a report and wait until all of it is drawn."""
        self._events.clear()
        start = time.perf_counter()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive(start + SECONDS)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        opened = Opened(time.perf_counter() - start)
        ready = "document.documentElement.dataset.ready"
        self.run(f"new Promise(done => {{ const look = () => {ready} ? done() : setTimeout(look, 10); look(); }})")
        opened.all_seconds = time.perf_counter() - start
        for event in self._events:
            method, more = event["method"], event.get("params", {})
            if method == "Network.requestWillBeSent":
                opened.requests.append(more["request"]["url"])
            elif method == "Runtime.exceptionThrown":
                opened.complaints.append(json.dumps(more["exceptionDetails"])[:500])
            elif method == "Runtime.consoleAPICalled" and more["type"] in ("error", "warning", "assert"):
                opened.complaints.append(json.dumps(more["args"])[:500])
            elif method == "Log.entryAdded" and more["entry"]["level"] in ("error", "warning"):
                opened.complaints.append(more["entry"]["text"])
        return opened

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. Raises RuntimeError where it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, or of what the window shows of it."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol to the tab, and its answer."""
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": parameters} | (
            {} if session is None else {"sessionId": session}
        )
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.perf_counter() + SECONDS
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        """The next message; events are kept as well."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.perf_counter()))
            if not ready:
                raise TimeoutError("chromium did not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise EOFError("chromium ended")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message
