"""The scripts that Slurm is given: whole, in golden files, and the rules that they follow. No cluster is needed.

``UPDATE_GOLDEN=1 pytest tests/backends/test_slurm_script.py`` writes the golden files anew; read their difference.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.slurm.backend import SlurmBackend
from launcher.backends.slurm.client import clean_environment, submission_environment, together
from launcher.backends.slurm.cluster import SlurmCluster, seconds_of
from launcher.backends.slurm.errors import own_complaint
from launcher.backends.slurm.options import options, quote
from launcher.backends.slurm.owned import check_extra, check_srun
from launcher.backends.slurm.plan import SlurmJobPlan
from launcher.backends.slurm.script import array_script, check_setup, job_script
from launcher.backends.slurm.states import EXIT_CODES
from launcher.backends.slurm.variables import OWN
from launcher.config.schema import ContainerConfig
from launcher.trials.job import Job, JobState
from tests.backends.slurm_support import PASSED_ON, SRUN_PASSED_ON
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden" / "slurm"
CODE = Path("/shared/runs/code/0123456789ab")
PLAIN = SlurmCluster(nodes=2, gpus_per_node=4, python="/venv/bin/python")
EVERYTHING: dict[str, Any] = {
    "partition": "batch", "account": "nlp", "qos": "high", "time": 90, "gpu_request": "gres", "gpu_type": "h100", "cpus": 8, "mem_gb": 0.0,
    "constraint": "h100&ib", "exclusive": True, "nodelist": "n[1-8]", "exclude": "n7", "reservation": "march", "dependency": "afterok:12",
    "switches": 1, "switches_wait": 10, "segment": 2, "comment": 'who says "no"?', "mail_type": "END", "mail_user": "me@site", "requeues": 0,
    "extra": ["--licenses=scratch:1"], "srun_args": ["--mpi=none"], "setup": ["module load cuda", 'export A="$(nproc)"'],
    "env": {"GREETING": "it's $HOME"}, "setup_may_fail": ["nvidia-smi"], "health_check": True,
}  # fmt: skip
IMAGES = {
    "pyxis": ContainerConfig("/images/trireme.sqsh", mounts=["/corpus:/corpus:ro"], workdir="/work", writable=True),
    "apptainer": ContainerConfig("/images/trireme.sif", mounts=["/corpus:/corpus:ro"]),
    "oci": ContainerConfig("/images/bundle"),
}


def job(cluster: SlurmCluster, ranks: int = 8, trial: str = "ab12cd34ef56", **fields: Any) -> Job:
    return Job(trial, "demo", 0, Path("/shared/runs/trials") / trial, cluster, ranks, **fields)


def script(cluster: SlurmCluster, ranks: int = 8, **fields: Any) -> str:
    return job_script(SlurmJobPlan(job(cluster, ranks, **fields), CODE))


def asked(cluster: SlurmCluster, ranks: int = 8, **fields: Any) -> dict[str, str | None]:
    return options(SlurmJobPlan(job(cluster, ranks, **fields)))


def agrees(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs"
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0, "not valid bash"


# ---------------------------------------------------------------- golden files


def test_a_plain_job_is_one_task_per_rank() -> None:
    agrees("plain.sh", script(PLAIN))


def test_every_option_of_a_site_finds_its_place() -> None:
    agrees("every_option.sh", script(dataclasses.replace(PLAIN, **EVERYTHING)))


def test_torchrun_is_one_task_per_node() -> None:
    agrees("torchrun.sh", script(dataclasses.replace(PLAIN, launch="torchrun", cpus=2)))


@pytest.mark.parametrize("runtime", IMAGES)
def test_a_container_is_put_around_the_ranks_only(runtime: str) -> None:
    agrees(f"{runtime}.sh", script(dataclasses.replace(PLAIN, container=IMAGES[runtime])))


def test_an_array_runs_the_scripts_of_its_trials() -> None:
    jobs = [job(PLAIN, trial=trial, max_parallel=2) for trial in ("000000000001", "000000000002", "000000000003")]
    agrees("array.sh", array_script("trireme-demo-89abcdef", jobs, "afterany:41"))


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(("ranks", "wanted"), [(1, (1, 1)), (3, (1, 3)), (4, (1, 4)), (6, (2, 4)), (8, (2, 4))])
def test_a_layout_takes_as_few_nodes_as_hold_it(ranks: int, wanted: tuple[int, int]) -> None:
    plan = SlurmJobPlan(job(PLAIN, ranks))
    assert (plan.nodes, plan.per_node) == wanted
    assert options(plan)["ntasks-per-node"] == str(wanted[1])


def test_a_run_without_checkpoints_is_not_told_of_its_end() -> None:
    def config(every: int) -> dict[str, Any]:
        return {"run": {"checkpoint": {"every": every}}}

    assert "--signal" in script(PLAIN, config=config(5)) and "USR1" in script(PLAIN, config=config(5))
    assert "--signal" not in script(PLAIN, config=config(0)) and "USR1" not in script(PLAIN, config=config(0))


def test_a_short_time_limit_leaves_half_of_it_to_the_ranks() -> None:
    assert asked(dataclasses.replace(PLAIN, time=1))["signal"] == "B:USR1@30"
    assert asked(dataclasses.replace(PLAIN, time="0:0:01"))["signal"] == "B:USR1@1", "at least one second"


@pytest.mark.parametrize(("ranks", "segment"), [(4, None), (8, "2"), (12, "3"), (16, "4"), (24, None), (32, "4")])
def test_nodes_of_a_trial_lie_in_blocks_of_equal_parts(ranks: int, segment: str | None) -> None:
    cluster = dataclasses.replace(PLAIN, nodes=8, segment=4)
    if ranks == 24:
        with pytest.raises(ConfigError, match=r"^cluster.segment=4 does not divide the 6 nodes of a trial; use 1, 2, 3 or 6, or another"):
            asked(cluster, ranks)
    else:
        assert asked(cluster, ranks).get("segment") == segment
    assert "segment" not in asked(PLAIN, 32)


def test_bad_nodes_of_earlier_attempts_are_excluded_beside_those_of_the_configuration() -> None:
    cluster = dataclasses.replace(PLAIN, exclude="n9")
    assert asked(cluster, avoid=("n1", "n2"))["exclude"] == "n9,n1,n2"


def test_an_array_is_throttled_only_when_it_is_longer_than_the_limit() -> None:
    def array(limit: int) -> str:
        return array_script("name", [job(PLAIN, max_parallel=limit)] * 3)

    assert "--array=0-2%2\n" in array(2)
    assert "--array=0-2\n" in array(3) and "--array=0-2\n" in array(0)


def test_a_dependency_of_the_configuration_holds_beside_that_of_the_array() -> None:
    cluster = dataclasses.replace(PLAIN, dependency="afterok:7")
    assert "--dependency=afterok:7,afterany:41\n" in array_script("name", [job(cluster)] * 2, "afterany:41")


@pytest.mark.parametrize("change", [
    {"comment": "a\nb"}, {"partition": "a\rb"}, {"extra": ["--comment=a\n#SBATCH --uid=0"]}, {"extra": ["rm -rf /"]},
    {"setup": ["a\nb"]}, {"srun_args": ["a\nb"]}, {"env": {"A B": "1"}}, {"env": {"é": "1"}},
    {"container": ContainerConfig("/i.sif", mounts=["a:b"])}, {"container": ContainerConfig("/i.sif", mounts=["/a:/b:/c"])},
    {"container": ContainerConfig("/i.sqsh", mounts=["/a,/b:/c"])},
])  # fmt: skip
def test_what_cannot_be_expressed_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        script(dataclasses.replace(PLAIN, **change))


@pytest.mark.parametrize("text", [
    "--job-name=foo", "--job-name foo", "--job-n=foo", "-J foo", "-Jfoo", "-J=foo", "-vJfoo", "--licenses=a:1 --job-name=foo",
    "-a 0-3", "--array=1", "--output=x", "-o x", "-e x", "--open-mode=append", "--nodes=2", "-N2", "-n 3", "--ntasks-per-node=1", "-c4",
    "--dependency=singleton", "--parsable", "--wrap=true", "--chdir=/", "-D/", "--export=NONE", "--comment=x", "--signal=USR2", "-W",
    "--requeue", "--no-requeue", "--gres=gpu:2", "--gres=nvme:1,gpu:h100:1", "-G 4", "-M other", "--container=/x", "--container-image=x",
    "-k", "--time=5", "-t5", "-p x", "--exclusive", "-s", "-x n1", "--time-min=5", "--tres-per-task=gpu:1", "--overcommit", "-O", "-vO",
    "--uid=1", "--gid=1", "--deadline=now+1hour", "--dead=1", "--distribution=cyclic", "-m cyclic", "--cluster-constraint=x",
])  # fmt: skip
def test_an_option_that_is_ours_is_refused_by_name_with_what_to_do_instead(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.extra holds '.*', and --[a-z-]+.* is Trireme's: .*; remove it$"):
        script(dataclasses.replace(PLAIN, extra=[text]))


@pytest.mark.parametrize("text", [
    "--licenses=scratch:1", "--begin=now+4", "-L a:1", "--nice", "--mem-per-cpu=2G", "--extra=x", "--prefer=h200", "--gres=nvme:1", "--gpu-bind=none",
    "--wait-all-nodes=1", "-b 16:00", "--bb='capacity=1'", '--wckey="x --job-name"',
])  # fmt: skip
def test_options_that_are_not_ours_are_passed_on(text: str) -> None:
    assert f"#SBATCH {text}\n" in script(dataclasses.replace(PLAIN, extra=[text]))


@pytest.mark.parametrize(
    "text",
    [
        "--nodes=1",
        "-n1",
        "--output=/dev/null",
        "--wait=3",
        "--kill-on-bad-exit",
        "--export=NONE",
        "--overcommit",
        "-O",
        "-t 5",
        "--time=5",
        "--nodelist=n1",
        "--relative=1",
        "--signal=USR1@9",
        "--container-image=x",
        "--tres-per-task=gpu:1",
        "--help",
    ],
)
def test_srun_keeps_the_ranks_as_they_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.srun_args holds .* is Trireme's: "):
        script(dataclasses.replace(PLAIN, srun_args=[text]))


@pytest.mark.parametrize("text", ["bash", "", " ", "-", "--", "---", "--=x", "--mpi none", "none", "--comment=a\n--label"])
def test_what_srun_would_run_in_place_of_the_ranks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.srun_args holds .*, which is not one option of srun on one line; write it as"):
        script(dataclasses.replace(PLAIN, srun_args=[text]))


@pytest.mark.parametrize("text", ["--mpi=none", "-v", "-lu", "--label", "--comment=two words"])
def test_other_options_of_srun_are_passed_on_as_one_word_each(text: str) -> None:
    assert shlex.quote(text) in script(dataclasses.replace(PLAIN, srun_args=[text]))


def test_no_option_that_is_passed_on_is_taken_for_an_abbreviation_of_ours() -> None:
    for name in PASSED_ON:
        check_extra(f"--{name}=x", gres=False)
    for name in SRUN_PASSED_ON:
        check_srun(f"--{name}=x")


@pytest.mark.parametrize("lines", [
    ["if true; then"], ["module load cuda", "echo 'a"], ["a=(", "echo"], ["echo $((1", "true"], ["cat <<EOF", "x"], ["true", "done", "true"], ["}"],
])  # fmt: skip
def test_lines_of_setup_that_bash_cannot_read_are_refused(lines: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.setup holds .*, where bash cannot read on \(.*\); correct it$") as refused:
        check_setup(tuple(lines))
    assert any(repr(line) in str(refused.value) for line in lines)


@pytest.mark.parametrize(
    "lines", [[], ["module load cuda"], ["if true; then", "export A=1", "fi"], ["exit 3 # is not run"], ["cat <<E", "x", "E"]]
)
def test_lines_of_setup_that_bash_can_read_are_taken(lines: list[str]) -> None:
    check_setup(tuple(lines))


def ended(tmp_path: Path, lines: list[str], **fields: Any) -> tuple[int, str]:
    """Exit code and log of a whole script, run by a real bash where srun is a stand-in that tells what reaches the ranks."""
    for name, does in {"srun": 'echo "ranks of $0: A=${A-} $*"', "scontrol": "echo n1; echo n2", "getent": "true"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    trial = dataclasses.replace(job(PLAIN), directory=tmp_path / "trial")
    path = tmp_path / "job.sh"
    path.write_text(job_script(SlurmJobPlan(dataclasses.replace(trial, cluster=dataclasses.replace(PLAIN, setup=lines, **fields)))))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    code = subprocess.run(["bash", str(path)], env=environment, cwd=tmp_path, timeout=60).returncode
    return code, (tmp_path / "trial" / "logs" / "attempt0.slurm.log").read_text()


@pytest.mark.parametrize(("lines", "failing"), [
    (["module load cuda/99"], "module load cuda/99"), (["source /nosuch"], "source /nosuch"), (["true", "cd /nosuch", "true"], "cd /nosuch"),
    (["false; export A=1"], "false; export A=1"), (["module() { return 1; }", "module load x"], "module load x"), (["A=$(false)"], "A=$(false)"),
    (["for i in 1 2; do", "[ $i = 1 ]", "done"], "[ $i = 1 ]"), (["false || exit 0"], "exit 0"), (["set -eu", "echo $nosuch"], "echo $nosuch"),
    (["cat <<E", "false", "E", "(exit 3)"], "(exit 3)"), (["echo 'return 3' >of_site", "source ./of_site"], "source ./of_site"),
])  # fmt: skip
def test_a_line_of_setup_that_fails_ends_the_job_and_is_the_reason(tmp_path: Path, lines: list[str], failing: str) -> None:
    code, log = ended(tmp_path, lines)
    assert EXIT_CODES[code][0] is Reason.CANNOT_START and "ranks of" not in log
    assert own_complaint(log).startswith(f"cluster.setup stops at: {failing} (exit code ")


@pytest.mark.parametrize("lines", [
    ["false || true", "! true", "if false; then", "true", "fi", "export A=1"], ["f() { false; true; }", "f", "A=1; export A"],
    ["echo 'false; export A=1' >of_site", "source ./of_site"], ["trap 'echo bye' EXIT", "set -euo pipefail", "IFS=,", "export A=1"],
    [f"{name}=7" for name in ("trial", "log", "code", "attempt", "nodes", "name", "warned", "ended", "ranks", "as_rank")] + ["export A=1"],
])  # fmt: skip
def test_what_setup_does_to_its_shell_reaches_the_ranks_and_not_the_rest_of_the_script(tmp_path: Path, lines: list[str]) -> None:
    code, log = ended(tmp_path, lines, health_check=True)
    given = f"{tmp_path}/trial/config.yaml --out {tmp_path}/trial --attempt 0"
    assert "attempt0.bad-nodes 4 n1 n2\n" in log
    assert code == 0 and ": A=1 " in log and given in log and ("bye" in log) == ("bye" in lines[0])


def test_lines_that_may_fail_come_after_the_others_and_end_nothing(tmp_path: Path) -> None:
    code, log = ended(tmp_path, ["export B=1"], setup_may_fail=["false", "cd /nosuch", "export A=$B"])
    assert code == 0 and ": A=1 " in log and "/nosuch" in log
    with pytest.raises(ConfigError, match=r"^cluster\.setup_may_fail holds '\}', where bash cannot read on"):
        check_setup(("}",), "setup_may_fail")


@pytest.mark.parametrize(("container", "key"), [
    (ContainerConfig(""), "image"), (ContainerConfig(" "), "image"), (ContainerConfig("-v"), "image"), (ContainerConfig("--x.sif"), "image"),
    (ContainerConfig("/i.sif", workdir="work"), "workdir"), (ContainerConfig("/i.sqsh", workdir=""), "workdir"),
])  # fmt: skip
def test_a_container_that_would_be_read_as_something_else_is_refused(container: ContainerConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster\.container\.{key}='.*; give "):
        script(dataclasses.replace(PLAIN, container=container))


def test_mounts_without_an_image_are_said_to_do_nothing() -> None:
    def remarks(container: ContainerConfig) -> list[str]:
        cluster = dataclasses.replace(PLAIN, container=container)
        return SlurmBackend(cluster).remarks([job(cluster)])

    assert remarks(ContainerConfig(mounts=["/a:/b"])) == ["cluster.container.mounts do nothing without cluster.container.image"]
    assert remarks(ContainerConfig("/i.sif", mounts=["/a:/b"])) == remarks(ContainerConfig()) == []


@pytest.mark.parametrize(("time", "seconds"), [
    ("60", 3600), (90, 5400), ("1:30", 90), ("4:00:00", 14400), ("1-0", 86400), ("1-2:30", 95400), ("2-0:0:1", 172801),
    ("UNLIMITED", math.inf), ("infinite", math.inf),
])  # fmt: skip
def test_a_time_limit_is_minutes_or_what_slurm_writes(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds
    assert f"#SBATCH --time={time}\n" in script(dataclasses.replace(PLAIN, time=time))


@pytest.mark.parametrize("time", ["0", "four hours", "1:2:3:4", "-5", "", "1.5", "0:00:00", "٤", "1:٣٠", "UNLIMITED:00"])
def test_what_is_no_time_limit_is_refused(time: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.time=.* is not a valid time limit; use minutes"):
        script(dataclasses.replace(PLAIN, time=time))


def test_a_comment_that_sbatch_cannot_read_is_refused_by_the_key_that_it_is_made_of() -> None:
    named = dataclasses.replace(job(PLAIN), sweep="a\nb")
    with pytest.raises(ConfigError, match=r"^sweep\.name='trireme sweep a\\nb' holds a line break"):
        job_script(SlurmJobPlan(named, CODE))
    with pytest.raises(ConfigError, match=r"^cluster\.comment='a\\nb' holds a line break"):
        script(dataclasses.replace(PLAIN, comment="a\nb"))


def test_torchrun_refuses_ranks_that_do_not_fill_nodes() -> None:
    with pytest.raises(ConfigError, match="6 ranks do not fill"):
        script(dataclasses.replace(PLAIN, launch="torchrun"), ranks=6)


def test_no_variable_that_the_script_itself_sets_may_be_given() -> None:
    """Found in the whole scripts, so that one that is added there is added to those that are refused."""
    text = "\n".join(path.read_text() for path in GOLDEN.glob("*.sh") if path.name != "array.sh")
    lines = [
        line
        for line in text.splitlines()
        if not line.startswith(("#", "  --", "export GREETING", "export A=", "export SRUN_", "export OMP_"))
    ]
    assigned = {name for line in lines for name in re.findall(r"(?:^|export |[; ]|until |do )([A-Za-z_]\w*)=(?!=)", line)}
    assigned |= set(re.findall(r"\bfor (\w+) in", text)) | set(re.findall(r"read -r (\w+)", text))
    assert assigned >= {"trireme_trial", "trireme_log", "MASTER_ADDR", "RANK", "trireme_as_rank", "trireme_warned"}
    assert assigned - {"PYTHONPATH", "NodeAddr"} <= OWN, "set by the script, and not refused"
    assert {name for name in assigned if name.islower()} <= {name for name in OWN if name.startswith("trireme_")}, (
        "set by cluster.setup too"
    )


@pytest.mark.parametrize("name", ["trireme_trial", "trireme_log", "IFS", "WORLD_SIZE", "MASTER_ADDR", "RANK", "SLURM_JOB_ID", "UID"])
def test_a_name_of_the_launchers_own_is_refused_whichever_key_gives_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text(f"{name}=x\n")
    file.chmod(0o600)
    for key, value in {"env": {name: "x"}, "env_from": str(file), "env_inherit": [name]}.items():
        with pytest.raises(ConfigError, match=rf"^cluster\.{key} has {name}, which is the launcher's own: .*; remove it"):
            script(dataclasses.replace(PLAIN, **{key: value}))


@pytest.mark.parametrize("name", ["x; rm y", "A=B", "A-B", "1A", "", "Ä"])
def test_what_no_variable_can_be_called_is_refused_whichever_key_gives_it(name: str) -> None:
    for key, value in {"env": {name: "x"}, "env_inherit": [name]}.items():
        with pytest.raises(ConfigError, match=rf"^cluster\.{key} has '{re.escape(name)}', which cannot name an environment variable; use"):
            script(dataclasses.replace(PLAIN, **{key: value}))


@pytest.mark.parametrize("name", ["SLURM_CPU_BIND", "SBATCH_ACCOUNT", "SRUN_CPUS_PER_TASK", "SQUEUE_FORMAT", "PMI_RANK", "PMIX_MCA_x"])
def test_what_sbatch_is_not_given_is_refused_to_be_inherited(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cluster\.env_inherit has {name}, which no job takes along: .*; remove it, or rename it$"):
        script(dataclasses.replace(PLAIN, env_inherit=[name]))
    with pytest.raises(ConfigError, match=r"^cluster\.env_inherit has TOKEN, and cluster\.env too; leave one of them out$"):
        script(dataclasses.replace(PLAIN, env_inherit=["TOKEN"], env={"TOKEN": "x"}))


@pytest.mark.parametrize(("key", "value"), [("env", {"TOKEN": "x"}), ("env_inherit", ["TOKEN"])])
def test_a_variable_is_given_once_whether_or_not_in_a_file(tmp_path: Path, key: str, value: Any) -> None:
    """Which of two values ranks would see depends on the container's runtime."""
    file = tmp_path / "variables"
    file.write_text("TOKEN=y\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=rf"^cluster\.env_from has TOKEN, and cluster\.{key} too; leave one of them out$"):
        script(dataclasses.replace(PLAIN, env_from=str(file), **{key: value}))


@pytest.mark.parametrize("code", [CODE, None], ids=["snapshot", "image"])
@pytest.mark.parametrize("name", ["PYTHONPATH", "OMP_NUM_THREADS", "SLURM_CONF", "SLURM_JWT", "MY_TOKEN"])
def test_what_is_inherited_is_left_as_it_is_on_its_way_to_the_ranks(name: str, code: Path | None) -> None:
    """The lines of the script before the ranks are run by a real bash, in the environment that sbatch gets."""
    cluster = dataclasses.replace(PLAIN, env_inherit=[name])
    lines = job_script(SlurmJobPlan(job(cluster), code))
    before = lines[lines.index("\nfi\n") + 4 : lines.index("# The ranks meet")]
    given = submission_environment({"PATH": os.environ["PATH"], name: "as it was"}, asked(cluster))
    program = f'{before}\nprintf %s "${{{name}-lost}}"'
    assert subprocess.run(["bash", "-c", program], env=given, capture_output=True, check=True, text=True).stdout == "as it was"


# ---------------------------------------------------------------- values are data


@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=30))
def test_any_environment_value_and_path_reaches_the_script_as_data(value: str) -> None:
    """The lines that set them are run by a real bash, and print exactly what was given."""
    cluster = dataclasses.replace(PLAIN, env={"HOSTILE": value})
    hostile = dataclasses.replace(job(cluster), directory=Path("/shared") / f"x{value}")
    lines = job_script(SlurmJobPlan(hostile))
    start, end = lines.index("trireme_trial="), lines.index("\ntrireme_attempt=")
    exported = lines[lines.index("export HOSTILE=") : lines.index("\n\n# The ranks meet")]
    program = f'{lines[start:end]}\n{exported}\nprintf "%s\\0%s" "$trireme_trial" "$HOSTILE"'
    shown = subprocess.run(["bash", "-c", program], capture_output=True, check=True).stdout.decode().split("\0")
    assert shown == [str(hostile.directory), value]


