"""Other ways to start the container: containerd, a script that pulls in parallel, a plain folder.

`prepare` makes a node without any image, `start` returns the timed commands, `again` those of a later start on the same
node, `clean` removes everything.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import urllib3

_STOP_S = 20.0
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def version(program: str | Path) -> str:
    """What `--version` prints."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


class Way(Protocol):
    """A way to start containers from images in a registry."""

    def prepare(self) -> None:
        """Make a node without any image, with the daemons that run before a job arrives."""

    def start(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        """The commands of a start. The last one runs the container in the foreground."""

    def again(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        """The commands of a later start of the same image on this node."""

    @property
    def env(self) -> Mapping[str, str]:
        """The environment of the commands."""

    def clean(self) -> None:
        """Stop and delete everything."""


class Containerd:
    """`ctr image pull`, then `ctr run` with runc: overlayfs snapshotter, layers unpacked one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "containerd.sock"
        self._daemon: subprocess.Popen[bytes] | None = None
        self._number = 0
        self.env: Mapping[str, str] = {**os.environ, "CONTAINERD_ADDRESS": str(self._socket)}

    def prepare(self) -> None:
        self._folder.mkdir(parents=True)
        config = self._folder / "config.toml"
        config.write_text(containerd_config(self._folder))
        with (self._folder / "log").open("wb") as log:
            self._daemon = subprocess.Popen(
                ["containerd", "-c", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + _STOP_S
        while subprocess.run(["ctr", "version"], env=self.env, capture_output=True, check=False).returncode:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"containerd did not start; see {self._folder / 'log'}")
            time.sleep(0.05)

    def start(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        return [["ctr", "image", "pull", "--plain-http", reference], *self.again(reference, command)]

    def again(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        self._number += 1
        return [["ctr", "run", "--rm", reference, f"start-{os.getpid()}-{self._number}", *command]]

    def clean(self) -> None:
        if self._daemon is not None:
            self._daemon.terminate()
            try:
                self._daemon.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
            self._daemon = None
        shutil.rmtree(self._folder, ignore_errors=True)


def containerd_config(folder: Path) -> str:
    """The configuration of a containerd with all its data and its socket, `containerd.sock`, in the folder."""
    # JSON strings are valid in TOML.
    return (
        "version = 2\n"
        f"root = {json.dumps(str(folder / 'root'))}\n"
        f"state = {json.dumps(str(folder / 'state'))}\n"
        'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]\n'
        f"[grpc]\naddress = {json.dumps(str(folder / 'containerd.sock'))}\n"
        f"[ttrpc]\naddress = {json.dumps(str(folder / 'containerd.sock.ttrpc'))}\n"
    )


class ParallelPull:
    """A script of curl, tar and runc: all layers concurrently, each unpacked while it arrives, mounted by overlayfs.

    On a link slower than gunzip no full pull can be faster. A runtime has more to do: the script verifies no digest.
    """

    env: Mapping[str, str] = os.environ

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[str, Path] = {}

    def prepare(self) -> None:
        self._folder.mkdir(parents=True)
        self._images = {}

    def start(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        """Reading the manifest and writing the script is not timed."""
        folder = self._images[reference] = self._folder / str(len(self._images))
        folder.mkdir()
        repository, _, tag = reference.partition("/")[2].rpartition(":")
        url = f"http://{reference.partition('/')[0]}/v2/{repository}"
        manifest = _get(f"{url}/manifests/{tag}")
        config = _get(f"{url}/blobs/{manifest['config']['digest']}")["config"]
        layers = [layer["digest"] for layer in manifest["layers"]]
        script = ["set -e -o pipefail", f"cd {folder}"]
        for number, digest in enumerate(layers):
            script.append(f"mkdir {number}; (curl -sSf {url}/blobs/{digest} | tar -xz -C {number} --numeric-owner) &")
            script.append("pids+=($!)")
        script.append('for pid in "${pids[@]}"; do wait "$pid"; done')
        # Whiteouts in overlayfs's form.
        script.append(
            r"find . -name '.wh.*' | while read -r path; do rm "
            r'"$path"; mknod "${path%/*}/${path##*/.wh.}" c 0 0; done'
        )
        lower = ":".join(str(number) for number in reversed(range(len(layers))))
        script.append("mkdir upper work rootfs")
        script.append(f"mount -t overlay overlay -o lowerdir={lower},upperdir=upper,workdir=work rootfs")
        write_bundle(folder, config, command)
        return [["bash", "-c", "\n".join(script)], *self.again(reference, command)]

    def again(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        folder = self._images[reference]
        return [["runc", "run", "--bundle", str(folder), f"pull-{os.getpid()}-{folder.name}"]]

    def clean(self) -> None:
        for folder in self._images.values():
            subprocess.run(["umount", str(folder / "rootfs")], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


class PlainFolder:
    """The images' files in ordinary folders: a start without loading."""

    env: Mapping[str, str] = os.environ

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._images: dict[str, Path] = {}

    def prepare(self) -> None:
        """The folders are kept between starts; only the page cache is cold."""

    def unpack(self, reference: str, layout: str) -> None:
        """Create the folder of an image from an OCI layout ("FOLDER:TAG")."""
        folder = self._images[reference] = self._folder / str(len(self._images))
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["umoci", "unpack", "--image", layout, str(folder)], check=True, capture_output=True)

    def start(self, reference: str, command: Sequence[str]) -> list[list[str]]:
        folder = self._images[reference]
        process = json.loads((folder / "config.json").read_text())["process"]
        write_bundle(folder, {"Env": process["env"], "WorkingDir": process["cwd"]}, command)
        return [["runc", "run", "--bundle", str(folder), f"folder-{os.getpid()}-{folder.name}"]]

    again = start

    def clean(self) -> None:
        """Keep the folders for the next start."""


def _get(url: str) -> Any:
    return urllib3.request("GET", url, headers={"Accept": _MANIFEST}, timeout=10).json()


def write_bundle(folder: Path, config: Mapping[str, Any], command: Sequence[str]) -> None:
    """runc's config.json for a folder whose root file system is in `rootfs`."""
    path = folder / "config.json"
    path.unlink(missing_ok=True)
    subprocess.run(["runc", "spec", "--bundle", str(folder)], check=True)
    spec = json.loads(path.read_text())
    spec["root"]["readonly"] = False
    spec["process"] |= {
        "terminal": False,
        "args": list(command),
        "env": config["Env"],
        "cwd": config.get("WorkingDir") or "/",
    }
    path.write_text(json.dumps(spec))
