"""Run all probes of this machine in parallel, with a deadline, for `bootseer doctor`.

A probe that raises or hangs gives a `broken` check.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bootseer.machine import kernel, programs, surroundings
from bootseer.machine.check import KERNEL, PYTHON, SPOOL, Check

Probe = tuple[str, Callable[[], Check]]

DEADLINE_S = programs.TORCH_DEADLINE_S + 5.0
"""For all probes together. The slowest one has a shorter deadline of its own."""


def run_checks(spool: Path, more: Sequence[Probe] = ()) -> list[Check]:
    """All checks, in the order of the output. `spool` is the folder for events. `more` are probes of higher layers."""
    return run_probes(
        [
            (KERNEL, kernel.check_kernel),
            (PYTHON, programs.check_python),
            (SPOOL, partial(surroundings.check_spool, spool)),
            ("PyTorch", programs.check_torch),
            ("FUSE", kernel.check_fuse),
            ("EROFS", kernel.check_erofs),
            ("mkfs.erofs", programs.check_mkfs_erofs),
            ("loop device", kernel.check_loop),
            ("overlayfs", kernel.check_overlayfs),
            ("overlay layers", kernel.check_overlay_layers),
            ("user namespaces", kernel.check_user_namespaces),
            ("runc or crun", programs.check_runtimes),
            ("CDI", surroundings.check_devices),
            ("Java", programs.check_java),
            ("HDFS", programs.check_hdfs),
            ("buckets", programs.check_buckets),
            ("clock", surroundings.check_clock),
            ("terminal", surroundings.check_terminal),
            *more,
        ],
        DEADLINE_S,
    )


def run_probes(probes: Sequence[Probe], deadline_s: float) -> list[Check]:
    """Run `probes` in parallel. Returns one check for each, after at most `deadline_s` seconds."""
    answers: dict[str, Check] = {}
    threads = []
    for name, probe in probes:
        # Daemon threads: a probe that hangs in the kernel (a dead NFS server) must not block the program's exit.
        thread = threading.Thread(target=_answer, args=(name, probe, answers), name=f"probe {name}", daemon=True)
        thread.start()
        threads.append(thread)
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = f"no answer within {deadline_s:g} s"
    return [answers.get(name) or Check(name, "broken", "", late) for name, _ in probes]


def _answer(name: str, probe: Callable[[], Check], answers: dict[str, Check]) -> None:
    try:
        answers[name] = probe()
    except Exception as error:  # a failed probe is a finding, too
        answers[name] = Check(name, "broken", "", f"the probe failed: {type(error).__name__}: {error}")
