"""A program that prints the log of another trainer with known step times, or fails as one: its behaviour follows from the micro-batch that it
is told. It looks for the number wherever the trainer is told it: in its words, or in a file that they name."""

import json
import os
import re
import sys
import time
from pathlib import Path

plan = json.loads(Path(os.environ["PLAN"]).read_text())
told = " ".join(
    [*sys.argv[1:], *(Path(word).read_text() for word in re.split("[ =]", " ".join(sys.argv[1:])) if word and Path(word).is_file())]
)
micro = int(re.search(plan["micro"], told)[1])
what = plan["behaviour"].get(str(micro), 1.0)
if what == "out of memory":
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
if what == "configuration":
    sys.exit("train.py: error: unrecognized arguments: --what")
if what == "hang":
    print("begun", flush=True)
    time.sleep(1000)
if int(os.environ["RANK"]) != (int(os.environ["WORLD_SIZE"]) - 1 if plan["reports"] == "last" else 0):
    sys.exit(0)
for step in range(1, plan["steps"] + 1):
    seconds = 1.0 if what == "nan" else float(what)
    values = {
        "step": step,
        "ms": 1000 * seconds,
        "tps_rank": plan["tokens"] / seconds / plan["ranks"],
        "samples": plan["samples"] / seconds,
    }
    values["loss"] = "nan" if what == "nan" else f"{9 - step / 10:.4f}"
    if plan["sleeps"]:
        time.sleep(seconds - 0.95)  # far apart, as a busy machine blurs them
    for line in plan["log"]:
        print(line.format(**values), flush=True)
