"""Snapshots for ordinary users: through FUSE or written out, under an overlay in a user namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plain_user import UID, as_plain_user, home_of
from restoring import Setup

pytestmark = pytest.mark.root

_PROGRAM = """
import json, os, subprocess, sys
from pathlib import Path
from bootseer.env.document import EnvironmentDocument
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.layer import LayerOptions, mount_layer
from bootseer.store.file import FileStore

folder = Path(sys.argv[1])
document = EnvironmentDocument.parse((folder / "document").read_bytes())
said = []
bring = LayerOptions(cache=folder / "home/cache", runtime=folder / "home/runtime", loading="lazy", workload="w")
layer = mount_layer(document, FileStore(folder / "store"), bring, say=said.append)
view = show_on_host(layer.at, document.roots, changes=folder / "home/changes", user=True, say=said.append)
ran = subprocess.run(["sh", "-ec", sys.argv[2]], preexec_fn=view.enter, capture_output=True, text=True)
numbers = layer.end_startup()
layer.wait_for_record()
view.close()
layer.close()
print(json.dumps([layer.facts, ran.stdout + ran.stderr, said, numbers]))
"""


@pytest.mark.fuse
@pytest.mark.parametrize("fuse", [True, False])
def test_a_user_without_rights_gets_the_environment_at_its_place(setup: Setup, tmp_path: Path, fuse: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become a user without rights")
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if not above.stat().st_mode & 1 and above.owner() == "root" and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    home = home_of(tmp_path)
    venv = home / "venv"
    for name in ("lib/old.py", "lib/gone.py", "data/hidden"):
        (venv / name).parent.mkdir(parents=True, exist_ok=True)
        (venv / name).write_text(name)
    setup.write(venv / "lib" / "new.py", "new")
    setup.write(venv / "data" / "fresh", "fresh")
    for path in [venv, *venv.rglob("*"), *setup.at(home).rglob("*")]:
        os.chown(path, UID, UID)
    changes = setup.changes(venv, deleted=[venv / "lib" / "gone.py"], opaque=[venv / "data"])
    (tmp_path / "document").write_bytes(setup.document(changes, [venv]).encode())
    for path in ((tmp_path / "store"), *(tmp_path / "store").rglob("*")):
        os.chown(path, 0, UID)  # users read a store as members of its group
    script = (
        f"cd {venv}; find . -type f | sort; id -u; stat -c %u lib/new.py; cat lib/new.py;"
        "echo changed > lib/new.py; echo 42 > result; rm data/fresh"
    )
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), script],
        preexec_fn=as_plain_user(tmp_path, fuse=fuse),
        env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    facts, shown, said, numbers = json.loads(ran.stdout)
    assert shown.split() == ["./data/fresh", "./lib/new.py", "./lib/old.py", str(UID), str(UID), "new"], shown
    if fuse:
        assert (facts["mode"], facts["way"]) == ("lazy", "file trees through FUSE")
        assert numbers["demand_bytes"] > 0
    else:
        assert (facts["mode"], facts["way"]) == ("fallback", "unpacked files")
    assert "2 files" in said[-1]
    assert (venv / "lib" / "gone.py").read_text() == "lib/gone.py"
    assert sorted(path.name for path in venv.rglob("*") if path.is_file()) == ["gone.py", "hidden", "old.py"]
