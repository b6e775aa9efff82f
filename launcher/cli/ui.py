"""``trireme ui [SWEEP]``: MLflow's page on this machine, open at a sweep's trials, fastest first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.arguments import open_sweep, sweep_parser
from launcher.cli.parser import VerbParser
from launcher.interrupt import asked, leave
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.trials.store import Store, Sweep


PORT = 5000


def main(argv: list[str]) -> int:
    """Serves until interrupted. 0 then; 1 when MLflow's server fails."""
    arguments = parser().parse_args(argv)
    from launcher.config.packages import need
    from launcher.tracking.mirror import tracking_of
    from launcher.tracking.names import view_name
    from launcher.tracking.server import runs_page
    from launcher.trials.store import Store, owner_of

    need("mlflow", "MLflow's page")
    sweep, store = open_sweep(arguments), Store(arguments.dir)
    _port(arguments.port)  # refuses one that is taken before anything is copied
    print("bringing MLflow up to date ...", file=sys.stderr)
    experiment, view = bring_up_to_date(store, sweep), view_name(sweep.name, owner_of(store.root))
    server = tracking_of(sweep).uri
    if server is not None:
        print(f"sweep {sweep.name} is tracked at\n  {runs_page(server, experiment, view)}")
        return 0
    return serve(store.root, arguments.port, experiment, view)


def parser() -> VerbParser:
    made = sweep_parser("ui", "Serves the MLflow page of all sweeps on this machine until Ctrl-C, and prints where it shows SWEEP.")
    made.add_argument("--port", type=int, help=f"port on the loopback interface (default: {PORT}, or a free one)")
    return made


def bring_up_to_date(store: Store, wanted: Sweep) -> str:
    """Copies ``wanted`` and every other tracked sweep; returns the experiment. Raises ``ConfigError`` if ``wanted`` cannot be copied."""
    from launcher.tracking.mirror import MlflowSweep, attempt, tracking_of

    for name in store.names():
        if name != wanted.name and tracking_of(store.sweep(name)).uri is None:
            trouble = attempt(MlflowSweep(store.root, name).update)
            if trouble:
                print(f"sweep {name} is not up to date: {trouble}", file=sys.stderr)
    mirror = MlflowSweep(store.root, wanted.name)
    trouble = attempt(mirror.update)
    if trouble:
        place = tracking_of(wanted).uri or store.root / "mlflow.db"
        raise ConfigError(f"sweep {wanted.name} cannot be copied to MLflow at {place}: {trouble}")
    return mirror.experiment


def serve(root: Path, wanted: int | None, experiment: str, view: str) -> int:
    """Runs the server until Ctrl-C, SIGTERM or a closed terminal; tries another port if its own was taken meanwhile."""
    from launcher.tracking.server import LocalServer, PortLost, ServerError, runs_page

    while True:
        try:
            with asked(leave), LocalServer(root, _port(wanted)) as server:
                server.wait_ready()
                print(f"trials, the fastest first:\n  {runs_page(server.url, experiment, view)}\nCtrl-C ends", flush=True)
                raise ServerError(f"the MLflow server ended by itself with code {server.wait()}")
        except PortLost:
            continue
        except ServerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 0


def _port(wanted: int | None) -> int:
    from launcher.tracking.server import server_port

    port = server_port(PORT if wanted is None else wanted)
    if wanted and wanted != port:
        raise ConfigError(f"--port={wanted} cannot be used on this machine; choose another, or leave it out for a free one")
    return port
