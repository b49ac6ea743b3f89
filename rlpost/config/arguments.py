"""The parser of every command: errors of argparse become ConfigError, without the usage text.

Input: words of a command line. Output: argparse's namespace, or ConfigError with the flag, what is
wrong, and a remedy. Standard library only: a verb that needs no settings loads none.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import NoReturn

from rlpost.errors import ConfigError, suggestion

ALIKE = 0.75
"""Minimum similarity of a flag and a word, both without dashes, for a suggestion."""
_ARGUMENT = re.compile(r"argument (?P<names>[^:]+): (?P<what>.*)", re.DOTALL)
_BAD_VALUE = re.compile(r"invalid (?P<kind>\w+) value: (?P<value>.*)", re.DOTALL)
_UNKNOWN = "unrecognized arguments: "
_KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message in the form of our messages."""
        if message.startswith(_UNKNOWN):
            word = message.removeprefix(_UNKNOWN).split()[0]
            raise ConfigError(self._unknown(word))
        match = _ARGUMENT.match(message)
        if match is None:
            raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")
        names, what = match["names"].split("/")[-1], match["what"]
        bad = _BAD_VALUE.match(what)
        if bad is not None:
            kind = _KINDS.get(bad["kind"], f"a {bad['kind']}")
            raise ConfigError(f"{names} {bad['value'].strip(chr(39))}: must be {kind}")
        if what.startswith("expected"):
            raise ConfigError(f"{names}: needs a value; write {names} {self._metavar(names)}")
        raise ConfigError(f"{names}: {what}; see {self.prog} --help")

    def _metavar(self, name: str) -> str:
        action = self._option_string_actions.get(name)
        return str(action.metavar or action.dest.upper()) if action is not None else "VALUE"

    def _unknown(self, word: str) -> str:
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        if word.startswith("-"):
            return f"{word}: unknown flag of {self.prog}{alike(word, known) or '; it has ' + ', '.join(sorted(known))}"
        return f"{word}: one word too many for {self.prog}; see {self.prog} --help"


def add_switch(made: argparse._ActionsContainer, flag: str, text: str) -> None:
    """Add a flag without a value; it is False unless given."""
    made.add_argument(flag, action="store_true", help=text)


def alike(word: str, flags: Iterable[str]) -> str:
    """Return ``; did you mean '--X'?`` for a sufficiently similar flag, else an empty string.

    >>> alike("--num-rolout", ["--num-rollout"]), alike("--tp", ["--fp8"])
    ("; did you mean '--num-rollout'?", '')
    """
    names = [flag.lstrip("-") for flag in flags]
    near = suggestion(word.partition("=")[0].lstrip("-"), names, cutoff=ALIKE)
    return near.replace("mean '", "mean '--") if near else ""
