"""The request key: relevant changes give another key, all others the same key."""

from __future__ import annotations

import base64
import os
import shutil
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.env.keys.key import difference, gate
from bootseer.env.keys.request_key import changed_inputs, facts_folder_of, request_key
from setup_projects import Project, git, write_wheel
from waiting import processes

pytestmark = pytest.mark.slow

Mutation = Callable[[Project], object]


def _append(name: str, text: str = "\n# more\n") -> Mutation:
    return lambda project: (project.job / name).write_text((project.job / name).read_text() + text)


def _wheel(name: str) -> Mutation:
    return lambda project: write_wheel(project.job / name, "two")


def _env(name: str, value: str) -> Mutation:
    return lambda project: project.env.update({name: value})


def _ask(**changed: object) -> Mutation:
    def change(project: Project) -> None:
        project.ask = replace(project.ask, **changed)

    return change


def _moved_branch(project: Project) -> None:
    git("commit", "-q", "--allow-empty", "-m", "two", cwd=project.root / "repository")


def _pip_conf(text: str) -> Mutation:
    def change(project: Project) -> None:
        path = project.root / "home/.config/pip/pip.conf"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return change


def _home_file(name: str, text: str = "") -> Mutation:
    return lambda project: (project.root / "home" / name).write_text(text)


MISSES: dict[str, tuple[Mutation, str]] = {
    "the setup script": (_append("setup.sh"), "setup"),
    "a script that it sources": (_append("tools/lib.sh"), "file tools/lib.sh"),
    "a script that is sourced by that": (_append("tools/deeper.sh"), "file tools/deeper.sh"),
    "a requirement file": (_append("requirements.txt", "six==1.16.0\n"), "requirements requirements.txt"),
    "a nested requirement file": (_append("nested/base.txt", "six==1.16.0\n"), "requirements nested/base.txt"),
    "a constraint file of a nested file": (_append("more.txt", "six==1.16.0\n"), "requirements more.txt"),
    "a constraint file": (_append("limits.txt", "six==1.16.0\n"), "requirements limits.txt"),
    "a local wheel of the same name": (_wheel("dist/local-1.0-py3-none-any.whl"), "package"),
    "a wheel in a folder of wheels": (_wheel("wheels/other-1.0-py3-none-any.whl"), "find-links wheels"),
    "one more wheel in a folder of wheels": (_wheel("wheels/new-1.0-py3-none-any.whl"), "find-links wheels"),
    "a file of an editable project": (_append("package/src/package.py"), "package"),
    "a new file of an editable project": (lambda p: p.write("package/src/new.py", ""), "package"),
    "a file that is now executable": (lambda p: (p.job / "package/src/package.py").chmod(0o755), "package"),
    "a branch that moved": (_moved_branch, "repository"),
    "a file that it copies": (_append("config.toml"), "file config.toml"),
    "a declared folder": (_append("declared/data.json"), "input declared"),
    "a variable that it names": (_env("FLAVOUR", "small"), "variable FLAVOUR"),
    "a variable of the compiler": (_env("CFLAGS", "-O3"), "variable CFLAGS"),
    "a variable of pip": (_env("PIP_INDEX_URL", "https://index.test/simple"), "variable PIP_INDEX_URL"),
    "a variable of CUDA": (_env("TORCH_CUDA_ARCH_LIST", "9.0"), "variable TORCH_CUDA_ARCH_LIST"),
    "bytecode switched off": (_env("PYTHONDONTWRITEBYTECODE", "1"), "variable PYTHONDONTWRITEBYTECODE"),
    "the search path": (_env("PATH", "/usr/local/bin:/usr/bin:/bin"), "variable PATH"),
    "an index in pip's configuration": (_pip_conf("[global]\nindex-url=https://i.test/"), "installer settings"),
    "the language, for a script": (_env("LC_ALL", "de_DE.UTF-8"), "variable LC_ALL"),
    "the tenant": (_ask(tenant="other"), "tenant"),
    "the working folder in the image": (_ask(place="/work"), "place in the image"),
    "a declared variable": (_ask(variables=("RANK",)), "variable RANK"),
    "another declared input": (_ask(inputs=("declared", "limits.txt")), "input limits.txt"),
    "an image instead of the host": (_ask(image="sha256:" + "a" * 64), "base"),
}

