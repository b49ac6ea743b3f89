"""The table [cluster] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from common.attempt import BRINGUP_DEADLINE_S, DRIVER_RESTARTS, SIGNAL_LEAD_S
from rlpost.config.groups.base import FilePath, Group, Positive, PositiveNumber, Variables


class ClusterConfig(Group):
    """Slurm resources, nodes, and the placement of trainer and engines on GPUs."""

    job_name: str = "rlpost"
    """Name of the Slurm job, and of its run folder unless --run-folder is given."""
    nodes: Positive | None = None
    """Nodes of the run. Default: as many as trainer and engines need."""
    spare_nodes: Annotated[int, Field(ge=0)] = 0
    """Extra nodes in the allocation that replace failed ones."""
    num_gpus_per_node: Positive = 8
    """GPUs per node (without CUDA: logical slots, one process each)."""
    actor_num_nodes: Positive | None = None
    """Nodes of the trainer. Default: all of --nodes."""
    actor_num_gpus_per_node: Positive = 8
    """GPUs of the trainer on each of its nodes."""
    rollout_num_gpus: Annotated[int, Field(ge=0)] = 1
    """Total GPUs for generation; with --colocate, the GPUs of the trainer. 0: all engines are in
    the fleet (--engines, --min-engines)."""
    rollout_num_gpus_per_engine: Positive = 1
    """GPUs of one SGLang engine (its tensor-parallel size). An engine larger than a node takes
    whole nodes."""
    bind_cpus: bool = True
    """Bind each trainer rank and each engine to the CPUs next to its GPUs, within the CPUs of the
    job."""
    colocate: bool = False
    """Run engines on the GPUs of the trainer. Training and generation alternate; the idle side
    offloads its GPU memory."""
    offload_train: bool | None = None
    """Offload weights, gradients and optimizer state to host memory while engines generate.
    Default: on with --colocate."""
    offload_nccl: bool = False
    """Release NCCL's buffers of trainer ranks as well while engines generate on their GPUs. Needs
    --colocate and NCCL 2.29.7 or newer; not tried on a GPU yet (docs/gpu.md)."""
    offload_rollout: bool | None = None
    """Release the engines' weights and KV cache while the trainer works. Default: on with
    --colocate."""
    runs_dir: FilePath = "runs"
    """Folder for the run folders, on the shared file system."""
    assets_dir: FilePath | None = None
    """Folder with models and data, on the shared file system; replaces $RLPOST_ASSETS at the start
    of a path. Default: the environment variable of that name."""
    gpu_hour_price: Annotated[float, Field(gt=0)] | None = None
    """Price of one GPU for one hour, a number without a currency. With it, `rlpost status`, `list`,
    `report` and `compare` show what the allocated GPU time cost."""
    node_mtbf_hours: Annotated[float, Field(gt=0)] = 6300.0
    """Mean time between failures of one node, in hours; the time of a run is this over its nodes.
    From it `rlpost plan` recommends --save-interval. Default: 419 interruptions in 54 days on 2048
    nodes of 8 GPUs (The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4)."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    reservation: str | None = None
    """Slurm reservation."""
    constraint: str | None = None
    """Node features to require, in Slurm's --constraint syntax."""
    segment: Positive | None = None
    """Place groups of this many nodes each within one block, on Slurm 23.11 or later with
    topology/block (racks of GB200 NVL72). It divides --nodes, spare nodes included."""
    exclusive: bool = True
    """Request whole nodes with all their memory."""
    exclude: tuple[str, ...] = ()
    """Host lists to exclude, for instance n[01-03]; nodes that fail during the run are added."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, --NAME or --NAME=VALUE as its manual page has them, for instance
    --licenses=site:8 or --gres=nvme:1. Not those that another setting has. Engines and sandboxes in
    other jobs get them too, but for requests for GPUs and --dependency."""
    requeue: Literal["requeue", "chain", "never"] = "requeue"
    """How the run restarts after an attempt ends: Slurm's requeue, a new job (where requeueing is
    forbidden), or never."""
    max_preemptions: Annotated[int, Field(ge=0)] = 100
    """Maximum restarts after a preemption or the time limit."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Maximum restarts after a failure."""
    max_trainer_recoveries: Annotated[int, Field(ge=0)] = 6
    """Times per hour that dead or hanging trainer ranks are started again within the attempt, while
    engines keep running (docs/preemption.md); beyond it the attempt ends as a failure. 0: never."""
    max_driver_restarts: Annotated[int, Field(ge=0)] = DRIVER_RESTARTS
    """Times per attempt that a driver that crashed is started again while Ray and engines keep
    running (docs/preemption.md); beyond it the attempt ends as a failure. 0: never."""
    trainer_standby: bool | None = None
    """Keep a process per trainer rank that has imported everything and takes over when ranks die.
    It costs about 1 GB of host memory per rank, no GPU memory, and at the start CPU time at low
    priority. Default: where ranks have GPUs."""
    max_stalled_attempts: Positive = 3
    """Consecutive attempts without a new checkpoint after which the run does not restart."""
    python: str | None = None
    """Python interpreter on the nodes. Default: the one that submits; in a container, its
    python3."""
    container: Literal["none", "auto", "pyxis", "enroot", "command"] = "none"
    """Container runtime of the agents. auto: RLPOST_CONTAINER, or what the job detects: pyxis,
    enroot or none. command: any other, by --container-command."""
    container_command: str = ""
    """Words before each command with --container command, for instance "apptainer exec --nv
    --bind={source}:{target}:{mode} {image}". A word with {source} and {target} is repeated for each
    mount (docs/containers.md)."""
    container_image: str | None = None
    """Absolute path of a .sqsh file, or an image in a registry that enroot imports once; may be
    $RLPOST_IMAGE. With --container command what that command takes."""
    container_mounts: tuple[str, ...] = ()
    """Extra mounts, SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro; the run folder and the code are
    always mounted."""
    image_cache: FilePath | None = None
    """Folder for imported images. Default: $RLPOST_IMAGE_CACHE or RUNS_DIR/images."""
    environment: Variables = Field(default={})
    """Environment variables NAME=VALUE for agents, driver and workers, also inside a container. Not
    for secrets: the values appear in the batch script."""
    setup_commands: tuple[str, ...] = ()
    """Shell lines that each node runs before its agent, inside the container."""
    time: str = "04:00:00"
    """Time limit of one attempt, in Slurm's --time syntax."""
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How to request GPUs at this site: --gres, --gpus-per-node, or not at all. With none, --sbatch
    may request them in another way."""
    gpu_type: str | None = None
    """Type of the GPUs in that request (--gres=gpu:TYPE:N), as `sinfo --format=%G` lists it: h100,
    or a MIG profile such as 1g.10gb. Default: any type."""
    signal_lead_s: Positive = SIGNAL_LEAD_S
    """Seconds before the time limit at which Slurm signals the job; the job signals itself where
    Slurm does not. Also the assumed grace period of a preemption where the job cannot query
    Slurm."""
    socket_ifname: str | None = None
    """Network interface for Ray, Gloo and NCCL. Default: detected."""
    bringup_deadline_s: Positive = BRINGUP_DEADLINE_S
    """Startup timeout in seconds: every node must join and every engine answer by then, else the
    attempt fails and names the missing ones."""
    distributed_timeout_minutes: Positive = 10
    """Timeout of the trainer's collectives, in minutes."""
    hang_factor: Annotated[float, Field(gt=1.0)] | None = 5.0
    """A training call hangs when it takes this many times the longest of its last 20 calls and no
    rank moves; the rank to blame is named and the ranks are started again (docs/troubleshooting.md). none:
    off."""
    hang_min_s: PositiveNumber = 30.0
    """Seconds before which no training call is judged to hang."""
    preflight_bandwidth_gbps: Annotated[float, Field(gt=0)] | None = None
    """Minimum all-reduce bandwidth in GB/s between each node and a neighbour, measured before the
    run. Not measured unless given."""
    ray_object_store_memory: Annotated[int, Field(ge=75 * 2**20)] | None = None
    """Bytes of shared memory for Ray's object store on each node. Default: Ray's."""
    ray_dashboard: bool = False
    """Run Ray's dashboard on the head node's loopback address; `rlpost tunnel` prints the SSH
    command to reach it."""
    ray_dashboard_host: str = "127.0.0.1"
    """Address on the head node that the dashboard binds instead, for sites where other machines may
    reach it; requests need the token."""
