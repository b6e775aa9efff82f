"""The rules of tuning, and how many parameters each method adds. Pure.

Shapes: h hidden, g width of keys (and of values), f inner width of the MLP, r rank, n virtual tokens, e width of the encoder.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.shared.families.block import attention, mlp
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import NORM_VECTORS, TrainConfig, TuneConfig

PROMPTS = ("prompt", "p_tuning")
"""Methods that train virtual tokens."""
MERGED = ("lora", "ia3")
"""Methods whose weights can be merged into the base's."""


def check_tune(tune: TuneConfig, model: ResolvedModelConfig) -> None:
    """Raises ``ConfigError`` on the first rule that ``tune`` breaks for a resolved ``model``."""
    if tune.dropout >= 1:
        raise ConfigError(f"tune.dropout={tune.dropout:g} drops everything; use a value from 0 to below 1")
    if tune.method == "lora":
        _check_rank(tune, model)
    if tune.method in PROMPTS and tune.virtual_tokens >= model.seq:
        remedy = f"use {model.seq - 1} or fewer" if model.seq > 1 else f"set model.seq to more than {tune.virtual_tokens}"
        raise ConfigError(f"tune.virtual_tokens={tune.virtual_tokens} leave no place for text in model.seq={model.seq}; {remedy}")
    if tune.tasks > 1 and (tune.method not in PROMPTS or tune.tasks > model.vocab):
        raise ConfigError(
            f"tune.tasks={tune.tasks} needs a method of virtual tokens ({', '.join(PROMPTS)}) and at most model.vocab={model.vocab} tasks"
        )


def check_tasks(config: TrainConfig) -> None:
    """Raises ``ConfigError`` unless each example has a known task, and every step has as many of each task."""
    data, tasks, batch = config.data, config.tune.tasks, config.run.global_batch
    if data.task is not None and data.kind != "instructions":
        raise ConfigError(f"data.task={data.task} is a field of examples, and data.kind={data.kind} has none; leave it out")
    if tasks > 1 and data.kind == "instructions" and data.task is None:
        raise ConfigError(f"tune.tasks={tasks} needs to know the task of each example; name the field that holds its number in data.task")
    if config.run.task == "train" and batch % tasks:
        raise ConfigError(f"run.global_batch={batch} is not divisible by tune.tasks={tasks}; every step takes as many examples of each")


def _check_rank(tune: TuneConfig, model: ResolvedModelConfig) -> None:
    if twice := [target for target in tune.targets if tune.targets.count(target) > 1]:
        raise ConfigError(f"tune.targets={tune.targets} names {twice[0]} twice; name each matrix once")
    shapes = matrix_shapes(model)
    for target in tune.targets:
        inputs, outputs = shapes[target]
        if tune.rank > min(inputs, outputs):
            raise ConfigError(
                f"tune.rank={tune.rank} is above that of the matrix {target} of {inputs} x {outputs}; "
                f"use {min(inputs, outputs)} or less, or leave {target} out of tune.targets"
            )


def text_model(model: ResolvedModelConfig, tune: TuneConfig) -> ResolvedModelConfig:
    """Returns ``model`` with the sequence that is left for text."""
    return replace(model, seq=model.seq - virtual_tokens(tune))


def virtual_tokens(tune: TuneConfig) -> int:
    """Returns the number of positions at the beginning of each sequence that are not text."""
    return tune.virtual_tokens if tune.method in PROMPTS else 0


def matrix_shapes(model: ResolvedModelConfig) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of each matrix of a block."""
    return {matrix.name: (matrix.inputs, matrix.outputs) for matrix in (*attention(model), *mlp(model))}


def added_parameters(model: ResolvedModelConfig, tune: TuneConfig) -> int:
    """Returns the number of parameters that the method adds and trains; 0 for full tuning."""
    h, norm = model.hidden, NORM_VECTORS[model.norm] * model.hidden
    n, e = tune.virtual_tokens * h, tune.encoder
    match tune.method:
        case "lora":
            return model.layers * tune.rank * sum(sum(matrix_shapes(model)[target]) for target in set(tune.targets))
        case "adapter":
            return model.layers * 2 * (2 * h * tune.rank + norm)
        case "ia3":
            return model.layers * (2 * model.kv_width + model.ffn)
        case "prompt":
            return tune.tasks * n
        case "p_tuning":
            return tune.tasks * (n + 2 * h * e + e + h)
    return 0
