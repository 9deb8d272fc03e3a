"""The paths of a setup's files in its container."""

from __future__ import annotations

from bootseer.image.containers.runtime_config import Bind
from bootseer.launch.image.setup_paths import setup_paths


def test_the_working_folder_is_shown_read_only() -> None:
    places = setup_paths("/home/job", ["setup.sh", "more/requirements.txt"], [])
    assert places.folder == "/run/bootseer/setup"
    assert places.own == (Bind("/home/job", "/run/bootseer/setup", read_only=True),)
    assert places.inside("/home/job/more/requirements.txt") == "/run/bootseer/setup/more/requirements.txt"
    assert places.outside("/run/bootseer/setup/setup.sh") == "/home/job/setup.sh"


def test_a_working_folder_that_the_user_mounts_is_shown_there() -> None:
    code = Bind("/home", "/code")
    places = setup_paths("/home/job", ["setup.sh"], [Bind("/data", "/data"), code])
    assert (places.folder, places.own) == ("/code/job", ())
    assert places.inside("/home/job/setup.sh") == "/code/job/setup.sh"
    assert places.outside("/code/job") == "/home/job"


def test_files_elsewhere_get_their_folders_shown() -> None:
    places = setup_paths(
        "/home/job", ["../setup/setup.sh", "/srv/requirements.txt", "/data/more.txt"], [Bind("/data", "/d")]
    )
    assert [(bind.source, bind.read_only) for bind in places.own] == [
        ("/home/job", True),
        ("/home/setup", True),
        ("/srv", True),
    ]
    assert len({bind.target for bind in places.own}) == 3
    assert places.inside("/srv/requirements.txt").endswith("/requirements.txt")
    assert places.inside("/srv/requirements.txt") != "/srv/requirements.txt"
    assert places.inside("/data/more.txt") == "/d/more.txt"


def test_what_no_mount_shows_keeps_its_name() -> None:
    places = setup_paths("/home/job", [], [])
    assert places.inside("/usr/bin/python3") == "/usr/bin/python3"
    assert places.outside("/usr/bin/python3") == ""


def test_the_machine_s_root_is_not_shown_as_a_whole() -> None:
    places = setup_paths("/", ["srv/setup.sh"], [])
    assert (places.folder, [bind.source for bind in places.own]) == ("/", ["/srv"])
    assert places.inside("/srv/setup.sh").startswith("/run/bootseer/")
