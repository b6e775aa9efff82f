"""Slurm's commands over ssh: against a real sshd of its own, on a port of this machine, beside the real cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.backends import backend_for
from launcher.backends.slurm.backend import SlurmBackend
from launcher.backends.slurm.cluster import SlurmCluster, SubmitConfig
from launcher.backends.slurm.login import Login
from launcher.cli.main import main
from launcher.config.schema import Config
from launcher.ports import free_port
from launcher.trials.store import Record, cluster_of
from tests.backends.conformance import Ground, SearchConformance, closing
from tests.backends.slurm_support import CLUSTER, PROJECT, dying, interpreter, run, submissions, trial, warmth
from tests.clusters.slurm.fixture import Slurm
from tests.clusters.slurm.process import wait_for
from tests.sweep.support import starts
from trainer.shared.records.outcome import Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass(frozen=True)
class Door:
    """A host ``login`` for ssh, which only ``options`` name."""

    folder: Path
    port: int

    @property
    def submit(self) -> SubmitConfig:
        return SubmitConfig("login", [f"-F{self.folder}/client"])

    def configure(self, **keys: str) -> None:
        usual = {"HostName": "127.0.0.1", "Port": str(self.port), "IdentityFile": f"{self.folder}/me", "IdentitiesOnly": "yes",
                 "UserKnownHostsFile": f"{self.folder}/known", "StrictHostKeyChecking": "yes"}  # fmt: skip
        lines = [f"  {name} {value}" for name, value in (usual | keys).items()]
        (self.folder / "client").write_text("\n".join(["Host login", *lines]) + "\n")


@pytest.fixture(scope="module")
def door(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    if os.geteuid() != 0 or not Path(SSHD).exists():
        pytest.skip("there is no sshd here (package openssh-server), or no right to start it")
    folder, port = tmp_path_factory.mktemp("ssh"), free_port(iter(range(22000, 23000)))
    assert port is not None
    for name in ("host", "me", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "known").write_text(f"[127.0.0.1]:{port} " + (folder / "host.pub").read_text())
    settings = {"Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": folder / "pid", "StrictModes": "no",
                "AuthorizedKeysFile": folder / "me.pub", "UsePAM": "no", "PasswordAuthentication": "no",
                "SetEnv": f"SLURM_CONF={slurm.conf}"}  # fmt: skip
    (folder / "server").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    subprocess.run([SSHD, "-f", str(folder / "server"), "-E", str(folder / "log")], check=True)
    wait_for(lambda: (folder / "pid").exists(), "sshd to start", 30)
    door = Door(folder, port)
    door.configure()
    yield door
    subprocess.run(["ssh", f"-F{folder}/client", *ours(door), "-O", "exit", "login"], capture_output=True)
    os.kill(int((folder / "pid").read_text()), signal.SIGTERM)


def ours(door: Door) -> list[str]:
    """The options by which ssh finds the shared connection."""
    command = Login(door.submit).command(["true"])
    return ["-o", next(word for word in command if word.startswith("ControlPath="))]


@pytest.fixture
def python(tmp_path: Path) -> str:
    return interpreter(tmp_path, "tests.backends.played_trainer")


@pytest.fixture(scope="module")
def ground(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    cluster = dataclasses.replace(
        CLUSTER, gpus_per_node=2, code="snapshot", submit=door.submit, python=warmth().get("python", sys.executable)
    )
    yield from closing(Ground(lambda: backend_for(cluster), cluster, tmp_path_factory.mktemp("runs") / "trials"))


@pytest.mark.campaign("slurm")
class TestSearchOverSsh(SearchConformance):
    """Inference."""


def far(door: Door, seed: int, python: str) -> Config:
    return trial(seed=seed, python=python, submit=door.submit)


def test_trials_are_submitted_and_followed_over_one_connection(
    door: Door, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here knows of Slurm but through ssh: the launcher has neither its configuration nor its commands."""
    conf = os.environ["SLURM_CONF"]
    monkeypatch.delenv("SLURM_CONF")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("ssh", "bash", "git", "sh"):
        (tools / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tools))
    done = run(tmp_path / "runs", *(far(door, seed, python) for seed in (1, 2)))
    assert [(record.status, starts(record)) for record in done] == [(Status.DONE, [0])] * 2, [record.detail for record in done]
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_CONF", conf)
    assert len(submissions(tmp_path / "runs")) == 2
    assert (door.folder / "log").read_text().count("Accepted publickey") == 1


@pytest.mark.campaign("slurm")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_launcher_killed_around_a_submission_over_ssh_loses_none_and_repeats_none(
    door: Door, tmp_path: Path, python: str, moment: str
) -> None:
    assert dying(moment, tmp_path / "runs", python, options=door.submit.ssh_options).wait() == -signal.SIGKILL
    done = run(tmp_path / "runs", *(far(door, seed, python) for seed in (1, 2, 3)))
    assert [(record.status, starts(record)) for record in done] == [(Status.DONE, [0])] * 3, [record.detail for record in done]
    assert len(submissions(tmp_path / "runs")) == 3


