"""``trireme serve MODEL [KEY=VALUE ...]``: completions and chat over HTTP. The trainer serves: in this process, or with keys
(``layout.tensor=2``) in a job under that layout. The first signal lets running requests finish, a second ends it at once."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import FrameType

from launcher.cli.generate import copier, for_generation, parsed, split, told
from launcher.cli.overrides import add_overrides
from launcher.cli.parser import VerbParser
from launcher.interrupt import leave
from launcher.own_python import finding_ours, module
from trainer.shared.run.command_lines import ServeCommand, asked, serve_parser
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.stages import STOP


def main(argv: list[str]) -> int:
    """Exit code 0 when it was asked to end, 1 the job failed, 2 wrong input."""
    if {"-h", "--help"} & {*argv}:
        parser().print_help()
        return 0
    from launcher.config.packages import need

    words, overrides, own = split(argv)
    if not overrides:
        need("train", "serving a model")
        os.execve(sys.executable, module("trainer.generate.serve", *argv), os.environ | finding_ours())  # signals reach the server itself
    from launcher.config import locate_data
    from launcher.sweep.oneoff import run_job

    command = asked(ServeCommand, parsed(serve_parser(), words))
    config, copy = for_generation(command.model, overrides, own), copier(True)
    if config.cluster.own_network:
        raise ConfigError(
            f"cluster.backend={config.cluster.backend}: a pod's address is its own, so this command cannot serve there; run "
            "'python -m trainer.generate.serve' in a Deployment with a Service, or use local or slurm"
        )
    ending: list[int] = []

    def watch(folder: Path) -> None:
        copy(folder)
        if ending:
            (folder / STOP).touch()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if ending:
            leave(number, frame)
        ending.append(number)

    run_job(locate_data(config), "serve", lambda *_: None, stage=told("serve", command), watch=watch, on_signal=on_signal)
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the words of the command line, for help and completion."""
    made = serve_parser(VerbParser)
    add_overrides(made, "a layout, a cluster: the server is a job (cluster=slurm layout.tensor=2)")
    return made
