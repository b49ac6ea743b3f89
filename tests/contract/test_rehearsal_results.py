"""Remembered results of operations on the meta device equal those that torch computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rlpost.config.tree import Config
from rlpost.extensions.rehearsal.all_ranks import run as run_module
from rlpost.extensions.rehearsal.all_ranks.distributed_calls import Recording
from rlpost.extensions.rehearsal.all_ranks.meta import DIRECT, IN_PLACE, NEW, MetaResults, kind_of
from rlpost.extensions.rehearsal.all_ranks.rank_facts import RankFacts
from rlpost.extensions.rehearsal.all_ranks.run import RehearsalOptions, build_ranks, rehearse_run
from rlpost.extensions.rehearsal.all_ranks.symmetry import Recorded, classes
from tests.contract.test_rehearsal_kinds import (
    DENSE,
    MOE,
    MUON,
    NUM_MICRO_BATCHES,
    PPO,
    config_of,
)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="run with CUDA_VISIBLE_DEVICES= (empty)"),
    pytest.mark.filterwarnings("ignore"),  # Megatron repeats its warnings for every rank
]
ATEN = torch.ops.aten
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear attention": ("qwen3-next-moe", {}),
    "PPO": (DENSE, PPO),
    "Muon with experts": (MOE, MUON),
}


def layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return everything on which later operations and the count of memory depend."""
    return (
        type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout,
        tensor.storage_offset(), tensor.untyped_storage().nbytes(), tensor.is_conj(), tensor.is_neg(),
        tensor.requires_grad,
    )  # fmt: skip


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [one for each in value for one in tensors_of(each)]
        if isinstance(value, list | tuple)
        else []
    )


def storages(value: object) -> list[int]:
    return [one.untyped_storage()._cdata for one in tensors_of(value)]


class Compared(MetaResults):
    """Also lets torch compute each remembered result, and compares the two."""

    def of(
        self, func: Any, args: tuple[Any, ...], options: dict[str, Any], computed: Any = None
    ) -> Any:
        before = self.num_remembered
        made = super().of(func, args, options, computed)
        if self.num_remembered == before:
            return made
        direct = func(*args, **options)
        assert type(made) is type(direct), func
        assert [layout(one) for one in tensors_of(made)] == [
            layout(one) for one in tensors_of(direct)
        ], func
        if direct is args[0]:
            assert made is args[0], func
        else:
            given = {*storages(args), *storages(options)}
            for found in (made, direct):
                own = storages(found)
                assert len({*own}) == len(own), func
                assert given.isdisjoint(own), func
        return made


def rehearsed(
    config: Config, facts: Mapping[int, RankFacts], results: Any
) -> Mapping[int, Recording]:
    """Record one rank of each class."""
    kept: dict[int, Recording] = {}

    def keep(facts: Mapping[int, RankFacts], run: Callable[[int], Recording], **_: Any) -> Recorded:
        of_classes = classes(facts, all_gather=True)
        kept.update((ranks[0], run(ranks[0])) for ranks in of_classes)
        all_ranks = {rank: kept[ranks[0]] for ranks in of_classes for rank in ranks}
        return Recorded(all_ranks, tuple(kept), tuple(of_classes))

    with (
        patch.object(run_module, "MetaResults", lambda: results),
        patch.object(run_module, "record", keep),
    ):
        rehearse_run(config, RehearsalOptions(micro_batches=NUM_MICRO_BATCHES), facts=facts)
    return kept


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_the_same_with_and_without_remembered_results(tmp_path, name):
    """Each remembered result is compared, and calls and bytes of a rank of each class are equal."""
    model, changed = STEPS[name]
    config, results = config_of(model, tmp_path, changed), Compared()
    facts = build_ranks(config)
    with_results = rehearsed(config, facts, results)
    assert results.num_remembered > 1000
    assert len(with_results) == 2
    assert with_results == rehearsed(config, facts, None)


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (ATEN.add.Tensor, NEW), (ATEN.mm.default, NEW), (ATEN.cat.default, NEW),
        (ATEN.add_.Tensor, IN_PLACE), (ATEN.copy_.default, IN_PLACE), (ATEN.zero_.default, IN_PLACE),
        (ATEN.view.default, DIRECT), (ATEN.split.Tensor, DIRECT), (ATEN.detach.default, DIRECT),
        (ATEN.resize_.default, DIRECT), (ATEN.set_.source_Tensor, DIRECT), (ATEN.t_.default, DIRECT),
        (ATEN.native_dropout.default, DIRECT), (ATEN.uniform_.default, DIRECT),
        (ATEN.nonzero.default, DIRECT), (ATEN._local_scalar_dense.default, DIRECT),
        (ATEN.mm.out, DIRECT), (ATEN._foreach_add_.Scalar, DIRECT), (ATEN.matmul.default, NEW),
    ],
)  # fmt: skip
def test_an_operation_is_remembered_if_its_schema_allows_it(func, kind):
    assert kind_of(func) == kind


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_equal_layouts_are_computed_once():
    results = Compared()
    first = results.of(ATEN.add.Tensor, (meta(4, 3), meta(3)), {})
    again = results.of(ATEN.add.Tensor, (meta(4, 3), meta(3)), {})
    assert results.num_remembered == 1
    assert layout(first) == layout(again)
    assert storages(first) != storages(again)
    results.of(ATEN.add.Tensor, (meta(3, 4).t(), meta(3)), {})
    results.of(ATEN.add.Tensor, (meta(4, 3), meta(3, dtype=torch.float64)), {})
    assert results.num_remembered == 1


def test_numbers_of_different_types_are_different_arguments():
    """1, 1.0 and True are equal and have the same hash, but results differ in their dtype."""
    results = Compared()
    dtypes = [
        results.of(ATEN.mul.Tensor, (meta(2, dtype=torch.int32), number), {}).dtype
        for number in (1, 1.0, True, 1)
    ]
    assert dtypes == [torch.int32, torch.float32, torch.int32, torch.int32]
    assert results.num_remembered == 1


def test_a_result_that_aliases_its_argument_against_its_schema_is_not_remembered():
    results, given = Compared(), meta(4, 3)
    for _ in range(3):
        made = results.of(ATEN._unsafe_view.default, (given, [12]), {})
        assert storages(made) == storages(given)
    assert results.num_remembered == 0


def test_tensors_with_data_are_computed_each_time():
    results = Compared()
    ones = torch.ones(3)
    sums = [results.of(ATEN.add.Tensor, (ones, number), {}).tolist() for number in (1, 1, 2)]
    assert sums == [[2.0] * 3, [2.0] * 3, [3.0] * 3]
    results.of(ATEN._to_copy.default, (ones,), {"device": torch.device("meta")})
    results.of(ATEN._to_copy.default, (ones,), {"device": torch.device("meta")})
    assert results.num_remembered == 0


def test_an_operation_that_fails_fails_again():
    results = Compared()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            results.of(ATEN.mm.default, (meta(2, 3), meta(2, 3)), {})


def test_a_change_in_place_returns_its_argument():
    results = Compared()
    for _ in range(2):
        given = meta(2, 3)
        assert results.of(ATEN.add_.Tensor, (given, 1), {}) is given
    assert results.num_remembered == 1
