"""Ranks that are killed, or stopped, at a chosen moment of their training: run through ``farm``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from trainer.__main__ import main
from trainer.launch.rank_env import RankEnv


def killed_in_step(env: RankEnv, out: Path, config: dict[str, Any], step: int, wait_for: str) -> None:
    """Train until step number ``step`` (from 0), wait until a checkpoint is there, then die without a word."""
    from trainer.step import Engine

    original = Engine.queue

    def doomed(self: Engine, number: int, *args: Any, **kwargs: Any) -> Any:
        if number == step:
            _wait_for(Path(config["run"]["checkpoint"]["dir"]) / wait_for)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, number, *args, **kwargs)

    Engine.queue = doomed  # type: ignore[method-assign]
    _train(out, config)


def killed_while_writing(env: RankEnv, out: Path, config: dict[str, Any], step: int, rank: int, moment: str) -> None:
    """Train, and die while ``rank`` saves the state after ``step`` steps: in the middle of its file, or before the commit's last move."""
    from trainer.checkpoint import folder, shards

    begin, write, rename = folder.Folder.workspace, shards._write_piece, Path.rename
    current = [0]

    def workspace(self: folder.Folder, number: int) -> Path:
        current[0] = number
        return begin(self, number)

    def write_piece(file: Any, s: Any) -> Any:
        done = write(file, s)
        if (current[0], env.rank, moment) == (step, rank, "file"):
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    def move(self: Path, target: Path) -> Path:
        if (current[0], moment) == (step, "commit") and self.name.startswith(".writing"):
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    folder.Folder.workspace = workspace  # type: ignore[method-assign]
    shards._write_piece = write_piece
    Path.rename = move  # type: ignore[method-assign,assignment]
    _train(out, config)


def stopped_in_step(env: RankEnv, out: Path, config: dict[str, Any], step: int) -> None:
    """Train; in step number ``step`` the last rank gets the signal by which a scheduler wants its nodes back."""
    from trainer.step import Engine

    original = Engine.queue

    def signalled(self: Engine, number: int, *args: Any, **kwargs: Any) -> Any:
        result = original(self, number, *args, **kwargs)
        if number == step and env.rank == env.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    Engine.queue = signalled  # type: ignore[method-assign]
    _train(out, config)


def _train(out: Path, config: dict[str, Any]) -> None:
    path = out / f"config.{os.getpid()}.yaml"
    path.write_text(yaml.safe_dump(config))
    code = main([str(path), "--out", str(out)])
    sys.stdout.flush()
    os._exit(code)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)
