"""Files in scratch folders: unneeded ones, and those that a restored node would miss."""

from __future__ import annotations

import pytest

from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.leftovers import has_random_name, left_elsewhere, left_in_scratch


@pytest.mark.parametrize(
    "written",
    [
        ["/tmp/tmp.Xa81bQzLk0/wheel/data"],
        ["/tmp/tmpab12_x9z", "/tmp/pip-unpack-ab12cd34/x.whl"],
        ["/tmp/build.log", "/tmp/get-pip.py", "/tmp/tool-1.2.tar.gz", "/tmp/requirements-gpu.txt"],
        ["/tmp/library-1.0/setup.py", "/tmp/library-1.0/src/x.py"],
        ["/var/tmp/made/library/CMakeLists.txt", "/var/tmp/made/library/build/lib.so"],
        ["/tmp/aws/install", "/tmp/aws/dist/aws", "/tmp/aws.zip"],
        ["/run/daemon.pid"],
        ["/dev/shm/sem.abc"],
    ],
)
def test_rubbish_does_not_count(written: list[str]) -> None:
    assert left_in_scratch(written, []) == []


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (["/tmp/venv/pyvenv.cfg", "/tmp/venv/bin/python"], "it installed into /tmp/venv, which is not kept"),
        (["/tmp/pip-venv/a/pyvenv.cfg"], "it installed into /tmp/pip-venv/a, which is not kept"),
        (["/tmp/conda/conda-meta/history"], "it installed into /tmp/conda, which is not kept"),
        (["/tmp/data/train.parquet", "/tmp/data/setup/x"], "it left /tmp/data, which is not kept"),
        (["/tmp/config.yaml"], "it left /tmp/config.yaml, which is not kept"),
        (["/dev/shm/weights"], "it left /dev/shm/weights, which is not kept"),
        (["/tmp/model.checkpoint"], "it left /tmp/model.checkpoint, which is not kept"),
    ],
)
def test_what_a_job_may_use_counts(written: list[str], reason: str) -> None:
    (found,) = left_in_scratch(written, [])
    assert found.startswith(reason)


def test_what_the_job_names_counts_even_if_it_looks_like_rubbish() -> None:
    written = ["/tmp/repository/setup.py", "/tmp/repository-2/setup.py"]
    assert left_in_scratch(written, ["python /tmp/repository/train.py"]) == [
        "it left /tmp/repository, which is used later but not kept: use another folder"
    ]


def test_writes_to_disks_that_are_not_captured_count_unless_no_snapshot_keeps_them() -> None:
    exclusions = Exclusions(homes=["/root"])
    written = [f"/scratch/{number}" for number in range(5)]
    assert left_elsewhere([*written, "/root/.cache/pip/x", "/tmp/x", "/run/x.pid"], exclusions) == [
        "it wrote /scratch/0, /scratch/1, /scratch/2 and 2 more, which is not captured"
    ]


def test_names_made_by_chance_are_recognised() -> None:
    assert has_random_name("/tmp/tmp.Xa81bQzLk0")
    assert not has_random_name("/tmp/triton")
    assert not has_random_name("/opt/tmp.Xa81bQzLk0")
