"""Launches: what they need of the thread that makes them, of the device, and of a capture."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import NUM_GPUS
from tests.support.small_kernels import scale_spec, write_package
from tokenloom.errors import InvalidArgument
from tokenloom.jit import compiler, kernel
from tokenloom.jit.compiler import KernelSpec
from tokenloom.jit.kernel import Kernel, LaunchShape

OK, INVALID_CONTEXT, INVALID_HANDLE, OTHER = 0, 201, 400, 999
STREAM, FUNCTION = 1234, 5678


class Result(IntEnum):
    """What the driver answers."""

    CUDA_SUCCESS = OK
    CUDA_ERROR_INVALID_CONTEXT = INVALID_CONTEXT
    CUDA_ERROR_INVALID_HANDLE = INVALID_HANDLE
    CUDA_ERROR_999 = OTHER


class Driver:
    """Launches nothing, and answers as it is told to."""

    CUresult = Result

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.said: list[str] = []

    def launch(self, shape: int, function: int, pointers: int, extra: None) -> int:
        """What is bound to the driver's cuLaunchKernelEx, with the struct that it is given."""
        given = LaunchShape.from_address(shape)
        sizes = (given.blocks, given.blocks_y, given.blocks_z, given.threads, given.threads_y, given.threads_z)
        assert sizes == (3, 1, 1, 64, 1, 1)
        assert (given.stream, given.attributes, given.num_attributes) == (STREAM, None, 0)
        assert function == FUNCTION
        assert ctypes.c_void_p.from_address(pointers).value, "the address of the arguments"
        self.said.append("launch")
        return self.answers.pop(0)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launch a kernel by a driver that answers so, and return what happened."""

    def run(spec: KernelSpec, *answers: int) -> list[str]:
        driver = Driver(*answers)

        @contextmanager
        def device(index: int) -> Iterator[None]:
            driver.said.append(f"device {index}")
            yield

        monkeypatch.setattr(kernel, "load_driver", lambda: driver)
        monkeypatch.setattr(kernel, "launch_function", lambda: driver.launch)
        monkeypatch.setattr(kernel, "_function", lambda spec, index: FUNCTION)
        monkeypatch.setattr(kernel, "make_current", lambda index: None)
        monkeypatch.setattr(torch.cuda, "device", device)
        Kernel(spec, 2).launch(3, STREAM)
        return driver.said

    return run


def test_a_launch_is_one_call(launch: Any) -> None:
    """The usual one asks the driver nothing else."""
    assert launch(scale_spec(), OK) == ["launch"]


@pytest.mark.parametrize("status", [INVALID_CONTEXT, INVALID_HANDLE])
def test_another_device_may_be_current(launch: Any, status: int) -> None:
    """The driver finds no context, in threads of autograd, or another device's: the launch is made again there."""
    assert launch(scale_spec(), status, OK) == ["launch", "device 2", "launch"]


def test_other_errors_are_raised(launch: Any) -> None:
    """Once: what has failed on its own device fails for another reason."""
    with pytest.raises(RuntimeError, match="CUDA_ERROR_999"):
        launch(scale_spec(), OTHER)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_999"):
        launch(scale_spec(), INVALID_HANDLE, OTHER)


def test_the_driver_has_the_same_struct() -> None:
    """The bindings' own, value by value, where they can be imported."""
    driver = pytest.importorskip("cuda.bindings.driver")
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 3, 4
    config.blockDimX, config.blockDimY, config.blockDimZ = 5, 6, 7
    config.sharedMemBytes, config.hStream, config.numAttrs = 8, driver.CUstream(9), 10
    found = LaunchShape.from_address(config.getPtr())
    assert [getattr(found, name) for name, *_ in LaunchShape._fields_] == [2, 3, 4, 5, 6, 7, 8, 9, None, 10]


def test_the_first_use_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the driver is asked to load anything, which would end the capture with an error of its own."""
    monkeypatch.setattr(kernel, "load_driver", lambda: Driver())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        InvalidArgument, match=r"^the first use of a kernel .* \(scale\); make the same call once before"
    ):
        Kernel(scale_spec(captured=1), 0)


class Mapper:
    """Writes down what tensor maps are asked of it, and makes each different."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def cuTensorMapEncodeTiled(self, kind: Any, rank: int, address: int, *rest: Any) -> tuple[Any, Any]:
        sizes, steps, box, _, _, swizzle, *_ = rest
        assert len(sizes) == rank
        given = (tuple(map(int, values)) for values in (sizes, steps, box))
        self.asked.append((kind.name.rpartition("_")[2], address, *given, swizzle.name.rpartition("_")[2]))
        words = [self._driver.cuuint64_t(len(self.asked))] * 16
        return self._driver.CUresult.CUDA_SUCCESS, SimpleNamespace(opaque=words)


