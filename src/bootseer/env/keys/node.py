"""Facts on this node: the job's Python, processor, C library and GPUs, and a fingerprint of installed packages.

The interpreter is asked once for version, ABI, prefix and folders; the answer is cached while its file is unchanged.
Shims and wrapper scripts are asked every time: their target depends on more than the file. The absence of a GPU is a
fact as well: a resolver without a GPU may choose other wheels.

The fingerprint covers the system that a setup in host mode starts from: its distribution, packages, and the
distributions of the job's Python. It changes only with packages: access times, logs, caches and host names are not in
it. Jobs do not change it, since a setup writes into a snapshot, not onto the node. Budget: 50 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from bootseer.env.keys.files import FactCache, NodeFiles, is_settled, stamp_of
from bootseer.env.keys.key import digest_of
from bootseer.env.keys.key_settings import search_path
from bootseer.errors import PermanentError, os_errors_as
from bootseer.machine import child

_DPKG = "/var/lib/dpkg/status"
_FIELD = re.compile(rb"^(Package|Version|Architecture|Status): (.*)$", re.MULTILINE)
_DATABASES = (
    "/usr/lib/sysimage/rpm/rpmdb.sqlite", "/var/lib/rpm/rpmdb.sqlite", "/var/lib/rpm/Packages.db",
    "/var/lib/rpm/Packages",    "/lib/apk/db/installed",
)  # fmt: skip
_MAX_DATABASE_BYTES = 64 << 20
_MAX_RECORD_BYTES = 64 << 20
_LOCAL_FOLDERS = ("/usr/local/bin", "/usr/local/sbin", "/usr/local/lib")
_TOOLKITS = ("/usr/local/cuda/version.json", "/usr/local/cuda/version.txt")
_DISTRIBUTIONS = (".dist-info", ".egg-info", ".egg-link", ".pth", ".egg")
_MAX_LINES = 2000


class Part(NamedTuple):
    """A part of the fingerprint: a digest, and readable lines."""

    digest: str
    lines: tuple[str, ...]


def system(files: NodeFiles, facts: FactCache) -> Part:
    """Distribution and packages of the system, and local files that no package owns."""
    parts: list[str] = []
    lines: list[str] = []
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        if files.kind(path) == "file":
            parts += ("os-release", files.digest(path)[0])
            name = re.search(r'^PRETTY_NAME="?([^"\n]+)', files.read(path).decode("utf-8", "replace"), re.MULTILINE)
            lines += [f"distribution {name[1]}"] if name else []
            break
    installed = _dpkg(facts)
    parts += ("dpkg", *installed)
    lines += installed[:_MAX_LINES]
    for path in _DATABASES:
        if files.kind(path) == "file":
            parts += (path, files.digest(path)[0])
            lines.append(f"database {path}")
    for folder in _LOCAL_FOLDERS:
        found = [f"{folder}/{entry}" for entry in _list_entries(folder)]
        parts += (folder, *found)
        lines += found[:_MAX_LINES]
    for path in _TOOLKITS:
        if files.kind(path) == "file":
            parts += (path, files.digest(path)[0])
    return Part(digest_of(parts), tuple(lines))


def distributions(folders: Iterable[str], facts: FactCache) -> Part:
    """Distributions installed in these folders: names, versions, and digests of their records."""
    parts: list[str] = []
    lines: list[str] = []
    for folder in dict.fromkeys(folders):
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted
        except OSError:
            continue
        names = [name for name in names if name.endswith(_DISTRIBUTIONS) and not name.startswith("~")]
        if names:  # an empty folder counts as none
            parts.append(folder)
        for name in names:
            record = _record(f"{folder}/{name}", facts)
            parts += (name, record)
            lines.append(f"{name} {record[:8]}")
    return Part(digest_of(parts), tuple(lines[:_MAX_LINES]))


def environment(prefix: str, files: NodeFiles, facts: FactCache) -> Part:
    """A Python environment named by a setup: its configuration and its distributions."""
    parts = [files.digest(f"{prefix}/pyvenv.cfg")[0]] if files.kind(f"{prefix}/pyvenv.cfg") == "file" else []
    libraries = [
        f"{prefix}/lib/{name}/site-packages" for name in files.names(f"{prefix}/lib") if name.startswith("python")
    ]
    conda = [name for name in files.names(f"{prefix}/conda-meta") if name.endswith(".json")]
    found = distributions(libraries, facts)
    return Part(digest_of([*parts, found.digest, *conda]), (*found.lines, *conda))


def _dpkg(facts: FactCache) -> Sequence[str]:
    """The installed packages, sorted; empty without dpkg."""
    try:
        with open(_DPKG, "rb") as file:  # noqa: PTH123 - bounded
            status = os.fstat(file.fileno())
            known = facts.get("dpkg", _DPKG, stamp_of(status))
            if isinstance(known, list):
                return known
            data = file.read(_MAX_DATABASE_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise PermanentError(f"{_DPKG}: {os.strerror(error.errno or 0)}") from error
    if len(data) > _MAX_DATABASE_BYTES:
        raise PermanentError(f"{_DPKG}: too large to be a list of packages")
    installed = sorted(dpkg_packages(data))
    if is_settled(status):
        facts.put("dpkg", _DPKG, stamp_of(status), installed)
    return installed


def dpkg_packages(data: bytes) -> Iterator[str]:
    """`name:architecture version` of each installed package of a dpkg status file."""
    for stanza in data.split(b"\n\n"):
        found = {name: value.decode("utf-8", "replace") for name, value in _FIELD.findall(stanza)}
        if b"Package" in found and found.get(b"Status", "").endswith(" installed"):
            yield f"{found[b'Package']}:{found.get(b'Architecture', '')} {found.get(b'Version', '')}"


def _record(path: str, facts: FactCache) -> str:
    """A digest of a distribution's RECORD. Bytecode is left out: it may be written anew at any time."""
    for name in ("RECORD", "METADATA", "PKG-INFO", "SOURCES.txt", ""):
        whole = f"{path}/{name}" if name else path
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(whole)  # noqa: PTH116 - many calls
            if stat.S_ISREG(status.st_mode):
                break
    else:
        return digest_of(["a folder"])
    if status.st_size > _MAX_RECORD_BYTES:
        return digest_of(["a folder"])
    stamp = stamp_of(status)
    known = facts.get("record", whole, stamp)
    if isinstance(known, str):
        return known
    with os_errors_as(PermanentError, whole), open(whole, "rb") as file:  # noqa: PTH123
        data = file.read(_MAX_RECORD_BYTES)
    lines = sorted(line for line in data.splitlines() if b".pyc," not in line) if name == "RECORD" else [data]
    digest = digest_of(lines)
    if is_settled(status):
        facts.put("record", whole, stamp, digest)
    return digest


