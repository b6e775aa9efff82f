"""lm-evaluation-harness (``lm_eval``, extra ``eval``) on the ranks of a layout, through its public model class.

Rank 0 runs the harness and sends all ranks the rows to read and the texts to generate. The rows are divided among the replicas.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.comm.collectives import World
from trainer.data.text import TextTokens
from trainer.generate.answering import open_session
from trainer.generate.generate import Completion, PromptRequest, generate
from trainer.generate.sampling import Sampling
from trainer.generate.session import Session
from trainer.generate.tasks import write_tasks
from trainer.generate.telling import open_text
from trainer.generate.weights import open_weights
from trainer.shared.records.artifacts import FETCHED
from trainer.shared.run.command_lines import ScoreCommand
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json, write_json
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.stages import BUILTIN_TASKS

Pair = tuple[list[int], list[int]]
"""Context tokens, and target tokens whose probability is requested."""


def score(command: ScoreCommand, config: ResolvedTrainConfig, world: World) -> dict[str, Any]:
    """Returns the figures of each task, on rank 0. Collective."""
    weights = open_weights(Path(command.model))
    words = open_text(command.tokenizer, Path(command.model), weights.model.vocab, weights.pairs)
    if world.rank == 0:
        _library(command.tasks_folder)
    reader = TaskReader(open_session(config, world, weights, words, command.task), command.batch)
    if world.rank != 0:
        reader.follow()
        return {}
    try:
        return _scores(command, reader, words)
    finally:
        reader.tell(None)


class TaskReader:
    """Work of all ranks on the instructions of rank 0."""

    def __init__(self, session: Session, batch: int):
        self.session, self.batch = session, batch

    def tell(self, work: Any) -> Any:
        """Lets all ranks do ``work``, a method's name and its argument; None ends the loop of ``follow``. On rank 0."""
        if work is not None and work[0] == "likelihoods" and self.session.written is not None:
            raise ConfigError(
                "a task of --tasks asks how likely a text is behind another, and an encoder's decoder answers; use tasks of generate_until"
            )
        self.session.world.group.gather_objects(work)
        return None if work is None else getattr(self, work[0])(work[1])

    def follow(self) -> None:
        """Does the work that rank 0 sends until there is none left. On all other ranks."""
        while (work := self.session.world.group.gather_objects(None)[0]) is not None:
            getattr(self, work[0])(work[1])

    def generated(self, requests: Sequence[PromptRequest]) -> list[Completion]:
        return generate(self.session, requests, self.batch)

    @torch.no_grad()
    def likelihoods(self, rows: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Returns the log-probability of each row's target tokens, and whether all are the likeliest. Runs the longest rows first."""
        session, seq = self.session, self.session.seq
        order = sorted(range(len(rows)), key=lambda i: -sum(map(len, rows[i])))
        own = order[session.rank.groups.at["data"] :: session.config.layout.data]
        told = torch.zeros(len(rows), 2, dtype=torch.float64)
        for start in range(0, len(own), self.batch):
            part = own[start : start + self.batch]
            texts = [(rows[i][0] + rows[i][1])[-(seq + 1) :] for i in part]
            longest = max(map(len, texts)) - 1
            logits = session.read_all([text[:-1] + [0] * (longest - len(text) + 1) for text in texts])
            if logits is None or not session.answers:
                continue
            for column, (i, text) in enumerate(zip(part, texts)):
                told[i] = _likelihood(logits[: len(text) - 1, column].cpu(), text, len(rows[i][1]))
        told = told.to(session.world.device)
        session.world.group.all_reduce(told).wait()
        return [(value, greedy == 1) for value, greedy in told.tolist()]


def _likelihood(logits: torch.Tensor, text: list[int], asked: int) -> torch.Tensor:
    """Returns the log-probability of a text's last ``asked`` tokens, and 1 if all are likeliest, from all earlier logits [s, V]."""
    targets = torch.tensor(text[len(text) - asked :], dtype=torch.long)
    shares = torch.log_softmax(logits[len(logits) - asked :].double(), -1)
    greedy = float(bool((shares.argmax(-1) == targets).all()))
    return torch.tensor([float(shares.gather(1, targets[:, None]).sum()), greedy], dtype=torch.float64)


def _library(fetched: Path | str | None = None) -> Any:
    """Imports ``lm_eval``, offline, with the data of a folder of fetched tasks; ``ConfigError`` if it is not installed."""
    if fetched is not None:
        home = Path(fetched).resolve()
        os.environ |= {"HF_HOME": str(home), "HF_DATASETS_CACHE": str(home / "datasets")}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    try:
        import lm_eval
    except ImportError:
        raise ConfigError("--tasks needs one more package: pip install 'lm-eval>=0.4.9,<0.5'") from None
    return lm_eval


def _scores(command: ScoreCommand, reader: TaskReader, words: TextTokens) -> dict[str, Any]:
    lm_eval, names = _library(command.tasks_folder), command.tasks
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as made:
        write_tasks(Path(made))
        folders = [made, *([command.tasks_folder] if command.tasks_folder else [])]
        own = set(names) <= set(BUILTIN_TASKS)
        manager = TaskManager(include_path=folders, include_defaults=not own)
        model = _model(reader, words)
        try:
            found = lm_eval.simple_evaluate(
                model=model, tasks=names, limit=command.limit, task_manager=manager, bootstrap_iters=0, log_samples=False
            )
        except (OSError, KeyError, ValueError) as error:
            raise ConfigError(f"--tasks={','.join(names)} cannot be evaluated: {error}; fetch it first where there is a network") from None
    figures = {"tasks": {name: _plain(result) for name, result in found["results"].items()}, "limit": command.limit}
    return {"evaluation": figures | {"items": {name: count["effective"] for name, count in found["n-samples"].items()}}}


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    return {name.removesuffix(",none"): value for name, value in result.items() if isinstance(value, (int, float))}


def _model(reader: TaskReader, words: TextTokens) -> Any:
    """Returns the harness' model class over a reader. Without a context, a text follows the BOS tokens, or else an EOS token."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    nothing = words.begin or [*words.ends[:1]] or [0]

    class Ranks(TemplateLM):
        eot_token_id = nothing[-1]
        max_length = reader.session.seq

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return words.plain(string) if add_special_tokens is False else words.begun(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            pairs = [
                (list(before), list(asked)) if context else (nothing, words.plain(text)) for (context, text), before, asked in requests
            ]
            found: list[tuple[float, bool]] = reader.tell(("likelihoods", pairs))
            return found

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            windows = [
                [make_disjoint_window(w) for w in get_rolling_token_windows(words.plain(r.args[0]), nothing[-1], self.max_length, 1)]
                for r in requests
            ]
            values = iter(reader.tell(("likelihoods", [(list(before), list(asked)) for text in windows for before, asked in text])))
            return [sum(next(values)[0] for _ in text) for text in windows]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            made = reader.tell(("generated", [self._request(n, *r.args) for n, r in enumerate(requests)]))
            texts = [words.tokenizer.decode(completion.tokens) for completion in made]
            return [_until(text, r.args[1].get("until", ())) for text, r in zip(texts, requests)]

        def _request(self, number: int, context: str, settings: dict[str, Any]) -> PromptRequest:
            tokens = settings.get("max_gen_toks", 256)
            sampling = Sampling(temperature=settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0)
            ids = self.tok_encode(context)[-(self.max_length - tokens) :]
            return PromptRequest(number, ids, tokens, sampling, frozenset(words.ends), number)

    return Ranks()


def _until(text: str, stops: Sequence[str]) -> str:
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop)[0] if stop else text
    return text


def fetch(names: Sequence[str], folder: Path) -> None:
    """Loads the data of published tasks into ``folder``, where ``--tasks-folder`` finds them later, without a network. ``ConfigError`` if
    that fails."""
    os.environ |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    words = ",".join(names)
    try:
        _library(folder)
        from lm_eval.tasks import TaskManager, get_task_dict

        get_task_dict([*names], TaskManager())
        write_json(folder / FETCHED, {"tasks": sorted({*names, *(read_json(folder / FETCHED) or {}).get("tasks", ())})})
    except Exception as error:  # errors of hub and libraries have no common type
        raise ConfigError(f"--tasks={words} cannot be fetched: {str(error).splitlines()[0]}") from error
    print(f"fetched {words} into {folder}; evaluate with: --tasks {words} --tasks-folder {folder}")


def main(arguments: Sequence[str]) -> int:
    """Runs ``python -m trainer.generate.harness NAMES FOLDER`` and returns its exit code."""
    try:
        fetch(arguments[0].split(","), Path(arguments[1]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
