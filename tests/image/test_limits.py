"""The user's options for a container, checked before anything is fetched."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.cli.image_options import CONTAINER, container
from bootseer.errors import UsageError
from bootseer.image.containers import shim
from bootseer.image.containers.limits import Limits, capabilities_of, parse_tmpfs, parse_ulimit, read_env_file
from bootseer.image.containers.process import process_of
from plain_user import alone


def test_variables_of_files_are_read_as_docker_reads_them(tmp_path: Path) -> None:
    first, second = tmp_path / "first.env", tmp_path / "second.env"
    first.write_bytes(b"\xef\xbb\xbfA=1\n# a comment\n\n  B='two words' # kept\nHOST\nNOT_SET\nEMPTY=\n")
    second.write_text("A=2\r\nC=x=y\nLINES=one\ftwo\u2028three\n")
    values = {option.name: option.start for option in CONTAINER}
    values |= {"env_files": (str(first), str(second)), "env": ("C=3",)}
    found = container(values, "none")
    assert "LINES=one\ftwo\u2028three" in found.process.env
    env = process_of({"config": {"Cmd": ["x"], "Env": ["A=0"]}}, found.process, tmp_path, {"HOST": "h"}).env
    assert {name: env.get(name) for name in ("A", "B", "C", "HOST", "NOT_SET", "EMPTY")} == {
        "A": "2", "B": "'two words' # kept", "C": "3", "HOST": "h", "NOT_SET": None, "EMPTY": "",
    }  # fmt: skip


@pytest.mark.parametrize("data", [b"=x", b"two words=x", b"\xff=x", b"A=\0", b"A=1\n" * (1 << 19)])
def test_what_is_no_file_of_variables_is_refused_without_telling_its_content(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "env").write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_env_file(str(tmp_path / "env"))
    assert "words" not in str(caught.value)


def test_a_limit_that_may_not_be_set_is_reported_at_once() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert parse_ulimit(f"nofile={soft}:{hard}") == ("nofile", soft, hard)
    assert parse_ulimit("core=0") == ("core", 0, 0)
    script = (
        "import os, sys; os.setuid(65534)\n"
        "from bootseer.image.containers.limits import parse_ulimit\n"
        f"try: parse_ulimit('nofile={hard + 1}')\n"
        "except Exception as error: print(error)\n"
    )
    if os.geteuid() == 0:
        preload = "import bootseer.image.containers.limits\n"  # the user may not read the source folder
        ran = subprocess.run([sys.executable, "-c", preload + script], capture_output=True, text=True, check=False)
        assert f"the hard limit here is {hard}" in ran.stdout, ran.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_a_right_that_we_do_not_have_is_reported_at_once() -> None:
    """For example inside a container; a test as root can reduce the bounding set in a child."""
    if os.geteuid() != 0:
        pytest.skip("only root may give up rights")
    script = (
        "import ctypes\n"
        "from bootseer.image.containers.limits import Limits, capabilities_of\n"
        "assert ctypes.CDLL(None).prctl(24, 19, 0, 0, 0) == 0\n"  # PR_CAPBSET_DROP, CAP_SYS_PTRACE
        "assert 'CAP_SYS_PTRACE' not in capabilities_of(Limits(capabilities=('ALL',)))\n"
        "assert ctypes.CDLL(None).prctl(24, 5, 0, 0, 0) == 0\n"  # CAP_KILL, one of the default ones
        "assert 'CAP_KILL' not in capabilities_of(Limits())\n"
        "try: capabilities_of(Limits(capabilities=('SYS_PTRACE',)))\n"
        "except Exception as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "bootseer does not have it itself" in ran.stdout, ran.stderr


def test_rights_are_added_and_left_out_as_engines_do() -> None:
    assert capabilities_of(Limits(capabilities=("cap_chown", "SYS_CHROOT"), dropped=("ALL",))) == [
        "CAP_CHOWN",
        "CAP_SYS_CHROOT",
    ]
    assert "CAP_CHOWN" not in capabilities_of(Limits(capabilities=("ALL",), dropped=("CHOWN",)))


def test_a_folder_in_memory_runs_no_programs_unless_it_shall() -> None:
    assert parse_tmpfs("/a:size=1g,mode=0700") == ("/a", ("nosuid", "nodev", "noexec", "size=1g", "mode=0700"))
    assert parse_tmpfs("/a:exec") == ("/a", ("nosuid", "nodev", "exec"))


@pytest.mark.parametrize("words", ["", "/", "a", "/a/../b", "/a:dev", "/a:size=x", "/a:ro,,rw", "/a:size=1g:x"])
def test_what_is_no_folder_in_memory_is_a_usage_error(words: str) -> None:
    with pytest.raises(UsageError):
        parse_tmpfs(words)


@pytest.mark.root
def test_a_container_that_may_start_no_process_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for pids in ("own", "try", "host"):
        ran = subprocess.run(
            [sys.executable, "-I", "-S", shim.__file__, pids, str(tmp_path), "true"],
            preexec_fn=alone(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        said = "Resource temporarily unavailable; see the limit of processes (ulimit -u, pids.max)"
        assert (ran.returncode, ran.stderr) == (125, f"bootseer: the container: {said}\n")
