"""Snapshots mounted on this machine: overlays over real folders, for processes that enter the view."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.env.restoring.host import HostView, show_on_host
from bootseer.env.restoring.layer import Layer, LayerOptions, mount_layer
from bootseer.errors import PermanentError
from bootseer.fuse.syscalls import MS_NOSUID
from bootseer.mounts import kernel
from bootseer.mounts.layers import mount_overlay
from restoring import Setup, run_in

pytestmark = pytest.mark.root
Show = Callable[..., HostView]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def show(as_root: None, tmp_path: Path, said: list[str]) -> Iterator[Show]:
    """`show(where, roots)`: a view, which is closed at the end at the latest."""
    views: list[HostView] = []

    def call(where: Callable[[str], Path], *roots: Path, changes: Path = tmp_path / "changes") -> HostView:
        views.append(show_on_host(where, [str(root) for root in roots], changes=changes, say=said.append))
        return views[-1]

    yield call
    for view in views:
        with closing(view):
            pass


@pytest.fixture
def venv(setup: Setup, tmp_path: Path) -> Path:
    """An environment with three files from a setup."""
    root = tmp_path / "host" / "venv"
    root.parent.mkdir()
    setup.write(root / "pyvenv.cfg", "home = /usr/bin\n")
    setup.write(root / "bin" / "tool", "#!/bin/sh\necho tool\n", mode=0o755)
    setup.write(root / "lib" / "module.py", "value = 1\n")
    return root


def bring(setup: Setup, tmp_path: Path, *roots: Path) -> Layer:
    changes = [change for root in roots for change in setup.changes(root)]
    wanted = LayerOptions(cache=tmp_path / "cache", runtime=tmp_path / "runtime")
    return mount_layer(setup.document(changes, roots), setup.store, wanted)


def test_a_job_finds_the_environment_where_it_was_and_no_other_process_does(
    setup: Setup, tmp_path: Path, venv: Path, show: Show
) -> None:
    with closing(bring(setup, tmp_path, venv)) as layer:
        view = show(layer.at, venv)
        assert run_in(view.enter, f"cat {venv}/lib/module.py; {venv}/bin/tool") == "value = 1\ntool\n"
        assert list(venv.iterdir()) == []
        view.close()
    assert not venv.exists()


def test_a_root_that_was_there_shows_both_and_deletions(setup: Setup, tmp_path: Path, show: Show) -> None:
    root = tmp_path / "host" / "prefix"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "old.py").write_text("old")
    (root / "lib" / "gone.py").write_text("gone")
    (root / "replaced").mkdir()
    (root / "replaced" / "hidden").touch()
    setup.write(root / "lib" / "new.py", "new")
    setup.write(root / "replaced" / "fresh", "")
    deleted = [root / "lib" / "gone.py", root / "replaced" / "hidden"]
    changes = setup.changes(root, deleted=deleted, opaque=[root / "replaced"])
    wanted = LayerOptions(cache=tmp_path / "cache", runtime=tmp_path / "runtime")
    with closing(mount_layer(setup.document(changes, [root]), setup.store, wanted)) as layer:
        view = show(layer.at, root)
        assert run_in(view.enter, f"cd {root}; find . -type f | sort").split() == [
            "./lib/new.py",
            "./lib/old.py",
            "./replaced/fresh",
        ]
        assert run_in(view.enter, f"ls {root}/replaced") == "fresh\n"
        view.close()
    assert sorted(path.name for path in (root / "lib").iterdir()) == ["gone.py", "old.py"]


def test_what_the_setup_has_just_written_is_shown_without_a_snapshot(setup: Setup, venv: Path, show: Show) -> None:
    view = show(setup.at, venv)
    assert run_in(view.enter, f"{venv}/bin/tool") == "tool\n"


def test_owners_and_modes_of_a_root_are_those_of_the_setup(
    setup: Setup, tmp_path: Path, venv: Path, show: Show
) -> None:
    setup.at(venv).chmod(0o2750)
    os.chown(setup.at(venv), 1234, 4321)
    os.setxattr(setup.at(venv), "user.note", b"kept")
    with closing(bring(setup, tmp_path, venv)) as layer:
        view = show(layer.at, venv)
        assert run_in(view.enter, f"stat -c '%u %g %a' {venv}") == "1234 4321 2750\n"
        status = venv.stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 4321, 0o2750)
        code = f"import os; print(os.getxattr({str(venv)!r}, {'user.note'!r}))"
        assert run_in(view.enter, f'{sys.executable} -c "{code}"') == "b'kept'\n"
        view.close()


def test_a_job_that_destroys_its_environment_destroys_no_other(
    setup: Setup, tmp_path: Path, venv: Path, show: Show
) -> None:
    with closing(bring(setup, tmp_path, venv)) as layer:
        first, second = show(layer.at, venv), show(layer.at, venv)
        run_in(first.enter, f"rm -r {venv}/lib; echo broken > {venv}/bin/tool")
        assert run_in(second.enter, f"{venv}/bin/tool; cat {venv}/lib/module.py") == "tool\nvalue = 1\n"
        first.close()
        assert run_in(second.enter, f"{venv}/bin/tool") == "tool\n"
        second.close()
        third = show(layer.at, venv)
        assert run_in(third.enter, f"{venv}/bin/tool; cat {venv}/lib/module.py") == "tool\nvalue = 1\n"
        third.close()
    assert not venv.exists()


def test_what_a_job_wrote_into_its_environment_is_kept_and_reported(
    setup: Setup, tmp_path: Path, venv: Path, show: Show, said: list[str]
) -> None:
    view = show(setup.at, venv)
    run_in(view.enter, f"mkdir {venv}/lib/__pycache__; echo x > {venv}/lib/__pycache__/m.pyc; echo 42 > {venv}/result")
    view.close()
    (line,) = said
    assert "1 files into its environment" in line
    (kept,) = (tmp_path / "changes").glob(f"kept/*{venv}/result")
    assert kept.read_text() == "42\n"
    assert str(kept).startswith(line.split(" kept in ")[1].split(" ")[0])


def test_a_run_that_wrote_nothing_but_bytecode_leaves_nothing(
    setup: Setup, tmp_path: Path, venv: Path, show: Show, said: list[str]
) -> None:
    view = show(setup.at, venv)
    run_in(view.enter, f"mkdir {venv}/lib/__pycache__; echo x > {venv}/lib/__pycache__/m.pyc; rm {venv}/pyvenv.cfg")
    view.close()
    assert said == []
    assert [path.name for path in (tmp_path / "changes").iterdir()] == ["points"]


def test_mounts_of_the_machine_below_a_root_stay_visible_and_writable(
    setup: Setup, tmp_path: Path, venv: Path, show: Show
) -> None:
    for place in (venv / "data", venv / "data" / "deeper"):
        place.mkdir(parents=True)
        kernel.attach(kernel.create_mount("tmpfs", [("source", "test")]), place)
    view = show(setup.at, venv)
    run_in(view.enter, f"echo 1 > {venv}/data/a; echo 2 > {venv}/data/deeper/b; {venv}/bin/tool")
    assert (venv / "data" / "a").read_text() == "1\n"
    assert (venv / "data" / "deeper" / "b").read_text() == "2\n"


def test_what_the_snapshot_has_below_a_mount_of_the_machine_shows_there(
    setup: Setup, venv: Path, show: Show, said: list[str]
) -> None:
    (venv / "lib").mkdir(parents=True)
    kernel.attach(kernel.create_mount("tmpfs", [("source", "test")]), venv / "lib")
    (venv / "lib" / "of-the-machine").touch()
    view = show(setup.at, venv)
    assert run_in(view.enter, f"ls {venv}/lib; echo new > {venv}/lib/written").split() == [
        "module.py",
        "of-the-machine",
    ]
    view.close()
    assert "1 files into its environment" in said[0]


def test_the_machines_own_name_and_resolver_are_not_the_setups(setup: Setup, show: Show) -> None:
    setup.write("/etc/hosts", "10.0.0.1 elsewhere\n")
    setup.write("/etc/bootseer-test.conf", "from the setup\n")
    view = show(setup.at, Path("/etc"))
    assert (
        run_in(view.enter, "cat /etc/hosts /etc/bootseer-test.conf")
        == f"{Path('/etc/hosts').read_text()}from the setup\n"
    )
    assert not Path("/etc/bootseer-test.conf").exists()


def test_changes_stay_in_memory_where_the_disk_takes_no_overlay(
    setup: Setup, tmp_path: Path, venv: Path, show: Show, said: list[str]
) -> None:
    merged = overlay(tmp_path)
    view = show(setup.at, venv, changes=merged / "changes")
    assert "kept in memory" in said[0]
    run_in(view.enter, f"{venv}/bin/tool; echo 42 > {venv}/result")
    view.close()
    (kept,) = (merged / "changes").glob(f"kept/*{venv}/result")
    assert kept.read_text() == "42\n"


def test_what_a_killed_run_left_is_settled_by_the_next(
    setup: Setup, tmp_path: Path, venv: Path, show: Show, said: list[str]
) -> None:
    pid = os.fork()
    if pid == 0:
        view = show_on_host(setup.at, [str(venv)], changes=tmp_path / "changes")
        run_in(view.enter, f"echo 42 > {venv}/result")
        os._exit(0)  # as after a kill: nothing is closed
    assert os.waitpid(pid, 0)[1] == 0
    assert venv.exists()
    other = tmp_path / "host" / "other"
    setup.write(other / "file", "")
    show(setup.at, other).close()
    assert "1 files into its environment" in said[0]
    assert not venv.exists()


def test_a_folder_that_a_killed_run_left_belongs_to_the_user_who_fills_it(setup: Setup, venv: Path, show: Show) -> None:
    pid = os.fork()
    if pid == 0:
        show(setup.at, venv)
        os._exit(0)  # as after a kill: nothing is closed
    assert os.waitpid(pid, 0)[1] == 0
    (venv / "own").write_text("own")
    view = show(setup.at, venv)
    run_in(view.enter, f"{venv}/bin/tool && cat {venv}/own")
    view.close()
    assert [path.name for path in venv.iterdir()] == ["own"]


def test_the_folders_of_a_job_that_outlived_its_run_are_left_alone(
    setup: Setup, tmp_path: Path, venv: Path, show: Show, said: list[str]
) -> None:
    ready, tell = os.pipe()
    go, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        view = show_on_host(setup.at, [str(venv)], changes=tmp_path / "changes")
        if os.fork() == 0:
            try:
                view.enter()
                os.write(tell, b"1")
                os.close(start)
                os.read(go, 1)
                (venv / "late").write_text("late")
                os.write(tell, b"1" if (venv / "lib" / "module.py").exists() else b"0")
            finally:
                os._exit(0)
        os.read(ready, 1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    other = tmp_path / "host" / "other"
    setup.write(other / "file", "")
    show(setup.at, other).close()
    assert said == []
    assert venv.is_dir()
    os.close(tell)
    os.close(start)
    assert os.read(ready, 1) == b"1"


def test_what_a_process_that_outlives_the_job_writes_is_kept_by_the_next_run(
    setup: Setup, tmp_path: Path, venv: Path, show: Show, said: list[str]
) -> None:
    view = show(setup.at, venv)
    script = f"echo started; read line; echo late > {venv}/late; cat {venv}/lib/module.py"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["/bin/sh", "-ec", script], preexec_fn=view.enter, **pipes) as process:  # noqa: PLW1509
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        view.close()
        assert said == []
        assert process.communicate("go\n", timeout=180)[0] == "value = 1\n"
    other = tmp_path / "host" / "other"
    setup.write(other / "file", "")
    show(setup.at, other).close()
    assert "1 files into its environment" in said[0]


def test_what_is_forbidden_for_the_machines_files_is_for_the_snapshots(setup: Setup, venv: Path, show: Show) -> None:
    venv.mkdir()
    kernel.attach(kernel.create_mount("tmpfs", [("source", "test")], attributes=MS_NOSUID), venv)
    view = show(setup.at, venv)
    code = f"import os; print(os.statvfs({str(venv)!r}).f_flag & os.ST_NOSUID)"
    assert run_in(view.enter, f'{sys.executable} -c "{code}"') == f"{os.ST_NOSUID}\n"
    assert run_in(view.enter, f"{venv}/bin/tool") == "tool\n"


def test_the_systems_own_folders_can_be_shown(setup: Setup, show: Show) -> None:
    setup.write("/usr/local/bin/bootseer-test-tool", "#!/bin/sh\necho installed\n", mode=0o755)
    view = show(setup.at, Path("/usr"))
    assert run_in(view.enter, "PATH=/usr/local/bin:$PATH bootseer-test-tool; ls /usr/bin/env").split() == [
        "installed",
        "/usr/bin/env",
    ]
    assert not Path("/usr/local/bin/bootseer-test-tool").exists()


def test_a_cache_on_an_overlay_is_no_hindrance(setup: Setup, tmp_path: Path, venv: Path, show: Show) -> None:
    merged = overlay(tmp_path)
    wanted = LayerOptions(cache=merged / "cache", runtime=tmp_path / "runtime", loading="pull")
    document = setup.document(setup.changes(venv), [venv])
    with closing(mount_layer(document, setup.store, wanted)) as layer:
        view = show(layer.at, venv)
        assert run_in(view.enter, f"{venv}/bin/tool") == "tool\n"
        view.close()


def overlay(folder: Path) -> Path:
    """An overlay, like the root of a container."""
    lower, upper, work, merged = (folder / name for name in ("lower", "upper", "work", "merged"))
    for path in (lower, upper, work, merged):
        path.mkdir()
    mount_overlay([lower], merged, upper=upper, work=work)
    return merged


@pytest.mark.parametrize("there", ["file", "link"])
def test_a_root_that_is_no_folder_here_is_refused(
    setup: Setup, tmp_path: Path, venv: Path, show: Show, there: str
) -> None:
    if there == "file":
        venv.touch()
    else:
        (tmp_path / "elsewhere").mkdir()
        venv.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermanentError, match="nothing can be mounted there"):
        show(setup.at, venv)
    assert [path.name for path in (tmp_path / "changes").iterdir()] == ["points"]
