"""Registries read through mirrors from containerd's configuration."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from bootseer.cli.image_convert import convert_command
from bootseer.errors import AccessError, BootseerError, NotFoundError, TransientError
from bootseer.image.mounting.mount import mount_image
from bootseer.image.mounting.request import Request
from bootseer.image.reference import parse_reference
from bootseer.store.mirrors import MirroredRegistry
from bootseer.store.oci import tag_of
from bootseer.store.open import open_registry, open_store
from fault_proxy import Fault, FaultProxy
from image_node import Node, have_converted, node
from registry import PASSWORD, USER, Registry, free_port, needs_registry
from store.contract import DATA, get, put

assert node
pytestmark = needs_registry
Configure = Callable[[str, str], Path]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """`configure(host, text)` writes the `hosts.toml` of a registry."""
    monkeypatch.setenv("BOOTSEER_REGISTRY_HOSTS", str(tmp_path / "certs.d"))

    def write(host: str, text: str) -> Path:
        path = tmp_path / "certs.d" / host / "hosts.toml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        return path

    return write


def away() -> str:
    """An unreachable registry."""
    return f"127.0.0.1:{free_port()}"


def refusal(host: str, repository: str) -> BootseerError:
    """The error of a lookup of a missing tag."""
    with closing(open_registry(host, repository, mirrored=True)) as client, pytest.raises(BootseerError) as caught:
        client.manifest_digest("latest")
    return caught.value


@pytest.mark.root
@pytest.mark.fuse
def test_an_image_is_mounted_from_a_mirror_while_its_registry_is_out_of_reach(node: Node, configure: Configure) -> None:
    have_converted(node)
    origin = away()
    configure(origin.replace(":", "_") + "_", f'[host."http://{node.registry.host}"]\n')
    image = parse_reference(f"{origin}/team/box:1")
    asked = Request(image, f"oci://{origin}/team/box", cache=node.cache, runtime=node.runtime)
    for mode in ("lazy", "pull"):
        request = replace(asked, loading=mode, cache=node.folder / mode)
        with closing(mount_image(request, node.folder / f"at-{mode}")) as mounted:
            assert mounted.facts["mode"] == mode
            assert (mounted.root / "hot").read_bytes() == (node.folder / "tree" / "hot").read_bytes()
    asked_for = node.requests("/team/box/")
    assert asked_for and all(f"ns={origin.replace(':', '%3A')}" in path for path in asked_for)


def test_what_a_mirror_lacks_comes_from_the_next_server(
    registry: Registry, repository: str, configure: Configure
) -> None:
    with closing(open_store(f"oci://{registry.host}/{repository}")) as direct:
        block = put(direct, DATA).name
        put(direct, b"index", "images/one")
    with FaultProxy("", lambda request: Fault(status=404)) as empty, FaultProxy(registry.host) as mirror:
        servers = f'[host."http://{empty.host}"]\n[host."http://{mirror.host}"]\ncapabilities = ["pull"]\n'
        configure(registry.host, servers)
        with closing(open_store(f"oci://{registry.host}/{repository}", mirrored=True)) as store:
            assert store.uri == f"oci://{registry.host}/{repository}"
            for _ in range(3):
                assert get(store, block) == DATA
            assert get(store, "images/one") == b"index"
            assert store.stat(block).size_bytes == len(DATA)
            with pytest.raises(NotFoundError):
                store.stat("images/two")
        assert len(empty.requests) == 1  # from then on it is tried after the others
        assert all("/blobs/" in request.path for request in mirror.requests)  # not trusted with tags


def test_a_mirror_that_hangs_costs_a_share_of_one_deadline(
    registry: Registry, repository: str, configure: Configure
) -> None:
    with closing(open_store(f"oci://{registry.host}/{repository}")) as direct:
        block = put(direct, DATA).name
        put(direct, b"index", "images/one")
    with FaultProxy(registry.host, lambda request: Fault(hang=True)) as mirror:
        configure(registry.host, f'[host."http://{mirror.host}"]\n')
        with closing(open_registry(registry.host, repository, mirrored=True)) as client:
            assert client.manifest(tag_of("images/one"), timeout_s=2.0).data
            assert b"".join(client.blob(block, 5, 10)) == DATA[5:15]
            assert len(mirror.requests) == 1
        with closing(open_registry(registry.host, repository, mirrored=True)) as client:
            assert b"".join(client.blob(block, timeout_s=2.0)) == DATA


def test_a_mirror_whose_answers_break_off_is_asked_last(
    registry: Registry, repository: str, configure: Configure
) -> None:
    with closing(open_store(f"oci://{registry.host}/{repository}")) as direct:
        block = put(direct, DATA).name
    with FaultProxy(registry.host, lambda request: Fault(cut_after=100)) as mirror:
        configure(registry.host, f'[host."http://{mirror.host}"]\n')
        with closing(open_registry(registry.host, repository, mirrored=True)) as client:
            with pytest.raises(TransientError):
                list(client.blob(block))
            assert b"".join(client.blob(block)) == DATA
        assert len(mirror.requests) == 1


def test_a_conversion_reads_the_registry_itself(node: Node, configure: Configure) -> None:
    with FaultProxy(node.registry.host) as mirror:
        configure(node.registry.host, f'[host."http://{mirror.host}"]\n')
        ended = CliRunner().invoke(convert_command, [str(node.reference), str(node.folder / "store")])
        assert ended.exit_code == 0, ended.output
        assert mirror.requests == []


def test_a_web_page_is_not_taken_for_a_manifest(registry: Registry, repository: str, configure: Configure) -> None:
    page = Fault(status=200, body=b"<html>")
    with closing(open_store(f"oci://{registry.host}/{repository}")) as direct, FaultProxy("", lambda _: page) as mirror:
        put(direct, b"index", "images/one")
        configure(registry.host, f'[host."http://{mirror.host}"]\n')
        with closing(open_store(f"oci://{registry.host}/{repository}", mirrored=True)) as store:
            assert get(store, "images/one") == b"index"
        assert mirror.requests


def servers_of(host: str) -> list[Any]:
    """The servers that are used, and whether they resolve tags."""
    opened = open_registry(host, "a/b", mirrored=True)
    return opened._servers if isinstance(opened, MirroredRegistry) else [(opened, True)]


@pytest.mark.parametrize("server", ["", 'server = "https://registry-1.docker.io"'])
def test_logins_of_docker_hub_are_looked_up_by_its_own_name(configure: Configure, server: str) -> None:
    path = configure("docker.io", f'{server}\n[host."https://mirror"]\n')
    (path.parent.parent / "hosts.toml").write_text('server = "https://elsewhere"')  # not that of a registry
    servers = servers_of("docker.io")
    assert [(each.host, each._query) for each, _ in servers] == [("mirror", "ns=docker.io"), ("docker.io", "")]
    assert [each.host for each, _ in servers_of("another")] == ["another"]


def test_missing_and_unreachable_are_different_errors(
    registry: Registry, repository: str, configure: Configure
) -> None:
    origin = away()
    configure(origin, f'[host."http://{registry.host}"]\n')
    error = refusal(origin, repository)
    assert isinstance(error, TransientError)
    assert re.search(f"{registry.host}/{repository}: .*404.*; cannot connect to {origin}", str(error))
    configure(registry.host, f'[host."http://{origin}"]\n')
    assert isinstance(refusal(registry.host, repository), NotFoundError)


def test_a_mirror_gets_its_own_login_alone(
    tmp_path: Path, repository: str, configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.example": {"auth": auth}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    refused = Fault(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
    with FaultProxy("", lambda request: refused) as mirror:
        configure("registry.example", f'server = "http://{mirror.host}"\n')
        assert f"docker login {mirror.host}" in str(refusal("registry.example", repository))
        assert [request.headers.get("authorization") for request in mirror.requests] == [None]
        (tmp_path / "config.json").write_text(json.dumps({"auths": {mirror.host: {"auth": auth}}}))
        assert isinstance(refusal("registry.example", repository), AccessError)
        assert mirror.requests[-1].headers["authorization"] == f"Basic {auth}"


def test_the_certificate_options_of_a_file(tmp_path: Path, repository: str, configure: Configure) -> None:
    with Registry(tmp_path, tls=True) as mirror:
        for line, words in (("", "not trusted"), ('ca = "ca.crt"', "status 404"), ("skip_verify = true", "status 404")):
            origin = away()
            path = configure(origin, f'[host."https://{mirror.host}"]\n{line}\n')
            (path.parent / "ca.crt").write_bytes(mirror.certificate.read_bytes())
            assert words in str(refusal(origin, repository))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["https://registry.example/v2"]),
        ('server = "http://a:5000/"', ["http://a:5000/v2"]),
        ('[host."https://b"]\n[host.a]', ["https://b/v2", "https://a/v2", "https://registry.example/v2"]),
        ('[host."https://a/v2/hub"]\noverride_path = true', ["https://a/v2/hub", "https://registry.example/v2"]),
        ('[host."https://me:secret@a/x/v2"]\nnew = 1', ["https://a/x/v2", "https://registry.example/v2"]),
        ('[host."https://a"]\ncapabilities = ["push"]', ["https://registry.example/v2"]),
    ],
)
def test_the_servers_of_a_file(configure: Configure, text: str, expected: list[str]) -> None:
    configure("_default", text)
    assert [each.address for each, _ in servers_of("registry.example")] == expected


@pytest.mark.parametrize(
    "text", ["server = ", "host = 3", "[host]\na = 1", '[host."ftp://a"]', '[host."https://a"]\nca = 5', "\xff"]
)
def test_a_file_that_cannot_be_used_is_a_warning(
    configure: Configure, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = configure("registry.example", "")
    path.write_bytes(text.encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        found = servers_of("registry.example")
    assert [each.address for each, _ in found] == ["https://registry.example/v2"]
    assert caplog.text.count(f"{path} cannot be used, so no mirror of registry.example is asked") == 1
