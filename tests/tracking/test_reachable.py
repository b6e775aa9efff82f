"""Where nothing can be tracked is found out before anything is submitted."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.tracking.reachable import check_experiment, check_tracking
from launcher.tracking.server import server_port
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import TrackingConfig

pytestmark = pytest.mark.slow
TINY = ["data=synthetic", "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocab=64", "model.seq=16", "cluster.gpus_per_node=1",
        "run.global_batch=4", "run.steps=4", "run.warmup_steps=1"]  # fmt: skip

BAD = [
    ("ftp://host/x", "is not an MLflow server or database"),
    ("./mlruns", "is not an MLflow server or database"),
    ("http://", "names no host"),
    ("http://host:port", "is not an address"),
    ("http://no-such-host.invalid:5000", "there is no host 'no-such-host.invalid'"),
    ("http://127.0.0.1:PORT", "nobody answers at 127.0.0.1:PORT"),
    ("postgresql+psycopg2://127.0.0.1:PORT/db", "nobody answers at 127.0.0.1:PORT"),
    ("sqlite:////dev/null/mlflow.db", "is not a writable folder"),
    ("sqlite:////dev/null", "which is not a file"),
    ("sqlite:////no/such/folder/mlflow.db", "is not a writable folder"),
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


@pytest.mark.parametrize("verb", [["train"], ["train", "-m", "layout.tensor=1"], ["search", "hardware=v100_32"]], ids=" ".join)
@pytest.mark.parametrize("key", ["uri", "experiment"])
def test_nothing_is_started_or_written_when_nothing_could_be_tracked(
    verb: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    value = {"uri": f"http://127.0.0.1:{server_port()}", "experiment": "''"}[key]
    assert main([*verb, *TINY, f"tracking.{key}={value}"]) == 2
    (error,) = [line for line in capfd.readouterr().err.splitlines() if "tracking" in line.lower() or "MLflow" in line]
    assert error.startswith(f"error: tracking.{key}=")
    assert not list(tmp_path.glob("runs/trials/*")) and not list(tmp_path.glob("runs/sweeps/*"))


@pytest.mark.parametrize("name", ["", "x" * 501], ids=["empty", "too long"])
def test_an_experiment_that_mlflow_cannot_make_is_one_plain_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.experiment"):
        check_experiment(TrackingConfig(experiment=name))
    check_experiment(TrackingConfig(experiment="x" * 500))
