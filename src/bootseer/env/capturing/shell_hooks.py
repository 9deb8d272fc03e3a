"""Let a shell script write down its environment when it ends, without it noticing.

Bash reads the file that BASH_ENV names before a script, so that our trap is there before the script's first line. A
script that sets a trap for its own end would take ours away: where its text says so, `trap` becomes a function that
keeps both. Other shells get the trap by `-c`, and read the script from there: `$0`, arguments, standard input and exit
code are what they were. What the hook runs is built into the shell (for sh: one `env`), so that a setup that breaks
PATH cannot break it, and a hook that fails changes nothing.

Who calls: `exports`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

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
    """See `exports.command`."""
    head = _head(script)
    line = _line(head)
    if os.access(script, os.X_OK):
        words, shell = [str(Path(script).absolute())], _shell(line)
        if b"\0" in head or (line and shell not in ("bash", *_OTHER_SHELLS)):
            return words, {}
    else:
        bash = shutil.which("bash", path=env.get("PATH"))
        words, shell, line = [bash or "/bin/sh", script], "bash" if bash else "", []
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
    """The name of the interpreter on that line; behind `env` the first word that is no option and no variable."""
    if line and Path(line[0]).name == "env":
        given = " ".join(line[1:]).split()
        line = [word for word in given if not word.startswith("-") and "=" not in word]
    return Path(line[0]).name if line else ""


def _head(script: str) -> bytes:
    with Path(script).open("rb") as file:
        return file.read(_MAX_SCRIPT)
