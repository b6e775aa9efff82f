"""Slurm: states, scripts, arrays."""

from __future__ import annotations

from tests.planted.defect import Defect

STATES, SCRIPT, SUBMISSION = (
    "launcher/backends/slurm/states.py",
    "launcher/backends/slurm/script.py",
    "launcher/backends/slurm/submission.py",
)
TEMPLATE = "launcher/backends/slurm/job.sh.jinja"
WORDS = "tests/backends/test_slurm_words.py tests/backends/test_slurm_script.py"
ALLOCATION_BACKEND, ALLOCATION_FILES, ALLOCATION_STEPS = (
    f"launcher/backends/slurm_allocation/{name}.py" for name in ("backend", "allocation", "steps")
)
STEPS_TESTS = "tests/backends/test_slurm_allocation.py"

DEFECTS = [
    Defect(
        "a preempted job has failed of itself",
        STATES,
        '"PREEMPTED": (Status.FAILED, Reason.PREEMPTED, "preempted"),',
        '"PREEMPTED": (Status.FAILED, Reason.ERROR, "preempted"),',
        "tests/backends/test_slurm_words.py",
    ),
    Defect(
        "a requeued job has ended",
        STATES,
        "if row.state in WAITING or not (row.ended or row.state in ACTIVE):",
        "if row.state in WAITING - {'REQUEUED'} or not (row.ended or row.state in ACTIVE | {'REQUEUED'}):",
        "tests/backends/test_slurm_words.py",
    ),
    Defect(
        "a signal is read as an exit code",
        STATES,
        "status >> 8, status & 127)",
        "status & 127, status >> 8)",
        "tests/backends/test_slurm_words.py",
    ),
    Defect(
        "a job that Slurm accounts for a second time counts as one start",
        STATES,
        "runs = (*before.runs, before) if before is not None and before.name == name else ()",
        "runs = () if before is not None and before.name == name else ()",
        "tests/backends/test_slurm_words.py",
    ),
    Defect(
        "a job that Slurm ended by itself was cancelled by a person",
        STATES,
        'BY_SLURM if words == "CANCELLED" else words.split(" ")[0]',
        'words.split(" ")[0]',
        "tests/backends/test_slurm_words.py",
    ),
    Defect(
        "a line of setup that fails is passed over",
        TEMPLATE,
        "  exit {{ codes.SETUP }}\n",
        "",
        "tests/backends/test_slurm_script.py",
    ),
    Defect(
        "how setup splits words holds for the rest of the script",
        TEMPLATE,
        "unset IFS\n",
        "",
        "tests/backends/test_slurm_script.py",
    ),
    Defect(
        "a single job is asked for as an array",
        SUBMISSION,
        "self._submit_together(group[:size], code, size > 1)",
        "self._submit_together(group[:size], code, True)",
        "tests/backends/test_slurm_odd_answers.py",
    ),
    Defect(
        "an array runs one task too many",
        SCRIPT,
        'array = f"0-{len(jobs) - 1}"',
        'array = f"0-{len(jobs)}"',
        "tests/backends/test_slurm_script.py",
    ),
    Defect(
        "a value with a blank is two words of a job script",
        TEMPLATE,
        "export {{ name }}={{ value | sh }}",
        "export {{ name }}={{ value }}",
        WORDS,
    ),
    Defect(
        "the last rank's node counts ranks that it has not",
        TEMPLATE,
        "LOCAL_WORLD_SIZE=$((trireme_rest < {{ per_node }} ? trireme_rest : {{ per_node }}))",
        "LOCAL_WORLD_SIZE={{ per_node }}",
        WORDS,
    ),
    Defect(
        "secrets of a file are printed into the log",
        TEMPLATE,
        "case $trireme_line in '' | '#'*) ;; *) export \"$trireme_line\" ;; esac",
        "case $trireme_line in '' | '#'*) ;; *) export \"$trireme_line\"; echo \"$trireme_line\" ;; esac",
        WORDS,
    ),
    Defect(
        "all trials of an array have its first index",
        SUBMISSION,
        '"index": index if as_array else None,',
        '"index": 0 if as_array else None,',
        "tests/backends/test_slurm_odd_answers.py",
    ),
    Defect(
        "a trial that was done before it could be cancelled counts as cancelled",
        ALLOCATION_BACKEND,
        "if code is not None and entry.cancelled and code != 0:",
        "if code is not None and entry.cancelled:",
        STEPS_TESTS,
    ),
    Defect(
        "a trial fails for good because the time of its allocation is over",
        ALLOCATION_STEPS,
        "return Status.FAILED, Reason.PREEMPTED,",
        "return Status.FAILED, Reason.TIME_LIMIT,",
        STEPS_TESTS,
    ),
    Defect(
        "a trial that was never handed over is found",
        ALLOCATION_FILES,
        "return handle if entry_of(handle).exists else None",
        "return handle",
        STEPS_TESTS,
    ),
    Defect(
        "a trial puts the whole allocation back into the queue",
        "launcher/backends/slurm/script.py",
        "requeues=plan.requeues,",
        "requeues=100,",
        STEPS_TESTS,
    ),
    Defect(
        "a connection that ssh cannot make is taken for an answer of Slurm",
        "launcher/backends/slurm/login.py",
        "if self.host is None or code != _SSH_FAILED:",
        "if True:",
        "tests/backends/test_slurm_ssh.py",
    ),
    Defect(
        "a trial is asked about at the login node that the command names now",
        "launcher/backends/slurm/cluster.py",
        'found_by: ClassVar[tuple[str, ...]] = (*ClusterConfig.found_by, "submit")',
        "found_by: ClassVar[tuple[str, ...]] = ()",
        "tests/backends/test_slurm_ssh.py",
    ),
    Defect(
        "a trial smaller than a segment asks for a whole one",
        "launcher/backends/slurm/options.py",
        "size := min(wanted, plan.nodes)",
        "size := wanted",
        "tests/backends/test_slurm_script.py",
    ),
    Defect(
        "a dry run asks a login node after it has printed the script",
        "launcher/sweep/dry_run.py",
        'if mode == "server":  # before',
        'if print(request.text) or mode == "server":  # before',
        "tests/backends/test_slurm_ssh.py",
    ),
    Defect(
        "steps of an allocation look like a job of their own",
        "launcher/backends/slurm_allocation/steps.py",
        """def alone(self) -> bool:
        return False""",
        """def alone(self) -> bool:
        return True""",
        STEPS_TESTS,
    ),
]
