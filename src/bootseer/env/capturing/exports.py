"""Environment variables that a setup script exports, so that the job gets them without the script being run again.

A script cannot change the environment of its parent process. But `export` or `activate` in a setup is meant for the
job, so the job gets the exports, after the script as well as after a restore, by the same rules. They are recorded as
changes: `PATH=/x:$PATH` becomes "prepend /x". Secrets and node-specific values are not recorded but reported: such a
setup is not snapshot-safe.

How they are found: the shell writes its environment to a file in an EXIT trap, invisibly for the script.

- Bash reads the file in BASH_ENV before a script, so that the trap is set before the script's first line. If the
  script sets an EXIT trap, or sources a file that may do so, `trap` is made a function that keeps both.
- Other shells get the trap by `-c` and source the script; `$0`, arguments, standard input and exit code stay the same.
- The hook uses only shell builtins (for sh: one `env`), so that a setup that breaks PATH does not break it. A failing
  hook has no effect. Programs that are not shell scripts export nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.env.document import MAX_TEXT, Export
from bootseer.env.keys.key_settings import search_path

OUTPUT = "environment"
"""The file that the hook writes: `NAME=value` and a zero byte for each variable, then one more zero byte."""
_HOOK = "hook.bash"
_OTHER_SHELLS = ("sh", "dash", "ash")
_MAX_SCRIPT = 1 << 20
_MAY_SET_TRAP = re.compile(r"\btrap\b[^\n]*\b(EXIT|exit|0)\b|(^|[;&|\s])(source|\.)[ \t]", re.MULTILINE)
# A function cannot change these traps for its caller.
_SETS_OTHER_TRAP = re.compile(r"\btrap\b[^\n]*\b(ERR|DEBUG|RETURN)\b")

# `A && :` keeps the status of A and does not end a script with `set -e`. In subshells `$BASHPID` differs from `$$`:
# what they export does not reach the script, so they must not write the file.
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


def capture_command(script: str, folder: Path, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command that runs a script and records its environment, and variables to add to `env`.

    An executable file is run by its own interpreter, any other by bash, or by sh where there is no bash. Arguments may
    be appended. `folder` must exist, and be the same folder outside and inside a capture: the hook and its output are
    written there. Raises `OSError`.
    """
    with Path(script).open("rb") as file:
        head = file.read(_MAX_SCRIPT)
    # The interpreter, and its argument: one string, as the kernel passes it.
    line = os.fsdecode(head[2:].partition(b"\n")[0]).strip().split(None, 1) if head.startswith(b"#!") else []
    if os.access(script, os.X_OK):
        words, shell = [str(Path(script).absolute())], _shell_name(line)
        if b"\0" in head or (line and shell not in ("bash", *_OTHER_SHELLS)):
            return words, {}
    else:
        bash = shutil.which("bash", path=env.get("PATH"))
        words, shell, line = [bash or "/bin/sh", script], "bash" if bash else "", []
    (folder / OUTPUT).touch(mode=0o600)  # fail early if the folder is not writable
    if shell == "bash":
        hook = folder / _HOOK
        hook.write_text(_hook(head, folder / OUTPUT, env.get("BASH_ENV", "")), errors="surrogateescape")
        return words, {"BASH_ENV": str(hook)}
    # A script without an interpreter line is run by sh, as shells and the launcher do.
    trap = shlex.quote(_SH.format(output=shlex.quote(str(folder / OUTPUT))))
    # The shell's `.` would search PATH for a plain name.
    name = words[-1] if "/" in words[-1] else f"./{words[-1]}"
    return [*(line or ["/bin/sh"]), "-c", f'trap {trap} EXIT; . "$0"', name], {}


def _hook(head: bytes, output: Path, bash_env: str) -> str:
    text = head.decode("utf-8", "replace")
    hook = _BASH_HOOK.format(output=shlex.quote(str(output)))
    if _MAY_SET_TRAP.search(text) and not _SETS_OTHER_TRAP.search(text):
        hook += _TRAP_FUNCTION
    if not bash_env:
        return f"{hook}unset BASH_ENV\n"
    # Bash expands the value and reads the file, if there is one.
    file = '"' + bash_env.replace('"', '\\"') + '"'
    return f"{hook}export BASH_ENV={shlex.quote(bash_env)}\nif [[ -r {file} ]]; then . {file}; fi\n"


def _shell_name(line: list[str]) -> str:
    """The name of the interpreter; after `env`, the first word that is neither an option nor an assignment."""
    if line and Path(line[0]).name == "env":
        given = " ".join(line[1:]).split()
        line = [word for word in given if not word.startswith("-") and "=" not in word]
    return Path(line[0]).name if line else ""


