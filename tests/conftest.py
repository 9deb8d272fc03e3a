"""Fixtures and hooks for all tests. More are in plugins: `conftest_launch` runs the real program, `conftest_ran` fails
a run that executed no test, `lock_tracker` checks the use of locks."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from bootseer.errors import BootseerError
from bootseer.io.files import delete_tree
from bootseer.mounts import kernel

pytest.register_assert_rewrite("store.contract")
pytest_plugins = [
    "once",  # before the plugins that import it
    "conftest_launch",
    "conftest_ran",
    "criu",
    "forked_workers",
    "image_node",
    "lock_tracker",
    "postgres",
    "s3_server",
    "shared_hdfs",
    "ways_image",
]


_FIRST = ("root", "fuse", "torch", "hdfs", "browser", "postgres", "slurm", "slow")
_LONGEST = (
    *("shared_hdfs", "shared_s3", "tests/examples/test_demo.py", "shared_torch"),
    *("tests/hdfs/test_reads_faults.py", "linked_hdfs", "tests/env/installing/test_choose.py"),
    *("tests/env/capturing/test_effects.py", "tests/env/installing/test_validate.py", "tests/cli/test_env.py"),
    *("tests/launch/test_run_slurm.py", "tests/hook/test_warm_torch.py", "tests/launch/test_run_environment.py"),
    # Of `make quick`:
    *("tests/store/test_oci.py", "tests/store/test_registry.py", "tests/trace/test_event_properties.py"),
    *("tests/service/test_ingest.py", "tests/report/test_log_scan.py", "tests/peers/test_choice.py"),
)
"""The longest units of work, roughly longest first: test files, and groups that share a server (`_unit`)."""
_EXAMPLES = 50
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_base = pytest.StashKey[Path]()
_passed = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: none of the objects become garbage, and garbage collection took 3 s
    # Freed memory is used again. The kernel takes 1 ms for each new MiB, and tests read and compare many MiB.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc accepts
    ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 512 << 20)
    # Each run has its own folder, which other users can traverse. pytest's folder is closed to them, and each run
    # closes it again for the other runs.
    if config.option.basetemp is None and not config.option.collectonly:
        _remove_earlier_runs()
        base = Path(tempfile.mkdtemp(prefix="bootseer-tests-", dir="/tmp"))
        base.chmod(0o711)
        fcntl.flock(os.open(base, os.O_RDONLY), fcntl.LOCK_EX)  # until this process ends
        config.stash[_base] = base
        config.option.basetemp = str(base / "t")


def _remove_earlier_runs() -> None:
    """Unmount what killed runs left mounted, and remove the folders of failed or killed runs, 4 GB each, except the
    latest. Runs that still go on hold a lock."""
    runs = [(folder.stat().st_mtime, folder) for folder in Path("/tmp").glob("bootseer-tests-*") if folder.exists()]
    for age, (_, folder) in enumerate(sorted(runs, reverse=True)):
        # It is locked by its run, belongs to another user, was deleted, or has a tree that is too deep.
        with contextlib.suppress(OSError, RecursionError, BootseerError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for point in reversed(kernel.mounts_below(folder)):
                    kernel.unmount(Path(point), lazy=True)
                if age and not kernel.mounts_below(folder):
                    delete_tree(folder)
            finally:
                os.close(lock)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    # The files of a failed run are kept for inspection.
    if (base := session.config.stash.get(_base, None)) is not None and session.exitstatus == pytest.ExitCode.OK:
        with contextlib.suppress(OSError):
            delete_tree(base / "t")


def pytest_unconfigure(config: pytest.Config) -> None:
    if (base := config.stash.get(_base, None)) is not None:
        with contextlib.suppress(OSError):
            base.rmdir()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Delete the folder of a test that passed, unless something is mounted there: a run writes 26 GB in all."""
    report = yield
    item.stash[_passed] = item.stash.get(_passed, True) and report.passed
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.when == "teardown" and item.stash[_passed] and isinstance(folder, Path):
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        if f" {folder}" not in mounts:
            with contextlib.suppress(OSError):
                delete_tree(folder)
    return report


def _unit(nodeid: str) -> str:
    """Unit of work for a worker: a test file, or all files that share a server or a process that imported PyTorch."""
    from s3_server import SHARES_S3
    from shared_hdfs import shared_fixture
    from warm import SHARES_TORCH

    file = nodeid.partition("::")[0]
    if file in SHARES_TORCH:
        return "shared_torch"
    return "shared_s3" if file in SHARES_S3 else shared_fixture(nodeid) or file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute units to the workers, in the order of `pytest_collection_modifyitems`."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest first, then files that need servers, the kernel or time: a slow file at the end would keep one worker
    busy while the others are idle."""
    if config.option.collectonly:
        return  # otherwise, in copies of this process (`forked_workers`), numbers of examples would be scaled twice
    profile = settings.get_profile(settings.get_current_profile_name())
    factor = profile.max_examples / _EXAMPLES if profile.max_examples <= _EXAMPLES else 10.0
    for test in {getattr(item, "function", None) for item in items}:
        # Hypothesis does not apply the profile to tests with their own number of examples.
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples != profile.max_examples:
            test._hypothesis_internal_use_settings = settings(own, max_examples=int(factor * own.max_examples))
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if any(item.get_closest_marker(name) for name in _FIRST)}

        def turn(item: pytest.Item) -> tuple[int, bool]:
            unit = _unit(item.nodeid)
            return _LONGEST.index(unit) if unit in _LONGEST else len(_LONGEST), item.path not in slow

        items.sort(key=turn)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="bootseer-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def alarm() -> Iterator[None]:
    """Ends a test that would wait forever, for example for the other end of a pipe."""

    def ring(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(300)  # much more than on any machine: the tests' own steps are short
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# A shell without job control starts background jobs with SIGINT ignored, and children inherit it: then `kill -INT` in a
# test would have no effect. The tests must not depend on the shell that started them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in each run, without deadlines: whether the tests pass depends only on the code. `make test` runs
# half of a test's own number of examples (default: 25) and `make quick` a fifth; `make fuzz` runs new examples, ten
# times a test's own number (default: 1,000).
settings.register_profile(
    "same", deadline=None, derandomize=True, max_examples=_EXAMPLES // 2, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("same"), derandomize=False, max_examples=1000)
settings.register_profile("quick", settings.get_profile("same"), max_examples=_EXAMPLES // 5)
settings.load_profile("same")
