"""The table [cluster] of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpost.config.groups.base import FilePath, Group, Positive, Variables


class ClusterConfig(Group):
    """Where the run lives: Slurm, nodes, GPUs and who gets them."""

    job_name: str = "rlpost"
    """Name of the job and, unless --run-folder says otherwise, of its run folder."""
    nodes: Positive | None = None
    """Nodes that the run uses; as many as trainer and engines need unless given."""
    spare_nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes allocated beyond those, to take the place of broken ones."""
    num_gpus_per_node: Positive = 8
    """GPUs of each node (without CUDA: logical slots, one process each)."""
    actor_num_nodes: Positive | None = None
    """Nodes that train; all of --nodes unless given."""
    actor_num_gpus_per_node: Positive = 8
    """GPUs on each of those nodes that train."""
    rollout_num_gpus: Positive = 1
    """GPUs that generate, in all; with --colocate those that train."""
    rollout_num_gpus_per_engine: Positive = 1
    """GPUs of one SGLang engine (its tensor-parallel size); an engine larger than a node takes whole nodes."""
    bind_cpus: bool = True
    """Run each rank of the trainer and each engine on the CPUs next to its GPUs, as far as the job has them."""
    colocate: bool = False
    """Engines on the GPUs of the trainer: they take turns, and whoever waits gives up its memory."""
    offload_train: bool | None = None
    """Keep weights, gradients and optimizer in host memory while engines generate; with --colocate unless given."""
    offload_rollout: bool | None = None
    """Let engines give up weights and cache while the trainer works; with --colocate unless given."""
    runs_dir: FilePath = "runs"
    """Folder on the shared file system that holds the run folders."""
    assets_dir: FilePath | None = None
    """Folder on the shared file system with models and data: what $RLPOST_ASSETS means at the beginning of a path;
    the variable of that name unless given."""
    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    reservation: str | None = None
    """Slurm reservation."""
    constraint: str | None = None
    """Features that the nodes must have, as Slurm writes them."""
    exclusive: bool = True
    """Ask for whole nodes with all their memory."""
    exclude: tuple[str, ...] = ()
    """Host lists to do without, for instance n[01-03]; those that broke during the run are added."""
    requeue: Literal["requeue", "chain", "never"] = "requeue"
    """How the run comes back: Slurm's requeue, a new job (where requeueing is forbidden), or not."""
    max_preemptions: Annotated[int, Field(ge=0)] = 100
    """How often it comes back after a preemption or its time limit."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """How often it comes back after a failure."""
    max_stalled_attempts: Positive = 3
    """Attempts in a row without a new checkpoint after which it does not come back."""
    python: str | None = None
    """Interpreter of the nodes; this one unless given, in a container its python3."""
    container: Literal["none", "auto", "pyxis", "enroot"] = "none"
    """What the agents run in; auto: RLPOST_CONTAINER, or detected by the job: pyxis, enroot or none."""
    container_image: str | None = None
    """Absolute path of a .sqsh file, or a name in a registry, imported once with enroot; may be $RLPOST_IMAGE."""
    container_mounts: tuple[str, ...] = ()
    """SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro; run folder and code are mounted anyway."""
    image_cache: FilePath | None = None
    """Folder for imported images; $RLPOST_IMAGE_CACHE or RUNS_DIR/images unless given."""
    environment: Variables = Field(default={})
    """Variables NAME=VALUE of agents, driver and workers, also in a container. No secrets: they stand in the script."""
    setup_commands: tuple[str, ...] = ()
    """Lines of shell that each node runs before its agent, in the container."""
    time: str = "04:00:00"
    """Time limit of one attempt, as Slurm writes it."""
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How this site asks Slurm for GPUs."""
    signal_lead_s: Positive = 120
    """Seconds before the time limit at which Slurm warns the job, and at which it warns itself where Slurm does not;
    also the grace period that a preempted job counts on where it cannot ask Slurm."""
    socket_ifname: str | None = None
    """Network interface for Ray, GLOO and NCCL; found by itself unless given."""
    bringup_deadline_s: Positive = 600
    """Seconds until every node has joined and every engine answers, or the attempt fails and names who is missing."""
    distributed_timeout_minutes: Positive = 10
    """Minutes after which a collective of the trainer counts as hung."""
    preflight_bandwidth_gbps: Annotated[float, Field(gt=0)] | None = None
    """GB/s of all-reduce that every node needs with a neighbour, measured before the run; not measured unless given."""
    ray_object_store_memory: Positive | None = None
    """Bytes of shared memory for Ray's object store on each node; Ray's own choice unless given."""
    ray_dashboard: bool = False
    """Run Ray's dashboard on the head's loopback; ``rlpost tunnel`` prints the way to it."""
    ray_dashboard_host: str = "127.0.0.1"
    """Address of the head at which it listens instead, for sites where others may reach it; it asks for the token."""
