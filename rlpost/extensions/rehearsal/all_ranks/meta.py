"""Emulate one rank of many in this process, on the meta device, and remember layouts of results.
Many kernels of the meta device are decompositions in Python, which take a hundred times as long as
the allocation of their result. Their result follows from the operation and the layouts of its
arguments, and a rank repeats the same operations in every layer and micro-batch.

Input: an operation and its arguments. Output: its result, allocated from the remembered layout if
the operation had arguments of these layouts before, and otherwise by torch.

These are always dispatched: views and other operations whose result aliases an argument, by their
schema or in fact; random numbers; results that depend on data; operations that resize a tensor;
those outside of torch's own namespaces; those with a tensor that is not on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import DeviceContext, _device_constructors

from rlpost.config.extensions import check_trainer_without_gpus
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, PlacementError
from rlpost.trainer import device, parallel

UNSUITABLE = frozenset(
    {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
        torch.Tag.maybe_aliasing_or_mutating,
        torch.Tag.nondeterministic_seeded,
    }
)
"""Tags of operations that are always dispatched."""
NAMESPACES = ("aten", "prims")
DIRECT, NEW, IN_PLACE = "direct", "new", "in place"
"""Kinds of operations.

They are always dispatched; return tensors with their own memory; change and return their first
argument.
"""
VALUES = frozenset(
    {
        bool,
        int,
        float,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
"""Types of arguments that are part of a key beside tensors and lists of both."""


class MetaResults:
    """Results by operation and layouts of arguments; one object serves all ranks of a rehearsal."""

    def __init__(self) -> None:
        self.num_remembered = 0
        """Calls that torch did not compute."""
        self._kinds: dict[object, str] = {}
        self._layouts: dict[tuple[object, ...], _Layouts] = {}

    def of(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        options: dict[str, object],
        computed: Callable[..., object] | None = None,
    ) -> object:
        """The result of ``func``; ``computed(func, args, options)`` has those not remembered."""
        compute = computed or _computed
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = kind_of(func)
        if kind == DIRECT:
            return compute(func, args, options)
        key: list[object] = [func, torch.get_default_dtype()]
        if not (_describe(args, key) and (not options or _describe(_flat(options), key))):
            return compute(func, args, options)
        call_key = tuple(key)
        layouts = self._layouts.get(call_key)
        if layouts is not None:
            self.num_remembered += 1
            return args[0] if kind == IN_PLACE else layouts.made()
        if kind == IN_PLACE:
            before = _place(args[0])
            result = compute(func, args, options)
            if result is args[0] and _place(result) == before:
                self._layouts[call_key] = UNCHANGED
            return result
        result = compute(func, args, options)
        layouts = _layouts_of(result, (args, options))
        if layouts is not None:
            self._layouts[call_key] = layouts
        return result


def _computed(func: OpOverload, args: tuple[object, ...], options: dict[str, object]) -> object:
    return func(*args, **options)


@dataclass(frozen=True, slots=True)
class _Layouts:
    """Shape, stride and dtype of each result; ``sequence`` is None for a single tensor."""

    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    sequence: type | None

    def made(self) -> object:
        """New tensors of these layouts."""
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            for shape, stride, dtype in self.tensors
        ]
        return made[0] if self.sequence is None else self.sequence(made)


UNCHANGED = _Layouts((), None)
"""The layout of an operation that returns its first argument unchanged in layout."""


def kind_of(func: OpOverload) -> str:
    """Return how an operation's results may be remembered, by its schema and tags."""
    schema = func._schema
    if func.namespace not in NAMESPACES or UNSUITABLE.intersection(func.tags):
        return DIRECT
    if not schema.is_mutable:
        is_new = all(one.alias_info is None for one in (*schema.arguments, *schema.returns))
        return NEW if is_new and schema.returns else DIRECT
    changed = [
        index
        for index, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    returns_first = len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    is_in_place = changed == [0] and returns_first and torch.Tag.inplace in func.tags
    return IN_PLACE if is_in_place else DIRECT


def _flat(options: dict[str, object]) -> list[object]:
    return [one for item in options.items() for one in item]


def _describe(values: Iterable[object], key: list[object]) -> bool:
    """Append the layout of each value to the key; False if it does not determine a result."""
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            assert isinstance(value, torch.Tensor)
            if not value.is_meta or value.layout is not torch.strided:
                return False
            if value.is_neg() or value.is_conj():
                return False
            key += (value.shape, value.stride(), value.dtype)
        elif kind in VALUES:
            key += (kind, value)  # 1, 1.0 and True are equal, and promote differently
        elif kind is list or kind is tuple:
            assert isinstance(value, list | tuple)
            key += (kind, len(value))
            if not _describe(value, key):
                return False
        else:
            return False
    return True


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    where = storage._cdata, storage.nbytes(), tensor.storage_offset()
    return (*where, tensor.shape, tensor.stride(), tensor.dtype)


def _layouts_of(result: object, arguments: object) -> _Layouts | None:
    """The layouts of new tensors; None if one is not, or has more memory than its layout needs."""
    sequence = type(result) if type(result) in (list, tuple) else None
    tensors: Sequence[object] = result if isinstance(result, list | tuple) else [result]
    used = {one.untyped_storage()._cdata for one in _tensors(arguments)}
    layouts = []
    for one in tensors:
        if not isinstance(one, torch.Tensor) or type(one) is not torch.Tensor:
            return None
        if not one.is_meta or one.layout is not torch.strided:
            return None
        storage = one.untyped_storage()
        if storage._cdata in used or storage.nbytes() != _needed(one) or one.storage_offset():
            return None
        if one.is_neg() or one.is_conj():
            return None
        used.add(storage._cdata)
        layouts.append((one.shape, one.stride(), one.dtype))
    return _Layouts(tuple(layouts), sequence)


def _needed(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps))


