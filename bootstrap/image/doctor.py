"""Report what an image lacks, from inside it: ``python3 -m bootstrap.image.doctor``.

Input: the image, and the version pins of the code that contains this file. Output: a table or JSON
on standard output or in a separate file, because the container runtime and setup commands also
write to standard output. Exit code 0 if a run would work in the image, 1 if something is missing.
Only the standard library of Python 3.8 and later.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Sequence  # noqa: UP035

from bootstrap.check_result import Check, level_of
from bootstrap.image.checks import check_image
from bootstrap.image.image_facts import read_image
from bootstrap.image.pins import Requirement, parse, python_required, read_pins, requirements

CODE = Path(__file__).resolve().parents[2]
COMPILED = ("te",)
# from bootstrap/image/no_deps.txt; the GPU stack installs its other packages itself
ALWAYS = ("megatron-core",)


def wanted_packages(
    code: Path, *, cpu: bool = False, extras: Sequence[str] = ()
) -> list[Requirement]:
    """Requirements of a training node: the pins of ``code``, and bootstrap/image/no_deps.txt."""
    found = requirements(read_pins(code), ["cpu" if cpu else "gpu", *extras])
    for line in (code / "bootstrap/image/no_deps.txt").read_text().splitlines():
        requirement = parse(line)
        if requirement is None or not requirement.bounds:
            continue
        if cpu or requirement.name in ALWAYS:
            found.append(requirement)
    return found


def compiled_packages(code: Path) -> list[Requirement]:
    """Packages to compile against the installed torch: the extras ``COMPILED`` of setup.cfg."""
    pins = read_pins(code)
    always = requirements(pins, [])
    return [one for one in requirements(pins, COMPILED) if one not in always]


def table(checks: Sequence[Check]) -> str:
    """One line per check, and a summary."""
    width = max(len(check.name) for check in checks)
    level_width = max(len(check.level) for check in checks)
    lines = [
        f"{check.level:<{level_width}}  {check.name:<{width}}  {check.found}" for check in checks
    ]
    lacking = sum(check.level == "FATAL_CONFIG" for check in checks)
    return "\n".join(
        [*lines, f"{lacking} lacking" if lacking else "a run would work in this image"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="rlpost doctor --image", description="Report what this image lacks for a run."
    )
    parser.add_argument("--cpu", action="store_true", help="check for nodes without a GPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write to FILE instead of standard output"
    )
    parser.add_argument(
        "--requirements",
        nargs="*",
        metavar="EXTRA",
        help="print the required packages with these extras, for pip",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="print the packages to compile against torch, for pip --no-build-isolation",
    )
    parser.add_argument(
        "--te-for",
        metavar="SETTING,...",
        default="",
        help="settings that require TransformerEngine",
    )
    options = parser.parse_args(argv)
    try:
        pins = read_pins(CODE)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    if options.compiled:
        print("\n".join(one.text for one in compiled_packages(CODE)))
        return 0
    if options.requirements is not None:
        requirements = wanted_packages(CODE, cpu=options.cpu, extras=options.requirements)
        print("\n".join(one.text for one in requirements))
        return 0
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    checks = check_image(
        read_image(environ),
        python_required(pins),
        wanted_packages(CODE, cpu=options.cpu),
        cpu=options.cpu,
        compiled=compiled_packages(CODE),
        te_reasons=[reason for reason in options.te_for.split(",") if reason],
    )
    text = table(checks)
    if options.json:
        text = json.dumps([asdict(check) for check in checks], indent=1)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n")
    return 1 if level_of(checks) == "FATAL_CONFIG" else 0


if __name__ == "__main__":
    sys.exit(main())