HITS: dict[str, Mutation] = {
    "rank": _env("RANK", "17"),
    "host": _env("HOSTNAME", "node-2"),
    "address and port of the rendezvous": lambda p: p.env.update(MASTER_ADDR="10.0.0.1", MASTER_PORT="29400"),
    "job id": lambda p: p.env.update(SLURM_JOB_ID="17", SLURM_NODELIST="n[1-4]", JOB_NAME="x"),
    "address of a pod": lambda p: p.env.update(POD_IP="10.1.2.3", KUBERNETES_SERVICE_HOST="10.0.0.1"),
    "a .netrc that is now there": _home_file(".netrc", "machine a login b password c"),
    "a token's value": _env("HF_TOKEN", "hf_2"),
    "a token that it does not name": _env("WANDB_API_KEY", "secret"),
    "a variable that nobody asks for": _env("SOMETHING_ELSE", "1"),
    "a proxy": lambda p: p.env.update(http_proxy="http://proxy.test:3128", HTTPS_PROXY="http://proxy.test:3128"),
    "where pip caches": lambda p: p.env.update(PIP_CACHE_DIR="/scratch/pip", UV_CACHE_DIR="/scratch/uv"),
    "the temporary folder": _env("TMPDIR", "/scratch/17"),
    "the hook of a measured start": _env("PYTHONPATH", "/opt/site/bootseer/hook/path"),
    "BootSeer's own variables": lambda p: p.env.update(BOOTSEER_JOB="x", TRACEPARENT="00-1-2-01"),
    "times of files": lambda p: [os.utime(path, (1, 1)) for path in p.job.rglob("*")],
    "bytecode beside an editable project": lambda p: p.write("package/src/__pycache__/package.cpython-311.pyc", "x"),
    "what an installation in place leaves": lambda p: p.write("package/src/package.egg-info/PKG-INFO", "x"),
    "a virtual environment in a project": lambda p: p.write("package/env/pyvenv.cfg", "home = /usr/bin"),
    "a file that nobody names": lambda p: p.write("train.py", "print()"),
    "a log in the working folder": lambda p: p.write("log.txt", "hello"),
    "the output of the job": lambda p: p.write("outputs/model.bin", "0" * 100),
}


def test_a_change_of_an_input_is_another_key_and_the_component_is_named(project: Project) -> None:
    """Cumulative changes: each key is compared with the previous one."""
    before = project.key()
    digests = {before.digest}
    for name, (change, component) in MISSES.items():
        assert not before.problems, name
        change(project)
        after = project.key()
        assert after.digest not in digests, name
        changed = difference(before.components, after, before.details)
        assert any(row.name.startswith(component) for row in changed), (name, changed)
        assert all(row.words for row in changed), name
        digests.add(after.digest)
        before = after


def test_what_does_not_matter_leaves_the_key_as_it_is(project: Project) -> None:
    before = project.key()
    for name, change in HITS.items():
        change(project)
        after = project.key()
        assert difference(before.components, after) == [], name
        assert after.digest == before.digest, name


def test_the_language_does_not_count_for_requirements_alone(empty: Project) -> None:
    empty.write("requirements.txt", "click==8.1.7\n")
    before = empty.key(requirements=("requirements.txt",))
    empty.env |= {"LANG": "de_DE.UTF-8", "LC_ALL": "C"}
    assert empty.key(requirements=("requirements.txt",)).digest == before.digest
    declared = empty.key(requirements=("requirements.txt",), variables=("LANG",))
    assert declared.components["variable LANG"] == "=de_DE.UTF-8"


def test_credentials_in_an_index_address_are_neither_in_the_key_nor_in_its_words(project: Project) -> None:
    found = []
    for password in ("hunter2", "hunter3"):
        project.env["PIP_EXTRA_INDEX_URL"] = f"https://me:{password}@index.test/simple?token={password}"
        _pip_conf(f"[global]\nindex-url = https://me:{password}@index.example/simple\n")(project)
        project.write("more.txt", "idna==3.7\n")
        project.write("nested/base.txt", "${INDEX_LINE}\n")
        project.env["INDEX_LINE"] = f"--index-url https://me:{password}@x.test/"
        found.append(project.key())
    assert "hunter" not in repr(found)
    same = [{k: v for k, v in key.components.items() if k != "variable INDEX_LINE"} for key in found]
    assert same[0] == same[1]
    assert found[0].components["variable PIP_EXTRA_INDEX_URL"] == "=https://index.test/simple?token="


