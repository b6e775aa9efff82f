"""The jobs of a Hydra sweep, composed quickly: composing takes Hydra a twentieth of a second and more, and sweeps may have thousands of jobs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Jobs:
    """Composes jobs of one ``config``. Those that differ in values alone, as in ``layout.tensor=2``, get them set on a copy of one composition,
    as Hydra would set them last; whatever else an override says (a choice of a group, ``+``, ``~``, ``hydra.``) is left to Hydra."""

    def __init__(self, loader: Any, config: DictConfig):
        from hydra.core.override_parser.overrides_parser import OverridesParser

        self._loader, self._config, self._parser = loader, config, OverridesParser.create()
        self._bases: dict[tuple[str, ...], DictConfig | None] = {}  # by what is not a value; None: met once

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of one job. Raises what Hydra raises."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        parsed = self._parser.parse_overrides(list(overrides))
        values = [o for o in parsed if _sets_a_value(o)]
        rest = tuple(line for line, o in zip(overrides, parsed) if not _sets_a_value(o))
        if rest not in self._bases:
            self._bases[rest] = None
            return self._whole(overrides)
        base = self._bases[rest]
        if base is None:
            base = self._bases[rest] = self._whole(rest)
        job = copy.deepcopy(base)
        try:
            for override in values:
                OmegaConf.update(job, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self._whole(overrides)  # for the error in Hydra's words
        return job

    def _whole(self, overrides: Sequence[str]) -> DictConfig:
        composed: DictConfig = self._loader.load_sweep_config(self._config, list(overrides))
        return composed


def _sets_a_value(override: Any) -> bool:
    key = override.key_or_group
    plain = override.type is not None and override.type.name == "CHANGE" and override.package is None
    return plain and "." in key and "/" not in key and not key.startswith("hydra.")
