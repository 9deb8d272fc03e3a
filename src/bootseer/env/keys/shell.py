"""A shell script as commands and words, as far as they are known without running it, and the paths that words may mean.

This is no shell: control flow is dropped, substitutions become separate commands, and unknown parts of a word are
written as `$`. Parsing never fails: a quote that is not closed is left out. Does no I/O itself: `NodeFiles` does.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field

from bootseer.env.keys.key_settings import looks_secret

if TYPE_CHECKING:
    from bootseer.env.keys.files import NodeFiles

SHELL = re.compile(r"(ba|da|z|k)?sh|su|eval")
"""Programs that run a script given as an argument or as their input."""
_OPENING, _CLOSING = frozenset(("if", "while", "until", "{")), frozenset(("fi", "done", "esac", "}"))
_KEYWORDS = _OPENING | _CLOSING | {"then", "else", "elif", "do", "function", "time", "coproc", "!"}
_DECLARING = frozenset(("export", "declare", "local", "readonly", "typeset"))
_LOOPS = frozenset(("for", "select", "case"))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\{[#!]?([A-Za-z_][A-Za-z0-9_]*)|([A-Za-z_][A-Za-z0-9_]*))")
_EXPANDED = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::?[-=](?P<default>[^${}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
_MAX_DEPTH = 20
_BLANKS = re.compile(r"[ \t]+|#[^\n]*")
_REDIRECTION = re.compile(r"\d*(&>>?|>>|>\||>&|<<<|<<-?|<&|>|<)")
_OPERATORS = ";&|()\n"
_ARITHMETIC = re.compile(r"\((\([^\n]*?\))\)")
_TWO_WORDS = re.compile(r"[A-Za-z]\s+[A-Za-z./~]")
"""Not in arithmetic, but in two subshells."""
_PART = r"\\(?P<escaped>.?)|(?P<opening>\$[({]|`)|(?P<reference>\$[A-Za-z_]\w*)"
_SINGLE = r"'(?P<single>[^']*)'|(?P<stray>')"
_PART_OF_WORD = re.compile(rf"{_PART}|{_SINGLE}|(?P<other>[^\s{_OPERATORS}<>\\'\"`$]+|.)", re.DOTALL)
_PART_OF_BRACES = re.compile(rf"{_PART}|{_SINGLE}|(?P<other>[^}}\\'\"`$]+|.)", re.DOTALL)
_PART_OF_QUOTED = re.compile(rf"{_PART}|(?P<other>[^\\\"`$]+|.)", re.DOTALL)


class Command(Struct, frozen=True):
    """A simple command: its program and arguments, without redirections."""

    words: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    """Files that receive its output."""
    inputs: tuple[str, ...] = ()
    """Files that it reads from or extends (`< file`, `>> file`), and other words that may name files."""

    @property
    def program(self) -> str:
        """The last component of the program's path."""
        return self.words[0].rpartition("/")[2] if self.words else ""


class Shell(Struct):
    """The commands and variables of a script."""

    commands: list[Command] = field(default_factory=list)
    assignments: dict[str, dict[str, None]] = field(default_factory=dict)
    """The values that each name is given, without quotes, in the order of the text; empty if they are not known."""
    assigned: set[str] = field(default_factory=set)
    """Names that are assigned in any case, not in a branch."""
    variables: set[str] = field(default_factory=set)
    """Names that are read before they are: the default in `${X:-1}` reads the caller's."""
    texts: list[str] = field(default_factory=list)
    """Heredocs that no shell reads."""
    complete: bool = True
    """False if the script is nested too deeply to be parsed completely."""
    budget: int = 1 << 22
    """Characters that may be scanned more than once."""

    def read(self, text: str) -> None:
        """Note the variables of a text."""
        found = {found[1] or found[2] for found in _REFERENCE.finditer(text)}
        self.variables |= found - self.assigned

    def assign(self, name: str, *values: str, certain: bool) -> None:
        known = self.assignments.setdefault(name, {})
        for value in values:
            known.pop(value, None)
            known[value] = None
        if certain:
            self.assigned.add(name)


