"""Probes of programs (runc and crun, mkfs.erofs, Java, Python), PyTorch, and the clients for HDFS and buckets.

A program counts as installed only if it prints its version in time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from bootseer.machine import child
from bootseer.machine.check import PYTHON, Check, Status

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


def _version(name: str, argv: tuple[str, str], *, pattern: str, install: str, opens: tuple[str, ...]) -> Check:
    """Check a program by its output for `argv`, in which `pattern` finds the version."""
    program, option = argv
    path = shutil.which(program)
    if path is None:
        return Check(name, "missing", "", f"no {Path(program).name} on PATH", install, opens)
    answer = child.run([path, option], deadline_s=_DEADLINE_S)
    found = re.search(pattern, answer.output)
    if found:
        return Check(name, "ok", found[1], opens=opens)
    reason = answer.error or f"{Path(program).name} {option} ended with code {answer.code} and printed no version"
    return Check(name, "broken", "", reason, install, opens)


def check_runtimes() -> Check:
    name, opens = "runc or crun", ("run --image, image run",)
    install = "apt-get install runc crun, or put a released static binary of one into a folder of PATH"
    checks = [
        _version(program, (program, "--version"), pattern=rf"{program} version (\S+)", install=install, opens=opens)
        for program in ("runc", "crun")
    ]
    found = ", ".join(f"{check.name} {check.found}" for check in checks if check.status == "ok")
    if found:
        return Check(name, "ok", found, opens=opens)
    status: Status = "broken" if any(check.status == "broken" for check in checks) else "missing"
    return Check(name, status, "", "; ".join(check.why for check in checks), install, opens)


def check_mkfs_erofs() -> Check:
    # Versions before 1.6 do not know the option and print their help, which also contains the version.
    opens = ("the trial mount of EROFS; BootSeer writes EROFS without it",)
    pattern = r"mkfs\.erofs (?:\(erofs-utils\) )?v?(\d+\.\d[\w.+-]*)"
    install = "apt-get install erofs-utils"
    return _version("mkfs.erofs", ("mkfs.erofs", "--version"), pattern=pattern, install=install, opens=opens)


def check_java() -> Check:
    opens = ("hdfs:// on a machine of its own (benchmarks, tests)",)
    install = "apt-get install default-jre-headless"
    return _version("Java", ("java", "-version"), pattern=r'version "([^"]+)"', install=install, opens=opens)


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
    if importlib.util.find_spec("obstore") is None:
        return Check("buckets", "missing", "", "Python has no module obstore", install, opens)
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
