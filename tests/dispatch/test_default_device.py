"""`torch.set_default_device` of another device than home changes no result and no device."""

import pytest
import torch
from comparison import assert_agrees
from devices import device
from hf_models import padded
from model_classes import BRIDGE, HOOKED
from runs_of_users import double

import tl_devicefix

RESID = "blocks.3.hook_resid_post"


CALLS = {
    "a padded forward": lambda model, x: model(x, attention_mask=padded(x)),
    "a hook": lambda model, x: model.run_with_hooks(x, fwd_hooks=[(RESID, double)]),
    "a cache": lambda model, x: model.run_with_cache(x)[1].accumulated_resid(layer=3),
    "generated": lambda model, x: model.generate(
        x[:1], max_new_tokens=3, do_sample=False, verbose=False
    ),
    "a sweep": lambda model, x: next(tl_devicefix.sweep(model, x, [[(RESID, double)]])),
}


@pytest.mark.parametrize(
    ("model_class", "kind"),
    [(HOOKED, "llama"), (BRIDGE, "llama"), (BRIDGE, "gpt2")],  # whose projection is fused
)
def test_another_default_device_changes_no_result_or_device(kind, load, on_one, machine, tokens):
    expected = {name: call(on_one(kind), tokens) for name, call in CALLS.items()}
    with torch.device(device(1)):
        model = load(kind, n_devices=4)
        results = {name: call(model, tokens.to(device(0))) for name, call in CALLS.items()}
    for name, result in results.items():
        assert str(result.device) == device(0), name
        assert_agrees(result, expected[name])


def test_save_activations_takes_batches_on_the_models_device(load, machine, tokens, tmp_path):
    with torch.device(device(1)):
        model = load("llama", device=device(0))
        batches = [{"tokens": tokens.to(device(0)), "attention_mask": padded(tokens).to(device(0))}]
        options = {"directory": tmp_path, "progress": False}
        saved = tl_devicefix.save_activations(model, batches, [RESID], **options)
    assert len(saved) == len(tokens)
