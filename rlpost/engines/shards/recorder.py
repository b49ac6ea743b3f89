"""Record what a model's ``load_weights`` copies where, without weights.

Input: a model and the shapes and dtypes of the tensors of its checkpoint. Output: ``Recording``: the
regions of its parameters that the tensors fill, and those tensors that it must load by name.

``load_weights`` runs once, with tensors that have no storage (``TrackedTensor``, a wrapper subclass).
A view of one is tracked, and a copy of it into a parameter is recorded and not executed. So the
model's own code decides what goes where, for every family, layout and quantisation. A tensor is
loaded by name when anything else happens to it: its values are read or computed with, it is copied
into memory that is no parameter, it replaces a parameter, or other tensors write the same elements.

Writes without a tensor are not executed either. Constants (padding) are recorded, and tensors that
fill the same elements are loaded by name, because the constant comes with them. ``post_load_weights``
(SGLang's method that derives weights from others) is not called; its calls are recorded. All other
computation with a parameter makes the tensors that fill it be loaded by name, together.

Invariant: a recording leaves the model and its weights as they were.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from rlpost.engines.shards.copies import overlap
from rlpost.engines.shards.messages import kind_of
from rlpost.engines.shards.parameters import Parameters
from rlpost.engines.shards.tracking import Fill, TensorTypes, Trace, ValueRead, Write
from rlpost.models.regions import Region


@dataclass(frozen=True, slots=True)
class PostLoad:
    """A call of ``post_load_weights`` of a module of the model."""

    module: torch.nn.Module
    args: tuple[object, ...]
    kwargs: dict[str, object]

    def call(self) -> None:
        """Derive the weights."""
        self.module.post_load_weights(*self.args, **self.kwargs)


@dataclass
class Recording:
    """What ``load_weights`` does with the tensors of a checkpoint."""

    regions: list[Region] = field(default_factory=list)
    by_name: dict[str, str] = field(default_factory=dict)
    """Tensors that must be loaded by name, with the reason."""
    together: list[list[str]] = field(default_factory=list)
    """Those of them that one call of ``load_weights`` must get."""
    fills: list[Fill] = field(default_factory=list)
    post_load: list[PostLoad] = field(default_factory=list)
    filled: dict[str, list[str]] = field(default_factory=dict)
    """The tensors that fill each declared parameter, once for each write; none for one that keeps its
    value."""


def record(
    model: torch.nn.Module,
    tensors: TensorTypes,
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], object] | None = None,
) -> Recording:
    """Record what ``model.load_weights`` does with these tensors, in their order.

    A tensor that cannot be recorded is left out, with all of its kind (names that differ in
    numbers). Then those that fill nothing are loaded by name as well: they may wait for it.
    """
    load = load or model.load_weights
    reasons: dict[str, str] = {}
    while True:
        names = [name for name in tensors if name not in reasons]
        if not names:
            return Recording(by_name=reasons)
        failure = _try(model, tensors, names, load)
        if isinstance(failure, _Finished):
            return _result(model, failure, tensors, reasons)
        if isinstance(failure, ValueRead):
            culprits, reason = set(failure.names), str(failure)
        else:
            culprits = {_culprit(model, tensors, names, load)}
            reason = f"cannot be recorded: {type(failure).__name__}: {failure}"
        kinds = {kind_of(name) for name in culprits}
        reasons |= {name: reason for name in names if kind_of(name) in kinds}


@dataclass
class _Finished:
    trace: Trace
    post_load: list[PostLoad]
    has_replaced: bool


def _try(
    model: torch.nn.Module, tensors: TensorTypes, names: Sequence[str], load: Callable[..., object]
) -> _Finished | Exception:
    parameters = Parameters(model)
    trace = Trace(parameters, tensors, parameters.device)
    post_load: list[PostLoad] = []
    with parameters.kept() as replaced, _post_load_recorded(model, post_load), _inline_executors():
        try:
            with trace:
                load(iter([(name, trace.track(name)) for name in names]))
        except Exception as error:
            return error
    return _Finished(trace, post_load, bool(replaced))


def _culprit(
    model: torch.nn.Module, tensors: TensorTypes, names: Sequence[str], load: Callable[..., object]
) -> str:
    """The last tensor of the shortest list that fails."""
    low, high = 0, len(names)  # lists of ``low`` tensors succeed, those of ``high`` fail
    while high - low > 1:
        middle = (low + high) // 2
        if isinstance(_try(model, tensors, names[:middle], load), _Finished):
            low = middle
        else:
            high = middle
    return names[high - 1]


def _result(
    model: torch.nn.Module, run: _Finished, tensors: TensorTypes, reasons: dict[str, str]
) -> Recording:
    trace = run.trace
    if run.has_replaced:
        every = dict.fromkeys(tensors, "load_weights replaces parameters")
        return Recording(by_name=every, together=[list(tensors)])
    for parameter, how in trace.disturbed.items():
        writers = [write.names for write in trace.writes.get(parameter, ())]
        names = frozenset[str]().union(*writers)
        trace.load_by_name(names, f"fills {parameter}, which is read or written by {how}")
    for fill in trace.fills:
        layout = trace.parameters.layout(fill.parameter)
        for write in trace.writes.get(fill.parameter, ()):
            if overlap(layout, write.view, fill.view):
                trace.load_by_name(write.names, "fills elements that are also set to a constant")
    for parameter, writes in trace.writes.items():
        for names in _contested(trace.parameters.layout(parameter), writes):
            trace.load_by_name(names, f"fills elements of {parameter} that are written twice")
    if reasons:
        written = [write.names for writes in trace.writes.values() for write in writes]
        waiting = tensors.keys() - frozenset[str]().union(*written) - reasons.keys()
        for name in waiting:
            trace.load_by_name({name}, "fills nothing without a tensor that cannot be recorded")
        trace.groups += _scopes([*reasons, *waiting])
    by_name = {
        name: (reasons | trace.by_name)[name]
        for name in tensors
        if name in reasons or name in trace.by_name
    }
    regions: dict[Region, None] = {}
    for writes in trace.writes.values():
        for write in writes:
            if write.regions is not None and not write.names & by_name.keys():
                regions |= dict.fromkeys(write.regions)
    together = _joined(trace.groups, list(tensors))
    filled = _filled(model, trace, are_all_recorded=not reasons)
    return Recording(list(regions), by_name, together, trace.fills, run.post_load, filled)


def _filled(
    model: torch.nn.Module, trace: Trace, *, are_all_recorded: bool
) -> dict[str, list[str]]:
    """What fills each parameter, as far as it is known.

    One with a constant is left out: a shard may consist of padding. So is one that no tensor is seen
    to fill, unless all tensors can be recorded.
    """
    padded = {fill.parameter for fill in trace.fills}
    filled: dict[str, list[str]] = {}
    for _, one in model.named_parameters():
        parameter = trace.parameters.name_of(one)
        if parameter is None or parameter in padded:
            continue
        names = [name for write in trace.writes.get(parameter, ()) for name in write.names]
        if names or are_all_recorded:
            filled[parameter] = sorted(names)
    return filled


def _contested(layout: Sequence[int], writes: list[Write]) -> Iterator[frozenset[str]]:
    """Yield the tensors of each two writes that share elements, unless the writes are equal."""
    active: list[Write] = []
    for write in sorted(writes, key=lambda one: one.view.offset):
        active = [one for one in active if one.view.last >= write.view.offset]
        for other in active:
            is_same = other.regions is not None and other.regions == write.regions
            if not is_same and overlap(layout, other.view, write.view):
                yield other.names | write.names
        active.append(write)


def _joined(groups: Iterable[frozenset[str]], order: list[str]) -> list[list[str]]:
    """Join groups with common tensors; those of one tensor are left out."""
    group_of: dict[str, set[str]] = {}
    for group in groups:
        joined = set(group).union(*(group_of.get(name, ()) for name in group))
        group_of |= dict.fromkeys(joined, joined)
    number = {name: index for index, name in enumerate(order)}
    distinct = {id(group): group for group in group_of.values() if len(group) > 1}
    return [sorted(group, key=number.__getitem__) for group in distinct.values()]


def _scopes(names: Iterable[str]) -> list[frozenset[str]]:
    """Group the tensors of each layer: names that are equal up to the first number."""
    groups: dict[str, set[str]] = {}
    for name in names:
        scope = re.match(r"(.*?\.\d+\.)?", name)
        groups.setdefault(scope[0] if scope else "", set()).add(name)
    return [frozenset(group) for group in groups.values()]


@contextlib.contextmanager
def _post_load_recorded(model: torch.nn.Module, calls: list[PostLoad]) -> Iterator[None]:
    """Record calls of ``post_load_weights`` of all modules instead of making them."""
    modules = [one for one in model.modules() if hasattr(one, "post_load_weights")]

    def recorder(module: torch.nn.Module) -> Callable[..., None]:
        return lambda *args, **kwargs: calls.append(PostLoad(module, args, kwargs))

    for module in modules:
        module.__dict__["post_load_weights"] = recorder(module)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["post_load_weights"]


@contextlib.contextmanager
def _inline_executors() -> Iterator[None]:
    """Run what this thread submits to thread pools in this thread, where the mode is active."""
    submit, thread = concurrent.futures.ThreadPoolExecutor.submit, threading.get_ident()

    def inline(
        pool: concurrent.futures.ThreadPoolExecutor,
        function: Callable[..., object],
        /,
        *args: object,
        **kwargs: object,
    ) -> concurrent.futures.Future[object]:
        if threading.get_ident() != thread:
            return submit(pool, function, *args, **kwargs)
        future: concurrent.futures.Future[object] = concurrent.futures.Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    concurrent.futures.ThreadPoolExecutor.submit = inline  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        concurrent.futures.ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
