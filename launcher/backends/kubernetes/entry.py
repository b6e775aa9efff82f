"""The first process of a pod: starts this node's ranks and sends their output back over the pod's log.

Shipped to the pods in a ConfigMap and run by the image's Python, so it imports nothing but the standard library. It sees to code and
corpus (provision.py), then meets the other pods, because their images may be pulled, and their names resolved, minutes later; ends the
ranks together, because one that is left waits for its peers; and passes SIGTERM on, which makes ranks write a checkpoint.

Every line of the log belongs to one rank, ``[rank] text``, or carries a piece of a file of the trial's directory:

    #trireme metrics.jsonl + {"step": 1, ...}           one more line of that file
    #trireme result.json 1/2 eJxLSS1...                 piece 1 of 2 of the file, zlib and base64

The first line says that there will be a last one, which says how many of these there were: whoever has them all has the whole log.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from typing import IO, Any

PIECE = 6000
"""Characters of a line: container runtimes cut lines at 16 KiB."""
PEER_GRACE = 10.0
"""Seconds that ranks get to say why, after the first of them has failed."""
GREETING = 5.0
"""Seconds in which who has connected to pod 0 has to say that it is another pod."""
FORMAT = 1
METRICS, RESULT, TIMELINE, FAILURE = "metrics.jsonl", "result.json", "timeline.json", "failure-{rank}.json"
REFUSED, STOPPED = 2, 75
"""Names, format and exit codes of ``trainer.shared.records.trial_files``, which is not there to be imported; a test compares them."""


def main() -> int:
    emit(b"#trireme begin", counted=False)
    code = work()
    emit(b"#trireme end %d" % Sent.lines, counted=False)
    return code


def work() -> int:
    """Provisions the pod, meets the others, runs the ranks, and returns the pod's exit code."""
    index = int(os.environ[os.environ["TRIREME_INDEX_FROM"]])
    world, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["TRIREME_RANKS_PER_NODE"])
    node = Node(range(index * per_node, min((index + 1) * per_node, world)))
    signal.signal(signal.SIGTERM, node.terminate)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # where provision.py lies; an image may set PYTHONSAFEPATH
    from provision import CannotStart, provide  # type: ignore[import-not-found]

    try:
        node.remark = provide(node.say, lambda: node.told_to_end)
    except CannotStart as error:
        return node.refuse(str(error))
    pods = -(-world // per_node)
    if pods > 1:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) - 1
        receive(port, pods - 1, node) if index == 0 else join(address, port, node)
    return node.run()


def receive(port: int, others: int, node: Node) -> None:
    """Pod 0: wait until all other pods are there, then release them. Ends early when this pod is told to end."""
    peers: list[socket.socket] = []
    dual = socket.has_dualstack_ipv6()
    with socket.create_server(
        ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=others, dualstack_ipv6=dual
    ) as server:
        server.settimeout(1.0)
        while len(peers) < others and not node.told_to_end:
            try:
                peer = server.accept()[0]
            except TimeoutError:
                continue
            if greets(peer):
                peers.append(peer)
            else:
                peer.close()
    for peer in peers:
        with contextlib.suppress(OSError):  # a pod that has ended since; the others are not to wait for it
            peer.sendall(b"go\n")
        peer.close()


def greets(peer: socket.socket) -> bool:
    """Returns whether the peer is another pod. A probe or a port scan that connects in silence may not delay the pods."""
    peer.settimeout(GREETING)
    try:
        said = read_line(peer)
    except OSError:
        return False
    peer.settimeout(None)
    return said == b"here\n"


def join(address: str, port: int, node: Node) -> None:
    """Connects until pod 0 answers: at first its name may not resolve, and then nobody may listen."""
    said = time.monotonic()
    while not node.told_to_end:
        try:
            with socket.create_connection((address, port), timeout=5.0) as pod0:
                pod0.sendall(b"here\n")
                pod0.settimeout(None)
                if read_line(pod0) == b"go\n":
                    return
        except OSError as error:
            if time.monotonic() - said > 60.0:
                said = time.monotonic()
                node.say(f"waiting for pod 0 at {address}:{port}: {error}")
        time.sleep(0.2)


