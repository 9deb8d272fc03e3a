"""Devices from CDI files: merging, precedence of files, and the error when there are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import PermanentError, UsageError
from bootseer.image.containers.cdi import edits_for, gpu_names


def spec(env: str = "GENERAL=1", *names: str) -> dict[str, Any]:
    devices = [
        {"name": name, "containerEdits": {"deviceNodes": [{"path": f"/dev/gpu{name}"}], "env": [f"GPU_{name}=1"]}}
        for name in names or ("0", "1")
    ]
    general = {
        "env": [env],
        "mounts": [{"hostPath": "/usr/lib/driver.so", "containerPath": "/usr/lib/driver.so", "options": ["ro"]}],
        "hooks": [{"hookName": "createContainer", "path": "/usr/bin/ldcache"}],
        "additionalGids": [44],
    }
    return {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": general}


def test_devices_bring_their_own_edits_and_the_file_s_once(tmp_path: Path) -> None:
    (tmp_path / "nvidia.json").write_text(json.dumps(spec()))
    edits = edits_for(gpu_names("0,1"), [tmp_path])
    assert [node["path"] for node in edits.nodes] == ["/dev/gpu0", "/dev/gpu1"]
    assert edits.env == ["GENERAL=1", "GPU_0=1", "GPU_1=1"]
    assert len(edits.mounts) == len(edits.hooks) == 1
    assert edits.groups == [44]


def test_yaml_is_read_as_vendors_write_it(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(spec()))
    assert edits_for(["nvidia.com/gpu=1"], [tmp_path]).nodes == [{"path": "/dev/gpu1"}]


def test_a_later_folder_outranks_an_earlier_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "nvidia.json").write_text(json.dumps(spec(f"FROM={name}")))
    assert edits_for(gpu_names("0"), [tmp_path / "a", tmp_path / "b"]).env[0] == "FROM=b"


def test_a_machine_without_files_gets_the_command_that_makes_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        edits_for(gpu_names("all"), [tmp_path, tmp_path / "missing"])
    assert "nvidia-ctk cdi generate" in caught.value.hint


def test_an_unknown_device_is_reported_with_those_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "nvidia.json").write_text(json.dumps(spec()))
    with pytest.raises(UsageError) as caught:
        edits_for(gpu_names("7"), [tmp_path])
    assert "0, 1" in caught.value.hint


@pytest.mark.parametrize("name", ["odd.json", "odd.yaml"])
@pytest.mark.parametrize("text", ["{", "[1]", '{"kind": "x/y", "devices": 7}', '{"kind": 1}', "\ud800"])
def test_a_file_that_is_none_ends_in_one_line(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises((PermanentError, UsageError)):
        edits_for(["x/y=0"], [tmp_path])


def test_an_empty_list_of_gpus_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        gpu_names(" , ")
