"""What of a model runs on tokenloom."""

from __future__ import annotations

import torch

from tokenloom.integrations.transformers.implementation import ATTRIBUTE, TokenloomExperts


def describe(model: torch.nn.Module) -> str:
    """Say which experts of a model run on tokenloom, how, and on which backends. Not collective.

    Args:
        model: any model. The communicators are known after its first call.

    Returns:
        A few lines for people.
    """
    found = {name: getattr(module, ATTRIBUTE, None) for name, module in model.named_modules()}
    ours = {name: each for name, each in found.items() if isinstance(each, TokenloomExperts)}
    if not ours:
        cure = "load it with DistributedConfig(..., ep_size=, ep_implementation='tokenloom')"
        return f"no experts of this {type(model).__name__.removeprefix('FSDP')} run on tokenloom; {cure}"
    lines = [f"{len(ours)} modules of experts run on tokenloom"]
    for (family, runs), names in _alike(ours).items():
        lines.append(f"  {family}, {runs}: {', '.join(names)}")
    shared = {id(each.shared): each.shared for each in ours.values()}.values()
    made = [comm.describe() for each in shared for comm in each.communicators.all()]
    made += [layer.describe() for each in shared for layer in each.fused.made.values()]
    lines += made or ["  no communicator yet: the first call makes it"]
    return "\n".join(lines)


def _alike(ours: dict[str, TokenloomExperts]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, each in ours.items():
        groups.setdefault((each.family, each.runs), []).append(name)
    return groups
