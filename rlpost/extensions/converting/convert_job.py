"""``rlpost convert RECIPE``: submit the job that converts a recipe's weights.

``rlpost convert to-torch-dist``, ``to-hf`` and ``to-fp8`` convert in this process, as the job does.

Input: a recipe whose --ref-load ends in "_torch_dist", or with ``--to fp8`` whose --hf-checkpoint
ends in "-FP8"; a cluster profile, flags. Output: a job that writes that folder from the Hugging
Face folder of the same name without the suffix. ``make jobs`` renders the same job as
jobs/convert_NAME.sbatch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from common.run_folder import claim_folder
from rlpost.cli.job import job_spec
from rlpost.config.arguments import add_switch
from rlpost.config.tree import Config
from rlpost.config.wording import COMMAND_LINE, with_values
from rlpost.errors import ConfigError
from rlpost.models.fp8 import FOLDER
from slurm.errors import SlurmError
from slurm.render import render_conversion
from slurm.spec import JobSpec

CONVERTED = "_torch_dist"
TIME = "04:00:00"
CONVERSION_NODES = {"glm45_355b": 2, "glm46_355b": 2, "glm47_355b": 2, "qwen3_235b_a22b": 2}
"""16 GPUs of 80 GB, at most 45 GB of weights on each; the other models fit one node."""


@dataclass(frozen=True, slots=True)
class Target:
    """A folder to write, and the folder of weights that it is made of."""

    folder: str
    source: str
    direction: str
    """Of ``rlpost convert``."""
    setting: str
    """The flag that names the folder, with its value."""


def target_of(config: Config, to: str = "torch_dist") -> Target:
    """Return what a conversion writes.

    Args:
        config: the settings of a run.
        to: "torch_dist" for --ref-load, "fp8" for --hf-checkpoint; one that names weights in
            bfloat16 is the source of a folder beside it.

    Raises:
        ConfigError: --ref-load is no torch_dist folder.
    """
    if to == "fp8":
        model = config.checkpoint.hf_checkpoint
        source = model.removesuffix(FOLDER)
        return Target(source + FOLDER, source, "to-fp8", f"--hf-checkpoint {model}")
    save = config.checkpoint.ref_load
    if save is None or not save.endswith(CONVERTED):
        problem = "--ref-load is not given" if save is None else f"--ref-load {save}"
        raise ConfigError(
            f"{problem}: it names the folder to write and must end in {CONVERTED}, beside the folder of "
            f"the weights without that suffix; give --ref-load FOLDER{CONVERTED}"
        )
    return Target(save, save.removesuffix(CONVERTED), "to-torch-dist", f"--ref-load {save}")


def conversion_spec(config: Config, target: Target) -> JobSpec:
    """Return the job of a conversion.

    Args:
        config: has its name, nodes and time.
        target: what it writes.
    """
    words = [target.direction]
    words += ["--hf-checkpoint", target.source, "--distributed-timeout-minutes", "60"]
    if config.cluster.gpu_type is not None:
        words += ["--gpu-type", config.cluster.gpu_type]
    return replace(job_spec(config, driver_args=tuple(words)), reads=(target.source,))


def main(arguments: Sequence[str]) -> int:
    """Run ``rlpost convert`` and return its exit code. Raises ConfigError."""
    from rlpost.extensions.converting.convert import DIRECTIONS

    if arguments and arguments[0] in DIRECTIONS:
        return DIRECTIONS[arguments[0]](arguments[1:])
    from rlpost.cli.command_line import make_parser, no_recipe, settings

    parser = make_parser("rlpost convert", "Submit the job that converts a recipe's weights.")
    add_switch(parser, "--dry-run", "print the batch script and submit nothing")
    parser.add_argument(
        "--to",
        choices=("torch_dist", "fp8"),
        default="torch_dist",
        help="Megatron's format for --ref-load (default), or FP8 blocks for engines in --hf-checkpoint",
    )
    options, loaded = settings(parser, arguments)
    if options.recipe is None:
        raise no_recipe("rlpost convert qwen3_4b")
    recipe = Path(options.recipe)
    on_command_line = {name for name, origin in loaded.origins.items() if origin == COMMAND_LINE}
    target = target_of(loaded.config, options.to)
    name = recipe.stem
    if options.to == "fp8":
        name = f"{name.removesuffix('_fp8')}_fp8"
    job: dict[str, object] = {"job_name": f"convert_{name}"}
    if "cluster.nodes" not in on_command_line:
        num_nodes = CONVERSION_NODES.get(name.removesuffix("_fp8"), 1)
        job["nodes"] = 1 if options.to == "fp8" else num_nodes
    if "cluster.segment" not in on_command_line:
        job["segment"] = None  # it divides the nodes of the run
    if "cluster.time" not in on_command_line:
        job["time"] = TIME
    config = with_values(loaded.config, **job)
    _require_weights(target, options.recipe, is_dry=options.dry_run)
    folder = Path(config.cluster.runs_dir) / (
        f"{config.cluster.job_name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    )
    try:
        spec = conversion_spec(config, target)
        if not options.dry_run:
            _require_slurm()
            folder = claim_folder(folder)  # another conversion may start in the same second
        spec = replace(
            spec.with_python(sys.executable),
            home=str(folder / "code"),
            run_folder=str(folder),
            output=str(folder).replace("%", "%%") + "/slurm-%j.out",
        )
        script = render_conversion(spec, target.folder)
        if options.dry_run:
            print(script, end="")
            return 0
        job_id = _submit(script, folder, spec.nodes)
    except SlurmError as error:
        raise ConfigError(str(error)) from error
    print(f"submitted {job_id}\nrun folder {folder}")
    return 0


def _require_weights(target: Target, recipe: str, *, is_dry: bool) -> None:
    """Raise ConfigError if the weights to convert are missing; a dry run prints it as a note."""
    source = target.source
    if (Path(source) / "config.json").is_file():
        return
    remedy = f"run: rlpost fetch {recipe}"
    if source.startswith("$"):
        remedy = "export RLPOST_ASSETS=FOLDER, or give --assets-dir FOLDER"
    line = f"{target.setting}: {source} is missing; {remedy}"
    if not is_dry:
        raise ConfigError(line)
    print(f"note: {line}", file=sys.stderr)


def _require_slurm() -> None:
    """Raise ConfigError where there is no Slurm."""
    from slurm.client import is_available

    if not is_available():
        raise ConfigError(
            "there is no Slurm on this machine; --dry-run prints the job, and docs/actor.md has the "
            "command for one machine"
        )


def _submit(script: str, folder: Path, num_nodes: int) -> str:
    """Copy the code, submit the script, return the job id. Raises SlurmError."""
    from rlpost.cli.submit import PROJECT
    from rlpost.config.keys import without_keys
    from slurm.executor import submit_script
    from slurm.snapshot import snapshot_code

    environ = without_keys(os.environ)
    snapshot_code(PROJECT, folder / "code", environ)
    return submit_script(script, folder / "job.sbatch", num_nodes, environ)