def parse(text: str) -> Shell:
    shell = Shell()
    _Scanner(text.replace("\r\n", "\n").replace("\\\n", " "), shell).run()
    return shell


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
        self._enclosing = 0
        """Number of quotes and braces around this place."""
        self._assigned: list[re.Match[str]] = []
        self._operator = ""
        """The one before this command, with the letter before it."""
        self._blocks = self._parentheses = 0
        """Numbers of blocks or functions, and of subshells, around it."""
        self._heredocs: list[tuple[str, bool]] = []
        """Delimiters of the heredocs that begin after this line, and whether they are quoted."""
        self._line = len(shell.commands)
        """Number of the first command of this line."""

    def run(self) -> None:
        text = self._text
        while self._at < len(text):
            if self._shell.budget < 0:
                self._shell.complete = False
                return
            if found := _BLANKS.match(text, self._at):
                self._at = found.end()
            elif found := _REDIRECTION.match(text, self._at):
                self._redirection = found[1]
                self._at = found.end()
            elif (found := _ARITHMETIC.match(text, self._at)) and not _TWO_WORDS.search(found[1]):
                self._at = found.end()
                self._scan(f': "{found[1]}"')
            elif (operator := text[self._at]) in _OPERATORS:
                self._at += 1
                if self._end_command() or operator != "\n":  # a line may end with an operator
                    self._operator = text[self._at - 2 : self._at]
                if operator in "()":  # without an opening one for a pattern of `case`
                    self._parentheses = max(self._parentheses + (1 if operator == "(" else -1), 0)
                if operator == "\n":
                    self._skip_heredocs()
            else:
                start = self._at
                self._take(self._word(), is_quoted=text[start] in "'\"\\")
        self._end_command()

    def _word(self) -> str:
        """The word that begins here; command substitutions in it become commands."""
        text, parts = self._text, []
        while self._at < len(text) and text[self._at] not in " \t<>" and text[self._at] not in _OPERATORS:
            parts.append(self._part(_PART_OF_WORD))
        return "".join(parts)

    def _enclosed(self, end: str, pattern: re.Pattern[str]) -> str | None:
        """What is here up to a closing quote or brace; None, and nothing is read, if there is none."""
        text, start = self._text, self._at
        parts: list[str] = []
        self._enclosing += 1
        while self._at < len(text) and self._enclosing <= _MAX_DEPTH and self._shell.budget >= 0:
            if text[self._at] == end:
                self._at += 1
                self._enclosing -= 1
                return "".join(parts)
            parts.append(self._part(pattern))
        self._enclosing -= 1
        self._shell.budget -= len(text) - start
        self._at = start
        return None

    def _part(self, pattern: re.Pattern[str]) -> str:
        if self._text[self._at] == '"':
            self._at += 1
            return self._enclosed('"', _PART_OF_QUOTED) or ""
        found = pattern.match(self._text, self._at)
        assert found is not None  # noqa: S101 - for the type checker: any letter matches
        self._at = found.end()
        if found["opening"] == "${":
            inside = self._enclosed("}", _PART_OF_BRACES) or ""
            self._shell.read(f"${{{inside}}}")
            return f"${{{inside}}}" if inside else "$"
        if found["opening"]:
            return self._substitution(found["opening"])
        if found["reference"]:
            self._shell.read(found["reference"])
        return "" if found.lastgroup == "stray" else found[found.lastgroup or 0]

    def _substitution(self, opening: str) -> str:
        """`$(...)`: its commands are noted; in the word it is `$`, or the script's own folder if that is its value."""
        text, start, depth = self._text, self._at, 1
        end = len(text)
        for found in re.compile("`" if opening == "`" else "[()]").finditer(text, start):
            depth += 1 if found[0] == "(" else -1
            if not depth:
                end = found.start()
                break
        inner, self._at = text[start:end], end + 1
        if _ARITHMETIC.fullmatch(f"({inner})") and not _TWO_WORDS.search(inner):
            inner = f': "{inner}"'
        if re.search(r"\bdirname\b.*(\$0|BASH_SOURCE)", inner):
            return "${0%/*}" if ".." not in inner else "${0%/*}/.."
        if inner.strip() in ("pwd", "pwd -P"):
            return "${PWD}"
        self._scan(inner)
        return "$"

    def _scan(self, text: str) -> None:
        self._shell.budget -= len(text)
        if self._depth >= _MAX_DEPTH or self._shell.budget < 0:
            self._shell.complete = False
        else:
            _Scanner(text, self._shell, self._depth + 1).run()

    def _take(self, word: str, *, is_quoted: bool) -> None:
        redirection, self._redirection = self._redirection, ""
        if redirection == "<":
            self._inputs.append(word)
        elif redirection in ("<<", "<<-"):
            self._heredocs.append((word, is_quoted))
        elif redirection:
            if ">" in redirection and not (redirection == ">&" and not word.strip("0123456789-")):
                self._outputs.append(word)
                self._inputs += [word] if ">>" in redirection else []
        elif not self._words and (assigned := _ASSIGNMENT.fullmatch(word)):
            self._assigned.append(assigned)
        elif self._words or word not in _KEYWORDS:
            self._words.append(word)
        else:
            self._blocks = max(self._blocks + (word in _OPENING) - (word in _CLOSING), 0)

    def _end_command(self) -> bool:
        """Note the command that ends here; whether there is one."""
        shell, words = self._shell, self._words
        program = words[0] if words else ""
        in_any_case = not (
            self._depth or self._blocks or self._parentheses or self._operator == "&&" or self._operator[-1:] == "|"
        )
        assigned = [*self._assigned]
        if program in _DECLARING:
            assigned += filter(None, map(_ASSIGNMENT.fullmatch, words[1:]))
        for each in assigned:  # `A=1 make` sets it for one command
            shell.assign(each[1], each[2], certain=in_any_case and (not words or program in _DECLARING))
        if program == "read":
            for name in filter(_NAME.fullmatch, words[1:]):
                shell.assign(name, certain=True)
        elif program in _LOOPS or words[-1:] == ["{"]:
            self._blocks += 1
            if words[2:3] == ["in"] and _NAME.fullmatch(words[1]):
                shell.assign(words[1], *words[3:], certain=True)
        found = bool(words or self._assigned or self._outputs or self._inputs)
        if words or self._outputs or self._inputs:
            shell.commands.append(Command(tuple(words), tuple(self._outputs), tuple(self._inputs)))
        self._words, self._outputs, self._inputs, self._assigned, self._redirection = [], [], [], [], ""
        return found

    def _skip_heredocs(self) -> None:
        """Skip the heredocs of the line that has just ended; one that a shell reads is a script."""
        shell, text = self._shell, self._text
        words = (word for command in shell.commands[self._line :] for word in command.words)
        of_shell = any(SHELL.fullmatch(word.rpartition("/")[2]) for word in words)
        for delimiter, is_quoted in self._heredocs:
            end = re.compile(rf"^[ \t]*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(text, self._at)
            if end is None:  # it was a shift (`1 << N`): nothing may be skipped
                shell.budget -= len(text) - self._at
                continue
            body, self._at = text[self._at : end.start()], end.end()
            if of_shell:
                self._scan(body)
            else:
                shell.texts.append(body)
            if not is_quoted:
                shell.read(body)
        self._heredocs, self._line = [], len(shell.commands)


_OWN_FOLDER = re.compile(r"\$\{(0|BASH_SOURCE(\[0\])?)%/\*\}")
_PATTERN = re.compile(r"[*?[]")
_UNKNOWN = re.compile(r"\$(\{[^}]*\}|\w*)")
_MAX_STEPS = 16
_MAX_EXPANSIONS = 1000
_MAX_WORD = 8192
_MAX_PATH = 4096


class Paths:
    """The paths of one script."""

    def __init__(self, cwd: str, folder: str, look: NodeFiles) -> None:
        """`cwd` is where the script runs, `folder` contains it."""
        self.bases = list(dict.fromkeys((cwd, folder)))
        """Folders that relative words may start from, the likeliest first."""
        self._values = {"PWD": [cwd]}
        """Known values of variables, the likeliest last: branches of a script may give different ones."""
        self._maybe_unset: set[str] = set()
        """Variables that only the script sets, perhaps in a branch."""
        self._folder = folder
        self._look = look

    def learn(self, env: Mapping[str, str], assignments: Mapping[str, Iterable[str]]) -> None:
        """Learn values of variables. Those of secrets must not get into addresses, file names or messages."""
        for name, value in env.items():
            if not looks_secret(name):
                self._values.setdefault(name, [value])
        for name, assigned in assignments.items():
            if not looks_secret(name):
                known = [*self._values.get(name, [])]
                if not known:
                    self._maybe_unset.add(name)
                for value in assigned:
                    # `A=${A:-1}` and `A=$A/x` read the value before, in a branch perhaps the first. No value may name
                    # the variable itself: each expansion would multiply the meanings.
                    texts = _expansions(value, {name: [*known[:1], *known[-1:]]})
                    known += [_expansions(each, {name: ["${}"]})[0] for each in reversed(texts)]
                self._values[name] = list(dict.fromkeys(known))

    def meanings(self, word: str, values: Mapping[str, Sequence[str]] | None = None) -> list[str]:
        """What a word may mean, the likeliest first."""
        return [self._plain(each) for each in _expansions(word, values or self._values)]

    def expand(self, word: str) -> str:
        """The likeliest meaning of a word."""
        return self.meanings(word)[0]

    def is_absolute(self, word: str) -> bool:
        """Whether the word does not depend on the working folder."""
        return all(each.startswith("/") for each in self.meanings(word))

    def certain(self, word: str) -> list[str]:
        """The absolute path that the word means; empty if it may mean another one."""
        meanings = self.meanings(word)
        return self._absolute(meanings[0])[:1] if len(meanings) == 1 else []

    def change_folder(self, word: str) -> None:
        """Let relative words start from a folder; they may still start from the others."""
        for path in self.existing(word):
            if self._look.kind(path) == "folder":
                self.bases = [path, *(base for base in self.bases if base != path)]

    def candidates(self, word: str) -> list[str]:
        """Absolute paths that a word may mean. An unknown variable at its beginning stands for any of the folders; it
        may also be empty, as any other that may be unset."""
        unset = {name: ["", *self._values[name]] for name in self._maybe_unset} if "$" in word else {}
        meanings = self.meanings(word, {**self._values, **unset})
        meanings += [_UNKNOWN.sub("", each) for each in meanings if "$" in each and not _PATTERN.search(each)]
        return list(dict.fromkeys(path for each in meanings for path in self._absolute(each)))

    def existing(self, word: str) -> list[str]:
        """The candidates that exist; a pattern means all matches."""
        found = []
        for path in self.candidates(word):
            folder, _, last = path.rpartition("/")
            if _PATTERN.search(last):
                found += [f"{folder}/{name}" for name in self._look.names(folder) if fnmatch.fnmatchcase(name, last)]
            elif self._look.kind(path):
                found.append(path)
        return found

    def _plain(self, word: str) -> str:
        word = _OWN_FOLDER.sub(lambda _: self._folder, word)
        if word == "~" or word.startswith("~/"):
            word = (self._values.get("HOME") or ["~"])[-1] + word[1:]
        return word.removeprefix("file://")

    def _absolute(self, word: str) -> list[str]:
        while "$" in word.partition("/")[0] and "/" in word:
            word = word.partition("/")[2]
        if (
            not word
            or len(word) > _MAX_PATH
            or "://" in word
            or word[0] == "-"
            or any(sign in word for sign in "$\0\n")
        ):
            return []
        return [posixpath.normpath(posixpath.join(base, word)) for base in self.bases]


def _expansions(word: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    """What the word may be when `$NAME`, `${NAME}` and `${NAME:-default}` are replaced by known values: one word for
    each combination, those with the last values first."""
    words = [word]
    for _ in range(_MAX_STEPS if "$" in word else 0):  # values may contain further variables, and themselves
        after = list(dict.fromkeys(changed for each in words for changed in _replaced(each, values)))[:_MAX_EXPANSIONS]
        if after == words or max(map(len, after)) > _MAX_WORD:
            break
        words = after
    return words


def _replaced(word: str, values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The word with each value of its first known variable."""
    for found in _EXPANDED.finditer(word):
        default = () if found["default"] is None else (found["default"],)
        if known := values.get(found["braced"] or found["bare"]) or default:
            for value in reversed(known):
                yield f"{word[: found.start()]}{value}{word[found.end() :]}"
            return
    yield word
