"""Install BootSeer on a node: the program, systemd units, and one configuration file for containerd.

    install_node.py --host /host            # in a container that has the node's root folder there
    install_node.py --host / --remove

The node's own files are not edited. Idempotent: what is already correct is left alone, and containerd is restarted only
when our file for it has changed. Needs root, and nothing but Python 3.11.
"""

import argparse
import fcntl
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOCKETS = ("bootseer-agent.socket", "bootseer-snapshotter.socket")
UNITS = (*SOCKETS, "bootseer-agent.service", "bootseer-snapshotter.service")
# Below the node's root.
FOLDER, PROGRAM, UNIT_FOLDER = "opt/bootseer", "usr/local/bin/bootseer", "etc/systemd/system"
VARIABLES = "etc/bootseer/node.env"
TOML = "zz-bootseer.toml"
SOCKET = "/run/bootseer/snapshotter.sock"
CRI1, IMAGES, RUNTIME = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"
Table = dict[str, Any]


class InstallError(Exception):
    """What the administrator has to mend, in one line."""


class Node:
    """The node whose root folder is `root`; `say` is called with a line for each change."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        self.root = root
        self.say = say

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the node, with the node's root folder as root."""
        before = None if self.root == Path("/") else lambda: (os.chroot(self.root), os.chdir("/"))
        # This container's variables do not apply there. By default systemctl does nothing in a chroot.
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        env |= {"SYSTEMD_IGNORE_CHROOT": "1"} if self.has_systemd else {}
        try:
            return subprocess.run(
                words, preexec_fn=before, capture_output=True, text=True, env=env, check=False, timeout=120, cwd="/"
            )
        except (FileNotFoundError, PermissionError) as error:
            raise InstallError(f"the node has no {words[0]}: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise InstallError(f"{' '.join(words)} has not ended within two minutes") from error

    def must(self, *words: str) -> str:
        """The output of a program of the node. Raises `InstallError` if it fails."""
        done = self.run(*words)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise InstallError(f"{' '.join(words)}: {said[-1] if said else f'exit code {done.returncode}'}")
        return done.stdout

    @property
    def has_systemd(self) -> bool:
        """Whether systemd runs there: not in a folder that becomes the image of a machine."""
        return (self.root / "run/systemd/system").is_dir()

    def write(self, path: str, text: str, mark: Path | None = None) -> bool:
        """Write a file; returns whether it had to be changed. The file `mark` is created before that."""
        target = self.root / path
        if target.is_file() and not target.is_symlink() and target.read_text(errors="replace") == text:
            return False
        if mark is not None:
            mark.touch()
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(text)
            os.fchmod(handle, 0o644)
            file.flush()
            os.fsync(handle)
        Path(name).replace(target)
        self.say(f"wrote /{path}")
        return True

    def link(self, path: str, to: str) -> None:
        """Create a symbolic link, or replace one made here. Raises `InstallError` if anything else is there."""
        target = self.root / path
        if target.is_symlink() and str(target.readlink()) == to:
            return
        ours = target.is_symlink() and (path.startswith(FOLDER) or str(target.readlink()).startswith(f"/{FOLDER}/"))
        if os.path.lexists(target) and not ours:
            raise InstallError(f"/{path} is there already and was not made here: remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(to)
        new.replace(target)
        self.say(f"/{path} leads to {to}")

    def drop(self, path: str) -> bool:
        """Delete a file or link; returns whether it existed."""
        if not os.path.lexists(self.root / path):
            return False
        (self.root / path).unlink()
        self.say(f"removed /{path}")
        return True


def install(node: Node, options: argparse.Namespace) -> None:
    """Install or update what is missing or outdated. Raises `InstallError`."""
    snapshotter = [name for name in UNITS if "snapshotter" in name]
    if not options.containerd:
        _undo(node, options, snapshotter)
    wanted = [name for name in UNITS if options.containerd or name not in snapshotter]
    sockets = [name for name in wanted if name in SOCKETS]
    services = [name for name in wanted if name not in SOCKETS]
    names = ("BOOTSEER_AGENT_OPTIONS", "BOOTSEER_SNAPSHOTTER_OPTIONS", "BOOTSEER_CACHE")
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not set('"\\').isdisjoint("".join(given.values())):
        raise InstallError('the cache and options of agent and snapshotter may not hold " and \\')
    variables = "".join(f'{name}="{text}"\n' for name, text in given.items())
    # Exists while changes, also those of an earlier run that was stopped, have not been loaded by systemd.
    unfinished = node.root / FOLDER / ".unfinished"
    changed = _program(node, options.source, unfinished)
    for path, text in [(VARIABLES, variables), *((f"{UNIT_FOLDER}/{name}", _unit(name)) for name in wanted)]:
        changed |= node.write(path, text, unfinished)
    for name in wanted:
        if not _is_enabled(node, name):
            node.must("systemctl", "enable", name)
    if changed or unfinished.exists():
        _systemctl(node, "daemon-reload")
        # systemd opens no socket for a service that is running, and older versions had fewer sockets.
        _systemctl(node, "stop", *services)
        _systemctl(node, "restart", *sockets)
        _systemctl(node, "start", *services)
        unfinished.unlink(missing_ok=True)
    elif node.has_systemd:
        # Starts units that were stopped by hand.
        node.must("systemctl", "start", *sockets, *services)
    unread = node.root / FOLDER / ".unread"
    if options.containerd and (_containerd(node, options, unread) or unread.exists()):
        _restart_containerd(node, options)
        unread.unlink(missing_ok=True)
    _forget(node)


def _unit(name: str) -> str:
    for folder in (HERE / "systemd", HERE.parents[1] / "contrib" / "systemd"):
        if (folder / name).is_file():
            return (folder / name).read_text()
    raise InstallError(f"{name} is not beside this program")


def _program(node: Node, source: Path, mark: Path) -> bool:
    """Install the program and switch to it; returns whether the current version has changed."""
    try:
        version = (source / "VERSION").read_text().strip()
    except OSError as error:
        raise InstallError(f"{source} is not what bundle.py made: {error.strerror}") from error
    target = node.root / FOLDER / version
    if not target.exists():
        new = target.with_name(f".new-{version}")
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(source, new, symlinks=True)
        # Before anything links to it: an older C library of the node cannot load all of its libraries.
        try:
            python = f"/{FOLDER}/{new.name}/bin/python3"
            node.must(python, "-I", "-c", "import bootseer.cli.verbs, pyexpat, sqlite3, ssl")
        except InstallError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        os.sync()  # a power failure must not leave the new name without its content
        new.rename(target)
        node.say(f"installed /{FOLDER}/{version}")
    current = node.root / FOLDER / "current"
    changed = not current.is_symlink() or str(current.readlink()) != version
    if changed:
        mark.touch()
    node.link(f"{FOLDER}/current", version)
    node.link(PROGRAM, f"/{FOLDER}/current/bin/bootseer")
    return changed


def _forget(node: Node) -> None:
    """Remove versions that are neither current nor running: mount daemons live as long as their containers."""
    folder = node.root / FOLDER
    used = set()
    for command in (node.root / "proc").glob("[0-9]*/cmdline"):
        try:
            text = command.read_bytes()
        except OSError:
            continue
        used |= {version.name for version in folder.iterdir() if f"/{FOLDER}/{version.name}/".encode() in text}
    current = folder / "current"
    keep = (
        used
        | {"current", ".lock", ".unfinished", ".unread"}
        | ({str(current.readlink())} if current.is_symlink() else set())
    )
    gone = folder / ".gone"
    shutil.rmtree(gone, ignore_errors=True)
    for version in folder.iterdir():
        if version.name not in keep:
            version.rename(gone)  # what an interrupted deletion leaves must not be taken for the version
            shutil.rmtree(gone, ignore_errors=True)
            node.say(f"removed /{FOLDER}/{version.name}")


def _is_enabled(node: Node, unit: str) -> bool:
    return node.run("systemctl", "is-enabled", "--quiet", unit).returncode == 0


def _systemctl(node: Node, *words: str) -> None:
    if node.has_systemd:
        node.must("systemctl", *words)
        node.say(f"systemctl {' '.join(words)}")


def _restart_containerd(node: Node, options: argparse.Namespace) -> None:
    if options.restart == "no":
        node.say("containerd has to be restarted: what it reads has changed")
    else:
        # Running containers are not affected: their parents are shims.
        _systemctl(node, "restart", options.containerd_unit)


def _containerd(node: Node, options: argparse.Namespace, mark: Path) -> bool:
    """Configure the snapshotter and the runtime; returns whether containerd's configuration has changed.

    Up to 1.7, a plugin's section in a later file replaces that of earlier ones, so ours has to repeat all of it. Before
    the file is installed, containerd's resulting configuration is compared with the one before.
    """
    path = f"{options.drop_in.strip('/')}/{TOML}"
    config = Path(options.config)
    main, others = _read(node, config, leave_out=f"/{path}")
    with tempfile.TemporaryDirectory(dir=_made(node.root / "run"), prefix="bootseer-") as folder:
        work = Path(folder)
        before = _dump(node, options, work, main, others)
        text = toml_text(_wanted(before, [main, *(_load(node, each) for each in others)], options))
        (work / TOML).write_text(text)
        after = _dump(node, options, work, main, [*others, f"/{(work / TOML).relative_to(node.root)}"])
    expected = deepcopy(before)
    _merge(expected, _ours(before, options))
    if difference := _difference(_known(expected), _known(after)):
        raise InstallError(f"containerd's configuration would also change at {difference}: nothing was changed")
    if not _per_runtime(after):
        node.say("this containerd has one snapshotter for all pods: images come as before until it is 1.7 or newer")
    earlier = (node.root / path).read_text() if (node.root / path).is_file() else None
    if not node.write(path, text, mark):
        return False
    seen = _loaded(options, node.must(options.containerd_program, "--config", options.config, "config", "dump"))
    if "bootseer" in seen.get("proxy_plugins", {}):
        return True
    node.drop(path)
    if earlier is not None:
        node.write(path, earlier)
    mark.unlink()
    raise InstallError(
        f'containerd does not read /{path}: put imports = ["{options.drop_in}/*.toml"] at the top of {config},'
        " which is never edited here"
    )


def _per_runtime(config: Table) -> bool:
    plugins = config.get("plugins", {})
    return RUNTIME in plugins or "snapshotter" in plugins[CRI1]["containerd"]["runtimes"]["bootseer"]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _load(node: Node, path: str | Path) -> Table:
    try:
        return tomllib.loads((node.root / str(path).lstrip("/")).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InstallError(f"{path} of the node: {error}") from error


def _read(node: Node, config: Path, leave_out: str) -> tuple[Table, list[str]]:
    """The main file and the others that it imports, in their order."""
    main = _load(node, config)
    found: list[str] = []
    for pattern in main.get("imports", []):
        inside = str(pattern) if str(pattern).startswith("/") else f"{config.parent}/{pattern}"
        names = sorted(glob.glob(inside.lstrip("/"), root_dir=node.root))  # noqa: PTH207 - the node's patterns may be any
        found += [f"/{name}" for name in names if f"/{name}" not in (leave_out, str(config))]
    return main, list(dict.fromkeys(found))


def _dump(node: Node, options: argparse.Namespace, work: Path, main: Table, imports: list[str]) -> Table:
    """The configuration that containerd reads from these files."""
    path = work / "config.toml"
    path.write_text(toml_text({**main, "imports": imports}))
    inside = f"/{path.relative_to(node.root)}"
    return _loaded(options, node.must(options.containerd_program, "--config", inside, "config", "dump"))


def _loaded(options: argparse.Namespace, text: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InstallError(f"{options.containerd_program} config dump: {error}") from error


def _ours(before: Table, options: argparse.Namespace) -> Table:
    """What we add to containerd's configuration."""
    plugins = before.get("plugins", {})
    two = RUNTIME in plugins
    runtimes = plugins.get(RUNTIME if two else CRI1, {}).get("containerd", {})
    base = options.base_runtime or runtimes.get("default_runtime_name") or "runc"
    known = runtimes.get("runtimes", {})
    if base not in known:
        raise InstallError(f"containerd has no runtime {base}; it has {', '.join(sorted(known)) or 'none'}")
    # A copy of the node's default runtime, with its cgroup driver, or NVIDIA's.
    runtime = {**deepcopy(known[base]), "snapshotter": "bootseer"}
    plugin: Table = {"type": "snapshot", "address": SOCKET}
    if not two:
        cri = {"disable_snapshot_annotations": False, "runtimes": {"bootseer": runtime}}
        return {"proxy_plugins": {"bootseer": plugin}, "plugins": {CRI1: {"containerd": cri}}}
    images = {
        "disable_snapshot_annotations": False,
        "use_local_image_pull": True,
        "runtime_platforms": {"bootseer": {"platform": "", "snapshotter": "bootseer"}},
    }
    return {
        "proxy_plugins": {"bootseer": plugin},
        "plugins": {IMAGES: images, RUNTIME: {"containerd": {"runtimes": {"bootseer": runtime}}}},
    }


def _wanted(before: Table, files: list[Table], options: argparse.Namespace) -> Table:
    """The content of our file: what we add, merged into the sections of the node's files."""
    wanted, version = _ours(before, options), files[0].get("version", before["version"])
    if IMAGES in wanted["plugins"]:
        if version < 3:  # containerd 2 with a file of 1.x turns the old section into the new one, but not back
            wanted["plugins"][CRI1] = wanted["plugins"].pop(RUNTIME)
        return {"version": version, **wanted}
    section: Table = {}
    for file in files:
        section = deepcopy(file.get("plugins", {}).get(CRI1, section))
    # A table of runtimes replaces that which containerd has built in.
    section.setdefault("containerd", {})["runtimes"] = deepcopy(before["plugins"][CRI1]["containerd"]["runtimes"])
    _merge(section, wanted["plugins"][CRI1])
    return {"version": version, **wanted, "plugins": {CRI1: section}}


def _merge(into: Table, other: Table) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = deepcopy(value)


def _known(config: Table) -> Table:
    """Without what differs in any case: the list of files, fields of a plugin that containerd fills in, and a runtime's
    snapshotter, which containerd 1.6 does not know."""
    plain = {key: deepcopy(value) for key, value in config.items() if key not in ("imports", "proxy_plugins")}
    plain["proxy_plugins"] = {key: value for key, value in config.get("proxy_plugins", {}).items() if key != "bootseer"}
    for section in (CRI1, RUNTIME):
        runtimes = plain.get("plugins", {}).get(section, {}).get("containerd", {}).get("runtimes", {})
        if "bootseer" in runtimes:
            runtimes["bootseer"].pop("snapshotter", None)
    return plain


def _difference(one: Any, other: Any, at: str = "") -> str:
    """The path of the first difference between two tables; empty if they are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if found := _difference(one.get(key), other.get(key), f"{at}.{key}".lstrip(".")):
                return found
        return ""
    return "" if one == other or (not one and not other) else at


def toml_text(table: Table, at: str = "") -> str:
    """A table as TOML."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    text = "".join(f"{line}\n" for line in lines)
    if at and (plain or not table):
        text = f"[{at}]\n{text}\n"
    tables = ((key, value) for key, value in table.items() if isinstance(value, dict))
    return text + "".join(toml_text(value, f"{at}.{_key(key)}".lstrip(".")) for key, value in tables)


def _key(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | int) else str(value)


def _undo(node: Node, options: argparse.Namespace, units: Iterable[str]) -> None:
    """Remove these units, and what containerd reads."""
    there = [name for name in units if os.path.lexists(node.root / UNIT_FOLDER / name)]
    if node.drop(f"{options.drop_in.strip('/')}/{TOML}"):
        _restart_containerd(node, options)
    for name in there:
        node.must("systemctl", *(["disable", "--now"] if node.has_systemd else ["disable"]), name)
        node.drop(f"{UNIT_FOLDER}/{name}")
    if there:
        _systemctl(node, "daemon-reload")


def remove(node: Node, options: argparse.Namespace) -> None:
    """Undo `install`. The cache and running versions stay."""
    _undo(node, options, UNITS)
    node.drop(VARIABLES)
    program = node.root / PROGRAM
    if program.is_symlink() and str(program.readlink()).startswith(f"/{FOLDER}/"):
        node.drop(PROGRAM)
    node.drop(f"{FOLDER}/current")
    _forget(node)


def main() -> int:
    """Parse the options; install or remove once, or with --stay repeatedly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--host", type=Path, default=Path("/host"), help="the node's root folder (default: %(default)s)"
    )
    parser.add_argument("--source", type=Path, default=Path("/opt/bootseer"), help="the folder made by bundle.py")
    parser.add_argument("--remove", action="store_true", help="uninstall")
    parser.add_argument("--stay", action="store_true", help="check again every --every seconds until a signal or error")
    parser.add_argument(
        "--every", type=float, default=300.0, metavar="S", help="with --stay: seconds between two checks"
    )
    parser.add_argument("--no-containerd", dest="containerd", action="store_false", help="the agent alone")
    parser.add_argument("--containerd-program", default="containerd", help="a name or path on the node")
    parser.add_argument("--containerd-unit", default="containerd.service", help="its systemd unit")
    parser.add_argument("--config", default="/etc/containerd/config.toml", help="containerd's own file, read only")
    parser.add_argument("--drop-in", default="/etc/containerd/conf.d", help="the folder for our file")
    parser.add_argument(
        "--base-runtime", default="", help="the runtime that ours is a copy of (default: the default runtime)"
    )
    parser.add_argument("--restart", choices=("yes", "no"), default="yes", help="restart containerd if necessary")
    options = parser.parse_args()
    node = Node(options.host.resolve(), lambda text: (sys.stdout.write(f"{text}\n"), sys.stdout.flush()))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    while True:
        try:
            if not (node.root / "etc").is_dir() or os.geteuid() != 0:
                raise InstallError(f"{options.host} is not a root folder, or this is not root")
            with (_made(node.root / FOLDER) / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                (remove if options.remove else install)(node, options)
        except (InstallError, OSError, shutil.Error) as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
        if not options.stay or ended.wait(options.every):
            return 0


if __name__ == "__main__":
    sys.exit(main())
