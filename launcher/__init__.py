"""The tool a person types: compose, plan, launch, measure, rank. What a script may use:

>>> from launcher import compose, plan, predict, resolve
>>> config = resolve(compose(["recipe=gpt3_5b"]))
>>> predict(config.model, config.layout, config.run, config.cluster).ranks
128
>>> found = plan(config)
>>> found.layout(found.order[0]).tensor in (1, 2, 4, 8)
True

``resolve`` fills in derived values and checks every rule, ``run_sweep`` runs trials, ``ConfigError`` is every error of wrong input. Other
names inside the package may change without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from launcher.own_python import TROUBLE

if TYPE_CHECKING:
    from launcher.config import compose, resolve
    from launcher.cost import predict
    from launcher.planning.plan import plan
    from launcher.sweep.run import run_sweep
    from trainer.shared.run.errors import ConfigError

_PUBLIC = {
    "ConfigError": "trainer.shared.run.errors", "compose": "launcher.config", "plan": "launcher.planning.plan", "predict": "launcher.cost",
    "resolve": "launcher.config", "run_sweep": "launcher.sweep.run",
}  # fmt: skip

__all__ = ["ConfigError", "compose", "plan", "predict", "resolve", "run_sweep"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: a verb that needs none of them starts at once."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    if TROUBLE:
        raise ImportError(TROUBLE)
    return getattr(import_module(_PUBLIC[name]), name)
