"""The sandbox's own process: reads a job as JSON from stdin, runs it in namespaces, writes what it left behind as JSON to stdout.

Started by runner.py as ``python -I -S inside.py``, never imported by it; standard library alone. Trusted code up to the `execve` of the
command, which then has: no network (an empty network namespace), no process but its own, a root file system of read-only system
directories and two bounded memory file systems, no capability and no way to get one, resource limits, and a clean environment. Where the
kernel refuses any part of that, nothing is run and the answer is ``{"refused": why}``.

Process tree: this process (outside the process namespace, keeps the deadline and the output cap) -> init (process 1 of the namespace) ->
the command. When the command ends, init ends, and the kernel kills whatever is left in the namespace, however it was detached.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import resource
import selectors
import signal
import stat
import sys
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x1, 0x2, 0x4, 0x20, 0x1000, 0x4000, 0x40000
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# RDONLY, NOSUID, NODEV of struct mount_attr, which are those of mount(2).
_READ_ONLY = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc/alternatives", "etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Who a sandbox runs as where it is started by root: a number that owns nothing, another one for each, since process limits count per user.
_FIRST_UID, _NUM_UIDS = 2_000_000, 1_000_000
# Its number inside the namespace: not 0, so that `execve` leaves it no capability.
_INSIDE_UID = 1000
_WORK = "work"
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC"}
_BLOCK = 65_536
# Of `st_blocks`.
_BLOCK_UNIT = 512
# This process and init run as the same user and count.
_OWN_PROCESSES = 2


class Refused(Exception):
    """The kernel does not permit what isolation needs."""


def main() -> None:
    """One job, one answer."""
    job = json.load(sys.stdin.buffer)
    try:
        _enter_namespaces()
        root = _make_root(job)
        _unpack(root / _WORK, job["files"])
    except (OSError, Refused) as error:
        json.dump({"refused": str(error)}, sys.stdout)
        return
    json.dump(_run(job, root), sys.stdout)


def _enter_namespaces() -> None:
    host_uid, host_gid = os.getuid(), os.getgid()
    if host_uid == 0:
        host_uid = host_gid = _FIRST_UID + os.getpid() % _NUM_UIDS
        os.setgroups([])
        os.setresgid(host_gid, host_gid, host_gid)
        os.setresuid(host_uid, host_uid, host_uid)
        # Changing the user hides /proc/self from its owner; the maps below are written there.
        _check(_LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
    os.unshare(_NAMESPACES)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{_INSIDE_UID} {host_uid} 1")
    Path("/proc/self/gid_map").write_text(f"{_INSIDE_UID} {host_gid} 1")
    # A namespace of its own would give the command capabilities again.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def _make_root(job: dict) -> Path:
    """A root file system in memory at /tmp: system directories read-only, /work and /tmp empty and bounded."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    root = Path("/tmp")
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for name in (_WORK, "tmp", "dev", "proc", "etc", "old"):
        (root / name).mkdir()
    (root / "etc" / "passwd").write_text(f"user:x:{_INSIDE_UID}:{_INSIDE_UID}::/work:/bin/sh\n")
    for name in (_WORK, "tmp"):
        _mount("tmpfs", root / name, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={job['disk_bytes']},nr_inodes={job['max_files']},mode=755")
    for name in _SYSTEM:
        _show(Path("/") / name, root / name)
    for name in _DEVICES:
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", root / "dev" / name, None, _MS_BIND)
    return root


def _show(source: Path, target: Path) -> None:
    """A system directory, read-only; /bin and the like are links on most systems and stay links."""
    if source.is_symlink():
        target.symlink_to(source.readlink())
    elif source.exists():
        if source.is_dir():
            target.mkdir()
        else:
            target.touch()
        _mount(source, target, None, _MS_BIND | _MS_REC)
        attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
        _check(
            _LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, str(target).encode(), _AT_RECURSIVE, attributes, ctypes.sizeof(attributes)),
            f"mount_setattr {target}",
        )


def _unpack(work: Path, files: list[dict]) -> None:
    """The job's files, parents first; whoever packed them read them from a directory, so no name leads out of it."""
    for entry in files:
        path = work / entry["path"]
        if entry["kind"] == "directory":
            path.mkdir()
        elif entry["kind"] == "link":
            path.symlink_to(entry["target"])
        else:
            path.write_bytes(base64.b64decode(entry["content"]))
            path.chmod(0o755 if entry["is_executable"] else 0o644)


def _run(job: dict, root: Path) -> dict:
    """Runs the command to its end, its deadline or its output cap, whichever comes first, and describes /work."""
    reading, writing = zip(os.pipe(), os.pipe(), strict=True)
    init = os.fork()
    if init == 0:
        _init(job, root, writing)
    for descriptor in writing:
        os.close(descriptor)
    outputs, ended = _collect(init, reading, job["output_bytes"], time.monotonic() + job["deadline_s"])
    if ended != "exit":
        os.kill(init, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(init, 0)[1])
    if ended == "exit" and status < 0:
        ended = "killed"
    texts = [base64.b64encode(output).decode() for output in outputs]
    return {"ended": ended, "exit_status": status, "stdout": texts[0], "stderr": texts[1], "files": _describe(root / _WORK)}