def test_only_values_that_need_it_are_quoted_for_sbatch() -> None:
    assert quote("n[1-4],n7", "cluster.nodelist") == "n[1-4],n7"
    assert quote('a\\b "c" $d', "cluster.comment") == '"a\\\\b \\"c\\" $d"'


@pytest.mark.parametrize(("ids", "words"), [
    ([], []), (["7"], ["7"]), (["7_3"], ["7_[3]"]), (["7_2", "9", "7_0", "7_1", "8_5"], ["9", "7_[0,1,2]", "8_[5]"]),
    ([f"7_{i}" for i in range(0, 1001)], [f"7_[{','.join(map(str, range(1000)))}]", "7_[1000]"]),
])  # fmt: skip
def test_jobs_of_an_array_are_named_together(ids: list[str], words: list[str]) -> None:
    assert together(ids) == words
    assert max(map(len, together([f"7_{i}" for i in range(0, 200_000, 2)]))) < 10_000


def test_defaults_of_a_site_hold_where_no_key_says_otherwise() -> None:
    site = {"SBATCH_ACCOUNT": "nlp", "SBATCH_PARTITION": "short", "SBATCH_TIMELIMIT": "5", "SBATCH_MEM_PER_CPU": "1G", "SBATCH_EXPORT": "NONE",
            "SBATCH_JOB_NAME": "x", "SBATCH_ARRAY_INX": "0-3", "SBATCH_GPUS": "1", "SBATCH_SIGNAL": "USR2@9", "SBATCH_NO_REQUEUE": "1"}  # fmt: skip
    kept = submission_environment(site, asked(PLAIN))
    assert kept == {name: site[name] for name in ("SBATCH_ACCOUNT", "SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_MEM_PER_CPU")}
    given = dataclasses.replace(PLAIN, partition="batch", time="60", mem_gb=4.0)
    assert submission_environment(site, asked(given)) == {"SBATCH_ACCOUNT": "nlp"}


