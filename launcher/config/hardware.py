"""The devices that are known by name: conf/hardware, and machines that ``trireme doctor`` measured into runs/hardware."""

from __future__ import annotations

from pathlib import Path

from launcher.config.compose import conf_dir
from launcher.config.schema import HardwareConfig
from trainer.config import ConfigError, from_dict


def hardware_files() -> dict[str, HardwareConfig]:
    """Every hardware file by its name; what was measured here replaces what ships."""
    import yaml

    found = {}
    for folder in (conf_dir() / "hardware", Path("runs") / "hardware"):
        for path in sorted(folder.glob("*.yaml")):
            try:
                found[path.stem] = from_dict(HardwareConfig, yaml.safe_load(path.read_text()) or {}, f"{path}: ")
            except yaml.YAMLError as error:
                raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    return found