def _list_entries(folder: str) -> Iterator[str]:
    """Direct entries that are files or links, with size or target; without times, which copies change."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_symlink():
                yield f"{entry.name} -> {os.readlink(entry.path)}"  # noqa: PTH115 - the text
            elif entry.is_file():
                yield f"{entry.name} {entry.stat().st_size}"
        except OSError:
            continue


_PYTHON_DEADLINE_S = 10.0
_ANSWER = "bootseer:"
# For any Python 3: it may be older than BootSeer's.
QUESTION = f"""
import json, os, site, sys, _imp
own = getattr(site, "getsitepackages", list)() + [entry for entry in sys.path if entry.endswith("-packages")]
facts = {{
    "executable": sys.executable,
    "implementation": sys.implementation.name,
    "version": ".".join(map(str, sys.version_info[:3])) + sys.version_info[3].replace("final", ""),
    "abi": (_imp.extension_suffixes() or [""])[0],
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "own_folders": list(dict.fromkeys(own)),
}}
if not sys.flags.isolated:
    import sysconfig
    from importlib.util import find_spec
    paths = sysconfig.get_paths()
    libraries = [paths["purelib"], paths["platlib"]]
    known = [entry for entry in sys.path if os.path.isdir(entry)]
    facts["scripts"] = paths["scripts"]
    facts["folders"] = sorted(set(os.path.abspath(entry) for entry in libraries + known))
    facts["writable"] = all(os.access(entry, os.W_OK) for entry in libraries if os.path.isdir(entry))
    facts["pip"] = find_spec("pip") is not None
print("{_ANSWER}" + json.dumps(facts))
"""
"""Prints an answer for `answered`; in isolation, as for a request key, without what only installations need, which
would take as long as the rest."""


class Interpreter(Struct, frozen=True):
    """A Python installation or virtual environment. Fields with defaults are not known of one asked in isolation."""

    executable: str
    implementation: str
    version: str
    abi: str
    """The suffix of extension modules: version, flags and C library."""
    prefix: str
    base_prefix: str
    own_folders: tuple[str, ...]
    """`site-packages` and `dist-packages` of the installation; without the user's own, if it was asked in isolation."""
    scripts: str = ""
    """Folder of its console scripts."""
    folders: tuple[str, ...] = ()
    """All folders that may have its distributions, absolute; those that an installer writes to, even if missing."""
    writable: bool = False
    """Whether packages can be installed into it; otherwise pip uses the user's own folder."""
    pip: bool = False
    """Whether `-m pip` works."""

    @property
    def name(self) -> str:
        """Implementation, version and ABI in one word."""
        return f"{self.implementation}-{self.version}{self.abi}"


def find_python(env: Mapping[str, str]) -> str | None:
    """The interpreter that `python3` in the setup means; None without one."""
    return shutil.which("python3", path=env.get("PATH")) or shutil.which("python", path=env.get("PATH"))


