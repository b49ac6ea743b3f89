"""``rlpost recipes``: the recipes, models and cluster profiles that have a name.

Input: the files in ``jobs/``. Output: name and description of each, or JSON. Settings are not
loaded: a description is the first sentence of the comment at the top of a TOML file, or of
``_description`` in the config.json of a model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlpost.cli.terminal import named_lines
from rlpost.config.arguments import Parser, add_switch
from rlpost.config.model_file import named_in

JOBS = Path(__file__).parents[2] / "jobs"
KINDS = {
    "recipes": "rlpost submit NAME",
    "models": "--model NAME",
    "clusters": "--cluster NAME",
}
"""Folders of ``jobs/``, and where a name of each is used."""
_GAP = 2


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost recipes [recipes|models|clusters] [--json]``."""
    parser = Parser(
        prog="rlpost recipes",
        description="List the recipes, models and cluster profiles that have a name.",
    )
    parser.add_argument("kind", nargs="?", choices=tuple(KINDS), help="only these (default: all)")
    add_switch(parser, "--json", "print JSON: kind, name, description")
    options = parser.parse_args(arguments)
    kinds = [options.kind] if options.kind else list(KINDS)
    descriptions = {kind: named_files(JOBS / kind) for kind in kinds}
    if options.json:
        print(json.dumps(descriptions, indent=2))
    else:
        print("\n".join(page(descriptions, shutil.get_terminal_size().columns)))
    return 0


def named_files(folder: Path) -> dict[str, str]:
    """Return the description of each file of a folder, by its name."""
    found = {path.stem: description(path.read_text()) for path in sorted(folder.glob("*.toml"))}
    return found | {
        path.stem: first_sentence(named_in(path)) for path in sorted(folder.glob("*.json"))
    }


def description(text: str) -> str:
    """Return the first sentence of the comment at the top of a file; empty without one.

    >>> description("# One node,\\n# no GPU. More.\\n\\n[cluster]")
    'One node, no GPU.'
    """
    lines = []
    for line in text.splitlines():
        if not line.startswith("# "):
            break
        lines.append(line.removeprefix("# "))
    return first_sentence(" ".join(lines))


def first_sentence(text: str) -> str:
    """Return the text up to the first full stop before a space; empty for an empty text."""
    return text.partition(". ")[0].rstrip(".") + "." if text else ""


def page(found: Mapping[str, Mapping[str, str]], width: int) -> list[str]:
    """Return the lines of the list, at most ``width`` columns wide unless names need more."""
    lines: list[str] = []
    for kind, descriptions in found.items():
        lines += [*([""] if lines else []), f"{kind} ({KINDS[kind]})"]
        indent = max(map(len, descriptions), default=0) + 2 * _GAP
        rows = [(f"{'':{_GAP}}{name}", text or "-") for name, text in descriptions.items()]
        lines += named_lines(rows, indent, max(width - 1, indent + 20))
    return lines
