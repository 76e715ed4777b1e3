"""Supervise one shell command: run it under a deadline, kill every process that it started, report its output.

    python -I -S supervise.py PARENT_PID TIMEOUT_S enclosed FILTER_BYTES ROOT DISK [SHOWN ...] < input > report
    python -I -S supervise.py PARENT_PID TIMEOUT_S plain < command > report

Enclosed, the command gets namespaces of its own, which root may make, and others where the system lets them. It sees
and can signal nothing but what it started, and can change no file but those of DISK, the session's work/, home/ and
tmp/, the last of which is its /tmp and /var/tmp; of ROOT, where all sessions are, it sees nothing else. SHOWN are
folders that it reads although they lie where it has a folder of its own. Small models do write `kill -9 -1`,
`rm -rf /tmp/*` and `rm /dev/null`. The first FILTER_BYTES of the input, before the command, are a seccomp program: in
a user namespace of its own an agent could mount the machine's control groups and end any process by `cgroup.kill`.
Plain, it runs among the user's other processes and files.

Either way the process makes itself the subreaper of all that the command starts: a daemon that forks twice, calls
setsid or clears its environment is still a descendant, because orphans come back here instead of going to init. When
the command ends, its deadline passes, SIGTERM arrives or the parent dies (the kernel sends SIGTERM then), it stops all
descendants, so that none can fork on, and kills them.

The report is a line "KIND CODE STDOUT_BYTES STDERR_BYTES", then the tails of both streams. KIND is "exit", "timeout",
"killed", "failed" (no shell or no namespaces; CODE is the errno) or "stuck" (something would not die). Output is
drained here, so a flood costs the trainer neither memory nor its interpreter lock.

Runs as a script, with no more imports than 12 ms of CPU buy, since a training step starts dozens of these.
"""

import ctypes
import os
import select
import signal
import struct
import sys
import time

TAIL_BYTES = 64 * 1024
MAX_PIPE_BYTES = 1 << 20  # fs.pipe-max-size, which no program without CAP_SYS_RESOURCE passes
KILL_LIMIT_S = 30.0
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # Linux 5.12, all architectures
READ_ONLY, NO_DEVICES = 0x1, 0x4
SCRATCH = (b"/tmp", b"/var/tmp")
SHARED_MEMORY = b"/dev/shm"
DEVICES = tuple(b"/dev/" + name for name in b"null zero full random urandom tty ptmx pts".split())
"""All that root keeps: others could not write a disk anyway."""
PROC_READ_ONLY = (b"/proc/bus", b"/proc/fs", b"/proc/irq", b"/proc/pressure", b"/proc/sys", b"/proc/sysrq-trigger")
# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service: root keeps what concerns its own files
# and processes; with more it could take these mounts away
CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 10)
# Python ignores the first two, and an ignored signal stays ignored across exec: `yes | head` would misbehave.
SHELL_DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGCHLD)
libc = ctypes.CDLL(None, use_errno=True)


class Tail:
    """The last `TAIL_BYTES` of a stream, in bounded memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_open = True
        self._buffer = bytearray()
        os.set_blocking(fd, False)

    def drain(self) -> None:
        """Read the available bytes, at most those of a whole pipe, so that one stream cannot starve the rest."""
        for _ in range(MAX_PIPE_BYTES // TAIL_BYTES):
            try:
                block = os.read(self.fd, TAIL_BYTES)
            except BlockingIOError:
                return
            if not block:
                self.is_open = False
                return
            self._buffer += block
            del self._buffer[:-TAIL_BYTES]

    def read(self) -> bytes:
        return bytes(self._buffer)


class Command:
    """The shell that runs the command, and its exit code. Raises `OSError` if the shell cannot be started."""

    def __init__(self, text: bytes, stdout: int, stderr: int) -> None:
        self.exit_code: int | None = None
        start = start_enclosed if sys.argv[3] == "enclosed" else start_plain
        self.pid = start(text, stdout, stderr)

    def reap(self) -> bool:
        """Collect every child that has ended, adopted ones too; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.exit_code = to_exit_code(status)


def start_plain(text: bytes, stdout: int, stderr: int) -> int:
    """Start the shell as one of the user's processes; return its process id."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, stdout, 1),
        (os.POSIX_SPAWN_DUP2, stderr, 2),
    ]
    return os.posix_spawnp(
        "bash",
        [b"bash", b"-c", text],
        os.environb,
        file_actions=actions,
        setsigdef=SHELL_DEFAULTS,
        setsid=True,
    )


def start_enclosed(text: bytes, stdout: int, stderr: int) -> int:
    """Start the shell in namespaces of its own. Raises `OSError` where the kernel allows none.

    Three processes: one to wait for, whose exit code is the shell's; the namespace's init; the shell.

    Returns:
        Process id of the first.
    """
    ready, ready_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            run_outside(text, stdout, stderr, ready_end)
        except OSError as error:
            os.write(ready_end, b"%d" % (error.errno or 0))
        finally:
            os._exit(127)
    os.close(ready_end)
    with open(ready, "rb") as file:
        said = file.read()  # to its end: the shell's exec closes it
    if said == b"ready":
        return pid
    os.waitpid(pid, 0)
    number = int(said.removeprefix(b"ready") or 0)
    raise OSError(number, os.strerror(number))


def run_outside(text: bytes, stdout: int, stderr: int, ready: int) -> None:
    """Open the namespaces, have their init run the shell, and exit as that does. Raises `OSError`."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC
    if libc.unshare(flags) != 0:
        require(libc.unshare(CLONE_NEWUSER | flags))
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    init = os.fork()
    if init == 0:
        try:
            run_init(text, stdout, stderr, ready)
        except OSError as error:
            os.write(ready, b"%d" % (error.errno or 0))
        finally:
            os._exit(127)
    for fd in (stdout, stderr, ready):
        os.close(fd)
    os._exit(to_exit_code(os.waitpid(init, 0)[1]))


