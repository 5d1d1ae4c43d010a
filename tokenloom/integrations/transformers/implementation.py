"""What transformers calls for each module of experts: dispatch, the experts, combine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers.distributed.expert_parallel import EPImplementation

from tokenloom.backends.seam import Strategy, Upcoming
from tokenloom.comm.communicator import Communicator
from tokenloom.comm.communicators_by_shape import CommShape, Communicators
from tokenloom.comm.placement import Placement, placement_of
from tokenloom.errors import InvalidArgument
from tokenloom.integrations.transformers.forms import Form, NotOurs, form_of
from tokenloom.integrations.transformers.fused import FusedExperts, FusedLayers, require_fused
from tokenloom.integrations.transformers.options import ExpertsOptions
from tokenloom.integrations.transformers.shared_batch import Share
from tokenloom.integrations.transformers.slots import SlotWeights
from tokenloom.ops.experts import Tensors
from tokenloom.training.pieces import RunOptions, cut
from tokenloom.training.routed_experts import routed_experts

ATTRIBUTE = "tokenloom"
"""Of a module of experts: its implementation. Of a mesh: what its layers share, by options."""
POOL_BYTES = 512 * 2**20
"""Where ranks hold the same tokens, they know the worst case. Up to so many bytes of rows there is room for it, and
the host waits for no counts."""


@dataclass
class SharedByLayers:
    """What all layers of a mesh and of equal options share.

    Attributes:
        placement: the last one that ``place_experts`` was told, or None.
    """

    communicators: Communicators
    fused: FusedLayers
    placement: Placement | None = None

    def place(self, placement: Placement) -> None:
        """Let a placement rule in all communicators, and in those that are made later. Collective."""
        for comm in (*self.communicators.all(), *(layer.comm for layer in self.fused.made.values())):
            comm.set_placement(placement)
        self.placement = placement


def shared_of(ep_mesh: Any, options: ExpertsOptions) -> SharedByLayers:
    """Find what the layers of a mesh share.

    It lives as long as the mesh, of which each model has its own. What lived until its last layer is collected would
    be gone on some ranks, and used again on others.
    """
    found = vars(ep_mesh).setdefault(ATTRIBUTE, {})
    if options not in found:
        group = ep_mesh.get_group()

        def of_communicators() -> dict[str, Any]:
            placement = found[options].placement
            later = {} if placement is None else {"placement": placement, "spare_slots": 0}
            return options.of_communicators() | later

        fused = FusedLayers(group, options, of_communicators)
        found[options] = SharedByLayers(Communicators(group, of_communicators), fused)
    return found[options]


class TokenloomExperts(EPImplementation):
    """Experts of one layer, spread over the ranks of ``ep_mesh``. transformers makes it, see ``register``.

    Args:
        experts: the model's module of experts, which has this rank's weights already, maybe on device "meta".
        ep_mesh: one dimension: the ranks that the experts are spread over.
        tp_mesh: one dimension: the ranks that hold the same tokens.

    Raises:
        InvalidArgument: a mesh has several dimensions, or experts that should run in ``MegaMoE`` cannot.
    """

    options: ClassVar[ExpertsOptions] = ExpertsOptions()

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        for name, mesh in (("ep_mesh", ep_mesh), ("tp_mesh", tp_mesh)):
            if mesh.ndim != 1:
                raise InvalidArgument(
                    f"{name} has dimensions {mesh.mesh_dim_names or mesh.ndim}, expected one; pass a slice of it"
                )
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts, self.family = experts, type(experts).__name__
        self.shared = shared_of(ep_mesh, self.options)
        self.num_experts = self.num_local_experts * ep_mesh.size()
        self.fused: FusedExperts | None = None
        if self.options.fused:
            form = require_fused(self.form, experts, self.family)
            self.fused = FusedExperts(self.shared.fused, form, self.num_experts)
        if self.options.placed and not isinstance(self.form, Form):
            raise InvalidArgument(
                f"{self.family} runs the model's own experts ({self.form}), which know no placement; register with "
                "experts='fp8' if they are quantised, or leave the placement out"
            )
        self.slots = SlotWeights()
        setattr(experts, ATTRIBUTE, self)

    @torch.compiler.disable
    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the weighted sum of each token's experts. Collective. Differentiable once.

        Args:
            hidden_states: [T, H]. T may differ between groups of ranks that hold the same tokens, and may be 0.
            top_k_index: integers [T, K], of all E experts.
            top_k_weights: floating-point [T, K].

        Returns:
            [T, H], dtype of ``hidden_states``.

        Raises:
            NotDifferentiable: experts in FP8 or four bits, where a gradient would be wanted.
            TokenloomError: as in ``Communicator.dispatch``.
        """
        share = Share(self.tp_mesh.get_group(), len(hidden_states)) if self.tp_mesh.size() > 1 else None
        given = (hidden_states, top_k_index, top_k_weights)
        x, ids, weights = given if share is None else (share.take(each) for each in given)
        weights = weights.to(torch.promote_types(x.dtype, torch.float32))
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        # Other ranks of the group may hold other batches, of which this one knows nothing.
        most = share.num_rows if share is not None and self.shares_batch else None
        out = self._all_experts(x, ids, weights, most)
        return out if share is None else share.gather(out)

    def _all_experts(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, most: int | None
    ) -> torch.Tensor:
        """Compute the experts of this rank's tokens, of which no rank has more than ``most``, where that is known."""
        if self.fused is not None:
            return self.fused.run(self.experts, x, ids, weights)
        shape = CommShape(self.num_experts, x.shape[1], ids.shape[1], wide=x.dtype if x.dtype.itemsize > 2 else None)
        # Where nobody waits for the counts of others, nobody would hear of a rank that needs more room.
        known = self.options.max_tokens_per_rank or 1
        tokens = max(len(x), most or 1, known) if self.options.pool_rows is None else known

        in_slots = self._in_slots(x.device)  # before any rank finds that it needs another communicator

        def call(comm: Communicator) -> torch.Tensor:
            return self._run(comm, x, ids, weights, most, in_slots)

        return self.shared.communicators.run(shape, tokens, x.device, call)

    def _in_slots(self, device: torch.device) -> Tensors | None:
        """Give w1, w2 and their biases in the slots of this rank, or None without a placement."""
        if not self.options.placed or not isinstance(self.form, Form):
            return None
        given, communicators = self.options, self.shared.communicators
        placement = self.shared.placement or placement_of(
            given.placement, given.spare_slots, self.num_experts, self.ep_mesh.size()
        )
        assert placement is not None
        return self.slots.of(lambda: communicators.meeting(device), placement, self.form.tensors(self.experts))

    def _run(
        self,
        comm: Communicator,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        most: int | None,
        in_slots: Tensors | None,
    ) -> torch.Tensor:
        if isinstance(self.form, Form):
            w1, w2, w1_bias, w2_bias = self.form.tensors(self.experts)
            if in_slots is not None:
                w1, w2, w1_bias, w2_bias = in_slots
            # Under a placement the layer itself reports other dtypes: the model's own experts know no slots.
            if x.dtype == w1.dtype or torch.is_autocast_enabled(x.device.type) or in_slots is not None:
                out = routed_experts(
                    comm,
                    self.run_options(comm, most, x.element_size()),
                    x,
                    ids,
                    weights,
                    w1,
                    w2,
                    w1_bias=w1_bias,
                    w2_bias=w2_bias,
                    activation=self.form.activation,
                    weight_layout=self.form.layout,
                )
                return out.to(x.dtype)  # of autocast until here
        routed = comm.dispatch(x, ids, weights, layout="expert", sizes="exact")
        with comm.engine.sequence(Upcoming("combine")):  # the other ranks hear of experts that fail
            rows = self._own_experts(routed.tokens, routed.expert_counts)
        return comm.combine(rows, routed)

    def run_options(self, comm: Communicator, most: int | None, itemsize: int) -> RunOptions:
        """Choose how tokenloom's experts run. All ranks choose alike.

        Args:
            comm: communicator.
            most: tokens of the rank that has most, where all know it.
            itemsize: bytes of a value.
        """
        given, plan = self.options, comm.plan
        pool_rows = given.pool_rows
        if pool_rows is None and most and not torch.is_grad_enabled():
            rows = 1 << (plan.num_ranks * most * plan.top_k - 1).bit_length()
            pool_rows = rows if rows * plan.hidden * itemsize <= POOL_BYTES else None
        run = RunOptions(
            Strategy.default(comm.engine.capabilities), given.overlap, given.redispatch_in_backward, pool_rows
        )
        # One piece without a backward has nothing to run beside. How many there are depends on the plan.
        alone = not torch.is_grad_enabled() and len(cut(comm.engine, run, 0)) == 1
        return replace(run, overlap=False) if alone else run

    def _own_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Run the model's experts on rows [R, H] that are grouped by expert, unweighted."""
        num_rows = len(rows)
        ids = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=num_rows)
        if not num_rows:  # a row of zeros keeps weights and rows in the graph, whose backward all ranks enter
            rows, ids = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), ids.new_zeros(1)
        out = self.experts_forward(rows, ids[:, None], rows.new_ones(len(rows), 1))
        return out[:num_rows]

    @cached_property
    def form(self) -> Form | str:
        """What the experts are in tokenloom's terms, or why the model's own run."""
        if self.options.experts == "model":
            return "as registered"
        try:
            return form_of(self.experts, self.family, with_scales=self.options.fused)
        except NotOurs as why:
            return str(why)

    @property
    def runs(self) -> str:
        """Whose experts run, for people."""
        if isinstance(self.form, Form):
            kept = {"fp8": " in FP8", "four_bits": " in four bits"}.get(self.options.experts, "")
            return f"tokenloom's experts{kept} ({self.form})"
        return f"the model's own experts ({self.form})"
