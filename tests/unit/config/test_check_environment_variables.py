"""Variables that NCCL would ignore or take for something harmful are refused early; recipes are
portable.
"""

from __future__ import annotations

import re

import pytest

from rlpost.cli.check_installed import check_installed
from rlpost.config.checks.environment_variables import allocator_problems, environment_problems
from rlpost.config.load import JOBS, files_of, load, read_toml
from rlpost.errors import ConfigError

FABRIC = re.compile(
    r"NCCL_(IB|NET|SOCKET|OOB|CROSS_NIC|PXN|P2P_PXN|GDR|TOPO|COLLNET|FASTRAK|GPUDIRECTTCPX).*|NCCL_P2P_LEVEL"
    r"|(NVSHMEM|UCX|GLOO|FI|OFI|RDMAV|TP|OMPI|MLX|IBV)_.*"
)
"""Variables that depend on a site's network or nodes: for cluster profiles, never for recipes."""

RECIPES = sorted((JOBS / "recipes").glob("*.toml"))
PROFILES = sorted((JOBS / "clusters").glob("*.toml"))


def problems(**variables: str) -> list[str]:
    return environment_problems(load([], {"cluster": {"environment": variables}}).config)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NCCL_IB_TIMEOUT", "32", ["1 to 31", "disable the timeout", "14 to 22"]),
        ("NCCL_IB_TIMEOUT", "0", ["1 to 31", "disable the timeout", "14 to 22"]),
        ("NCCL_IB_TIMEOUT", "22s", ["whole number"]),
        ("NCCL_IB_RETRY_CNT", "8", ["0 to 7"]),
        ("NCCL_IB_GID_INDEX", "auto", ["whole number"]),
        ("NCCL_IB_GID_INDEX", "-2", ["-1 to 255", "show_gids"]),
        ("NCCL_IB_TC", "256", ["0 to 255"]),
        ("NCCL_IB_SL", "16", ["0 to 15"]),
        ("NCCL_IB_QPS_PER_CONNECTION", "0", ["1 to 128"]),
        ("NCCL_NVLS_ENABLE", "3", ["0 to 2"]),
        ("NCCL_MIN_CTAS", "65", ["1 to 64"]),
        ("NCCL_P2P_LEVEL", "NVLINK", ["LOC, NVL, PIX"]),
        ("NCCL_P2P_LEVEL", "5", ["LOC, NVL, PIX"]),
        ("NCCL_NET_GDR_LEVEL", "NVL", ["LOC, PIX"]),
        ("GLOO_SOCKET_IFNAME", "=eth0", ["not patterns", "use eth0"]),
        ("TP_SOCKET_IFNAME", "^lo", ["not patterns"]),
    ],
)
def test_a_value_that_does_harm_is_named_with_what_to_give_instead(name, value, words):
    (problem,) = problems(**{name: value})
    assert f"--environment {name}={value}: " in problem
    assert all(word in problem for word in words), problem


def test_values_that_nccl_takes_pass():
    good = {
        "NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7", "NCCL_IB_GID_INDEX": "3", "NCCL_IB_TC": "160",
        "NCCL_P2P_LEVEL": "NVL", "NCCL_NET_GDR_LEVEL": "4", "NCCL_SOCKET_IFNAME": "^docker,lo",
        "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "INFO", "MY_OWN": "anything",
    }  # fmt: skip
    assert problems(**good) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_no_variable_of_a_site_s_fabric(path):
    names = read_toml(path)["cluster"].get("environment", {})
    assert not [name for name in names if FABRIC.fullmatch(name)], "these belong into jobs/clusters"


@pytest.mark.parametrize("path", [*RECIPES, *PROFILES], ids=lambda path: path.stem)
def test_what_recipes_and_profiles_set_passes(path):
    assert problems(**read_toml(path)["cluster"].get("environment", {})) == []


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.sbatch")), ids=lambda path: path.stem)
def test_no_script_carries_one_either(path):
    """They are made with jobs/clusters/site.toml, which leaves the fabric to detection."""
    exported = [word.partition("=")[0] for word in path.read_text().split() if "=" in word]
    assert not [name for name in exported if FABRIC.fullmatch(name.strip("\"'"))]


def test_the_fabric_is_told_from_what_belongs_to_a_model():
    fabric = "NCCL_IB_TIMEOUT NCCL_IB_HCA NCCL_NET_GDR_LEVEL NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME FI_PROVIDER UCX_TLS"
    assert all(
        FABRIC.fullmatch(name) for name in [*fabric.split(), "NCCL_P2P_LEVEL", "NCCL_PXN_DISABLE"]
    )
    generic = "NCCL_NVLS_ENABLE NCCL_DEBUG NCCL_CUMEM_ENABLE CUDA_DEVICE_MAX_CONNECTIONS TORCH_NCCL_BLOCKING_WAIT"
    assert not [name for name in generic.split() if FABRIC.fullmatch(name)]


def test_variables_of_recipe_profile_and_command_line_add_up(tmp_path):
    """A profile that names its HCAs takes nothing else from a recipe, and a word for debugging
    nothing from either.
    """
    site = tmp_path / "site.toml"
    site.write_text("[cluster.environment]\nNCCL_IB_HCA = 'mlx5'\nNCCL_IB_TC = '106'\n")
    files = files_of(JOBS / "recipes/glm45_355b.toml", str(site))
    given = {"cluster": {"environment": ["NCCL_DEBUG=INFO", "NCCL_IB_TC=160"]}}
    environment = load(files, given).config.cluster.environment
    assert environment["NCCL_NVLS_ENABLE"] == "0" and environment["NCCL_IB_HCA"] == "mlx5"
    assert environment["NCCL_DEBUG"] == "INFO" and environment["NCCL_IB_TC"] == "160"
    with pytest.raises(ConfigError, match="write NAME=VALUE"):
        load(files, {"cluster": {"environment": ["NCCL_DEBUG"]}})


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", [EXPANDABLE, f"max_split_size_mb:64, {EXPANDABLE}"])
@pytest.mark.parametrize(
    "cluster", [{"colocate": True}, {"offload_rollout": True}, {"colocate": False}]
)
def test_expandable_segments_are_refused_wherever_engines_release_memory(name, value, cluster):
    config = load([], {"cluster": cluster | {"environment": {name: value}}}).config
    found = environment_problems(config)
    assert found == allocator_problems(config, {name: value})
    if cluster == {"colocate": False}:
        assert found == []
    else:
        assert found[0].startswith(f"--environment {name}={value}: ")
        assert "use expandable_segments:False" in found[0]


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"colocate": True}, None),
        ({"colocate": True, "environment": {"NCCL_CUMEM_ENABLE": "1"}}, None),
        ({"colocate": False}, "use it with --colocate"),
        ({"colocate": True, "offload_train": False}, "use it with --colocate and --offload-train"),
        ({"colocate": True, "environment": {"NCCL_CUMEM_ENABLE": "0"}}, "leave the variable out"),
    ],
)
def test_buffers_of_nccl_are_offloaded_only_where_that_frees_memory(cluster, said):
    found = environment_problems(load([], {"cluster": cluster | {"offload_nccl": True}}).config)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert environment_problems(load([], {"cluster": cluster}).config) == []


def test_other_settings_of_the_allocator_are_accepted():
    config = load([], {"cluster": {"colocate": True}}).config
    assert allocator_problems(config, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}) == []


def test_the_environment_of_a_node_is_checked_too(monkeypatch):
    """An image or a profile may set the variable."""
    config = load([], {"cluster": {"colocate": True}}).config
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"):
        check_installed(config)
