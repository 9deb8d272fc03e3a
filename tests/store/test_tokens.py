"""Logins and tokens, with a registry that requires and verifies them."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.errors import AccessError, NotFoundError, PermanentError, TransientError
from bootseer.store.open import open_store
from bootseer.store.tokens import _check_receiver
from bootseer.store.transport import Origin
from fault_proxy import Fault, FaultProxy, Request, once
from registry import PASSWORD, USER, Registry, needs_registry
from store.contract import DATA, get, put, sha256
from token_server import IDENTITY_TOKEN, TokenServer

pytestmark = needs_registry


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    return folder / "config.json"


def log_in(config: Path, host: str, **entry: str) -> None:
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    config.write_text(json.dumps({"auths": {host: entry or {"auth": auth}}}))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenServer]:
    with TokenServer(tmp_path_factory.mktemp("tokens")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tokens: TokenServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry that requires tokens."""
    with Registry(tmp_path_factory.mktemp("guarded"), tokens=tokens) as running:
        yield running


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Registry, TokenServer]]:
    """A registry with a token server on another host, which issues tokens without a login."""
    folder = tmp_path_factory.mktemp("foreign")
    with TokenServer(folder, strict=False, name="localhost") as tokens, Registry(folder, tokens=tokens) as running:
        yield running, tokens


@pytest.fixture
def asked(tokens: TokenServer) -> Iterator[list[dict[str, list[str]]]]:
    """The requests to the token server in this test."""
    tokens.asked.clear()
    yield tokens.asked
    tokens.lives.clear()
    tokens.status = 200


class TestBasic:
    def test_the_login_of_docker_opens_the_registry(self, tmp_path: Path, docker_config: Path) -> None:
        with Registry(tmp_path, basic=True) as registry:
            with FaultProxy(registry.host) as proxy:
                log_in(docker_config, proxy.host)
                with closing(open_store(f"oci://{proxy.host}/a/b")) as store:
                    assert get(store, put(store, DATA).name) == DATA
                    put(store, b"x", "name")
                # Challenged once, not with every request.
                assert ["authorization" in request.headers for request in proxy.requests].count(False) == 1

            log_in(docker_config, registry.host, username=USER, password=PASSWORD[1:])
            with (
                closing(open_store(f"oci://{registry.host}/a/b")) as store,
                pytest.raises(AccessError, match=f"status 401 .*docker login {registry.host}"),
            ):
                get(store, sha256(DATA))

            docker_config.unlink()
            with (
                closing(open_store(f"oci://{registry.host}/a/b")) as store,
                pytest.raises(AccessError, match=f"{registry.host}: not logged in; .*docker login"),
            ):
                get(store, sha256(DATA))

    def test_a_login_that_was_renewed_meanwhile_is_used(self, tmp_path: Path, docker_config: Path) -> None:
        with Registry(tmp_path, basic=True) as registry:
            log_in(docker_config, registry.host, username=USER, password=PASSWORD[1:])
            with closing(open_store(f"oci://{registry.host}/a/b")) as store:
                with pytest.raises(AccessError):
                    put(store, DATA)
                log_in(docker_config, registry.host)
                assert get(store, put(store, DATA).name) == DATA

    def test_a_login_that_expires_with_403_is_looked_up_again(self, tmp_path: Path, docker_config: Path) -> None:
        """Like Amazon's registries after twelve hours, without a challenge."""
        valid = PASSWORD

        def plan(request: Request) -> Fault | None:
            sent = base64.b64decode(request.headers.get("authorization", "").removeprefix("Basic "))
            if not sent:
                return Fault(status=401, headers={"WWW-Authenticate": 'Basic realm="tests"'})
            return None if sent == f"{USER}:{valid}".encode() else Fault(status=403)

        with Registry(tmp_path) as registry, FaultProxy(registry.host, plan) as proxy:
            log_in(docker_config, proxy.host)
            with closing(open_store(f"oci://{proxy.host}/a/b")) as store:
                name = put(store, DATA).name
                valid = "next"
                with pytest.raises(AccessError, match=f"status 403.*docker login {proxy.host}"):
                    get(store, name)
                log_in(docker_config, proxy.host, username=USER, password=valid)
                assert get(store, name) == DATA


