"""Experts in FP8 or four bits, for inference: a MegaMoE for all layers of a shape, with each one's weights in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from tokenloom.comm.placement import Placement
from tokenloom.errors import InvalidArgument, NotDifferentiable
from tokenloom.inference.mega_moe import WIDTH_UNIT, MegaMoE
from tokenloom.integrations.transformers.forms import Form
from tokenloom.integrations.transformers.options import ExpertsOptions
from tokenloom.integrations.transformers.slots import NAMES, TO_SLOTS, rows_in_slots, without_empty_slots
from tokenloom.plan import Activation
from tokenloom.training.slot_moves import agreed, terms_of

Sizes = tuple[int, int, int, int, Activation]
"""E, H, I, K and what lies between the products."""


def require_fused(form: Form | str, experts: torch.nn.Module, family: str) -> Form:
    """Check that MegaMoE computes these experts.

    Raises:
        InvalidArgument: it does not.
    """
    why = form if isinstance(form, str) else ""
    if isinstance(form, Form):
        widths = widths_of(form, experts)
        if not form.activation.gated:
            why = f"{form.activation.function} has no gates"
        elif any(width % WIDTH_UNIT for width in widths):
            why = f"hidden and intermediate are {' and '.join(map(str, widths))}, not multiples of {WIDTH_UNIT}"
    if why or isinstance(form, str):
        raise InvalidArgument(f"{family} cannot run in FP8: {why}; register with experts='auto' for this model")
    return form


def widths_of(form: Form, experts: torch.nn.Module) -> tuple[int, int]:
    """Return H and I."""
    w2, w2_scales = form.tensors(experts)[1], form.scales(experts)[1]
    if form.four_bits is not None and w2_scales is not None:  # how the values are packed does not matter here
        return w2_scales.shape[1], w2_scales.shape[2] * form.four_bits.group
    _, first, second = w2.shape
    return (second, first) if form.layout.transposed else (first, second)


class FusedLayers:
    """What the layers of one mesh share.

    Args:
        group: ranks that the experts are spread over.
        options: of the implementation.
        of_communicators: gives what of them communicators take, with the placement of now.
    """

    def __init__(
        self, group: ProcessGroup, options: ExpertsOptions, of_communicators: Callable[[], dict[str, Any]]
    ) -> None:
        self._group, self.options, self._of_communicators = group, options, of_communicators
        self.made: dict[Sizes, MegaMoE] = {}

    def layer(self, sizes: Sizes, device: torch.device) -> MegaMoE:
        """Find the MegaMoE of a shape, or make it: then all ranks do."""
        if sizes not in self.made:
            num_experts, hidden, intermediate, top_k, activation = sizes
            options, others = self.options, self._of_communicators()
            backend = "nvlink" if device.type == "cuda" else "composed"
            assert options.max_tokens_per_rank is not None
            for name in ("backend", "num_sms"):
                del others[name]
            self.made[sizes] = MegaMoE(
                self._group,
                num_experts=num_experts,
                hidden=hidden,
                intermediate=intermediate,
                top_k=top_k,
                max_tokens_per_rank=options.max_tokens_per_rank,
                activation=activation,
                backend=backend if options.backend == "auto" else options.backend,
                device=device,
                recipe="row" if options.experts == "four_bits" else "block",
                **others,
            )
        return self.made[sizes]


class FusedExperts:
    """One layer's experts: quantised, or taken from what a checkpoint has, at the first call of each placement.

    Args:
        layers: what it shares with others.
        form: of the experts.
        num_experts: E.
    """

    def __init__(self, layers: FusedLayers, form: Form, num_experts: int) -> None:
        self._layers, self._form, self._num_experts = layers, form, num_experts
        self._weights: tuple[torch.Tensor, ...] = ()
        self._biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._placement: Placement | None = None

    def run(self, experts: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute what ``MegaMoE.forward`` does. Collective.

        Raises:
            NotDifferentiable: a gradient would be wanted.
        """
        sizes = (self._num_experts, *widths_of(self._form, experts), ids.shape[1], self._form.activation)
        layer = self._layers.layer(sizes, x.device)
        if layer.comm.placement != self._placement:  # on all ranks alike
            self._fill_slots(layer, experts)
        try:
            self._prepare(layer, experts, (x, weights))
        except Exception as fault:
            layer.refuse(fault)  # or the others would make this call with this rank's next one, of another layer
        return layer(x, ids, weights)

    def _prepare(self, layer: MegaMoE, experts: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        """Give the layer the weights of these experts."""
        if torch.is_grad_enabled() and any(each.requires_grad for each in (*given, *experts.parameters())):
            raise NotDifferentiable("experts in FP8 have no gradients; call the model under torch.no_grad()")
        if not self._weights:
            self._load(layer, self._tensors(experts))
        self._lend(layer)

    def _fill_slots(self, layer: MegaMoE, experts: torch.nn.Module) -> None:
        """Load what the slots of this rank hold by the layer's placement. Collective: a fault is one of all ranks.

        What travels is as the model has it, since that is what ``load_weights`` takes.
        """
        placement, engine, tensors = layer.comm.placement, layer.comm.engine, self._tensors(experts)
        assert placement is not None
        filled = without_empty_slots(placement)  # zeros in empty slots could be refused, as no weights
        with agreed(engine, TO_SLOTS, lambda: terms_of(tensors)) as ranks:
            in_slots = rows_in_slots(ranks, filled, tensors.values())

        def load() -> dict[str, Any]:
            self._weights = ()  # room for the new ones
            self._load(layer, dict(zip(tensors, in_slots, strict=True)), filled.experts_of(layer.comm.rank))
            return {}

        self._placement = None  # so that all ranks come here again, if one cannot load
        with agreed(engine, "loading experts in slots", load):
            self._placement = placement

    def _tensors(self, experts: torch.nn.Module) -> dict[str, Any]:
        """Give the tensors of these experts, by the names that ``load_weights`` has for them."""
        given = (*self._form.tensors(experts), *self._form.scales(experts))
        named = zip((*NAMES, "w1_scales", "w2_scales"), given, strict=True)
        return {name: each.detach() for name, each in named if each is not None}

    def _load(self, layer: MegaMoE, tensors: dict[str, Any], experts: Sequence[int] | None = None) -> None:
        """Keep what the layer makes of tensors that have rows of these experts, or of this rank's own."""
        layer.load_weights(
            **tensors,
            weight_layout=self._form.layout,
            four_bits=self._form.four_bits,
            keep="four_bits" if self._layers.options.experts == "four_bits" else "fp8",
            experts=experts,
        )
        self._weights, self._biases = layer.weights, layer.biases
        self._lend(layer)  # at once: what else it loads then lies elsewhere, whatever fails before a call

    def _lend(self, layer: MegaMoE) -> None:
        w1_bias, w2_bias = self._biases
        layer.use_weights(*self._weights, w1_bias=w1_bias, w2_bias=w2_bias)
