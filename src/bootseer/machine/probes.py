"""The probes of this machine (programs, Python packages, disk, clock; `kernel` has the others), and running them in
parallel, with a deadline, for `bootseer doctor`.

A program counts as installed only if it prints its version in time. A probe that raises or hangs gives a `broken`
check.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path

from bootseer.io.tasks import Tasks
from bootseer.machine import child, kernel
from bootseer.machine.check import CDI_FOLDERS, KERNEL, PYTHON, SPOOL, Check, Status
from bootseer.units import format_bytes

_ENOUGH_BYTES = 64 * 1024**2
"""A startup writes some 100 kB per rank, but with less free space than this the disk is nearly full."""

_STA_UNSYNC = 0x40
_TIMEX_BYTES = 256
"""struct timex has 208 bytes on 64-bit Linux; the rest is reserve for later kernels."""


def check_spool(folder: Path) -> Check:
    """Whether files can be written to `folder`, or, if it does not exist yet, to its nearest existing parent."""
    opens = ("measuring: events of each process",)
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        reason = f"{existing} is not a folder"
        return Check(SPOOL, "broken", str(folder), reason, "name another one with --spool", opens)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0" * 4096)
            file.flush()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        reason = f"{existing}: {os.strerror(error.errno or 0)}"
        return Check(SPOOL, "broken", str(folder), reason, "name another one with --spool", opens)
    found = f"{folder}, {format_bytes(free)} free"
    if free < _ENOUGH_BYTES:
        return Check(SPOOL, "limited", found, "nearly full: events may be lost", "free some space", opens)
    return Check(SPOOL, "ok", found, opens=opens)


def check_devices(folders: Sequence[Path] = tuple(map(Path, CDI_FOLDERS))) -> Check:
    name, opens = "CDI", ("image run --gpus: GPUs in containers",)
    files = []
    for folder in folders:
        if folder.is_dir():
            files += [path for path in sorted(folder.iterdir()) if path.suffix in (".json", ".yaml", ".yml")]
    if files:
        return Check(name, "ok", ", ".join(str(path) for path in files[:3]), opens=opens)
    reason = f"no file in {' or '.join(str(folder) for folder in folders)}"
    install = "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, on machines with GPUs"
    return Check(name, "missing", "", reason, install, opens)


def check_clock() -> Check:
    """The clock's synchronisation as known to the kernel (adjtimex), by any daemon."""
    name, opens = "clock", ("tight comparison of nodes",)
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: read only
    if ctypes.sizeof(ctypes.c_long) != 8 or ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
        return Check(name, "limited", "", "the kernel does not report whether it is synchronised", "", opens)
    # modes, offset, freq, maxerror, esterror, status; the man page adjtimex(2) has the layout.
    _, _, _, max_error_us, _, status = struct.unpack_from("=I4xqqqqi", buffer)
    if status & _STA_UNSYNC:
        reason = "not synchronised: offsets between nodes are estimated from barriers"
        return Check(name, "limited", "", reason, "apt-get install chrony", opens)
    return Check(name, "ok", f"synchronised within {max_error_us / 1000:.1f} ms", opens=opens)


_DEADLINE_S = 8.0
HDFS_MODULES = ("hdfs_native", "google_crc32c", "numpy")
"""The modules of the extra `hdfs`."""
TORCH_DEADLINE_S = 20.0
"""A first `import torch` from a slow disk takes this long; more than that is a finding."""

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)

# Prints the version before the import, which may hang. The working folder is removed from the path: any user could have
# put a `torch.py` there, and the doctor often runs as root.
_ASK_TORCH = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.metadata as metadata, importlib.util as util
if util.find_spec("torch") is None:
    sys.exit(3)
try:
    print("version", metadata.version("torch"), flush=True)
except metadata.PackageNotFoundError:
    pass
import torch
print("version", torch.__version__, flush=True)
print("gpus", torch.cuda.device_count() if torch.cuda.is_available() else 0, flush=True)
print("cuda", torch.version.cuda or "none", flush=True)
"""


def check_runtimes() -> Check:
    name, opens = "runc or crun", ("run --image, image run",)
    install = "apt-get install runc crun, or put a released static binary of one into a folder of PATH"
    versions, problems = [], []
    for program in ("runc", "crun"):
        path = shutil.which(program)
        if path is None:
            continue
        answer = child.run([path, "--version"], deadline_s=_DEADLINE_S)
        if found := re.search(rf"{program} version (\S+)", answer.output):
            versions.append(f"{program} {found[1]}")
        else:
            ended = f"{program} --version ended with code {answer.code} and printed no version"
            problems.append(answer.error or ended)
    if versions:
        return Check(name, "ok", ", ".join(versions), opens=opens)
    status: Status = "broken" if problems else "missing"
    return Check(name, status, "", "; ".join(problems) or "neither is on PATH", install, opens)


def check_hdfs() -> Check:
    """The HDFS client in this Python. No Hadoop installation is needed, only the cluster's addresses."""
    install, opens = "pip install 'bootseer[hdfs]'", ("checkpoints, images and environments in hdfs://",)
    missing = [module for module in HDFS_MODULES if importlib.util.find_spec(module) is None]
    if missing:
        return Check("HDFS", "missing", "", f"Python has no module {missing[0]}", install, opens)
    settings = os.environ.get("HADOOP_CONF_DIR", "")
    if settings and not Path(settings).is_dir():
        reason = "HADOOP_CONF_DIR is not a folder: only addresses work, not names of services"
        return Check("HDFS", "limited", settings, reason, "name the folder with core-site.xml", opens)
    found = f"hdfs-native {importlib.metadata.version('hdfs-native')}"
    return Check("HDFS", "ok", f"{found}, settings in {settings}" if settings else found, opens=opens)


