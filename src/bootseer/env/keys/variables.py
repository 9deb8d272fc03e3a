"""Which environment variables are in the key: those that change what an installer does, and those the setup names.

Everything that tells one rank, node or attempt from another stays out, even when the script names it: with them in the
key no start would ever find a snapshot. Secrets stay out too; only that they are set counts. Decides and touches
nothing; called by `request_key`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.store.addresses import without_credentials

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
"""How programs talk and sort: of those that are allowed, what matters to scripts alone."""
ALLOWED_PREFIXES = (
    *(
        "PIP_",
        "UV_",
        "CONDA_",
        "MAMBA_",
        "POETRY_",
        "PDM_",
        "PIXI_",
        "PYTHON",
        "CUDA_",
        "CUDNN_",
        "NVTE_",
        "TORCH_CUDA_",
    ),
    *("FLASH_ATTENTION_", "FLASH_ATTN_", "XFORMERS_", "DS_BUILD_", "APEX_", "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_"),
)

_PLACES = frozenset(
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
    CMAKE_BUILD_PARALLEL_LEVEL
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
"""Who runs this, and where it shows."""
_MANNERS = frozenset(
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
"""How an installer talks, waits and caches."""
_IRRELEVANT_PREFIXES = (
    *(
        "SLURM_",
        "SLURMD_",
        "PMI_",
        "PMIX_",
        "OMPI_",
        "PRTE_",
        "HYDRA_",
        "MPI_",
        "PBS_",
        "LSB_",
        "SGE_",
        "FLUX_",
        "PALS_",
    ),
    *(
        "PET_",
        "TORCHELASTIC_",
        "TORCHX_",
        "SKYPILOT_",
        "KUBERNETES_",
        "RAY_",
        "VC_",
        "JOB_COMPLETION_",
        "BATCH_",
        "AWS_BATCH_",
    ),
    *("BOOTSEER_", "SSH_", "OTEL_", "NCCL_", "GLOO_", "WANDB_", "MLFLOW_", "VSCODE_", "TMUX", "STY", "BASH_FUNC_"),
)
_NUMBERED = re.compile(
    r"_PORT$|_PORT_|_SERVICE_HOST$|^PORT$|_(?:HOST|NODE|POD)_?(?:NAME|IP)$|_RANK$|_PROXY$", re.IGNORECASE
)
_SECRET_WORDS = frozenset(
    """
    TOKEN TOKENS SECRET SECRETS PASSWORD PASSWD PASS PASSPHRASE PWD PAT KEY KEYS APIKEY CREDENTIAL CREDENTIALS AUTH
    AUTHORIZATION COOKIE NETRC
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
_LISTS = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "PKG_CONFIG_PATH"})
_HOOK = "/hook/path"


class Variables(NamedTuple):
    """`values` go into the key by name; `notes` are words about what was left out."""

    values: dict[str, str]
    notes: tuple[str, ...]


def looks_secret(name: str) -> bool:
    """Whether a variable of this name is taken for a secret."""
    called = name.upper().replace("TOKENIZER", "")  # those make other tokens
    return bool(_SECRET_WORDS.intersection(called.split("_"))) or "TOKEN" in called or "PASSWORD" in called


def is_irrelevant(name: str) -> bool:
    """Whether it tells ranks, nodes and attempts apart, or only how an installer talks."""
    return name in _PLACES or name in _MANNERS or name.startswith(_IRRELEVANT_PREFIXES) or bool(_NUMBERED.search(name))


def is_allowed(name: str) -> bool:
    """Whether it is in every key, named by the setup or not."""
    return (name in ALLOWED or name.startswith(ALLOWED_PREFIXES)) and not is_irrelevant(name)


def choose(
    env: Mapping[str, str],
    *,
    referenced: Iterable[str] = (),
    declared: Iterable[str] = (),
    assigned: Iterable[str] = (),
) -> Variables:
    """The variables of `env` that are in the key.

    `referenced` are those the script names, `declared` those the user names (they count whatever they are called);
    `assigned` are set by the script before it could read them.
    """
    declared, referenced, assigned = set(declared), set(referenced), set(assigned)
    # A list with nothing but our hook in it is not there in a start without the hook.
    env = {name: value for name, value in env.items() if name not in _LISTS or search_path(value)}
    wanted = {name for name in env if is_allowed(name)} | declared | (referenced - assigned)
    values: dict[str, str] = {}
    left_out = []
    for name in sorted(wanted):
        if name not in declared and is_irrelevant(name):
            left_out.append(name)
        elif name not in env:
            # That it is not set is a value: `${CUDA:-12.4}` depends on it.
            values[name] = "not set"
        elif looks_secret(name):
            values[name] = "set, a secret"
        else:
            values[name] = _value(name, env[name], told=is_allowed(name))
    secret = [name for name, value in values.items() if value == "set, a secret"]
    notes = []
    if left_out:
        notes.append(f"named by the setup, but different on each node, so not in the key: {', '.join(left_out)}")
    if secret:
        notes.append(f"look like secrets, only their presence counts: {', '.join(secret)}")
    return Variables(values, tuple(notes))


def search_path(value: str) -> str:
    """A list of folders without BootSeer's own hook, which is not there in every start."""
    return ":".join(word for word in value.split(":") if not (word.rstrip("/").endswith(_HOOK) and "bootseer" in word))


def _value(name: str, value: str, *, told: bool) -> str:
    text = search_path(value) if name in _LISTS else value
    text = without_credentials(text)
    if told:
        return f"={text}"
    # A name that is not known to be harmless: the key needs to see a change, nobody needs to see the value.
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"
