"""Several runs of a sweep as one forward: each run has its own rows of the batch.

Three runs of a prompt `[1, pos]`, one hook each:

    rows     hooks
    0        of run 0
    1        of run 1
    2        of run 2
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformer_lens.hook_points import HookPoint

from tl_devicefix.dispatch.carrying import repeated
from tl_devicefix.misspelt import shown
from tl_devicefix.pipelining.launching import replaced_loss
from tl_devicefix.types import Model

Hooks = Sequence[tuple[str | Callable[..., Any], Callable[..., Any]]]
"""Pairs of a hook point's name, or a function of names, and the hook, as `run_with_hooks` takes."""
Tokens = torch.Tensor | str | list[str]

_REPEATED = ("attention_mask", "position_ids")
_SHARED = (
    *("clear_contexts", "loss_per_token", "padding_side", "prepend_bos", "return_type"),
    "stop_at_layer",
)
_OF_NORMS = (".hook_normalized", ".hook_scale")
_RETURN_TYPES = ("logits", "loss", "both", None)
_REMEDY = "pass batch_size=1"


def check_repeatable(arguments: dict[str, Any]) -> None:
    """Refuse arguments of a forward that cannot be repeated for each run of a batch."""
    for name, value in arguments.items():
        if name not in (*_REPEATED, *_SHARED) and value is not None:
            raise ValueError(f"{name} cannot be repeated for the runs of a batch: {_REMEDY}")
        if name in _REPEATED and not isinstance(value, torch.Tensor | None):
            raise ValueError(
                f"{name} must be a tensor to be repeated for the runs of a batch, but is "
                f"{shown(value)}: {_REMEDY}"
            )
    if (kind := arguments.get("return_type", "logits")) not in _RETURN_TYPES:
        raise ValueError(f"return_type={kind!r} cannot be split among runs: {_REMEDY}")


class Batch:
    """A forward of several runs.

    Args:
        tokens: the prompts, the same for every run; a single text is given as its tokens.
        runs: the hooks of each run.
        arguments: of the forward, the same for every run; `check_repeatable` has accepted them.
    """

    def __init__(self, tokens: Tokens, runs: Sequence[Hooks], arguments: dict[str, Any]) -> None:
        self._runs = runs
        self._n_runs = len(runs)
        self._tokens: Tokens
        if isinstance(tokens, torch.Tensor):
            tokens = tokens[None] if tokens.dim() == 1 else tokens
            self._rows, self._tokens = tokens.shape[0], repeated(tokens, self._n_runs)
        else:
            self._rows, self._tokens = len(tokens), list(tokens) * self._n_runs
        self._arguments: dict[str, Any] = {
            # A value with a row for each prompt is repeated; any other broadcasts.
            name: repeated(value, self._n_runs)
            if name in _REPEATED
            and value is not None
            and value.dim() > 1
            and len(value) == self._rows
            else value
            for name, value in arguments.items()
        }

    def run(self, model: Model) -> list[Any]:
        """Run all runs in one forward of a model or view, and return the result of each."""
        results = _HookResults()
        # A Bridge's norm ignores in-place edits, unless a hook of some run returns a tensor.
        uneditable = _OF_NORMS if hasattr(model, "original_model") else ()
        rows_of_runs = [
            _RunRows(number, self._rows, self._n_runs, results, uneditable)
            for number in range(self._n_runs)
        ]
        loss_fn = model.loss_fn

        def call(
            rows: _RunRows, user_hook: Callable[..., object], *args: object, hook: HookPoint
        ) -> torch.Tensor | None:
            with replaced_loss(model, loss_fn):  # the hook may run the model
                return rows.call(user_hook, *args, hook=hook)

        hooks: Any = [
            (names, partial(call, rows, hook))
            for rows, run in zip(rows_of_runs, self._runs)
            for names, hook in run
        ]
        # Apply the model's own loss to each run's rows.
        with replaced_loss(model, partial(self._losses, loss_fn)):
            output = model.run_with_hooks(self._tokens, fwd_hooks=hooks, **self._arguments)
        return self._split(output)

    def _losses(
        self,
        loss_fn: Callable[..., torch.Tensor],
        logits: torch.Tensor,
        tokens: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        per_token: bool = False,
    ) -> torch.Tensor:
        """Return the loss of each run `[run]`, or of each token `[run * batch, pos - 1]`."""
        given = logits, tokens, attention_mask
        if len(logits) != self._n_runs * self._rows:  # called by a permanent hook
            return loss_fn(*given, per_token=per_token)
        parts = zip(*map(self._split_rows, given), strict=True)
        losses = [loss_fn(*part, per_token=per_token) for part in parts]
        return torch.cat(losses) if per_token else torch.stack(losses)

    def _split_rows(self, rows: torch.Tensor | None) -> Sequence[Any]:
        """Return each run's rows; a tensor that is not per run goes whole to each."""
        if rows is None or len(rows) != self._n_runs * self._rows:
            return [rows] * self._n_runs
        return rows.chunk(self._n_runs)

    def _split(self, output: Any) -> list[Any]:
        """Return each run's part of what the model returned."""
        if isinstance(output, tuple):  # logits and loss
            pairs = zip(*map(self._split, output), strict=True)
            return [output._make(pair) if hasattr(output, "_make") else pair for pair in pairs]
        if isinstance(output, torch.Tensor) and output.shape == (self._n_runs,):  # a loss of each
            return list(output.unbind())
        return list(self._split_rows(output))


