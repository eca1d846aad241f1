"""Finds the rank that caused a NaN: measures local gradients before DDP's all-reduce spreads them to all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from gradstat import _fields
from gradstat._core.backends import known_name
from gradstat._core.collectives import device_of, format_ranks, gather, reduce_
from gradstat._core.compiling import never_traced
from gradstat._core.tensors import to_device
from gradstat._core.text import count_of, lines_of, nan_and_inf, printable
from gradstat._core.wrappers import uncompiled
from gradstat.accumulation import NAMED_IN_ERROR, NAMED_IN_TEXT, place_in_step
from gradstat.check import stats
from gradstat.report import NonFiniteGradientError
from gradstat.tensor_stats import Judged

_CALLER = "OriginTracker.result"
_COUNTS = [_fields.INDEX["nan_count"], _fields.INDEX["inf_count"]]
# The micro-batch number that stands for "always finite".
_NEVER = torch.iinfo(torch.int64).max

_Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]


def track_origin(
    ddp_model: Module,
    hook: _Hook | None = None,
    state: object = None,
    *,
    per_micro_batch: bool = False,
    backend: str | None = None,
) -> OriginTracker:
    """Tracks the local gradients of a DDP model, to find the rank that causes NaN or Inf.

    DDP averages gradients over all ranks, so after ``backward()`` one rank's NaN is on every rank. A communication hook
    measures each bucket just before it is reduced: one more pass over the gradients and one launch per bucket, no sync
    and no collective. `OriginTracker.result` then combines all ranks. ::

        tracker = track_origin(ddp_model)
        for inputs, targets in batches:
            loss_of(ddp_model(inputs), targets).backward()
            tracker.result().raise_if_nonfinite()  # on all ranks; the same error on all of them
            optimizer.step()
            optimizer.zero_grad()

    Works with ``static_graph``, ``gradient_as_bucket_view``, ``find_unused_parameters``, rebuilt buckets and
    ``torch.compile`` on either side of DDP. Every rank has to track the same model.

    Args:
        ddp_model: A ``DistributedDataParallel`` without a communication hook, or ``torch.compile``'s result for one;
            DDP accepts one hook, permanently.
        hook: The communication hook to wrap, as for ``register_comm_hook``; None for torch's ``allreduce_hook``, which
            does what DDP does without a hook.
        state: The state that ``hook`` is called with.
        per_micro_batch: With gradient accumulation under ``no_sync()`` a bucket holds the sum of all micro-batches,
            which does not show which of them was not finite. If true, gradients are also measured after each
            ``backward()`` without a reduction, when the next ``forward`` begins or `OriginTracker.result` is called.
            This costs a pass and a launch per such micro-batch, and a Python call per parameter in each ``backward()``.
        backend: As for `gradstat.check`.

    Returns:
        A handle with ``result()`` and ``remove()``. A model may be tracked again after that, with the same hook.

    Raises:
        TypeError: ``ddp_model`` is no such model.
        ValueError: ``backend`` is unknown.
        RuntimeError: The model is already tracked, or has a communication hook.
    """
    known_name(backend)  # an unknown name raises here, not in a backward pass
    ddp_model = uncompiled(ddp_model)
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"expected a DistributedDataParallel, got {type(ddp_model).__name__}; only DDP exposes gradients before it "
            "reduces them"
        )
    relay = _relays.get(ddp_model)
    if relay is None:
        relay = _relays[ddp_model] = _Relay(ddp_model, hook, state)
    elif relay.measure is not None:
        raise RuntimeError("this model is already tracked; call remove() on the handle of the first track_origin()")
    elif hook is not None and hook is not relay.hook:
        raise RuntimeError("DDP never drops a communication hook; this model was first tracked with another one")
    return OriginTracker(ddp_model, relay, per_micro_batch, backend)


class _Relay:
    """The hook registered with DDP: shows each bucket to the current tracker, then calls the real hook."""

    def __init__(self, ddp_model: DistributedDataParallel, hook: _Hook | None, state: object) -> None:
        if getattr(ddp_model, "_comm_hooks", None):  # DDP would record the second hook before rejecting it
            raise RuntimeError(
                "this model already has a communication hook, and DDP accepts only one; pass it to "
                "track_origin(ddp_model, hook, state) instead of registering it"
            )
        self.hook = hook
        self.measure: Callable[[Any], None] | None = None  # of the current tracker
        # Without a hook DDP reduces over its own group, which has to be passed to allreduce_hook.
        reduce: _Hook = allreduce_hook if hook is None else hook
        its_state = ddp_model.process_group if hook is None else state

        def relayed(_: object, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
            if self.measure is not None:
                self.measure(bucket)
            return reduce(its_state, bucket)

        ddp_model.register_comm_hook(None, relayed)


_relays: weakref.WeakKeyDictionary[DistributedDataParallel, _Relay] = weakref.WeakKeyDictionary()


class _Seen(NamedTuple):
    micro_batch: int
    positions: list[int]  # positions of their parameters
    table: Tensor


@final
class OriginTracker:
    """The measurements of local gradients since the last ``result()``: tables on the device, one row per gradient.

    Returned by `track_origin`. Micro-batches count from 0, one per reduction, or with ``per_micro_batch`` one per
    ``backward()``. Call `result` once a step. Until then only rows are kept, and no gradient.
    """

    def __init__(
        self, ddp_model: DistributedDataParallel, relay: _Relay, per_micro_batch: bool, backend: str | None
    ) -> None:
        named = [(name, p) for name, p in ddp_model.module.named_parameters() if p.requires_grad]
        self._names = tuple(name for name, _ in named)
        self._parameters = [parameter for _, parameter in named]
        self._position = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._group, self._relay, self._backend = ddp_model.process_group, relay, backend
        self._unmeasured: set[int] = set()  # ids of parameters whose gradients were accumulated and not measured yet
        self.reset()
        relay.measure = self._measure_bucket
        self._handles: list[Any] = []
        if per_micro_batch:
            # Not a method of the tracker: the garbage collector cannot see what a parameter's hook references.
            noted = self._unmeasured
            hook = lambda parameter: noted.add(id(parameter))  # noqa: E731
            self._handles = [p.register_post_accumulate_grad_hook(hook) for p in self._parameters]
            self._handles.append(ddp_model.register_forward_pre_hook(self._measure_accumulated))

    def __repr__(self) -> str:
        return f"OriginTracker({len(self._names)} parameters, {len(self._seen)} measurements since the last result)"

    def result(self) -> OriginReport:
        """Which rank caused NaN or Inf since the last call; the same report on every rank. Resets for the next step.

        A collective: all ranks have to call it. If all gradients are finite it costs one all-reduce of 8 bytes per
        parameter and one sync; otherwise the NaN and Inf counts of the others are gathered, with two more syncs.

        Raises:
            RuntimeError: On some rank nothing was measured since the last call. Raised on all of them.
            UnreachableRankError: A rank did not take part (where the backend reports it; see there).
        """
        return self.pending_result()()

    def pending_result(self) -> Callable[[], OriginReport]:
        """The measurements since the last call, as a function to be called later, or never. Resets for the next step.

        No collective and no sync; the returned function does what `result` does, and raises the same errors.
        """
        self._measure_accumulated()
        seen, count = self._seen, self._micro_batch
        self.reset()
        return lambda: self._report(seen, count)

    def _report(self, seen: list[_Seen], count: int) -> OriginReport:
        """Agrees on the micro-batch since which each gradient is not finite; gathers the counts of these gradients."""
        device = device_of(self._group)
        places = [(one.micro_batch, position) for one in seen for position in one.positions]
        # The last element is the number of this rank's measurements, so that all ranks learn if one has none.
        first = torch.full((len(self._names) + 1,), _NEVER, dtype=torch.int64, device=device)
        first[-1] = len(places)
        counts = torch.zeros(0, len(_COUNTS), dtype=torch.float64, device="cpu")
        if places:
            counts = torch.cat([to_device(one.table[:, _COUNTS], device) for one in seen])
            micro_batches, positions = torch.tensor(places, device=device).unbind(1)
            when = torch.where(counts.sum(1) > 0, micro_batches, _NEVER)
            first.scatter_reduce_(0, positions, when, "amin")
        *earliest, least_seen = reduce_(first, dist.ReduceOp.MIN, [self._group], _CALLER).tolist()
        if not least_seen:
            raise RuntimeError(
                "on some rank no gradient was reduced since the last result(); call it on all ranks after backward(), "
                "once a step, and not after remove()"
            )
        nonfinite = [i for i, micro_batch in enumerate(earliest) if micro_batch != _NEVER]
        ranks = tuple(dist.get_process_group_ranks(self._group))
        causes: list[NonfiniteOrigin] = []
        if nonfinite:
            local_counts = torch.zeros(len(self._names), len(_COUNTS), dtype=torch.float64, device="cpu")
            for (micro_batch, position), row in zip(places, counts.cpu(), strict=True):
                if micro_batch == earliest[position]:
                    local_counts[position] = row
            gathered = gather(local_counts[nonfinite].to(device), self._group, _CALLER).tolist()
            for k, position in enumerate(nonfinite):
                on = {rank: (int(c[k][0]), int(c[k][1])) for rank, c in zip(ranks, gathered, strict=True) if any(c[k])}
                numel = self._parameters[position].numel()
                causes.append(NonfiniteOrigin(self._names[position], numel, earliest[position], on))
        return OriginReport(self._names, causes, ranks, count)

    def reset(self) -> None:
        """Discards the measurements since the last `result`, for a step that is abandoned."""
        self._seen: list[_Seen] = []
        self._micro_batch = 0
        self._unmeasured.clear()

    def remove(self) -> None:
        """Ends the tracking. The hook stays registered, as DDP keeps hooks permanently, and only passes buckets on."""
        if self._relay.measure == self._measure_bucket:
            self._relay.measure = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.reset()

    def _measure_bucket(self, bucket: Any) -> None:
        buffer = bucket.buffer()
        gradients = [buffer] if buffer.is_sparse else bucket.gradients()
        self._measure(gradients, bucket.parameters(), is_last=bucket.is_last())

    @never_traced
    def _measure_accumulated(self, *_: object) -> None:
        if self._unmeasured:
            having = [p for p in self._parameters if p.grad is not None]
            self._measure([p.grad for p in having if p.grad is not None], having, is_last=True)

    def _measure(self, gradients: list[Tensor], parameters: list[Tensor], is_last: bool) -> None:
        positions = [self._position[id(parameter)] for parameter in parameters]
        self._seen.append(_Seen(self._micro_batch, positions, stats(gradients, backend=self._backend)))
        if is_last:
            self._micro_batch += 1
            self._unmeasured.clear()


class NonfiniteOrigin(NamedTuple):
    """A gradient that was not finite before it was reduced."""

    name: str
    numel: int
    micro_batch: int  # the first in which it was not finite on some rank
    counts: dict[int, tuple[int, int]]  # its NaN and Inf elements in that micro-batch, by rank; never empty


class OriginReport(Judged):
    """Which rank caused NaN or Inf in which gradient, the same on every rank. Ranks are global.

    Returned by `OriginTracker.result`. What is not finite stays so when it is reduced or accumulated, so each parameter
    is described as of the first micro-batch in which its gradient was not finite on some rank.

    Attributes:
        ranks: All ranks that took part.
        micro_batches: Number of micro-batches: reductions, or with ``per_micro_batch`` calls of ``backward()``.
        nonfinite: The parameters whose gradient was not finite on some rank, in the model's order.
        nonfinite_since: For each of them, the first micro-batch in which it was not, as `micro_batch_of` says.
    """

    def __init__(
        self, names: Sequence[str], nonfinite: Sequence[NonfiniteOrigin], ranks: tuple[int, ...], micro_batches: int
    ) -> None:
        self._names = frozenset(names)
        self._nonfinite = {one.name: one for one in nonfinite}
        self.ranks: tuple[int, ...] = ranks
        self.micro_batches: int = micro_batches
        self.nonfinite: tuple[str, ...] = tuple(self._nonfinite)
        self.nonfinite_since: dict[str, int] = {one.name: one.micro_batch for one in nonfinite}

    @property
    def ok(self) -> bool:
        """Whether every local gradient was finite on every rank."""
        return not self._nonfinite

    def rank_of(self, name: str) -> int | None:
        """The lowest rank where ``name``'s gradient was first not finite, or None. KeyError if ``name`` is unknown."""
        origin = self._find(name)
        return None if origin is None else next(iter(origin.counts))

    def nonfinite_ranks(self, name: str) -> int:
        """Number of ranks where ``name``'s gradient was not finite in its first such micro-batch. Errors: `rank_of`."""
        origin = self._find(name)
        return 0 if origin is None else len(origin.counts)

    def micro_batch_of(self, name: str) -> int | None:
        """The first micro-batch in which ``name``'s gradient was not finite, from 0. Errors as in `rank_of`.

        Without ``per_micro_batch`` reductions are counted: under ``no_sync()`` all micro-batches of a step are one.
        """
        self._find(name)
        return self.nonfinite_since.get(name)

    def raise_if_nonfinite(self) -> None:
        """Raises `NonFiniteGradientError`, which names ranks and parameters, on every rank, unless `ok`.

        The error has no ``report``, since the gradients described are those of several ranks.
        """
        if not self.ok:
            raise NonFiniteGradientError("\n".join(self._summary(NAMED_IN_ERROR)))

    def __repr__(self) -> str:
        state = "ok" if self.ok else f"{len(self._nonfinite)} not finite"
        return f"OriginReport({len(self._names)} gradients of {len(self.ranks)} ranks, {state})"

    def __str__(self) -> str:
        if self.ok:
            return f"gradstat: {len(self._names)} gradients, finite on all {len(self.ranks)} ranks before the reduction"
        return "gradstat: " + "\n".join(self._summary(NAMED_IN_TEXT))

    def _find(self, name: str) -> NonfiniteOrigin | None:
        if name not in self._names:
            raise KeyError(f"no parameter named {name!r} is reduced by this model")
        return self._nonfinite.get(name)

    def _summary(self, limit: int) -> list[str]:
        """Who caused what, in words: ordered by micro-batch, with parameters of the same ranks grouped."""
        together: dict[tuple[int, tuple[int, ...]], list[NonfiniteOrigin]] = {}
        for one in self._nonfinite.values():
            together.setdefault((one.micro_batch, tuple(one.counts)), []).append(one)
        lines = [f"NaN or Inf in {len(self._nonfinite)} of {len(self._names)} gradients before they were reduced"]
        left = limit
        for micro_batch, ranks in sorted(together):
            group = together[micro_batch, ranks]
            count = count_of(len(group), "gradient")
            when = f" in {place_in_step(micro_batch, self.micro_batches)}" if self.micro_batches > 1 else ""
            who = f"{format_ranks(ranks)}{' alone' * (len(ranks) == 1)} (of {len(self.ranks)})"
            if ranks == self.ranks and len(ranks) > 1:
                who = f"ALL {len(ranks)} ranks (so not by one rank's data: parameters, learning rate or loss scale?)"
            lines.append(f"caused by {who}{when}: {count}")
            lines += lines_of(group, left, lambda one: f"  {printable(one.name)}: {_counts(one)}")
            left = max(0, left - len(group))
        return lines


def _counts(origin: NonfiniteOrigin) -> str:
    rank, counts = next(iter(origin.counts.items()))
    on = f" on rank {rank}" if len(origin.counts) > 1 else ""
    return f"{nan_and_inf(*counts)} of {origin.numel:,} elements{on}"
