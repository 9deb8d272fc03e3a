"""Namespaces that are held and entered: mounts inside and outside, and the user inside."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.errors import AccessError, PermanentError, TransientError
from bootseer.fuse.syscalls import failure
from bootseer.io.proc import open_files
from bootseer.mounts import kernel
from bootseer.mounts.kernel import is_mounted_anywhere
from bootseer.mounts.namespace import Built, Namespace, overlay_in_place
from hung_mount import hung_mount, needs_fuse
from plain_user import UID, as_plain_user

pytestmark = pytest.mark.root
BOTH = pytest.mark.parametrize("user", [False, True])


def inside(namespace: Namespace, script: str, cwd: Path | None = None) -> str:
    ended = subprocess.run(
        ["sh", "-ec", script], preexec_fn=namespace.enter, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def tmpfs(place: Path) -> Callable[[], None]:
    def build() -> None:
        kernel.attach(kernel.create_mount("tmpfs", [("source", "test")]), place)
        (place / "inside").write_text("only here")

    return build


@BOTH
def test_mounts_are_seen_inside_and_through_the_root_alone(place: Path, user: bool) -> None:
    with contextlib.closing(Namespace.create(tmpfs(place), user=user)) as namespace:
        assert inside(namespace, f"cat {place}/inside") == "only here"
        assert (namespace.root / f"{place}/inside".lstrip("/")).read_text() == "only here"
        assert not list(place.iterdir())
        assert not kernel.is_mount(place)


def test_a_child_keeps_its_working_folder_by_name(place: Path) -> None:
    with contextlib.closing(Namespace.create(tmpfs(place))) as namespace:
        assert inside(namespace, "pwd; ls", cwd=place) == f"{place}\ninside\n"


def test_a_deleted_working_folder_stays_deleted(place: Path) -> None:
    gone = place / "gone"
    gone.mkdir()
    with contextlib.closing(Namespace.create(lambda: None)) as namespace:

        def look() -> None:
            gone.rmdir()
            namespace.enter()
            assert not list(Path().iterdir())

        assert run_forked(look, gone) == 0


def run_forked(do: Callable[[], object], cwd: Path) -> int:
    """Run `do` in a child process. Returns its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(cwd)
            do()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def test_what_the_helper_tells_and_hands_over_arrives(place: Path) -> None:
    def build() -> Built:
        (place / "x").write_text("handed over")
        return Built({"points": ["/", "/a b"]}, {"folder": os.open(place, os.O_PATH)})

    with contextlib.closing(Namespace.create(build)) as namespace:
        assert namespace.facts == {"points": ["/", "/a b"]}
        assert (namespace.folder("folder") / "x").read_text() == "handed over"


