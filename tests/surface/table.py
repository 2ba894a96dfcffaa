"""Print docs/surface.md: what of TransformerLens is compared across devices, and what is not.

python tests/surface/table.py > docs/surface.md
"""

from __future__ import annotations

import bridge_calls
import hooked_calls
from registry import Calls

HOOKED = """\
# What is compared across devices

Written by `python tests/surface/table.py`. Every public method, property and function
of the classes and modules below, as found by inspection of the installed
TransformerLens, is called on several numbers of simulated devices and compared with
unpatched TransformerLens on one CPU. All agree to 1e-4, or raise the same error, and are at home,
or on the CPU where they were moved there. Over hosts,
`pytest tests/surface --hosts`, they are compared with this package's own model
on one CPU instead. A name that is neither here nor left out
fails a test. By default a part runs: each call with one model, and each model on each number
of devices; `pytest --full` runs all.

## HookedTransformer

`tests/surface/test_sweep.py`: GPT-2 (LayerNorm) and Llama (RMSNorm, grouped-query attention) on
1, 3 and 4 devices, and on 3 Phi-3 (RMSNorm without), on TransformerLens 3.9.0 and 2.18.0;
`patching` on 4, 4 and 3.
"""

BRIDGE = """\
## TransformerBridge

`tests/surface/test_bridge_sweep.py`, on TransformerLens 4.3.0: GPT-2 (LayerNorm, tied
embeddings) on 3 devices and Llama (RMSNorm, grouped-query attention) on 1 and 4, in
compatibility mode, and Llama as booted on 3; `patching` with Llama on 4. On 3.9.0, with
`--full`, GPT-2 on 3, and `JacobianLens`, less `occupancy`, which draws on the device, with Llama.
Tokens are handed over at home; `ioi_eval`, which hands them over on the CPU, does without one
device. As TransformerLens says, a Bridge over several devices stays there: `to(device)` and `cpu`
warn and move nothing.
"""


def table() -> str:
    """The page, in Markdown."""
    hooked = _section(
        hooked_calls.CALLS, hooked_calls.LEFT_OUT, "3.9.0", "2.18.0", hooked_calls.NEW_IN_3
    )
    bridge = _section(
        bridge_calls.CALLS, bridge_calls.LEFT_OUT, "4.3.0", "3.9.0", bridge_calls.NEW_IN_4
    )
    return "\n".join([HOOKED, *hooked, "", BRIDGE, *bridge]) + "\n"


def _section(
    calls: Calls, left_out: dict[str, str], new: str, old: str, in_new: frozenset[str]
) -> list[str]:
    """The two tables of a sweep: what is compared, and what is left out."""
    lines = ["| name | compared | TransformerLens |", "|---|---|---|"]
    for name, cases in sorted(calls.items()):
        words = ", ".join(case.replace("_", " ").strip() or "plain" for case in cases)
        versions = new if name in in_new else f"{new}, {old}"
        lines.append(f"| `{name}` | {words} | {versions} |")
    lines += ["", "Left out:", "", "| name | why |", "|---|---|"]
    return lines + [f"| `{name}` | {reason} |" for name, reason in sorted(left_out.items())]


if __name__ == "__main__":
    print(table(), end="")
