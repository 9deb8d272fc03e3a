"""A shell script as commands and words, as far as they are known without running it, and the paths that words may mean.

This is no shell: control flow is dropped, substitutions become separate commands, and unknown parts of a word are
written as `$`. Parsing never fails: a quote that is not closed is left out. Does no I/O itself: `NodeFiles` does.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from msgspec import Struct, field

from bootseer.env.keys.key_settings import looks_secret

if TYPE_CHECKING:
    from bootseer.env.keys.files import NodeFiles

SHELL = re.compile(r"(ba|da|z|k)?sh|su|eval")
"""Programs that run a script given as an argument or as their input."""
_KEYWORDS = frozenset("if while until { fi done esac } then else elif do function time coproc !".split())  # noqa: SIM905
_DECLARING = frozenset(("export", "declare", "local", "readonly", "typeset"))
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ANY_NAME = "*?./"
"""Characters of a pattern for all files, which in a text is most likely something else."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=(.*)", re.DOTALL)
_EXPANDED = re.compile(r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::?[-=](?P<default>[^${}]*))?\}|(?P<bare>[A-Za-z_]\w*))")
_MAX_DEPTH = 25
"""Of quotes, braces and substitutions within each other."""
_MAX_OWN_FOLDER = 300
"""Length of a substitution for the script's own folder: one that is not closed in time has commands of the script."""
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*")
_REDIRECTION = re.compile(r"\d*(&>>?|>>|>\||>&|<<<|<<-?|<&|>|<)")
_OPERATORS = ";&|()\n"
_ARITHMETIC = re.compile(r"\((\([^\n]{0,1000}?\))\)")
_PARAMETERS = re.compile(r"\([ \t]*\)")
_TWO_WORDS = re.compile(r"[A-Za-z]\s+[A-Za-z./~]")
"""Not in arithmetic, but in two subshells."""
_PART = r"\\(?P<escaped>.?)|(?P<opening>\$[({]|`)"
_SINGLE = r"'(?P<single>[^']*)'|\$'(?P<ansi>(?:[^'\\]|\\.)*)'|(?P<stray>')"
_PART_OF_WORD = re.compile(rf"{_PART}|{_SINGLE}|(?P<other>[^\s{_OPERATORS}<>\\'\"`$]+|.)", re.DOTALL)
_PART_OF_BRACES = re.compile(rf"{_PART}|{_SINGLE}|(?P<other>[^}}\\'\"`$]+|.)", re.DOTALL)
_PART_OF_QUOTED = re.compile(rf"{_PART}|(?P<other>[^}}\\\"`$]+|.)", re.DOTALL)


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
    """The values that each name is given, without quotes, in the order of the text."""
    overwritten: set[str] = field(default_factory=set)
    """Names that are set before any branch, and not named before: their values at the start are not read."""
    functions: set[str] = field(default_factory=set)
    """Their commands are among `commands`."""
    texts: list[str] = field(default_factory=list)
    """Heredocs that no shell reads."""
    commented: list[str] = field(default_factory=list)
    """Names in comments, as often as they are there; without those of nested commands."""
    complete: bool = True
    """False if the script is nested too deeply to be parsed completely."""
    budget: int = 1 << 22
    """Characters that may be scanned more than once."""

    def assign(self, name: str, *values: str) -> None:
        known = self.assignments.setdefault(name, {})
        for value in values:
            known.pop(value, None)
            known[value] = None

    def spend(self, count: int) -> None:
        """Note that this many characters are scanned again."""
        self.budget -= count
        if self.budget < 0:
            raise _TooComplexError


class _TooComplexError(Exception):
    pass


def parse(text: str) -> Shell:
    shell = Shell()
    try:
        _Scanner(text.replace("\r\n", "\n"), shell).run()
    except _TooComplexError:
        shell.complete = False
    return shell