def check_buckets() -> Check:
    install, opens = "pip install 'bootseer[s3]'", ("checkpoints, images and environments in s3://, gs:// and az://",)
    for module in ("obstore", "botocore"):
        if importlib.util.find_spec(module) is None:
            return Check("buckets", "missing", "", f"Python has no module {module}", install, opens)
    return Check("buckets", "ok", f"obstore {importlib.metadata.version('obstore')}", opens=opens)


def check_python() -> Check:
    found = platform.python_version()
    opens = ("everything",)
    if sys.version_info[:2] < _OLDEST_PYTHON:
        return Check(PYTHON, "broken", found, "older than 3.11", "apt-get install python3.11", opens)
    if sys.version_info[:2] > _NEWEST_PYTHON:
        return Check(PYTHON, "limited", found, "newer than 3.13, the last one tested", "", opens)
    return Check(PYTHON, "ok", found, opens=opens)


def check_torch() -> Check:
    """PyTorch in the `python3` on PATH, which a job would use; it need not be the Python that runs BootSeer."""
    name, opens = "PyTorch", ("stages inside the training process", "checkpoint read into tensors")
    install = "pip install torch, in the environment that the job runs in"
    python = shutil.which("python3")
    if python is None:
        return Check(name, "missing", "", "no python3 on PATH", "apt-get install python3", opens)
    answer = child.run([python, "-c", _ASK_TORCH], deadline_s=TORCH_DEADLINE_S)
    facts = dict(re.findall(r"^(version|gpus|cuda) (\S+)$", answer.output, re.MULTILINE))
    if "cuda" in facts:
        cuda = "no CUDA" if facts["cuda"] == "none" else f"CUDA {facts['cuda']}"
        return Check(name, "ok", f"{facts['version']}, {cuda}, {facts['gpus']} GPUs", opens=opens)
    if answer.code == 3:
        return Check(name, "missing", "", "python3 on PATH has no torch", install, opens)
    # The last line of a traceback is the reason.
    last = answer.output.strip().rpartition("\n")[2][:200]
    reason = answer.error or (last if "Error" in last else f"import torch ended with code {answer.code}")
    return Check(name, "broken", facts.get("version", ""), f"import torch: {reason}", install, opens)


Probe = tuple[str, Callable[[], Check]]

DEADLINE_S = TORCH_DEADLINE_S + 5.0
"""For all probes together. The slowest one has a shorter deadline of its own."""


def run_checks(spool: Path, more: Sequence[Probe] = ()) -> list[Check]:
    """All checks, in the order of the output. `spool` is the folder for events. `more` are probes of higher layers."""
    return run_probes(
        [
            (KERNEL, kernel.check_kernel),
            (PYTHON, check_python),
            (SPOOL, partial(check_spool, spool)),
            ("PyTorch", check_torch),
            ("FUSE", kernel.check_fuse),
            ("user namespaces", kernel.check_user_namespaces),
            ("runc or crun", check_runtimes),
            ("CDI", check_devices),
            ("HDFS", check_hdfs),
            ("buckets", check_buckets),
            ("clock", check_clock),
            *more,
        ],
        DEADLINE_S,
    )


def run_probes(probes: Sequence[Probe], deadline_s: float) -> list[Check]:
    """Run `probes` in parallel. Returns one check for each, after at most `deadline_s` seconds."""
    # A probe that hangs in the kernel (a dead NFS server) is left behind.
    with Tasks("bootseer-probe", len(probes), leave_s=0.0) as tasks:
        asked = [(name, tasks.submit(_answer, name, probe)) for name, probe in probes]
        wait([answer for _, answer in asked], deadline_s)
        late = f"no answer within {deadline_s:g} s"
        return [answer.result() if answer.done() else Check(name, "broken", "", late) for name, answer in asked]


def _answer(name: str, probe: Callable[[], Check]) -> Check:
    try:
        return probe()
    except Exception as error:  # a failed probe is a finding, too
        return Check(name, "broken", "", f"the probe failed: {type(error).__name__}: {error}")
