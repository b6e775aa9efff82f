"""Settings of the stages that are no runs on ranks: how a model is converted, and how text is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.spec.schema import key

COMMAND, TEXT, STOP = "generate.json", "text", "stop"
"""Files of a job that generates: its command line (``verb``, ``words``, and the ``folder`` in which they were typed), its text as it grows, and
one that asks a server to end."""
BUILTIN_TASKS = ("addition", "brackets", "copying", "members", "prose")
"""Tasks of ``trireme evaluate --tasks`` that need no download."""
FETCHED = "tasks.json"
"""File of a folder of fetched tasks: their names."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Sampling:
    """How a token is chosen. Filters apply in this order: repetition penalty, temperature, top_k, top_p."""

    temperature: float = key(0.0, "0 = greedy (of equal ones the lowest id); above it, logits are divided by it", minimum=0)
    top_k: int = key(0, "choose among the k likeliest tokens; 0 = all", minimum=0)
    top_p: float = key(1.0, "choose among the likeliest tokens that have this probability together, at least one", above=0, maximum=1)
    repetition_penalty: float = key(1.0, "divides positive and multiplies negative logits of tokens in the text so far; 1 = none", above=0)
    seed: int = key(1234, "seed of the draws", minimum=0)


@dataclass
class ConvertSettings:
    """A checkpoint to a Hugging Face folder."""

    dtype: str = key("float32", "type of the weights", choices=DTYPES)


@dataclass
class ChooseSettings:
    """One of several trainings."""

    best: str = key(
        "step_time_s", "which one goes on: that of the shortest median step, or of the lowest last loss", choices=("step_time_s", "loss")
    )


@dataclass
class GenerateSettings(Sampling):
    """Text after prompts."""

    prompts: list[str] = key(list, "texts to be continued")
    tokens: int = key(32, "tokens to add at most to each", minimum=1)
