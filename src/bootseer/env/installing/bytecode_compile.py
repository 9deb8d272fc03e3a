"""Compile installed packages to bytecode on all cores, so that no start compiles them.

pip compiles on one core, which takes two thirds of its time; uv does not compile. Bytecode is made by the function of
the standard library that pip calls, too: it has time and size of its source, so that Python notices edits. A snapshot
sets the times (ADR 16). `python -m compileall -j` is parallel only within each folder, and its workers stay behind when
it is killed.

Files that do not compile (for another Python, templates) are skipped, as by pip.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence

from bootseer.env.installing.interpreter import READ_RECORD
from bootseer.env.installing.packages import Distribution

_LIBRARY = re.compile(r"(?P<prefix>.*)/lib(?:64)?/(?P<python>python3[^/]*)/(?:site|dist)-packages(?:/|$)")

# Arguments: number of workers, then records of distributions. For any Python 3. Forked workers take files of all sizes
# in turn, and end with their parent.
_PROGRAM = (
    READ_RECORD
    + r"""
import compileall

def sources(records):
    for record in records:
        for name in files_in(record):
            if name.endswith(".py"):
                path = os.path.normpath(os.path.join(os.path.dirname(record), name))
                try:
                    yield os.stat(path).st_size, path
                except OSError:
                    pass

found = [path for _, path in sorted(set(sources(sys.argv[2:])), reverse=True)]
num_workers = max(1, min(int(sys.argv[1]), len(found)))
parent, workers = os.getpid(), []
for number in range(num_workers):
    worker = os.fork()
    if worker == 0:
        try:
            for path in found[number::num_workers]:
                if os.getppid() != parent:
                    break
                try:
                    compileall.compile_file(path, quiet=2)
                except Exception:
                    pass
            os._exit(0)
        finally:
            os._exit(1)
    workers.append(worker)
sys.exit(any([os.waitpid(worker, 0)[1] for worker in workers]))
"""
)


def compile_command(python: str, distributions: Iterable[Distribution], workers: int) -> tuple[str, ...]:
    """The command that compiles the sources in these distributions' records that have no valid bytecode.

    It writes only bytecode, regardless of PYTHONDONTWRITEBYTECODE. Exit code 1: a worker died (no memory, a crash of
    the compiler); Python compiles its remaining files at import, as usual.
    """
    records = sorted({each.record for each in distributions if each.record.endswith(".dist-info")})
    # Without `site`: no start-up file of the environment is run.
    return python, "-S", "-W", "ignore", "-c", _PROGRAM, str(workers), *records


def by_interpreter(
    distributions: Iterable[Distribution], python: str, folders: Sequence[str]
) -> dict[str, list[Distribution]]:
    """Distributions by the Python that compiles them: the job's for its own folders, otherwise that of the environment
    which the setup created. If the Python of a folder is unknown (`--target`), it is the job's."""
    known = {posixpath.normpath(folder) for folder in folders}
    found: dict[str, list[Distribution]] = {}
    for each in distributions:
        folder = posixpath.dirname(each.record)
        place = _LIBRARY.match(folder)
        if place is None or posixpath.normpath(folder) in known:
            compiler = python
        else:
            compiler = f"{place['prefix']}/bin/{place['python']}"
        found.setdefault(compiler, []).append(each)
    return found
