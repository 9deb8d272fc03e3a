"""Small wheels and indexes of them, for tests that install packages without a network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str] | None = None,
    *,
    requires: Sequence[str] = (),
    scripts: Mapping[str, str] | None = None,
) -> Path:
    """Write a pure wheel to `folder`; without `files` it has one module with its version."""
    module = name.replace("-", "_")
    contents = dict(files) if files is not None else {f"{module}.py": f"VERSION = {version!r}\n"}
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    contents[f"{info}/METADATA"] = metadata + "".join(f"Requires-Dist: {each}\n" for each in requires)
    contents[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if scripts:
        lines = [f"{script} = {target}\n" for script, target in scripts.items()]
        contents[f"{info}/entry_points.txt"] = "[console_scripts]\n" + "".join(lines)
    record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in contents.items():
            wheel.writestr(zipfile.ZipInfo(member, (2026, 1, 1, 0, 0, 0)), text)
    return path


def make_index(folder: Path, wheels: Sequence[Path]) -> str:
    """Write a simple index of these wheels to a folder; returns its URL."""
    for wheel in wheels:
        project = folder / wheel.name.partition("-")[0].replace("_", "-").lower()
        project.mkdir(parents=True, exist_ok=True)
        link = f'<a href="{wheel.absolute().as_uri()}">{wheel.name}</a>\n'
        with (project / "index.html").open("a", encoding="utf-8") as page:
            page.write(link)
    return folder.absolute().as_uri()


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
