"""Which commit a branch or a tag is now, so that a moved branch is another key.

Asks `git ls-remote`, for repositories of this machine and for remote ones, each with a deadline, never for a password.
Called by `request_key`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping

from bootseer.env.keys.requirement import Requirement
from bootseer.io.tasks import Tasks
from bootseer.machine import child

DEADLINE_S = 5.0
_MAX_ASKED = 32
_COMMIT = re.compile(r"([0-9a-f]{40}|[0-9a-f]{64})\t(\S+)")


def commits(wanted: Iterable[Requirement], env: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """The commit for each address and reference; those that could not be told are not there."""
    asked = list(wanted)
    found = {(item.target, item.reference): item.reference for item in asked if item.pinned}
    open_ones = [item for item in asked if not item.pinned and item.target.startswith("git+")][:_MAX_ASKED]
    program = shutil.which("git", path=env.get("PATH"))
    if program is None or not open_ones:
        return found
    quiet = {**env, "GIT_TERMINAL_PROMPT": "0", "GIT_ASKPASS": "true", "SSH_ASKPASS": "true", "LC_ALL": "C"}
    quiet.setdefault("GIT_SSH_COMMAND", f"ssh -o BatchMode=yes -o ConnectTimeout={DEADLINE_S:.0f}")
    with Tasks("bootseer-git", min(8, len(open_ones))) as pool:
        answers = list(pool.map(lambda item: _ask(program, item, quiet), open_ones))
    for item, commit in zip(open_ones, answers, strict=True):
        if commit:
            found[item.target, item.reference] = commit
    return found


def _ask(program: str, item: Requirement, env: Mapping[str, str]) -> str:
    address, reference = item.target.removeprefix("git+"), item.reference or "HEAD"
    if address.startswith("-") or reference.startswith("-"):
        return ""
    # The patterns are matched against ends of names: `main` would also find `feature/main`.
    answer = child.run(
        [program, "ls-remote", "--", address, reference, f"{reference}^{{}}"], deadline_s=DEADLINE_S, env=env
    )
    if answer.code != 0:
        return ""
    lines: dict[str, str] = {name: commit for commit, name in _COMMIT.findall(answer.output)}
    for name in (reference, f"refs/tags/{reference}^{{}}", f"refs/tags/{reference}", f"refs/heads/{reference}"):
        if name in lines:
            return lines[name]
    return ""
