"""The files of the fleet in the run folder; ``rlpost.extensions.fleet.records`` describes their contents.

    RUN/fleet/            0700, on the shared file system; fleet-NAME for a group [engines.NAME]
      secret              API key of the fleet's servers, made once; not that of an attempt
      lease.json          written by the driver
      orders.json         written by ``rlpost fleet``
      engines/NAME.json   written by the agent of the engine NAME
      stop/NAME           written by the batch script of the engine: its job ends soon
      weights/            written by the driver: folders with the weights of the newest versions
      logs/               output of the engine jobs

Input: the run folder. Output: records; a file that cannot be read counts as missing and is reported
once.

Anyone who can write here can join the fleet, so only the owner of the run has access to the folder.
Only the driver's and the agents' hosts read the secret; it is in no command line, script or
environment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from common.files import write_atomic, write_first
from common.fleet_name import GROUP, POLICY, fleet_name
from rlpost.errors import RlpostError
from rlpost.extensions.fleet.records import (
    EngineRecord,
    Lease,
    Orders,
    RecordError,
    is_engine_name,
    parse_engine,
    parse_lease,
    parse_orders,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BYTES = 1_000_000
SERVER_TABLES = ("model", "sglang")
"""Tables of run.json that the server of an engine depends on."""
NOT_OF_SERVER = frozenset(
    {
        "sglang_server_concurrency",
        "rollout_external_engine_addrs",
        "rollout_health_check_interval",
        "rollout_health_check_timeout",
    }
)
"""Settings of these tables that only the driver uses."""
SERVER_SETTINGS = ("hf_checkpoint",)
"""Settings of other tables that the server of an engine depends on."""


class FleetError(RlpostError):
    """The fleet's folder is not safe or not there."""


@dataclass(frozen=True, slots=True)
class FleetFolder:
    """The files of a group's fleet. Construction does not access the file system."""

    run: Path
    group: str = POLICY
    _reported: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def root(self) -> Path:
        """The folder of all files."""
        return self.run / fleet_name(self.group)

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def logs(self) -> Path:
        """Output of the engine jobs."""
        return self.root / "logs"

    @property
    def command(self) -> str:
        """The command that starts engine jobs of the group."""
        words = "" if self.group == POLICY else f"{GROUP} {self.group} "
        return f"rlpost fleet {self.run} {words}--engines N"

    def engine_path(self, engine: str) -> Path:
        return self.root / "engines" / f"{engine}.json"

    def stop_path(self, engine: str) -> Path:
        """The file by which the batch script of an engine announces its end."""
        return self.root / "stop" / engine

    def exists(self) -> bool:
        """Whether a fleet was ever requested for the run."""
        return self.root.is_dir()

    def create(self) -> None:
        """Create the folders and the secret; keep existing ones. Raises OSError."""
        below = (self.root / "engines", self.root / "stop", self.weights, self.logs)
        for folder in (self.root, *below):
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)  # mkdir's mode is subject to the umask
        write_first(self.root / "secret", secrets.token_hex(32) + "\n")

    def secret(self) -> str:
        """Return the API key of the fleet's servers.

        Raises FleetError if others may read it, or if there is none.
        """
        path = self.root / "secret"
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            text = path.read_text().strip()
        except OSError as error:
            raise FleetError(f"{path}: {error.strerror}; {self.command} creates it") from None
        if mode & 0o077:
            raise FleetError(f"{path}: others can read it (mode {mode:04o}); chmod 600 it")
        if len(text) < 32:
            raise FleetError(f"{path}: {len(text)} characters are no secret; remove the file")
        return text

    # -- records

    def write_engine(self, record: EngineRecord) -> None:
        """Replace the file of an engine. Raises OSError."""
        write_atomic(self.engine_path(record.engine), record.to_json())

    def write_lease(self, lease: Lease) -> None:
        """Replace the lease. Raises OSError."""
        write_atomic(self.root / "lease.json", lease.to_json())

    def engine(self, engine: str) -> EngineRecord | None:
        """Return the record of an engine; None if there is none."""
        return self._read(self.engine_path(engine), parse_engine)

    def engines(self) -> list[EngineRecord]:
        """Return the records of all engines, in the order of their names."""
        folder = self.root / "engines"
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            return []
        records = []
        for name in names:
            engine, _, suffix = name.rpartition(".")
            if suffix != "json" or not is_engine_name(engine):
                continue  # also the temporary files of atomic writes
            record = self._read(folder / name, parse_engine)
            if record is not None and record.engine == engine:
                records.append(record)
        return records

    def lease(self) -> Lease | None:
        """Return the lease; None before the first driver."""
        return self._read(self.root / "lease.json", parse_lease)

    def orders(self) -> Orders:
        """Return the user's orders; none if there is no file."""
        return self._read(self.root / "orders.json", parse_orders) or Orders()

    def order(self, *, drain: Iterable[str] = (), stop: bool | None = None) -> Orders:
        """Add to the user's orders and return all of them; ``stop`` None keeps its value."""
        there = self.orders()
        names = tuple(dict.fromkeys((*there.drain, *drain)))
        orders = replace(there, drain=names, stop=there.stop if stop is None else stop)
        write_atomic(self.root / "orders.json", orders.to_json())
        return orders

    def remove_engine(self, engine: str) -> None:
        """Remove the files of an engine whose job has ended."""
        for path in (self.engine_path(engine), self.stop_path(engine)):
            with suppress(FileNotFoundError):
                path.unlink()

    def _read(self, path: Path, parse: Callable[[str], T]) -> T | None:
        """Return a record; None if the file is missing or unusable.

        Each read opens the file: only then does an NFS client ask the server whether it has changed
        (close-to-open consistency, nfs(5)).
        """
        try:
            with path.open() as file:
                record = parse(file.read(MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, RecordError) as error:
            if str(path) not in self._reported:
                logger.warning("%s is not used: %s", path, error)
                self._reported.add(str(path))
            return None
        self._reported.discard(str(path))
        return record


def settings_digest(run_json: Mapping[str, Any]) -> str:
    """Return a digest of the settings that an engine's server depends on.

    A run that is resumed with other values needs new servers.
    """
    used: dict[str, object] = {}
    for name in SERVER_TABLES:
        table = run_json.get(name) or {}
        used[name] = {key: table[key] for key in table if key not in NOT_OF_SERVER}
    for table in run_json.values():
        if isinstance(table, dict):
            used |= {name: table[name] for name in SERVER_SETTINGS if name in table}
    text = json.dumps(used, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
