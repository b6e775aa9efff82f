"""Pipelines of stages: their graph, what makes a stage the same stage."""

from __future__ import annotations

from tests.planted.defect import Defect

GRAPH, PLAN, TRAIN = "launcher/stages/graph.py", "launcher/stages/plan.py", "launcher/stages/kinds/train.py"

DEFECTS = [
    Defect(
        "a stage is the same whatever its inputs",
        PLAN,
        'digest({"stage": stage.verb, "content": work.content, "inputs": inputs})',
        'digest({"stage": stage.verb, "content": work.content, "inputs": sorted(inputs)})',
        "tests/stages/test_stage_identity.py",
    ),
    Defect(
        "where a corpus lies makes it another one",
        TRAIN,
        'for name in ("path", "source", "pattern", "text_key", "vocab", "tokenizer"):',
        'for name in ("source", "pattern", "text_key", "vocab"):',
        "tests/stages/test_stage_identity.py",
    ),
    Defect(
        "--until runs all stages before it in the file",
        GRAPH,
        "        if before and stage.name in found:\n            found |= set(stage.needs)",
        "        if before and found:\n            found |= set(stage.needs)",
        "tests/stages/test_graph.py",
    ),
    Defect(
        "an input of another kind is taken",
        GRAPH,
        "        if gives not in takes[name]:\n",
        "        if gives not in takes[name] and not stage.needs:\n",
        "tests/stages/test_graph.py",
    ),
]
