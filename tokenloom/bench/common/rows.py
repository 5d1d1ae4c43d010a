"""What samples of all ranks come to, and the file that keeps rows with their setup."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np


def of_the_slowest(times_us: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Percentiles of the slowest rank.

    Args:
        times_us: samples [W][iterations]; all ranks take each sample together.

    Returns:
        p50 and p99 over the slowest rank of each sample, as measured values without interpolation, and the rank that
        was slowest most often.
    """
    times = np.asarray(times_us)
    p50, p99 = np.percentile(times.max(0), [50, 99], method="inverted_cdf").tolist()
    return p50, p99, Counter(times.argmax(0).tolist()).most_common(1)[0][0]


def write_json(file: Path, setup: dict[str, Any], notes: Sequence[str], rows: Sequence[Any]) -> None:
    """Write one JSON object: ``setup``, which all rows share, ``notes``, and ``rows``.

    Args:
        notes: why rows are missing, and what else a reader must know to believe the rest.
        rows: dataclasses.
    """
    content = {"setup": setup, "notes": list(notes), "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(content, indent=1) + "\n")
