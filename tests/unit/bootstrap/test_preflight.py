"""Invariant: an unknown fact never excludes a host; a fault is named with its remedy."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from bootstrap.check_result import GIB, UNLIMITED, Check, level_of
from bootstrap.preflight.checks import check_bandwidth, check_host, compare_hosts
from bootstrap.preflight.gpus import Gpu, GpuReading
from bootstrap.preflight.table import (
    Hca,
    HeadObservations,
    HostFacts,
    Preflight,
    Requirements,
    SandboxOffer,
)
from common.jit_caches import mount_of

WANTED = Requirements(num_gpus=8, object_store_memory=2 * GIB)
GPUS = tuple(
    Gpu(
        f"GPU-{index}",
        3,
        0,
        remap_pending=False,
        remap_failed=False,
        recovery="none",
        num_nvlinks=18,
    )
    for index in range(8)
)
HCAS = tuple(Hca(f"mlx5_{index}", True, 400.0) for index in range(8))
FIT = HostFacts(
    gpu_reading=GpuReading(GPUS, "NVML"),
    num_gpus_by_slurm=8,
    hcas=HCAS,
    memlock=UNLIMITED,
    nofile=1 << 20,
    shm_free=64 * GIB,
    temp_path="/tmp",
    temp_fs="ext4",
    temp_free=100 * GIB,
    head_ips=("10.0.0.1",),
    folder_fs="nfs4",
    rename_ms=3.0,
    canary="c",
    clock=1.0,
)
SEEN = HeadObservations(skew_s=0.1, head_ip="10.0.0.1", canary_seen=True, via="10.0.0.2 (eth0)")


def gpus(
    first: Gpu | None = None, *, count: int = 8, error: str | None = None
) -> dict[str, object]:
    """A variant of ``FIT`` with as many GPUs, of which these are the first."""
    return {
        "gpu_reading": GpuReading(
            (*([first] if first else []), *GPUS[1 if first else 0 : count]), "NVML", error
        )
    }


def cuda(driver: str | None, supports: str | None, torch: str | None) -> dict[str, object]:
    """A variant of ``FIT``: the driver, its CUDA, and that of torch."""
    reading = GpuReading(GPUS, "NVML", driver=driver, cuda=supports)
    return {"gpu_reading": reading, "torch_cuda": torch}


def test_a_fit_host_is_fit() -> None:
    assert level_of(check_host(FIT, WANTED, SEEN)) == "OK"


@pytest.mark.parametrize(
    "change",
    [
        cuda("580.95.05", "13.0", "13.0"),
        cuda("590.44", "13.1", "13.0"),
        cuda("570.1", "12.8", "12.9"),  # minor versions of CUDA are compatible
        cuda(None, None, "13.0"),
        cuda("550.54.15", "12.4", None),
        cuda("580.95.05", "13.0", "") | {"num_gpus_by_slurm": None},  # the job asked for no GPU
        {"torch_cuda": "", "gpu_reading": GpuReading()},
    ],
)
def test_a_torch_that_the_driver_supports_and_what_is_unknown_are_fit(
    change: dict[str, object],
) -> None:
    facts = replace(FIT, **change)  # type: ignore[arg-type]
    assert level_of(check_host(facts, WANTED, SEEN)) == "OK"


def test_nothing_known_is_nothing_wrong() -> None:
    assert level_of(check_host(HostFacts(head_ips=("10.0.0.1",)), WANTED)) == "OK"


@pytest.mark.parametrize(
    ("offer", "level", "words"),
    [
        (SandboxOffer(cgroup="/c", has_enroot=True), "OK", "cgroup v2 /c; enroot"),
        (SandboxOffer(None, "/c"), "OK", "namespaces not tried; "),
        (SandboxOffer(no_cgroup="none"), "OK", "rlimits and measurement (none); no enroot"),
        (
            SandboxOffer("user namespaces: No space left on device", "/c"),
            "EXCLUDE_NODE",
            "user namespaces: No space left on device; needed are user namespaces "
            "(user.max_user_namespaces",
        ),
    ],
)
def test_what_a_host_offers_for_sandboxes_is_said_when_a_run_needs_it(
    offer: SandboxOffer, level: str, words: str
) -> None:
    facts = HostFacts.from_json(json.loads(json.dumps(asdict(replace(FIT, sandboxes=offer)))))
    (check,) = [each for each in check_host(facts, WANTED, SEEN) if each.name == "sandboxes"]
    assert check.level == level and words in check.found
    assert not [each for each in check_host(FIT, WANTED, SEEN) if each.name == "sandboxes"]


@pytest.mark.parametrize(
    ("change", "name", "level", "words"),
    [
        (gpus(count=7), "gpus", "EXCLUDE_NODE", "7 by NVML, 8 asked for"),
        (
            gpus(count=0, error="NVML does not start"),
            "gpus",
            "EXCLUDE_NODE",
            "8 asked for (NVML does not start)",
        ),
        ({"num_gpus_by_slurm": 4}, "gpus", "EXCLUDE_NODE", "4 by Slurm, 8 asked for"),
        (
            cuda("550.54.15", "12.4", "13.0"),
            "gpus",
            "EXCLUDE_NODE",
            "driver 550.54.15 supports CUDA 12.4, torch is built for CUDA 13.0 and sees no GPU "
            "with it: install driver 580 or newer",
        ),
        (cuda("580.95.05", "13.0", ""), "gpus", "FATAL_CONFIG", "a torch for the CPU"),
        (
            gpus(replace(GPUS[0], used_mib=30_000)),
            "gpu-health",
            "EXCLUDE_NODE",
            "GPU-0 has 30000 MiB",
        ),
        (
            gpus(replace(GPUS[0], recovery=None, ecc_uncorrected=2)),
            "gpu-health",
            "EXCLUDE_NODE",
            "reset it",
        ),
        # the driver says it is fit
        (
            gpus(replace(GPUS[0], ecc_uncorrected=2)),
            "gpu-health",
            "WARN",
            "2 uncorrected",
        ),
        (gpus(replace(GPUS[0], recovery="reboot")), "gpu-health", "EXCLUDE_NODE", "needs a reboot"),
        (gpus(replace(GPUS[0], remap_pending=True)), "gpu-health", "WARN", "remap"),
        (gpus(replace(GPUS[0], remap_failed=True)), "gpu-health", "EXCLUDE_NODE", "replace it"),
        (gpus(replace(GPUS[0], xids=(13, 79))), "gpu-health", "WARN", "had Xid 79 within"),
        (gpus(replace(GPUS[0], num_nvlinks=17)), "nvlink", "WARN", "GPU-0 has 17 of 18 NVLinks up"),
        (gpus(replace(GPUS[0], num_nvlinks=0)), "nvlink", "EXCLUDE_NODE", "GPU-0 has 0 of 18"),
        (
            gpus(replace(GPUS[0], fabric="in progress")),
            "nvlink",
            "EXCLUDE_NODE",
            "nvidia-fabricmanager",
        ),
        (
            {"hcas": (replace(HCAS[0], is_active=False),)},
            "hcas",
            "WARN",
            "no port is active: mlx5_0",
        ),
        ({"missing_paths": ("/data/model",)}, "mounts", "EXCLUDE_NODE", "/data/model not there"),
        ({"memlock": 8 << 20}, "memlock", "EXCLUDE_NODE", "LimitMEMLOCK=infinity"),
        ({"limits": {"CPU": 600, "NPROC": 63_000}}, "limits", "WARN", "LimitCPU=infinity"),
        ({"limits": {"NPROC": 4096}}, "limits", "WARN", "4096 processes and threads"),
        ({"hcas": (replace(HCAS[0], is_open=False), *HCAS[1:])}, "hcas", "WARN", "mlx5_0 cannot"),
        (
            {"tmpdir": "/scratch/" + 80 * "x"},
            "temp-dir",
            "WARN",
            "too long for the names of sockets",
        ),
        ({"nofile": 20_000}, "nofile", "WARN", "65535 wanted"),
        ({"nofile": 1024}, "nofile", "EXCLUDE_NODE", "ulimit -n"),
        ({"shm_free": 64 << 20}, "shm", "EXCLUDE_NODE", "2.00 needed"),
        ({"shm_free": 64 << 20, "gpu_reading": GpuReading()}, "shm", "WARN", "2.00 needed"),
        ({"temp_fs": "nfs4"}, "temp-dir", "EXCLUDE_NODE", "/tmp is on nfs4"),
        ({"temp_free": 0}, "temp-dir", "EXCLUDE_NODE", "0.00 GiB free in /tmp"),
        ({"temp_free": 5 * GIB}, "temp-dir", "WARN", "5.00 GiB free"),
        ({"taken_ports": (12004,)}, "ports", "EXCLUDE_NODE", "12004 of the job's block"),
        (
            {"folder_error": "Read-only file system"},
            "folder",
            "EXCLUDE_NODE",
            "Read-only file system",
        ),
        ({"rename_ms": 2500.0}, "folder", "WARN", "2500.0 ms"),
        (
            {"head_ips": ("127.0.1.1",)},
            "names",
            "WARN",
            "leads to 127.0.1.1, the head is at 10.0.0.1",
        ),
        ({"head_ips": ()}, "names", "WARN", "does not resolve"),
        ({"head_ips": None}, "names", "WARN", "in 2 s"),
        (
            {"network_conflicts": ("NCCL_IB_GID_INDEX=3 is set; this host shows 1",)},
            "network",
            "WARN",
            "host shows 1",
        ),
        ({"problem": "no such interface"}, "reach", "EXCLUDE_NODE", "no such interface"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_else(
    change: Mapping[str, object], name: str, level: str, words: str
) -> None:
    checks = check_host(replace(FIT, **change), WANTED, SEEN)
    (bad,) = [check for check in checks if check.level != "OK"]
    assert (bad.name, bad.level) == (name, level)
    assert words in bad.found


@pytest.mark.parametrize(
    ("seen", "name", "level"),
    [
        (HeadObservations(skew_s=-9.0), "clock", "WARN"),
        (HeadObservations(canary_seen=False), "folder", "EXCLUDE_NODE"),
    ],
)
def test_what_only_the_head_can_see(seen: HeadObservations, name: str, level: str) -> None:
    (bad,) = [check for check in check_host(FIT, WANTED, seen) if check.level != "OK"]
    assert (bad.name, bad.level) == (name, level)


def test_locked_memory_is_nobodys_concern_without_rdma() -> None:
    assert level_of(check_host(replace(FIT, hcas=(), memlock=8192), WANTED, SEEN)) == "OK"


def test_facts_survive_the_way_to_the_head() -> None:
    facts = replace(
        FIT,
        taken_ports=(1, 2),
        network_conflicts=("a",),
        **gpus(replace(GPUS[0], used_mib=None, xids=(79,))),
    )
    assert HostFacts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


def test_what_fails_on_every_host_is_a_matter_of_configuration() -> None:
    few = check_host(replace(FIT, **gpus(count=4)), WANTED, SEEN)
    preflight = Preflight.of({"n1": few, "n2": few})
    assert preflight.fatal == "on every host (n1, n2): gpus: 4 by NVML, 8 asked for"
    assert preflight.unfit == {}
    one_fit = Preflight.of({"n1": few, "n2": check_host(FIT, WANTED, SEEN)})
    assert one_fit.fatal is None and one_fit.unfit == {"n1": "gpus: 4 by NVML, 8 asked for"}


def test_one_host_alone_is_a_matter_of_configuration_only_if_a_path_is_missing() -> None:
    """A local disk of the login node; if other hosts are absent, they may have the path."""
    preflight = Preflight.of({"n1": check_host(replace(FIT, **gpus(count=0)), WANTED, SEEN)})
    assert preflight.fatal is None and list(preflight.unfit) == ["n1"]
    checks = {"n1": check_host(replace(FIT, missing_paths=("/tmp/model",)), WANTED, SEEN)}
    assert (Preflight.of(checks).fatal or "").startswith("on n1: mounts: /tmp/model not there")
    assert Preflight.of(checks, {"n2": "it did not join"}).fatal is None
    assert Preflight.of({**checks, "n2": check_host(FIT, WANTED, SEEN)}).fatal is None


def test_different_failures_on_every_host_are_not_one_of_configuration() -> None:
    preflight = Preflight.of(
        {
            "n1": check_host(replace(FIT, **gpus(count=0)), WANTED, SEEN),
            "n2": check_host(replace(FIT, temp_free=0), WANTED, SEEN),
        }
    )
    assert preflight.fatal is None and len(preflight.unfit) == 2


def test_a_host_that_is_absent_has_a_row_and_does_not_hide_what_the_others_share() -> None:
    few = check_host(replace(FIT, **gpus(count=4)), WANTED, SEEN)
    preflight = Preflight.of({"n1": few, "n2": few}, {"n3": "it did not join"})
    assert preflight.fatal is not None and preflight.unfit == {"n3": "reach: it did not join"}
    row = preflight.table().splitlines()[3].split()
    assert row[:3] == ["n3", "X", "?"]


@pytest.mark.parametrize(
    ("odd", "name", "level", "words"),
    [
        ({"folder_fs": "ext4"}, "mounts", "WARN", "run folder on ext4, elsewhere on nfs4"),
        (
            {"hcas": HCAS[:7]},
            "hcas",
            "WARN",
            "7 active of 400 Gb/s, elsewhere 8 active of 400 Gb/s",
        ),
        (
            {"hcas": (replace(HCAS[0], rate_gbps=200.0), *HCAS[1:])},
            "hcas",
            "WARN",
            "1 active of 200 Gb/s and 7 active",
        ),
        (
            {"hcas": (replace(HCAS[0], is_active=False),)},
            "hcas",
            "EXCLUDE_NODE",
            "no active port, elsewhere 8",
        ),
        ({"hcas": ()}, "hcas", "EXCLUDE_NODE", "no active port"),
    ],
)
def test_the_odd_host_among_several_is_named(
    odd: Mapping[str, object], name: str, level: str, words: str
) -> None:
    hosts = {"n1": FIT, "n2": replace(FIT, **odd), "n3": FIT}
    compared = compare_hosts(hosts)
    assert list(compared) == ["n2"]
    (check,) = compared["n2"]
    assert (check.name, check.level) == (name, level) and words in check.found
    merged = Preflight.of(
        {host: [*check_host(hosts[host], WANTED, SEEN), *compared.get(host, ())] for host in hosts}
    )
    assert f"n2 {level} {name}: " in merged.table()
    # the worst of a name counts
    assert len({one.name for one in merged.checks["n2"]}) == len(merged.checks["n2"])


def test_a_slow_node_is_named_by_its_figure_and_one_without_a_figure_by_its_error() -> None:
    found = check_bandwidth({"n1": 40.0, "n2": 3.0, "n3": "no route to host"}, 20.0)
    assert [found[host].level for host in ("n1", "n2", "n3")] == [
        "OK",
        "EXCLUDE_NODE",
        "EXCLUDE_NODE",
    ]
    assert "3.00 GB/s" in found["n2"].found and "20 wanted" in found["n2"].found
    assert "no route to host" in found["n3"].found


def test_the_table_has_a_row_a_host_a_column_a_check_and_every_remark() -> None:
    """Parse the table: cells are aligned with the header."""
    bad = check_host(replace(FIT, temp_free=0, nofile=20_000), WANTED, SEEN)
    preflight = Preflight.of({"node-with-a-long-name": check_host(FIT, WANTED, SEEN), "n2": bad})
    head, *rows = preflight.table().splitlines()
    assert rows[0].split() == ["node-with-a-long-name"] + ["ok"] * 22
    assert rows[1][head.index("temp-dir")] == "X" and rows[1][head.index("nofile")] == "-"
    assert [row.split(":")[0] for row in rows[2:]] == ["n2 WARN nofile", "n2 EXCLUDE_NODE temp-dir"]


def test_the_worst_level_counts() -> None:
    order = ("OK", "WARN", "EXCLUDE_NODE", "FATAL_CONFIG")
    for pair in itertools.product(order, repeat=2):
        worst = max(pair, key=order.index)
        assert level_of([Check("c", level, "") for level in pair]) == worst


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /tmp xfs rw 0 0
server:/x /data/my\\040runs lustre rw 0 0
server:/y /mnt/größe nfs4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp", "xfs"),
        ("/tmp/r1.0", "xfs"),
        ("/tmpfoo", "ext4"),
        ("/home/me/runs", "nfs4"),
        ("/data/my runs/1", "lustre"),
        ("/mnt/größe/runs", "nfs4"),
    ],
)
def test_the_mount_that_holds_a_path(path: str, kind: str) -> None:
    assert mount_of(path, MOUNTS) == kind


@pytest.mark.parametrize(
    ("mode", "share", "level"),
    [
        ("default", True, "OK"),
        ("exclusive-process", True, "EXCLUDE_NODE"),
        ("exclusive-thread", True, "EXCLUDE_NODE"),
        ("exclusive-process", False, "OK"),
        ("prohibited", False, "EXCLUDE_NODE"),
        (None, True, "OK"),
    ],
)
def test_a_gpu_that_one_process_may_use_is_unfit_where_several_share_it(mode, share, level) -> None:
    facts = replace(FIT, **gpus(replace(GPUS[0], compute_mode=mode)))
    found = check_host(facts, replace(WANTED, share_gpus=share), SEEN)
    (check,) = [each for each in found if each.name == "gpu-mode"]
    assert check.level == level == level_of(found)
    assert level == "OK" or check.found.endswith("nvidia-smi -c 0")


def test_a_gpu_in_mig_mode_is_unfit() -> None:
    """NVML counts the whole GPUs, so the check of their number passes."""
    facts = replace(FIT, **gpus(replace(GPUS[0], is_mig=True)))
    by_name = {each.name: each for each in check_host(facts, WANTED, SEEN)}
    assert by_name["gpus"].level == "OK" and by_name["gpu-mode"].level == "EXCLUDE_NODE"
    assert "MIG" in by_name["gpu-mode"].found


@pytest.mark.parametrize(
    ("ways", "hcas", "level", "words"),
    [
        (("nvidia_peermem",), HCAS, "OK", "nvidia_peermem"),
        (("DMA-BUF",), HCAS, "OK", "DMA-BUF"),
        ((), HCAS, "WARN", "modprobe nvidia_peermem"),
        ((), (), "OK", "not needed"),
        ((), (Hca("rdmap0", True, 400.0, needs_peer_memory=False),), "OK", "not needed"),
        (None, HCAS, "OK", "no NVIDIA driver"),
    ],
)
def test_rdma_without_access_to_gpu_memory_is_a_warning(ways, hcas, level, words) -> None:
    facts = replace(FIT, gpu_direct=ways, hcas=hcas)
    facts = HostFacts.from_json(json.loads(json.dumps(asdict(facts))))
    (check,) = [each for each in check_host(facts, WANTED, SEEN) if each.name == "gpu-direct"]
    assert check.level == level and words in check.found


@pytest.mark.parametrize(
    ("torch", "nvcc", "level", "words"),
    [
        ("13.0", "13.0", "OK", "nvcc 13.0"),
        ("13.0", "13.2", "OK", "nvcc 13.2"),
        ("13.0", "12.4", "WARN", "nvcc 12.4, torch is built for CUDA 13.0"),
        ("13.0", "", "WARN", "install the toolkit of CUDA 13.0, or set CUDA_HOME"),
        ("13.0", None, "OK", "not known"),
        ("", "", "OK", "not needed"),
    ],
)
def test_engines_compile_with_a_compiler_of_torch_s_cuda(
    torch: str, nvcc: str | None, level: str, words: str
) -> None:
    facts = replace(FIT, **cuda("580.95.05", "13.0", torch), nvcc=nvcc)  # type: ignore[arg-type]
    (check,) = [each for each in check_host(facts, WANTED, SEEN) if each.name == "compiler"]
    assert check.level == level and words in check.found
    if torch:
        (check,) = [
            each
            for each in check_host(replace(facts, launcher="no Python.h"), WANTED, SEEN)
            if each.name == "compiler"
        ]
        assert check.level == "FATAL_CONFIG" and "no Python.h; install gcc" in check.found


@pytest.mark.parametrize(
    ("problem", "level"), [(None, "OK"), ("", "OK"), ("libnccl-net.so: cannot open", "WARN")]
)
def test_a_libfabric_that_nccl_does_not_reach_is_named(problem: str | None, level: str) -> None:
    facts = replace(FIT, net_plugin=problem)
    (check,) = [each for each in check_host(facts, WANTED, SEEN) if each.name == "net_plugin"]
    assert check.level == level and (problem or "") in check.found


@pytest.mark.parametrize(
    ("preload", "share_gpus", "level", "words"),
    [
        (None, True, "OK", "not needed"),
        ("", True, "OK", "loads"),
        ("libcudart.so.13: cannot open", True, "FATAL_CONFIG", "cannot open; put the folder"),
        ("libcudart.so.13: cannot open", False, "WARN", "LD_LIBRARY_PATH"),
    ],
)
def test_the_library_that_engines_preload_has_loaded_on_the_node(
    preload: str | None, share_gpus: bool, level: str, words: str
) -> None:
    facts, asked = replace(FIT, preload=preload), replace(WANTED, share_gpus=share_gpus)
    (check,) = [each for each in check_host(facts, asked, SEEN) if each.name == "preload"]
    assert check.level == level and words in check.found
