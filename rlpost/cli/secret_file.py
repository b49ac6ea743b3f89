"""A person's keys on their way to the driver: a file of mode 0600 in the run folder, and nothing else.

In: the environment of ``rlpost submit``. Out: RUN/secrets.env (``NAME=value`` a line) and an environment without them,
from which sbatch is called; in the job, the driver's environment. So no key stands in an argv, a batch script, Slurm's
copy of the environment, a log, run.json, the ledger, or the environment of Ray, its workers and the engines.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from rlpost.errors import ConfigError
from slurm.run_folder import RunFolder, write_atomic

SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")


def secrets_path(run: RunFolder) -> Path:
    """RUN/secrets.env."""
    return run.root / "secrets.env"


def put_away(run: RunFolder, environ: MutableMapping[str, str]) -> None:
    """Move the keys of ``environ`` into the run's file; those already there that nobody gives anew stay.

    Raises:
        ConfigError: a key holds a line break.
    """
    given = {name: environ.pop(name) for name in SECRETS if environ.get(name)}
    for name, value in given.items():
        if not value.isprintable():
            raise ConfigError(f"{name} in the environment holds a line break or another control character; set it anew")
    if given:
        lines = [f"{name}={value}\n" for name, value in {**_read(secrets_path(run)), **given}.items()]
        write_atomic(secrets_path(run), "".join(lines), mode=0o600)


def take_out(run: RunFolder, environ: MutableMapping[str, str]) -> None:
    """Put the keys of the run's file, if there is one, into ``environ``: what the driver does first."""
    environ.update(_read(secrets_path(run)))


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The same environment without any key."""
    return {name: value for name, value in environ.items() if name not in SECRETS}


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    pairs = (line.partition("=") for line in path.read_text().splitlines())
    return {name: value for name, _, value in pairs if name in SECRETS}
