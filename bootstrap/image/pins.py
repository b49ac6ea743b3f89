"""Read the versions that rlpost requires from setup.cfg and tools/no_deps.txt.

Input: the text of setup.cfg, names of extras. Output: ``Requirement`` values. Only the standard
library of Python 3.8 and later, because it runs in images that are being built or diagnosed.
"""

from __future__ import annotations

import configparser
import re
from typing import Iterable, NamedTuple  # noqa: UP035

_FORM = re.compile(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?\s*((?:(?:==|>=|<=|!=|~=|<|>)[^,;]+,?\s*)*)$")
_BOUND = re.compile(r"(==|>=|<=|!=|~=|<|>)\s*([^,;\s]+)")


class Requirement(NamedTuple):
    """A package and its version bounds, such as (("==", "2.13.0"),); ``text``: the line of the
    file.
    """

    name: str
    bounds: tuple[tuple[str, str], ...]
    text: str

    def allows(self, version: str) -> bool:
        """Whether a version is within the bounds; a local part (2.13.0+cu130) is ignored."""
        have = _numbers(version)
        return all(_holds(have, sign, wanted) for sign, wanted in self.bounds)


def parse(line: str) -> Requirement | None:
    """Parse a requirement line; None if it has a condition or is no requirement."""
    found = _FORM.match(line.strip())
    if found is None:
        return None
    return Requirement(canonical(found[1]), tuple(_BOUND.findall(found[3])), line.strip())


def requirements(setup_cfg: str, extras: Iterable[str]) -> list[Requirement]:
    """Requirements of the package with these extras, without duplicates. Raises KeyError for an
    unknown extra.
    """
    read = configparser.ConfigParser()
    read.read_string(setup_cfg)
    lines = read["options"]["install_requires"].splitlines()
    for extra in extras:
        lines += read["options.extras_require"][extra].splitlines()
    return list(dict.fromkeys(found for line in lines if (found := parse(line))))


def python_required(setup_cfg: str) -> Requirement:
    """The required Python version."""
    read = configparser.ConfigParser()
    read.read_string(setup_cfg)
    bounds = read["options"]["python_requires"]
    return Requirement("python", tuple(_BOUND.findall(bounds)), f"Python {bounds}")


def canonical(name: str) -> str:
    """Normalised name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0.post1+cu130`` is (2, 13, 0); sufficient for this project's bounds."""
    found = re.match(r"\d+(?:\.\d+)*", version.partition("+")[0])
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _holds(have: tuple[int, ...], sign: str, wanted: str) -> bool:
    bound = _numbers(wanted)
    width = max(len(have), len(bound))
    left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (have, bound))
    if sign == "~=":
        return left >= right and left[: len(bound) - 1] == right[: len(bound) - 1]
    if sign in ("==", "!=") and wanted.endswith(".*"):
        return (left[: len(bound)] == bound) == (sign == "==")
    return {
        "==": left == right,
        "!=": left != right,
        ">=": left >= right,
        "<=": left <= right,
        ">": left > right,
        "<": left < right,
    }[sign]