def read_line(peer: socket.socket) -> bytes:
    """Reads one line, or as much as exceeds any line that pods exchange."""
    data = b""
    while not data.endswith(b"\n") and len(data) < 16:
        more = peer.recv(16)
        if not more:
            return data
        data += more
    return data


class Node:
    """The ranks of one pod."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = ranks
        self.out = os.environ["TRIREME_OUT"]
        self.attempt = int(os.environ["TRIREME_ATTEMPT"])
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.told_to_end = False
        self.ended_by_us = False
        self.first_failure: int | None = None  # exit code, as a shell would say it
        self.kills_before = oom_kills()
        self.remark = ""  # for the trial's record

    def terminate(self, *_: object) -> None:
        self.told_to_end = True
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def say(self, text: str) -> None:
        for line in text.splitlines():
            emit(f"[{self.ranks[0]}] {line}".encode())

    def run(self) -> int:
        """Starts the ranks, relays their output and metrics, and returns the pod's exit code."""
        if self.told_to_end:
            return STOPPED
        os.makedirs(self.out, exist_ok=True)
        metrics = Growing(os.path.join(self.out, METRICS))  # grows in the pod of the rank that reports
        readers = [self.start(rank) for rank in self.ranks]
        codes = self.wait(metrics)
        for reader in readers:
            reader.join()
        self.explain(codes)
        self.pass_on_remark()
        metrics.send(rest=True)
        self.send_files()
        self.write_termination_message()
        return max(codes.values()) if self.first_failure is None else self.first_failure

    def refuse(self, why: str) -> int:
        """Reports that this node lacks something its ranks need, starts none, and returns the exit code."""
        self.say(why)
        os.makedirs(self.out, exist_ok=True)
        self.write_failure(self.ranks[0], "configuration", why)
        self.send_files()
        self.write_termination_message()
        return REFUSED

    def write_failure(self, rank: int, reason: str, message: str) -> None:
        """Writes a failure for a rank that could not."""
        path = os.path.join(self.out, FAILURE.format(rank=rank))
        if not current(path, self.attempt):
            with open(path, "w") as stream:
                written = {"format": FORMAT, "attempt": self.attempt, "rank": rank}
                json.dump({**written, "reason": reason, "message": message, "collective": None}, stream)

    def start(self, rank: int) -> threading.Thread:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank - self.ranks[0]), "LOCAL_WORLD_SIZE": str(len(self.ranks))}
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **place}
        command = [sys.executable, "-u", "-m", "trainer", os.environ["TRIREME_CONFIG"], "--out", self.out, "--attempt", str(self.attempt)]
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.processes[rank] = process
        reader = threading.Thread(target=relay, args=(rank, process.stdout))
        reader.start()
        return reader

    def wait(self, metrics: Growing) -> dict[int, int]:
        """Exit codes by rank. A rank that fails gives its peers a moment to say why, then all are ended."""
        since = 0.0
        while True:
            codes = {rank: process.poll() for rank, process in self.processes.items()}
            metrics.send()
            ended = {rank: code for rank, code in codes.items() if code is not None}
            bad = [128 - code if code < 0 else code for code in ended.values() if code not in (0, STOPPED)]
            if bad and self.first_failure is None:
                self.first_failure, since = bad[0], time.monotonic()
            if len(ended) == len(codes):
                return ended
            if bad and time.monotonic() - since > PEER_GRACE:
                self.ended_by_us = True
                for process in self.processes.values():
                    process.kill()
            time.sleep(0.1)

    def explain(self, codes: dict[int, int]) -> None:
        """A rank that was killed could not say why: the kernel's counter tells whether memory was the reason."""
        killed = [rank for rank, code in codes.items() if code == -signal.SIGKILL]
        if not killed or self.ended_by_us or oom_kills() <= self.kills_before:
            return
        message = "the kernel ended this rank: the pod's memory limit (cluster.memory) is too small for it"
        self.write_failure(killed[0], "host memory", message)

    def pass_on_remark(self) -> None:
        """A remark on a run that ended well goes into its result, where nothing else was said."""
        path = os.path.join(self.out, RESULT)
        if self.remark and 0 in self.ranks and current(path, self.attempt):
            with open(path) as stream:
                content = json.load(stream)
            if not content.get("message"):
                with open(path, "w") as stream:
                    json.dump({**content, "message": self.remark}, stream)

    def send_files(self) -> None:
        """This pod's failures, and from the pod of the rank that reports the timeline and at last the result."""
        names = [*(FAILURE.format(rank=rank) for rank in self.ranks), TIMELINE, RESULT]
        for name in names:
            path = os.path.join(self.out, name)
            if os.path.exists(path) and (name == TIMELINE or current(path, self.attempt)):
                send(name, path)

    def write_termination_message(self) -> None:
        """Writes the message of the pod's status, for when its log is lost: the result without its series, or the first failure."""
        result = [os.path.join(self.out, RESULT)]
        failures = sorted(glob.glob(os.path.join(glob.escape(self.out), FAILURE.format(rank="*"))))
        path = next((path for path in result + failures if current(path, self.attempt)), None)
        if path is None:
            return
        with open(path) as stream:
            content = json.load(stream)
        text = json.dumps({"file": os.path.basename(path), "content": content})
        if len(text) > 4000:  # 4096 bytes are kept
            short = {key: value for key, value in content.items() if not isinstance(value, list | dict)}
            text = json.dumps({"file": os.path.basename(path), "content": short})
        try:
            with open(os.environ.get("TRIREME_TERMINATION_LOG", "/dev/termination-log"), "w") as stream:
                stream.write(text[:4096])
        except OSError as error:
            self.say(f"no termination message: {error}")


