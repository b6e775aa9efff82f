"""What the verbs that look at a sweep have in common: how it is named on the command line, and how it is read."""

from __future__ import annotations

import argparse
import sys

from launcher.backends.contract import BackendError
from launcher.backends.pool import Backends
from launcher.sweep.reconcile import catch_up
from launcher.trials.store import Store, Sweep


def sweep_parser(verb: str, description: str) -> argparse.ArgumentParser:
    """A parser that takes ``[SWEEP] [--dir DIR]``."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(f"trireme {verb}", description=description, formatter_class=form)
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="name of the sweep (default: the newest)")
    parser.add_argument("--dir", default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    return parser


def open_sweep(arguments: argparse.Namespace) -> Sweep:
    """The sweep that was asked for. Trials that a launcher left in a queue are asked after; ``ConfigError`` when there is no such sweep."""
    store = Store(arguments.dir)
    sweep = store.sweep(arguments.sweep)
    try:
        with Backends() as backends:
            catch_up(store, sweep.records, backends)
    except (BackendError, PermissionError) as error:
        print(f"as last recorded, since the queue cannot be asked: {error}", file=sys.stderr)
    return sweep
