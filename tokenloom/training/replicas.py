"""Replicas in training: gradients summed at an expert's owner, copies that follow it, and experts that change places.

The owner of an expert is its first slot in ascending (rank, slot). Its gradient and its optimizer state are the
expert's; other slots have zeros. An optimizer that follows the placement does all of it by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from tokenloom.comm.communicator import Communicator
from tokenloom.comm.placement import Placement, placement_terms, require_fits
from tokenloom.comm.slot_rows import copy_from_owners, sum_at_owners
from tokenloom.errors import InvalidArgument, require_type
from tokenloom.training.expert_module import RoutedExperts
from tokenloom.training.shards import local_part
from tokenloom.training.slot_moves import (
    Act,
    Held,
    agreed,
    along,
    moved,
    moves_between,
    moves_from_owners,
    moves_to_owners,
    terms_of,
)
from tokenloom.training.state_by_expert import by_expert, by_slot

__all__ = ["copy_replicas", "follow_placement", "place_experts", "reduce_replica_gradients"]

Tensors = dict[str, torch.Tensor]
"""This rank's parts of tensors of slots, by names that are the same on all ranks."""


def reduce_replica_gradients(module: nn.Module) -> None:
    """Give each expert's owner the sum of its slots' gradients, and its other slots zeros. Collective.

    Call it once behind the last backward of a step, before whatever reads gradients: ``clip_grad_norm_``, or the
    ``unscale_`` of a GradScaler. An optimizer that follows the placement calls it before it steps; a second call
    changes nothing. It sums ``grad`` and ``main_grad`` in at least float32, in ascending (rank, slot), and rounds
    once. Gradients of replicated experts travel, and nothing else.

    Args:
        module: module that holds ExpertParallelMoE or RoutedExperts.

    Raises:
        InvalidArgument: ``module`` is no module; or a communicator has another placement than its experts.
        PlanMismatch: a gradient is missing on another rank.
        TokenloomError: as in ``Communicator.set_placement``.
    """
    _along(_placed(module), "reduce_replica_gradients", _gradients, sum_at_owners)


def copy_replicas(module: nn.Module) -> None:
    """Give all slots of each expert the weights of its owner. Collective.

    Call it behind whatever changes weights at owners. An optimizer that follows the placement calls it behind its
    step. Weights of replicated experts travel, and nothing else.

    Args:
        module: module that holds ExpertParallelMoE or RoutedExperts.

    Raises:
        InvalidArgument, TokenloomError: as in ``reduce_replica_gradients``.
    """
    _along(_placed(module), "copy_replicas", _weights, copy_from_owners)