BAD = [
    ({"Port": "1"}, "cannot be reached: nothing listens there for ssh (ssh: connect to host 127.0.0.1 port 1: Connection refused)"),
    ({"HostName": "nobody.invalid"}, "cannot be reached: it is not known by that name (ssh: Could not resolve hostname"),
    ({"IdentityFile": "{folder}/stranger"}, "cannot be reached: it does not take your key"),
    ({"UserKnownHostsFile": "/dev/null"}, "cannot be reached: its host key is not known"),
]


@pytest.mark.parametrize(("keys", "words"), BAD)
def test_a_login_node_out_of_reach_is_one_plain_line(door: Door, tmp_path: Path, keys: dict[str, str], words: str) -> None:
    elsewhere = Door(tmp_path, door.port)
    for name in ("known", "me", "stranger"):
        (tmp_path / name).write_bytes((door.folder / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    elsewhere.configure(**{name: value.format(folder=tmp_path) for name, value in keys.items()})
    submit = SubmitConfig("login", [*elsewhere.submit.ssh_options, "-oControlPath=none"])
    with pytest.raises(ConfigError) as caught:
        SlurmBackend(dataclasses.replace(CLUSTER, python="/p", submit=submit)).check()
    said = str(caught.value)
    assert said.startswith(f"cluster.submit.ssh=login {words}") and "\n" not in said, said


@pytest.mark.parametrize("flag", [[], ["--dry-run=server"]])
def test_a_login_node_out_of_reach_is_said_before_anything_else(flag: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    there = ["cluster=slurm", "cluster.submit.ssh=127.0.0.1", "cluster.submit.ssh_options=[-p1,-oControlPath=none]", "cluster.python=/p"]
    what = ["model=gpt_tiny", "data=synthetic", "cluster.gpus_per_node=2", "layout.data=2", f"sweep.dir={tmp_path}/runs"]
    assert main(["train", *what, *there, *flag]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.startswith("error: cluster.submit.ssh=127.0.0.1 cannot be reached") and said.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


FAR = """
import sys
from pathlib import Path
from launcher.backends.slurm.cluster import SubmitConfig
from launcher.trials.store import Record, cluster_of
from tests.backends.slurm_support import run, trial

runs, python, options = sys.argv[1:]
(record,) = run(Path(runs), trial(python=python, submit=SubmitConfig("login", [options])))
print(f"{record.status.value}: {record.detail}")
"""


@pytest.mark.campaign("slurm")
def test_a_folder_that_the_login_node_does_not_have_is_refused(door: Door, tmp_path: Path, python: str) -> None:
    """The launcher's mount of the sweep's folder is its own, as a laptop's disk is."""
    (tmp_path / "own").mkdir()
    launcher = [sys.executable, "-c", FAR, str(tmp_path / "own" / "runs"), python, door.submit.ssh_options[0]]
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$1"; shift; exec "$@"', "sh", str(tmp_path / "own"), *launcher]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    line = done.stdout.splitlines()[-1]
    assert line.startswith(f"failed: cluster.submit.ssh=login has no {tmp_path}/own/runs/arrays/trireme-drill-"), line
    assert "this machine and the cluster share, under the same path" in line


REFUSED = [
    ({"python": None}, "the ranks cannot take this machine's Python; name the cluster's with cluster.python=PATH"),
    ({"python": "/p", "env_inherit": ["TOKEN"]}, "variables of this machine do not reach the jobs (cluster.env_inherit=['TOKEN'])"),
]


@pytest.mark.parametrize(("keys", "words"), REFUSED)
def test_what_a_login_node_cannot_have_is_refused_before_it_is_asked(keys: dict[str, object], words: str) -> None:
    cluster: SlurmCluster = dataclasses.replace(CLUSTER, submit=SubmitConfig("nobody.invalid"), **keys)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cluster\.submit\.ssh=nobody\.invalid: ") as caught:
        SlurmBackend(cluster).check()
    assert words in str(caught.value)


def test_a_trial_under_way_is_asked_about_where_and_as_it_was_submitted(tmp_path: Path) -> None:
    first, now = (dataclasses.replace(CLUSTER, submit=SubmitConfig(host, ["-p2222"]), name_prefix=host) for host in ("first", "now"))
    record = Record("ab12cd34ef56", tmp_path, Status.SUBMITTED, cluster=json.loads(json.dumps(to_dict(first))))
    assert cluster_of(record, now) == first
    del record.cluster["name_prefix"]  # of a version that had no such key
    assert cluster_of(record, now) == dataclasses.replace(first, name_prefix="trireme")
    record.status = Status.DONE
    assert cluster_of(record, now) == now
