"""Regions of copies, compared with torch's copies of the same views."""

from __future__ import annotations

import random

import pytest
import torch

from rlpost.engines.shards.copies import View, boxes_of, overlap, regions_of
from rlpost.models.regions import Region

IN_A_TEST = 25
"""Seeds of one test: the rest of a test takes longer than its copies."""


def view_of(tensor: torch.Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()))


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(1, 4)))


def random_view(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Apply views as weight loaders do: narrow, select, transpose, reshape, flatten, expand."""
    for _ in range(rng.randint(0, 4)):
        if tensor.dim() == 0:
            return tensor
        dim = rng.randrange(tensor.dim())
        size = tensor.size(dim)
        kind = rng.choice(["narrow", "select", "transpose", "split", "flatten", "step", "expand"])
        if kind == "narrow":
            start = rng.randrange(size)
            tensor = tensor.narrow(dim, start, rng.randint(1, size - start))
        elif kind == "select" and tensor.dim() > 1:
            tensor = tensor.select(dim, rng.randrange(size))
        elif kind == "transpose":
            tensor = tensor.transpose(dim, rng.randrange(tensor.dim()))
        elif kind == "split" and size % 2 == 0:
            tensor = tensor.unflatten(dim, (2, size // 2))
        elif kind == "flatten" and dim + 1 < tensor.dim():
            try:
                tensor = tensor.flatten(dim, dim + 1) if tensor.is_contiguous() else tensor
            except RuntimeError:
                continue
        elif kind == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif kind == "expand":
            tensor = tensor.unsqueeze(0).expand(2, *tensor.size())
    return tensor


def replay(regions: list[Region], tensor: torch.Tensor, storage: torch.Tensor) -> None:
    for region in regions:
        index = tuple(slice(a, a + n) for a, n in zip(region.start, region.size, strict=True))
        target = storage.as_strided(region.size, region.strides, region.offset)
        target.copy_(tensor[index])


def seeds(first: int) -> range:
    return range(first, first + IN_A_TEST)


@pytest.mark.parametrize("first", range(0, 300, IN_A_TEST))
def test_regions_copy_what_torch_copies(first: int) -> None:
    for seed in seeds(first):
        copies_agree(random.Random(seed))


def copies_agree(rng: random.Random) -> None:
    shape = random_shape(rng)
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    source = random_view(rng, tensor)
    order = list(range(source.dim()))
    rng.shuffle(order)
    sizes = [source.size(dim) + rng.randint(0, 2) for dim in order]
    target = torch.full(sizes or (1,), -1)
    into = target.permute([order.index(dim) for dim in range(len(order))]) if sizes else target[0]
    for dim, size in enumerate(source.size()):
        into = into.narrow(dim, into.size(dim) - size, size)
    regions = regions_of("t", shape, view_of(source), "p", view_of(into))
    assert regions is not None
    storage = torch.full((target.numel(),), -1)
    replay(regions, tensor, storage)
    into.copy_(source)
    assert torch.equal(storage, target.flatten())


@pytest.mark.parametrize("first", range(0, 200, IN_A_TEST))
def test_overlap_is_that_of_the_elements(first: int) -> None:
    for seed in seeds(first):
        rng = random.Random(seed)
        shape = random_shape(rng)
        tensor = torch.arange(torch.Size(shape).numel()).view(shape)
        one, other = random_view(rng, tensor), random_view(rng, tensor)
        common = set(one.flatten().tolist()) & set(other.flatten().tolist())
        assert overlap(shape, view_of(one), view_of(other)) == bool(common), seed


def test_heads_that_alternate_are_a_region_each() -> None:
    heads, part, hidden = 3, 2, 5
    tensor = torch.arange(heads * 2 * part * hidden).view(heads * 2 * part, hidden)
    queries = tensor.view(heads, 2, part, hidden)[:, 0]
    regions = regions_of("t", tuple(tensor.shape), view_of(queries), "p", view_of(queries.clone()))
    assert regions is not None
    assert [one.start for one in regions] == [(head * 2 * part, 0) for head in range(heads)]
    assert all(one.size == (part, hidden) for one in regions)


def test_a_view_that_boxes_do_not_describe_is_refused() -> None:
    diagonal = torch.zeros(4, 4).diagonal()
    assert boxes_of((4, 4), view_of(diagonal)) is None
    tensor = torch.zeros(5000, 2)
    assert (
        boxes_of(tuple(tensor.shape), view_of(tensor.T[:, ::1][:, 0:0:1].new_zeros(1))) is not None
    )
    every_second = torch.zeros(10_000)[::2]
    assert boxes_of((10_000,), view_of(every_second)) is None, "too many boxes"