@pytest.mark.parametrize(("ranks", "fields", "whole"), [
    (8, {}, True), (4, {}, True), (2, {}, False), (6, {}, False), (8, {"exclusive": False}, False), (2, {"exclusive": True}, True),
    (8, {"gpu_request": "none"}, False),
])  # fmt: skip
def test_trials_that_take_all_gpus_of_their_nodes_share_them_with_nobody(ranks: int, fields: dict[str, Any], whole: bool) -> None:
    cluster = dataclasses.replace(PLAIN, **fields)
    assert ("exclusive" in asked(cluster, ranks)) is whole


def test_nothing_of_an_outer_job_reaches_the_submitted_one() -> None:
    outer = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "x",
        "SBATCH_PARTITION": "p",
        "SRUN_X": "1",
        "RANK": "3",
        "MASTER_ADDR": "n1",
        "PMI_RANK": "0",
    }
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "a.b.c", "PATH": "/bin", "HOME": "/root", "MY_SLURM_NOTES": "1", "PRANK": "1"}
    assert clean_environment(outer | kept) == kept


# ---------------------------------------------------------------- variables by reference


def test_variables_of_a_file_are_read_by_the_job_as_they_stand_and_named_for_containers(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text('# ours\n\nA_TOKEN=it\'s $HOME "here"=x\nEMPTY=\nLAST=no line end')
    file.chmod(0o600)
    cluster = dataclasses.replace(PLAIN, env_from=str(file), env_inherit=["SHELL_TOKEN"], container=IMAGES["pyxis"])
    lines = script(cluster)
    assert "it's" not in lines and "A_TOKEN,EMPTY,LAST,SHELL_TOKEN" in lines
    start, end = lines.index("while IFS="), lines.index("unset trireme_line")
    program = lines[start:end] + '\nprintf "%s|%s|%s" "$A_TOKEN" "${EMPTY-unset}" "$LAST"'
    shown = subprocess.run(["bash", "-c", program], capture_output=True, check=True, text=True).stdout
    assert shown == 'it\'s $HOME "here"=x||no line end'


@pytest.mark.parametrize(("text", "mode", "words"), [
    ("A=1\nnot a variable\n", 0o600, "line 2 is not NAME=value"), ("export A=1\n", 0o600, "line 1 is not NAME=value"),
    ("A=1\r\n", 0o600, "line 1"), ("A=1\n", 0o640, "chmod 600"), (None, 0o600, "cannot be read"),
])  # fmt: skip
def test_a_file_of_variables_that_cannot_be_used_is_refused_without_its_values(
    tmp_path: Path, text: str | None, mode: int, words: str
) -> None:
    file = tmp_path / "secrets"
    if text is not None:
        file.write_bytes(text.encode())
        file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"^cluster\.env_from=.*{words}") as refused:
        script(dataclasses.replace(PLAIN, env_from=str(file)))
    assert "not a variable" not in str(refused.value)


