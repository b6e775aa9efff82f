"""The rank's half of each kind of stage. Sections of stages name these classes (``StageRun.work``)."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.shared.corpora.index import TOKENIZER
from trainer.shared.records.artifacts import GGUF_FILE, MANIFEST, METRICS_FILE
from trainer.shared.records.named_tokens import GENERATION, named_tokens
from trainer.shared.records.trial_files import number, positive, read_steps
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json, write_json
from trainer.shared.run.stages import COMPLETIONS
from trainer.stages.make import ProcessWork, StageWork, input_problem

FIGURES, CHOICE = ".training.json", ".choice.json"
"""Files of a training's course and choice. Hidden, since an artifact's digest names its weights alone."""


class TrainWork(StageWork):
    """A training, which continues from its checkpoints."""

    continues = True

    def complete(self, result: Mapping[str, Any], out: Path) -> None:
        """Writes the last loss and the median step time, without the warm-up, as its result will have them; and the words of its text."""
        steps = read_steps(out)
        measured = steps[self.config.run.warmup_steps :] or steps
        times = [seconds for line in measured if (seconds := positive(line.get("step_time_s")))]
        loss = number(steps[-1].get("loss")) if steps else None
        write_json(self.folder / FIGURES, {"loss": loss, "step_time_s": statistics.median(times) if times else None})
        words = Path(self.stage.sources.get("data") or self.stage.sources["model"])
        shutil.copyfile(words / TOKENIZER, self.folder / TOKENIZER)
        if named := named_tokens([words]):
            write_json(self.folder / GENERATION, named)


class EvaluateWork(StageWork):
    """The figures of an evaluation."""

    def complete(self, result: Mapping[str, Any], out: Path) -> None:
        write_json(self.folder / METRICS_FILE, result["evaluation"])


class GenerateWork(StageWork):
    """Text after prompts."""

    def complete(self, result: Mapping[str, Any], out: Path) -> None:
        write_json(self.folder / COMPLETIONS, {"completions": result["completions"]})


class PrepareWork(ProcessWork):
    """A corpus."""

    def act(self) -> None:
        from trainer.data.prepare import prepare

        prepare(self.config.data, False)


class FetchWork(ProcessWork):
    """Data of published tasks."""

    def act(self) -> None:
        from trainer.generate.harness import fetch

        fetch(self.stage.settings["tasks"], self.folder)


class ConvertWork(ProcessWork):
    """Weights in another form."""

    def act(self) -> None:
        from trainer.convert import export, import_weights

        source, dtype = Path(self.stage.sources["model"]), self.stage.settings["dtype"]
        if self.stage.settings["format"] == "checkpoint":
            import_weights(source, self.folder)
        else:
            export(source, self.folder / GGUF_FILE if self.stage.settings["format"] == "gguf" else self.folder, dtype)


class ChooseWork(ProcessWork):
    """The best of several trainings, as hard links where the file system has them."""

    all_inputs = False

    def act(self) -> None:
        """Raises ``ConfigError`` if none was brought to its end."""
        stage, best = self.stage, self.stage.settings["best"]
        whole = {name: Path(folder) for name, folder in stage.sources.items() if not input_problem(stage, name)}
        figures = {name: read_json(folder / FIGURES) or {} for name, folder in whole.items()}
        ranked = sorted((value, name) for name, known in figures.items() if (value := number(known.get(best))) is not None)
        if not ranked:
            raise ConfigError(f"stage {stage.name} has nothing to choose from: none of {', '.join(stage.sources)} was brought to its end")
        chosen = ranked[0][1]
        shutil.copytree(whole[chosen], self.folder, copy_function=_link, ignore=shutil.ignore_patterns(MANIFEST))
        write_json(self.folder / CHOICE, {"chosen": chosen, "best": best, "figures": figures})
        print(f"{chosen} goes on: {best} {ranked[0][0]:.6g} of {', '.join(f'{value:.6g} ({name})' for value, name in ranked)}")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
