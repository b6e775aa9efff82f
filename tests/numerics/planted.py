"""Ranks one of which computes a value that is not finite: run through ``farm``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import yaml

from trainer.__main__ import main
from trainer.launch.rank_env import RankEnv


def planted(env: RankEnv, out: Path, config: dict[str, Any], rank: int, where: str) -> None:
    """Train; ``rank`` spoils its own part: a ``weight``, an ``output`` of attention, or a ``gradient``, in the second step or once."""
    if env.rank == rank:
        {"weight": _weight, "output": _output, "gradient": _gradient, "once": _once}[where]()
    path = out / f"config.{os.getpid()}.yaml"
    path.write_text(yaml.safe_dump(config))
    os._exit(main([str(path), "--out", str(out)]))


def _weight() -> None:
    from trainer.step import Engine

    original = Engine.queue

    def step(self: Engine, number: int, *args: Any, **kwargs: Any) -> Any:
        if number == 1:
            self.rank.state.settle()
            self.trained[0].weight[0] = torch.nan
        return original(self, number, *args, **kwargs)

    Engine.queue = step  # type: ignore[method-assign]


def _output(times: int = 10**9) -> None:
    from trainer.models.attention import AttentionCore

    original, left = AttentionCore.forward, [times]

    def forward(self: AttentionCore, *args: Any) -> Any:
        left[0] -= 1
        return original(self, *args) + (torch.inf if left[0] >= 0 else 0.0)

    AttentionCore.forward = forward  # type: ignore[method-assign]


def _once() -> None:
    _output(times=1)


def _gradient() -> None:
    from trainer.state.sharding import ShardedState

    original = ShardedState.add_product

    def add_product(self: ShardedState, parameter: Any, left: Any, right: Any) -> None:
        original(self, parameter, left * torch.nan, right)

    ShardedState.add_product = add_product  # type: ignore[method-assign]
