"""What Slurm says and what we make of it: states, reasons and errors, from texts as Slurm 22.05 prints them. No cluster is needed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest

from launcher.backends.slurm.cluster import SlurmCluster
from launcher.backends.slurm.errors import REFUSALS, SchedulerUnavailable, SubmissionRejected, complaint, explain, unanswered
from launcher.backends.slurm.states import ENDED, EXIT_CODES, earlier, expand, judge, read_accounts, read_queue
from launcher.trials.job import JobState
from trainer.shared.records.outcome import Reason, Status

NAME = "trireme-demo-89abcdef"


def queued(state: str, reason: str = "None", nodes: str = "", restarts: int = 0, wait_status: int = 0) -> JobState:
    line = f"12_3|{NAME}|{state}|{reason}|2026-11-20T10:13:14|{nodes}|{restarts}|{wait_status}|"
    return judge(read_queue(line)["12_3"], attempt=1)


def accounted(*lines: str) -> JobState:
    return judge(read_accounts("\n".join(lines))["12_3"], attempt=0)


@pytest.mark.parametrize(("state", "status"), [
    ("PENDING", Status.SUBMITTED), ("CONFIGURING", Status.SUBMITTED), ("REQUEUED", Status.SUBMITTED), ("RUNNING", Status.RUNNING),
    ("COMPLETING", Status.RUNNING), ("SUSPENDED", Status.RUNNING), ("COMPLETED", Status.DONE), ("A_WORD_OF_THE_FUTURE", Status.SUBMITTED),
])  # fmt: skip
def test_states_of_the_queue(state: str, status: Status) -> None:
    assert queued(state).status is status
    begins = datetime(2026, 11, 20, 10, 13, 14).timestamp()  # by the queue: it has, or is expected to
    assert (queued(state).expected if status is Status.SUBMITTED else queued(state).started) == begins


@pytest.mark.parametrize(("state", "reason"), [
    ("TIMEOUT", Reason.TIME_LIMIT), ("DEADLINE", Reason.TIME_LIMIT), ("PREEMPTED", Reason.PREEMPTED), ("NODE_FAIL", Reason.NODE),
    ("BOOT_FAIL", Reason.NODE), ("OUT_OF_MEMORY", Reason.HOST_MEMORY), ("CANCELLED", Reason.CANCELLED),
])  # fmt: skip
def test_every_bad_end_has_its_reason_and_names_its_nodes(state: str, reason: Reason) -> None:
    end = queued(state, nodes="n[1-2]")
    assert (end.reason, end.nodes) == (reason, ("n1", "n2")) and "n[1-2]" in end.detail
    assert end.status is (Status.STOPPED if reason is Reason.CANCELLED else Status.FAILED)


@pytest.mark.parametrize(("nodes", "names"), [
    ("", ""), ("(null)", ""), ("n1", "n1"), ("n[1-3,7],m2", "n1 n2 n3 n7 m2"), ("n[08-11]", "n08 n09 n10 n11"), ("n[8-11]", "n8 n9 n10 n11"),
    ("r[1-2]n[08-09],login,x-[3,5-6]", "r1n08 r1n09 r2n08 r2n09 login x-3 x-5 x-6"), ("a[01,1]-ib", "a01-ib a1-ib"),
])  # fmt: skip
def test_a_node_list_is_read_as_slurm_writes_it(nodes: str, names: str) -> None:
    assert expand(nodes) == names.split()


@pytest.mark.parametrize(
    ("code", "reason"),
    [(1, Reason.ERROR), (2, Reason.CONFIGURATION), (69, Reason.NODE), (75, Reason.PREEMPTED), (127, Reason.CANNOT_START)],
)
def test_a_failed_job_is_judged_by_its_exit_code_in_queue_and_accounting_alike(code: int, reason: Reason) -> None:
    assert queued("FAILED", "NonZeroExitCode", "n1", wait_status=code << 8).reason is reason
    assert accounted(f"12_3|{NAME}|FAILED|{code}:0|2026-11-20T10:13:14|2026-11-20T10:23:14|n1|None").reason is reason


def test_a_job_that_its_node_could_not_start_says_so() -> None:
    assert queued("FAILED", "JobLaunchFailure", "n1", wait_status=53).reason is Reason.CANNOT_START


def test_what_was_put_back_into_the_queue_waits_and_says_so() -> None:
    again = queued("PENDING", "BeginTime", restarts=2)
    assert again.status is Status.SUBMITTED and "put back" in again.detail


def test_accounting_counts_the_runs_of_a_job_and_its_last_one_counts() -> None:
    runs = [f"12_3|{NAME}|{state}|0:0|2026-11-20T10:13:14|2026-11-20T10:23:14|n1|None" for state in ("REQUEUED", "NODE_FAIL", "COMPLETED")]
    (row,) = read_accounts("\n".join(runs)).values()
    assert (row.restarts, row.state) == (2, "COMPLETED")


def test_an_older_job_of_the_same_id_is_no_earlier_run() -> None:
    older, ours = (f"12_3|{name}|COMPLETED|0:0|2026-11-20T10:13:14|2026-11-20T10:23:14|n1|None" for name in ("other", NAME))
    assert read_accounts(f"{older}\n{ours}")["12_3"].restarts == 0


def test_a_step_over_its_memory_limit_explains_a_failed_job() -> None:
    lines = [f"12_3|{NAME}|FAILED|1:0|2026-11-20T10:13:14|2026-11-20T10:23:14|n1|None", "12_3.batch|batch|FAILED|1:0|2026-11-20T10:13:14|2026-11-20T10:23:14|n1|None",
             "12_3.0|sh|OUT_OF_MEMORY|0:125|2026-11-20T10:13:14|2026-11-20T10:23:14|n1|None"]  # fmt: skip
    assert accounted(*lines).reason is Reason.HOST_MEMORY


def test_who_cancelled_a_job_is_not_part_of_its_state() -> None:
    assert accounted(f"12_3|{NAME}|CANCELLED by 1000|0:15|Unknown|2026-11-20T10:23:14|None assigned|None").reason is Reason.CANCELLED


def test_a_job_that_nobody_cancelled_was_ended_by_slurm_and_is_worth_another_attempt() -> None:
    """Where a controller has lost its state, the accounting calls its jobs CANCELLED, without saying by whom."""
    orphan = accounted(f"12_3|{NAME}|CANCELLED|0:0|2026-11-20T10:13:14|2026-11-20T10:23:14|n1|None", "12_3.batch|batch|CANCELLED|0:15||||")
    assert (orphan.status, orphan.reason, orphan.nodes) == (Status.FAILED, Reason.NODE, ("n1",)) and orphan.reason.retryable
    assert accounted(f"12_3|{NAME}|CANCELLED|0:0|None|2026-11-20T10:23:14|None assigned|Dependency").reason is Reason.UPSTREAM


def test_every_run_that_slurm_followed_by_another_is_known_with_its_end_and_its_hours() -> None:
    lines = [f"12_3|{NAME}|{state}|0:0|2026-11-20T1{hour}:00:00|2026-11-20T1{hour}:30:00|n{hour}|None"
             for hour, state in enumerate(("REQUEUED", "NODE_FAIL", "PREEMPTED", "RUNNING"))]  # fmt: skip
    ends = earlier(read_accounts("\n".join(lines))["12_3"].runs, first=4, newest=7)
    assert [(end.attempt, end.reason, end.nodes) for end in ends] == [
        (4, Reason.PREEMPTED, ("n0",)), (5, Reason.NODE, ("n1",)), (6, Reason.PREEMPTED, ("n2",))
    ]  # fmt: skip
    assert [(end.ended or 0.0) - (end.started or 0.0) for end in ends] == [1800.0] * 3


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED"])
def test_a_job_that_stands_still_says_so(state: str) -> None:
    halted = queued(state)
    assert halted.status is Status.RUNNING and "suspended" in halted.detail and not queued("RUNNING").detail


@pytest.mark.parametrize("why", ["PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"])
def test_waiting_for_ever_is_a_failure_to_start(why: str) -> None:
    state = queued("PENDING", why)
    assert state.reason is Reason.CANNOT_START and "cluster." in state.detail


@pytest.mark.parametrize("state", ["PENDING", "CANCELLED"])
def test_a_job_after_one_that_failed_is_told_from_one_that_somebody_cancelled(state: str) -> None:
    assert queued(state, "DependencyNeverSatisfied").reason is Reason.UPSTREAM
    assert queued("CANCELLED", "Dependency").reason is Reason.CANCELLED


@pytest.mark.parametrize("why", ["ReqNodeNotAvail, UnavailableNodes:n1", "QOSMaxJobsPerUserLimit", "PartitionDown", "Resources"])
def test_waiting_that_may_end_is_no_failure_and_says_what_for(why: str) -> None:
    state = queued("PENDING", why)
    assert state.status is Status.SUBMITTED and why in state.detail


@pytest.mark.parametrize("why", [
    "QOSMaxWallDurationPerJobLimit", "QOSMaxNodePerJobLimit", "AssocMaxCpuPerJobLimit", "QOSMaxGRESPerNode", "QOSMinGRES", "QOSMinCpuNotSatisfied",
    "AssocMaxWallDurationPerJobLimit", "QOSMaxCpuMinutesPerJobLimit",
])  # fmt: skip
def test_a_limit_that_the_job_alone_exceeds_is_a_failure_to_start(why: str) -> None:
    state = queued("PENDING", why)
    assert state.reason is Reason.CANNOT_START and why in state.detail and "cluster.qos" in state.detail


@pytest.mark.parametrize("why", ["QOSMaxJobsPerUserLimit", "AssocGrpGRES", "QOSMaxGRESPerUser", "JobHeldUser", "PartitionDown"])
def test_a_word_of_slurms_that_says_little_is_explained(why: str) -> None:
    state = queued("PENDING", why)
    assert state.status is Status.SUBMITTED and state.detail.startswith(f"waits: {why} (")


def test_a_job_that_only_completes_is_told_from_one_that_runs() -> None:
    assert queued("COMPLETING").clearing_up and not queued("RUNNING").clearing_up


def test_every_failure_detail_is_one_line() -> None:
    assert all("\n" not in detail for _, _, detail in ENDED.values()) and all("\n" not in detail for _, detail in EXIT_CODES.values())


# ---------------------------------------------------------------- odd answers

QUEUED = f"12_3|{NAME}|FAILED|NonZeroExitCode|2026-11-20T10:13:14|n1|1|256|"
ACCOUNTED = f"12_3|{NAME}|FAILED|1:0|2026-11-20T10:13:14|2026-11-20T10:23:14|n1|None"


@pytest.mark.parametrize("notice", ["Welcome to ALPHA", "", "maintenance|on|Friday", "a|b|c|d|e|f|g|h|i", "slurm: 3|4|5"])
def test_a_line_that_is_no_row_is_left_out(notice: str) -> None:
    for text in ("{notice}\n{row}", "{row}\n{notice}"):
        assert read_queue(text.format(notice=notice, row=QUEUED)) == read_queue(QUEUED)
        assert read_accounts(text.format(notice=notice, row=ACCOUNTED)) == read_accounts(ACCOUNTED)


@pytest.mark.parametrize("cell", ["N/A", "", "Unknown", "-1", "²", "1.5"])
def test_a_cell_that_is_no_number_is_one_that_slurm_does_not_know(cell: str) -> None:
    row = read_queue(f"12_3|{NAME}|RUNNING|None|{cell}|n1|{cell}|{cell}|")["12_3"]
    assert (row.started, row.restarts, row.exit_code, row.exit_signal) == (None, 0, 0, 0)
    end = accounted(f"12_3|{NAME}|FAILED|{cell}|{cell}|{cell}|n1|None")
    assert end.reason is Reason.ERROR and "does not know its exit code" in end.detail


@pytest.mark.parametrize("read", [read_queue, read_accounts])
def test_an_answer_without_a_row_is_silence_and_not_an_empty_queue(read: Callable[[str], object]) -> None:
    with pytest.raises(SchedulerUnavailable, match="cannot be read: 'Welcome'"):
        read("Welcome\n")
    assert read("") == {}


# ---------------------------------------------------------------- errors

SBATCH = "sbatch: error: Batch job submission failed: "
POLICY = SBATCH + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(("words", "key"), [
    ("sbatch: error: invalid partition specified: nopart\n" + SBATCH + "Invalid partition name specified", "cluster.partition=nopart"),
    (SBATCH + "More processors requested than permitted", "cluster.nodes=3"),
    (SBATCH + "Node count specification invalid", "cluster.nodes=3"),
    (SBATCH + "Requested time limit is invalid (missing or exceeds some limit)", "cluster.time=7"),
    (SBATCH + "Requested node configuration is not available", "gpu_type=b300"),
    ("sbatch: error: Invalid generic resource (gres) specification", "cluster.gpu_type=b300"),
    ("sbatch: error: Memory specification can not be satisfied\n" + SBATCH + "Requested node configuration is not available", "cluster.mem_gb=5.0"),
    (SBATCH + "Invalid feature specification", "cluster.constraint=ib"),
    (SBATCH + "Invalid node name specified", "cluster.nodelist=n77"),
    (SBATCH + "Invalid account or account/partition combination specified", "cluster.account=poor"),
    (SBATCH + "Invalid qos specification", "cluster.qos=royal"),
    ("sbatch: error: QOSMaxNodePerJobLimit\n" + POLICY, "cluster.qos=royal"),
    (POLICY, "a limit of the account (Batch job submission failed: Job violates"),
    (SBATCH + "Invalid job array specification", "MaxArraySize"),
    (SBATCH + "Job dependency problem", "cluster.dependency=perhaps"),
    (SBATCH + "Requested reservation is invalid", "cluster.reservation=party"),
    (SBATCH + "Required partition not available (inactive or drain)", "cluster.partition=nopart"),
    ("sbatch: unrecognized option '--x'\nTry \"sbatch --help\" for more information", "cluster.extra"),
    ("sbatch: error: Invalid --signal specification", "--signal"),
    ("sbatch: error: Invalid --time specification", "--time"),
    ("sbatch: error: Unable to open file /shared/runs/arrays/a/array.sh", "sweep.dir"),
    ("sbatch: error: This does not look like a batch script.  The first\nsbatch: error: line must start with #! followed by the path", "sweep.dir"),
    ("sbatch: error: Batch script is empty!", "sweep.dir"),
    ("sbatch: error: AssocMaxCpuPerJobLimit\n" + POLICY, "a limit of the account (AssocMaxCpuPerJobLimit"),
    ("scontrol: error: _parse_next_key: Parsing error at unrecognized key: X\nscontrol: fatal: Unable to process configuration file", "SLURM_CONF"),
    ("sbatch: error: Batch script contains DOS line breaks (\\r\\n)", "cluster.setup"),
    ("sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsbatch: fatal: Could not establish a configuration source", "SLURM_CONF"),
])  # fmt: skip
def test_a_refusal_is_one_line_with_the_key_its_value_and_a_remedy(words: str, key: str) -> None:
    cluster = SlurmCluster(
        partition="nopart", nodes=3, time=7, gpu_type="b300", mem_gb=5.0, constraint="ib", nodelist="n77", account="poor", qos="royal",
        dependency="perhaps", reservation="party",
    )  # fmt: skip
    error = explain(words, cluster)
    assert isinstance(error, SubmissionRejected)
    assert key in str(error) and "\n" not in str(error) and "; " in str(error) and "sbatch: error" not in str(error)


@pytest.mark.parametrize("words", [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    'sbatch: error: If munged is up, restart with --num-threads=10\nsbatch: error: Munge encode failed: Failed to access "/run/munge.sock": '
    "No such file or directory (Did you start munged?)\n" + SBATCH + "Protocol authentication error",
    SBATCH + "Zero Bytes were transmitted or received",
    SBATCH + "Socket timed out on send/recv operation",
    SBATCH + "Protocol authentication error",
    SBATCH + "Unable to contact slurm controller (connect failure)",
    "scancel: error: Kill job error on job id 7: Unable to contact slurm controller (connect failure)",
    "slurm_load_jobs error: Slurm backup controller in standby mode",
    "sacct: error: Problem talking to the database: Connection refused",
    SBATCH + "Resource temporarily unavailable",
])  # fmt: skip
def test_a_controller_that_is_away_is_silence_not_refusal(words: str) -> None:
    assert isinstance(explain(words, SlurmCluster()), SchedulerUnavailable)


@pytest.mark.parametrize("words", [
    *(f"sbatch: error: {limit}\n{POLICY}" for limit in (
        "QOSMaxSubmitJobPerUserLimit", "QOSMaxSubmitJobPerAccountLimit", "QOSGrpSubmitJobsLimit", "QOSMaxJobsPerUserLimit",
        "AssocMaxSubmitJobLimit", "AssocGrpSubmitJobsLimit", "AssocMaxJobsLimit",
    )),
    SBATCH + "I/O error writing script/environment to file",
])  # fmt: skip
def test_a_limit_on_how_many_jobs_there_are_is_waited_for_in_slurms_words(words: str) -> None:
    error = explain(words, SlurmCluster())
    assert isinstance(error, SchedulerUnavailable) and str(error).startswith("Slurm takes no more jobs for now: ")
    assert words.splitlines()[0].rpartition(": ")[2] in str(error)


@pytest.mark.parametrize("limit", [
    "QOSMaxCpuPerJobLimit", "QOSMaxWallDurationPerJobLimit", "QOSMaxNodePerJobLimit", "AssocMaxNodePerJobLimit", "QOSMinCpuNotSatisfied", "QOSGrpNodeLimit",
])  # fmt: skip
def test_a_limit_that_a_job_exceeds_alone_is_a_refusal(limit: str) -> None:
    assert isinstance(explain(f"sbatch: error: {limit}\n{POLICY}", SlurmCluster()), SubmissionRejected)


@pytest.mark.parametrize("words", ["Invalid qos specification", "QOSMaxCpuPerJobLimit"])
def test_a_quality_of_service_that_nobody_named_is_the_sites(words: str) -> None:
    assert "this site gives a job without cluster.qos" in str(explain(SBATCH + words, SlurmCluster()))
    assert "null" not in str(explain(SBATCH + words, SlurmCluster()))


def test_words_that_nobody_foresaw_are_passed_on() -> None:
    assert "the moon is full" in str(explain(SBATCH + "the moon is full", SlurmCluster()))


def test_every_cause_names_only_keys_that_exist() -> None:
    values = dict.fromkeys(vars(SlurmCluster()), "x")
    assert all(cause.format(**values, words="x") for _, cause, _ in REFUSALS)


@pytest.mark.parametrize(("log", "words"), [
    ("job 7 on n1, attempt 0\nslurmstepd: error: pyxis: failed to create container filesystem for image: X\n"
     "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\nsrun: error: n1: task 0: Exited with exit code 1\n",
     "pyxis: failed to create container filesystem for image: X"),
    ("job 7 on n1, attempt 0\nslurmstepd-n1: error: pyxis: container start failed with error code: 1\n"
     "slurmstepd-n1: error: pyxis: printing enroot log file:\nslurmstepd-n1: error: pyxis:     [INFO] Extracting squashfs filesystem...\n"
     "slurmstepd-n1: error: pyxis:     \nslurmstepd-n1: error: pyxis:     created 8 directories\n"
     "slurmstepd-n1: error: pyxis:     enroot-mount: failed to create file: /c/x: Read-only file system\n"
     "slurmstepd-n1: error: pyxis: container was not started successfully by another task\n",
     "pyxis:     enroot-mount: failed to create file: /c/x: Read-only file system"),
    ("job 7 on n1, attempt 0\nFATAL:   could not open image /shared/x.sif\nsrun: error: n1: task 0: Exited with exit code 255\n",
     "could not open image /shared/x.sif"),
    ("job 7 on n1, attempt 0\nsrun: error: n2: task 1: Killed\nsrun: error: n2: task 0: Exited with exit code 1\n", ""),
])  # fmt: skip
def test_what_a_job_complains_of_is_told_from_what_follows_from_it(log: str, words: str) -> None:
    assert complaint(log) == words


def test_a_step_that_a_silent_node_keeps_open_is_told_from_one_whose_rank_failed() -> None:
    failed = "job 7 on n1, attempt 0\nsrun: error: n1: task 0: Exited with exit code 1\n"
    assert unanswered(complaint(failed + "srun: error: Timed out waiting for job step to complete\n"))
    assert not unanswered(complaint(failed))