class TestBearer:
    @pytest.mark.parametrize("expired", [{"username": USER, "password": "expired"}, {"identitytoken": "expired"}])
    def test_a_login_that_was_renewed_meanwhile_is_used(
        self, guarded: Registry, docker_config: Path, repository: str, expired: dict[str, str]
    ) -> None:
        log_in(docker_config, guarded.host, **expired)
        with closing(open_store(f"oci://{guarded.host}/{repository}")) as store:
            with pytest.raises(AccessError):
                put(store, DATA)
            log_in(docker_config, guarded.host)
            assert get(store, put(store, DATA).name) == DATA

    def test_a_token_is_fetched_once_for_each_kind_of_access(
        self, guarded: Registry, asked: list[dict[str, list[str]]], docker_config: Path, repository: str
    ) -> None:
        log_in(docker_config, guarded.host)
        with closing(open_store(f"oci://{guarded.host}/{repository}")) as store:
            for number in range(3):
                put(store, b"%d" % number, "name")
                assert get(store, "name") == b"%d" % number
            store.delete("name")
        scopes = [request["scope"][0].rpartition(":") for request in asked]
        # The order of the rights depends on the registry.
        assert sorted((what, sorted(rights.split(","))) for what, _, rights in scopes) == [
            (f"repository:{repository}", ["delete"]),
            (f"repository:{repository}", ["pull"]),
            (f"repository:{repository}", ["pull", "push"]),
        ]

    def test_an_identity_token_is_exchanged(
        self, guarded: Registry, asked: list[dict[str, list[str]]], docker_config: Path, repository: str
    ) -> None:
        log_in(docker_config, guarded.host, identitytoken=IDENTITY_TOKEN)
        with closing(open_store(f"oci://{guarded.host}/{repository}")) as store:
            assert get(store, put(store, DATA).name) == DATA
        assert asked[0]["grant_type"] == ["refresh_token"]

    def test_a_token_that_ended_on_its_way_is_fetched_again(
        self, guarded: Registry, tokens: TokenServer, asked: list[object], docker_config: Path, repository: str
    ) -> None:
        log_in(docker_config, guarded.host)
        with closing(open_store(f"oci://{guarded.host}/{repository}")) as store:
            name = put(store, DATA).name
        asked.clear()
        tokens.lives = [-120]
        with closing(open_store(f"oci://{guarded.host}/{repository}")) as store, pytest.raises(AccessError):
            get(store, name)  # refused also with its first token: a request is tried once
            assert get(store, name) == DATA
            assert len(asked) == 2

    def test_a_large_upload_survives_the_end_of_its_token(
        self, guarded: Registry, tokens: TokenServer, asked: list[object], docker_config: Path, repository: str
    ) -> None:
        with FaultProxy(guarded.host) as proxy:
            log_in(docker_config, proxy.host)
            with closing(open_store(f"oci://{proxy.host}/{repository}")) as store:
                upload = store.upload()
                upload.write(bytes(9_000_000))
                scope = f"repository:{repository}:pull,push"
                ask = ",".join(f'{key}="{value}"' for key, value in {**tokens.settings(), "scope": scope}.items())
                proxy.plan = once(Fault(status=401, headers={"WWW-Authenticate": f"Bearer {ask}"}), method="PATCH")
                before = len(asked)
                upload.write(bytes(9_000_000))
                stored = upload.commit()
                assert len(asked) == before + 1
                assert stored.size_bytes == store.stat(stored.name).size_bytes == 18_000_000

    def test_many_readers_that_are_refused_at_once_fetch_one_token(
        self, guarded: Registry, tokens: TokenServer, asked: list[object], docker_config: Path, repository: str
    ) -> None:
        log_in(docker_config, guarded.host)
        with closing(open_store(f"oci://{guarded.host}/{repository}")) as store:
            name = put(store, DATA).name
        asked.clear()
        with closing(open_store(f"oci://{guarded.host}/{repository}")) as store, ThreadPoolExecutor(16) as pool:
            assert set(pool.map(lambda _: get(store, name, 0, 1000), range(16))) == {DATA[:1000]}
        assert len(asked) == 1

    def test_a_token_near_its_end_is_renewed_before_it_is_refused(
        self, guarded: Registry, asked: list[object], docker_config: Path, repository: str
    ) -> None:
        with FaultProxy(guarded.host) as proxy:
            log_in(docker_config, proxy.host)
            with closing(open_store(f"oci://{proxy.host}/{repository}")) as store:
                name = put(store, DATA).name
                get(store, name)
                held = store.registry._authorizer._tokens
                for scope, token in held.items():
                    held[scope] = type(token)(token.header, 0.0)
                before = len(asked), len(proxy.requests)
                get(store, name)
                assert (len(asked), len(proxy.requests)) == (before[0] + 1, before[1] + 1)

    def test_a_missing_login_is_an_error_with_a_hint(
        self, guarded: Registry, asked: list[object], repository: str
    ) -> None:
        with (
            closing(open_store(f"oci://{guarded.host}/{repository}")) as store,
            pytest.raises(AccessError, match=r"gives us no token \(status 401\); log in with: docker login"),
        ):
            store.stat(sha256(DATA))

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_a_token_server_in_trouble_is_transient(
        self,
        guarded: Registry,
        tokens: TokenServer,
        asked: list[object],
        docker_config: Path,
        repository: str,
        status: int,
    ) -> None:
        log_in(docker_config, guarded.host)
        tokens.status = status
        with (
            closing(open_store(f"oci://{guarded.host}/{repository}")) as store,
            pytest.raises(TransientError, match=f"the token server of {guarded.host}.* status {status}"),
        ):
            store.stat(sha256(DATA))

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"[]",
            b"{}",
            b'{"token": 5}',
            b'{"token": "a\\r\\nX: y"}',
            b'{"token": ""}',
            b'{"token":"x","expires_in":"z"}',
            b'{"token":"x","expires_in":1' + 400 * b"0" + b"}",
            b'{"token":' + 60_000 * b"[",
        ],
    )
    def test_an_answer_without_a_token_is_transient(self, answer: bytes) -> None:
        with FaultProxy("") as proxy:
            challenge = {"WWW-Authenticate": f'Bearer realm="http://{proxy.host}/token",service="s",scope="x"'}
            proxy.plan = lambda request: (
                Fault(status=200, body=answer)
                if request.path.startswith("/token")
                else Fault(status=401, headers=challenge)
            )
            with (
                closing(open_store(f"oci://{proxy.host}/a/b")) as store,
                pytest.raises(TransientError, match="not a token"),
            ):
                store.stat(sha256(DATA))

    @pytest.mark.parametrize("challenge", ['{}, Basic realm="x"', 'Basic realm="x",{}', "Negotiate, {}"])
    def test_challenges_joined_in_one_header_by_a_proxy_are_separated(self, challenge: str) -> None:
        """One challenge's realm was mistaken for the other's."""
        with FaultProxy("") as proxy:
            bearer = f'Bearer realm="http://{proxy.host}/token",service="s",scope="repository:a/b:pull,push"'
            proxy.plan = lambda request: (
                Fault(status=200, body=b'{"token":"x"}')
                if request.path.startswith("/token?service=s&scope=repository%3Aa%2Fb%3Apull%2Cpush")
                else Fault(status=404)
                if "authorization" in request.headers
                else Fault(status=401, headers={"WWW-Authenticate": challenge.format(bearer)})
            )
            with closing(open_store(f"oci://{proxy.host}/a/b")) as store, pytest.raises(NotFoundError):
                store.stat(sha256(DATA))

    @pytest.mark.parametrize(
        "challenge", ["", "Bearer", "Bearer realm=", 'Bearer realm="ftp://x/"', "Digest x=y", "Bearer " + "a" * 9000]
    )
    def test_a_challenge_without_sense_is_permanent(self, challenge: str) -> None:
        with (
            FaultProxy("", lambda _: Fault(status=401, headers={"WWW-Authenticate": challenge})) as proxy,
            closing(open_store(f"oci://{proxy.host}/a/b")) as store,
            pytest.raises(PermanentError),
        ):
            store.stat(sha256(DATA))


