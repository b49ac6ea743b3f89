"""Remember the layouts of results of operations on the meta device.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
        self._kinds: dict[Any, str] = {}
        self._layouts: dict[tuple[object, ...], _Layouts] = {}

    def of(
        self,
        func: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        computed: Callable[..., Any] | None = None,
    ) -> Any:
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
        found = tuple(key)
        layouts = self._layouts.get(found)
        if layouts is not None:
            self.num_remembered += 1
            return args[0] if kind == IN_PLACE else layouts.made()
        if kind == IN_PLACE:
            before = _place(args[0])
            result = compute(func, args, options)
            if result is args[0] and _place(result) == before:
                self._layouts[found] = UNCHANGED
            return result
        result = compute(func, args, options)
        layouts = _layouts_of(result, (args, options))
        if layouts is not None:
            self._layouts[found] = layouts
        return result


def _computed(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return func(*args, **options)


@dataclass(frozen=True, slots=True)
class _Layouts:
    """Shape, stride and dtype of each result; ``sequence`` is None for a single tensor."""

    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    sequence: type | None

    def made(self) -> Any:
        """New tensors of these layouts."""
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            for shape, stride, dtype in self.tensors
        ]
        return made[0] if self.sequence is None else self.sequence(made)


UNCHANGED = _Layouts((), None)
"""The layout of an operation that returns its first argument unchanged in layout."""


def kind_of(func: Any) -> str:
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


def _flat(options: dict[str, Any]) -> list[object]:
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


def _layouts_of(result: Any, given: object) -> _Layouts | None:
    """The layouts of new tensors; None if one is not, or has more memory than its layout needs."""
    sequence = type(result) if type(result) in (list, tuple) else None
    tensors: Sequence[object] = result if isinstance(result, list | tuple) else [result]
    used = {one.untyped_storage()._cdata for one in _tensors(given)}
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
