"""A model of dispatch and combine between nodes by GPU-initiated puts and signals: docs/explanation/between-nodes.md.

Ranks are generators (``rank.py``) on a fabric that keeps only the promises of NVLink and of a network (``fabric.py``).
A run is one history of many (``history.py``). Rules broken on purpose (``broken.py``) show that a run can fail.
"""

from __future__ import annotations

from tests.support.network_model.calls import COMBINE, DISPATCH, Call, Shape, in_halves, make_calls, whole
from tests.support.network_model.fabric import Fabric, Violation, Wait
from tests.support.network_model.history import Outcome, Report, culprits, run
from tests.support.network_model.rank import Rank

__all__ = [
    "COMBINE",
    "DISPATCH",
    "Call",
    "Fabric",
    "Outcome",
    "Rank",
    "Report",
    "Shape",
    "Violation",
    "Wait",
    "culprits",
    "in_halves",
    "make_calls",
    "run",
    "whole",
]
