"""Reads that no known input covers."""

from __future__ import annotations

import pytest

from bootseer.env.capturing.leftovers import unaccounted


@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/os-release",
        "/lib64/ld-linux-x86-64.so.2",
        "/etc/pip.conf",
        "/opt/python/lib/python3.12/os.py",
        "/var/lib/dpkg/status",
        "/proc/cpuinfo",
        "/tmp/x",
        "/root/.netrc",
        "/root/.local/lib/python3.11/site-packages/a-1.0.dist-info/METADATA",
        "/root/.cache/uv/simple-v15/x",
        "/home/somebody/.config/pip/pip.conf",
        "/home/somebody/.pyenv/version",
    ],
)
def test_the_base_and_what_decides_nothing_do_not_count(path: str) -> None:
    assert unaccounted([path], [], set()) == ()


@pytest.mark.parametrize(
    "path",
    [
        "/data/model.bin",
        "/home/somebody/project/pins.txt",
        "/usrlocal/x",
        "/home/somebody/.cachet",
        "/root/.netrc.old",
        "/data/home/me/.gitconfig",
        "/mnt/proc/cpuinfo",
        "/home/.cache",
    ],
)
def test_other_files_count(path: str) -> None:
    assert unaccounted([path], [], set()) == (path,)


def test_files_and_trees_of_the_key_prefixes_and_what_the_setup_made_do_not_count() -> None:
    reads = ["/p/a", "/p/tree/x/y", "/p/treetop", "/conda/lib/os.py", "/p/made", "/p/b"]
    assert unaccounted(reads, ["/p/a", "/p/tree/"], {"/p/made"}, ["/conda"]) == ("/p/b", "/p/treetop")


def test_a_base_of_everything_covers_nothing() -> None:
    assert unaccounted(["/p/a"], ["/"], [], ["/"]) == ("/p/a",)


def test_bytecode_of_a_file_in_the_key_is_accounted_for_and_other_bytecode_is_not() -> None:
    reads = ["/p/__pycache__/a.cpython-312.pyc", "/p/__pycache__/b.cpython-312.pyc"]
    assert unaccounted(reads, ["/p/a.py"], ()) == (reads[1],)


def test_a_project_in_a_scratch_folder_counts_and_the_rest_of_the_folder_does_not() -> None:
    reads = ["/tmp/project/pins.txt", "/tmp/project-2/x", "/tmp/x", "/var/tmp/env/bin/tool"]
    assert unaccounted(reads, [], set(), inside=["/", "/tmp/project", "/var/tmp/env"]) == (
        "/tmp/project/pins.txt",
        "/var/tmp/env/bin/tool",
    )
    assert (
        unaccounted(reads, ["/tmp/project"], {"/var/tmp/env/bin/tool"}, inside=["/tmp/project", "/var/tmp/env"]) == ()
    )


def test_folders_of_the_base_above_the_project_do_not_cover_it() -> None:
    reads = ["/opt/app/pins.txt", "/opt/app/venv/bin/python", "/opt/cuda/lib/libcudart.so", "/opt/app/declared"]
    found = unaccounted(reads, ["/opt/app/declared"], (), ["/opt/app/venv"], project="/opt/app")
    assert found == ("/opt/app/pins.txt",)
    assert unaccounted(reads, [], (), ["/opt/app"], project="/opt/app") == (), "an environment with the project in it"
