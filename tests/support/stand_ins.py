"""Backend "nvlink" without a GPU: what its calls ask of torch.cuda, of the driver and of shared memory, doing nothing.

Tensors lie on the CPU. Calls are over when :meth:`StandIns.settle` says so, or when the host waits for one.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tokenloom.backends import registry
from tokenloom.backends.peers import backend, buffers, opening, outcomes
from tokenloom.backends.peers.opening import Launcher
from tokenloom.backends.peers.outcomes import CAPTURED_SLOT
from tokenloom.comm import communicator
from tokenloom.comm.communicators_by_shape import Communicators
from tokenloom.inference import mega_gemms
from tokenloom.jit import kernel
from tokenloom.ops import gemm
from tokenloom.runtime import rendezvous
from tokenloom.runtime.kernel_reports import RECORD_WORDS, SEQUENCE_WORD, HostCounts
from tokenloom.runtime.rank_group import RankGroup
from tokenloom.runtime.symmetric_memory import BufferLayout
from tokenloom.runtime.turns import Turn

NUM_SMS = 132


class Stream:
    """A stream, made anew at each question, as torch does."""

    def __init__(self, device: object = None, priority: int = 0, cuda_stream: int = 7) -> None:
        self.cuda_stream, self.device_index = cuda_stream, 0
        self.query: Callable[[], bool] = lambda: True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    __hash__ = None  # type: ignore[assignment]

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)


class Memory:
    """A symmetric buffer that only this process has."""

    def __init__(self, layout: BufferLayout, ranks: RankGroup, fill: int = 0) -> None:
        self.layout = layout
        memory = torch.full((layout.total_bytes + 256,), fill, dtype=torch.uint8, device="cpu")
        self._memory = memory[-memory.data_ptr() % 256 :]
        self.addresses = [self._memory.data_ptr()] * ranks.num_ranks
        self.peers = torch.tensor(self.addresses, device="cpu")

    def view(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        offset, _ = self.layout.places[name]
        size = dtype.itemsize * torch.Size(shape).numel()
        return self.bytes(offset, size).view(dtype).view(shape)

    def bytes(self, begin: int, num_bytes: int) -> torch.Tensor:
        return self._memory[begin : begin + num_bytes]

    def copy_to(self, rank: int, offset: int, rows: torch.Tensor) -> None:
        pass

    def ended_ranks(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


class StandIns:
    """While it is entered, communicators of backend "nvlink" can be made on the CPU.

    Args:
        num_ranks: that groups pretend to have.

    Attributes:
        launchers: of the communicators that were made.
        launched: each kernel that opened a call while ``keeps`` was set: its variant and its arguments then.
        asked: how often each stand-in was asked, while ``keeps`` is set.
        capturing: what streams answer.
        stream: handle of the current stream.
        counts: what every dispatch with exact sizes leaves for the host, zeros behind them.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.launchers: list[Launcher] = []
        self.launched: list[tuple[Any, Any]] = []
        self.asked: Counter[str] = Counter()
        self.keeps, self.capturing, self.stream = False, False, 7
        self.counts: list[int] = []
        self._stack = ExitStack()

    def __enter__(self) -> StandIns:
        cuda: dict[str, Callable[..., Any]] = {
            "current_stream": lambda device=None: Stream(cuda_stream=self.stream),
            "is_current_stream_capturing": lambda: self.capturing,
            "current_device": lambda: 0,
            "synchronize": lambda device=None: None,
            "device": lambda index: nullcontext(),
            "set_stream": lambda stream: None,
            "get_device_properties": lambda device: SimpleNamespace(multi_processor_count=NUM_SMS),
        }
        for name, answer in cuda.items():
            self._patch(torch.cuda, name, self._counted(name, answer))
        self._patch(torch.cuda, "Stream", Stream)
        self._patch(torch._C, "_cuda_getCurrentRawStream", self._counted("raw stream", lambda index: self.stream))
        zeros = torch.zeros
        self._patch(torch, "zeros", lambda *size, pin_memory=False, **options: zeros(*size, **options))
        self._patch(kernel, "load_driver", lambda: None)
        self._patch(kernel, "_function", lambda spec, index: 1)
        self._patch(kernel, "launch_function", lambda: self._launch)
        self._patch(gemm, "operand_map", lambda *shape: kernel.TensorMap())
        self._patch(mega_gemms, "row_windows", lambda rows, recipe: torch.empty(1))
        self._patch(mega_gemms, "scale_map", lambda *shape: kernel.TensorMap())
        self._patch(backend, "usable_sms", lambda index: NUM_SMS)
        self._patch(backend, "SymmetricBuffer", Memory)
        self._patch(buffers, "SymmetricBuffer", Memory)
        self._patch(opening, "close_together", lambda buffers: None)
        # Who waits for a call looks at once, and finds it over.
        self._patch(outcomes, "LOOK_EVERY_S", -1.0)
        self._patch(outcomes.Outcomes, "_look_around", lambda *arguments: self.settle())
        self._patch(HostCounts, "wait", self._counted("reads of counts", self._wait_for_counts))
        tolist = torch.Tensor.tolist
        self._patch(torch.Tensor, "tolist", self._counted("tolist", lambda tensor: tolist(tensor)))
        self._patch(communicator, "agree", lambda ranks, prepare, what: [prepare()[1]] * ranks.num_ranks)
        self._patch(rendezvous, "agree", lambda ranks, prepare, what: [prepare()[1]])
        self._patch(rendezvous, "agreeing", lambda ranks, what: nullcontext())
        meeting = SimpleNamespace(open_timeout_s=1.0, timeout_s=1.0, masks_late=False, turn=Turn())
        self._patch(Communicators, "meeting", lambda communicators, device: meeting)
        self._patch(communicator, "RankGroup", self._ranks)
        self._patch(registry, "probe", lambda request: [])
        self._patch(registry, "make", self._make)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def settle(self) -> None:
        """Write what kernels write when they are over."""
        for launcher in self.launchers:
            for number in range(max(launcher._num_launches - CAPTURED_SLOT, 0), launcher._num_launches):
                launcher.outcomes._records._words[record_word(number, SEQUENCE_WORD)] = number + 1

    def _patch(self, owner: object, name: str, value: object) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, value, create=True))

    def _counted(self, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **options: Any) -> Any:
            if self.keeps:
                self.asked[name] += 1
            return answer(*arguments, **options)

        return ask

    def _launch(self, shape: int, function: int, pointers: int, extra: None) -> int:
        """A call of the C library with as many operands as the driver has."""
        if self.keeps:
            self.asked["launches"] += 1
            address = ctypes.c_void_p.from_address(pointers).value
            for launcher in self.launchers:
                for each in launcher._all_kernels:
                    if ctypes.addressof(each.args) == address:
                        self.launched.append((each.variant, type(each.args).from_buffer_copy(each.args)))
        _nothing(shape, function, pointers, extra)
        return 0

    def group(self) -> Any:
        """A process group of so many ranks, for programs that make communicators themselves."""
        group = mock.Mock(spec=dist.ProcessGroup)
        group.size.return_value, group.rank.return_value = self.num_ranks, 0
        return group

    def _wait_for_counts(self, counts: HostCounts, look: object) -> list[int]:
        size = len(counts._words) - 1
        return [*self.counts, *[0] * (size - len(self.counts))][:size]

    def _ranks(self, group: object, **options: Any) -> RankGroup:
        ranks = RankGroup(None, **options)
        ranks.num_ranks = self.num_ranks
        return ranks

    def _make(self, request: Any, ranks: RankGroup, probes: object) -> registry.Choice:
        made = backend.NvlinkBackend(request.plan, ranks, request.num_sms, request.checked)
        self.launchers.append(made._launcher)
        return registry.Choice(made, "a stand-in", [])


class Operations(TorchDispatchMode):
    """Counts operations of torch by name, those that make views included."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def asked(stand_ins: StandIns, call: Callable[[], Any]) -> dict[str, int]:
    """What a call asks from its third time on: of torch.cuda, launches of kernels, and operations."""
    for _ in range(2):
        call()
        stand_ins.settle()
    stand_ins.asked.clear()
    stand_ins.keeps = True
    with Operations(stand_ins.asked):
        call()
    stand_ins.keeps = False
    stand_ins.settle()
    return dict(stand_ins.asked)


def record_word(number: int, word: int) -> int:
    """Where the record of a launch has a word."""
    return RECORD_WORDS * (number % CAPTURED_SLOT) + word


_nothing = ctypes.CDLL(None).getpid
_nothing.argtypes = [ctypes.c_void_p] * 4
