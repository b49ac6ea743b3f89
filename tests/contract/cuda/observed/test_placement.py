"""With CUDA, no tensor that is computed with or broadcast is left on the CPU.

Tensors that stay in host memory on purpose are not built here: Adam's state with
``optimizer_cpu_offload``, other sets of weights (``kept_weights.py``, swapped in when needed), the
copies of a background save (``host_copies.py``, which outlive the step), and the trainer's memory
while engines use the GPU (``memory.py``).
"""

from __future__ import annotations

import pytest

from tests.contract.cuda.conftest import FAMILIES, IMPLEMENTATIONS
from tests.contract.cuda.observations_table import OF_EXPERTS, RECIPES

pytestmark = pytest.mark.timeout(300)


def nothing_left(found):
    assert "error" not in found, found["error"]
    assert found["exported"]["shapes"] and not found["exported"]["on_cpu"]
    assert not any(found["on_cpu"].values()), found["on_cpu"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_model_gradients_optimizer_export_and_conversion_of_a_family_are_on_the_gpu(
    observe, implementation, family
):
    found = observe(implementation)["families"][family]
    assert {"converter", "local, one", f"{implementation}, tp"} <= found.keys()
    for each in found.values():
        nothing_left(each)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_trainer_of_a_recipe_is_on_the_gpu_at_its_own_layout(observe, implementation, recipe):
    table = (
        "recipes without kernels"
        if recipe in OF_EXPERTS and implementation == "local"
        else "recipes"
    )
    nothing_left(observe(implementation)[table][recipe])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_optimizer_that_is_not_sharded_takes_the_weights_of_the_router(observe, implementation):
    """The optimizer refuses tensors on any other device."""
    nothing_left(observe(implementation)["settings"]["whole adam on every rank"])
