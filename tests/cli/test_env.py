"""The `bootseer env` commands: output, JSON, exit codes and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from bootseer.cli.env_options import parse_duration
from bootseer.cli.verbs import cli
from bootseer.env.processes import process
from bootseer.env.restoring import loose
from bootseer.env.snapshot import verify
from bootseer.errors import Interrupted, UsageError
from bootseer.launch.environment import snapshot
from bootseer.mounts.process import ProcessId
from environment_place import Place, made_place
from waiting import until


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


def env(place: Place, *words: str, code: int = 0) -> str:
    ran = place.bootseer("env", *words)
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    return str(ran.stdout)


def as_json(place: Place, schema: str, *words: str, code: int = 0) -> Any:
    value = json.loads(env(place, *words, "--json", code=code))
    assert value["schema"] == schema
    return value


@pytest.mark.root
def test_a_snapshot_from_capture_to_prune(place: Place) -> None:
    place.write("requirements.txt", "alpha==1.0\nbeta==2.0\n")
    words = ("-r", "requirements.txt")
    made = as_json(place, "bootseer.environment-capture/1", "capture", *words, "--env-import", "beta")
    key = made["key"]
    assert (made["published"], made["was_there"], made["code"]) == (True, False, 0)
    assert as_json(place, "bootseer.environment-capture/1", "capture", *words)["was_there"] is True
    assert as_json(place, "bootseer.environment-key/1", "key", *words)["key"] == key

    (row,) = as_json(place, "bootseer.environments/1", "list")["environments"]
    assert (row["key"], row["state"], row["builder"]) == (key, "ready", place.cache)  # the value of $BOOTSEER_NODE
    shown = as_json(place, "bootseer.environments/1", "show", key[:8])
    assert shown["packages"] == ["alpha==1.0", "beta==2.0"]
    assert "alpha==1.0" in env(place, "show", key[:8])
    assert key[:12] in env(place, "list")

    for tier in ("quick", "full"):
        found = as_json(place, "bootseer.environment-verified/1", "verify", key[:8], "--tier", tier)
        assert (found["differences"], found["paths"] > 4) == ([], True)
    oracle = as_json(place, "bootseer.environment-verified/1", "verify", key[:8], "--tier", "oracle", *words)
    assert oracle["differences"] == []
    leaving = place.counting_script(f"sleep 300 > /dev/null 2>&1 &\necho $! > {place.outside}/left\n")
    assert place.bootseer("env", "verify", key[:8], "--tier", "oracle", "--setup", leaving).returncode == 1
    left = int((place.outside / "left").read_text())
    until(lambda: process(left) is None, "the setup's process is still running")

    target = place.root / "look"
    as_json(place, "bootseer.environment-restored/1", "restore", key[:8], str(target))
    copied = target / place.site.relative_to("/") / "alpha.py"
    assert "1.0" in copied.read_text()
    ran = place.bootseer(
        "env", "restore", key[:8], "--", "python", "-c", "import alpha; print(alpha.__file__); exit(3)"
    )
    assert (ran.returncode, ran.stdout) == (3, f"{place.site}/alpha.py\n")
    assert not (place.site / "alpha.py").exists()

    gone = as_json(place, "bootseer.environments-removed/1", "remove", "--package", "Alpha==1.0")
    assert gone["removed"] == [key]
    assert as_json(place, "bootseer.environments/1", "list")["environments"] == []
    assert as_json(place, "bootseer.environments-removed/1", "prune")["objects"] == 0
    place.bootseer("cache", "prune", "--to", "0")
    assert as_json(place, "bootseer.environments-removed/1", "prune", "--grace", "0.001s")["objects"] > 0
    assert not place.mounts()


@pytest.mark.root
def test_what_a_snapshot_leaves_out_is_no_difference_from_a_fresh_installation(place: Place) -> None:
    script = place.counting_script("mkdir own; echo x > own/x; echo words > kept; sleep 7531 > daemon.log 2>&1 &\n")
    words = ("--setup", script)
    left_out = ("--env-leave-out", f"{place.project}/own")
    made = as_json(place, "bootseer.environment-capture/1", "capture", *words, *left_out)
    assert made["published"] is True, made
    shutil.rmtree(place.project / "own")  # as on a machine without them
    (place.project / "daemon.log").unlink()
    verify = ("verify", made["key"], "--tier", "oracle", *words)
    assert as_json(place, "bootseer.environment-verified/1", *verify)["differences"] == []


def test_a_signal_ends_a_comparison_with_a_fresh_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "fresh_install_differs", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    layer = SimpleNamespace(path=tmp_path)
    monkeypatch.setattr(snapshot.SavedSnapshot, "_mounted", lambda self: nullcontext((layer, [])))
    document: Any = SimpleNamespace(packages=(), daemons=(), left_out=())
    env = {"HOME": str(tmp_path), "BOOTSEER_RUNTIME": str(tmp_path / "run")}
    saved = snapshot.SavedSnapshot(document, str(tmp_path), tmp_path / "cache", env)
    with pytest.raises(Interrupted):
        saved.compare_with_fresh("true", ())


def test_sigterm_while_a_snapshot_is_verified_or_copied_unmounts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    @contextmanager
    def mounted(self: object) -> Iterator[tuple[Any, list[Any]]]:
        try:
            yield SimpleNamespace(path=tmp_path, at=None), []
        finally:
            ended.append(self)

    monkeypatch.setattr(snapshot.SavedSnapshot, "_mounted", mounted)
    monkeypatch.setattr(verify, "verify", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(loose, "plan", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    saved = snapshot.SavedSnapshot(SimpleNamespace(), "", tmp_path, {})  # type: ignore[arg-type]
    with pytest.raises(Interrupted):
        saved.check("quick", lambda done, of: None)
    with pytest.raises(Interrupted):
        saved.copy_to(tmp_path / "copy")
    assert len(ended) == 2


def test_sigterm_while_a_lock_is_made_ends_uv_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "in.txt").write_text("six\n")
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho $$ > pid.new && mv pid.new pid\nexec sleep 600\n")
    uv.chmod(0o755)
    words = [f"{Path(sys.executable).parent}/bootseer", "env", "lock", "in.txt", "--uv", str(uv)]
    scratch = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    with subprocess.Popen(words, cwd=tmp_path, env=scratch, stderr=subprocess.PIPE) as locking:
        until((tmp_path / "pid").exists)
        locking.send_signal(signal.SIGTERM)
        assert locking.communicate()[1] == b"bootseer: interrupted\n"
    assert locking.returncode == 143
    left = int((tmp_path / "pid").read_text())
    until(lambda: not ProcessId.of(left), "uv, which was killed, has ended")
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.root
def test_a_copy_of_a_snapshot_has_files_that_the_setup_found_and_changed(place: Place) -> None:
    place.write("settings", "old\n")
    place.run("--setup", place.counting_script("echo new >> settings"), "--", "true")
    key = place.documents()[0]["key"]
    as_json(place, "bootseer.environment-restored/1", "restore", key, str(place.root / "look"))
    assert (place.root / "look" / place.project.relative_to("/") / "settings").read_text() == "old\nnew\n"


@pytest.mark.root
def test_a_changed_part_of_the_key_is_named(place: Place) -> None:
    place.write("requirements.txt", "alpha==1.0\n")
    before = env(place, "key", "-r", "requirements.txt", "--json")
    place.write("key.json", before)
    assert "nothing changed" in env(place, "key", "-r", "requirements.txt", "--diff", "key.json")
    place.write("requirements.txt", "alpha==1.1\n")
    assert "requirements" in env(place, "key", "-r", "requirements.txt", "--diff", "key.json")
    changed = as_json(place, "bootseer.environment-key/1", "key", "-r", "requirements.txt", "--diff", "key.json")
    assert [row["name"] for row in changed["changed"]] == ["requirements requirements.txt"]


def test_the_key_names_variables_that_it_leaves_out(tmp_path: Any, run: Any) -> None:
    script = tmp_path / "setup.sh"
    script.write_text("echo $RANK\n")
    ran = run("env", "key", "--setup", str(script), more={"RANK": "3", "BOOTSEER_CACHE": str(tmp_path / "cache")})
    assert "variables left out" in ran.stdout
    assert "not in the key: RANK" in ran.stdout


@pytest.mark.root
def test_a_setup_that_fails_gives_no_snapshot_and_its_exit_code(place: Place) -> None:
    script = place.counting_script("exit 9")
    made = as_json(place, "bootseer.environment-capture/1", "capture", "--setup", script, code=9)
    assert (made["published"], made["why_not"]) == (False, "the setup failed")
    assert place.leftovers() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("key",), "--setup SCRIPT or --requirements FILE"),
        (("key", "-r", "nothing.txt"), "no such file"),
        (("show", "abcd"), "no snapshot begins with abcd"),
        (("show", "xyz"), "is not a key"),
        (("remove",), "nothing to remove"),
        (("restore", "abcd"), "give either a folder or a command"),
        (("restore", "abcd", "--json", "--", "true"), "hint: leave out --json"),
        (("verify", "abcd", "--tier", "oracle"), "needs a setup to run"),
        (("verify", "abcd", "-r", "requirements.txt"), "only --tier oracle runs a setup"),
        (("list", "--store", "gopher://x"), "is not a store"),
        (("list", "--store", "/no/store"), "/no/store: no such folder"),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path: Any, run: Any, words: tuple[str, ...], said: str) -> None:
    ran = run("env", *words, more={"BOOTSEER_STORE": str(tmp_path), "BOOTSEER_CACHE": str(tmp_path / "cache")})
    assert ran.returncode in (1, 2)
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_document_that_cannot_be_read_is_removed_and_counted(tmp_path: Path, run: Any) -> None:
    key = "ab" * 32
    document = tmp_path / "environments" / key / "document"
    document.parent.mkdir(parents=True)
    document.write_text("{")
    ran = run("env", "remove", key, "--store", str(tmp_path), "--json")
    assert (json.loads(ran.stdout)["removed"], document.exists()) == ([key], False)
    assert json.loads(run("env", "remove", key, "--store", str(tmp_path), "--json").stdout)["removed"] == []


@pytest.mark.parametrize(
    ("text", "value_s"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_times_are_read(text: str, value_s: float) -> None:
    assert parse_duration(text, "--env-wait") == value_s


def test_a_number_may_have_another_unit() -> None:
    assert parse_duration("1.5", "--older-than", unit="h") == parse_duration("90m", "--older-than", unit="h") == 5400


def test_a_wait_may_be_none_at_all() -> None:
    assert parse_duration("0s", "--env-wait", zero=True) == 0


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1y", "none", "1e9", "9999999999"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration"):
        parse_duration(text, "--env-wait")


def test_every_verb_has_help_with_an_example() -> None:
    group = cli.get_command(click.Context(cli), "env")  # type: ignore[attr-defined]
    assert isinstance(group, click.Group)
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert f"bootseer env {name}" in (command.help or ""), name
