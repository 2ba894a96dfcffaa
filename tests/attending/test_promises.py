"""Whatever is done to a tensor that is not built gives what its values would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tl_devicefix.attending import heads, scores
from tl_devicefix.attending.promises import build
from tl_devicefix.attending.scores import Parts

OPERATIONS = {
    "softmax": lambda x: torch.softmax(x, -1),
    "F.softmax": lambda x: torch.nn.functional.softmax(input=x, dim=-1),
    "isnan": lambda x: torch.isnan(input=x),
    "reshape": lambda x: x.reshape(-1),
    "expand": lambda x: x.expand(2, *x.shape),
    "transpose": lambda x: x.transpose(dim0=2, dim1=3),
    "where": lambda x: torch.where(condition=x > 0, input=x, other=x),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.0),
    "item": lambda x: x[0, 0, 0, 0],
    "matmul": lambda x: torch.matmul(input=x, other=x.mT),
    "to": lambda x: x.to(torch.float64, copy=True),
    "add": lambda x: x.add(x.double()),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.int),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_whatever_is_done_to_a_promise_is_done_to_its_values(operation: Any) -> None:
    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    values = q @ k.mT
    promised = (
        scores.promise(Parts(q, k, 1.0), values.clone),
        heads.promise(values),
    )
    for each in promised:
        actual, expected = operation(each), operation(values)
        assert torch.equal(build(actual), expected), type(each)
        assert actual.dtype == expected.dtype
