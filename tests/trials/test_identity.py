"""The same content is the same trial, and nothing that changes a measurement is left out of an id."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.config import compose, resolve
from launcher.config.rules import GIVEN
from launcher.config.schema import Config, HardwareConfig, LocalCluster
from launcher.config.trainer import LaunchProfile
from launcher.trials.identity import digest, trial_id
from launcher.trials.store import Point, Record, Store
from tests.sweep.conftest import cluster, place
from tests.sweep.support import Place, sweep, trial
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.read import flatten, from_dict, to_dict
from trainer.shared.run.schema import TrackingConfig

__all__ = ["cluster", "place"]


def test_the_id_is_twelve_hexadecimal_digits_and_the_same_in_every_process() -> None:
    assert digest({"b": 1, "a": [1, None]}) == digest({"a": [1, None], "b": 1}) == "28aaa2efb398"


def test_a_value_given_and_the_same_value_derived_are_one_trial() -> None:
    derived, given = trial(), Config(**vars(trial()))
    given.model = dataclasses.replace(given.model, ffn=4 * given.model.hidden)
    assert trial_id(given) == trial_id(derived)


def _changed(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str) and value in FAMILIES:
        return next(name for name in FAMILIES if name != value)
    return f"{value}x" if isinstance(value, str) else [1]


RUN_KEYS = [key for key in flatten(trial().train_config()) if not key.startswith("tracking.") and key not in GIVEN]


@pytest.mark.parametrize("key", RUN_KEYS)
def test_every_key_of_the_run_but_tracking_is_part_of_the_id(key: str) -> None:
    config = trial()
    *path, last = key.split(".")
    section = config
    for name in path:
        section = getattr(section, name)
    before = trial_id(config)
    setattr(section, last, _changed(getattr(section, last)))
    assert trial_id(config) != before


def test_the_requests_of_an_inference_are_part_of_the_id() -> None:
    asked = trial()
    asked.run = dataclasses.replace(asked.run, task="inference")
    loads: list[dict[str, Any]] = [{}, {"batch": 2}, {"concurrency": 2}, {"rate": 2.0}, {"batch": 2, "output": 9}]
    found = {trial_id(dataclasses.replace(asked, workload=dataclasses.replace(asked.workload, **load))) for load in loads}
    assert len(found | {trial_id(trial())}) == len(loads) + 1


def test_another_trainers_command_and_its_program_are_part_of_the_id(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    found = set()
    for words, program in (([], "a"), (["--more"], "a"), ([], "b")):
        script.write_text(program)
        launch = LaunchProfile(program="command", command=["{script}", *words], script=str(script), log=[r"(?P<step>\d+)"])
        config = trial()
        found.add(trial_id(dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, launch=launch))))
    assert len(found | {trial_id(trial())}) == 4


def test_what_cannot_change_a_measurement_is_not_part_of_the_id() -> None:
    config = trial()
    elsewhere = dataclasses.replace(
        config,
        tracking=TrackingConfig(uri="http://mlflow", experiment="x", owner="y"),
        sweep=dataclasses.replace(config.sweep, name="other", max_parallel=7, rerun=True),
        cluster=LocalCluster(
            gpus_per_node=4, max_processes=3, start_timeout=9.0, hardware=HardwareConfig(link_gbs=3.0, calibration={"a": 1})
        ),
    )
    assert trial_id(elsewhere) == trial_id(config)


def test_another_place_is_another_trial() -> None:
    config = trial()
    for there in (LocalCluster(nodes=2, gpus_per_node=4), LocalCluster(gpus_per_node=4, env={"A": "1"}),
                    LocalCluster(gpus_per_node=4, hardware=HardwareConfig(name="other"))):  # fmt: skip
        assert trial_id(dataclasses.replace(config, cluster=there)) != trial_id(config)


def test_the_id_survives_writing_and_reading_the_configuration() -> None:
    config = trial()
    again = Config(**{k: v for k, v in vars(config).items() if k != "model"}, model=from_dict(type(config.model), to_dict(config.model)))
    assert trial_id(again) == trial_id(config)


def test_what_a_tuning_reads_is_part_of_the_id_by_its_content_not_by_its_time(tmp_path: Path) -> None:
    files = {"examples": tmp_path / "a.jsonl", "tokenizer": tmp_path / "tokenizer.json", "base": tmp_path / "base" / "manifest.json"}
    files["base"].parent.mkdir()
    for path in files.values():
        path.write_text('{"model": {}}')
    config = trial()
    config.data = dataclasses.replace(config.data, kind="instructions", source=str(files["examples"]), path=str(tmp_path))
    config.tune = dataclasses.replace(config.tune, method="lora", base=str(tmp_path / "base"))
    before = trial_id(config)
    for path in files.values():
        os.utime(path, (1, 1))
        assert trial_id(config) == before
        path.write_text('{"model": {} }')
        assert trial_id(config) != before
        path.write_text('{"model": {}}')
        assert trial_id(config) == before
    planned = Store(tmp_path / "runs").plan(Point((), config), "s")
    assert (
        set(planned.reads) == set(files)
        and Record.from_json(planned.directory, json.loads(json.dumps(planned.to_json()))).reads == planned.reads
    )
    files["examples"].unlink()
    assert trial_id(config) != before, "whoever reads it says that it is gone"


def test_what_an_id_knows_by_its_path_alone_is_said_to_have_changed(
    cluster: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, lines = tmp_path / "corpus", tmp_path / "lines.jsonl"
    corpus.mkdir()
    config, launch = trial(), LaunchProfile(program="command", command=["a", "--data={data.source}", "{data.path}"], log=[r"(?P<step>\d+)"])
    own = dataclasses.replace(config, data=dataclasses.replace(config.data, kind="corpus", path=str(corpus)))
    other = dataclasses.replace(own, trainer=dataclasses.replace(own.trainer, launch=launch))
    other.data = dataclasses.replace(own.data, source=str(lines))

    def said(sha: str, text: str, **settings: bool) -> list[str]:
        (corpus / "index.json").write_text(json.dumps({"sha256": sha, "settings": os.urandom(4).hex()}))
        lines.write_text(text)
        capsys.readouterr()
        sweep(cluster.runs, own, other, backends=cluster.backend, **settings)
        return [line for line in capsys.readouterr().err.splitlines() if "has changed since" in line]

    before = trial_id(own), trial_id(other)
    assert said("a", "one") == said("a", "one") == []
    assert [line.partition(" has")[0] for line in said("b", "one")] == [f"data.path={corpus}"]
    assert len(said("b", "two")) == 2 and len(said("b", "two")) == 2, "until it is measured again"
    assert said("b", "two", rerun=True) == said("b", "two") == []
    assert (trial_id(own), trial_id(other)) == before


def test_a_trial_at_another_price_is_the_same_trial() -> None:
    config = resolve(compose([]))
    dearer = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, price_per_gpu_hour=2.5))
    assert trial_id(dearer) == trial_id(config)
