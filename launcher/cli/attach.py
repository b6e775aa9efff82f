"""``trireme attach [SWEEP]``: the live table of a sweep that a command is at work on, in the background or in another terminal."""

from __future__ import annotations

from launcher.cli.arguments import sweep_parser
from launcher.cli.parser import VerbParser
from launcher.cli.status import EVERY_S, watch
from trainer.shared.run.errors import ConfigError


def main(argv: list[str]) -> int:
    """Shows it until its command has ended; Ctrl-C ends the showing alone. 0 however the trials end."""
    arguments = parser().parse_args(argv)
    from launcher.sweep.at_work import at_work, log_of
    from launcher.trials.store import Store

    store = Store(arguments.dir)
    names = [arguments.sweep] if arguments.sweep is not None else [name for name in store.names() if at_work(store, name)][:1]
    if not names:
        raise ConfigError(f"no command is at work on a sweep in {store.root}; 'trireme status' shows how the newest stands")
    store.sweep(names[0])  # is there one of that name
    if not at_work(store, names[0]):
        raise ConfigError(
            f"no command is at work on sweep {names[0]}; 'trireme status {names[0]}' shows how it stands, and the command that ran it, "
            "repeated, continues it"
        )
    watch(store, names[0], EVERY_S)
    if (log := log_of(store, names[0])).exists():
        print(f"the command has ended; its words: {log}")
    return 0


def parser() -> VerbParser:
    made = sweep_parser("attach", "Shows the live table of a sweep that is being run. Ctrl-C leaves it running.")
    made.epilog = "Without SWEEP: the newest that a command is at work on."
    return made
