"""GPU memory of CUDA contexts and of NCCL's communicators. Pure.

Input: the layout, GPUs of a node, whether NVLink SHARP is on. Output: bytes of one rank. Nothing
here was measured by this project. Read in NCCL 2.30 (``src/init.cc``, ``src/transport/p2p.cc``,
``net.cc``, ``nvls.cc``, ``src/graph/paths.cc``): a connection receives into the buffers of three
protocols, rounded up to 2 MiB. Public measurements: NVIDIA/nccl#1685 (allocations of 10 MiB and 2
MiB for each pair and channel, 32 channels for each peer), sgl-project/sglang#30908 (576 MiB of a
communicator of 8 GPUs = 24 channels x 2 neighbours x 12 MiB). verl-project/verl#6408 frees 7 GB a
rank (dense) and 9.5 GB (experts) on 8 H100 at TP 2 x PP 2 x DP 2, more than these sums. What
--offload-nccl releases while engines generate is counted as held, because it was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.config.plan.shape import Layout, Shape
from rlpost.config.tree import Config

MIB = 2**20
CUDA_CONTEXT = 600 * 10**6
"""A CUDA context with cuBLAS's workspaces. nccl#1685: 1.06 GB with one communicator of 0.6 GB."""
LL_BYTES, LL128_BYTES, SIMPLE_BYTES = 512 * 1024, 4800 * 1024, 4 * MIB
"""NCCL's default buffers of a connection, for its three protocols."""
CONNECTION = 12 * MIB
"""One channel to a neighbour on NVLink: 10 MiB to receive, 2 MiB to send."""
NET_CONNECTION = 2 * (LL128_BYTES + SIMPLE_BYTES)
"""The same over the network with GPUDirect RDMA: both ends have buffers; those of LL are on the
host."""
CHANNELS, NET_CHANNELS, P2P_CHANNELS = 24, 4, 32
"""Of collectives within a node, of a NIC of 400 Gb/s, and of transfers between two GPUs."""
SHARED_NET_BUFFERS = 128 * MIB
"""Transfers over the network share these: 32 channels x 16 steps x 128 KiB, for each direction."""
NVLS_BYTES = 2 * MIB
"""NVLink SHARP: for each channel and rank of the node."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator that a training step uses.

    Attributes:
        name: the kind of parallelism.
        size: its ranks.
        stride: distance between adjacent ones, in ranks of the trainer.
        transfers: peers on the same node, at most, with which a rank exchanges tensors directly.
    """

    name: str
    size: int
    stride: int = 1
    transfers: int = 0

    def num_bytes(self, gpus_per_node: int, *, nvls: bool) -> int:
        """Bytes on a rank's GPU; ``nvls``: whether NVLink SHARP is on."""
        if self.size < 2:
            return 0
        neighbours = min(self.size - 1, 2)
        local = min(self.size, max(1, gpus_per_node // self.stride))
        total = NET_CHANNELS * neighbours * NET_CONNECTION
        if local > 1:
            total = CHANNELS * neighbours * CONNECTION
        if nvls and local > 2:
            total += CHANNELS * local * NVLS_BYTES
        if self.transfers:
            # with a peer on another node NCCL uses as many channels to each peer as to that one
            channels = P2P_CHANNELS if local == self.size else NET_CHANNELS
            total += channels * min(self.transfers, local - 1) * CONNECTION
            total += SHARED_NET_BUFFERS if local < self.size else 0
        return total


def communicators(layout: Layout, shape: Shape) -> tuple[Communicator, ...]:
    """The communicators that a rank of the last stage uses in a step, those of one rank included.

    Experts use separate communicators, also where their ranks are the same.
    """
    stage = layout.world // layout.pipeline
    step_communicators = [
        Communicator("world", layout.world),
        Communicator("gradient norm", layout.world),
        Communicator("tensor", layout.tensor),
        Communicator("context", layout.context, layout.tensor, transfers=2),
        Communicator("data with context", layout.data * layout.context, layout.tensor),
        Communicator("pipeline", layout.pipeline, stage, transfers=2),
    ]
    if shape.tied:
        ends = min(layout.pipeline, 2)
        step_communicators.append(
            Communicator("embedding", ends, (layout.pipeline - 1) * stage or 1)
        )
    if any(shape.sparse):
        experts = layout.expert_tensor * layout.expert
        step_communicators += [
            Communicator(
                "expert", layout.expert, layout.expert_tensor, transfers=layout.expert - 1
            ),
            Communicator("expert with tensor", experts),
            Communicator("expert data", stage // experts, experts),
            Communicator("tensor with data", stage),
        ]
    return tuple(step_communicators)


def trainer_context(config: Config, layout: Layout, shape: Shape) -> int:
    """Bytes that a trainer's rank keeps beside its tensors, from the first step on."""
    gpus, nvls = config.cluster.actor_num_gpus_per_node, _has_nvls(config)
    return CUDA_CONTEXT + sum(
        one.num_bytes(gpus, nvls=nvls) for one in communicators(layout, shape)
    )


def exchange_group(config: Config, layout: Layout) -> int:
    """Bytes of the group in which the ranks of a stage exchange slices for an export or a hash.

    It exists only then (``trainer.weights.whole_tensors``). Any rank may send to any other of its
    stage: nccl#1685 saw 3.28 GB more for such exchanges between 8 GPUs, of which these sums have
    2.8 GB, beside 0.6 GB of the communicator itself.
    """
    stage = layout.world // layout.pipeline
    one = Communicator("exchange", stage, transfers=stage - 1)
    return one.num_bytes(config.cluster.actor_num_gpus_per_node, nvls=_has_nvls(config))


def _has_nvls(config: Config) -> bool:
    return config.cluster.environment.get("NCCL_NVLS_ENABLE") != "0"


def idle_context(config: Config) -> int:
    """The same before the first step, when engines start and size their KV cache."""
    world = Communicator("world", config.actor_world_size)
    return CUDA_CONTEXT + world.num_bytes(config.cluster.actor_num_gpus_per_node, nvls=False)


def engine_context(config: Config, attention_gpus: int) -> int:
    """Bytes beside the weights on a GPU of an engine, when it sizes its KV cache.

    ``attention_gpus``: GPUs that share an attention replica. SGLang sets NCCL_NVLS_ENABLE=0.
    """
    cluster = config.cluster
    sizes = {cluster.rollout_num_gpus_per_engine, attention_gpus}
    return CUDA_CONTEXT + sum(
        Communicator("engine", size).num_bytes(cluster.num_gpus_per_node, nvls=False)
        for size in sizes
    )
