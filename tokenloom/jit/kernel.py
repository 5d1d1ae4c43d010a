"""Load a compiled kernel and launch it through the driver, with one packed struct of arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from tokenloom.errors import BackendUnavailable, InvalidArgument
from tokenloom.jit import cache as disk
from tokenloom.jit.compiler import KernelSpec, entry_symbol


class Kernel:
    """A kernel on one device, with arguments of its own.

    A launch writes nothing but ``args`` and makes one driver call. The driver copies the arguments before it returns,
    so one struct serves all launches of one thread.

    Args:
        spec: what to compile.
        device_index: index of the GPU.

    Attributes:
        args: the ``spec.args`` structure that the next launch passes.
        overlaps_previous: launches begin when the kernel before them on the stream lets them (device/ptx/grid.cuh),
            not when it is over. Kernels themselves wait for results of that one.

    Raises:
        InvalidArgument: the kernel is not loaded yet, and a CUDA graph is being captured.
        BackendUnavailable: there is no driver.
        KernelCompileError: the kernel does not compile.
    """

    def __init__(self, spec: KernelSpec, device_index: int) -> None:
        self.spec = spec
        self.device_index = device_index
        self._driver = load_driver()
        function = _function(spec, device_index)
        self.args: Any = spec.args()
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.args))
        self._shape = LaunchShape(1, 1, 1, spec.threads, 1, 1, spec.shared_bytes)
        self._where = (1, 0)
        self._launch = launch_function()
        self._operands = (ctypes.addressof(self._shape), int(function), ctypes.addressof(self._pointers), None)

    @property
    def overlaps_previous(self) -> bool:
        return bool(self._shape.num_attributes)

    @overlaps_previous.setter
    def overlaps_previous(self, overlaps_previous: bool) -> None:
        self._shape.attributes, self._shape.num_attributes = ctypes.addressof(EARLY), int(overlaps_previous)

    def launch(self, blocks: int, stream: int) -> None:
        """Put one launch with the present ``args`` on a stream. The device need not be the current one.

        Args:
            blocks: blocks of the grid.
            stream: raw handle of a stream of this kernel's device.

        Raises:
            RuntimeError: the driver refuses, for the reason that the message names.
        """
        if (blocks, stream) != self._where:  # to write them takes longer than to look
            self._shape.blocks, self._shape.stream = self._where = blocks, stream
        status = self._launch(*self._operands)
        if status:
            self._launch_elsewhere(status)

    def _launch_elsewhere(self, status: int) -> None:
        """Launch again on this kernel's device, if the error says that another one is current, or raise the error."""
        results = self._driver.CUresult
        # Another device's, or none yet in this thread.
        if status in (results.CUDA_ERROR_INVALID_CONTEXT, results.CUDA_ERROR_INVALID_HANDLE):
            with torch.cuda.device(self.device_index):
                make_current(self.device_index)
                status = self._launch(*self._operands)
        if status:
            checked((results(status),))


class LaunchShape(ctypes.Structure):
    """The driver's CUlaunchConfig: how many blocks of what size run on which stream."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute: which one, and its value in a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


EARLY = LaunchAttribute(6, 0, 1)
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


@cache
def launch_function() -> Callable[..., int]:
    """The driver's cuLaunchKernelEx: (shape, function, pointers to arguments, None) -> status.

    The bindings make Python objects of eleven values at each launch, which takes longer than the driver itself.
    """
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes, launch.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return launch


class TensorMap(ctypes.Structure):
    """Mirror of TensorMap in device/ptx/tensor.cuh: 128 opaque bytes."""

    _fields_ = [("word", ctypes.c_uint64 * 16)]


def tensor_map(tensor: torch.Tensor, box: tuple[int, ...], swizzle: bool = False) -> TensorMap:
    """How TMA finds boxes of a tensor of 1-byte or float32 values, the innermost of which follow each other.

    Who gets it must not write it, only copy it: whoever asks for an equal one gets the same object.

    Args:
        box: its sizes, innermost dimension first.
        swizzle: 128-byte swizzle of the box in shared memory; its innermost dimension then has 128 bytes.
    """
    where = tensor.device.index, tensor.data_ptr()
    return _tensor_map(*where, tensor.itemsize, tuple(tensor.shape), tensor.stride(), box, swizzle)


@lru_cache(maxsize=1024)  # to make one takes the host as long as the rest of a launch
def _tensor_map(
    device_index: int,
    address: int,
    itemsize: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: bool,
) -> TensorMap:
    driver = load_driver()
    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    make_current(device_index)
    sizes = shape[::-1]
    # Where a dimension is 1, torch may have any stride.
    packed = accumulate(sizes[:-1], mul)
    given = zip(sizes[1:], reversed(stride[:-1]), packed, strict=True)
    steps = [(step if size > 1 else own) * itemsize for size, step, own in given]
    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32 if itemsize == 4 else kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(sizes),
            address,
            [driver.cuuint64_t(size) for size in sizes],
            [driver.cuuint64_t(step) for step in steps],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1) for _ in box],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzle else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    found = TensorMap()
    found.word[:] = [int(word) for word in encoded.opaque]
    return found


def blocks_per_sm(entry: disk.Entry) -> int:
    """How many blocks of a kernel fit on one SM of the current CUDA context's GPU at once.

    Raises:
        RuntimeError: the GPU is of another architecture.
    """
    driver = load_driver()
    module, function = _load(driver, entry)
    try:
        return checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, entry.threads, entry.shared_bytes))
    finally:
        checked(driver.cuModuleUnload(module))


def _load(driver: Any, entry: disk.Entry) -> tuple[Any, Any]:
    """(module, function), with room for its dynamic shared memory."""
    module = checked(driver.cuModuleLoadData(entry.cubin))
    function = checked(driver.cuModuleGetFunction(module, entry_symbol(entry.name).encode()))
    if entry.shared_bytes:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, attribute, entry.shared_bytes))
    return module, function


@cache
def _function(spec: KernelSpec, device_index: int) -> Any:
    """The kernel in the device's primary context, which torch uses; loaded once in this process."""
    if torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            f"the first use of a kernel loads it, which a CUDA graph cannot capture ({spec.name}); make the same call "
            "once before the capture"
        )
    with torch.cuda.device(device_index):
        make_current(device_index)
        return _load(load_driver(), disk.get(spec))[1]


def make_current(device_index: int) -> None:
    """Threads that torch starts, for backward say, have no current context until torch itself needs one there."""
    driver = load_driver()
    if not int(checked(driver.cuCtxGetCurrent())):
        device = checked(driver.cuDeviceGet(device_index))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))


@cache
def load_driver() -> Any:
    """The driver bindings, initialised.

    Raises:
        BackendUnavailable: no driver, or no bindings.
    """
    try:
        from cuda.bindings import driver

        checked(driver.cuInit(0))
    except Exception as error:  # the bindings raise errors of several types when the library is missing
        raise BackendUnavailable(f"no CUDA driver ({error})") from error
    return driver


def checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call; raises RuntimeError with the driver's name for the error."""
    status, *values = answer
    if status:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if len(values) == 1 else values
