"""Trials as processes of this machine."""

from launcher.backends.local.backend import LocalBackend

__all__ = ["LocalBackend"]
