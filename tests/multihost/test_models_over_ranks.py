"""A model whose blocks are half another process's gives, bit for bit, what it gives in one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hf_models import N_LAYERS, padded
from ranks import devices_of
from torch.utils._pytree import tree_leaves
from written_by_hand import files

import tl_devicefix
from tl_devicefix import save_activations
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.multihost.init_hosts import Ranks

GREEDY = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "verbose": False}
FAR_BLOCK = N_LAYERS - 1


def steered(model: Any, tokens: torch.Tensor) -> Any:
    def steer(value: torch.Tensor, hook: Any) -> torch.Tensor:
        return value + torch.arange(value.shape[-1], device=value.device) / 10

    name = f"blocks.{FAR_BLOCK}.hook_resid_pre"
    return model.run_with_hooks(tokens, fwd_hooks=[(name, steer)])


def zeroed_in_place(model: Any, tokens: torch.Tensor) -> Any:
    def zero(value: torch.Tensor, hook: Any) -> None:
        value[:, :, 0] = 0

    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{FAR_BLOCK}.attn.hook_z", zero)])


def cached(model: Any, tokens: torch.Tensor) -> Any:
    logits, cache = model.run_with_cache(tokens)
    return logits, dict(cache)


def gradients(model: Any, tokens: torch.Tensor) -> Any:
    grads: list[torch.Tensor] = []
    with model.hooks(bwd_hooks=[(f"blocks.{FAR_BLOCK}.hook_resid_pre", _keep(grads))]):
        loss = model(tokens, return_type="loss")
        weights = [item for item in model.parameters() if item.requires_grad]
        result = torch.autograd.grad(loss, weights, allow_unused=True)
    return loss, result, grads


def _keep(grads: list[torch.Tensor]) -> Callable[..., None]:
    return lambda grad, hook: grads.append(grad.detach().clone())


def without_gradients(model: Any, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(tokens, return_type="both")


def with_a_mask(model: Any, tokens: torch.Tensor) -> Any:
    with torch.inference_mode():
        return model(tokens, attention_mask=padded(tokens))


def read(model: Any, tokens: torch.Tensor) -> Any:
    return model.W_O, model.QK.eigenvalues, model.all_composition_scores("Q")


def generated(model: Any, tokens: torch.Tensor) -> Any:
    return model.generate(tokens, **GREEDY)


def with_sdpa(model: Any, tokens: torch.Tensor) -> Any:
    with tl_devicefix.set_attn_implementation(model, "sdpa"), torch.no_grad():
        return model(tokens), model.generate(tokens, **GREEDY)


STOP = N_LAYERS - 1  # after the last one, a Bridge goes on to what is behind the blocks
POINTS = ["blocks.0.hook_resid_post", f"blocks.{STOP - 1}.hook_resid_post"]
SAVINGS: list[dict[str, Any]] = [
    {"stop_at_layer": STOP},
    # None of a shard's tokens.
    {"token_mask": lambda tokens: (tokens == tokens[0, 0]) & (tokens[0, 0] % 2 == 0)},
    {"transform": {POINTS[0]: lambda activation: activation.half()}},
]


def saved(model: Any, tokens: torch.Tensor) -> Any:
    """The bytes of all files."""
    batches = [tokens.roll(shift, 1) for shift in range(5)]
    with TemporaryDirectory() as directory:
        result = []
        for number, options in enumerate(SAVINGS):
            options = {"directory": Path(directory, str(number)), "shard_size": 6000, **options}
            activations = save_activations(model, batches, POINTS, progress=False, **options)
            assert len(activations.index.shards) > 1
            assert activations.verify() == []
            result.append(files(activations.directory))
    return result


RUNS = [
    *(
        steered,
        zeroed_in_place,
        cached,
        gradients,
        without_gradients,
        with_a_mask,
        generated,
        with_sdpa,
        saved,
    ),
    *([read] if has_hooked_transformer() else []),
]

EQUAL = {"rtol": 0, "atol": 0}
CLOSE = {
    # SDPA of simulated devices is another kernel than the CPU's, if there is a bias.
    with_sdpa: {"rtol": 0, "atol": 1e-5}
}


def at_home(result: Any) -> list[Any]:
    return [
        item.detach().cpu() if isinstance(item, torch.Tensor) else item
        for item in tree_leaves(result)
    ]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def both(
    request: pytest.FixtureRequest, ranks: Ranks, load_over_entered: Any, tokens: torch.Tensor
) -> Iterator[tuple[Any, dict[str, list[Any]]]]:
    """A model over four devices of two processes, and what each run gives in one process."""
    with tl_devicefix.simulate(4):
        model = load_over_entered(request.param)
        expected = {run.__name__: at_home(run(model, tokens.to("sim:0"))) for run in RUNS}
    with ranks.entered(devices_of(ranks, ["4GiB"] * 4)):
        yield load_over_entered(request.param), expected


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_the_same_bits(run: Any, both: Any, tokens: torch.Tensor) -> None:
    model, expected = both

    actual = at_home(run(model, tokens.to("sim:0")))

    assert len(actual) == len(expected[run.__name__])
    for one, other in zip(actual, expected[run.__name__]):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, **CLOSE.get(run, EQUAL), equal_nan=True)
        else:
            assert one == other


@pytest.mark.skipif(
    not has_hooked_transformer(), reason="a Bridge keeps what has a graph, and cannot be copied"
)
def test_an_optimizer_changes_weights_where_they_are(both: Any, tokens: torch.Tensor) -> None:
    def trained(model: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens, return_type="loss").backward()
            optimizer.step()
        return at_home(list(model.parameters()))

    model, _ = both
    for one, other in zip(trained(model), trained(copy.deepcopy(model).to("cpu"))):
        torch.testing.assert_close(one, other, **EQUAL)
