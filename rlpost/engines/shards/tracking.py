"""Tensors without storage that record what code does with them.

Input: operators of PyTorch on tracked tensors and on parameters. Output: ``Trace``: copies of tracked
tensors into parameters, and all else that happened to them. ``rlpost.engines.shards.recorder``
decides what follows from it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from rlpost.engines.shards.copies import View, regions_of, row_strides
from rlpost.engines.shards.parameters import Parameters
from rlpost.models.regions import Region

TensorTypes = Mapping[str, tuple[Sequence[int], torch.dtype]]
aten = torch.ops.aten
COPIES = {aten.clone.default, aten._to_copy.default}
VIEWS = {
    *(aten.alias.default, aten.detach.default, aten.expand.default, aten.permute.default),
    *(aten.t.default, aten.transpose.int, aten.select.int, aten.slice.Tensor),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.view.default),
    aten.diagonal.default,
}
"""Views that choose elements by their index, whatever strides their argument has."""
VIEWS_OF_COPIES = {aten._unsafe_view.default: aten.view.default}
"""Functions whose result is a view, although their schema does not say so."""
FILLS = {aten.fill_.Scalar, aten.zero_.default}
FACTORIES = {
    *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default),
    *(aten.full_like.default, aten.new_empty.default, aten.new_zeros.default),
    *(aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default),
}
"""Functions that read the shape of a tensor and not its values."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator of PyTorch."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def values(self) -> Iterator[object]:
        """The arguments and the elements of lists; they do not nest deeper."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, list | tuple):
                yield from value
            else:
                yield value

    @property
    def tracked(self) -> list[TrackedTensor]:
        """The tracked tensors among the values."""
        return [one for one in self.values if isinstance(one, TrackedTensor)]

    def run(self, convert: Callable[[object], object] | None = None) -> object:
        """Run the operator on the values, or on what ``convert`` makes of each."""
        if convert is None:
            return self.operator(*self.args, **self.kwargs)
        return self.operator(*tree_map(convert, self.args), **tree_map(convert, self.kwargs))

    def on(self, tensor: torch.Tensor) -> torch.Tensor | Sequence[torch.Tensor]:
        """Run the operator on another tensor in place of the first argument."""
        return self.operator(tensor, *self.args[1:], **self.kwargs)

    def mutated(self) -> list[torch.Tensor]:
        """The tensors that the operator writes, by its schema."""
        mutated = []
        for number, argument in enumerate(self.operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = (
                    self.args[number] if number < len(self.args) else self.kwargs.get(argument.name)
                )
                mutated += [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]
        return mutated


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements of a parameter that are set to a constant."""

    parameter: str
    view: View
    value: float


class ValueRead(RuntimeError):
    """``load_weights`` needs the values of a tensor; without them it cannot go on."""

    def __init__(self, names: Iterable[str], what: str) -> None:
        self.names = frozenset(names)
        super().__init__(f"{what} reads values")


class _Root:
    """What all views of one tensor share."""

    def __init__(self, names: set[str], reason: str = "") -> None:
        self.names = names
        self.reason = reason
        """Why it is no longer the tensor of the checkpoint; empty for one that is."""


