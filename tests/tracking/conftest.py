"""Fixtures of tests that need MLflow or a browser."""

from tests.tracking.fixtures import empty_database, page, root, server

__all__ = ["empty_database", "page", "root", "server"]
