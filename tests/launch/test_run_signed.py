"""Signatures on the command line: `convert --sign`, `--require-signature`, `--trusted-keys` and their variables."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.artifact.objects import read_all
from bootseer.artifact.signatures import Signatures, is_signed
from bootseer.store.open import open_store
from environment_place import Place, made_place
from image_node import Node
from signing_keys import make_key, trust

pytestmark = [pytest.mark.root, pytest.mark.fuse]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def place() -> Iterator[Place]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    with made_place() as place:
        yield place


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return make_key(tmp_path / "key")


@pytest.fixture
def trusted(tmp_path: Path, key: Path) -> str:
    return trust(tmp_path / "trusted", key)


def only(pattern: str, folder: Path) -> Path:
    (found,) = folder.glob(pattern)
    return found


class TestEnvironments:
    """Nodes with the key sign what they build; the others use only signed snapshots, and publish none."""

    def test_what_a_node_with_the_key_built_is_used_by_nodes_without(
        self, place: Place, key: Path, trusted: str
    ) -> None:
        words = (
            "--setup",
            place.counting_script("echo 1 > $VIRTUAL_ENV_HOME/made\n"),
            "--",
            "cat",
            f"{place.venv}/made",
        )
        place.more = {
            "BOOTSEER_SIGNING_KEY": str(key),
            "BOOTSEER_TRUSTED_KEYS": trusted,
            "VIRTUAL_ENV_HOME": str(place.venv),
        }
        assert place.run(*words).stdout == "1\n"
        assert place.published()["published"] is True
        stored = only("environments/*/document", place.store)
        assert is_signed(stored.read_bytes())
        del place.more["BOOTSEER_SIGNING_KEY"]
        for place.cache in ("cache", "other"):
            assert place.run(*words).stdout == "1\n"
            assert (place.start()["mode"], place.start()["code"]) == ("restored", "hit")
        assert place.num_setups == 1

    def test_a_node_without_the_key_installs_and_keeps_nothing(self, place: Place, trusted: str) -> None:
        words = ("--trusted-keys", trusted, "--setup", place.counting_script(), "--", "true")
        for _ in range(2):
            ran = place.run(*words)
            assert "a new one must be signed, and there is no key for that" in ran.stderr
            assert (place.start()["mode"], place.start()["code"]) == ("installed", "no-key")
        assert place.num_setups == 2
        assert list(place.store.glob("environments/*/document")) == []

    def test_a_snapshot_without_a_signature_is_not_used_until_a_key_makes_it_anew(
        self, place: Place, key: Path, trusted: str
    ) -> None:
        words = ("--setup", place.counting_script(), "--", "true")
        place.run(*words)
        strict = ("--require-signature", "--trusted-keys", trusted, *words)
        ran = place.run(*strict)
        assert "document is not signed" in ran.stderr
        assert (place.start()["mode"], place.start()["code"]) == ("installed", "unsigned")
        ran = place.run("--env", "require", *strict, code=1)
        assert "(unsigned)" in ran.stderr
        place.run(*strict, more={"BOOTSEER_SIGNING_KEY": str(key)})
        assert (place.start()["mode"], place.start()["code"]) == ("captured", "unsigned")
        ran = place.run(*strict)
        assert (place.start()["mode"], place.num_setups) == ("restored", 3), (place.start(), ran.stderr)

    def test_a_forged_snapshot_is_not_restored(self, place: Place, key: Path, trusted: str, tmp_path: Path) -> None:
        """One setup's document under the key of another setup, with its own signature and with others."""
        evil = f"{place.venv}/evil"
        good, other = place.counting_script(), place.counting_script(f"echo evil > {evil}\n", "other.sh")
        signing = {"BOOTSEER_SIGNING_KEY": str(key), "BOOTSEER_TRUSTED_KEYS": trusted}
        place.run("--setup", good, "--", "true", more=signing)
        (document,) = place.store.glob("environments/*/document")
        place.run("--setup", other, "--", "true", more=signing)
        Path(evil).unlink()  # a loose file, which the capturing start wrote to its path
        (forged,) = set(place.store.glob("environments/*/document")) - {document}
        attacker = Signatures((str(make_key(tmp_path / "attacker")),))
        name = str(document.relative_to(place.store))
        honest, value = (
            json.loads(Signatures().open(str(path.relative_to(place.store)), path.read_bytes(), "store"))
            for path in (document, forged)
        )
        renamed = json.dumps(
            {**value, **{part: honest[part] for part in ("key", "components")}}, sort_keys=True, separators=(",", ":")
        ).encode()
        for data, why in (
            (forged.read_bytes(), "holds another signed object"),
            (renamed, "is not signed"),
            (attacker.seal(name, renamed), "a key that is not trusted"),
        ):
            document.write_bytes(data)
            words = ("--trusted-keys", trusted, "--setup", good, "--", "test", "!", "-e", evil)
            assert why in place.run(*words).stderr
            assert (place.start()["mode"], place.start()["code"]) == ("installed", "unsigned")
            for verb in (("restore",), ("verify",)):
                shown = [str(tmp_path / "shown")] if verb == ("restore",) else []
                ran = place.bootseer("env", *verb, document.parent.name, *shown, "--trusted-keys", trusted)
                assert (ran.returncode, why in ran.stderr) == (1, True), ran.stderr
            assert not (tmp_path / "shown").exists()
        # Without the option it would have been restored.
        place.run("--setup", good, "--", "test", "-e", evil)

    def test_env_capture_signs_and_env_restore_verifies(self, place: Place, key: Path, trusted: str) -> None:
        script = place.counting_script()
        ran = place.bootseer("env", "capture", "--setup", script, more={"BOOTSEER_SIGNING_KEY": str(key)})
        assert ran.returncode == 0, ran.stderr
        document = only("environments/*/document", place.store)
        words = ("env", "restore", document.parent.name, "--require-signature", "--trusted-keys", trusted, "--", "true")
        assert place.bootseer(*words).returncode == 0

    def test_a_node_s_own_store_needs_no_signature(self, place: Place, trusted: str) -> None:
        """Its contents were made by this node itself."""
        words = ("--trusted-keys", trusted, "--setup", place.counting_script(), "--", "true")
        for _ in range(2):
            place.run(*words, more={"BOOTSEER_STORE": ""})
        assert (place.start()["mode"], place.num_setups) == ("restored", 1)


