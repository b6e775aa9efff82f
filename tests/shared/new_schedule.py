"""What holds for a pipeline schedule that one new function describes. A program, run in a copy of the project that has it too."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from launcher.cli.main import main as trireme
from tests.shared.schedule_validator import validate
from trainer.shared.parallel.schedule import build
from trainer.shared.parallel.simulate import Times, makespan, simulate

SCHEDULE, SCHEMA = "trainer/shared/parallel/schedule.py", "trainer/shared/run/schema.py"
FUNCTION = '''
def eager(rank: int, stages: int, chunks: int, micro_batches: int) -> Iterator[Action]:
    """1F1B with a further forward per rank behind it, to hide transfers. In flight on rank r: at most ``2 (stages - r) - 1``."""
    forwards = [Action(Kind.FORWARD, 0, m) for m in range(micro_batches)]
    backwards = [Action(Kind.BACKWARD, 0, m) for m in range(micro_batches)]
    yield from _alternate(forwards, backwards, warm_up=2 * (stages - 1 - rank))


'''
EDITS = {
    SCHEDULE: [
        ("ORDERS: ", FUNCTION.lstrip() + "ORDERS: "),
        ('"zero_bubble": zero_bubble,', '"zero_bubble": zero_bubble, "eager": eager,'),
    ],
    SCHEMA: [('"zero_bubble", "sliced_1f1b")', '"zero_bubble", "sliced_1f1b", "eager")')],
}
"""All that is added: the function and its name, by file."""


def add(root: Path) -> int:
    """Adds the schedule to the project in ``root``; returns how many lines that takes."""
    lines = 0
    for file, edits in EDITS.items():
        text = (root / file).read_text()
        for before, after in edits:
            assert text.count(before) == 1, f"{file} has not one {before!r}"
            text = text.replace(before, after)
            lines += 1 if "\n" not in after else len(FUNCTION.strip().splitlines())
        (root / file).write_text(text)
    return lines


def check_order() -> None:
    """It is complete, ordered and free of deadlock, and hides transfers that 1F1B waits for."""
    for stages in range(1, 6):
        for micro_batches in range(1, 12):
            validate(build("eager", stages, 1, micro_batches), 1, micro_batches, most_in_flight=2 * stages - 1)
    slow = Times.equal(4, send=0.5)
    assert makespan(simulate(build("eager", 4, 1, 16), slow)) < makespan(simulate(build("1f1b", 4, 1, 16), slow))


def said(*words: str) -> str:
    with redirect_stdout(text := io.StringIO()):
        assert trireme([*words]) == 0
    return text.getvalue()


def check_plan() -> None:
    """The planner predicts layouts that have it."""
    wanted = ("layout.pipeline=2", "layout.schedule=eager", "hardware=h100", "cluster.gpus_per_node=2", "data=synthetic")
    rows = json.loads(said("plan", "model=gpt_tiny", "run.global_batch=8", *wanted, "--json"))["layouts"]
    assert rows and all(row["layout"]["schedule"] == "eager" for row in rows)


def check_training(folder: Path) -> None:
    """Two ranks train by it what they train by 1F1B."""
    run = ("run.steps=2", "run.warmup_steps=1", "run.global_batch=8", "layout.pipeline=2", "data=synthetic", "tracking.uri=null")
    model = ("model=gpt_tiny", "model.layers=2", "model.hidden=32", "model.heads=2", "model.seq=16", "model.vocab=64")
    said("train", "-m", "layout.schedule=1f1b,eager", f"sweep.dir={folder}", "cluster.gpus_per_node=2", *model, *run)
    results = [json.loads(path.read_text()) for path in folder.glob("trials/*/result.json")]
    schedules, losses = [result["layout"]["schedule"] for result in results], [result["losses"] for result in results]
    assert sorted(schedules) == ["1f1b", "eager"] and losses[0] == losses[1], (schedules, losses)


if __name__ == "__main__":
    check_order()
    check_plan()
    if len(sys.argv) > 1:
        check_training(Path(sys.argv[1]))
    print("all holds")
