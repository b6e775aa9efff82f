"""How many held-out answers each method of tuning gets right: ``python -m benchmarks.tuned_answers``.

The questions are those about lines of Python's standard library (``data.source=stdlib``). A small model learns to answer them in two forms,
of which a word before the line names one. Then each method tunes it to one of the forms, without that word, with the same examples in the
same order and as many steps. What is held out no run has seen. A match is exact: each token of the answer and the end behind it is the
likeliest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.farm import Farm
from trainer.data.prepare import prepare
from trainer.shared.corpora.questions import questions
from trainer.shared.run.schema import DataConfig

FORMS = {"short": "{}", "whole": "it is {}"}
TEMPLATES = {"tuned": "{context}\n# {question} {answer}", "base": "{form}\n{context}\n# {question} {answer}"}
HELD_OUT = 0.1
EVERY = 1000
"""Batches at most that are evaluated: more than there are."""
VOCAB = 1024
MODEL = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": VOCAB, "seq": 64}
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "full": ({}, 1e-3),
    "lora": ({"rank": 8, "alpha": 16.0}, 3e-3),
    "p_tuning": ({"virtual_tokens": 8, "encoder": 128}, 1e-2),
}
"""Settings and learning rate of each method."""


def examples(folder: Path) -> None:
    """Two files: ``base.jsonl`` without what is held out, its forms by turns, and ``tuned.jsonl``."""
    asked = [json.loads(line) for line in questions().splitlines()]
    for record, form in zip(asked, list(FORMS) * len(asked)):
        record["form"] = form
    known = asked[: int(len(asked) * (1 - HELD_OUT))]
    for name, records in (("base", known), ("tuned", [record | {"form": "whole"} for record in asked])):
        lines = [json.dumps(record | {"answer": FORMS[record["form"]].format(record["answer"])}) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))


class Runs:
    """Trainings and evaluations of one rank in ``folder``, which keeps their checkpoints."""

    def __init__(self, folder: Path, farm: Farm) -> None:
        self.folder, self.farm = folder, farm

    def run(self, name: str, source: str, tune: dict[str, Any], steps: int, lr: float = 1e-3, task: str = "train") -> dict[str, Any]:
        """The result of one run on the examples ``source``; its checkpoints have the name ``name``."""
        path = {"source": str(self.folder / f"{source}.jsonl"), "path": str(self.folder / "corpus")}
        checkpoint = {"dir": str(self.folder / name), "every": steps if task == "train" else 0, "keep": 1}
        config = {
            "model": MODEL,
            "layout": {"micro_batch": 32},
            "data": {"kind": "instructions", "template": TEMPLATES[source], "held_out": HELD_OUT if source == "tuned" else 0.0} | path,
            "optimizer": {"lr": lr, "warmup_steps": min(20, steps - 1)},
            "run": {"task": task, "steps": steps, "warmup_steps": 0, "global_batch": 32, "checkpoint": checkpoint},
            "tune": tune,
        }
        return self.farm.train(config, 1).checked().result

    def exact(self, name: str) -> float:
        """Share of the held-out answers that the newest checkpoint of ``name`` gives."""
        return float(self.run(name, "tuned", {}, EVERY, task="evaluate")["evaluation"]["exact_match"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--base-steps", type=int, default=900, help="of the model that is tuned (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of each method (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="keeps all checkpoints (default: none are kept)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        examples(folder)
        prepare(DataConfig(path=str(folder / "corpus"), vocab=VOCAB, pattern="*.py"))
        farm = Farm(Path(temporary))
        try:
            compare(Runs(folder, farm), asked.base_steps, asked.steps)
        finally:
            farm.close()


def compare(runs: Runs, base_steps: int, steps: int) -> None:
    """Print what the base and each method reach, and a method's share of what tuning all weights does."""
    runs.run("base", "base", {}, base_steps, 2e-3)
    print(f"base      exact match {runs.exact('base'):6.1%}", flush=True)
    full = 0.0
    for method, (settings, lr) in WAYS.items():
        runs.run(method, "tuned", {"method": method, "base": str(runs.folder / "base")} | settings, steps, lr)
        exact = runs.exact(method)
        full = full or exact
        print(f"{method:9} exact match {exact:6.1%}   {exact / full:.2f} of full", flush=True)


if __name__ == "__main__":
    main()
