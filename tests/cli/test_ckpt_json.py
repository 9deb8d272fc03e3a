"""The JSON of the `bootseer ckpt` commands matches docs/checkpoints.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
_DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"
_ROW = re.compile(r"^\| `(\w+)` \| `([\w-]+/\d)` \| (.*) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, str]]:
    """Each command with its schema and the description of the fields."""
    return {verb: (f"bootseer.{schema}", words) for verb, schema, words in _ROW.findall(_DOCUMENT.read_text())}


def names(value: Any) -> Iterator[str]:
    """The names of all fields, except of objects whose keys are data or the daemon's."""
    if isinstance(value, dict):
        for name, inside in value.items():
            yield name
            if name not in ("bytes_by_node", "daemon"):
                yield from names(inside)
    if isinstance(value, list):
        for inside in value:
            yield from names(inside)


@pytest.fixture
def job(run: Run, tmp_path: Path) -> Path:
    """A job with striped checkpoints."""
    source = tmp_path / "step-10"
    source.mkdir()
    (source / "model").write_bytes(os.urandom(9 << 20))
    job = tmp_path / "jobs"
    assert run("ckpt", "put", str(source), str(job), "--name", "step-9").returncode == 0
    assert run("ckpt", "put", str(source), str(job)).returncode == 0
    return job


def damage(job: Path) -> None:
    part = next(path for path in sorted((job / "step-10" / ".stripes").rglob("*.0.*")) if path.is_file())
    with part.open("r+b") as file:
        file.write(b"wrong")


def calls(job: Path, tmp_path: Path) -> dict[str, list[str]]:
    """All commands without a mount, in an order in which they succeed."""
    return {
        "put": ["put", str(tmp_path / "step-10"), str(job), "--name", "step-11", "--keep-last", "2"],
        "get": ["get", f"{job}/step-10", str(tmp_path / "copy")],
        "list": ["list", str(job)],
        "latest": ["latest", str(job)],
        "stat": ["stat", f"{job}/step-10/model"],
        "verify": ["verify", f"{job}/step-10"],
        "policy": ["policy", str(job)],
        "remove": ["remove", f"{job}/step-10"],
    }


def test_each_verb_prints_the_fields_that_are_documented(run: Run, job: Path, tmp_path: Path) -> None:
    told = documented()
    for verb, words in calls(job, tmp_path).items():
        if verb == "verify":
            damage(job)
        printed = json.loads(run("ckpt", *words, "--json").stdout)
        schema, fields = told[verb]
        assert printed.pop("schema") == schema
        assert set(re.findall(r"`(\w+)`", fields)) == set(names(printed)), verb


@pytest.mark.fuse
def test_so_do_the_verbs_of_mounts(run: Run, job: Path, tmp_path: Path) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    more = {"BOOTSEER_RUNTIME": str(tmp_path / "run"), "BOOTSEER_CACHE": str(tmp_path / "cache")}
    told, target = documented(), str(tmp_path / "m")
    row = set(re.findall(r"`(\w+)`", told["mount"][1]))
    for verb, words, fields in (
        ("mount", ("mount", str(job), target), row),
        ("mounted", ("mounted",), {"mounts", *row}),
        ("umount", ("umount", target), {"target", "published", "lost"}),
    ):
        printed = json.loads(run("ckpt", *words, "--json", more=more).stdout)
        assert printed.pop("schema") == told[verb][0]
        assert set(names(printed)) == fields
