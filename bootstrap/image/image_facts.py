"""Read the facts of an image from inside it. Decides nothing and never raises.

Only the standard library of Python 3.8 and later, because the packages to be checked may be
missing.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Iterator, Mapping  # noqa: UP035

from bootstrap.check_result import UNLIMITED
from bootstrap.image.checks import RDMA_LIBRARIES, ImageFacts
from bootstrap.image.pins import canonical

COMMANDS = ("bash", "gcc", "c++", "ninja")
NEEDY = ("sglang", "megatron-core", "transformers", "ray", "torch")
TE = "transformer-engine"
ENTRYPOINTS = (
    "/etc/rc",
    "/opt/nvidia/nvidia_entrypoint.sh",
    "/usr/local/bin/docker-entrypoint.sh",
    "/entrypoint.sh",
)
_LIBRARY_FOLDERS = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
)


def read_image(environ: Mapping[str, str], root: Path = Path("/")) -> ImageFacts:
    """Read the facts of the image that this process runs in."""
    packages, needs, te_range = _packages()
    home = environ.get("HOME", "")
    return ImageFacts(
        python=platform.python_version(),
        executable=sys.executable,
        packages=packages,
        needs=needs,
        te_range=te_range,
        commands={name: shutil.which(name) for name in COMMANDS},
        libraries={name: _loads(name) for name in (*RDMA_LIBRARIES, "libcuda.so.1")},
        providers=tuple(sorted(_providers(root))),
        rdma_drivers=tuple(sorted(_rdma_drivers(root))),
        has_gpu_devices=(root / "dev/nvidiactl").exists(),
        nccl=dict(_nccl(root)),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE),
        shm_bytes=_size(root / "dev/shm"),
        home=home,
        unwritable=tuple(
            path
            for path in (home or "HOME is unset", tempfile.gettempdir())
            if not _can_write(path)
        ),
        environment=dict(environ),
        entrypoints=tuple(path for path in ENTRYPOINTS if (root / path.lstrip("/")).is_file()),
    )


def _packages() -> tuple[dict[str, str], dict[str, list[str]], str]:
    """Installed versions, requirements of NEEDY packages, TransformerEngine range.

    The requirements are those without a condition. The range is that of Megatron-core's extra;
    empty if it has none.
    """
    versions: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    te_range = ""
    for distribution in importlib.metadata.distributions():
        with suppress(Exception):  # damaged metadata: the package counts as missing
            name = canonical(distribution.metadata["Name"])
            if name in versions:  # shadowed by an earlier entry of the path
                continue
            versions[name] = distribution.version
            if name in NEEDY:
                needs[name] = [line for line in distribution.requires or () if ";" not in line]
            if name == "megatron-core":
                lines = [line.partition(";")[0].strip() for line in distribution.requires or ()]
                te_range = next((line for line in lines if canonical(line).startswith(TE)), "")
    return versions, needs, te_range


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _providers(root: Path) -> Iterator[str]:
    """RDMA providers of rdma-core: /etc/libibverbs.d/mlx5.driver names libmlx5-rdmav34.so."""
    with suppress(OSError):
        yield from (path.stem for path in (root / "etc/libibverbs.d").glob("*.driver"))


def _rdma_drivers(root: Path) -> set[str]:
    found = set()
    for device in (root / "sys/class/infiniband").glob("*"):
        with suppress(OSError):
            found.add((device / "device/driver").resolve(strict=True).name)
    return found


def _nccl(root: Path) -> Iterator[tuple[str, str]]:
    """Path and version of every NCCL in the image: from the wheel and from the system."""
    places = [
        place
        for folder in sys.path
        if folder
        for place in sorted(Path(folder).glob("nvidia/*/lib"))
    ]
    places += [root / folder.lstrip("/") for folder in _LIBRARY_FOLDERS]
    seen = set()
    for place in places:
        path = place / "libnccl.so.2"
        with suppress(OSError, AttributeError):
            real = path.resolve(strict=True)
            if real in seen:
                continue
            seen.add(real)
            number = ctypes.c_int()
            ctypes.CDLL(str(real)).ncclGetVersion(ctypes.byref(number))
            yield str(path), nccl_version(number.value)


def nccl_version(number: int) -> str:
    """Format NCCL_VERSION of nccl.h: 22304 is 2.23.4; before 2.9, 2804 is 2.8.4."""
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _limit(kind: int) -> int:
    _, hard = resource.getrlimit(kind)  # the agents raise the soft limit to the hard limit
    return UNLIMITED if hard == resource.RLIM_INFINITY else hard


def _size(path: Path) -> int | None:
    try:
        return shutil.disk_usage(str(path)).total
    except OSError:
        return None


def _can_write(folder: str) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return True
    except OSError:
        return False
