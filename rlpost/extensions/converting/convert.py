"""Convert weights: ``rlpost convert to-torch-dist``, ``to-hf`` or ``to-fp8``.

The same as tools/convert_hf_to_torch_dist.py, convert_torch_dist_to_hf.py and convert_hf_to_fp8.py
of a checkout.

Input: command-line arguments, and the rank variables of torchrun or srun; without them, the
conversion runs in a single process.
Output: a folder. If no parallel size is given, the layers are spread over all ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.files import write_first
from common.host_lists import expand
from common.jit_caches import jit_cache_environment
from common.modes import follow_umask
from common.units import counted
from rlpost.cli import command_line as command_line
from rlpost.config.plan.cards import capability_of
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.errors import ConfigError, RlpostError
from rlpost.models.fp8 import has_powers_of_two
from rlpost.trainer.model_description import read_description

FIRST_PORT, NUM_PORTS = 20_000, 10_000  # below the usual ephemeral port range
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True, slots=True)
class ConversionRank:
    """The rank of a process in a conversion, and the rendezvous address."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def place(environ: Mapping[str, str]) -> ConversionRank:
    """Read the rank from the variables of torchrun or srun; without them, rank 0 of 1."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return ConversionRank(
            int(environ["RANK"]),
            int(environ["WORLD_SIZE"]),
            int(environ.get("LOCAL_RANK", 0)),
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
        )
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        nodes = expand(environ["SLURM_STEP_NODELIST"])
        port = FIRST_PORT + int(environ["SLURM_JOB_ID"]) % NUM_PORTS
        return ConversionRank(
            int(environ["SLURM_PROCID"]),
            int(environ["SLURM_STEP_NUM_TASKS"]),
            int(environ["SLURM_LOCALID"]),
            environ.get("MASTER_ADDR", nodes[0]),
            int(environ.get("MASTER_PORT", port)),
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ConversionRank(0, 1, 0, "127.0.0.1", probe.getsockname()[1])


def store_port(environ: Mapping[str, str], master_port: int) -> int:
    """Return the port for the store of the ranks; torchrun's agent occupies the given one."""
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return master_port + 1 if has_agent else master_port


def conversion_secret(path: Path) -> str:
    """Return the secret of the ranks of one conversion, which the first of them writes.

    Raises ConfigError if the file cannot be written or belongs to another user.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_first(path, secrets.token_hex(32))
        status = path.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(f"{path} is open to others, and would be the secret; remove it")
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}, the secret of the ranks: {error}") from error


def device_of(environ: Mapping[str, str], local_rank: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for this process: its own GPU among the visible ones.

    If fewer GPUs are visible than ranks run on the node, the given value stays.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return str(local_rank)
    devices = [device for device in given.split(",") if device]
    return devices[local_rank] if local_rank < len(devices) else given


def spread(num_layers: int, num_ranks: int) -> dict[str, object]:
    """Return parallel sizes that spread the layers over as many ranks as possible.

    All pipeline stages have the same number of layers, except for a smaller last one.
    """
    for stages in range(num_ranks, 0, -1):
        each = -(-num_layers // stages)
        last = num_layers - each * (stages - 1)
        if num_ranks % stages == 0 and last > 0:
            uneven = {} if last == each else {"decoder_last_pipeline_num_layers": last}
            return {"pipeline_model_parallel_size": stages, **uneven}
    raise AssertionError("one stage always works")


def hf_to_torch_dist(arguments: Sequence[str]) -> int:
    """Write the weights of --hf-checkpoint as a torch_dist checkpoint to --save."""
    made = command_line.make_parser(
        "convert_hf_to_torch_dist.py", "Hugging Face weights to Megatron's torch_dist."
    )
    return _main(made, arguments)


def torch_dist_to_hf(arguments: Sequence[str]) -> int:
    """Write the checkpoint --input-dir as a Hugging Face folder to --output-dir.

    Tokenizer, configuration and untrained weights are copied from --origin-hf-dir.
    """
    parser = command_line.make_parser(
        "convert_torch_dist_to_hf.py", "Megatron's torch_dist to Hugging Face weights."
    )
    parser.add_argument(
        "--input-dir",
        required=True,
        help="torch_dist checkpoint, such as RUN/checkpoints/iter_0000020",
    )
    parser.add_argument("--output-dir", required=True, help="folder to write")
    parser.add_argument(
        "--origin-hf-dir",
        help="the same as --hf-checkpoint: configuration, tokenizer, what is not trained",
    )
    return _main(parser, arguments)


def hf_to_fp8(arguments: Sequence[str]) -> int:
    """Write the weights of --hf-checkpoint in FP8 blocks to --save, on the first rank alone.

    Scales follow the GPUs of --gpu-type; without it those of this machine.
    """
    parser = command_line.make_parser(
        "convert_hf_to_fp8.py", "Hugging Face weights in bfloat16 to FP8 blocks."
    )
    started, here = time.monotonic(), place(os.environ)
    if here.rank > 0:  # torchrun starts one for each GPU
        return 0
    _prepare_log(here)
    try:
        _, loaded = command_line.settings(parser, arguments)
        config = loaded.config
        folder = _target(argparse.Namespace(), config)
        os.environ["CUDA_VISIBLE_DEVICES"] = device_of(os.environ, here.local_rank)
        from rlpost.extensions.converting.fp8_folder import write_fp8_folder
        from rlpost.trainer import device  # imports torch

        capability = capability_of(config.cluster.gpu_type) or device.capability()
        write_fp8_folder(
            Path(config.checkpoint.hf_checkpoint),
            Path(folder),
            has_powers_of_two=has_powers_of_two(capability),
        )
        follow_umask(Path(folder))  # safetensors writes files for their owner alone
    except RlpostError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{folder}: written in {time.monotonic() - started:.0f} s")
    return 0


def _prepare_log(here: ConversionRank) -> None:
    """Log progress of the first rank, without Megatron's warnings of each optional package."""
    warnings.simplefilter("ignore", UserWarning)
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about calls of Megatron
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("rlpost").setLevel(logging.INFO if here.rank == 0 else logging.ERROR)


