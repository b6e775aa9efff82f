"""What a person sees of a sweep that runs, and what a command in the background owes to others."""

from __future__ import annotations

from tests.planted.defect import Defect

LIVE, REMAINING = "launcher/sweep/live.py", "launcher/sweep/remaining.py"
PROGRESS, AT_WORK, NOTIFY = "launcher/sweep/progress.py", "launcher/sweep/at_work.py", "launcher/sweep/notify.py"
PICTURE, BACKGROUND = "tests/sweep/test_live.py", "tests/sweep/test_at_work.py"

DEFECTS = [
    Defect(
        "lines of the live table are counted in characters, not in columns",
        LIVE,
        "return set_cell_size(words, room) if cell_len(words) <= room else",
        "return words if len(words) <= room else",
        PICTURE,
    ),
    Defect(
        "a terminal's height is forgotten",
        LIVE,
        "room = max(1, min(MOST_ROWS, height - 3 - len(head) - len(reasons)))",
        "room = MOST_ROWS",
        PICTURE,
    ),
    Defect(
        "what ended trials have measured does not correct the others' predictions",
        REMAINING,
        "per_step = learnt.step_s if predicted is None else predicted * learnt.ratio",
        "per_step = learnt.step_s if predicted is None else predicted",
        PICTURE,
    ),
    Defect(
        "waiting trials are expected to run all at once",
        REMAINING,
        "heapq.heapreplace(slots, slots[0] + known[record.id])",
        "heapq.heappush(slots, known[record.id])",
        PICTURE,
    ),
    Defect(
        "a terminal of another size keeps the torn table",
        PROGRESS,
        "            self._console.clear()\n",
        "",
        PICTURE,
    ),
    Defect(
        "escape codes go into a pipe",
        PROGRESS,
        "return sys.stdout.isatty() and sys.stderr.isatty() and",
        "return sys.stderr.isatty() and",
        "tests/sweep/test_progress.py",
    ),
    Defect(
        "a command in the background keeps its terminal",
        AT_WORK,
        "    os.setsid()\n    _write_into(log)\n",
        "    os.setsid()\n",
        BACKGROUND,
    ),
    Defect(
        "a command that is refused in the background is taken for one that began",
        AT_WORK,
        "        if os.read(reading, 1):",
        "        if not os.read(reading, 1):",
        BACKGROUND,
    ),
    Defect(
        "a second command joins a sweep that is being run",
        AT_WORK,
        "            self._locks.take(self._name)\n",
        "",
        BACKGROUND,
    ),
    Defect(
        "an interrupted sweep is told as done",
        NOTIFY,
        '        return "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"',
        '        return "done"',
        BACKGROUND,
    ),
]
