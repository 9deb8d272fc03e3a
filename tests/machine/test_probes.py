"""The doctor's probes on this machine, with programs missing from PATH, and with misbehaving probes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from bootseer.io.executor import Executor
from bootseer.machine import kernel, probes
from bootseer.machine.check import REQUIRED, Check, usable
from bootseer.machine.probes import run_checks, run_probes


@pytest.mark.slow
def test_every_check_answers_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests use the default one meanwhile
    spool = tmp_path / "a" / "spool"
    checks = {check.name: check for check in run_checks(spool)}
    assert set(checks) > REQUIRED
    for check in checks.values():
        assert (check.why == "") == (check.status == "ok"), check
        assert "the probe failed" not in check.why, check
        assert check.opens
    assert usable(list(checks.values()))
    mounts = Path("/proc/self/mountinfo").read_text().replace("/var/tmp/bootseer-test-", "")  # of other tests
    assert str(tmp_path) not in mounts and "/var/tmp/bootseer-" not in mounts
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_probe_that_raises_or_hangs_is_a_broken_check() -> None:
    release = threading.Event()

    def raises() -> Check:
        raise RuntimeError("surprise")

    def hangs() -> Check:
        release.wait(60)
        return Check("hangs", "ok", "")

    try:
        raised, hung, fine = run_probes(
            [("raises", raises), ("hangs", hangs), ("fine", lambda: Check("fine", "ok", "1"))], deadline_s=3.0
        )
    finally:
        release.set()
    assert (raised.status, raised.why) == ("broken", "the probe failed: RuntimeError: surprise")
    assert (hung.status, hung.why) == ("broken", "no answer within 3 s")
    assert fine.status == "ok"


def test_a_probe_that_has_not_begun_is_a_broken_check(monkeypatch: pytest.MonkeyPatch) -> None:
    release, start = threading.Event(), Executor._start_thread
    monkeypatch.setattr(Executor, "_start_thread", lambda pool: not pool._threads and start(pool))
    hangs = ("hangs", lambda: Check("hangs", "ok", str(release.wait(60))))
    try:
        _, waiting = run_probes([hangs, ("waits", lambda: Check("waits", "ok", ""))], deadline_s=0.2)
    finally:
        release.set()
    assert (waiting.status, waiting.why) == ("broken", "no answer within 0.2 s")


def test_usable_needs_only_the_required() -> None:
    good = [Check(name, "ok", "") for name in sorted(REQUIRED)]
    assert usable([*good, Check("FUSE", "missing", "", "no")])
    assert usable([*good[1:], Check(good[0].name, "limited", "", "old")])
    assert not usable([*good[1:], Check(good[0].name, "broken", "", "no")])


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.18.44-fc", (6, 18)), ("5.10.0-26-amd64", (5, 10)), ("6.1", (6, 1)), ("odd", None), ("", None)],
)
def test_kernel_version(release: str, version: tuple[int, int] | None) -> None:
    assert kernel.kernel_version(release) == version


def _program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_programs_missing_from_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = probes.check_runtimes()
    assert check.status == "missing"
    assert check.install
    assert probes.check_torch().status == "missing"


@pytest.mark.parametrize(
    ("name", "script", "found"),
    [
        ("runc", "echo 'runc version 1.2.3'", "runc 1.2.3"),
        ("crun", "echo 'crun version 1.8.1'; echo 'spec: 1.0.0'", "crun 1.8.1"),
    ],
)
def test_version_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str, found: str
) -> None:
    _program(tmp_path, name, script)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", f"{tmp_path}:{tmp_path}/tools")
    check = probes.check_runtimes()
    assert (check.status, check.found) == ("ok", found)


def test_program_without_a_version_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, "runc", "echo 'cannot allocate memory' >&2; exit 137")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = probes.check_runtimes()
    assert check.status == "broken"
    assert "code 137" in check.why


def test_hdfs_needs_the_modules_of_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hdfs_native", reason="extra hdfs")
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    check = probes.check_hdfs()
    assert (check.status, check.found.split()[0]) == ("ok", "hdfs-native")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "nowhere"))
    assert probes.check_hdfs().status == "limited"
    monkeypatch.setattr(probes, "HDFS_MODULES", ("a_module_that_nobody_has",))
    check = probes.check_hdfs()
    assert (check.status, check.install) == ("missing", "pip install 'bootseer[hdfs]'")


def test_buckets_need_both_modules_of_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="extra s3")
    monkeypatch.setitem(sys.modules, "botocore", None)
    check = probes.check_buckets()
    assert (check.status, check.why) == ("missing", "Python has no module botocore")


@pytest.mark.torch
def test_torch_of_the_python_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    _program(tmp_path, "python3", f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(probes, "TORCH_DEADLINE_S", 300.0)
    check = probes.check_torch()
    assert check.status == "ok"
    assert check.found.startswith(torch.__version__)
    assert f"{torch.cuda.device_count()} GPUs" in check.found


def test_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    _program(tmp_path, "python3", f'PYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    check = probes.check_torch()
    assert check.status == "broken"
    assert "OSError: libcudart.so.12" in check.why


def test_spool_folder(tmp_path: Path) -> None:
    good = probes.check_spool(tmp_path / "new" / "spool")
    assert good.status == "ok"
    assert " free" in good.found
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert probes.check_spool(tmp_path / "file").why == f"{tmp_path}/file is not a folder"
    assert probes.check_spool(tmp_path / "file" / "below").status == "broken"


def test_spool_folder_that_takes_no_files() -> None:
    """Not even root can create files in /proc."""
    assert probes.check_spool(Path("/proc/bootseer")).status == "broken"


_SYSTEM_PYTHON = "/usr/bin/python3"  # the user nobody may have no access to the Python that runs the tests
_AS_NOBODY = """
import sys
if sys.version_info < (3, 11):
    sys.exit(3)
from bootseer.machine import kernel
for check in (kernel.check_fuse(), kernel.check_user_namespaces()):
    assert check.status == "ok" or check.why, check
    print(check.name, check.status, sep="=")
if not kernel.may_open_fuse():  # fuse3 would not help
    assert "chmod 666 /dev/fuse" in kernel.check_fuse().install
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or not Path(_SYSTEM_PYTHON).exists(), reason="needs root and a system python3")
def test_an_ordinary_user_gets_answers_too() -> None:
    """For the user nobody the probes report `limited` or `missing` with a reason, and none fails."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(kernel.__file__).parents[1], Path(folder, "bootseer"))
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        answer = subprocess.run(
            [_SYSTEM_PYTHON, "-B", "-c", _AS_NOBODY],
            env={"PYTHONPATH": folder, "PATH": os.environ["PATH"]},
            user=65_534,
            group=65_534,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    if answer.returncode == 3:
        pytest.skip("the system's python3 is older than 3.11")
    assert answer.returncode == 0, answer.stderr
    states = dict(line.split("=") for line in answer.stdout.splitlines())
    assert set(states) == {"FUSE", "user namespaces"}


def test_files_that_describe_devices_are_named(tmp_path: Path) -> None:
    assert probes.check_devices([tmp_path, tmp_path / "missing"]).status == "missing"
    (tmp_path / "nvidia.yaml").write_text("")
    assert probes.check_devices([tmp_path]).found == str(tmp_path / "nvidia.yaml")


def test_a_probe_process_that_dies_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trial.py").write_text("import os; os.abort()")
    monkeypatch.setattr(kernel, "_SCRIPT", tmp_path / "trial.py")
    trial = kernel.attempt("fuse")
    assert not trial.worked
    assert "ended with code" in trial.reason
