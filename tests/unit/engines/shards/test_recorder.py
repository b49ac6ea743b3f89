"""Loaders of all kinds: what is recorded equals what they load, and the rest is loaded by name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlpost.engines.shards.loader import LoadedModel
from rlpost.engines.shards.messages import NotPrepared
from rlpost.engines.shards.parameters import Parameters
from rlpost.engines.shards.recorder import record
from rlpost.models.regions import Box

Weights = Iterable[tuple[str, torch.Tensor]]
LoadOne = Callable[["Model", str, torch.Tensor], None]
SHAPES = {"a": (4, 6), "b": (4, 6), "c": (4, 6), "scale": (1,)}


class Model(torch.nn.Module):
    """A fused parameter, one that is derived from it, a buffer, and a loader of one tensor."""

    def __init__(self, load_one: LoadOne, *, in_threads: bool = False) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(14, 6))
        self.scale = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("derived", torch.zeros(14))
        self.load_one, self.in_threads = load_one, in_threads
        self.pending: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Weights) -> None:
        with ThreadPoolExecutor(2) as pool:
            futures = []
            for name, tensor in weights:
                if self.in_threads:
                    futures.append(pool.submit(self.load_one, self, name, tensor))
                else:
                    self.load_one(self, name, tensor)
            for future in futures:
                future.result()
        if self.pending:
            self.pending.clear()


def rows(model: Model, name: str) -> torch.Tensor:
    """The rows of a tensor in the fused parameter; two of them are padding."""
    start = 4 * "abc".index(name)
    return model.fused.data[start : start + 4]


def copied(model: Model, name: str, tensor: torch.Tensor) -> None:
    if name == "scale":
        model.scale.data.fill_(tensor.item())
    else:
        rows(model, name).copy_(tensor)


def only_a(load: Callable[[Model, torch.Tensor], None]) -> LoadOne:
    """A loader that does something else with tensor a."""

    def load_one(model: Model, name: str, tensor: torch.Tensor) -> None:
        if name == "a":
            load(model, tensor)
        else:
            copied(model, name, tensor)

    return load_one


def joined(model: Model, name: str, tensor: torch.Tensor) -> None:
    """Load a and b together."""
    if name not in ("a", "b"):
        return copied(model, name, tensor)
    model.pending[name] = tensor
    if len(model.pending) == 2:
        fused = torch.cat([model.pending.pop("a"), model.pending.pop("b")])
        model.fused.data[:8].copy_(fused)
    return None


def padded(model: Model, name: str, tensor: torch.Tensor) -> None:
    copied(model, name, tensor)
    model.fused.data[12:].fill_(3.0)


def derived(model: Model, name: str, tensor: torch.Tensor) -> None:
    copied(model, name, tensor)
    model.derived.copy_(model.fused.data.sum(1))


def by_hand(model: Model, tensor: torch.Tensor) -> None:
    for row in range(4):
        model.fused.data[row, :].copy_(tensor.T.contiguous()[:, row])


def in_place(model: Model, tensor: torch.Tensor) -> None:
    copy = tensor.clone()
    copy[0].mul_(2)
    rows(model, "a").copy_(copy)


def twice(model: Model, name: str, tensor: torch.Tensor) -> None:
    copied(model, name, tensor)
    if name == "b":
        rows(model, "a")[2:].copy_(tensor[2:])


def replaced(model: Model, tensor: torch.Tensor) -> None:
    model.fused = torch.nn.Parameter(model.fused.data.clone())
    rows(model, "a").copy_(tensor)


def constant_below(model: Model, tensor: torch.Tensor) -> None:
    rows(model, "a").zero_()
    rows(model, "a")[:2].copy_(tensor[:2])


def scaled(model: Model, name: str, tensor: torch.Tensor) -> None:
    """Load a when its scale has come, as a number."""
    if name not in ("a", "scale"):
        return copied(model, name, tensor)
    model.pending[name] = tensor
    if len(model.pending) == 2:
        rows(model, "a").copy_(model.pending.pop("a") * model.pending.pop("scale").item())
    return None


def experts(model: Model, tensor: torch.Tensor) -> None:
    for number, row in enumerate(tensor):
        rows(model, "a")[number].copy_(row)


def caught(model: Model, tensor: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        rows(model, "a").copy_(tensor.flatten()[tensor.flatten() > 0].view(4, 6))


CASES: dict[str, tuple[LoadOne, set[str]]] = {
    "copied": (copied, {"scale"}),
    "rows of a transposed copy": (only_a(by_hand), {"scale"}),
    "half": (only_a(lambda m, t: rows(m, "a").copy_(t.half())), {"scale", "a"}),
    "double": (only_a(lambda m, t: rows(m, "a").copy_(t.double())), {"scale", "a"}),
    "set item": (only_a(lambda m, t: rows(m, "a").__setitem__(slice(0, 4), t)), {"scale"}),
    "data": (only_a(lambda m, t: rows(m, "a").copy_(t.data)), {"scale"}),
    "detach": (only_a(lambda m, t: rows(m, "a").copy_(t.detach().reshape(24).view(4, 6))), {"scale"}),
    "half a row": (only_a(lambda m, t: rows(m, "a")[:, :3].copy_(t.chunk(2, 1)[1])), {"scale"}),
    "broadcast": (only_a(lambda m, t: rows(m, "a").copy_(t[0])), {"scale"}),
    "experts": (only_a(experts), {"scale"}),
    "joined": (joined, {"scale", "a", "b"}),
    "arithmetic": (only_a(lambda m, t: rows(m, "a").copy_(1 + t)), {"scale", "a"}),
    "in place": (only_a(in_place), {"scale", "a"}),
    "value": (only_a(lambda m, t: rows(m, "a").fill_(t[0, 0].item())), {"scale", "a"}),
    "condition": (only_a(lambda m, t: rows(m, "a").copy_(t) if t.sum() > 0 else None), {"scale", "a"}),
    "mask": (only_a(lambda m, t: rows(m, "a").masked_scatter_(t > 0.7, t)), {"scale", "a", "b", "c"}),
    "index": (only_a(lambda m, t: rows(m, "a").copy_(t[torch.tensor([3, 2, 1, 0])])), {"scale", "a"}),
    "padded": (padded, {"scale"}),
    "constant below": (only_a(constant_below), {"scale", "a"}),
    "derived": (derived, {"scale", "a", "b", "c"}),
    "twice": (twice, {"scale", "a", "b"}),
    "replaced": (only_a(replaced), {"scale", "a", "b", "c"}),
    "numpy": (only_a(lambda m, t: rows(m, "a").copy_(torch.tensor(t.numpy()))), {"scale", "a"}),
    "list": (only_a(lambda m, t: rows(m, "a").copy_(torch.tensor(t.tolist()))), {"scale", "a"}),
    "ignored": (only_a(lambda m, t: None), {"scale", "a"}),
    "waiting": (scaled, {"scale", "a"}),
    "strided": (only_a(lambda m, t: rows(m, "a").copy_(t.T.clone().as_strided((4, 6), (6, 1)))), {"scale", "a"}),
    "caught": (only_a(caught), {"scale", "a"}),
}  # fmt: skip
"""A loader of one tensor, and what must be loaded by name."""


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) + 0.5 for name, shape in SHAPES.items()}


def types(values: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(one.shape), one.dtype) for name, one in values.items()}


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in Parameters(model).tensors.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def update(loaded: LoadedModel, values: dict[str, torch.Tensor]) -> None:
    """Send boxes of all regions, row by row, and whole tensors."""
    boxes = [
        Box(name, (row, 0), (1, one.shape[1]))
        for name, one in values.items()
        for row in range(one.shape[0])
        if one.dim() == 2
    ]
    data = [(box, values[box.tensor][box.start[0] : box.start[0] + 1]) for box in boxes]
    whole = [(name, one) for name, one in values.items() if name in loaded.recording.by_name]
    loaded.begin()
    loaded.load(0, data, whole)
    loaded.finish()


@pytest.mark.parametrize("in_threads", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_update_by_regions_is_what_the_loader_makes(name: str, in_threads: bool) -> None:
    load_one, by_name = CASES[name]
    if in_threads and name in ("joined", "derived", "twice", "replaced", "waiting"):
        in_threads = False  # their result depends on the order of the threads
    model, other = (Model(load_one, in_threads=in_threads) for _ in range(2))
    for one in (model, other):
        one.load_weights(iter(tensors(0).items()))
    loaded, before = LoadedModel(model, 0), state(model)
    loaded.record(types(tensors(0)))
    assert equal(before, state(model)), "the recording changed the model"
    assert set(loaded.recording.by_name) == by_name, loaded.recording.by_name
    for seed in (1, 2):
        other.load_weights(iter(tensors(seed).items()))
        update(loaded, tensors(seed))
        assert equal(state(other), state(model))


def test_what_fills_a_parameter_is_recorded_as_far_as_it_is_known() -> None:
    """The scale is read as a number, so what it fills is not seen; padding may be all of a shard."""
    every = types(tensors(0))
    without_scale = {name: one for name, one in every.items() if name != "scale"}
    skips_a = only_a(lambda model, tensor: None)
    assert record(Model(skips_a), without_scale).filled == {"fused": ["b", "c"], "scale": []}
    assert record(Model(joined), every).filled == {"fused": ["a", "b", "c"]}
    assert record(Model(padded), every).filled == {}


def test_tensors_that_are_joined_come_together() -> None:
    recording = record(Model(joined), types(tensors(0)))
    assert ["a", "b"] in recording.together


def test_what_waits_for_a_tensor_that_is_left_out_comes_with_it() -> None:
    assert record(Model(scaled), types(tensors(0))).together == [["a", "scale"]]


def test_a_kind_of_tensor_that_fails_is_left_out_at_once() -> None:
    """Not one after the other: each try loads all others."""
    tries: list[None] = []

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(100, 2))

        def load_weights(self, weights: Weights) -> None:
            tries.append(None)
            for name, tensor in weights:
                layer = int(name.split(".")[1])
                if name.endswith("odd"):
                    raise ValueError(name)
                self.weight.data[layer].copy_(tensor)

    names = [f"layers.{layer}.{kind}" for layer in range(50) for kind in ("odd", "weight")]
    recording = record(Layers(), {name: ((2,), torch.float32) for name in names})
    assert sorted(recording.by_name) == sorted(one for one in names if one.endswith("odd"))
    assert len(recording.regions) == 50
    assert len(tries) < 12


def test_a_loader_that_fails_without_tensors_gets_them_all_by_name() -> None:
    class Failing(Model):
        def load_weights(self, weights: Weights) -> None:
            raise OSError("no file")

    recording = record(Failing(copied), types(tensors(0)))
    assert recording.by_name.keys() == SHAPES.keys()
    assert not recording.regions


def test_derivation_after_the_load_is_called_once_with_its_arguments() -> None:
    class Derived(Model):
        def __init__(self) -> None:
            super().__init__(copied)
            self.calls: list[list[str]] = []

        def load_weights(self, weights: Weights) -> None:
            names = []
            for name, tensor in weights:
                names.append(name)
                copied(self, name, tensor)
            self.post_load_weights(weight_names=names)

        def post_load_weights(self, weight_names: list[str]) -> None:
            self.calls.append(weight_names)
            self.derived.copy_(self.fused.data.sum(1))

    model, other = Derived(), Derived()
    loaded = LoadedModel(model, 0)
    loaded.record(types(tensors(0)))
    assert not model.calls and "post_load_weights" not in vars(model)
    assert set(loaded.recording.by_name) == {"scale"}
    update(loaded, tensors(1))
    other.load_weights(iter(tensors(1).items()))
    assert equal(state(other), state(model))
    assert model.calls == [["scale"], ["a", "b", "c"]], "scale is loaded first, by its name"


def test_thread_pools_of_other_threads_are_left_alone() -> None:
    ran_in = []

    def slow(model: Model, name: str, tensor: torch.Tensor) -> None:
        if name == "a":
            thread = threading.Thread(target=submit)
            thread.start()
            thread.join()
        copied(model, name, tensor)

    def submit() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: ran_in.append(threading.current_thread().name)).result()

    record(Model(slow), types(tensors(0)))
    assert all(name.startswith("ThreadPoolExecutor") for name in ran_in) and ran_in


def test_other_shapes_than_recorded_are_refused() -> None:
    model = Model(copied)
    loaded = LoadedModel(model, 0)
    loaded.record(types(tensors(0)))
    model.fused = torch.nn.Parameter(torch.zeros(6, 14).T)
    with pytest.raises(NotPrepared, match="other shapes"):
        loaded.begin()


def test_memory_that_is_mapped_again_is_found_by_name() -> None:
    model = Model(padded)
    loaded = LoadedModel(model, 0)
    loaded.record(types(tensors(0)))
    model.fused = torch.nn.Parameter(torch.full((14, 6), torch.nan))
    update(loaded, tensors(1))
    other = Model(padded)
    other.load_weights(iter(tensors(1).items()))
    assert equal(state(other), state(model))


def test_tied_parameters_have_one_name() -> None:
    model = Model(copied)
    model.head = model.fused
    assert [name for name, _ in iterated(model)] == ["fused", "scale", "head", "derived"]
    assert Parameters(model).name_of(model.head.data[3:]) == "fused"


def iterated(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from Parameters(model).tensors.items()
