"""Write the tasks of an environment as a prompt file.

    python -m rlpost.extensions.agents.environments.export verifiers:NAME --out tasks.jsonl

Input: environments, as --env has them, and their --env-args. Output: one line for each task, which
names its environment and its task: `--prompt-data tasks.jsonl --input-key prompt`. Prompts of
environments that have a taskset of their own are only shown; a harness builds its own messages.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from common.terminal import visible_output
from rlpost.algorithm.plugin import load_function
from rlpost.errors import ConfigError, RlpostError
from rlpost.extensions.agents.env_names import EnvName, parse_envs
from rlpost.extensions.agents.environments.make import ADAPTERS
from rlpost.extensions.agents.environments.of_harbor import options_of, prompts, sort_tasks
from rlpost.extensions.agents.environments.of_nemogym import rows_of


def tasks_of(name: EnvName, arguments: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the rows of an environment's tasks.

    Raises ConfigError for an environment without tasks.
    """
    if name.kind == "harbor":
        yield from _harbor_rows(name, arguments)
        return
    if name.kind == "nemogym":
        yield from rows_of(name.label, arguments)
        return
    if name.kind in ("own", "openenv"):
        raise ConfigError(
            f"--env {name.word}: it has no tasks to export; write the prompt file yourself"
        )
    harness = load_function(ADAPTERS[name.kind], key="--env")(name.target, **arguments)
    refusal_of = getattr(harness, "refusal_of", lambda task: "")
    for number, task in enumerate(harness.tasks):
        if refusal := refusal_of(task):
            print(f"skipped {getattr(task, 'id', number)}: {refusal}", file=sys.stderr)
            continue
        text = getattr(getattr(task, "data", task), "prompt_text", None)
        shown = text or str(getattr(task, "id", number))
        yield {"prompt": shown, "env": name.label, "task": number}


def _harbor_rows(name: EnvName, arguments: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the rows of Harbor tasks that may run here; report the others."""
    options = {key: value for key, value in arguments.items() if key != "shown"}
    running, skipped = sort_tasks(name.target, options_of(name.target, options))
    for task in skipped:
        print(f"skipped {task.name}: {task.reason}", file=sys.stderr)
    yield from prompts(running, name.label)


def main(argv: list[str] | None = None) -> int:
    """Write the file; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpost.extensions.agents.environments.export",
        description=(__doc__ or "").split("\n")[0],
    )
    parser.add_argument(
        "env",
        nargs="+",
        help="verifiers:NAME, tau2:DOMAIN, harbor:FOLDER, nemogym:URL, gymnasium:ID, textarena:ID "
        "or reasoning_gym:NAME",
    )
    parser.add_argument("--out", type=Path, required=True, help="the prompt file to write")
    parser.add_argument("--env-args", type=json.loads, default={}, help="as for a run")
    options = parser.parse_args(argv)
    try:
        rows = [
            row
            for name in parse_envs(options.env)
            for row in tasks_of(name, options.env_args.get(name.label, {}))
        ]
    except RlpostError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{options.out}: {len(rows)} tasks")
    return 0


if __name__ == "__main__":
    with visible_output():
        sys.exit(main())
