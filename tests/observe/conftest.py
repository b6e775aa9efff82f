"""Ranks of these tests are forked from a process that has imported torch."""

from tests.warm import forked

__all__ = ["forked"]
