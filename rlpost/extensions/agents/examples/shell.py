"""An example environment in a sandbox: the model writes a program, and hidden cases score it.

    --env rlpost.extensions.agents.examples.shell:Shell

A turn that begins with "$ " is a shell command, whose output follows it; any other turn ends the
episode. The label of a prompt is a JSON list of cases [input, output], on which ``python3
solution.py`` runs outside the agent's sandbox. Reward: the share of cases that it solves.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.protocol import Pool, fresh
from rlpost.extensions.agents.sandbox.verify import CaseVerifier, verify
from rlpost.types import Prompt

PROMPT = "$ "
PROGRAM = "python3 solution.py"


class Shell:
    """One sandbox for each episode; files stay from one command to the next."""

    stop = ("\n",)
    uses_sandboxes = True
    sandboxes: Pool
    archives: Archives

    def __init__(self, shown: int = 2000) -> None:
        """``shown``: characters of an output that the model reads."""
        self._shown = shown
        self._open = AsyncExitStack()

    async def reset(self, prompt: Prompt) -> None:
        """Take a fresh sandbox."""
        await self._begin(prompt.label or "[]")

    async def _begin(self, label: str) -> None:
        self._label = label
        cases = [(given.encode(), wanted.encode()) for given, wanted in json.loads(label)]
        self._verifier = CaseVerifier(PROGRAM, cases)
        self._sandbox = await self._open.enter_async_context(fresh(self.sandboxes))

    async def step(self, turn: Turn) -> Step:
        """Run a command."""
        if not turn.text.startswith(PROMPT):
            return Step(done=True)
        result = await self._sandbox.run(turn.text.removeprefix(PROMPT))
        return Step(f"{result.text[: self._shown]}\n", tool="shell")

    async def score(self) -> float:
        """Run the cases on a copy of the files."""
        return (await verify(self._sandbox, self._verifier, self.sandboxes)).score

    async def save(self) -> bytes:
        """Save the files and the cases; refused while a command runs in the background."""
        files = await self.archives.save(self._sandbox)
        return json.dumps({"files": files.decode(), "label": self._label}).encode()

    async def restore(self, data: bytes) -> None:
        """Take a fresh sandbox, with the files that were saved."""
        state = json.loads(data)
        await self._begin(state["label"])
        await self.archives.restore(self._sandbox, state["files"].encode())

    async def close(self) -> None:
        """Close the sandbox."""
        await self._open.aclose()
