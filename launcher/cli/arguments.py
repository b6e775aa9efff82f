"""Shared arguments of the verbs that look at a sweep, and reading it."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.cli.overrides import NamedOption
from launcher.cli.parser import VerbParser

if TYPE_CHECKING:
    from launcher.trials.store import Store, Sweep


UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""Errors of a folder that can be read all the same."""


def sweep_parser(verb: str, description: str) -> VerbParser:
    """A parser that takes ``[SWEEP] [--dir DIR]``."""
    parser = VerbParser(f"trireme {verb}", description)
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="name of the sweep (default: the newest)")
    parser.add_argument("--dir", action=NamedOption, default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    return parser


def open_sweep(arguments: argparse.Namespace) -> Sweep:
    """Returns the requested sweep, polling trials that a launcher left in a queue. Raises ``ConfigError`` if there is none."""
    from launcher.trials.store import Store

    store = Store(arguments.dir)
    return caught_up(store, lambda: store.sweep(arguments.sweep))


def caught_up(store: Store, read: Callable[[], Sweep]) -> Sweep:
    """Returns the sweep that ``read`` reads, its trials polled; as last recorded, with a note, if no queue answers or the disk is full."""
    from launcher.backends.contract import BackendError
    from launcher.backends.pool import Backends
    from launcher.sweep.reconcile import catch_up

    sweep = read()
    try:
        with Backends() as backends:
            catch_up(store, sweep.records, backends)
    except BackendError as error:
        print(f"as last recorded, since the queue cannot be asked: {error}", file=sys.stderr)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        print(f"as last recorded, since {error.filename or store.root} cannot be written: {error.strerror}", file=sys.stderr)
        return read()  # without the polled states, which could not be saved
    return sweep
