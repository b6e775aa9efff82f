"""The places where trials run: a folder for each (see ``launcher.config.clusters``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.config.clusters import class_of
from launcher.config.packages import install_command
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.backends.contract import Backend
    from launcher.config.schema import ClusterConfig


def backend_for(cluster: ClusterConfig) -> Backend:
    """The backend of ``cluster``. ``ConfigError`` when a package that it needs is not installed."""
    try:
        backend: Backend = class_of(cluster.backend, "BACKEND")(cluster)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ConfigError(
            f"cluster.backend={cluster.backend} needs the Python package {package!r}; run {install_command(cluster.backend, package)}"
        ) from None
    return backend
