"""All checks of this machine, side by side, each within its deadline.

`run_checks` is the engine of `bootseer doctor`. A probe that raises or hangs becomes a `broken` check: the doctor
never falls ill itself.
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
"""For all probes together; the slowest one has its own, shorter deadline."""


def run_checks(spool: Path, more: Sequence[Probe] = ()) -> list[Check]:
    """Every check, in the order in which they are shown. `spool` is the folder that events would go to.

    `more` are probes of parts above this one.
    """
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
    """Run `probes` at the same time and answer for each after `deadline_s` seconds at the latest."""
    answers: dict[str, Check] = {}
    threads = []
    for name, probe in probes:
        # Daemons: a probe that hangs in the kernel (a dead NFS server) must not hold the exit of the program.
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
    except Exception as error:  # whatever a probe meets is an answer about this machine
        answers[name] = Check(name, "broken", "", f"the probe failed: {type(error).__name__}: {error}")