class _Scanner:
    """One pass over the characters. A substitution is read where it stands, up to its end; other nested commands are
    texts of their own."""

    def __init__(self, text: str, shell: Shell, at: int = 0, depth: int = 0, *, is_substitution: bool = False) -> None:
        self._text = text
        self._shell = shell
        self._at = at
        self._depth = depth
        self._is_substitution = is_substitution
        self._words: list[str] = []
        self._outputs: list[str] = []
        self._inputs: list[str] = []
        self._assigned: list[re.Match[str]] = []
        self._redirection = ""
        self._is_certain = depth == 0
        """Whether each command up to this place runs in any case."""
        self._began = 0
        self._named: set[str] = set()
        """Words before this command, which begins there."""
        self._parentheses = 0
        """Number of subshells around this place."""
        self._in_pattern = False
        """Whether patterns of `case` are here, which are no commands."""
        self._heredocs: list[str] = []
        """Delimiters of the heredocs that begin after this line."""
        self._line = len(shell.commands)
        """Number of the first command of this line."""

    def run(self) -> int:
        """Note all commands; where they end."""
        text = self._text
        while self._at < len(text):
            if found := _BLANKS.match(text, self._at):
                self._at = found.end()
                if found[0].startswith("#") and not self._depth:
                    self._shell.commented += NAME.findall(found[0])
            elif found := _REDIRECTION.match(text, self._at):
                self._redirection = found[1]
                self._at = found.end()
            elif self._arithmetic(self._at):
                continue
            elif len(self._words) == 1 and (found := _PARAMETERS.match(text, self._at)):
                self._shell.functions.add(self._words.pop())
                self._at, self._is_certain = found.end(), False
            elif self._in_pattern and text[self._at] in "|()":
                self._in_pattern = text[self._at] != ")"
                self._words, self._assigned = [], []
                self._at += 1
            elif (operator := text[self._at]) in _OPERATORS:
                self._at += 1
                self._is_certain &= operator in ";\n"
                self._in_pattern &= not self._words
                self._end_command()
                self._in_pattern |= text.startswith((";;", ";&"), self._at - 1)
                if operator == ")" and not self._parentheses and self._is_substitution:
                    break
                if operator in "()":
                    self._parentheses = max(self._parentheses + (1 if operator == "(" else -1), 0)
                if operator == "\n":
                    self._skip_heredocs()
            else:
                self._take(self._word())
        self._end_command()
        return self._at

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
        self._deepen(1)
        while self._at < len(text) and text[self._at] != end:
            parts.append(self._part(pattern))
        self._deepen(-1)
        self._at += 1
        if self._at <= len(text):
            return "".join(parts)
        self._shell.spend(len(text) - start)
        self._at = start
        return None

    def _deepen(self, levels: int) -> None:
        self._depth += levels
        if self._depth > _MAX_DEPTH:
            raise _TooComplexError

    def _part(self, pattern: re.Pattern[str]) -> str:
        if self._text[self._at] == '"':
            self._at += 1
            return self._enclosed('"', _PART_OF_QUOTED) or ""
        found = pattern.match(self._text, self._at)
        assert found is not None  # noqa: S101 - for the type checker: any letter matches
        self._at = found.end()
        if found["opening"] == "${":
            inside = self._enclosed("}", pattern if pattern is _PART_OF_QUOTED else _PART_OF_BRACES)
            return f"${{{inside}}}" if inside else "$"
        if found["opening"]:
            return self._substitution(found["opening"])
        return "" if found.lastgroup == "stray" or found[0] == "\\\n" else found[found.lastgroup or 0]

    def _substitution(self, opening: str) -> str:
        """`$(...)`: its commands are noted; in the word it is `$`, or the script's own folder if that is its value."""
        text, start, before = self._text, self._at, len(self._shell.commands)
        if opening == "`":
            end = text.find("`", start)
            self._at = (len(text) if end < 0 else end) + 1
            self._scan(text[start : self._at - 1])
        elif not self._arithmetic(start - 1):
            self._at = self._scan(text, start, is_substitution=True)
        inner = text[start : self._at - 1]
        if len(inner) < _MAX_OWN_FOLDER and re.search(r"\bdirname\b.*(\$0|BASH_SOURCE)", inner):
            del self._shell.commands[before:]  # its `cd` is no change of the folder
            return "${0%/*}" if ".." not in inner else "${0%/*}/.."
        return "${PWD}" if inner.strip() in ("pwd", "pwd -P") else "$"

    def _arithmetic(self, at: int) -> bool:
        """Read `((...))`, whose substitutions are commands; whether it is there."""
        found = _ARITHMETIC.match(self._text, at)
        if found is None or _TWO_WORDS.search(found[1]):
            return False
        self._at = found.end()
        self._scan(f': "{found[1]}"')
        return True

    def _scan(self, text: str, at: int = 0, *, is_substitution: bool = False) -> int:
        """Read nested commands; where they end."""
        self._deepen(1)
        end = _Scanner(text, self._shell, at, self._depth, is_substitution=is_substitution).run()
        self._deepen(-1)
        return end

    def _take(self, word: str) -> None:
        redirection, self._redirection = self._redirection, ""
        if redirection == "<":
            self._inputs.append(word)
        elif redirection in ("<<", "<<-"):
            self._heredocs.append(word)
        elif redirection:
            if ">" in redirection and not (redirection == ">&" and not word.strip("0123456789-")):
                self._outputs.append(word)
                self._inputs += [word] if ">>" in redirection else []
        elif not self._words and (assigned := _ASSIGNMENT.fullmatch(word)):
            self._assigned.append(assigned)
        elif self._words or word not in _KEYWORDS:
            self._words.append(word)
            if word == "in" and self._words[0] == "case" and len(self._words) == 3:
                self._end_command()
                self._in_pattern, self._is_certain = True, False
        else:
            self._is_certain = False
            self._in_pattern &= word != "esac"

    def _end_command(self) -> None:
        """Note the command that ends here, if there is one."""
        shell, words, assigned = self._shell, self._words, self._assigned
        if words and words[0] in _DECLARING:
            assigned += filter(None, map(_ASSIGNMENT.fullmatch, words[1:]))
        elif words and words[0] in ("for", "select") and words[2:3] == ["in"]:
            shell.assign(words[1], *words[3:])
        for each in assigned:
            shell.assign(each[1], each[2])
        if self._is_certain:
            names = Counter(NAME.findall(self._text, self._began, self._at))
            if not words or words[0] in _DECLARING:  # `A=1 make` sets it for one command
                once = {each[1] for each in assigned if each[0][len(each[1])] == "=" and names[each[1]] == 1}
                shell.overwritten |= once - self._named
            self._named.update(names)
            self._began = self._at
        if words[1:] == ["{"]:
            shell.functions.add(words[0])
        if words or self._outputs or self._inputs:
            shell.commands.append(Command(tuple(words), tuple(self._outputs), tuple(self._inputs)))
        self._words, self._outputs, self._inputs, self._assigned, self._redirection = [], [], [], [], ""

    def _skip_heredocs(self) -> None:
        """Skip the heredocs of the line that has just ended; one that a shell reads is a script."""
        shell, text = self._shell, self._text
        words = (word for command in shell.commands[self._line :] for word in command.words)
        of_shell = any(SHELL.fullmatch(word.rpartition("/")[2]) for word in words)
        for delimiter in self._heredocs:
            end = re.compile(rf"^[ \t]*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(text, self._at)
            if end is None:  # it was a shift (`1 << N`): nothing may be skipped
                shell.spend(len(text) - self._at)
                continue
            body, self._at = text[self._at : end.start()], end.end()
            if of_shell:
                self._scan(body)
            else:
                shell.texts.append(body)
        self._heredocs, self._line = [], len(shell.commands)


_OWN_FOLDER = re.compile(r"\$\{(0|BASH_SOURCE(\[0\])?)%/\*\}")
_PATTERN = re.compile(r"[*?]|\[.+\]")
_UNKNOWN = re.compile(r"\$(\{[^}]*\}|\w*)")
_EXPANDABLE = re.compile("[${]")
_BRACES = re.compile(r"(?<!\$)\{([^{}]*,[^{}]*)\}")
_MAX_STEPS = 16
_MAX_EXPANSIONS = 1000
_FEW = 10
_MAX_WORD = 8192
_MAX_PATH = 4096


class Paths:
    """The paths of one script."""

    def __init__(self, cwd: str, folder: str, env: Mapping[str, str], look: NodeFiles) -> None:
        """`cwd` is where the script runs, `folder` contains it."""
        self.bases = list(dict.fromkeys((cwd, folder)))
        """Folders that relative words may start from, the likeliest first."""
        # Values of secrets must not get into addresses, file names or messages.
        self._values = {name: [value] for name, value in env.items() if not looks_secret(name)} | {"PWD": [cwd]}
        """Known values of variables, the likeliest last: branches of a script may give different ones."""
        self._maybe_unset: set[str] = set()
        """Variables that only the script sets, perhaps in a branch."""
        self._existing: dict[str, list[str]] = {}
        """Results of `existing` with these values and folders."""
        self._folder = folder
        self._look = look

    def learn(self, assignments: Mapping[str, Iterable[str]], overwritten: Set[str]) -> None:
        """Learn the values that the script gives to variables, to some of them before it reads the start's."""
        for name, assigned in assignments.items():
            if not looks_secret(name):
                known = [] if name in overwritten else [*self._values.get(name, [])]
                if not known:
                    self._maybe_unset.add(name)
                for value in assigned:
                    # `A=${A:-1}` and `A=$A/x` read the value before, in a branch perhaps the first. No value may name
                    # the variable itself: each expansion would multiply the meanings.
                    texts = _expansions(value, {name: [*known[:1], *known[-1:]]})
                    known += [_expansions(each, {name: ["${}"]})[0] for each in reversed(texts)]
                self._values[name] = list(dict.fromkeys(known))
                self._existing.clear()

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
        """Let relative words start from a folder, which the script may make; they may still start from the others."""
        for path in self.existing(word) or self.certain(word):
            if self._look.kind(path) != "file" and path != self.bases[0]:
                self._existing.clear()
                self.bases = [path, *(base for base in self.bases if base != path)]

    def candidates(self, word: str) -> list[str]:
        """Absolute paths that a word may mean, or several words in it or in a variable. An unknown variable at its
        beginning stands for any of the folders; it may also be empty, as any other that may be unset."""
        found = [self._plain(word)]
        if _EXPANDABLE.search(word):
            values = self._values | {name: ["", *self._values[name]] for name in self._maybe_unset}
            found = texts = [] if "\n" in word else self._texts(word, values)
            if (parts := word.split()) != [word]:  # text with many variables has too many meanings for all of them
                texts = [*found[:_FEW], *(text for part in parts for text in self._texts(part, values))]
            found = [*found, *(each for text in texts for each in text.split() if each.strip(ANY_NAME))]
        return list(dict.fromkeys(path for each in found for path in self._absolute(each)))

    def _texts(self, word: str, values: Mapping[str, Sequence[str]]) -> list[str]:
        meanings = self.meanings(word, values)
        return meanings + [_UNKNOWN.sub("", each) for each in meanings if "$" in each and not _PATTERN.search(each)]

    def existing(self, word: str) -> list[str]:
        """The candidates that exist; a pattern means all matches."""
        if word not in self._existing:
            self._existing[word] = [found for path in self.candidates(word) for found in self._matches(path)]
        return self._existing[word]

    def _matches(self, path: str) -> list[str]:
        folder, _, last = path.rpartition("/")
        if not _PATTERN.search(path):
            return [path] if self._look.kind(path) else []
        folders = self._matches(folder) if _PATTERN.search(folder) else [folder]
        found = ((each, name) for each in folders for name in self._look.names(each or "/"))
        return [f"{each}/{name}" for each, name in found if fnmatch.fnmatchcase(name, last)]

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
        paths = (posixpath.normpath(posixpath.join(base, word)) for base in self.bases)
        return [f"/{path.lstrip('/')}" for path in paths]  # POSIX keeps two slashes


def _expansions(word: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    """What the word may be when `$NAME`, `${NAME}` and `${NAME:-default}` are replaced by known values, and `{a,b}` by
    its parts: one word for each combination, those with the last values first."""
    words = [word]
    steps = _MAX_STEPS if _EXPANDABLE.search(word) else 0  # values may contain further variables, and themselves
    for _ in range(steps):
        after = list(dict.fromkeys(changed for each in words for changed in _replaced(each, values)))[:_MAX_EXPANSIONS]
        if after == words or max(map(len, after)) > _MAX_WORD:
            break
        words = after
    return words


def _replaced(word: str, values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The word with each value of its first known variable, or without one each part of its first braces."""
    for found in _EXPANDED.finditer(word):
        default = () if found["default"] is None else (found["default"],)
        if known := values.get(found["braced"] or found["bare"]) or default:
            for value in reversed(known):
                yield f"{word[: found.start()]}{value}{word[found.end() :]}"
            return
    braces = _BRACES.search(word)
    if braces is None:
        yield word
    else:
        yield from (f"{word[: braces.start()]}{part}{word[braces.end() :]}" for part in braces[1].split(","))
