"""RoutedExperts: a module of experts that are spread over the ranks, for routes that the caller chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends.registry import LAYER_SMS
from tokenloom.backends.seam import STRATEGY_OF_MODE, Capabilities, Strategy, Upcoming
from tokenloom.comm import checks
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.move_experts import PIECE_BYTES, MovingExperts, move_experts
from tokenloom.comm.placement import Placement
from tokenloom.comm.slot_rows import copy_from_owners
from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.ops.autocast import autocast_dtype
from tokenloom.ops.experts import PLAIN, ExpertForm
from tokenloom.ops.split_batch import EMPTY
from tokenloom.plan import PLAIN_WEIGHTS, SWIGLU, Activation, WeightLayout
from tokenloom.runtime.rendezvous import agree
from tokenloom.runtime.torch_modes import breaks_graph, require_eager, settled
from tokenloom.training.gradients import scale_grad
from tokenloom.training.main_grads import accumulate_main_grads
from tokenloom.training.parameters import check_experts, draw_seeded, own_name
from tokenloom.training.pieces import RunOptions, forward_calls
from tokenloom.training.routed_experts import routed_experts
from tokenloom.training.shards import local_part, make_mesh, renew_hooks, spread
from tokenloom.training.slot_moves import along, moves_from_owners
from tokenloom.training.state_by_expert import by_expert, by_slot
from tokenloom.tune import choices

__all__ = ["RoutedExperts"]


def _is_meta(device: object) -> bool:
    """Tell whether a device is "meta". For a value that is no device, the communicator raises on all ranks."""
    try:
        return torch.device(device).type == "meta"  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        return False


NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of tokens that experts in float32 take too."""


