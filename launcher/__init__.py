"""The tool a person types: compose, plan, launch, measure, rank. What a script or a notebook may use:

>>> from launcher import plan
>>> found = plan("recipe=gpt3_5b", top=3)
>>> len(found), "layout.tensor" in found
(3, True)

``plan``, ``size``, ``search``, ``sweep`` and ``rank`` are the verbs; each takes the words of its command line and returns a table
(``launcher.frames``). Below them, with objects in place of words:

>>> from launcher import compose, predict, resolve
>>> config = resolve(compose(["recipe=gpt3_5b"]))
>>> predict(config.model, config.layout, config.run, config.cluster).ranks
128

``resolve`` fills in derived values and checks every rule, ``run_sweep`` runs trials, ``ConfigError`` is every error of wrong input. Other
names inside the package may change without notice.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from launcher.own_python import TROUBLE

if TYPE_CHECKING:
    from launcher.config import compose, resolve
    from launcher.cost import predict
    from launcher.frames import plan, rank, size
    from launcher.sweep.run import run_sweep
    from trainer.shared.run.errors import ConfigError

_FRAMES = dict.fromkeys(("plan", "rank", "search", "size", "sweep"), "launcher.frames")
_PUBLIC = {
    "ConfigError": "trainer.shared.run.errors", "compose": "launcher.config", "predict": "launcher.cost", "resolve": "launcher.config",
    "run_sweep": "launcher.sweep.run", **_FRAMES,
}  # fmt: skip

__all__ = ["ConfigError", "compose", "plan", "predict", "rank", "resolve", "run_sweep", "search", "size", "sweep"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: a verb that needs none of them starts at once."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    if TROUBLE:
        raise ImportError(TROUBLE)
    return getattr(import_module(_PUBLIC[name]), name)


class _RoomOfVerb(ModuleType):
    """A room with the name of a verb (``search``, ``sweep``): once it is imported, that name of this package is the room, so it can be
    called like the verb."""

    def __call__(self, *words: str, **options: Any) -> Any:
        return __getattr__(self.__name__.rpartition(".")[2])(*words, **options)


class _Face(ModuleType):
    """This package: tells rooms from the verbs whose names they have, when they are bound here as they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FRAMES and isinstance(value, ModuleType):
            value.__class__ = _RoomOfVerb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
