"""The row of training and serving without a GPU."""

from rlpost.config.extensions import Extension

EXTENSION = Extension(
    name="on_cpu",
    trainer_without_gpus="rlpost.extensions.on_cpu.megatron:install",
    engine_without_gpus="rlpost.extensions.on_cpu.engine:prepare_engine",
    moved={
        "rlpost.engines.cpu_memory": "rlpost.extensions.on_cpu.engine_memory",
        "rlpost.trainer.megatron_on_cpu": "rlpost.extensions.on_cpu.megatron",
    },
)
