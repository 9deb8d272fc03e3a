"""`bootseer image convert --watch`: each image that is pushed into a repository is converted once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.image.catalog import images_in
from bootseer.store.open import open_registry, open_store
from conftest_launch import BOOTSEER
from fault_proxy import Fault, FaultProxy, Request
from image_node import push
from oci_images import file, layer, write_layout
from registry import Registry, needs_registry
from small_disks import small_disk

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]


def push_image(folder: Path, host: str, tag: str, text: bytes) -> None:
    layout = folder / f"layout-{tag}"
    write_layout(layout, [layer(file("a", text))], tag=tag)
    push(layout, host, "team/train", tag)


@needs_registry
def test_each_image_is_converted_once_also_after_a_restart(tmp_path: Path, run: Run, env: dict[str, str]) -> None:
    with Registry(tmp_path) as registry:
        push_image(tmp_path, registry.host, "1", b"one")
        push_image(tmp_path, registry.host, "again", b"one")
        push_image(tmp_path, registry.host, "other-1", b"not wanted")
        repository = f"{registry.host}/team/train"
        state = tmp_path / "state" / "watch.json"
        words = ["image", "convert", "--watch", "--json", "--state", str(state), "--tag", "[0-9a]*", repository]
        with subprocess.Popen(
            [*BOOTSEER, *words, "--interval", "1s"],
            env={**env, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            first = json.loads(process.stdout.readline())
            assert (first["schema"], first["image"]) == ("bootseer.convert/1", f"{repository}:1")
            push_image(tmp_path, registry.host, "2", b"two")
            second = json.loads(process.stdout.readline())
            assert second["image"] == f"{repository}:2"
            with closing(open_registry(registry.host, "team/train")) as opened:
                manifest = opened.manifest("2")
                empty = json.dumps({**json.loads(manifest.data), "layers": []}).encode()
                opened.put_manifest("9", empty, manifest.media_type)
            refused = json.loads(process.stdout.readline())
            assert (refused["image"], "0 layers" in refused["error"]) == (f"{repository}:9", True)
            busy = run(*words, "--once")
            assert (busy.returncode, "locked" in busy.stderr) == (1, True)
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 0
            assert "SIGINT: 2 images converted, 1 failed" in process.stderr.read()
        with closing(open_store(f"oci://{repository}")) as store:
            for each in (first, second):
                assert images_in(store).look(each["digest"]).kind != "none"
        before = len(registry.requests())
        done = run(*words, "--once")
        assert (done.returncode, json.loads(done.stdout)["image"]) == (1, refused["image"]), done.stderr
        assert {logged.method for logged in registry.requests()[before:]} == {"GET", "HEAD"}
        state.write_text("{}")
        assert "not a valid watch state file" in run(*words, "--once").stderr


@needs_registry
def test_a_tag_that_the_registry_refuses_holds_no_other_up(tmp_path: Path, run: Run) -> None:
    with Registry(tmp_path) as registry, FaultProxy(registry.host) as proxy:
        for tag in ("1", "2", "3"):
            push_image(tmp_path, registry.host, tag, tag.encode())
        state = tmp_path / "watch.json"
        words = ["image", "convert", "--watch", "--once", "--json", "--state", str(state)]
        words += [f"{proxy.host}/team/train", str(tmp_path / "store")]
        assert run(*words).returncode == 0
        kept = state.read_bytes()
        push_image(tmp_path, registry.host, "4", b"4")
        proxy.plan = lambda request: Fault(status=403) if request.path.endswith("manifests/2") else None
        looked = run(*words)
        refused, converted = map(json.loads, looked.stdout.splitlines())
        assert (looked.returncode, refused["image"]) == (1, f"{proxy.host}/team/train:2")
        assert "status 403" in refused["error"]
        assert converted["image"] == f"{proxy.host}/team/train:4"
        before = set(json.loads(kept)["converted"])
        assert set(json.loads(state.read_bytes())["converted"]) == {*before, converted["tagged"]}
        proxy.plan = lambda request: Fault(status=403) if "/manifests/" in request.path else None
        assert "status 403" in run(*words).stderr
        assert before < set(json.loads(state.read_bytes())["converted"])


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one file: the state's lock, but not the state."""
    with small_disk(tmp_path / "full", "nr_inodes=2") as folder:
        yield folder


@pytest.mark.root
@needs_registry
def test_all_is_converted_where_the_state_cannot_be_kept(tmp_path: Path, full_disk: Path, run: Run) -> None:
    with Registry(tmp_path) as registry:
        for tag in ("1", "2"):
            push_image(tmp_path, registry.host, tag, tag.encode())
        words = ["image", "convert", "--watch", "--once", "--json", "--state", str(full_disk / "watch.json")]
        looked = run(*words, f"{registry.host}/team/train", str(tmp_path / "store"))
        images = [json.loads(line)["image"] for line in looked.stdout.splitlines()]
        assert images == [f"{registry.host}/team/train:{tag}" for tag in ("1", "2")]
        assert (looked.returncode, looked.stderr.count("cannot be written")) == (1, 1)


@needs_registry
def test_a_signal_ends_it_while_a_layer_hangs(tmp_path: Path, env: dict[str, str]) -> None:
    with Registry(tmp_path) as registry, FaultProxy(registry.host) as proxy:
        push_image(tmp_path, registry.host, "1", b"one")
        hung = threading.Event()

        def plan(request: Request) -> Fault | None:
            if request.method != "GET" or "/blobs/" not in request.path:
                return None
            if len([each for each in proxy.requests if "/blobs/" in each.path]) > 1:  # after the configuration
                hung.set()
                return Fault(hang=True)
            return None

        proxy.plan = plan
        words = ["image", "convert", "--watch", f"{proxy.host}/team/train", str(tmp_path / "store")]
        with subprocess.Popen([*BOOTSEER, *words], env={**env, **os.environ}, stderr=subprocess.PIPE) as process:
            assert hung.wait(300)
            process.send_signal(signal.SIGTERM)
            try:
                assert process.wait(90) == 0  # the time that a service manager allows
            finally:
                process.kill()
            assert process.stderr is not None
            assert process.stderr.read().startswith(b"bootseer: SIGTERM: 0 images converted")
