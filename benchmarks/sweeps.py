"""Many runs that differ in their hooks: `sweep`, batches and `pipeline_map`, compared with a loop.

    python benchmarks/sweeps.py [PART ...] [--only WORD ...] [--rounds 5] [--positions 16]
                                [--bridge] [--json FILE]

Times are CPU seconds of all threads, with one thread of torch. The ways take turns in one process;
a ratio is the median of the rounds' ratios.

`hooks`: 16 runs with a hook on one residual stream each, from the first to the last of 80 blocks
of `d_model` 32. The figure is the time / that of a loop of `run_with_hooks` on the same model.

`patching`: `get_act_patch_resid_pre`, which patches each of `--positions` positions of each block
(with 80 blocks, a quarter as many). The figure is how many times as fast each way is as
TransformerLens's loop: with the patches off, or, on simulated devices, with a model of this
package. nnsight patches the transformers model.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest import mock

os.environ["TQDM_DISABLE"] = "1"  # before torch imports tqdm

import torch
from forward import FLOORS
from launch import ALONE
from layers import (
    alone,
    begin,
    in_flight,
    in_turns,
    load_quietly,
    loop,
    make_llama,
    one_hook_each,
    ratio,
    sweep,
)
from transformer_lens import patching

import tl_devicefix
from tl_devicefix.pipelining import patching as patches

Calls = dict[str, Callable[[], Any]]
Results = Iterator[tuple[str, dict[str, float]]]
"""A title, and figures by name."""


def on(n_devices: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context with simulated devices, if there are several."""
    return tl_devicefix.simulate(n_devices) if n_devices > 1 else contextlib.nullcontext()


def load_on(n_devices: int, kind: str, bridge: bool) -> Any:
    """Load a model on the CPU or on simulated devices."""
    where: dict[str, Any] = {"n_devices": n_devices} if n_devices > 1 else {"device": "cpu"}
    return load_quietly(kind, bridge, **where)


def check(are_equal: Iterable[bool]) -> None:
    """Raise if results differ."""
    if not all(are_equal):
        raise RuntimeError("the results are not equal: report it")


def hooks(arguments: argparse.Namespace) -> Results:
    """Compare `sweep` and `pipeline_map` with a loop of the same model.

    Raises:
        RuntimeError: if the results are not equal, bit for bit.
    """
    make_llama(80, 32)
    tokens, runs = torch.arange(3, 11)[None], one_hook_each(80)
    ways = {"loop": loop, "sweep": sweep, "pipeline_map": in_flight}
    for n_devices, kind in itertools.product((1, 4), ("here", "here fused")):
        title = f"80 blocks, {kind}, devices: {n_devices}"
        if not any(word in title for word in arguments.only):
            continue
        with on(n_devices):
            model = load_on(n_devices, kind, arguments.bridge)
            calls: Calls = {name: partial(way, model, tokens, runs) for name, way in ways.items()}
            results = [torch.cat(call()).cpu() for call in calls.values()]
            check(torch.equal(results[0], each) for each in results)
            took = in_turns(calls, arguments.rounds, freeze=False)  # as in a user's process
            del model, calls
        figures = {f"ms: {name}": 1000 * min(each) for name, each in took.items()}
        figures |= {f"{way} / loop": ratio(took[way], took["loop"]) for way in list(ways)[1:]}
        yield title, figures


def patched(arguments: argparse.Namespace) -> Results:
    """Measure how many times as fast as TransformerLens's loop each way is.

    Raises:
        RuntimeError: if a sweep of single runs differs at all, or another way by more than 1e-3.
    """
    for n_layers, d_model, n_devices in ((8, 64, 1), (8, 512, 1), (8, 64, 4), (80, 32, 1)):
        title = f"{n_layers} blocks of {d_model}, devices: {n_devices}"
        if not any(word in title for word in arguments.only):
            continue
        make_llama(n_layers, d_model)
        positions = arguments.positions if n_layers == 8 else arguments.positions // 4
        tokens = torch.arange(3, 3 + positions)[None]
        with on(n_devices):
            sizes = (8, 32) if n_layers == 8 else (16,)
            calls = ways_to_patch(n_devices, tokens, sizes, arguments.bridge)
            if n_layers == 8 and n_devices == 1:
                calls |= by_nnsight(tokens, n_layers)
            (floor, *others) = calls
            with alone(floor):
                expected, n_blocks = blocks_run(calls[floor])
            result, n_blocks_of_sweep = blocks_run(calls["sweep"])
            check([torch.equal(result, expected)])
            check(torch.allclose(calls[name](), expected, atol=1e-3) for name in others[1:])
            took = in_turns(calls, arguments.rounds)
            del calls
        figures = {f"ms: {floor}": 1000 * min(took[floor])}
        figures |= {"blocks that a sweep runs / the loop's": n_blocks_of_sweep / n_blocks}
        figures |= {f"x as fast: {name}": 1 / ratio(took[name], took[floor]) for name in others}
        yield title, figures


