"""Read the NVIDIA GPUs of this host and their faults from driver and kernel log.

Input: the machine. Output: ``GpuReading``, which ``python -m bootstrap.preflight.gpus`` prints as
JSON. NVML is called in a separate process, because a broken GPU may block its caller forever.
Decides nothing; None means not reported. Constants and structures are those of nvml.h, from
NVIDIA's package nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

_DRIVER = Path("/proc/driver/nvidia")
_KERNEL_LOG = "/dev/kmsg"
_READ_S = 20.0  # a first call without persistence mode loads the driver
_XID_WINDOW_S = 86_400.0
_MAX_NVLINKS = 36
_RECOVERY = (
    "none",
    "reset",
    "reboot",
    "drain-p2p",
    "drain-and-reset",
    "recover-imex",
    "bus-reset",
    "system-reboot",
)
_COMPUTE_MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
_FABRIC = ("not supported", "not started", "in progress", "completed")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)[^)]*\): (\d+)")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its driver describes it; memory in MiB."""

    uuid: str
    used_mib: int | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    remap_pending: bool | None = None  # rows that a reset would remap
    remap_failed: bool | None = None  # no spare rows are left
    recovery: str | None = None  # recovery action of NVIDIA's driver: none, reset, reboot, ...
    num_nvlinks: int | None = None  # number of active links
    fabric: str | None = None  # state of its registration with the NVSwitches
    bus: str | None = None  # 0000:3b:00
    xids: tuple[int, ...] = ()  # of the last day
    problem: str | None = None  # why the driver reports no other facts
    compute_mode: str | None = None  # default: several processes may use it; exclusive-process, ...
    is_mig: bool | None = None  # split into instances, of which CUDA shows one to a process

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Gpu:
        """Raises TypeError for fields that this version does not know."""
        return cls(**{**raw, "xids": tuple(raw.get("xids") or ())})


@dataclass(frozen=True, slots=True)
class GpuReading:
    """GPUs of this job on this host.

    ``gpus``: None without an NVIDIA driver, empty if the driver fails.
    """

    gpus: tuple[Gpu, ...] | None = None
    source: str = ""  # NVML or nvidia-smi
    error: str | None = None
    driver: str | None = None  # version, 580.95.05
    cuda: str | None = None  # newest version that the driver's libcuda supports, 13.0

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> GpuReading:
        """Raises TypeError for fields that this version does not know."""
        gpus = raw.get("gpus")
        return cls(**{**raw, "gpus": None if gpus is None else tuple(map(Gpu.from_json, gpus))})


