"""An example environment with a browser: the model reads screenshots and clicks.

    --env rlpost.extensions.agents.examples.browser:ClickSquare --multimodal-keys '{"image": "images"}'

A page has a square of each colour, at places that depend on the prompt. The label of the prompt is
the colour to click, and a turn is a place, "x y" in thousandths of the page's sides. After a click
beside the square the model gets the next screenshot. Reward 1 for a click on the square.

The page is a real one in a headless Chromium, which has to be on the PATH of the node, and is driven
over a pipe with the DevTools protocol (chromedevtools.github.io/devtools-protocol). It has no
network; a real task would run the browser in a sandbox.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from multiprocessing.connection import wait
from typing import Any

from rlpost.config.keys import without_keys
from rlpost.errors import ConfigError, DataError, GradingLost
from rlpost.extensions.agents.environments.protocol import Content, Step, Turn
from rlpost.types import Prompt

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
COLOURS = ("red", "lime", "blue", "yellow")
CELLS, CELL = 4, 64  # cells of a side of the page, pixels of a side of one
SIDE = CELLS * CELL
DEADLINE_S = 120.0
_PLACE = re.compile(r"\s*(\d{1,4})[\s,]+(\d{1,4})\s*")


class ClickSquare:
    """Click the square of the label's colour."""

    deterministic = True  # the page depends on the prompt alone

    def __init__(self, turns: int = 3, ask: str = "\nClick: ") -> None:
        """``ask`` follows each screenshot. Raises ConfigError if there is no browser."""
        programs = [path for name in PROGRAMS if (path := shutil.which(name))]
        if not programs:
            raise ConfigError(
                f"no browser: none of {', '.join(PROGRAMS)} is on the PATH; install Chromium on the node "
                "of the driver"
            )
        self._program, self._turns, self._ask = programs[0], turns, ask
        self._browser: Browser | None = None
        self._wanted = ""

    def reset(self, prompt: Prompt) -> Content:
        """Open the page. Raises DataError for a label that is no colour."""
        self._wanted = (prompt.label or "").strip()
        if self._wanted not in COLOURS:
            raise DataError(
                f"prompt {prompt.prompt_id}: the label {self._wanted!r} is none of {', '.join(COLOURS)}"
            )
        self._browser = Browser(self._program, SIDE)
        self._browser.show(page(prompt))
        return (self._browser.screenshot(), self._ask)

    def step(self, turn: Turn) -> Step:
        """Click; anything but a place ends the episode."""
        assert self._browser is not None
        match = _PLACE.fullmatch(turn.answer)
        if match is None:
            return Step(done=True)
        x, y = (min(int(number), 999) * SIDE // 1000 for number in match.groups())
        self._browser.click(x, y)
        if self._browser.title() == self._wanted:
            return Step(reward=1.0, done=True, tool="click")
        is_last = turn.number + 1 == self._turns
        return Step((self._browser.screenshot(), self._ask), done=is_last, tool="click")

    def close(self) -> None:
        """End the browser."""
        if self._browser is not None:
            self._browser.close()


def page(prompt: Prompt) -> str:
    """Return the page of a prompt, whose title is the colour that was clicked last."""
    digest = hashlib.sha256(f"{prompt.prompt_id}:{prompt.text}".encode()).digest()
    cells = sorted(range(CELLS * CELLS), key=lambda cell: digest[cell])
    squares = "".join(
        f'<div onclick="document.title=\'{colour}\'" style="position:absolute;background:{colour};'
        f"left:{cell % CELLS * CELL}px;top:{cell // CELLS * CELL}px;width:{CELL}px;height:{CELL}px"
        '"></div>'
        for colour, cell in zip(COLOURS, cells, strict=False)
    )
    return f"<title></title><body style='margin:0;background:white'>{squares}</body>"


class Browser:
    """One page of a headless Chromium. Methods block.

    Raises GradingLost, also from the constructor, if the browser ends or does not answer.
    """

    def __init__(self, program: str, side: int) -> None:
        """``side``: of the page, in pixels."""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._unread, self._number, self._session = b"", 0, ""
        ours, theirs = os.pipe(), os.pipe()
        self._out, self._in = open(ours[1], "wb", 0), open(theirs[0], "rb", 0)  # noqa: SIM115
        words = [
            *("--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-dev-shm-usage"),
            "--no-sandbox",  # the page is this module's; many nodes lack user namespaces
            f"--user-data-dir={self._profile.name}",
        ]
        # The protocol has its pipes at descriptors 3 and 4.
        shell = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "browser", program, *words, "about:blank"],
            pass_fds=(ours[0], theirs[1]),
            env=without_keys(os.environ),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        try:
            target = self.ask("Target.createTarget", url="about:blank")["targetId"]
            attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            size = {"width": side, "height": side, "deviceScaleFactor": 1, "mobile": False}
            self.ask("Emulation.setDeviceMetricsOverride", **size)
        except BaseException:
            self.close()
            raise

    def show(self, html: str) -> None:
        """Load a page."""
        tree = self.ask("Page.getFrameTree")["frameTree"]
        self.ask("Page.setDocumentContent", frameId=tree["frame"]["id"], html=html)

    def click(self, x: int, y: int) -> None:
        """Press and release the mouse at a place, in pixels."""
        button = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, **button)

    def title(self) -> str:
        """Return the title of the page."""
        result = self.ask("Runtime.evaluate", expression="document.title", returnByValue=True)
        return str(result["result"].get("value", ""))

    def screenshot(self) -> bytes:
        """Return the page as a PNG file."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser, if it has not ended by itself. Further calls do nothing."""
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()
        self._profile.cleanup()

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        try:
            self._out.write(json.dumps(message).encode() + b"\0")
        except OSError as error:
            raise GradingLost(f"the browser ended: {error}") from error
        while (answer := self.next_message()).get("id") != self._number:
            pass
        if "error" in answer:
            raise GradingLost(f"the browser refuses {method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def next_message(self) -> dict[str, Any]:
        """Return the next message: an answer or an event."""
        while b"\0" not in self._unread:
            ready = wait([self._in.fileno()], DEADLINE_S)
            more = self._in.read(1 << 20) if ready else b""
            if not more:
                raise GradingLost(
                    "the browser ended"
                    if ready
                    else f"no message of the browser for {DEADLINE_S:g} s"
                )
            self._unread += more
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message
