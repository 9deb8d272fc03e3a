"""`bootseer image convert --watch`: what is pushed into a repository is converted, each image once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from bootseer.image.catalog import images_in
from bootseer.store.open import open_registry, open_store
from conftest_launch import BOOTSEER
from image_node import push
from oci_images import file, layer, write_layout
from registry import Registry, needs_registry

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
            [*BOOTSEER, *words, "--interval", "0.1s"],
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
        assert "not the state of a watch" in run(*words, "--once").stderr
