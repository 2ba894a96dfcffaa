"""Several runs of a sweep as one forward: each run has its own rows of the batch.

Three runs of a prompt `[1, pos]`, one hook each:

    rows     hooks
    0        of run 0
    1        of run 1
    2        of run 2
"""

from __future__ import annotations

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
_KEPT = (
    *("clear_contexts", "loss_per_token", "padding_side", "prepend_bos", "return_type"),
    "stop_at_layer",
)
_OF_NORMS = (".hook_normalized", ".hook_scale")
_RETURN_TYPES = ("logits", "loss", "both", None)
_ALONE = "pass batch_size=1"


def check_repeatable(arguments: dict[str, Any]) -> None:
    """Refuse arguments of a forward that cannot be repeated for each run of a batch."""
    for name, value in arguments.items():
        if name not in (*_REPEATED, *_KEPT) and value is not None:
            raise ValueError(f"{name} cannot be repeated for the runs of a batch: {_ALONE}")
        if name in _REPEATED and not isinstance(value, torch.Tensor | None):
            raise ValueError(
                f"{name} must be a tensor to be repeated for the runs of a batch, but is "
                f"{shown(value)}: {_ALONE}"
            )
    if (kind := arguments.get("return_type", "logits")) not in _RETURN_TYPES:
        raise ValueError(f"return_type={kind!r} cannot be split among runs: {_ALONE}")


class Batch:
    """A forward of several runs.

    Args:
        tokens: of each run.
        runs: the hooks of each run.
        arguments: of the forward, for each run; see `check_repeatable`.
    """

    def __init__(self, tokens: Tokens, runs: Sequence[Hooks], arguments: dict[str, Any]) -> None:
        self._runs = runs
        self._n = len(runs)
        self._tokens: Tokens
        if isinstance(tokens, torch.Tensor):
            tokens = tokens[None] if tokens.dim() == 1 else tokens
            self._rows, self._tokens = tokens.shape[0], repeated(tokens, self._n)
        else:
            texts = [tokens] if isinstance(tokens, str) else list(tokens)
            self._rows, self._tokens = len(texts), texts * self._n
        self._arguments: dict[str, Any] = {
            # One row is for all rows of the batch.
            name: repeated(value, self._n)
            if name in _REPEATED
            and value is not None
            and value.dim() > 1
            and len(value) == self._rows
            else value
            for name, value in arguments.items()
        }

    def run(self, model: Model) -> list[Any]:
        """Run all on a model, or a view of it, and return each run's result."""
        written = _Written()
        # A Bridge's norm ignores an edit in place, unless another hook returns a new tensor.
        kept = _OF_NORMS if hasattr(model, "original_model") else ()
        of_runs = [
            _RunRows(number, self._rows, self._n, written, kept) for number in range(self._n)
        ]
        hooks: Any = [
            (names, partial(rows.call, hook))
            for rows, run in zip(of_runs, self._runs)
            for names, hook in run
        ]
        # The model's own loss, of each run's rows.
        with replaced_loss(model, partial(self._losses, model.loss_fn)):
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
        if len(logits) != self._n * self._rows:  # a hook's own, of its rows
            return loss_fn(*given, per_token=per_token)
        parts = zip(*map(self._of_runs, given), strict=True)
        losses = [loss_fn(*part, per_token=per_token) for part in parts]
        return torch.cat(losses) if per_token else torch.stack(losses)

    def _of_runs(self, rows: torch.Tensor | None) -> Sequence[Any]:
        """Return each run's rows; all of them where there are none for each run."""
        if rows is None or len(rows) != self._n * self._rows:
            return [rows] * self._n
        return rows.chunk(self._n)

    def _split(self, output: Any) -> list[Any]:
        """Return each run's part of what the model returned."""
        if isinstance(output, tuple):  # logits and loss
            pairs = zip(*map(self._split, output), strict=True)
            return [output._make(pair) if hasattr(output, "_make") else pair for pair in pairs]
        if isinstance(output, torch.Tensor) and output.shape == (self._n,):  # a loss of each
            return list(output.unbind())
        return list(self._of_runs(output))


class _Written:
    """The results of a batch's hooks at a hook point.

    Attributes:
        source: the activation as the model has it. Other parts may read it too, so a run's edits in
            place belong there, until one of its hooks returns another tensor.
        activation: a copy of it with the rows of all runs, once a hook has returned a tensor.
        returned: what each run's hooks returned last.
    """

    source: torch.Tensor
    activation: torch.Tensor | None = None
    returned: dict[int, torch.Tensor]
    _point: str | None = None

    def begin(self, activation: torch.Tensor, point: str | None) -> None:
        """Take an activation, unless it is the copy that a hook before returned at this point."""
        if activation is not self.activation or point != self._point:
            self.source, self.activation, self._point = activation, None, point
            self.returned = {}


class _RunRows:
    """The rows of a run in a batch, which its hooks see and edit."""

    def __init__(
        self, run: int, rows: int, n_runs: int, written: _Written, kept: tuple[str, ...]
    ) -> None:
        self._run, self._n_runs, self._written, self._kept = run, n_runs, written, kept
        self._rows = slice(run * rows, (run + 1) * rows)
        self._total = n_runs * rows
        self._contexts: dict[int, dict[object, object]] = {}  # by the id of the hook point's own

    def call(
        self, user_hook: Callable[..., Any], activation: Any, *, hook: HookPoint
    ) -> torch.Tensor | None:
        """Call a hook of the run with its rows `[batch, ...]` of `[run * batch, ...]`."""
        shape = tuple(getattr(activation, "shape", ()))
        # The rows that are routed to an expert may be as many by chance.
        if shape[:1] != (self._total,) or ".experts." in f"{hook.name}.":
            what = f"a tensor {list(shape)}" if shape else f"a {type(activation).__name__}"
            raise ValueError(
                f"{hook.name} has no rows for each of {self._n_runs} runs of a batch, as it gives "
                f"{what} instead of {self._total} rows: {_ALONE}"
            )
        written = self._written
        written.begin(activation, hook.name)
        rows = written.returned.get(self._run)
        if rows is None:
            rows = written.source[self._rows]
        point = _PointOfRun(hook, self._contexts.setdefault(id(hook.ctx), dict(hook.ctx)))
        before = rows.clone() if f"{hook.name}".endswith(self._kept) else None
        result = user_hook(rows, hook=point)
        if result is None or result is rows:
            if before is not None and not torch.equal(before, rows):
                raise ValueError(
                    f"a hook on {hook.name} edits in place, which a TransformerBridge ignores "
                    f"there: return a new tensor, or {_ALONE}"
                )
            result = rows
        elif getattr(result, "shape", None) != rows.shape or result.dtype != rows.dtype:
            given = list(result.shape) if isinstance(result, torch.Tensor) else shown(result)
            raise ValueError(
                f"a hook on {hook.name} returned {given} for {rows.dtype} {list(rows.shape)}, but "
                f"in a batch it must return a tensor of the same shape and dtype: {_ALONE}"
            )
        else:
            written.returned[self._run] = result
            if written.activation is None:
                written.activation = activation.clone()
        if written.activation is not None:
            written.activation[self._rows] = result
        return written.activation


class _PointOfRun:
    """A hook point as a run of a batch sees it, with a context of its own."""

    def __init__(self, point: HookPoint, context: dict[object, object]) -> None:
        self._point = point
        self.ctx = context

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # a hook may ask what it was given
        return type(self._point)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._point, name)
