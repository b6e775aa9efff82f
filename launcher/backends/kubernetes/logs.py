"""From a pod's log to the files of a trial's directory: the log of every rank, metrics, failures, timeline, result.

The pod's first process (``entry.py``) writes everything to its log; here it is read while the pod runs, because the
log goes with the pod. How far it has been read is kept in a file next to the logs, so that another launcher continues from there.
The log is whole when its last line has come, which says how many there are; until then it is read again while the pod is there.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import queue
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes.causes import Object, container_of, ended, index_of, lost, name_of
from launcher.backends.kubernetes.client import Client
from launcher.backends.kubernetes.errors import ApiError, explain
from launcher.backends.kubernetes.manifests import CONTAINER
from launcher.backends.kubernetes.submission import PODS_PATH
from launcher.backends.logs import log_attempts
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import EXIT_STOPPED, FORMAT, METRICS, RESULT, attempt_of, outcome_of
from trainer.shared.run.files import read_json, write_json, write_text

_FILE = re.compile(r"(metrics\.jsonl|timeline\.json|result\.json|failure-\d+\.json)\Z")
_PIECE = re.compile(rb"#trireme (\S+) (?:(\+)|(\d+)/(\d+)) (.*)\Z", re.DOTALL)
_RANK = re.compile(rb"\[(\d+)\] (.*)\Z", re.DOTALL)
_MARK = re.compile(rb"#trireme (begin|end (\d+))\Z")
_SAVE_SECONDS = 1.0
_AGAIN_SECONDS = 0.5
_REFUSED_SECONDS = 2.0
_PATIENCE = 600.0
"""Seconds for which a log is asked for that cannot be read, while its pod is there: a node that starts anew takes minutes."""
_SHORT_PATIENCE = 60.0
"""Seconds to wait for the log of a failed pod: its status tells the cause even if the log is gone with the container."""


@dataclass
class LogCount:
    """Counts lines read from a log, and keeps the total that its last line gives."""

    lines: int = 0  # of ranks and of files
    begun: bool = False  # by a program that tells the end
    last: int | None = None  # how many such lines there are, by the last one
    result: bool = False  # the result was among them

    @property
    def whole(self) -> bool:
        return self.last is not None and self.lines >= self.last


@dataclass
class LogPosition:
    """Marks a place in a pod's log and the bytes written here up to it: reading may resume there."""

    seen: int = 0  # time of the last line, nanoseconds
    sizes: dict[str, int] = field(default_factory=dict)  # of the files that grow, by name
    told: LogCount = field(default_factory=LogCount)


class Unpacker:
    """Writes the files that a pod's log carries, line by line. ``attempt`` fences: files of a newer attempt are left alone.

    ``sizes`` are those of the files that it appends to, at the start of this reading: later content of a killed launcher is overwritten.
    Lines without a rank of ``ranks`` belong to the first: complaints of the interpreter before a rank has started.
    """

    def __init__(self, directory: Path, attempt: int, ranks: range, sizes: dict[str, int], told: LogCount | None = None):
        self._directory, self._attempt, self._ranks = directory, attempt, ranks
        self._sizes = dict(sizes)
        self.told = dataclasses.replace(told or LogCount())
        self._streams: dict[str, IO[bytes]] = {}
        self._pieces: list[bytes] = []
        self._closing = threading.Lock()  # whoever stops a follower flushes while its thread may be closing

    @property
    def whole(self) -> bool:
        """Not in the middle of a file: a good place to continue from."""
        return not self._pieces

    def take(self, line: bytes) -> None:
        if match := _MARK.match(line):
            self.told.begun, self.told.last = True, None if match[2] is None else int(match[2])
        elif match := _PIECE.match(line):
            self.told.lines += 1
            self._file(match[1].decode("ascii", "replace"), *match.groups()[1:])
        elif (match := _RANK.match(line)) and int(match[1]) in self._ranks:
            self.told.lines += 1
            self._stream(log_of(self._attempt, int(match[1]))).write(match[2] + b"\n")
        else:
            self._stream(log_of(self._attempt, self._ranks[0])).write(line + b"\n")

    def flush(self) -> dict[str, int]:
        """Flushes to disk and returns the sizes of the files."""
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
            with contextlib.suppress(ValueError, zlib.error):  # a file that came damaged is none
                if len(pieces) == int(count or 0):
                    write_fenced(self._directory / name, zlib.decompress(base64.b64decode(b"".join(pieces))).decode(), self._attempt)
                    self.told.result |= name == RESULT