def run_init(text: bytes, stdout: int, stderr: int, ready: int) -> None:
    """Be the namespace's init: arrange files, run the shell, and end all when it ends. Raises `OSError`."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    num_filter = int(sys.argv[4])
    program, text = text[:num_filter], text[num_filter:]
    root, disk, *shown = (os.fsencode(word) for word in sys.argv[5:])
    mount(None, b"/", MS_REC | MS_PRIVATE)
    arrange_files(root, disk, shown)
    mount(b"proc", b"/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"proc")
    for path in filter(os.path.exists, PROC_READ_ONLY):  # root without capabilities still owns these
        mount(path, path, MS_BIND)
        set_attributes(path, READ_ONLY)
    os.environ["TMPDIR"] = "/tmp"
    os.write(ready, b"ready")
    shell = os.fork()
    if shell == 0:
        try:
            os.setsid()
            for number in SHELL_DEFAULTS:
                signal.signal(number, signal.SIG_DFL)
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            for capability in range(64):
                if capability not in CAPABILITIES:
                    libc.prctl(PR_CAPBSET_DROP, capability)  # fails for those that this kernel does not know
            install_filter(program)
            os.execvpe("bash", [b"bash", b"-c", text], os.environb)
        except OSError as error:
            os.write(ready, b"%d" % (error.errno or 0))
        finally:
            os._exit(127)
    for fd in (stdout, stderr, ready):
        os.close(fd)
    while True:
        pid, status = os.wait()
        if pid == shell:
            os._exit(to_exit_code(status))


def install_filter(program: bytes) -> None:
    """Apply a filter of system calls to this process and all that it starts, setuid or not. Raises `OSError`."""
    require(libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), None, None, None))
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))  # struct sock_fprog
    require(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), header))


def arrange_files(root: bytes, disk: bytes, shown: list[bytes]) -> None:
    """Give the session its own scratch folders, hide the other sessions, and make the rest read-only."""
    work, home, tmp = (os.path.join(disk, name) for name in (b"work", b"home", b"tmp"))
    shown = [path for path in shown if find_scratch(path)]  # the others are not covered
    sources = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (work, home, *shown)}
    scratch = [path for path in SCRATCH if os.path.isdir(path)]
    own_tmp = b"/proc/self/fd/%d" % os.open(tmp, os.O_PATH | os.O_DIRECTORY)
    for path in scratch:
        mount(own_tmp, path, MS_BIND)
    if os.path.isdir(SHARED_MEMORY):
        mount(b"tmpfs", SHARED_MEMORY, MS_NOSUID | MS_NODEV, b"tmpfs", b"mode=1777")
        scratch.append(SHARED_MEMORY)
    for path in shown:
        mount(b"/proc/self/fd/%d" % sources[path], make_place(path), MS_BIND | MS_REC)
    mount(b"tmpfs", make_place(root), MS_NOSUID | MS_NODEV, b"tmpfs", b"mode=755,size=1m")
    for path in (work, home):
        os.makedirs(path)
        mount(b"/proc/self/fd/%d" % sources[path], path, MS_BIND)
    devices = [path for path in DEVICES if os.geteuid() == 0 and os.path.exists(path)]
    if devices:
        mount(b"devpts", b"/dev/pts", MS_NOSUID | MS_NOEXEC, b"devpts", b"newinstance,ptmxmode=0666,mode=620,max=64")
    for path in devices:
        mount(b"/dev/pts/ptmx" if path == b"/dev/ptmx" else path, path, MS_BIND)
    set_attributes(b"/", READ_ONLY | (NO_DEVICES if devices else 0), flags=AT_RECURSIVE)
    for path in (work, home, *scratch):
        set_attributes(path, 0, READ_ONLY)
    for path in devices:
        set_attributes(path, 0, NO_DEVICES)
    os.chdir(work)  # through the new mounts


def find_scratch(path: bytes) -> bytes | None:
    """Find the scratch folder that a path lies below."""
    return next((top for top in (*SCRATCH, SHARED_MEMORY) if path.startswith(top + b"/")), None)


def make_place(path: bytes) -> bytes:
    """Return a path to mount on, made if it lies in the session's own scratch folders; follow no link of the agent."""
    top = find_scratch(path)
    if top is None:
        return path
    folder = os.open(top, os.O_PATH | os.O_DIRECTORY)
    for name in path[len(top) + 1 :].split(b"/"):
        try:
            below = open_below(folder, name)
        except OSError:  # the agent put something else there, or took rights away
            os.chmod(b"/proc/self/fd/%d" % folder, 0o755)
            place = b"/proc/self/fd/%d/%s" % (folder, name)
            if os.path.islink(place) or (os.path.exists(place) and not os.path.isdir(place)):
                os.unlink(place)
            below = open_below(folder, name)
        os.close(folder)
        folder = below
    return b"/proc/self/fd/%d" % folder


