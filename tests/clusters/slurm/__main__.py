"""A real Slurm of several nodes on this machine (Debian, root), by hand.

python -m tests.clusters.slurm install
eval "$(python -m tests.clusters.slurm start)"       exports SLURM_CONF
srun -N4 --ntasks-per-node=2 hostname
python -m tests.clusters.slurm kill n2               power cut of a node; or slurmctld, slurmdbd, mariadb, munged
python -m tests.clusters.slurm boot n2
python -m tests.clusters.slurm cut n3; python -m tests.clusters.slurm plug n3      unplug a node's cable
python -m tests.clusters.slurm stop                  ends and removes everything

Containers are run by a stand-in for pyxis, container.c. Where the sources of pyxis and enroot are at hand:

eval "$(tests/clusters/slurm/pyxis PYXIS_SOURCES ENROOT_SOURCES FOLDER)"      builds them, exports TRIREME_TEST_PYXIS
pytest tests/backends/test_slurm_containers.py       the same tests, with the real ones
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.clusters.slurm import Cluster, Settings, install, why_not
from tests.clusters.slurm.configuration import real_pyxis

VERBS = ("install", "start", "stop", "status", "kill", "boot", "cut", "plug")


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clusters.slurm", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("names", nargs="*", help="kill, boot, cut, plug: daemons or nodes")
    parser.add_argument("--number", type=int, default=50, help="tells clusters apart that run at the same time (50)")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--max-array-size", type=int, default=1001, help="Slurm's MaxArraySize (1001)")
    parser.add_argument("--directory", type=Path, help="(/tmp/tslurm<number>)")
    parser.add_argument("--pyxis", type=Path, help="where the script pyxis has built the real one (TRIREME_TEST_PYXIS; else a stand-in)")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = arguments(argv)
    reason = why_not()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    directory = options.directory or Path(f"/tmp/tslurm{options.number}")
    settings = Settings(
        directory, options.number, options.nodes, max_array_size=options.max_array_size, pyxis=options.pyxis or real_pyxis()
    )
    cluster = Cluster(settings)
    if options.verb == "install":
        install()
    elif options.verb == "start":
        cluster.start()
        print(f"export SLURM_CONF={cluster.settings.conf}")
    elif options.verb == "stop":
        cluster.stop()
    elif options.verb == "status":
        print(cluster.output("sinfo", "-N", "-p", "main", "-o", "%N %T %E"), end="")
    else:
        for name in options.names:
            getattr(cluster, options.verb)(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
