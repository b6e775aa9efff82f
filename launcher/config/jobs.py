"""The jobs of a Hydra sweep, composed quickly: composing takes Hydra a twentieth of a second and more, and sweeps may have thousands of jobs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Jobs:
    """Composes jobs of one ``config``. Those that differ in values alone, as in ``layout.tensor=2``, get them set on a copy of one composition,
    as Hydra would set them last; whatever else an override says (a choice of a group, ``+``, ``~``, ``hydra.``) is left to Hydra, with all
    values before it: Hydra applies what is no choice in the order given, and ``++cluster.env.A=1`` may follow ``cluster.env.A=2``."""

    def __init__(self, loader: Any, config: DictConfig):
        from hydra.core.override_parser.overrides_parser import OverridesParser

        self._loader, self._config, self._parser = loader, config, OverridesParser.create()
        self._bases: dict[tuple[str, ...], DictConfig | None] = {}  # by what is not a value; None: met once

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of one job. Raises what Hydra raises."""
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        parsed = self._parser.parse_overrides(list(overrides))
        ordered = [i for i, o in enumerate(parsed) if not _sets_a_value(o) and not _may_be_a_choice(o)]
        last = ordered[-1] if ordered else -1
        values = [o for i, o in enumerate(parsed) if i > last and _sets_a_value(o)]
        rest = tuple(line for i, (line, o) in enumerate(zip(overrides, parsed)) if i <= last or not _sets_a_value(o))
        if rest not in self._bases:
            self._bases[rest] = None
            return self._whole(overrides)
        try:
            base = self._bases[rest]
            if base is None:
                base = self._bases[rest] = self._whole(rest)
            job = copy.deepcopy(base)
            for override in values:
                OmegaConf.update(job, override.key_or_group, override.value(), merge=True)
        except (OmegaConfBaseException, HydraException):
            return self._whole(overrides)  # which says what is wrong in Hydra's words
        return job

    def _whole(self, overrides: Sequence[str]) -> DictConfig:
        composed: DictConfig = self._loader.load_sweep_config(self._config, list(overrides))
        return composed


def _sets_a_value(override: Any) -> bool:
    return _changes(override) and "." in override.key_or_group and not override.key_or_group.startswith("hydra.")


def _may_be_a_choice(override: Any) -> bool:
    return _changes(override) and "." not in override.key_or_group and isinstance(override.value(), str)


def _changes(override: Any) -> bool:
    plain = override.type is not None and override.type.name == "CHANGE" and override.package is None
    return plain and "/" not in override.key_or_group
