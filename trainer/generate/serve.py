"""``python -m trainer.generate.serve MODEL``: completions and chat over HTTP until SIGTERM or Ctrl-C; requests under way are
finished. Started by ``trireme serve``."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from trainer.comm.collectives import World
from trainer.generate.answering import open_session
from trainer.generate.api import ServedModel
from trainer.generate.broker import RequestBroker
from trainer.generate.chat import open_template
from trainer.generate.generate import Decoder, RequestUpdate
from trainer.generate.ranks import alone
from trainer.generate.server import open_server
from trainer.generate.telling import open_text
from trainer.generate.weights import Weights, open_weights
from trainer.shared.run.command_lines import PRECISIONS, ServeCommand, asked, serve_parser
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedTrainConfig

LEAVE_SECONDS = 5.0
"""Time for clients to read the last answers."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 after a signal, 2 wrong input (one line on stderr)."""
    arguments = serve_parser().parse_args(argv)
    try:
        command = asked(ServeCommand, arguments)
        with alone(Path(command.model), PRECISIONS[arguments.dtype], arguments.threads) as (config, world):
            serve(command, config, world, sys.stdout)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


def serve(
    command: ServeCommand,
    config: ResolvedTrainConfig,
    world: World,
    file: IO[str] | None,
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Serves on every rank until a signal or ``ended``. Rank 0 has the server and writes its address to ``file``."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    folder = Path(command.model)
    server, weights = None, open_weights(folder)
    words = open_text(command.tokenizer, folder, weights.model.vocab, weights.pairs)
    (seq, written), template = weights.lengths, open_template(_places(command, weights), words)
    model = ServedModel(folder.absolute().name, words, seq, weights.tune.tasks, template, written)
    if world.rank == 0:
        server = open_server(command.host, command.port, _secret(command.token_file))
    decoder = Decoder(open_session(config, world, weights, words, command.task), command.batch)
    if server is None:
        decoder.run(lambda idle: RequestUpdate(), lambda row: None)
        return
    room = command.batch * decoder.replicas + command.queue
    desk = server.desk = RequestBroker(model, room, lambda: stop.is_set() or ended())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"serving {command.model} on http://{command.host}:{server.server_port}/v1/completions", file=file, flush=True)
    decoder.run(desk.hear, desk.tell)
    deadline = time.monotonic() + LEAVE_SECONDS
    while desk.open and time.monotonic() < deadline:
        time.sleep(0.01)
    server.shutdown()
    while server.answering and time.monotonic() < deadline:  # requests that are refused
        time.sleep(0.01)
    server.server_close()
    print(desk.stats(), file=file, flush=True)


def _places(command: ServeCommand, weights: Weights) -> list[Path]:
    """Returns the folders that may have a chat template: the tokenizer's, the model's, and those of the model that it was tuned from."""
    given = [] if command.tokenizer is None else [Path(command.tokenizer), Path(command.tokenizer).parent]
    models = [Path(command.model), *([Path(weights.base)] if weights.base else [])]
    return [*given, *(place for model in models for place in (model, model.parent))]


def _secret(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file={path} cannot be read: {error}; give a file with a secret") from None
    if not secret:
        raise ConfigError(f"--token-file={path} is empty; put a secret in it")
    return secret


if __name__ == "__main__":
    sys.exit(main())