def test_tensor_maps_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all that makes one: GPU, address, sizes, strides, width of values, box and swizzle."""
    mapper = Mapper(pytest.importorskip("cuda.bindings.driver"))
    monkeypatch.setattr(kernel, "load_driver", lambda: mapper)
    monkeypatch.setattr(kernel, "make_current", lambda index: None)
    kernel._tensor_map.cache_clear()
    whole = torch.zeros(8, 256, dtype=torch.uint8)
    at, scales = whole.data_ptr(), whole.view(torch.float32)
    asks: dict[tuple[Any, ...], tuple[torch.Tensor, tuple[int, ...], bool]] = {
        ("UINT8", at, (256, 8), (256,), (128, 4), "128B"): (whole, (128, 4), True),
        ("UINT8", at, (256, 8), (256,), (128, 4), "NONE"): (whole, (128, 4), False),
        ("UINT8", at, (256, 8), (256,), (64, 4), "NONE"): (whole, (64, 4), False),
        ("UINT8", at, (256, 4), (512,), (64, 4), "NONE"): (whole[::2], (64, 4), False),
        ("UINT8", at, (256, 4), (256,), (64, 4), "NONE"): (whole[:4], (64, 4), False),
        ("UINT8", at + 1024, (256, 4), (256,), (64, 4), "NONE"): (whole[4:], (64, 4), False),
        ("FLOAT32", at, (64, 8), (256,), (64, 4), "NONE"): (scales, (64, 4), False),
        ("UINT8", at, (256, 4, 2), (256, 1024), (64, 4, 1), "NONE"): (whole.view(2, 4, 256), (64, 4, 1), False),
    }
    try:
        made = [kernel.tensor_map(*ask) for ask in asks.values()]
        assert mapper.asked == list(asks)
        assert [each.word[0] for each in made] == [*range(1, len(asks) + 1)]
        assert [kernel.tensor_map(*ask) for ask in asks.values()] == made, "the same objects"
        assert len(mapper.asked) == len(asks)
        of_gpus = [kernel._tensor_map(gpu, at, 1, (4, 256), (256, 1), (64, 4), False) for gpu in (0, 1, 0)]
        assert of_gpus[0] is of_gpus[2] is not of_gpus[1]
    finally:
        kernel._tensor_map.cache_clear()  # what this driver made is no map


# -- on GPUs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small kernel, and a cache of its own."""
    monkeypatch.setattr(compiler, "PACKAGE", write_package(tmp_path / "package"))
    monkeypatch.setenv("TOKENLOOM_CACHE_DIR", str(tmp_path / "cache"))


def run_scale(spec: KernelSpec, device: int, out: torch.Tensor, blocks: int = 4) -> None:
    """out[i] = i + 7 for the first 256 values."""
    launched = Kernel(spec, device)
    args = launched.args
    args.out, args.length, args.step = out.data_ptr(), 256, 1
    args.inner.factor = 1
    launched.launch(blocks, torch.cuda.current_stream(out.device).cuda_stream)


def expected(device: int) -> torch.Tensor:
    return torch.arange(7, 263, dtype=torch.int32, device=f"cuda:{device}")


@pytest.mark.gpu(2)
def test_a_device_that_is_not_current(package: None) -> None:
    """Loaded and launched while another one is, with its own stream."""
    out = torch.zeros(256, dtype=torch.int32, device="cuda:1")
    with torch.cuda.device(0):
        run_scale(scale_spec(), 1, out)
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert torch.equal(out, expected(1))


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="no NVIDIA GPU on this machine")
def test_a_capture_survives_the_refusal(package: None) -> None:
    """What was captured before and after it runs when the graph does."""
    out = torch.zeros(2, 256, dtype=torch.int32, device="cuda:0")
    run_scale(scale_spec(), 0, out[0])
    torch.cuda.synchronize()
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(InvalidArgument, match="once before the capture"):
            run_scale(scale_spec(new=1), 0, out[0])
        run_scale(scale_spec(), 0, out[1])
    graph.replay()
    torch.cuda.synchronize()
    assert not out[0].any()
    assert torch.equal(out[1], expected(0))