class TestImages:
    """Images and their hot sets."""

    @pytest.fixture
    def env(self, env: dict[str, str], node: Node) -> dict[str, str]:
        return {**env, **node.env}

    def test_a_signed_image_runs_and_its_hot_set_is_signed(
        self, run: Run, node: Node, key: Path, trusted: str, tmp_path: Path
    ) -> None:
        assert run("image", "convert", node.reference, "--sign", str(key)).returncode == 0
        words = ("run", "-q", "--image", node.reference, "--loading", "lazy", "--workload", "w", "--require-signature",
                 "--trusted-keys", trusted, "--", "sh", "-c", "cat /hot | wc -c; env | grep -c _KEY")  # fmt: skip
        ran = run(*words, more={"BOOTSEER_SIGNING_KEY": str(key)})
        assert ran.stdout.splitlines() == [str(6 << 20), "0"], ran.stderr  # the container gets no keys
        assert is_signed(self.hot_set(node))
        fresh = {"BOOTSEER_CACHE": str(tmp_path / "fresh")}
        ran = run("image", "run", *words[3:4], "--trusted-keys", trusted, "--workload", "w", "--", "true", more=fresh)
        assert (ran.returncode, ran.stderr) == (0, "")
        shown = json.loads(run("image", "hotset", "show", node.reference, "--json", more=fresh).stdout)
        assert [row["workload"] for row in shown["hotsets"]] == ["w"]

    def test_a_hot_set_without_a_signature_is_ignored_with_a_note(
        self, run: Run, node: Node, key: Path, trusted: str, tmp_path: Path
    ) -> None:
        assert run("image", "convert", node.reference, "--sign", str(key)).returncode == 0
        words = ("image", "run", node.reference, "--loading", "lazy", "--workload", "w")
        assert run(*words, "--", "sh", "-c", "cat /hot | wc -c").returncode == 0
        assert not is_signed(self.hot_set(node))
        fresh = {"BOOTSEER_CACHE": str(tmp_path / "fresh"), "BOOTSEER_TRUSTED_KEYS": trusted}
        ran = run(*words, "--", "true", more=fresh)
        assert ran.returncode == 0
        assert "no hot set: " in ran.stderr
        assert "is not signed" in ran.stderr

    @pytest.mark.parametrize("verb", ["mount", "run", "launch"])
    def test_an_image_without_a_signature_is_refused_by_each_verb(
        self, run: Run, node: Node, trusted: str, tmp_path: Path, verb: str
    ) -> None:
        assert run("image", "convert", node.reference).returncode == 0
        words = {
            "mount": ("image", "mount", node.reference, str(tmp_path / "mnt")),
            "run": ("image", "run", node.reference, "--", "true"),
            "launch": ("run", "--image", node.reference, "--", "true"),
        }[verb]
        for more in (
            {"BOOTSEER_TRUSTED_KEYS": trusted},
            {"BOOTSEER_REQUIRE_SIGNATURE": "1", "BOOTSEER_TRUSTED_KEYS": trusted},
        ):
            ran = run(*words, more=more)
            assert ran.returncode == 1
            assert (
                "is not signed; signatures are required: sign it with bootseer image convert --sign KEY" in ran.stderr
            )

    def test_keys_that_cannot_be_used_end_it_before_anything_is_done(
        self, run: Run, node: Node, key: Path, trusted: str, tmp_path: Path
    ) -> None:
        requests = len(node.requests())
        key.chmod(0o644)
        for words, more, why in (
            (("image", "convert", node.reference, "--sign", str(key)), {}, "may be read by others"),
            (("image", "convert", node.reference), {"BOOTSEER_SIGNING_KEY": str(key)}, "may be read by others"),
            (("image", "run", node.reference, "--require-signature"), {}, "/etc/bootseer/trusted-keys"),
            (("image", "run", node.reference), {"BOOTSEER_REQUIRE_SIGNATURE": "1"}, "/etc/bootseer/trusted-keys"),
            (("run", "--image", node.reference, "--trusted-keys", str(key), "--", "true"), {}, "no public keys"),
            (("run", "--trusted-keys", trusted, "--", "true"), {}, "--trusted-keys needs a container"),
        ):
            ran = run(*words, more=more)
            assert ran.returncode == 2, ran.stderr
            assert why in ran.stderr
            assert "Traceback" not in ran.stderr
        assert len(node.requests()) == requests

    def test_without_the_library_a_required_signature_is_an_error(
        self, run: Run, node: Node, key: Path, trusted: str, tmp_path: Path
    ) -> None:
        assert run("image", "convert", node.reference, "--sign", str(key)).returncode == 0
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "sitecustomize.py").write_text("import sys; sys.modules['cryptography'] = None\n")
        more = {"PYTHONPATH": str(tmp_path / "lib")}
        ran = run("image", "run", node.reference, "--trusted-keys", trusted, "--", "true", more=more)
        assert (ran.returncode, "pip install 'bootseer[sign]'" in ran.stderr) == (2, True), ran.stderr
        assert run("image", "run", node.reference, "--", "true", more=more).returncode == 0

    def hot_set(self, node: Node) -> bytes:
        with closing(open_store(f"oci://{node.reference.rpartition(':')[0]}")) as store:
            (found,) = store.list("hotsets/")
            return read_all(store, found.name, 1 << 20)
