"""Read a shell script: its file becomes commands with all words expanded. Nothing is executed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlpost.errors import ConfigError
from rlpost.extensions.importing.shell import Shell
from rlpost.extensions.importing.shell_syntax import parse
from rlpost.extensions.importing.text_file import read_text


def read_script(path: Path, variables: Mapping[str, str]) -> Shell:
    """Read a script with variables of the caller. Raises ConfigError."""
    shell = Shell(path, {"HOME": "$HOME", **variables}, given=frozenset(variables))
    text = read_text(path)
    try:
        shell.run(parse(text))
    except ConfigError as error:
        raise ConfigError(f"{path.name}, {error}") from None
    except RecursionError:
        raise ConfigError(f"{path.name}: nested too deeply to be read") from None
    return shell
