"""Rules of the cluster, on top of the run's own (``trainer.shared.run.rules``), and the values derived from it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from launcher.config.command import check_told, command_of
from launcher.config.mounts import Mount, seen
from launcher.config.packages import missing, need
from launcher.config.schema import Config
from launcher.config.trainer import LaunchProfile
from launcher.config.trainers import OWN as OWN_TRAINER
from launcher.own_python import finding_ours, module
from trainer.shared.corpora.examples import check_examples
from trainer.shared.corpora.index import TOKENIZER, check_corpus, data_name
from trainer.shared.corpora.sources import STDLIB
from trainer.shared.records.artifacts import OTHER_BASE, check_model_of, checkpoint_facts
from trainer.shared.records.resume import check_resume
from trainer.shared.records.trial_files import CONFIG
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.foreign import CommandConfig
from trainer.shared.run.read import as_text, to_dict
from trainer.shared.run.rules import resolve as resolve_run
from trainer.shared.run.schema import DataConfig, ModelConfig, RequestsConfig, TrainConfig
from trainer.shared.run.tuning import text_model

TOLD_TOGETHER = 8
"""Number of requests arriving at random that count as one step: a line of ``metrics.jsonl``."""
_PREFIX = re.compile(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?")
GIVEN = ("command", "requests")
"""Parts of a run that the launcher adds (``run_of``)."""


def resolve(config: Config) -> Config:
    """Returns ``config`` with every derived value filled in. Raises ``ConfigError`` for the first rule that it breaks, and if its trainer
    cannot be told it."""
    resolved = settle(config)
    if not _PREFIX.fullmatch(config.cluster.name_prefix):
        raise ConfigError(
            f"cluster.name_prefix={config.cluster.name_prefix!r} cannot begin the name of a job; use up to 20 of a-z, 0-9 and '-', a "
            "letter first, no '-' last"
        )
    command_of(resolved)
    return resolved


def settle(config: Config) -> Config:
    """Resolves a run that is only predicted, even if its trainer cannot be told it."""
    check_precision(config)
    run = config.train_config()
    if run.run.peak_tflops is None:
        peak = config.cluster.hardware.peak_tflops.get(run.run.precision)
        run = dataclasses.replace(run, run=dataclasses.replace(run.run, peak_tflops=peak))
    if not config.trainer.embedded:  # limits of this project's trainer do not apply
        run = dataclasses.replace(run, command=CommandConfig(trainer=config.trainer.name))
    run = resolve_run(run, config.cluster.world_size)
    return dataclasses.replace(config, **{f.name: getattr(run, f.name) for f in dataclasses.fields(run) if f.name not in GIVEN})


def check_precision(config: Config) -> None:
    """Raises ``ConfigError`` for 8-bit products on a known device without them."""
    device = config.cluster.hardware
    if config.run.precision == "fp8" and device.peak_tflops and not device.host and "fp8" not in device.peak_tflops:
        raise ConfigError(
            f"run.precision=fp8 on {device.name}, which has no peak_tflops.fp8: it does not multiply numbers of 8 bits; "
            "use run.precision=bf16"
        )


def run_of(config: Config) -> TrainConfig:
    """Returns the configuration that the ranks of a resolved run read: the run's own, with the command of another trainer or the requests
    of an inference."""
    return dataclasses.replace(config.train_config(), command=command_of(config), requests=requests_of(config))


def requests_of(config: Config) -> RequestsConfig | None:
    """Returns the requests of a run that measures an inference; None for other tasks."""
    if config.run.task != "inference":
        return None
    work = config.workload
    mode = "open" if work.rate is not None else "static" if work.concurrency is None else "closed"
    each = TOLD_TOGETHER if mode == "open" else (work.concurrency or 1) // (config.layout.data or 1)
    return RequestsConfig(mode, work.input, work.output, work.batch or max(each, 1), work.rate)


def generating(config: Config, model: ModelConfig) -> Config:
    """Returns the resolved configuration of ranks that read a model's weights and generate; one replica unless ``layout.data`` says
    more."""
    check_launchable(config)
    check_ours(config, "the generation of text")
    layout = dataclasses.replace(config.layout, data=config.layout.data or 1)
    batch = (layout.data or 1) * layout.micro_batch
    run = dataclasses.replace(config.run, task="generate", steps=1, warmup_steps=0, global_batch=batch)
    data = dataclasses.replace(config.data, kind="synthetic")
    return resolve(dataclasses.replace(config, model=model, layout=layout, run=run, data=data))


def check_launchable(config: Config) -> None:
    """Raises ``ConfigError`` for a trainer whose profile is for predictions alone, that cannot be told the run, or that is not installed
    here, and for a task that can only be planned."""
    if config.task == "inference":
        raise ConfigError("task=inference trains nothing: 'trireme plan' or 'trireme search task=inference' answers; leave it out to train")
    if config.trainer.launch.program == "none":
        raise ConfigError(
            f"trainer.name={config.trainer.name} can be predicted (plan, size, search --replay, validate) but not launched: "
            "its profile has no launch part; use trainer=trireme to train"
        )
    if config.trainer.foreign:
        check_told(config)  # before a search or a sweep begins, not trial by trial
    check_installed(config, "training")


def check_ours(config: Config, verb: str) -> None:
    """Raises ``ConfigError`` for another trainer: ``verb`` names something that only this project's trainer does."""
    if config.trainer.foreign:
        raise ConfigError(
            f"trainer={config.trainer.name} is of no use to {verb}, which our own trainer does; leave it out, or use trainer={OWN_TRAINER}"
        )


