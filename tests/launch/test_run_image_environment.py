"""`bootseer run --image --setup`: the setup runs in the container once, later its layer is mounted over the image."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.artifact.places import containers_folder
from bootseer.env.keys.lock import own_uv
from bootseer.mounts import kernel
from bootseer.trace.event import BEGIN, Event
from busybox import without_mixed_cgroups
from image_node import Node
from stored import stored
from wheels import make_wheel

pytestmark = [pytest.mark.root, pytest.mark.fuse]
Run = Callable[..., subprocess.CompletedProcess[str]]
SETUP = """
mkdir -p /opt/tool; cat words > /opt/tool/words
echo more >> /etc/profile
export GREETING=hello
"""


@pytest.fixture
def job(run: Run, node: Node, tmp_path: Path, events: Callable[[], list[Event]]) -> Callable[..., Any]:
    """`job(words)`: run in the image with the setup; the finished process, and the environment's event."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "words").write_text("words of the project\n")
    (project / "setup.sh").write_text(SETUP)
    store = {"BOOTSEER_STORE": str(tmp_path / "store")}

    def call(
        *words: str, code: int = 0, more: dict[str, str] | None = None, setup: str = "setup.sh", **kwargs: Any
    ) -> Any:
        ran = run(
            "run", "-q", "--image", node.reference, "--setup", setup, *words,
            more={**node.env, **store, **(more or {})}, cwd=project, timeout=300, **kwargs,
        )  # fmt: skip
        assert ran.returncode == code, ran.stderr
        assert "Traceback" not in ran.stderr
        assert "not unmounted" not in ran.stderr
        measured = (tmp_path / "spool").exists()
        said = [event.attrs for event in events() if event.stage == "environment_start"] if measured else []
        return ran, said[-1] if said else {}

    return call


