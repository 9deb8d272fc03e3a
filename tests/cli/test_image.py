"""The `bootseer image` and `bootseer cache` commands: output, JSON, exit codes and errors."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import pytest

from bootseer.cli.options import parse_size
from bootseer.cli.verbs import cli
from bootseer.errors import UsageError
from bootseer.mounts import kernel
from conftest_launch import BOOTSEER
from fault_proxy import Fault, FaultProxy
from image_node import Node, have_converted

needs_mounts = [pytest.mark.root, pytest.mark.fuse]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def bootseer(run: Run, node: Node) -> Run:
    """`bootseer(words)` runs the program on this node, which must end with exit code `code`."""

    def call(*words: str, code: int = 0, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        ran = run(*words, more={**node.env, **kwargs.pop("more", {})}, **kwargs)
        assert ran.returncode == code, ran.stderr
        assert "Traceback" not in ran.stderr
        return ran

    return call


@pytest.fixture
def converted(node: Node) -> None:
    have_converted(node)


def as_json(ran: subprocess.CompletedProcess[str], schema: str) -> Any:
    value = json.loads(ran.stdout)
    assert value["schema"] == schema
    return value


def test_inspect_of_an_image_that_is_not_converted_says_what_to_type(bootseer: Run, node: Node) -> None:
    said = bootseer("image", "inspect", node.reference, code=2).stderr
    hint = said.partition("hint: ")[2].strip()
    bootseer(*shlex.split(hint)[1:])
    assert node.digest in bootseer("image", "inspect", node.reference).stdout


@pytest.mark.root
@pytest.mark.fuse
def test_remove_and_prune(bootseer: Run, node: Node) -> None:
    store = str(node.folder / "store")
    bootseer("image", "convert", node.reference, store)
    target = node.folder / "mnt"
    bootseer("image", "mount", node.reference, str(target), "--store", store, "--loading", "lazy")
    words = ("image", "remove", node.reference, "--store", store)
    schema = "bootseer.images-removed/1"
    kept = as_json(bootseer(*words, "--json", code=1), schema)
    assert kept["kept"] == [{"digest": node.digest, "why": f"it is mounted at {target}"}]
    assert "stays: it is mounted" in bootseer(*words, code=1).stdout
    bootseer("image", "umount", str(target))
    assert as_json(bootseer(*words, "--dry-run", "--json"), schema)["removed"] == [node.digest]
    twice = bootseer(*words, node.reference, code=1)  # what was removed before an error is told
    assert "1 image removed" in twice.stdout
    assert "is not converted" in twice.stderr
    assert "1 removed image within the grace period, 0 in use" in bootseer("image", "prune", "--store", store).stdout
    assert as_json(bootseer("image", "prune", "--store", store, "--json"), schema)["waiting"] == 1
    done = as_json(bootseer("image", "prune", "--store", store, "--grace", "0", "--json"), schema)
    assert (done["waiting"], done["in_use"], done["problems"]) == (0, 0, [])
    assert done["objects"] > 2
    assert [path for path in (node.folder / "store").rglob("*") if path.is_file()] == []
    bootseer("image", "inspect", node.reference, "--store", store, code=2)


@pytest.mark.root
@pytest.mark.fuse
def test_convert_inspect_mount_list_and_umount(bootseer: Run, node: Node) -> None:
    convert = as_json(bootseer("image", "convert", node.reference, "--json"), "bootseer.convert/1")
    assert (convert["digest"], convert["layers"]) == (node.digest, 2)
    inspect = as_json(bootseer("image", "inspect", node.reference, "--json"), "bootseer.inspect/1")
    assert [layer["here_bytes"] for layer in inspect["layers"]] == [0, 0]
    target = node.folder / "mnt"
    words = ("image", "mount", node.reference, str(target), "--loading", "lazy", "--json")
    mount = as_json(bootseer(*words), "bootseer.mounts/1")
    assert (mount["mode"], mount["target"]) == ("lazy", str(target))
    assert (target / "etc" / "passwd").is_file()
    (row,) = as_json(bootseer("image", "list", "--json"), "bootseer.mounts/1")["mounts"]
    assert (row["target"], row["state"], row["digest"]) == (str(target), "mounted", node.digest)
    assert 0 < row["here"] < 1
    assert "already" in bootseer("image", *words[1:], code=2).stderr or kernel.is_mount(target)
    assert f"bootseer image umount {target}" in bootseer("ckpt", "umount", str(target), code=2).stderr
    bootseer("image", "umount", str(target))
    assert not kernel.is_mount(target)
    assert bootseer("image", "list").stdout == "nothing is mounted\n"
    assert "no image is mounted" in bootseer("image", "umount", str(target), code=2).stderr


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("converted")
def test_a_mount_with_a_dead_daemon_is_reported_and_can_be_unmounted(bootseer: Run, node: Node) -> None:
    target = node.folder / "mnt"
    bootseer("image", "mount", node.reference, str(target), "--loading", "lazy")
    (row,) = json.loads(bootseer("image", "list", "--json").stdout)["mounts"]
    os.kill(row["daemon_pid"], signal.SIGKILL)
    with pytest.raises(OSError):
        (target / "cold").read_bytes()
    (row,) = json.loads(bootseer("image", "list", "--json", code=1).stdout)["mounts"]
    assert row["state"] == "daemon dead"
    bootseer("image", "umount", str(target))
    assert not kernel.is_mount(target)


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("converted")
def test_a_second_umount_says_that_nothing_is_mounted_while_another_namespace_has_a_copy(
    bootseer: Run, node: Node
) -> None:
    target = node.folder / "mnt"
    bootseer("image", "mount", node.reference, str(target), "--loading", "lazy")
    script = f"echo; exec 9<{shlex.quote(str(target))}/hot; read -r _"
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        bootseer("image", "umount", str(target))
        assert "no image is mounted" in bootseer("image", "umount", str(target), code=2).stderr
        holder.communicate(b"\n")


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("converted")
def test_a_writable_mount_takes_changes(bootseer: Run, node: Node) -> None:
    target = node.folder / "mnt"
    bootseer("image", "mount", node.reference, str(target), "--rw")
    (target / "new").write_text("x")
    with (target / "new").open():
        assert "fuser -vm" in bootseer("image", "umount", str(target), code=1).stderr
        bootseer("image", "umount", str(target), "--force")
    assert not kernel.is_mount(target)
    bootseer("image", "mount", node.reference, str(target), "--rw")
    subprocess.run(["mount", "-t", "tmpfs", "somebody's", target], check=True)
    assert "mounted over it" in bootseer("image", "umount", str(target), code=1).stderr
    subprocess.run(["umount", target], check=True)
    (target / "new").write_text("x")
    shared = node.folder / "shared"
    second, third = node.folder / "second", shared / "third"
    shared.mkdir()
    for _ in range(2):  # as container engines do; mounts in it are listed twice
        subprocess.run(["mount", "--bind", shared, shared], check=True)
        subprocess.run(["mount", "--make-shared", shared], check=True)
    bootseer("image", "mount", node.reference, str(second), "--rw")
    kernel.unmount(second)  # like umount: its changes are deleted by the next mount
    bootseer("image", "mount", node.reference, str(third), "--rw")
    assert (target / "new").read_text() == "x"
    assert len(list((node.cache / "containers").iterdir())) == 2
    bootseer("image", "umount", str(target))
    bootseer("image", "umount", str(third))
    subprocess.run(["umount", shared, shared], check=True)
    assert list((node.cache / "containers").iterdir()) == []


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("converted")
def test_hot_sets_are_shown_exported_and_merged_elsewhere(bootseer: Run, node: Node) -> None:
    target = node.folder / "mnt"
    bootseer("image", "mount", node.reference, str(target), "--loading", "lazy", "--workload", "w")
    hashlib.sha256((target / "hot").read_bytes())
    bootseer("image", "umount", str(target))
    (row,) = as_json(bootseer("image", "hotset", "show", node.reference, "--json"), "bootseer.hotsets/2")["hotsets"]
    assert (row["workload"], row["runs"]) == ("w", 1)
    assert row["stored_bytes"] > 6 << 20
    file = node.folder / "hot.bin"
    bootseer("image", "hotset", "export", node.reference, "w", str(file))
    elsewhere = {"BOOTSEER_CACHE": str(node.folder / "other"), "BOOTSEER_STORE": str(node.folder / "store")}
    bootseer("image", "convert", node.reference, more=elsewhere)
    bootseer("image", "hotset", "merge", node.reference, str(file), more=elsewhere)
    there = bootseer("image", "hotset", "show", node.reference, "--json", more=elsewhere)
    assert [row["workload"] for row in json.loads(there.stdout)["hotsets"]] == ["w"]
    (node.folder / "wrong").write_text("{}")
    refused = bootseer("image", "hotset", "merge", node.reference, str(node.folder / "wrong"), more=elsewhere, code=2)
    assert f"{node.folder / 'wrong'}: a hot set cannot be read" in refused.stderr
    assert "known hot sets: w" in bootseer("image", "hotset", "export", node.reference, "no", "-", code=2).stderr


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("converted")
def test_the_cache_is_shown_verified_and_pruned(bootseer: Run, node: Node) -> None:
    bootseer("image", "run", node.reference, "--loading", "pull", "--", "true")
    shown = as_json(bootseer("cache", "show", "--json"), "bootseer.cache/2")
    assert len(shown["files"]) == 2
    assert all(file["trusted"] for file in shown["files"])
    assert bootseer("cache", "show").stdout.splitlines()[-1].startswith("2 files, ")
    data = next((node.cache / "blocks" / "files").glob("*/data"))
    with data.open("r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    verified = as_json(bootseer("cache", "verify", "--json", code=1), "bootseer.cache/2")
    assert list(verified["dropped_blocks"].values()) == [[0]]
    pruned = as_json(bootseer("cache", "prune", "--to", "0", "--json"), "bootseer.cache/2")
    assert pruned["freed_bytes"] > 12 << 20
    assert json.loads(bootseer("cache", "show", "--json").stdout)["files"] == []


@pytest.mark.root
@pytest.mark.fuse
def test_interrupted_a_conversion_ends_at_once_and_publishes_nothing(node: Node, env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reference = f"127.0.0.1:{silent.getsockname()[1]}/a/b:1"
        words = [*BOOTSEER, "image", "convert", reference]
        with subprocess.Popen(words, env={**env, **node.env}, stderr=subprocess.PIPE, text=True) as process:
            link, _ = silent.accept()
            with link:
                process.send_signal(signal.SIGINT)
                assert process.wait(120) == 130
            assert process.stderr is not None
            assert process.stderr.read() == "bootseer: interrupted\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("image", "convert", "alpine"), "host/repository"),
        (("image", "convert", "."), "SRC DST"),
        (("image", "convert", "127.0.0.1:1/a:1", "--once"), "--watch"),
        (("image", "convert", "127.0.0.1:1/a:1", "--watch"), "--watch 127.0.0.1:1/a"),
        (("image", "convert", "127.0.0.1:1/a", "--watch", "--interval", "soon"), "90s"),
        (("image", "run", "127.0.0.1:1/a:1", "--workload", "a b"), "letters"),
        (("image", "run", "127.0.0.1:1/a:1", "--device", "nvidia"), "vendor.com"),
        (("image", "run", "127.0.0.1:1/a:1", "--shm-size", "big"), "8g"),
        (("image", "convert", "127.0.0.1:1/a:1", "--layer-limit", "files=7"), "unpacked_bytes"),
        (("image", "mount", "127.0.0.1:1/a:1", "/mnt/x", "--layer-limit", "members=x"), "8g"),
        (("image", "mount", "127.0.0.1:1/a:1", "/proc/self"), "name a folder to mount on: /proc/"),
        (("image", "run", "127.0.0.1:1/a:1", "--layer-limit", "text_bytes=big"), "8g"),
        *(
            ((*verb, "--" + option.partition(" ")[0], option.partition(" ")[2], "--", "true"), hint)
            for verb, (option, hint) in zip(
                cycle((("image", "run", "127.0.0.1:1/a:1"), ("run", "--image", "127.0.0.1:1/a:1"))),
                (
                    ("cap-drop CHOWNS", "--cap-drop SYS_PTRACE"),
                    ("cap-add ROOT", "--cap-add SYS_PTRACE"),
                    ("ulimit files=7", "nofile"),
                    ("ulimit nofile=9:8", "SOFT:HARD"),
                    ("env-file /nowhere", "NAME=VALUE"),
                    ("tmpfs scratch", "/scratch:size=8g"),
                    ("tmpfs /scratch:dev", "size=8g"),
                    ("hostname a_b", "letters"),
                    ("shm-size much", "8g"),
                ),
                strict=False,
            )
        ),
        (("cache", "prune", "--to", "all"), "512m"),
        (("cache", "show", "--cache", "nowhere"), "the folder of a cache"),
        (("image", "prune", "--store", "/no/store"), "the folder of a store"),
    ],
)
def test_a_mistake_is_one_line_and_a_hint(run: Run, tmp_path: Path, words: tuple[str, ...], hint: str) -> None:
    ran = run(*words, more={"BOOTSEER_CACHE": str(tmp_path / "cache"), "BOOTSEER_RUNTIME": str(tmp_path / "runtime")})
    assert ran.returncode == 2
    line, second = ran.stderr.splitlines()
    assert line.startswith("bootseer: ")
    assert second.startswith("hint: ")
    assert hint in second


def test_a_command_without_dashes_before_it_is_a_mistake_with_a_hint(run: Run) -> None:
    hint = "hint: a command goes after --, as `bootseer image run ... -- python train.py`"
    for words in (("sh",), ("python", "-c", "print()")):
        ran = run("image", "run", "127.0.0.1:1/a:1", *words)
        assert (ran.returncode, ran.stderr.splitlines()[-1]) == (2, hint)
    assert "hint" not in run("image", "run", "127.0.0.1:1/a:1", "-x", "--", "sh").stderr


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("512", 512), ("64k", 65536), ("1.5G", 3 << 29), ("8gib", 8 << 30), ("2TB", 2 << 40)]
)
def test_sizes_are_read_in_binary_units(text: str, size: int) -> None:
    assert parse_size(text, "--to") == size


@pytest.mark.parametrize("text", ["", "g", "-1", "1x", "1e9", "٣"])
def test_an_invalid_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text, "--to")


def every_verb(command: click.Command, name: str = "bootseer") -> list[tuple[str, click.Command]]:
    found = [(name, command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            verb = command.get_command(context, inner)
            assert verb is not None
            found += every_verb(verb, f"{name} {inner}")
    return found


@pytest.mark.parametrize(
    ("name", "command"), every_verb(cli), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_verb_has_help_for_itself_and_for_each_option(name: str, command: click.Command) -> None:
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("converted")
def test_a_mount_in_use_is_an_error_with_the_command_to_find_its_users(bootseer: Run, node: Node) -> None:
    target = node.folder / "mnt"
    bootseer("image", "mount", node.reference, str(target))
    with (target / "hot").open("rb"):
        assert f"fuser -vm {target}" in bootseer("image", "umount", str(target), code=1).stderr
    bootseer("image", "umount", str(target))


@pytest.mark.root
@pytest.mark.fuse
def test_a_layer_beyond_a_limit_names_the_option_that_helps(bootseer: Run, node: Node) -> None:
    small = ("--layer-limit", "members=3")
    error = bootseer("image", "convert", node.reference, *small, code=1).stderr
    assert error.endswith("to allow more: --layer-limit members=6\n")
    words = ("image", "run", "--entrypoint", "none", node.reference)
    assert bootseer(*words, *small, "--", "true", code=1).stderr.endswith("--layer-limit members=6\n")
    small = ("--layer-limit", "unpacked_bytes=1m")
    assert "--layer-limit unpacked_bytes=2097152" in bootseer(*words, *small, "--", "true", code=1).stderr
    bootseer(*words, "--layer-limit", "unpacked_bytes=1g", "--layer-limit", "members=1000", "--", "true")


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.parametrize("loading", ["lazy", "pull"])
@pytest.mark.usefixtures("converted")
def test_a_registry_that_does_not_give_its_blobs_is_named_once(bootseer: Run, node: Node, loading: str) -> None:
    with FaultProxy(node.registry.host) as proxy:
        proxy.plan = lambda request: Fault(status=403) if "range" in request.headers else None
        reference = node.reference.replace(node.registry.host, proxy.host)
        words = ("image", "run", "--loading", loading, "--entrypoint", "none", reference, "--", "true")
        (line,) = bootseer(*words, code=1).stderr.splitlines()
    assert proxy.host in line
    assert "status 403" in line


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("converted")
def test_reads_that_fail_while_the_command_runs_are_reported_with_their_cause(bootseer: Run, node: Node) -> None:
    gone = node.folder / "gone"
    with FaultProxy(node.registry.host) as proxy:
        proxy.plan = lambda request: Fault(status=403) if gone.exists() else None
        reference = node.reference.replace(node.registry.host, proxy.host)
        words = (
            "image",
            "run",
            "--loading",
            "lazy",
            "--entrypoint",
            "none",
            "--mount",
            f"{node.folder}:/node",
            reference,
        )
        ran = bootseer(*words, "--", "sh", "-c", "touch /node/gone; cat /cold > /dev/null", code=1)
    assert "Input/output error" in ran.stderr
    assert f"of the image failed: {proxy.host}" in ran.stderr
    assert "status 403" in ran.stderr


def test_a_conversion_tells_that_the_registry_does_not_answer(env: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        name = f"127.0.0.1:{silent.getsockname()[1]}/team/train:7"
        words = [*BOOTSEER, "image", "convert", name, str(tmp_path / "store")]
        with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as converting:
            assert converting.stderr is not None
            assert f"still waiting for {name}" in converting.stderr.readline()
            converting.send_signal(signal.SIGINT)
            assert converting.wait(60) == 130


@pytest.mark.root
@pytest.mark.fuse
@pytest.mark.usefixtures("converted")
def test_a_registry_that_is_down_is_missed_once(bootseer: Run, node: Node) -> None:
    words = ("image", "run", "--loading", "lazy", "--entrypoint", "none", node.reference, "--", "true")
    bootseer(*words)
    node.registry.__exit__(None, None, None)
    ran = bootseer(*words)
    assert ran.stderr.count("no hot set:") == 1, ran.stderr
