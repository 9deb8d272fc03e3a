"""Addresses that servers name, before anything is sent to them."""

from __future__ import annotations

import pytest

from bootseer.errors import PermanentError
from bootseer.store.transport import Origin


@pytest.mark.parametrize(
    "url", ["ftp://host/", "ftp://host:21/", "file:///etc/passwd", "//host/", "http://", "http://h:x/"]
)
def test_only_addresses_of_http_are_followed(url: str) -> None:
    with pytest.raises(PermanentError):
        Origin.of(url)


@pytest.mark.parametrize(("url", "port"), [("http://h/", 80), ("https://h/", 443), ("https://h:5000/", 5000)])
def test_an_origin_has_the_port_that_is_meant(url: str, port: int) -> None:
    assert Origin.of(url).port == port


def test_an_origin_is_the_host_that_is_connected_to() -> None:
    # urllib takes what stands behind the @ for the host, urllib3 connects to what stands before the backslash.
    assert Origin.of("http://attacker:1\\@registry:2/token") == Origin("http", "attacker", 1)
