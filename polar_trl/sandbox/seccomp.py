"""Build the seccomp filter of bubblewrap and local sandboxes: a classic BPF program that denies what no agent needs.

What is denied follows Docker's default profile for a container without capabilities (docs.docker.com, "Seccomp
security profiles"): namespaces, mounts, keyrings, bpf, perf, kernel modules, clocks, the memory of other processes,
io_uring, and sockets of families other than Unix, IPv4, IPv6 and route netlink. A number that is newer than this list,
or of the x32 or the 32-bit interface, gets ENOSYS, with which C libraries fall back to older calls; so does clone3,
whose flags lie in memory that a filter cannot read. Debugging (ptrace) stays.

Formats: the kernel's "Seccomp BPF" (userspace-api/seccomp_filter), seccomp(2), linux/filter.h, linux/audit.h. Numbers:
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h, which aarch64 has.
"""

import errno
import functools
import platform
import struct

from polar_trl.errors import SandboxError

AUDIT_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LAST_KNOWN = 466
"""removexattrat, the last call that was looked at; x32's numbers, which begin at 1 << 30, lie above it too."""

DENIED: dict[str, tuple[int | None, int | None]] = {
    # namespaces, mounts, root
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    # files by handle, which lead around every mount; quotas; watching all files
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    # keyrings belong to a user of the machine, not to a namespace
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # kernel: programs, counters, log, modules, clocks, switches
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "lookup_dcookie": (212, 18),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    # memory of other processes, and faults that stop the kernel halfway
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "userfaultfd": (323, 282),
    # of the past
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
}
"""Numbers on x86_64 and aarch64 of what ends with EPERM; None: that machine has no such call."""
UNKNOWN = {
    "clone3": (435, 435),
    "io_setup": (206, 0),  # its requests are counted for the whole machine, fs.aio-max-nr
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
"""Numbers of what ends with ENOSYS, as on a kernel without it."""
CLONE, PERSONALITY, IOCTL, SOCKET, SOCKETPAIR = (56, 220), (135, 92), (16, 29), (41, 198), (53, 199)

NEW_NAMESPACES = 0x7E02_0000
"""CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET."""
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, Linux 32, both with a version of 2.6, and the question: those that Docker lets through."""
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
AF_NETLINK, NETLINK_ROUTE = 16, 0
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""

# of linux/bpf_common.h: load a word of seccomp_data; jump if equal, greater, a bit set; return
_LOAD, _EQUAL, _GREATER, _BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NR, _ARCH, _ARGS = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF_0000, 0x0005_0000

Instruction = tuple[int, int, int, int]


@functools.cache
def build_filter(machine: str | None = None) -> bytes:
    """Build the program, an array of `struct sock_filter`.

    Args:
        machine: "x86_64" or "aarch64"; None is this machine.

    Raises `SandboxError` for any other.
    """
    machine = machine or platform.machine()
    column = _find_column(machine)
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, AUDIT_ARCHES[machine]),
        _fail(errno.ENOSYS),
        (_LOAD, 0, 0, _NR),
        (_GREATER, 0, 1, LAST_KNOWN),
        _fail(errno.ENOSYS),
    ]
    for table, code in ((DENIED, errno.EPERM), (UNKNOWN, errno.ENOSYS)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                program += _on_call(number, [_fail(code)])
    program += _on_call(CLONE[column], [_load(0), (_BIT, 0, 1, NEW_NAMESPACES), _fail(errno.EPERM), _allow()])
    program += _on_call(PERSONALITY[column], [_load(0), *_allow_any(PERSONALITIES), _fail(errno.EPERM)])
    typing = [part for code in TERMINAL_INPUT for part in ((_EQUAL, 0, 1, code), _fail(errno.EPERM))]
    program += _on_call(IOCTL[column], [_load(1), *typing, _allow()])
    for numbers in (SOCKET, SOCKETPAIR):
        route = [(_EQUAL, 0, 3, AF_NETLINK), _load(2), (_EQUAL, 0, 1, NETLINK_ROUTE), _allow()]
        families = [_load(0), *_allow_any(FAMILIES), *route, _fail(errno.EAFNOSUPPORT)]
        program += _on_call(numbers[column], families)
    program.append(_allow())
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def list_numbers() -> dict[str, int | None]:
    """List this machine's numbers of the calls in the tables. Raises `SandboxError` where it has no tables."""
    column = _find_column(platform.machine())
    return {name: numbers[column] for name, numbers in {**DENIED, **UNKNOWN, "clone": CLONE}.items()}


def _find_column(machine: str) -> int:
    if machine not in AUDIT_ARCHES:
        raise SandboxError(f"there is no system call filter for {machine}; use the docker sandbox")
    return list(AUDIT_ARCHES).index(machine)


def _on_call(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body`, which always returns, where the call has this number."""
    return [(_EQUAL, 0, len(body), number), *body]


def _load(argument: int) -> Instruction:
    # the low half, on these little-endian machines: the kernel reads no more of any argument that is looked at here
    return (_LOAD, 0, 0, _ARGS + 8 * argument)


def _allow_any(values: tuple[int, ...]) -> list[Instruction]:
    return [part for value in values for part in ((_EQUAL, 0, 1, value), _allow())]


def _allow() -> Instruction:
    return (_RETURN, 0, 0, _ALLOW)


def _fail(code: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)
