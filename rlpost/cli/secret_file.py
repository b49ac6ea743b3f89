"""Pass API keys to the driver through a file of mode 0600 in the run folder, and nothing else.

Input: the environment of ``rlpost submit``.
Output: RUN/secrets.env (one ``NAME=value`` per line), and an environment without the keys for
sbatch; in the job, the driver's environment. Keys therefore appear in no argv, batch script, log,
run.json or ledger, nor in Slurm's copy of the environment, nor in that of Ray, its workers and the
engines. ``hide_keys`` runs first: every user of a host can read the command line of a process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from common.files import write_atomic
from common.run_folder import RunFolder
from rlpost.config.keys import WANDB, is_key
from rlpost.errors import ConfigError


def secrets_path(run: RunFolder) -> Path:
    """Return the path RUN/secrets.env."""
    return run.root / "secrets.env"


def store_keys(run: RunFolder, environ: MutableMapping[str, str]) -> None:
    """Move the keys of ``environ`` into the run's file; other keys in the file stay.

    Raises:
        ConfigError: a key holds a line break.
    """
    keys = {name: environ.pop(name) for name in [*environ] if is_key(name) and environ[name]}
    for name, value in keys.items():
        if not value.isprintable():
            raise ConfigError(
                f"{name} in the environment contains a line break or another control character; set it again"
            )
    if keys:
        merged = _read(secrets_path(run)) | keys
        lines = [f"{name}={value}\n" for name, value in merged.items()]
        write_atomic(secrets_path(run), "".join(lines), mode=0o600)


def load_keys(run: RunFolder, environ: MutableMapping[str, str]) -> None:
    """Add the keys of the run's file, if it exists, to ``environ``; the driver calls this first."""
    environ.update(_read(secrets_path(run)))


def has_key(run: RunFolder, environ: Mapping[str, str], name: str) -> bool:
    """Return whether ``environ`` or the run's file has the key ``name``."""
    return bool(environ.get(name)) or name in _read(secrets_path(run))


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    pairs = (line.partition("=") for line in path.read_text().splitlines())
    return {name: value for name, _, value in pairs if is_key(name)}


KEY_FLAGS = {"--wandb-key": WANDB}


def take_keys(words: Sequence[str], environ: MutableMapping[str, str]) -> list[str]:
    """Move keys into ``environ``; return the other arguments.

    Raises ConfigError for a flag without a value.
    """
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if name not in KEY_FLAGS:
            rest.append(word)
            continue
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("--") else ""
        if not value:
            raise ConfigError(f"{name}: the key is missing; is the variable that you gave empty?")
        environ[KEY_FLAGS[name]] = value
    return rest


def hide_keys() -> None:
    """Re-execute this process without keys on its command line; return if there are none."""
    words = sys.argv[1:]
    if not any(word.partition("=")[0] in KEY_FLAGS for word in words):
        return
    try:
        rest = take_keys(words, os.environ)
    except ConfigError:
        return  # the parser reports it
    # Only exec replaces /proc/PID/cmdline. The flag cannot be refused instead: published command
    # lines use it.
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
    os.execv(sys.executable, [sys.executable, *before, *rest])
