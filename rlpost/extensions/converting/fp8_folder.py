"""Write a Hugging Face folder in FP8 blocks, from one in bfloat16.

Input: a folder of a supported family. Output: a folder with the same files of weights, whose
matrices are quantised by the functions of a weight update (``quantise``), so that of a folder in
bfloat16 engines load the bytes that the first update sends. Streamed: the host holds one file of
weights at a time. The folder appears when it is complete.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Set
from pathlib import Path

from safetensors import SafetensorError

from rlpost.errors import CheckpointError, WeightError
from rlpost.models import fp8
from rlpost.models.config_file import language_model
from rlpost.models.families import family
from rlpost.models.model_types import HfConfig
from rlpost.trainer import device
from rlpost.trainer.weight_files import commit
from rlpost.trainer.weights.folder_export import save_tensors
from rlpost.trainer.weights.hf_folder import QUANTISATION, copy_files, exported_files
from rlpost.trainer.weights.importer import HuggingFaceFolder
from rlpost.trainer.weights.quantise import BlockFp8
from rlpost.trainer.weights.safetensors_files import INDEX, file_problems

logger = logging.getLogger(__name__)


def write_fp8_folder(
    source: Path,
    target: Path,
    *,
    block: tuple[int, int] = (fp8.SIDE, fp8.SIDE),
    has_powers_of_two: bool = False,
) -> None:
    """Write ``source`` in FP8 blocks to ``target``, which appears when it is complete.

    Args:
        source: in bfloat16.
        target: a folder that does not exist or is empty.
        block: rows and columns.
        has_powers_of_two: the rule of scales of the engines' GPUs (``fp8.has_powers_of_two``).

    Raises:
        WeightError: the folder is incomplete or quantised, or engines cannot have its family in FP8
            blocks.
        CheckpointError: a file cannot be written.
    """
    try:
        config: HfConfig = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise WeightError(f"{source}/config.json: {error}; fetch the model again") from error
    if problems := file_problems(source):
        raise WeightError("\n".join(problems))
    folder = HuggingFaceFolder(source)
    names = _quantised_names(folder, config)
    quantisation = BlockFp8(names, block, has_powers_of_two)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        copy_files(exported_files(source), source, temporary)
        kept = _write_weights(folder, temporary, quantisation)
        described = {**config, "quantization_config": fp8.quantization_config(kept, block)}
        (temporary / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        commit(temporary, target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write weights to {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _quantised_names(folder: HuggingFaceFolder, config: HfConfig) -> Set[str]:
    """Return the tensors to quantise. Raises WeightError."""
    if any(key in language_model(config) for key in QUANTISATION):
        raise WeightError(
            f"{folder.folder}: its weights are quantised already; use a checkpoint in bfloat16"
        )
    architecture = (config.get("architectures") or ["none given"])[0]
    known = family(architecture)
    if known.carried:
        raise WeightError(
            f"{folder.folder}: {architecture} has an encoder of images, whose folder in FP8 blocks is "
            "not written; use the folder in bfloat16 for engines"
        )
    if known.engines_lack_fp8_scales or any(rule.is_stacked for rule in known.rules):
        raise WeightError(
            f"{folder.folder}: SGLang does not load FP8 blocks of {architecture}; use the folder in "
            "bfloat16 for engines"
        )
    width = known.fields(known.resolved(config)).get("moe_shared_expert_intermediate_size") or 0
    names = fp8.quantised_names(folder.file_of, known.rules, shared_width=int(width))
    if not names:
        raise WeightError(
            f"{folder.folder} has no matrix of a layer of {architecture}; check that config.json "
            "belongs to these weights"
        )
    return names


def _write_weights(folder: HuggingFaceFolder, target: Path, quantisation: BlockFp8) -> list[str]:
    """Write all tensors; return the modules whose matrix is not quantised."""
    files = sorted(set(folder.file_of.values()))
    file_of: dict[str, str] = {}
    kept, total = [], 0
    for number, file in enumerate(files, start=1):
        tensors = {}
        for name in (name for name, at in folder.file_of.items() if at == file):
            tensor = folder.read(name)
            if name not in quantisation.names:
                tensors[name] = tensor
                if tensor.dim() == 2:
                    kept.append(name.removesuffix(".weight"))
                continue
            for key, part in quantisation.tensors(name, tensor.to(device.current())).items():
                tensors[key] = part.cpu()
        save_tensors(tensors, target, file)
        file_of |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
        logger.info("%s: wrote file %d of %d", target, number, len(files))
    if (folder.folder / INDEX).exists():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return kept
