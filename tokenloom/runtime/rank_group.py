"""The ranks of one group: collectives with deadlines, which name the ranks that are missing."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.errors import CommunicatorBroken, InvalidArgument, PeerError, PeerTimeout
from tokenloom.runtime.leftovers import release_dropped, undo_when_dropped
from tokenloom.runtime.noteboard import Noteboard

OPEN_TIMEOUT_S = 600.0
"""Least default for the opening of a call: another rank's host may write a checkpoint, evaluate or compile."""
MAX_TIMEOUT_S = 1e9
"""31 years. In nanoseconds, and added to the time of day as GPUs count it, it still fits an int64."""
SIGN_IN_AFTER_S = 0.5
"""A rank that has waited this long signs in at the noteboard, so that others can tell who is missing."""
LOOK_EVERY_S = 0.5
"""How often a rank that waits looks whether another one has given up: then nobody will answer."""
ROLL_CALL_S = 1.0
"""How long a rank that gives up waits for those to sign in that came at the last moment."""

# Renamed in torch 2.13, which warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transfer:
    """A collective that has been started. Transfers of a group are waited for in the order they were started.

    Args:
        ranks: the group.
        work: torch's handle; an error, if the start failed; None if nothing is under way.
        result: what the collective fills.
        phase: what is going on, for error messages.
        step: number of the collective.
        limit_s: longest wait for other ranks, from the call of :meth:`wait` on.
    """

    def __init__(
        self,
        ranks: RankGroup,
        work: dist.Work | RuntimeError | None,
        result: torch.Tensor,
        phase: str,
        step: int,
        limit_s: float,
    ) -> None:
        self._ranks, self._work, self._result = ranks, work, result
        self._phase, self._step, self._limit_s = phase, step, limit_s

    def wait(self) -> torch.Tensor:
        """The result. Over gloo the host waits for it, over NCCL the current stream.

        Raises:
            PeerTimeout: over gloo, ranks are missing. CommunicatorBroken: they were in an earlier wait.
        """
        if self._work is not None:
            self._ranks._finish(self._work, self._phase, self._step, self._limit_s)
            self._work = None
        return self._result