class _HookResults:
    """The activation at a hook point, as a batch's hooks have left it so far.

    Attributes:
        source: the activation that the model passed in. The model may read it elsewhere too, so a
            run's hooks edit it in place, until one of them returns a tensor.
        activation: a copy of `source` with all runs' results; None until a hook returns a tensor.
        returned: run -> the last tensor that a hook of the run returned.
    """

    source: torch.Tensor
    activation: torch.Tensor | None = None
    returned: dict[int, torch.Tensor]
    _point: str | None = None

    def begin(self, activation: torch.Tensor, point: str | None) -> None:
        """Start with this activation, unless it is the copy that an earlier hook returned here."""
        if point != self._point or not _is_same(activation, self.activation):
            self.source, self.activation, self._point = activation, None, point
            self.returned = {}
            if activation.stride(0) == 0:  # a Bridge's positions, one row for all runs
                self.source = activation.clone()
                self.activation = self.source.clone()


def _is_same(activation: torch.Tensor, other: torch.Tensor | None) -> bool:
    if activation is other or other is None:
        return activation is other
    with contextlib.suppress(RuntimeError):  # a tensor in `torch.func` has no memory
        return activation.data_ptr() == other.data_ptr()  # an OPT Bridge makes a view for each hook
    return False


class _RunRows:
    """The rows of a run in a batch, which its hooks see and edit."""

    def __init__(
        self, run: int, rows: int, n_runs: int, results: _HookResults, uneditable: tuple[str, ...]
    ) -> None:
        self._results, self._uneditable = results, uneditable
        self._run, self._n_runs, self._total = run, n_runs, n_runs * rows
        self._rows = slice(run * rows, (run + 1) * rows)
        self._contexts: dict[int, dict[object, object]] = {}  # by the id of `hook.ctx`

    def call(
        self, user_hook: Callable[..., Any], activation: Any, *, hook: HookPoint
    ) -> torch.Tensor | None:
        """Call a hook of the run with its rows `[batch, ...]` of `[run * batch, ...]`."""
        shape = tuple(getattr(activation, "shape", ()))
        is_of_expert = ".experts." in f"{hook.name}."
        # An expert's rows are the tokens routed to it: their number may match by chance.
        if is_of_expert or shape[:1] != (self._total,):
            what = f"a tensor {list(shape)}" if shape else f"a {type(activation).__name__}"
            what = "rows of experts" if is_of_expert else f"{what} instead of {self._total} rows"
            raise ValueError(
                f"{hook.name} cannot be split among {self._n_runs} runs of a batch, as it gives "
                f"{what}: {_REMEDY}"
            )
        results = self._results
        results.begin(activation, hook.name)
        rows = results.returned.get(self._run)
        if rows is None:
            rows = results.source[self._rows]
        point = _RunHookPoint(hook, self._contexts.setdefault(id(hook.ctx), dict(hook.ctx)))
        before = rows.clone() if f"{hook.name}".endswith(self._uneditable) else None
        result = user_hook(rows, hook=point)
        if result is None or result is rows:
            if before is not None and not torch.equal(before, rows):
                raise ValueError(
                    f"a hook on {hook.name} edits in place, which a TransformerBridge ignores "
                    f"there: return a new tensor, or {_REMEDY}"
                )
            result = rows
            if before is None and rows.requires_grad:  # the hook may keep them, for a gradient
                self._return(rows, activation)
        elif getattr(result, "shape", None) != rows.shape or result.dtype != rows.dtype:
            given = list(result.shape) if isinstance(result, torch.Tensor) else shown(result)
            raise ValueError(
                f"a hook on {hook.name} returned {given} for {rows.dtype} {list(rows.shape)}, but "
                f"in a batch it must return a tensor of the same shape and dtype: return one, or "
                f"{_REMEDY}"
            )
        else:
            self._return(result, activation)
        if results.activation is not None:
            results.activation[self._rows] = result
        return results.activation

    def _return(self, result: torch.Tensor, activation: torch.Tensor) -> None:
        self._results.returned[self._run] = result
        if self._results.activation is None:
            self._results.activation = activation.clone()


class _RunHookPoint:
    """A hook point as a run of a batch sees it, with its own context."""

    def __init__(self, point: HookPoint, context: dict[object, object]) -> None:
        self._point = point
        self.ctx = context

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # a hook may ask what it was given
        return type(self._point)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._point, name)
