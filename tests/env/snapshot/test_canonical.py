"""Two installations of the same packages are equal, and all others are not."""

from __future__ import annotations

import json
import marshal
import os
import shutil
import subprocess
import sys
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.snapshot.canonical import canonical, ignored_reason

PYC = "/a/__pycache__/m.cpython-311.pyc"


def test_bytecode_is_the_same_whenever_its_source_was_written() -> None:
    code = marshal.dumps(compile("answer = 42", "/a/m.py", "exec"))
    other = marshal.dumps(compile("answer = 43", "/a/m.py", "exec"))
    one, two = (MAGIC_NUMBER + head + code for head in (b"\0" * 12, b"\1" * 12))
    assert canonical(PYC, one) == canonical(PYC, two)
    assert canonical(PYC, one) != canonical(PYC, MAGIC_NUMBER + b"\0" * 12 + other)
    foreign = b"\x57\x0d\r\n"
    assert canonical(PYC, foreign + one[4:]) == canonical(PYC, foreign + two[4:]) != canonical(PYC, one)


def test_marks_of_shared_objects_in_bytecode_do_not_count() -> None:
    """Whether a string is marked depends on other references to it in the compiling process."""
    text = "".join(["shared", "_", "text"])
    plain = marshal.dumps(("shared_text", 1))
    marked = marshal.dumps((text, 1))
    variants = {bytes([data[0] & flag]) + data[1:] for data in (plain, marked) for flag in (0x7F, 0xFF)}
    assert len(variants) > 1
    head = MAGIC_NUMBER + bytes(12)
    assert len({canonical(PYC, head + data) for data in variants}) == 1


def test_the_list_of_files_of_a_package_counts_without_bytecode_and_order() -> None:
    both = b"m-1.dist-info/RECORD,,\nm.py,sha256=x,3\n"
    pip = b"m-1.dist-info/INSTALLER,sha256=pip,4\n" + both + b"__pycache__/m.cpython-311.pyc,,\n"
    uv = both + b"m-1.dist-info/INSTALLER,sha256=uv,2\n"
    path = "/a/m-1.dist-info/RECORD"
    assert canonical(path, pip) == canonical(path, uv)
    assert canonical(path, pip) != canonical(path, uv.replace(b"=x", b"=y"))


def test_dpkg_may_list_packages_in_any_order() -> None:
    path = "/var/lib/dpkg/status"
    one, two = b"Package: a\nVersion: 1\n", b"Package: b\nVersion: 2\n"
    assert canonical(path, one + b"\n" + two) == canonical(path, two + b"\n" + one)
    assert canonical(path, one + b"\n" + two) != canonical(path, one)


def test_json_of_pip_and_of_uv_is_the_same() -> None:
    value = {"url": "file:///w.whl", "archive_info": {}}
    path = "/a/m-1.dist-info/direct_url.json"
    assert canonical(path, json.dumps(value).encode()) == canonical(path, json.dumps(value, indent=1).encode())
    assert canonical(path, b"{") == b"{"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_the_folder_of_a_build_does_not_count(tmp_path: Path) -> None:
    def built(name: str, text: str) -> bytes:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "m.c").write_text(text)
        subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-O1", "-o", "m.so", folder / "m.c"], cwd=folder, check=True)
        return (folder / "m.so").read_bytes()

    one, two = (built(name, "int answer(void) { return 42; }\n") for name in ("pip-x1", "pip-y22"))
    other = built("pip-z", "int answer(void) { return 43; }\n")
    assert one != two
    assert canonical("/a/m.so", one) == canonical("/a/m.so", two)
    assert canonical("/a/m.so", one) != canonical("/a/m.so", other)


def test_everything_else_counts_byte_by_byte() -> None:
    for path in ("/a/m.py", "/a/RECORD", "/etc/hosts", "/a/m.so"):
        assert canonical(path, b"any\r\nbytes\0") == b"any\r\nbytes\0"
        assert not ignored_reason(path)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/var/log/dpkg.log", "a log"),
        ("/srv/repo/.git/index", "packing and times of Git; HEAD and the references are compared"),
        ("/srv/repo/.git/HEAD", ""),
        ("/srv/repo/.git/refs/heads/main", ""),
        ("/a/m-1.dist-info/INSTALLER", "who installed, and whether it was asked for or needed by another"),
        ("/a/m-1.dist-info/METADATA", ""),
    ],
)
def test_what_is_ignored_has_a_reason(path: str, reason: str) -> None:
    assert ignored_reason(path) == reason


@given(st.binary(max_size=200), st.sampled_from(["/m.pyc", "/m-1.dist-info/RECORD", "/var/lib/dpkg/status", "/m.so"]))
def test_no_bytes_make_it_fail(data: bytes, path: str) -> None:
    canonical(path, data)
    canonical(path, b"\x7fELF\x02\x01" + data)


def test_compilers_in_other_processes_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(Path(json.__file__).with_name("decoder.py").read_text())
    found = []
    for warm_up in ("pass", "import argparse, typing, decimal, dataclasses"):
        code = f"{warm_up}\nimport py_compile; print(py_compile.compile('m.py', doraise=True))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env={**os.environ}
        )
        found.append((tmp_path / done.stdout.strip()).read_bytes())
    assert canonical(PYC, found[0]) == canonical(PYC, found[1])