def read_gpus(environ: Mapping[str, str]) -> GpuReading:
    """Read this job's GPUs; each query takes at most ``_READ_S`` seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None and not _DRIVER.exists():
        return GpuReading()
    reading = _ask_nvml() or _ask_nvidia_smi(tool)
    if not reading.gpus:
        return reading
    xids = parse_xids(_kernel_log(), time.clock_gettime(time.CLOCK_MONOTONIC))
    gpus = visible_gpus(reading.gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    return replace(
        reading, gpus=tuple(replace(gpu, xids=xids.get(gpu.bus or "", ())) for gpu in gpus)
    )


def visible_gpus(gpus: Sequence[Gpu], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """This job's GPUs. On a shared node without device cgroups the driver lists all GPUs.

    Args: cuda_visible_devices: the variable as Slurm sets it: indices or UUIDs; other values select
        all.
    """
    names = [name.strip() for name in (cuda_visible_devices or "").split(",")]
    by_name = {str(index): gpu for index, gpu in enumerate(gpus)} | {gpu.uuid: gpu for gpu in gpus}
    if not all(name in by_name for name in names):
        return tuple(gpus)
    return tuple(by_name[name] for name in names)


def parse_xids(log: str, now_s: float) -> dict[str, tuple[int, ...]]:
    """Xid errors of the last day by PCI bus.

    Args:
        log: records of /dev/kmsg, ``PRIORITY,NUMBER,MICROSECONDS,FLAGS;TEXT``.
        now_s: seconds since boot, on the clock of the log.
    """
    codes: dict[str, tuple[int, ...]] = {}
    for record in log.splitlines():
        head, _, text = record.partition(";")
        match, fields = _XID.search(text), head.split(",")
        if match is None or len(fields) < 3 or not fields[2].isdigit():
            continue
        if now_s - int(fields[2]) / 1e6 <= _XID_WINDOW_S:
            bus, code = _bus_name(*match.group(1, 2, 3)), int(match[4])
            codes[bus] = (*(known for known in codes.get(bus, ()) if known != code), code)
    return codes


def parse_nvidia_smi(
    listing: str, remapped: str, recovery: str, modes: str = ""
) -> tuple[Gpu, ...]:
    """Parse ``nvidia-smi --format=csv,noheader,nounits``; values that are not supported are None.

    Args:
        listing: ``--query-gpu=uuid,pci.bus_id,memory.used,ecc.errors.uncorrected.volatile.total``.
        remapped: ``--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure``.
        recovery: ``--query-gpu=uuid,gpu_recovery_action`` (drivers from 565 on).
        modes: ``--query-gpu=uuid,compute_mode,mig.mode.current``.
    """
    remapped_of, action_of = _by_uuid(remapped, 3), _by_uuid(recovery, 2)
    modes_of = _by_uuid(modes, 3)
    gpus = []
    for uuid, (bus, used, ecc) in _by_uuid(listing, 4).items():
        if not uuid.startswith("GPU-"):
            continue
        pending, failed = remapped_of.get(uuid, ("", ""))
        (action,) = action_of.get(uuid, ("",))
        compute_mode, mig_mode = modes_of.get(uuid, ("", ""))
        gpus.append(
            Gpu(
                uuid,
                used_mib=_number(used),
                ecc_uncorrected=_number(ecc),
                remap_pending=_flag(pending),
                remap_failed=_flag(failed),
                recovery=_action(action),
                bus=_bus_name(*bus.split(".")[0].split(":")),
                compute_mode=_compute_mode(compute_mode),
                is_mig=_flag(mig_mode),
            )
        )
    return tuple(gpus)


def _ask_nvml() -> GpuReading | None:
    """Read NVML; None if NVML or its bindings are missing or do not work."""
    try:
        done = _ask([sys.executable, "-m", "bootstrap.preflight.gpus"])
    except subprocess.TimeoutExpired:
        return GpuReading(
            (), "NVML", f"NVML does not answer within {_READ_S:.0f} s: a GPU or its driver hangs"
        )
    except OSError:
        return None
    if done.returncode != 0:
        return None  # the bindings are missing, too old or broken: not a fault of the GPU
    return GpuReading.from_json(json.loads(done.stdout))


def _ask_nvidia_smi(tool: str | None) -> GpuReading:
    if tool is None:
        return GpuReading(
            error="there is an NVIDIA driver and neither NVML (nvidia-ml-py) nor nvidia-smi to ask it"
        )
    listing, error = _csv(
        tool, "--query-gpu=uuid,pci.bus_id,memory.used,ecc.errors.uncorrected.volatile.total"
    )
    if error is not None:
        return GpuReading((), "nvidia-smi", error)  # no usable GPU
    remapped, _ = _csv(
        tool, "--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure"
    )
    recovery, _ = _csv(tool, "--query-gpu=uuid,gpu_recovery_action")
    modes, _ = _csv(tool, "--query-gpu=uuid,compute_mode,mig.mode.current")
    return GpuReading(parse_nvidia_smi(listing, remapped, recovery, modes), "nvidia-smi")


def _csv(tool: str, query: str) -> tuple[str, str | None]:
    """Output and error of a query."""
    command = [tool, query, "--format=csv,noheader,nounits"]
    try:
        done = _ask(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    said = " ".join((done.stdout + done.stderr).split())
    return (done.stdout, None) if done.returncode == 0 else ("", f"nvidia-smi failed: {said[:200]}")


def _ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with a timeout, without waiting for a process that KILL does not end.

    ``subprocess.run`` would wait for such a process forever.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=_READ_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _kernel_log() -> str:
    """All records in the kernel's buffer; empty if only root may read them."""
    records: list[bytes] = []
    with suppress(OSError):
        log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:  # ends with BlockingIOError
                with suppress(BrokenPipeError):  # a record was overwritten while we read
                    records.append(os.read(log, 8192))
        finally:
            os.close(log)
    return b"\n".join(records).decode(errors="replace")