class TrackedTensor(torch.Tensor):
    """A view of a tensor of the checkpoint, without storage."""

    root: _Root
    outer: torch.Tensor
    """On the meta device: size and strides as code sees them."""
    place: torch.Tensor
    """On the meta device: the elements of the contiguous tensor of the checkpoint."""
    cast: torch.dtype | None
    """A dtype to which it was converted."""
    trace: Trace

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(
        trace: Trace,
        root: _Root,
        outer: torch.Tensor,
        place: torch.Tensor,
        cast: torch.dtype | None = None,
    ) -> TrackedTensor:
        """Wrap a view."""
        view = torch.Tensor._make_wrapper_subclass(
            TrackedTensor,
            outer.size(),
            strides=outer.stride(),
            storage_offset=outer.storage_offset(),
            dtype=outer.dtype,
            device=trace.device,
        )
        view.root, view.outer, view.place, view.cast, view.trace = root, outer, place, cast, trace
        return view

    @classmethod
    def __torch_dispatch__(
        cls,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Track an operator; also in threads in which the mode is not active."""
        call = Call(func, args, kwargs or {})
        return call.tracked[0].trace.on_tracked(call)


@dataclass(frozen=True, slots=True)
class Write:
    """A copy of a tensor into a parameter; ``regions`` is None for one that is not affine."""

    names: frozenset[str]
    view: View
    regions: tuple[Region, ...] | None


class Trace(TorchDispatchMode):
    """One run of ``load_weights``."""

    def __init__(self, parameters: Parameters, tensors: TensorTypes, device: torch.device) -> None:
        super().__init__()
        self.parameters = parameters
        self.tensors = tensors
        self.device = device
        self.by_name: dict[str, str] = {}
        self.groups: list[frozenset[str]] = []
        self.writes: dict[str, list[Write]] = {}
        self.fills: list[Fill] = []
        self.disturbed: dict[str, str] = {}
        """Parameters with which the model computes, and how."""
        self.lock = threading.RLock()

    def track(self, name: str) -> TrackedTensor:
        """Stand in for a tensor of the checkpoint."""
        shape, dtype = self.tensors[name]
        with _outside_modes():
            meta = torch.empty(tuple(shape), dtype=dtype, device="meta")
            return TrackedTensor.of(self, _Root({name}), meta, meta)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Handle an operator of the recording thread."""
        call = Call(func, args, kwargs or {})
        return self.on_tracked(call) if call.tracked else self._on_plain(call)

    def on_tracked(self, call: Call) -> object:
        """Track a view, record a copy into a parameter, or mark the tensors as loaded by name."""
        with self.lock, _outside_modes():
            try:
                return self._track(call)
            except Exception as error:  # the model may catch it and go on
                for one in call.tracked:
                    self.load_by_name(one.root.names, f"fails in {call.operator}: {error}")
                raise

    def _track(self, call: Call) -> object:
        first = call.args[0] if call.args else None
        if call.operator is aten.copy_.default and not isinstance(first, TrackedTensor):
            return self._record(first, call.args[1])
        if call.operator in FACTORIES:  # an ordinary tensor in the shape of a tracked one
            kwargs = call.kwargs | {"device": call.kwargs.get("device") or self.device}
            return replace(call, kwargs=kwargs).run(_outer)
        if isinstance(first, TrackedTensor) and len(call.tracked) == 1:
            call = replace(call, operator=VIEWS_OF_COPIES.get(call.operator, call.operator))
            if call.operator in VIEWS:
                return self._view(call, first)
            if call.operator in COPIES:
                return self._copy(call, first)
        return self._compute(call)

    def _record(self, target: torch.Tensor, source: TrackedTensor) -> torch.Tensor:
        if target.numel() == 0:
            return target
        name = self.parameters.name_of(target)
        if name is None or self.parameters.tensors[name].dtype != target.dtype:
            self.load_by_name(source.root.names, "is copied into memory that is no parameter")
            return target
        view = View(target.storage_offset(), tuple(target.size()), tuple(target.stride()))
        reason = source.root.reason
        if not reason and source.cast not in (None, target.dtype):
            reason = f"is converted to {source.cast} and to {target.dtype}"
        regions = None
        if not reason:
            regions = self._regions(name, view, source.place.expand(target.size()), source.root)
            reason = "" if regions is not None else "is copied in a way that boxes do not describe"
        if regions is None:
            self.load_by_name(source.root.names, reason)
        names = frozenset(source.root.names)
        write = Write(names, view, None if regions is None else tuple(regions))
        self.writes.setdefault(name, []).append(write)
        return target

    def _regions(
        self, parameter: str, target: View, place: torch.Tensor, root: _Root
    ) -> list[Region] | None:
        (name,) = root.names
        source = View(place.storage_offset(), tuple(place.size()), tuple(place.stride()))
        return regions_of(name, tuple(self.tensors[name][0]), source, parameter, target)

    def _view(self, call: Call, source: TrackedTensor) -> TrackedTensor | list[TrackedTensor]:
        outer = call.on(source.outer)
        root, place = source.root, outer
        if not root.reason:
            try:
                place = call.on(source.place)
            except RuntimeError:  # a view of a copy, which its source does not have
                root = self._tainted([source], f"is copied and viewed by {call.operator}")
        pairs = [(outer, place)] if isinstance(outer, torch.Tensor) else zip(outer, place)  # noqa: B905
        views = [TrackedTensor.of(self, root, one, at, source.cast) for one, at in pairs]
        return views[0] if isinstance(outer, torch.Tensor) else views

    def _copy(self, call: Call, source: TrackedTensor) -> TrackedTensor:
        kwargs = {key: call.kwargs[key] for key in call.kwargs.keys() - {"device", "non_blocking"}}
        outer = replace(call, kwargs=kwargs).on(source.outer)
        assert isinstance(outer, torch.Tensor)
        cast = source.cast
        root = _Root(set(source.root.names), source.root.reason)
        if outer.dtype != source.dtype:
            if cast is not None:
                root = self._tainted([source], f"is converted to {cast} and to {outer.dtype}")
            cast = outer.dtype
        place = outer if root.reason else source.place
        return TrackedTensor.of(self, root, outer, place, cast)

    def _compute(self, call: Call) -> object:
        """Compute with tracked tensors on the meta device; the result is no longer one of them."""
        root = self._tainted(call.tracked, f"is read by {call.operator}")
        mutated = call.mutated()
        for one in mutated:
            if isinstance(one, TrackedTensor):
                one.root.names |= root.names
                one.root.reason = root.reason
            elif (name := self.parameters.name_of(one)) is not None:
                self._write_whole(name, root.names)
        if mutated:
            return mutated[0] if call.operator._schema.returns else None
        try:
            result = call.run(_on_meta)
        except Exception as error:  # item(), or a result whose shape depends on values
            raise ValueRead(root.names, str(call.operator)) from error
        if not all(isinstance(one, torch.Tensor) for one in tree_flatten(result)[0]):
            raise ValueRead(root.names, str(call.operator))

        def wrap(one: torch.Tensor) -> TrackedTensor:
            return TrackedTensor.of(self, root, one, one)

        return tree_map(wrap, result)

    def _on_plain(self, call: Call) -> object:
        """Run an operator without tracked tensors, unless it writes a parameter."""
        touched = {
            name
            for one in call.values
            if isinstance(one, torch.Tensor) and (name := self.parameters.name_of(one)) is not None
        }
        if not touched or call.operator.is_view or call.operator in FACTORIES:
            return call.run()
        mutated = call.mutated()
        if call.operator in FILLS and len(touched) == 1:
            target = mutated[0]
            if target.numel():
                (name,) = touched
                view = View(target.storage_offset(), tuple(target.size()), tuple(target.stride()))
                self.fills.append(Fill(name, view, call.args[1] if len(call.args) > 1 else 0))
            return target
        if all(one.numel() == 0 for one in mutated) and mutated:
            return call.run()
        for name in touched:
            self.disturbed.setdefault(name, str(call.operator))
        written = [one for one in mutated if self.parameters.name_of(one) is not None]
        return written[0] if written else call.run()

    def _write_whole(self, parameter: str, names: set[str]) -> None:
        layout = self.parameters.layout(parameter)
        whole = View(0, tuple(layout), row_strides(layout))
        self.writes.setdefault(parameter, []).append(Write(frozenset(names), whole, None))

    def _tainted(self, tracked: Iterable[TrackedTensor], reason: str) -> _Root:
        names = set().union(*(one.root.names for one in tracked))
        self.load_by_name(names, reason)
        return _Root(names, reason)

    def load_by_name(self, names: Iterable[str], reason: str) -> None:
        self.groups.append(frozenset(names))
        for name in names:
            self.by_name.setdefault(name, reason)


def _outer(value: object) -> object:
    return value.outer if isinstance(value, TrackedTensor) else value


def _on_meta(value: object) -> object:
    if isinstance(value, TrackedTensor):
        return value.outer
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _outside_modes() -> contextlib.AbstractContextManager[object]:
    """Context in which operators on meta tensors reach no mode of this thread."""
    return torch.utils._python_dispatch._disable_current_modes()
