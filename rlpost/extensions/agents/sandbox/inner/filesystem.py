"""The file system of a sandbox: a bounded tmpfs over read-only folders, visible only inside.

Everything is mounted in the sandbox's mount namespace and disappears with it; no folder is made on
the host.
"""

from __future__ import annotations

import os
from typing import TypedDict

from rlpost.extensions.agents.sandbox.inner import kernel

UID = 1000  # the agent's user and group inside
HOME, WORK = "/home/agent", "/work"
FOLDERS = (WORK, HOME, "/tmp", "/var/tmp", "/run", "/dev", "/proc")
DEVICES = ("null", "zero", "full", "random", "urandom")
# Files of the host's /etc that programs need to start; none about users or services.
ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust", "ca-certificates"),
)
ETC_NETWORK = ("resolv.conf", "hosts", "services", "protocols")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
BASES = ("/tmp", "/mnt", "/var/tmp", "/run", "/opt")  # the first that exists takes the tmpfs
PASSWD = f"root:x:0:0:root:/root:/bin/sh\nagent:x:{UID}:{UID}:agent:{HOME}:/bin/sh\n"
GROUP = f"root:x:0:\nagent:x:{UID}:\n"


class LimitValues(TypedDict):
    """The limits of ``Limits`` that are enforced inside the sandbox."""

    cores: int
    memory_mib: int
    processes: int
    open_files: int
    file_mib: int
    disk_mib: int
    files: int
    network: bool


class Spec(TypedDict):
    """Description of a sandbox for its launcher."""

    limits: LimitValues
    image: str | None
    read_only: list[str]
    user: int
    group: int
    slot: int


def open_sources(spec: Spec) -> dict[str, int]:
    """Open the folders and files to bind, by target path.

    Call it in the mount namespace of the sandbox, before the tmpfs covers the paths and before root
    changes to the agent's user.
    """
    binds = [(path, path) for path in spec["read_only"]]
    if spec["image"]:
        binds.append((spec["image"], spec["image"]))
    else:
        binds += [(path, path) for path in SYSTEM]
        binds += [(f"/etc/{name}", f"/etc/{name}") for name in ETC]
    if spec["limits"]["network"]:
        binds += [(f"/etc/{name}", f"/etc/{name}") for name in ETC_NETWORK]
    optional = {path for path in SYSTEM} | {f"/etc/{name}" for name in ETC + ETC_NETWORK}
    sources: dict[str, int] = {}
    for target, path in binds:
        if os.path.islink(path) and path in SYSTEM and not spec["image"]:
            continue  # /bin -> usr/bin is made as a link
        try:
            sources[target] = os.open(os.path.realpath(path), os.O_PATH)
        except OSError:
            if path not in optional:
                raise
    return sources


def enter(spec: Spec, sources: dict[str, int]) -> None:
    """Build the file system that ``spec`` describes and make it the root of this process.

    ``sources``: the result of ``open_sources``.
    """
    limits = spec["limits"]
    base = next(path for path in BASES if os.path.isdir(path))
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    options = f"size={limits['disk_mib']}m,nr_inodes={limits['files'] + 64},mode=755"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", base, "tmpfs", flags, options)
    root = f"{base}/root"
    os.mkdir(root, 0o755)
    if spec["image"]:
        _overlay(base, root, sources.pop(spec["image"]))
    else:
        kernel.mount(root, root, "", kernel.MS_BIND)  # a root must be a mount
        _system(root)
    for target, handle in sources.items():
        _bind_read_only(root + target, handle)
    for folder in FOLDERS:
        os.makedirs(root + folder, exist_ok=True)
    _devices(base, root)
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        os.chmod(root + folder, 0o1777)
    _etc(root)
    kernel.mount("proc", root + "/proc", "proc", flags | kernel.MS_NOEXEC)
    old = root + "/.previous"
    os.mkdir(old)
    kernel.pivot_root(root, old)
    os.chdir("/")
    kernel.unmount("/.previous")
    os.rmdir("/.previous")
    for handle in sources.values():
        os.close(handle)


def seal_proc() -> None:
    """Disable nested user namespaces, then make the kernel's settings read-only."""
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:
        pass  # the filter of system calls denies them as well
    kernel.mount("/proc/sys", "/proc/sys", "", kernel.MS_BIND)
    kernel.restrict_mount("/proc/sys", kernel.ATTR_RDONLY)


def _system(root: str) -> None:
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)


def _overlay(base: str, root: str, image: int) -> None:
    """Mount an image folder with a writable layer on the tmpfs."""
    for name in ("upper", "scratch"):
        os.mkdir(f"{base}/{name}", 0o755)
    options = f"lowerdir=/proc/self/fd/{image},upperdir={base}/upper,workdir={base}/scratch"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    try:
        kernel.mount("overlay", root, "overlay", flags, options + ",userxattr")
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}; an image needs overlayfs in user namespaces (Linux 5.11)",
        ) from None
    finally:
        os.close(image)


def _bind_read_only(target: str, handle: int) -> None:
    source = f"/proc/self/fd/{handle}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _touch(target)
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    attributes = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
    kernel.restrict_mount(target, attributes)


def _touch(path: str) -> None:
    if os.path.islink(path):
        os.unlink(path)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _devices(base: str, root: str) -> None:
    kernel.mount("tmpfs", f"{root}/dev", "tmpfs", kernel.MS_NOSUID, "size=64k,mode=755")
    os.mkdir(f"{base}/shm")  # so that /dev/shm counts as disk
    os.mkdir(f"{root}/dev/shm")
    kernel.mount(f"{base}/shm", f"{root}/dev/shm", "", kernel.MS_BIND)
    for name in DEVICES:
        target = f"{root}/dev/{name}"
        _touch(target)
        kernel.mount(f"/dev/{name}", target, "", kernel.MS_BIND)
        kernel.restrict_mount(target, kernel.ATTR_NOSUID)
    os.mkdir(f"{root}/dev/pts")
    kernel.mount("devpts", f"{root}/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=620")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0"}
    links |= {"stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
    for name, target in links.items():
        os.symlink(target, f"{root}/dev/{name}")


def _etc(root: str) -> None:
    os.makedirs(f"{root}/etc", exist_ok=True)
    texts = {"passwd": PASSWD, "group": GROUP, "hosts": "127.0.0.1 localhost\n::1 localhost\n"}
    texts["nsswitch.conf"] = "passwd: files\ngroup: files\nhosts: files dns\n"
    for name, text in texts.items():
        path = f"{root}/etc/{name}"
        if os.path.exists(path) and name != "passwd":
            continue
        try:
            with open(path, "w") as file:
                file.write(text)
        except OSError:
            pass  # an image whose file belongs to another user keeps it
