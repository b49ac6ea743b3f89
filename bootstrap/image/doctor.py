"""Report what an image lacks, from inside it: ``python3 -m bootstrap.image.doctor [--cpu] [--te-for=SETTING,...]``

Input: the image, and setup.cfg of the code that contains this file. Output: a table or JSON on standard output or in
a separate file, because the container runtime and setup commands also write to standard output. Exit code 0 if a run
would work in the image, 1 if something is missing. Only the standard library of Python 3.8 and later.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Sequence  # noqa: UP035

from bootstrap.check import Check, level_of
from bootstrap.image.checks import check_image
from bootstrap.image.facts import read_image
from bootstrap.image.pins import Requirement, parse, python_required, requirements

CODE = Path(__file__).resolve().parents[2]
COMPILED = ("te",)
ALWAYS = ("megatron-core",)  # of tools/no_deps.txt; the rest of it is what a GPU's stack brings by itself


def wanted_packages(code: Path, *, cpu: bool = False, extras: Sequence[str] = ()) -> list[Requirement]:
    """What a training node needs, by setup.cfg and tools/no_deps.txt."""
    found = requirements((code / "setup.cfg").read_text(), ["cpu" if cpu else "gpu", *extras])
    lines = map(parse, (code / "tools/no_deps.txt").read_text().splitlines())
    return found + [one for one in lines if one is not None and one.bounds and (cpu or one.name in ALWAYS)]


def compiled_packages(code: Path) -> list[Requirement]:
    """What has to be compiled against the torch that is installed: the extras ``COMPILED`` of setup.cfg alone."""
    text = (code / "setup.cfg").read_text()
    always = requirements(text, [])
    return [one for one in requirements(text, COMPILED) if one not in always]


def table(checks: Sequence[Check]) -> str:
    """A line for each check, and what they come to."""
    width = max(len(check.name) for check in checks)
    level_width = max(len(check.level) for check in checks)
    lines = [f"{check.level:<{level_width}}  {check.name:<{width}}  {check.found}" for check in checks]
    lacking = sum(check.level == "FATAL_CONFIG" for check in checks)
    return "\n".join([*lines, f"{lacking} lacking" if lacking else "a run would work in this image"])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="rlpost doctor --image", description="What does this image lack?")
    parser.add_argument("--cpu", action="store_true", help="for nodes without a GPU")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write it there, not to standard output")
    parser.add_argument(
        "--requirements", nargs="*", metavar="EXTRA", help="print what it should hold, with these extras, for pip"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="print what is compiled against torch, for pip --no-build-isolation"
    )
    parser.add_argument(
        "--te-for", metavar="SETTING,...", default="", help="settings that need TransformerEngine: it must be there"
    )
    options = parser.parse_args(argv)
    if not (CODE / "setup.cfg").is_file():
        print(f"no setup.cfg in {CODE}, where the pins stand: call this from a checkout", file=sys.stderr)
        return 2
    if options.compiled:
        print("\n".join(one.text for one in compiled_packages(CODE)))
        return 0
    if options.requirements is not None:
        print("\n".join(one.text for one in wanted_packages(CODE, cpu=options.cpu, extras=options.requirements)))
        return 0
    python = python_required((CODE / "setup.cfg").read_text())
    facts = read_image({name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)})
    checks = check_image(
        facts,
        python,
        wanted_packages(CODE, cpu=options.cpu),
        cpu=options.cpu,
        compiled=compiled_packages(CODE),
        te_reasons=[reason for reason in options.te_for.split(",") if reason],
    )
    text = json.dumps([asdict(check) for check in checks], indent=1) if options.json else table(checks)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n")
    return 1 if level_of(checks) == "FATAL_CONFIG" else 0


if __name__ == "__main__":
    sys.exit(main())
