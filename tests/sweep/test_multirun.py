"""``trireme train -m`` as a user types it: Hydra composes, every trial is measured once, sweepers get the step times."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.arguments import sweep_parser
from launcher.cli.main import main
from launcher.config.folders import conf_dir
from launcher.sweep.multirun import Multirun, dir_option
from launcher.trials.store import Record
from tests.warm import run
from trainer.shared.records.outcome import Reason, Status

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

TINY = ["data=synthetic", "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocab=64", "model.seq=16", "cluster.gpus_per_node=2",
        "run.global_batch=4", "run.steps=4", "run.warmup_steps=1"]  # fmt: skip


def trireme(cwd: Path, *arguments: str, code: int = 0) -> str:
    """Run the tool in ``cwd``; its standard output. Fails the test when the exit code is another."""
    done = run("-m", "launcher", *arguments, cwd=cwd)
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout


@pytest.mark.parametrize("folder", ["runs", "other", "-lead", "--dir", "a b", "$(x)", "--a b='c'"])
def test_the_commands_that_are_printed_find_the_sweep_in_any_folder(folder: str, tmp_path: Path) -> None:
    words = shlex.split(f"demo{dir_option(folder)}")
    arguments = sweep_parser("rank", "").parse_args(words)
    assert (arguments.sweep, arguments.dir) == ("demo", folder)


def ranked(cwd: Path, *arguments: str) -> list[dict[str, Any]]:
    return json.loads(trireme(cwd, "rank", "--json", *arguments))


def test_a_sweep_is_ranked_by_step_time_and_trained_once(tmp_path: Path) -> None:
    command = ["train", "-m", *TINY, "layout.tensor=1,2", "layout.pipeline=1,2", "run.memory_gb=1"]
    trireme(tmp_path, *command)
    records = ranked(tmp_path)
    assert [r["status"] for r in records] == ["done", "done", "done", "pruned"]  # tensor=2 pipeline=2 needs 4 ranks of 2
    assert "needs 4 ranks, but the cluster has 2" in records[-1]["detail"] and records[-1]["reason"] == "configuration"
    times = [r["step_time_s"] for r in records[:3]]
    assert times == sorted(times)
    needed = {
        "trial",
        "status",
        "reason",
        "layout",
        "step_time_s",
        "step_time_spread_s",
        "tokens_per_s",
        "peak_memory_bytes",
        "predicted_step_time_s",
        "dir",
    }
    assert all(needed <= set(r) for r in records)
    results = [Path(r["dir"]) / "result.json" for r in records[:3]]
    before = [(p.stat().st_mtime_ns, p.read_bytes()) for p in results]
    trireme(tmp_path, *command)
    assert [(p.stat().st_mtime_ns, p.read_bytes()) for p in results] == before
    assert ranked(tmp_path) == records


def test_one_trial_out_of_memory_does_not_hide_the_others(tmp_path: Path) -> None:
    trireme(tmp_path, "train", "-m", *TINY, "run.memory_gb=0.000001,1", "sweep.name=memory")
    good, bad = ranked(tmp_path, "memory")
    assert (good["status"], bad["status"], bad["reason"]) == ("done", "failed", "out of memory")
    assert "1 of 2" not in bad["detail"] and bad["detail"]


def test_a_single_run_that_fails_exits_1(tmp_path: Path) -> None:
    trireme(tmp_path, "train", *TINY, "run.memory_gb=0.000001", code=1)
    (record,) = ranked(tmp_path)
    assert (record["status"], record["reason"]) == ("failed", "out of memory")


SWEEPER = '''
"""Launches one job after another, the last of which cannot be run and fails, and notes the values where Hydra says."""
import json, pathlib, psutil
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

class Adaptive(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.file = pathlib.Path(config.hydra.sweep.dir) / "values.json"
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments):
        values, servers = [], []
        for index, extra in enumerate(["layout.tensor=3", "layout.tensor=1", "layout.tensor=2", "run.memory_gb=0.000001"]):
            (job,) = self.launcher.launch([[*arguments, extra]], initial_job_idx=index)
            values.append(job.return_value)
            servers += [child.pid for child in psutil.Process().children() if "trainer.fork_server" in child.cmdline()]
        self.file.write_text(json.dumps({"values": values, "servers": servers}))

ConfigStore.instance().store(group="hydra/sweeper", name="adaptive", node={"_target_": "hydra_plugins.adaptive.Adaptive"})
'''


def test_a_sweeper_is_given_each_trials_step_time_and_infinity_for_one_that_failed_or_cannot_be_run(tmp_path: Path) -> None:
    """As a process that is not forked: it imports all by itself, as its fork server does."""
    plugins = tmp_path / "path" / "hydra_plugins"
    plugins.mkdir(parents=True)
    (plugins / "adaptive.py").write_text(SWEEPER)
    command = [sys.executable, "-m", "launcher", "train", "-m", "hydra/sweeper=adaptive", *TINY, "sweep.name=adaptive"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}"}, check=True)
    noted = json.loads((tmp_path / "runs" / "hydra" / "values.json").read_text())
    records = {r["layout"]["tensor"]: r["step_time_s"] for r in ranked(tmp_path, "adaptive") if r["status"] == "done"}
    assert noted["values"] == [float("inf"), records[1], records[2], float("inf")]
    assert len(noted["servers"]) == 3 and len(set(noted["servers"])) == 1, (
        "what ranks import is imported once, however often a sweeper comes back"
    )


def test_a_folder_of_the_users_own_has_files_of_every_group(tmp_path: Path) -> None:
    own = tmp_path / "mine" / "cluster"
    own.mkdir(parents=True)
    (own / "mysite.yaml").write_text("defaults: [slurm, _self_]\nnodes: 1\ngpus_per_node: 4\npartition: big\n")
    for flag in (["--config-dir", "mine"], ["--config-dir=mine"]):
        out = trireme(tmp_path, "train", *flag, *TINY, "cluster=mysite", "cluster.account=us", "--dry-run")
        assert "#SBATCH --partition=big" in out and "#SBATCH --account=us" in out
    trireme(tmp_path, "train", "--config-dir", "mine", *TINY, "cluster=mysit", code=2)


def test_dry_run_prints_every_trial_and_starts_nothing(tmp_path: Path) -> None:
    out = trireme(tmp_path, "train", "-m", *TINY, "layout.tensor=1,2,4", "--dry-run")
    assert out.count("# trial ") == 2 and "pruned: layout.tensor=4" in out
    assert "-m trainer" in out
    assert not (tmp_path / "runs" / "trials").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layout.tensor=range(1,0)"], "there is nothing to run"),
        pytest.param(["layout.tensor=glob(*)"], "there is nothing to run", marks=pytest.mark.campaign("words")),
        (["model=glob(none*)"], "model=glob(none*) stands for nothing; conf/model/ has"),
        (["sweep.dir="], "sweep.dir= names no folder; give the name of one"),
    ],
)
def test_what_stands_for_nothing_is_one_line_and_makes_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "-m", *TINY, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("error: ") == 1 and not list(tmp_path.iterdir())


def test_options_of_a_group_are_named_by_a_pattern_too(tmp_path: Path) -> None:
    out = trireme(tmp_path, "train", "-m", "model=glob(gpt_*i*)", "data=synthetic", "cluster.gpus_per_node=1", "--dry-run")
    assert out.count("# trial ") == len(list((conf_dir() / "model").glob("gpt_*i*.yaml"))) > 1


@pytest.mark.parametrize("name", ["a/b", *(pytest.param(name, marks=pytest.mark.campaign("words")) for name in ("***", "x" * 300, "a\nb"))])
def test_a_dry_run_refuses_the_names_that_the_run_itself_would_refuse(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    for last in ([], ["--dry-run"]):
        assert main(["train", *TINY, f"sweep.name='{name}'", *last]) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1] and said[0].startswith("error: sweep.name=")


def test_whatever_an_override_holds_a_dry_run_prints_it_as_a_comment(tmp_path: Path) -> None:
    """What is printed may be run as a script, or applied."""
    for lines in ("++cluster.env={A: 'x\necho INJECTED'}", "++cluster.env={A: 'x\r\u2028echo INJECTED'}"):
        out = trireme(tmp_path, "train", "-m", *TINY, "layout.tensor=1,4", "--dry-run", lines)
        around = out.partition("mkdir -p")[0] + out.rpartition("\nwait\n")[2]  # of the one script
        assert around.count("echo INJECTED") == 2 and "pruned: layout.tensor=4" in around
        assert all(line.startswith("#") for line in around.splitlines() if line)


def test_a_dry_run_by_a_server_says_where_there_is_none_to_ask(tmp_path: Path) -> None:
    assert "# cluster.backend=local has no server to ask" in trireme(tmp_path, "train", *TINY, "--dry-run=server")
    assert not (tmp_path / "runs" / "trials").exists()


@pytest.mark.parametrize(("ends", "code"), [
    ([], 0), (["done"], 0), (["running", "submitted"], 0), (["done", "pruned"], 0), (["done", "out of memory", "numerics"], 0),
    (["done"] * 9 + ["error"], 1), (["done", "node"], 1), (["done", "cancelled"], 1), (["done", "planned"], 1), (["out of memory"], 1),
    (["pruned"], 1), (["cannot start", "cannot start"], 1),
])  # fmt: skip
def test_the_exit_code_says_whether_the_same_command_would_run_something(tmp_path: Path, ends: list[str], code: int) -> None:
    multirun = Multirun([])
    for number, end in enumerate(ends):
        failed = end not in [status.value for status in Status]
        reason, status = Reason(end) if failed else None, Status.FAILED if failed else Status(end)
        record = Record(f"{number:012x}", tmp_path / str(number), Status.STOPPED if reason is Reason.CANCELLED else status, reason)
        record.directory.mkdir()
        (record.directory / "result.json").write_text(json.dumps({"status": status.value, "attempt": 0}))
        multirun.records.append(record)
    assert multirun.exit_code == code