def _tensors(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


META = torch.device("meta")
# Looked up once: every operation of a rehearsal, some millions, is compared with them.
_TYPE, _CPU = torch.Tensor.type, torch.Tensor.cpu


@contextmanager
def as_rank(
    rank: int, world: int, config: Config, *, num_virtual_stages: int | None
) -> Iterator[None]:
    """Emulate a rank of ``world``: its groups are formed, and the trainer's device is meta.

    Raises:
        PlacementError: the layout does not match the number of ranks.
        ConfigError: a GPU is visible, or the process has already joined process groups.
    """
    if torch.cuda.is_available():
        raise ConfigError(
            "a rehearsal builds no tensor on a GPU; run it with CUDA_VISIBLE_DEVICES= (empty)"
        )
    check_trainer_without_gpus()
    if dist.is_initialized():
        raise ConfigError(
            "this process has already joined process groups; rehearse in a separate process"
        )
    if not 0 <= rank < world:
        raise PlacementError(
            f"rank {rank} is not one of the {world} ranks of the trainer; give 0 to {world - 1}"
        )
    parallel.check_layout(config, world)
    with (
        patch.object(parallel_state, "create_group", _without_gloo()),
        patch.object(device, "current", lambda: META),
    ):
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            parallel.form_groups(config, num_virtual_stages=num_virtual_stages)
            yield
        finally:
            parallel.destroy()


def building() -> AbstractContextManager[object]:
    """Context in which tensors without a device are on the meta device."""
    return _Building(META)


def _without_gloo() -> Callable[..., object]:
    """Return ``create_group`` of Megatron without the gloo groups of its optimizers.

    Gloo would wait for the other ranks.
    """
    create = parallel_state.create_group

    def create_fake(ranks: object = None, **options: object) -> object:
        return create(ranks, **(options | {"backend": None}))

    return create_fake


class MetaAsHost(TorchFunctionMode):
    """Make two methods of tensors on the meta device behave as on the host.

    Megatron's optimizers dispatch on ``Tensor.type()`` and do not know the meta device. Embeddings
    that are tied across pipeline stages are copied with ``Tensor.cpu()``, which fails for a tensor
    without data.
    """

    answered: frozenset[object] = frozenset({_TYPE, _CPU})
    """Functions that ``answer`` is asked about, and not called directly."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        if function in self.answered or "generator" in options:
            return self.answer(function, args, options)
        return function(*args, **options)  # nearly all: reads of attributes come here too

    def answer(
        self, function: Callable[..., object], args: tuple[Any, ...], options: dict[str, object]
    ) -> object:
        """Call ``function``, or answer for it."""
        if function is _TYPE and len(args) == 1 and not options and args[0].is_meta:
            return torch.empty(0, dtype=args[0].dtype, device="cpu").type()
        if function is _CPU and args[0].is_meta:
            return args[0]
        return function(*args, **options)


class _Building(MetaAsHost, DeviceContext):
    """Also create tensors on a device, and draw no random values.

    A generator of the host does not fit tensors on the meta device. One mode instead of ``with
    device`` and another, because each costs time for every operation.
    """

    answered = MetaAsHost.answered | _device_constructors()

    def answer(
        self, function: Callable[..., object], args: tuple[Any, ...], options: dict[str, object]
    ) -> object:
        """Call ``function`` without a generator, on the device."""
        if "generator" in options:
            options = {name: value for name, value in options.items() if name != "generator"}
        if options.get("device") is None and function in _device_constructors():
            options = {**options, "device": self.device}
        return super().answer(function, args, options)
