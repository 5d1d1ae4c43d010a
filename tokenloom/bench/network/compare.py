"""Compares results of this rank with those of the reference, bit for bit, and says where they part."""

from __future__ import annotations

import torch

from tokenloom import reference
from tokenloom.bench.network.findings import Seen
from tokenloom.comm.routed import Routed


def compare_routed(got: Routed, want: reference.Routed) -> Seen:
    """Compare everything that a dispatch gives, wherever it is specified."""
    seen = Seen(0)
    wanted_counts = {
        "num_rows": want.num_rows,
        "expert_counts": want.expert_counts,
        "source_counts": want.source_counts,
        "expert_offsets": want.expert_offsets,
        "slot_ranges": want.slot_ranges,
    }
    for name, counts in wanted_counts.items():
        seen += _compare_counts(name, getattr(got, name), counts)
    sources = {place: key for key, place in want.rows.items()}
    places = sorted(sources)
    for name in ("tokens", "scales", "topk_ids", "topk_weights"):
        mine, theirs = getattr(got, name), getattr(want, name)
        if (mine is None) != (theirs is None):
            seen += Seen(0, f"{name} is {'missing' if mine is None else 'there'}, expected otherwise")
        elif mine is not None:
            mine = mine.to(torch.int64) if name == "topk_ids" else mine
            seen += _compare_rows(name, _flat(mine, name), _flat(theirs, name), places, sources)
    return seen


def _flat(rows: torch.Tensor, name: str) -> torch.Tensor:
    return rows.cpu().flatten(0, -2).contiguous()


def _compare_counts(name: str, got: object, want: object) -> Seen:
    if want is None or got is None:
        return Seen(0, "" if got is want else f"{name} is {got}, expected {want}")
    mine, theirs = (torch.as_tensor(each).to(torch.int64).cpu() for each in (got, want))
    if mine.shape == theirs.shape and torch.equal(mine, theirs):
        return Seen(mine.numel())
    return Seen(mine.numel(), f"{name} is {mine.tolist()}, expected {theirs.tolist()}")


def _compare_rows(
    name: str, got: torch.Tensor, want: torch.Tensor, places: list[int], sources: dict[int, reference.Key]
) -> Seen:
    if got.shape != want.shape or got.dtype != want.dtype:
        said = [f"{each.dtype} {list(each.shape)}" for each in (got, want)]
        return Seen(0, f"{name} is {said[0]}, expected {said[1]}")
    if not places:
        return Seen(0)
    differs = (got.view(torch.uint8)[places] != want.view(torch.uint8)[places]).any(1)
    seen = Seen(len(places) * got.shape[1])
    if bool(differs.any()):
        place = places[int(differs.nonzero()[0])]
        source, token = sources[place][:2]
        number = int(differs.sum())
        seen += Seen(0, f"{name} differ in {number} of {len(places)} rows; first, token {token} of rank {source}")
    return seen


def compare_sums(got: torch.Tensor, want: torch.Tensor) -> Seen:
    """Compare the rows that came home, [T, H]; any NaN equals any NaN."""
    got = got.detach().cpu()
    if got.shape != want.shape or got.dtype != want.dtype:
        return Seen(0, f"{got.dtype} {list(got.shape)} came home, expected {want.dtype} {list(want.shape)}")
    if not want.numel():
        return Seen(0)
    both_nan = got.isnan() & want.isnan()
    same = (got.view(torch.int16) == want.view(torch.int16)) | both_nan
    if bool(same.all()):
        return Seen(want.numel())
    wrong = (~same).any(1).nonzero().flatten().tolist()
    return Seen(want.numel(), f"{len(wrong)} of {len(want)} tokens have other sums; first, token {wrong[0]}")
