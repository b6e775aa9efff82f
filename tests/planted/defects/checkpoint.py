"""Checkpoints: what is written, what is read under another layout, what a run goes on from."""

from __future__ import annotations

from tests.planted.defect import Defect

CHECKPOINTS, SHARDS, FOLDER = "trainer/checkpoint/checkpoints.py", "trainer/checkpoint/shards.py", "trainer/checkpoint/folder.py"
RESUME = "tests/checkpoint/test_any_layout.py tests/checkpoint/test_resume.py"

DEFECTS = [
    Defect(
        "a run that names a checkpoint continues the newest",
        "trainer/shared/records/resume.py",
        "wanted := [one for one in found if one.step == at]",
        "wanted := [one for one in found if one.step >= at]",
        "tests/checkpoint/test_resume.py",
    ),
    Defect(
        "moments are not restored",
        CHECKPOINTS,
        "{name: state[: piece.numel] for name, state in owned.states.items()}",
        "{name: state[: piece.numel] for name, state in owned.states.items() if name == 'weight'}",
        RESUME,
    ),
    Defect(
        "a resumed optimizer counts its updates from 0",
        "trainer/step.py",
        "        self.optimizer.begin(self.updates)\n",
        "",
        RESUME,
    ),
    Defect(
        "a resumed run reads samples again",
        "trainer/step.py",
        'self.samples, self.updates = int(extra["samples"]), int(extra["updates"])',
        'self.samples, self.updates = int(extra["updates"]), int(extra["updates"])',
        RESUME,
    ),
    Defect(
        "only one rank's pieces are saved where all save",
        "trainer/state/bucket.py",
        "self.keeps = settings.data_index < settings.factors.optimizer",
        "self.keeps = settings.data_index == 0",
        RESUME,
    ),
    Defect(
        "a piece that begins inside a row loses it",
        "trainer/checkpoint/pieces.py",
        "row if start % row else 0)",
        "start % row)",
        "tests/checkpoint/test_pieces.py",
    ),
    Defect(
        "an overlap is read from where it is written",
        SHARDS,
        "_view(source, at, box)[inside(shared, box)].to(target)",
        "_view(source, at, box)[inside(shared, box)].to(target).flip(0)",
        RESUME,
    ),
    Defect(
        "a damaged piece is taken",
        SHARDS,
        "if len(content) != size or zlib.crc32(content) != checksums[state]:",
        "if len(content) != size:",
        "tests/checkpoint/test_any_layout.py",
    ),
    Defect(
        "the newest checkpoints are removed",
        FOLDER,
        "for old in self.found()[count:]:",
        "for old in self.found()[:-count]:",
        "tests/checkpoint/test_folder.py",
    ),
    Defect(
        "a start that was overtaken still commits",
        FOLDER,
        "        if newest > self.number:\n",
        "        if newest > self.number + 1:\n",
        "tests/checkpoint/test_folder.py",
    ),
    Defect(
        "a checkpoint of other data is continued",
        "trainer/shared/records/resume.py",
        "if saved is None else [name for name, value in own.items() if saved.get(name, value) != value]",
        "if saved is None else [name for name, value in own.items() if saved.get(name, value) != value and name != 'corpus']",
        "tests/config/test_resume_refused.py tests/checkpoint/test_resume.py",
    ),
]
