"""A shell script as commands and words, as far as they are known without running it.

This is no shell: control flow is dropped, substitutions become separate commands, and unknown parts of a word are
written as `$`. Parsing never fails: an unterminated quote ends with its line. Heredocs are not commands unless a shell
reads them. Does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct, field

_KEYWORDS = frozenset(
    """
    if then else elif fi for while until do done case esac in function select time coproc ! { }
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
_WRAPPERS = frozenset(
    """
    sudo exec command env nice ionice time nohup timeout retry stdbuf setsid builtin eval xargs flock
    """.split()  # noqa: SIM905 - a list of this length reads better as text
)
_CONDA = ("conda", "mamba", "micromamba")
# Options of wrappers whose value is the next word.
_TAKE_VALUE = {
    "sudo": "ugpChTUDR", "env": "uC", "exec": "a", "nice": "n", "ionice": "cnp", "timeout": "ks", "xargs": "nIPdLsEa",
    "flock": "wE", "stdbuf": "ioe", "time": "fo", **dict.fromkeys(_CONDA, "np"),
}  # fmt: skip
_LONG_TAKE_VALUE = frozenset(
    "--user --group --chdir --unset --adjustment --kill-after --signal --timeout --name --prefix --cwd".split()  # noqa: SIM905
)
_MAX_WRAPPERS = 16
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=(.*)", re.DOTALL)
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"\\]?)((?<=['\"])[^'\"]+|[^\s'\"\\;&|<>()$`]+)")
_REFERENCE = re.compile(r"\$(?:\{[#!]?([A-Za-z_][A-Za-z0-9_]*)|([A-Za-z_][A-Za-z0-9_]*))")
_ASSIGNS = re.compile(
    r"(?:^|[;&|(]|\b(?:export|local|declare|readonly|then|do|else))\s*([A-Za-z_]\w*)=(?:\"[^\"]*\"|[^\s;]*)"
)
_LOOPS = re.compile(r"\b(?:for|select)\s+([A-Za-z_]\w*)\s+in\b|\bread\s+(?:-\w+\s+)*([A-Za-z_]\w*)")
_SHELLS = re.compile(r"(^|[\s;&|/])(ba|da|z|k)?sh(\s|$)")
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_MAX_GIVEN = 100
_MAX_DEPTH = 20
_EXPANDED = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::?[-=](?P<default>[^${}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
_REDIRECTION = re.compile(r"\d*(&>>?|>>|>\||>&|<<<|<<-?|<&|>|<)")
_OPERATORS = ";&|()\n"


class Command(Struct, frozen=True):
    """A simple command: its program and arguments, without redirections."""

    words: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    """Files that receive its output."""
    inputs: tuple[str, ...] = ()
    """Files that it reads from (`< file`), and other words before its program that may name files."""

    @property
    def program(self) -> str:
        """The last component of the program's path."""
        return self.words[0].rpartition("/")[2] if self.words else ""


class Shell(Struct):
    """The commands and variables of a script."""

    commands: list[Command] = field(default_factory=list)
    assignments: dict[str, str] = field(default_factory=dict)
    """Last value by name, without quotes."""
    variables: set[str] = field(default_factory=set)
    """Names that are read before the script assigns them."""
    complete: bool = True
    """False if the script is nested too deeply to be parsed completely."""
    budget: int = 1 << 22
    """Characters that may be scanned more than once."""
    assigned: set[str] = field(default_factory=set)
    """Names that the script assigns in any way."""


def parse(text: str) -> Shell:
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    shell = Shell()
    text = _without_heredocs(text, shell)
    _note_variables(text, shell)
    _Scanner(text, shell).run()
    return shell


def expand(word: str, values: Mapping[str, str]) -> str:
    """The word with `$NAME`, `${NAME}` and `${NAME:-default}` replaced by known values."""

    def value(found: re.Match[str]) -> str:
        known = values.get(found["braced"] or found["bare"])
        if known is None and found["default"] is not None:
            return found["default"]
        return found[0] if known is None else known

    for _ in range(4):  # values may contain further variables
        after = _EXPANDED.sub(value, word)
        if after == word or len(after) > 8192:
            break
        word = after
    return word


def _without_heredocs(text: str, shell: Shell) -> str:
    """The text without the lines of heredocs; heredocs read by a shell are parsed as scripts."""
    out: list[str] = []
    lines = text.split("\n")
    last = {line.strip(): number for number, line in enumerate(lines)}
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        out.append(line)
        if "<<" not in line or line.lstrip().startswith("#"):
            continue
        bare = re.sub(r"\s#.*", "", _QUOTED.sub(_without_quoted, line.replace("<<<", "   ")))
        for found in _HEREDOC.finditer(bare):
            # Without a closing line it is a shift (`1 << N`): nothing may be skipped.
            if last.get(found[2], -1) < at:
                continue
            end = next(number for number in range(at, len(lines)) if lines[number].strip() == found[2])
            body, at = lines[at:end], end + 1
            if not found[1]:
                _note_variables("\n".join(body), shell)
            if _SHELLS.search(line.partition("<<")[0]):
                _Scanner("\n".join(body), shell).run()
    return "\n".join(out)


def _without_quoted(found: re.Match[str]) -> str:
    """Nothing for a quoted word, except for the delimiter of a heredoc."""
    return found[0] if found.string[: found.start()].rstrip("- \t").endswith("<<") else "''"


def _note_variables(text: str, shell: Shell) -> None:
    """Note variables that the text reads before assigning them: the default in `${X:-1}` reads the caller's."""
    for whole in text.split("\n"):
        if whole.lstrip().startswith("#"):
            continue
        line = _QUOTED.sub(lambda found: found[0] if found[0][0] == '"' else "''", whole)
        # (position, name): an assignment takes effect after its own word, `PATH=/x:$PATH` reads first.
        assigned = [(found.end(), found[1]) for found in _ASSIGNS.finditer(line)]
        assigned += [(found.end(), name) for found in _LOOPS.finditer(line) for name in found.groups() if name]
        for found in _REFERENCE.finditer(line):
            name = found[1] or found[2]
            earlier = any(end <= found.start() and name == other for end, other in assigned[:_MAX_GIVEN])
            if name not in shell.assigned and not earlier:
                shell.variables.add(name)
        shell.assigned.update(name for _, name in assigned)


class _Scanner:
    """One pass over the characters. Nested parts are scanned again, with bounded depth and budget."""

    def __init__(self, text: str, shell: Shell, depth: int = 0) -> None:
        self._text = text
        self._depth = depth
        self._shell = shell
        self._at = 0
        self._words: list[str] = []
        self._outputs: list[str] = []
        self._inputs: list[str] = []
        self._redirection = ""

    def run(self) -> None:
        text = self._text
        while self._at < len(text):
            if self._shell.budget < 0:
                self._shell.complete = False
                return
            letter = text[self._at]
            if letter in " \t":
                self._at += 1
            elif letter == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif found := _REDIRECTION.match(text, self._at):
                self._redirection = found[1]
                self._at = found.end()
            elif letter in _OPERATORS:
                self._at += 1
                self._end_command()
            else:
                self._take(self._word())
        self._end_command()

    def _word(self) -> str:
        """The word that begins here; command substitutions in it become commands."""
        text, out = self._text, []
        while self._at < len(text):
            letter = text[self._at]
            if letter in " \t" or letter in _OPERATORS or letter in "<>":
                break
            if letter == "\\":
                out.append(text[self._at + 1 : self._at + 2])
                self._at += 2
            elif letter in "'\"":
                out.append(self._quoted(letter))
            elif letter == "`":
                out.append(self._backquoted())
            elif text.startswith("$(", self._at) or text.startswith("$((", self._at):
                out.append(self._substitution())
            elif text.startswith("${", self._at):
                end = text.find("}", self._at)
                end = self._at + 2 if end < 0 else end + 1
                out.append(text[self._at : end])
                self._at = end
            else:
                out.append(letter)
                self._at += 1
        return "".join(out)

    def _quoted(self, quote: str) -> str:
        text, start = self._text, self._at + 1
        self._at = start
        out = []
        while self._at < len(text) and text[self._at] != quote:
            if quote == '"' and text.startswith("$(", self._at):
                out.append(self._substitution())
                continue
            if quote == '"' and text[self._at] == "\\":
                self._at += 1
            out.append(text[self._at : self._at + 1])
            self._at += 1
        if self._at >= len(text):
            # No closing quote: the rest after the line's end is not part of it and is scanned again.
            self._shell.budget -= len(text) - start
            end = text.find("\n", start)
            self._at = len(text) if end < 0 else end
            return text[start : self._at]
        self._at += 1
        return "".join(out)

    def _substitution(self) -> str:
        """`$(...)`: its commands are noted; in the word it is `$`, or the script's own folder if that is its value."""
        text, start, depth = self._text, self._at + 2, 1
        at = start
        while at < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        inner = text[start : at - 1] if not depth else text[start:at]
        self._at = at
        if re.search(r"\bdirname\b.*(\$0|BASH_SOURCE)", inner):
            return "${0%/*}" if ".." not in inner else "${0%/*}/.."
        if inner.strip() in ("pwd", "pwd -P"):
            return "${PWD}"
        self._inner(inner)
        return "$"

    def _backquoted(self) -> str:
        end = self._text.find("`", self._at + 1)
        end = len(self._text) if end < 0 else end
        self._inner(self._text[self._at + 1 : end])
        self._at = end + 1
        return "$"

    def _inner(self, text: str) -> None:
        self._shell.budget -= len(text)
        if self._depth >= _MAX_DEPTH or self._shell.budget < 0:
            self._shell.complete = False
        else:
            _Scanner(text, self._shell, self._depth + 1).run()

    def _take(self, word: str) -> None:
        if self._redirection:
            if self._redirection == "<":
                self._inputs.append(word)
            elif ">" in self._redirection and not (self._redirection == ">&" and not word.strip("0123456789-")):
                self._outputs.append(word)
            self._redirection = ""
            return
        if not self._words:
            if word in _KEYWORDS:
                return
            assigned = _ASSIGNMENT.fullmatch(word)
            if assigned:
                self._shell.assignments[assigned[1]] = assigned[2]
                return
        self._words.append(word)

    def _end_command(self) -> None:
        words = self._words
        for _ in range(_MAX_WRAPPERS):
            if words and _EXPANDED.fullmatch(words[0]):
                self._inputs.append(words[0])  # its value may be a path with blanks
                words = [*expand(words[0], self._shell.assignments).split(), *words[1:]]
            if not words or not _is_wrapper(words):
                break
            words, values = _unwrapped(words)
            self._inputs += values
        if words and words[0] in ("export", "declare", "local", "readonly", "typeset"):
            for word in words[1:]:
                if assigned := _ASSIGNMENT.fullmatch(word):
                    self._shell.assignments[assigned[1]] = assigned[2]
        if words or self._outputs or self._inputs:
            self._shell.commands.append(Command(tuple(words), tuple(self._outputs), tuple(self._inputs)))
        self._words, self._outputs, self._inputs, self._redirection = [], [], [], ""


def _is_wrapper(words: list[str]) -> bool:
    program = words[0].rpartition("/")[2]
    return program in _WRAPPERS or (program in _CONDA and words[1:2] == ["run"])


def _unwrapped(words: list[str]) -> tuple[list[str], list[str]]:
    """`sudo -E -u me env A=1 pip ...` without the words before the program, and the values of options among these."""
    program = words[0].rpartition("/")[2]
    taking = _TAKE_VALUE.get(program)
    rest, values = words[2 if program in _CONDA else 1 :], []
    while rest and (
        rest[0].startswith("-") or _ASSIGNMENT.fullmatch(rest[0]) or re.fullmatch(r"[\d.]+[smh]?", rest[0])
    ):
        option, *rest = rest
        if option in _LONG_TAKE_VALUE or (taking and re.fullmatch(rf"-[^-{taking}]*[{taking}]", option)):
            values += rest[:1]
            rest = rest[1:]
    if program == "flock":  # a file, then a program or -c with a script
        values += rest[:1]
        rest = ["sh", *rest[1:]] if rest[1:2] == ["-c"] else rest[1:]
    return rest, values
