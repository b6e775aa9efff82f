"""``trireme train``: Hydra composes one run, or a sweep with ``-m``; the sweep loop runs it.

Everything after the verb is Hydra's own command line: overrides, ``-m``, ``--cfg job``, ``--help``, ``--config-dir``,
``hydra/sweeper=...``. Three flags are ours: ``--dry-run`` prints what would be submitted, ``--keys`` explains every key,
``--schema`` prints the JSON schema of the configuration for editors.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from launcher.cli.console import wide_console
from launcher.cli.main import plain
from launcher.config.clusters import backend_names, cluster_class
from launcher.config.compose import check_overrides, plain_errors, register_schema
from launcher.config.folders import conf_dir
from launcher.config.json_schema import json_schema
from launcher.config.schema import Config
from launcher.config.text_keys import in_quotes, several_texts, split
from launcher.sweep.multirun import Multirun
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import flatten
from trainer.shared.run.schema import field_docs


def main(argv: list[str]) -> int:
    """Exit code 0 if every trial was measured or submitted (in a sweep, some may be out of memory or diverged; with ``--dry-run``:
    printed), 1 if one failed or was stopped, or none was measured, 2 for wrong input."""
    if "--keys" in argv:
        return print_keys([a for a in argv if not a.startswith("-")])
    if "--schema" in argv:
        return print_schema([a for a in argv if not a.startswith("-")])
    import hydra

    overrides = [_dry_run(a) for a in argv]
    flags, plain = _split(overrides)
    register_schema()
    sweep = Multirun(plain)
    several = bool({"-m", "--multirun"} & set(flags))
    if not {"-sc", "--shell-completion"} & set(flags):  # completion asks about words that are not whole yet
        for text in filter(several_texts, plain if several else ()):
            key, _, value = text.partition("=")
            one = shlex.quote(f"{key}={in_quotes(value)}")
            said = f"{text}: a comma separates values with -m, here {len(split(value))}, each for trials of its own; one text is {one}"
            print(said, file=sys.stderr)
        plain = check_overrides(plain, sweep=several, folder=_own_folder(flags))
    sys.argv = ["trireme train", *flags, *plain]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then lets errors through instead of printing its own and exiting with 1
    try:
        with plain_errors():
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(sweep.train)()
    except KeyboardInterrupt:
        sweep.finish(0)
        raise
    except OSError as error:
        sweep.error = error
    if isinstance(sweep.error, OSError):
        raise _by_key(sweep.error, sweep.folder)
    sweep.finish()
    if sweep.error is not None:
        raise sweep.error
    return sweep.exit_code


def _by_key(error: OSError, folder: str) -> OSError | ConfigError:
    """Returns the message with the key that names the folder of trials, if it is about a file there."""
    file = os.path.abspath(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else ""
    inside = folder and Path(file).is_relative_to(os.path.abspath(folder))
    return ConfigError(f"sweep.dir={folder}: {plain(error)}") if inside else error


def _dry_run(argument: str) -> str:
    if argument in ("--dry-run", "--dry-run=client"):
        return "dry_run=client"
    return "dry_run=server" if argument == "--dry-run=server" else argument


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
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


def _own_folder(flags: list[str]) -> Path | None:
    for flag, following in zip(flags, [*flags[1:], ""]):
        name, _, value = flag.partition("=")
        if name in ("--config-dir", "-cd"):
            if not (value or following):
                raise ConfigError(f"{name}= is empty (unset shell variable?); give a folder or drop it")
            return Path(value or following)
    return None


def print_keys(words: list[str]) -> int:
    """Every key of which the name or the meaning, with its backend, contains one of ``words`` (all without); ``ConfigError`` for none."""
    table = Table("key", "default", "meaning", box=None, pad_edge=False)
    for name, (default, doc) in key_docs().items():
        if not words or any(word.lower() in f"{name} {doc}".lower() for word in words):
            table.add_row(name, Text("null" if default is None else str(default)), Text(doc))
    if not table.row_count:
        raise ConfigError(f"no key matches {' or '.join(map(repr, words))}; 'trireme train --keys' lists all")
    wide_console().print(table)
    return 0


def print_schema(words: list[str]) -> int:
    """The JSON schema of a recipe file, or of the files of one section: ``--schema cluster``."""
    if len(words) > 1:
        raise ConfigError(f"--schema takes one section, not {' '.join(words)}; name one, or none for a whole recipe")
    print(json.dumps(json_schema(*words), indent=1))
    return 0


def key_docs() -> dict[str, tuple[Any, str]]:
    """``{key: (default, meaning)}`` of the whole configuration with ``cluster=local``, and of the other backends' clusters."""
    docs, defaults = field_docs(Config), flatten(Config())
    of_all, owners = set(docs), dict[str, list[str]]()
    for backend in backend_names():
        cluster = cluster_class(backend)
        for key, doc in field_docs(cluster, "cluster.").items():
            docs.setdefault(key, doc)
            owners.setdefault(key, []).append(backend)
        defaults |= {k: v for k, v in flatten(cluster(), "cluster.").items() if k not in defaults}
    return {key: (defaults.get(key), doc if key in of_all else f"{doc} ({', '.join(owners[key])})") for key, doc in docs.items()}
