"""Check an environment before it is shared: installed code that is missing, imports requested by the user, and new
version conflicts.

Conflicts are checked separately, since some users deliberately install against declared requirements. The exit code of
the setup is checked by the launcher. `run` has the view of a restored start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from bootseer.env.installing.interpreter import READ_RECORD, SAFE_PATH, Run, last_line, module_command
from bootseer.env.installing.packages import Distribution, Installed
from bootseer.env.keys.node import Interpreter
from bootseer.env.keys.requirement import normalised

_DEADLINE_S = 60.0
IMPORT_DEADLINE_S = 300.0
"""For one import: the first one after a large installation reads gigabytes."""
_MAX_PROBLEMS = 20
# The user's own modules may lie in the working folder; it comes last, so that it hides no installed module.
_IMPORT = f"{SAFE_PATH}; import importlib; sys.path.append(''); importlib.import_module(sys.argv[1])"
# Output of pip: "a 1.0 requires b, which is not installed." and "a 1.0 has requirement b>2, but you have b 1.0."
_CONFLICT = re.compile(
    r"(?P<name>\S+) (?P<version>\S+) (?:requires|has requirement) (?P<other>[\w.-]+)"
    r".*?(?:, but you have \S+ (?P<has>\S+?))?\.?"
)

# Arguments: records of distributions. Prints [[record, number of missing files, one of them], ...]. Only code counts,
# without tests and examples: setups delete other files to make environments smaller.
_QUESTION = (
    READ_RECORD
    + r"""
import json, re
SPARED = {"test", "tests", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks"}
found = []
for record in sys.argv[1:]:
    missing = [
        name for name in files_in(record)
        if re.search(r"\.py$|\.so(\.[0-9.]+)?$|^\.\./.*/bin/[^/]+$", name)
        and not SPARED.intersection(name.split("/"))
        and not os.path.lexists(os.path.join(os.path.dirname(record), name))
    ]
    if missing:
        found.append([record, len(missing), missing[0]])
print(json.dumps(found))
"""
)


def validate(
    python: Interpreter, new: Iterable[Distribution], env: Mapping[str, str], run: Run, *, imports: Sequence[str] = ()
) -> list[str]:
    """Defects as messages, at most about twenty. `new` are the distributions that the setup installed; the job will run
    in `env`."""
    problems = _missing_files(python, new, env, run)
    for module in imports:
        problems += _check_import(module, python, env, run)
    return problems[:_MAX_PROBLEMS]


def _missing_files(python: Interpreter, new: Iterable[Distribution], env: Mapping[str, str], run: Run) -> list[str]:
    argv = [python.executable, "-S", "-c", _QUESTION, *(each.record for each in new)]
    ran = run(argv, env=env, deadline_s=_DEADLINE_S)
    try:
        found = [(str(record), int(count), str(one)) for record, count, one in json.loads(ran.stdout)]
    except (ValueError, TypeError):
        return [f"{python.executable} does not run in the new environment: {last_line(ran)}"]
    problems = []
    for record, count, one in found:
        name = record.rpartition("/")[2].removesuffix(".dist-info")
        more = f" and {count - 1} more of its files are" if count > 1 else " is"
        problems.append(f"{name} is not whole: {one}{more} missing")
    return problems


def conflicts(python: Interpreter, before: Installed, env: Mapping[str, str], run: Run) -> list[str]:
    """Conflicts that `pip check` reports and that are new. An environment without pip is not checked."""
    if not python.pip:
        return []
    argv = module_command(python.executable, "pip", "--disable-pip-version-check", "check")
    ran = run(argv, env=env, deadline_s=_DEADLINE_S)
    if ran.code != 1:  # a broken or hanging pip gives no conflicts
        return []
    old = {each.name: each.version for each in before.distributions}
    problems = []
    for line in ran.stdout.splitlines():
        found = _CONFLICT.fullmatch(line.strip())
        if found is None:
            continue
        now = {normalised(found["name"]): found["version"], normalised(found["other"]): found["has"]}
        if any(old.get(name) != version for name, version in now.items()):
            problems.append(line.strip().rstrip("."))
    return problems[:_MAX_PROBLEMS]


def _check_import(module: str, python: Interpreter, env: Mapping[str, str], run: Run) -> list[str]:
    """In a process of its own: one failed import must not affect the next."""
    if not all(map(str.isidentifier, module.split("."))):
        return [f"{module!r} is not a module name"]
    ran = run([python.executable, "-c", _IMPORT, module], env=env, deadline_s=IMPORT_DEADLINE_S)
    if ran.code is None and ran.started:
        return [f"import {module} takes longer than {IMPORT_DEADLINE_S:g} s"]
    return [f"import {module} fails: {last_line(ran)}"] if ran.code != 0 else []