class Growing:
    """Yields new whole lines of ``metrics.jsonl``, without those that an earlier attempt sent."""

    def __init__(self, path: str):
        self.path = path
        self.offset = os.path.getsize(path) if os.path.exists(path) else 0

    def send(self, rest: bool = False) -> None:
        try:
            with open(self.path, "rb") as stream:
                stream.seek(self.offset)
                data = stream.read()
        except FileNotFoundError:
            return
        whole = data if rest else data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            emit(f"#trireme {METRICS} + ".encode() + line)


def send(name: str, path: str) -> None:
    with open(path, "rb") as stream:
        text = base64.b64encode(zlib.compress(stream.read())).decode()
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    emit("\n".join(f"#trireme {name} {number}/{len(pieces)} {piece}" for number, piece in enumerate(pieces, 1)).encode())


def relay(rank: int, stream: IO[bytes]) -> None:
    """Everything a rank prints, in lines that no container runtime cuts."""
    for line in iter(lambda: stream.readline(PIECE), b""):
        emit(b"[%d] " % rank + line.rstrip(b"\n"))


class Sent:
    """Counts the lines that this pod has written."""

    lock = threading.Lock()
    lines = 0  # of ranks and files


def emit(lines: bytes, counted: bool = True) -> None:
    with Sent.lock:
        Sent.lines += counted * (lines.count(b"\n") + 1)
        sys.stdout.buffer.write(lines + b"\n")
        sys.stdout.buffer.flush()


def current(path: str, attempt: int) -> bool:
    """Returns whether this attempt wrote the file."""
    content: Any = None
    try:
        with open(path) as stream:
            content = json.load(stream)
    except (OSError, ValueError):
        pass
    return isinstance(content, dict) and content.get("attempt") == attempt


def oom_kills() -> int:
    """Returns how many processes of this container the kernel has killed for lack of memory (cgroup v2, then v1)."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        if os.path.exists(path):
            with open(path) as stream:
                return next((int(line.split()[1]) for line in stream if line.startswith("oom_kill ")), 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
