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

SIGN_IN_AFTER_S = 0.5
"""A rank that has waited this long signs the roll in the store, so that others can tell who is missing."""
LOOK_EVERY_S = 0.5
"""How often a rank that waits looks in the store whether another one has given up: then nobody will answer."""
ROLL_CALL_S = 1.0
"""How long a rank that gives up waits for those to sign the roll that came at the last moment."""

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

    def mark_broken(self, timeout: PeerTimeout) -> None:
        """Makes every later call raise CommunicatorBroken, for a wait that expired elsewhere than here."""
        self._broken = f"an earlier call failed: {timeout}"

    def post_note(self, name: str, text: str) -> None:
        """Leave a text in the group's store, under this rank's name; nothing waits for it."""
        self._store("set", f"{self._roll}/{name}/{self.rank}", text.encode())

    def read_note(self, name: str, rank: int) -> str | None:
        """The text that a rank left, or None."""
        key = f"{self._roll}/{name}/{rank}"
        text = self._store("get", key) if self._store("check", [key]) else None
        return None if text is None else text.decode()

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
        trouble = self._wait(start)
        if trouble is None:
            return
        cause, error = trouble
        self._store("set", f"{self._roll}/gave up", f"rank {self.rank} gave up in step {self._epoch}".encode())
        timeout = PeerTimeout(self.rank, self._missing_ranks(), phase, self._epoch, cause)
        self.mark_broken(timeout)
        raise timeout from error

    def _wait(self, start: Callable[[], Any]) -> tuple[str, RuntimeError] | None:
        """Wait until the deadline; whoever waits long signs the roll. Returns what went wrong, if so: cause and error.

        A collective fails on the ranks that talk to a dead one only, and a deadline passes where the wait began
        first. The others learn of it from the store, so that none of them waits for an answer that cannot come.
        """
        deadline = time.monotonic() + self.timeout_s
        wait_s = min(SIGN_IN_AFTER_S, self.timeout_s)
        try:
            work = start()
        except RuntimeError as error:
            self._sign_in()
            return f"the connection broke ({error})", error
        signed_in = False
        while True:
            try:
                work.wait(timedelta(seconds=max(wait_s, 0.01)))  # torch takes less than 1 ms as no limit at all
                return None
            except RuntimeError as error:
                waited = error.with_traceback(None)  # which holds this frame, and with it the callers' tensors
            if not signed_in:
                self._sign_in()
                signed_in = True
            if work.is_completed():  # it failed, or came to its end just now; waiting again tells which
                try:
                    work.wait()
                    return None
                except RuntimeError as error:
                    return f"the connection broke ({error})", error
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return f"no answer within {self.timeout_s:g} s", waited
            note = self._store("check", [f"{self._roll}/gave up"]) and self._store("get", f"{self._roll}/gave up")
            if note:
                return note.decode(), waited
            wait_s = min(LOOK_EVERY_S, left_s)

    def _sign_in(self) -> None:
        self._store("set", f"{self._roll}/{self._epoch}/{self.rank}", b"here")

    def _missing_ranks(self) -> list[int]:
        """Who has not signed the roll of this step; nobody, if the store is gone."""
        deadline = time.monotonic() + ROLL_CALL_S
        missing = [rank for rank in range(self.num_ranks) if rank != self.rank]
        while True:
            for rank in list(missing):
                signed = self._store("check", [f"{self._roll}/{self._epoch}/{rank}"])
                if signed is None:
                    return []
                if signed:
                    missing.remove(rank)
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(0.05)

    def _store(self, method: str, *args: Any) -> Any:
        """Call the key-value store of the group; None where there is none, or the rank that hosts it is gone."""
        store = _store_of(self.process_group)
        try:
            return None if store is None else getattr(store, method)(*args)
        except RuntimeError:
            return None


def _store_of(group: dist.ProcessGroup | None) -> Any:
    """The key-value store that the group was made with, or None where torch keeps it out of reach."""
    try:
        return group.get_group_store()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
