"""``python -m trainer.generate.serve MODEL``: completions over HTTP until SIGTERM or Ctrl-C, which finish what runs. Behind ``trireme
serve``."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from trainer.comm.collectives import World
from trainer.generate.command import PRECISIONS
from trainer.generate.generate import Decoder, News
from trainer.generate.ranks import alone
from trainer.generate.server import Desk, open_server
from trainer.generate.session import Session
from trainer.generate.telling import open_text
from trainer.generate.weights import open_weights
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import ResolvedTrainConfig

LEAVE_SECONDS = 5.0
"""How long clients may take to read what was still answered."""


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when asked to end, 2 wrong input (one line on stderr)."""
    arguments = parser().parse_args(argv)
    try:
        with alone(arguments.model, PRECISIONS[arguments.dtype], arguments.threads) as (config, world):
            serve(arguments, config, world, sys.stdout)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="trireme serve", description="Completions over HTTP in the form of OpenAI's /v1/completions.")
    made.add_argument("model", type=Path, metavar="MODEL", help="a checkpoint, a folder of them, or a Hugging Face folder")
    made.add_argument(
        "--host", default="127.0.0.1", help="address to serve on; any but this machine's own needs a token (default: %(default)s)"
    )
    made.add_argument("--port", type=int, default=8000, help="0 = any that is free (default: %(default)s)")
    made.add_argument("--token-file", type=Path, metavar="FILE", help="file with the secret that clients send as bearer token")
    made.add_argument("--batch", type=int, default=32, help="requests under way at once in each replica (default: %(default)s)")
    made.add_argument("--queue", type=int, default=128, help="requests that may wait; more are refused (default: %(default)s)")
    made.add_argument(
        "--threads", type=int, default=1, help="CPU threads; more than cores that are free make it slow (default: %(default)s)"
    )
    made.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, or a folder that has one (default: next to the weights)"
    )
    made.add_argument(
        "--dtype", choices=PRECISIONS, default="float32", help="type of the weights (default: %(default)s); with keys: run.precision"
    )
    made.add_argument(
        "--task",
        type=int,
        default=0,
        help="of a model with virtual tokens of several tasks: which, where a request names none (default: %(default)s)",
    )
    return made


def serve(
    arguments: argparse.Namespace,
    config: ResolvedTrainConfig,
    world: World,
    file: IO[str] | None,
    asked: Callable[[], bool] = lambda: False,
) -> None:
    """On every rank, until a signal or ``asked``. Rank 0 has the server, and writes its address to ``file``."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server, weights = None, open_weights(arguments.model)
    words = open_text(arguments.tokenizer, arguments.model, weights.model.vocab)
    for name in ("batch", "queue", "threads"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name}={getattr(arguments, name)} must be 1 or more")
    if world.rank == 0:
        server = open_server(arguments.host, arguments.port, arguments.model.absolute().name, _secret(arguments.token_file))
    decoder = Decoder(Session(config, world, weights.load, weights.tune, arguments.task), arguments.batch)
    if server is None:
        decoder.run(lambda idle: News(), lambda row: None)
        return
    room = arguments.batch * decoder.replicas + arguments.queue
    desk = server.desk = Desk(words, weights.seq, room, lambda: stop.is_set() or asked(), weights.tune.tasks)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"serving {arguments.model} on http://{arguments.host}:{server.server_port}/v1/completions", file=file, flush=True)
    decoder.run(desk.hear, desk.tell)
    deadline = time.monotonic() + LEAVE_SECONDS
    while desk.open and time.monotonic() < deadline:
        time.sleep(0.01)
    server.shutdown()
    while server.answering and time.monotonic() < deadline:  # those that are refused
        time.sleep(0.01)
    server.server_close()
    print(desk.stats(), file=file, flush=True)


def _secret(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file={path} cannot be read: {error}; give a file with a secret") from None
    if not secret:
        raise ConfigError(f"--token-file={path} is empty; put a secret in it")
    return secret


if __name__ == "__main__":
    sys.exit(main())
