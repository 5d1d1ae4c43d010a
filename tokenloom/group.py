"""The ranks of one group: collectives with deadlines, which name the ranks that are missing."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.errors import CommunicatorBroken, InvalidArgument, PeerTimeout

SIGN_IN_AFTER_S = 1.0
"""A rank that has waited this long signs the roll in the store, so that others can tell who is missing."""
ROLL_CALL_S = 2.0
"""How long to wait for others to sign the roll after the connection broke."""

# Renamed in torch 2.13, which warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_made_on: Counter[str] = Counter()
"""RankGroups made so far per process group: the same on all ranks, since making one is collective."""


class RankGroup:
    """A process group (or a single rank without one) as the collective backend uses it.

    Every rank calls the same methods in the same order. Tensors on the wire are int32, int64, uint8 or
    floating point, on ``device``.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None: the default group if torch.distributed
            is initialised, else a group of this rank alone.
        device: where tensors lie; None picks the current GPU for NCCL groups and the CPU otherwise.
        timeout_s: longest wait for other ranks, in seconds. Over gloo it is kept by this class and ends in
            PeerTimeout; over NCCL the group's own timeout applies.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise InvalidArgument(
                    f"group is a DeviceMesh of {group.ndim} dimensions; pass one of them: mesh['name']"
                )
            group = group.get_group()
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise InvalidArgument("this process is not a rank of the group; make the communicator on its ranks only")
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s < threading.TIMEOUT_MAX:
            raise InvalidArgument(f"timeout_s is {timeout_s!r}, expected seconds above 0")
        self.process_group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.device = self._pick_device(device)
        self.timeout_s = timeout_s
        self._deadline_is_ours = group is not None and self.device.type == "cpu"
        name = "" if group is None else group.group_name
        self._roll = f"tokenloom/{_made_on[name]}"
        _made_on[name] += 1
        self._epoch = 0
        self._broken: str | None = None

    def _pick_device(self, device: torch.device | str | None) -> torch.device:
        if device is None:
            nccl = self.process_group is not None and "nccl" in dist.get_backend_config(self.process_group)
            device = "cuda" if nccl and torch.cuda.is_available() else "cpu"
        try:
            picked = torch.device(device)
            if picked.type == "cuda" and picked.index is None:
                picked = torch.device("cuda", torch.cuda.current_device())
        except (RuntimeError, TypeError, AssertionError) as error:  # what torch raises without CUDA differs by build
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"device is {device!r}, expected one that torch has here: {reason}") from error
        return picked

    @property
    def transport(self) -> str:
        """Name of what carries the bytes: "gloo", "nccl" or "local"."""
        if self.process_group is None:
            return "local"
        config = dist.get_backend_config(self.process_group)
        by_device = dict(part.split(":") for part in config.split(",") if ":" in part)
        return by_device.get(self.device.type, config)

    def require_alive(self) -> None:
        """Raises CommunicatorBroken once a wait has timed out or the group was closed."""
        if self._broken:
            raise CommunicatorBroken(f"{self._broken}; make a new communicator")

    def close(self) -> None:
        """Makes every later call raise CommunicatorBroken. The process group itself stays the caller's."""
        self._broken = self._broken or "this communicator was closed"

    def all_gather_object(self, value: Any, phase: str) -> list[Any]:
        """The (picklable) value of every rank, by rank."""
        if self.num_ranks == 1:
            return [value]
        encoded = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        sizes = self.all_gather(torch.tensor([encoded.numel()], device=self.device), phase).flatten().tolist()
        room = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        room[: encoded.numel()] = encoded
        rows = self.all_gather(room, phase).cpu()
        return [pickle.loads(rows[rank, :size].numpy().tobytes()) for rank, size in enumerate(sizes)]

    def all_gather(self, row: torch.Tensor, phase: str) -> torch.Tensor:
        """[n] on every rank -> [W, n] on every rank."""
        out = torch.empty(self.num_ranks * row.numel(), dtype=row.dtype, device=self.device)
        if self.process_group is None:
            out.copy_(row)
        else:
            self._run(lambda: _all_gather(out, row, group=self.process_group, async_op=True), phase)
        return out.view(self.num_ranks, -1)

    def all_to_all(
        self, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], phase: str
    ) -> torch.Tensor:
        """Send the first ``send_counts[0]`` rows to rank 0, the next to rank 1, ...; same order on arrival.

        Any dtype: rows travel as bytes, since gloo lacks FP8.
        """
        out = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
        if self.process_group is None:
            return out.copy_(rows)
        sent, received = rows.view(torch.uint8), out.view(torch.uint8)
        self._run(
            lambda: dist.all_to_all_single(
                received, sent, recv_counts, send_counts, group=self.process_group, async_op=True
            ),
            phase,
        )
        return out

    def all_reduce_sum(self, values: torch.Tensor, phase: str) -> torch.Tensor:
        """The sum over ranks, as a new tensor."""
        out = values.detach().clone()
        if self.process_group is not None:
            self._run(lambda: dist.all_reduce(out, group=self.process_group, async_op=True), phase)
        return out

    def _run(self, start: Callable[[], Any], phase: str) -> None:
        """Start a collective and wait for it: on the host with our deadline (gloo), on the stream (NCCL)."""
        self.require_alive()
        self._epoch += 1
        if not self._deadline_is_ours:
            start().wait()
            return
        began = time.monotonic()
        error = self._wait(start, min(SIGN_IN_AFTER_S, self.timeout_s / 2))
        if error is None:
            return
        timed_out = time.monotonic() - began >= self.timeout_s
        cause = f"no answer within {self.timeout_s:g} s" if timed_out else f"the connection broke ({error})"
        missing = self._missing_ranks(0.0 if timed_out else min(ROLL_CALL_S, self.timeout_s))
        timeout = PeerTimeout(self.rank, missing, phase, self._epoch, cause)
        self._broken = f"an earlier call failed: {timeout}"
        raise timeout from error

    def _wait(self, start: Callable[[], Any], sign_in_after_s: float) -> RuntimeError | None:
        """Wait until the deadline; whoever waits long signs the roll meanwhile. Returns what went wrong, if so."""
        work = None
        try:
            work = start()
            work.wait(timedelta(seconds=sign_in_after_s))
            return None
        except RuntimeError as error:
            self._sign_in()
            if work is None:
                return error
        try:  # not there yet, or broken, in which case this raises at once
            work.wait(timedelta(seconds=self.timeout_s - sign_in_after_s))
            return None
        except RuntimeError as error:
            return error

    def _sign_in(self) -> None:
        store = _store_of(self.process_group)
        if store is not None:
            store.set(f"{self._roll}/{self._epoch}/{self.rank}", b"here")

    def _missing_ranks(self, wait_s: float) -> list[int]:
        store = _store_of(self.process_group)
        if store is None:
            return []
        deadline = time.monotonic() + wait_s
        missing = [rank for rank in range(self.num_ranks) if rank != self.rank]
        while True:
            missing = [rank for rank in missing if not store.check([f"{self._roll}/{self._epoch}/{rank}"])]
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(0.05)


def _store_of(group: dist.ProcessGroup | None) -> Any:
    """The key-value store that the group was made with, or None where torch keeps it out of reach."""
    try:
        return group.get_group_store()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
