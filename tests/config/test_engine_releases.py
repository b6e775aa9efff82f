"""An engine is what it was in the release that runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from launcher.config.engine import EngineMemory, EngineProfile, check_lines, released
from launcher.config.trainers import engine, engine_names
from trainer.shared.run.errors import ConfigError

TODAY = EngineProfile(
    "an engine",
    prefill="mixed",
    asynchronous=True,
    memory=EngineMemory(share=0.9, kv_block=16),
    earlier=[
        {"before": "0.8", "prefill": "first", "memory": {"kv_block": 8}},
        {"before": "0.10", "asynchronous": False, "prefill": "alone"},
        {"before": "2"},
    ],
)


def of(version: str, **facts: Any) -> EngineProfile:
    return released(replace(TODAY, version=version, **facts))


@pytest.mark.parametrize(
    ("version", "prefill", "asynchronous", "block"),
    [
        ("", "mixed", True, 16), ("3.1", "mixed", True, 16), ("0.10", "mixed", True, 16), ("0.10.0rc2.post1", "mixed", True, 16),
        ("0.9.9", "alone", False, 16), ("0.8", "alone", False, 16), ("v0.7.3", "first", False, 8), ("0.1", "first", False, 8),
    ],
)  # fmt: skip
def test_what_changed_since_a_release_is_as_it_was_before(version: str, prefill: str, asynchronous: bool, block: int) -> None:
    found = of(version)
    assert (found.prefill, found.asynchronous, found.memory) == (prefill, asynchronous, EngineMemory(share=0.9, kv_block=block))
    assert found.name == f"an engine {version}".strip() and released(found) == found


@pytest.mark.parametrize("name", engine_names())
def test_every_release_that_ships_is_an_engine(name: str) -> None:
    known = engine(name)
    found = {
        before: released(replace(known, version=before))
        for before in ["0.0.1", *(entry["before"] for entry in known.earlier)]
        if known.earlier
    }
    for before, profile in found.items():
        check_lines(profile)
        candidate = released(replace(known, version=f"{before}rc1"))
        assert replace(candidate, name=profile.name) == profile
    facts = [replace(profile, name="") for profile in found.values()]
    assert not any(one == other for one, other in itertools.combinations(facts, 2))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"version": "newest"}, r"engine\.version='newest' is not a release; write it as in '0\.8\.2'"),
        ({"version": "1", "earlier": []}, r"engine\.version=1: the profile of an engine does not tell releases apart; leave it out"),
        ({"version": "1", "earlier": [{"before": 0.1}]}, r"engine\.earlier: before=0\.1 is not a release; .*, in quotes in a file"),
        ({"version": "1", "earlier": [{"launch": "native"}]}, r"engine\.earlier: before=None is not a release"),
        ({"version": "1", "earlier": [{"before": "2", "lunch": "native"}]}, r"unknown key engine\.earlier: lunch"),
        ({"version": "1", "earlier": [{"before": "2", "launch": "slow"}]}, r"engine\.earlier: launch='?slow"),
    ],
)
def test_a_release_that_cannot_be_told_is_one_plain_error(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of(**facts)
