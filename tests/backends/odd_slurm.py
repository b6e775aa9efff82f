"""Slurm's commands as scripts that answer oddly, as wrappers and overloaded controllers of sites do. No cluster is needed.

They keep the queue in a folder: ``jobs`` has a line ``ID NAME`` for each job that was accepted. Tests write a line of shell by which a
command answers (``sbatch``, ``squeue``; ``test`` for ``sbatch --test-only``), where ``accept`` queues the job and prints its id.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPTS = {
    "sbatch": """\
[ "${1#--test-only}" = "$1" ] || { [ ! -e test.does ] || . ./test.does; exit 0; }
script=${!#}; [ -r "$script" ] || script=/dev/stdin
name=$(sed -n 's/^#SBATCH --job-name=//p' "$script" | head -n 1)
for word; do case $word in --job-name=*) name=${word#*=} ;; esac; done
queue() { id=$((100 + $(cat jobs 2>/dev/null | wc -l))); echo "$id $name" >>jobs; }
accept() { queue; echo $id; }
""",
    "squeue": """\
for word; do case $word in
  --name=*) asked='$2 == "'${word#*=}'" { print $1 }' ;;
  --jobs=*) asked='"'${word#*=}'" ~ $1 { print $1 "_0|" $2 "|" ($3 ? $3 : "RUNNING") "|None|N/A|n1|0|0|" }' ;;
esac; done
rows() { [ ! -e jobs ] || awk "$asked" jobs; }
""",
    "scancel": 'for word; do id=${word%%_*}; sed -i "s/^$id .*/& CANCELLED/; s/ ${word#--name=}$/& CANCELLED/" jobs; done',
    "scontrol": 'echo "MaxArraySize = 1001"; echo "AccountingStorageType = accounting_storage/none"',
    "sacct": "exit 1",
    "srun": "",
}
ANSWERS = {"sbatch": "accept", "squeue": "rows"}


class OddSlurm:
    """The commands in ``folder``, for processes that have it first on their PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        for name, script in SCRIPTS.items():
            path = folder / name
            path.write_text(f'#!/bin/bash\ncd {folder}\necho "$*" >>{name}.calls\n{script}\n[ ! -e {name}.does ] || . ./{name}.does\n')
            path.chmod(0o755)
        for name, answer in ANSWERS.items():
            self.does(name, answer)

    def does(self, command: str, shell: str) -> None:
        """From now on ``command`` runs ``shell``."""
        (self.folder / f"{command}.does").write_text(shell + "\n")

    def calls(self, command: str, word: str) -> int:
        """How often ``command`` was run with ``word`` among its words."""
        path = self.folder / f"{command}.calls"
        return sum(word in line for line in path.read_text().splitlines()) if path.exists() else 0

    @property
    def jobs(self) -> list[str]:
        """Ids of the jobs that were accepted and not cancelled."""
        path = self.folder / "jobs"
        return [line.split()[0] for line in path.read_text().splitlines() if "CANCELLED" not in line] if path.exists() else []


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OddSlurm:
    slurm = OddSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{slurm.folder}:{os.environ['PATH']}")
    return slurm
