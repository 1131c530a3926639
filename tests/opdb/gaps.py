"""The known gaps: a file of rows that may only get shorter."""

from __future__ import annotations

from pathlib import Path

from tests.opdb.rows import Row

GAPS_FILE = Path(__file__).with_name("known_gaps.txt")
# The length of the file today. Lower it whenever a line goes; it is never raised.
MAX_GAPS = 0


def known_gaps() -> dict[Row, str]:
    """Reason by row; a line reads `op dtype mode reason`."""
    gaps = {}
    for line in GAPS_FILE.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            op, dtype, mode, reason = line.split(maxsplit=3)
            gaps[Row(op, dtype, mode)] = reason
    return gaps
