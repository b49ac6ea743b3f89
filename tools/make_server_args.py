"""Write SGLang's settings to ``rlpost/config/server_args.json``, with which settings are checked.

Run it in the training environment after setup.cfg pins another SGLang, with a folder for each later
version that is supported:

    pip install --no-deps --target build/sglang-0.5.22 sglang==0.5.22
    python tools/make_server_args.py build/sglang-0.5.22

Types come from the source; choices and defaults of the pinned version from SGLang's parser, because
some of them are computed. Of a later version the file has the settings that differ, null for one that
is gone. Without folders the later versions stay as they are. ``--check`` writes nothing and exits
with 1 if the file is out of date.
"""

import argparse
import dataclasses
import json
import os
import sys
from importlib.metadata import distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "rlpost/extensions/on_cpu/sglang_on_cpu")]
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from rlpost.config.server_arg_values import COPY, ServerArg  # noqa: E402
from tools.server_arg_source import source_args  # noqa: E402


def document(folders: list[Path]) -> str:
    """Content of the file: one line per setting, without values that equal ServerArg's defaults."""
    import sglang
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    actions = {action.dest: action for action in parser._actions}
    args = source_args(Path(sglang.__path__[0]))
    pinned = {name: entry(arg, actions.get(name)) for name, arg in args.items()}
    later = dict(changes(folder, pinned) for folder in folders)
    later = later or json.loads(COPY.read_text())["later"]
    tables = [f'"{name}": {{\n{lines(table)}\n }}' for name, table in sorted(later.items())]
    return (
        f'{{"sglang": "{version("sglang")}",\n "args": {{\n{lines(pinned)}\n }},\n "later": {{\n '
        + ",\n ".join(tables)
        + "}}\n"
    )


def lines(table: dict[str, object]) -> str:
    """The settings of a table as JSON, one a line."""
    return ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(said)}" for name, said in sorted(table.items())
    )


def changes(folder: Path, pinned: dict[str, object]) -> tuple[str, dict[str, object]]:
    """Return the version of SGLang in a folder, and its settings that differ from ``pinned``."""
    (found,) = distributions(name="sglang", path=[str(folder)])
    args = {name: entry(arg, None) for name, arg in source_args(folder / "sglang").items()}
    names = pinned.keys() | args.keys()
    differing = {name: args.get(name) for name in names if args.get(name) != pinned.get(name)}
    return found.version, differing


def entry(arg: ServerArg, action: argparse.Action | None) -> dict[str, object]:
    """The facts of one setting, with choices and default of its parser action."""
    if action is not None:
        choices = [choice for choice in action.choices or () if choice is not None]
        ordered = sorted(choices) if isinstance(action.choices, set | frozenset) else choices
        default = (
            action.default
            if isinstance(action.default, str | int | float | list | dict | None)
            else None
        )
        arg = dataclasses.replace(arg, choices=tuple(ordered), default=default)
    plain = ServerArg()
    said = {
        key: value for key, value in dataclasses.asdict(arg).items() if value != getattr(plain, key)
    }
    return json.loads(json.dumps(said))


def main() -> int:
    """Write or check the file."""
    words = sys.argv[1:]
    text = document([Path(word) for word in words if word != "--check"])
    if "--check" in words:
        return int(COPY.read_text() != text)
    COPY.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
