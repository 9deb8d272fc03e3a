"""The record of a program for warm starts: its name, its imports, and what may change them.

Used by all processes of a warm start: the recorded program (`Recorder`, when training begins or the program ends), the
launcher that starts it the next time (`warm_launcher`), and the warm parent (`warm_parent`).
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.io import proc

if TYPE_CHECKING:
    import socket

SCHEMA = "bootseer.imports/1"
RECORD = "imports-"
"""Name prefix of the files with records in the folder for them, which `bootseer run` reads at its end."""
KNOWN = "warm.json"
"""File with the records of earlier starts, written by `bootseer run`."""
MAX_BYTES = 1 << 20
VARIABLE = "BOOTSEER_WARM"
PARENT = "warm_parent.py"
NEVER_WHOLE = ("torch", "jax")
"""Packages without which a warm start gains nothing: only single modules of them are left out."""
SNAPSHOT = "snapshot"
"""First argument of a warm parent that is to be dumped, instead of the number of its socket."""
FACTS = "facts.json"
"""File that such a warm parent writes when it is ready: its process id, the variables that imports read, and why it
must not be dumped, if it must not."""
_MAX_FILES = 200
_FLAGS = ("-u",)
_IMPORT = re.compile(rb"(?m)^[ \t]*(?:from\s+([\w.]+)\s+import\b\s*(\((?:[^)#]+|#.*)*|[\w, ]*)|import\s+([\w., ]+))")
_IMPORT_LINE = re.compile(
    rb"^.*(?:^[ \t]*(?:import|from)\s|environ|putenv|unsetenv|dotenv|sys\.(?:path|modules|meta_path|path_hooks|set)"
    rb"|importlib|__import__|setlocale|monkey|ctypes|\bexec\(|\beval\().*$",
    re.MULTILINE,
)
_SETS = re.compile(rb"environ\s*\[[^]]*\]\s*=(?!=)|environ\.(?:setdefault|update|pop|clear)|putenv|unsetenv")
_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")


def parse(argv: Sequence[str]) -> tuple[list[str], str, list[str]] | None:
    """The flags of a Python command line, its program (`train.py`, `-m torch.distributed.run`), and the words from the
    program on. None for a command line without a file or module, or with flags other than `-u`."""
    rest = list(argv[1:])
    flags = []
    while rest and rest[0] in _FLAGS:
        flags.append(rest.pop(0))
    if len(rest) > 1 and rest[0] == "-m":
        return flags, f"-m {rest[1]}", rest
    if rest and not rest[0].startswith("-"):
        return flags, os.path.basename(rest[0]), rest
    return None


def import_lines(main: str, folder: str) -> tuple[str, set[str]]:
    """A digest of the source lines that may change imports, and all words of the lines that set variables.

    Searches the program's file and the modules that it imports, also indirectly, from its own folder or from `folder`.
    Raises `OSError`.
    """
    import hashlib

    digest = hashlib.sha256()
    words: set[str] = set()
    queue = [main]
    is_folder: dict[str, bool] = {}
    """Paths where a module, as `<path>.py`, or package was looked for."""
    for path in queue:
        if len(queue) > _MAX_FILES:
            raise OSError(f"{os.path.basename(path)}: too many modules to be searched for imports")
        status = os.stat(path)
        lines, of_file, names = _search(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))
        digest.update(lines)
        words |= of_file
        for name in names:
            dots = len(name) - len(name.lstrip("."))
            for top in (path.rsplit("/", dots)[0],) if dots else (folder, os.path.dirname(main)):
                base = top
                for part in (name.strip(".") or "__init__").split("."):
                    base = f"{base}/{part}"
                    if base not in is_folder:
                        is_folder[base] = os.path.isdir(base)
                        near = {f"{base}.py", f"{base}/__init__.py"}.difference(queue)
                        queue += filter(os.path.isfile, sorted(near))
                    if not is_folder[base]:
                        break
    return digest.hexdigest(), words


@functools.lru_cache(maxsize=_MAX_FILES)
def _search(path: str, stamp: tuple[int, ...]) -> tuple[bytes, set[str], list[str]]:
    """The lines of a file that may change imports, the words of those that set variables, and the names of the modules
    that it imports. A warm parent searches a file once for all ranks, unless its `stamp` changes."""
    with open(path, "rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise OSError(f"{os.path.basename(path)}: too large to be searched for imports")
    if b"\0" in text:
        raise OSError(f"{os.path.basename(path)}: no Python source, but an archive or compiled")
    lines = _IMPORT_LINE.findall(text)
    words = {word.decode() for line in lines if _SETS.search(line) for word in _WORD.findall(line)}
    names = []
    for package, members, modules in _IMPORT.findall(text):
        names += [package] if package else [module.partition(b" as ")[0].strip() for module in modules.split(b",")]
        # A member may be a module, too.
        names += [b"%s.%s" % (package.rstrip(b".") or package[:-1], name) for name in _WORD.findall(members)]
    return b"".join(line.strip() + b"\n" for line in lines), words, [name.decode() for name in names]


def own_module(folder: str) -> str:
    """Name a module in the folder of a program, which is first in its `sys.path`, that imports of this process found
    elsewhere; empty if there is none. In the program installed packages would import it, too."""
    for entry in os.listdir(folder) if not sys.flags.safe_path else ():
        name, dot, ending = entry.partition(".")
        module = sys.modules.get(name)
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if module is None or name in ("sitecustomize", "usercustomize") or name in sys.builtin_module_names:
            continue
        path = os.path.join(folder, entry)
        has = ending.endswith(("py", "so")) if dot else os.path.isfile(os.path.join(path, "__init__.py"))
        if has and not os.path.realpath(str(origin)).startswith(os.path.realpath(path)):
            return f"{folder} has a module {name} of its own, which the imports found elsewhere"
    return ""


def read_known(folder: str) -> dict[str, Any]:
    """The record of each launcher's program; empty without a readable file."""
    import json

    try:
        with open(os.path.join(folder, KNOWN), "rb") as file:
            text = file.read(4 * MAX_BYTES)
        known = json.loads(text)
        return dict(known["launchers"]) if known["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def read_records(folder: str) -> list[dict[str, Any]]:
    """The records of this start that `bootseer run` has not read yet."""
    import json

    found = []
    for name in sorted(os.listdir(folder)):
        if name.startswith(RECORD) and name.endswith(".json"):
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    record = json.loads(file.read(MAX_BYTES))
                if record["schema"] == SCHEMA:
                    found.append(dict(record))
            except (OSError, ValueError, KeyError, TypeError):  # read and deleted meanwhile
                pass
    return found


def left_out(module: str, cold: Collection[str]) -> str:
    """What imports leave out because of this refused module: when `cold` has another one of its package, all of the
    package, instead of one more module each time."""
    package = module.partition(".")[0]
    is_second = any(name.partition(".")[0] == package for name in cold)
    return package if is_second and package not in NEVER_WHOLE else module


_CHANGED_BY_SHELLS = ("_", "PWD", "OLDPWD", "SHLVL")


def is_own(name: str) -> bool:
    """Whether a variable is `bootseer run`'s, and another one at each start."""
    return name.startswith("BOOTSEER_") or name == "TRACEPARENT"


def start_digest(pid: int, args: Sequence[str], env: Mapping[str, str]) -> str:
    """A digest of how a launcher was started: arguments, environment, and the limits and folder of process `pid`.

    Equal for a command and the launcher that it executes: then it can be started without the command, which may be a
    shell script.
    """
    import hashlib

    variables = {name: value for name, value in env.items() if not is_own(name) and name not in _CHANGED_BY_SHELLS}
    umask, folder = proc.status(pid)["Umask"], proc.link(pid, "cwd")
    whole = (list(args), sorted(variables.items()), proc.read(pid, "limits"), umask, folder)
    return hashlib.sha256(repr(whole).encode("utf-8", "surrogateescape")).hexdigest()


def write_facts(folder: str, facts: Mapping[str, Any]) -> None:
    """Write `FACTS` to a folder. Raises `OSError`."""
    import json

    path = os.path.join(folder, FACTS)
    with open(f"{path}.new", "w") as file:
        json.dump(facts, file)
    os.replace(f"{path}.new", path)


def restart_address(run_id: str, pid: int) -> str:
    """The abstract socket address of `bootseer run --restarts` with this process id, for warm parents. By the id alone
    those of launchers below the command would connect, too; runs of several pods in the host's network may have the
    same process id."""
    return f"\0bootseer-restart-{run_id}-{pid}"


def process_address(pid: int) -> str:
    """The abstract socket address at which this process waits for the warm parent that it restores from a process
    snapshot. Process ids are unique in their namespace only, abstract addresses in that of the network."""
    return f"\0bootseer-process-{os.stat('/proc/self/ns/pid').st_ino}-{pid}"


def connect(address: str, pid: int) -> socket.socket | None:
    """A socket to this process of the same user at an abstract address; None if it does not listen there."""
    import socket

    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.connect(address)
        if peer(end) == (pid, os.getuid()):
            return end
    except OSError:
        pass
    end.close()
    return None


def peer(end: socket.socket) -> tuple[int, int]:
    """Process id and user at the other end of a Unix socket."""
    import socket
    import struct

    pid, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Recorder:
    """Records the imports of a process started by a Python launcher, up to its first use of a device."""

    def __init__(self, folder: str, path: Sequence[str]) -> None:
        """`folder` gets the record; `path` is `sys.path` from before the program's start."""
        self._folder = folder
        self._path = [os.path.join(os.path.abspath(entry), "") for entry in path if entry]
        self._pid = os.getpid()
        self._begun_in = os.getcwd()
        self._early: list[str] | None = None
        self._before_device: list[str] | None = None
        self._launcher = ""
        self._start: list[str] = []
        """The launcher's command line up to its program."""
        self._start_digest = ""
        parent = os.getppid()
        self._above = proc.environment(parent)
        try:
            # The variable excludes `bootseer run`, which is a Python program, too, but no launcher.
            if VARIABLE in self._above and os.readlink(f"/proc/{parent}/exe") == os.readlink("/proc/self/exe"):
                words = [os.fsdecode(word) for word in proc.read(parent, "cmdline").split(b"\0")]
                started = parse(words)
                if started:
                    self._launcher = started[1]
                    self._start = words[: 1 + len(started[0]) + (2 if started[2][0] == "-m" else 1)]
                    self._start_digest = start_digest(parent, words[len(self._start) : -1], self._above)
        except OSError:
            pass

    def groups_begin(self) -> None:
        """Note the imports so far: the process joins a process group next, and may use devices after that."""
        if self._early is None:
            self._early = self._modules()

    def device_begins(self) -> None:
        """Note the imports so far: the process uses a device next. They are recorded if it joins no process group."""
        if self._before_device is None:
            self._before_device = self._modules()

    def write(self) -> None:
        """Write the record, unless another process of the same program did; an event says why it cannot be written.
        Never raises."""
        launcher, self._launcher = self._launcher, ""
        own = parse(sys.orig_argv)
        if launcher and own is not None and os.getpid() == self._pid:
            try:
                name = re.sub(r"[^\w.-]", "_", f"{launcher}-{own[1]}")[:100]
                target = os.path.join(self._folder, f"{RECORD}{name}.json")
                if not os.path.exists(target):
                    self._write(target, launcher, *own)
            except Exception as error:
                from bootseer.hook import warm_launcher

                warm_launcher.emit({"program": own[1], "why_not": f"its imports are not recorded: {error}"})

    def _write(self, target: str, launcher: str, flags: Sequence[str], program: str, rest: Sequence[str]) -> None:
        import json

        is_module = rest[0] == "-m"
        main = sys.modules["__main__"].__file__ if is_module else os.path.join(self._begun_in, rest[0])
        main = os.path.realpath(main or "")
        begun = proc.environment(os.getpid())
        set_above = begun.items() - self._above.items()
        cuda = sys.modules.get("torch.cuda")
        touched = cuda is not None and bool(cuda.is_initialized())
        record = {
            "schema": SCHEMA,
            "launcher": launcher,
            "start": self._start,
            "start_digest": self._start_digest,
            "python": sys.executable,
            "program": program,
            "flags": flags,
            "modules": (self._early or self._before_device or []) if touched else self._modules(),
            "native": {name: value for name, value in set_above if recorded(name)},
            "changed": sorted(name for name in {*begun, *os.environ} if begun.get(name) != os.environ.get(name)),
            "telling": import_lines(main, self._begun_in if is_module else os.path.dirname(main))[0],
            "main": main,
        }
        mine = f"{target}.{os.getpid()}"
        with open(mine, "x") as out:
            json.dump(record, out)
        os.replace(mine, target)

    def _modules(self) -> list[str]:
        """Names of the imported modules, in order, without those from the program's folder or folders that it added."""
        own = os.path.join(os.path.abspath(sys.path[0]), "") if sys.path and sys.path[0] else os.getcwd() + "/"
        names = []
        for name, module in list(sys.modules.items()):
            spec = getattr(module, "__spec__", None)
            origin = str(getattr(spec, "origin", None) or "")
            if spec is None or spec.name != name or name.partition(".")[0] in ("bootseer", "sitecustomize"):
                continue
            place = max((entry for entry in self._path if origin.startswith(entry)), key=len, default="")
            if place and place != own and not (origin.startswith(own) and len(own) > len(place)):
                names.append(name)
        return names


_NATIVE = re.compile(
    r"FSSPEC_|(?!.*(?:TOKEN|SECRET|PASSW|CREDENTIAL|_KEYS?(?:_|$)))"  # NVIDIA_API_KEY: only programs read it
    r"(?:LD_|GLIBC_|MALLOC_|PYTHON|LC_|LANG|TZ$|TZDIR|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|GOTO_|BLIS_|NUMEXPR_|DNNL_"
    r"|ONEDNN_|ATEN_|C10_|TORCH_|PYTORCH_|KINETO_|NPY_|CUDA_MODULE|CUDA_LAUNCH|CUDA_CACHE|NVIDIA_|HSA_|HIP_|TBB"
    r"|OPENSSL_|SSL_|UCX_|FI_|NCCL_|CUBLAS_|CUDNN_|HDF5_|TF_|GRPC_|ARROW_|JE_|TCMALLOC|MIMALLOC|JAX_|XLA_|TQDM_|NETWORKX_)"
)


def native(name: str) -> bool:
    """Whether native libraries may read this variable while they are loaded, without Python's knowledge."""
    return _NATIVE.match(name) is not None


def recorded(name: str) -> bool:
    """Whether the value of this variable may be recorded: a native one that is no secret. fsspec's are the settings of
    storage, among them keys, which it reads when it is imported."""
    return native(name) and not name.startswith("FSSPEC_")


def differing_variable(names: set[str], ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first of `names` and of the variables for native libraries that differs; empty if all are equal."""
    every = names | {name for name in ours.keys() | theirs.keys() if native(name)}
    return next((name for name in sorted(every) if ours.get(name) != theirs.get(name)), "")