def _counts(line: bytes, ranks: range) -> bool:
    """Returns whether it is a line of a rank or a file, which the last line counts."""
    match = _RANK.match(line)
    return _PIECE.match(line) is not None or (match is not None and int(match[1]) in ranks)


def log_of(attempt: int, rank: int) -> str:
    """The file of a rank's log, in the trial's directory."""
    return f"logs/attempt{attempt}.rank{rank}.log"


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def write_fenced(path: Path, text: str, attempt: int) -> None:
    """Writes a file of JSON whole, unless a newer attempt has written it."""
    if attempt_of(read_json(path) or {}) <= attempt:
        write_text(path, text)


def unpack_message(pod: Object, directory: Path, attempt: int) -> None:
    """The result or failure in a pod's termination message, where its log did not bring one of this attempt."""
    text = (container_of(pod).get("terminated") or {}).get("message") or ""
    try:
        message: Any = json.loads(text)
        name, content = str(message["file"]), dict(message["content"])
    except (ValueError, KeyError, TypeError):
        return  # written by another program; the state's detail holds it
    path = directory / name
    if _FILE.match(name) and content.get("attempt") == attempt and attempt_of(read_json(path) or {}) != attempt:
        write_fenced(path, json.dumps(content), attempt)


def disbelieve(directory: Path, attempt: int, world_size: int, missing: str) -> None:
    """A run whose log is ``missing`` was not measured, though its ranks went well: its result says so, and that the place is to blame."""
    result = read_json(directory / RESULT)
    ours = result if result is not None and attempt_of(result) == attempt else None
    if (result is None or attempt_of(result) <= attempt) and (ours is None or outcome_of(ours)[0] is Status.DONE):
        failed = {"status": Status.FAILED.value, "reason": Reason.NODE.value, "message": missing}
        write_json(directory / RESULT, {"format": FORMAT, "world_size": world_size, "attempt": attempt} | (ours or {}) | failed)


