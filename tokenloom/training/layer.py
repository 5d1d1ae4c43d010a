"""ExpertParallelMoE: a mixture-of-experts layer whose experts are spread over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from tokenloom.backends.base import Capabilities
from tokenloom.backends.registry import MAX_SMS
from tokenloom.comm import validation
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.strategy import Strategy
from tokenloom.comm.torch_modes import require_eager, settled
from tokenloom.errors import DeviceMismatch, DtypeMismatch, InvalidArgument, ShapeMismatch
from tokenloom.ops.activation import apply_activation
from tokenloom.ops.autocast import autocast_dtype
from tokenloom.ops.experts import PLAIN, ExpertForm
from tokenloom.ops.router import Router, RouterSums, balance_loss, router_logits, router_sums, z_loss
from tokenloom.plan import PLAIN_WEIGHTS, SWIGLU, Activation, WeightLayout
from tokenloom.runtime.rendezvous import agree
from tokenloom.training import torch_compile
from tokenloom.training.gradients import scale_grad, sum_grad_over_ranks, sum_over_ranks, tied
from tokenloom.training.main_grads import accumulate_main_grads
from tokenloom.training.parameters import check_options, check_pool_rows, draw_seeded
from tokenloom.training.pieces import RunOptions, forward_calls
from tokenloom.training.routed_experts import routed_experts
from tokenloom.training.saved_activations import SavedTensor, saved_tensors
from tokenloom.tune import choices

__all__ = ["ExpertParallelMoE"]

EXPERT_WEIGHTS = ("w1", "w2", "w1_bias", "w2_bias")
"""Names of the parameters that are sharded by expert, along dimension 0."""


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
        comm: a Communicator to share between layers, instead of ``group``.
        backend: as in ``Communicator``.
        timeout_s: as in ``Communicator``.
        open_timeout_s: as in ``Communicator``.
        transport: as in ``Communicator``.
        ranks_per_node: as in ``Communicator``.
        device: device of the parameters, which must be the communicator's.
        dtype: dtype of the parameters; None means torch's default.

    Attributes:
        w1: [L, 2I, H], this rank's L = E / W experts, gate rows first, then up rows. [L, I, H] where the activation
            is not gated. ``weight_layout`` may say otherwise, as of w2.
        w2: [L, H, I], this rank's experts.
        w1_bias: [L, 2I] in the order of w1's rows, or None without biases.
        w2_bias: [L, H], or None without biases.
        router_weight: [E, H].
        router_bias: [E], or None without ``Router.bias``.
        correction_bias: float32 buffer [E], or None without ``Router.correction_bias``.
        shared_w1: [2S, H], gate rows first, or [S, H] without gates, or None without a shared expert of width S.
        shared_w2: [H, S], or None without a shared expert.
        shared_gate_weight: [1, H], or None without ``shared_gate``.
        expert_counts: int64 buffer [E], routes of the last forward over all ranks. Zero before the first forward, and
            updated only when a loss or a correction bias needs it.

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
        require_eager()
        dtype = dtype or torch.get_default_dtype()
        group_and_comm = group is not None and comm is not None
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
                num_sms=MAX_SMS,
            )
        self.comm = comm

        usual = Strategy.usual(comm.engine.capabilities)

        def prepare() -> tuple[dict[str, Any], tuple[Router, ExpertForm, Strategy | None]]:
            if group_and_comm:
                raise InvalidArgument("group and comm are both given; the communicator already has a group")
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
                raise InvalidArgument(f"dtype is {dtype!r}, expected bfloat16, float16, float32 or float64")
            rule = Router(num_experts, top_k, router) if isinstance(router, str) else router
            form = ExpertForm(Activation.of(activation), weight_layout)
            factors = {"balance_coef": balance_coef, "z_coef": z_coef, "expert_grad_scale": expert_grad_scale}
            sizes = (hidden, intermediate, num_experts, top_k, shared_intermediate)
            check_options(comm.plan, rule, *sizes, router_grad, factors)
            check_pool_rows(pool_rows)
            if shared_gate and not shared_intermediate:
                raise InvalidArgument("shared_gate is True, but there is no shared expert; give shared_intermediate")
            validation.require_layout(comm.engine.capabilities, "expert")
            validation.require_strategy(comm.engine.capabilities, strategy or usual)
            found = None
            if strategy is None and comm.rank == 0:  # ranks may see different disks
                found = choices.find(choices.setting_of(comm, intermediate, dtype))
            return {
                "intermediate": intermediate,
                "activation": form.activation,
                "weight_layout": form.layout,
                "biases": bool(biases),
                "shared_intermediate": shared_intermediate,
                "shared_gate": bool(shared_gate),
                "router": rule,
                "balance_coef": balance_coef,
                "z_coef": z_coef,
                "router_grad": router_grad,
                "expert_grad_scale": expert_grad_scale,
                "strategy": strategy,
                "overlap": overlap,
                "redispatch_in_backward": redispatch_in_backward,
                "pool_rows": pool_rows,
                "dtype": dtype,
            }, (rule, form, found)

        agreed = agree(comm.engine.ranks, prepare, "making an ExpertParallelMoE")
        self.router, self.form, _ = agreed[comm.rank]
        self.hidden, self.intermediate = hidden, intermediate
        self.balance_coef, self.z_coef = balance_coef, z_coef
        self.router_grad, self.expert_grad_scale = router_grad, expert_grad_scale
        self.strategy = strategy or agreed[0][2] or usual
        self.overlap, self.redispatch_in_backward, self.pool_rows = overlap, redispatch_in_backward, pool_rows
        local = comm.plan.experts_per_rank
        factory: dict[str, Any] = {"device": comm.device, "dtype": dtype}
        shapes = self.form.shapes(local, hidden, intermediate)

        def parameter(wanted: object, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **factory)) if wanted else None

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_experts, dtype=dtype, device=comm.device)

        with torch.inference_mode(False):  # forward writes to buffers, and saves parameters, in any mode
            self.router_weight = nn.Parameter(torch.empty(num_experts, hidden, **factory))
            self.router_bias = parameter(self.router.bias, num_experts)
            self.w1 = nn.Parameter(torch.empty(shapes["w1"], **factory))
            self.w2 = nn.Parameter(torch.empty(shapes["w2"], **factory))
            self.w1_bias, self.w2_bias = parameter(biases, *shapes["w1_bias"]), parameter(biases, *shapes["w2_bias"])
            self.shared_w1 = parameter(shared_intermediate, self.form.activation.rows * shared_intermediate, hidden)
            self.shared_w2 = parameter(shared_intermediate, hidden, shared_intermediate)
            self.shared_gate_weight = parameter(shared_gate, 1, hidden)
            self.register_buffer("correction_bias", zeros(torch.float32) if self.router.correction_bias else None)
            self.register_buffer("expert_counts", zeros(torch.int64), persistent=False)
            self.reset_parameters()
        self._weight_names = tuple(self._parameters)
        self.main_grads = main_grads
        self._set_up()

    def _set_up(self) -> None:
        """Do what each copy of a layer needs for itself."""
        self._number = torch_compile.number_layer(self)
        self._accumulate_main_grads()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ExpertParallelMoE:
        before = self.correction_bias
        super()._apply(fn, recurse)
        after = self.correction_bias
        if before is not None and after is not None and after.dtype != torch.float32:  # steps would be rounded away
            self.correction_bias = before.to(after.device)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.correction_bias is not None:  # assign=True brings that of a checkpoint
            self.correction_bias = self.correction_bias.float()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_up()

    @property
    def local_experts(self) -> range:
        """Global numbers of the experts on this rank."""
        local = self.comm.plan.experts_per_rank
        return range(self.comm.rank * local, (self.comm.rank + 1) * local)

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's experts. They are sharded, and their gradients are complete."""
        return [parameter for name, parameter in self.named_parameters() if _own_name(name) in EXPERT_WEIGHTS]

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that ``router_grad`` is about: router and shared expert, the same on every rank."""
        return [parameter for name, parameter in self.named_parameters() if _own_name(name) not in EXPERT_WEIGHTS]

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all weights uniformly in ±1/sqrt(fan-in), as nn.Linear does. The layer's own buffers become 0.

        Args:
            seed: draw the same full set of weights on every rank and for any number of ranks, and keep this rank's
                shard. Experts compute the same in any ``weight_layout``. Give each layer its own seed, or layers get
                equal weights. None draws from torch's generator,
                and how many values depends on the number of ranks. Then load a checkpoint, or make replicated
                parameters equal yourself.
        """
        widths = {"w2": self.intermediate, "w2_bias": self.intermediate}
        if self.shared_w2 is not None:
            widths["shared_w2"] = self.shared_w2.shape[1]
        for full_name, parameter in self.named_parameters():
            name = _own_name(full_name)
            bound = 1 / math.sqrt(widths.get(name, self.hidden))
            if seed is None:
                parameter.uniform_(-bound, bound)
            else:
                rows = self.local_experts if name in EXPERT_WEIGHTS else range(len(parameter))
                draw_seeded(parameter, self.form.layout, bound, seed, name, rows)
        self.expert_counts.zero_()  # not the mask of somebody's pruning
        if self.correction_bias is not None:
            self.correction_bias.zero_()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route, dispatch, compute, combine. Collective.

        Args:
            x: [..., H], dtype and device of the parameters; leading dimensions may differ per rank and be 0.

        Returns:
            out [..., H], dtype of the parameters (or of autocast), and aux_loss, a scalar of at least float32:
            ``balance_coef`` times the balance loss plus ``z_coef`` times the z-loss. Both losses are over the tokens
            of all ranks, so aux_loss is the same on every rank; it is 0 where both coefficients are 0. Add it to a
            loss that is averaged over ranks. Where losses are summed over ranks, add ``aux_loss / W``. A backward of
            one result runs through both, so detach an aux_loss that is kept.

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch, InvalidArgument: bad input on this rank.
            PeerError: bad input, or any other failure, on another rank.
            TokenloomError: as in ``Communicator.dispatch``.
        """
        return torch_compile.forward(self, x) if torch.compiler.is_compiling() else self._forward(x)

    def _accumulate_main_grads(self) -> None:
        """Let gradients of experts add to ``main_grad``, if the layer does so."""
        if self.main_grads:  # at every forward: parameters may be new or thawed since the layer was made
            accumulate_main_grads(self.expert_parameters())

    def _forward(self, x: torch.Tensor, compiled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Run forward. With ``compiled``, copies stand in the places of the parameters."""
        engine = self.comm.engine
        engine.begin()
        if not compiled:
            self._accumulate_main_grads()
        options = RunOptions(self.strategy, self.overlap, self.redispatch_in_backward, self.pool_rows)
        dtype = autocast_dtype(self.comm.device) or self.w1.dtype
        with engine.sequence(
            *forward_calls(options, 1, dtype, needs_grad=False)
        ):  # a failure here comes before any call
            try:
                if compiled:
                    torch_compile.require_parameters(self, self._weight_names)
                tokens, topk_ids, topk_weights, sums = self._route(x)
            except Exception:
                self._sum_over_ranks(None)  # the other ranks are about to sum
                raise
        sums = self._sum_over_ranks(sums)
        topk_weights = topk_weights.to(torch.promote_types(dtype, torch.float32))  # of float64 layers under autocast
        shared: list[torch.Tensor] = []
        w1, w2 = (scale_grad(weight, self.expert_grad_scale) for weight in (self.w1, self.w2))
        w1_bias, w2_bias = (
            None if bias is None else scale_grad(bias, self.expert_grad_scale) for bias in (self.w1_bias, self.w2_bias)
        )
        beside = None if self.shared_w1 is None else lambda: shared.append(self._shared_expert(tokens))
        out = routed_experts(
            self.comm,
            options,
            tokens,
            topk_ids,
            topk_weights,
            w1,
            w2,
            beside,
            w1_bias=w1_bias,
            w2_bias=w2_bias,
            activation=self.form.activation,
            weight_layout=self.form.layout,
        )
        for result in shared:
            out = out + result.to(out.dtype)  # autocast leaves float64 as it is
        # The sums' gradient is collective too, and so is that of the experts.
        return tied(out.view(x.shape), self._aux_loss(sums, torch.promote_types(x.dtype, torch.float32)))

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RouterSums | None]:
        """Route, giving tokens [T, H], ids, weights, and the sums over tokens if a loss or the bias wants them.

        Not collective. Logits, weights and sums are at least float32.
        """
        tokens = self._tokens(x)
        validation.number_of_tokens(self.comm.plan, len(tokens))  # pieces of too many tokens may be few enough
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):  # autocast would route by bfloat16 logits
            logits = router_logits(tokens, self._replicated(self.router_weight), dtype)
            if self.router_bias is not None:
                logits = logits + self._replicated(self.router_bias).to(dtype)
            topk_ids, topk_weights, probabilities = self.router.route(logits, self.correction_bias)
            sums = router_sums(logits, probabilities, topk_ids) if self._wants_sums() else None
            return tokens, topk_ids, topk_weights, sums

    def _wants_sums(self) -> bool:
        return bool(self.balance_coef or self.z_coef or self.correction_bias is not None)

    def _sum_over_ranks(self, sums: RouterSums | None) -> RouterSums | None:
        """Sum over the tokens of all ranks, if a loss or the bias wants that, which is then collective.

        A rank that failed passes None and takes part all the same. If one rank left out an all-reduce, all later ones
        would pair wrongly.
        """
        if not self._wants_sums():
            return None
        if self.pool_rows is None:
            self.comm.engine.check("calls")  # a rank whose experts failed in an earlier layer does not get here
        wide = torch.promote_types(self.w1.dtype, torch.float32)
        if sums is None:
            counts = torch.zeros(self.comm.plan.num_experts, dtype=wide, device=self.comm.device)
            sums = RouterSums(counts, counts[:1], counts, counts[:1])
        return sum_over_ranks(self.comm.engine.ranks, sums, wide)

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        x = settled(x)
        validation.require_tensor("x", x)
        if x.ndim == 0 or x.shape[-1] != self.hidden:
            raise ShapeMismatch(f"x is {list(x.shape)}, the layer was made for [..., {self.hidden}]")
        if x.device != self.w1.device:
            raise DeviceMismatch(f"x is on {x.device}, the layer is on {self.w1.device}; move one of them")
        if x.dtype != self.w1.dtype:
            if not torch.is_autocast_enabled(x.device.type):
                raise DtypeMismatch(f"x is {x.dtype}, the layer is {self.w1.dtype}; cast one of them, or use autocast")
            if x.dtype not in Capabilities().dtypes:  # they would be cast, whatever they mean
                raise DtypeMismatch(f"x is {x.dtype}, expected a dtype that autocast takes, such as {self.w1.dtype}")
        return x.reshape(-1, self.hidden).contiguous()

    def _aux_loss(self, sums: RouterSums | None, dtype: torch.dtype) -> torch.Tensor:
        """Compute aux_loss over the tokens of all ranks, and keep the counts of routes."""
        if sums is not None:
            self.expert_counts.copy_(sums.expert_counts)
        if sums is None or not (self.balance_coef or self.z_coef):
            return torch.zeros((), dtype=dtype, device=self.comm.device)
        return self.balance_coef * balance_loss(sums, self.router.top_k) + self.z_coef * z_loss(sums)

    def _shared_expert(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.shared_w1 is not None
        assert self.shared_w2 is not None
        hidden = functional.linear(tokens, self._replicated(self.shared_w1))
        out = functional.linear(apply_activation(hidden, self.form.activation), self._replicated(self.shared_w2))
        if self.shared_gate_weight is None:
            return out
        return torch.sigmoid(functional.linear(tokens, self._replicated(self.shared_gate_weight))) * out

    def _replicated(self, parameter: torch.Tensor) -> torch.Tensor:
        return sum_grad_over_ranks(parameter, self.comm.engine.ranks) if self.router_grad == "sum" else parameter

    def saved_activations(self, x: torch.Tensor) -> list[SavedTensor]:
        """Run a forward on x and list what it keeps for backward, without parameters and x. Collective.

        Args:
            x: as in ``forward``.

        Returns:
            One item per storage, largest first. Print the items for a table; ``sum(each.num_bytes for each in ...)``
            is the total.
        """
        with torch.enable_grad():
            outputs = self(x)
        return saved_tensors(outputs, [*self.parameters(), *self.buffers(), x])

    @torch.no_grad()
    def update_correction_bias(self, rate: float) -> None:
        """Raise the bias of experts with less than the mean load in the last forward, and lower the bias of others.

        Call it after a step. Source: auxiliary-loss-free balancing in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).

        Args:
            rate: added to a bias or subtracted from it.

        Raises:
            InvalidArgument: the router has no correction bias.
        """
        if self.correction_bias is None:
            raise InvalidArgument("the router has no correction bias; make it with Router(..., correction_bias=True)")
        counts = self.expert_counts.float()
        self.correction_bias += rate * torch.sign(counts.mean() - counts)

    def extra_repr(self) -> str:
        plan = self.comm.plan
        return (
            f"hidden={self.hidden}, intermediate={self.intermediate}, experts={plan.num_experts} "
            f"({plan.experts_per_rank} here), top_k={plan.top_k}, ranks={plan.num_ranks}, backend={self.comm.backend}"
            f"{'' if self.form == PLAIN else f', {self.form}'}{', biases' if self.w1_bias is not None else ''}"
        )


def _own_name(name: str) -> str:
    """Name of a parameter, or of what is computed from it: "w1" of "parametrizations.w1.original" and "w1_orig".

    ``torch.nn.utils`` renames parameters so, for parametrizations and for pruning.
    """
    return name.removeprefix("parametrizations.").split(".")[0].removesuffix("_orig")
