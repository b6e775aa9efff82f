"""Nodes at fault are left out for a while, never for ever, and never so many that an attempt cannot start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launcher.trials.exclusion import choose, exclusions, names, words

HISTORY: list[dict[str, Any]] = [
    {"attempt": 0, "ended": 1000.0, "bad_nodes": ["n2"]},
    {"attempt": 1, "ended": 2000.0, "bad_nodes": ["n1", "n3"]},
    {"attempt": 2, "ended": 3000.0, "bad_nodes": ["n2"]},
]


def test_an_exclusion_ends_and_a_new_fault_begins_it_anew() -> None:
    def left_out(now: float) -> tuple[str, ...]:
        return names(exclusions(HISTORY, 1500.0, now))

    assert left_out(3000.0) == ("n1", "n2", "n3")
    assert left_out(3500.0) == ("n2",)
    assert left_out(4500.0) == ()
    assert exclusions(HISTORY, 0.0, 3000.0) == [], "none at all"


@given(st.integers(0, 4))
def test_as_many_are_left_out_as_can_be_and_the_newest_fault_before_older_ones(spare: int) -> None:
    wanted = exclusions(HISTORY, 5000.0, 3000.0)
    chosen = choose(wanted, lambda nodes: len(nodes) <= spare)
    assert len(chosen) == min(spare, 3)
    assert spare == 0 or names(chosen[-1:]) == ("n2",)


def test_a_person_is_told_who_is_left_out_and_who_is_used_again() -> None:
    wanted = exclusions(HISTORY, 5000.0, 3000.0)
    said = words(wanted, wanted[-1:])
    assert said.startswith("leaves out n2 (at fault in attempt 2, until ")
    assert said.endswith("; uses n1 (at fault in attempt 1), n3 (at fault in attempt 1) again, without which there are not enough nodes")
    assert words([], []) == ""


def test_a_place_is_only_asked_while_somebody_is_to_be_left_out() -> None:
    asked: list[Sequence[str]] = []
    choose([], lambda nodes: bool(asked.append(nodes)))
    assert asked == []
