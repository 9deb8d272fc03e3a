"""The fingerprint of the host: different for different packages, the same otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bootseer.env.keys import node
from bootseer.env.keys.files import FactCache, NodeFiles, stamp_of
from bootseer.errors import PermanentError


def _install(folder: Path, name: str, record: str) -> Path:
    path = folder / f"{name}.dist-info"
    path.mkdir(parents=True)
    (path / "RECORD").write_text(record)
    return path


def test_distributions_count_by_name_version_and_record(tmp_path: Path) -> None:
    facts = FactCache(tmp_path / "facts")
    empty = node.distributions([str(tmp_path)], facts).digest
    path = _install(tmp_path, "click-8.1.7", "click.py,sha256=a,1\n__pycache__/click.cpython-311.pyc,,\n")
    before = node.distributions([str(tmp_path)], facts)
    assert before.digest != empty
    assert before.lines[0].startswith("click-8.1.7.dist-info ")
    (path / "RECORD").write_text("click.py,sha256=b,1\n")
    assert node.distributions([str(tmp_path)], facts).digest != before.digest


def test_records_that_did_not_change_are_not_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    record = _install(folder, "click-8.1.7", "click.py,sha256=a,1\n") / "RECORD"
    facts = FactCache(tmp_path / "facts")
    node.distributions([str(folder)], facts)  # just written: the next change could have the same time
    stamp = stamp_of(record.stat())
    assert facts.get("record", str(record), stamp) is None
    facts.put("record", str(record), stamp, "known")
    assert node.distributions([str(folder)], facts).lines == ("click-8.1.7.dist-info known",)
    record.write_text("click.py,sha256=b,1\n")
    os.utime(record, ns=(stamp[3], stamp[3]))  # detected by the inode's change time
    assert node.distributions([str(folder)], facts).digest == node.distributions([str(folder)], FactCache(None)).digest


def test_bytecode_times_caches_and_empty_folders_do_not_count(tmp_path: Path) -> None:
    facts = FactCache(None)
    path = _install(tmp_path, "click-8.1.7", "a,b,1\nc,d,2\n__pycache__/click.cpython-311.pyc,,\n")
    before = node.distributions([str(tmp_path)], facts).digest
    (path / "RECORD").write_text("c,d,2\na,b,1\n")
    os.utime(path / "RECORD", (1, 1))
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "~lick-8.1.7.dist-info").mkdir()
    (tmp_path / "empty").mkdir()
    folders = [str(tmp_path), str(tmp_path / "nowhere"), str(tmp_path / "empty")]
    assert node.distributions(folders, facts).digest == before


def test_the_system_is_the_same_at_a_second_look_and_names_its_packages(tmp_path: Path) -> None:
    facts = FactCache(tmp_path)
    files = NodeFiles(facts)
    first = node.system(files, facts)
    facts.save()
    assert node.system(files, FactCache(tmp_path)) == node.system(files, FactCache(None)) == first
    assert any(line.startswith("distribution ") for line in first.lines)


def test_packages_that_were_removed_do_not_count() -> None:
    status = (
        b"Package: a\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1-2\nDescription: x\n y\n\n"
        b"Package: b\nStatus: deinstall ok config-files\nArchitecture: all\nVersion: 1\n\nPackage: half\n"
    )
    assert list(node.dpkg_packages(status)) == ["a:amd64 1-2"]


def test_an_interpreter_tells_about_itself_and_is_asked_once(tmp_path: Path) -> None:
    facts = FactCache(tmp_path)
    python = node.ask_python(sys.executable, dict(os.environ), facts)
    assert python.version == ".".join(map(str, sys.version_info[:3]))
    assert python.prefix == sys.prefix
    facts.save()
    # The second answer needs no process: none could be started with this environment.
    assert node.ask_python(sys.executable, {}, FactCache(tmp_path)) == python


def test_a_wrapper_script_is_asked_each_time(tmp_path: Path) -> None:
    wrapper = tmp_path / "python3"
    wrapper.write_text(f'#!/bin/sh\necho x >> {tmp_path}/calls\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    facts = FactCache(None)
    for _ in range(2):
        node.ask_python(str(wrapper), dict(os.environ), facts)
    assert (tmp_path / "calls").read_text() == "x\nx\n"


def test_levels_of_processors_follow_their_flags() -> None:
    v2 = ["cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"]
    v3 = [*v2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"]
    assert node.level_of([]) == "x86-64-v1"
    assert node.level_of(v2) == "x86-64-v2"
    assert node.level_of(v3) == "x86-64-v3"
    assert node.level_of([*v3, "avx512f"]) == "x86-64-v3"


def test_a_driver_that_does_not_answer_is_no_node_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_head", lambda path, limit: "NVRM version: NVIDIA UNIX Kernel Module  550.54.15  x")
    monkeypatch.setattr(node, "_GPU_DEADLINE_S", 0.3)
    program = tmp_path / "nvidia-smi"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for text, expected in (("exit 9", ()), ("echo 9.0, 550.54.15", ("9.0",))):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        assert node.accelerators(env) == node.Accelerators(expected, "550.54.15")
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(PermanentError, match="nvidia-smi: no answer within"):
        node.accelerators(env)


def test_the_driver_of_nvidia_is_read_with_gpus_of_two_kinds() -> None:
    found = node.read_accelerators("9.0, 550.54.15\n8.0, 550.54.15\n9.0, 550.54.15\n", "")
    assert found == node.Accelerators(("8.0", "9.0"), "550.54.15")
    assert node.read_accelerators("[N/A]\n", "550.1") == node.Accelerators((), "550.1")
