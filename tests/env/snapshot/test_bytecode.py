"""Bytecode in snapshots: valid on a read-only mount, and never older than its source."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.snapshot.bytecode import EARLIEST_S, Source, settle_header, source_of
from env_snapshots import BEGAN_S, changes_of, overlay, reader_of, shown, snapshot, written
from erofs_images import needs_root
from store_doubles import MemoryStore

FLAGS = {mode: number for number, mode in ((0, PycInvalidationMode.TIMESTAMP), (1, PycInvalidationMode.UNCHECKED_HASH), (3, PycInvalidationMode.CHECKED_HASH))}  # fmt: skip  # noqa: E501


def _module(folder: Path, name: str = "module", text: str = "answer = 42\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(text)
    os.utime(path, (BEGAN_S + 5, BEGAN_S + 5))
    return path


def _compiled(path: Path, mode: PycInvalidationMode = PycInvalidationMode.TIMESTAMP) -> bytes:
    return Path(py_compile.compile(str(path), invalidation_mode=mode, doraise=True)).read_bytes()


def _source(path: Path, *, shown_s: float | None) -> Source:
    status = path.stat()
    shown_ns = None if shown_s is None else int(shown_s * 10**9)
    return Source(status.st_mtime_ns, status.st_size, shown_ns, path.read_bytes)


def _run(code: str, *paths: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-S", "-E", *options, "-c", f"import sys; sys.path[:0] = {list(map(str, paths))}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("mode", FLAGS)
def test_valid_bytecode_stays_valid_with_its_new_header(mode: PycInvalidationMode, tmp_path: Path) -> None:
    path = _module(tmp_path)
    before = _compiled(path, mode)
    for shown_s, flags in ((1_700_000_000.0, 0), (None, 3)):
        after = settle_header(before, _source(path, shown_s=shown_s))
        assert after is not None
        assert (after[:4], after[16:]) == (before[:4], before[16:])
        assert int.from_bytes(after[4:8], "little") == flags
        os.utime(path, (1_700_000_000, 1_700_000_000))
        Path(cache_from_source(str(path))).write_bytes(after)
        told = _run("import module; assert module.answer == 42", tmp_path, options=("-v",)).stderr
        assert "matches" in next(line for line in told.splitlines() if str(tmp_path) in line and ".pyc" in line)
        assert "bytecode is stale" not in told
        os.utime(path, (BEGAN_S + 5, BEGAN_S + 5))


def test_bytecode_that_python_would_not_load_is_dropped(tmp_path: Path) -> None:
    path = _module(tmp_path)
    for mode in FLAGS:
        data = _compiled(path, mode)
        source = _source(path, shown_s=1.0)
        other = Source(source.mtime_ns + 10**9, source.size + 1, 1, lambda: b"answer = 43\n")
        assert settle_header(data, None) is None
        # Python loads unchecked bytecode whatever the source contains: so does a restored job.
        assert settle_header(data, other) == (data if mode is PycInvalidationMode.UNCHECKED_HASH else None)
        assert settle_header(data[:15], source) is None
        assert settle_header(b"\x41\x0d\x0d\x0a" + data[4:], source) is None  # an early Python 3.7, before flags
        assert settle_header(data[:4] + b"\x02\0\0\0" + data[8:], source) is None


def test_digests_of_pythons_before_3_11_are_left_to_them(tmp_path: Path) -> None:
    """Their hashes of sources are computed differently; times are the same."""
    path = _module(tmp_path)
    for mode in FLAGS:
        data = (3439).to_bytes(2, "little") + b"\r\n" + _compiled(path, mode)[4:]
        assert settle_header(data, _source(path, shown_s=None)) == data
        inside = settle_header(data, _source(path, shown_s=5.0))
        assert inside is not None
        stamped = (5).to_bytes(4, "little") + path.stat().st_size.to_bytes(4, "little")
        assert inside[8:16] == (stamped if mode is PycInvalidationMode.TIMESTAMP else data[8:16])


@given(st.binary(max_size=40))
def test_no_bytes_make_it_fail(data: bytes) -> None:
    magic = importlib.util.MAGIC_NUMBER
    for found in (data, magic + data):
        kept = settle_header(found, Source(1, 2, 3, lambda: b""))
        assert kept is None or len(kept) == len(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/a/__pycache__/m.cpython-311.pyc", "/a/m.py"),
        ("/a/__pycache__/m.cpython-311.opt-1.pyc", "/a/m.py"),
        ("/a/__pycache__/test_m.cpython-311-pytest-8.3.5.pyc", "/a/test_m.py"),
        ("/a/__pycache__/m.v2.cpython-313.pyc", "/a/m.v2.py"),
        ("/__pycache__/m.pypy310.pyc", "/m.py"),
        ("/a/m.pyc", None),
        ("/a/__pycache__/m.pyc", None),
        ("/a/__pycache__/m.cpython-311.pyc.1234", None),
        ("/a/__pycache__/sub/m.cpython-311.pyc", None),
    ],
)
def test_the_source_of_a_cached_file_is_next_to_the_cache(path: str, source: str | None) -> None:
    assert source_of(path) == source


@pytest.mark.slow
def test_a_snapshot_keeps_valid_bytecode_only(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    for name in ("good", "stale", "orphan", "replaced"):
        _compiled(_module(upper, name))
    (upper / "stale.py").write_text("answer = 4242\n")
    (upper / "replaced.py").write_text("answer = 4242\n")
    (upper / "orphan.py").unlink()
    shutil.copy(cache_from_source(str(upper / "good.py")), upper / "sourceless.pyc")
    tag = f"{sys.implementation.cache_tag}.pyc"
    old = f"/__pycache__/replaced.{tag}"
    done = snapshot(MemoryStore(str(tmp_path)), upper, changes=changes_of(upper, modified=(old,)))
    kinds = {entry.path: entry.kind for entry in done.entries if entry.path.endswith(".pyc")}
    # Replaced bytecode must be hidden, or Python could load the old one.
    assert kinds == {f"/__pycache__/good.{tag}": "file", old: "deleted", "/sourceless.pyc": "file"}


def test_bytecode_of_loose_sources_is_left_to_python(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    _compiled(_module(upper / "project"))
    done = snapshot(MemoryStore(str(tmp_path)), upper, is_loose=lambda path: path.startswith("/project"))
    assert [entry.path for entry in done.entries] == ["/project", "/project/__pycache__", "/project/module.py"]


def test_bytecode_of_a_source_outside_is_compared_with_it_at_each_import(tmp_path: Path) -> None:
    upper, root = tmp_path / "upper", tmp_path / "root"
    path = _module(root / "lib")
    _compiled(path)
    (upper / "lib").mkdir(parents=True)
    shutil.move(path.parent / "__pycache__", upper / "lib")
    done = snapshot(MemoryStore(str(tmp_path)), upper, root=str(root))
    (entry,) = (entry for entry in done.entries if entry.kind == "file")
    reader = reader_of(MemoryStore(str(tmp_path)), done)
    inode = dict(reader.walk())[entry.path[1:].encode()]
    assert reader.pread(inode, 4, 4) == b"\x03\0\0\0"


def _wheel(folder: Path) -> Path:
    """A small wheel with a package with a few modules."""
    path = folder / "small-1.0-py3-none-any.whl"
    files = {
        "small/__init__.py": "from small import deep, data\nanswer = deep.value\n",
        "small/deep/__init__.py": "from small.deep.leaf import value\n",
        "small/deep/leaf.py": "value = 42\n",
        "small/data.py": "text = 'x' * 1000\n",
        "small-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: small\nVersion: 1.0\n",
        "small-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, "small-1.0.dist-info/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | {"small-1.0.dist-info/RECORD": record}).items():
            archive.writestr(name, text)
    return path


def _install(wheel: Path, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([*pip, "--target", target, wheel], check=True, env=environment)


@pytest.mark.slow
@needs_root
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")
def test_nothing_is_compiled_when_an_installed_package_is_imported_from_a_mount(tmp_path: Path) -> None:
    site = tmp_path / "upper/site"
    _install(_wheel(tmp_path), site)
    shutil.copytree(Path(json.__file__).parent, site / "json2")  # real modules, valid only with their own times
    written(site / "json2")
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-f", site / "json2"], check=True)
    began_s = min(path.stat().st_mtime for path in site.rglob("*.py"))
    with shown(tmp_path / "upper", tmp_path, began_s=began_s) as folder:
        told = _run("import small, json2; print(small.answer)", folder / "site", options=("-v",))
    assert told.stdout == "42\n"
    lines = [line for line in told.stderr.splitlines() if str(folder) in line]
    assert sum(" matches " in line for line in lines) == 4 + 3
    assert not [line for line in lines if "stale" in line or "wrote" in line]
    assert not [line for line in lines if line.startswith("# code object from") and ".pyc" not in line]


@needs_root
@pytest.mark.parametrize("mode", FLAGS)
def test_a_job_that_changes_an_installed_source_runs_what_it_wrote(mode: PycInvalidationMode, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    _compiled(_module(upper), mode)
    code = "import module; print(module.answer)"
    with shown(upper, tmp_path) as layer, overlay([layer], tmp_path / "view", upper=tmp_path / "job") as view:
        assert _run(code, view).stdout == "42\n"
        (view / "module.py").write_text("answer = 43\n")
        assert _run(code, view).stdout == "43\n"


def test_two_installations_with_other_times_give_one_snapshot(tmp_path: Path) -> None:
    def install(folder: Path, later_s: float, compile_it: Callable[[Path], object]) -> Path:
        path = _module(folder)
        os.utime(path, (BEGAN_S + later_s, BEGAN_S + later_s))
        os.chdir(folder)  # so that the bytecode contains the same file name
        compile_it(Path("module.py"))
        return folder

    here = Path.cwd()
    try:
        folders = [
            install(tmp_path / str(number), 10.0 * number, lambda path, mode=mode: _compiled(path, mode))
            for number, mode in enumerate([*FLAGS, PycInvalidationMode.TIMESTAMP])
        ]
    finally:
        os.chdir(here)
    store = MemoryStore(str(tmp_path))
    assert len({snapshot(store, folder).file for folder in folders}) == 1
    (shown_ns,) = {inode.mtime_ns for path, inode in reader_of(store, snapshot(store, folders[0])).walk() if path}
    assert shown_ns == EARLIEST_S * 10**9
