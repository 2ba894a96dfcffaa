"""Several runs of a sweep as one forward: each run has its own rows of the batch.

Of three runs of two prompts, the hooks of run 1 see rows 2 and 3 of `[6, pos, ...]`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformer_lens.hook_points import HookPoint

from tl_devicefix.dispatch.carrying import repeated
from tl_devicefix.errors import shown
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
_IS_INPUT_OF_PART = re.compile(r"\w*blocks\.\d+\.(.+\.hook_in|hook_resid_mid\d?)").fullmatch
_RETURN_TYPES = ("logits", "loss", "both", None)
_REMEDY = "pass batch_size=1"


def check_repeatable(arguments: dict[str, Any]) -> None:
    """Refuse arguments of a forward that cannot be repeated for each run of a batch."""
    for name, value in arguments.items():
        is_tensor = name in _REPEATED and isinstance(value, torch.Tensor)
        if name not in _SHARED and not is_tensor and value is not None:
            raise ValueError(
                f"{name}={shown(value)} cannot be repeated for the runs of a batch: {_REMEDY}"
            )
    if (kind := arguments.get("return_type", "logits")) not in _RETURN_TYPES:
        raise ValueError(f"return_type={kind!r} cannot be split among runs: {_REMEDY}")


class Batch:
    """A forward of several runs.

    Args:
        tokens: the prompts, the same for every run; a single text is given as its tokens.
        runs: the hooks of each run.
        points: the model's hook points by name; a Bridge's have several names.
        arguments: of the forward, the same for every run; `check_repeatable` has accepted them.
    """

    def __init__(
        self,
        tokens: Tokens,
        runs: Sequence[Hooks],
        points: Mapping[str, HookPoint],
        arguments: dict[str, Any],
    ) -> None:
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
        self._points = points
        # A hook point's own name -> the runs that hook it, with their hooks, in order
        self._hooks: dict[str, list[tuple[int, Callable[..., Any]]]] = {}
        self._named: dict[str, str] = {}  # the names that runs use, by the hook points' own
        for run, hooks in enumerate(runs):
            for names, hook in hooks:
                found = [names] if isinstance(names, str) else filter(names, points)
                for own_name in dict.fromkeys(map(self._own_name, found)):
                    self._hooks.setdefault(own_name, []).append((run, hook))
                if isinstance(names, str):
                    self._named[self._own_name(names)] = names
        # Run -> each hook point as it sees it, by its own name
        self._points_of_runs: dict[tuple[int, str | None], _RunHookPoint] = {}

    def run(self, model: Model) -> list[Any]:
        """Run all runs in one forward of a model or view, and return the result of each."""
        loss_fn = model.loss_fn
        is_bridge = hasattr(model, "original_model")

        def call(activation: Any, *, hook: HookPoint) -> torch.Tensor | None:
            with replaced_loss(model, loss_fn):  # a hook may run the model
                return self._call(activation, hook, is_bridge)

        hooks: list[tuple[Any, Any]] = [(name, call) for name in self._named.values()]
        # TransformerLens refuses a hook point that is off if it is named, not if it is filtered.
        filtered = self._hooks.keys() - self._named.keys()
        if filtered:
            hooks.append((lambda name: self._own_name(name) in filtered, call))
        # Apply the model's own loss to each run's rows.
        with replaced_loss(model, partial(self._losses, loss_fn)):
            output = model.run_with_hooks(self._tokens, fwd_hooks=hooks, **self._arguments)
        return self._split(output)

    def _own_name(self, name: str) -> str:
        return self._points[name].name or name

    def _call(self, activation: Any, hook: HookPoint, is_bridge: bool) -> torch.Tensor | None:
        """Call the runs' hooks on a hook point, each with its rows of `[run * batch, ...]`."""
        self._check_rows(activation, hook)
        # A Bridge's norm ignores in-place edits, unless a hook of some run returns a tensor.
        is_uneditable = is_bridge and f"{hook.name}".endswith(_OF_NORMS)
        # It also uses the input of a part of a block elsewhere: in another part, or as the skip.
        is_used_elsewhere = is_uneditable or (is_bridge and _IS_INPUT_OF_PART(f"{hook.name}"))
        # The model may read the activation elsewhere too, so hooks edit it in place.
        source, result = activation, None
        if activation.stride(0) == 0:  # a Bridge's positions, one row for all runs
            source = activation.clone()
            result = source.clone()
        returned: dict[int, torch.Tensor] = {}  # run -> what its last hook returned
        for run, user_hook in self._hooks[f"{hook.name}"]:
            own = slice(run * self._rows, (run + 1) * self._rows)
            rows = returned[run] if run in returned else source[own]
            point = self._points_of_runs.setdefault((run, hook.name), _RunHookPoint(hook))
            before = rows.clone() if is_uneditable else None
            edited = user_hook(rows, hook=point)
            if edited is None or edited is rows:
                edited = rows
                if before is not None and not torch.equal(before, rows):
                    raise ValueError(
                        f"a hook on {hook.name} edits in place, which a TransformerBridge ignores "
                        f"there: return a new tensor, or {_REMEDY}"
                    )
                if is_used_elsewhere and _asks_for_gradient(rows):
                    raise ValueError(
                        f"a hook on {hook.name} asks for the gradient of its activation, of which "
                        f"a batch would give only a part: {_REMEDY}"
                    )
            elif getattr(edited, "shape", None) != rows.shape or edited.dtype != rows.dtype:
                given = list(edited.shape) if isinstance(edited, torch.Tensor) else shown(edited)
                raise ValueError(
                    f"a hook on {hook.name} returned {given} for {rows.dtype} {list(rows.shape)}, "
                    f"but in a batch it must return a tensor of the same shape and dtype: return "
                    f"one, or {_REMEDY}"
                )
            # A hook may keep rows that have a gradient: they have to lead to the results.
            if edited is not rows or (rows.requires_grad and not is_used_elsewhere):
                returned[run] = edited
                result = source.clone() if result is None else result
            if result is not None:
                result[own] = edited
        return result

    def _check_rows(self, activation: Any, hook: HookPoint) -> None:
        """Refuse a hook point whose first dimension is not `run * batch`."""
        shape = tuple(getattr(activation, "shape", ()))
        n_rows = self._n_runs * self._rows
        # An expert's rows are the tokens routed to it: their number may match by chance.
        is_of_expert = ".experts." in f"{hook.name}."
        if is_of_expert or shape[:1] != (n_rows,):
            what = f"a tensor {list(shape)}" if shape else f"a {type(activation).__name__}"
            what = "rows of experts" if is_of_expert else f"{what} instead of {n_rows} rows"
            raise ValueError(
                f"{hook.name} cannot be split among {self._n_runs} runs of a batch, as it gives "
                f"{what}: {_REMEDY}"
            )

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


def _asks_for_gradient(rows: torch.Tensor) -> bool:
    """Return True if a hook called `retain_grad`, `register_hook` or `requires_grad_`."""
    is_leaf = rows.requires_grad and rows.is_leaf
    return rows.retains_grad or bool(rows._backward_hooks) or is_leaf


class _RunHookPoint:
    """A hook point as a run of a batch sees it, with its own context."""

    def __init__(self, point: HookPoint) -> None:
        self._point = point
        self.ctx = dict(point.ctx)

    def clear_context(self) -> None:
        """Forget what the run's hooks have kept here."""
        self.ctx.clear()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # a hook may ask what it was given
        return type(self._point)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._point, name)