class Follower(threading.Thread):
    """Reads one pod's log to its end into a trial's directory. ``over`` returns whether the pod's process has ended or the pod is gone.

    Position and file sizes are noted together, so every line arrives once, whichever launcher is killed. Failed reads and writes are
    repeated from the last note. It ends when the log is whole or nothing more can come (``missing`` says which part); until then
    ``trouble`` names an obstacle.
    """

    def __init__(self, client: Client, pod: Object, directory: Path, attempt: int, over: Callable[[], bool]):
        super().__init__(name=f"log {name_of(pod)}", daemon=True)
        self._client, self._pod, self.uid, self._over = client, name_of(pod), pod["metadata"]["uid"], over
        self._directory, self._attempt, self.ranks = directory, attempt, ranks_of(pod)
        self._cursor = directory / "logs" / f"attempt{attempt}.{self._pod}.cursor"
        self._stopped = threading.Event()
        self._unpacker: Unpacker | None = None
        self._begin = self._place = LogPosition()
        self._since: float | None = None  # monotonic; the server answers, and what it has of the log is not all
        self._recounted = self._done = False
        self.trouble = ""
        self.missing = f"the log of pod {self._pod} has not been read"
        self.gone = False

    @property
    def has_result(self) -> bool:
        """The result came with this log, which is whole: so are the metrics, which the same pod has sent before."""
        return self._place.told.result and not self.missing

    def run(self) -> None:
        if any(later > self._attempt for later in log_attempts(self._directory)):
            self._end()  # the files that grow are that one's now
        while not (self._done or self._stopped.is_set()):
            pause = _REFUSED_SECONDS
            try:
                self._place = self._place if self._place.sizes else self._noted()
                seen, over = self._place.seen, self._over()  # asked before reading, so that nothing written before the end is missed
                if not self._place.told.whole:
                    self._read(follow=not over)
                self.trouble = ""
                self._consider(over, self._place.seen == seen)
                pause = _AGAIN_SECONDS
            except OSError as error:  # of this machine: the pod has it all
                self._since = None
                self.trouble = f"{error.filename or self._directory} cannot be written ({error.strerror})"
                self._client.complain(self.trouble)
            except ApiError as error:
                words = explain(error, f"read the log of pod {self._pod}", self._client.namespace)
                if error.status not in (400, 404):  # not yet, or not now
                    self._client.complain(words)
                self._ask(words)
            except BackendError as error:  # streams break off all the time
                self._ask(str(error))
            if not self._done:
                self._stopped.wait(pause)

    def stop(self) -> None:
        """Stops asking; flushes to disk."""
        self._stopped.set()
        if self._unpacker is not None:
            with contextlib.suppress(OSError):
                self._unpacker.flush()

    def _noted(self) -> LogPosition:
        """Returns the place where an earlier launcher stopped, else the beginning, which is noted now."""
        noted = read_json(self._cursor)
        if noted is None:
            grown = [METRICS, *(log_of(self._attempt, rank) for rank in self.ranks)]
            self._begin = LogPosition(sizes={name: size_of(self._directory / name) for name in grown})
            self._note(self._begin)
            return self._begin
        self._begin = LogPosition(sizes=noted.get("begin") or noted["sizes"])
        return LogPosition(noted["seen"], noted["sizes"], LogCount(**noted.get("told", {})))

    def _note(self, place: LogPosition) -> None:
        write_json(self._cursor, dataclasses.asdict(place) | {"begin": self._begin.sizes})
        self._place = place

    def _read(self, follow: bool) -> None:
        """Reads from the last note as far as possible; notes only bytes on disk. Raises ``BackendError`` if the connection breaks off."""
        unpacker = self._unpacker = Unpacker(self._directory, self._attempt, self.ranks, self._place.sizes, self._place.told)
        saved, seen, broken = time.monotonic(), self._place.seen, None
        try:
            try:
                for stamp, line in _read_pod(self._client, self._pod, seen, follow):
                    if self._stopped.is_set():
                        return
                    if not stamp:
                        raise BackendError(f"the node of pod {self._pod} says of its log: {line.decode('utf-8', 'replace')}")
                    unpacker.take(line)
                    if unpacker.whole:
                        seen = stamp
                        if time.monotonic() - saved > _SAVE_SECONDS:
                            saved = time.monotonic()
                            self._note(LogPosition(seen, unpacker.flush(), dataclasses.replace(unpacker.told)))
            except BackendError as error:
                broken = error
            if unpacker.whole:
                self._note(LogPosition(seen, unpacker.flush(), dataclasses.replace(unpacker.told)))
            if broken is not None:
                raise broken
        finally:
            with contextlib.suppress(OSError):  # lines after the note come again
                unpacker.close()

    def _consider(self, over: bool, nothing_new: bool) -> None:
        """After a reading that did not break off: whether that was all."""
        told = self._place.told
        over = over and nothing_new and not self._stopped.is_set()
        if told.whole:
            self._end()
        elif (over or told.last is not None) and not self._recounted:
            self._recount()
        elif told.last is not None:
            self._end("they are not there any more")
        elif over:
            self._ask("there is no more of it", read=True)

    def _recount(self) -> None:
        """Begins again if there is more than was read: after a clock was set back, lines are older than those before them."""
        lines = [line for stamp, line in _read_pod(self._client, self._pod, 0, follow=False) if stamp]
        self._recounted, told = True, self._place.told
        more = sum(_counts(line, self.ranks) for line in lines) - told.lines
        if more > 0 or (more == 0 and told.last is None and any(map(_MARK.match, lines[-1:]))):
            self._note(self._begin)

    def _ask(self, trouble: str, read: bool = False) -> None:
        """Checks with the pod whether its log may yet grow. ``read``: its log has been read twice."""
        try:
            pod = self._client.get(PODS_PATH, self._pod)
        except BackendError as error:  # as long as nobody answers, nothing is lost
            self._since, self.trouble = None, str(error)
            return
        if pod is None or pod["metadata"]["uid"] != self.uid:
            self.gone = True
            self._end("the pod is gone")
            return
        silent = lost(pod, self._client.now())
        well = (container_of(pod).get("terminated") or {}).get("exitCode") in (0, EXIT_STOPPED)
        over = ended(pod) or silent
        if over and read and (not well or (self._place.seen and not self._place.told.begun)):  # killed, or it does not tell its end
            self._end()
            return
        self._since = (self._since or time.monotonic()) if over else None
        if silent or (self._since and time.monotonic() - self._since > (_PATIENCE if well else _SHORT_PATIENCE)):
            self._end(trouble)
        else:
            self.trouble = trouble

    def _end(self, why: str = "") -> None:
        """Ends the reading. ``why`` tells why lines are missing, and is added to the log where it breaks off."""
        told, self.missing, self._done = self._place.told, "", True
        if why:
            count = f"{told.lines} lines, and not the last one," if told.last is None else f"{told.lines} of {told.last} lines"
            self.missing = f"{count} have come of the log of pod {self._pod}: {why}"
            with contextlib.suppress(OSError), (self._directory / log_of(self._attempt, self.ranks[0])).open("a") as stream:
                stream.write(f"trireme: {self.missing}\n")