def test_the_setup_runs_once_in_the_image_and_later_its_layer_is_mounted(
    job: Callable[..., Any], node: Node, tmp_path: Path
) -> None:
    words = ("--", "sh", "-c", 'cat /opt/tool/words; tail -1 /etc/profile; echo "greeting: $GREETING"; ls /opt')
    first, start = job(*words)
    assert first.stdout == "words of the project\nmore\ngreeting: hello\ntool\n"
    assert (start["mode"], start["trust"]) == ("captured", "observed")
    assert "which is not" not in first.stderr  # the runtime's own /etc/hosts and the like
    (document,) = (tmp_path / "store").glob("environments/*/document")
    assert json.loads(document.read_text())["roots"] == []
    second, start = job(*words)
    assert second.stdout == first.stdout
    assert (start["mode"], start["code"]) == ("restored", "hit")
    mounted = [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/") and "/layers/" not in point]
    assert not mounted


def test_the_job_s_changes_are_in_no_snapshot(job: Callable[..., Any]) -> None:
    job("--", "sh", "-c", "echo changed > /opt/tool/words")
    ran, start = job("--", "cat", "/opt/tool/words")
    assert (ran.stdout, start["mode"]) == ("words of the project\n", "restored")


def test_a_failing_setup_starts_nothing(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "project" / "bad.sh").write_text("exit 5\n")
    ran, _ = job("--", "echo", "started", code=5, setup="bad.sh")
    assert "started" not in ran.stdout
    assert "exit code 5" in ran.stderr
    assert not list((tmp_path / "store").glob("environments/*/document"))


def test_without_measuring_the_setup_still_runs(job: Callable[..., Any]) -> None:
    ran, start = job("--", "cat", "/opt/tool/words", more={"BOOTSEER_DISABLE": "1"})
    assert (ran.stdout, start) == ("words of the project\n", {})


def test_variables_that_the_setup_took_away_are_gone(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "project" / "bare.sh").write_text("unset GREETING\nexport MOOD=good\n")
    script = 'echo "${GREETING-none} $MOOD"'
    for mode in ("captured", "restored"):
        ran, start = job("--", "sh", "-c", script, setup="bare.sh")
        assert (ran.stdout, start["mode"]) == ("none good\n", mode)


def test_what_the_setup_of_another_user_exports_reaches_the_command(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "project" / "mood.sh").write_text("export MOOD=good\n")
    ran, start = job("--user", "1000", "--", "sh", "-c", 'echo "$MOOD"', setup="mood.sh")
    assert (ran.stdout, start["mode"]) == ("good\n", "captured")


def test_a_mounted_working_folder_is_where_the_setup_runs(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "project" / "where.sh").write_text("pwd > /where\n")
    ran, start = job("--mount", f"{tmp_path}:/data:ro", "--", "cat", "/where", setup="where.sh")
    assert (ran.stdout, start["mode"]) == ("/data/project\n", "captured")
    # Installed files may contain this path.
    ran, start = job("--mount", f"{tmp_path}:/other:ro", "--", "cat", "/where", setup="where.sh")
    assert (ran.stdout, start["mode"]) == ("/other/project\n", "captured")


def test_a_setup_that_writes_into_a_mount_is_not_kept(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "project" / "build.sh").write_text("echo built > result\n")
    for _ in range(2):
        ran, start = job("--mount", f"{tmp_path}/project:/code", "--", "cat", "/code/result", setup="build.sh")
        # Not `unsafe`: another program may have written the file.
        assert (ran.stdout, start["mode"], start["code"]) == ("built\n", "installed", "no-snapshot")
    assert "project/result, in a mount, which is not captured" in ran.stderr


def test_a_mount_that_the_setup_names_is_in_the_key_by_content(job: Callable[..., Any], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "project" / "copy.sh").write_text("cat /data/words > /words\n")
    for words, mode in (("one", "captured"), ("one", "restored"), ("two", "captured")):
        (data / "words").write_text(words)
        ran, start = job("--mount", f"{data}:/data:ro", "--", "cat", "/words", setup="copy.sh")
        assert (ran.stdout, start["mode"]) == (words, mode)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_what_a_setup_reads_in_a_mount_and_the_key_does_not_know_keeps_it_from_being_kept_until_it_is_declared(
    job: Callable[..., Any], tmp_path: Path, runtime: str
) -> None:
    if shutil.which(runtime) is None:
        pytest.skip(f"needs {runtime}")
    (tmp_path / "data").mkdir()
    unknown = tmp_path / "data" / "words"
    unknown.write_text("one\n")
    (tmp_path / "project" / "hidden.sh").write_text('cat words; cat "/da""ta/wo""rds" > /words\n')
    words = ("--runtime", runtime, "--mount", f"{tmp_path}/data:/data:ro", "--", "cat", "/words")
    become = {"setup": "hidden.sh", "become": without_mixed_cgroups if runtime == "crun" else None}
    ran, start = job(*words, **become)
    assert (ran.stdout, start["mode"], start["code"]) == ("one\n", "installed", "no-snapshot")
    assert f"it read files that its key does not cover: {unknown} " in ran.stderr
    unknown.write_text("two\n")
    ran, start = job(*words, **become)
    assert (ran.stdout, start["mode"], start["code"]) == ("two\n", "installed", "unsafe")
    (tmp_path / "project" / "link").symlink_to(unknown)
    for declared, mode in ((str(unknown), "captured"), (str(unknown), "restored"), ("link", "captured")):
        ran, start = job("--env-input", declared, *words, **become)
        assert (ran.stdout, start["mode"], start["trust"]) == ("two\n", mode, "observed")


def test_requirements_need_a_python_in_the_image(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "project" / "requirements.txt").write_text("einops\n")
    ran, _ = job("--requirements", "requirements.txt", "--", "echo", "started", code=127)
    assert "started" not in ran.stdout
    assert "there is no working Python in the image" in ran.stderr


@pytest.mark.parametrize("name", ["uv.lock", "requirements.txt"])
def test_an_image_s_python_needs_neither_uv_nor_pip(run: Run, node: Node, tmp_path: Path, name: str) -> None:
    """This machine's Python and a virtual environment for it are mounted into the image: so nothing is captured."""
    project = tmp_path / "project"
    make_wheel(project / "wheels", "alpha", "1.0")
    text = '[project]\nname = "job"\nversion = "1"\nrequires-python = ">=3.9"\ndependencies = ["alpha"]\n'
    (project / "pyproject.toml").write_text(text + '[tool.uv]\nfind-links = ["wheels"]\nno-index = true\n')
    (project / "requirements.txt").write_text("--no-index\n-f wheels\nalpha\n")
    subprocess.run([own_uv() or "uv", "lock", "-q"], cwd=project, check=True, timeout=300)
    venv.create(tmp_path / "venv", with_pip=False)
    folders = [folder for folder in (sys.base_prefix, "/lib", "/lib64", "/usr/lib") if Path(folder).exists()]
    mounts = [f"{os.path.realpath(folder)}:{folder}:ro" for folder in folders] + [f"{tmp_path}/venv:{tmp_path}/venv"]
    ran = run(
        *("run", "-q", "--image", node.reference, "-r", name),
        *(word for mount in mounts for word in ("--mount", mount)),
        *("--container-env", f"PATH={tmp_path}/venv/bin:/bin", "--"),
        *("python3", "-c", "import alpha; print(alpha.VERSION)"),
        more={**node.env, "BOOTSEER_STORE": str(tmp_path / "store")},
        cwd=project,
    )
    assert (ran.returncode, ran.stdout) == (0, "1.0\n"), ran.stderr


WORDS = ("--", "sh", "-c", 'cat /opt/tool/words; echo "greeting: $GREETING"')
SAID = "words of the project\ngreeting: hello\n"


def test_where_layers_cannot_be_moved_the_command_still_runs_on_what_the_setup_did(
    job: Callable[..., Any], node: Node, tmp_path: Path
) -> None:
    folder = node.cache / "environments" / "runs"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", folder], check=True)
    ran, start = job(*WORDS)
    assert (ran.stdout, start["mode"]) == (SAID, "installed")
    assert "no snapshot of the environment was published" in ran.stderr
    assert not list((tmp_path / "store").glob("environments/*/document"))


def test_without_an_overlay_the_command_runs_on_what_the_setup_did(
    job: Callable[..., Any], node: Node, tmp_path: Path
) -> None:
    """An overlay cannot be the upper layer of another: the container gets a private copy of the image's files."""
    folder, *others = containers_folder(node.cache), *(tmp_path / name for name in ("lower", "changes", "work"))
    for each in (folder, *others):
        each.mkdir(parents=True, mode=0o700)
    layers = "lowerdir={},upperdir={},workdir={}".format(*others)
    subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", folder], check=True)
    (tmp_path / "no-store").write_text("a file")
    for more in ({}, {"BOOTSEER_STORE": str(tmp_path / "no-store")}):
        ran, start = job(*WORDS, more=more)
        assert "this container gets a private copy" in ran.stderr
        assert (ran.stdout, start["mode"]) == (SAID, "installed")
    assert not list((tmp_path / "store").glob("environments/*/document"))


def test_without_a_folder_for_environments_the_setup_runs(job: Callable[..., Any], node: Node) -> None:
    folder = node.cache / "environments"
    folder.mkdir(parents=True)
    (folder / "runs").write_text("a file")
    ran, start = job(*WORDS)
    assert (ran.stdout, start["mode"]) == (SAID, "bypassed")
    assert "no snapshot of the environment" in ran.stderr
    job("--env", "require", *WORDS, code=1)


def test_without_a_store_the_setup_runs(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    ran, start = job(*WORDS)
    assert (ran.stdout, start["mode"]) == (SAID, "installed")


def test_a_damaged_snapshot_is_made_anew(job: Callable[..., Any], node: Node, tmp_path: Path) -> None:
    job(*WORDS)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file() and path.name != "document":
            path.write_bytes(b"damaged")
    more = {"BOOTSEER_CACHE": str(tmp_path / "cache2")}  # another node
    for mode, code in (("installed", "damaged"), ("captured", "no-snapshot"), ("restored", "hit")):
        ran, start = job(*WORDS, more=more)
        assert (ran.stdout, start["mode"], start["code"]) == (SAID, mode, code), ran.stderr


def test_a_required_snapshot_that_is_missing_starts_nothing(job: Callable[..., Any]) -> None:
    ran, _ = job("--env", "require", "--", "echo", "started", code=1)
    assert "started" not in ran.stdout
    assert "no environment snapshot" in ran.stderr


def test_what_a_setup_leaves_running_ends_with_it_in_every_start(job: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "project" / "daemon.sh").write_text("sleep 600 </dev/null >/dev/null 2>&1 &\necho done > /done\n")
    words = ("--", "sh", "-c", "cat /done; busybox ps | grep -c '[s]leep 600'")
    for mode in ("captured", "restored"):
        ran, start = job(*words, setup="daemon.sh", code=1)
        assert (ran.stdout, start["mode"]) == ("done\n0\n", mode)


def test_what_the_command_needs_from_a_scratch_folder_keeps_the_snapshot_away(
    job: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "project" / "scratch.sh").write_text("mkdir -p /tmp/tool; echo tool > /tmp/tool/words\n")
    ran, _ = job("--", "cat", "/tmp/tool/words", setup="scratch.sh")
    assert ran.stdout == "tool\n"
    assert "not snapshot-safe" in ran.stderr
    assert job("--", "cat", "/tmp/tool/words", setup="scratch.sh")[0].stdout == "tool\n"


def test_a_replaced_node_mounts_image_and_snapshot_lazily(
    job: Callable[..., Any], node: Node, tmp_path: Path, events: Callable[[], list[Event]]
) -> None:
    words = ("--loading", "lazy", "--", "sh", "-c", "cat /opt/tool/words; wc -c < /hot")
    first, _ = job(*words)
    ran, start = job(*words, more={"BOOTSEER_CACHE": str(tmp_path / "other")})
    assert (ran.stdout, start["mode"]) == (first.stdout, "restored")
    begun = [event.stage for event in events() if event.attempt == 1 and event.phase == BEGIN]
    # The image's blocks are fetched while the environment is restored.
    assert (
        begun.index("image_loading.daemon") < begun.index("environment_setup.key") < begun.index("image_loading.mount")
    )


def test_a_snapshot_is_not_used_in_a_folder_with_other_content(job: Callable[..., Any], node: Node) -> None:
    """The digest of such an image is known only after it is converted."""
    words = ("--image", f"dir:{node.folder}/tree", "--", "cat", "/etc/changed", "/opt/tool/words")
    changed = node.folder / "tree" / "etc" / "changed"
    for text, mode in (("1", "captured"), ("1", "restored"), ("2", "captured")):
        if mode == "captured":
            changed.write_text(f"{text}\n")
        ran, start = job(*words)
        assert (ran.stdout, start["mode"]) == (f"{text}\nwords of the project\n", mode)


def test_credentials_of_a_setup_in_an_image_are_in_no_store(job: Callable[..., Any], tmp_path: Path) -> None:
    secret = "7Gq2xK9wLmT4vB8nRz5pYc3d"  # noqa: S105 - drawn for this test
    (tmp_path / "project" / "login.sh").write_text(
        f"mkdir -p $HOME/.kube; echo {secret}kube > $HOME/.kube/config; echo {secret}vault > $HOME/.vault-token\n"
        "mkdir -p /opt; echo words > /opt/words\n"
    )
    words = ("--", "sh", "-c", "cat /opt/words; cat $HOME/.vault-token")
    ran, start = job(*words, setup="login.sh")
    assert (ran.stdout, start["mode"]) == (f"words\n{secret}vault\n", "captured")
    held = stored(tmp_path / "store")
    assert b"opt" in held
    assert secret.encode() not in held
    ran, start = job("--", "cat", "/opt/words", setup="login.sh")
    assert (ran.stdout, start["mode"]) == ("words\n", "restored")
    assert ".vault-token" in ran.stderr
    (tmp_path / "project" / "copy.sh").write_text(f"mkdir -p /opt; echo token={secret} > /opt/settings.conf\n")
    ran, start = job("--", "cat", "/opt/settings.conf", setup="copy.sh")
    assert "it would contain what looks like a secret: /opt/settings.conf" in ran.stderr
    assert secret.encode() not in stored(tmp_path / "store")
    login = tmp_path / "user" / ".netrc"
    login.parent.mkdir()
    login.write_text("machine a.test login me password pR4vT8mQ2xL6wZ1k\n")
    shutil.copy(login, tmp_path / "project" / "data")
    (tmp_path / "project" / "copy.sh").write_text("mkdir -p /opt; tr ' ' '\\n' < data > /opt/data\n")
    ran, start = job("--", "true", setup="copy.sh", more={"HOME": str(login.parent)})
    assert f"/opt/data (a word of {login})" in ran.stderr