def test_credentials_in_a_home_that_a_link_leads_to_are_not_in_the_key(empty: Project) -> None:
    (empty.root / "link").symlink_to(empty.job)
    empty.env["HOME"] = str(empty.root / "link")
    empty.write("setup.sh", "cp config.toml /etc/app.toml\ncp .aws/credentials /etc/app\n")
    empty.write("config.toml", "a = 1\n")
    empty.write(".aws/credentials", "secret\n")
    found = [name for name in empty.key(setup="setup.sh").components if name.startswith("file ")]
    assert found == ["file config.toml"]


def test_a_renewed_login_in_a_requirement_file_does_not_change_the_key(project: Project) -> None:
    keys = set()
    for login, host in (("me:old", "x"), ("me:new", "x"), ("me:new", "y")):
        project.write("nested/base.txt", f"--extra-index-url https://{login}@{host}.test/simple\nidna==3.7\n")
        keys.add(project.key().digest)
    assert len(keys) == 2  # the host matters


def test_no_secret_is_in_a_key_even_when_the_script_puts_it_into_an_address(project: Project) -> None:
    project.env |= {"GIT_TOKEN": "s3cr3t", "API_KEY": "s3cr3t", "DB_PASSWORD": "s3cr3t"}
    project.write(
        "setup.sh",
        'curl -o /tmp/x "https://h.test/$API_KEY/x"\npip install "git+https://$GIT_TOKEN@127.0.0.1:1/r.git"\n'
        'MY_TOKEN=s3cr3t\nwget "https://h.test/$MY_TOKEN" -O /tmp/y\necho $DB_PASSWORD\n'
        "pip install https://me:s3cr3t@h.test/$WHAT.whl\n",
    )
    key = project.key()
    assert "s3cr3t" not in repr(key)
    assert key.components["variable DB_PASSWORD"].startswith("set, a")


def test_a_variable_that_the_script_names_counts_whether_or_not_it_is_set(empty: Project) -> None:
    empty.write("setup.sh", "SIZE=${SIZE:-1}; pip install numpy==$NCCL_VERSION\n")
    digests = {empty.key(setup="setup.sh").digest}
    for name, value in (("SIZE", ""), ("SIZE", "2"), ("NCCL_VERSION", "1"), ("NCCL_VERSION", "2")):
        empty.env[name] = value
        digests.add(empty.key(setup="setup.sh").digest)
    assert len(digests) == 5


def test_the_job_s_own_folder_counts_where_all_of_it_is_copied(empty: Project) -> None:
    keys = []
    for name, text in (("one", "1"), ("two", "1"), ("three", "2")):
        (empty.root / name).mkdir()
        (empty.root / name / "setup.sh").write_text("cp -r . /opt/app\n")
        (empty.root / name / "train.py").write_text(text)
        keys.append(empty.key(cwd=str(empty.root / name), setup="setup.sh"))
    assert "folder ." in keys[0].components
    changed = [[row.name for row in difference(keys[0].components, key)] for key in keys[1:]]
    assert changed == [[], ["folder ."]]


