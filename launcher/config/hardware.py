"""The devices that are known by name: conf/hardware, and machines that ``trireme doctor`` measured into runs/hardware."""

from __future__ import annotations

from pathlib import Path

from launcher.config.folders import conf_dir
from launcher.config.renamed import refuse_renamed
from launcher.config.schema import HardwareConfig
from launcher.config.yaml_text import read_yaml
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict


class HardwareFiles(dict[str, HardwareConfig]):
    """Devices by name. A measured one whose file is broken stops nothing else: it is a ``ConfigError`` when it is asked for."""

    def __init__(self, readable: dict[str, HardwareConfig], broken: dict[str, ConfigError]):
        super().__init__(readable)
        self._broken = broken

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._broken

    def __missing__(self, name: str) -> HardwareConfig:
        raise self._broken.get(name) or KeyError(name)


def hardware_files(folder: Path | None = None) -> HardwareFiles:
    """Every hardware file by its name, those of ``folder``, a user's own config groups, too; what ships comes before what was measured
    here, and that before those of ``folder``, as in ``hardware=NAME``."""
    readable, broken = {}, {}
    own = [] if folder is None else sorted((folder / "hardware").glob("*.yaml"))
    for path in [*own, *sorted((Path("runs") / "hardware").glob("*.yaml"))]:
        try:
            readable[path.stem] = _read(path)
        except ConfigError as error:
            broken[path.stem] = error
    return HardwareFiles(readable | shipped_hardware(), broken)


def shipped_hardware() -> dict[str, HardwareConfig]:
    """The data sheets of conf/hardware by name."""
    return {path.stem: _read(path) for path in sorted((conf_dir() / "hardware").glob("*.yaml"))}


def _read(path: Path) -> HardwareConfig:
    import yaml

    try:
        data = read_yaml(path.read_text()) or {}
        if isinstance(data, dict):
            refuse_renamed(data, f"{path}: ")
        return from_dict(HardwareConfig, data, f"{path}: ")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({error}); mend or remove it") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
