"""`estimate` by a name: a HookedTransformer, or with TransformerLens 4 a Bridge."""

from __future__ import annotations

from typing import Any

import pytest

from tl_devicefix import estimate
from tl_devicefix.__main__ import main


def test_gradients_take_those_of_the_weights_and_more() -> None:
    plain, with_gradients = estimate("gpt2"), estimate("gpt2", gradients=True)
    weights = plain.devices[0].weights
    assert plain.devices[0].working < weights < with_gradients.devices[0].working


@pytest.mark.parametrize("where", ["cpu", 1])
def test_gathering_takes_the_largest_stack_there(where: str | int) -> None:
    found = estimate("gpt2", 2, gather=where, ctx=8)
    gathered = {each.device: each.gathered for each in found.devices if each.gathered}
    assert gathered == {str(where): 12 * 768 * 3072 * 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "resid_pots"}, "names 'resid_pots', which is no hook .* 'resid_post'"),
        ({"ctx": 1000, "generate": 100}, "1100 tokens are more than the model's n_ctx of 1024"),
    ],
)
def test_arguments_that_do_not_fit_the_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate("gpt2", **{"ctx": 8, **options})


def test_an_argument_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match="no argument 'frist_n_layers'"):
        estimate("gpt2", frist_n_layers=2)


def test_the_command_prints_the_table_and_whether_it_fits(capsys: Any) -> None:
    status = main(["plan", "gpt2", "--n-devices", "2", "--cache", "resid_post"])
    assert status == 0
    assert capsys.readouterr().out.rstrip().endswith("It fits.")
