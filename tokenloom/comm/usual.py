"""Usual calls: those like an earlier one, with nothing around them, which a serving loop makes by the thousand.

A call is looked at once, launched and handed out. Whatever is unusual about it, bad input above all, sends it the long
way through halves.py, which makes all errors: then nothing has happened here yet.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenloom.backends.base import (
    CombineOptions,
    DispatchInputs,
    DispatchOptions,
    DispatchOut,
    MakesUsualCalls,
    OwnOutputs,
    Rows,
    Upcoming,
    UsualAgain,
    UsualCombine,
    UsualDispatch,
)
from tokenloom.comm import outputs
from tokenloom.comm.engine import Engine
from tokenloom.comm.routed import Routed
from tokenloom.comm.validation import SCALE_DTYPE, WEIGHT_DTYPE

MOST_KINDS = 64
"""Kinds of calls that are remembered. A program has a few, unless it passes another capacity each time."""
Tensor = torch.Tensor
is_grad_enabled = torch.is_grad_enabled


class UsualCalls:
    """The usual calls of one communicator.

    Args:
        engine: of the communicator. backend: what makes its calls.
    """

    def __init__(self, engine: Engine, backend: MakesUsualCalls) -> None:
        self._engine, self._plan, self._backend, self._turn = engine, engine.plan, backend, engine.ranks.turn
        device = engine.ranks.device
        self._device = -1 if device.index is None else device.index  # as get_device() of tensors has it
        self._dispatches: dict[object, UsualDispatch] = {}
        self._results: dict[UsualDispatch, dict[str, tuple[Any, ...]]] = {}  # shapes, strides and dtypes, by name
        self._combines: dict[object, UsualCombine] = {}
        self._again: dict[object, UsualAgain] = {}

    def nothing_around(self) -> bool:
        """Whether a call that is made now needs no profile, other calls' halves, or sequence."""
        engine = self._engine
        return engine.is_plain() and not engine.open_calls.any_open()

    def ready(self, awaited: bool = False) -> int | None:
        """Raise what earlier calls left; the stream, or None if nothing was raised and the next call is no usual one.

        Args:
            awaited: the host will wait for the call.
        """
        if not self.nothing_around():
            return None
        self._engine.ranks.require_alive()
        return self._backend.ready(awaited)

    # -- dispatch -------------------------------------------------------------------------------------------

    def dispatch(
        self,
        owner: object,
        x: Any,
        topk_ids: Any,
        weights: Any,
        options: tuple[Any, ...],
        out: Any,
        copy: Any,
        copies_ids: bool = False,
    ) -> Routed | None:
        """Make a dispatch, if it is a usual one.

        Args:
            owner: the communicator.
            x, topk_ids, weights, out, copy: as they were given.
            options: what follows ``able`` in :func:`tokenloom.comm.validation.dispatch_options`.
            copies_ids: later calls of this dispatch read a copy of the ids, so that the caller may change its own.
        """
        if is_grad_enabled():
            return None
        scales = None
        if x.__class__ is tuple and len(x) == 2:
            x, scales = x
        usual = self.like_before(x, scales, topk_ids, weights, options, copy)
        if usual is None or not (out is None or self._fits_all(out, usual)) or not self._turn.take():
            return None
        try:
            stream = self.ready(usual.awaited)
            if stream is None:
                return None
            engine = self._engine
            try:
                handle, rows, _ = usual.launch(x, scales, topk_ids, weights, x.shape[0], out, stream)
            except Exception:
                with engine.sequence(Upcoming("dispatch", awaited=usual.awaited)):
                    raise
            engine.open_calls.opened()
            try:  # behind the kernel, while it runs
                if copies_ids:
                    handle.use_ids(topk_ids.clone())
                if usual.finish is not None:
                    handle, rows = usual.finish(handle, rows, x, scales, topk_ids, weights)
            except Exception:
                with engine.sequence():
                    raise
        finally:
            self._turn.leave()
        return Routed(owner, self._plan, handle, rows, None, weights is not None, topk_ids.dtype, out)

    def like_before(
        self, x: Any, scales: Any, topk_ids: Any, weights: Any, options: tuple[Any, ...], copy: Any = False
    ) -> UsualDispatch | None:
        """What makes this dispatch, if there were others of its kind and its tensors are right at a glance.

        Args:
            x, scales, topk_ids, weights, options, copy: as for :meth:`dispatch`.
        """
        if not (x.__class__ is Tensor is topk_ids.__class__) or x.ndim != 2:
            return None
        plan, device = self._plan, self._device
        try:
            usual = self._dispatches.get(_kind_of_dispatch(x, scales, topk_ids, weights, options, copy))
            ids_shape = topk_ids.shape
            num_tokens, hidden = x.shape
            if (
                usual is None
                or usual.is_stale
                or hidden != plan.hidden
                or num_tokens > plan.max_tokens_per_rank
                or ids_shape != (num_tokens, plan.top_k)
                or not x.get_device() == device == topk_ids.get_device()
                or not (x.is_contiguous() and topk_ids.is_contiguous())
                or not (num_tokens == 0 or (x.data_ptr() and topk_ids.data_ptr()))
                or not (weights is None or self._fits(weights, ids_shape, WEIGHT_DTYPE))
                or not (scales is None or self._fits(scales, (num_tokens, plan.scales_per_token), SCALE_DTYPE))
            ):
                return None
        except (TypeError, RuntimeError):  # a list, say, cannot be looked up, and a nested tensor has no shape
            return None
        return usual

    def learn_dispatch(
        self, given: tuple[Any, ...], options: DispatchOptions, inputs: DispatchInputs | None, copy: Any = False
    ) -> None:
        """Remember the kind of a dispatch that was made the long way, if such calls are usual from now on.

        Args:
            given: options, as for :meth:`dispatch`. options: what they mean.
            inputs: the checked tensors.
            copy: as for :meth:`dispatch`.
        """
        if inputs is None or inputs.scale_words is not None or is_grad_enabled():
            return
        kind = _kind_of_dispatch(inputs.x, inputs.scales, inputs.topk_ids, inputs.topk_weights, given, copy)
        known = self._dispatches.get(kind)
        if known is not None:
            if not known.is_stale:
                return
            self._results.pop(known, None)
        found = self._backend.usual_dispatch(options, inputs)
        if found is not None:
            if len(self._dispatches) >= MOST_KINDS:
                self._dispatches.clear()
                self._results.clear()
            self._dispatches[kind] = found
            if found.takes_out:
                likes = outputs.results(self._plan, options, inputs)
                self._results[found] = {name: (each.shape, each.stride(), each.dtype) for name, each in likes.items()}

    def _fits(self, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return (
            tensor.__class__ is Tensor
            and tensor.dtype is dtype
            and tensor.shape == shape
            and tensor.get_device() == self._device
            and tensor.is_contiguous()
            and (tensor.data_ptr() != 0 or shape[0] == 0)
        )

    def _fits_result(self, out: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return self._fits(out, shape, dtype) and not out.requires_grad

    def _fits_all(self, out: Any, usual: UsualDispatch) -> bool:
        """Whether a dispatch can write its results to the caller's tensors, at a glance."""
        if out.__class__ is not DispatchOut or not usual.takes_out:
            return False
        results, device = self._results[usual], self._device
        for name, tensor in vars(out).items():
            if tensor is None:
                continue
            if tensor.__class__ is not Tensor or tensor.get_device() != device:
                return False
            if (tensor.shape, tensor.stride(), tensor.dtype) != results.get(name):
                return False
        return out.topk_ids is None or out.topk_ids.dtype is torch.int32

    # -- other rows by the routes of a dispatch -------------------------------------------------------------

    def dispatch_again(
        self, owner: object, x: Any, routed: Any, copy: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """Send other rows to the places of a dispatch, if that is a usual call.

        Args:
            owner: the communicator.
            x, routed, copy: as they were given.
        """
        if is_grad_enabled():
            return None
        scales = None
        if x.__class__ is tuple and len(x) == 2:
            x, scales = x
        if not (x.__class__ is Tensor and routed.__class__ is Routed and routed._owner is owner):
            return None
        handle, plan = routed._handle, self._plan
        try:
            usual = self._again.get(_kind_of_rows(x, scales, routed, copy))
            if (
                usual is None
                or usual.is_stale
                or x.shape != (handle.num_tokens, plan.hidden)
                or x.get_device() != self._device
                or not x.is_contiguous()
                or not (handle.num_tokens == 0 or x.data_ptr())
                or not (scales is None or self._fits(scales, (handle.num_tokens, plan.scales_per_token), SCALE_DTYPE))
                or not usual.fits(handle)
                or not self._turn.take()
            ):
                return None
        except (TypeError, RuntimeError):
            return None
        try:
            stream = self.ready()
            if stream is None:
                return None
            engine = self._engine
            try:
                again, rows = usual.launch(handle, x, scales, stream)
            except Exception:
                with engine.sequence(Upcoming("rows again")):
                    raise
            engine.open_calls.opened()
            try:
                found = usual.finish(handle, again, rows)
            except Exception:
                with engine.sequence():
                    raise
        finally:
            self._turn.leave()
        if isinstance(found, tuple):
            return routed._by_place(found[0]), routed._by_place(found[1])
        return routed._by_place(found)

    def learn_again(self, values: Rows, routed: Routed, copy: object, own: OwnOutputs) -> None:
        """Remember what rows were sent again the long way, if such calls are usual from now on.

        Args:
            values: the checked rows, with scales if they have some.
            routed, copy: as for :meth:`dispatch_again`. own: what ``copy`` means.
        """
        x, scales = values if isinstance(values, tuple) else (values, None)
        kind = _kind_of_rows(x, scales, routed, copy)
        known = self._again.get(kind)
        if is_grad_enabled() or (known is not None and not known.is_stale and known.fits(routed._handle)):
            return
        found = self._backend.usual_again(routed._handle, values, own)
        if found is not None:
            if len(self._again) >= MOST_KINDS:
                self._again.clear()
            self._again[kind] = found

    # -- combine --------------------------------------------------------------------------------------------

    def combine(
        self, owner: object, y: Any, routed: Any, options: tuple[Any, ...], out: Any, home_weights: Any
    ) -> torch.Tensor | None:
        """Make a combine, if it is a usual one.

        Args:
            owner: the communicator.
            y, routed, out, home_weights: as they were given.
            options: weighted, mode, wire_dtype and out_dtype as they were given.
        """
        if is_grad_enabled():
            return None
        if not (y.__class__ is Tensor and routed.__class__ is Routed and routed._owner is owner):
            return None
        handle = routed._handle
        home_shape = handle.num_tokens, self._plan.top_k
        try:
            usual = self._combines.get((routed.layout, routed._weighted, y.dtype, options, home_weights is not None))
            if (
                usual is None
                or usual.is_stale
                or y.shape != routed._shape
                or y.get_device() != self._device
                or not y.is_contiguous()
                or not (y.data_ptr() or y.numel() == 0)
                or not (out is None or self._fits_result(out, (handle.num_tokens, self._plan.hidden), usual.out_dtype))
                or not (home_weights is None or self._fits(home_weights, home_shape, WEIGHT_DTYPE))
                or not self._turn.take()
            ):
                return None
        except (TypeError, RuntimeError):
            return None
        try:
            stream = self.ready()
            if stream is None:
                return None
            engine = self._engine
            try:
                weights = routed._late_weights if home_weights is None else home_weights
                result, _ = usual.launch(handle, y, weights, out, stream)
            except Exception:
                with engine.sequence(Upcoming("combine")):
                    raise
            engine.open_calls.opened()
        finally:
            self._turn.leave()
        return result

    def learn_combine(self, y: torch.Tensor, routed: Routed, given: tuple[Any, ...], options: CombineOptions) -> None:
        """Remember the kind of a combine that was made the long way, if such calls are usual from now on.

        Args:
            given: options as for :meth:`combine`. options: what they mean.
        """
        kind = (routed.layout, routed._weighted, y.dtype, given, options.weights_from_home)
        known = self._combines.get(kind)
        if options.needs_grad or (known is not None and not known.is_stale):
            return
        found = self._backend.usual_combine(routed.layout, y.dtype, options)
        if found is not None:
            self._combines[kind] = found


def _kind_of_rows(x: torch.Tensor, scales: object, routed: Routed, copy: object) -> object:
    """What usual calls that send other rows of one kind have alike."""
    return routed._handle.options, routed._ids_dtype, x.dtype, scales is None, copy, copy.__class__


def _kind_of_dispatch(
    x: torch.Tensor, scales: object, topk_ids: torch.Tensor, weights: object, options: tuple[Any, ...], copy: object
) -> object:
    """What usual dispatches of one kind have alike. Types as well: True is no number of rows, and 1 is not True."""
    _, alignment, _, capacity, to_fp8, powers, _, _ = options
    types = (alignment.__class__, capacity.__class__, to_fp8.__class__, powers.__class__)
    return options, types, x.dtype, topk_ids.dtype, scales is None, weights is None, copy
