"""The places where trials run. Each is imported only when a cluster asks for it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from launcher.config.packages import install_command
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.backends.contract import Backend
    from launcher.config.schema import ClusterConfig

_BACKENDS = {
    "local": ("launcher.backends.local.backend", "LocalBackend"),
    "slurm": ("launcher.backends.slurm", "SlurmBackend"),
    "kubernetes": ("launcher.backends.kubernetes", "KubernetesBackend"),
}


def backend_for(cluster: ClusterConfig) -> Backend:
    """The backend of ``cluster``. ``ConfigError`` when a package that it needs is not installed."""
    module, name = _BACKENDS[cluster.backend]
    try:
        backend: Backend = getattr(import_module(module), name)(cluster)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ConfigError(
            f"cluster.backend={cluster.backend} needs the Python package {package!r}; run {install_command(cluster.backend)}"
        ) from None
    return backend
