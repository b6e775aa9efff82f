"""What scripts may import from ``launcher``."""

from __future__ import annotations

import doctest

import pytest

import launcher

pytestmark = pytest.mark.slow


def test_the_examples_of_the_facade_are_true() -> None:
    outcome = doctest.testmod(launcher)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_every_public_name_can_be_imported() -> None:
    assert all(callable(getattr(launcher, name)) for name in launcher.__all__)


def test_packages_say_that_they_are_typed() -> None:
    from importlib.resources import files

    assert all((files(package) / "py.typed").is_file() for package in ("launcher", "trainer"))
