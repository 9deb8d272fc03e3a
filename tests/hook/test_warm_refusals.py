"""Programs that are started by exec although there is a warm parent, and the reported reason."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from bootseer.hook import programs, warm_child, warm_imports, warm_launcher
from hook.test_warm import HOOK, Launcher

pytestmark = pytest.mark.slow


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


_UNFIT = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "threads",
    ),
    "file": ("kept = open('/dev/null')", "open files"),
    "socket": ("import socket\nkept = socket.socket()", "open files"),
    "seed": ("import random\nrandom.seed(3)", "state of random"),
    "signal": ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)", "signals"),
    "memory": ("import mmap\nkept = mmap.mmap(-1, 4096)", "shared"),
    "process": ("import os\nif os.fork() == 0:\n    os.execv('/bin/sleep', ['sleep', '9'])", "children"),
    "variables": ("import os\nkept = dict(os.environ)", "reads all variables"),
    "secret": ("import secrets\nkept = secrets.token_hex()", "random bytes, in library"),
    "folder": ("import os\nos.chdir('/')", "current folder"),
    "failed": ("import secrets\nkept = secrets.token_hex()\nraise ImportError", "random bytes, in library"),
}


def test_a_parent_that_does_not_answer_in_time_is_reported_as_late() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(warm_launcher.LostError, match="did not answer within 0 s") as lost:
        warm_launcher.ask(ours, {}, [], 0.01)
    assert lost.value.facts == {"late": True}


@pytest.mark.parametrize("case", _UNFIT)
def test_an_import_that_does_more_than_define_keeps_the_parent_from_being_copied(launcher: Launcher, case: str):
    text, words = _UNFIT[case]
    launcher.write("library.py", text)
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    launcher.known["modules"] = ["json", "library", "colorsys"]
    (launcher.folder / "job").mkdir()
    launcher.remember(launcher.write("job/child.py", "print('ran')"))
    assert launcher.run((["job/child.py"], {})) == [(0, "ran\n", "")]
    (told,) = launcher.told()
    assert words in told["why_not"]
    assert told["unfit"]
    assert told["module"] == ("" if case in ("thread", "memory") else "library")
    if told["module"]:  # as recorded by `bootseer run`: the next warm parent does not import the module
        launcher.known["cold"] = {told["module"]: told["why_not"]}
        launcher.remember(str(launcher.folder / "job" / "child.py"))
        assert launcher.run((["job/child.py"], {})) == [(0, "ran\n", "")]
        assert launcher.reasons()[1:] == [""]


def test_programs_of_an_environment_with_a_sitecustomize_are_started_by_exec(launcher: Launcher):
    """It may read the rank's variables."""
    launcher.write("sitecustomize.py", "import os\nos.environ['SEEN'] = str(os.environ.get('LOCAL_RANK'))")
    launcher.before = "os.environ['LOCAL_RANK'] = '5'"
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    (launcher.folder / "job").mkdir()
    launcher.remember(launcher.write("job/child.py", "import os\nprint(os.environ['SEEN'])"))
    assert launcher.run((["job/child.py"], {})) == [(0, "5\n", "")]
    (told,) = launcher.told()
    assert told["why_not"] == "the environment has a sitecustomize, which Python runs at the start of each process"
    assert told["unfit"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))", "scheduling policy"),
        (
            "resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))",
            "stack size",
        ),
    ],
)
def test_a_launcher_that_has_changed_what_a_copy_cannot_get(launcher: Launcher, change: str, what: str):
    launcher.before = f"import resource\n{change}"
    launcher.remember(launcher.write("child.py", "print('ran')"))
    assert launcher.run((["child.py"], {})) == [(0, "ran\n", "")]
    assert launcher.reasons() == [f"the launcher has changed since its start: {what}"]


def test_a_second_refused_module_leaves_out_the_package():
    assert programs.left_out("rich.align", []) == "rich.align"
    assert programs.left_out("rich.align", ["richer", "rich.text"]) == "rich"
    assert programs.left_out("torch.cuda", ["torch.mps"]) == "torch.cuda"


