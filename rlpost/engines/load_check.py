"""Check that engines load every tensor that they are sent, before the first byte is sent.

SGLang's ``load_weights`` skips names that its model does not have, without an error: the engine would
keep the old values. Input: engines, the tensors of an update. Output: for each engine rank, what its
models load of them (``rlpost.engines.shards``); or an error that names a tensor of which all ranks of
an engine together load nothing, or only a part, or that one rank skips where another loads it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import orjson

from common.files import write_atomic
from rlpost.config.plan.shard_plan import Unit, check_complete
from rlpost.config.plan.weight_update import read_units
from rlpost.durable.daemon_threads import in_daemon
from rlpost.engines.engine_side_weights import Mover, Receiver, all_do
from rlpost.engines.shards.messages import kind_of, serialised
from rlpost.errors import EngineDied, SyncError, WeightError
from rlpost.models.regions import BoxGroup, group_from_json

logger = logging.getLogger(__name__)
TensorTypes = Mapping[str, tuple[Sequence[int], str]]
"""Shape and dtype of each tensor by its name."""
Place = tuple[str, str]
"""A parameter, and the kind of tensors that fill it."""


class LoadCheck:
    """Compares what engines load with what a trainer sends. An engine records once in its life."""

    def __init__(self) -> None:
        self._unchecked: set[str] = set()
        self._right: set[bytes] = set()
        """Digests of answers of engines that load all."""

    async def check(
        self,
        receivers: Sequence[Receiver],
        units: Sequence[Unit],
        folder: Path,
        *,
        in_session: bool,
    ) -> None:
        """Check paused engines; those that cannot be checked are named once in the log.

        Args:
            units: the tensors that are sent.
            folder: shared by all nodes; each check has a folder in it, and removes it.
            in_session: a weight update is open. Otherwise one is opened and closed, without weights.

        Raises:
            WeightError: an engine does not load all of a tensor.
            SyncError: an engine died, or has no session; the message names it.
        """
        asking = [one.client.has_shard_loader() for one in receivers]
        have_loader = await all_do("report their loader", asking)
        able = [one for one, has_loader in zip(receivers, have_loader, strict=True) if has_loader]
        if lacking := [one for one in receivers if one not in able]:
            self._report(lacking, "it runs without rlpost's loader")
        if not able:
            return
        if not in_session:
            await all_do("open a session", [one.client.begin_weight_update() for one in able])
        problem = await self._problem(able, units, folder)
        if not in_session:
            await all_do("close the session", [one.client.end_weight_update() for one in able])
        if problem is not None:
            raise problem

    async def check_folder(self, receivers: Sequence[Receiver], weights: Path) -> None:
        """Check paused engines, as ``check`` does, before they read a folder of all weights."""
        try:
            units = await in_daemon(partial(read_units, weights))
        except (OSError, ValueError) as error:
            self._report(receivers, str(error))
        else:
            await self.check(receivers, units, weights.parent, in_session=False)

    async def _problem(
        self, receivers: Sequence[Receiver], units: Sequence[Unit], shared: Path
    ) -> WeightError | None:
        name = secrets.token_hex(8)  # engines may live longer than an attempt of the run
        folder, types = shared / name, tensor_types(units)
        try:
            await in_daemon(partial(folder.mkdir, parents=True))
            files = await record_loads(receivers, types, folder=folder, message_id=name)
            await in_daemon(partial(self._compare, files, units))
        except WeightError as error:
            return error
        except (SyncError, OSError, ValueError, TypeError, LookupError) as error:
            # An engine elsewhere may not have the folder, or answer as another version does.
            if isinstance(error.__cause__, EngineDied):
                raise
            self._report(receivers, str(error) or type(error).__name__)
        finally:
            await in_daemon(partial(shutil.rmtree, folder, ignore_errors=True))
        return None

    def _compare(self, files: Mapping[str, Sequence[Path]], units: Sequence[Unit]) -> None:
        """Compare each engine whose ranks do not answer as those of one that was right."""
        names = list(tensor_types(units))
        for url, of_ranks in files.items():
            answers = [one.read_bytes() for one in of_ranks]
            digest = hashlib.sha256(b"\0".join(answers)).digest()
            if digest not in self._right:
                parsed = [orjson.loads(answer) for answer in answers]
                check_complete(units, {url: [boxes_of(one, names) for one in parsed]})
                check_ranks(url, parsed, names)
                self._right.add(digest)

    def _report(self, receivers: Sequence[Receiver], why: str) -> None:
        urls = {one.address.url for one in receivers} - self._unchecked
        self._unchecked |= urls
        if urls:
            logger.warning(
                "%s: whether its model loads every tensor of an update cannot be checked: %s",
                ", ".join(sorted(urls)),
                why,
            )


class CheckedMover:
    """Checks the engines before the first update of a connection; see ``Mover``."""

    def __init__(self, mover: Mover, check: LoadCheck, units: Sequence[Unit], folder: Path) -> None:
        """``units``, ``folder``: see ``LoadCheck.check``."""
        self._mover, self._check, self._sent = mover, check, (units, folder)
        self._is_checked = False
        self.in_session = mover.in_session

    async def move(self, receivers: Sequence[Receiver], version: int) -> None:
        """See ``Mover``. Raises WeightError for engines that would not load all that is sent."""
        if not self._is_checked:
            await self._check.check(receivers, *self._sent, in_session=self.in_session)
            self._is_checked = True
        await self._mover.move(receivers, version)


async def record_loads(
    receivers: Sequence[Receiver], types: TensorTypes, *, folder: Path, message_id: str
) -> dict[str, list[Path]]:
    """Let each engine rank record what it loads; return the files of the answers by the engine's URL.

    The engines are in a session. Raises SyncError.
    """
    tensors = folder / "tensors.json"
    await in_daemon(partial(write_json, tensors, types))
    files = {
        one.address.url: [
            folder / f"engine-{number}-{rank}.json" for rank in range(one.address.num_gpus)
        ]
        for number, one in enumerate(receivers)
    }
    message = {"do": "record", "id": message_id, "tensors": str(tensors)}
    recording = []
    for one, answers in zip(receivers, files.values(), strict=True):
        payloads = [serialised(message | {"answer": str(answer)}) for answer in answers]
        recording.append(one.client.send_to_loader(payloads))
    await all_do("record what they load", recording)
    return files


def boxes_of(answer: Mapping[str, list[list[object]]], names: Sequence[str]) -> list[BoxGroup]:
    """The boxes in the answer of an engine rank; ``names`` of the tensors by their number."""
    return [group_from_json(fields, names) for fields in answer["boxes"]]


def check_ranks(
    url: str, answers: Sequence[Mapping[str, Mapping[str, Sequence[int]]]], names: Sequence[str]
) -> None:
    """Check that each rank of an engine fills a parameter as the others do which have it.

    Together they load all of a tensor even if one of them skips its copy. Equal are the numbers of
    tensors of each kind, or those of writes: the ranks may have other experts, and two copies of one
    (SGLang's ``ep_num_redundant_experts``).

    Args:
        answers: of the engine's ranks.
        names: of the tensors by their number.

    Raises WeightError: names the tensor, the rank and the parameter.
    """
    loads = [_loads(answer["filled"], names) for answer in answers]
    fullest: dict[Place, list[str]] = {}
    for of_rank in loads:
        for place, loaded in of_rank.items():
            fullest[place] = max(fullest.get(place, []), loaded, key=lambda one: len(set(one)))
    for rank, (of_rank, answer) in enumerate(zip(loads, answers, strict=True)):
        unseen = set(map(kind_of, answer["reasons"]))
        for (parameter, kind), most in fullest.items():
            loaded = of_rank.get((parameter, kind), [])
            is_seen = parameter in answer["filled"] and kind not in unseen
            if is_seen and len(set(loaded)) < len(set(most)) and len(loaded) < len(most):
                skipped = next(name for name in most if name not in loaded)
                raise WeightError(
                    f"{skipped}: rank {rank} of engine {url} has a parameter {parameter.partition(':')[2]} and does "
                    "not load it there, as another rank does; all ranks of an engine must have the same model"
                )


def _loads(filled: Mapping[str, Sequence[int]], names: Sequence[str]) -> dict[Place, list[str]]:
    """The tensors of each kind that fill each parameter, once for each write."""
    loads: dict[Place, list[str]] = {}
    for parameter, numbers in filled.items():
        for number in numbers:
            place = (parameter, kind_of(names[number]))
            loads.setdefault(place, []).append(names[number])
    return loads


def tensor_types(units: Sequence[Unit]) -> TensorTypes:
    """Shape and dtype of each tensor. The order numbers them in the files that are exchanged."""
    return {one.name: (one.shape, one.dtype) for unit in units for one in unit.tensors}


def write_json(path: Path, values: Mapping[str, object] | Iterable[object]) -> None:
    """Write a list or a mapping as JSON, in pieces: the encoding of each holds Python's lock."""
    if isinstance(values, Mapping):
        items = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
        write_atomic(path, f"{{{', '.join(items)}}}")
    else:
        write_atomic(path, f"[{', '.join(map(json.dumps, values))}]")
