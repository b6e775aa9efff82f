"""``python -m trainer`` for drills in which the training itself does not matter: ranks as ``tests/sweep/played.py`` plays them."""

from tests.sweep.played import entry as main

__all__ = ["main"]
