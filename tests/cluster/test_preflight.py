"""Preflight on real Slurm: one table of hosts and checks; faults are found before Ray starts."""

from __future__ import annotations

import json
import sys

from tests.cluster.attempts import Attempt, on_node
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import REPOSITORY, Lab


def test_every_host_is_checked_and_the_table_is_printed_once(lab: Lab) -> None:
    attempt = Attempt(
        lab, "table", nodes="n01,n02,n03", run_if=on_node(2, "ulimit -n 5000"), stub_ray=True
    )
    attempt.wait_until_it_works()
    hosts = json.loads(attempt.log("preflight.json"))["hosts"]
    assert list(hosts) == ["n01", "n02", "n03"]
    assert all(found["level"] in ("OK", "WARN") for found in hosts.values())
    by_name = {check["name"]: check for check in hosts["n03"]["checks"]}
    assert by_name["gpus"] == {"name": "gpus", "level": "OK", "found": "2 by Slurm"}
    assert by_name["nofile"]["level"] == "WARN" and "5000 open files" in by_name["nofile"]["found"]
    assert by_name["reach"]["found"] == f"reached the head from {lab.ip('n03')} (eth0)"
    assert by_name["names"]["found"] == f"the head's name leads to {lab.ip('n01')}"
    assert attempt.log("agent-n01.log").count("host reach gpus") == 1
    assert not (attempt.folder / "canary").exists()
    attempt.stop()
    attempt.wait()
    attempt.end()


def test_more_gpus_than_any_node_has_is_a_configuration_error(lab: Lab) -> None:
    attempt = Attempt(lab, "gpus", options="--num-gpus 4", stub_ray=True)
    word, cause = attempt.wait()
    assert word == "config"
    assert "on every host (n01, n02): gpus: 2 by Slurm, 4 asked for" in cause
    assert attempt.excluded == []
    attempt.end()


def test_a_run_folder_that_is_not_shared_is_found_and_its_node_named(lab: Lab) -> None:
    """n02 sees a copy of the folder, including the secret, as with a stale image or a local disk."""
    copy = "mkdir -p /tmp/copy && cp {folder}/secret /tmp/copy/ && mount --bind /tmp/copy {folder}"
    folder = lab.shared / "notshared"
    attempt = Attempt(
        lab,
        "notshared",
        run_if="unshare --mount " + on_node(1, copy.format(folder=folder)),
        stub_ray=True,
    )
    word, cause = attempt.wait()
    assert word == "requeue"
    assert "n02: folder: what it writes into the run folder is not seen by the head" in cause
    assert attempt.excluded == ["n02"]
    attempt.end()


def test_a_path_that_one_node_does_not_see_is_named(lab: Lab) -> None:
    needed = lab.shared / "model"
    needed.mkdir()
    (needed / "config.json").write_text("{}")
    gone = on_node(1, f"mkdir -p /tmp/none && mount --bind /tmp/none {needed}")
    attempt = Attempt(
        lab,
        "path",
        run_if="unshare --mount " + gone,
        options=f"--needed-path {needed}/config.json",
        stub_ray=True,
    )
    word, cause = attempt.wait()
    assert word == "requeue" and f"n02: mounts: {needed}/config.json not there" in cause
    assert attempt.excluded == ["n02"]
    attempt.end()


def test_a_slow_node_is_named_and_a_spare_takes_its_place(lab: Lab) -> None:
    """With real gloo; the kernel limits n02 to 160 Mbit/s, which is 0.02 GB/s."""
    qdisc = ["dev", "eth0", "root"]
    limit = ["tbf", "rate", "160mbit", "burst", "256kbit", "latency", "50ms"]
    lab.run("n02", ["tc", "qdisc", "add", *qdisc, *limit])
    try:
        options = "--spare-nodes 1 --bandwidth-gbps 0.05"
        attempt = Attempt(lab, "bandwidth", nodes="n01,n02,n03", options=options, stub_ray=True)
        cluster = attempt.wait_until_it_works()
    finally:
        lab.run("n02", ["tc", "qdisc", "del", *qdisc])
    assert [node.host for node in cluster.nodes] == ["n01", "n03"]
    hosts = json.loads(attempt.log("preflight.json"))["hosts"]
    found = {
        host: check
        for host, row in hosts.items()
        for check in row["checks"]
        if check["name"] == "bandwidth"
    }
    print({host: check["found"] for host, check in found.items()})
    assert [found[host]["level"] for host in ("n01", "n02", "n03")] == ["OK", "EXCLUDE_NODE", "OK"]
    assert "0.0" in found["n02"]["found"] and "0.05 wanted" in found["n02"]["found"]
    attempt.stop()
    attempt.wait()
    attempt.end()


def test_the_doctor_runs_as_a_job_and_compares_the_nodes(lab: Lab) -> None:
    """One table from the first node; n02 has a lower limit than n01."""
    doctor = f"{sys.executable} -m bootstrap.doctor.node --num-gpus 2"
    limited = f"sh -c 'test $SLURM_NODEID = 0 || ulimit -n 5000; exec {doctor}'"
    script = f"#!/bin/bash\nsrun --ntasks-per-node=1 {limited}\n"
    wanted = ["-N2", "--gres=gpu:2", "-w", "n01,n02", "--output=doctor.txt", "--error=doctor.err"]
    job = sbatch(lab, "doctor.sh", script, *wanted, env={"PYTHONPATH": str(REPOSITORY)})
    until(lambda: job_info(lab, job).state.is_over, lab, "the doctor's report")
    report = (lab.shared / "doctor.txt").read_text()
    assert report.count("host reach gpus") == 1 and "n02 WARN nofile: 5000 open files" in report
    compared = report[report.index("host  interface") :].splitlines()
    assert [line.split()[:3] for line in compared[1:3]] == [
        [n, "eth0", lab.ip(n)] for n in ("n01", "n02")
    ]
    assert not list(lab.shared.glob(".doctor-*"))


def test_the_doctor_runs_on_one_node_alone(lab: Lab) -> None:
    script = f"#!/bin/bash\nsrun {sys.executable} -m bootstrap.doctor.node --num-gpus 3 --json\n"
    wanted = ["-N1", "--gres=gpu:2", "-w", "n02", "--output=doctor.json", "--error=doctor.err"]
    job = sbatch(lab, "doctor.sh", script, *wanted, env={"PYTHONPATH": str(REPOSITORY)})
    until(lambda: job_info(lab, job).state.is_over, lab, "the doctor's report")
    found = json.loads((lab.shared / "doctor.json").read_text())["hosts"]["n02"]
    assert found["level"] == "EXCLUDE_NODE"
    assert [check["found"] for check in found["checks"] if check["name"] == "gpus"] == [
        "2 by Slurm, 3 asked for"
    ]