def test_the_library_of_a_driver_may_be_mapped_as_long_as_no_device_is_open(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import _ctypes

    library = launcher.folder / "libcuda.so.1"  # mapped like by the import of a CUDA build of torch
    library.write_bytes(Path(_ctypes.__file__).read_bytes())
    launcher.write("library.py", f"import ctypes\nctypes.CDLL({str(library)!r})")
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    launcher.known["modules"] = ["json", "library"]
    (launcher.folder / "job").mkdir()
    launcher.remember(launcher.write("job/child.py", "print('libcuda.so' in open('/proc/self/maps').read())"))
    assert launcher.run((["job/child.py"], {})) == [(0, "True\n", "")]
    assert launcher.reasons() == [""]
    device = tmp_path / "device"
    device.touch()
    monkeypatch.setattr(warm_imports, "_DEVICES", (str(device),))
    with device.open():
        assert warm_imports.unfit() == "a device's driver is in use"


def test_a_package_that_may_not_be_imported_is_left_out_as_a_whole_at_once(launcher: Launcher):
    """Modules come before their package in a record: Python moves the package to the end after its import."""
    (launcher.folder / "library").mkdir()
    launcher.write("library/__init__.py", "import library.one, library.other")
    launcher.write("library/one.py", "")
    launcher.write("library/other.py", "import os\nkept = dict(os.environ)")
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    launcher.known["modules"] = ["json", "library.one", "library.other", "library"]
    (launcher.folder / "job").mkdir()
    launcher.remember(launcher.write("job/child.py", "print('ran')"))
    launcher.run((["job/child.py"], {}))
    (told,) = launcher.told()
    assert (told["module"], told["unfit"]) == ("library", True)


def test_what_may_change_imports_is_named_and_the_program_started_by_exec(launcher: Launcher):
    launcher.write("library.py", "import os\nlevel = os.environ.get('LEVEL')\n")
    launcher.env.update(PYTHONPATH=f"{HOOK}/path:{launcher.folder}", OTHER="1")
    launcher.known["modules"] = ["library", "fsspec.config"]
    (launcher.folder / "fsspec").mkdir()
    launcher.write(
        "fsspec/config.py", "import os\nkept = [name for name in dict(os.environ) if name.startswith('FSSPEC_')]\n"
    )
    (launcher.folder / "job").mkdir()
    text = "import library, os, sys\nprint(library.level, sys.argv[1:])\n"
    launcher.remember(launcher.write("job/child.py", text))
    base = {**os.environ, **launcher.env, "BOOTSEER_TRACE": f"spool:{launcher.spool}"}
    runs = [
        (["job/child.py"], {"env": {**base, "OTHER": "2"}}),
        (["job/child.py"], {"env": {**base, "LEVEL": "3"}}),
        (["job/child.py"], {"env": {**base, "OMP_NUM_THREADS": "3"}}),
        (["job/child.py"], {"env": {**base, "FSSPEC_S3_SECRET": "3"}}),
        (["-u", "job/child.py"], {}),
        (["-c", "print('other')"], {}),
    ]
    found = launcher.run(*runs)
    assert [out for _, out, _ in found] == ["None []\n", "3 []\n", "None []\n", "None []\n", "None []\n", "other\n"]
    warm, level, native, settings, flags = launcher.reasons()
    assert warm == ""
    assert "LEVEL" in level
    assert "library" in level
    assert "OMP_NUM_THREADS" in native
    assert "FSSPEC_S3_SECRET" in settings
    assert [programs.recorded(name) for name in ("OMP_NUM_THREADS", "FSSPEC_S3_SECRET", "NVIDIA_API_KEY")] == [
        True,
        False,
        False,
    ]
    assert "flags" in flags


@pytest.mark.parametrize("member", ["near", "far", "sibling", "cousin"])
def test_modules_that_are_imported_as_members_of_packages_are_searched_too(tmp_path: Path, member: str):
    texts = {
        "train": "from pkg import (\n    near,  # (first)\n    far as other,\n)\nfrom pkg.deep import module\n",
        **dict.fromkeys(
            ("pkg/__init__", "pkg/near", "pkg/far", "pkg/deep/__init__", "pkg/deep/sibling", "pkg/cousin"), ""
        ),
        "pkg/deep/module": "from .sibling import(name)\nfrom .. import cousin\n",
    }
    (tmp_path / "pkg" / "deep").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    main, found = str(tmp_path / "train.py"), next(tmp_path.rglob(f"{member}.py"))
    digest, words = programs.import_lines(main, str(tmp_path))
    found.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\n")
    changed, words = programs.import_lines(main, str(tmp_path))
    assert changed != digest
    assert "OMP_NUM_THREADS" in words


def test_a_relative_folder_of_modules_is_the_programs_own(launcher: Launcher):
    for folder in ("", "sub/"):
        (launcher.folder / folder).mkdir(exist_ok=True)
        launcher.write(f"{folder}helper.py", f"where = {folder!r}\n")
    (launcher.folder / "job").mkdir()
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:."
    launcher.known["modules"] = ["helper"]
    launcher.remember(launcher.write("job/child.py", "import helper\nprint(helper.where)\n"))
    here, there = launcher.run((["job/child.py"], {}), (["../job/child.py"], {"cwd": "sub"}))
    assert (here, there) == ((0, "\n", ""), (0, "sub/\n", ""))
    warm, refused = launcher.reasons()
    assert warm == ""
    assert "relative folder" in refused


def test_a_program_that_cannot_be_recorded_says_why(launcher: Launcher):
    text = "import os, sys\nfrom bootseer.hook.programs import Recorder\n"
    text += "Recorder(os.environ['BOOTSEER_WARM'], sys.path).write()\n"
    launcher.write("child.py", text + "#" * (1 << 20))
    assert launcher.run((["child.py"], {})) == [(0, "", "")]
    assert launcher.reasons() == ["its imports are not recorded: child.py: too large to be searched for imports"]


@pytest.mark.parametrize("text", ["import library, os\nos.environ['LEVEL'] = '3'\n", "import json, library\n"])
def test_a_program_that_imports_otherwise_than_recorded_is_started_by_exec(launcher: Launcher, text: str):
    launcher.remember(launcher.write("child.py", "import json\ndef train():\n    return 1\n"))
    launcher.write("child.py", "import json\ndef train():\n    return 2\nprint(train())\n")
    assert launcher.run((["child.py"], {}))[0][1] == "2\n"
    assert launcher.reasons() == [""]
    launcher.write("library.py", "")
    launcher.write("child.py", text)
    launcher.run((["child.py"], {}))
    assert "imports other modules, or sets other variables" in launcher.reasons()[-1]


@pytest.mark.parametrize("own", ["job/helper.py", "job/helper/__init__.py"])
def test_a_program_whose_folder_has_a_module_that_imports_found_elsewhere_is_started_by_exec(
    launcher: Launcher, own: str
):
    """For example a folder `datasets` next to the program, when an installed package imports the other `datasets`."""
    launcher.write("framework.py", "import helper\n")
    launcher.write("helper.py", "value = 'installed'\n")
    launcher.env["PYTHONPATH"] = f"{HOOK}/path:{launcher.folder}"
    launcher.known["modules"] = ["framework"]
    (launcher.folder / "job/helper").mkdir(parents=True)
    launcher.remember(launcher.write("job/child.py", "import framework\nprint(framework.helper.value)\n"))
    assert launcher.run((["job/child.py"], {})) == [(0, "installed\n", "")]
    launcher.write(own, "value = 'own'\n")
    assert launcher.run((["job/child.py"], {})) == [(0, "own\n", "")]
    assert launcher.reasons()[0] == ""
    assert launcher.reasons()[1].endswith("has a module helper of its own, which the imports found elsewhere")


def test_a_program_that_sets_what_imports_read_is_started_by_exec(launcher: Launcher):
    main = launcher.write("child.py", "import os\nif 0:\n    os.environ['OMP_NUM_THREADS'] = '1'\nimport json\n")
    launcher.remember(main)
    launcher.run((["child.py"], {}))
    assert "may set OMP_NUM_THREADS" in launcher.reasons()[0]
    launcher.known["changed"] = ["OMP_PLACES"]
    launcher.remember(launcher.write("child.py", "import json\n"))
    launcher.run((["child.py"], {}))
    assert "sets OMP_PLACES" in launcher.reasons()[1]


def test_a_c_library_that_does_not_keep_the_thread_id_there_is_refused(monkeypatch: pytest.MonkeyPatch):
    """musl has a lock there: the first thread of a copy would wait for it forever."""
    lock = ctypes.c_int(0)

    def prctl(option: int, place: object, *_: int) -> int:
        place._obj.value = ctypes.addressof(lock)
        return 0

    monkeypatch.setattr(warm_child, "libc", SimpleNamespace(prctl=prctl))
    with pytest.raises(NotImplementedError, match="C library"):
        warm_child.Cloner()
