"""``trireme train``: Hydra composes one run, or a sweep with ``-m``; the sweep loop runs it.

Everything after the verb is Hydra's own command line: overrides, ``-m``, ``--cfg job``, ``--config-dir``, ``hydra/sweeper=...``. Five
flags are ours: ``--help``, ``--dry-run`` prints what would be submitted, ``--detach`` goes on in the background, ``--keys`` explains every
key, ``--schema`` prints the JSON schema of the configuration for editors.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.cli.launching import DETACH, DETACH_HELP, check_detach, first_word
from launcher.cli.main import plain
from launcher.cli.overrides import add_keys
from launcher.cli.parser import VerbParser
from trainer.shared.run.errors import ConfigError

DESCRIPTION = """\
Trains one layout, or with -m every combination of KEY=A,B,C, and measures it. What was measured before is not run again. Overrides are in
Hydra's grammar, and Hydra's other flags and sweepers work too.

examples:
  trireme train model=gpt_tiny layout.tensor=2 layout.pipeline=2
  trireme train -m model=gpt_tiny layout.tensor=1,2 layout.pipeline=1,2
  trireme train recipe=gpt3_1.3b cluster=slurm --dry-run
  trireme train --keys learning rate
"""
FEW = 4
"""Options of a group that the help names."""


def main(argv: list[str]) -> int:
    """Exit code 0 if every trial was measured or submitted (in a sweep, some may be out of memory or diverged; with ``--dry-run``:
    printed), 1 if one failed or was stopped, or none was measured, 2 for wrong input."""
    if {"-h", "--help"} & {*argv}:
        parser().print_help()
        return 0
    if "--keys" in argv or "--schema" in argv:
        from launcher.cli.keys import print_keys, print_schema

        return (print_keys if "--keys" in argv else print_schema)([a for a in argv if not a.startswith("-")])
    overrides, detach = [_dry_run(a) for a in argv if a != DETACH], DETACH in argv
    flags, plain = _split(overrides)
    prints = {"-sc", "--shell-completion", "--cfg", "-c", "--info", "-i", "--hydra-help"} & {flag.partition("=")[0] for flag in flags}
    check_detach(detach, dry_run=any(word.startswith("dry_run=") for word in plain))
    if detach and "hydra/sweeper=trireme" in plain:
        raise ConfigError(f"{DETACH}: a search goes on in the background with 'trireme search {DETACH} ...'")
    if not prints:
        first_word()
    import hydra

    from launcher.config import conf_dir
    from launcher.config.compose import check_overrides, hydra_behaviour, plain_errors, register_schema, search_path
    from launcher.config.folders import PRIMARY, primary_of
    from launcher.config.text_keys import in_quotes, several_texts, split
    from launcher.sweep.multirun import Multirun

    flags = [{"--config-path": "--config-dir", "-cp": "-cd"}.get(flag, flag) for flag in flags]  # there are groups of ours beside
    if "--hydra-help" not in flags:  # which composes no configuration, and copies every schema for each group that it lists
        register_schema()
    sweep = Multirun(plain, detach)
    several = bool({"-m", "--multirun"} & set(flags))
    for text in filter(several_texts, plain if several else ()):
        key, _, value = text.partition("=")
        one = shlex.quote(f"{key}={in_quotes(value)}")
        said = f"{text}: a comma separates values with -m, here {len(split(value))}, each for trials of its own; one text is {one}"
        print(said, file=sys.stderr)
    own = _own_folder(flags)
    primary = primary_of(own, name) if (name := _value_of(flags, "--config-name", "-cn")) is not None else None
    plain = check_overrides(plain, sweep=several, folder=own, primary=primary)
    sys.argv = ["trireme train", *flags, *plain, search_path(primary=primary, own=own if primary else None)]
    theirs = own is not None or any(word.lstrip("+~").startswith("hydra") for word in plain)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then lets errors through instead of printing its own and exiting with 1
    try:
        with sweep.backends, plain_errors(), _mode_by_flags(theirs):
            hydra.main(**hydra_behaviour(), config_path=str(conf_dir()), config_name=PRIMARY)(sweep.train)()
    except OSError as error:
        sweep.error = error
    except BaseException as error:
        sweep.finish(0, error)
        raise
    if isinstance(sweep.error, OSError):
        raise _by_key(sweep.error, sweep.folder)
    sweep.finish(error=sweep.error)
    if sweep.error is not None:
        raise sweep.error
    return sweep.exit_code


@contextmanager
def _mode_by_flags(of_their_own: bool) -> Iterator[None]:
    """Spares the composition by which Hydra reads ``hydra.mode`` before the one that it runs, half of the time until a run is composed:
    only settings ``of_their_own`` can set it."""
    from hydra._internal.hydra import Hydra

    read = Hydra.get_mode
    if not of_their_own:
        Hydra.get_mode = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_mode = read  # type: ignore[method-assign]


def parser() -> VerbParser:
    """Returns the words that Hydra reads, for help and completion, with the groups and some of their options."""
    made = VerbParser("trireme train", DESCRIPTION)
    add_keys(made)
    made.epilog = f"groups, each with its first options:\n\n{groups()}"
    made.add_argument("-m", "--multirun", action="store_true", help="every combination of several values is a trial")
    made.add_argument("--dry-run", nargs="?", choices=("client", "server"), help="print what would be submitted; start nothing")
    made.add_argument("--keys", nargs="*", metavar="WORD", help="explain every key, or those about a word")
    made.add_argument(DETACH, action="store_true", help=DETACH_HELP)
    made.add_argument("--schema", nargs="?", metavar="SECTION", help="the JSON schema of configuration files, for editors")
    made.add_argument(
        "--cfg", "-c", choices=("job", "hydra", "all"), metavar="WHAT", help="print the configuration (job, hydra or all) and stop"
    )
    made.add_argument("--config-dir", "-cd", metavar="DIR", help="folder of config groups of your own, such as DIR/trainer/NAME.yaml")
    made.add_argument("--config-name", "-cn", metavar="NAME", help="DIR/NAME.yaml, which builds on ours: 'defaults: [config, _self_]'")
    made.add_argument("--info", "-i", metavar="WHAT", help="how Hydra composed it: defaults, ...")
    made.add_argument("--hydra-help", action="store_true", help="Hydra's other flags")
    return made


def groups() -> str:
    """Lists the config groups as the help of ``trireme train`` shows them."""
    from launcher.config.compose import config_groups
    from trainer.shared.run.errors import options_listed

    shown = {group: [name for name in names if not name.startswith("_")] for group, names in config_groups().items()}
    return "\n".join(f"  {group:<10}   {options_listed(names, FEW)}" for group, names in shown.items())


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
    given = _value_of(flags, "--config-dir", "-cd")
    return None if given is None else Path(given)


def _value_of(flags: list[str], *names: str) -> str | None:
    """Returns what follows a flag. Raises ``ConfigError`` if it is empty."""
    for flag, following in zip(flags, [*flags[1:], ""]):
        name, _, value = flag.partition("=")
        if name in names:
            if not (value or following):
                raise ConfigError(f"{name}= is empty (unset shell variable?); give a value or drop it")
            return value or following
    return None
