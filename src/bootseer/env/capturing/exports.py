"""What a setup script leaves in its environment, so that the job gets it without the script being run again.

A script cannot change the environment of the process that started it. But a setup that has `export` or `activate`
means the job, and so the job gets it: after the script ran as well as after a restore, by the same rules. Kept is the
difference and not the environment: `PATH=/x:$PATH` becomes "/x stands before". Secrets and what differs between nodes
are not kept but reported: such a setup is not snapshot-safe.

A shell writes its environment down when the script ends, without the script noticing. Bash reads the file that
BASH_ENV names before a script, so that our trap is there before the script's first line. A script that sets a trap for
its own end would take ours away: where its text says so, `trap` becomes a function that keeps both. Other shells get
the trap by `-c`, and read the script from there: `$0`, arguments, standard input and exit code are what they were.
What the hook runs is built into the shell (for sh: one `env`), so that a setup that breaks PATH cannot break it, and a
hook that fails changes nothing. Programs that are not shell scripts leave nothing behind.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.env.document import Export
from bootseer.env.keys.settings import search_path

OUTPUT = "environment"
"""The file that the script writes: `NAME=value` and a zero byte for each variable, and one more zero byte."""
_HOOK = "hook.bash"
_OTHER_SHELLS = ("sh", "dash", "ash")
_MAX_SCRIPT = 1 << 20
_SETS_TRAP = re.compile(r"\btrap\b[^\n]*\b(EXIT|exit|0)\b")
# These a function cannot set for its caller once they are set.
_SETS_OTHER_TRAP = re.compile(r"\btrap\b[^\n]*\b(ERR|DEBUG|RETURN)\b")

# `A && :` keeps the status of A and never ends a script that runs with `set -e`.
_BASH_HOOK = """\
__bootseer_tell() {{
    {{
        local - __bootseer_name IFS=$'\\n'
        set +eux
    }} 2>/dev/null
    if [[ $BASHPID = "$$" ]]; then
        {{
            for __bootseer_name in $(builtin compgen -e); do
                if [[ -n ${{!__bootseer_name+x}} ]]; then
                    builtin printf '%s=%s\\0' "$__bootseer_name" "${{!__bootseer_name}}"
                fi
            done
            builtin printf '\\0'
        }} >| {output}
    fi 2>/dev/null
    return "$1"
}}
builtin trap '__bootseer_tell "$?" && :' EXIT
"""
_TRAP_FUNCTION = """\
trap() {
    builtin trap "$@" || return
    [[ ${1-} != -- ]] || shift
    case $#:${1-} in
        0:* | *:-[lpP]*) return 0 ;;
        1:*) set -- - "$1" ;;
    esac
    local __bootseer_action=$1 __bootseer_signal
    [[ $1 != - ]] || __bootseer_action=
    shift
    for __bootseer_signal in "$@"; do
        case $__bootseer_signal in
            0 | [Ee][Xx][Ii][Tt] | [Ss][Ii][Gg][Ee][Xx][Ii][Tt])
                builtin trap '__bootseer_tell "$?" && :'$'\\n'"$__bootseer_action" EXIT
                ;;
        esac
    done
}
"""
_SH = "{{ command -p env -0 && printf '\\000'; }} >| {output} 2>/dev/null"


def command(script: str, folder: Path, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """How to run a script so that it tells its environment: the words of the command, and variables to add to `env`.

    It runs as it would without: an executable file by its own interpreter, any other by bash, or sh where there is
    none. Arguments may be appended. `folder` exists; two files are written there, by us and by the script, so it must
    be the same folder outside and inside a capture. Raises `OSError`.
    """
    head = _head(script)
    line = _line(head)
    if os.access(script, os.X_OK):
        words, shell = [str(Path(script).absolute())], _shell(line)
        if b"\0" in head or (line and shell not in ("bash", *_OTHER_SHELLS)):
            return words, {}
    else:
        bash = shutil.which("bash", path=env.get("PATH"))
        words, shell, line = [bash or "/bin/sh", script], "bash" if bash else "", []
    (folder / OUTPUT).touch(mode=0o600)  # where there is no room for it, that is known now
    if shell == "bash":
        hook = folder / _HOOK
        hook.write_text(_hook(head, folder / OUTPUT, env.get("BASH_ENV", "")), errors="surrogateescape")
        return words, {"BASH_ENV": str(hook)}
    # A script that names no interpreter is given to sh, by shells as by our launcher.
    trap = shlex.quote(_SH.format(output=shlex.quote(str(folder / OUTPUT))))
    # The dot of a shell would look for a plain name on PATH.
    name = words[-1] if "/" in words[-1] else f"./{words[-1]}"
    return [*(line or ["/bin/sh"]), "-c", f'trap {trap} EXIT; . "$0"', name], {}


def _hook(head: bytes, output: Path, bash_env: str) -> str:
    text = head.decode("utf-8", "replace")
    hook = _BASH_HOOK.format(output=shlex.quote(str(output)))
    if _SETS_TRAP.search(text) and not _SETS_OTHER_TRAP.search(text):
        hook += _TRAP_FUNCTION
    if not bash_env:
        return f"{hook}unset BASH_ENV\n"
    # Bash expands the value and reads the file, if there is one.
    file = '"' + bash_env.replace('"', '\\"') + '"'
    return f"{hook}export BASH_ENV={shlex.quote(bash_env)}\nif [[ -r {file} ]]; then . {file}; fi\n"


def _line(head: bytes) -> list[str]:
    """The interpreter that a script names and what it gives it, as the kernel has it: one string."""
    if not head.startswith(b"#!"):
        return []
    return os.fsdecode(head[2:].partition(b"\n")[0]).strip().split(None, 1)


def _shell(line: list[str]) -> str:
    """The name of the interpreter on that line; behind `env` the first word that is no option or variable."""
    if line and Path(line[0]).name == "env":
        given = " ".join(line[1:]).split()
        line = [word for word in given if not word.startswith("-") and "=" not in word]
    return Path(line[0]).name if line else ""


def _head(script: str) -> bytes:
    with Path(script).open("rb") as file:
        return file.read(_MAX_SCRIPT)


MAX_BYTES = 4 << 20
_MAX_VALUE = 128 << 10  # the kernel takes no longer string of an environment
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
# Of shells and terminals, not of the job; `activate` changes some of them.
_OF_SHELL = frozenset((
    "_", "PWD", "OLDPWD", "SHLVL", "PS0", "PS1", "PS2", "PS3", "PS4", "PROMPT_COMMAND", "PROMPT_DIRTRIM", "COLUMNS",
    "LINES", "OPTIND", "OPTERR", "OPTARG", "IFS", "RANDOM", "SECONDS", "LINENO", "PPID", "UID", "EUID", "SHELLOPTS",
    "HISTFILE", "HISTSIZE", "HISTFILESIZE", "HISTCONTROL", "TERM", "TERM_PROGRAM", "COLORTERM", "LS_COLORS", "MAIL",
    "MAILCHECK", "VIRTUAL_ENV_PROMPT", "CONDA_PROMPT_MODIFIER", "DIRSTACK", "FUNCNAME", "PIPESTATUS", "TRACEPARENT",
    "TRACESTATE",
))  # fmt: skip
_OF_SHELL_PREFIXES = ("BASH", "_OLD_", "BOOTSEER_", "_CE_", "__")
# What a node, a rank or an attempt is called.
_OF_NODE = re.compile(
    r"(LOCAL_|NODE_|GROUP_|GLOBAL_)?RANK|MASTER_(ADDR|PORT)|HOST|HOSTNAME|(HOST|POD|NODE|MY)_(IP|NAME|ADDR|HOSTNAME)|POD_UID"
    r"|SLURM_(NODEID|PROCID|LOCALID|JOB_ID|NODELIST|JOB_NODELIST)|DBUS_SESSION_BUS_ADDRESS|SSH_(AUTH_SOCK|AGENT_PID)"
    r"|GPG_AGENT_INFO|CUDA_VISIBLE_DEVICES|DISPLAY"
)
_MIN_WORD = 4


@dataclass(frozen=True, slots=True)
class Left:
    """What a script left in its environment."""

    exports: tuple[Export, ...]
    """By name; a variable that got something on both sides has two."""
    unsafe: tuple[str, ...]
    """Why it is not snapshot-safe, for people; empty when it is."""


NOTHING = Left((), ())


def read(folder: Path, before: Mapping[str, str], *, node_words: Iterable[str] = ()) -> Left:
    """What the script left. `folder` as for `command`, `before` the whole environment that it was started with.

    `node_words` are names and addresses of this node: a value that holds one is wrong elsewhere. Nothing where the
    script has reported nothing: it was killed, became another program by `exec`, or is not a shell script.
    """
    try:
        with (folder / OUTPUT).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError:
        return NOTHING
    if len(data) > MAX_BYTES:
        return Left((), (f"its environment has more than {MAX_BYTES >> 20} MiB",))
    entries, whole, _ = data.partition(b"\0\0")
    if not whole:
        return NOTHING
    after = {}
    for entry in entries.split(b"\0"):
        name, equals, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if equals:
            after[name] = value
    return difference(before, after, node_words=node_words)


def difference(before: Mapping[str, str], after: Mapping[str, str], *, node_words: Iterable[str] = ()) -> Left:
    """The same from the two environments. Pure."""
    words = _patterns(node_words)
    exports: list[Export] = []
    unsafe = []
    for name in sorted({*before, *after}):
        if not _NAME.fullmatch(name) or name in _OF_SHELL or name.startswith(_OF_SHELL_PREFIXES):
            continue
        if before.get(name) == after.get(name):
            continue
        if name not in after:
            exports.append(Export(name, "unset"))
            continue
        found = list(_change(name, before.get(name, ""), after[name]))
        reason = next((why for export in found if (why := _why_not(export, words))), "")
        if reason:
            unsafe.append(f"it exports {name}, {reason}")
        else:
            exports += found
    return Left(tuple(exports), tuple(unsafe))


def apply(exports: Iterable[Export], env: Mapping[str, str]) -> dict[str, str]:
    """The environment `env` with what a setup left in its own. Pure."""
    result = dict(env)
    for export in exports:
        present = result.get(export.name, "")
        if export.kind == "unset":
            result.pop(export.name, None)
        elif export.kind == "set" or not present:
            result[export.name] = export.value
        else:
            pair = (export.value, present) if export.kind == "prepend" else (present, export.value)
            result[export.name] = ":".join(pair)
    return result


def _change(name: str, old: str, new: str) -> Iterator[Export]:
    """`new` as what was put around `old`, where it was."""
    if old and new.startswith(f"{old}:"):
        yield Export(name, "append", new[len(old) + 1 :])
    elif old and new.endswith(f":{old}"):
        yield Export(name, "prepend", new[: -len(old) - 1])
    elif old and (found := new.find(f":{old}:")) != -1:
        yield Export(name, "prepend", new[:found])
        yield Export(name, "append", new[found + len(old) + 2 :])
    else:
        yield Export(name, "set", search_path(new))


def why_not_kept(value: str, node_words: Iterable[str] = ()) -> str:
    """Why a text that the setup chose is of no use on another node, or no other's business; empty when it is kept."""
    return _why_not(Export("value", "set", value), _patterns(node_words))


def _patterns(node_words: Iterable[str]) -> list[re.Pattern[str]]:
    return [re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-])") for word in node_words if len(word) >= _MIN_WORD]


def _why_not(export: Export, words: Sequence[re.Pattern[str]]) -> str:
    """Why an export is not kept; empty when it is."""
    from bootseer.env.capturing.leftovers import is_made_by_chance
    from bootseer.env.capturing.secrets import is_secret_variable

    if is_secret_variable(export.name, export.value):
        return "which looks like a secret"
    if _OF_NODE.fullmatch(export.name):
        return "which differs between nodes"
    if any(word.search(export.value) for word in words):
        return "which holds a name or an address of this node"
    if any(is_made_by_chance(part) for part in export.value.split(":")):
        return f"whose value is a scratch file with a name made by chance ({export.value})"
    if len(export.value) > _MAX_VALUE:
        return "which is too long"
    return ""
