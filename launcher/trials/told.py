"""Exports a trial of another trainer as files that need nothing of this project. Pure."""

from __future__ import annotations

import re
import shlex

from trainer.shared.run.derived import world_size_of
from trainer.shared.run.foreign import AT_RUN_TIME, CommandConfig
from trainer.shared.run.schema import LayoutConfig

IN_SHELL = {
    "python": "python",
    "folder": '"$folder"',
    **{name: f'"${name.upper()}"' for name in ("rank", "local_rank", "master_addr", "master_port")},
    "node_rank": '"$GROUP_RANK"',
}
"""Values of placeholders that only a rank knows, in a script that torchrun starts."""


def as_files(command: CommandConfig, layout: LayoutConfig, per_node: int, comment: str) -> dict[str, str]:
    """``command`` as somebody without this project runs it: ``command.sh`` and the files that it reads, all in one folder."""
    ranks = world_size_of(layout)
    each, nodes = min(ranks, per_node), -(-ranks // per_node)
    size = f"--nnodes={nodes} --nproc-per-node={1 if command.starts == 'node' else each}"
    lines = ["#!/bin/sh", f"# {comment}", "# On every node, FOLDER being that of this file:"]
    lines += [f"#   torchrun {size} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 --no-python sh FOLDER/command.sh"]
    lines += ['folder=$(cd "$(dirname "$0")" && pwd)']
    lines += [f"cd {shlex.quote(command.workdir)}"] if command.workdir else []
    lines += [f"export {name}={_shell(value)}" for name, value in command.environment.items()]
    return {"command.sh": "\n".join([*lines, "exec " + " \\\n  ".join(map(_shell, command.words))]) + "\n"} | command.files


def _shell(word: str) -> str:
    parts = re.split(rf"\{{({'|'.join(AT_RUN_TIME)})\}}", word)
    return "".join(IN_SHELL[part] if index % 2 else shlex.quote(part) if part else "" for index, part in enumerate(parts)) or "''"
