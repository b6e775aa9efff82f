"""From a pod's log to the files of a trial's directory: the log of every rank, metrics, failures, timeline, result.

The pod's first process (``entry.py``) writes everything to its log; here it is read while the pod runs, because the
log goes with the pod. How far it has been read is kept in a file next to the logs, so that another launcher continues from there.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes.causes import Object, container_of, index_of, name_of
from launcher.backends.kubernetes.client import Client
from launcher.backends.kubernetes.errors import ApiError, explain
from launcher.backends.kubernetes.manifests import CONTAINER
from trainer.spec.files import read_json, write_json
from trainer.spec.records import METRICS

_FILE = re.compile(r"(metrics\.jsonl|timeline\.json|result\.json|failure-\d+\.json)\Z")
_PIECE = re.compile(rb"#trireme (\S+) (?:(\+)|(\d+)/(\d+)) (.*)\Z", re.DOTALL)
_RANK = re.compile(rb"\[(\d+)\] (.*)\Z", re.DOTALL)
_SAVE_SECONDS = 1.0
_AGAIN_SECONDS = 0.5
_REFUSED_SECONDS = 5.0


class Unpacker:
    """Takes a pod's log line by line and writes what it holds. ``attempt`` fences: what a newer attempt wrote is left alone.

    ``sizes`` are those of the files that it appends to, by name, at the place in the pod's log where it begins: what a killed launcher
    wrote after that place comes again, and is written over. Lines of no rank of ``ranks`` are the first one's: the interpreter's own
    complaints, before a rank has started.
    """

    def __init__(self, directory: Path, attempt: int, ranks: range, sizes: dict[str, int]):
        self._directory, self._attempt, self._ranks = directory, attempt, ranks
        self._sizes = dict(sizes)
        self._streams: dict[str, IO[bytes]] = {}
        self._pieces: list[bytes] = []
        self._closing = threading.Lock()  # whoever stops a follower flushes while its thread may be closing

    @property
    def whole(self) -> bool:
        """Not in the middle of a file: a good place to continue from."""
        return not self._pieces

    def take(self, line: bytes) -> None:
        if match := _PIECE.match(line):
            self._file(match[1].decode("ascii", "replace"), *match.groups()[1:])
        elif (match := _RANK.match(line)) and int(match[1]) in self._ranks:
            self._stream(log_of(self._attempt, int(match[1]))).write(match[2] + b"\n")
        else:
            self._stream(log_of(self._attempt, self._ranks[0])).write(line + b"\n")

    def flush(self) -> dict[str, int]:
        """Bring what was taken to disk; the sizes of the files then."""
        with self._closing:
            for name, stream in list(self._streams.items()):
                if not stream.closed:
                    stream.flush()
                    self._sizes[name] = stream.tell()
            return dict(self._sizes)

    def close(self) -> None:
        with self._closing:
            for stream in self._streams.values():
                stream.close()

    def _stream(self, name: str) -> IO[bytes]:
        if name not in self._streams:
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if size_of(path) > self._sizes.get(name, 0):
                os.truncate(path, self._sizes.get(name, 0))
            self._streams[name] = path.open("ab")
        return self._streams[name]

    def _file(self, name: str, append: bytes | None, number: bytes | None, count: bytes | None, content: bytes) -> None:
        if not _FILE.match(name):  # a pod has no say over other files
            return
        if append:
            stream = self._stream(name)
            stream.write(content + b"\n")
            stream.flush()  # progress is seen as it is made
            return
        self._pieces = [*self._pieces, content] if number != b"1" else [content]
        if number == count:
            pieces, self._pieces = self._pieces, []
            if len(pieces) == int(count or 0):
                write_fenced(self._directory / name, zlib.decompress(base64.b64decode(b"".join(pieces))), self._attempt)


def log_of(attempt: int, rank: int) -> str:
    """The file of a rank's log, in the trial's directory."""
    return f"logs/attempt{attempt}.rank{rank}.log"


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def write_fenced(path: Path, content: bytes, attempt: int) -> None:
    """Write a file whole, unless a newer attempt has written it."""
    try:
        there = json.loads(path.read_bytes())
    except (OSError, ValueError):
        there = None
    if isinstance(there, dict) and isinstance(there.get("attempt"), int) and there["attempt"] > attempt:
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    partial.write_bytes(content)
    partial.replace(path)


def unpack_message(pod: Object, directory: Path, attempt: int) -> None:
    """The result or failure in a pod's termination message, where its log did not bring one of this attempt."""
    text = (container_of(pod).get("terminated") or {}).get("message") or ""
    try:
        message: Any = json.loads(text)
        name, content = str(message["file"]), dict(message["content"])
    except (ValueError, KeyError, TypeError):
        return  # written by another program; the state's detail holds it
    path = directory / name
    if not _FILE.match(name) or content.get("attempt") != attempt:
        return
    try:
        if json.loads(path.read_bytes()).get("attempt") == attempt:
            return
    except (OSError, ValueError, AttributeError):
        pass
    write_fenced(path, json.dumps(content).encode(), attempt)


