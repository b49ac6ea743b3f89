"""GPUs of a host by NVML, or without it by the files of the driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from common.local_gpus import (
    LocalGpu,
    cpus_of_mask,
    find_gpu,
    hidden_gpu_problem,
    parse_cpu_list,
    read_local_gpus,
    visible_names,
)
from rlpost.errors import ConfigError
from rlpost.trainer import device
from tests.settings import rank_config


class NVMLError(Exception):
    """As pynvml's."""


def nvml(*, masks=None, fails=None):
    """A fake pynvml: two GPUs next to two sockets; the second GPU has a MIG device."""

    def init():
        if fails:
            raise NVMLError(fails)

    def affinity(handle, num_words):
        if masks is None:
            raise NVMLError("Not Supported")
        assert num_words == 4, "for CPUs 0 to 255"
        return masks[handle]

    def mig(handle, number):
        if handle == 0 or number:
            raise NVMLError("Not Found")
        return "mig"

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: "MIG-77" if handle == "mig" else f"GPU-{handle}{handle}",
        nvmlDeviceGetCpuAffinity=affinity,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(domain=0, bus=0x3B + handle, device=0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 2 if handle else 0,
        nvmlDeviceGetMigDeviceHandleByIndex=mig,
    )


@pytest.fixture
def host(tmp_path):
    """A root folder with the files of the kernel and of the driver."""
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/possible").write_text("0-255\n")
    for bus, uuid, cpus in (
        ("0000:3b:00.0", "GPU-00", "0-63"),
        ("0000:3c:00.0", "GPU-11", "64-127"),
    ):
        pci, driver = (
            tmp_path / f"sys/bus/pci/devices/{bus}",
            tmp_path / f"proc/driver/nvidia/gpus/{bus}",
        )
        pci.mkdir(parents=True)
        driver.mkdir(parents=True)
        (pci / "local_cpulist").write_text(cpus + "\n")
        (driver / "information").write_text(
            f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
        )
    return tmp_path


def test_cpus_are_those_of_nvml(host, monkeypatch):
    masks = [[(1 << 64) - 1, 0, 0, 0], [0, (1 << 64) - 1, 1, 0]]
    monkeypatch.setitem(sys.modules, "pynvml", nvml(masks=masks))
    first, second = read_local_gpus(host)
    assert first == LocalGpu(0, "GPU-00", (), parse_cpu_list("0-63"))
    assert second == LocalGpu(1, "GPU-11", ("MIG-77",), parse_cpu_list("64-128"))


@pytest.mark.parametrize("masks", [None, [[0] * 4] * 2])
def test_where_nvml_reports_no_cpus_they_are_those_of_the_bus(host, monkeypatch, masks):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(masks=masks))
    assert [gpu.cpus for gpu in read_local_gpus(host)] == [
        parse_cpu_list("0-63"),
        parse_cpu_list("64-127"),
    ]


def test_without_nvml_a_gpu_is_found_by_uuid_and_not_by_index(host, monkeypatch):
    """The driver lists the GPUs of other jobs as well, so an index would be a guess."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml(fails="Driver/library version mismatch"))
    gpus = read_local_gpus(host)
    assert find_gpu("GPU-11", gpus).cpus == parse_cpu_list("64-127")
    assert find_gpu("0", gpus) is None and find_gpu("1", gpus) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_local_gpus(host) == gpus, "without the bindings"


def test_a_host_without_a_driver_has_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(fails="Shared Library Not Found"))
    assert read_local_gpus(tmp_path) == ()
    monkeypatch.delitem(sys.modules, "pynvml")
    assert isinstance(read_local_gpus(tmp_path), tuple), (
        "with the real bindings, wherever this runs"
    )


def test_names_of_cuda_visible_devices():
    gpus = (LocalGpu(0, "GPU-abc1"), LocalGpu(1, "GPU-abd2", ("MIG-77",)))
    assert visible_names(" 0, GPU-abc1 ,") == ["0", "GPU-abc1"] and visible_names("") == []
    assert find_gpu("1", gpus) is gpus[1] and find_gpu("GPU-abc", gpus) is gpus[0]
    assert find_gpu("MIG-77", gpus) is gpus[1]
    assert find_gpu("GPU-ab", gpus) is None, "the prefix is ambiguous"
    assert find_gpu("NoDevFiles", gpus) is None


def test_masks_are_words_of_64_cpus():
    assert cpus_of_mask([0b101, 0, 1 << 63]) == {0, 2, 191}


BUILT = {"torch_version": "2.13.0+cu130", "torch_cuda": "13.0"}


def test_a_gpu_that_torch_does_not_see_is_a_problem(monkeypatch):
    """Only if the process was given one, the host has it, and torch is not one for a CPU."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    for given in ("0", "0,1", "GPU-00", "MIG-77"):
        problem = hidden_gpu_problem(given, **BUILT)
        assert f"CUDA_VISIBLE_DEVICES={given}, and torch 2.13.0+cu130 sees no GPU" in problem
        assert "CUDA 13.0" in problem and "580 or newer" in problem
    for given in ("", "-1", "NoDevFiles"):
        assert hidden_gpu_problem(given, **BUILT) is None
    assert hidden_gpu_problem("0", torch_version="2.13.0+cpu", torch_cuda=None) is None
    monkeypatch.setattr("common.local_gpus.read_local_gpus", lambda: ())
    assert hidden_gpu_problem("0", **BUILT) is None


def test_a_rank_whose_gpu_torch_does_not_see_is_refused(monkeypatch):
    """It would train on the CPU, in float32 and over gloo."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device.torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="sees no GPU"):
        device.prepare(rank_config("m"))