class RankGroup:
    """A process group (or a single rank without one) as the collective backend uses it.

    Every rank calls the same methods in the same order. Tensors on the wire are int32, int64, uint8 or
    floating point, on ``device``.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None: the default group if torch.distributed
            is initialised, else a group of this rank alone.
        device: where tensors lie; None picks the current GPU for NCCL groups and the CPU otherwise.
        timeout_s: longest wait for other ranks within a call, in seconds. Over gloo this class keeps it and raises
            PeerTimeout; over NCCL the process group's own timeout applies.
        open_timeout_s: longest wait for other ranks to open the same call, in seconds. None: the process group's own
            timeout, at least OPEN_TIMEOUT_S and at least ``timeout_s``. Over gloo no wait outlasts the process
            group's own timeout.

    Raises:
        InvalidArgument: an argument has a value that is never right, or this process is not in the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 30.0,
        open_timeout_s: float | None = None,
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
        self.timeout_s = _seconds("timeout_s", timeout_s)
        self.process_group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.device = self._pick_device(device)
        if open_timeout_s is None:
            open_timeout_s = max(OPEN_TIMEOUT_S, self.timeout_s, _timeout_of(group, self.device))
        self.open_timeout_s = _seconds("open_timeout_s", open_timeout_s)
        self._deadline_is_ours = group is not None and self.device.type == "cpu"
        release_dropped()
        self.notes = notes = Noteboard(group, self.rank, self.num_ranks)

        def leave() -> bool:
            notes.leave()
            return True

        undo_when_dropped(self, leave)
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
        """Raise CommunicatorBroken if a wait has timed out or the group was closed."""
        if self._broken:
            raise CommunicatorBroken(f"{self._broken}; make a new communicator")

    def close(self) -> None:
        """Make every later call raise CommunicatorBroken. The process group itself stays the caller's."""
        self._broken = self._broken or "this communicator was closed"
        self.notes.leave()
        release_dropped()

    def mark_broken(self, timeout: PeerTimeout) -> None:
        """Make every later call raise CommunicatorBroken, and tell ranks that wait: one on the GPU has expired."""
        if self._broken is None:
            self.notes.give_up(f"rank {self.rank} gave up in {timeout.phase}, step {timeout.epoch}")
        self._broken = f"an earlier call failed: {timeout}"

    def abort(self, fault: Exception) -> None:
        """End the group for all ranks: this one failed in the middle of a call, and sends no more of it.

        Over gloo, ranks that wait for it raise PeerError within a second. Over NCCL they wait for the group's timeout.
        """
        self._broken = f"an earlier call failed: {fault}"
        self.notes.fail(f"{type(fault).__name__}: {fault}")

    def post_note(self, name: str, text: str) -> None:
        """Leave a text for the other ranks, under this rank's name; nothing waits for it, and the latest 8 stay."""
        self.notes.post(name, text)

    def read_note(self, name: str, rank: int) -> str | None:
        """The text that a rank left, or None."""
        return self.notes.read(name, rank)

    def all_gather_object(self, value: Any, phase: str) -> list[Any]:
        """The picklable value of every rank. This is a call by itself: ranks have ``open_timeout_s`` to come."""
        if self.num_ranks == 1:
            return [value]
        encoded = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        size = torch.tensor([encoded.numel()], dtype=torch.int64, device=self.device)
        sizes = self.all_gather(size, phase, opens=True).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: encoded.numel()] = encoded
        rows = self.all_gather(padded, phase).cpu()
        return [pickle.loads(rows[rank, :size].numpy().tobytes()) for rank, size in enumerate(sizes)]

    def all_gather(self, row: torch.Tensor, phase: str, *, opens: bool = False) -> torch.Tensor:
        """[n] on every rank -> [W, n] on every rank.

        Args:
            opens: this is the first collective of a call, for which ranks have ``open_timeout_s``.
        """
        out = torch.empty(self.num_ranks * row.numel(), dtype=row.dtype, device=self.device)
        if self.process_group is None:
            out.copy_(row)

        def start() -> dist.Work:
            return _all_gather(out, row, group=self.process_group, async_op=True)

        return self._start(start, out.view(self.num_ranks, -1), phase, opens).wait()

    def start_all_to_all(
        self, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], phase: str
    ) -> Transfer:
        """Send the first ``send_counts[0]`` rows to rank 0, the next to rank 1, ...; same order on arrival.

        Any dtype: rows travel as bytes, since gloo lacks FP8. They may not change before the transfer was waited for.
        """
        out = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
        if self.process_group is None:
            out.copy_(rows)
        sent, received = rows.view(torch.uint8), out.view(torch.uint8)

        def start() -> dist.Work:
            return dist.all_to_all_single(
                received, sent, recv_counts, send_counts, group=self.process_group, async_op=True
            )

        return self._start(start, out, phase)

    def all_to_all(
        self, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int], phase: str
    ) -> torch.Tensor:
        """Run :meth:`start_all_to_all` and wait for what it brings."""
        return self.start_all_to_all(rows, send_counts, recv_counts, phase).wait()

    def all_reduce_sum(self, values: torch.Tensor, phase: str) -> torch.Tensor:
        """The sum over ranks, as a new tensor. This is a call by itself: ranks have ``open_timeout_s`` to come."""
        out = values.detach().clone()
        return self._start(
            lambda: dist.all_reduce(out, group=self.process_group, async_op=True), out, phase, True
        ).wait()

    def _start(
        self, start: Callable[[], dist.Work], result: torch.Tensor, phase: str, opens: bool = False
    ) -> Transfer:
        limit_s = self.open_timeout_s if opens else self.timeout_s
        if self.process_group is None:
            return Transfer(self, None, result, phase, 0, limit_s)
        self.require_alive()
        self.notes.step += 1
        work: dist.Work | RuntimeError
        try:
            work = start()
        except RuntimeError as error:
            if not self._deadline_is_ours:
                raise
            work = error  # as if it had failed a moment later
        return Transfer(self, work, result, phase, self.notes.step, limit_s)

    def _finish(self, work: dist.Work | RuntimeError, phase: str, step: int, limit_s: float) -> None:
        """Wait for a collective: on the host with our deadline (gloo), on the stream (NCCL)."""
        self.require_alive()
        if not self._deadline_is_ours:
            assert not isinstance(work, RuntimeError)
            work.wait()
            return
        trouble = self._wait(work, step, limit_s)
        if trouble is None:
            return
        cause, error = trouble
        self.notes.give_up(f"rank {self.rank} gave up in step {step}")
        timeout = PeerTimeout(self.rank, self._missing_ranks(step), phase, step, cause)
        self._broken = f"an earlier call failed: {timeout}"
        raise timeout from error

    def _wait(self, work: dist.Work | RuntimeError, step: int, limit_s: float) -> tuple[str, RuntimeError] | None:
        """Wait until the deadline; whoever waits long signs in. Returns what went wrong, if so: cause and error.

        A collective fails on the ranks that talk to a dead one only, and a deadline passes where the wait began
        first. The others learn of it from the noteboard, so that none of them waits for an answer that cannot come.
        """
        if isinstance(work, RuntimeError):
            self.notes.sign_in(step)
            return f"the connection broke ({work})", work
        deadline = time.monotonic() + limit_s
        wait_s = min(SIGN_IN_AFTER_S, limit_s)
        signed_in = False
        while True:
            try:
                work.wait(timedelta(seconds=max(wait_s, 0.01)))  # torch takes less than 1 ms as no limit at all
                return None
            except RuntimeError as error:
                waited = error.with_traceback(None)  # which holds this frame, and with it the callers' tensors
            if not signed_in:
                self.notes.sign_in(step)
                signed_in = True
            if work.is_completed():  # it failed, or came to its end just now; waiting again tells which
                try:
                    work.wait()
                    return None
                except RuntimeError as error:
                    return f"the connection broke ({error})", error
            failed = self.notes.who_failed()
            if failed:
                peer_error = PeerError(*failed, sent=True)
                self._broken = f"an earlier call failed: {peer_error}"
                raise peer_error
            if self.notes.who_left_before(step):
                return "the communicator was closed there", waited
            said = self.notes.who_gave_up()
            if said:
                return said[1], waited
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return f"no answer within {limit_s:g} s", waited
            wait_s = min(LOOK_EVERY_S, left_s)

    def _missing_ranks(self, step: int) -> list[int]:
        """Who has not come to wait in this step or a later one; nobody, if the store is gone."""
        deadline = time.monotonic() + ROLL_CALL_S
        missing = [rank for rank in range(self.num_ranks) if rank != self.rank]
        while True:
            for rank in list(missing):
                waits = self.notes.waits_in(step, rank)
                if waits is None:
                    return []
                if waits:
                    missing.remove(rank)
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(0.05)


def _seconds(name: str, value: float) -> float:
    """The value of an option; NaN, infinity and what is not a number are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TIMEOUT_S:
        raise InvalidArgument(f"{name} is {value!r}, expected seconds above 0, at most {MAX_TIMEOUT_S:g}")
    return value


def _timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """The process group's own timeout in seconds, or 0 where torch does not tell."""
    try:
        timeout = group._get_backend(device).options._timeout  # type: ignore[union-attr]
        return min(timeout.total_seconds(), MAX_TIMEOUT_S)
    except (AttributeError, RuntimeError):
        return 0.0
