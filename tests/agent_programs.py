"""Run agents of npm against the gateway: settings, trajectories, trained tokens.

    python -m tests.agent_programs [--only NAME ...] [--record FILE] [--folder .venv-programs]

``make test-programs``. Installs the programs with npm, and runs each with its own settings in an
empty folder. The policy is scripted: a call of the program's tool for commands, a second one, an
answer. It writes them in the chat template of Qwen3, in tokens that no tokenizer would choose, so
that a tokenisation that is repeated differs. A program is exact if every trained token is the
sampled one after the tokens that the engine read, and each is trained once.

--record writes the requests in their order, a JSON object a line, as in
tests/unit/agents/recorded.jsonl: with shortened texts, without names and ids. Exit code 1: a
program is not exact, or the task has several trajectories.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from rlpost.extensions.agents import http_server
from rlpost.extensions.agents.gateway import OpenEpisode
from rlpost.extensions.agents.trajectory import split_side_requests
from rlpost.rollout.sampling import SamplingParams
from tests.unit.agents.chat_models import real_template, write_model
from tests.unit.agents.sampled import check
from tests.unit.agents.test_gateway import PROMPT, setup

FOLDER = Path(".venv-programs")
TASK = "List the files in this folder with a command, then say done."
ANSWER = "It is done."
DEADLINE_S = 180.0
NUM_TURNS = 3
CONTEXT = 200_000
Files = Mapping[str, str]
LONGEST_TEXT, LONGEST_TEXTS = 200, {"description": 36}  # characters of a recorded text
_HEXADECIMAL = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4,})+")
_EPISODE = re.compile(r"_[0-9a-f]{16}_")


@dataclass(frozen=True)
class Program:
    """One program: its package, and how it is told the address, the key and the task.

    ``files`` and ``environ`` may name HOME, BASE_URL, ANTHROPIC_URL and KEY.
    """

    name: str
    package: str
    binary: str
    arguments: tuple[str, ...]
    tool: str
    argument: str
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)  # further arguments of each call

    def call(self, command: str) -> str:
        """Return an answer with a call; its spelling is not that of the template."""
        arguments = {**self.more, self.argument: command}
        written = json.dumps({"arguments": arguments, "name": self.tool})
        return f"<think>\nHm.\n</think>\n\nLook:\n<tool_call>{written}</tool_call>"


CODEX = """
model = "policy"
model_provider = "rlpost"
[model_providers.rlpost]
name = "rlpost"
base_url = "BASE_URL"
env_key = "KEY_OF_EPISODE"
wire_api = "responses"
"""
OPENCODE = json.dumps(
    {
        "provider": {
            "rlpost": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "BASE_URL", "apiKey": "KEY"},
                "models": {"policy": {}},
            }
        },
        "model": "rlpost/policy",
        "permission": "allow",
    }
)
PROGRAMS = (
    Program(
        "Claude Code",
        "@anthropic-ai/claude-code@2.1.332",
        "@anthropic-ai/claude-code-linux-x64/claude",
        ("-p", TASK, "--dangerously-skip-permissions"),
        *("Bash", "command"),
        environ={
            "ANTHROPIC_BASE_URL": "ANTHROPIC_URL",
            "ANTHROPIC_API_KEY": "KEY",
            "IS_SANDBOX": "1",
        },
    ),
    Program(
        "Codex CLI",
        "@openai/codex@0.171.0",
        ".bin/codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
        *("exec_command", "cmd"),
        environ={"KEY_OF_EPISODE": "KEY"},
        files={".codex/config.toml": CODEX},
    ),
    Program(
        "qwen-code",
        "@qwen-code/qwen-code@0.15.10",
        ".bin/qwen",
        ("-p", TASK, "--yolo", "--auth-type", "openai"),
        *("run_shell_command", "command"),
        environ={"OPENAI_BASE_URL": "BASE_URL", "OPENAI_API_KEY": "KEY", "OPENAI_MODEL": "policy"},
        more={"description": "a command", "is_background": "false"},
    ),
    Program(
        "opencode",
        "opencode-ai@1.18.33",
        "opencode-linux-x64/bin/opencode",
        ("run", TASK),
        *("bash", "command"),
        files={".config/opencode/opencode.json": OPENCODE},
        more={"description": "a command"},
    ),
)


@dataclass(frozen=True)
class Seen:
    """What one program did. ``fault``: why it is not exact; empty if it is."""

    program: Program
    output: str
    num_trajectories: int
    num_turns: int
    num_trained: int
    num_side: int
    num_side_tokens: int
    fault: str


def install(folder: Path, programs: tuple[Program, ...]) -> None:
    """Install the programs with npm; their install scripts are not run."""
    stamp, packages = folder / ".installed", sorted(each.package for each in programs)
    if stamp.exists() and set(packages) <= set(stamp.read_text().split()):
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text("{}")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *packages]
    subprocess.run(command, cwd=folder, check=True)
    stamp.write_text("\n".join(packages))


def script(program: Program, bodies: Sequence[Mapping[str, Any]]) -> Callable[[], str]:
    """Return the policy: two calls, then an answer, which requests without tools get, too.

    ``bodies``: the requests so far.
    """
    calls = iter([program.call("ls"), program.call("echo R\u00f6m \u5929; ls -a")])
    answer = f"<think>\nHm.\n</think>\n\n{ANSWER}"
    return lambda: next(calls, answer) if bodies[-1]["body"].get("tools") else answer


async def run_program(program: Program, episode: OpenEpisode, folder: Path, home: Path) -> str:
    """Run a program with an episode; return what it printed."""
    values = {
        "BASE_URL": episode.base_url,
        "ANTHROPIC_URL": episode.anthropic_url,
        "KEY": episode.api_key,
        "HOME": str(home),
    }
    for name, text in program.files.items():
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        # KEY_OF_EPISODE is a name of the file itself.
        for word in ("BASE_URL", '"KEY"'):
            text = text.replace(
                word, json.dumps(values["KEY"]) if word == '"KEY"' else values[word]
            )
        file.write_text(text)
    work = home / "project"
    work.mkdir()
    (work / "notes.txt").write_text("hello\n")
    environ = {name: values.get(value, value) for name, value in program.environ.items()}
    process = await asyncio.create_subprocess_exec(
        folder.absolute() / "node_modules" / program.binary,
        *program.arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "CI": "1", **environ},
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        output = b"it did not end within its time\n"
    return output.decode(errors="replace")


class Recorder:
    """Keeps the bodies of requests, beside the gateway's own middleware."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def install(self) -> None:
        """Record the requests of every gateway of this process from now on."""
        read = http_server._Routes._content

        async def content(
            routes: http_server._Routes, request: web.Request, episode: OpenEpisode
        ) -> bytes:
            body = await read(routes, request, episode)
            self.bodies.append({"path": request.path, "body": json.loads(body)})
            return body

        http_server._Routes._content = content  # type: ignore[method-assign]


