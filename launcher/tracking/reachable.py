"""Checks, within seconds and before submission, that ``tracking.uri`` is reachable."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from launcher.tracking.loggers import check_loggers
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import TrackingConfig

PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
"""Schemes of tracking stores that are somewhere on the network, and their usual ports."""
CONNECT_S = 10.0
"""A machine that is only slow lets its kernel accept a connection sooner."""

REMEDY = (
    "give http://HOST:PORT of a server, sqlite:////FOLDER/FILE.db, or leave tracking.uri out for a database in the folder of the trials"
)


LONGEST_NAME = 500
"""Letters of an experiment's name that MLflow takes."""


def check_experiment(tracking: TrackingConfig) -> None:
    """``ConfigError`` for a name that MLflow gives no experiment."""
    if not tracking.experiment:
        raise ConfigError("tracking.experiment='' names no experiment; give a name, or leave it out for 'trireme'")
    if (letters := len(tracking.experiment)) > LONGEST_NAME:
        raise ConfigError(f"tracking.experiment has {letters} letters, and MLflow takes {LONGEST_NAME}; give a shorter name")


def check_tracking(tracking: TrackingConfig, root: Path) -> None:
    """``ConfigError`` for a logger without its package, an address that MLflow cannot have, a host that is not there or refuses, a file
    that cannot be written."""
    check_loggers(tracking.loggers)
    if tracking.uri is None:
        return _check_file(root / "mlflow.db", "", "move it away, or choose another sweep.dir")
    try:
        parts = urlsplit(tracking.uri)
        scheme, port = parts.scheme.partition("+")[0], parts.port
    except ValueError as error:
        raise ConfigError(f"tracking.uri={tracking.uri!r} is not an address ({error}); {REMEDY}") from None
    if scheme == "sqlite":
        _check_file(Path(parts.path[1:]), f"tracking.uri={tracking.uri} names ", "name a file in a folder that exists and can be written")
    elif scheme in PORTS:
        _check_host(tracking.uri, parts, port or PORTS[scheme])
    elif scheme != "databricks":
        raise ConfigError(f"tracking.uri={tracking.uri!r} is not an MLflow server or database; {REMEDY}")


def _check_file(path: Path, who: str, remedy: str) -> None:
    """A database that is there must be a file that can be written; where one is to be made, its folder must take it."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{who}{path}, which is not a file; {remedy}")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{who}{path}, which cannot be written; {remedy}")
    if who and not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{who}{path}, but {path.parent} is not a writable folder; {remedy}")


def _check_host(uri: str, parts: SplitResult, port: int) -> None:
    if not parts.hostname:
        raise ConfigError(f"tracking.uri={uri!r} names no host; {REMEDY}")
    if parts.scheme in getproxies() and not proxy_bypass(parts.hostname):
        return  # the proxy knows the host, this machine need not
    try:
        socket.create_connection((parts.hostname, port), CONNECT_S).close()
    except socket.gaierror as error:
        raise ConfigError(f"tracking.uri={uri}: there is no host {parts.hostname!r} ({error.strerror}); {REMEDY}") from None
    except (OSError, UnicodeError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"tracking.uri={uri}: nobody answers at {parts.hostname}:{port} ({words}); start the server, or {REMEDY}"
        ) from None
