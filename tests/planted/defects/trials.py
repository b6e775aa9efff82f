"""Trials on disk: identity, verdicts, records, locks."""

from __future__ import annotations

from tests.planted.defect import Defect

IDENTITY, OUTCOME, STORE = "launcher/trials/identity.py", "launcher/trials/outcome.py", "launcher/trials/store.py"

DEFECTS = [
    Defect(
        "two trials on different hardware are one",
        IDENTITY,
        '    place["hardware"] = config.cluster.hardware.name\n',
        '    place["hardware"] = ""\n',
        "tests/trials/test_identity.py",
    ),
    Defect(
        "a trial's id depends on the order of keys",
        IDENTITY,
        'json.dumps(content, sort_keys=True, separators=(",", ":"))',
        'json.dumps(content, separators=(",", ":"))',
        "tests/trials/test_identity.py",
    ),
    Defect(
        "how many trials run at once makes them others",
        IDENTITY,
        "if name not in config.cluster.passing}",
        "}",
        "tests/trials/test_identity.py",
    ),
    Defect(
        "a lost connection is told as the reason of a failure",
        OUTCOME,
        "return min(causes, key=lambda cause: ROOT_CAUSES.index(cause[0]))",
        "return max(causes, key=lambda cause: ROOT_CAUSES.index(cause[0]))",
        "tests/trials/test_outcome.py",
    ),
    Defect(
        "failures of an older attempt are told",
        OUTCOME,
        "words = [failure for failure in failures if attempt_of(failure) == newest]",
        "words = list(failures)",
        "tests/trials/test_outcome.py",
    ),
    Defect(
        "a result of an older attempt counts",
        STORE,
        "return result if result is not None and attempt_of(result) >= self.attempt else None",
        "return result",
        "tests/trials/test_store.py tests/results/test_ranking.py",
    ),
    Defect(
        "a trial that was preempted is taken for answered",
        STORE,
        "return self.status.final and self.reason in (Reason.OUT_OF_MEMORY, Reason.NUMERICS, *enough)",
        "return self.status.final",
        "tests/trials/test_store.py tests/sweep/test_loop.py",
    ),
    Defect(
        "silent nodes are counted one rank off",
        OUTCOME,
        "spoke = {rank // per_node for failure in of_attempt",
        "spoke = {(rank + 1) // per_node for failure in of_attempt",
        "tests/trials/test_outcome.py",
    ),
    Defect(
        "a sweep that is run again forgets its other trials",
        STORE,
        'for point in data["points"] if point["trial"] in ids or point.get("stage") not in stages}',
        'for point in data["points"] if point["trial"] in ids}',
        "tests/trials/test_store.py",
    ),
]
