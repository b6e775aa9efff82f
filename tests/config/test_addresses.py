"""Which addresses hold a password: whoever logs in, and wherever it stands."""

from __future__ import annotations

import pytest

from launcher.config.secrets import secrets_in


@pytest.mark.parametrize(
    "address", ["redis://:word@cache:6379", "amqp://me:word@queue", "postgresql://me:w%40rd@db/x", "https://me:word@a.b/c"]
)
def test_an_address_with_a_password_is_a_secret_also_without_a_user(address: str) -> None:
    assert list(secrets_in({"proxies": [f"see {address} for more"]})) == [("proxies.0", "an address with a password")]


@pytest.mark.parametrize(
    "address", ["http://host:5000", "http://host:5000/a@b", "https://me@host/x", "git@host:group/x.git", "s3://bucket/a:b@c"]
)
def test_an_address_without_a_password_is_none(address: str) -> None:
    assert not list(secrets_in({"proxies": [address]}))
