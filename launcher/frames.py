"""The verbs as functions for scripts and notebooks: words as on a command line, results as tables.

A table is a pandas ``DataFrame`` where pandas is installed, else a list of dicts with the same columns: nested values under dotted names
(``layout.tensor``), seconds, bytes. ``attrs["document"]`` of a frame holds the rest of what ``--json`` prints. Progress and remarks go to
standard error, as on a command line; wrong input is a ``ConfigError``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.shared.run.read import flatten

Table = Any
"""A ``DataFrame``, or a list of dicts."""


def plan(*words: str, **options: Any) -> Table:
    """Predicts, as ``trireme plan``: the candidates that are in, the fastest first; of serving, the front. ``options``: ``top=50``."""
    from launcher.cli import plan as verb

    document = _document(verb.main, words, options)
    rows = document.pop("layouts" if "layouts" in document else "front")
    return table([flatten(row) for row in rows], document)


def size(*words: str, **options: Any) -> Table:
    """Sizes a model, as ``trireme size``: the choice, then the alternatives. ``options``: ``gpus=64, days=10, tokens=300e9``."""
    from launcher.cli import size as verb

    document = _document(verb.main, words, options)
    return table([flatten(row) for row in (document["choice"], *document.pop("alternatives"))], document)


def search(*words: str, **options: Any) -> Table:
    """Searches, as ``trireme search``: the trials that it measured, ranked. The same call continues a search that was interrupted."""
    from launcher.cli import search as verb

    document = _document(verb.main, words, options)
    return _ranked(document["search"], _folder(words), document)


def sweep(*words: str) -> Table:
    """Trains every combination of values, as ``trireme train -m``: the trials, ranked. The same call runs only those that are missing."""
    from launcher.cli import train as verb
    from launcher.sweep.multirun import sweep_name

    name = _value(words, "sweep.name") or sweep_name(words)
    with _arguments():
        verb.main(["-m", *words])
    return _ranked(name, _folder(words), {})


def rank(sweep: str | None = None, dir: str = "runs") -> Table:
    """Ranks the trials of a sweep, as ``trireme rank``; without a name, of the newest."""
    return _ranked(sweep, dir, {})


def table(rows: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> Table:
    """Returns ``rows`` as a frame with ``document`` among its attributes; without pandas as a list of dicts, each with all columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    whole = [{name: row.get(name) for name in names} for row in rows]
    try:
        import pandas
    except ImportError:
        return whole
    frame = pandas.DataFrame(whole, columns=[*names])
    frame.attrs["document"] = dict(document)
    return frame


def _ranked(name: str | None, folder: str, document: Mapping[str, Any]) -> Table:
    from launcher.cli.arguments import caught_up
    from launcher.results.rows import trial_rows
    from launcher.trials.store import Store

    store = Store(folder)
    return table(trial_rows(caught_up(store, lambda: store.sweep(name))), document)


def _document(verb: Callable[[list[str]], int], words: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the document that a verb prints with ``--json``."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), _arguments():
        verb([*words, *_options(options), "--json"])
    return dict(json.loads(said.getvalue()))


def _options(options: Mapping[str, Any]) -> list[str]:
    """Turns ``top=5, compute_optimal=True`` into ``--top=5 --compute-optimal``."""
    words = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None and value is not False}
    return [name if value is True else f"{name}={value}" for name, value in words.items()]


def _folder(words: Sequence[str]) -> str:
    return _value(words, "sweep.dir") or "runs"


def _value(words: Sequence[str], key: str) -> str | None:
    """Returns the last value that ``words`` give to ``key``."""
    return next((value for name, _, value in (word.partition("=") for word in reversed(words)) if name.lstrip("+") == key), None)


@contextlib.contextmanager
def _arguments() -> Iterator[None]:
    """Leaves ``sys.argv`` as it was: Hydra reads a command line from there."""
    before = sys.argv
    try:
        yield
    finally:
        sys.argv = before
