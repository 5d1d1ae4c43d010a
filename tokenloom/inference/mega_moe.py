"""MegaMoE: a whole mixture-of-experts layer in FP8, for inference on Hopper GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tokenloom.backends.registry import LAYER_SMS
from tokenloom.backends.seam import DispatchOptions
from tokenloom.comm import checks
from tokenloom.comm.balance import default_rows_per_pull
from tokenloom.comm.communicator import Communicator, Recipe, line_about
from tokenloom.comm.move_experts import PIECE_BYTES, MovingExperts, move_experts
from tokenloom.comm.placement import Placement
from tokenloom.comm.restore_experts import restore_experts
from tokenloom.errors import BackendUnavailable, InvalidArgument, ShapeMismatch, a_type
from tokenloom.inference.composed_experts import ComposedExperts
from tokenloom.inference.expert_memory import FP8
from tokenloom.inference.mega_weights import (
    NEEDED,
    OPTIONAL,
    Experts,
    WeightForms,
    require_tensors,
    rows_of_slots,
)
from tokenloom.inference.nvlink_experts import NvlinkExperts
from tokenloom.inference.schedules import MegaSchedule
from tokenloom.inference.trace import MegaTimes
from tokenloom.kernels.gemm.launch import BLOCK
from tokenloom.ops.gemm import (
    ALIGNMENT_BYTES,
    Biases,
    check_aligned,
    check_tensor,
    gated_activation,
)
from tokenloom.ops.padding import pad
from tokenloom.ops.quant import (
    FourBits,
    WeightReport,
    is_packed,
    require_recipe,
    shape_of_weights,
)
from tokenloom.ops.quant.packed_weights import can_pack
from tokenloom.plan import PLAIN_WEIGHTS, SWIGLU, Activation, WeightLayout, align_up
from tokenloom.runtime.rendezvous import agree, agreeing
from tokenloom.runtime.torch_modes import require_no_tangent, settled

MOST_TERMS = 32
"""Most results that are added up for one token."""
WIDTH_UNIT = 16
"""Widths are multiples of it: rows of FP8 are then whole pieces of 16 bytes, which is what copies move."""
KEPT = ("fp8", "four_bits", "both")
"""Forms of weights in memory."""
EXPERTS: dict[str, type[NvlinkExperts] | type[ComposedExperts]] = {
    "nvlink": NvlinkExperts,
    "composed": ComposedExperts,
}
"""Implementation of a layer, by the name of its backend."""


class MegaMoE:
    """Dispatch, gated experts in FP8, combine: ``y = sum over k of weight_k * (w2 @ a + w2_bias)``.

    ``a`` is the activation of gates and ups, ``w1 @ x + w1_bias``; by default ``silu(gate) * up``, and no biases.

    x and the weighted activations are quantised with a scale per 128 values, or by ``recipe`` with one per row. Each
    route's result is rounded to bfloat16, and a token's results are added in ascending k, in float32
    (docs/reference/semantics.md). On "nvlink" nothing waits for the host. Any routing fits, and equal calls give equal
    bits. Making a layer is collective, and so is every call.

    Args:
        group: as in ``Communicator``. The ranks are Hopper GPUs of one host with ``backend`` "nvlink", at
            most 32.
        num_experts: E, divisible by the number of ranks.
        hidden: H, a multiple of 16. Kernels have the next multiple of 128: weights are padded with zeros when they are
            loaded, x is padded in each call, and results are cut.
        intermediate: I, likewise.
        top_k: K, at most 32.
        max_tokens_per_rank: M, the most tokens of one call on one rank.
        activation: an ``Activation`` with gates, or the name of one, such as "swiglu", "geglu", "swigluoai".
        activation_clamp: largest gate, and largest absolute up, before the activation: its ``limit`` by another name.
            None sets none beside that.
        fast_math: use the hardware's exponential and division in the activation.
        recipe: which values share a scale. "block": 128 of a row, and 128 x 128 of a weight, as DeepSeek-V3 and Qwen3
            have them. "row": a row, and an output channel of a weight, as compressed-tensors has them; its GEMMs are
            faster where they limit a call. docs/reference/fp8.md says what that costs. Scales of activations are then
            powers of two.
        power_of_two_scales: round the scales of x and of activations up to powers of two.
        num_shared_experts: S, experts that every token goes to with weight 1, on its own rank. K + S is at most 32.
        schedule: schedule of all calls. None chooses by the number of tokens of each call.
        backend: "nvlink" or "composed". "composed" makes the same of dispatch, grouped GEMMs and combine. It runs on
            Hopper GPUs of any number of nodes, with the host waiting for counts, and slowly on CPUs.
        device: as in ``Communicator``.
        timeout_s: as in ``Communicator``.
        open_timeout_s: as in ``Communicator``.
        transport: as in ``Communicator``.
        ranks_per_node: as in ``Communicator``; "nvlink" runs on one node.
        on_timeout: as in ``Communicator``. With "mask" a call that loses a rank is made again without it, so replicas
            take over in that call on "nvlink", and in the next one on "composed". The host waits for every call. After
            replays of CUDA graphs, ``check`` says what to replay again. ``timeout_s`` then limits the first call too,
            with what ranks load before it.
        placement: as in ``Communicator``: which slots of which ranks hold which experts. Weights then lie by slot, and
            ids stay those of experts. ``move_experts`` changes it, weights and all.
        spare_slots: as in ``Communicator``: instead of a placement, the default one with so many empty slots more.
        balance: as in ``Communicator``: "batch" splits each call's routes evenly over the ranks, which pull experts
            into their empty slots. Results keep their bits. On "nvlink" the host waits for nothing, weights come by
            ``load_weights``, and a rank cannot ``rejoin``.
        rows_per_pull: as in ``Communicator``. None: on GPUs about 1,500.
        rejoin: as in ``Communicator``. Load the weights again, or take those of replicas by ``move_experts(placement,
            stale=[rank])`` on all ranks. Graphs that were captured before leave this rank out.

    Attributes:
        comm: communicator that dispatches the tokens, with the ``hidden`` that kernels have.
        hidden: H, as it was given.
        intermediate: I, likewise.
        weights: w1 with gates and ups in turn, its scales, w2, its scales, of the widths that kernels have. Empty
            before ``load_weights``. With ``keep="four_bits"`` w1 and w2 are as ``pack_weights`` makes them. With
            "both" they are in FP8: load others by ``load_weights``, as what is written to them changes no four bits.
        biases: that of w1, with gates and ups in turn, and that of w2, float32, or None for each, likewise.
        after_stage: function that gets the name of each stage of a call once it is on the stream, or None.

    Raises:
        InvalidArgument: a size or an option is not as above.
        BackendUnavailable: the kernels do not run here.
        PlanMismatch: another rank passed another size, activation or option that all must have.
        TokenloomError: as in ``Communicator``; PeerError among them, where another rank raises one of these.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        num_experts: int,
        hidden: int,
        intermediate: int,
        top_k: int,
        max_tokens_per_rank: int,
        activation: Activation | str = SWIGLU,
        activation_clamp: float | None = None,
        fast_math: bool = True,
        recipe: Recipe = "block",
        power_of_two_scales: bool = False,
        num_shared_experts: int = 0,
        schedule: MegaSchedule | None = None,
        backend: str = "nvlink",
        device: torch.device | str | None = None,
        timeout_s: float = 30.0,
        open_timeout_s: float | None = None,
        transport: str = "auto",
        ranks_per_node: int | None = None,
        on_timeout: Literal["raise", "mask"] = "raise",
        placement: Placement | None = None,
        spare_slots: int = 0,
        balance: Literal["batch"] | None = None,
        rows_per_pull: int | None = None,
        rejoin: bool = False,
    ) -> None:
        implementation = EXPERTS.get(backend) if isinstance(backend, str) else None
        try:
            self.comm = Communicator(
                group,
                num_experts=num_experts,
                hidden=align_up(hidden, BLOCK) if _is_width(hidden) else hidden,  # which is refused
                top_k=top_k,
                max_tokens_per_rank=max_tokens_per_rank,
                backend="auto" if implementation is None else implementation.communicator_backend,
                num_sms=LAYER_SMS,  # of "composed"; the fused kernels take what the schedule says
                device=device,
                timeout_s=timeout_s,
                open_timeout_s=open_timeout_s,
                transport=transport,
                ranks_per_node=ranks_per_node,
                on_timeout=on_timeout,
                placement=placement,
                spare_slots=spare_slots,
                balance=balance,
                rows_per_pull=rows_per_pull,
                rejoin=rejoin,
            )
        except BackendUnavailable as error:  # its advice is for a Communicator
            said = str(error).replace("use backend='auto'", "use backend='composed'")
            raise BackendUnavailable(said) from None

        engine = self.comm.engine
        if engine.balance is not None and rows_per_pull is None and self.comm.device.type != "cpu":
            engine.balance.rows_per_pull = default_rows_per_pull(1, engine.capabilities.link_gbytes_per_s)

        def prepare() -> tuple[dict[str, Any], None]:
            if implementation is None:
                raise InvalidArgument(f"backend is {backend!r}, expected one of {', '.join(EXPERTS)}")
            widths = {"hidden": hidden, "intermediate": intermediate}  # which ranks may all pad to the same
            for name, width in widths.items():
                if not _is_width(width):
                    raise InvalidArgument(f"{name} is {width!r}, expected a multiple of {WIDTH_UNIT}")
            shared = num_shared_experts
            if not isinstance(shared, int) or not 0 <= shared <= MOST_TERMS - top_k:
                raise InvalidArgument(
                    f"num_shared_experts is {shared!r}, expected 0 to {MOST_TERMS} - top_k (top_k is {top_k})"
                )
            form = gated_activation(activation, activation_clamp, "activation_clamp")
            if schedule is not None and not isinstance(schedule, MegaSchedule):
                raise InvalidArgument(f"schedule is {schedule!r}, expected a MegaSchedule, or None")
            require_recipe(recipe)
            if rejoin and balance is not None and implementation.shares_weights:
                raise InvalidArgument(
                    "rejoin=True with balance='batch': peers read weights in memory that all make together; make "
                    "the layers of all ranks anew"
                )
            padded = align_up(intermediate, BLOCK)
            self._experts = implementation(self.comm, padded, shared, power_of_two_scales, recipe)
            self._experts.set_activation(form, fast_math)
            return {
                "backend": backend,
                **widths,
                "num_shared_experts": shared,
                "activation": form,
                "recipe": recipe,
                "power_of_two_scales": bool(power_of_two_scales),
            }, None

        try:
            if rejoin:
                prepare()  # the others have their layer
            else:
                agree(self.comm.engine.ranks, prepare, "making a MegaMoE")
        except Exception:
            self.comm.close()
            raise
        self.hidden, self.intermediate, self.num_shared_experts = hidden, intermediate, num_shared_experts
        self.schedule, self._backend, self._recipe = schedule, backend, recipe
        self._pads_tokens = hidden != self.comm.plan.hidden
        self._token_scales = self.comm.plan.scale_shape(recipe)  # behind T
        self._num_slots = self.comm.engine.plan.experts_per_rank
        self._num_local = self._num_slots + num_shared_experts
        self._forms = WeightForms(hidden, intermediate, recipe, self.comm.device)
        self._kept = "fp8"
        self.weights: tuple[torch.Tensor, ...] = ()
        self.biases: Biases = (None, None)
        self._packed: tuple[torch.Tensor, ...] = ()
        """w1 and w2 in four bits, beside those in FP8."""
        self._weights_are_ours = False
        self._weight_reports: tuple[WeightReport, ...] = ()
        self._device, self._dtypes = self.comm.device, self.comm.engine.capabilities.dtypes
        self.after_stage: Callable[[str], None] | None = None

    def set_activation(
        self, clamp: float | None = None, fast_math: bool = True, activation: Activation | str = SWIGLU
    ) -> None:
        """Change the activation from the next call on.

        Args:
            clamp: as ``activation_clamp`` of the constructor.
            fast_math: as in the constructor.
            activation: as in the constructor.

        Raises:
            InvalidArgument: the clamp is neither None nor above 0, or the activation is not one of those.
        """
        self._experts.set_activation(gated_activation(activation, clamp, "activation_clamp"), fast_math)

    @torch.inference_mode(False)  # what is kept may be loaded over in any mode
    @torch.no_grad()
    def load_weights(
        self,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w1_scales: torch.Tensor | None = None,
        w2_scales: torch.Tensor | None = None,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        weight_layout: WeightLayout = PLAIN_WEIGHTS,
        four_bits: FourBits | None = None,
        round_again: bool = False,
        keep: Literal["fp8", "four_bits", "both"] = "fp8",
        experts: Sequence[int] | None = None,
    ) -> None:
        """Copy this rank's experts, with gates and ups of w1 in turn. Captured graphs use the new values too.

        With ``balance`` on backend "nvlink" the first load is collective, since it makes memory that others read.

        The L = E / W + S experts are this rank's own, then the shared ones, which are the same on all ranks. Tensors
        may have any strides. With a placement, or with ``experts``, L is another number: all E experts, or those of
        ``experts``, then the shared ones. Each slot takes the rows of its expert.

        Args:
            w1: [L, 2I, H], gates first, then ups. bfloat16, float16 and float32 are quantised by the layer's recipe;
                float8_e4m3fn comes with scales.
            w2: [L, H, I], of the same dtype.
            w1_scales: beside FP8, else None: [L, 2I / 128, H / 128], [L, 2I] or [L, 2I, 1], [L] or [], float32,
                bfloat16 or E8M0, as ``weights_for`` takes them and converts them to the layer's recipe. I / 128 and
                H / 128 are rounded up: the last block may be smaller, and gates and ups begin with a block each.
            w2_scales: likewise [L, H / 128, I / 128], [L, H] or [L, H, 1], [L] or [].
            w1_bias: [L, 2I], in the order of w1's rows, float32 or narrower, or None.
            w2_bias: [L, H], or None.
            weight_layout: how w1, w2, their scales and w1_bias lie, where it is not as above. Block scales of
                interleaved FP8 would be of gates and ups together, so those are refused.
            four_bits: how w1 and w2 hold values of four bits, such as ``MXFP4``, or None. They are encoded as FP8, as
                ``weights_for`` does it from w1 [L, 2I, H / 2] with w1_scales [L, 2I, H / group], and w2 likewise. H
                and I are multiples of the group. Rows may be interleaved, but not transposed.
            round_again: round FP8 values a second time where the recipe needs other scales than they have, and
                these do not convert exactly. ``describe()`` says how many were. Otherwise that is an error.
            keep: "fp8"; "four_bits", which takes 0.53 byte a weight instead of 1, with recipe "row" and weights of
                which four bits say everything (``pack_weights``); or "both", where calls of few tokens read four
                bits and others FP8. Of these, only forms are kept that calls of the layer read; ``describe()`` says
                which. Results have the same bits. docs/how-to/four-bit-checkpoints.md says when
                to take which.
            experts: which experts the rows are of, in their order, such as ``[0, 5, 7]``: at least those that have
                slots on this rank (``comm.placement.experts_of(comm.rank)``). None: this rank's own; with a placement
                all of them.

        Raises:
            InvalidArgument: the layout interleaves FP8 with block scales; values would be rounded a second time, or
                by four bits; weights that were loaded before had other biases than these, or were kept otherwise.
            ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
        """
        if not isinstance(weight_layout, WeightLayout):
            raise InvalidArgument(f"weight_layout is {weight_layout!r}, expected a WeightLayout")
        if keep not in KEPT:
            raise InvalidArgument(f"keep is {keep!r}, expected one of {', '.join(KEPT)}")
        if keep != "fp8" and self._recipe != "row":
            raise InvalidArgument(f"keep={keep!r} needs recipe='row', this layer has {self._recipe!r}")
        if keep != "fp8" and isinstance(four_bits, FourBits) and not can_pack(four_bits):
            raise InvalidArgument(
                f"keep={keep!r} keeps E2M1 with a scale for 32 values or more, these are {four_bits}; pass keep='fp8'"
            )
        form = self._experts.kept_as(keep)
        if self._weights_are_ours and form != self._form:
            raise InvalidArgument(
                f"the weights loaded before were not kept as keep={keep!r} says, and captured graphs may read them; "
                "make another MegaMoE"
            )
        given = {"w1": w1, "w2": w2, "w1_scales": w1_scales, "w2_scales": w2_scales, "w1_bias": w1_bias}
        given |= {"w2_bias": w2_bias}
        require_tensors(given)
        placement = self.comm.placement
        if experts is not None or placement is not None:
            of_rank = self.comm.rank * self._num_slots
            slots = range(of_rank, of_rank + self._num_slots) if placement is None else placement.experts_of(
                self.comm.rank
            )  # fmt: skip
            named = range(self.comm.plan.num_experts) if experts is None else self._checked_experts(experts)
            given = rows_of_slots(given, named, slots, self.num_shared_experts)
        found = self._forms.convert(self._num_local, given, weight_layout, four_bits, round_again, keep, form)
        biases = found.biases
        if self._weights_are_ours:  # captured graphs read the weights where they are
            ours = (*self.weights, *self._packed)
            if [each is None for each in biases] != [each is None for each in self.biases]:
                raise InvalidArgument(
                    "the weights loaded before had other biases, which captured graphs may read; make another MegaMoE"
                )
            for old, new in zip((*ours, *self.biases), (*found.weights, *found.packed, *biases), strict=True):
                if old is not None and new is not None:
                    old.copy_(new)
        else:
            own = self._experts.own_weights(found)
            self._use(own.weights, own.biases, own.packed)
            self._weights_are_ours, self._kept = True, keep
        self._weight_reports = found.reports

    def _checked_experts(self, experts: Any) -> list[int]:
        most = self.comm.plan.num_experts
        named: list[Any] = list(experts) if isinstance(experts, (list, tuple, range)) else [None]
        if any(isinstance(e, bool) or not isinstance(e, int) or not 0 <= e < most for e in named):
            raise InvalidArgument(f"experts is {experts!r}, expected a list of experts 0..{most - 1}")
        return named

    def use_weights(
        self,
        w1: torch.Tensor,
        w1_scales: torch.Tensor,
        w2: torch.Tensor,
        w2_scales: torch.Tensor,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> None:
        """Use this rank's experts as they are, without a copy, from the next call or capture on.

        Where H or I is no multiple of 128, the layer makes padded copies, and later changes of what was given do not
        count. Tensors that are padded already, as ``weights`` and ``biases`` have them, are not copied.

        Args:
            w1: float8_e4m3fn [L, 2I, H], the experts of ``load_weights``, with gates and ups in turn as
                ``interleave_gate_and_up`` puts them. By recipe "row" also what ``pack_weights`` makes of that; w2
                likewise. Beside packed weights all tensors have H and I rounded up to multiples of 128, as in the
                ``weights`` of a layer that has loaded them.
            w1_scales: float32 [L, 2I / 128, H / 128], rounded up as in ``load_weights``, gates, then ups, not
                interleaved. Recipe "row": [L, 2I], in the order of w1's rows (``interleave_gate_and_up(w1_scales)``).
            w2: float8_e4m3fn [L, H, I].
            w2_scales: float32 [L, H / 128, I / 128]. Recipe "row": [L, H].
            w1_bias: float32 [L, 2I], in the order of w1's rows likewise, or None.
            w2_bias: float32 [L, H], or None.

        Raises:
            ShapeMismatch, DtypeMismatch, DeviceMismatch: a tensor is not as above.
        """
        self._experts.require_foreign_weights()
        weights, biases = (w1, w1_scales, w2, w2_scales), (w1_bias, w2_bias)
        shapes = self._forms.padded_shapes(self._num_local)
        tensors = [w for w in (w1, w2) if isinstance(w, torch.Tensor)]
        is_padded = any(map(is_packed, tensors)) or list(getattr(w1, "shape", ())) == shapes["w1"]
        if self._forms.is_padded and not is_padded:
            w1, w1_scales, w2, w2_scales, w1_bias, w2_bias = map(self._padded, shapes, (*weights, *biases))
            weights, biases = (w1, w1_scales, w2, w2_scales), (w1_bias, w2_bias)
        self._forms.check(self._num_local, w1, w1_scales, w2, w2_scales)
        for name, bias in (("w1_bias", w1_bias), ("w2_bias", w2_bias)):
            if bias is not None:
                check_tensor(name, bias, torch.float32, shapes[name], self.comm.device)
                check_aligned(name, bias)
        self._use(weights, biases, ())

    # -- experts that move ----------------------------------------------------------------------------------

    def move_experts(
        self, placement: Placement, *, piece_bytes: int = PIECE_BYTES, stale: Collection[int] = ()
    ) -> MovingExperts:
        """Begin to move experts to another placement, in pieces between calls; see :func:`tokenloom.move_experts`.

        Collective. Captured graphs go by the new placement, and read the moved weights, from their next replay on.

        Raises:
            InvalidArgument: ``load_weights`` was not called; or what ``move_experts`` raises.
        """
        tensors = self._of_slots("move_experts")
        return move_experts(self.comm, tensors, placement, piece_bytes=piece_bytes, stale=stale)

    def restore_experts(
        self,
        restore: Callable[[int], Mapping[str, torch.Tensor | None]],
        *,
        weight_layout: WeightLayout = PLAIN_WEIGHTS,
        four_bits: FourBits | None = None,
        round_again: bool = False,
    ) -> list[int]:
        """Load experts that are lost with masked ranks into slots of living ones; see ``tokenloom.restore_experts``.

        Collective among the ranks that are left, between calls.

        Args:
            restore: returns w1, w2 and what else ``load_weights`` was given, by its names, of one expert: without the
                first dimension, on any device. Called with the number of each expert that this rank is to hold.
            weight_layout: as in ``load_weights``.
            four_bits: as there.
            round_again: as there.

        Returns:
            The experts that have a slot again.

        Raises:
            TokenloomError: as ``load_weights`` for such tensors, and as ``restore_experts``. Nothing has changed then.
        """

        @torch.no_grad()
        def converted(expert: int) -> list[torch.Tensor]:
            tensors = restore(expert)
            names = {*NEEDED, *OPTIONAL}
            if not isinstance(tensors, Mapping) or not {*NEEDED} <= {*tensors} <= names:
                raise InvalidArgument(
                    f"restore({expert}) is {a_type(tensors)}, expected a dict of w1, w2 and their like"
                )
            given = dict.fromkeys((*NEEDED, *OPTIONAL)) | dict(tensors)
            require_tensors(given)
            given = {
                name: None if each is None else each.detach().to(self.comm.device)[None]
                for name, each in given.items()
            }
            keep = self._kept if self._weights_are_ours else self._form
            found = self._forms.convert(1, given, weight_layout, four_bits, round_again, keep, self._form)
            return [tensor[0] for tensor in found.tensors]

        tensors = self._of_slots("restore_experts")
        return restore_experts(self.comm, tensors, converted if callable(restore) else restore)

    def _of_slots(self, phase: str) -> list[torch.Tensor]:
        """What each slot has, and then each shared expert; or an error that is told where the others agree."""
        with agreeing(self.comm.engine.ranks, phase):
            if not self.weights:
                raise InvalidArgument("the experts have no weights; call load_weights first")
        return Experts(self.weights, self.biases, self._packed, ()).tensors

    def _use(self, weights: tuple[torch.Tensor, ...], biases: Biases, packed: tuple[torch.Tensor, ...]) -> None:
        self._experts.use_weights(weights, biases, packed)  # first: it may raise
        self.weights, self.biases, self._packed = weights, biases, packed
        self._weights_are_ours, self._weight_reports = False, ()

    def _padded(self, name: str, tensor: Any) -> Any:
        """Check what ``use_weights`` was given of the caller's widths, and return it with those of kernels.

        Gates and ups lie in turns, so zeros behind all of them are behind each.
        """
        if tensor is None and name in ("w1_bias", "w2_bias"):
            return None
        shape = self._forms.shapes(self._num_local)[name]
        check_tensor(name, tensor, FP8 if name in ("w1", "w2") else torch.float32, shape, self.comm.device)
        return pad(tensor.detach(), self._forms.padded_shapes(self._num_local)[name])

    def forward(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        expert_stats: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the layer's output for this rank's tokens. CUDA graphs can hold calls other than the first.

        Args:
            x: bfloat16, float16 or float32 [T, H], which dispatch quantises, or (float8_e4m3fn [T, H], float32
                [T, H / 128], rounded up; with recipe "row" [T]). T may differ per rank and may be 0, but all ranks
                pass the same of both.
            topk_ids: int32 or int64 [T, K]; -1 is an unused place.
            topk_weights: float32 [T, K].
            expert_stats: int32 [E / W], to which each local expert's number of routes is added, or None. With a
                placement int32 [slots_per_rank], of each slot. A call that is made again without a rank
                counts once; each replay of a graph counts.
            out: bfloat16 [T, H] to write to, or None for a new tensor.

        Returns:
            bfloat16 [T, H], ``out`` if it was given. A token without routes or shared experts gives 0.

        Raises:
            InvalidArgument: ``load_weights`` was not called.
            TokenloomError: as in ``Communicator.dispatch`` with bounded sizes, but nothing can overflow.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(x, topk_ids, topk_weights, expert_stats, out)
        if self._pads_tokens or not self._fits(x, topk_ids, topk_weights, expert_stats, out):
            x, topk_ids, topk_weights = self._checked(x, topk_ids, topk_weights, expert_stats, out)
        after_stage = self.after_stage or _ignore
        if not self._pads_tokens:
            return self._experts.forward(x, topk_ids, topk_weights, expert_stats, out, self.schedule, after_stage)
        padded = self._experts.forward(x, topk_ids, topk_weights, expert_stats, None, self.schedule, after_stage)
        result = padded[:, : self.hidden]
        if out is None:
            return result.contiguous()
        with torch.inference_mode():  # out may have been made in it
            return out.copy_(result)

    __call__ = forward

    def refuse(self, fault: Exception) -> NoReturn:
        """Tell the other ranks, which make a call, that this one cannot: theirs raise PeerError. Raises ``fault``."""
        self._experts.ready_stream()
        with self.comm.engine.sequence(*self._experts.upcoming):
            raise fault

    def _fits(self, x: Any, topk_ids: Any, topk_weights: Any, expert_stats: Any, out: Any) -> bool:
        """Whether a quick check accepts the call; :meth:`_checked` handles the others."""
        plan, device, scales, fits = self.comm.plan, self._device, None, checks.fits_like
        if x.__class__ is tuple and len(x) == 2:
            x, scales = x
        try:
            num_tokens = x.shape[0]
            return (
                bool(self.weights)
                and num_tokens <= plan.max_tokens_per_rank
                and (x.dtype in self._dtypes if scales is None else x.dtype is FP8)
                and fits(x, (num_tokens, plan.hidden), x.dtype, device)
                and (scales is None or fits(scales, (num_tokens, *self._token_scales), torch.float32, device))
                and fits(topk_ids, (num_tokens, plan.top_k), topk_ids.dtype, device)
                and topk_ids.dtype in checks.ID_DTYPES
                and fits(topk_weights, (num_tokens, plan.top_k), torch.float32, device)
                and (expert_stats is None or fits(expert_stats, (self._num_slots,), torch.int32, device))
                and (out is None or fits(out, (num_tokens, plan.hidden), torch.bfloat16, device))
                and (out is None or out.data_ptr() % ALIGNMENT_BYTES == 0)
            )
        except (AttributeError, IndexError, RuntimeError):  # no tensor, or one without dimensions or shape
            return False

    def _checked(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        expert_stats: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Check a call thing by thing, and return x, topk_ids and topk_weights as experts take them, x padded.

        What is wrong is told to the other ranks, behind what earlier calls have left.
        """
        engine, plan, device = self.comm.engine, self.comm.plan, self._device
        self._experts.ready_stream()
        with engine.sequence(*self._experts.upcoming):
            if isinstance(x, torch.Tensor) and x.dtype == FP8:
                raise InvalidArgument(
                    "x is torch.float8_e4m3fn without scales; pass (x, scales), or x before it was FP8"
                )
            if self._pads_tokens:
                x = self._padded_tokens(x)
            if not self._experts.checks_tokens:
                options = DispatchOptions(
                    "expert", 1, "bounded", 1, to_fp8=not isinstance(x, (tuple, list)), recipe=self._recipe
                )
                given = (engine.capabilities, device, options, x, topk_ids, topk_weights)
                tokens, _ = checks.dispatch_tokens(plan, *given)
                x = tokens.x if tokens.scales is None else (tokens.x, tokens.scales)
                topk_ids, topk_weights = tokens.topk_ids, tokens.topk_weights
            if not self.weights:
                raise InvalidArgument("the experts have no weights; call load_weights first")
            if topk_weights is None:
                raise InvalidArgument("topk_weights is None, expected float32 [T, K]")
            if expert_stats is not None:
                check_tensor("expert_stats", expert_stats, torch.int32, [self._num_slots], device)
            checks.require_tensor("topk_ids", topk_ids)
            if not topk_ids.dim():
                raise ShapeMismatch("topk_ids is [], expected [T, K]")
            if out is not None:
                check_tensor("out", out, torch.bfloat16, [len(topk_ids), self.hidden], device)
                check_aligned("out", out)
        return x, topk_ids, topk_weights

    def _padded_tokens(self, x: Any) -> Any:
        """Check the width of x, alone or before its scales, and put zeros behind each row. More is checked later."""
        if isinstance(x, (tuple, list)):
            return (self._padded_tokens(x[0]), *x[1:]) if x else x
        x = settled(x)
        checks.require_tensor("x", x)
        require_no_tangent(x=x)  # padding would lose it
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ShapeMismatch(
                f"x is {list(x.shape)}, the layer was made for [tokens, {self.hidden}]; pass hidden= to MegaMoE"
            )
        return pad(x, [len(x), self.comm.plan.hidden])

    def __repr__(self) -> str:
        if not hasattr(self, "comm"):  # its constructor has raised
            return "MegaMoE(never made)"
        widths: dict[str, Any] = {"hidden": self.hidden, "intermediate": self.intermediate}
        widths |= {"num_shared_experts": self.num_shared_experts}
        widths |= {} if self._recipe == "block" else {"recipe": self._recipe}
        return line_about(self.comm, "MegaMoE", **widths, backend=self._backend)

    def describe(self) -> str:
        """Say what the layer runs on, what is padded, and how much memory buffers take. The first call makes them."""
        scales = {"block": "per 128 values", "row": "per row, those of activations powers of two"}[self._recipe]
        lines = [self.comm.describe(), self._experts.describe(), f"recipe {self._recipe}: FP8 scales {scales}"]
        if self._forms.is_padded:
            hidden, intermediate = self._forms.padded_shapes(1)["w2"][1:]
            more = hidden * intermediate / (self.hidden * self.intermediate) - 1
            lines.append(
                f"padded with zeros to multiples of {BLOCK}: hidden {self.hidden} to {hidden}, intermediate "
                f"{self.intermediate} to {intermediate}; weights take {100 * more:.3g}% more"
            )
        if self.weights:
            lines.append(f"weights {self._kept_as()}")
        if self._weight_reports:
            of_w1, of_w2 = self._weight_reports
            lines.append(f"scales of w1 {of_w1}; of w2 {of_w2}")
        return "\n    ".join(lines)

    @property
    def _form(self) -> str:
        """In which of KEPT ``load_weights`` has kept the weights."""
        return "both" if self._packed else "four_bits" if is_packed(self.weights[0]) else "fp8"

    def _kept_as(self) -> str:
        w1, _, w2, _ = self.weights
        num_bytes = sum(each.nbytes for each in (w1, w2, *self._packed))
        values = math.prod(shape_of_weights(w1)) + math.prod(shape_of_weights(w2))
        of_w1, of_w2 = ("four bits" if is_packed(w) else "FP8" for w in (w1, w2))
        form = of_w1 if of_w1 == of_w2 else f"{of_w1} (w1) and {of_w2} (w2)"
        form += " and, for few tokens, four bits" if self._packed else ""
        return f"in {form}: {num_bytes / 1e9:.3g} GB, {num_bytes / values:.3g} bytes a value"

    def trace(self) -> MegaTimes:
        """Let kernels of later calls write when they work, which makes GEMMs a little slower.

        Returns:
            What each call, and each replay of a graph captured from now on, overwrites.

        Raises:
            InvalidArgument: only backend "nvlink" has kernels that write times.
        """
        return self._experts.trace()

    def check(self) -> None:
        """Wait for all calls and graph replays, and raise what they left behind, as ``Communicator.check`` does."""
        self.comm.check()

    def close(self) -> None:
        """Release the buffers. Calling it twice is fine."""
        self.comm.close()

    def __enter__(self) -> MegaMoE:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _ignore(stage: str) -> None:
    """For ``after_stage`` where nobody wants to know."""


def _is_width(width: object) -> bool:
    return isinstance(width, int) and not isinstance(width, bool) and width > 0 and width % WIDTH_UNIT == 0
