"""Hydra's habits: completion, groups of the user's own, functions as trials."""

from __future__ import annotations

from tests.planted.defect import Defect

DEFECTS = [
    Defect(
        "an error appears within the line that a person types",
        "launcher/cli/completion.py",
        "    except Exception:\n        return 1\n",
        "    except ZeroDivisionError:\n        return 1\n",
        "tests/config/test_completion.py",
    ),
    Defect(
        "completion after a comma forgets the values before it",
        "launcher/cli/candidates.py",
        "start = last[: len(last) - len(value.rpartition(",
        "start = last[: len(last) - len(value.partition(",
        "tests/config/test_completion.py",
    ),
    Defect(
        "keys of a file that does not say where they belong are Hydra's words",
        "launcher/config/compose.py",
        "and not says_package(path.read_text()):",
        "and False:",
        "tests/config/test_own_groups.py",
    ),
    Defect(
        "keys of a cluster that a file of the user's own chooses are unknown",
        "launcher/config/compose.py",
        "    clusters = clusters or _clusters_of(overrides, groups, folder, primary)\n",
        "",
        "tests/config/test_own_groups.py",
    ),
    Defect(
        "a function that raised an error counts as done",
        "launcher/stages/function.py",
        "return packed, returned._return_value if returned.status is JobStatus.FAILED else None",
        "return packed, None",
        "tests/stages/test_function.py",
    ),
    Defect(
        "a job in another folder gets what the first one returned",
        "launcher/stages/function.py",
        ', "output": where})',
        "})",
        "tests/stages/test_function.py",
    ),
    Defect(
        "an application's groups are lost while ours are read",
        "launcher/stages/function.py",
        "        Singleton._instances = kept\n",
        "",
        "tests/stages/test_function.py",
    ),
]
