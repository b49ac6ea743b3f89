"""What SGLang makes of open settings on each GPU, for each family; nothing is loaded.

Settings are resolved with the facts of another platform, which a process without a GPU can. Not
resolved here: backends of attention and sampling, which need the device, and which no update, offload
or replay depends on.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from rlpost.config.checks.routing import _OPAQUE_BACKENDS
from rlpost.engines.blackwell import DENSE, EXPERTS, TRITON, updatable_kernels
from tests.contract.families import FAMILIES, make_family_config

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPUS: dict[str, tuple[int, int]] = {"sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
ROUTES = {"enable_return_routed_experts": True}
RANDOM = ("random_seed",)
KEPT = {
    "quantization": "that of config.json, named",
    "disable_shared_experts_fusion": "fused experts are loaded by their own names",
    "speculative_moe_runner_backend": f"follows {EXPERTS}",
}
"""Fields that depend on the GPU although our settings are given, and why that is harmless."""
REVIEWED = (EXPERTS, DENSE, *KEPT)
UPDATABLE = {
    EXPERTS: ("auto", "triton", "triton_kernel"),
    DENSE: ("auto", "triton"),
}
"""Values whose weights stay in the layout of the checkpoint; "auto" of sm90 alone.

triton_kernel creates transposed weights and loads into them (layers/quantization/unquant.py).
"""


def write_configs(root: Path) -> list[Path]:
    """Write config.json of each family, also in FP8 blocks; return the folders."""
    folders = []
    for name in sorted(FAMILIES):
        folders += [root / name, root / f"{name}-fp8"]
        make_family_config(root / name, name)
        config = json.loads((root / name / "config.json").read_text())
        (root / f"{name}-fp8").mkdir()
        (root / f"{name}-fp8/config.json").write_text(
            json.dumps(config | {"quantization_config": FP8})
        )
    return folders


def facts_of(gpu: str) -> dict[str, Any]:
    """Return the facts of a platform that SGLang's rules read."""
    major, minor = GPUS[gpu]
    return {
        "is_cuda": True,
        "is_sm90": gpu == "sm90",
        "is_sm100": gpu == "sm100",
        "is_sm100_or_sm110": gpu == "sm100",
        "is_sm120": gpu == "sm120",
        "is_blackwell": major >= 10,
        "is_hopper_with_cuda_12_3": gpu == "sm90",
        "device_capability": (major, minor),
        "device_sm": 10 * major + minor,
    }


def resolved(folder: Path, gpu: str, given: dict[str, Any]) -> dict[str, str]:
    """Return all fields of ServerArgs for a model folder with given fields, as text."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    with override_platform(**facts_of(gpu)):
        args = ServerArgs(model_path=str(folder), skip_tokenizer_init=True, device="cpu", **given)
        names = [name for name in args.__struct_fields__ if name not in RANDOM]
        args.resolve_once()
        view = resolving_view(args)
        return {name: str(getattr(view, name, None)) for name in names}


def problems(
    folders: list[Path],
    gpus: tuple[str, ...] = tuple(GPUS),
    extras: tuple[dict[str, Any], ...] = ({}, ROUTES),
) -> list[str]:
    """Return what updates and routing replay cannot bear, and fields that are not reviewed.

    ``extras``: fields that the run gives to the engines, beside those of ``updatable_kernels``.
    """
    warnings.simplefilter("ignore")
    lines = []
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        for extra in extras:
            by_gpu = {}
            for gpu in gpus:
                ours = updatable_kernels(extra, config, GPUS[gpu])
                by_gpu[gpu] = resolved(folder, gpu, {**extra, **ours})
                lines += _refused(f"{folder.name} on {gpu}", by_gpu[gpu], bool(extra))
            lines += _not_reviewed(folder.name, by_gpu)
    return sorted(set(lines))


def _refused(case: str, fields: dict[str, str], returns_routes: bool) -> list[str]:
    lines = [
        f"{case}: {name} = {fields[name]}"
        for name, values in UPDATABLE.items()
        if fields[name] not in values
    ]
    if returns_routes and fields[EXPERTS] in _OPAQUE_BACKENDS:
        lines.append(f"{case}: {EXPERTS} = {fields[EXPERTS]} returns no routes")
    return lines


def _not_reviewed(case: str, by_gpu: dict[str, dict[str, str]]) -> list[str]:
    first, *others = by_gpu.values()
    return [
        f"{case}: {name} depends on the GPU"
        for name in first
        if name not in REVIEWED and any(other[name] != first[name] for other in others)
    ]


def chosen_alone(folders: list[Path], gpu: str) -> set[str]:
    """Return the kernels of experts that SGLang chooses where nothing is given."""
    return {resolved(folder, gpu, {})[EXPERTS] for folder in folders} - {"auto", TRITON}
