"""How long it takes to submit a sweep to Slurm: Trireme beside a bare `sbatch --array` and hydra-submitit-launcher, in one run.

    python benchmarks/submission.py                          # starts a Slurm of its own (Debian, root)
    SLURM_CONF=... python benchmarks/submission.py           # on a cluster that is there; jobs are held and cancelled
    python benchmarks/submission.py --peer PYTHON            # an interpreter that has hydra-submitit-launcher
    python benchmarks/submission.py --submission-only        # seconds instead of minutes

Every contestant leaves one array of held jobs in the queue. *Submission* is the time from a list of trials to ids in hand. The bare
way writes one script for each trial and one for the array, and calls sbatch once. Trireme needs more: a folder for each trial, in
which a note of its place in the array lies beside its script, so that a killed launcher loses nothing; a copy of the code; the limits
of the controller. *The same by hand* makes these files and calls, by copying and without rendering anything, and is what Trireme is
held against. *Command* is a whole command as a person types it, interpreter start, Hydra and the composition of every job included.
Rounds alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TARGET = 1.5  # times the same files and calls by hand

PEER_APP = """\
import hydra
@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(config): pass
from hydra.core.config_store import ConfigStore
ConfigStore.instance().store("app", {"seed": 0})
main()
"""


@dataclass
class Contestant:
    """One line of the table."""

    name: str
    submit: Callable[[Path, int], None]  # submits so many held jobs, with a new folder to work in
    seconds: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # of Slurm's commands

    def round(self, folder: Path, count: int, log: Path) -> None:
        log.write_text("")
        start = time.perf_counter()
        self.submit(folder, count)
        self.seconds.append(time.perf_counter() - start)
        self.calls.append(len(log.read_text().splitlines()))
        queued = len(_squeue("--array"))
        assert queued == count, f"{self.name} left {queued} jobs in the queue, not {count}"
        subprocess.run(["scancel", *sorted(set(_squeue("--format=%F")))], check=True)
        while _squeue():
            time.sleep(0.2)


def _squeue(*options: str) -> list[str]:
    return subprocess.run(["squeue", "--noheader", *options], check=True, capture_output=True, text=True).stdout.split("\n")[:-1]


# ---------------------------------------------------------------- contestants


def bare(folder: Path, count: int) -> None:
    """A script for each trial, as long as ours, and one sbatch."""
    body = "# " + "x" * 76 + "\n"
    for index in range(count):
        (folder / f"{index}.sh").write_text("#!/bin/bash\n" + body * 45 + "true\n")
    array = f"#!/bin/bash\n#SBATCH --hold --output=/dev/null --array=0-{count - 1}\nexec bash {folder}/$SLURM_ARRAY_TASK_ID.sh\n"
    (folder / "array.sh").write_text(array)
    subprocess.run(["sbatch", "--parsable", str(folder / "array.sh")], check=True, capture_output=True)


def same(folder: Path, count: int) -> None:
    """The files and calls of ``backend``, with nothing thought about: contents are ready, and copied."""
    body, note = (
        "#!/bin/bash\n" + ("# " + "x" * 76 + "\n") * 45 + "true\n",
        '{"array": "trireme-bench-01234567", "index": 1000, "code": "0123456789ab"}',
    )
    subprocess.run(["scontrol", "show", "config"], check=True, capture_output=True)
    tracked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(tracked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / "code" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "code" / name)
    for index in range(count):
        logs = folder / "trials" / f"{index:012x}" / "logs"
        logs.mkdir(parents=True)
        (logs / "attempt0.array.json").write_text(note)
        (logs / "attempt0.submitted.txt").write_text(body)
    array = f"#!/bin/bash\n#SBATCH --hold --output=/dev/null --array=0-{count - 1}\nexec bash {folder}/trials/$SLURM_ARRAY_TASK_ID\n"
    (folder / "array.sh").write_text(array)
    subprocess.run(["sbatch", "--parsable", str(folder / "array.sh")], check=True, capture_output=True)


def backend(folder: Path, count: int) -> None:
    """Our backend alone: rendered scripts, notes, one array."""
    from launcher.backends import backend_for
    from launcher.backends.slurm.cluster import SlurmCluster
    from launcher.trials.job import Job

    cluster = SlurmCluster(gpus_per_node=1, gpu_request="none", extra=["--hold"])
    slurm = backend_for(cluster)
    trials = [folder / "trials" / f"{index:012x}" for index in range(count)]
    handles = slurm.submit([slurm.render(Job(path.name, "bench", 0, path, cluster, 1)) for path in trials])
    assert len({handle["job_id"] for handle in handles}) == count


def command(folder: Path, count: int) -> None:
    """`trireme train -m` with as many values of a key."""
    overrides = ["cluster=slurm", "cluster.gpus_per_node=1", "cluster.gpu_request=none", "cluster.extra=[--hold]", "data=synthetic"]
    seeds = "run.seed=" + ",".join(map(str, range(count)))
    arguments = ["train", "-m", *overrides, seeds, "sweep.follow=false", f"sweep.dir={folder}"]
    subprocess.run([sys.executable, "-m", "launcher", *arguments], check=True, cwd=ROOT, capture_output=True)


def peer(python: str) -> Callable[[Path, int], None]:
    """hydra-submitit-launcher, until its sbatch has returned; it would wait for the jobs."""

    def submit(folder: Path, count: int) -> None:
        (folder / "app.py").write_text(PEER_APP)
        settings = [
            "hydra/launcher=submitit_slurm",
            f"hydra.launcher.array_parallelism={count}",
            "+hydra.launcher.additional_parameters={hold: true}",
        ]
        seeds = "seed=" + ",".join(map(str, range(count)))
        process = subprocess.Popen(
            [python, "app.py", "-m", *settings, seeds], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while len(_squeue("--array")) < count:
            assert process.poll() is None, f"{python} app.py -m {' '.join(settings)} failed; try it by hand in {folder}"
            time.sleep(0.05)
        process.kill()
        process.wait()

    return submit


# ---------------------------------------------------------------- the run


@contextmanager
def cluster() -> Iterator[None]:
    """A Slurm: that of ``SLURM_CONF``, or one of our own with arrays long enough."""
    if "SLURM_CONF" in os.environ:
        yield
        return
    from tests.clusters.slurm import Cluster, Settings, install, why_not

    reason = why_not()
    if reason:
        sys.exit(f"error: {reason}; set SLURM_CONF to use another cluster")
    install()
    own = Cluster(Settings(Path("/tmp/tslurm90"), 90, nodes=1, max_array_size=1001), with_parent=True)
    own.stop()
    own.start()
    os.environ["SLURM_CONF"] = str(own.settings.conf)
    try:
        yield
    finally:
        own.stop()


@contextmanager
def counted_commands(folder: Path) -> Iterator[Path]:
    """Slurm's commands, each leaving a line in the file that is returned."""
    log, before = folder / "calls", os.environ["PATH"]
    (folder / "bin").mkdir()
    for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "srun"):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} >>{log}\nexec {shutil.which(name)} "$@"\n')
        program.chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}:{before}"
    try:
        yield log
    finally:
        os.environ["PATH"] = before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", metavar="PYTHON", help="interpreter with hydra-submitit-launcher")
    parser.add_argument("--submission-only", action="store_true", help="leave out whole commands, which compose every job and take minutes")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args()
    contestants = [Contestant("sbatch --array", bare), Contestant("the same by hand", same), Contestant("Trireme, submission", backend)]
    if not options.submission_only:
        contestants.append(Contestant("Trireme, command", command))
    if options.peer:
        contestants.append(Contestant("hydra-submitit-launcher, command", peer(options.peer)))
    with cluster(), tempfile.TemporaryDirectory(prefix="bench") as temporary, counted_commands(Path(temporary)) as log:
        for number in range(options.rounds):
            for contestant in contestants:
                folder = Path(temporary, f"{number}{contestant.name.replace(' ', '')}")
                folder.mkdir()
                contestant.round(folder, options.trials, log)
    return report(contestants, options.trials, options.json)


def report(contestants: list[Contestant], trials: int, as_json: bool) -> int:
    """The table; 1 when our submission is slower than the target."""
    base, ours = (statistics.median(contestant.seconds) for contestant in contestants[1:3])
    ratio = ours / base
    if as_json:
        rows = {c.name: {"seconds": c.seconds, "calls": c.calls} for c in contestants}
        print(json.dumps({"trials": trials, "contestants": rows, "ratio": ratio, "target": TARGET}, indent=2))
    else:
        print(f"{trials} trials{'':34} median s   by hand = 1   calls of Slurm")
        for c in contestants:
            seconds = statistics.median(c.seconds)
            print(f"  {c.name:40} {seconds:8.3f} {seconds / base:13.2f} {c.calls[-1]:12d}")
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
