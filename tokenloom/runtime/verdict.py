"""What a rank says where it has come to the end of something that all ranks do in steps."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """How something ended on a rank that all ranks do together, for :meth:`RankGroup.all_gather_object`.

    Attributes:
        failed: whether it failed. fatal: nothing else would help.
        of_another: it failed because another rank did.
        text: why.
    """

    failed: bool
    fatal: bool = False
    of_another: bool = False
    text: str = ""
