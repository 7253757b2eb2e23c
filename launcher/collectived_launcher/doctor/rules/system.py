"""The kernel, limits, memory, clock, and the folder of sockets."""

from __future__ import annotations

from collections.abc import Iterator

from collectived_launcher.doctor.facts import Clock, Folder, Gpus, Kernel, LimitFacts, MemoryFacts
from collectived_launcher.doctor.finding import Finding, failure, ok, warning
from collectived_proto.ipc.job_files import MAX_SOCKET_PATH
from collectived_proto.report.quantities import format_memory

# A worker was seen to hold 22 descriptors and 7 per client, and has more for other workers; the launcher holds 4 per
# process.
FEW_DESCRIPTORS, TOO_FEW_DESCRIPTORS = 1024, 64
# A daemon has up to 12 threads, a client as many as its libraries start.
FEW_TASKS, TOO_FEW_TASKS = 256, 32
# An input arena begins with 8 MiB per client, and a daemon itself takes some 40 MiB.
LITTLE_MEMORY, TOO_LITTLE_MEMORY = 1 << 30, 256 << 20
_MIB = 1 << 20


def check_kernel(kernel: Kernel) -> Iterator[Finding]:
    if kernel.system == "Linux":
        yield ok("kernel", f"Linux {kernel.release}")
    else:
        yield failure(
            "kernel",
            f"{kernel.system} {kernel.release}: daemons run on Linux alone",
            "run them on a Linux host, and reach its worker over gRPC: COLLECTIVED_WORKER=host:port "
            "(docs/guide/grpc.md)",
        )


def check_memfd(kernel: Kernel) -> Iterator[Finding]:
    if not kernel.memfd:
        yield ok("memfd", "shared memory can be sealed against shrinking and future writing; /dev/shm is not needed")
    else:
        yield failure(
            "memfd",
            f"shared memory cannot be made and sealed: {kernel.memfd}",
            "use Linux 5.1 or newer; in a container, let its seccomp profile allow memfd_create and F_ADD_SEALS",
        )


def check_pidfd(kernel: Kernel) -> Iterator[Finding]:
    if kernel.pidfd:
        yield failure(
            "pidfd",
            f"the kernel gives no pidfd, by which the end of a process is noticed: {kernel.pidfd}",
            "use Linux 5.3 or newer; in a container, let its seccomp profile allow pidfd_open",
        )
    elif kernel.peer_pidfd:
        yield ok("pidfd", "pidfd_open works (SO_PEERPIDFD, since Linux 6.5, does not, and is not missed)")
    else:
        yield ok("pidfd", "SO_PEERPIDFD and pidfd_open work: the end of a process is noticed at once")


def check_sockets(kernel: Kernel) -> Iterator[Finding]:
    if not kernel.seqpacket:
        yield ok("sockets", "Unix SOCK_SEQPACKET sockets pass messages and descriptors")
    else:
        yield failure(
            "sockets",
            f"Unix SOCK_SEQPACKET sockets do not work: {kernel.seqpacket}",
            "use a Linux kernel with Unix sockets (CONFIG_UNIX); some sandboxes, such as gVisor, forbid SCM_RIGHTS",
        )


def check_descriptors(limits: LimitFacts) -> Iterator[Finding]:
    most = limits.descriptors
    if most is None or most >= FEW_DESCRIPTORS:
        yield ok("descriptors", "no limit" if most is None else f"{most} files and sockets may be open at once")
        return
    hard = limits.descriptors_most
    wished = 65536 if hard is None else min(65536, hard)
    if wished > most:
        remedy = f"ulimit -n {wished} before the start, or LimitNOFILE={wished} in the unit"
    else:
        remedy = "raise the hard limit: nofile in /etc/security/limits.conf, or --ulimit nofile=65536 of the container"
    text = f"only {most} files and sockets may be open at once (a worker holds about 22, and 7 per client)"
    yield (failure if most < TOO_FEW_DESCRIPTORS else warning)("descriptors", text, remedy)


