"""A real Kubernetes of Debian's sources on this machine (Debian), by hand; it ends with Ctrl-C and leaves nothing.

    python -m tests.clusters.kubernetes [--directory DIR] [--played N] [--no-node]

The first start builds the programs (four to seven minutes). Then, in another shell: export KUBECONFIG=DIR/admin.kubeconfig
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.clusters.kubernetes import OwnCluster, node, obstacle, packages


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.clusters.kubernetes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("/tmp/trireme-kubernetes"), help="(%(default)s)")
    parser.add_argument("--played", type=int, default=4, help="nodes without machines (%(default)s)")
    parser.add_argument("--no-node", action="store_true", help="no kubelet: no root needed, and no pod really runs")
    options = parser.parse_args(argv)
    packages.install()
    reason = obstacle() or (None if options.no_node else node.obstacle())
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    cluster = OwnCluster(options.directory, not options.no_node, options.played)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell started us in the background
    try:
        cluster.start()
        print(f"export KUBECONFIG={cluster.control.kubeconfig}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        print("stopping", file=sys.stderr)
    finally:
        cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
