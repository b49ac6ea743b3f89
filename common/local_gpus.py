"""Lists the NVIDIA GPUs of this host, with the CPUs next to each.

Input: NVML, or without it /proc and /sys. Output: ``LocalGpu`` values in PCI bus order. Nothing
raises: unreadable values are None, and without a driver there are no GPUs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

logger = logging.getLogger(__name__)

_MASK_BITS = 64  # NVML fills words of unsigned long


@dataclass(frozen=True, slots=True)
class LocalGpu:
    """One GPU; ``migs`` are the UUIDs of its MIG devices, ``cpus`` those of its NUMA node."""

    index: int
    uuid: str
    migs: tuple[str, ...] = ()
    cpus: frozenset[int] | None = None


def visible_names(cuda_visible_devices: str) -> list[str]:
    """Return the names in a value of CUDA_VISIBLE_DEVICES."""
    return [name.strip() for name in cuda_visible_devices.split(",") if name.strip()]


def find_gpu(name: str, gpus: Sequence[LocalGpu]) -> LocalGpu | None:
    """Return the GPU for a name in CUDA_VISIBLE_DEVICES: index, UUID, UUID prefix or MIG device.

    CUDA numbers GPUs as NVML does if all are of one model, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    if name.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(name)), None)
    found = [gpu for gpu in gpus if gpu.uuid.startswith(name) or name in gpu.migs]
    return found[0] if len(found) == 1 else None


def hidden_gpu_problem(
    cuda_visible_devices: str, *, torch_version: str, torch_cuda: str | None
) -> str | None:
    """Return why a process with GPUs, whose torch sees none, must not go on; None if it may.

    Args:
        cuda_visible_devices: the GPUs of the process; empty if it was given none.
        torch_version: the installed torch.
        torch_cuda: the version of CUDA that it is built for; None for a CPU, which is intended.
    """
    names = visible_names(cuda_visible_devices)
    has_gpus = bool(names) and (names[0].isdigit() or names[0].startswith(("GPU-", "MIG-")))
    if torch_cuda is None or not has_gpus or not read_local_gpus():
        return None
    return (
        f"CUDA_VISIBLE_DEVICES={cuda_visible_devices}, and torch {torch_version} sees no GPU: it "
        f"needs a driver that supports CUDA {torch_cuda} (nvidia-smi prints what it supports; CUDA "
        "13 needs 580 or newer), and libcuda.so.1 in the container. This process would compute on "
        "the CPU; update the driver, or submit without GPUs"
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a CPU list of the kernel: ``0-15,64-79``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpus_of_mask(words: Sequence[int]) -> frozenset[int]:
    """Return the CPUs of an NVML mask; word 0 holds CPUs 0 to 63."""
    return frozenset(
        number * _MASK_BITS + bit
        for number, word in enumerate(words)
        for bit in range(_MASK_BITS)
        if word >> bit & 1
    )


def read_local_gpus(root: Path = Path("/")) -> tuple[LocalGpu, ...]:
    """Return the visible GPUs; empty without NVIDIA's driver."""
    try:
        import pynvml
    except ImportError:
        return tuple(_from_driver(root))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        readings = tuple(_from_driver(root))
        if readings:
            logger.info(
                "NVML does not start (%s): GPUs are known by what the driver writes into /proc",
                error,
            )
        return readings
    try:
        return tuple(_from_nvml(pynvml, root))
    except pynvml.NVMLError as error:
        logger.info("NVML fails (%s): GPUs are known by what the driver writes into /proc", error)
        return tuple(_from_driver(root))
    finally:
        pynvml.nvmlShutdown()


def read_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first GPU of this host; None if NVML does not say it.

    Neither creates a CUDA context nor initialises CUDA, which would fix the visible devices.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(
            pynvml.nvmlDeviceGetHandleByIndex(0)
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return int(major), int(minor)


def _from_nvml(nvml: ModuleType, root: Path) -> Iterator[LocalGpu]:
    num_words = _last_cpu(root) // _MASK_BITS + 1
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        cpus: frozenset[int] | None = None
        with suppress(nvml.NVMLError):
            cpus = cpus_of_mask(
                [int(word) for word in nvml.nvmlDeviceGetCpuAffinity(handle, num_words)]
            )
        if not cpus:  # NVML knows no affinity here, as in some virtual machines
            with suppress(nvml.NVMLError):
                pci = nvml.nvmlDeviceGetPciInfo(handle)
                cpus = _cpus_of_bus(root, f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0")
        yield LocalGpu(index, str(nvml.nvmlDeviceGetUUID(handle)), tuple(_migs(nvml, handle)), cpus)


def _migs(nvml: ModuleType, handle: object) -> Iterator[str]:
    """Yield the UUIDs of the GPU's MIG devices."""
    with suppress(nvml.NVMLError):
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with suppress(nvml.NVMLError):  # no MIG device at this index
                yield str(
                    nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
                )


def _from_driver(root: Path) -> Iterator[LocalGpu]:
    """Yield GPUs from /proc/driver/nvidia/gpus/BUS/information, in bus order.

    It also lists GPUs that a cgroup hides, so indices are meaningless: ``index`` is -1, and only
    UUIDs match.
    """
    with suppress(OSError):
        for folder in sorted((root / "proc/driver/nvidia/gpus").iterdir()):
            uuid = re.search(r"GPU UUID:\s*(GPU-\S+)", (folder / "information").read_text())
            if uuid:
                yield LocalGpu(-1, uuid[1], cpus=_cpus_of_bus(root, folder.name))


def _cpus_of_bus(root: Path, bus: str) -> frozenset[int] | None:
    try:
        return (
            parse_cpu_list((root / f"sys/bus/pci/devices/{bus}/local_cpulist").read_text()) or None
        )
    except (OSError, ValueError):
        return None


def _last_cpu(root: Path) -> int:
    """Return the highest possible CPU number of this host."""
    try:
        return max(parse_cpu_list((root / "sys/devices/system/cpu/possible").read_text()))
    except (OSError, ValueError):
        return 1023
