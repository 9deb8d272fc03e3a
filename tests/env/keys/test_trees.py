"""What the digest of a source tree includes and excludes."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bootseer.env.keys.files import FactCache, NodeFiles
from bootseer.env.keys.sources import read_tree

_C = '#include <Python.h>\nstatic struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "fast"};\n'
_C += "PyMODINIT_FUNC PyInit_fast(void) { return PyModule_Create(&m); }\n"


def digest(folder: Path) -> str:
    return read_tree(str(folder), NodeFiles(FactCache(None))).digest


def write(folder: Path, name: str, text: str = "x") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "name",
    [
        "build/lib.linux-x86_64-cpython-311/a.so",
        "slurm-1234.out",
        "slurm-1234_5.out",
        "pip.log",
        "wandb/run-1/config.yaml",
        "build/temp.linux-x86_64-3.11/a.o",
        "build/bdist.linux-x86_64/x",
        "build/cp311-cp311-linux_x86_64/CMakeCache.txt",
        "native/build/CMakeCache.txt",
        "out/meson-info/intro-targets.json",
        "rust/target/CACHEDIR.TAG",
        "dist/a-1.0-py3-none-any.whl",
        "dist/a-1.0.tar.gz",
        "src/a.egg-info/PKG-INFO",
        ".eggs/x",
        "a/__pycache__/b.cpython-311.pyc",
        "a/b.pyc",
        ".venv/x",
        "env/pyvenv.cfg",
        "node_modules/a/index.js",
        ".git/index",
        ".git/logs/HEAD",
    ],
)
def test_what_an_installation_leaves_in_a_tree_is_no_change_of_it(tmp_path: Path, name: str) -> None:
    write(tmp_path, "setup.py")
    write(tmp_path, "native/CMakeLists.txt")
    write(tmp_path, "rust/Cargo.toml")
    write(tmp_path, "src/a/__init__.py")
    write(tmp_path, "a/b.py")
    before = digest(tmp_path)
    write(tmp_path, name)
    assert digest(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        "build/tool.sh",
        "build/scripts/install.sh",
        "dist/notes.txt",
        "src/build/rules.py",
        "library/x",
        "a/dist.py",
        "build/docs/x.md",
        "wandb/__init__.py",
        "a/whole.pyc",
        "cpp/more.cpp",
    ],
)
def test_files_written_by_users_count_wherever_they_are(tmp_path: Path, name: str) -> None:
    write(tmp_path, "setup.py")
    write(tmp_path, "build/lib.linux/x")
    write(tmp_path, "dist/a.whl")
    write(tmp_path, "a/b.py")
    write(tmp_path, "build/scripts/other.sh")
    write(tmp_path, "cpp/CMakeLists.txt")
    write(tmp_path, "cpp/CMakeCache.txt")
    before = digest(tmp_path)
    write(tmp_path, name)
    assert digest(tmp_path) != before


def test_extension_modules_that_were_built_in_place_are_no_change(tmp_path: Path) -> None:
    for name in ("a/__init__.py", "src/b/__init__.py"):
        write(tmp_path, name)
    before = digest(tmp_path)
    for folder, inside in (("a", ""), ("b", "src/")):
        module = f"{folder}/fast.cpython-311-x86_64-linux-gnu.so"
        write(tmp_path, f"build/lib.linux-x86_64-cpython-311/{module}")
        write(tmp_path, f"{inside}{module}", "copy")
    assert digest(tmp_path) == before
    write(tmp_path, "a/other.so")
    assert digest(tmp_path) != before


@pytest.mark.parametrize(
    ("build", "name"),
    [("lib.linux-x86_64-cpython-311", "libmine.so"), ("lib", "mine.cpython-311-x86_64-linux-gnu.so")],
)
def test_a_library_of_the_project_counts_although_a_build_has_copied_it(tmp_path: Path, build: str, name: str) -> None:
    write(tmp_path, f"a/{name}", "1")
    before = digest(tmp_path)
    write(tmp_path, f"build/{build}/a/{name}", "1")
    assert digest(tmp_path) == before
    write(tmp_path, f"a/{name}", "2")
    assert digest(tmp_path) != before


@pytest.mark.parametrize("name", ["dist", "build"])
def test_a_folder_that_is_named_itself_counts_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    write(folder, "a-1.0-py3-none-any.whl")
    write(folder, "lib.a/x")
    before = digest(folder)
    write(folder, "a-1.0-py3-none-any.whl", "another")
    assert digest(folder) != before
    before = digest(folder)
    write(folder, "lib.a/x", "another")
    assert digest(folder) != before


@pytest.mark.slow
def test_building_an_extension_for_real_leaves_the_digest_as_it_is(tmp_path: Path) -> None:
    if find_spec("setuptools") is None:  # importing it here would replace parts of the standard library
        pytest.skip("setuptools is not installed")
    write(tmp_path, "fast.c", _C)
    write(
        tmp_path,
        "setup.py",
        "from setuptools import Extension, setup\n"
        "setup(name='fast', version='1.0', ext_modules=[Extension('fast', ['fast.c'])])\n",
    )
    before = digest(tmp_path)
    ended = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if ended.returncode:
        pytest.skip(f"no extension can be built here: {ended.stderr.strip().splitlines()[-1:]}")
    assert (tmp_path / "build").is_dir()
    assert (tmp_path / "dist").is_dir()
    assert digest(tmp_path) == before
