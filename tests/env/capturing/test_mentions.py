"""Paths mentioned in the files of a snapshot."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.env.capturing.effects import files_of_node, mentions
from bootseer.env.capturing.exports import node_patterns
from bootseer.env.changes import Action, Change


def test_links_into_scratch_folders_and_import_paths_are_reported(tmp_path: Path) -> None:
    (tmp_path / "app.pth").write_text("/tmp/repository/src\n")
    (tmp_path / "__editable___app_finder.py").write_text("MAPPING = {'app': '/tmp/app'}\n")
    (tmp_path / "notes.txt").write_text("/tmp/notes\n")
    (tmp_path / "link").symlink_to("/var/tmp/data")
    (tmp_path / "other").symlink_to("/opt/data")
    (tmp_path / "outside.pth").symlink_to("notes.txt")  # in an image it could lead to a file or pipe of this machine
    names = ["app.pth", "__editable___app_finder.py", "notes.txt", "link", "other", "missing.pth", "outside.pth"]
    changes = [Change(f"/opt/{name}", Action.ADDED, str(tmp_path / name)) for name in names]
    assert mentions([*changes, Change("/opt/gone.pth", Action.DELETED)]) == [
        "/tmp/repository/src\n",
        "MAPPING = {'app': '/tmp/app'}\n",
        "/var/tmp/data",
    ]


def test_a_pipe_named_as_an_import_path_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pth")
    assert mentions([Change("/opt/pipe.pth", Action.ADDED, str(tmp_path / "pipe.pth"))]) == [""]


def test_files_with_names_of_the_node_or_the_job_are_reported_if_the_setup_names_such_variables(tmp_path: Path) -> None:
    texts = {
        "hostfile": "gpu-a12 slots=8\n",
        "job.yaml": "job: 987654\n",
        "setup.log": "gpu-a12\n",
        "o.txt": "gpu-a123",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("hostfile")
    os.mkfifo(tmp_path / "pipe")
    changes = [Change(f"/p/{name}", Action.ADDED, str(tmp_path / name)) for name in [*texts, "link", "pipe", "gone"]]
    env = {"SLURM_JOB_ID": "987654", "SLURM_JOB_NODELIST": "gpu-a[12-13]", "USER": "gpu"}
    patterns = node_patterns("gpu-a12.example", ["SLURM_JOB_ID", "USER"], env)
    assert files_of_node([*changes, Change("/p/x", Action.DELETED)], patterns) == ["/p/hostfile", "/p/job.yaml"]
    assert files_of_node(changes, node_patterns("gpu-a12.example", ["USER", "SLURM_JOB_NODELIST_"], env)) == []
    # Possible in the README of any repository.
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert node_patterns("localhost", common, common) == []
