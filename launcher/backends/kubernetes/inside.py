"""A launcher that runs in the cluster, so that the machine which asked for it may be switched off."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

from launcher.backends.kubernetes.client import Client, plainly
from launcher.backends.kubernetes.cluster import check_cluster, check_mounted
from launcher.backends.kubernetes.errors import ApiError
from launcher.backends.kubernetes.manifests import Manifest, launcher_job
from launcher.backends.kubernetes.values import IMAGE, said
from launcher.backends.kubernetes.workloads import KINDS, check_schema, outcome, to_text
from launcher.config.schema import ClusterConfig
from launcher.trials.identity import digest
from trainer.shared.run.errors import ConfigError

_GONE_SECONDS = 60.0
"""Seconds for an ended Job of the same name to disappear."""
_LONGEST = 63
"""Characters of a label's value: a Job's pods carry its name in one."""


def launcher_name(pipeline: str, folder: str) -> str:
    """Returns the stable, unique Job name of ``pipeline`` in ``folder``; the digest distinguishes names that are equal as DNS labels."""
    suffix = digest([pipeline, os.path.normpath(folder)])
    readable = re.sub(r"[^a-z0-9]+", "-", f"trireme-run-{pipeline.lower()}")[: _LONGEST - len(suffix) - 1]
    return f"{readable.rstrip('-')}-{suffix}"


class InsideLauncher:
    """``trireme`` with ``words``, as a Job that is called ``name``. ``ConfigError`` if it would not see ``folders``."""

    def __init__(self, name: str, words: Sequence[str], cluster: ClusterConfig, image: str, folders: dict[str, str]):
        settings = check_cluster(cluster)
        IMAGE.check(image, said("--in-cluster", image))
        check_mounted(settings, folders)
        self.settings, self.name = settings, name
        self.manifest: Manifest = launcher_job(name, words, settings, image)
        check_schema(self.manifest)

    @property
    def text(self) -> str:
        """Returns the manifest for ``kubectl apply -f``."""
        return to_text([self.manifest])

    def start(self) -> None:
        """Creates the Job, in place of one that has ended. ``ConfigError`` if one is at work, or the server refuses."""
        client, kind = Client(self.settings), KINDS["job"]
        try:
            there, deadline = client.get(kind.path, self.name), time.monotonic() + _GONE_SECONDS
            if there is not None and not outcome(kind, there)[0]:
                raise ConfigError(f"Job {self.name} is at work in namespace {client.namespace}; wait for its end, or delete it")
            if there is not None:
                client.delete(kind.path, self.name, there["metadata"]["uid"])
            while there is not None and time.monotonic() < deadline:
                time.sleep(0.3)
                there = client.get(kind.path, self.name)
            client.create(kind.path, self.manifest)
        except ApiError as error:
            raise plainly(error, f"create Job {self.name}", client.namespace) from None
        finally:
            client.close()
