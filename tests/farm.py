"""Ranks for tests, at the cost of a fork: configurations through the trainer, or any function on some ranks.

    farm = Farm(folder)                                    # one for a whole test session; imports torch once
    farm.train(config, 4).checked().result["losses"]       # ``python -m trainer`` on 4 ranks
    farm.call(sums_agree, 4, numel=1000)                   # sums_agree(rank_env, folder, numel=1000) in each of 4 ranks
    farm.close()

As a program (``python -m tests.farm``) it is ``trainer.fork_server`` with one more kind of request: in place of a configuration a JSON
file ``{"call": "module:function", "arguments": {...}}``.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trainer.shared.records.trial_files import CONFIG, RESULT, failure_file
from trainer.shared.run.read import save, to_dict
from trainer.shared.run.schema import TrainConfig

PATIENCE_S = 600.0
"""After so long the ranks of a run are killed: it hangs."""


@dataclass(frozen=True)
class Finished:
    """What the ranks left behind."""

    directory: Path
    codes: dict[int, int]

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.directory / RESULT).read_text()))

    def failure(self, rank: int) -> dict[str, Any]:
        return dict(json.loads((self.directory / failure_file(rank)).read_text()))

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("*.log")))

    def checked(self) -> Finished:
        """Itself, if every rank ended well."""
        assert set(self.codes.values()) == {0}, f"exit codes {self.codes}\n{self.logs}"
        return self


class Farm:
    """A fork server and its runs, each with a folder in ``directory``. Modules of functions are found on this process's ``sys.path``."""

    def __init__(self, directory: Path):
        self.directory, self.numbers = directory, itertools.count()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.farm"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        assert self._reply() == {"ready": True}

    def train(self, config: dict[str, Any], world_size: int, out: Path | None = None, attempt: int = 0) -> Finished:
        """``python -m trainer`` on ``world_size`` ranks with the plain data of a TrainConfig; sections that it lacks are as in any run."""
        out = out or self.folder()
        path = out / CONFIG
        self.write(path, config)
        return self.wait(self.start(path, world_size, out, attempt))

    @staticmethod
    def write(path: Path, config: dict[str, Any]) -> None:
        save(to_dict(TrainConfig()) | config, path, durable=False)

    def call(self, function: Callable[..., Any], world_size: int, **arguments: Any) -> Finished:
        """``function(rank_env, folder, **arguments)`` on ``world_size`` ranks; fails if one fails.

        It must be a function at the top of a module; its arguments must be JSON.
        """
        out = self.folder()
        return self.wait(self.start(self.write_call(out, function, **arguments), world_size, out)).checked()

    @staticmethod
    def write_call(out: Path, function: Callable[..., Any], **arguments: Any) -> Path:
        """The request for ``function``, in place of a configuration."""
        assert "." not in function.__qualname__, f"{function.__qualname__} is not found by the name of its module"
        path = out / "call.json"
        path.write_text(json.dumps({"call": f"{function.__module__}:{function.__name__}", "arguments": arguments}))
        return path

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
        assert line, "the fork server died"
        return dict(json.loads(line))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(300)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    from trainer import fork_server
    from trainer.__main__ import main as entry
    from trainer.__main__ import preload
    from trainer.fork_server import ForkServer, reply
    from trainer.launch.rank_env import discover

    def run(argv: list[str]) -> int:
        if not argv[0].endswith(".json"):
            return entry(argv)
        request = json.loads(Path(argv[0]).read_text())
        called(request)(discover(os.environ), Path(argv[2]), **request["arguments"])
        return 0

    class Server(ForkServer):
        """Imports the module of a function, pytest included, once, instead of in each of its ranks."""

        def _start(self, request: dict[str, Any]) -> None:
            if request["config"].endswith(".json"):
                called(json.loads(Path(request["config"]).read_text()))
                gc.freeze()
            super()._start(request)

    fork_server.GRACE_S = 8.0  # a busy machine lets peers of a failed rank say why
    preload(compiler=True)
    gc.freeze()  # as the fork server does, and for the same reason
    reply({"ready": True})
    Server(run).serve()
    return 0


def called(request: dict[str, Any]) -> Callable[..., Any]:
    """The function that a request names."""
    module, _, function = request["call"].partition(":")
    return cast(Callable[..., Any], getattr(importlib.import_module(module), function))


if __name__ == "__main__":
    sys.exit(main())
