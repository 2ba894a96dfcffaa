"""`estimate` by a name: a HookedTransformer, or with TransformerLens 4 a Bridge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import N_CTX

from tl_devicefix import estimate, simulate
from tl_devicefix.__main__ import main
from tl_devicefix.monkeypatch.versions import has_hooked_transformer
from tl_devicefix.planning.usage import Job

# A Bridge is estimated with an unembedding of its own, but booted with a tied one.
TIED = ["gpt2"] if has_hooked_transformer() else []


def kept(model: Any, job: Job) -> Any:
    tokens = torch.zeros(job.batch_size, job.seq_len, dtype=torch.long, device=model.cfg.device)
    with torch.no_grad():
        return model.run_with_cache(
            tokens, names_filter=job.keeps, return_type="logits", return_cache_object=False
        )[1]


@pytest.mark.cover(("name", "cache"))
@pytest.mark.parametrize("n_devices", [1, 3])
@pytest.mark.parametrize("cache", ["all", "resid_post,z", None])
@pytest.mark.parametrize("name", ["llama", "pythia", *TIED])
def test_it_is_what_a_loaded_model_takes(
    name: str, cache: str | None, n_devices: int, loaded: Any
) -> None:
    """Within 5% for weights and caches, and 15% for the peak."""
    devices, job = range(n_devices), Job(batch_size=4, seq_len=N_CTX // 2, cache=cache)
    with simulate(n_devices) as machine:
        model, config = loaded(name, n_devices)
        weights = [machine.memory_allocated(index) for index in devices]
        for index in devices:
            machine.reset_peak_memory_stats(index)
        cached = kept(model, job)
        peaks = [machine.max_memory_allocated(index) for index in devices]
        held = [machine.memory_allocated(i) - weights[i] for i in devices]
        del cached, model

    result = estimate(
        config, n_devices, batch_size=job.batch_size, seq_len=job.seq_len, cache=cache
    )

    assert [d.weights + d.buffers for d in result.devices] == pytest.approx(weights, rel=0.05)
    assert [d.cached for d in result.devices] == pytest.approx(held, rel=0.05)
    running = [d.weights + d.buffers + d.cached + d.working for d in result.devices]
    assert running == pytest.approx(peaks, rel=0.15)


def test_gradients_take_those_of_the_weights_and_more() -> None:
    plain, with_gradients = estimate("gpt2"), estimate("gpt2", gradients=True)
    weights = plain.devices[0].weights
    assert plain.devices[0].working < weights < with_gradients.devices[0].working


@pytest.mark.parametrize("where", ["cpu", 1])
def test_gathering_takes_the_largest_stack_there(where: str | int) -> None:
    result = estimate("gpt2", 2, gather=where, seq_len=8)
    gathered = {item.device: item.gathered for item in result.devices if item.gathered}
    assert gathered == {str(where): 12 * 768 * 3072 * 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"cache": "resid_pots"},
            "'resid_pots', but .* has no such hook.* 'resid_post'",
        ),
        (
            {"seq_len": 1000, "max_new_tokens": 100},
            "are 1100 tokens together, more than the model's n_ctx of 1024",
        ),
    ],
)
def test_arguments_that_do_not_fit_the_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate("gpt2", **{"seq_len": 8, **options})


def test_the_command_prints_the_table_and_whether_it_fits(capsys: Any) -> None:
    status = main(["estimate", "gpt2", "--n-devices", "2", "--cache", "resid_post"])
    assert status == 0
    assert capsys.readouterr().out.rstrip().endswith("It fits into 80.00 GiB a device.")


def test_the_command_takes_a_longer_context(capsys: Any, checkpoints: Any) -> None:
    longer = ["estimate", str(checkpoints("llama")), "--seq-len", "1100"]
    assert main(longer) == 1
    assert main([*longer, "--n-ctx", "2048"]) == 0
    assert "1100 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("n_ctx", [64, 2048])
def test_learnt_positions_are_as_many_as_they_are(n_ctx: int, checkpoints: Any) -> None:
    with pytest.raises(ValueError, match=f"n_ctx is {n_ctx}, but this model has"):
        estimate(str(checkpoints("gpt2")), n_ctx=n_ctx)