def test_a_helper_holds_more_mounts_than_the_soft_limit_of_open_files(place: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(open_files()) + 50

    def build() -> Built:
        held = [kernel.clone_mount(place) for _ in range(most)]
        return Built({"held": len(held)})

    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with contextlib.closing(Namespace.create(build)) as namespace:
            assert namespace.facts == {"held": most}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_errors_of_the_helper_are_raised_here() -> None:
    def refuse() -> None:
        raise failure("mount nothing", errno.EPERM)

    with pytest.raises(AccessError, match="mount nothing"):
        Namespace.create(refuse)


def test_a_defect_in_the_helper_is_an_error_here_and_unwinds_nothing() -> None:
    with pytest.raises(PermanentError, match="ZeroDivisionError"):
        Namespace.create(lambda: print(1 / 0))
    with pytest.raises(PermanentError, match="died"):
        Namespace.create(lambda: os._exit(1))


def test_a_helper_that_hangs_is_given_up() -> None:
    answer, report = os.pipe2(os.O_NONBLOCK)

    def hang() -> None:
        os.write(report, str(os.getpid()).encode())
        time.sleep(600)

    helper = 0
    for deadline_s in (0.5, 5.0, 50.0):
        with pytest.raises(TransientError, match="in time"):
            Namespace.create(hang, deadline_s=deadline_s)
        with contextlib.suppress(BlockingIOError):  # on a busy machine the deadline may pass before it gets there
            helper = int(os.read(answer, 20))
            break
    os.close(answer)
    os.close(report)
    assert helper
    assert not Path(f"/proc/{helper}").exists()


def test_everything_ends_with_the_last_holder(place: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    namespace = Namespace.create(tmpfs(place))
    sleeper = subprocess.Popen(["sleep", "600"], preexec_fn=namespace.enter)  # noqa: PLW1509
    namespace.close()
    namespace.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert is_mounted_anywhere(str(place))
    sleeper.kill()
    sleeper.wait()
    assert not is_mounted_anywhere(str(place))


def test_root_keeps_all_ids_in_a_user_namespace(place: Path) -> None:
    with contextlib.closing(Namespace.create(lambda: None, user=True)) as namespace:
        assert inside(namespace, f"id -u; touch {place}/f; chown 1234:77 {place}/f; stat -c %u:%g {place}/f") == (
            "0\n1234:77\n"
        )


def test_a_plain_user_is_who_it_was_and_root_of_nothing(place: Path) -> None:
    place.chmod(0o755)
    script = (
        "import os, sys, subprocess; from pathlib import Path; from bootseer.mounts import kernel;"
        "from bootseer.mounts.namespace import Namespace;"
        "n = Namespace.create(lambda: kernel.restrict(Path('/'), 1), user=True);"
        "subprocess.run(['sh', '-c', 'id -u; id -g; umount / 2>&1; grep CapEff /proc/self/status'], preexec_fn=n.enter)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=as_plain_user(place, fuse=False),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    uid, gid, refused, rights = ended.stdout.splitlines()
    assert (uid, gid) == (str(UID), str(UID)), ended.stderr
    assert "superuser" in refused or "permi" in refused
    assert rights.split()[1] == "0" * 16


@BOTH
def test_an_overlay_in_place_lets_nested_mounts_through(place: Path, user: bool) -> None:
    root, layer, changes = place / "root", place / "layer", place / "changes"
    for folder in (root / "nested/deep", root / "nested/file_on", layer / "lib", changes / "upper", changes / "work"):
        folder.mkdir(parents=True)
    (root / "own").write_text("own")
    (layer / "lib/new").write_text("new")
    (place / "file").write_text("bound")
    (root / "bound").write_text("below")

    def build() -> Built:
        if not user:
            kernel.attach(kernel.create_mount("tmpfs", [("source", "one")]), root / "nested")
            (root / "nested/deep").mkdir()
            kernel.attach(kernel.create_mount("tmpfs", [("source", "two")]), root / "nested/deep")
            (root / "nested/deep/mark").write_text("deep")
            kernel.attach(kernel.clone_mount(place / "file"), root / "bound")
        notes = overlay_in_place(root, [root, layer], upper=changes / "upper", work=changes / "work", userxattr=user)
        return Built({"notes": notes})

    with contextlib.closing(Namespace.create(build, user=user)) as namespace:
        assert namespace.facts["notes"] == []
        assert inside(namespace, f"cat {root}/own {root}/lib/new; echo w > {root}/written") == "ownnew"
        if not user:
            assert inside(namespace, f"cat {root}/nested/deep/mark {root}/bound") == "deepbound"
    assert (changes / "upper/written").exists()
    assert not (root / "written").exists()
    assert (changes / "work/work/incompat/volatile").exists()  # the kernel's mark: unmounting synced nothing


def test_a_mount_without_a_target_in_the_new_folder_is_reported(place: Path) -> None:
    root, layer = place / "root", place / "layer"
    (root / "nested").mkdir(parents=True)
    layer.mkdir()

    def build() -> Built:
        kernel.attach(kernel.create_mount("tmpfs", [("source", "one")]), root / "nested")
        return Built({"notes": overlay_in_place(root, [layer])})

    with contextlib.closing(Namespace.create(build)) as namespace:
        (note,) = namespace.facts["notes"]
    assert f"the mount {root}/nested cannot be kept" in note


@needs_fuse
def test_a_helper_that_hangs_in_the_kernel_is_left_behind(tmp_path: Path) -> None:
    with hung_mount(tmp_path / "hung") as path, pytest.raises(TransientError):
        Namespace.create(lambda: os.chdir(path), deadline_s=0.5)
    os.wait()
