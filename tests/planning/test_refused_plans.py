"""Arguments that make no sense are refused in a sentence, by each call."""

import pytest
import transformers
from by_name import CONFIG

from tl_devicefix import dry_run, estimate, plan
from tl_devicefix.__main__ import main
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer


def estimated(model="gpt2", **options):
    return estimate(model, seq_len=8, **options)


def dry(model="gpt2", **options):
    return dry_run(model, id, **options)


REFUSED = [
    (lambda: dry(cls=dict), "cls must be .*, but is"),
    (lambda: dry_run("gpt2", "hello"), "^run must be a function of the model, .* but is 'hello'$"),
    (lambda: estimated(device="cuda"), "^estimate has no argument 'device', since .* n_devices$"),
    (lambda: estimated(cache=","), "cache must be 'all' or names .*, but is ','$"),
    (lambda: estimated(cache="resid_pots"), "'resid_pots', but .* no such hook.* 'resid_post'"),
    (lambda: dry(CONFIG, device_map="cpu"), "^embed, .* would run on the CPU, whose memory"),
    (lambda: estimated(CONFIG, device_map={"": "cpu", "blocks.1": 0}), r"blocks.0, 2-\d, .* CPU"),
    (lambda: estimate("gpt2", seq_len=1000, max_new_tokens=100), "are 1100 tokens .* of 1024"),
    (
        lambda: estimated(CONFIG, n_device=4),
        r"^estimate has .*'n_device'.* mean 'n_devices'\?",
    ),
]

if has_hooked_transformer():
    from transformer_lens import HookedTransformerConfig

    CFG = HookedTransformerConfig(
        n_layers=1, d_model=8, n_ctx=8, d_head=4, d_vocab=9, act_fn="relu"
    )
    TOO_MANY = "n_devices must be an int from 1 to 64, but is"
    REFUSED += [
        (lambda: estimated(CFG, n_ctx=4), "no argument 'n_ctx' for a config, which has"),
        (lambda: estimated(batch_size=0), "batch_size must be an int of 1 or more, but is 0"),
        (lambda: estimated(n_devices=0), f"{TOO_MANY} 0"),
        (lambda: estimated(cache=""), "but is ''"),
        (lambda: estimated(cache=3), "cache must be 'all' or names"),
        (lambda: estimated(cache=[3]), "cache='3' names '3', but this model has no such hook"),
        (lambda: estimated(max_memory="36Gb"), "^max_memory must be .*, but is '36Gb'"),
        (lambda: estimate(None), "^a NoneType is neither a model's name"),
        (lambda: plan(CFG, max_memory=20), r"^the weights do not fit: .* has 20 bytes to use"),
    ]
else:
    REFUSED += [
        (lambda: dry(CONFIG, n_ctxt=4), "'n_ctxt' for a TransformerBridge; did you mean 'n_ctx'"),
    ]

if has_bridge():
    from transformer_lens.model_bridge import TransformerBridge

    boot = TransformerBridge.boot_transformers
    REFUSED += [
        (lambda: boot("gpt2", n_device=4), r"no argument 'n_device'; did you mean 'n_devices'\?$"),
        (lambda: estimate(transformers.MambaConfig(), n_ctx=64), "^n_ctx=64 cannot be applied"),
        (lambda: boot("gpt2", bogus=True), "^boot_transformers has no argument 'bogus'$"),
    ]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_planning_refuses_bad_arguments(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_n_ctx_beyond_learned_positions_is_refused(checkpoints):
    for n_ctx in (64, 2048):
        with pytest.raises(ValueError, match=f"n_ctx is {n_ctx}, but this model has"):
            estimate(str(checkpoints("gpt2")), n_ctx=n_ctx)


@pytest.mark.hooked
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nosuchmodel", "TransformerLens lists no model 'nosuchmodel'"),
        ("./no_such", "there is no directory './no_such'"),
        ("gpt2 --seq-len 4096", "more than the model's n_ctx of 1024: lower them, or, unless its"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message, capsys):
    assert main(["estimate", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