def answered(output: str) -> Interpreter | None:
    """The interpreter that printed this when asked `QUESTION`, maybe after lines of its start-up files; None if it gave
    no answer."""
    line = next((line for line in output.splitlines() if line.startswith(_ANSWER)), _ANSWER)
    try:
        return msgspec.convert(json.loads(line.removeprefix(_ANSWER)), Interpreter)
    except (ValueError, msgspec.ValidationError):
        return None


def ask_python(path: str, env: Mapping[str, str], facts: FactCache) -> Interpreter:
    """Ask an interpreter about itself. Raises `PermanentError` if it does not answer in time."""
    stamp = _stamp(path)
    known = facts.get("python", path, stamp) if stamp else None
    with contextlib.suppress(msgspec.ValidationError):  # of an earlier version
        if known is not None:
            return msgspec.convert(known, Interpreter)
    # -I: the cached answer must not depend on the user or the working folder.
    clean = {**env, "PYTHONPATH": search_path(env.get("PYTHONPATH", ""))}
    answer = child.run([path, "-I", "-c", QUESTION], deadline_s=_PYTHON_DEADLINE_S, env=clean)
    found = answered(answer.output)
    if found is None:
        reason = answer.error or f"ended with code {answer.code}"
        raise PermanentError(f"{path}: its version cannot be determined: {reason}")
    if stamp:
        facts.put("python", path, stamp, msgspec.to_builtins(found))
    return found


def _stamp(path: str) -> list[object]:
    """Values that the answer depends on; empty if unknown."""
    try:
        real = os.path.realpath(path)
        status = Path(real).stat()
        with open(real, "rb") as file:  # noqa: PTH123 - a string
            if file.read(4) != b"\x7fELF":
                return []
    except OSError:
        return []
    stamp: list[object] = [real, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    for folder in (Path(path).parent, Path(path).parent.parent):
        try:
            config = (folder / "pyvenv.cfg").stat()
            stamp += [config.st_ino, config.st_mtime_ns, config.st_size]
        except OSError:
            stamp.append(None)
    return stamp


_GPU_DEADLINE_S = 30.0
"""Without persistence mode, the driver initialises each GPU first."""
_LEVELS = (
    ("x86-64-v2", frozenset(("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"))),
    ("x86-64-v3", frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))),
    ("x86-64-v4", frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))),
)  # fmt: skip


class Accelerators(Struct, frozen=True):
    """NVIDIA GPUs of this node. All fields are empty without GPUs or if the driver does not answer."""

    gpus: tuple[str, ...] = ()
    """Distinct compute capabilities, sorted."""
    driver: str = ""


def cpu_level() -> str:
    """The x86-64 ABI level of this processor, elsewhere the name of the architecture."""
    machine = os.uname().machine
    if machine != "x86_64":
        return machine
    found = re.search(r"^flags\s*:\s*(.+)$", _head("/proc/cpuinfo", 65_536), re.MULTILINE)
    return level_of(found[1].split() if found else ())


def level_of(flags: Iterable[str]) -> str:
    """The level for flags of /proc/cpuinfo."""
    have, level = set(flags), "x86-64-v1"
    for name, needed in _LEVELS:
        if not needed <= have:
            break
        level = name
    return level


def libc() -> str:
    """Name and version of the C library: `glibc 2.36`, `musl 1.2.4`, or empty."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        found = sorted(Path("/lib").glob("ld-musl-*.so.1"))
        return "musl" if found else ""


def accelerators(env: Mapping[str, str]) -> Accelerators:
    """Ask NVIDIA's driver. Starts a program only if there is a driver. Raises `PermanentError` without an answer in
    time: other GPUs may need other code."""
    version = _head("/proc/driver/nvidia/version", 4096)
    program = shutil.which("nvidia-smi", path=env.get("PATH")) if version or Path("/dev/nvidiactl").exists() else None
    driver = re.search(r"Kernel Module\D*\s(\d+\.\d[\d.]*)", version)
    if program is None:
        return Accelerators(driver=driver[1] if driver else "")
    argv = [program, "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    answer = child.run(argv, deadline_s=_GPU_DEADLINE_S, env=env)
    if answer.code is None and answer.started:
        raise PermanentError(f"the GPUs of this node are not known: nvidia-smi: {answer.error}")
    return read_accelerators(answer.output if answer.code == 0 else "", driver[1] if driver else "")


def read_accelerators(rows: str, driver: str) -> Accelerators:
    """Parse the output of `nvidia-smi`. GPUs hidden from this job count: another job may get them."""
    found = re.findall(r"^\s*(\d+\.\d+)\s*,\s*(\d[\d.]*)\s*$", rows, re.MULTILINE)
    return Accelerators(tuple(sorted({capability for capability, _ in found})), found[0][1] if found else driver)


def _head(path: str, limit: int) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the first bytes only
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
