"""Where nothing can be tracked is found out before anything is submitted."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.tracking.reachable import check_experiment, check_tracking
from launcher.tracking.server import server_port
from trainer.spec import ConfigError, TrackingConfig

TINY = ["data=synthetic", "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocab=64", "model.seq=16", "cluster.gpus_per_node=1",
        "run.global_batch=4", "run.steps=4", "run.warmup_steps=1"]  # fmt: skip

BAD = [
    ("ftp://host/x", "is none of MLflow's servers or databases"),
    ("./mlruns", "is none of MLflow's servers or databases"),
    ("http://", "names no host"),
    ("http://host:port", "is no address"),
    ("http://no-such-host.invalid:5000", "there is no host 'no-such-host.invalid'"),
    ("http://127.0.0.1:PORT", "nobody answers at 127.0.0.1:PORT"),
    ("postgresql+psycopg2://127.0.0.1:PORT/db", "nobody answers at 127.0.0.1:PORT"),
    ("sqlite:////dev/null/mlflow.db", "is no folder that can be written"),
    ("sqlite:////dev/null", "which is no file"),
    ("sqlite:////no/such/folder/mlflow.db", "is no folder that can be written"),
]


@pytest.mark.parametrize(("uri", "words"), BAD)
def test_place_where_nothing_can_be_tracked_is_one_plain_error(uri: str, words: str, tmp_path: Path) -> None:
    port = str(server_port())
    with pytest.raises(ConfigError) as raised:
        check_tracking(TrackingConfig(uri=uri.replace("PORT", port)), tmp_path)
    assert words.replace("PORT", port) in str(raised.value) and "\n" not in str(raised.value)


def test_place_that_is_there_is_taken(tmp_path: Path) -> None:
    check_tracking(TrackingConfig(), tmp_path / "not-yet")
    check_tracking(TrackingConfig(uri=f"sqlite:///{tmp_path}/new.db"), tmp_path)
    with socket.socket() as silent:  # a server that is only slow
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        check_tracking(TrackingConfig(uri=f"http://127.0.0.1:{silent.getsockname()[1]}"), tmp_path)


@pytest.mark.parametrize("command", [["train"], ["train", "-m", "layout.tensor=1"], ["search", "hardware=v100_32"]])
def test_nothing_is_started_or_written_when_nothing_could_be_tracked(command: list[str], tmp_path: Path) -> None:
    words = [*command, *TINY, f"tracking.uri=http://127.0.0.1:{server_port()}"]
    done = subprocess.run([sys.executable, "-m", "launcher", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: tracking.uri=http://127.0.0.1:") and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/trials/*")) and not list(tmp_path.glob("runs/sweeps/*"))


@pytest.mark.parametrize("name", ["", "x" * 501], ids=["empty", "too long"])
@pytest.mark.parametrize("command", [["train"], ["train", "-m"], ["search", "hardware=v100_32"]], ids=" ".join)
def test_an_experiment_that_mlflow_cannot_make_is_refused_before_anything_starts(command: list[str], name: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "launcher", *command, *TINY, f"tracking.experiment='{name}'"]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and error.startswith("error: tracking.experiment") and "MLflow" not in done.stderr.replace(error, "")
    assert not list(tmp_path.glob("runs/trials/*"))


def test_an_experiment_of_500_letters_is_taken() -> None:
    check_experiment(TrackingConfig(experiment="x" * 500))