def check_installed(config: Config, what: str) -> None:
    """Raises ``ConfigError`` if ``what`` would run this project's trainer on this machine, which lacks its packages."""
    if config.trainer.embedded and config.cluster.runs_here:
        need("train", f"{what} on this machine")


def locate_data(config: Config) -> Config:
    """Returns ``config`` with the corpus at the path where the ranks will look for it. Raises ``ConfigError`` if it cannot be read, or if a
    container cannot be given the files that the run reads and writes.

    The path becomes absolute, so that a trial's configuration can be run by hand from anywhere. Pods have the corpus from a volume, or
    prepare it themselves. Another trainer has data of its own; its program is located instead.
    """
    cluster = config.cluster
    if config.trainer.foreign:
        return _locate_script(config, config.trainer.launch)
    if cluster.in_container:
        return cluster.located(_locate_corpus(config, cluster.mounts()) if cluster.shares_files else config)
    located = _locate_corpus(_locate_base(config), [])
    if config.run.task == "train" and config.run.checkpoint.dir is not None:
        with suppress(OSError):  # the ranks may read files that this machine cannot
            check_resume(located.train_config(), data_name(located.data))
    return located


def _locate_base(config: Config) -> Config:
    """Checks the checkpoint that is tuned, and makes its path absolute."""
    base = config.tune.base
    if base is None or config.run.task != "train":
        return config
    path = os.path.abspath(base)
    try:
        checkpoint, manifest = checkpoint_facts(Path(path))
        if not manifest.get("tune"):
            check_model_of(checkpoint, manifest["model"], resolve_model(config.model), OTHER_BASE)
    except ConfigError as error:
        raise ConfigError(f"tune.base={base}: {error}") from None
    if manifest.get("tune"):
        raise ConfigError(f"tune.base={base} holds what a tuning added, which cannot be a base; merge it first: trireme convert")
    return dataclasses.replace(config, tune=dataclasses.replace(config.tune, base=path))


def _locate_script(config: Config, launch: LaunchProfile) -> Config:
    """Makes the path of the user's program absolute, if the ranks use this machine's files."""
    if launch.script is None or config.cluster.in_container:
        return config
    path = Path(os.path.abspath(launch.script))
    if not path.is_file():
        raise ConfigError(f"trainer.launch.script={launch.script} does not exist; give the path of your program")
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, launch=dataclasses.replace(launch, script=str(path))))


def _locate_corpus(config: Config, mounts: Sequence[Mount]) -> Config:
    """Makes the path of the corpus absolute, and checks the corpus on the host, at the path that ``mounts`` take it from."""
    if config.data.kind == "instructions":
        return _locate_examples(config)
    if config.data.kind != "corpus":
        return config
    path = os.path.abspath(config.data.path)
    there = seen(path, mounts)
    if there is None or there[0] == path:
        check_corpus(config.data, config.model)
    else:
        check_corpus(dataclasses.replace(config.data, path=there[0]), config.model)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=path))


def _locate_examples(config: Config) -> Config:
    """Checks examples and tokenizer, and makes their paths absolute."""
    check_examples(config.data, config.tune if config.run.task == "train" else None)
    if not Path(config.data.path, TOKENIZER).is_file():
        raise ConfigError(
            f"data.path={config.data.path} holds no {TOKENIZER}; give the folder of a prepared corpus, or of a checkpoint that has one"
        )
    check_answers(config)
    return dataclasses.replace(config, data=with_paths(config.data))


def check_answers(config: Config) -> None:
    """Raises ``ConfigError`` for the first example that leaves nothing to learn, if this machine has tokenizers; elsewhere the ranks report
    it."""
    if missing("train") is None:
        run = TrainConfig(model=text_model(resolve_model(config.model), config.tune), data=config.data)
        _read_examples(as_text(to_dict(run)), check_examples(config.data))


@cache  # the layouts of a sweep have the same examples
def _read_examples(run: str, digest: str) -> None:
    """Has the trainer read the examples of ``run`` in tokens. Raises ``ConfigError`` with the trainer's message if they are wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, CONFIG)
        path.write_text(run)
        done = subprocess.run(module("trainer.data", str(path), "--check"), capture_output=True, text=True, env=os.environ | finding_ours())
    if done.returncode == ConfigError.exit_code:
        raise ConfigError(done.stderr.strip().splitlines()[-1].removeprefix("error: "))


def with_paths(data: DataConfig) -> DataConfig:
    """Returns ``data`` with absolute paths."""
    source = data.source if data.source == STDLIB else os.path.abspath(data.source)
    tokenizer = None if data.tokenizer is None else os.path.abspath(data.tokenizer)
    return dataclasses.replace(data, source=source, path=os.path.abspath(data.path), tokenizer=tokenizer)
