"""The mirror in MLflow."""

from __future__ import annotations

from tests.planted.defect import Defect

MIRROR = "launcher/tracking/mirror.py"
LOGGED = "tests/tracking/test_loggers.py"

DEFECTS = [
    Defect(
        "a mirror that is started again makes a second run of a trial",
        MIRROR,
        "ours = [run for run in found if run.data.tags.get(PARENT, self._parent) == self._parent]",
        "ours = [run for run in found if PARENT not in run.data.tags]",
        "tests/tracking/test_mirror.py",
    ),
    Defect(
        "a sweep that is mirrored again has two parent runs",
        MIRROR,
        "parent = parents[0] if parents else client.create_run(",
        "parent = client.create_run(",
        "tests/tracking/test_mirror.py",
    ),
    Defect(
        "variables of the ranks are parameters of a run",
        "launcher/results/rows.py",
        'HIDDEN = ("tracking.", "cluster.env.", "cluster.hardware.calibration.")',
        'HIDDEN = ("tracking.", "cluster.hardware.calibration.")',
        "tests/tracking/test_parameters.py",
    ),
    Defect(
        "a trial that failed has finished",
        "launcher/tracking/names.py",
        'Status.FAILED: "FAILED",',
        'Status.FAILED: "FINISHED",',
        "tests/tracking/test_parameters.py",
    ),
    Defect(
        "event files keep no word of steps that were run again",
        "launcher/tracking/loggers/tensorboard.py",
        'if line["step"] <= run.step:',
        'if line["step"] < 0:',
        LOGGED,
    ),
    Defect(
        "steps that come after a look are logged from the start again",
        "launcher/tracking/loggers/tensorboard.py",
        "        run.offset = tail.offset\n",
        "        run.offset = 0\n",
        LOGGED,
    ),
    Defect(
        "exported trials show where they are tracked",
        "launcher/results/rows.py",
        'HIDDEN = ("tracking.", ',
        "HIDDEN = (",
        LOGGED,
    ),
]
