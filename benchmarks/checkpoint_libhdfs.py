"""pyarrow with libhdfs in a separate folder. No package contains libhdfs, so it is compiled from the sources in the
Python package pydoop. Needs gcc and the headers of a JDK; without them the arm is skipped.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import hadoop

_PYARROW = "pyarrow==26.0.1"
# The last version with pkg_resources, which the build of pydoop imports.
_SETUPTOOLS = "setuptools==79.0.1"
_SOURCES = "pydoop==2.0.0 --hash=sha256:c7eb2ad8c36d2a75dc1c6cee701928334614f2e862a70798b0cb278e3102f77d\n"


class Libhdfs:
    """libhdfs and pyarrow in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python = folder / "python"
        self._library = folder / "libhdfs.so"

    def bring(self) -> str:
        """Fetch and compile what is missing. Returns the reason if that is impossible, otherwise ""."""
        if self._library.exists() and self._python.is_dir():
            return ""
        home = _java_home()
        if shutil.which("gcc") is None:
            return "there is no gcc to compile libhdfs"
        if home is None:
            return "there are no headers of a JDK to compile libhdfs"
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._pip("install", "--quiet", "--target", str(self._python), _PYARROW, _SETUPTOOLS)
            requirement = self._folder / "sources.txt"
            requirement.write_text(_SOURCES)
            words = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes")
            self._pip("download", "--quiet", *words, "--dest", str(self._folder), "--requirement", str(requirement))
            with tarfile.open(self._folder / "pydoop-2.0.0.tar.gz") as archive:
                archive.extractall(self._folder, filter="data")
            self._compile(self._folder / "pydoop-2.0.0/src/libhdfs", home)
            shutil.rmtree(self._folder / "pydoop-2.0.0")
        except subprocess.CalledProcessError as error:
            return f"{error.cmd[0]} fails: {error.stderr.decode(errors='replace').strip()[-300:]}"
        return ""

    def environment(self, conf: Path) -> Mapping[str, str]:
        """The environment of a process that uses it; `conf` is the cluster's configuration folder."""
        # An embedded virtual machine does not expand wildcards in the class path.
        jars = [jar for entry in hadoop.class_path() for jar in (glob.glob(entry) if "*" in entry else [entry])]  # noqa: PTH207
        return {
            "JAVA_HOME": str(_java_home()),
            "PYTHONPATH": str(self._python),
            "ARROW_LIBHDFS_DIR": str(self._folder),
            "CLASSPATH": ":".join([str(conf), *jars]),
            "LIBHDFS_OPTS": "-Xmx1g",
        }

    def _pip(self, *words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(self._python)}
        subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, check=True, env=environment)

    def _compile(self, sources: Path, java_home: Path) -> None:
        new = self._library.with_suffix(".new")
        jvm = java_home / "lib/server"
        files = [str(path) for part in (".", "common", "os/posix") for path in sorted((sources / part).glob("*.c"))]
        includes = [f"-I{path}" for path in (sources, sources / "include", sources / "os/posix")]
        includes += [f"-I{java_home}/include", f"-I{java_home}/include/linux"]
        linked = [f"-L{jvm}", "-ljvm", "-lpthread", f"-Wl,-rpath,{jvm}"]
        subprocess.run(
            ["gcc", "-O2", "-fPIC", "-shared", "-w", "-o", str(new), *includes, *files, *linked],
            capture_output=True,
            check=True,
        )
        new.replace(self._library)


def _java_home() -> Path | None:
    """The folder of the JDK of the `java` on PATH; None if that is only a runtime."""
    java = shutil.which("java")
    home = Path(java).resolve().parents[1] if java else None
    return home if home is not None and (home / "include/jni.h").exists() else None
