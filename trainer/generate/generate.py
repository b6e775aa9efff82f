"""Prompts in, completions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trainer.generate.cache import Cached
from trainer.generate.sampling import Sampling, choose
from trainer.spec import ConfigError


@dataclass
class Completion:
    """What followed a prompt. ``log_probabilities`` are those of the model itself, before any filter."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    ended: str = "length"  # or "stop": at the end token

    @property
    def text(self) -> list[int]:
        return self.prompt + self.tokens


Heard = Callable[[int, int], object]
"""Called with the number of a prompt and its next token."""


def generate(
    model: Cached,
    prompts: Sequence[list[int]],
    tokens: int,
    seq: int,
    sampling: Sampling,
    stop: int | None = None,
    heard: Heard | None = None,
) -> list[Completion]:
    """Up to ``tokens`` tokens after each prompt, all prompts at once; a row ends at the token ``stop``, which is not part of the text.

    ``ConfigError`` for an empty prompt, and for one that has no room for ``tokens`` more in the ``seq`` positions of the model.
    """
    check_prompts(prompts, tokens, seq)
    done = [Completion(list(prompt)) for prompt in prompts]
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    model.begin(padding)
    new = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    open_rows = list(range(len(done)))
    for _ in range(tokens):
        logits = model.read(new)
        chosen = choose(logits, [done[row].text for row in open_rows], sampling, open_rows)
        likelihood = torch.log_softmax(logits.double(), -1).gather(1, chosen[:, None]).squeeze(1)
        going = [i for i, token in enumerate(chosen.tolist()) if token != stop]
        _note(done, open_rows, chosen.tolist(), likelihood.tolist(), stop, heard)
        open_rows = [open_rows[i] for i in going]
        if not open_rows:
            break
        model.keep(torch.tensor(going))
        new = chosen[going][:, None]
    return done


def check_prompts(prompts: Sequence[list[int]], tokens: int, seq: int) -> None:
    """``ConfigError`` for a prompt that cannot be completed."""
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {number} is empty; give it at least one token")
        if len(prompt) + tokens > seq:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens, and {tokens} more do not fit into model.seq={seq}; "
                f"ask for {max(0, seq - len(prompt))} or fewer, or shorten it"
            )


def _note(
    done: Sequence[Completion],
    rows: Sequence[int],
    chosen: Sequence[int],
    likelihood: Sequence[float],
    stop: int | None,
    heard: Heard | None,
) -> None:
    for row, token, value in zip(rows, chosen, likelihood):
        if token == stop:
            done[row].ended = "stop"
            continue
        done[row].tokens.append(token)
        done[row].log_probabilities.append(value)
        if heard is not None:
            heard(row, token)
