"""Keeps a local copy of some of the server's objects by a watch: polling 200 trials then costs nothing.

The copy may lag (a broken watch is being resumed) but never invents: read from the server before a final conclusion.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes.client import Client
from launcher.backends.kubernetes.errors import ApiError, explain
from launcher.backends.kubernetes.manifests import Manifest
from launcher.backends.waiting import pause_unless

_PAUSE = 1.0
"""Seconds between attempts to resume a broken watch; twice as long after each that fails."""
_PAUSE_AT_MOST = 15.0
_FIRST = 60.0
"""Seconds for which the first answer is waited for."""

Wanted = Callable[[Manifest], bool]


class Mirror:
    """The objects at ``path`` that match ``query`` and ``wanted``, by uid. Deleted ones are kept as last seen until they are forgotten."""

    def __init__(self, client: Client, path: str, wanted: Wanted = lambda _: True, **query: Any):
        self._client, self._path, self._query, self._wanted = client, path, query, wanted
        self._objects: dict[str, Manifest] = {}
        self._gone: set[str] = set()
        self._lock = threading.Lock()
        self._synced, self._closed = threading.Event(), threading.Event()
        self._listed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)

    def start(self) -> Mirror:
        self._thread.start()
        return self

    def objects(self) -> list[Manifest]:
        """A copy as of the newest change. ``BackendError`` while there has been no answer yet, or only refusals."""
        pause_unless(lambda: self._synced.is_set() or self._client.hurried, _FIRST)
        if not self._synced.is_set():
            raise BackendError(f"the Kubernetes API server at {self._client.server} does not answer; submitted jobs continue")
        if self._failure is not None:
            raise self._failure
        with self._lock:
            return list(self._objects.values())

    def get(self, uid: str) -> Manifest | None:
        """One object; None if there is none, or it was deleted."""
        with self._lock:
            return None if uid in self._gone else self._objects.get(uid)

    def gone(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._gone)

    def forget(self, unneeded: Wanted) -> None:
        """Drops deleted objects that nobody asks about any more."""
        with self._lock:
            for uid in [uid for uid in self._gone if unneeded(self._objects[uid])]:
                self._gone.remove(uid)
                del self._objects[uid]

    def close(self) -> None:
        """The thread is a daemon and may be in a read; it ends with its next change."""
        self._closed.set()
        self._synced.set()

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # shown to whoever asks for the objects
            self._failure = error
            self._synced.set()

    def _follow(self) -> None:
        version: str | None = None
        pause = _PAUSE
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                version = version or self._list()
                for change in self._client.watch(self._path, resourceVersion=version, **self._query):
                    version = change["object"]["metadata"]["resourceVersion"]
                    self._take(change)
                pause = _PAUSE
            except ApiError as error:
                version = None  # 410 Gone, or a server that has forgotten: list again
                if not error.expired:
                    self._refused(error)
                    pause = min(2 * pause, _PAUSE_AT_MOST)
            except BackendError as error:
                self._client.complain(str(error))
                pause = min(2 * pause, _PAUSE_AT_MOST)
            self._closed.wait(max(0.0, pause - (time.monotonic() - began)))

    def _refused(self, error: ApiError) -> None:
        """Rights may be granted late, or again: the watch keeps trying. Readers get the error if there has never been an answer."""
        words = explain(error, f"watch {self._path.rpartition('/')[2]}", self._client.namespace)
        if self._listed:
            self._client.complain(words)
        else:
            self._failure = BackendError(words)
            self._synced.set()

    def _list(self) -> str:
        answer = self._client.list(self._path, **self._query)
        items = {item["metadata"]["uid"]: item for item in answer["items"] if self._wanted(item)}
        with self._lock:
            self._gone = {uid for uid in self._objects if uid not in items}
            self._objects = {**self._objects, **items}
        self._listed, self._failure = True, None
        self._synced.set()
        return str(answer["metadata"]["resourceVersion"])

    def _take(self, change: Manifest) -> None:
        item = change["object"]
        if change["type"] == "BOOKMARK" or not self._wanted(item):
            return
        uid = item["metadata"]["uid"]
        with self._lock:
            self._objects[uid] = item
            if change["type"] == "DELETED":
                self._gone.add(uid)