def ways_to_patch(
    n_devices: int, tokens: torch.Tensor, sizes: tuple[int, ...], bridge: bool
) -> Calls:
    """Return TransformerLens's loop, and sweeps in batches of these sizes; the last also fused."""

    def patch(model: Any, clean: Any, batch_size: int) -> torch.Tensor:
        with tl_devicefix.batch_sweeps(batch_size):
            return patching.get_act_patch_resid_pre(model, tokens, clean, metric).cpu()

    def by_loop(model: Any, clean: Any) -> torch.Tensor:
        with mock.patch.object(patches, "is_model", return_value=False):
            return patch(model, clean, 1)

    def of(kind: str) -> tuple[Any, Any]:
        model = load_on(n_devices, kind, bridge)
        return model, model.run_with_cache(tokens.flip(1))[1]

    here, fused = of("here"), of("here fused")
    if n_devices > 1:
        calls: Calls = {"a loop": partial(by_loop, *here)}
    else:
        with tl_devicefix.disabled():
            calls = {ALONE: partial(patch, *of(ALONE), 1)}
    calls["sweep"] = partial(patch, *here, 1)
    calls |= {f"in batches of {size}": partial(patch, *here, size) for size in sizes}
    calls[f"fused, in batches of {sizes[-1]}"] = partial(patch, *fused, sizes[-1])
    return calls


def metric(logits: torch.Tensor) -> torch.Tensor:
    """Return a logit difference at the last position."""
    return logits[0, -1, 5] - logits[0, -1, 7]


def blocks_run(call: Any) -> tuple[torch.Tensor, int]:
    """Return the result of a call, whose first argument is the model, and how many blocks ran."""
    cls = type(call.args[0].blocks[0])
    own, count = cls.forward, itertools.count()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        next(count)
        return own(self, *args, **kwargs)

    with mock.patch.object(cls, "forward", forward):
        return call(), next(count)


def by_nnsight(tokens: torch.Tensor, n_layers: int) -> Calls:
    """Return nnsight's ways: a trace for each patch, or for 32; {} if it is not installed."""
    try:
        from nnsight import NNsight
    except ImportError:
        print("\nleft out: nnsight is not installed")
        return {}
    plain = load_quietly(FLOORS[0], bridge=False, device="cpu")
    model = NNsight(plain)
    # The input of each block: [batch, pos, d_model]
    clean = plain(tokens.flip(1), output_hidden_states=True).hidden_states
    places = list(itertools.product(range(n_layers), range(tokens.shape[1])))

    def patch(n_rows: int) -> torch.Tensor:
        found = []
        for group in (places[at : at + n_rows] for at in range(0, len(places), n_rows)):
            with model.trace(tokens.repeat(len(group), 1), use_cache=False):
                for row, (layer, position) in enumerate(group):
                    model.model.layers[layer].input[row, position] = clean[layer][0, position]
                logits = model.lm_head.output.save()
            found += [metric(each[None]) for each in logits]
        return torch.stack(found).reshape(n_layers, -1)

    name = f"nnsight {version('nnsight')}"
    kinds = {"a trace for each patch": 1, "32 rows in each trace": 32}
    return {f"{name}, {kind}": partial(patch, n_rows) for kind, n_rows in kinds.items()}


PARTS: dict[str, Callable[[argparse.Namespace], Results]] = {"hooks": hooks, "patching": patched}


def main() -> None:
    """Measure and print tables; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--only", nargs="+", metavar="WORD", default=[""], help="in the title")
    parser.add_argument("--positions", type=int, default=16, help="for patching")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = begin(parser)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part is called {unknown.pop()}: choose from {', '.join(PARTS)}")
    results: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for part in arguments.parts or PARTS:
            for title, figures in PARTS[part](arguments):
                results[title] = figures
                print(f"\n{title}")
                for name, value in figures.items():
                    print(f"  {name:<50}{value:10.2f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
