"""`bootseer simulate`: output, files and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = pytest.mark.slow

Run = Callable[..., CompletedProcess[str]]
SMALL = [f"--what-if={change}" for change in ("image.gb=0.2", "environment.gb=0.05", "checkpoint.gb=1")]


def test_a_start_is_simulated_and_reported(run: Run, tmp_path: Path) -> None:
    words = ["simulate", "--nodes", "2", "--arm", "bootseer", *SMALL]
    page = tmp_path / "figures.html"
    shown = run(*words, "--events", str(tmp_path), "--html", str(page))
    assert shown.returncode == 0, shown.stderr
    digest = shown.stdout.split("parameters ")[1].split(";")[0]
    drawn = page.read_text()
    # A figure is labelled even if it is shown alone.
    for figure in drawn.split("<figure ")[1:]:
        assert "<b>Simulated.</b>" in figure
        assert f"moe ({digest}); seed 0" in figure
    assert drawn.count("<svg") == 3
    assert "http" not in drawn.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "Simulated: parameters " in shown.stdout
    (start,) = json.loads(run(*words, "--json").stdout)["starts"]
    assert (start["nodes"], start["arm"]) == (2, "bootseer")
    report = json.loads(run("report", "--json", str(tmp_path), "--job", "simulated-moe-bootseer-2").stdout)
    assert report["overhead"]["startup_s"] == pytest.approx(start["startup_s"], abs=0.01)


def test_no_extra_is_needed() -> None:
    blocked = dict.fromkeys(("google_crc32c", "hdfs_native", "numpy", "obstore", "botocore", "cryptography"))
    words = ["bootseer", "simulate", "--nodes", "2", "--arm", "bootseer", *SMALL]
    program = (
        f"import sys; sys.modules.update({blocked}); sys.argv = {words}; from bootseer.cli.main import main; main()"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, "Simulated: parameters " in ran.stdout) == (0, True), ran.stderr


def test_values_are_compared(run: Run) -> None:
    words = ["simulate", "--nodes", "2", "--arm", "lazy", *SMALL, "--what-if", "links.node-gbit=0.5,1.5", "--json"]
    document = json.loads(run(*words).stdout)
    slow, fast = document["starts"]
    assert (slow["arm"], fast["arm"]) == ("lazy, node-gbit=0.5", "lazy, node-gbit=1.5")
    assert slow["parameters"] != fast["parameters"]
    assert slow["startup_s"] > fast["startup_s"]


def test_compared_values_of_fields_with_one_name_are_told_apart(run: Run) -> None:
    words = ["simulate", "--nodes", "02", "--arm", "lazy", *SMALL, "--json"]
    words += ["--what-if", "image.fixed-s=1,2", "--what-if", "environment.fixed-s=0,1"]
    arms = [start["arm"] for start in json.loads(run(*words).stdout)["starts"]]
    assert arms == [f"lazy, image.fixed-s={image}, environment.fixed-s={env}" for image in (1, 2) for env in (0, 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such.toml"], "shipped scenarios: buckets, dense, diffusion"),
        (["--arm", "faster"], "no arm 'faster'"),
        (["--what-if", "links.speed=1"], "docs/simulation.md lists all fields"),
        (["month", "--what-if", "links.node-gbit=1,10"], "compared only for starts"),
        (["month", "--html", "page.html"], "for starts, not for --calibrate or a month"),
        (["--calibrate", "report.json", "--html", "page.html"], "for starts, not for --calibrate or a month"),
        (["month", "--what-if", "month.nodes=8"], "a job of 16 nodes on a cluster of 8"),
        (["--nodes", "0"], "nodes"),
        (["--nodes", "two"], "--nodes 'two': expected numbers of nodes, such as 16,64"),
        (["--nodes", "2", "--what-if", "nodes=2,4"], "nodes is given more than once"),
        (["--what-if", "image.gb=1,2", "--what-if", "image.gb=3"], "image.gb is given more than once"),
        (["--what-if", 'name="a/b"', "--events", "events"], "'a/b' cannot be part of a file name"),
        (["--html", "no-such-folder/page.html"], "no-such-folder: no such folder"),
        (["--what-if", "links.node-gbit=fast"], "'links.node-gbit=fast': the value must be"),
        (["--what-if", "fault=[{upload-factor=0}]"], "a fault needs a node or a datanode"),
        (["--nodes", "2", "--what-if", "fault=[{node=2}]"], "there are 2 nodes"),
        (["--what-if", "fault=[{datanode=64}]"], "64 DataNodes"),
        (["--what-if", "links.node-gbit"], "expected TABLE.FIELD=VALUE"),
        (["--what-if", "links.node-gbit=-1"], "links.node-gbit"),
        (["--what-if", "links.unheard=1"], "unheard"),
        (["--what-if", "image.gb=1e12"], "image.gb"),
        (["--what-if", "name.of=1"], "name is not a table"),
    ],
)
def test_what_cannot_be_simulated_is_an_error_in_one_line(run: Run, words: list[str], said: str) -> None:
    ran = run("simulate", *words)
    assert ran.returncode == 2, ran.stderr
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
