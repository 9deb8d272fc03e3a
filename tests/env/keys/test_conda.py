"""conda in the request key: its files, its configuration, its environments."""

from __future__ import annotations

import json

import pytest

from bootseer.env.keys.key import difference
from setup_projects import Project

pytestmark = pytest.mark.slow


def test_files_for_pip_in_an_environment_file_of_conda_count_also_in_a_script(empty: Project) -> None:
    empty.write("setup.sh", "conda env update -f gpu.yml\n")
    empty.write("gpu.yml", "dependencies:\n  - numpy=1\n  - pip:\n    - -r more.txt\n")
    keys = []
    for text in ("six==1\n", "six==2\n"):
        empty.write("more.txt", text)
        keys.append(empty.key(setup="setup.sh"))
    assert keys[0].digest != keys[1].digest
    assert "dependencies of gpu.yml" in keys[0].unpinned


def test_packages_that_are_not_python_s_count_in_a_conda_environment(empty: Project) -> None:
    prefix = empty.root / "conda"
    (prefix / "conda-meta").mkdir(parents=True)
    names = ("executable", "implementation", "version", "abi", "base_prefix")
    answer = json.dumps({**dict.fromkeys(names, "x"), "prefix": str(prefix), "own_folders": []})
    python = empty.write("python3", f"#!/bin/sh\necho 'bootseer:{answer}'\n")
    python.chmod(0o755)
    env = empty.env | {"PATH": f"{empty.job}:{empty.env['PATH']}"}
    before = empty.key(env=env)
    (prefix / "conda-meta/cuda-12.1-0.json").touch()
    after = empty.key(env=env)
    assert [row.name for row in difference(before.components, after)] == [f"environment {prefix}"]


@pytest.mark.parametrize(
    "text",
    [
        "source {conda}/etc/profile.d/conda.sh\nconda activate train\npip install click",
        'eval "$({conda}/bin/conda shell.bash hook)"; ENV=train; conda activate $ENV',
        ". {conda}/bin/activate train; pip install click",
        "{conda}/bin/conda run -n train pip install click",
        "sudo {conda}/bin/mamba install --name=train numpy",
    ],
)
def test_an_environment_of_conda_that_is_named_counts(empty: Project, text: str) -> None:
    conda = empty.root / "conda"
    for name in ("conda-meta/history", "etc/profile.d/conda.sh", "bin/conda", "bin/mamba", "bin/activate"):
        (conda / name).parent.mkdir(parents=True, exist_ok=True)
        (conda / name).touch()
    empty.write("setup.sh", text.format(conda=conda) + "\nconda create -n new; conda activate new")
    for name in ("train", "new"):
        (conda / "envs" / name / "conda-meta").mkdir(parents=True)
    before = empty.key(setup="setup.sh")
    for name in ("train", "new"):
        (conda / "envs" / name / "conda-meta/numpy-2.0-0.json").touch()
    after = empty.key(setup="setup.sh")
    assert [row.name for row in difference(before.components, after)] == [f"environment {conda}/envs/train"]


def test_the_configuration_of_conda_counts_wherever_it_lies(empty: Project) -> None:
    empty.env |= {"CONDA_EXE": str(empty.root / "conda/bin/conda"), "CONDA_PREFIX": str(empty.root / "conda/envs/x")}
    digests = {empty.key().digest}
    for place in ("conda/.condarc", "conda/envs/x/.condarc", "home/.conda/.condarc", "home/.config/conda/.condarc"):
        path = empty.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"channels: [{place}]\n")
        digests.add(empty.key().digest)
    assert len(digests) == 5
