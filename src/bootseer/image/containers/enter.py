"""Become a container's process without runc: read `config.json`, build the mounts, change the root, run the program.

A script of its own, run by the interpreter of BootSeer with `-I -S` in front of the job, so that it imports the
standard library alone and little of that. It stays in its process group, session and terminal: signals, job control
and the death of the parent reach the program as if there were no container. What it takes of the configuration is what
`runtime_config` writes, without hooks.

Every path of the image is resolved after the root has been changed, so that no link in it leads to the host.
"""

# pathlib would cost more than all the rest:
# ruff: noqa: PTH103, PTH110, PTH112, PTH120, PTH123, PTH211

import ctypes
import json
import os
import re
import resource
import signal
import stat
import sys
from typing import Any, NoReturn

_NEWNS, _NEWIPC, _NEWUSER = 0x00020000, 0x08000000, 0x10000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_BIND, _REC, _PRIVATE, _STRICTATIME = 1 << 12, 1 << 14, 1 << 18, 1 << 24
_FLAGS = {"ro": _RDONLY, "nosuid": _NOSUID, "nodev": _NODEV, "noexec": _NOEXEC, "strictatime": _STRICTATIME}
_NOT_DATA = {*_FLAGS, "rw", "rro", "bind", "rbind", "private", "rprivate", "slave", "rslave", "newinstance"}
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same on all architectures
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CLONE_CLOEXEC = 1 | os.O_CLOEXEC
_MNT_DETACH = 2
_MOUNT_ATTR_RDONLY = 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = re.findall(  # by number
    r"\w+",
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN "
    "SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE "
    "MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE",
)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def checked(result: int, what: str) -> int:
    """The result of a call into libc, or `OSError`."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return int(result)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = (os.fsencode(source), os.fsencode(target), kind.encode())
    checked(libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(data) or None), f"mount {target}")


def read_only(path: str, recursive: bool) -> None:
    """Make a mount read-only in this namespace, whatever other flags it has."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    name = ctypes.c_char_p(os.fsencode(path))
    result = libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, name, ctypes.c_uint(flags), attributes, ctypes.c_size_t(32)
    )
    checked(result, f"make {path} read-only")


def detached(path: str, recursive: bool) -> int:
    """A copy of a mount of the host, to be attached after the root has been changed."""
    flags = _CLONE_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    name = ctypes.c_char_p(os.fsencode(path))
    return checked(libc.syscall(ctypes.c_long(_OPEN_TREE), _AT_FDCWD, name, ctypes.c_uint(flags)), path)


def attach(fd: int, target: str) -> None:
    kind = os.fstat(fd).st_mode
    make_place(target, folder=stat.S_ISDIR(kind))
    empty, name = ctypes.c_char_p(b""), ctypes.c_char_p(os.fsencode(target))
    moved = libc.syscall(ctypes.c_long(_MOVE_MOUNT), fd, empty, _AT_FDCWD, name, ctypes.c_uint(4))  # from: empty path
    checked(moved, f"mount {target}")
    os.close(fd)


def make_place(path: str, *, folder: bool) -> None:
    """A folder or an empty file to mount on, where the image has none."""
    if folder:
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def take_from_host(config: dict[str, Any]) -> tuple[dict[int, int], dict[str, int]]:
    """Everything of the host that the container will see: binds by their number among the mounts (two may have one
    place, and the later one covers the other), devices by their place."""
    binds = {
        number: detached(item["source"], "rbind" in item["options"])
        for number, item in enumerate(config["mounts"])
        if item["type"] == "bind"
    }
    return binds, {f"/dev/{name}": detached(f"/dev/{name}", False) for name in _DEVICES}


def change_root(root: str) -> None:
    mount(root, root, "", _BIND | _REC)
    os.chdir(root)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"changing the root is not known for {os.uname().machine}")
    dot = ctypes.c_char_p(b".")
    checked(libc.syscall(ctypes.c_long(number), dot, dot), "pivot_root")  # the old root lies above the new one now
    checked(libc.umount2(dot, _MNT_DETACH), "leave the host's root")
    os.chdir("/")


def build_mounts(config: dict[str, Any], binds: dict[int, int], devices: dict[str, int]) -> None:
    for number, item in enumerate(config["mounts"]):
        place, options = item["destination"], item["options"]
        if item["type"] == "bind":
            attach(binds[number], place)
            if "ro" in options:
                read_only(place, "rro" in options)
            continue
        make_place(place, folder=True)
        flags = 0
        for word in options:
            flags |= _FLAGS.get(word, 0)
        mount(item["source"], place, item["type"], flags, ",".join(word for word in options if word not in _NOT_DATA))
        if place == "/dev":
            for name, goal in _LINKS.items():
                os.symlink(goal, f"/dev/{name}")
    for place, fd in devices.items():
        attach(fd, place)
    for node in config["linux"]["devices"]:
        os.makedirs(os.path.dirname(node["path"]), exist_ok=True)
        kind = stat.S_IFBLK if node["type"] == "b" else stat.S_IFCHR
        os.mknod(node["path"], kind | node["fileMode"], os.makedev(node["major"], node["minor"]))
        os.chown(node["path"], node["uid"], node["gid"])


