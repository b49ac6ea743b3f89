"""The system-call filter of commands: a denied call fails with EPERM, the program continues.

It denies calls that change the host or reach past the namespaces, and calls that allocate memory
which no limit counts; buffers of sockets keep their size. The filter is a BPF program for x86_64
and aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import sys

from rlpost.extensions.agents.sandbox.inner import kernel

ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); None where the machine lacks the call
DENIED: dict[str, tuple[int | None, int | None]] = {
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # kernel keyrings, which no namespace separates
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "fanotify_init": (300, 262),
    # memory that belongs to no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
CLONE, CLONE3 = (56, 220), (435, 435)
SOCKET, SOCKETPAIR, SETSOCKOPT = (41, 198), (53, 199), (54, 208)
IOCTL, PRLIMIT, SETPRIORITY = (16, 29), (302, 261), (141, 140)
FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6
NETLINK, NETLINK_ROUTE = 16, 0
SOL_SOCKET, BUFFER_SIZES = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and their FORCE forms
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
X32 = 0x40000000

LOAD, EQUAL, GREATER_EQUAL, SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCH, ARGUMENT_0, ARGUMENT_1, ARGUMENT_2 = 0, 4, 16, 24, 32


class _Program:
    """Instructions; each test either returns at once or continues with the next instruction."""

    def __init__(self) -> None:
        self.code = b""

    def add(self, code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        self.code += struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)

    def load(self, offset: int) -> None:
        self.add(LOAD, offset)

    def verdict_if(self, test: int, value: int, verdict: int) -> None:
        self.add(test, value, 0, 1)
        self.add(RETURN, verdict)

    def for_call(self, number: int, body: _Program) -> None:
        """Run ``body`` for one call only; the body ends with a verdict."""
        self.load(NUMBER)
        self.add(EQUAL, number, 0, len(body.code) // 8)
        self.code += body.code


def denied(number: int = errno.EPERM) -> int:
    """Return the verdict: fail with this error number."""
    return DENY | number


def program(machine: str = kernel.MACHINE) -> bytes:
    """Return the filter as instructions of 8 bytes. Raises KeyError on other machines."""
    column = {"x86_64": 0, "aarch64": 1}[machine]
    rules = _Program()
    rules.load(ARCH)
    rules.add(EQUAL, ARCHITECTURE[machine], 1, 0)
    rules.add(RETURN, KILL)  # 32-bit programs have other numbers
    rules.load(NUMBER)
    if machine == "x86_64":
        rules.verdict_if(GREATER_EQUAL, X32, denied(errno.ENOSYS))
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            rules.verdict_if(EQUAL, number, denied())
    # Its flags are in memory that BPF cannot read. After ENOSYS the C library uses clone.
    rules.verdict_if(EQUAL, CLONE3[column], denied(errno.ENOSYS))
    # Not NEW_TIME: in clone these bits are part of the exit signal.
    rules.for_call(CLONE[column], _deny(ARGUMENT_0, SET, kernel.NEW_ANY & ~kernel.NEW_TIME))
    rules.for_call(SOCKET[column], _families())
    rules.for_call(SOCKETPAIR[column], _families())
    rules.for_call(SETSOCKOPT[column], _without_buffer_sizes())
    rules.for_call(IOCTL[column], _deny(ARGUMENT_1, EQUAL, TIOCSTI, TIOCLINUX))
    rules.for_call(PRLIMIT[column], _only_zero(ARGUMENT_0))
    rules.for_call(SETPRIORITY[column], _only_zero(ARGUMENT_1))
    rules.add(RETURN, ALLOW)
    return rules.code


def _deny(argument: int, test: int, *values: int) -> _Program:
    body = _Program()
    body.load(argument)
    for value in values:
        body.verdict_if(test, value, denied())
    body.add(RETURN, ALLOW)
    return body


def _only_zero(argument: int) -> _Program:
    body = _Program()
    body.load(argument)
    body.verdict_if(EQUAL, 0, ALLOW)
    body.add(RETURN, denied())
    return body


def _without_buffer_sizes() -> _Program:
    """Let sockets keep the size of their buffers, which hold data that belongs to no process.

    The call succeeds, as it does in the kernel when it caps a size.
    """
    body = _Program()
    body.load(ARGUMENT_1)
    body.add(EQUAL, SOL_SOCKET, 1, 0)
    body.add(RETURN, ALLOW)
    body.load(ARGUMENT_2)
    for option in BUFFER_SIZES:
        body.verdict_if(EQUAL, option, denied(0))
    body.add(RETURN, ALLOW)
    return body


def _families() -> _Program:
    body = _Program()
    body.load(ARGUMENT_0)
    for family in FAMILIES:
        body.verdict_if(EQUAL, family, ALLOW)
    body.add(EQUAL, NETLINK, 1, 0)
    body.add(RETURN, denied(errno.EAFNOSUPPORT))
    body.load(ARGUMENT_2)
    body.verdict_if(EQUAL, NETLINK_ROUTE, ALLOW)
    body.add(RETURN, denied(errno.EAFNOSUPPORT))
    return body


def install(code: bytes) -> None:
    """Apply a filter to this process irrevocably. Needs no-new-privileges."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program_header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    assert sys.byteorder == "little"
    PR_SET_SECCOMP, FILTER = 22, 2
    header = ctypes.create_string_buffer(program_header, len(program_header))
    result = kernel.libc.prctl(
        PR_SET_SECCOMP, ctypes.c_ulong(FILTER), ctypes.c_ulong(ctypes.addressof(header)), 0, 0
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "seccomp filter refused")
