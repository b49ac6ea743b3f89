"""Adam on the host beside a GPU (``--optimizer-cpu-offload``).

It trains, and its checkpoints can be resumed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.actor_ranks import run_ranks
from tests.contract.families import make_family
from tests.contract.samples import STEPS
from tests.gpu.gpu_ranks import load_and_train, train_and_save
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
MODELS = "qwen3", "glm4.5-moe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("offload") / name for name in MODELS}
    for name, folder in made.items():
        make_family(folder, name)
    return made


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "on the host"])
def test_a_checkpoint_resumes_with_the_weights_and_moments_that_were_saved(
    folders: dict[str, Path], tmp_path: Path, device: str, name: str, offload: bool
) -> None:
    """In the process that saved, and in another process, whose next step is that of the first."""
    settings = rank_config(
        str(folders[name]),
        bf16=True,
        lr=1e-3,
        adam_eps=1e-4,
        optimizer_cpu_offload=offload,
        actor_num_threads=4,
    )
    folder = str(tmp_path / "saved")
    (first,) = run_ranks(train_and_save, 1, settings, steps=STEPS, folder=folder)
    (second,) = run_ranks(load_and_train, 1, settings, samples=STEPS[-1], folder=folder)
    (weights, moments), (weights_again, moments_again) = first["saved"], second["saved"]
    assert weights == weights_again and first["is_pinned"]
    assert moments == moments_again and any(moments["exp_avg"])
    assert second["metrics"]["train/loss"] == pytest.approx(
        first["metrics"]["train/loss"], rel=1e-2, abs=1e-3
    )
    assert second["metrics"]["train/grad_norm"] == pytest.approx(
        first["metrics"]["train/grad_norm"], rel=2e-2
    )


def test_training_with_adam_on_the_host_matches_adam_on_the_device(
    folders, tmp_path, device
) -> None:
    metrics = []
    for offload in (False, True):
        settings = rank_config(
            str(folders["qwen3"]),
            bf16=True,
            lr=1e-3,
            adam_eps=1e-4,
            optimizer_cpu_offload=offload,
            actor_num_threads=4,
        )
        (found,) = run_ranks(
            train_and_save, 1, settings, steps=STEPS, folder=str(tmp_path / f"{offload}")
        )
        metrics.append(found["metrics"])
    assert metrics[1]["train/loss"] == pytest.approx(metrics[0]["train/loss"], rel=2e-2, abs=5e-3)
    assert metrics[1]["train/grad_norm"] == pytest.approx(metrics[0]["train/grad_norm"], rel=5e-2)
