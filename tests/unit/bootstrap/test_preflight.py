"""Invariant: what cannot be read is never held against a host; what is wrong is named with what to do about it."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from bootstrap.preflight import (
    GIB,
    UNLIMITED,
    Check,
    Gpu,
    HostFacts,
    Preflight,
    Seen,
    Wanted,
    check_host,
    level_of,
    mount_of,
    parse_gpus,
    visible_gpus,
)

WANTED = Wanted(num_gpus=8, object_store_memory=2 * GIB)
GPUS = tuple(Gpu(f"GPU-{index}", 3, 0, False) for index in range(8))
FIT = HostFacts(
    gpus=GPUS,
    num_gpus_by_slurm=8,
    num_rdma_devices=8,
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
SEEN = Seen(skew_s=0.1, head_ip="10.0.0.1", canary_seen=True)


def test_a_fit_host_is_fit() -> None:
    assert level_of(check_host(FIT, WANTED, SEEN)) == "OK"


def test_nothing_known_is_nothing_wrong() -> None:
    assert level_of(check_host(HostFacts(head_ips=("10.0.0.1",)), WANTED)) == "OK"


@pytest.mark.parametrize(
    ("change", "name", "level", "words"),
    [
        ({"gpus": GPUS[:7]}, "gpus", "EXCLUDE_NODE", "7 by nvidia-smi, 8 asked for"),
        ({"gpus": ()}, "gpus", "EXCLUDE_NODE", "0 by nvidia-smi"),
        ({"num_gpus_by_slurm": 4}, "gpus", "EXCLUDE_NODE", "4 by Slurm, 8 asked for"),
        ({"gpus": (replace(GPUS[0], used_mib=30_000), *GPUS[1:])}, "gpu-health", "EXCLUDE_NODE", "GPU-0 has 30000 MiB"),
        ({"gpus": (replace(GPUS[0], ecc_uncorrected=2), *GPUS[1:])}, "gpu-health", "EXCLUDE_NODE", "reset it"),
        ({"gpus": (replace(GPUS[0], remap_pending=True), *GPUS[1:])}, "gpu-health", "EXCLUDE_NODE", "remap"),
        ({"memlock": 8 << 20}, "memlock", "EXCLUDE_NODE", "LimitMEMLOCK=infinity"),
        ({"nofile": 20_000}, "nofile", "WARN", "65535 wanted"),
        ({"nofile": 1024}, "nofile", "EXCLUDE_NODE", "ulimit -n"),
        ({"shm_free": 64 << 20}, "shm", "EXCLUDE_NODE", "2.00 needed"),
        ({"shm_free": 64 << 20, "gpus": None}, "shm", "WARN", "2.00 needed"),
        ({"temp_fs": "nfs4"}, "temp-dir", "EXCLUDE_NODE", "/tmp is on nfs4"),
        ({"temp_free": 0}, "temp-dir", "EXCLUDE_NODE", "0.00 GiB free in /tmp"),
        ({"temp_free": 5 * GIB}, "temp-dir", "WARN", "5.00 GiB free"),
        ({"taken_ports": (12004,)}, "ports", "EXCLUDE_NODE", "12004 of the job's block"),
        ({"folder_error": "Read-only file system"}, "folder", "EXCLUDE_NODE", "Read-only file system"),
        ({"rename_ms": 2500.0}, "folder", "WARN", "2500.0 ms"),
        ({"head_ips": ("127.0.1.1",)}, "names", "WARN", "leads to 127.0.1.1, the head is at 10.0.0.1"),
        ({"head_ips": ()}, "names", "WARN", "does not resolve"),
        ({"head_ips": None}, "names", "WARN", "in 2 s"),
        ({"problem": "no such interface"}, "agent", "EXCLUDE_NODE", "no such interface"),
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
    [(Seen(skew_s=-9.0), "clock", "WARN"), (Seen(canary_seen=False), "folder", "EXCLUDE_NODE")],
)
def test_what_only_the_head_can_see(seen: Seen, name: str, level: str) -> None:
    (bad,) = [check for check in check_host(FIT, WANTED, seen) if check.level != "OK"]
    assert (bad.name, bad.level) == (name, level)


def test_locked_memory_is_nobodys_concern_without_rdma() -> None:
    assert level_of(check_host(replace(FIT, num_rdma_devices=0, memlock=8192), WANTED, SEEN)) == "OK"


def test_facts_survive_the_way_to_the_head() -> None:
    facts = replace(FIT, taken_ports=(1, 2), gpus=(replace(GPUS[0], used_mib=None),))
    assert HostFacts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


def test_what_fails_on_every_host_is_a_matter_of_configuration() -> None:
    few = check_host(replace(FIT, gpus=GPUS[:4]), WANTED, SEEN)
    preflight = Preflight.of({"n1": few, "n2": few}, {})
    assert preflight.fatal == "on every host: gpus: 4 by nvidia-smi, 8 asked for"
    assert preflight.unfit == {}
    one_fit = Preflight.of({"n1": few, "n2": check_host(FIT, WANTED, SEEN)}, {})
    assert one_fit.fatal is None and one_fit.unfit == {"n1": "gpus: 4 by nvidia-smi, 8 asked for"}


def test_one_host_alone_is_never_a_matter_of_configuration() -> None:
    preflight = Preflight.of({"n1": check_host(replace(FIT, gpus=()), WANTED, SEEN)}, {})
    assert preflight.fatal is None and list(preflight.unfit) == ["n1"]


def test_different_failures_on_every_host_are_not_one_of_configuration() -> None:
    preflight = Preflight.of(
        {
            "n1": check_host(replace(FIT, gpus=()), WANTED, SEEN),
            "n2": check_host(replace(FIT, temp_free=0), WANTED, SEEN),
        },
        {},
    )
    assert preflight.fatal is None and len(preflight.unfit) == 2


def test_the_host_whose_run_folder_is_mounted_differently_is_named() -> None:
    fit = check_host(FIT, WANTED, SEEN)
    preflight = Preflight.of(dict.fromkeys(("n1", "n2", "n3"), fit), {"n1": "nfs4", "n2": "ext4", "n3": "nfs4"})
    assert "n2 WARN mounts: run folder on ext4, elsewhere on nfs4" in preflight.table()


def test_the_table_has_a_row_a_host_a_column_a_check_and_every_remark() -> None:
    """Read back: the columns stand where the head line says."""
    bad = check_host(replace(FIT, temp_free=0, nofile=20_000), WANTED, SEEN)
    preflight = Preflight.of({"node-with-a-long-name": check_host(FIT, WANTED, SEEN), "n2": bad}, {})
    head, *rows = preflight.table().splitlines()
    assert rows[0].split() == ["node-with-a-long-name"] + ["ok"] * 10
    assert rows[1][head.index("temp-dir")] == "X" and rows[1][head.index("nofile")] == "-"
    assert [row.split(":")[0] for row in rows[2:]] == ["n2 WARN nofile", "n2 EXCLUDE_NODE temp-dir"]


def test_the_worst_level_counts() -> None:
    order = ("OK", "WARN", "EXCLUDE_NODE", "FATAL_CONFIG")
    for pair in itertools.product(order, repeat=2):
        worst = max(pair, key=order.index)
        assert level_of([Check("c", level, "") for level in pair]) == worst


def test_what_nvidia_smi_prints() -> None:
    """Format of ``--format=csv,noheader,nounits``: a card without ECC says [N/A]."""
    listing = "GPU-aa, 12, 0\nGPU-bb, 40000, [N/A]\n"
    remapped = "GPU-aa, No\nGPU-bb, Yes\n"
    assert parse_gpus(listing, remapped) == (Gpu("GPU-aa", 12, 0, False), Gpu("GPU-bb", 40_000, None, True))
    assert parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "") == ()


@pytest.mark.parametrize(
    ("variable", "seen"),
    [(None, "abcd"), ("", "abcd"), ("NoDevFiles", "abcd"), ("2,0", "ca"), ("GPU-b", "b"), ("7", "abcd")],
)
def test_only_the_jobs_own_gpus_are_looked_at(variable: str | None, seen: str) -> None:
    gpus = [Gpu(f"GPU-{letter}") for letter in "abcd"]
    assert visible_gpus(gpus, variable) == tuple(Gpu(f"GPU-{letter}") for letter in seen)


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /tmp xfs rw 0 0
server:/x /data/my\\040runs lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp", "xfs"),
        ("/tmp/r1.0", "xfs"),
        ("/tmpfoo", "ext4"),
        ("/home/me/runs", "nfs4"),
        ("/data/my runs/1", "lustre"),
    ],
)
def test_the_mount_that_holds_a_path(path: str, kind: str) -> None:
    assert mount_of(path, MOUNTS) == kind
