"""The settings of the actor: the leaves of the configuration it needs, nothing of the tree. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """Names and units are those of the configuration's leaves."""

    hf_checkpoint: str
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    lr: float = 1e-6
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    seed: int = 1234
    temperature: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    calculate_per_token_loss: bool = False
    distributed_timeout_minutes: int = 10
    update_weight_buffer_size: int = 512 * 1024**2
    num_threads: int = 1
