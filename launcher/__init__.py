"""The tool a person types: compose, plan, launch, measure, rank. What a script may use:

>>> from launcher import compose, plan, predict, resolve
>>> config = resolve(compose(["recipe=gpt3_5b"]))
>>> predict(config.model, config.layout, config.run, config.cluster).ranks
128
>>> found = plan(config)
>>> found.layout(found.order[0]).tensor in (1, 2, 4, 8)
True

``resolve`` fills in what is derived and checks every rule, ``run_sweep`` runs trials, ``ConfigError`` is every error of wrong input. Other
names inside the package may change without notice.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def _load_trainer() -> None:
    """The package beside this one, where PYTHONPATH names a folder with another ``trainer``. What a program has imported stays."""
    path = Path(__file__).parents[1] / "trainer" / "__init__.py"
    if "trainer" in sys.modules or ((found := find_spec("trainer")) and found.origin == str(path)):
        return
    ours = spec_from_file_location("trainer", path, submodule_search_locations=[str(path.parent)])
    assert ours is not None and ours.loader is not None
    sys.modules["trainer"] = module_from_spec(ours)
    ours.loader.exec_module(sys.modules["trainer"])


_load_trainer()


def __getattr__(name: str) -> Any:
    """Imported when asked for: a verb that needs none of them starts at once."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'launcher' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
