"""A manifest that is damaged in any place is noticed before anything is loaded, and the previous checkpoint is taken."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_saving import ALONE, EXTRA, checkpoints
from tests.checkpoint.worlds import assert_holds, global_state, owned_by
from trainer.shared.records.manifest import MANIFEST
from trainer.shared.run.derived import FIRST_KEYS
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow  # imports torch

WRONG = (None, True, "text", -1, 10**12, 1.5, [], {}, [[0, -1]])
OPTIONAL = {("optimizer",), ("data", "seq"), *(("pieces", 0, "crc32", state) for state in ("exp_avg", "exp_avg_sq", "average"))}
"""What may be missing: moments and averages that were not saved."""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2, of different states."""
    run = checkpoints(tmp_path)
    for step in (1, 2):
        run.save(step, owned_by(ALONE, 0, 0, global_state(step)), EXTRA)
        run.finish()
    return tmp_path


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a manifest; one piece speaks for all."""
    if at:
        yield at
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:1] if at == ("pieces",) else value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in entries:
        yield from paths(inner, (*at, key))


def changed(manifest: dict[str, Any], at: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """``manifest`` with what stands at ``at`` removed, or replaced by ``value``."""
    manifest = copy.deepcopy(manifest)
    inner: Any = manifest
    for key in at[:-1]:
        inner = inner[key]
    if value:
        inner[at[-1]] = value[0]
    else:
        del inner[at[-1]]
    return manifest


def newest(folder: Path) -> tuple[Path, dict[str, Any]]:
    (path,) = folder.glob("step-00000002-*/" + MANIFEST)
    return path, json.loads(path.read_text())


def test_without_any_one_of_its_entries_a_manifest_is_damaged_and_the_older_checkpoint_is_loaded(
    two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, manifest = newest(two)
    for at in paths(manifest):
        if at in OPTIONAL or at == ("pieces", 0) or (at[0] == "model" and at[1:] and at[1] not in FIRST_KEYS):
            continue
        path.write_text(json.dumps(changed(manifest, at)))
        fresh = owned_by(ALONE, 0, 0, None)
        resumed = checkpoints(two).resume(fresh)
        assert resumed is not None and resumed.step == 1, at
        assert_holds(fresh, global_state(1))
        assert "trying the previous checkpoint" in capsys.readouterr().err, at


def test_a_checkpoint_of_a_version_with_fewer_keys_of_the_model_is_resumed(two: Path) -> None:
    path, manifest = newest(two)
    manifest["model"] = {name: manifest["model"][name] for name in FIRST_KEYS}
    path.write_text(json.dumps(manifest))
    fresh = owned_by(ALONE, 0, 0, None)
    resumed = checkpoints(two).resume(fresh)
    assert resumed is not None and resumed.step == 2


def test_whatever_stands_in_a_manifest_resuming_loads_something_whole_or_says_plainly_why_not(two: Path) -> None:
    path, manifest = newest(two)
    run = checkpoints(two)
    for at in paths(manifest):
        for value in WRONG:
            path.write_text(json.dumps(changed(manifest, at, value)))
            try:
                resumed = run.resume(owned_by(ALONE, 0, 0, None))
            except ConfigError as error:  # a checkpoint of another model or other data, as far as one can tell
                assert any(words in str(error) for words in ("is of another model", "is of other data", "was made for"))
            else:
                assert resumed is not None, (at, value)


@pytest.mark.parametrize("text", ["[]", "null", "1", "{}", "[" * 100_000, '{"format": 2}', "\ud800"])
def test_json_that_is_no_manifest_is_damaged(two: Path, text: str) -> None:
    newest(two)[0].write_text(text, errors="surrogatepass")
    resumed = checkpoints(two).resume(owned_by(ALONE, 0, 0, None))
    assert resumed is not None and resumed.step == 1
