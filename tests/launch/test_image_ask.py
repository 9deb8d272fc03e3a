"""The variables and mounts of a container that are part of a setup's request key."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.image.containers.runtime_config import Bind
from bootseer.launch.image.setup_paths import mounts_of_setup, passed_settings, setup_variables

BIND = Bind("/srv/wheels", "/wheels", read_only=True)


def named(tmp_path: Path, setup: str = "", requirements: str = "", **env: str) -> bool:
    (tmp_path / "setup.sh").write_text(setup)
    (tmp_path / "requirements.txt").write_text(requirements)
    found = mounts_of_setup("setup.sh", ["requirements.txt"], str(tmp_path), env, [BIND])
    assert found in ((), (BIND,))
    return bool(found)


def test_a_mount_counts_when_the_setup_names_its_place(tmp_path: Path) -> None:
    assert not named(tmp_path, "pip install einops", "einops==0.8.2\n")
    assert named(tmp_path, "cp /wheels/a.whl .")
    assert named(tmp_path, requirements="--find-links=/wheels\neinops\n")
    assert named(tmp_path, PIP_FIND_LINKS="/wheels")
    # `run` mounts different folders for the command in each start, and the environment does not depend on them.
    assert not named(tmp_path, "pip install einops", BOOTSEER_PEERS_DIR="/wheels", BOOTSEER_CHECKPOINT="/wheels")


@pytest.mark.parametrize("text", ["ls /wheels2", "ls /my-wheels", "ls /wheels-old", "ls wheels"])
def test_another_name_is_not_the_mount_s(tmp_path: Path, text: str) -> None:
    assert not named(tmp_path, text)


def test_files_that_the_script_runs_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "more.sh").write_text("tar xf /wheels/all.tar\n")
    assert named(tmp_path, "sh more.sh")


def test_a_declared_part_counts_instead_of_the_whole_mount(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("cp /wheels/a.whl .")
    assert mounts_of_setup("setup.sh", [], str(tmp_path), {}, [BIND], ["/srv/wheels/a.whl"]) == ()


def test_settings_of_installers_pass_unless_they_name_a_place_of_this_machine() -> None:
    env = {
        "PIP_INDEX_URL": "https://index.example/simple",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "/srv/wheels",
        "UV_FIND_LINKS": "https://a.example,/srv",
        "PIP_CONFIG_FILE": "~/pip.conf",
        "HOME": "/root",
        "FLAVOUR": "dev",
    }
    assert passed_settings(env, ["FLAVOUR", "MISSING"]) == ("PIP_INDEX_URL", "PIP_NO_INDEX", "FLAVOUR")


def test_options_of_the_user_take_precedence_over_the_machine_s_variables() -> None:
    env = {"PIP_NO_INDEX": "1", "FLAVOUR": "dev", "SECRET": "x"}
    assert setup_variables(["PIP_NO_INDEX=0", "FLAVOUR", "MISSING"], env, []) == {"PIP_NO_INDEX": "0", "FLAVOUR": "dev"}