def ranks_of(pod: Object) -> range:
    """The ranks that run in a pod, as its own environment has it; one for each index where it does not say."""
    environment = {
        item["name"]: item.get("value") for container in pod["spec"].get("containers", []) for item in container.get("env") or []
    }
    count = int(environment.get("TRIREME_RANKS_PER_NODE") or 1)
    return range(index_of(pod) * count, (index_of(pod) + 1) * count)


def follow_pod(client: Client, pod: str, over: Callable[[], bool]) -> Iterator[tuple[int, bytes]]:
    """Yields time (nanoseconds) and text of a pod's log lines, until its process is ``over``; resumes broken streams."""
    seen = 0
    while True:
        last = over()  # asked before reading, so that nothing written before the end is missed
        try:
            for stamp, line in _read_pod(client, pod, seen, follow=not last):
                seen = stamp or seen
                yield seen, line
        except ApiError as error:
            if error.status not in (400, 404):  # still being created; gone
                raise
        except BackendError:
            last = False
        if last:
            return
        time.sleep(_AGAIN_SECONDS)


def together(streams: Sequence[Iterator[tuple[int, bytes]]]) -> Iterator[tuple[int, bytes]]:
    """Yields lines of several streams as they come, each read in a thread of its own."""
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
    """Yields lines younger than ``after``; a kubelet's own have time 0. Raises ``BackendError`` if it breaks off, ``ApiError`` without a
    log."""
    since = datetime.fromtimestamp(after // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if after else None
    for line in client.log(pod, CONTAINER, since, follow):
        stamp, _, text = line.partition(b" ")
        when = nanoseconds(stamp.decode("ascii", "replace"))
        if when == 0:
            yield 0, line
        elif when > after:
            yield when, text


def nanoseconds(stamp: str) -> int:
    """Unix time of an RFC 3339 stamp with any number of digits; its fraction is cut, not padded, by those who write it. 0 if it is none."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", stamp)
    if match is None:
        return 0
    whole, fraction, zone = match.groups()
    return int(datetime.fromisoformat(whole + zone).timestamp()) * 10**9 + int((fraction or "").ljust(9, "0"))