def check_locked_memory(limits: LimitFacts, gpus: Gpus) -> Iterator[Finding]:
    most = limits.locked
    shown = "no limit" if most is None else format_memory(most)
    if not gpus.rdma:
        yield ok("locked memory", f"{shown}; not needed: links between hosts are TCP")
    elif most is None:
        yield ok("locked memory", f"{shown}, as NCCL needs it for {', '.join(gpus.rdma)}")
    else:
        yield warning(
            "locked memory",
            f"{shown} may be locked, and NCCL locks what it sends by {', '.join(gpus.rdma)}",
            "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or --ulimit memlock=-1 of the container",
        )


def check_processes(limits: LimitFacts) -> Iterator[Finding]:
    left = limits.tasks_left
    if left is None or left >= FEW_TASKS:
        room = "no limit of a control group" if left is None else f"{left} more may be started here"
        yield ok("processes", room)
        return
    remedy = "raise pids.max of the control group: TasksMax= in the unit, --pids-limit of the container"
    text = f"only {left} more processes and threads may be started in this control group"
    yield (failure if left < TOO_FEW_TASKS else warning)("processes", text, remedy)


def check_memory(memory: MemoryFacts) -> Iterator[Finding]:
    seen = memory.total if memory.seen_limit is None else min(memory.total, memory.seen_limit)
    share = seen // 2
    limit = memory.total if memory.limit is None else memory.limit
    available, limit_text, most = map(format_memory, (memory.available, limit, share))
    text = f"{available} of {limit_text} are available; a worker takes up to {most}"
    if memory.available < LITTLE_MEMORY:
        grade = failure if memory.available < TOO_LITTLE_MEMORY else warning
        yield grade("memory", text, "end what uses it, or raise the limit of the control group (MemoryMax=, --memory)")
    elif share > memory.available:
        yield warning(
            "memory",
            f"{text}, which is more than there is",
            f"start workers with --memory-limit {memory.available // 2 // _MIB * _MIB}",
        )
    else:
        yield ok("memory", text)


def check_folder(folder: Folder) -> Iterator[Finding]:
    if folder.longest_socket > MAX_SOCKET_PATH:
        yield failure(
            "socket folder",
            f"{folder.path} is too deep: sockets in it have paths of {folder.longest_socket} bytes, the kernel allows "
            f"{MAX_SOCKET_PATH}",
            "set XDG_RUNTIME_DIR to a folder that you own and that has a shorter path",
        )
    elif folder.owner is None and not folder.parent_writable:
        yield failure(
            "socket folder",
            f"{folder.path} is not there, and you may not make it",
            "set XDG_RUNTIME_DIR to a folder that you own",
        )
    elif folder.owner is None:
        yield ok("socket folder", f"{folder.path} (made with mode 0700 when it is needed)")
    elif not folder.is_directory or folder.owner != folder.user:
        what = "belongs to" if folder.is_directory else "is no directory, and belongs to"
        yield failure(
            "socket folder",
            f"{folder.path} {what} uid {folder.owner}, you are {folder.user}",
            "have it removed, or set XDG_RUNTIME_DIR to a folder that you own",
        )
    elif folder.mode is not None and folder.mode & 0o077:
        yield failure(
            "socket folder",
            f"{folder.path} has mode {folder.mode:04o}: others may enter it, and use your workers",
            f"chmod 700 {folder.path}",
        )
    else:
        yield ok("socket folder", f"{folder.path}, which only you may enter (mode {folder.mode or 0:04o})")


def check_clock(clock: Clock) -> Iterator[Finding]:
    match clock.kept:
        case True:
            yield ok("clock", "a time service keeps it")
        case False:
            yield ok("clock", "no time service keeps it; that matters between hosts alone (--hosts measures it)")
        case None:
            yield ok("clock", "the kernel does not say whether a time service keeps it (--hosts measures it)")
