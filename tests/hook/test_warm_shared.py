"""A launcher that imports what its programs import does it once for all: it is as after exec, and so are they."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hook.test_warm import FACTS, HOOK, Launcher

pytestmark = pytest.mark.slow

# What is watched of the framework is missing here: its marks end, and nothing else.
TORCH = """
import os, sys
class default_generator:
    seed = staticmethod(lambda: 0)
def initial_seed():
    return 0
threads = os.environ.get("OMP_NUM_THREADS")
os.environ["SET_BY_TORCH"] = "yes"
print("torch is imported", file=sys.stderr)
"""
BEFORE = "import sys\nearly = 'torch' in sys.modules\nimport torch\n"
LAUNCH = """
import subprocess
os.environ.update(LAUNCHER=str(os.getpid()), GROUP=str(os.getpgid(0)))
child = {**os.environ, "OMP_NUM_THREADS": "3"}
done = subprocess.run([sys.executable, "-u", "child.py"], env=child, capture_output=True, text=True, input="x")
sys.__stdout__.write(json.dumps([early, done.returncode, done.stdout, done.stderr]) + "\\n")
sys.__stdout__.flush()
exec(sys.argv[1])
"""
FACTS_OF_LAUNCHER = FACTS.replace('os.environ["LAUNCHER"]', "os.getppid()").replace('os.environ["GROUP"]', "0")


class Shared(Launcher):
    """`torchrun`, which imports a small torch, and so does its program."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "library").mkdir()
        (folder / "library" / "torch").mkdir()
        self.write("library/torch/__init__.py", TORCH)
        self.known |= {"modules": ["torch", "colorsys"], "flags": ["-u"], "native": {"OMP_NUM_THREADS": "3"}}
        self.write("child.py", "import colorsys, torch\n" + FACTS.replace("streams=", "count=torch.threads, streams="))
        self.write("torchrun", f"#!{sys.executable}\n{BEFORE}{FACTS_OF_LAUNCHER}{LAUNCH}")
        (folder / "torchrun").chmod(0o755)

    def remember(self, main: str) -> None:
        super().remember(main)
        path = self.spool / "warm.json"
        record = json.loads(path.read_text())
        launchers = dict.fromkeys(("torchrun", "-m torch.distributed.run"), record["launchers"]["launch.py"])
        path.write_text(json.dumps({**record, "launchers": launchers}))

    def begin(self, *words: str, warm: bool = True, **options: Any) -> tuple[int, list[Any], str]:
        """The launcher's exit code, the lines of its output, and what it wrote as errors."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BOOTSEER_", "OMP_"))}
        env = {**clean, "PYTHONPATH": f"{HOOK}/path:{self.folder}/library", "BOOTSEER_JOB": "x"}
        env |= {"BOOTSEER_TRACE": f"spool:{self.spool}", "BOOTSEER_WARM": str(self.spool if warm else self.folder)}
        done = subprocess.run(
            words, env=env, cwd=self.folder, input="told\n", capture_output=True, text=True, timeout=300, check=False,
            **options,
        )  # fmt: skip
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def _comparable(facts: dict[str, Any]) -> dict[str, Any]:
    for name in ("LAUNCHER", "BOOTSEER_WARM", "GROUP"):
        facts["env"].pop(name, None)
    facts["environ"] = [word for word in facts["environ"] if word.partition("=")[0] in facts["env"]]
    facts["fds"] = [number for number, handed_on in facts["fds"].items() if handed_on]  # not those of the warm parent
    facts["ignored"] = int(facts["ignored"], 16) & ~(3 << 31)  # two of the C library's own, by its posix_spawn
    facts["flags"] = facts["flags"].replace("unbuffered=1", "unbuffered=0")  # of the launcher: as its programs have
    return facts


_ENDS = {
    "exit": "sys.exit(7)",
    "error": "def f():\n    raise ValueError('bad')\nf()",
    "signal": "import signal\nos.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.parametrize("way", ["exit", "error", "signal", "by name", "module"])
def test_launcher_and_program_find_what_they_find_after_exec(shared: Shared, way: str):
    words = [sys.executable, "torchrun", _ENDS.get(way, "")]
    if way == "by name":  # the kernel names the process after the script then
        words = ["./torchrun", ""]
    if way == "module":
        (shared.folder / "library/torch/distributed").mkdir()
        shared.write("library/torch/distributed/__init__.py", "")
        text = (shared.folder / "torchrun").read_text()
        shared.write("library/torch/distributed/run.py", text)
        words = [sys.executable, "-m", "torch.distributed.run", ""]
    shared.remember(str(shared.folder / "child.py"))
    by_exec, warm = shared.begin(*words, warm=False), shared.begin(*words)
    assert shared.reasons() == [""]
    early = [one[1][1].pop(0) for one in (by_exec, warm)]
    assert early == ([True, True] if way == "module" else [False, True])
    for code, (facts, child), _ in (by_exec, warm):
        assert code == {"exit": 7, "error": 1, "signal": -signal.SIGTERM}.get(way, 0)
        assert child[0] == 0, child
        _comparable(facts)
        child[1] = _comparable(json.loads(child[1]))
        assert child[1]["count"] == "3"
        assert child[1]["ours"]
    assert warm[1][0] == by_exec[1][0]
    assert warm == by_exec


def test_a_framework_that_does_more_than_define_costs_the_launcher_one_more_beginning(shared: Shared):
    shared.write("library/torch/__init__.py", TORCH + "kept = open('/dev/null')\n")
    shared.remember(str(shared.folder / "child.py"))
    words = [sys.executable, "torchrun", ""]
    by_exec, warm = shared.begin(*words, warm=False), shared.begin(*words)
    for _, (facts, child), _ in (by_exec, warm):
        _comparable(facts)
        child[2] = _comparable(json.loads(child[2]))
    assert warm == by_exec
    (told,) = shared.told()
    assert (told["module"], told["unfit"]) == ("torch", True)
    assert "open files" in told["why_not"]
    # What `bootseer run` keeps of it: the warm parent is a process of its own then, and leaves the module out.
    shared.known["cold"] = {"torch": told["why_not"]}
    shared.remember(str(shared.folder / "child.py"))
    _, (_, child), _ = shared.begin(*words)
    assert not child[0]
    assert shared.reasons()[1:] == [""]


@pytest.mark.parametrize("way", ["child", "stdin"])
def test_a_launcher_with_children_or_without_standard_files_stays_as_it_is(shared: Shared, way: str):
    shared.remember(str(shared.folder / "child.py"))
    text = (shared.folder / "torchrun").read_text().replace("stdin=sys.stdin.read()", "stdin=0")
    shared.write("torchrun", text.replace("sys.stdin, sys.stdout", "sys.stdout"))
    before = {"child": "sleep 5 >&2 2>/dev/null &", "stdin": "exec <&-;"}[way]
    code, (_, child), err = shared.begin("sh", "-c", f"{before} exec {sys.executable} torchrun ''")
    assert (code, child[:2]) == (0, [False, 0]), err
    assert [why for why in shared.reasons() if "NoneType" not in why] == ([""] if way == "child" else [])
