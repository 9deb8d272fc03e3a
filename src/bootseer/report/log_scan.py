"""Find events and lines of other programs in logs of any kind and size.

Why search before decoding: a training log has gigabytes, of which a few hundred lines are about the startup. Splitting
it into lines, decoding them and trying some ninety patterns on each takes minutes. So a block of raw bytes is searched
as a whole for the event tag (`memmem`) and for the clues of all parsers in one pass (`search.Search`). Only around a
hit the line is cut out, stripped of what log collectors added (docker's JSON, CRI's partial lines), decoded, and passed
to the event decoder or to the parsers that asked for it. Line numbers come from counting newlines between hits.

The price: blocks end anywhere, so a line, an event or a record that a collector split must not be cut at a block's end
(`_FileScan.feed`, `_open_record`), and each parser must name clues that every line it needs contains.

Nothing here raises on bad content: what cannot be read is counted by reason.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from bootseer.errors import PermanentError, UsageError
from bootseer.logs import logger
from bootseer.report import inputs
from bootseer.report.foreign.parser import FOREIGN, Line, Parser
from bootseer.report.foreign.program_tables import parsers, search
from bootseer.report.foreign.rules import Site
from bootseer.report.foreign.times import line_time, other_unit
from bootseer.report.foreign.torchelastic import AGENT
from bootseer.report.scanned import Scanned, name_jobs
from bootseer.report.search import fastest_find, line_starts
from bootseer.trace.event import MAX_READ_BYTES, TAG_STEM, Event, Malformed, decode, encodable, from_json
from bootseer.trace.sinks import SUFFIX

_LOG = logger(__name__)
_MAX_LINE = 1 << 20
"""Bytes of an unfinished line that are kept while waiting for its newline."""
_MAX_PARTS = 64
_CRI = re.compile(rb"(\d{4}-\d\d-\d\dT\S{1,40} (?:stdout|stderr)) ([PF])(?::\S*)? ")
_PARTIAL = (b" stdout P ", b" stderr P ")
_DOCKER = (b'{"log":"', b'{"log": "')
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
_POD = re.compile(rb"\[pod/([a-z0-9.-]{1,253})/")
_TAG = re.compile(re.escape(TAG_STEM) + rb"\d{1,4} \{")
_MAX_TAG = 16
_MAX_SEEN = 1 << 16
_DAEMONS = frozenset({"slurmd", "kubelet", "containerd", "crio", "dockerd"})
"""Their log files often have the node after the program: `slurmd.gpu-17.log`."""
_SLOW_S = 10.0
Progress = Callable[[int], None]


def scan(
    sources: Iterable[inputs.Source],
    *,
    patterns: Sequence[tuple[str, re.Pattern[bytes]]] = (),
    job: str | None = None,
    progress: Progress | None = None,
) -> Scanned:
    """Scan the sources.

    patterns: stages with patterns of the site's own lines (`foreign.rules.Site`).
    job: of several jobs in a scheduler's log, the one to which lines without a job belong.
    progress: called with the number of bytes read so far.

    Raises `PermanentError` if a file that the user named cannot be read; one in a folder is only counted. Raises
    `UsageError` if a pattern takes seconds for a block.
    """
    result = Scanned()
    for source in sources:
        result.files += 1
        reader = _FileScan(source, result, patterns)
        with _counting_faults(source, result):
            for block in inputs.blocks(source):
                reader.feed(block)
                result.bytes += len(block)
                if progress is not None:
                    progress(result.bytes)
        reader.finish()
        _LOG.debug("%s: %d lines; %d events so far", source.name, reader.lines, len(result.events))
    name_jobs(result, job)
    return result


class Growing:
    """Scans logs while they are written: each `look` reads what was added since the last one.

    Findings of foreign logs are complete only at the end, because later lines belong to them. Compressed files are read
    once.
    """

    def __init__(self, patterns: Sequence[tuple[str, re.Pattern[bytes]]] = (), job: str | None = None) -> None:
        self.result = Scanned()
        self._job = job
        self.over = False
        """Standard input has ended."""
        self._patterns = patterns
        self._files: dict[str, _FileScan] = {}
        self._read: dict[str, tuple[int, float]] = {}
        """Inode and bytes read of each file."""

    def look(self, sources: Iterable[inputs.Source]) -> list[Event]:
        """The events since the last call. Raises `PermanentError` like `scan`."""
        known = len(self.result.events)
        for source in sources:
            inode, size = inputs.state(source)
            before, offset = self._read.get(source.name, (inode, 0))
            if inode != before or size < offset < math.inf:  # rotated
                self._files.pop(source.name).finish()
                offset = 0
            elif offset in (size, math.inf):
                continue
            reader = self._files.get(source.name)
            if reader is None:
                self.result.files += 1
                reader = self._files[source.name] = _FileScan(source, self.result, self._patterns)
            self._read[source.name] = (inode, size)  # what cannot be read is counted once
            with _counting_faults(source, self.result):
                if archive := not offset and inputs.is_archive(source):
                    self._read[source.name] = (inode, math.inf)
                for block in inputs.blocks(source) if archive else inputs.new_blocks(source, int(offset)):
                    reader.feed(block)
                    self.result.bytes += len(block)
                    offset += len(block)
                    self.over |= not block
                self._read[source.name] = (inode, math.inf if archive or self.over else offset)
        return self.result.events[known:]

    def finish(self) -> Scanned:
        for reader in self._files.values():
            reader.finish()
        name_jobs(self.result, self._job)
        return self.result


class _FileScan:
    """One file's scan: keeps the unfinished last line between blocks."""

    def __init__(
        self, source: inputs.Source, result: Scanned, patterns: Sequence[tuple[str, re.Pattern[bytes]]]
    ) -> None:
        self.source = source
        self.result = result
        self.patterns = patterns
        is_spool = source.name.removesuffix(".zst").endswith(SUFFIX)  # it contains only events
        self.parsers: list[Parser] = [] if is_spool else parsers()
        self.sites = [] if is_spool else [Site(stage, pattern) for stage, pattern in patterns]
        self.rest = b""
        self.lines = 0
        # Collected logs usually have one file per node.
        names = source.path.name.split(".") if source.path is not None else ["stdin"]
        self.node = encodable(names[names[0] in _DAEMONS and len(names) > 2])
        self.near_ns = source.modified_ns
        self.seen: set[int] = set()
        """Hashes of the latest lines that were passed to parsers."""
        self.pods: dict[bytes, _FileScan] = {}
        """The scans of the lines that `kubectl logs --prefix` labels with a pod."""

    def feed(self, block: bytes) -> None:
        text = self.rest + block if self.rest else block
        end = text.rfind(b"\n") + 1
        if not end and len(text) < _MAX_LINE:
            self.rest = text
            return
        if not end:  # an endless line, such as progress bars
            end = len(text) - _MAX_TAG
            last = text.rfind(TAG_STEM, max(len(text) - MAX_READ_BYTES, 1))
            end = last if last > 0 else end  # do not cut an event
        end = _open_record(text, end)
        self.rest = text[end:]
        if end:
            self._scan(text[:end])

    def finish(self) -> None:
        if self.rest:
            self._scan(self.rest)
            self.lines += not self.rest.endswith(b"\n")
        self.rest = b""
        self.result.lines += self.lines
        for pod in self.pods.values():
            pod.finish()
        found = [parser.finish() for parser in (*self.parsers, *self.sites)]
        events = [event for one in found for event in one.events]
        hosts = dict.fromkeys(event.node for event in events if event.attrs[FOREIGN] == "nccl")
        if found:
            self.result.hosts[self.node].update(hosts)
        if len(hosts) == 1:
            events = [event._replace(node=min(hosts)) if event.node == self.node else event for event in events]
        self.result.events += events
        self.result.facts += [fact for one in found for fact in one.facts]

    def _scan(self, text: bytes) -> None:
        """Process a block of whole lines, in order."""
        if b"\x1b" in text:  # colours may be within what is searched for
            text = _ANSI.sub(b"", text)
        hits = self._wanted(text)
        own = list(line_starts(text, TAG_STEM))
        events = set(own)
        # In CRI logs an event may be split over several lines: also take those that end within a tag.
        for needle in _PARTIAL if _CRI.match(text) else ():
            events.update(begin for begin in line_starts(text, needle) if _ends_in_tag(text, begin))
        counted = 0
        for begin in sorted(events | hits.keys()):
            self.lines += text.count(b"\n", counted, begin)
            counted = begin
            raw = _unwrapped(text, begin)
            if begin in events:
                self._events(raw)
            wanted = hits.get(begin)
            # A line with an event is not a foreign log line, even if it contains a clue.
            if wanted and TAG_STEM not in raw:
                of = self._of(raw)
                line = of._line(raw, self.lines + 1)
                if line.wall_ns is not None and hash(raw) in self.seen:
                    continue  # collectors repeat lines: a stage would begin twice, and end once
                if len(self.seen) == _MAX_SEEN:  # a word that parsers search for may be in each line of a long log
                    self.seen.clear()
                self.seen.add(hash(raw))
                for index in wanted:
                    (*of.parsers, *of.sites)[index].feed(line)
        self.lines += text.count(b"\n", counted)
        for of in (self, *self.pods.values()):
            for site in of.sites:  # a start may be followed by them
                self.result.events += site.taken()

    def _of(self, raw: bytes) -> _FileScan:
        """The scan to which a line belongs: of the pod that it names, or this one."""
        if (named := _POD.match(raw)) is None:
            return self
        if (pod := self.pods.get(named[1])) is None:
            pod = self.pods[named[1]] = _FileScan(self.source, self.result, self.patterns)
            pod.node = named[1].decode()
        return pod

    def _wanted(self, text: bytes) -> dict[int, dict[int, None]]:
        """The places of the parsers and sites that want a line, by the line's offset."""
        hits: dict[int, dict[int, None]] = defaultdict(dict)
        done = [index for index, parser in enumerate(self.parsers) if parser.done]
        if done and fastest_find(text, AGENT, 0) >= 0:  # after a restart, lines about steps are of interest again
            done = []
        clues, wanting = search(frozenset(done))
        for place, number in clues.hits(text) if self.parsers else ():
            hits[text.rfind(b"\n", 0, place) + 1].update(dict.fromkeys(wanting[number]))
        for index, site in enumerate(self.sites, len(self.parsers)):
            with _in_time(site.pattern):
                for match in site.pattern.finditer(text) if not site.done else ():
                    hits[text.rfind(b"\n", 0, match.start()) + 1][index] = None
        return hits

    def _line(self, raw: bytes, number: int) -> Line:
        text = raw.decode("utf-8", "replace")
        wall_ns = line_time(text, reference_ns=self.near_ns)
        return Line(text, self.source.name, number, wall_ns, self.node)

    def _events(self, raw: bytes) -> None:
        # A stem quoted in prose is not a damaged event. Events contain no tags, so each ends before the next tag.
        alone = _TAG.match(raw) is not None and raw.find(TAG_STEM, 1) < 0
        places = [0] if alone else [tag.start() for tag in _TAG.finditer(raw)]
        for place, until in pairwise([*places, len(raw)]):
            try:
                event = decode(raw[place:until])
            except Malformed as error:
                self.result.skipped[error.reason] += 1
                continue
            if other_unit(event.wall_ns, event.mono_ns):
                self.result.skipped["unit"] += 1
            else:
                self.result.events.append(event)