def shorten(value: Any, home: str, key: str = "") -> Any:
    """Return a body with long texts cut, and without ids, names of folders and most tools.

    The cut is the same in each request, so later ones still extend earlier ones.
    """
    if isinstance(value, dict):
        return {name: shorten(each, home, name) for name, each in value.items()}
    if key == "tools":
        value = [each for each in value if json.dumps(each).find('"name": "Agent"') < 0]
        value = sorted(value, key=lambda tool: json.dumps(tool).find('"command"') < 0)[:2]
    if isinstance(value, list):
        return [shorten(each, home) for each in value]
    if not isinstance(value, str):
        return value
    text = _EPISODE.sub("_NAME_", value.replace(home, "/home/user"))
    text = _HEXADECIMAL.sub("0" * 8, text)
    longest = LONGEST_TEXTS.get(key, LONGEST_TEXT)
    return text if len(text) <= longest or key == "arguments" else text[:longest] + " ..."


async def observe(program: Program, model: str, folder: Path, recorder: Recorder) -> Seen:
    """Run one program with a gateway of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        async with setup(model) as serving:
            serving.sampled.write = script(program, recorder.bodies)
            serving.gateway.policy.longest_request = CONTEXT
            sampling = SamplingParams(max_new_tokens=4000)
            async with await serving.gateway.open(
                PROMPT, sampling, connection=serving.connection
            ) as episode:
                output = await run_program(program, episode, folder, Path(home))
                recorder.bodies[:] = [shorten(each, home) for each in recorder.bodies]
                trajectories = episode.trajectories()
    fault = ""
    try:
        check(trajectories, serving.sampled)
    except AssertionError as error:
        fault = f"not exact: {error}"
    task, side = split_side_requests(trajectories)
    num_turns = sum(len(each.turns) for each in task)
    if not fault and (len(task), num_turns) != (1, NUM_TURNS):
        fault = f"{[each.cause for each in task]} {output[-500:]}"
    return Seen(
        program,
        output,
        len(task),
        num_turns,
        sum(each.loss_mask.total() for each in task),
        len(side),
        sum(each.loss_mask.total() for each in side),
        fault,
    )


def row(seen: Seen) -> str:
    """Return the line of a program in the table."""
    cells = [
        seen.program.package.rpartition("@")[0],
        seen.program.package.rpartition("@")[2],
        f"{seen.num_trajectories} ({seen.num_turns})",
        str(seen.num_trained),
        f"{seen.num_side} ({seen.num_side_tokens})" if seen.num_side else "none",
        seen.fault or "exact",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run the programs, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[each.name for each in PROGRAMS])
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the installed programs")
    options = parser.parse_args()
    programs = tuple(each for each in PROGRAMS if not options.only or each.name in options.only)
    install(options.folder, programs)
    recorder, seen, lines = Recorder(), list[Seen](), list[str]()
    recorder.install()
    with tempfile.TemporaryDirectory() as model_folder:
        model = write_model(Path(model_folder), "qwen", real_template("qwen3"))
        for program in programs:
            print(f"{program.name}: running", file=sys.stderr)
            recorder.bodies.clear()
            seen.append(asyncio.run(observe(program, model, options.folder, recorder)))
            name = program.name.lower().replace(" ", "_").replace("-", "_")
            lines += [json.dumps({"program": name, **each}) for each in recorder.bodies]
    print("| program | version | trajectories (turns) | trained | beside the task | seen |")
    print("\n".join(["|---|---|---|---|---|---|", *map(row, seen)]))
    if options.record is not None:
        options.record.write_text("\n".join(lines) + "\n")
    return int(any(each.fault for each in seen))


if __name__ == "__main__":
    sys.exit(main())
