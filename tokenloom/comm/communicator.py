"""Communicator: what users call to move tokens to their experts and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends import registry
from tokenloom.comm.beside import CallsBeside
from tokenloom.comm.engine import Engine
from tokenloom.comm.torch_modes import require_eager, untransformed
from tokenloom.errors import CommunicatorBroken, InvalidArgument, PeerTimeout
from tokenloom.plan import Plan
from tokenloom.runtime import topology
from tokenloom.runtime.rank_group import MAKING, RankGroup
from tokenloom.runtime.rendezvous import agree, raising
from tokenloom.runtime.turns import Turn

__all__ = ["Communicator"]


class Communicator(CallsBeside):
    """Moves the tokens of a mixture-of-experts layer to their experts and back.

    Making one is collective: all ranks of the group do it, with the same arguments. So is every call, in the same
    order on all ranks. Several layers may share one.

    Args:
        group: a ProcessGroup or a one-dimensional DeviceMesh. None means the default group, or this process alone
            where torch.distributed is not initialised.
        num_experts: E, divisible by the ranks W; expert e lives on rank ``e // (E / W)``.
        hidden: H, values in a token.
        top_k: K, experts per token, at most 32.
        max_tokens_per_rank: M, the most tokens of one dispatch on one rank.
        backend: "auto" picks the best that works on all ranks (``describe()`` says why). Or one of "nvlink",
            "network", "collective", "gin" and "padded". The last is for several nodes, and is taken only by its name:
            it has run on GPUs of one host alone.
        device: where the tensors are. None means the current GPU for NCCL groups, else the CPU.
        timeout_s: longest wait for another rank inside a call, in seconds (over NCCL the group's own timeout applies).
        open_timeout_s: longest wait for another rank to open the same call, in seconds. A rank that writes a
            checkpoint, evaluates or compiles may be that late. None means the group's own timeout, at least 10
            minutes.
        dtype: dtype of the tokens, where it is known. "auto" then picks a backend that moves it.
        num_sms: SMs that a kernel of backend "nvlink" takes, 1 to 32. The others stay with your GEMMs.
        checked: on backend "nvlink", read ids and the outcome of every call on the host before it returns, so that
            errors come at once. "collective" always does.
        on_timeout: what happens to a rank that another one waits for. "raise": the wait ends with PeerTimeout, and
            with it the communicator. "mask" ("nvlink", and the others over gloo): a rank that does not come
            within ``timeout_s``, or whose process ends, is masked by all others alike. The call goes on without it and
            loses just the routes to it. ``timeout_s`` then counts from the opening of a call as well.
        transport: what carries rows between nodes. "auto" picks the best that works on all ranks, "collective" is
            torch.distributed. "gin" is NCCL's network that GPUs start transfers of by themselves; it has run on
            no network yet, so "auto" does not take it. "nvlink" wants all ranks on one node, within reach of each
            other's NVLink. ``backend`` says what carries rows within a node.
        ranks_per_node: ranks of each node, which are then taken to be on nodes one after the other, wherever they are:
            to try what runs between nodes on one machine, or where nodes cannot be found out. None finds nodes by
            host and by the access of GPUs to each other's memory.
        rejoin: come back to the ranks of the group, which have masked this one and have their communicator still. It
            waits until they call ``unmask_ranks``, ``open_timeout_s`` long.

    Attributes:
        plan: sizes, and what follows from them.
        engine: the same calls in halves, for layers that write their own gradients.

    Raises:
        InvalidArgument: an argument has a value that is never right, or ``num_sms`` is more than this process may use.
        PlanMismatch: the ranks passed different arguments; names the rank and the argument.
        PeerError: another rank failed to make its own.
        BackendUnavailable: the backend or the transport asked for does not work here; says on which rank, and why.
        PeerTimeout: a rank did not come, or with ``rejoin`` nobody took this one back.
    """

    _closed = False

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | RankGroup | None = None,
        *,
        num_experts: int,
        hidden: int,
        top_k: int,
        max_tokens_per_rank: int,
        backend: str = "auto",
        device: torch.device | str | None = None,
        timeout_s: float = 30.0,
        open_timeout_s: float | None = None,
        dtype: torch.dtype | None = None,
        num_sms: int = registry.DEFAULT_SMS,
        checked: bool = False,
        on_timeout: Literal["raise", "mask"] = "raise",
        transport: str = "auto",
        ranks_per_node: int | None = None,
        rejoin: bool = False,
    ) -> None:
        fault: InvalidArgument | None = None
        try:
            ranks = RankGroup(group, device=device, timeout_s=timeout_s, open_timeout_s=open_timeout_s, rejoins=rejoin)
        except InvalidArgument as error:
            if rejoin:
                raise
            fault = error
        if fault is not None:
            ranks = RankGroup(group)  # the other ranks wait for this one, and must hear of its fault
        if rejoin and ranks.num_ranks == 1:
            raise InvalidArgument("rejoin is True, but this rank is alone and nobody can take it back; leave it out")
        with ranks.turn.behind(ranks.open_timeout_s) as in_turn:
            _require_eager(ranks, rejoin)
            fault = fault or in_turn

            def make_request() -> registry.Request:
                plan = Plan(ranks.num_ranks, num_experts, hidden, top_k, max_tokens_per_rank)
                options = (backend, plan, dtype, num_sms, checked, transport, ranks_per_node)
                return registry.Request(ranks.transport, ranks.device, *options)

            def terms_of(request: registry.Request) -> dict[str, Any]:
                return request.must_agree() | {"on_timeout": on_timeout}

            def prepare() -> tuple[dict[str, Any], tuple[list[registry.Availability], topology.Place]]:
                if fault is not None:
                    raise fault
                request = make_request()
                topology.checked_ranks_per_node(ranks_per_node, ranks.num_ranks)
                if not isinstance(num_sms, int) or not 1 <= num_sms <= registry.MAX_SMS:
                    raise InvalidArgument(f"num_sms is {num_sms!r}, expected 1 to {registry.MAX_SMS}")
                if on_timeout not in ("raise", "mask"):
                    raise InvalidArgument(f"on_timeout is {on_timeout!r}, expected 'raise' or 'mask'")
                if dtype is not None and not isinstance(dtype, torch.dtype):
                    raise InvalidArgument(f"dtype is {dtype!r}, expected a torch.dtype, such as torch.bfloat16")
                if not isinstance(checked, bool):
                    raise InvalidArgument(f"checked is {checked!r}, expected True or False")
                found = registry.probe(request), topology.Place.own(ranks.device)
                return terms_of(request), found

            if on_timeout == "mask" and not rejoin and ranks.could_go_by_pairs:
                # With the patience that a first call takes. Whoever is lost meanwhile, or was before so that the
                # process group carries nothing any more, is found out below, by pairs.
                with suppress(PeerTimeout, CommunicatorBroken):
                    agree(ranks, prepare, MAKING)
                ranks = ranks.left_by_pairs()
            said = [prepare()[1]] if rejoin else agree(ranks, prepare, MAKING)
            probes = [found for found, _ in said]
            request = make_request()
            self.plan = Plan(ranks.num_ranks, num_experts, hidden, top_k, max_tokens_per_rank)
            if ranks_per_node is not None:
                ranks.topology = topology.pretended(ranks.num_ranks, ranks_per_node)
            elif not rejoin and not ranks.masked:  # else those that stayed tell, and masked ranks do not
                ranks.topology = topology.find_nodes([place for _, place in said])
            if rejoin:
                name, _ = registry.choose(
                    backend, probes, None if ranks_per_node is None else ranks.topology, transport
                )
                ranks.terms = _in_words(terms_of(request), name)
                ranks.own_transport = registry.capabilities(name).own_transport
                ranks.rejoin(on_timeout == "mask")
                self._choice = registry.make_alone(name, request, ranks, probes[0])
            else:
                self._choice = registry.make(request, ranks, probes)
                ranks.terms = _in_words(terms_of(request), self._choice.backend.name)
                ranks.own_transport = self._choice.backend.capabilities.own_transport
                if on_timeout == "mask":
                    try:
                        self._choice.backend.mask_late()
                    except InvalidArgument:
                        self._choice.backend.close()
                        raise
        if ranks.own_transport:
            ranks.turn = Turn()
        self._ranks = ranks
        self._request = request
        self.engine = Engine(self.plan, ranks, self._choice.backend)

    def _make_engine(self, hidden: int) -> Engine:
        request = replace(
            self._request, name=self.backend, plan=replace(self.plan, hidden=hidden), dtype=torch.float32
        )
        assert request.plan is not None

        def prepare() -> tuple[dict[str, Any], list[registry.Availability]]:
            return request.must_agree(), registry.probe(request)

        probes = agree(self._ranks, prepare, "making room for weights")
        return Engine(request.plan, self._ranks, registry.make(request, self._ranks, probes).backend)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._ranks.rank

    @property
    def num_ranks(self) -> int:
        """W, ranks in the group."""
        return self._ranks.num_ranks

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""
        return self._ranks.device

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self._choice.backend.name

    @property
    def transports(self) -> dict[str, str]:
        """What carries rows to ranks of the "own node" and, if there are any, of "other nodes".

        One of "nvlink", "collective" and "gin" for each.
        """
        can = self.engine.capabilities
        several = self._ranks.topology.num_nodes > 1
        return {"own node": can.own_node} | ({"other nodes": str(can.other_nodes)} if several else {})

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The torch.distributed group; None for a process alone, and once the communicator was closed."""
        return self._ranks.process_group

    def describe(self) -> str:
        """The plan, the backend and why, and the memory it holds or will take, in a few lines for people."""
        plan = self.plan
        nodes = self._ranks.topology
        lines = [
            f"tokenloom Communicator, rank {self.rank} of {self.num_ranks} on {self.device}",
            f"  {plan.num_experts} experts, {plan.experts_per_rank} on each rank; top-{plan.top_k}; "
            f"hidden {plan.hidden}; at most {plan.max_tokens_per_rank} tokens a rank",
            f"  worst case on one rank: {plan.worst_case_rows('token')} rows in layouts token and rank, "
            f"{plan.worst_case_rows('expert')} in layout expert",
            *([f"  {nodes.describe()}"] if nodes.num_nodes > 1 else []),
            f"  backend {self.backend}: {self._choice.why}",
            *([f"    {self._transports_in_words()}"] if nodes.num_nodes > 1 else []),
            *(f"    {line}" for line in self.engine.memory()),
            *(f"  rank {rank} is masked: {why}" for rank, why in self._ranks.why_masked().items()),
        ]
        return "\n".join(lines + [f"  not picked: {reason}" for reason in self._choice.not_picked])

    def _transports_in_words(self) -> str:
        return ", ".join(f"{kind} by {transport}" for kind, transport in self.transports.items())

    def mask_ranks(self, ranks: Collection[int]) -> None:
        """Go on without these ranks from the next call on. All ranks that stay call it alike.

        Nothing is sent to masked ranks or awaited from them, so their processes may be dead. They have no tokens, and
        routes to their experts count as -1: in dispatch and combine, and in gradients of earlier calls. Calls that are
        open end as they began. Masked ranks call nothing; those that live close their communicator.

        Args:
            ranks: of the group, but for this one. Ranks that are masked already may be among them.

        Raises:
            InvalidArgument: a rank that is none, or this one; or a backend or transport that cannot leave ranks out.
            PlanMismatch: another rank passed other ranks, or makes another call; names the rank and its list. Nothing
                has changed. A rank that makes another call instead cannot go on.
            PeerTimeout: a rank that stays does not call it.
        """
        self.engine.mask(ranks)
        if self._narrow is not None:
            self._narrow.mask(())  # the same ranks are left out

    def unmask_ranks(self, ranks: Collection[int]) -> None:
        """Take masked ranks back. All ranks that stay call it alike.

        Each of these ranks meanwhile makes its communicator again, with the same arguments, on the same process group
        and with ``rejoin=True``. Either side may come first: this one waits as long as a call may take to open.

        Args:
            ranks: masked ranks.

        Raises:
            InvalidArgument: a rank that is not masked.
            PlanMismatch: another rank passed other ranks, or a communicator was made again with other arguments.
            PeerTimeout: a rank that stays does not call it. Or a rank does not come back, or cannot connect with all
                others: then all ranks raise this, the ranks stay masked, and the communicator keeps working.
        """
        self.engine.unmask(ranks)
        self._narrow = None  # ranks that came back have none either

    def masked_ranks(self) -> list[int]:
        """The ranks that this one goes on without. With ``on_timeout="mask"`` a call may add some."""
        return sorted(self.engine.masked)

    def check(self) -> None:
        """Wait for all calls, and raise what earlier calls left behind.

        Raises:
            CapacityOverflow: a bounded dispatch dropped rows (raised once).
            PeerError, PlanMismatch, PeerTimeout: an earlier call failed.
            CommunicatorBroken: closed, or an earlier call timed out.
        """
        self.engine.check("everything")
        if self._narrow is not None:
            self._narrow.check("everything")

    def __repr__(self) -> str:
        if not hasattr(self, "engine"):  # its constructor has raised
            return f"{type(self).__name__}(never made)"
        return line_about(self, type(self).__name__, backend=self.backend)

    def close(self) -> None:
        """Release everything; later calls raise CommunicatorBroken. The process group stays yours."""
        self._closed = True
        if self._narrow is not None:
            self._narrow.close()
        self.engine.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Communicator:
        """Return itself: the copy of a layer, as for averages of its weights, shares the communicator."""
        return self

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a communicator belongs to its process and its group: it cannot be pickled, nor can a layer that has it; "
            "save layer.state_dict(), or gather_state_dict(model) with the experts of all ranks, and load that into a "
            "new layer"
        )

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require_eager(ranks: RankGroup, rejoins: bool) -> None:
    """Raise where torch transforms what is called. The other ranks, which make a Communicator, hear of it."""
    try:
        require_eager()
    except InvalidArgument as error:
        if rejoins:
            raise
        fault = error
    else:
        return
    untransformed(lambda: agree(ranks, raising(fault), MAKING))


def _in_words(terms: Mapping[str, Any], backend: str) -> dict[str, str]:
    """What a rank that comes back must have alike."""
    return {name: str(value) for name, value in terms.items()} | {"backend in use": backend}


def line_about(comm: Communicator, kind: str, **more: object) -> str:
    """One line about a communicator, or about a layer that has one for itself, as ``repr`` shows it.

    Args:
        kind: name of the class.
        more: values behind the communicator's sizes.
    """
    values = {"rank": comm.rank} | vars(comm.plan) | more
    state = ", closed" if comm._closed else ", broken" if comm._ranks.is_broken else ""
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in values.items())}{state})"
