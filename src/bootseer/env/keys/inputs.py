"""Everything that a setup names, followed to the end: scripts that run scripts, requirement files that include others.

Called by `request_key`.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping, Sequence

from bootseer.env.keys.files import NodeFiles
from bootseer.env.keys.script import Inputs, Script, read_program, read_script
from bootseer.errors import BootseerError

_MAX_SCRIPTS = 500
_SHELL = re.compile(rb"#!\s*\S*?(?:/env\s+(?:-\S+\s+)*)?\S*?(?:ba|da|z|k|a)?sh\b")
_PROGRAM = re.compile(rb"#!.*(python|perl|ruby|node)")
# Variables by which pip and uv are given files, and whether those only constrain.
_FILE_VARIABLES = {
    "PIP_REQUIREMENT": False,
    "PIP_CONSTRAINT": True,
    "UV_CONSTRAINT": True,
    "UV_OVERRIDE": True,
    "UV_BUILD_CONSTRAINT": True,
    "PIP_BUILD_CONSTRAINT": True,
}


def gather(
    setup: str | None, requirements: Sequence[str], cwd: str, env: Mapping[str, str], files: NodeFiles
) -> Inputs:
    """What the script and the files depend on. What cannot be read is among its problems, never an exception."""
    inputs = Inputs()
    for path in requirements:
        inputs.requirement_files[whole := posixpath.normpath(posixpath.join(cwd, path))] = False
        inputs.requirements.given.add(whole)
    for name, constraint in _FILE_VARIABLES.items():
        for word in env.get(name, "").split():
            inputs.requirement_files.setdefault(posixpath.normpath(posixpath.join(cwd, word)), constraint)
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_SRC"):
        if env.get(name) and not env[name].startswith("/"):
            inputs.place = f"{name} is relative to it"
    if setup is not None:
        path = posixpath.normpath(posixpath.join(cwd, setup))
        # Without the right to execute it is given to a shell, whatever its first line says.
        inputs.files[path] = not os.access(path, os.X_OK)
    read: set[str] = set()
    while waiting := [path for path in inputs.files if path not in read]:
        for path in waiting:
            read.add(path)
            if len(read) > _MAX_SCRIPTS:
                inputs.requirements.problems.append(
                    f"{setup}: names more than {_MAX_SCRIPTS:,} files; give it a folder"
                )
                return inputs
            _follow(path, cwd, env, files, inputs)
    inputs.requirements.add_files(inputs.requirement_files.items(), files, cwd)
    inputs.requirements.close()
    inputs.variables |= inputs.requirements.variables
    if inputs.requirements.uses_cwd and "VIRTUAL_ENV" not in env:
        inputs.place = inputs.place or "a checkout that is installed in place lies in it"
    return inputs


def _follow(path: str, cwd: str, env: Mapping[str, str], files: NodeFiles, inputs: Inputs) -> None:
    """Look into a file that the setup names, if it is one that names others."""
    if path in inputs.requirement_files:
        return
    try:
        head = files.read(path)
    except BootseerError:
        return  # too large or unreadable: its digest, if it has one, is all; the caller takes it
    if b"\0" in head[:8192]:
        return
    script = Script(head.decode("utf-8", "replace"), path, cwd, env)
    if inputs.files[path] or _SHELL.match(head) or path.endswith((".sh", ".bash")):
        if not (_PROGRAM.match(head) and not inputs.files[path]):
            read_script(script, files, inputs)
    elif _PROGRAM.match(head) or path.endswith(".py"):
        read_program(script, files, inputs)
