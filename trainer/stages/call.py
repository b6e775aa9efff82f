"""The rank's half of a trial that is a call of somebody else's function: ``launcher.stages.function`` writes it to a file."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from trainer.shared.records.stage_run import RETURNED_FILE
from trainer.stages.make import ProcessWork


class CallWork(ProcessWork):
    """The result of a function. The settings name the file of the ``call``, the folder where it was made, and the ``path`` of modules."""

    def act(self) -> None:
        """Raises the function's error, after its return is written."""
        os.chdir(self.stage.settings["folder"])
        sys.path[:] = dict.fromkeys([*self.stage.settings["path"], *sys.path])
        returned, error = pickle.loads(Path(self.stage.settings["call"]).read_bytes())()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RETURNED_FILE).write_bytes(returned)
        if error is not None:
            raise error
