"""Records that engine jobs, the driver and the command line exchange in files.

Input: JSON text of a file that another host wrote. Output: frozen values, or a RecordError that
names the field. Pure; ``rlpost.extensions.fleet.fleet_folder`` knows the paths.

Each record has one writer:

    Lease           the driver: the attempt that lives, and the weights that engines must have
    EngineRecord    the agent of one fleet engine: its state and its address
    Orders          the command line: engines to drain, or all of them to stop

Clocks of hosts differ, so no reader compares the times of a writer with its own clock. Lease and
engine record carry ``beat``, which grows with every write: a writer is alive while its beat changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

_ENGINE = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
_URL = r"^(http://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})?$"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("not one line of printable text")
    return text


Line = Annotated[str, AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RecordError(ValueError):
    """A file of the fleet cannot be read as its record."""


class EngineState(StrEnum):
    """The state of an engine as its agent reports it."""

    STARTING = "starting"
    """Preflight or the start of the server."""
    READY = "ready"
    """The server answers; the driver may send weights and requests."""
    DRAINING = "draining"
    """The job ends soon: no new requests, those in flight are aborted."""
    GONE = "gone"
    """The server has ended."""


class LeaseState(StrEnum):
    """The state of the run as the driver reports it."""

    RUNNING = "running"
    ENDED = "ended"
    """The run is done: engine jobs exit."""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One fleet engine.

    Attributes:
        engine: name of the engine's file, ``JOB_TASK`` of the array.
        incarnation: random, different for each start of the server. A requeued job keeps its
            engine's name, but its new server has neither the weights nor the requests.
        beat: grows with every write, over all incarnations of the engine.
        url: ``http://HOST:PORT``; empty while it starts.
        num_gpus: ranks of the engine.
        settings: digest of the settings that the server was started with (``Lease.settings``).
        host: the node.
        reason: of the state, for the user; empty if there is none.
        alive_s: seconds in which the engine's job had its node, over all its starts.
    """

    engine: Annotated[str, Field(pattern=_ENGINE)]
    incarnation: Line
    state: EngineState
    beat: Count
    url: Annotated[str, Field(pattern=_URL)] = ""
    num_gpus: Annotated[int, Field(ge=1)] = 1
    settings: Line = ""
    host: Line = ""
    reason: Line = ""
    alive_s: Seconds = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def next(self, **changed: Any) -> EngineRecord:
        return replace(self, beat=self.beat + 1, **changed)


@dataclass(frozen=True, slots=True)
class Lease:
    """The driver's record.

    Attributes:
        attempt: names the driver; changes with every start of the run's job.
        beat: grows with every write.
        version: the policy version that engines must have; None before the first update.
        weights: folder with these weights; empty before the first update.
        settings: digest of the settings that a server depends on
            (``fleet_folder.settings_digest``).
        engines: what the driver does with each engine, for the user.
        in_use: incarnations that requests may be sent to.
        host: the driver's node, for messages.
        address: IP address of the driver; the route to it names an engine's network interface.
        time: of the write, in seconds since 1970 on the driver's clock; for display only.
    """

    attempt: Line
    beat: Count
    state: LeaseState = LeaseState.RUNNING
    version: Count | None = None
    weights: Line = ""
    settings: Line = ""
    engines: Mapping[str, str] = field(default_factory=dict)
    in_use: tuple[str, ...] = ()
    host: Line = ""
    address: Line = ""
    time: Seconds = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True)
class Orders:
    """The user's orders to the fleet."""

    drain: tuple[str, ...] = ()
    """Engines that leave; a requeue does not bring them back."""
    stop: bool = False
    """All engines leave."""

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    def says_leave(self, engine: str) -> bool:
        """Return whether ``engine`` is ordered to leave."""
        return self.stop or engine in self.drain


R = TypeVar("R", EngineRecord, Lease, Orders)
_OPTIONAL = {"alive_s", "version", "engines", "in_use", "time", "drain", "stop"}
"""Fields that a record may lack."""


def is_engine_name(text: str) -> bool:
    """Return whether a text can be an engine's name, which is also a file name."""
    return re.fullmatch(_ENGINE, text) is not None


def parse_engine(text: str) -> EngineRecord:
    """Parse an engine's file. Raises RecordError."""
    record = _parse(EngineRecord, text)
    if record.state is EngineState.READY and not record.url:
        raise RecordError("url: empty, but the state is ready")
    return record


def parse_lease(text: str) -> Lease:
    """Parse the lease. Raises RecordError."""
    return _parse(Lease, text)


def parse_orders(text: str) -> Orders:
    """Parse the user's orders. Raises RecordError."""
    return _parse(Orders, text)


def _parse(kind: type[R], text: str) -> R:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise RecordError(f"not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise RecordError("not a JSON object")
    missing = {entry.name for entry in fields(kind)} - raw.keys() - _OPTIONAL
    if missing:
        raise RecordError(f"{', '.join(sorted(missing))}: missing")
    try:
        # Validate the text, not ``raw``: strict mode accepts a list as a tuple only in JSON text.
        adapter = _adapter(kind)  # type: ignore[arg-type]  # mypy: a class is not hashable
        record: R = adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RecordError(f"{place}: {first['input']!r}: {first['msg']}") from None
    return record


@cache  # making one takes longer than parsing a record
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
