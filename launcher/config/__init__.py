"""The launcher's typed configuration: schema, composition by Hydra, and the rules that concern the cluster."""

from launcher.config.compose import compose, to_config
from launcher.config.folders import conf_dir, project_dir
from launcher.config.rules import check_launchable, check_ours, locate_data, resolve
from launcher.config.schema import ClusterConfig, Config, ContainerConfig, HardwareConfig, LocalCluster, SweepConfig

__all__ = [
    "ClusterConfig",
    "Config",
    "ContainerConfig",
    "HardwareConfig",
    "LocalCluster",
    "SweepConfig",
    "check_launchable",
    "check_ours",
    "compose",
    "conf_dir",
    "locate_data",
    "project_dir",
    "resolve",
    "to_config",
]
