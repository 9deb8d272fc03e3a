"""What this node is, as far as compiled code and resolvers ask: processor, C library, GPUs, driver, CUDA.

That there is no GPU is a fact like any other: a resolver without a GPU may choose other wheels. Called by
`request_key`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bootseer.machine import child

DEADLINE_S = 5.0
_LEVELS = (
    ("x86-64-v2", frozenset(("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"))),
    ("x86-64-v3", frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"))),
    ("x86-64-v4", frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Accelerators:
    """NVIDIA's GPUs of this node. Empty fields: there are none, or nobody answers."""

    gpus: tuple[str, ...] = ()
    """Compute capabilities, each once, sorted."""
    driver: str = ""
    cuda: str = ""
    """The newest CUDA that the driver can do."""


def architecture() -> str:
    """`x86_64`, `aarch64`, ..."""
    return os.uname().machine


def cpu_level() -> str:
    """The level of the x86-64 ABI that this processor reaches; elsewhere the name of the architecture."""
    machine = architecture()
    if machine != "x86_64":
        return machine
    found = re.search(r"^flags\s*:\s*(.+)$", _text("/proc/cpuinfo", 65_536), re.MULTILINE)
    return level_of(found[1].split() if found else ())


def level_of(flags: object) -> str:
    """The level for the names of /proc/cpuinfo."""
    have, level = set(flags if isinstance(flags, list | tuple) else ()), "x86-64-v1"
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
    """What NVIDIA's driver says. Costs a program's start only where there is a driver."""
    version = _text("/proc/driver/nvidia/version", 4096)
    program = shutil.which("nvidia-smi", path=env.get("PATH")) if version or Path("/dev/nvidiactl").exists() else None
    driver = re.search(r"Kernel Module\D*\s(\d+\.\d[\d.]*)", version)
    if program is None:
        return Accelerators(driver=driver[1] if driver else "")
    answer = child.run(
        [program, "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"], deadline_s=DEADLINE_S, env=env
    )
    return read_accelerators(
        answer.output if answer.code == 0 else "", _cuda(program, env), driver[1] if driver else ""
    )


def read_accelerators(rows: str, cuda: str, driver: str) -> Accelerators:
    """The answer of `nvidia-smi` as facts. GPUs that are hidden from this job count: another job gets those."""
    found = re.findall(r"^\s*(\d+\.\d+)\s*,\s*(\d[\d.]*)\s*$", rows, re.MULTILINE)
    return Accelerators(tuple(sorted({capability for capability, _ in found})), found[0][1] if found else driver, cuda)


def _cuda(program: str, env: Mapping[str, str]) -> str:
    answer = child.run([program], deadline_s=DEADLINE_S, env=env)
    found = re.search(r"CUDA Version:\s*(\d+\.\d+)", answer.output)
    return found[1] if found else ""


def id_ranges(kind: str) -> list[list[int]]:
    """The ids that exist in this user namespace, as first id and count. `kind` is `uid` or `gid`."""
    rows = [line.split() for line in _text(f"/proc/self/{kind}_map", 65_536).splitlines()]
    return [[int(row[0]), int(row[2])] for row in rows if len(row) == 3]


def umask() -> str:
    """The umask in octal digits."""
    found = re.search(r"^Umask:\s*(\d+)$", _text("/proc/self/status", 65_536), re.MULTILINE)
    return found[1] if found else ""


def _text(path: str, limit: int) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the first bytes only
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""
