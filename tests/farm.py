"""The nursery that tests share: it runs configurations through the trainer, or any function of a test module on some ranks.

As a program it is ``trainer.fork_server`` with one more kind of request: where a trial has a configuration, a JSON file
``{"call": "module:function", "arguments": {...}}`` runs ``function(place, out, **arguments)`` in every rank.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE_S = 180.0


@dataclass(frozen=True)
class Finished:
    """What the ranks left behind."""

    directory: Path
    codes: dict[int, int]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.directory / "result.json").read_text())

    def failure(self, rank: int) -> dict[str, Any]:
        return json.loads((self.directory / f"failure-{rank}.json").read_text())

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("*.log")))

    def checked(self) -> Finished:
        """Itself, if every rank ended well."""
        assert set(self.codes.values()) == {0}, f"exit codes {self.codes}\n{self.logs}"
        return self


class Farm:
    """A nursery process and the runs it has been asked for. One for the whole test session."""

    def __init__(self, directory: Path):
        self.directory, self.numbers = directory, itertools.count()
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True
        )
        assert self._reply() == {"ready": True}

    def train(self, config: dict[str, Any], world_size: int, out: Path | None = None, attempt: int = 0) -> Finished:
        """``python -m trainer`` on ``world_size`` ranks with the plain data of a TrainConfig."""
        out = out or self.folder()
        path = out / "config.yaml"
        self.write(path, config)
        return self.wait(self.start(path, world_size, out, attempt))

    @staticmethod
    def write(path: Path, config: dict[str, Any]) -> None:
        import yaml

        path.write_text(yaml.safe_dump(config))

    def call(self, function: str, world_size: int, **arguments: Any) -> Finished:
        """``module:function`` of the tests folder on ``world_size`` ranks; fails if it fails on one."""
        out = self.folder()
        path = out / "call.json"
        path.write_text(json.dumps({"call": function, "arguments": arguments}))
        return self.wait(self.start(path, world_size, out)).checked()

    def folder(self) -> Path:
        out = self.directory / f"run{next(self.numbers)}"
        out.mkdir()
        return out

    def start(self, path: Path, world_size: int, out: Path, attempt: int = 0, only: list[int] | None = None) -> dict[str, Any]:
        """Start all ranks, or ``only`` some; what ``wait`` needs, with their pids."""
        request = {
            "start": str(out),
            "config": str(path),
            "out": str(out),
            "attempt": attempt,
            "ranks": only or list(range(world_size)),
            "world_size": world_size,
            "master_port": free_port(),
            "log": str(out / f"attempt{attempt}.rank{{rank}}.log"),
        }
        self.ask(request)
        reply = self._reply()
        assert reply.get("started") == str(out), reply
        return {"out": out, "pids": {int(rank): pid for rank, pid in reply["pids"].items()}}

    def wait(self, started: dict[str, Any]) -> Finished:
        codes: dict[int, int] = {}
        guard = threading.Timer(PATIENCE_S, lambda: self.ask({"kill": str(started["out"])}))
        guard.start()
        while len(codes) < len(started["pids"]):
            reply = self._reply()
            codes[reply["rank"]] = reply["code"]
        guard.cancel()
        return Finished(started["out"], codes)

    def ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the nursery died"
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    from trainer.__main__ import main as entry
    from trainer.__main__ import preload
    from trainer.fork_server import Nursery, reply
    from trainer.launch.rank_env import discover

    def run(argv: list[str]) -> int:
        if not argv[0].endswith(".json"):
            return entry(argv)
        request = json.loads(Path(argv[0]).read_text())
        module, _, function = request["call"].partition(":")
        getattr(importlib.import_module(module), function)(discover(os.environ), Path(argv[2]), **request["arguments"])
        return 0

    preload()
    reply({"ready": True})
    Nursery(run).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