def follow_placement(optimizer: Optimizer, module: nn.Module) -> None:
    """Let an optimizer keep the replicas of a module's experts equal. Not collective; its steps are, from now on.

    Before each step gradients are summed at owners, and behind it replicas get their owner's weights. So each expert
    is stepped once, by its whole gradient. ``optimizer.state_dict()`` then has states of all experts in their order,
    each once, whatever the placement, and ``load_state_dict`` takes them: both are collective where rows have to
    travel, and so are torch's checkpoints of them.

    Args:
        optimizer: it has the module's weights of experts, of all layers or some.
        module: module that holds ExpertParallelMoE or RoutedExperts. Without a placement nothing changes.

    Raises:
        InvalidArgument: no optimizer or no module, the optimizer has none of the experts, or follows already.
    """
    require_type("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    if optimizer in _followers:
        raise InvalidArgument("the optimizer follows a placement already; call follow_placement once")
    follower = _Follower(module)
    if not any(follower.layers(optimizer, placed=False)):
        raise InvalidArgument("the optimizer has no weights of the module's experts; make it with them")
    _followers[optimizer] = follower
    follower.note(optimizer, _layers(module))
    optimizer.register_step_pre_hook(follower.before_step)
    optimizer.register_step_post_hook(follower.after_step)
    optimizer.register_state_dict_post_hook(follower.saved)
    optimizer.register_load_state_dict_pre_hook(follower.loaded)


def place_experts(module: nn.Module, placement: Placement, optimizers: Optimizer | Iterable[Optimizer] = ()) -> None:
    """Place the experts of all layers of a module anew, between steps. Collective.

    Weights, gradients, main gradients and states of optimizers move with their experts, and the layers' communicators
    go by the new placement. Beside them there is room for one more tensor of this rank's slots.

    Args:
        module: module that holds ExpertParallelMoE or RoutedExperts.
        placement: for all its layers, with as many slots of a rank as they were made for.
        optimizers: whose states move: all that have the weights. States that have a row for each slot move. Those of
            an optimizer that follows, and was left out before, come from where they were left.

    Raises:
        InvalidArgument: no module, no experts, no optimizer; a layer was made without a placement; the placement has
            another number of ranks, experts or slots; or an expert is lost with masked ranks. Nothing has changed.
        PlanMismatch: the ranks passed different placements, or have different states.
        PeerError: such an error of another rank.
    """
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for each in optimizers:
        require_type("an optimizer", each, Optimizer, "a torch.optim.Optimizer")
    layers = _layers(module)
    if not layers:
        raise InvalidArgument(
            "the module has no ExpertParallelMoE and no RoutedExperts, whose experts could be placed"
        )
    for comm, its_layers in _by_communicator(layers):
        _place(comm, its_layers, placement, optimizers)
        for optimizer in optimizers:
            if optimizer in _followers:
                _followers[optimizer].note(optimizer, its_layers)


class _Follower:
    """Hooks of an optimizer, and the placements by which its states lie."""

    def __init__(self, module: nn.Module) -> None:
        require_type("module", module, nn.Module, "a torch.nn.Module")
        self._module = module
        self._placements: WeakKeyDictionary[RoutedExperts, Placement | None] = WeakKeyDictionary()

    def layers(self, optimizer: Optimizer, placed: bool = True) -> list[RoutedExperts]:
        """The module's experts of which the optimizer has weights."""
        own = {id(each) for group in optimizer.param_groups for each in group["params"]}
        layers = _placed(self._module) if placed else _layers(self._module)
        return [layer for layer in layers if any(id(each) in own for each in layer.parameters())]

    def note(self, optimizer: Optimizer, layers: Collection[RoutedExperts]) -> None:
        """The optimizer's states of these layers lie as the experts do now."""
        for layer in self.layers(optimizer):
            if layer in layers:
                self._placements[layer] = layer.placement

    def placement_of(self, layer: RoutedExperts) -> Placement | None:
        """Where the optimizer's states of a layer lie: where its experts were when they were last noted."""
        return self._placements.get(layer, layer.placement)

    def _require_followed(self, optimizer: Optimizer) -> list[RoutedExperts]:
        layers = self.layers(optimizer)
        for layer in layers:
            if self._placements.setdefault(layer, layer.placement) != layer.placement:
                raise InvalidArgument(
                    "experts were placed anew without this optimizer, whose states lie where they were; pass it to "
                    "place_experts(module, placement, optimizers)"
                )
        return layers

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        _along(self._require_followed(optimizer), "reduce_replica_gradients", _gradients, sum_at_owners)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        _along(self.layers(optimizer), "copy_replicas", _weights, copy_from_owners)

    def saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Turn states of slots into those of experts. The optimizer's own stay."""
        state = dict(state_dict["state"])
        for layer in self._require_followed(optimizer):
            keys = _keys(optimizer, state_dict, layer)
            slots = {
                f"{key} {name}": value
                for key, weight in keys.items()
                for name, value in state.get(key, {}).items()
                if _has_rows(value, len(weight))
            }
            _put_back(state, keys, by_expert(layer, slots, "by owners", "optimizer.state_dict"))
        return {**state_dict, "state": state}

    def loaded(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Turn states of experts into those of slots."""
        state = dict(state_dict["state"])
        for layer in self.layers(optimizer):
            keys, num_experts = _keys(optimizer, state_dict, layer), layer.comm.plan.num_experts
            experts = {
                f"{key} {name}": value
                for key in keys
                for name, value in state.get(key, {}).items()
                if _has_rows(value, num_experts)
            }
            _put_back(state, keys, by_slot(layer, experts, "by owners", "optimizer.load_state_dict"))
        self.note(optimizer, _layers(self._module))
        return {**state_dict, "state": state}


_followers: WeakKeyDictionary[Optimizer, _Follower] = WeakKeyDictionary()


def _keys(optimizer: Optimizer, state_dict: dict[str, Any], layer: RoutedExperts) -> dict[Any, torch.Tensor]:
    """Map what a state dict has for each weight of a layer to the weight."""
    own = {id(each) for each in layer.parameters()}
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=False)  # torch reports other numbers
    pairs = (pair for group, packed in groups for pair in zip(packed["params"], group["params"], strict=False))
    return {key: weight for key, weight in pairs if id(weight) in own}


def _has_rows(value: object, number: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == number


def _put_back(state: dict[Any, Any], keys: Iterable[Any], values: dict[str, Any]) -> None:
    for key in keys:
        if key in state:
            state[key] = {name: values.get(f"{key} {name}", value) for name, value in state[key].items()}


def _layers(module: nn.Module) -> list[RoutedExperts]:
    require_type("module", module, nn.Module, "a torch.nn.Module")
    return [each for each in module.modules() if isinstance(each, RoutedExperts)]


def _placed(module: nn.Module) -> list[RoutedExperts]:
    return [each for each in _layers(module) if each.placement is not None]


def _by_communicator(layers: Iterable[RoutedExperts]) -> Iterator[tuple[Communicator, list[RoutedExperts]]]:
    found: dict[int, list[RoutedExperts]] = {}
    for layer in layers:
        found.setdefault(id(layer.comm), []).append(layer)
    for its_layers in found.values():
        yield its_layers[0].comm, its_layers


def _weights(layer: RoutedExperts) -> Tensors:
    return {name: local_part(each.detach()) for name, each in layer.named_parameters()}


def _gradients(layer: RoutedExperts) -> Tensors:
    found: Tensors = {}
    for name, each in layer.named_parameters():
        if each.grad is not None:
            found[f"gradient of {name}"] = local_part(each.grad.detach())
        main_grad = getattr(each, "main_grad", None)
        if main_grad is not None:
            found[f"main_grad of {name}"] = main_grad
    return found


def _states(layer: RoutedExperts, number: int, optimizer: Optimizer) -> Tensors:
    return {
        f"{key} of {name}, optimizer {number}": local_part(value.detach())
        for name, each in layer.named_parameters()
        for key, value in optimizer.state.get(each, {}).items()
        if _has_rows(value, len(each))
    }


def _held_rows(layer: RoutedExperts, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Placement, Held, Tensors]]:
    """What moves with a layer's experts: the placement by which it lies, who has an expert's row, and the tensors."""
    assert layer.placement is not None
    yield layer.placement, "by all slots", _weights(layer)
    yield layer.placement, "by owners", _gradients(layer)
    for number, optimizer in enumerate(optimizers):
        follower = _followers.get(optimizer)
        placement = layer.placement if follower is None else follower.placement_of(layer)
        assert placement is not None
        yield placement, "by owners", _states(layer, number, optimizer)


def _along(layers: Iterable[RoutedExperts], phase: str, tensors_of: Any, act: Act) -> None:
    """Sum or copy the tensors of layers over the slots of each expert."""
    for comm, its_layers in _by_communicator(layers):
        for layer in its_layers:
            layer.require_placed()
        placement, masked = its_layers[0].placement, comm.engine.masked
        assert placement is not None
        list_moves = moves_to_owners if act is sum_at_owners else moves_from_owners
        tensors = {
            f"{number}.{name}": each
            for number, layer in enumerate(its_layers)
            for name, each in tensors_of(layer).items()
        }
        along(comm.engine, list_moves(placement, masked), tensors, act, phase)


def _place(comm: Communicator, layers: list[RoutedExperts], placement: Placement, optimizers: list[Optimizer]) -> None:
    """Move the experts of layers that share a communicator, and let the placement rule."""
    engine, phase = comm.engine, "place_experts"

    def prepare() -> dict[str, Any]:
        if engine.slots is None:
            raise InvalidArgument(
                "a layer was made without a placement; make it with placement=, or with spare_slots="
            )
        require_fits(placement, comm.plan, engine.plan.experts_per_rank)
        for layer in layers:
            layer.require_own_weights()
            assert layer.placement is not None
            if lost := layer.placement.lost_without(engine.masked):
                raise InvalidArgument(
                    f"expert(s) {', '.join(map(str, lost))} are lost with masked ranks; load a checkpoint instead"
                )
        held = [(i, *each) for i, layer in enumerate(layers) for each in _held_rows(layer, optimizers)]
        named = {f"{i}.{name}": each for i, _, who, own in held if who == "by owners" for name, each in own.items()}
        before = {
            f"placement before, layer {i}, tensors {n}": str(lies_by.to_tensor().tolist())
            for n, (i, lies_by, _, _) in enumerate(held)
        }
        return terms_of(named) | placement_terms(placement) | before

    with agreed(engine, phase, prepare) as ranks, torch.no_grad():
        masked = engine.masked
        for layer in layers:
            assert layer.placement is not None
            for each in _gradients(layer).values():
                sum_at_owners(ranks, moves_to_owners(layer.placement, masked), each, phase)
            for lies_by, held, tensors in _held_rows(layer, optimizers):
                moves = moves_between(lies_by, placement, held, masked)
                for each in tensors.values():
                    each.copy_(moved(ranks, moves, each, len(each), phase))
    comm.set_placement(placement)
    for layer in layers:
        layer.placement = placement