class RoutedExperts(nn.Module):
    """Experts spread over the ranks, without a router: the caller says which experts each token goes to.

    ``out = sum over the K routes of weight_k * (w2_e a + w2_bias_e)`` with ``e`` the expert of route k and
    ``a = activation(w1_e x + w1_bias_e)``. Every rank passes its own tokens and gets its own outputs. Gradients are
    those of the sum of all ranks' losses, and those of expert weights are complete. ``ExpertParallelMoE`` has such a
    module as its ``experts``.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None, as in ``Communicator``. Leave it out with
            ``comm``.
        hidden: H, values in a token.
        intermediate: I, width of one expert.
        num_experts: E, divisible by the number of ranks.
        top_k: K, routes of a token, at most 32.
        max_tokens_per_rank: most tokens (product of the leading dimensions of the input) on one rank. Leave it out
            with ``comm``.
        activation: an ``Activation`` or the name of one, such as "swiglu", "geglu", "relu2", "swigluoai".
        biases: give both products a bias.
        weight_layout: how w1, w2 and w1_bias lie.
        expert_grad_scale: factor of the gradients of expert weights; 1/W beside a trainer that averages.
        strategy: strategies of dispatch and combine in forward; backward swaps them. None takes what ``tokenloom
            tune`` chose for this hardware, software and shape if rank 0 has it on its disk, else "dedup" both ways; on
            backends that only sum per node, "per_node" brings rows home.
        overlap: on GPUs, let transfers run beside GEMMs. False gives the same bits.
        redispatch_in_backward: keep x and send it again in backward, instead of keeping the rows that a rank
            receives, which are about ``top_k`` times as many.
        pool_rows: most rows that a rank's experts may get. There is always room for them, so the host does not wait
            (on ``nvlink``, in bfloat16). More rows raise CapacityOverflow in a later call or ``comm.check()``, and
            the tokens concerned become NaN. None keeps exact sizes, which the host waits for in forward.
        main_grads: let backward add the gradients of expert weights to ``parameter.main_grad``, which is float32, of
            this rank's part, made here as zeros and reset by you alone. ``parameter.grad`` stays None.
        placement: which slots of which ranks hold which experts, as in ``Communicator``. Leave it out with ``comm``,
            whose placement rules. ``follow_placement`` lets an optimizer keep replicas equal.
        spare_slots: instead of a placement, slots of each rank beyond its E / W experts, empty until
            ``place_experts``.
        balance: "batch": no rank computes more routes than the mean, as far as empty slots allow. Helpers pull the
            experts that they lack into these, in forward and again in backward, and add their gradients to their
            owners', in ascending rank. Then ``strategy`` is by default one whose sums do not depend on it. As in
            ``Communicator``, whose it is with ``comm``.
        rows_per_pull: as in ``Communicator``.
        comm: a Communicator to share between layers, instead of ``group``.
        backend: as in ``Communicator``.
        timeout_s: as in ``Communicator``.
        open_timeout_s: as in ``Communicator``.
        transport: as in ``Communicator``.
        ranks_per_node: as in ``Communicator``.
        device: device of the parameters, which must be the communicator's, or "meta". None takes the communicator's,
            and "meta" inside ``torch.device("meta")``: parameters then have no memory until ``to_empty``.
        dtype: dtype of the parameters; None means torch's default.

    Attributes:
        w1: [E, 2I, H], gate rows first, then up rows. [E, I, H] where the activation is not gated. ``weight_layout``
            may say otherwise, for w2 too. Where there is a process group, all weights are DTensors over its ranks,
            and ``to_local()`` is this rank's part, L = E / W experts, in the same memory. With a placement they have
            a row for each slot of each rank instead of E, and zeros in empty slots, or what a balanced
            batch has pulled there; state dicts have E rows still.
        w2: [E, H, I].
        w1_bias: [E, 2I] in the order of w1's rows, or None without biases.
        w2_bias: [E, H], or None without biases.
        strategy: the strategies in use.

    Raises:
        InvalidArgument, PlanMismatch, PeerError: as in ``Communicator``.
    """

    w1: nn.Parameter
    w2: nn.Parameter
    w1_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None
    stood_for: tuple[nn.Parameter, ...] = ()
    """While an operator of the compiler runs the module, the parameters in whose places plain tensors stand."""
    _moving: MovingExperts | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int | None = None,
        activation: Activation | str = SWIGLU,
        biases: bool = False,
        weight_layout: WeightLayout = PLAIN_WEIGHTS,
        expert_grad_scale: float = 1.0,
        strategy: Strategy | None = None,
        overlap: bool = True,
        redispatch_in_backward: bool = False,
        pool_rows: int | None = None,
        main_grads: bool = False,
        placement: Placement | None = None,
        spare_slots: int = 0,
        balance: Literal["batch"] | None = None,
        rows_per_pull: int | None = None,
        comm: Communicator | None = None,
        backend: str = "auto",
        timeout_s: float = 30.0,
        open_timeout_s: float | None = None,
        transport: str = "auto",
        ranks_per_node: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or torch.get_default_dtype()
        on_meta = _is_meta(torch.get_default_device() if device is None else device)
        if on_meta:
            device = None
        if comm is not None and not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm is {comm!r}, expected a tl.Communicator, or None")
        group_and_comm = group is not None and comm is not None
        placed_apart = comm is not None and (placement is not None or spare_slots != 0)
        balanced_apart = comm is not None and (balance is not None or rows_per_pull is not None)
        if comm is None:
            comm = Communicator(
                group,
                num_experts=num_experts,
                hidden=hidden,
                top_k=top_k,
                # The communicator reports a missing value, on all ranks.
                max_tokens_per_rank=max_tokens_per_rank,  # type: ignore[arg-type]
                backend=backend,
                device=device,
                timeout_s=timeout_s,
                open_timeout_s=open_timeout_s,
                transport=transport,
                ranks_per_node=ranks_per_node,
                dtype=dtype,
                num_sms=LAYER_SMS,
                placement=placement,
                spare_slots=spare_slots,
                balance=balance,
                rows_per_pull=rows_per_pull,
            )
        self.comm, self._placed = comm, comm.placement
        is_balanced = comm.engine.balance is not None
        default_strategy = Strategy.default(comm.engine.capabilities)
        if is_balanced:
            default_strategy = replace(default_strategy, combine=STRATEGY_OF_MODE["per_route"])

        def prepare() -> tuple[dict[str, Any], Strategy | None]:
            require_eager()
            if group_and_comm:
                raise InvalidArgument("group and comm are both given; the communicator already has a group")
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
                raise InvalidArgument(f"dtype is {dtype!r}, expected bfloat16, float16, float32 or float64")
            if placed_apart:
                raise InvalidArgument(
                    "comm is given with a placement beside it; make the communicator with the placement"
                )
            if balanced_apart:
                raise InvalidArgument("comm is given with balance beside it; make the communicator with balance")
            self.form = form = ExpertForm(Activation.of(activation), weight_layout)
            check_experts(comm.plan, hidden, intermediate, num_experts, top_k, expert_grad_scale, pool_rows)
            checks.require_layout(comm.engine.capabilities, "expert")
            checks.require_strategy(comm.engine.capabilities, strategy or default_strategy)
            tuned = None
            if strategy is None and comm.rank == 0 and not is_balanced:  # ranks may see different disks
                tuned = choices.find(choices.setting_of(comm, intermediate, dtype))
            self.hidden, self.intermediate = hidden, intermediate
            with torch.inference_mode(False):  # forward saves parameters in any mode
                self._make_parameters(biases, dtype, torch.device("meta") if on_meta else comm.device)
                self._draw_parameters(None)
            self.weight_names = tuple(self._parameters)
            self.main_grads = main_grads
            self.accumulate_main_grads()
            return {
                "intermediate": intermediate,
                "activation": form.activation,
                "weight_layout": form.layout,
                "biases": bool(biases),
                "expert_grad_scale": expert_grad_scale,
                "strategy": strategy,
                "overlap": overlap,
                "redispatch_in_backward": redispatch_in_backward,
                "pool_rows": pool_rows,
                "dtype": dtype,
            }, tuned

        tuned = agree(comm.engine.ranks, prepare, "making RoutedExperts")[0]
        self._make_replicas_equal()
        self.expert_grad_scale = expert_grad_scale
        self.strategy = strategy or tuned or default_strategy
        self.overlap, self.redispatch_in_backward, self.pool_rows = overlap, redispatch_in_backward, pool_rows

    def _make_parameters(self, biases: bool, dtype: torch.dtype, device: torch.device) -> None:
        mesh = make_mesh(self.comm.engine.ranks)
        self.is_spread = mesh is not None
        for name, shape in self.shapes().items():
            wanted = biases or not name.endswith("bias")
            value = torch.empty(shape, dtype=dtype, device=device) if wanted else None
            self.register_parameter(name, None if value is None else nn.Parameter(spread(value, mesh)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Map the name of each weight that experts can have to the shape of this rank's part."""
        return self.form.shapes(self.comm.engine.plan.experts_per_rank, self.hidden, self.intermediate)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.accumulate_main_grads()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.placement is not None and not keep_vars:  # the parameters themselves have slots
            self.require_own_weights()
            names = [prefix + name for name, each in self._parameters.items() if each is not None]
            slots = {name: destination[name] for name in names}
            destination.update(by_expert(self, slots, "by all slots", "state_dict"))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        names = [
            prefix + name for name, _ in chain(self.named_parameters(), self.named_buffers())
        ]  # pruning has buffers
        experts = {name: state_dict[name] for name in names if isinstance(state_dict.get(name), torch.Tensor)}
        if self.placement is not None:
            self.require_own_weights()
        state_dict.update(by_slot(self, experts, "by all slots", "load_state_dict"))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def require_own_weights(self) -> None:
        """Raise InvalidArgument where weights are computed from other parameters, which no placement knows."""
        if tuple(self._parameters) != self.weight_names:
            raise InvalidArgument(
                "the weights of experts are parametrized or pruned, and their layer has a placement; do either alone"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RoutedExperts:
        if getattr(fn, "__qualname__", "").startswith("Module.share_memory."):  # of a DTensor, torch ends the process
            for tensor in chain(self.parameters(), self.buffers()):  # pruning has buffers
                local_part(tensor.detach()).share_memory_()
            return self
        kept = {each: dict(vars(each)) for each in self.parameters()}
        super()._apply(fn, recurse)
        for parameter, attributes in kept.items():  # torch swaps a DTensor for another, without them and hooks
            vars(parameter).update(attributes)
            renew_hooks(parameter)
        return self

    @property
    def placement(self) -> Placement | None:
        """The placement by which the weights lie, or None."""
        if self._moving is not None:  # each stage that ends has moved the weights of its placement
            self._placed = self.comm.placement
            if self._moving.is_done:
                self._moving = None
        return self._placed

    @placement.setter
    def placement(self, placement: Placement) -> None:
        self._placed = placement

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh over which the weights are spread, or None."""
        return next((getattr(each, "device_mesh", None) for each in self.parameters()), None)

    @property
    def local_experts(self) -> range:
        """Numbers of the experts of which this rank has the part in state dicts. Without a placement they lie here."""
        local = self.comm.plan.experts_per_rank
        return range(self.comm.rank * local, (self.comm.rank + 1) * local)

    @property
    def slot_experts(self) -> Sequence[int]:
        """The expert in each slot of this rank, -1 for an empty slot; without a placement ``local_experts``."""
        return self.local_experts if self.placement is None else self.placement.experts_of(self.comm.rank)

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's experts. They are sharded, and their gradients are complete."""
        return list(self.parameters())

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all weights uniformly in ±1/sqrt(fan-in), as nn.Linear does. Collective if there are replicas.

        Args:
            seed: draw the same full set of weights for any number of ranks, and keep this rank's shard. Experts
                compute the same in any ``weight_layout``. Give each module its own seed, or they get equal weights.
                None draws from torch's generator.
        """
        self._draw_parameters(seed)
        self._make_replicas_equal()

    @torch.no_grad()
    def _draw_parameters(self, seed: int | None) -> None:
        for full_name, parameter in self.named_parameters():
            name = own_name(full_name)
            bound = 1 / math.sqrt(self.hidden if name.startswith("w1") else self.intermediate)
            weights = local_part(parameter)
            if seed is None:
                weights.uniform_(-bound, bound)
            else:
                draw_seeded(weights, self.form.layout, bound, seed, name, self.slot_experts)
            empty = [slot for slot, expert in enumerate(self.slot_experts) if expert == EMPTY]
            weights[empty] = 0

    def _make_replicas_equal(self) -> None:
        """Give all slots of an expert the weights of the first. Collective if there are several."""
        if self.placement is not None and not self.w1.is_meta:
            weights = {name: local_part(each.detach()) for name, each in self.named_parameters()}
            moves = moves_from_owners(self.placement, self.comm.engine.masked)
            along(self.comm.engine, moves, weights, copy_from_owners, "making replicas equal")

    @breaks_graph
    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
        alike: tuple[tuple[str, str], ...] = (),
    ) -> torch.Tensor:
        """Dispatch, compute, combine. Collective. Differentiable once, in x, ``topk_weights`` and the parameters.

        Args:
            x: [..., H], dtype and device of the parameters; leading dimensions may differ per rank and be 0. Beside
                float32 parameters x may be bfloat16 or float16: they are then cast, as autocast casts them.
            topk_ids: int32 or int64 [..., K], experts of all ranks, -1 for a place without a route.
            topk_weights: floating point [..., K]. They are used in float32, or in float64 for float64 experts.
            meanwhile: work of this rank beside the dispatch, such as a shared expert, or None.
            alike: what else all ranks must mean alike in this call, by name.

        Returns:
            [..., H], dtype of x, or of autocast where that is on.

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument: bad input on this rank.
            PeerError: bad input, or any other failure, on another rank.
            PlanMismatch: another rank has frozen other parameters.
            TokenloomError: as in ``Communicator.dispatch``.
        """
        engine = self.comm.engine
        engine.raise_known_errors()
        self.accumulate_main_grads()
        dtype = self._compute_dtype(getattr(x, "dtype", None))
        with engine.sequence(*self.first_calls(dtype)):  # sends nothing: bad input is told to the other ranks
            if engine.slots is not None:
                self.require_placed()
            tokens = self.tokens(x)
            checks.number_of_tokens(self.comm.plan, len(tokens))  # pieces of too many tokens may be few enough
            ids = self.ids(x, topk_ids)
            weights = self.weights(x, topk_weights).to(torch.promote_types(dtype, torch.float32))
        w1, w2, w1_bias, w2_bias = self._scaled_weights()
        with nullcontext() if dtype == w1.dtype else torch.autocast(tokens.device.type, dtype):
            out = routed_experts(
                self.comm,
                self.options,
                tokens,
                ids,
                weights,
                w1,
                w2,
                meanwhile,
                w1_bias=w1_bias,
                w2_bias=w2_bias,
                activation=self.form.activation,
                weight_layout=self.form.layout,
                sources=self.stood_for or (self.w1, self.w2, self.w1_bias, self.w2_bias),
                alike=alike,
            )
        return out.view(x.shape)

    def move_experts(self, placement: Placement, *, piece_bytes: int = PIECE_BYTES) -> MovingExperts:
        """Begin to move experts to another placement, in pieces between calls; see :func:`tokenloom.move_experts`.

        Collective. It is for serving, with a communicator that no other layer shares. Gradients and states of an
        optimizer stay where they are: in training ``place_experts`` moves all of them.

        Raises:
            InvalidArgument: the weights are computed from others, or lie by another placement than the
                communicator's; or what ``move_experts`` raises.
        """
        self.require_own_weights()
        self.require_placed()
        weights = [local_part(each.detach()) for each in self.parameters()]
        self._moving = move_experts(self.comm, weights, placement, piece_bytes=piece_bytes)
        return self._moving

    def require_placed(self) -> None:
        """Raise InvalidArgument unless the weights lie by the communicator's placement."""
        if self.placement is not self.comm.placement and self.placement != self.comm.placement:
            raise InvalidArgument(
                "the experts lie by another placement than their communicator's, which other layers may share; call "
                "tokenloom.place_experts(model, placement), which moves the experts of all layers of a model"
            )

    @property
    def options(self) -> RunOptions:
        """Choices that change time and memory."""
        return RunOptions(self.strategy, self.overlap, self.redispatch_in_backward, self.pool_rows)

    def _compute_dtype(self, x_dtype: torch.dtype | None) -> torch.dtype:
        """Choose the dtype of rows that travel, for tokens of ``x_dtype``."""
        dtype = autocast_dtype(self.comm.device)
        if dtype is None and x_dtype in NARROW and self.w1.dtype == torch.float32:
            dtype = x_dtype
        return dtype or self.w1.dtype

    def first_calls(self, dtype: torch.dtype | None) -> list[Upcoming]:
        """List the calls to declare while inputs are checked: a dispatch and a combine of one piece.

        Args:
            dtype: dtype of the tokens, or None if it is not known.
        """
        calls = forward_calls(self.options, 1, self._compute_dtype(dtype), needs_grad=False)
        return self.comm.engine.with_counts(calls)

    def accumulate_main_grads(self) -> None:
        """Let gradients of experts add to ``main_grad``, if the module does so."""
        if self.main_grads:  # at every forward: parameters may be new or thawed since the module was made
            # While an operator of the compiler runs the module, plain tensors stand in the places of its parameters.
            accumulate_main_grads(each for each in self.parameters() if isinstance(each, nn.Parameter))

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """View the input as [T, H].

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument: it does not fit the experts.
        """
        x = settled(x)
        checks.require_tensor("x", x)
        if x.ndim == 0 or x.shape[-1] != self.hidden:
            raise ShapeMismatch(f"x is {list(x.shape)}, the layer was made for [..., {self.hidden}]")
        if self.w1.is_meta:
            raise DeviceMismatch(
                "the layer's weights are on meta, without memory; call to_empty(device=...), and load_state_dict()"
            )
        if x.device != self.w1.device:
            raise DeviceMismatch(f"x is on {x.device}, the layer is on {self.w1.device}; move one of them")
        if x.dtype not in (self.w1.dtype, self._compute_dtype(x.dtype)):
            if not torch.is_autocast_enabled(x.device.type):
                raise DtypeMismatch(f"x is {x.dtype}, the layer is {self.w1.dtype}; cast x to {self.w1.dtype}")
            if x.dtype not in Capabilities().dtypes:  # they would be cast, whatever they mean
                raise DtypeMismatch(f"x is {x.dtype}, expected a dtype that autocast takes, such as {self.w1.dtype}")
        return x.reshape(-1, self.hidden).contiguous()

    def ids(self, x: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """View ids of the tokens of x as [T, K].

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument: they do not fit x.
        """
        topk_ids = settled(topk_ids)
        _require_like("topk_ids", topk_ids, x, self.comm.plan.top_k)
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise DtypeMismatch(f"topk_ids is {topk_ids.dtype}, expected torch.int32 or torch.int64")
        return topk_ids.reshape(-1, self.comm.plan.top_k).contiguous()

    def weights(self, x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """View weights of the tokens of x as [T, K].

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument: they do not fit x.
        """
        topk_weights = settled(topk_weights)
        _require_like("topk_weights", topk_weights, x, self.comm.plan.top_k)
        if not topk_weights.is_floating_point():
            raise DtypeMismatch(f"topk_weights is {topk_weights.dtype}, expected floating point, such as float32")
        return topk_weights.reshape(-1, self.comm.plan.top_k).contiguous()

    def _scaled_weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return w1, w2 and their biases as forward reads them."""
        w1, w2 = (scale_grad(local_part(weight), self.expert_grad_scale) for weight in (self.w1, self.w2))
        w1_bias, w2_bias = (
            None if bias is None else scale_grad(local_part(bias), self.expert_grad_scale)
            for bias in (self.w1_bias, self.w2_bias)
        )
        return w1, w2, w1_bias, w2_bias

    def extra_repr(self) -> str:
        plan, here = self.comm.plan, len(self.slot_experts)
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, experts={plan.num_experts} "
            f"({here} {'here' if self.placement is None else 'slots here'}), top_k={plan.top_k}, "
            f"ranks={plan.num_ranks}, backend={self.comm.backend}"
            f"{'' if self.form == PLAIN else f', {self.form}'}{', biases' if self.w1_bias is not None else ''}"
        )


def _require_like(name: str, value: torch.Tensor, x: torch.Tensor, top_k: int) -> None:
    """Raise unless the value has ``top_k`` numbers for each token of x, on its device."""
    checks.require_tensor(name, value)
    wanted = (*x.shape[:-1], top_k)
    if value.shape != wanted:
        raise ShapeMismatch(f"{name} is {list(value.shape)}, expected {list(wanted)} for x {list(x.shape)}")
    if value.device != x.device:
        raise DeviceMismatch(f"{name} is on {value.device}, x is on {x.device}; move one of them")
