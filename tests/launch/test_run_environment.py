"""`bootseer run --setup`, `--requirements`: the setup runs once, later starts mount its result."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.env.keys.request_key import request_key
from bootseer.launch.environment.capture import input_changes
from bootseer.launch.environment.lookup_process import key_request_of
from bootseer.launch.environment.task import EnvironmentOptions, Task
from environment_place import Place, made_place
from once import copy

pytestmark = pytest.mark.root


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


NOT_FOR_A_RESTORE = {
    f"bootseer.{name}"
    for name in (
        "artifact.hotsets", "env.capturing.capture", "env.capturing.secrets", "env.snapshot.contents",
        "fetch.fetcher", "hdfs.requests", "launch.environment.publish", "mounts.serve",
    )
}  # fmt: skip
IMPORT = ("python", "-c", "import alpha, beta; print(alpha.VERSION, beta.VERSION, alpha.__file__)")


EDITABLE_BACKEND = """
import os, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "lib-1-py3-none-any.whl"
    files = {
        "lib.pth": os.getcwd() + "\\n",
        "lib-1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: lib\\nVersion: 1\\n",
        "lib-1.dist-info/WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files["lib-1.dist-info/RECORD"] = "".join(f"{path},,\\n" for path in [*files, "lib-1.dist-info/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
"""


def test_the_setup_runs_once_and_later_starts_mount_what_it_did(place: Place) -> None:
    script = place.counting_script()
    place.write("requirements.txt", "alpha==1.0\nbeta==2.0\n")
    words = ("--setup", script, "-r", "requirements.txt", "--", *IMPORT)
    first = place.run(*words, is_new=True)
    assert first.stdout == f"1.0 2.0 {place.site}/alpha.py\n"
    assert place.start()["mode"] == "captured"
    assert place.published()["published"] is True, place.published()
    assert not (place.site / "alpha.py").exists()
    second = place.run(*words, is_new=True)
    assert second.stdout == first.stdout
    start = place.start()
    assert (start["mode"], start["code"], start["trust"]) == ("restored", "hit", "observed")
    # Everything is local now: the modules for fetching, capturing and serving are not even imported.
    third = place.run(*words, more={"PYTHONPROFILEIMPORTTIME": "1"}, is_new=True)
    imported = {line.rpartition("|")[2].strip() for line in third.stderr.splitlines()}
    assert "bootseer.env.restoring.host" in imported
    assert not imported & NOT_FOR_A_RESTORE
    # Nothing is compiled either.
    said = place.run(*words[:4], "--", "python", "-v", "-c", "import alpha, beta").stderr
    assert "code object from" in said
    for name in ("alpha", "beta"):
        assert f"__pycache__/{name}." in said
        assert f"wrote '{place.site}/__pycache__/{name}." not in said
        assert f"code object from {place.site}/{name}.py" not in said
    assert not place.leftovers()
    assert not place.mounts()
    # A replacement node restores from the store.
    place.cache = "other"
    assert place.run(*words).stdout == first.stdout
    start = place.start()
    assert (start["mode"], start["builder"]) == ("restored", "cache")
    assert start["stored_bytes"] > start["local_bytes"]
    assert place.num_setups == 1


def test_inputs_and_a_python_that_links_lead_to_are_in_the_key(place: Place) -> None:
    shared = place.root / "shared"
    shared.mkdir()
    (shared / "pins.txt").write_text("1\n")
    (place.project / "link").symlink_to(shared)
    (place.root / "linked").symlink_to(place.venv)
    (place.root / "settings").write_text("[user]\n")
    (place.root / "home/.gitconfig").symlink_to("../settings")
    script = place.alpha_script("cat link/pins.txt; git config --list || :\npython -c 'import json'\n")
    path = place.env["PATH"].replace(str(place.venv), f"{place.root}/linked")
    place.run("--setup", script, "--", "python", "-c", "import alpha", more={"PATH": path})
    assert place.published()["published"] is True, place.published()
    assert place.start()["trust"] == "observed"


def test_a_changed_input_is_a_miss(place: Place) -> None:
    script = place.counting_script()
    place.write("base.txt", "alpha==1.0\n")
    place.write("requirements.txt", "-r base.txt\n")
    words = ("--setup", script, "-r", "requirements.txt", "--", "python", "-c", "import alpha; print(alpha.VERSION)")
    assert place.run(*words).stdout == "1.0\n"
    place.write("base.txt", "alpha==1.1\n")
    assert place.run(*words).stdout == "1.1\n"
    assert (place.start()["mode"], place.num_setups) == ("captured", 2)


def test_an_input_that_another_program_changes_while_the_setup_runs_keeps_a_snapshot_from_being_made(
    place: Place,
) -> None:
    """An input that the setup itself changes does not."""
    for name in ("own.txt", "other.txt"):
        place.write(name, "1\n")
    change = f"nsenter -t $PPID -m sh -c 'echo 2 > {place.project}/other.txt'"  # on the machine itself
    script = place.alpha_script(f"cat own.txt other.txt\necho 2 > own.txt\n{change}\n")
    words = ("--env-input", "own.txt", "--env-input", "other.txt", "--setup", script, "--", "cat", "own.txt")
    ran = place.run(*words)
    assert f"inputs of it changed while it ran: {place.project}/other.txt (its content changed)\n" in ran.stderr
    assert (ran.stdout, place.documents()) == ("2\n", [])
    place.run(*words)
    assert len(place.documents()) == 1


def test_an_input_that_changes_counts_unless_a_scan_has_found_it_among_the_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("alpha==1.0\n")
    wanted = EnvironmentOptions(tmp_path / "cache", tmp_path / "runtime")
    task = Task(None, ("a.txt",), wanted, {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    key = request_key(key_request_of(task, ""))
    assert input_changes(task, key) == []
    (tmp_path / "a.txt").write_text("alpha==1.1\n")
    assert input_changes(task, key) == [f"inputs of it changed while it ran: {tmp_path}/a.txt (its content changed)"]
    assert input_changes(task, key, [f"{tmp_path.resolve()}/a.txt"]) == []
    task.folder.remove()


def test_what_the_job_writes_stays_on_the_machine(place: Place) -> None:
    script = place.counting_script("mkdir -p data; echo words > data/vocab; echo x > $HOME/.tool-settings")
    words = (
        "--setup",
        script,
        "--",
        "sh",
        "-c",
        "cat data/vocab; echo 1 >> results; echo 2 > data/more; date > $HOME/log",
    )
    for number in (1, 2):
        assert place.run(*words).stdout == "words\n"
        assert (place.project / "results").read_text() == "1\n" * number
        assert (place.project / "data" / "more").exists()
        assert (place.root / "home" / "log").exists()
        assert (place.root / "home" / ".tool-settings").read_text() == "x\n"
    assert place.start()["mode"] == "restored"
    assert place.num_setups == 1


def test_a_restore_writes_what_another_node_lacks(place: Place) -> None:
    script = place.counting_script("mkdir -p data/deep; echo words > data/deep/vocab; ln -s deep/vocab data/link")
    words = ("--setup", script, "--", "cat", "data/link")
    place.run(*words)
    for path in (place.project / "data" / "link", place.project / "data" / "deep" / "vocab"):
        path.unlink()
    assert place.run(*words).stdout == "words\n"
    assert (place.start()["mode"], place.num_setups) == ("restored", 1)
    assert (place.project / "data" / "deep" / "vocab").read_text() == "words\n"


def test_a_user_s_own_file_in_the_way_makes_the_setup_run(place: Place) -> None:
    script = place.counting_script("mkdir -p data; echo words > data/vocab")
    words = ("--setup", script, "--", "cat", "data/vocab")
    place.run(*words)
    (place.project / "data" / "vocab").write_text("my own work\n")
    ran = place.run(*words)
    assert "data/vocab" in ran.stderr
    assert (place.start()["mode"], place.start()["code"]) == ("installed", "conflict")
    assert place.num_setups == 2


def test_an_environment_in_the_project_folder_is_mounted(place: Place) -> None:
    script = place.counting_script(
        "python -m venv --without-pip .venv\n. .venv/bin/activate\n"
        f"{place.venv}/bin/python -m pip --python .venv/bin/python install -q alpha==1.0\n"
    )
    words = (
        "--setup",
        script,
        "--",
        "sh",
        "-c",
        "command -v python; alpha; python -c 'import alpha; print(alpha.__file__)'",
    )
    first = place.run(*words)
    assert first.stdout.splitlines()[:2] == [f"{place.project}/.venv/bin/python", "alpha 1.0"]
    assert not (place.project / ".venv" / "pyvenv.cfg").exists()
    assert place.run(*words).stdout == first.stdout
    assert (place.start()["mode"], place.start()["roots"], place.num_setups) == ("restored", 1, 1)
    assert not (place.project / ".venv").exists()


def test_an_environment_in_a_folder_that_the_setup_replaces_is_mounted(place: Place) -> None:
    place.write("box/old", "")
    script = place.counting_script(
        "rm -rf box; mkdir -p box/env/bin; touch box/env/pyvenv.cfg; echo tool > box/env/bin/tool\n"
        "echo file > box/file\n"
    )
    words = ("--setup", script, "--", "sh", "-c", "ls box; cat box/env/bin/tool box/file")
    for mode in ("captured", "restored"):
        assert place.run(*words).stdout == "env\nfile\ntool\nfile\n"
        assert place.start()["mode"] == mode
    assert sorted(path.name for path in (place.project / "box").iterdir()) == ["file"]


def test_an_editable_install_shows_the_code_as_it_is_now(place: Place) -> None:
    place.write(
        "lib/pyproject.toml",
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "lib"\nversion = "1"\n',
    )
    place.write("lib/backend.py", EDITABLE_BACKEND)
    place.write("lib/lib.py", "WORD = 'one'\n")
    place.write("requirements.txt", "-e ./lib\n")
    words = ("-r", "requirements.txt", "--", "python", "-c", "import lib; print(lib.WORD, lib.__file__)")
    first = place.run(*words)
    assert first.stdout == f"one {place.project}/lib/lib.py\n"
    second = place.run(*words)
    assert second.stdout == first.stdout
    assert place.start()["mode"] == "restored"


def test_console_scripts_deletions_and_downgrades_are_restored(place: Place) -> None:
    place.write("base.txt", "alpha==1.1\nbeta==2.0\n")
    place.run("--env", "bypass", "-r", "base.txt", "--", "true")
    assert place.start()["mode"] == "bypassed"
    script = place.counting_script("python -m pip uninstall -q -y beta\npython -m pip install -q alpha==1.0\n")
    code = "import importlib.util as u, alpha; print(alpha.VERSION, u.find_spec('beta'))"
    words = ("--setup", script, "--", "sh", "-c", f'alpha; python -c "{code}"; ls {place.site} | grep -c alpha-')
    first = place.run(*words)
    assert first.stdout == "alpha 1.0\n1.0 None\n1\n"
    assert place.run(*words).stdout == first.stdout
    assert (place.start()["mode"], place.num_setups) == ("restored", 1)
    assert (place.site / "beta.py").exists()  # still in the machine's own Python


def test_a_failing_setup_is_no_snapshot_and_starts_nothing(place: Place) -> None:
    script = place.counting_script("echo half > half\nexit 7\n")
    ran = place.run("--setup", script, "--", "touch", "started", code=7)
    assert "exit code 7" in ran.stderr
    assert "its changes are discarded" in ran.stderr
    assert not (place.project / "started").exists()
    assert not (place.project / "half").exists()
    assert not list(place.store.glob("environments/*/*"))
    place.run("--setup", script, "--", "true", code=7)
    assert place.num_setups == 2
    assert not place.leftovers()


def test_a_daemon_keeps_the_snapshot_from_being_made_and_serves_the_first_job(place: Place) -> None:
    stop = place.outside / "stop"
    wait = f"while [ ! -e {stop} ]; do sleep 0.05; done; rm {stop}"
    script = place.counting_script(f"({wait}) </dev/null >/dev/null 2>&1 &\n")
    for number in (1, 2):
        ran = place.run("--setup", script, "--", "touch", str(stop))
        assert "not snapshot-safe" in ran.stderr
        assert "left a process running" in ran.stderr
        assert place.published()["published"] is False
        assert not place.documents()
        assert place.num_setups == number
        end = time.monotonic() + 300
        while stop.exists():  # until the daemon has seen it
            assert time.monotonic() < end
            time.sleep(0.05)


def test_secrets_are_in_no_snapshot(place: Place) -> None:
    token = "ghp_" + "a1B2" * 10
    script = place.counting_script(
        f"echo '//npm.example/:_authToken={token}' > .npmrc; echo TOKEN={token} > settings.env"
    )
    ran = place.run("--setup", script, "--", "cat", "settings.env")
    assert ran.stdout == f"TOKEN={token}\n"
    assert token not in ran.stderr
    assert place.published()["published"] is False
    stored = b"".join(path.read_bytes() for path in place.store.rglob("*") if path.is_file())
    assert token.encode() not in stored
    assert not place.documents()


def test_uv_is_told_that_there_are_no_hard_links_out_of_a_capture(place: Place) -> None:
    script = place.alpha_script('echo "mode $UV_LINK_MODE"')
    ran = place.run("--setup", script, "--", "sh", "-c", "echo job ${UV_LINK_MODE-unset}")
    assert "mode copy" in ran.stderr
    assert ran.stdout == "job unset\n"
    again = ("--env", "refresh", "--setup", script, "--", "true")
    assert "mode symlink" in place.run(*again, more={"UV_LINK_MODE": "symlink"}).stderr


def test_exports_of_the_script_reach_every_job(place: Place) -> None:
    script = place.counting_script("export GREETING=hello\nexport PATH=/somewhere/bin:$PATH\nunset GONE\n")
    words = ("--setup", script, "--", "sh", "-c", 'echo "$GREETING ${PATH%%:*} ${GONE-none}"')
    for _ in range(2):
        assert place.run(*words, more={"GONE": "here"}).stdout == "hello /somewhere/bin none\n"
    assert (place.start()["mode"], place.num_setups) == ("restored", 1)


def test_a_job_gets_its_arguments_tells_its_exit_code_and_cannot_poison_its_environment(place: Place) -> None:
    place.write("requirements.txt", "alpha==1.0\n")
    poison = f"echo \"VERSION = 'bad'\" > {place.site}/alpha.py; python -c 'import alpha; print(alpha.VERSION)'"
    for mode in ("captured", "restored"):
        job = ("sh", "-c", f'echo "$1"; {poison}; exit 42', "sh", "a  b")
        assert place.run("-r", "requirements.txt", "--", *job, code=42).stdout == "a  b\nbad\n"
        assert place.start()["mode"] == mode
        check = ("python", "-c", "import alpha; print(alpha.VERSION)")
        assert place.run("-r", "requirements.txt", "--", *check).stdout == "1.0\n"
    assert not (place.site / "alpha.py").exists()


def test_bypass_runs_the_setup_each_time_and_gives_the_same_job(place: Place) -> None:
    script = place.counting_script("export GREETING=hello\nunset GONE\n")
    words = ("--setup", script, "--", "sh", "-c", 'echo "$GREETING ${GONE-none}"')
    for number in (1, 2):
        assert place.run("--env", "bypass", *words, more={"GONE": "here"}).stdout == "hello none\n"
        assert place.num_setups == number
    assert not place.documents()
    ran = place.bootseer("run", *words, more={"GONE": "here", "BOOTSEER_DISABLE": "1"})
    assert ran.stdout == " here\n"
    place.run("--setup", script, "--", "true", more={"BOOTSEER_ENV": "bypass"})
    assert place.num_setups == 4
    assert not place.documents()


def test_the_input_is_the_command_s_alone(place: Place) -> None:
    script = place.counting_script("cat > seen; echo end >> seen\n")
    for mode in ("auto", "auto", "bypass"):
        ran = place.run("--env", mode, "--setup", script, "--", "cat", "seen", "-", stdin="words\n")
        assert ran.stdout == "end\nwords\n"
    assert place.num_setups == 2


def test_require_ends_where_there_is_no_snapshot_and_refresh_makes_it_anew(place: Place) -> None:
    script = place.counting_script()
    ran = place.run("--env", "require", "--setup", script, "--", "touch", "started", code=1)
    assert "no environment snapshot" in ran.stderr
    assert (place.num_setups, (place.project / "started").exists()) == (0, False)
    place.run("--setup", script, "--", "true")
    (before,) = place.documents()
    place.run("--env", "require", "--setup", script, "--", "touch", "started")
    assert (place.num_setups, (place.project / "started").exists()) == (1, True)
    place.run("--env", "refresh", "--setup", script, "--", "true")
    (after,) = place.documents()
    assert place.start()["code"] == "refresh"
    assert (place.num_setups, after["key"]) == (2, before["key"])
    assert after["built_s"] > before["built_s"]


def test_files_that_the_key_does_not_know_keep_a_snapshot_from_being_made_until_they_are_declared(place: Place) -> None:
    secret_input = place.root / "elsewhere.txt"
    secret_input.write_text("1\n")
    place.write("read.py", f"print(open('{secret_input}').read())")
    script = place.counting_script("python -c \"exec(compile(open('read.py').read(), 'x', 'exec'))\" > seen\n")
    ran = place.run("--setup", script, "--", "true")
    assert f"it read files that its key does not cover: {secret_input}" in ran.stderr
    assert not place.documents()
    assert str(secret_input) in place.run("--setup", script, "--", "true").stderr
    assert (place.start()["mode"], place.start()["code"]) == ("installed", "unsafe")
    words = ("--env-input", str(secret_input), "--env-input", "read.py", "--setup", script, "--", "true")
    assert "does not know" not in place.run(*words).stderr
    place.run(*words)
    assert (place.start()["mode"], place.num_setups) == ("restored", 3)


@pytest.mark.parametrize(("cache", "name"), [(".", "project/data.txt"), ("disk", "disk/data.txt")])
def test_a_cache_that_is_a_link_to_a_folder_of_all_covers_no_other_files(place: Place, cache: str, name: str) -> None:
    (place.root / "disk").mkdir()
    (place.root / "home/.cache").symlink_to(place.root / cache)
    data = place.root / name
    data.write_text("1\n")
    read = f'python -c \'print(open("{data.parent}/da" + "ta.txt").read())\' > seen\n'
    ran = place.run("--setup", place.alpha_script(read), "--", "true")
    assert f"it read files that its key does not cover: {data}" in ran.stderr
    assert not place.documents()


@pytest.mark.parametrize("variable", ["BOOTSEER_CACHE", "BOOTSEER_STORE"])
def test_a_cache_or_store_may_contain_the_project(place: Place, variable: str) -> None:
    place.more[variable] = str(place.root)
    place.write("data.txt", "1\n")
    script = place.alpha_script('python -c \'print(open("da" + "ta.txt").read())\' > seen\n')
    ran = place.run("--setup", script, "--", "true")
    assert f"it read files that its key does not cover: {place.project}/data.txt" in ran.stderr
    for mode in ("captured", "restored"):
        (place.project / "seen").unlink()
        place.run("--env-input", "data.txt", "--setup", script, "--", "cat", "seen")
        assert place.start()["mode"] == mode


def test_what_a_setup_makes_and_no_snapshot_keeps_is_no_unknown_input(place: Place) -> None:
    """For example, `uv venv` makes a lock file, and conda unpacks packages."""
    for name in (".lock", "conda/pkgs/x"):
        script = place.alpha_script(f"mkdir -p conda/pkgs; : > {name}; cat {name}\n")
        assert "does not cover" not in place.run("--setup", script, "--", "true").stderr
    place.run("--setup", script, "--", "true")
    assert (place.start()["mode"], place.start()["trust"]) == ("restored", "observed")


def test_imports_that_were_asked_for_are_tried_before_a_snapshot_is_kept(place: Place) -> None:
    place.write("requirements.txt", "alpha==1.0\n")
    ran = place.run("--env-import", "gamma", "-r", "requirements.txt", "--", "true")
    assert "import gamma fails" in ran.stderr
    assert not place.documents()
    place.run("--env-import", "alpha", "-r", "requirements.txt", "--", "true")
    assert len(place.documents()) == 1


def test_conflicts_of_versions_keep_a_snapshot_from_being_kept_unless_they_are_accepted(place: Place) -> None:
    script = place.counting_script("python -m pip install -q --no-deps beta==2.0\n")
    words = ("--setup", script, "--", "true")
    ran = place.run(*words)
    assert "beta 2.0 requires alpha, which is not installed (--env-conflicts accept" in ran.stderr
    assert not place.documents()
    assert "--env-conflicts accept" in place.run(*words).stderr
    assert place.start()["code"] == "unsafe"
    place.run("--env-conflicts", "accept", *words)
    assert len(place.documents()) == 1


def test_what_is_installed_from_a_scratch_folder_and_leads_there_is_in_no_snapshot(place: Place) -> None:
    folder = Path("/tmp", place.root.name)
    text = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    place.write("lib/pyproject.toml", text + '[project]\nname = "lib"\nversion = "1"\n')
    place.write("lib/backend.py", EDITABLE_BACKEND)
    place.write("lib/lib.py", "WORD = 'one'\n")
    script = place.counting_script(f"cp -r lib {folder}\npython -m pip install -q -e {folder}\n")
    try:
        ran = place.run("--setup", script, "--", "python", "-c", "import lib; print(lib.WORD)")
        assert ran.stdout == "one\n"
        assert f"it left {folder}, which is used later but not kept" in ran.stderr
        assert not place.documents()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_snapshot_is_announced_only_when_it_is_published(place: Place) -> None:
    """A home below /tmp is captured like any other: the second start finds what the first one created."""
    home = Path(tempfile.mkdtemp(prefix="bootseer-home-"))
    script = place.counting_script("[ -f ~/.tool ] || echo words > ~/.tool\n")
    words = ("--setup", script, "--", "sh", "-c", "cat ~/.tool")
    try:
        first = place.run(*words, more={"HOME": str(home)})
        assert first.stdout == "words\n"
        said = first.stderr
        assert "kept" not in said.partition("is set up now: there is no snapshot")[0]
        assert f"environment {place.published()['key'][:12]} is published as a snapshot: " in said
        (home / ".tool").unlink()
        assert place.run(*words, more={"HOME": str(home)}).stdout == "words\n"
        assert (place.start()["mode"], place.num_setups) == ("restored", 1)
        unsafe = place.counting_script(f"{script}\nmkdir {home}-left; date > {home}-left/x", name="unsafe.sh")
        ran = place.run("--setup", unsafe, "--", "true", more={"HOME": str(home)})
        assert "not snapshot-safe" in ran.stderr
        assert "is kept" not in ran.stderr
    finally:
        shutil.rmtree(home)
        shutil.rmtree(f"{home}-left", ignore_errors=True)


def test_the_working_folder_may_be_in_the_environment(place: Place) -> None:
    script = place.counting_script("mkdir -p /opt/bootseer-test-tool/bin; echo tool > /opt/bootseer-test-tool/bin/tool")
    words = ("--setup", script, "--", "sh", "-c", "cd /opt/bootseer-test-tool/bin && cat tool && pwd -P")
    for _ in range(2):
        assert place.run(*words).stdout == "tool\n/opt/bootseer-test-tool/bin\n"
    assert (place.start()["mode"], place.num_setups) == ("restored", 1)
    assert not Path("/opt/bootseer-test-tool").exists()


def test_a_python_in_a_scratch_folder_works_like_any_other(place: Place, tmp_path: Path) -> None:
    """Either its packages are captured there, or the start reports why not: never a snapshot without them."""
    copy(place.venv, tmp_path / "venv")
    place.write("requirements.txt", "alpha==1.0\n")
    more = {"PATH": f"{tmp_path}/venv/bin:{place.env['PATH']}"}
    words = ("-r", "requirements.txt", "--", "python", "-c", "import alpha; print(alpha.VERSION)")
    assert place.run(*words, more=more).stdout == "1.0\n"
    installed = list(tmp_path.glob("venv/lib/*/site-packages/alpha.py"))
    assert not (installed and place.documents())
    assert place.run(*words, more=more).stdout == "1.0\n"