def test_git_gets_the_login_of_a_private_repository_and_no_one_else(empty: Project) -> None:
    repository, served = empty.root / "repository", empty.root / "served/private.git"
    repository.mkdir()
    git("init", "-q", "-b", "main", cwd=repository)
    git("commit", "-q", "--allow-empty", "-m", "one", cwd=repository)
    git("clone", "-q", "--bare", str(repository), str(served), cwd=empty.root)
    git("update-server-info", cwd=served)
    (served.parent / "public.git").symlink_to(served)
    arguments: list[bytes] = []

    class Private(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            arguments.extend(words for _, words in processes())
            wanted = f"Basic {base64.b64encode(b'bot:pass word').decode()}"
            if self.headers["Authorization"] == (wanted if "private" in self.path else None):
                super().do_GET()
            else:
                self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Private, directory=str(served.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}/private.git"
        public = place.replace("private", "public")  # rejects a login, for example an expired token
        lines = (f"{name} @ git+http://bot:${{TOKEN}}@{at}@main\n" for name, at in (("one", place), ("two", public)))
        empty.write("requirements.txt", "".join(lines))
        empty.env |= {"TOKEN": "pass%20word"}
        key = empty.key(requirements=("requirements.txt",))
        server.shutdown()
    for at in (place, public):
        assert key.components[f"repository git+http://{at}@main"] == git("rev-parse", "main", cwd=served)
    assert not key.unpinned or "commit is unknown" not in str(key.unpinned)
    assert "word" not in str(key)
    assert any(b"ls-remote" in each for each in arguments)
    assert not [each for each in arguments if b"pass%20word" in each or b"pass word" in each]


def test_a_job_in_another_folder_has_the_same_key_when_nothing_depends_on_the_path(empty: Project) -> None:
    empty.write("requirements.txt", "-r base.txt\n")
    empty.write("base.txt", "click==8.1.7\n")
    empty.write("setup.sh", "pip install -r requirements.txt\nmkdir -p /opt/data\n")
    keys = []
    for name in ("one", "two"):
        shutil.copytree(empty.job, empty.root / name)
        keys.append(empty.key(cwd=str(empty.root / name), setup="setup.sh"))
    assert keys[0].digest == keys[1].digest
    assert keys[0].accounted != keys[1].accounted


@pytest.mark.parametrize("line", ["python -m venv env", "mkdir data", "git clone https://h.test/r.git", "./configure"])
def test_the_place_counts_when_the_setup_may_write_there(empty: Project, line: str) -> None:
    keys = []
    for name in ("one", "two"):
        (empty.root / name).mkdir()
        (empty.root / name / "setup.sh").write_text(line + "\n")
        keys.append(empty.key(cwd=str(empty.root / name), setup="setup.sh"))
    assert [row.name for row in difference(keys[0].components, keys[1])] == ["working folder"]
    assert keys[0].details["working folder"][0].startswith("`")


def test_an_editable_project_elsewhere_is_another_key(empty: Project) -> None:
    empty.write("requirements.txt", "-e ./package\n")
    empty.write("package/pyproject.toml", "[project]\nname = 'package'\n")
    before = empty.key(requirements=("requirements.txt",))
    shutil.copytree(empty.job, empty.root / "elsewhere")
    after = empty.key(requirements=("requirements.txt",), cwd=str(empty.root / "elsewhere"))
    assert {row.name.partition(" ")[0] for row in difference(before.components, after)} == {"package"}


def test_a_second_look_gives_the_same_key_with_remembered_facts(project: Project, tmp_path: Path) -> None:
    large = project.write("config.toml", "x" * (2 << 20))
    os.utime(large, (1, 1))
    folder = facts_folder_of(tmp_path / "cache")
    first = request_key(project.ask, facts_folder=folder)
    assert (folder / "facts.json").exists()
    assert request_key(project.ask, facts_folder=folder) == first == request_key(project.ask)
    large.write_text("y" * (2 << 20))
    assert request_key(project.ask, facts_folder=folder).digest != first.digest


def test_what_was_not_read_is_a_problem_and_never_an_exception(project: Project) -> None:
    project.write("requirements.txt", "-r missing.txt\n")
    os.mkfifo(project.job / "pipe.txt")
    key = project.key(inputs=("nowhere", "pipe.txt"), requirements=("pipe.txt", "gone.txt"))
    words = "\n".join(key.problems)
    for name in ("missing.txt", "nowhere", "pipe.txt", "gone.txt"):
        assert name in words


def test_a_declared_file_that_may_not_be_read_is_a_problem(project: Project) -> None:
    secret = project.write("declared/secret", "x")
    secret.chmod(0)
    readable = os.access(secret, os.R_OK)
    assert bool(project.key().problems) != readable


def test_a_loop_of_includes_and_of_scripts_ends(empty: Project) -> None:
    empty.write("a.txt", "-r b.txt\nclick==8.1.7\n")
    empty.write("b.txt", "-r a.txt\n")
    empty.write("setup.sh", "source other.sh\npip install -r a.txt\n")
    empty.write("other.sh", "source setup.sh\n")
    key = empty.key(setup="setup.sh")
    assert not key.problems
    assert {Path(path).name for path in key.accounted} >= {"a.txt", "b.txt", "setup.sh", "other.sh"}


def test_a_tree_that_is_too_large_is_a_problem_with_what_to_do(empty: Project) -> None:
    (empty.job / "data").mkdir()
    sparse = empty.job / "data" / "huge"
    with sparse.open("wb") as file:
        file.truncate(2 << 30)
    empty.write("setup.sh", "cp -r data /srv/data\n")
    key = empty.key(setup="setup.sh")
    assert any("huge" in problem and "1.0 GiB" in problem for problem in key.problems)


def test_of_a_setup_that_names_too_many_files_few_are_read(empty: Project) -> None:
    for number in range(700):
        empty.write(f"data/{number}", "")
    empty.write("setup.sh", "du data/*\n")
    key = empty.key(setup="setup.sh")
    assert any("more than 500 files" in problem for problem in key.problems)
    assert len(key.components) < 550


def test_binary_and_hostile_files_give_a_key(empty: Project) -> None:
    (empty.job / "setup.sh").write_bytes(b"#!/bin/sh\n\xff\xfe\x00 $(((((( `` \"'" + b"(" * 5000)
    (empty.job / "requirements.txt").write_bytes(b"\x00\x01\xff -r\n")
    key = empty.key(setup="setup.sh", requirements=("requirements.txt",))
    assert any("not a text file" in problem for problem in key.problems)
    assert len(key.digest) == 64


def test_inside_an_image_files_of_the_node_do_not_count(empty: Project) -> None:
    outside = empty.root / "outside.cfg"
    empty.write("setup.sh", f"cp {outside} /etc/app.cfg\ncp inside.cfg /etc/b.cfg\n")
    empty.write("inside.cfg", "1")
    image = "sha256:" + "a" * 64
    before = empty.key(setup="setup.sh", image=image)
    outside.write_text("1")
    assert empty.key(setup="setup.sh", image=image).digest == before.digest
    assert "file inside.cfg" in before.components
    assert "python" not in before.platform
    assert gate(before.components, before.platform, empty.key(setup="setup.sh", image=image)) is None


def test_what_an_earlier_start_wrote_is_no_input(empty: Project) -> None:
    empty.write(
        "setup.sh", "echo x > made.cfg\ncurl -o get.py https://h.test/get.py\npython get.py\ncp made.cfg /srv/\n"
    )
    before = empty.key(setup="setup.sh")
    empty.write("made.cfg", "x")
    empty.write("get.py", "print()")
    assert difference(before.components, empty.key(setup="setup.sh")) == []


def test_open_versions_are_reported_and_pinned_ones_are_not(empty: Project) -> None:
    empty.write("open.txt", "click\nrich>=13\n./missing.whl\n")
    empty.write("pinned.txt", "click==8.1.7\n")
    empty.write("hashed.txt", f"click==8.1.7 \\\n    --hash=sha256:{'a' * 64}\n")
    empty.write("setup.sh", "apt-get install -y libfoo\napt-get install -y bar=1.2\ncurl https://h.test/x.sh | bash\n")
    assert set(empty.key(requirements=("open.txt",)).unpinned) >= {"click", "rich>=13"}
    assert empty.key(requirements=("pinned.txt",)).unpinned == ("dependencies of click==8.1.7",)
    assert empty.key(requirements=("hashed.txt",)).unpinned == ()
    words = empty.key(setup="setup.sh").unpinned
    assert "apt-get libfoo" in words
    assert "download of https://h.test/x.sh" in words
    assert not any("bar" in word for word in words)


@pytest.mark.parametrize("option", ["constraint", "requirement", "build-constraint"])
def test_files_that_the_configuration_of_pip_names_count_by_content(empty: Project, option: str) -> None:
    _pip_conf(f"[install]\n{option} =\n    limits.txt\n    https://h.test/more.txt\n")(empty)
    empty.write("requirements.txt", "click==8.1.7\n")
    keys = []
    for text in ("-c deeper.txt\n", "six==1\n"):
        empty.write("limits.txt", text)
        empty.write("deeper.txt", "")
        keys.append(empty.key(requirements=("requirements.txt",)))
    assert "requirements deeper.txt" in keys[0].components
    assert keys[0].digest != keys[1].digest
    assert "the file https://h.test/more.txt" in keys[0].unpinned
    assert not keys[0].problems


def test_an_environment_that_the_setup_uses_counts_by_what_is_installed_in_it(empty: Project) -> None:
    empty.write("env/pyvenv.cfg", "home = /usr/bin\n")
    empty.write("env/bin/pip", "#!/bin/sh\n")
    empty.write("setup.sh", "env/bin/pip install click==8.1.7\n")
    before = empty.key(setup="setup.sh")
    empty.write("env/lib/python3.11/site-packages/cache.tmp", "x")
    assert empty.key(setup="setup.sh").digest == before.digest
    empty.write("env/lib/python3.11/site-packages/six-1.16.0.dist-info/RECORD", "six.py,sha256=x,1\n")
    after = empty.key(setup="setup.sh")
    assert [row.name for row in difference(before.components, after)] == [f"environment {empty.job / 'env'}"]


def test_the_key_explains_itself(project: Project) -> None:
    key = project.key()
    assert key.components["setup"].startswith("sha256:")
    assert "editable" in key.details[f"package {project.job / 'package'}"][0]
    assert any("RANK" in line and "HOSTNAME" in line for line in key.details["variables left out"])
    assert str(project.job / "nested/base.txt") in key.accounted
    assert list(key.accounted) == sorted(key.accounted)


def test_the_words_of_a_difference_name_the_files_of_a_folder(project: Project) -> None:
    before = project.key()
    project.write("package/src/new.py", "")
    project.write("package/src/package.py", "x = 2\n")
    (project.job / "package/pyproject.toml").unlink()
    project.write("package/setup.py", "")
    after = project.key()
    words = {row.name: row.words for row in difference(before.components, after, before.details)}
    found = words[f"package {project.job / 'package'}"]
    assert "added setup.py, src/new.py" in found
    assert "removed pyproject.toml" in found
    assert "changed src/package.py" in found


def test_inputs_that_have_changed_since_are_named_by_their_paths(project: Project) -> None:
    key = project.key()
    assert changed_inputs(project.ask, key) == {}
    project.write("nested/base.txt", "-c ../more.txt\nrich==13.8.0  # why\n")
    project.write("more.txt", "# a comment\nidna==3.7\n")
    project.write("package/src/package.py", "x = 2\n")
    (project.job / "config.toml").unlink()
    assert changed_inputs(project.ask, key) == {
        str(project.job / "nested/base.txt"): "its content changed",
        str(project.job / "more.txt"): "its content changed",
        str(project.job / "package"): "changed src/package.py",
        str(project.job / "config.toml"): "is not in the key any more",
    }


def test_the_base_of_the_host_is_the_same_after_a_program_ran(project: Project) -> None:
    before = project.key().components
    assert project.key(setup=None, inputs=()).components["system"] == before["system"]
    assert before["distributions"] == project.key().components["distributions"]


def test_a_repository_of_this_machine_is_in_the_key_by_its_commit_and_its_git_folder_is_accounted_for(
    project: Project,
) -> None:
    accounted = project.key().accounted
    repository = str(project.root / "repository")
    assert f"{repository}/.git" in accounted
    assert repository not in accounted


def test_a_description_of_a_project_above_is_accounted_for_and_counts_by_what_it_tells_uv(empty: Project) -> None:
    empty.write("pyproject.toml", "[project]\nname = 'job'\nversion = '1'\n")
    one = empty.key()
    assert str(empty.job / "pyproject.toml") in one.accounted
    empty.write("pyproject.toml", "[project]\nname = 'job'\nversion = '2'\n")
    assert empty.key().digest == one.digest
    empty.write("pyproject.toml", "[project]\nname = 'job'\n[tool.uv]\nindex-strategy = 'unsafe-best-match'\n")
    assert empty.key().digest != one.digest