class TestWhoGetsTheLogin:
    """A registry names its token server, but must not be able to choose who gets the password."""

    @pytest.mark.parametrize("entry", [{}, {"identitytoken": IDENTITY_TOKEN}])
    def test_a_login_is_not_sent_to_another_host(
        self, foreign: tuple[Registry, TokenServer], docker_config: Path, entry: dict[str, str]
    ) -> None:
        registry, tokens = foreign
        tokens.asked.clear()
        log_in(docker_config, registry.host, **entry)
        with (
            closing(open_store(f"oci://{registry.host}/a/b")) as store,
            pytest.raises(AccessError, match=r"sent to localhost;.*BOOTSEER_AUTH_HOSTS=127.0.0.1=localhost"),
        ):
            store.stat(sha256(DATA))
        assert tokens.asked == []

    def test_it_is_sent_to_a_host_that_the_user_allows(
        self, foreign: tuple[Registry, TokenServer], docker_config: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        registry, tokens = foreign
        tokens.asked.clear()
        log_in(docker_config, registry.host)
        monkeypatch.setenv("BOOTSEER_AUTH_HOSTS", "registry.example=localhost, 127.0.0.1=localhost")
        with closing(open_store(f"oci://{registry.host}/a/b")) as store:
            assert get(store, put(store, DATA).name) == DATA
        assert tokens.asked

    def test_another_registry_may_not_send_it_there(
        self, foreign: tuple[Registry, TokenServer], docker_config: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        registry, _ = foreign
        log_in(docker_config, registry.host)
        monkeypatch.setenv("BOOTSEER_AUTH_HOSTS", "registry.example=localhost,localhost,=localhost,127.0.0.1=")
        with closing(open_store(f"oci://{registry.host}/a/b")) as store, pytest.raises(AccessError, match="AUTH_HOSTS"):
            store.stat(sha256(DATA))

    def test_without_a_login_any_host_may_give_the_token(
        self, foreign: tuple[Registry, TokenServer], docker_config: Path
    ) -> None:
        with closing(open_store(f"oci://{foreign[0].host}/a/b")) as store:
            assert get(store, put(store, DATA).name) == DATA

    def test_an_address_that_two_parsers_read_differently_gets_no_login(
        self, tokens: TokenServer, docker_config: Path
    ) -> None:
        """In `http://attacker:1\\@registry:2/` the host is `registry` for urllib, `attacker` for urllib3."""
        with FaultProxy("", lambda _: Fault(status=200, body=b"{}")) as attacker, FaultProxy("") as registry:
            host = registry.host.replace("127.0.0.1", "localhost")
            realm = f"http://{attacker.host}" + r"\\@" + f"{host}/token"
            registry.plan = lambda _: Fault(status=401, headers={"WWW-Authenticate": f'Bearer realm="{realm}"'})
            log_in(docker_config, host)
            with closing(open_store(f"oci://{host}/a/b")) as store, pytest.raises((AccessError, PermanentError)):
                store.stat(sha256(DATA))
            assert not attacker.requests

    @pytest.mark.parametrize("kind", ["Basic", "Bearer"])
    def test_no_login_is_sent_unencrypted(self, tokens: TokenServer, docker_config: Path, kind: str) -> None:
        challenge = 'Basic realm="x"' if kind == "Basic" else f'Bearer realm="{tokens.settings()["realm"]}"'
        tokens.asked.clear()
        with FaultProxy("", lambda _: Fault(status=401, headers={"WWW-Authenticate": challenge})) as proxy:
            host = proxy.host.replace("127.0.0.1", "127.1")  # the same address, but not recognizable as loopback
            log_in(docker_config, host)
            with (
                closing(open_store(f"oci://{host}/a/b", plain_http=True)) as store,
                pytest.raises(AccessError, match="unencrypted"),
            ):
                store.stat(sha256(DATA))
            assert not any("authorization" in request.headers for request in proxy.requests)
        assert tokens.asked == []

    def test_a_token_server_may_not_be_asked_unencrypted(self, docker_config: Path) -> None:
        with FaultProxy("", lambda _: Fault(status=200, body=b'{"token": "x"}')) as attacker, FaultProxy("") as proxy:
            realm = f"http://{attacker.host.replace('127.0.0.1', '127.1')}/token"
            proxy.plan = lambda _: Fault(status=401, headers={"WWW-Authenticate": f'Bearer realm="{realm}"'})
            log_in(docker_config, proxy.host)
            with closing(open_store(f"oci://{proxy.host}/a/b")) as store, pytest.raises(AccessError):
                store.stat(sha256(DATA))
            assert not attacker.requests

    @pytest.mark.parametrize(
        ("registry", "realm", "allowed"),
        [
            ("registry-1.docker.io", "https://auth.docker.io/token", True),
            ("index.docker.io", "https://auth.docker.io/token", True),
            ("registry.gitlab.com", "https://gitlab.com/jwt/auth", True),
            ("registry.example", "https://auth.docker.io/token", False),
            ("registry.example:5000", "https://REGISTRY.example/token", True),
            ("registry.example", "https://registry.example.attacker.net/token", False),
            ("registry.example", "https://attacker-registry.example/token", False),
            ("registry.example", "https://registry.example@attacker.net/token", False),
            ("registry.example", "http://registry.example/token", False),
            ("[::1]:5000", "http://[::1]:5001/token", True),
        ],
    )
    def test_which_hosts_belong_together(self, registry: str, realm: str, allowed: bool) -> None:
        own = Origin.of(f"https://{registry}").host
        with contextlib.nullcontext() if allowed else pytest.raises(AccessError):
            _check_receiver(own, Origin.of(realm), "")
