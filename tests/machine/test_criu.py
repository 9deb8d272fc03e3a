"""Finding CRIU, with a real one and with scripts that print another version, none, or nothing in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.launch.doctor import PROCESSES, check_processes
from bootseer.machine import criu as module
from bootseer.machine.criu import PROGRAM, check_criu, find_criu


def _program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_real_one_is_found_and_works(criu: str) -> None:
    env = {**os.environ, PROGRAM: criu}
    assert find_criu(env) == criu
    assert check_criu(criu, env) == ""
    found = check_processes(env)
    assert (found.name, found.status, found.required) == (PROCESSES, "ok", False)
    assert found.found.startswith(f"{criu} ")


@pytest.mark.root
def test_a_check_needs_one_capability_and_leaves_nothing_behind(criu: str, tmp_path: Path) -> None:
    code = f"import os; from bootseer.machine.criu import check_criu; print(check_criu({criu!r}, os.environ))"
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}

    def said(capabilities: str) -> str:
        words = ["setpriv", f"--bounding-set=-all{capabilities}", "--inh-caps=-all", sys.executable, "-c", code]
        return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()

    assert said(",+checkpoint_restore,+setpcap") == ""
    assert "CAP_CHECKPOINT_RESTORE" in said(",+setpcap")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_container_without_a_writable_proc_sys_is_enough(criu: str) -> None:
    code = f"import os; from bootseer.machine.criu import check_criu; print([check_criu({criu!r}, os.environ)])"
    script = 'mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$0" -c "$1"'
    words = ["unshare", "-m", "sh", "-c", script, sys.executable, code]
    assert subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout == "['']\n"


def test_the_variable_precedes_path(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    on_path = _program(tmp_path / "bin" / "criu", "echo 'Version: 4.2'")
    named = _program(tmp_path / "mine", "echo 'Version: 4.1.1'; echo 'GitID: v4.1.1'")
    env = {"PATH": str(tmp_path / "bin")}
    assert find_criu(env) == on_path
    assert find_criu({**env, PROGRAM: ""}) == on_path
    assert find_criu({**env, PROGRAM: named}) == named


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Version: 3.17.1'", "is CRIU 3.17.1, older than 4.1.1"),
        ("echo 'Version: 4.1'", "is CRIU 4.1, older than 4.1.1"),
        ("exit 0", "--version: it printed no version"),
        ("echo 'libnet.so.9: cannot open' >&2; exit 127", "--version: libnet.so.9: cannot open"),
        ("sleep 60", "--version: no answer within 0.5 s"),
    ],
)
def test_one_that_is_not_recent_enough_is_not_used(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_VERSION_S", 0.5)
    path = _program(tmp_path / "criu", f"PATH={os.environ['PATH']}; exec 2>&1; {script}")
    with pytest.raises(LookupError) as raised:
        find_criu({"PATH": str(tmp_path)})
    assert str(raised.value) == f"{path} {reason}"
    found = check_processes({"PATH": str(tmp_path)})
    assert (found.status, found.why) == ("missing", str(raised.value))


def test_without_a_criu_the_reason_says_so(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"^criu is not on PATH$"):
        find_criu({"PATH": str(tmp_path)})
    with pytest.raises(LookupError, match=f"^{PROGRAM}: {tmp_path} is not a program$"):
        find_criu({"PATH": "/bin", PROGRAM: str(tmp_path)})


def test_a_failed_check_is_a_broken_feature_with_its_last_lines(tmp_path: Path) -> None:
    script = (
        "[ $1 = --version ] && echo 'Version: 4.2' && exit; echo 'Warn  (x.c:1): x'; echo 'no time namespace'; exit 1"
    )
    found = check_processes({"PATH": str(tmp_path), PROGRAM: _program(tmp_path / "criu", script)})
    assert (found.status, found.found, found.why) == ("broken", f"{tmp_path}/criu 4.2", "no time namespace")


def test_the_module_needs_nothing_but_the_standard_library() -> None:
    """It also runs inside containers, which have neither BootSeer's packages nor its other modules."""
    subprocess.run([sys.executable, "-I", "-S", str(module.__file__)], check=True)
