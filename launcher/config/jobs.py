"""Composes configurations that differ in values quickly: Hydra takes a tenth of a second for one, a sweep may have thousands of jobs, and a
pipeline composes one for each of its stages."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from launcher.config.clusters import cluster_from_dict
from launcher.config.composed import override_parser, to_config, without_secrets
from launcher.config.schema import Config
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict

if TYPE_CHECKING:
    from omegaconf import DictConfig

_WHOLE_NUMBER = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=(0|-?[1-9][0-9]{0,17})")
"""The most frequent override of a sweep. Hydra's parser takes a millisecond for it."""


class Jobs:
    """Composes jobs with ``whole``, which has Hydra compose one from all its overrides. Jobs that differ in values alone, as in
    ``layout.tensor=2``, get them set on a copy of one composition, as Hydra would set them last. Any other override (a choice of a group,
    ``+``, ``~``, ``hydra.``) is left to Hydra, with all values before it: Hydra applies overrides other than choices in the order given,
    and ``++cluster.env.A=1`` may follow ``cluster.env.A=2``."""

    def __init__(self, whole: Callable[[list[str]], DictConfig]):
        self._whole = whole
        self._bases: dict[tuple[str, ...], _Typed | None] = {}  # by the overrides left to Hydra
        self._parsed: dict[str, Any] = {}

    def config(self, overrides: Sequence[str]) -> Config:
        """Returns the typed configuration of one job. Sections that are equal in many jobs are one object. Raises Hydra's errors."""
        rest, values = self._split(overrides)
        if rest not in self._bases:
            self._bases[rest] = self._base(list(rest))
        base, job = self._bases[rest], None
        if base is not None:
            wanted = _by_section({o.key_or_group: o.value() for o in values})
            try:
                job = base.with_values(wanted)
            except ConfigError:
                if (plain := base.plain_with(wanted)) is not None:
                    return to_config(plain)  # raises the error of the first section that has a mistake, as Hydra's composition would
        return to_config(self._whole(list(overrides))) if job is None else job

    def _base(self, rest: list[str]) -> _Typed | None:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        try:
            return _Typed.of(self._whole(rest))
        except (OmegaConfBaseException, HydraException):
            return None  # all overrides together may be right

    def _split(self, overrides: Sequence[str]) -> tuple[tuple[str, ...], list[Any]]:
        """Splits overrides into those that Hydra has to compose and the values that may be set afterwards."""
        parsed = [self._parse(line) for line in overrides]
        ordered = [i for i, o in enumerate(parsed) if not _sets_a_value(o) and not _chooses(o)]
        last = ordered[-1] if ordered else -1
        values = [o for i, o in enumerate(parsed) if i > last and _sets_a_value(o)]
        return tuple(line for i, (line, o) in enumerate(zip(overrides, parsed)) if i <= last or not _sets_a_value(o)), values

    def _parse(self, line: str) -> Any:
        from hydra.core.override_parser.types import Override, OverrideType, ValueType

        plain = _WHOLE_NUMBER.fullmatch(line)
        if plain:
            return Override(OverrideType.CHANGE, plain[1], ValueType.ELEMENT, int(plain[2]), input_line=line)
        if line not in self._parsed:
            self._parsed[line] = override_parser().parse_overrides([line])[0]
        return self._parsed[line]


@dataclasses.dataclass
class _Typed:
    """A composition without interpolations, as plain data and typed."""

    sections: dict[str, Any]
    config: Config
    _made: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)  # sections by the values set in them

    @classmethod
    def of(cls, base: Any) -> _Typed | None:
        """Returns ``base`` as plain data and typed; None if a value may depend on another, or if it is not a configuration. Hydra then has
        to compose every job."""
        from omegaconf import OmegaConf

        plain: Any = OmegaConf.to_container(base)
        sections = {str(name): value for name, value in plain.items() if name != "hydra"}
        try:
            return None if _interpolates(sections) else cls(sections, to_config(base))
        except ValueError:
            return None

    def with_values(self, wanted: dict[str, dict[str, Any]]) -> Config | None:
        """Returns the configuration with plain values in place of plain values, by section and dotted key; None if ``wanted`` asks for
        more than that.

        Raises ``ConfigError`` for values that the schema refuses, and for secrets.
        """
        made: dict[str, Any] = {}
        for section in wanted:
            # By their text: 1, 1.0 and True are three values, but one key of a dictionary.
            known = section, repr(wanted[section])
            if known not in self._made:
                data = _with(self.sections.get(section), wanted[section])
                self._made[known] = None if data is None else self._typed_section(section, data)
            made[section] = self._made[known]
            if made[section] is None:
                return None
        return without_secrets(dataclasses.replace(self.config, **made))

    def plain_with(self, wanted: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
        """Returns the same as plain data."""
        changed = {section: _with(self.sections.get(section), values) for section, values in wanted.items()}
        return None if None in changed.values() else self.sections | changed

    def _typed_section(self, section: str, data: dict[str, Any]) -> Any:
        if section == "cluster":
            return cluster_from_dict(data)
        return from_dict(type(getattr(self.config, section)), data, f"{section}.")


def _by_section(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    wanted: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, rest = key.partition(".")
        wanted.setdefault(section, {})[rest] = value
    return wanted


def _with(section: Any, values: dict[str, Any]) -> dict[str, Any] | None:
    """Copies a section with plain values in place of plain values, by dotted key; None if they cannot simply be put there."""
    changed = copy.deepcopy(section)
    for key, value in values.items():
        *path, last = key.split(".")
        node = changed
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict) or not _is_plain(node.get(last, ...)) or not _is_plain(value):
            return None
        node[last] = value
    return changed if isinstance(changed, dict) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(entry) and not isinstance(entry, list) for entry in value)
    return value is None or type(value) in (bool, int, float) or (type(value) is str and "${" not in value and value != "???")


def _interpolates(node: Any) -> bool:
    if isinstance(node, dict):
        return any(map(_interpolates, node.values()))
    return any(map(_interpolates, node)) if isinstance(node, list) else isinstance(node, str) and not _is_plain(node)


def _sets_a_value(override: Any) -> bool:
    return _changes(override) and "." in override.key_or_group and not override.key_or_group.startswith("hydra.")


def _chooses(override: Any) -> bool:
    return _changes(override) and "." not in override.key_or_group and isinstance(override.value(), str)


def _changes(override: Any) -> bool:
    plain = override.type is not None and override.type.name == "CHANGE" and override.package is None
    return plain and "/" not in override.key_or_group