# ---------------------------------------------------------------- what the files of a failed job tell


@pytest.mark.parametrize(("reason", "files", "wanted", "words"), [
    (Reason.NODE, {"bad-nodes": "n1\nn3\n"}, Reason.NODE, "ended: n1, n3"),
    (Reason.NODE, {"slurm.log": "srun: error: it is broken"}, Reason.NODE, "ended"),
    (Reason.ERROR, {"rank0.log": "step 1\nModuleNotFoundError: No module named 'torch'\n\n"}, Reason.CANNOT_START, "has no package torch"),
    (Reason.CONFIGURATION, {"rank0.log": "No module named trainer"}, Reason.CANNOT_START, "has no trainer"),
    (Reason.CONFIGURATION, {"slurm.log": "error: cluster.setup ended"}, Reason.CONFIGURATION, "ended"),
    (Reason.ERROR, {"slurm.log": "job 7\nerror: cluster.setup ended"}, Reason.CANNOT_START, "cluster.setup ended"),
    (Reason.ERROR, {"slurm.log": "srun: error: it is broken\nsrun: error: n1: task 0: Exited with exit code 1"}, Reason.ERROR, "ended: it is broken"),
    (Reason.ERROR, {"slurm.log": "srun: error: Timed out waiting for job step to complete"}, Reason.NODE, "Timed out"),
    (Reason.TIME_LIMIT, {"slurm.log": "srun: error: it is broken"}, Reason.TIME_LIMIT, "ended"),
    (Reason.ERROR, {}, Reason.ERROR, "ended"),
])  # fmt: skip
def test_a_failed_job_is_explained_by_its_files(reason: Reason, files: dict[str, str], wanted: Reason, words: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name, text in files.items():
        (tmp_path / "logs" / f"attempt2.{name}").write_text(text)
    backend, failed = SlurmBackend(PLAIN), JobState(Status.FAILED, reason, "ended", attempt=2)
    backend._watcher._known["array 7"] = failed
    (state,) = backend.poll([{"job_id": "7", "array": "array", "attempt": 1, "directory": str(tmp_path)}])
    assert state.reason is wanted and words in state.detail
    assert state.bad_nodes == (("n1", "n3") if "bad-nodes" in files else ())
