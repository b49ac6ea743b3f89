"""Facts of SGLang, Megatron-core, torch and Ray that our CUDA-only branches rely on.

Each fact is checked against the installed source, without a GPU. An upgrade that changes a fact
fails here with its name and the modules of ours that rely on it. Each check is also run on a source
with that fact changed, and must fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.cuda import facts_of_megatron, facts_of_sglang, facts_of_torch_and_ray
from tests.contract.cuda.library_source import Fact, FactChanged, Source

ROOT = Path(__file__).parents[3]
FACTS = (*facts_of_sglang.FACTS, *facts_of_megatron.FACTS, *facts_of_torch_and_ray.FACTS)
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
each_fact = pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.library}: {fact.name}")


@each_fact
def test_a_library_does_what_our_code_relies_on(fact: Fact) -> None:
    fact.verify(Source())


@each_fact
def test_a_library_that_changes_it_is_reported_with_the_modules_that_rely_on_it(fact: Fact) -> None:
    changed = Source.with_change(*fact.change)
    with pytest.raises(FactChanged) as reported:
        fact.verify(changed)
    assert not isinstance(reported.value.__cause__, NameError), (
        "the check broke instead of noticing the change"
    )
    assert fact.name in str(reported.value)
    assert all(module in str(reported.value) for module in fact.relied_on_by)


@each_fact
def test_the_modules_that_rely_on_it_exist(fact: Fact) -> None:
    assert [module for module in fact.relied_on_by if not (ROOT / module).is_file()] == []


def test_the_names_of_facts_are_unique() -> None:
    assert len({fact.name for fact in FACTS}) == len(FACTS)


def test_a_library_that_is_not_installed_is_reported() -> None:
    with pytest.raises(LookupError, match="is not installed"):
        Source().text("no_such_library/file.py")
