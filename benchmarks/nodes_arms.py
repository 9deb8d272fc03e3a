"""How a node of `nodes` starts the job: the preparation, and the timed commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from competitors import containerd_config
from harness import ROOT
from nodes_site import BOOTSEER, PYTHON, Script

_UNGUARDED = str(Path(__file__).with_name("nodes_unguarded.py"))
_COPY = str(ROOT / "examples/plain_copy.py")
REQUIREMENTS = ROOT / "examples/moe/requirements.txt"


@dataclass(frozen=True, slots=True)
class Origin:
    """The servers and files from which nodes start."""

    host: str
    """Host and port of the registry."""
    index: str
    """URL of the package index; empty if the job needs no other packages than the image's."""
    image: str
    striped: str
    """The checkpoints in stripes, and as ordinary files; empty if the job reads none."""
    plain: str
    meet: str
    """The folder for `--peers`."""
    bench: Path
    """The folder that every node mounts at /bench, with the replay and its plan."""
    layout: Path
    """The image as an OCI layout."""

    @property
    def unrecorded(self) -> str:
        """The checkpoints in stripes, without hot lists."""
        return f"{self.striped}-unrecorded"


@dataclass(frozen=True, slots=True)
class Start:
    """One node's start in one row."""

    origin: Origin
    folder: Path
    """The node's."""
    number: int
    of: int
    row: str
    """Unique name of the job and of the container."""
    command: tuple[str, ...] = ("python3", "/bench/nodes_replay.py", "/bench/plan")
    """The job; the folder of checkpoints is appended."""
    workload: str = "replay"
    """The name of the hot set of starts that use one."""

    @property
    def copied(self) -> Path:
        return self.folder / "copied"

    def job(self, checkpoint: Path) -> list[str]:
        read = [str(checkpoint)] if self.origin.striped else []
        return [*self.command, *read]


@dataclass(frozen=True, slots=True)
class Techniques:
    """The parts of BootSeer that a start uses. Without any it does the same as `today`, except for containerd."""

    image: bool = True
    environment: bool = True
    checkpoint: bool = True
    record: bool = True
    """Whether hot sets of earlier starts are used; otherwise the start has a new workload name."""
    peers: bool = False
    warm: bool = False

    def only(self, **chosen: bool) -> Techniques:
        return replace(self, **{"image": False, "environment": False, "checkpoint": False, **chosen})


def today(start: Start, pull: str = "") -> Script:
    """containerd pulls (`pull` instead of the image, if given), one client copies the checkpoint, pip installs."""
    image = pull or start.origin.image
    prepare, env = containerd(start.folder)
    pulled = ["ctr", "image", "pull", "--plain-http", image]
    return Script(prepare, [pulled, *copy(start), run_container(start, image)], env)


def containerd(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Shell lines that start containerd before the job arrives, and the variables for its clients."""
    place = folder / "containerd"
    place.mkdir(parents=True)
    (place / "config.toml").write_text(containerd_config(place))
    lines = [
        f"containerd -c {place}/config.toml </dev/null >{place}/log 2>&1 &",
        "for _ in $(seq 400); do ctr version >/dev/null 2>&1 && break; sleep 0.05; done",
        "ctr version >/dev/null",
    ]
    return lines, {"CONTAINERD_ADDRESS": str(place / "containerd.sock")}


def copy(start: Start) -> list[list[str]]:
    """Copy the checkpoint, one file after the other."""
    return [[PYTHON, _COPY, start.origin.plain, str(start.copied)]] if start.origin.plain else []


def run_container(start: Start, image: str) -> list[str]:
    """Run pip, then the job, in a container of containerd."""
    folders = {str(start.origin.bench): "/bench"}
    if start.origin.plain:
        folders[str(start.copied)] = str(start.copied)
    mounts = [f"type=bind,src={here},dst={there},options=rbind:ro" for here, there in folders.items()]
    options = ["--rm", "--net-host", *(word for mount in mounts for word in ("--mount", mount))]
    options += ["--cgroup", f"/{start.row}-{start.number}"]
    if not start.origin.index:
        return ["ctr", "run", *options, image, f"{start.row}-{start.number}", *start.job(start.copied)]
    pip = f"python3 -m pip install --quiet {_pip(start.origin)} -r /bench/requirements.txt"
    inside = ["sh", "-c", f'{pip} && exec "$@"', "sh", *start.job(start.copied)]
    return ["ctr", "run", *options, image, f"{start.row}-{start.number}", *inside]


def bootseer(start: Start, techniques: Techniques, without: str = "") -> Script:
    """`bootseer run` with image, environment and checkpoint. `without`: a guard of `nodes_unguarded`."""
    origin = start.origin
    program = [PYTHON, _UNGUARDED, without] if without else [BOOTSEER]
    words = [*program, "run", "--quiet", "--job", start.row, "--attempt", "0", "--node", f"node{start.number}"]
    words += ["--num-nodes", str(start.of), "--began-pattern", "^began"]
    words += ["--image", origin.image, "--store", f"oci://{origin.image.rpartition(':')[0]}", "--entrypoint", "none"]
    words += ["--loading", "lazy" if techniques.image else "pull", "--mount", f"{origin.bench}:/bench:ro"]
    words += ["--workload", start.workload if techniques.record else start.row]
    if techniques.warm:
        words += ["--warm", "auto"]
    if techniques.peers:
        words += ["--peers", origin.meet]
    if origin.index:
        words += ["--requirements", str(REQUIREMENTS), "--env", "auto" if techniques.environment else "bypass"]
        for setting in _pip_variables(origin):
            words += ["--container-env", setting]
    steps, checkpoint = [], start.copied
    if origin.striped and techniques.checkpoint:
        checkpoint = start.folder / "checkpoints"
        place = origin.striped if techniques.record else origin.unrecorded
        words += ["--checkpoint", place, "--checkpoint-dir", str(checkpoint)]
    elif origin.plain:
        words += ["--mount", f"{checkpoint}:{checkpoint}:ro"]
        steps = copy(start)
    return Script(
        # Load the program's own code into memory, as on a node in use.
        [f"{BOOTSEER} --version >/dev/null"],
        [*steps, [*words, "--", *start.job(checkpoint)]],
        {"BOOTSEER_PLAIN_HTTP": origin.host},
    )


def _pip(origin: Origin) -> str:
    return f"--index-url {origin.index} --trusted-host {origin.host.partition(':')[0]} --no-cache-dir"


def _pip_variables(origin: Origin) -> Sequence[str]:
    host = origin.host.partition(":")[0]
    return (f"PIP_INDEX_URL={origin.index}", f"PIP_TRUSTED_HOST={host}", "PIP_QUIET=1", "PIP_NO_CACHE_DIR=1")
