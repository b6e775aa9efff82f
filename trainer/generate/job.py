"""Text from a checkpoint on the ranks of a layout: ``python -m trainer`` with ``run.task=generate``, or one process.

A job finds its command line in ``generate.json`` beside its configuration. Rank 0 writes the text as it grows into ``text``, and the
completions into ``result.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from trainer.comm.collectives import World
from trainer.generate.command import parser, sampling_of, texts_of
from trainer.generate.generate import Completion, Decoder, News, Request, Row, check_prompts
from trainer.generate.session import Session
from trainer.generate.telling import Printer, Telling, end_tokens, read_tokenizer
from trainer.generate.weights import open_weights
from trainer.launch.rank_env import RankEnv
from trainer.loop import choose_device
from trainer.spec import ConfigError, DataConfig, ResolvedTrainConfig, RunConfig, Status, TrainConfig, resolve
from trainer.spec.files import read_json
from trainer.spec.records import RESULT, write_outcome
from trainer.spec.stages import COMMAND, TEXT


def generate_on_ranks(config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int) -> Status:
    """Complete the prompts of ``generate.json`` in ``out`` on every rank of ``env``."""
    command = read_json(out / COMMAND)
    if command is None:
        raise ConfigError(f"{out} has no {COMMAND}; use `trireme generate`")
    os.chdir(command["folder"])
    arguments = parser().parse_args(command["words"])
    prompts = texts_of(arguments)
    with _world(config, env) as world, (out / TEXT).open("w") if world.rank == 0 else contextlib.nullcontext() as file:
        completions = complete(arguments, prompts, config, world, file)
    if env.rank == 0:
        result = {"status": Status.DONE.value, "attempt": attempt, "world_size": env.world_size, "layout": asdict(config.layout)}
        write_outcome(out / RESULT, result | {"model": asdict(config.model), "completions": completions})
    return Status.DONE


@contextlib.contextmanager
def alone(model: Path, precision: str) -> Iterator[tuple[ResolvedTrainConfig, World]]:
    """This process as the only rank, for the model in a folder."""
    run = RunConfig(task="generate", steps=1, warmup_steps=0, global_batch=1, precision=precision, threads=torch.get_num_threads())
    plain = TrainConfig(model=open_weights(model).model, data=DataConfig(kind="synthetic"), run=run)
    config, env = resolve(plain, 1), RankEnv()
    with _world(config, env) as world:
        yield config, world


@contextlib.contextmanager
def _world(config: ResolvedTrainConfig, env: RankEnv) -> Iterator[World]:
    device = choose_device(config.run.device, env.local_rank)
    torch.set_num_threads(config.run.threads)
    world = World(env.rank, env.world_size, device, env.address, env.port, config.run.timeout_s)
    try:
        yield world
    finally:
        world.close()


def complete(
    arguments: argparse.Namespace, texts: Sequence[str], config: ResolvedTrainConfig, world: World, file: IO[str] | None
) -> list[dict[str, Any]]:
    """What followed each of ``texts``, as plain data, on rank 0. The text is also written to ``file``, as it grows."""
    weights, sampling = open_weights(arguments.model), sampling_of(arguments)
    tokenizer = read_tokenizer(arguments.tokenizer, arguments.model, weights.model.vocab)
    ends = end_tokens(arguments.model, tokenizer)
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    check_prompts(prompts, [arguments.tokens] * len(prompts), config.model.seq)
    requests = [Request(number, prompt, arguments.tokens, sampling, ends, number) for number, prompt in enumerate(prompts)]
    front = Front(requests, [Telling(tokenizer, arguments.stop) for _ in texts], None if file is None else Printer(file, texts))
    Decoder(Session(config, world, weights.load), arguments.batch).run(front.hear, front.tell)
    return [front.plain(number, text) for number, text in enumerate(texts)] if world.rank == 0 else []


class Front:
    """What rank 0 of a batch of prompts asks for, and what it is told."""

    def __init__(self, requests: Sequence[Request], tellings: Sequence[Telling], printer: Printer | None):
        self.requests, self.tellings, self.printer = requests, tellings, printer
        self.asked = False
        self.dropped: set[int] = set()
        self.made: dict[int, Completion] = {}

    def hear(self, idle: bool) -> News:
        requests, self.asked = ([] if self.asked else self.requests), True
        dropped, self.dropped = frozenset(self.dropped), set()
        return News(requests, dropped, over=True)

    def tell(self, row: Row) -> None:
        number, made = row.request.number, row.made
        telling = self.tellings[number]
        piece = telling.hear(made.tokens, bool(made.ended))
        if telling.stopped and not made.ended:
            self.dropped.add(row.request.name)
            made.ended = "stop"
        self.made[number] = made
        if self.printer is not None:
            self.printer.tell(number, piece, bool(made.ended))

    def plain(self, number: int, text: str) -> dict[str, Any]:
        data = asdict(self.made[number])
        return {"prompt": text, "text": self.tellings[number].text, "prompt_tokens": data.pop("prompt"), **data}
