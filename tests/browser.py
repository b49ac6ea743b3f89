"""A headless Chromium for the report's pages: what they draw, complain of and request.

Input: files. Output: values of JavaScript expressions, network requests, errors and warnings,
screenshots. The example environment has the client of the DevTools protocol.
"""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

from rlpost.extensions.agents.examples.browser import PROGRAMS
from rlpost.extensions.agents.examples.browser import Browser as Client

SIDE = 800  # of a page before it is opened, in pixels


def find_browser() -> str | None:
    """The path of a browser on this machine, or None."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser(Client):
    """One page at a time; a context manager.

    ``complaints`` (errors and warnings) and ``requests`` belong to the newest page.
    """

    def __init__(self, program: str) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._is_loaded = False
        super().__init__(program, SIDE)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
            self.next_message()

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

    def next_message(self) -> dict[str, Any]:
        """Return the next message, and record what it says of the page."""
        message = super().next_message()
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