def protect(config: dict[str, Any]) -> None:
    linux = config["linux"]
    for path in filter(os.path.exists, linux["readonlyPaths"]):
        attach(detached(path, True), path)
        read_only(path, True)
    for path in filter(os.path.exists, linux["maskedPaths"]):
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", _RDONLY)
        else:
            attach(detached("/dev/null", False), path)
    if config["root"]["readonly"]:
        read_only("/", False)


def own_ids(user: dict[str, Any]) -> None:
    """Where the user namespace has not the user's ids, call our own by them: all files are ours, so the user's."""
    if has_id("uid_map", user["uid"]) and has_id("gid_map", user["gid"]):
        return
    uid, gid = os.geteuid(), os.getegid()
    checked(libc.unshare(_NEWUSER), "the user's own ids")
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{user['uid']} {uid} 1"),
        ("gid_map", f"{user['gid']} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def has_id(name: str, number: int) -> bool:
    with open(f"/proc/self/{name}") as file:
        rows = [[int(word) for word in line.split()] for line in file]
    return any(inside <= number < inside + count for inside, _, count in rows)


def take_groups(groups: list[int]) -> None:
    """The user's further groups. A user namespace that may not change them has those of whoever made it."""
    with open("/proc/self/setgroups") as file:
        if file.read().strip() == "deny":
            return
    os.setgroups([number for number in groups if has_id("gid_map", number)])


def give_up_rights(process: dict[str, Any]) -> None:
    """Take the user's ids and the capabilities that the container is to have, for good."""
    kept = {_CAPABILITIES.index(name[4:]) for name in process["capabilities"]["bounding"] if name[4:] in _CAPABILITIES}
    # No device cgroup stands around us: who may make device nodes may read the host's disks.
    kept.discard(_CAPABILITIES.index("MKNOD"))
    for number in range(len(_CAPABILITIES)):
        if number not in kept:
            libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)  # one that the kernel has not is no loss
    user = process["user"]
    take_groups(user["additionalGids"])
    os.setresgid(user["gid"], user["gid"], user["gid"])
    os.setresuid(user["uid"], user["uid"], user["uid"])
    if user["uid"] == 0:
        ours = capabilities_now()
        mask = sum(1 << number for number in kept) & ours
        header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        low, high = mask & 0xFFFFFFFF, mask >> 32
        data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)  # effective, permitted, inheritable
        checked(libc.capset(header, data), "give up capabilities")


def capabilities_now() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapPrm:"))


def become(process: dict[str, Any], parent: int) -> NoReturn:
    for limit in process["rlimits"]:
        pair = [value if value < 1 << 63 else resource.RLIM_INFINITY for value in (limit["soft"], limit["hard"])]
        resource.setrlimit(getattr(resource, limit["type"]), (pair[0], pair[1]))
    os.makedirs(process["cwd"], exist_ok=True)
    own_ids(process["user"])
    give_up_rights(process)
    os.chdir(process["cwd"])
    # A change of rights makes the kernel forget it: die with whoever started us.
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the program must not
        signal.signal(number, signal.SIG_DFL)
    env = dict(word.split("=", 1) for word in process["env"])
    os.umask(0o022)
    os.execvpe(process["args"][0], process["args"], env)


def main() -> None:
    parent = os.getppid()
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(sys.argv[1], "rb") as file:
        config = json.load(file)
    try:
        checked(libc.unshare(_NEWNS | _NEWIPC), "own mounts")
        mount("", "/", "", _REC | _PRIVATE)
        binds, devices = take_from_host(config)
        change_root(config["root"]["path"])
        build_mounts(config, binds, devices)
        protect(config)
    except OSError as error:
        fail(f"the container cannot be built: {error.filename or ''}: {error.strerror or error}", 125)
    try:
        become(config["process"], parent)
    except (FileNotFoundError, NotADirectoryError):
        fail(f"{config['process']['args'][0]}: command not found in the image", 127)
    except OSError as error:
        fail(f"{config['process']['args'][0]}: {error.strerror or error}", 126)


def fail(message: str, code: int) -> NoReturn:
    os.write(2, f"bootseer: {message}\n".encode("utf-8", "backslashreplace"))
    os._exit(code)


if __name__ == "__main__":
    main()