def _from_nvml() -> GpuReading:
    """Read NVML in this process. Raises ImportError if the bindings or the library are missing."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise ImportError(str(error)) from error
    except pynvml.NVMLError as error:
        return GpuReading((), "NVML", f"NVML does not start: {error}")
    driver = None
    with suppress(pynvml.NVMLError, AttributeError):
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    return GpuReading(
        tuple(_gpu_of(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())),
        "NVML",
        driver=driver,
        cuda=_cuda_of_driver(),
    )


def _cuda_of_driver() -> str | None:
    """The newest CUDA of the libcuda that programs here load; None without one.

    It may be newer than the kernel's driver: NVIDIA's package cuda-compat. (cuda.h:
    ``cuDriverGetVersion``, 1000 major + 10 minor.)
    """
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _gpu_of(nvml: ModuleType, index: int) -> Gpu:
    def ask(question: Callable[[], T]) -> T | None:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):
            return None  # not supported by this card, driver or version of the bindings

    def link_state(link: int) -> int | None:
        return ask(lambda: nvml.nvmlDeviceGetNvLinkState(handle, link))

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
    except nvml.NVMLError as error:
        return Gpu(f"GPU {index}", problem=str(error))
    rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    fields = ask(
        lambda: nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    )
    action = fields[0].value.uiVal if fields and fields[0].nvmlReturn == nvml.NVML_SUCCESS else None
    links = [link_state(link) for link in range(_MAX_NVLINKS)]
    fabric = ask(lambda: _fabric_of(nvml, handle))
    pci = ask(lambda: nvml.nvmlDeviceGetPciInfo(handle))
    compute_mode = ask(lambda: nvml.nvmlDeviceGetComputeMode(handle))
    mig = ask(lambda: nvml.nvmlDeviceGetMigMode(handle))  # [current, pending]
    bus = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}" if pci is not None else None
    return Gpu(
        uuid,
        used_mib=ask(lambda: _used_bytes(nvml, handle) >> 20),
        ecc_uncorrected=ask(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        recovery=None if action is None else _at(_RECOVERY, action),
        num_nvlinks=None if set(links) == {None} else links.count(1),
        fabric=None if fabric is None else _at(_FABRIC, fabric),
        bus=bus,
        compute_mode=None if compute_mode is None else _at(_COMPUTE_MODES, compute_mode),
        is_mig=None if mig is None else bool(mig[0]),
    )


def _used_bytes(nvml: ModuleType, handle: object) -> int:
    """Bytes of a GPU in use. Raises NVMLError or AttributeError where that cannot be read.

    Memory of a Grace GPU is a NUMA node of the kernel, which keeps pages of files there and counts
    them as used, so that of processes is counted.
    """
    try:
        nvml.nvmlDeviceGetNumaNodeId(handle)
    except (nvml.NVMLError, AttributeError):
        # nvmlMemory_v2 excludes the driver's reserved memory.
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(process.usedGpuMemory or 0 for process in processes)


def _fabric_of(nvml: ModuleType, handle: object) -> int:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return int(info.state)


def _at(words: Sequence[str], number: int) -> str:
    return words[number] if number < len(words) else f"unknown ({number})"


def _bus_name(domain: str, bus: str, device: str) -> str:
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}"


def _by_uuid(listing: str, num_cells: int) -> dict[str, list[str]]:
    """Return the cells behind the UUID by UUID; lines with another number of cells are ignored."""
    rows = ([cell.strip() for cell in line.split(",")] for line in listing.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) == num_cells}


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _flag(text: str) -> bool | None:
    words = {"yes": True, "1": True, "enabled": True, "no": False, "0": False, "disabled": False}
    return words.get(text.lower())


def _compute_mode(text: str) -> str | None:
    """``Exclusive_Process`` in NVML's words here."""
    return _action(text.replace("_", "-"))


def _action(text: str) -> str | None:
    return None if not text or text.startswith("[") else text.lower()


def main() -> int:
    """Print NVML's facts as JSON; return 1 without NVML."""
    try:
        print(json.dumps(asdict(_from_nvml())))
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
