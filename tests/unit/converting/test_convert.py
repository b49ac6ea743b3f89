"""Where a converting process stands, and how layers are spread over the ranks."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from rlpost.config.load import JOBS, files_of, load
from rlpost.config.transformer_engine import needs_transformer_engine
from rlpost.durable.commit import checkpoint_name
from rlpost.extensions.converting.convert import (
    ConversionRank,
    _prepared,
    device_of,
    hf_to_torch_dist,
    place,
    spread,
    torch_dist_to_hf,
)
from tests.unit.cli.projects import make_project
from tests.unit.jobs.assets import make_assets


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A conversion sets the level of the log and filters warnings, of the whole process."""
    logger = logging.getLogger("rlpost")
    level = logger.level
    with warnings.catch_warnings():
        yield
    logger.setLevel(level)


def test_torchrun_says_where_a_process_stands():
    environ = {
        "RANK": "5",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29400",
    }
    assert place(environ | {"SLURM_PROCID": "0"}) == ConversionRank(5, 16, 1, "n1", 29400)


def test_srun_says_it_as_well_and_all_meet_at_the_first_node():
    environ = {
        "SLURM_PROCID": "9",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "1234567",
    }
    assert place(environ) == ConversionRank(9, 16, 1, "gpu07", 24567)
    assert place(environ | {"MASTER_ADDR": "10.0.0.7"}).master_addr == "10.0.0.7"


def test_a_process_of_its_own_is_alone():
    alone = place({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert (alone.rank, alone.world_size, alone.master_addr) == (0, 1, "127.0.0.1")


def test_each_process_of_a_node_has_a_gpu_of_its_own_unless_its_launcher_chose_one():
    assert [device_of({}, local) for local in (0, 3)] == ["0", "3"]
    assert device_of({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2) == "6"
    assert device_of({"CUDA_VISIBLE_DEVICES": "6"}, 2) == "6"
    assert device_of({"CUDA_VISIBLE_DEVICES": ""}, 2) == ""


@pytest.mark.parametrize("num_layers", [1, 2, 4, 36, 46, 61, 92])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 16, 32])
def test_layers_are_spread_over_as_many_ranks_as_have_work(num_layers, num_ranks):
    sizes = spread(num_layers, num_ranks)
    stages = sizes["pipeline_model_parallel_size"]
    last = sizes.get("decoder_last_pipeline_num_layers")
    assert num_ranks % stages == 0 and 1 <= stages <= num_layers
    if last is None:
        assert num_layers % stages == 0
    else:
        each, rest = divmod(num_layers - last, stages - 1)
        assert rest == 0 and 0 < last < each


def test_a_conversion_never_writes_over_what_is_there(tmp_path, capsys):
    """Not even when --output-dir is the model itself, whose weights and config.json have the same
    names.
    """
    model = make_project(tmp_path) / "model"
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    origin = ["--input-dir", str(tmp_path / checkpoint_name(20)), "--origin-hf-dir", str(model)]
    assert torch_dist_to_hf([*origin, "--output-dir", str(model)]) == 1
    assert f"--output-dir {model} is there and not empty" in capsys.readouterr().err
    assert hf_to_torch_dist(["--hf-checkpoint", str(model), "--save", str(model)]) == 1
    assert f"--save {model} is there and not empty" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_a_model_that_is_only_converted_misses_no_kernel(tmp_path, monkeypatch):
    """--model qwen3_30b_a3b asks for those of TransformerEngine, which a node that converts need
    not have.
    """
    monkeypatch.setenv("RLPOST_ASSETS", str(make_assets(tmp_path / "assets")))
    config = load(files_of(JOBS / "recipes/qwen3_30b_a3b.toml"), {}).config
    assert any(need.is_required for need in needs_transformer_engine(config))
    assert needs_transformer_engine(_prepared(config, None, 8)) == ()