MAX_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
# Variables of shells and terminals, some of which `activate` changes.
_SHELL_VARIABLES = frozenset((
    "_", "PWD", "OLDPWD", "SHLVL", "PS0", "PS1", "PS2", "PS3", "PS4", "PROMPT_COMMAND", "PROMPT_DIRTRIM", "COLUMNS",
    "LINES", "OPTIND", "OPTERR", "OPTARG", "IFS", "RANDOM", "SECONDS", "LINENO", "PPID", "UID", "EUID", "SHELLOPTS",
    "HISTFILE", "HISTSIZE", "HISTFILESIZE", "HISTCONTROL", "TERM", "TERM_PROGRAM", "COLORTERM", "LS_COLORS", "MAIL",
    "MAILCHECK", "VIRTUAL_ENV_PROMPT", "CONDA_PROMPT_MODIFIER", "DIRSTACK", "FUNCNAME", "PIPESTATUS", "TRACEPARENT",
    "TRACESTATE",
))  # fmt: skip
_SHELL_PREFIXES = ("BASH", "_OLD_", "BOOTSEER_", "_CE_", "__")
# Names and addresses of a node, a rank or an attempt.
_NODE_VARIABLE = re.compile(
    r"(LOCAL_|NODE_|GROUP_|GLOBAL_)?RANK|MASTER_(ADDR|PORT)|HOST|HOSTNAME|(HOST|POD|NODE|MY)_(IP|NAME|ADDR|HOSTNAME)|POD_UID"
    r"|SLURM_(NODEID|PROCID|LOCALID|JOB_ID|NODELIST|JOB_NODELIST)|DBUS_SESSION_BUS_ADDRESS|SSH_(AUTH_SOCK|AGENT_PID)"
    r"|GPG_AGENT_INFO|CUDA_VISIBLE_DEVICES|DISPLAY"
)
_MIN_WORD = 4
# Not `localhost`, 127.0.0.1 or 29500, which any repository may contain.
_DISTINCT = re.compile(r"[A-Za-z].*\d|\d.*[A-Za-z]|\d{6}")


@dataclass(frozen=True, slots=True)
class ExportDiff:
    """The changes of a script to its environment."""

    exports: tuple[Export, ...]
    """Sorted by name; a variable that was extended on both sides has two."""
    unsafe: tuple[str, ...]
    """Reasons why the setup is not snapshot-safe."""


def read_exports(folder: Path, before: Mapping[str, str], *, node_words: Iterable[str] = ()) -> ExportDiff:
    """The exports of a script that has ended. `folder` as for `capture_command`, `before` its whole initial
    environment.

    `node_words` are names and addresses of this node: a value that contains one is wrong elsewhere. Empty if the hook
    has not run: the script was killed, called `exec`, or is not a shell script.
    """
    try:
        # An image's programs can write to the folder: a link would lead to a file of the host, a pipe hold this up.
        opened = os.open(folder / OUTPUT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as file:
            data = file.read(MAX_BYTES + 1) or b""
    except OSError:
        return ExportDiff((), ())
    if len(data) > MAX_BYTES:
        return ExportDiff((), (f"its environment has more than {MAX_BYTES >> 20} MiB",))
    entries, whole, _ = data.partition(b"\0\0")
    if not whole:
        return ExportDiff((), ())
    after = {}
    for entry in entries.split(b"\0"):
        name, equals, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if equals:
            after[name] = value
    return difference(before, after, node_words=node_words)


def difference(before: Mapping[str, str], after: Mapping[str, str], *, node_words: Iterable[str] = ()) -> ExportDiff:
    """The exports, from the environments before and after. Pure."""
    words = word_patterns(node_words)
    exports: list[Export] = []
    unsafe = []
    for name in sorted({*before, *after}):
        if not _NAME.fullmatch(name) or name in _SHELL_VARIABLES or name.startswith(_SHELL_PREFIXES):
            continue
        if before.get(name) == after.get(name):
            continue
        if name not in after:
            exports.append(Export(name, "unset"))
            continue
        found = list(_change(name, before.get(name, ""), after[name]))
        reason = next((why for export in found if (why := reason_not_kept(name, export.value, words))), "")
        if reason:
            unsafe.append(f"it exports {name}, {reason}")
        else:
            exports += found
    return ExportDiff(tuple(exports), tuple(unsafe))


def _change(name: str, old: str, new: str) -> Iterator[Export]:
    """`new` as additions around `old`, if it contains that."""
    if old and new.startswith(f"{old}:"):
        yield Export(name, "append", new[len(old) + 1 :])
    elif old and new.endswith(f":{old}"):
        yield Export(name, "prepend", new[: -len(old) - 1])
    elif old and (found := new.find(f":{old}:")) != -1:
        yield Export(name, "prepend", new[:found])
        yield Export(name, "append", new[found + len(old) + 2 :])
    else:
        yield Export(name, "set", search_path(new))


def node_patterns(node: str, names: Iterable[str], env: Mapping[str, str]) -> list[re.Pattern[str]]:
    """Patterns for this node's name and the values of variables that differ between nodes; none without such names."""
    values = [env[name] for name in names if name in env and _NODE_VARIABLE.fullmatch(name)]
    words = [node.partition(".")[0], *values] if values else []
    return word_patterns(word for word in words if _DISTINCT.search(word))


def word_patterns(node_words: Iterable[str]) -> list[re.Pattern[str]]:
    """Patterns for names and addresses of this node, without short ones."""
    return [re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-])") for word in node_words if len(word) >= _MIN_WORD]


def reason_not_kept(name: str, value: str, words: Sequence[re.Pattern[str]]) -> str:
    """Why a variable or another text of the setup must not be recorded; empty if it may be."""
    from bootseer.env.capturing.leftovers import has_random_name
    from bootseer.env.capturing.secrets import is_secret_variable

    if is_secret_variable(name, value):
        return "which looks like a secret"
    if _NODE_VARIABLE.fullmatch(name):
        return "which differs between nodes"
    if any(word.search(value) for word in words):
        return "which holds a name or an address of this node"
    if any(has_random_name(part) for part in value.split(":")):
        return f"whose value is a scratch file with a random name ({value})"
    if len(value) > MAX_TEXT:
        return "which is too long"
    return ""
