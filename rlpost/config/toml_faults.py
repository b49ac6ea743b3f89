"""Errors of TOML files, with the line that they are about. Pure."""

from __future__ import annotations

import json
import re

_PLACE = re.compile(r" \(at line (\d+), column \d+\)$")
_BARE_TEXT = re.compile(r"\s*([\w.-]+)\s*=\s*([A-Za-z_./~][^\s\"'#]*)\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([\w.-]+)\s*=")


_RUNTIME = '; write --container command and --container-command "{} ...", see docs/containers.md'
OTHER_WORDS = {
    **{name: _RUNTIME.format(f"{name} exec") for name in ("apptainer", "singularity")},
    **{name: _RUNTIME.format(f"{name} run") for name in ("podman", "podman-hpc", "docker")},
    "charliecloud": _RUNTIME.format("ch-run"),
}
"""What to write in place of a word that several users tried."""


def toml_fault(message: str, text: str) -> str:
    """Return tomllib's message with the line that it is about, and the remedy of common faults.

    >>> toml_fault("Invalid value (at line 1, column 11)", "rm_type = exact_match")
    'line 1: rm_type = exact_match: text needs quotes; write rm_type = "exact_match"'
    """
    place = _PLACE.search(message)
    if place is None:
        return message
    number, what = int(place[1]), message[: place.start()]
    lines = text.splitlines()
    line = lines[number - 1].strip() if number <= len(lines) else ""
    bare, key = _BARE_TEXT.match(line), _KEY.match(line)
    if bare is not None and what.startswith("Invalid value"):
        reason = f'text needs quotes; write {bare[1]} = "{bare[2]}"'
    elif key is not None and what.startswith("Cannot overwrite"):
        reason = f"{key[1]} is set twice in this table; remove one of the lines"
    else:
        reason = what[0].lower() + what[1:]
    return f"line {number}: {line}: {reason}"


def spelling(fault: str, value: object) -> str:
    """Return how a value is written that TOML read as another type; empty for other faults.

    ``fault``: pydantic's type of the fault.

    >>> spelling("string_type", 30), spelling("tuple_type", "a.jsonl"), spelling("int_type", 1.5)
    ('must be a text; write "30" with quotes', 'must be a list; write ["a.jsonl"]', '')
    """
    if fault in ("tuple_type", "list_type"):
        return f"must be a list; write [{json.dumps(value, default=str)}]"
    if fault == "string_type" and isinstance(value, (int, float)):
        return f'must be a text; write "{value}" with quotes'
    return ""