def _init(job: dict, root: Path, outputs: tuple[int, ...]) -> None:
    """Process 1: enters the new root, starts the command, reaps what it leaves, exits as it did. Never returns."""
    try:
        _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        # Its own copy of the mounts: the process outside keeps seeing /work at its old place.
        os.unshare(os.CLONE_NEWNS)
        os.chdir(root)
        # Some containers permit no new /proc; then there is none.
        with contextlib.suppress(Refused):
            _mount("proc", "proc", "proc", _READ_ONLY)
        _check(_LIBC.syscall(_SYS_PIVOT_ROOT[platform.machine()], b".", b"old"), "pivot_root")
        _check(_LIBC.umount2(b"/old", _MNT_DETACH), "umount2")
        # The outermost layer too: only /work and /tmp can be written.
        _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _READ_ONLY)
        os.chdir("/work")
        command = os.fork()
        if command == 0:
            _exec(job, outputs)
        for descriptor in outputs:
            os.close(descriptor)
        while True:
            pid, status = os.wait()
            if pid == command:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
    finally:
        os._exit(126)


def _exec(job: dict, outputs: tuple[int, ...]) -> None:
    """Becomes the command."""
    try:
        for target, descriptor in zip((0, 1, 2), (os.open("/dev/null", os.O_RDONLY), *outputs), strict=True):
            os.dup2(descriptor, target)
        os.closerange(3, 1024)
        os.umask(0o022)
        for name, limit in (
            (resource.RLIMIT_CPU, job["cpu_s"]),
            (resource.RLIMIT_AS, job["memory_bytes"]),
            (resource.RLIMIT_NPROC, job["processes"] + _OWN_PROCESSES),
            (resource.RLIMIT_FSIZE, job["file_bytes"]),
            (resource.RLIMIT_NOFILE, job["open_files"]),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(name, (limit, limit))
        _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        os.execve(job["argv"][0], job["argv"], _ENVIRONMENT)
    finally:
        os._exit(127)


def _collect(init: int, descriptors: tuple[int, ...], max_bytes: int, deadline_s: float) -> tuple[list[bytes], str]:
    """Both outputs up to their cap, and how the command ended: ``exit``, ``deadline`` or ``output``.

    Waits for init itself: a command can close its outputs and stay. Once init is gone nothing is left that could write.
    """
    outputs = {descriptor: bytearray() for descriptor in descriptors}
    ended, process = "", os.pidfd_open(init)
    with selectors.DefaultSelector() as selector:
        for descriptor in (*descriptors, process):
            selector.register(descriptor, selectors.EVENT_READ)
        while not ended:
            left_s = deadline_s - time.monotonic()
            ready = {key.fd for key, _ in selector.select(left_s)} if left_s > 0 else set[int]()
            for descriptor in ready - {process}:
                block = os.read(descriptor, _BLOCK)
                outputs[descriptor] += block
                if not block:
                    selector.unregister(descriptor)
                elif len(outputs[descriptor]) > max_bytes:
                    ended = "output"
            if not ready:
                ended = "deadline"
            elif ready == {process}:
                ended = "exit"
    return [bytes(output[:max_bytes]) for output in outputs.values()], ended


def _describe(work: Path) -> list[list[str]]:
    """Every path below /work with what it is; follows no link, opens regular files only. Nested deeper than a path can name: out of reach."""
    found, waiting = [], [work]
    while waiting:
        for path in _entries(waiting.pop()):
            identity = _identity(path)
            if identity == "directory":
                waiting.append(path)
            found.append([_text(os.fsencode(path.relative_to(work))), identity])
    return sorted(found)


def _entries(directory: Path) -> list[Path]:
    try:
        directory.chmod(0o700)
        return list(directory.iterdir())
    except OSError:
        return []


def _identity(path: Path) -> str:
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            return "link " + _text(os.fsencode(path.readlink()))
        if not stat.S_ISREG(status.st_mode):
            return "directory" if stat.S_ISDIR(status.st_mode) else "other"
        if status.st_size > status.st_blocks * _BLOCK_UNIT:
            # Holes cost no memory and would take any time to read.
            return f"sparse {status.st_size}"
        path.chmod(0o600)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return f"{'program' if status.st_mode & stat.S_IXUSR else 'file'} {digest}"
    except OSError:
        return "out of reach"


def _text(name: bytes) -> str:
    """Names are bytes; Latin-1 maps each to one character, which JSON can hold."""
    return name.decode("latin-1")


def _mount(source: str | Path | None, target: str | Path, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if value is None else str(value).encode() for value in (source, target, kind)]
    _check(_LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
