"""Make a relocatable folder with BootSeer and its own Python, which runs on any machine whose glibc is not older.

    python bundle.py /opt/bootseer containerd s3 hdfs sign service

Copies the interpreter that runs it, its standard library, BootSeer with the named extras, and the shared libraries that
these need besides the C library, found by relative paths. Needs the programs `ldd` and `patchelf`.
"""

import compileall
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_NOT_NEEDED = (
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "config-*",
    "site-packages",
    "_tkinter*",
    "*.opt-?.pyc",  # bytecode for `python -O`: half of the library's bytes where an installer of Python made it
    "*.pyc.*",  # bytecode that another process is writing: it gets another name meanwhile
)
# The C library has to fit the kernel's loader and the node's name service: it stays the node's own.
_GLIBC = re.compile(r"(ld-linux|linux-vdso|lib(c|m|dl|rt|pthread|resolv|util|nsl|anl)\.so)")
_NEEDED = re.compile(r"(?m)^\s*(\S+) => (/\S+)")
# OpenSSL looks for authorities only where the distribution that it was built for has them.
_AUTHORITIES = """

_load_default_certs = SSLContext.load_default_certs
_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/ssl/ca-bundle.pem",  # SUSE
)


def _load_certs(self, purpose=Purpose.SERVER_AUTH):
    _load_default_certs(self, purpose)
    for name in _FILES:
        if not self.cert_store_stats()["x509_ca"] and os.path.isfile(name):
            self.load_verify_locations(name)


SSLContext.load_default_certs = _load_certs
"""
_START = """#!/bin/sh
exec "$(dirname "$(readlink -f "$0")")/python3" -I -m bootseer "$@"
"""


def main(target: Path, extras: list[str]) -> None:
    """Write the folder, which must not exist. Its file VERSION identifies its content."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = target / "lib" / python
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        library,
        symlinks=False,
        ignore=shutil.ignore_patterns(*_NOT_NEEDED, "dist-packages", "sitecustomize.py"),
        ignore_dangling_symlinks=True,
    )
    with (library / "ssl.py").open("a") as file:
        file.write(_AUTHORITIES)
    (target / "bin").mkdir()
    shutil.copy2(Path(sys.executable).resolve(), target / "bin" / python)
    (target / "bin" / "python3").symlink_to(python)
    for distribution in _distributions("bootseer", extras):
        _copy_distribution(distribution, library)
    import bootseer

    if not (library / "bootseer").exists():  # installed as an editable
        ignore = shutil.ignore_patterns(*_NOT_NEEDED)
        shutil.copytree(Path(bootseer.__file__).parent, library / "bootseer", ignore=ignore)
    compileall.compile_dir(library, quiet=2)  # images of Python have no bytecode, and jobs may not write it here
    start = target / "bin" / "bootseer"
    start.write_text(_START)
    start.chmod(0o755)
    _add_libraries(target)
    version = f"{bootseer.__version__}-{_digest(target)[:12]}"
    (target / "VERSION").write_text(f"{version}\n")
    sys.stdout.write(f"{target}: {version}\n")


def _distributions(name: str, extras: Iterable[str]) -> Iterator[metadata.Distribution]:
    """The named distribution and all that it requires."""
    todo, done = [(name, frozenset(extras))], set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in done:
            continue
        done.add((name, wanted))
        found = metadata.distribution(name)
        if not any(other == name and others != wanted for other, others in done):
            yield found
        for text in found.requires or ():
            needed = Requirement(text)
            environments = [{"extra": extra} for extra in wanted or {""}] + [{"extra": ""}]
            if needed.marker is None or any(needed.marker.evaluate(each) for each in environments):
                todo.append((canonicalize_name(needed.name), frozenset(needed.extras)))


def _copy_distribution(distribution: metadata.Distribution, library: Path) -> None:
    for file in distribution.files or ():
        # Neither its programs nor the path file of an editable installation.
        if ".." in file.parts or file.is_absolute() or file.suffix == ".pth":
            continue
        source, target = Path(str(distribution.locate_file(file))), library / file
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _add_libraries(target: Path) -> None:
    libraries = target / "lib"
    for path in sorted(target.rglob("*")):
        if path.is_symlink() or not path.is_file() or not _is_elf(path):
            continue
        # `ldd` prints nothing useful for static programs and those of other architectures.
        answer = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        foreign = [
            (name, Path(found))
            for name, found in _NEEDED.findall(answer)
            if not _GLIBC.match(name) and not Path(found).is_relative_to(target)
        ]
        for name, found in foreign:
            if not (libraries / name).exists():
                shutil.copy2(found.resolve(), libraries / name)
                _search_in(libraries / name, libraries)
        if foreign:
            _search_in(path, libraries)


def _search_in(path: Path, libraries: Path) -> None:
    path.chmod(path.stat().st_mode | 0o200)
    asked = subprocess.run(["patchelf", "--print-rpath", path], capture_output=True, text=True, check=True)
    # A package may have libraries of its own beside it.
    places = [place for place in asked.stdout.strip().split(":") if place.startswith("$ORIGIN")]
    places.append(f"$ORIGIN/{os.path.relpath(libraries, path.parent)}")
    # Before a job's LD_LIBRARY_PATH, which may have other versions of these libraries.
    subprocess.run(["patchelf", "--force-rpath", "--set-rpath", ":".join(places), path], check=True)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _digest(target: Path) -> str:
    digest = sha256()
    for path in sorted(target.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(target)}\0".encode())
            digest.update(sha256(path.read_bytes()).digest())
    return digest.hexdigest()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER [EXTRA]...")
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
