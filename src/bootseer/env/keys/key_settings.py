"""Settings in the key: environment variables, and configuration files of pip, uv and conda.

The key has settings that change what an installer does, and variables named by the setup. Variables that differ between
ranks, nodes or attempts stay out, even if the script names them: with them no start would ever find a snapshot. Secrets
stay out as well: for a secret variable and for `.netrc` (if an index is set) only its presence counts, and addresses
lose their passwords.

Does no I/O.
"""

from __future__ import annotations

import configparser
import hashlib
import posixpath
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.errors import BootseerError
from bootseer.store.addresses import without_credentials

if TYPE_CHECKING:
    from bootseer.env.keys.files import NodeFiles

ALLOWED = frozenset(
    """
    AR AS BLAS_LIBS BLIS_NUM_THREADS CC CFLAGS CMAKE_ARGS CMAKE_BUILD_TYPE CMAKE_GENERATOR CMAKE_PREFIX_PATH
    CMAKE_TOOLCHAIN_FILE CPATH CPLUS_INCLUDE_PATH CPP CPPFLAGS CXX CXXFLAGS C_INCLUDE_PATH DEBIAN_FRONTEND FC FFLAGS
    FORCE_CMAKE FORCE_CUDA HOME LANG LANGUAGE LC_ALL LC_CTYPE LD LDFLAGS LDSHARED LD_LIBRARY_PATH LD_PRELOAD
    LD_RUN_PATH LIBRARY_PATH MAKEFLAGS NVCC NVCC_APPEND_FLAGS NVCC_FLAGS NVCC_PREPEND_FLAGS PATH PKG_CONFIG_LIBDIR
    PKG_CONFIG_PATH PYTORCH_ROCM_ARCH RUSTFLAGS SETUPTOOLS_SCM_PRETEND_VERSION SETUPTOOLS_USE_DISTUTILS
    SETUPTOOLS_ENABLE_FEATURES SKBUILD_CMAKE_ARGS SKBUILD_CONFIGURE_OPTIONS SOURCE_DATE_EPOCH TORCH_CUDA_ARCH_LIST
    TORCH_NVCC_FLAGS TZ USE_CUDA USE_ROCM VIRTUAL_ENV
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
LANGUAGE = frozenset({"LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"})
"""Language and sort order: of the allowed variables, these matter only to scripts."""
ALLOWED_PREFIXES = tuple(
    """
    PIP_ UV_ CONDA_ MAMBA_ POETRY_ PDM_ PIXI_ PYTHON CUDA_ CUDNN_ NVTE_ TORCH_CUDA_ FLASH_ATTENTION_ FLASH_ATTN_
    XFORMERS_ DS_BUILD_ APEX_ SETUPTOOLS_SCM_PRETEND_VERSION_FOR_
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)