@contextlib.contextmanager
def _counting_faults(source: inputs.Source, result: Scanned) -> Iterator[None]:
    """Count a file that is cut or cannot be read. Raises `PermanentError` if the user named it."""
    try:
        yield
    except inputs.Cut:
        result.skipped["archive_cut"] += 1
    except PermanentError:
        if source.named:
            raise
        result.skipped["unreadable"] += 1


@contextlib.contextmanager
def _in_time(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Abort a user's pattern that backtracks for too long: `re` checks for signals while it matches."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        text = pattern.pattern.decode("utf-8", "replace")
        raise UsageError(
            f"pattern {text[:200]!r} took more than {_SLOW_S:.0f} s for 1 MB of log",
            hint="simplify it: avoid nested repetitions, and use `.*` sparingly",
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _SLOW_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _open_record(text: bytes, end: int) -> int:
    """Offset of the first CRI record that continues after `end`, so that it is not cut; `end` if there is none."""
    first = begin = end
    closed = set()
    for _ in range(_MAX_PARTS):
        if not begin:
            break
        begin = text.rfind(b"\n", 0, begin - 1) + 1
        match = _CRI.match(text, begin)
        if match is None:
            break
        stream = match[1].rpartition(b" ")[2]
        if match[2] == b"F":
            closed.add(stream)
        elif stream not in closed:
            first = begin
            closed.clear()  # nor must a record be cut that ends behind this one's begin
    return first if end - first < _MAX_LINE else end


def _ends_in_tag(text: bytes, begin: int) -> bool:
    """Whether the line at `begin` ends within a tag that the next part completes."""
    end = text.find(b"\n", begin)
    tail = text[begin : end if end >= 0 else len(text)][-_MAX_TAG:]
    place = tail.rfind(b"@")
    return place >= 0 and TAG_STEM.startswith(tail[place:])


def _unwrapped(text: bytes, begin: int) -> bytes:
    """The line at `begin` as the program wrote it, after the time that the collector added."""
    end = text.find(b"\n", begin)
    line = text[begin : end if end >= 0 else len(text)]
    line = line.strip(b"\0\r")  # a log that was truncated under its writer begins with NULs
    if line.startswith(TAG_STEM):
        return line
    if line.startswith(b'{"'):
        return from_json(line) if line.startswith(_DOCKER) or TAG_STEM in line else line
    match = _CRI.match(line)
    if match is None or match[2] == b"F":
        return line
    parts = [line]
    for _ in range(_MAX_PARTS):
        if end < 0:
            break
        begin, end = end + 1, text.find(b"\n", end + 1)
        part = text[begin : end if end >= 0 else len(text)]
        more = _CRI.match(part)
        if more is None or more[1].rpartition(b" ")[2] != match[1].rpartition(b" ")[2]:
            continue
        parts.append(part[more.end() :])
        if more[2] == b"F":
            break
    return b"".join(parts)
