"""Text from a checkpoint on the ranks of a layout: ``python -m trainer`` with ``run.task=generate``.

The section ``stage`` of the configuration holds the command. Rank 0 writes the text to ``text`` as it grows, and the completions, or the
figures of tasks, to ``result.json``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from trainer.comm.collectives import World
from trainer.generate.answering import open_session
from trainer.generate.generate import Completion, Decoder, PromptRequest, RequestUpdate, TextRow, check_prompts, check_texts
from trainer.generate.harness import score
from trainer.generate.ranks import world_of
from trainer.generate.serve import serve
from trainer.generate.telling import Printer, TextStream, open_text
from trainer.generate.weights import open_weights
from trainer.launch.rank_env import RankEnv
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import Finish, StageRun
from trainer.shared.records.trial_files import RESULT, write_outcome
from trainer.shared.run.command_lines import GenerateCommand, ScoreCommand, ServeCommand, sampling_of, texts_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.stages import STOP, TEXT


def generate_on_ranks(
    config: ResolvedTrainConfig, env: RankEnv, out: Path, attempt: int, stage: StageRun | None, finish: Finish = lambda result: None
) -> Status:
    """Runs the command of ``stage``, on every rank of ``env``."""
    if stage is None:
        raise ConfigError("run.task=generate has no prompts of its own; use `trireme generate`")
    act = {"generate": _completions, "serve": _served, "evaluate": _scored}[stage.verb]
    with world_of(config, env) as world, _page(stage, out, world.rank) as file:
        made = act(stage.settings, config, world, file, out)
    if env.rank == 0:
        result = {"status": Status.DONE.value, "attempt": attempt, "world_size": env.world_size, "layout": asdict(config.layout)}
        result |= {"model": asdict(config.model)} | made
        finish(result)
        write_outcome(out / RESULT, result)
    return Status.DONE


def _page(stage: StageRun, out: Path, rank: int) -> contextlib.AbstractContextManager[IO[str] | None]:
    """Opens the file to which rank 0 writes the text as it grows: the log of a stage, else a file for the command that waits."""
    if rank != 0:
        return contextlib.nullcontext()
    return contextlib.nullcontext(sys.stdout) if stage.folder else (out / TEXT).open("w")


def _completions(settings: dict[str, Any], config: ResolvedTrainConfig, world: World, file: IO[str] | None, out: Path) -> dict[str, Any]:
    command = from_dict(GenerateCommand, settings)
    return {"completions": complete(command, texts_of(command), config, world, file)}


def _scored(settings: dict[str, Any], config: ResolvedTrainConfig, world: World, file: IO[str] | None, out: Path) -> dict[str, Any]:
    return score(from_dict(ScoreCommand, settings), config, world)


def _served(settings: dict[str, Any], config: ResolvedTrainConfig, world: World, file: IO[str] | None, out: Path) -> dict[str, Any]:
    serve(from_dict(ServeCommand, settings), config, world, file, (out / STOP).exists)
    return {}


def complete(
    command: GenerateCommand, texts: Sequence[str], config: ResolvedTrainConfig, world: World, file: IO[str] | None
) -> list[dict[str, Any]]:
    """Returns the completion of each of ``texts`` as plain data, on rank 0. The text is also written to ``file`` as it grows."""
    check_texts([*texts, *command.stop])
    weights, sampling = open_weights(Path(command.model)), sampling_of(command)
    words = open_text(command.tokenizer, Path(command.model), weights.model.vocab, weights.pairs)
    prompts = [words.begun(text) for text in texts]
    check_prompts(prompts, [command.tokens] * len(prompts), *weights.lengths)
    ends = frozenset(words.ends)
    requests = [PromptRequest(number, prompt, command.tokens, sampling, ends, number) for number, prompt in enumerate(prompts)]
    tellings = [TextStream(words.tokenizer, command.stop, words.before(prompt)) for prompt in prompts]
    front = PromptFrontend(requests, tellings, None if file is None else Printer(file, [words.shown(text) for text in texts]))
    session = open_session(config, world, weights, words, command.task)
    Decoder(session, command.batch).run(front.hear, front.tell)
    return [front.plain(number, text) for number, text in enumerate(texts)] if world.rank == 0 else []


class PromptFrontend:
    """Rank 0's end of a batch of prompts: gives requests to the decoder and receives their rows."""

    def __init__(self, requests: Sequence[PromptRequest], tellings: Sequence[TextStream], printer: Printer | None):
        self.requests, self.tellings, self.printer = requests, tellings, printer
        self.asked = False
        self.dropped: set[int] = set()
        self.made: dict[int, Completion] = {}

    def hear(self, idle: bool) -> RequestUpdate:
        requests, self.asked = ([] if self.asked else self.requests), True
        dropped, self.dropped = frozenset(self.dropped), set()
        return RequestUpdate(requests, dropped, over=True)

    def tell(self, row: TextRow) -> None:
        number, made = row.request.number, row.made
        telling = self.tellings[number]
        if telling.stopped:
            return
        piece = telling.hear(made.tokens, bool(made.ended))
        if telling.stopped and not made.ended:
            self.dropped.add(row.request.name)
            made = replace(made.copy(), ended="stop")
        self.made[number] = made
        if self.printer is not None:
            self.printer.tell(number, piece, bool(made.ended))

    def plain(self, number: int, text: str) -> dict[str, Any]:
        data = asdict(self.made[number])
        for name in ("likeliest", "read"):  # not part of the result
            del data[name]
        return {"prompt": text, "text": self.tellings[number].text, "prompt_tokens": data.pop("prompt"), **data}
