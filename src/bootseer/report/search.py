"""Find the clues of all parsers in a block of log bytes in one pass.

Every log costs at least this pass, so it determines the speed of the whole scan. If the C library PCRE2 is available,
as nearly everywhere (grep and libselinux need it), its JIT-compiled code searches for all clues at once, at a speed
that hardly depends on how often they occur. Otherwise each clue's literal is searched with `memmem`, and its pattern
only in blocks that contain the literal. `make bench` (scan_foreign) measures it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Clue(NamedTuple):
    """What a line must contain to be of interest: a literal, followed by a pattern without capturing groups.

    The pattern must be valid for both `re` and PCRE2. It is matched on the raw line, in which quotes may be escaped.
    """

    literal: bytes
    then: bytes = b""

    @property
    def pattern(self) -> bytes:
        """Literal and pattern as one expression."""
        return re.escape(self.literal) + self.then


class Search:
    """Searches for clues. If two match at the same offset, only one of them is reported."""

    def __init__(self, clues: Sequence[Clue]) -> None:
        # Grouped by first byte, so that the library can rule out most offsets with one table lookup.
        self._order = sorted(range(len(clues)), key=lambda index: clues[index].literal)
        self._clues = [(clues[index].literal, re.compile(clues[index].pattern)) for index in self._order]
        by_first: dict[bytes, list[bytes]] = {}
        for index in self._order:
            rest = re.escape(clues[index].literal[1:]) + clues[index].then
            by_first.setdefault(re.escape(clues[index].literal[:1]), []).append(b"(" + rest + b")")
        self._all = b"|".join(first + b"(?:" + b"|".join(rests) + b")" for first, rests in by_first.items())
        self._compiled = _pcre2(self._all)

    def hits(self, text: bytes) -> Iterator[tuple[int, int]]:
        """The offsets of all matches with the indexes of their clues, in no particular order."""
        found = self._compiled(text) if self._compiled is not None else None
        for place, number in self._python(text) if found is None else found:
            yield place, self._order[number]

    def _python(self, text: bytes) -> Iterator[tuple[int, int]]:
        for number, (literal, pattern) in enumerate(self._clues):
            begin = fastest_find(text, literal, 0)
            if begin >= 0:
                yield from ((match.start(), number) for match in pattern.finditer(text, begin))


def _pcre2(pattern: bytes) -> Callable[[bytes], list[tuple[int, int]] | None] | None:
    """A function that returns all matches with the indexes of their groups, from 0; None if the library is missing.

    The function returns None if the library gives up on a text.
    """
    try:
        library = ctypes.CDLL("libpcre2-8.so.0")
        word, size = ctypes.c_void_p, ctypes.c_size_t
        _declare(library.pcre2_compile_8, word, ctypes.c_char_p, size, ctypes.c_uint32, word, word, word)
        _declare(library.pcre2_jit_compile_8, ctypes.c_int, word, ctypes.c_uint32)
        _declare(library.pcre2_match_data_create_from_pattern_8, word, word, word)
        _declare(library.pcre2_get_ovector_pointer_8, ctypes.POINTER(size), word)
        match = library.pcre2_match_8
        _declare(match, ctypes.c_int, word, ctypes.c_char_p, size, size, ctypes.c_uint32, word, word)
    except (OSError, AttributeError):
        return None
    code = library.pcre2_compile_8(
        pattern, len(pattern), 0, ctypes.byref(ctypes.c_int()), ctypes.byref(ctypes.c_size_t()), None
    )
    if not code or library.pcre2_jit_compile_8(code, 1):  # without JIT it is slower than `re`
        return None
    data = library.pcre2_match_data_create_from_pattern_8(code, None)
    if not data:
        return None
    place = library.pcre2_get_ovector_pointer_8(data)

    def all_matches(text: bytes) -> list[tuple[int, int]] | None:
        found = []
        begin = 0
        while (answer := match(code, text, len(text), begin, 0, data, None)) > 0:
            found.append((place[0], answer - 2))
            begin = place[0] + 1  # another clue may begin within this match
        return found if answer == -1 else None

    return all_matches


def _declare(function: Any, result: Any, *arguments: Any) -> None:
    function.restype, function.argtypes = result, arguments


_memmem = ctypes.CDLL(None).memmem
_declare(_memmem, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)


def fastest_find(text: bytes, needle: bytes, begin: int) -> int:
    """`bytes.find` with the C library's `memmem`, which is three times as fast."""
    # The caller holds a reference to `text`, and bytes are immutable: the address stays valid during the call.
    base = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0  # only the address of None would be None
    found = _memmem(base + begin, len(text) - begin, needle, len(needle))
    return -1 if found is None else int(found) - base


def line_starts(text: bytes, needle: bytes) -> Iterator[int]:
    """Offsets of the lines that contain the needle, each once. `needle` must not be empty."""
    place = fastest_find(text, needle, 0)
    while place >= 0:
        yield text.rfind(b"\n", 0, place) + 1
        after = text.find(b"\n", place)
        if after < 0:
            return
        # Shortcut for spools, where each line begins with the needle.
        place = after + 1 if text.startswith(needle, after + 1) else fastest_find(text, needle, after)
