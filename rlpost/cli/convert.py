"""Converting weights: tools/convert_hf_to_torch_dist.py and tools/convert_torch_dist_to_hf.py.

Input: the words of a command line, and the variables by which torchrun or srun tells a process its
place; without them it is alone.
Output: a folder. With no parallel size given the layers are spread over all ranks.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.host_lists import expand
from rlpost.actor.model_description import read_description
from rlpost.cli import command_line as command_line
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, RlpostError
from rlpost.orchestration.settings_of_actors import actor_settings

FIRST_PORT, NUM_PORTS = 20_000, 10_000  # below those that systems give to outgoing connections
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


@dataclass(frozen=True, slots=True)
class Rank:
    """Of a process among those of one conversion."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def place(environ: Mapping[str, str]) -> Rank:
    """What torchrun's variables say, or else srun's, or that the process is alone."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size, local = (int(environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return Rank(rank, size, local, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        nodes = expand(environ["SLURM_STEP_NODELIST"])
        port = FIRST_PORT + int(environ["SLURM_JOB_ID"]) % NUM_PORTS
        return Rank(
            int(environ["SLURM_PROCID"]),
            int(environ["SLURM_STEP_NUM_TASKS"]),
            int(environ["SLURM_LOCALID"]),
            environ.get("MASTER_ADDR", nodes[0]),
            int(environ.get("MASTER_PORT", port)),
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Rank(0, 1, 0, "127.0.0.1", probe.getsockname()[1])


def device_of(environ: Mapping[str, str], local_rank: int) -> str:
    """CUDA_VISIBLE_DEVICES of this process: one of those it may see, all of them for all processes of its node."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return str(local_rank)
    devices = [device for device in given.split(",") if device]
    return devices[local_rank] if local_rank < len(devices) else given


def spread(num_layers: int, num_ranks: int) -> dict[str, Any]:
    """Sizes that cut the layers over as many of the ranks as can be: stages of equal size and a smaller last one."""
    for stages in range(num_ranks, 0, -1):
        each = -(-num_layers // stages)
        last = num_layers - each * (stages - 1)
        if num_ranks % stages == 0 and last > 0:
            uneven = {} if last == each else {"decoder_last_pipeline_num_layers": last}
            return {"pipeline_model_parallel_size": stages, **uneven}
    raise AssertionError("one stage always works")


def hf_to_torch_dist(arguments: Sequence[str] | None = None) -> int:
    """--hf-checkpoint X --save Y: the weights of X as a torch_dist checkpoint in Y."""
    made = command_line.parser("convert_hf_to_torch_dist.py", "Hugging Face weights to Megatron's torch_dist.")

    def target(namespace: argparse.Namespace, config: Config) -> str:
        if config.checkpoint.save is None:
            raise ConfigError("--save is not given; give the folder to write")
        return _unused("--save", config.checkpoint.save)

    def convert(namespace: argparse.Namespace, config: Config, converter: Any, target: str) -> None:
        converter.from_hugging_face(config.checkpoint.hf_checkpoint)
        converter.to_torch_dist(target)

    return _main(made, arguments, target, convert)


def torch_dist_to_hf(arguments: Sequence[str] | None = None) -> int:
    """--input-dir X --output-dir Y --origin-hf-dir Z: the checkpoint X as a folder Y, with what else Z has."""
    made = command_line.parser("convert_torch_dist_to_hf.py", "Megatron's torch_dist to Hugging Face weights.")
    made.add_argument("--input-dir", required=True, help="torch_dist checkpoint, such as RUN/checkpoints/iter_0000020")
    made.add_argument("--output-dir", required=True, help="folder to write")
    made.add_argument(
        "--origin-hf-dir", help="the same as --hf-checkpoint: configuration, tokenizer, what is not trained"
    )

    def target(namespace: argparse.Namespace, config: Config) -> str:
        return _unused("--output-dir", str(namespace.output_dir))

    def convert(namespace: argparse.Namespace, config: Config, converter: Any, target: str) -> None:
        converter.from_torch_dist(namespace.input_dir)
        converter.to_hugging_face(target)

    return _main(made, arguments, target, convert)


def _unused(flag: str, folder: str) -> str:
    """The folder to write, which a conversion never writes over: it may be the model that is converted.

    Raises ConfigError when it is not empty.
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{flag} {folder} is there and not empty; name another folder, or remove it first")
    return folder


def _main(
    made: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    target: Callable[[argparse.Namespace, Config], str],
    convert: Callable[[argparse.Namespace, Config, Any, str], None],
) -> int:
    """Parse, build the model, ``convert`` into the folder that is the ``target``, and say how long it took.

    The folder is looked at by every rank before it joins the others, so by all before any writes.
    """
    started, here = time.monotonic(), place(os.environ)
    warnings.simplefilter("ignore", UserWarning)  # Megatron's, of every package that is not installed
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("rlpost").setLevel(logging.INFO if here.rank == 0 else logging.ERROR)
    try:
        namespace, loaded = command_line.settings(made, sys.argv[1:] if arguments is None else arguments)
        config = _prepared(loaded.config, getattr(namespace, "origin_hf_dir", None), here.world_size)
        folder = target(namespace, config)
        os.environ["CUDA_VISIBLE_DEVICES"] = device_of(os.environ, here.local_rank)
        from rlpost.actor.conversion import Converter, with_mtp_layer  # from here on: torch and Megatron
        from rlpost.actor.parallel import Rendezvous

        meeting = Rendezvous(here.rank, here.world_size, here.master_addr, here.master_port)
        source = getattr(namespace, "input_dir", config.checkpoint.hf_checkpoint)
        converter = Converter(with_mtp_layer(actor_settings(config), source), meeting)
        try:
            convert(namespace, config, converter, folder)
        finally:
            converter.close()
    except RlpostError as error:
        print(error, file=sys.stderr)
        return 1
    if here.rank == 0:
        print(f"{folder}: written in {time.monotonic() - started:.0f} s by {here.world_size} ranks")
    return 0


NO_KERNELS = {"moe_grouped_gemm": False, "moe_permute_fusion": False, "no_rope_fusion": True}
"""Settings of a model that is only converted: nothing is computed, so no kernel is missed."""


def _prepared(config: Config, origin: str | None, num_ranks: int) -> Config:
    """The settings with what is not given filled in: precision as in config.json, layers over all ranks."""
    checkpoint = config.checkpoint.model_copy(update={"hf_checkpoint": origin or config.checkpoint.hf_checkpoint})
    hf, perf = read_description(checkpoint.hf_checkpoint, config.model.model_dump()).hf_config, config.perf
    update: dict[str, Any] = {}
    if perf.bf16 is None:
        update["bf16"] = (hf.get("dtype") or hf.get("torch_dtype")) == "bfloat16"
    if all(getattr(perf, name) == 1 for name in SIZES):
        update |= spread(hf["num_hidden_layers"], num_ranks)
    model = config.model.model_copy(update=NO_KERNELS)
    return config.model_copy(update={"checkpoint": checkpoint, "perf": perf.model_copy(update=update), "model": model})
