"""The arms of a search for a loss: read, checked, composed."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from launcher.config import Config, check_launchable, locate_data, resolve
from launcher.config.rules import check_ours
from launcher.cost.phases import sized
from launcher.cost.prediction import CostModel
from launcher.goals.goal import Asked, Wanted
from launcher.planning.plan import plan
from launcher.search.branches import Trunk
from launcher.search.loss import Arm, FastestLayout, LossProblem, fastest_layout
from launcher.trials.identity import trial_id
from trainer.shared.corpora.index import read_index, windows
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.phases import PhaseTable

OF_ARMS = ("optimizer", "layout", "run.global_batch", "run.phases", "run.steps", "run.eval_every")
"""Keys and sections that arms may change: all others are the same question's, of model, data, validation and seeds."""
OF_CLUSTERS = ("cluster", "hardware", "run.precision", "run.compile")
"""Those that the cluster whose time counts may change."""
PLACE = ("cluster", "hardware", "layout")
"""Sections of the trials that say nothing of another cluster."""


def refuse_plan(config: Config, wanted: Wanted) -> NoReturn:
    """Raises ``ConfigError``: what an arm needs is measured."""
    raise ConfigError("goal=loss is for trireme search: the steps that an arm needs are measured; leave it out to plan layouts")


def check(config: Config) -> None:
    """Raises ``ConfigError`` if the run that the arms change cannot be searched."""
    search = config.search
    check_ours(config, "a search for a loss")
    check_launchable(config)
    if search.target_loss is None:
        raise ConfigError("goal=loss needs a loss to reach; set search.target_loss to a validation loss")
    if len(search.arms) < 2:
        raise ConfigError(
            f"search.arms has {len(search.arms)} of the two or more arms that goal=loss compares; name them, as in "
            "search.arms.adamw=optimizer=adamw search.arms.muon='optimizer=muon optimizer.lr=0.003'"
        )
    if search.branches and config.cluster.in_container:
        raise ConfigError(
            f"search.branches={search.branches} keeps checkpoints in sweep.dir={config.sweep.dir}, which containers of "
            f"cluster={config.cluster.backend} need not see; leave it out"
        )
    if not config.run.eval_every and not search.branches:
        raise ConfigError("goal=loss needs validations; set run.eval_every, such as run.steps / 50, and data.held_out, such as 0.02")


def problem(config: Config, wanted: Wanted, asked: Asked) -> LossProblem:
    """Returns the problem of a checked run. ``wanted``: values of layout keys, of which each has one."""
    if several := [name for name, values in wanted.items() if len(values) > 1]:
        raise ConfigError(f"layout.{several[0]} has several values; goal=loss trains in one layout: give one value")
    base = asked.but([])
    check_text(base)
    arms = [arm(name, text, base, asked) for name, text in base.search.arms.items()]
    for one in arms:
        if twin := next((other for other in arms if other is not one and other.config == one.config), None):
            raise ConfigError(f"search.arms.{one.name} and search.arms.{twin.name} train alike; change one, or leave it out")
    assert base.search.target_loss is not None
    return LossProblem(base, base.search.target_loss, arms)


def check_text(base: Config) -> None:
    """Raises ``ConfigError`` if less text is held out than a validation reads: arms with other batches would read other parts of it."""
    run = base.run
    with suppress(OSError):  # ranks may read files that this machine cannot
        if base.data.kind == "corpus" and base.cluster.shares_files:
            located = locate_data(base)
            there, wanted = windows(read_index(located.data), base.model.seq, located.data)[1], run.eval_batches * run.global_batch
            if there < wanted:
                raise ConfigError(
                    f"run.eval_batches={run.eval_batches} x run.global_batch={run.global_batch} = {wanted} sequences to validate on are "
                    f"more than the {there} that data.held_out={base.data.held_out:g} keeps back; lower one, or raise data.held_out"
                )


def arm(name: str, text: str, base: Config, asked: Asked) -> Arm:
    """Composes an arm. Raises ``ConfigError``, naming it, for a wrong one."""
    key = f"search.arms.{name}"
    words = words_of(key, text, OF_ARMS)
    with naming(key):
        made = validating_alike(asked.but(words), base)
        trunk = None if base.search.branches is None else Trunk(base.search.branches, base.search.decay)
        made = made if trunk is None else trunk.whole(made)
        config = resolve(locate_data(made))
        if trunk is not None:
            trunk = dataclasses.replace(trunk, folder=os.path.abspath(Path(base.sweep.dir, "trunks", trial_id(config))))
            resolve(trunk.of(config, 1))
    if base.search.target_cluster is None:
        return Arm(name, words, config, made, trunk=trunk)
    there, fastest = elsewhere(base.search.target_cluster, words, key, asked)
    there = there if trunk is None else trunk.whole(there)
    there = dataclasses.replace(there, layout=fastest.layout)
    return Arm(name, words, config, there, fastest, trunk, phase_times(there) if there.run.phases else ())


def phase_times(config: Config) -> list[tuple[int, float]]:
    """Returns the first step of each phase that a run reaches, from 1, and its predicted seconds."""
    cost, table = CostModel(config.cluster, config.trainer), PhaseTable.of(config.run, config.model.seq)
    sizes = [(phase.first + 1, *sized(phase, config.model, config.run)) for phase, _ in table.reached(config.run.steps)]
    return [(step, cost.predict(model, config.layout, run, config.tune, config.optimizer).step_time_s) for step, model, run in sizes]


def elsewhere(target: str, words: Sequence[str], key: str, asked: Asked) -> tuple[Config, FastestLayout]:
    """Returns an arm on the cluster whose time counts, and its fastest layout there."""
    place = words_of("search.target_cluster", target, OF_CLUSTERS)
    with naming(f"{key} on search.target_cluster"):
        there = asked.but([*place, *(word for word in words if not word.startswith("layout."))], without=PLACE)
        return there, dataclasses.replace(fastest_layout(plan(there, there.search.space)), phases=there.run.phases)


def words_of(key: str, text: str, allowed: Sequence[str]) -> list[str]:
    """Returns the overrides in ``text``. Raises ``ConfigError`` for others than those of the ``allowed`` keys and sections."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{key}={text!r} cannot be read ({error}); give overrides as a shell has them") from None
    for word in words:
        named = word.lstrip("+~").partition("=")[0]
        if not any(named == name or named.startswith(name + ".") for name in allowed):
            raise ConfigError(f"{key} changes {named}; it may change keys of {listed(allowed)}")
    return words


def validating_alike(made: Config, base: Config) -> Config:
    """Returns an arm that validates on as many sequences as the run that it changes, whatever its batch."""
    sequences, batch = base.run.eval_batches * base.run.global_batch, made.run.global_batch
    if sequences % batch:
        raise ConfigError(
            f"run.global_batch={batch} does not divide the {sequences} sequences that run.eval_batches={base.run.eval_batches} x "
            f"run.global_batch={base.run.global_batch} validate on; raise run.eval_batches to a multiple of {batch}"
        )
    return dataclasses.replace(made, run=dataclasses.replace(made.run, eval_batches=sequences // batch))


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Puts ``key`` before the words of an error."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
