"""Checks of a container image, from facts read inside it. Pure.

Input: ``ImageFacts`` and the requirements. Output: ``Check`` values: FATAL_CONFIG if a run would
fail because the image lacks something, WARN if it would be slow or behave unexpectedly. Facts that
cannot be read (e.g. on a host without a GPU) are not faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping, Sequence  # noqa: UP035

from bootstrap.check_result import GIB, UNLIMITED, Check, Level
from bootstrap.image.pins import Requirement, parse

TE_USES = "optimizer_cpu_offload, the precision-aware optimizer with other types, grouped experts and fused permutation"
RDMA_LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")
# Kernel drivers of RDMA devices, and the user-space provider of rdma-core (or the vendor) for each.
PROVIDERS = {
    "mlx5_core": "mlx5",
    "mlx4_core": "mlx4",
    "bnxt_en": "bnxt_re",
    "efa": "efa",
    "irdma": "irdma",
    "erdma": "erdma",
    "hns_roce": "hns",
}
_WANTED_NOFILE = 65_535
_NEEDED_SHM = GIB  # Docker's 64 MiB break NCCL, Ray and SGLang alike
_NCCL_GID = (2, 21)  # selects the RoCE GID automatically (NCCL 2.21, release notes)
# Variables of the image that change a run, and their effect.
_HARMFUL = {
    "PYTHONPATH": "its folders come before the packages; rlpost's own value wins in a job",
    "PYTHONHOME": "another Python's library",
    "PIP_CONSTRAINT": "pip refuses other versions than the image's: set it empty when you install",
    "LD_PRELOAD": "a library in every process",
    "MASTER_ADDR": "removed by the agents",
    "NCCL_SOCKET_IFNAME": "overrides the agents' detection; remove it from the image",
    "GLOO_SOCKET_IFNAME": "overrides the agents' detection; remove it from the image",
    "NCCL_IB_HCA": "overrides the agents' detection; remove it from the image",
    "OMP_NUM_THREADS": "overrides the number of threads of each process",
    "CUDA_VISIBLE_DEVICES": "hides GPUs from every process",
}


@dataclass(frozen=True)
class ImageFacts:
    """Facts read in an image; None: could not be read."""

    python: str = ""
    executable: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)  # canonical name: version
    # requirements of some packages
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    te_range: str = ""  # TransformerEngine versions that Megatron-core accepts, from its metadata
    commands: Mapping[str, str | None] = field(default_factory=dict)  # command: path
    # shared library: whether it can be loaded
    libraries: Mapping[str, bool] = field(default_factory=dict)
    providers: Sequence[str] = ()  # RDMA providers installed
    rdma_drivers: Sequence[str] = ()  # kernel drivers of the visible RDMA devices
    has_gpu_devices: bool = False
    nccl: Mapping[str, str] = field(default_factory=dict)  # file: version
    memlock: int | None = None
    nofile: int | None = None
    shm_bytes: int | None = None
    home: str = ""
    unwritable: Sequence[str] = ()  # folders that a run writes to
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoints: Sequence[str] = ()


def check_image(
    facts: ImageFacts,
    python: Requirement,
    requirements: Sequence[Requirement],
    *,
    cpu: bool = False,
    compiled: Sequence[Requirement] = (),
    te_reasons: Sequence[str] = (),
) -> tuple[Check, ...]:
    """Run every check, in the order of the table.

    Args:
        cpu: omit the checks that need GPUs. On a CPU, SGLang runs without its CUDA dependencies
            (bootstrap/image/no_deps.txt).
        compiled: pins of packages that are compiled against torch (``te`` in setup.cfg).
        te_reasons: settings of a recipe that need TransformerEngine; if there are none, a missing
            TransformerEngine is a warning only.
    """
    te = _transformer_engine(facts, compiled, te_reasons)
    gpu_checks = () if cpu else (_needs(facts), te, _driver(facts), _rdma(facts), _nccl(facts))
    return (
        _python(facts, python),
        _packages(facts, requirements),
        *gpu_checks,
        _commands(facts),
        _limits(facts),
        _shm(facts),
        _folders(facts),
        _variables(facts),
        _entrypoint(facts),
    )


def _python(facts: ImageFacts, python: Requirement) -> Check:
    said = f"{facts.python} ({facts.executable})"
    if python.allows(facts.python):
        return Check("python", "OK", said)
    found = f"{said}, {python.text} needed: install one and name it with cluster.python"
    return Check("python", "FATAL_CONFIG", found)


def _packages(facts: ImageFacts, requirements: Sequence[Requirement]) -> Check:
    missing = [one for one in requirements if one.name not in facts.packages]
    other = [
        one
        for one in requirements
        if one.name in facts.packages and not one.allows(facts.packages[one.name])
    ]
    if not missing and not other:
        return Check("packages", "OK", f"all {len(requirements)} that are wanted")
    parts = [f"without {', '.join(one.text for one in missing)}"] if missing else []
    if other:
        parts.append(
            ", ".join(f"{one.name} {facts.packages[one.name]} ({one.text} wanted)" for one in other)
        )
    said = f"{'; '.join(parts)}: build jobs/container/Dockerfile on top of this image"
    return Check("packages", "FATAL_CONFIG", said)


def _needs(facts: ImageFacts) -> Check:
    """Check what large packages require; without kernels the first request fails."""
    unmet = []
    for package, lines in sorted(facts.needs.items()):
        for one in filter(None, map(parse, lines)):
            have = facts.packages.get(one.name)
            if have is None or not one.allows(have):
                unmet.append(f"{package} wants {one.text}" + (f" (here {have})" if have else ""))
    if unmet:
        more = f" and {len(unmet) - 6} more" if len(unmet) > 6 else ""
        return Check("their needs", "FATAL_CONFIG", "; ".join(unmet[:6]) + more)
    said = f"met: {', '.join(sorted(facts.needs)) or 'nothing installed that has any'}"
    return Check("their needs", "OK", said)


def _transformer_engine(
    facts: ImageFacts, compiled: Sequence[Requirement], reasons: Sequence[str]
) -> Check:
    """Both TransformerEngine packages must have one version, and Megatron-core must accept it."""
    name, half = "transformer-engine", "transformer-engine-torch"
    pin = next((one for one in compiled if one.name == name), None)
    accepted = parse(facts.te_range) or pin
    have, torch_half = facts.packages.get(name), facts.packages.get(half)
    needed = f"needed for {', '.join(reasons)}" if reasons else f"needed for {TE_USES}"
    level: Level = "FATAL_CONFIG" if reasons else "WARN"
    build = "build jobs/container/Dockerfile"
    if pin:
        build += f", which compiles {pin.text}"
    if have is None:
        return Check("TransformerEngine", level, f"not installed; {needed}: {build}")
    if torch_half != have:
        said = f"{have} with {half} {torch_half or 'missing'}; {needed}: {build}"
        return Check("TransformerEngine", level, said)
    if accepted is not None and not accepted.allows(have):
        said = f"{have}, Megatron-core accepts {_bounds(accepted)}; {needed}: {build}"
        return Check("TransformerEngine", level, said)
    return Check("TransformerEngine", "OK", have)


def _bounds(one: Requirement) -> str:
    return ",".join(sign + version for sign, version in one.bounds)


def _commands(facts: ImageFacts) -> Check:
    absent = [name for name, place in facts.commands.items() if place is None]
    if "bash" in absent:
        return Check("commands", "FATAL_CONFIG", "no bash, which runs setup commands")
    if absent:
        said = f"without {', '.join(absent)}: kernels are compiled at the first use (Triton)"
        return Check("commands", "WARN", said)
    return Check("commands", "OK", ", ".join(facts.commands))


def _driver(facts: ImageFacts) -> Check:
    requested = facts.environment.get("NVIDIA_VISIBLE_DEVICES", "")
    hint = (
        "set NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=compute,utility in the image"
    )
    if facts.libraries.get("libcuda.so.1"):
        return Check("GPU driver", "OK", "libcuda.so.1 loads")
    if facts.has_gpu_devices:
        why = f"NVIDIA_VISIBLE_DEVICES={requested or 'unset'}"
        return Check(
            "GPU driver",
            "FATAL_CONFIG",
            f"the host has GPUs, but libcuda.so.1 is missing ({why}): with enroot see its hook 98-nvidia, and {hint}; "
            "with Apptainer --nv, with podman-hpc --gpu in --container-command",
        )
    if requested in ("", "void", "none"):
        text = f"no GPU on this host, and NVIDIA_VISIBLE_DEVICES is {requested or 'unset'}: {hint}"
        return Check("GPU driver", "WARN", text)
    return Check("GPU driver", "OK", "no GPU on this host; the image requests the driver")


def _rdma(facts: ImageFacts) -> Check:
    absent = [name for name in RDMA_LIBRARIES if not facts.libraries.get(name)]
    wanted = {PROVIDERS.get(driver, driver) for driver in facts.rdma_drivers} or {"mlx5"}
    missing = sorted(wanted - set(facts.providers))
    if not absent and not missing:
        return Check("RDMA", "OK", f"libraries load; providers: {', '.join(facts.providers)}")
    parts = [f"without {', '.join(absent)}"] if absent else []
    parts += [f"no provider for {', '.join(missing)}"] if missing else []
    fix = "apt-get install libibverbs1 ibverbs-providers librdmacm1, or the vendor's; else NCCL takes TCP"
    said = f"{'; '.join(parts)}: {fix}"
    return Check("RDMA", "FATAL_CONFIG" if facts.rdma_drivers else "WARN", said)


def _nccl(facts: ImageFacts) -> Check:
    if not facts.nccl:
        level: Level = "FATAL_CONFIG" if facts.has_gpu_devices else "WARN"
        return Check("NCCL", level, "no libnccl.so.2: a torch without CUDA?")
    listed = ", ".join(f"{version} ({path})" for path, version in facts.nccl.items())
    if len(set(facts.nccl.values())) > 1:
        said = f"{listed}: which one is loaded depends on LD_LIBRARY_PATH; remove the others"
        return Check("NCCL", "WARN", said)
    version = next(iter(facts.nccl.values()))
    if tuple(int(part) for part in version.split(".")[:2]) < _NCCL_GID:
        said = f"{listed}: before 2.21 NCCL_IB_GID_INDEX has to be given on RoCE"
        return Check("NCCL", "WARN", said)
    return Check("NCCL", "OK", listed)


def _limits(facts: ImageFacts) -> Check:
    bad = []
    if facts.memlock not in (None, UNLIMITED):
        bad.append(f"memlock {facts.memlock} bytes (RDMA needs unlimited: ulimit -l)")
    if facts.nofile is not None and facts.nofile != UNLIMITED and facts.nofile < _WANTED_NOFILE:
        bad.append(f"{facts.nofile} open files ({_WANTED_NOFILE} wanted: ulimit -n)")
    if not bad:
        return Check("limits", "OK", "memlock unlimited, enough open files")
    return Check(
        "limits",
        "FATAL_CONFIG" if facts.rdma_drivers and "memlock" in bad[0] else "WARN",
        "; ".join(bad),
    )


def _shm(facts: ImageFacts) -> Check:
    if facts.shm_bytes is None:
        return Check("/dev/shm", "FATAL_CONFIG", "missing: NCCL, Ray and SGLang need it")
    said = f"{facts.shm_bytes / GIB:.2f} GiB"
    if facts.shm_bytes >= _NEEDED_SHM:
        return Check("/dev/shm", "OK", said)
    found = f"{said}: docker run --shm-size=16g"
    return Check("/dev/shm", "FATAL_CONFIG" if facts.has_gpu_devices else "WARN", found)


def _folders(facts: ImageFacts) -> Check:
    if not facts.unwritable:
        return Check("folders", "OK", f"HOME={facts.home} and the temporary folder can be written")
    fix = "caches of Triton and flashinfer lie there; set HOME in [cluster.environment], or make the image writable"
    said = f"cannot be written: {', '.join(facts.unwritable)}: {fix}"
    return Check("folders", "FATAL_CONFIG", said)


def _variables(facts: ImageFacts) -> Check:
    set_here = [name for name in _HARMFUL if facts.environment.get(name)]
    if "CUDA_VISIBLE_DEVICES" in set_here and _shows_what_slurm_gave(facts.environment):
        set_here.remove("CUDA_VISIBLE_DEVICES")
    set_here += [
        name
        for name in facts.environment
        if name.startswith(("NCCL_DEBUG_", "TORCH_NCCL_")) and facts.environment[name]
    ]
    if not set_here:
        return Check("variables", "OK", "none that change a run")
    said = "; ".join(
        f"{name}={facts.environment[name]}: {_HARMFUL.get(name, 'changes NCCL')}"
        for name in set_here
    )
    return Check("variables", "WARN", said)


def _shows_what_slurm_gave(environment: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES has as many entries as Slurm allocated GPUs (man srun)."""
    visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    if not given:
        listed = environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS") or ""
        given = str(len(listed.split(","))) if listed else ""
    return given == str(len(visible))


def _entrypoint(facts: ImageFacts) -> Check:
    if not facts.entrypoints:
        return Check("entrypoint", "OK", "none")
    said = f"{', '.join(facts.entrypoints)}: not run by pyxis, enroot and `apptainer exec`"
    return Check("entrypoint", "OK", said)
