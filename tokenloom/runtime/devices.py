"""What this process may use of a GPU."""

from __future__ import annotations

import torch

from tokenloom.jit.kernel import checked, load_driver


def usable_sms(device_index: int) -> int:
    """SMs that kernels of this process may run on: fewer than the GPU has under an MPS limit or a green context."""
    driver = load_driver()
    with torch.cuda.device(device_index):
        torch.cuda.current_stream(device_index).synchronize()  # makes torch's context current
        resource = checked(
            driver.cuCtxGetDevResource(
                checked(driver.cuCtxGetCurrent()), driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
            )
        )
    return int(resource.sm.smCount)
