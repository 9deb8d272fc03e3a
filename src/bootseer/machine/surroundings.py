"""Probes of the environment of a run: terminal, spool folder, CDI files, clock."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bootseer.machine.check import SPOOL, Check
from bootseer.units import format_bytes

CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""Where container engines look for CDI files; later folders have precedence."""
_ENOUGH_BYTES = 64 * 1024**2
"""A startup writes some 100 kB per rank, but with less free space than this the disk is nearly full."""

_STA_UNSYNC = 0x40
_TIMEX_BYTES = 256
"""struct timex has 208 bytes on 64-bit Linux; the rest is reserve for later kernels."""


def check_terminal() -> Check:
    opens = ("progress while a job starts", "colours in reports")
    if not sys.stderr.isatty():
        reason = "stderr is not a terminal: output is plain text"
        return Check("terminal", "limited", "none", reason, "", opens)
    size = shutil.get_terminal_size()
    found = f"{size.columns} x {size.lines}"
    if size.columns < 80:
        return Check("terminal", "limited", found, "narrower than 80 columns: tables wrap", "", opens)
    return Check("terminal", "ok", found, opens=opens)


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


def check_devices(folders: Sequence[Path] = CDI_FOLDERS) -> Check:
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
