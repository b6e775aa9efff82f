"""``trireme prepare``: make a tokenizer and a token file from text. Hydra composes the settings; the trainer does the work."""

from __future__ import annotations

import tempfile
from pathlib import Path

from launcher.cli.overrides import PathOption, add_keys
from launcher.cli.parser import VerbParser
from launcher.own_python import run
from trainer.shared.records.trial_files import CONFIG
from trainer.shared.run.read import save

DESCRIPTION = """\
Makes a tokenizer and a token file from text. A folder that was prepared from the same files with the same settings is used again.

keys:
  data=stdlib                 the Python standard library's sources, which are on every machine (default)
  data.source=FILE|FOLDER     your own text: JSON lines (.jsonl, .ndjson, .json) are read line by line, all others as UTF-8 text
  data.path=FOLDER            where the prepared corpus goes
  data.vocab=N                size of the vocabulary that is trained
  data.tokenizer=FILE|FOLDER  the words of this tokenizer.json instead, as those of T5 or mT5
  data.pattern='**/*.txt'     which files of a source folder are read
  data.text_key=text          the JSONL field that holds the text
"""


def main(argv: list[str]) -> int:
    """Exit code 0 when the folder is there, 2 for wrong input."""
    arguments = parser().parse_intermixed_args(argv)
    from launcher.config.compose import compose
    from launcher.config.packages import need

    if arguments.tasks is not None:
        need("train", "fetching tasks")
        return run("trainer.generate.harness", arguments.tasks, str(arguments.tasks_folder))
    flags = [flag for flag, given in (("--force", arguments.force), ("--json", arguments.json)) if given]
    need("train", "preparing a corpus")
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / CONFIG
        save(compose(arguments.overrides).train_config(), config)
        return run("trainer.data", str(config), *flags)


def parser() -> VerbParser:
    made = VerbParser("trireme prepare", DESCRIPTION)
    add_keys(made)
    made.add_argument("--force", action="store_true", help="prepare again even if the folder is there")
    made.add_argument("--json", action="store_true", help="print one JSON document")
    made.add_argument("--tasks", metavar="NAMES", help="fetch the data of these tasks of lm-evaluation-harness, in place of a corpus")
    made.add_argument(
        "--tasks-folder", action=PathOption, metavar="DIR", default=Path("data/tasks"), help="where it goes (default: %(default)s)"
    )
    return made
