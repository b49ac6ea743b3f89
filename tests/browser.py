"""A headless Chromium, driven over a pipe with the DevTools protocol.

Input: files. Output: values of JavaScript expressions, network requests, errors and warnings,
screenshots.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
DEADLINE_S = 120


def find_browser() -> str | None:
    """The path of a browser on this machine, or None."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """One page at a time; a context manager.

    ``complaints`` (errors and warnings) and ``requests`` belong to the newest page.
    """

    def __init__(self, program: str, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        words = [
            "--headless=new",
            "--no-sandbox",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        words += [
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
        ]
        shell = f'exec "$@" 3<&{theirs[0]} 4>&{ours[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", program, *words, "about:blank"],
            pass_fds=(theirs[0], ours[1]),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs[0])
        os.close(ours[1])
        self._in, self._out = os.fdopen(ours[0], "rb"), os.fdopen(theirs[1], "wb")
        self._rest, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._is_loaded = False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()
        self._in.close()
        self._process.terminate()
        self._process.wait(DEADLINE_S)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(
        self, path: Path, *, width: int = 1280, dark: bool = False, fragment: str = ""
    ) -> None:
        """Load a file in a window of this width, light or dark."""
        self.ask("Page.navigate", url="about:blank")
        self.complaints, self.requests, self._is_loaded = [], [], False
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.requests, self._is_loaded = [], False
        self.ask("Page.navigate", url=path.as_uri() + fragment)
        while not self._is_loaded:
            self._next()

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        found = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path, *, height: int | None = None) -> None:
        """Save the page, or its upper part, as a PNG file."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(size["height"], height or 16000),
            "scale": 1,
        }
        found = self.ask(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert wait([self._in], DEADLINE_S), f"no message of the browser for {DEADLINE_S} s"
            more = os.read(self._in.fileno(), 1 << 20)
            assert more, "the browser ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        match message.get("method"), message.get("params"):
            case "Page.loadEventFired", _:
                self._is_loaded = True
            case "Runtime.exceptionThrown", event:
                self.complaints.append(str(event["exceptionDetails"]))
            case "Log.entryAdded", event if event["entry"]["level"] in ("error", "warning"):
                self.complaints.append(event["entry"]["text"])
            case "Runtime.consoleAPICalled", event if event["type"] in (
                "error",
                "warning",
                "assert",
            ):
                self.complaints.append(str(event["args"]))
            case "Network.requestWillBeSent", event:
                self.requests.append(event["request"]["url"])
        return message