class Follower(threading.Thread):
    """Reads one pod's log to its end into a trial's directory. ``ended`` tells whether the pod's process has ended, or the pod is gone.

    How far it has read, and how long the files were there, is noted together: every line arrives once, whichever launcher is killed.
    """

    def __init__(self, client: Client, pod: Object, directory: Path, attempt: int, ended: Callable[[], bool]):
        super().__init__(name=f"log {name_of(pod)}", daemon=True)
        self._client, self._pod, self._ended = client, name_of(pod), ended
        self._cursor = directory / "logs" / f"attempt{attempt}.{self._pod}.cursor"
        self._stopped = threading.Event()
        ranks = ranks_of(pod)
        noted = read_json(self._cursor)
        if noted is None:
            grown = [METRICS, *(log_of(attempt, rank) for rank in ranks)]
            noted = {"seen": 0, "sizes": {name: size_of(directory / name) for name in grown}}
            write_json(self._cursor, noted)
        self._seen: int = noted["seen"]
        self._unpacker = Unpacker(directory, attempt, ranks, noted["sizes"])

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    self._read()
                    return
                except ApiError as error:  # rights may come back; whoever waits for the end stops us
                    self._client.complain(explain(error, f"read the log of pod {self._pod}", self._client.namespace))
                    self._stopped.wait(_REFUSED_SECONDS)
        finally:
            self._unpacker.close()

    def stop(self) -> None:
        """Do not ask again; what has been read comes to disk."""
        self._stopped.set()
        self._unpacker.flush()

    def _read(self) -> None:
        saved = time.monotonic()
        for stamp, line in follow_pod(self._client, self._pod, self._seen, self._ended, self._stopped):
            self._unpacker.take(line)
            if self._unpacker.whole:
                self._seen = stamp
                if time.monotonic() - saved > _SAVE_SECONDS:
                    saved = time.monotonic()
                    self._save()
        if self._unpacker.whole:
            self._save()

    def _save(self) -> None:
        """What was read comes to disk before the note that it was."""
        write_json(self._cursor, {"seen": self._seen, "sizes": self._unpacker.flush()})


def ranks_of(pod: Object) -> range:
    """The ranks that run in a pod, as its own environment has it; one for each index where it does not say."""
    environment = {
        item["name"]: item.get("value") for container in pod["spec"].get("containers", []) for item in container.get("env") or []
    }
    count = int(environment.get("TRIREME_RANKS_PER_NODE") or 1)
    return range(index_of(pod) * count, (index_of(pod) + 1) * count)


def follow_pod(
    client: Client, pod: str, after: int, over: Callable[[], bool], stopped: threading.Event | None = None
) -> Iterator[tuple[int, bytes]]:
    """Time (in nanoseconds) and text of a pod's log lines younger than ``after``, until its process is ``over``, or we are ``stopped``.

    Goes on from where it was when a stream breaks off, or the server or the pod's node cannot be asked for a while.
    """
    stopped = stopped or threading.Event()
    seen = after
    while not stopped.is_set():
        last = over()  # asked before reading, so that nothing written before the end is missed
        try:
            for stamp, line in _read_pod(client, pod, seen, follow=not last):
                seen = stamp
                yield stamp, line
        except ApiError:
            raise
        except BackendError:
            last = False
        if last:
            return
        stopped.wait(_AGAIN_SECONDS)


def together(streams: Sequence[Iterator[tuple[int, bytes]]]) -> Iterator[tuple[int, bytes]]:
    """What several streams bring, as it comes, each read in a thread of its own."""
    lines: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()

    def read(stream: Iterator[tuple[int, bytes]]) -> None:
        try:
            for item in stream:
                lines.put(item)
        finally:
            lines.put(None)

    for stream in streams:
        threading.Thread(target=read, args=(stream,), daemon=True).start()
    left = len(streams)
    while left:
        item = lines.get()
        left -= item is None
        if item is not None:
            yield item


def _read_pod(client: Client, pod: str, after: int, follow: bool) -> Iterator[tuple[int, bytes]]:
    """What there is, or comes; nothing if there is no log (yet, or any more). ``BackendError`` when it cannot be asked for now."""
    since = datetime.fromtimestamp(after // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if after else None
    try:
        for line in client.log(pod, CONTAINER, since, follow):
            stamp, _, text = line.partition(b" ")
            when = nanoseconds(stamp.decode("ascii", "replace"))
            if when == 0:  # the kubelet's own words, such as that the container's log is gone
                yield after, line
            elif when > after:
                yield when, text
    except ApiError as error:
        if error.status not in (400, 404):  # still being created; gone
            raise


def nanoseconds(stamp: str) -> int:
    """Unix time of an RFC 3339 stamp with any number of digits; its fraction is cut, not padded, by those who write it. 0 if it is none."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", stamp)
    if match is None:
        return 0
    whole, fraction, zone = match.groups()
    return int(datetime.fromisoformat(whole + zone).timestamp()) * 10**9 + int((fraction or "").ljust(9, "0"))