_IDENTITY = frozenset(
    """
    RANK LOCAL_RANK NODE_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE
    ROLE_WORLD_SIZE NNODES NUM_NODES MASTER_ADDR MASTER_PORT HOSTNAME HOST HOSTFILE NODE_NAME NODENAME POD_NAME
    POD_UID POD_IP POD_NAMESPACE HOST_IP JOB_ID JOB_NAME JOB_UID RUN_ID TASK_ID ATTEMPT TRACEPARENT TRACESTATE PWD
    OLDPWD SHLVL _ TERM TERM_PROGRAM COLORTERM COLUMNS LINES DISPLAY XAUTHORITY WINDOWID TMPDIR TEMP TMP
    XDG_RUNTIME_DIR XDG_SESSION_ID XDG_CACHE_HOME DBUS_SESSION_BUS_ADDRESS LS_COLORS PS1 PS4 PROMPT_COMMAND MAIL
    EDITOR VISUAL PAGER LESS LESSOPEN LOGNAME HISTFILE CI RANDOM SECONDS LINENO EPOCHSECONDS EPOCHREALTIME PPID
    BASHPID UID EUID GROUPS BASH BASH_SOURCE BASH_VERSION BASH_VERSINFO BASH_ENV BASHOPTS SHELLOPTS BASH_COMMAND
    BASH_LINENO FUNCNAME PIPESTATUS IFS OPTARG OPTIND REPLY DIRSTACK SRANDOM CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER
    CUDA_CACHE_PATH CUDA_CACHE_DISABLE CUDA_CACHE_MAXSIZE CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_MODULE_LOADING CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY MAX_JOBS OMP_NUM_THREADS MKL_NUM_THREADS
    CMAKE_BUILD_PARALLEL_LEVEL ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL
    ZE_AFFINITY_MASK NODE_IP INVOCATION_ID
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
"""Identity of user, terminal and session."""
_INSTALLER_BEHAVIOUR = frozenset(
    """
    PIP_CACHE_DIR PIP_NO_CACHE_DIR PIP_DISABLE_PIP_VERSION_CHECK PIP_DEFAULT_TIMEOUT PIP_TIMEOUT PIP_RETRIES
    PIP_PROGRESS_BAR PIP_LOG PIP_QUIET PIP_VERBOSE PIP_NO_COLOR PIP_NO_INPUT PIP_ROOT_USER_ACTION PIP_CERT
    PIP_CLIENT_CERT PIP_KEYRING_PROVIDER PIP_EXISTS_ACTION PIP_REPORT PIP_NO_PYTHON_VERSION_WARNING
    PIP_RESUME_RETRIES PIP_PROXY UV_CACHE_DIR UV_NO_CACHE UV_CONCURRENT_DOWNLOADS UV_CONCURRENT_BUILDS
    UV_CONCURRENT_INSTALLS UV_NO_PROGRESS UV_HTTP_TIMEOUT UV_REQUEST_TIMEOUT UV_HTTP_RETRIES UV_NATIVE_TLS
    UV_SYSTEM_CERTS UV_INSECURE_HOST UV_KEYRING_PROVIDER UV_QUIET UV_NO_WRAP UV_PREVIEW UV_LOCK_TIMEOUT
    UV_STACK_SIZE UV_LOG_CONTEXT UV_OFFLINE UV_LINK_MODE PYTHONUNBUFFERED PYTHONFAULTHANDLER PYTHONSTARTUP
    PYTHONBREAKPOINT PYTHONHISTFILE PYTHON_HISTORY PYTHON_COLORS PYTHON_BASIC_REPL PYTHONPYCACHEPREFIX
    PYTHONTRACEMALLOC PYTHONPROFILEIMPORTTIME PYTHONASYNCIODEBUG PYTHONINSPECT PYTHONDEBUG PYTHONVERBOSE CONDA_SHLVL
    CONDA_PROMPT_MODIFIER CONDA_CHANGEPS1 CONDA_PKGS_DIRS CONDA_PREFIX_1 CONDA_REPORT_ERRORS CONDA_QUIET
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
"""Output, waiting and caching of installers."""
_IRRELEVANT_PREFIXES = tuple(
    """
    SLURM_ SLURMD_ PMI_ PMIX_ OMPI_ PRTE_ HYDRA_ MPI_ PBS_ LSB_ SGE_ FLUX_ PALS_ PET_ TORCHELASTIC_ TORCHX_
    SKYPILOT_ KUBERNETES_ RAY_ VC_ JOB_COMPLETION_ BATCH_ AWS_BATCH_ BOOTSEER_ SSH_ OTEL_ NCCL_ GLOO_ WANDB_
    MLFLOW_ VSCODE_ TMUX STY BASH_FUNC_
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
_NUMBERED = re.compile(
    r"_PORT$|_PORT_|_SERVICE_HOST$|^PORT$|_(?:HOST|NODE|POD)_?(?:NAME|IP)$|_RANK$|_PROXY$", re.IGNORECASE
)
_SECRET_WORDS = frozenset(
    """
    TOKEN TOKENS SECRET SECRETS PASSWORD PASSWD PASS PASSPHRASE PWD PAT KEY KEYS APIKEY CREDENTIAL CREDENTIALS AUTH
    AUTHORIZATION COOKIE JWT NETRC
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
_LISTS = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PKG_CONFIG_PATH"})
_HOOK = "/hook/path"


class Variables(NamedTuple):
    """`values` go into the key by name; `notes` describe what was left out."""

    values: dict[str, str]
    notes: tuple[str, ...]


def looks_secret(name: str) -> bool:
    """Whether a variable of this name is treated as a secret."""
    called = name.upper().replace("TOKENIZER", "")  # its tokens are no secrets
    return bool(_SECRET_WORDS.intersection(called.split("_"))) or "TOKEN" in called or "PASSWORD" in called


def is_irrelevant(name: str) -> bool:
    """Whether a variable differs between ranks, nodes and attempts, or only affects an installer's output."""
    return (
        name in _IDENTITY
        or name in _INSTALLER_BEHAVIOUR
        or (name.startswith(_IRRELEVANT_PREFIXES) and not name.endswith("_VERSION"))  # `libnccl2=$NCCL_VERSION`
        or bool(_NUMBERED.search(name))
    )


def is_allowed(name: str) -> bool:
    """Whether a variable is in every key, named by the setup or not."""
    return (name in ALLOWED or name.startswith(ALLOWED_PREFIXES)) and not is_irrelevant(name)


def choose_variables(
    env: Mapping[str, str], *, referenced: Iterable[str] = (), declared: Iterable[str] = ()
) -> Variables:
    """The variables of `env` that are part of the key: allowed ones, those `referenced` by the script, and those
    `declared` by the user, which always count."""
    declared = set(declared)
    # A list with only our hook is not set in a start without the hook.
    env = {name: value for name, value in env.items() if name not in _LISTS or search_path(value)}
    wanted = {name for name in env if is_allowed(name)} | declared | {*referenced}
    values: dict[str, str] = {}
    left_out = []
    for name in sorted(wanted):
        if name not in declared and is_irrelevant(name):
            left_out.append(name)
        elif name not in env:
            # Being unset is a value of those that the user declares or a requirement file names.
            values[name] = "not set"
        elif looks_secret(name):
            values[name] = "set, a secret"
        else:
            values[name] = _value(name, env[name], known=is_allowed(name))
    secret = [name for name, value in values.items() if value == "set, a secret"]
    notes = []
    if left_out:
        notes.append(f"named by the setup, but different on each node, so not in the key: {', '.join(left_out)}")
    if secret:
        notes.append(f"look like secrets, only their presence counts: {', '.join(secret)}")
    return Variables(values, tuple(notes))


def search_path(value: str) -> str:
    """A list of folders without BootSeer's hook, which is not in every start."""
    return ":".join(word for word in value.split(":") if not (word.rstrip("/").endswith(_HOOK) and "bootseer" in word))


def _value(name: str, value: str, *, known: bool) -> str:
    text = search_path(value) if name in _LISTS else value
    text = without_credentials(text)
    if known:
        return f"={text}"
    # An unknown name may be a secret: the key must change with its value without showing it.
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"


class Configuration(NamedTuple):
    """`lines` are part of the key, in order. `files` were read for them, including those without settings for
    installers: of a `pyproject.toml` above the working folder, uv and pip read no more than we do."""

    lines: tuple[str, ...]
    files: tuple[str, ...]
    find_links: tuple[str, ...]
    """Local folders searched for distributions."""
    requirement_files: tuple[tuple[str, bool], ...]
    """Files and addresses that pip's configuration names; True for constraint files."""
    problems: tuple[str, ...]


def configuration(env: Mapping[str, str], cwd: str, prefix: str, files: NodeFiles) -> Configuration:
    """The relevant settings in configuration files. `prefix` is that of the job's Python, or empty."""
    home = env.get("HOME", "")
    lines: list[str] = []
    read: list[str] = []
    problems: list[str] = []
    links: list[str] = []
    asked: list[tuple[str, bool]] = []
    for path, reader in _places(env, cwd, home, prefix, lambda path: files.kind(path) == "file"):
        if files.kind(path) != "file":
            continue
        try:
            found = list(reader(files.read(path), posixpath.basename(path)))
        except BootseerError as error:
            problems.append(str(error))
            continue
        read.append(path)
        for section, name, value in found:
            lines.append(f"{section} {name} = {without_credentials(value)}")
            if name == "find-links":
                links += [word.removeprefix("file://") for word in value.split()]
            elif section.startswith("pip ") and name in ("requirement", "constraint", "build-constraint"):
                asked += [
                    (word, name != "requirement")
                    for word in value.split()
                    if "://" in word or files.kind(posixpath.join(cwd, word)) == "file"
                ]
    named = [*env.get("PIP_FIND_LINKS", "").split(), *env.get("UV_FIND_LINKS", "").replace(",", " ").split()]
    links += [word.removeprefix("file://") for word in named]
    netrc = env.get("NETRC") or f"{home}/.netrc"
    names = [name.lower().replace("_", "-") for name, value in env.items() if value]
    indexes = any("index" in words and "no-index" not in words for words in (*(line.lower() for line in lines), *names))
    if indexes and files.kind(netrc) == "file":  # without it, an index may report that a package does not exist
        lines.append("netrc is there")
    places = (posixpath.join(cwd, re.sub(r"^~(?=/)", lambda _: home, word)) for word in links)
    folders = tuple(dict.fromkeys(path for path in places if files.kind(path) == "folder"))
    return Configuration(tuple(lines), tuple(read), folders, tuple(asked), tuple(problems))


def pip_files(
    env: Mapping[str, str], cwd: str, home: str, prefix: str, is_file: Callable[[str], bool]
) -> Iterator[str]:
    """pip's configuration files, in order of increasing precedence: global, of the user, of the environment with this
    `prefix` (or empty), and the one in PIP_CONFIG_FILE, which replaces the user's."""
    own = env.get("PIP_CONFIG_FILE", "")
    if own == "/dev/null":
        return
    named = posixpath.join(cwd, own) if own else ""
    for folder in filter(None, (env.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")):
        yield f"{folder}/pip/pip.conf"
    yield "/etc/pip.conf"
    if home and not (named and is_file(named)):
        yield f"{home}/.pip/pip.conf"
        yield f"{env.get('XDG_CONFIG_HOME') or f'{home}/.config'}/pip/pip.conf"
    if prefix:
        yield f"{prefix}/pip.conf"
    if named:
        yield named


def _places(
    env: Mapping[str, str], cwd: str, home: str, prefix: str, is_file: Callable[[str], bool]
) -> Iterator[tuple[str, Any]]:
    """Configuration files and the program that reads them."""
    config = env.get("XDG_CONFIG_HOME") or f"{home}/.config"
    for path in pip_files(env, cwd, home, prefix, is_file):
        yield path, _pip
    if env.get("UV_NO_CONFIG", "") in ("", "0", "false"):
        if env.get("UV_CONFIG_FILE"):
            yield posixpath.join(cwd, env["UV_CONFIG_FILE"]), _uv
        else:
            yield "/etc/uv/uv.toml", _uv
            yield f"{config}/uv/uv.toml", _uv
            folder = cwd
            for _ in range(40):  # uv takes the first one on the way up
                yield f"{folder}/uv.toml", _uv
                yield f"{folder}/pyproject.toml", _uv
                if folder == "/":
                    break
                folder = posixpath.dirname(folder)
    root = posixpath.dirname(posixpath.dirname(env.get("CONDA_EXE", "")))
    folders = ("/etc/conda", root, f"{config}/conda", f"{home}/.conda", home, env.get("CONDA_PREFIX"))
    places = [f"{folder}/{name}" for folder in folders if folder for name in ("condarc", ".condarc")]
    for path in dict.fromkeys((*places, env.get("CONDARC", ""))):
        if path:
            yield path, _conda
    yield f"{home}/.pydistutils.cfg", _pip


def _pip(data: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(data.decode("utf-8-sig", "replace"))
    except configparser.Error:
        yield "pip", "unreadable", "yes"
        return
    for section in parser.sections():
        for option, value in parser.items(section):
            key = option.replace("_", "-")
            if not is_irrelevant(f"PIP_{key.replace('-', '_').upper()}"):
                shown = "a secret" if looks_secret(key.replace("-", "_")) else " ".join(value.split())
                yield f"pip {section}", key, shown


def _uv(data: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    try:
        found: Any = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        yield "uv", "unreadable", "yes"
        return
    if name == "pyproject.toml":
        tool = found.get("tool")
        found = tool.get("uv") if isinstance(tool, dict) else None
    if isinstance(found, dict):
        for key, value in _flat(found, "", 0):
            if not is_irrelevant(f"UV_{key.rpartition('.')[2].replace('-', '_').upper()}"):
                yield "uv", key, value


def _flat(value: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and depth < 8:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list) and depth < 8:
        for item in value:
            yield from _flat(item, name, depth + 1)
    elif looks_secret(name.rpartition(".")[2].replace("-", "_")):
        yield name, "a secret"
    else:
        yield name, str(value)


def _conda(data: bytes, name: str) -> Iterator[tuple[str, str, str]]:
    """Its lines without comments: YAML in which the order of channels matters."""
    for line in data.decode("utf-8", "replace").splitlines():
        text = line.partition(" #")[0].rstrip()
        if text and not text.startswith("#"):
            key = text.partition(":")[0].strip(" -")
            yield "conda", key, "a secret" if looks_secret(key) else text.strip()
