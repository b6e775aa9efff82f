"""``trireme train``: Hydra composes one run, or a sweep with ``-m``; the sweep loop runs it.

Everything after the verb is Hydra's own command line: overrides, ``-m``, ``--cfg job``, ``--help``, ``--config-dir``,
``hydra/sweeper=...``. One flag is ours: ``--dry-run`` prints what would be submitted.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from launcher.config.compose import check_overrides, conf_dir, plain_errors, register_schema

HELP = "train one layout, or a sweep of them with -m"


def main(argv: list[str]) -> int:
    """Exit code 0 if a trial was measured (or printed, with ``--dry-run``), 1 if all failed, 2 for wrong input."""
    import hydra

    from launcher.sweep.multirun import Multirun

    overrides = [_dry_run(a) for a in argv]
    flags, plain = _split(overrides)
    register_schema()
    sweep = Multirun(plain)
    sys.argv = ["trireme train", *flags, *check_overrides(plain)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then lets errors through instead of printing its own and exiting with 1
    with plain_errors():
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(sweep.task())()
    return sweep.exit_code


def _dry_run(argument: str) -> str:
    if argument in ("--dry-run", "--dry-run=client"):
        return "dry_run=client"
    return "dry_run=server" if argument == "--dry-run=server" else argument


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides."""
    takes_value = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--info", "-i",
                   "--experimental-rerun"}  # fmt: skip
    flags: list[str] = []
    overrides: list[str] = []
    rest: Any = iter(argv)
    for argument in rest:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flags.append(argument)
        if argument in takes_value:
            flags += [value for value in [next(rest, None)] if value is not None]
    return flags, overrides
