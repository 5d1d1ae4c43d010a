"""Settings that hold for the whole process."""

from __future__ import annotations

import torch

from tokenloom.errors import InvalidArgument
from tokenloom.inference.mega_gemms import sms_for_gemms


def get_num_sms() -> int:
    """Return how many SMs of the current GPU the layer's kernels take: all, and 0 without a GPU."""
    return sms_for_gemms(torch.device("cuda")) if torch.cuda.is_available() else 0


def set_num_sms(num_sms: int) -> None:
    """Accept the number that ``get_num_sms`` returns, as programs do that put back what they found.

    Raises:
        InvalidArgument: another number. The layer's kernels take all SMs.
    """
    if num_sms != get_num_sms():
        raise InvalidArgument(f"num_sms is {num_sms!r}; kernels of this layer take all {get_num_sms()} SMs")


def set_pdl(new_value: bool) -> None:
    """Do nothing, whatever is set: kernels of this layer begin early where they can, and keep the stream's order."""
