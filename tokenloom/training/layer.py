"""ExpertParallelMoE: a mixture-of-experts layer whose experts are spread over the ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from tokenloom.backends.seam import Strategy
from tokenloom.comm import checks
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.placement import Placement
from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.ops.activation import apply_activation
from tokenloom.ops.router import SCORES, Router, RouterSums, balance_loss, router_logits, router_sums, z_loss
from tokenloom.plan import PLAIN_WEIGHTS, SWIGLU, Activation, WeightLayout
from tokenloom.runtime.rendezvous import agree
from tokenloom.training import torch_compile
from tokenloom.training.expert_module import RoutedExperts
from tokenloom.training.gradients import (
    has_saved_tensors_hooks,
    in_backward,
    once_in_backward,
    sum_grad_over_ranks,
    sum_over_ranks,
    tied,
)
from tokenloom.training.parameters import EXPERT_WEIGHTS, check_options, draw_seeded, own_name
from tokenloom.training.saved_activations import SavedTensor, saved_tensors

__all__ = ["ExpertParallelMoE"]


_GIVEN = ("none", "given")
"""What ranks tell of an argument, by whether there is one."""


class ExpertParallelMoE(nn.Module):
    """Router, experts spread over the ranks, and an optional shared expert.

    ``out = sum over the K chosen experts e of weight_e * (w2_e a + w2_bias_e)`` with
    ``a = activation(w1_e x + w1_bias_e)``, plus the shared expert. By default there are no biases, and ``a`` is
    ``silu(gate) * up``. Every rank passes its own tokens and gets its own outputs. Gradients are those of the sum of
    all ranks' losses. Expert weights receive their whole gradient here; ``router_grad`` says what the replicated
    parameters (router, shared expert) receive.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None, as in ``Communicator``. Leave it out with
            ``comm``.
        hidden: H, values in a token.
        intermediate: I, width of one expert.
        num_experts: E, divisible by the number of ranks.
        top_k: K, experts per token, at most 32.
        max_tokens_per_rank: most tokens (product of the leading dimensions of the input) on one rank. Leave it out
            with ``comm``.
        router: "softmax_topk", "topk_softmax" or "sigmoid", or a ``Router`` with all options.
        activation: an ``Activation`` or the name of one, such as "swiglu", "geglu", "relu2", "swigluoai"; the shared
            expert has the same.
        biases: give both products of the experts a bias. The shared expert has none.
        weight_layout: how w1, w2 and w1_bias lie. The shared expert's weights lie as by default.
        shared_intermediate: width of the shared expert, 0 for none.
        shared_gate: multiply the shared expert's output by ``sigmoid(shared_gate_weight x)`` (Qwen2-MoE).
        balance_coef: weight of the balance loss in ``aux_loss``; 0 switches it off.
        z_coef: weight of the z-loss in ``aux_loss``; 0 switches it off.
        router_grad: "local" leaves this rank's part in the gradients of replicated parameters, for a trainer that
            reduces them (DDP does). "sum" lets backward sum them over the ranks of the group.
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
        main_grads: let backward add the gradients of expert weights to ``parameter.main_grad``, which is float32,
            made here as zeros and reset by you alone. ``parameter.grad`` stays None.
        placement: which slots of which ranks hold which experts, as in ``RoutedExperts``.
        spare_slots: slots of each rank beyond its E / W experts, as in ``RoutedExperts``.
        balance: "batch" splits each batch evenly over the ranks, as in ``RoutedExperts``.
        rows_per_pull: as in ``Communicator``.
        comm: a Communicator to share between layers, instead of ``group``.
        backend: as in ``Communicator``.
        timeout_s: as in ``Communicator``.
        open_timeout_s: as in ``Communicator``.
        transport: as in ``Communicator``.
        ranks_per_node: as in ``Communicator``.
        device: device of the parameters, which must be the communicator's, or "meta". None takes the communicator's,
            and "meta" inside ``torch.device("meta")``: parameters and buffers then have no memory until ``to_empty``.
        dtype: dtype of the parameters; None means torch's default.

    Attributes:
        experts: the ``RoutedExperts`` with the weights of experts, which are DTensors over the ranks:
            ``experts.w1``, ``experts.w2``, ``experts.w1_bias`` and ``experts.w2_bias``.
        router_weight: [E, H].
        router_bias: [E], or None without ``Router.bias``.
        correction_bias: float32 buffer [E], or None without ``Router.correction_bias``.
        shared_w1: [2S, H], gate rows first, or [S, H] without gates, or None without a shared expert of width S.
        shared_w2: [H, S], or None without a shared expert.
        shared_gate_weight: [1, H], or None without ``shared_gate``.
        expert_counts: int64 buffer [E], routes of training forwards over all ranks, since ``update_correction_bias``
            last used them or you last set them to 0. Forwards count in training mode with gradients enabled, if a
            loss or a correction bias needs their counts. In an activation checkpoint they count once, in backward.

    Raises:
        InvalidArgument, PlanMismatch, PeerError: as in ``Communicator``.
    """

    correction_bias: torch.Tensor | None
    expert_counts: torch.Tensor

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int | None = None,
        router: Router | Literal["softmax_topk", "topk_softmax", "sigmoid"] = "softmax_topk",
        activation: Activation | str = SWIGLU,
        biases: bool = False,
        weight_layout: WeightLayout = PLAIN_WEIGHTS,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        balance_coef: float = 0.0,
        z_coef: float = 0.0,
        router_grad: Literal["local", "sum"] = "local",
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
        self.experts = RoutedExperts(
            group,
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            activation=activation,
            biases=biases,
            weight_layout=weight_layout,
            expert_grad_scale=expert_grad_scale,
            strategy=strategy,
            overlap=overlap,
            redispatch_in_backward=redispatch_in_backward,
            pool_rows=pool_rows,
            main_grads=main_grads,
            placement=placement,
            spare_slots=spare_slots,
            balance=balance,
            rows_per_pull=rows_per_pull,
            comm=comm,
            backend=backend,
            timeout_s=timeout_s,
            open_timeout_s=open_timeout_s,
            transport=transport,
            ranks_per_node=ranks_per_node,
            device=device,
            dtype=dtype,
        )
        self.comm = comm = self.experts.comm
        plan = comm.plan

        def prepare() -> tuple[dict[str, Any], None]:
            if isinstance(router, str) and router not in SCORES:
                raise InvalidArgument(f"router is {router!r}, expected a Router or one of {', '.join(SCORES)}")
            rule = Router(num_experts, top_k, router) if isinstance(router, str) else router
            coefficients = {"balance_coef": balance_coef, "z_coef": z_coef}
            check_options(plan, rule, shared_intermediate, shared_gate, router_grad, **coefficients)
            if rule.is_constant and comm.rank == 0:
                warnings.warn(
                    f"with top_k=1, {'topk_softmax' if rule.score == 'topk_softmax' else 'renormalize=True'} gives "
                    "every route the same weight, so the router has no gradient from the outputs and cannot learn; "
                    f"use Router({num_experts}, 1, 'softmax_topk', renormalize=False)",
                    stacklevel=4,  # who makes the layer
                )
            self.router = rule
            self._make_parameters(shared_intermediate, shared_gate)
            return {
                "shared_intermediate": shared_intermediate,
                "shared_gate": bool(shared_gate),
                "router": rule,
                "router_grad": router_grad,
                **coefficients,
            }, None

        agree(comm.engine.ranks, prepare, "making an ExpertParallelMoE")
        self.balance_coef, self.z_coef, self.router_grad = balance_coef, z_coef, router_grad
        self._set_up()

    def _make_parameters(self, shared_intermediate: int, shared_gate: bool) -> None:
        """Make what lies on every rank: the router, the shared expert and the layer's buffers."""
        device, num_experts, hidden = self.experts.w1.device, self.comm.plan.num_experts, self.experts.hidden
        factory: dict[str, Any] = {"device": device, "dtype": self.experts.w1.dtype}

        def parameter(wanted: object, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **factory)) if wanted else None

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_experts, dtype=dtype, device=device)

        with torch.inference_mode(False):  # forward writes to buffers, and saves parameters, in any mode
            self.router_weight = nn.Parameter(torch.empty(num_experts, hidden, **factory))
            self.router_bias = parameter(self.router.bias, num_experts)
            rows = self.experts.form.activation.rows * shared_intermediate
            self.shared_w1 = parameter(shared_intermediate, rows, hidden)
            self.shared_w2 = parameter(shared_intermediate, hidden, shared_intermediate)
            self.shared_gate_weight = parameter(shared_gate, 1, hidden)
            self.register_buffer("correction_bias", zeros(torch.float32) if self.router.correction_bias else None)
            self.register_buffer("expert_counts", zeros(torch.int64), persistent=False)
            self._reset_replicated(None)
        self.weight_names = tuple(self._parameters)

    def _set_up(self) -> None:
        """Do what each copy of a layer needs for itself."""
        self._number = torch_compile.number_layer(self)
        self._records: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ExpertParallelMoE:
        before, counts = self.correction_bias, self.expert_counts
        super()._apply(fn, recurse)
        after, device = self.correction_bias, self.expert_counts.device
        if before is not None and after is not None and after.dtype != torch.float32:  # steps would be rounded away
            self.correction_bias = before.to(after.device)
        # Also where fn leaves it empty, as to_empty does: no checkpoint has these counts.
        self.expert_counts = torch.zeros_like(counts, device=device) if counts.is_meta else counts.to(device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _rename_experts(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.correction_bias is not None:  # assign=True brings that of a checkpoint
            self.correction_bias = self.correction_bias.float()
        if self.expert_counts.is_meta and not self.router_weight.is_meta:  # assign=True leaves it there
            self.expert_counts = torch.zeros_like(self.expert_counts, device=self.router_weight.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_up()

    @property
    def local_experts(self) -> range:
        """Numbers of the experts of which this rank has the part in state dicts. Without a placement they lie here."""
        return self.experts.local_experts

    @property
    def slot_experts(self) -> Sequence[int]:
        """The expert in each slot of this rank, -1 for an empty slot; without a placement ``local_experts``."""
        return self.experts.slot_experts

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's experts. They are sharded, and their gradients are complete."""
        return self.experts.expert_parameters()

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that ``router_grad`` is about: router and shared expert, the same on every rank."""
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("experts.")]

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all weights uniformly in ±1/sqrt(fan-in), as nn.Linear does. The layer's own buffers become 0.

        Collective if there are replicas.

        Args:
            seed: draw the same full set of weights on every rank and for any number of ranks, and keep this rank's
                shard. Experts compute the same in any ``weight_layout``. Give each layer its own seed, or layers get
                equal weights. None draws from torch's generator,
                and how many values depends on the number of ranks. Then load a checkpoint, or make replicated
                parameters equal yourself.
        """
        self._reset_replicated(seed)
        self.experts.reset_parameters(seed)

    @torch.no_grad()
    def _reset_replicated(self, seed: int | None) -> None:
        shared_width = 0 if self.shared_w2 is None else self.shared_w2.shape[1]
        for full_name, parameter in self.named_parameters():
            if full_name.startswith("experts."):
                continue
            name = own_name(full_name)
            bound = 1 / math.sqrt(shared_width if name == "shared_w2" else self.experts.hidden)
            if seed is None:
                parameter.uniform_(-bound, bound)
            else:
                draw_seeded(parameter, PLAIN_WEIGHTS, bound, seed, name, range(len(parameter)))
        self.expert_counts.zero_()  # by name: pruning has buffers too, which are masks
        if self.correction_bias is not None:
            self.correction_bias.zero_()

    def forward(
        self,
        x: torch.Tensor,
        *,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route, dispatch, compute, combine. Collective.

        Args:
            x: [..., H], dtype and device of the parameters; leading dimensions may differ per rank and be 0.
            topk_ids: int32 or int64 [..., K], the experts of each token, -1 for a place without a route; None lets the
                router choose. All ranks give them, or none does. The losses and ``expert_counts`` count them.
            topk_weights: floating point [..., K], weights of ``topk_ids``. None takes what the router, as it is now,
                would give these experts; then it learns from them. Weights that are given are used as they are. All
                ranks give them, or none does.
            token_mask: bool [...], True for a real token, False for padding, which is left out: it gets no route, 0 as
                its output and gradient, and no part in losses and counts. Everything else is, bit for bit, as if the
                rows were not there. On GPUs the host waits for the number of real tokens.

        Returns:
            out [..., H], dtype of the parameters (or of autocast), and aux_loss, a scalar of at least float32:
            ``balance_coef`` times the balance loss plus ``z_coef`` times the z-loss. Both losses are over the tokens
            of all ranks, so aux_loss is the same on every rank; it is 0 where both coefficients are 0. Add it to a
            loss that is averaged over ranks. Where losses are summed over ranks, add ``aux_loss / W``. A backward of
            one result runs through both, so detach an aux_loss that is kept.

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument: bad input on this rank.
            PeerError: bad input, or any other failure, on another rank.
            PlanMismatch: another rank gives other arguments than this one, or has frozen other parameters.
            TokenloomError: as in ``Communicator.dispatch``.
        """
        if torch.compiler.is_compiling():
            return torch_compile.forward(self, x, topk_ids, topk_weights, token_mask)
        return self._forward(x, topk_ids=topk_ids, topk_weights=topk_weights, token_mask=token_mask)

    def _forward(
        self,
        x: torch.Tensor,
        *,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
        counts: bool | None = None,
        compiled: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens, run the experts, and add losses and counts.

        Args:
            x: as in ``forward``.
            topk_ids: as in ``forward``.
            topk_weights: as in ``forward``.
            token_mask: as in ``forward``.
            counts: whether the routes count. None counts them if this trains.
            compiled: whether an operator of torch.compile runs this forward, with copies of the parameters.
        """
        if counts is None:
            counts = self.training and torch.is_grad_enabled()
        engine, experts = self.comm.engine, self.experts
        engine.raise_known_errors()
        router_weight = self._parameters.get("router_weight")  # getattr would compute a parametrized weight
        dtype = None if router_weight is None else router_weight.dtype
        trained = ""
        if torch.is_grad_enabled():
            parameters = [*self._parameters.items(), *experts._parameters.items()]
            trained = ", ".join([name for name, each in parameters if each is not None and each.requires_grad])
        alike = (
            ("topk_ids", _GIVEN[topk_ids is not None]),
            ("topk_weights", _GIVEN[topk_weights is not None]),
            ("trained parameters", trained or "none"),
        )
        with engine.sequence(*experts.first_calls(dtype)):  # sends nothing: bad input is told to the other ranks
            try:
                if compiled:
                    torch_compile.require_parameters((self, experts))
                routed = self._route(x, topk_ids, topk_weights, token_mask)
            except Exception as fault:
                self._sum_over_ranks(None, alike, fault)  # the other ranks are about to sum
                raise
            sums = self._sum_over_ranks(routed.sums, alike)
        shared: list[torch.Tensor] = []
        meanwhile = None if self.shared_w1 is None else lambda: shared.append(self._shared_expert(routed.tokens))
        out = experts(routed.tokens, routed.topk_ids, routed.topk_weights, meanwhile, alike)
        for result in shared:
            out = out + result.to(out.dtype)  # autocast leaves float64 as it is
        self._record(routed, x.shape)
        out = routed.put_back(out, x.shape, 0)
        aux_loss = self._aux_loss(sums, torch.promote_types(x.dtype, torch.float32))
        if counts and sums is not None:
            out, aux_loss = self._count(sums.expert_counts.to(torch.int64), out, aux_loss)
        # Gradients of the sums and of the experts are collective, so every rank has to run both.
        return tied(out, aux_loss)

    def _route(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        token_mask: torch.Tensor | None,
    ) -> _RoutedTokens:
        """Choose experts, or take the caller's. Not collective. Logits, weights and sums are at least float32."""
        tokens = self.experts.tokens(x)
        self._require_dtype(tokens.dtype)
        if topk_ids is not None:
            topk_ids = self.experts.ids(x, topk_ids)
        elif topk_weights is not None:
            raise InvalidArgument("topk_weights are given without topk_ids; give the experts that they belong to")
        if topk_weights is not None:
            topk_weights = self.experts.weights(x, topk_weights)
        real = None
        if token_mask is not None:
            real = _places_of_real_tokens(x, token_mask)
            tokens = tokens.index_select(0, real)
            topk_ids, topk_weights = (
                None if each is None else each.index_select(0, real) for each in (topk_ids, topk_weights)
            )
        if topk_ids is not None and topk_weights is not None and not self._wants_sums():
            return _RoutedTokens(tokens, topk_ids, topk_weights, None, real)
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):  # autocast would route by bfloat16 logits
            logits = router_logits(tokens, self._replicated(self.router_weight), dtype)
            if self.router_bias is not None:
                logits = logits + self._replicated(self.router_bias).to(dtype)
            ids, weights, probabilities = self.router.route(
                logits, self.correction_bias, None if topk_ids is None else topk_ids.long()
            )
            sums = router_sums(logits, probabilities, ids) if self._wants_sums() else None
            return _RoutedTokens(tokens, ids, weights if topk_weights is None else topk_weights, sums, real)

    def _require_dtype(self, dtype: torch.dtype) -> None:
        """Raise if tokens have another dtype than the parameters outside of the experts."""
        if torch.is_autocast_enabled(self.comm.device.type):
            return
        experts, shared = self.experts.w1.dtype, self._parameters.get("shared_w1")
        # FSDP casts tokens and replicated parameters. Experts, which it leaves alone, are cast where they are used.
        if dtype != experts and any(each.dtype != dtype for each in self.replicated_parameters()):
            raise DtypeMismatch(f"x is {dtype}, the layer is {experts}; cast x to {experts}")
        if shared is not None and shared.dtype != dtype:
            raise DtypeMismatch(
                f"x is {dtype}, shared_w1 is {shared.dtype}; cast x, which FSDP does with cast_forward_inputs=True"
            )

    def _wants_sums(self) -> bool:
        return bool(self.balance_coef or self.z_coef or self.correction_bias is not None)

    def _sum_over_ranks(
        self, sums: RouterSums | None, alike: tuple[tuple[str, str], ...], fault: Exception | None = None
    ) -> RouterSums | None:
        """Sum over the tokens of all ranks, if a loss or the bias needs the sums. Collective then.

        A rank that failed passes its fault, and no sums. Where the host does not wait, it still takes part: the others
        hear of the fault in the next call.
        """
        if not self._wants_sums():
            return None
        if self.experts.pool_rows is None:
            self.comm.engine.check("calls")  # a rank whose experts failed in an earlier layer does not get here
        wide = torch.promote_types(self.experts.w1.dtype, torch.float32)
        if sums is None:
            counts = torch.zeros(self.comm.plan.num_experts, dtype=wide, device=self.comm.device)
            sums = RouterSums(counts, counts[:1], counts, counts[:1])
        host_waits, bias = self.experts.pool_rows is None, self.correction_bias
        return sum_over_ranks(self.comm.engine.ranks, sums, wide, host_waits, bias, alike, fault)

    def _aux_loss(self, sums: RouterSums | None, dtype: torch.dtype) -> torch.Tensor:
        """Compute aux_loss over the tokens of all ranks."""
        if sums is None or not (self.balance_coef or self.z_coef):
            return torch.zeros((), dtype=dtype, device=self.comm.device)
        return self.balance_coef * balance_loss(sums, self.router.top_k) + self.z_coef * z_loss(sums)

    def _count(
        self, routes: torch.Tensor, out: torch.Tensor, aux_loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add routes to the counts, once for each forward that trains, and return the outputs.

        An activation checkpoint runs a forward twice and backward once, so there the backward counts.
        """

        def add() -> None:
            self.expert_counts.add_(routes)

        later = in_backward() or has_saved_tensors_hooks()
        if later and out.requires_grad:
            out = once_in_backward(out, add)
        elif later and aux_loss.requires_grad:
            aux_loss = once_in_backward(aux_loss, add)
        elif not in_backward():
            add()
        return out, aux_loss

    def _shared_expert(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.shared_w1 is not None
        assert self.shared_w2 is not None
        hidden = functional.linear(tokens, self._replicated(self.shared_w1))
        activations = apply_activation(hidden, self.experts.form.activation)
        out = functional.linear(activations, self._replicated(self.shared_w2))
        if self.shared_gate_weight is None:
            return out
        return torch.sigmoid(functional.linear(tokens, self._replicated(self.shared_gate_weight))) * out

    def _replicated(self, parameter: torch.Tensor) -> torch.Tensor:
        if self.router_grad != "sum":
            return parameter
        return sum_grad_over_ranks(parameter, self.comm.engine.ranks, host_waits=self.experts.pool_rows is None)

    @contextmanager
    def record_routing(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Record the routes of each forward in the block, to give them again as ``topk_ids``.

        Routes that an activation checkpoint recomputes are not recorded again. The same holds in ``torch.compile``.

        Returns:
            a context that gives a list. Each forward appends topk_ids, int64 [..., K], and topk_weights [..., K],
            without a graph. Padding has -1 and 0.
        """
        routes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._records.append(routes)
        try:
            yield routes
        finally:
            self._records = [each for each in self._records if each is not routes]

    def _record(self, routed: _RoutedTokens, shape: torch.Size) -> None:
        if not self._records or in_backward():
            return
        # Copies: a compiler may reuse the memory of the caller's routes.
        ids, weights = routed.topk_ids.long().clone(), routed.topk_weights.detach().clone()
        for routes in self._records:
            routes.append((routed.put_back(ids, shape, -1), routed.put_back(weights, shape, 0)))

    def saved_activations(self, x: torch.Tensor) -> list[SavedTensor]:
        """Run a forward on x and list what it keeps for backward, without parameters and x. Collective.

        Args:
            x: as in ``forward``.

        Returns:
            One item per storage, largest first. Print the items for a table; ``sum(each.num_bytes for each in ...)``
            is the total.
        """
        counts = self.expert_counts.clone()
        with torch.enable_grad():
            outputs = self(x)
        self.expert_counts.copy_(counts)
        return saved_tensors(outputs, [*self.parameters(), *self.buffers(), x])

    @torch.no_grad()
    def update_correction_bias(self, rate: float) -> None:
        """Raise the bias of experts with less than the mean load, lower the bias of others, and count from 0 again.

        The load is ``expert_counts``: that of all training forwards since the last call, so of all micro-batches of a
        step. Call it once after each step, on all ranks. Nothing is sent, since counts are the same on all. Where the
        bias of ranks differs, the next forward raises PlanMismatch, unless ``pool_rows`` keeps the host from waiting.
        Source: auxiliary-loss-free balancing in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).

        Args:
            rate: added to a bias or subtracted from it; the same on all ranks.

        Raises:
            InvalidArgument: the router has no correction bias.
        """
        if self.correction_bias is None:
            raise InvalidArgument("the router has no correction bias; make it with Router(..., correction_bias=True)")
        counts = self.expert_counts
        above = torch.sign(counts.sum() - len(counts) * counts)  # exact, as integers
        self.correction_bias += rate * above.to(self.correction_bias.dtype)  # a product would have torch's default
        counts.zero_()

    def extra_repr(self) -> str:
        return (
            f"router={self.router.score}, balance_coef={self.balance_coef}, z_coef={self.z_coef}, "
            f"router_grad={self.router_grad}"
        )


@dataclass
class _RoutedTokens:
    """Tokens with their routes.

    Attributes:
        tokens: [T, H].
        topk_ids: [T, K].
        topk_weights: [T, K].
        sums: sums over the tokens, if a loss or the bias wants them.
        real: int64 [T], positions of the tokens in the layer's input, or None if there is no padding.
    """

    tokens: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    sums: RouterSums | None
    real: torch.Tensor | None

    def put_back(self, values: torch.Tensor, shape: torch.Size, fill: int) -> torch.Tensor:
        """Put values [T, n] where the tokens were in x of ``shape``, giving [..., n], and ``fill`` beside them."""
        if self.real is not None:
            everything = values.new_full((shape[:-1].numel(), values.shape[1]), fill)
            values = everything.index_copy(0, self.real, values)
        return values.view(*shape[:-1], values.shape[1])


def _places_of_real_tokens(x: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """List the positions of real tokens in x: int64 [T], of those whose mask is True."""
    checks.require_tensor("token_mask", token_mask)
    if token_mask.dtype != torch.bool:
        raise DtypeMismatch(
            f"token_mask is {token_mask.dtype}, expected torch.bool: True for a real token; pass token_mask.bool()"
        )
    if token_mask.shape != x.shape[:-1]:
        wanted = list(x.shape[:-1])
        raise ShapeMismatch(f"token_mask is {list(token_mask.shape)}, expected {wanted}: one value for each token")
    if token_mask.device != x.device:
        raise DeviceMismatch(f"token_mask is on {token_mask.device}, x is on {x.device}; move one of them")
    return token_mask.flatten().nonzero()[:, 0]


def _rename_experts(state_dict: dict[str, Any], prefix: str) -> None:
    """Rename weights of experts in a state dict from before ``experts`` was a module of its own."""
    for name in list(state_dict):
        weight = name.removeprefix(prefix)
        if name.startswith(prefix) and own_name(weight).removesuffix("_mask") in EXPERT_WEIGHTS:
            state_dict.setdefault(f"{prefix}experts.{weight}", state_dict.pop(name))