def open_below(folder: int, name: bytes) -> int:
    """Open a folder's subfolder, which is made if it is missing. Raises `OSError` if it is none, or a link."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        os.mkdir(name, dir_fd=folder)
    return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)


def mount(
    source: bytes | None, target: bytes, flags: int, kind: bytes | None = None, data: bytes | None = None
) -> None:
    """Call mount(2). Raises `OSError`."""
    require(libc.mount(source, target, kind, flags, data))


def set_attributes(path: bytes, given: int, taken: int = 0, flags: int = 0) -> None:
    """Give attributes to a mount, and take others from it. Raises `OSError`, as before Linux 5.12."""
    attributes = (ctypes.c_uint64 * 4)(given, taken, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    require(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, size))


def require(result: int) -> None:
    """Raise `OSError` if a call of libc failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def to_exit_code(status: int) -> int:
    """Convert a wait status to an exit code; 128 + n after signal n, as shells have it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def list_descendants() -> set[int]:
    """List the process ids of all descendants of this process, from /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended while we looked, or /proc hides it from us
            children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(below)
        todo += below
    return found


def send(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue  # gone, or of another user: then `kill_descendants` reports that something is left


def raise_priority() -> None:
    """Run before all descendants: thousands of runnable ones would starve us. Others than root have `ulimit -u`."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return


def kill_descendants(command: Command) -> bool:
    """Kill all descendants of this process; False if one is still there after `KILL_LIMIT_S`."""
    limit = time.monotonic() + KILL_LIMIT_S
    if command.reap():
        raise_priority()
    while command.reap():
        if time.monotonic() > limit:
            return False
        stopped: set[int] = set()
        while new := list_descendants() - stopped:
            send(new, signal.SIGSTOP)  # a stopped parent forks no more, so this ends even for a fork bomb
            stopped |= new
            if time.monotonic() > limit:
                break
        send(stopped, signal.SIGKILL)
        time.sleep(0.002)
    return True


def watch(command: Command, tails: list[Tail], wake: int, deadline: float) -> str:
    """Drain output until the command ends ("exit"), SIGTERM comes ("killed") or the deadline ("timeout")."""
    poll = select.poll()
    for fd in (wake, *(tail.fd for tail in tails)):
        poll.register(fd, select.POLLIN)
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return "timeout"
        ready = {fd for fd, _ in poll.poll(min(left_s, 3600.0) * 1000 + 1)}
        for tail in tails:
            if tail.fd in ready:
                tail.drain()
                if not tail.is_open:
                    poll.unregister(tail.fd)
        if wake in ready:
            if signal.SIGTERM in os.read(wake, 4096):
                return "killed"
            command.reap()
            if command.exit_code is not None:
                return "exit"


def listen_for_signals(parent: int) -> int:
    """Turn SIGTERM, SIGCHLD and the death of the parent into bytes on a pipe; its read end."""
    wake, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    for option, value in ((PR_SET_CHILD_SUBREAPER, 1), (PR_SET_PDEATHSIG, signal.SIGTERM)):
        require(libc.prctl(option, ctypes.c_ulong(value), None, None, None))
    if os.getppid() != parent:
        sys.exit("the parent died before the command was started")
    return wake


def write_report(kind: str, code: int, stdout: bytes = b"", stderr: bytes = b"") -> None:
    with open(1, "wb") as file:
        file.write(f"{kind} {code} {len(stdout)} {len(stderr)}\n".encode() + stdout + stderr)


def main() -> None:
    parent, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    deadline = time.monotonic() + timeout_s
    wake = listen_for_signals(parent)
    with open(0, "rb", closefd=False) as file:  # a closed 0 would become one end of a pipe below
        text = file.read()
    (stdout, stdout_end), (stderr, stderr_end) = os.pipe(), os.pipe()
    tails = [Tail(stdout), Tail(stderr)]
    try:
        command = Command(text, stdout_end, stderr_end)
    except OSError as error:
        return write_report("failed", error.errno or 0)
    os.close(stdout_end)
    os.close(stderr_end)
    kind = watch(command, tails, wake, deadline)
    if not kill_descendants(command):
        kind = "stuck"
    for tail in tails:
        tail.drain()
    code = command.exit_code if kind == "exit" and command.exit_code is not None else 0
    write_report(kind, code, *(tail.read() for tail in tails))


if __name__ == "__main__":
    main()
