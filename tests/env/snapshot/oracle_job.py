"""Install in a capture, keep the snapshot, then let the oracle install again, in a separate process with one thread.
Reads its parameters from standard input; prints the oracle's result as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from bootseer.env.capturing.capture import open_capture
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.installing import interpreter
from bootseer.env.installing.interpreter import runner
from bootseer.env.installing.packages import installed, new_packages
from bootseer.env.snapshot.oracle import fresh_install_differs
from bootseer.env.snapshot.secret_check import SecretCheck
from bootseer.env.snapshot.write import write_snapshot
from bootseer.errors import BootseerError
from bootseer.mounts import kernel
from in_capture import run_in
from store_doubles import MemoryStore

PLACE = "/srv"


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    folder, env = Path(spec["folder"]), spec["env"]
    # Temporary folders are not captured: the test's folder is mounted elsewhere.
    kernel.unshare_mounts()
    kernel.attach(kernel.clone_mount(Path(spec["work"])), Path(PLACE))
    python = interpreter.ask(spec["python"], env, runner())
    before = installed(python.folders)
    tree = folder / "tree"
    began_s = time.time()
    with open_capture(folder / "first", env=env, ways=["overlay"], folders=[PLACE]) as view:
        code = run_in(view, ["sh", "-ec", spec["setup"]], env, stdout=2)
        assert code == 0, code
        packages = new_packages(before, installed(python.folders, root=str(view.root)))
        changes = [change for change in view.changes() if change.path.startswith(PLACE + "/")]
        check = SecretCheck(Exclusions(), cache=Path(spec["rules"]))
        written = write_snapshot(MemoryStore("test"), changes, began_s=began_s, check=check, root=str(view.root))
        for change in changes:
            place = Path(f"{tree}{change.path}")
            if change.source and Path(change.source).is_dir():
                place.mkdir(parents=True, exist_ok=True)
            elif change.source:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(change.source, place, follow_symlinks=False)
    for path, text in spec["between"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    for source, target in spec["moved"].items():
        shutil.move(source, target)
    try:
        with open_capture(folder / "capture", env=env, ways=["overlay"], folders=[PLACE]) as view:
            found = fresh_install_differs(
                packages,
                written.entries,
                tree,
                view,
                lambda env: run_in(view, ["sh", "-ec", spec["setup"]], env, stdout=2),
                folder=folder,
                env=env,
            )
    except BootseerError as error:
        print(json.dumps({"error": str(error)}))
        return
    differences = {one.path: one.words for one in found.differences if one.path.startswith(PLACE + "/")}
    said = {"packages": packages, "differences": differences, "compared": found.num_paths}
    print(json.dumps(said))


main()
