"""Shared by launcher and ranks for stages: names of files, formats of weights, and the settings of generation and tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from trainer.shared.run.keys import key

TEXT, STOP = "text", "stop"
"""Files of a job that generates: its text as it grows, and one that asks a server to end."""
COMPLETIONS = "completions.json"
"""File of an artifact of texts."""
BUILTIN_TASKS = ("addition", "brackets", "copying", "members", "prose")
"""Tasks of ``trireme evaluate --tasks`` that need no download."""
FORMATS = {"huggingface": ("float32", "bfloat16", "float16"), "gguf": ("float16", "q8_0"), "checkpoint": ("float32",)}
"""Formats that weights are converted to, and the types that each may have; the first is the default. A checkpoint is made of one of the
others."""


@dataclass
class Sampling:
    """The choice of a token. Filters apply in this order: repetition penalty, temperature, top_k, top_p."""

    temperature: float = key(0.0, "0 = greedy (of equal ones the lowest id); above it, logits are divided by it", minimum=0)
    top_k: int = key(0, "choose among the k likeliest tokens; 0 = all", minimum=0)
    top_p: float = key(1.0, "choose among the likeliest tokens that have this probability together, at least one", above=0, maximum=1)
    repetition_penalty: float = key(1.0, "divides positive and multiplies negative logits of tokens in the text so far; 1 = none", above=0)
    seed: int = key(1234, "seed of the draws", minimum=0)


@dataclass
class EvaluateSettings:
    """Tasks of lm-evaluation-harness, in place of the loss on a corpus."""

    tasks: list[str] = key(list, "names of tasks; none = the loss on the corpus")
    tasks_folder: Optional[str] = key(None, "more tasks: YAML files, or what 'trireme prepare --tasks' filled")
    limit: Optional[int] = key(None, "only the first items of each task; null = all", minimum=1)


@dataclass
class GenerateSettings(Sampling):
    """Text after prompts."""

    prompts: list[str] = key(list, "texts to be continued")
    tokens: int = key(32, "tokens to add at most to each", minimum=1)
