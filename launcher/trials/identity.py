"""What makes two trials the same trial.

A trial's id is a hash of everything that can change what it computes or how fast: its configuration, and the content of files that a tuning
reads (``launcher.trials.reads``). A prepared corpus is known by its path, and so are files that another trainer's command names: where they
have changed since a trial was measured, it is said. Left out, because a trial repeated with another value would measure the same thing:

- ``tracking``: where measurements are mirrored;
- ``cluster.hardware`` but its name: rates are the cost model's input, and calibration changes them while a search runs
  (the two that reach the trainer, peak and memory, are in ``run``);
- the cluster's ``passing`` keys: how patiently, how many at once, at whose expense.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from launcher.config.rules import run_of
from launcher.config.schema import Config
from launcher.trials.reads import digests
from trainer.shared.run.read import to_dict
from trainer.shared.run.schema import TuneConfig

_NEWER = [
    ("run", "deterministic", False), ("run", "moments", "fp32"), ("run", "async_tensor", False), ("data", "task", None),
    ("data", "pack", False), ("cluster", "setup_may_fail", []),
]  # fmt: skip
"""Keys that came later, with the value under which all is as before: trials of versions without them keep their id."""


def trial_id(config: Config) -> str:
    """12 hexadecimal digits; ``config`` must be resolved, so that a value given and the same value derived agree."""
    content = to_dict(run_of(config))
    del content["tracking"]
    defaults = {"command": None, "requests": None, "tune": to_dict(TuneConfig())}  # trials of versions without them keep their id
    for name, default in defaults.items():
        if content[name] == default:
            del content[name]
    place: dict[str, Any] = {name: value for name, value in to_dict(config.cluster).items() if name not in config.cluster.passing}
    place["hardware"] = config.cluster.hardware.name
    content["cluster"] = place
    for section, name, usual in _NEWER:
        if content[section].get(name, ...) == usual:
            del content[section][name]
    read = digests(config)  # none for most trials, which keep the id that they had before
    return digest(content | ({"reads": read} if read else {}))


def digest(content: Any) -> str:
    """12 hexadecimal digits of plain data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]
