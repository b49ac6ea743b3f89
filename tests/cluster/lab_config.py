"""Configuration files of the Slurm lab, as text. Pure.

Input: ``LabOptions`` and the lab's folder. Output: slurm.conf, gres.conf, cgroup.conf and hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.host_lists import expand

CONTROLLER = "ctl"
SUBNET = "10.77.0"
FIRST_NODE_HOST = 11
SLURMCTLD_PORT, SLURMD_PORT = 6817, 6818


@dataclass(frozen=True, slots=True)
class LabOptions:
    """What a test may choose about its cluster. Times in seconds.

    Attributes:
        cred_expire_s: a requeued job stays ineligible for one second longer; Slurm 22.05 accepts no
            less than 5.
        shared_cache_s: how long each node caches names (missing ones too) and attributes in the
            shared folder, as NFS clients do; with 0 all nodes see the same at all times.
        slurm: Debian release whose Slurm runs (``slurm_roots.RELEASES``); None: this machine's.
        blocks: host list of each block of topology/block, all of one size; Slurm 23.11 or later.
        settings: lines KEY=VALUE of slurm.conf, each in place of that of the same key; ``@BASE@`` is
            the lab's folder.
        files: further configuration files, (name, text).
        is_configless: nodes get their configuration from the controller alone.
    """

    num_gpus_per_node: int = 8
    grace_time_s: int = 10
    kill_wait_s: int = 5
    send_user_signal: bool = True
    proctrack: str = "linuxproc"
    num_cpus_per_node: int = 16
    cred_expire_s: int = 5
    slurmd_timeout_s: int = 20
    shared_cache_s: int = 0
    slurm: str | None = None
    blocks: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    is_configless: bool = False


def node_names(num_nodes: int) -> tuple[str, ...]:
    """``("n01", "n02", ...)``."""
    return tuple(f"n{i:02d}" for i in range(1, num_nodes + 1))


def address(name: str) -> str:
    """IPv4 address of the controller or of a node."""
    if name == CONTROLLER:
        return f"{SUBNET}.1"
    return f"{SUBNET}.{FIRST_NODE_HOST - 1 + int(name.removeprefix('n'))}"


def hosts(num_nodes: int) -> str:
    """/etc/hosts of the controller and of every node."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{address(name)} {name}" for name in (CONTROLLER, *node_names(num_nodes))]
    return "\n".join(lines) + "\n"


def slurm_conf(base: Path, num_nodes: int, options: LabOptions) -> str:
    """slurm.conf: three partitions; jobs of ``low`` are preempted by those of the other two, and
    requeued.

    The scheduler runs every second and after every submission, so that tests do not wait for it.
    MinJobAge keeps ended jobs visible to scontrol, because there is no accounting. ReturnToService
    accepts a node again after it was powered off.
    """
    user_signal = (
        "SlurmctldParameters=preempt_send_user_signal\n" if options.send_user_signal else ""
    )
    if options.blocks:
        user_signal += "TopologyPlugin=topology/block\n"
    low = "PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1"
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={name} NodeAddr={address(name)} CPUs={options.num_cpus_per_node} "
        f"RealMemory=64000 Gres=gpu:{options.num_gpus_per_node} State=UNKNOWN"
        for name in node_names(num_nodes)
    )
    text = f"""\
ClusterName=lab
SlurmctldHost={CONTROLLER}({address(CONTROLLER)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire={options.cred_expire_s}
CryptoType=crypto/munge
SlurmctldPort={SLURMCTLD_PORT}
SlurmdPort={SLURMD_PORT}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/{options.proctrack}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,preempt_youngest_first,requeue_setup_env_fail
{user_signal}PriorityType=priority/basic
MessageTimeout=10
SlurmctldTimeout=30
SlurmdTimeout={options.slurmd_timeout_s}
InactiveLimit=0
KillWait={options.kill_wait_s}
MinJobAge=3600
UnkillableStepTimeout=20
TreeWidth=64
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=5 PreemptMode=OFF
{low} PreemptMode=REQUEUE GraceTime={options.grace_time_s}
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
    keys = {line.partition("=")[0] for line in options.settings}
    kept = [line for line in text.splitlines() if line.partition("=")[0] not in keys]
    return "\n".join([*options.settings, *kept, ""]).replace("@BASE@", str(base))


def topology_conf(options: LabOptions) -> str:
    """topology.conf: ``blocks``, in two levels, so that Slurm may give a job several of them."""
    lines = [f"BlockName=b{index} Nodes={hosts}" for index, hosts in enumerate(options.blocks, 1)]
    size = len(expand(options.blocks[0]))
    return "\n".join([*lines, f"BlockSizes={size},{2 * size}"]) + "\n"


def gres_conf(base: Path, options: LabOptions) -> str:
    """gres.conf: device files in place of GPUs."""
    return f"AutoDetect=off\nName=gpu File={base}/dev/nvidia[0-{options.num_gpus_per_node - 1}]\n"


def cgroup_conf() -> str:
    """cgroup.conf; read only with ``proctrack="cgroup"``."""
    constrain = "".join(f"Constrain{what}=no\n" for what in ("Cores", "RAMSpace", "Devices"))
    return f"CgroupPlugin=cgroup/v1\nCgroupAutomount=yes\n{constrain}"