def _require_empty(flag: str, folder: str) -> str:
    """Return the output folder. Raises ConfigError when it is not empty.

    A conversion never overwrites a folder, because it may be the model that is converted.
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(
            f"{flag} {folder} is there and not empty; name another folder, or remove it first"
        )
    return folder


def _target(namespace: argparse.Namespace, config: Config) -> str:
    """Return the folder to write, which is empty. Raises ConfigError."""
    if "output_dir" in namespace:
        return _require_empty("--output-dir", str(namespace.output_dir))
    if config.checkpoint.save is None:
        raise ConfigError("--save is not given; give the folder to write")
    return _require_empty("--save", config.checkpoint.save)


def _main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Parse the arguments, build the model, convert its weights and print the duration.

    Every rank checks the folder before the rendezvous, so all have checked it before any writes.
    """
    started, here = time.monotonic(), place(os.environ)
    _prepare_log(here)
    try:
        namespace, loaded = command_line.settings(parser, arguments)
        config = _prepared(
            loaded.config, getattr(namespace, "origin_hf_dir", None), here.world_size
        )
        folder = _target(namespace, config)
        os.environ["CUDA_VISIBLE_DEVICES"] = device_of(os.environ, here.local_rank)
        os.environ.update(jit_cache_environment(os.environ))
        from rlpost.extensions.converting.conversion import (  # imports torch and Megatron
            Converter,
            with_parts_of,
        )
        from rlpost.trainer.parallel import Rendezvous

        secret_file = Path(f"{folder}.secret")
        secret = conversion_secret(secret_file) if here.world_size > 1 else ""
        port = store_port(os.environ, here.master_port)
        meeting = Rendezvous(here.rank, here.world_size, here.master_addr, port, secret)
        source = getattr(namespace, "input_dir", config.checkpoint.hf_checkpoint)
        converter = Converter(with_parts_of(config, source), meeting)
        try:
            if "output_dir" in namespace:
                converter.from_torch_dist(source)
                converter.to_hugging_face(folder)
            else:
                converter.from_hugging_face(source)
                converter.to_torch_dist(folder)
        finally:
            converter.close()
            if here.rank == 0:
                secret_file.unlink(missing_ok=True)
        if here.rank == 0:
            follow_umask(Path(folder))  # safetensors writes files for their owner alone
    except RlpostError as error:
        print(error, file=sys.stderr)
        return 1
    if here.rank == 0:
        print(
            f"{folder}: written in {time.monotonic() - started:.0f} s by {counted(here.world_size, 'rank')}"
        )
    return 0


NO_KERNELS = {"moe_grouped_gemm": False, "moe_permute_fusion": False, "no_rope_fusion": True}
"""Settings of a model that is only converted: nothing is computed, so no kernels are needed."""


def _prepared(config: Config, origin: str | None, num_ranks: int) -> Config:
    """Fill in settings that are not given: precision from config.json, layers over all ranks."""
    folder = origin or config.checkpoint.hf_checkpoint
    hf = read_description(folder, config.checkpoint).hf_config
    update: dict[str, object] = {"hf_checkpoint": folder, **NO_KERNELS}
    if config.perf.bf16 is None:
        update["bf16"] = (hf.get("dtype") or hf.get("torch_dtype")) == "bfloat16"
    if all(getattr(config.perf, name) == 1 for name in SIZES):
        update |= spread(hf["num_hidden_layers"], num_ranks)
    return with_values(config, **update)


DIRECTIONS = {
    "to-torch-dist": hf_to_torch_dist,
    "to-hf": torch_dist_to_hf,
    "to-fp8": hf_to_fp8,
}
