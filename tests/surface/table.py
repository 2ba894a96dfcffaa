"""Print docs/surface.md: what of TransformerLens is compared across devices, and what is not.

python tests/surface/table.py > docs/surface.md
"""

from __future__ import annotations

from typing import Any

import bridge_calls
import hooked_calls

HOOKED = """\
# What is compared across devices

Written by `python tests/surface/table.py`. Every public method, property and function
of the classes and modules below, as found by inspection of the installed
TransformerLens, is called on several numbers of simulated devices and compared with
unpatched TransformerLens on one CPU. All agree to 1e-4, or raise the same error, and are at home,
or on the CPU where they were moved there. Over two other hosts, `pytest tests/surface --hosts`,
they are compared with this package's own model on one CPU, to 1e-6: all but gradients of weights
elsewhere, which have none, and calls that are refused. A name that is neither here nor left out
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
    hooked = _section(hooked_calls, "3.9.0", "2.18.0", hooked_calls.NEW_IN_3)
    bridge = _section(bridge_calls, "4.3.0", "3.9.0", bridge_calls.NEW_IN_4)
    return "\n".join([HOOKED, *hooked, "", BRIDGE, *bridge]) + "\n"


def _section(of: Any, new: str, old: str, in_new: frozenset[str]) -> list[str]:
    """The tables of a sweep: what is compared, what is refused over hosts, what is left out."""
    lines = ["| name | compared | TransformerLens |", "|---|---|---|"]
    for name, cases in sorted(of.CALLS.items()):
        words = ", ".join(case.replace("_", " ").strip() or "plain" for case in cases)
        versions = new if name in in_new else f"{new}, {old}"
        lines.append(f"| `{name}` | {words} | {versions} |")
    for title, reasons in (
        ("Refused over hosts", of.REFUSED_OVER_HOSTS),
        ("Left out", of.LEFT_OUT),
    ):
        lines += ["", f"{title}:", "", "| name | why |", "|---|---|"]
        for called, reason in sorted(reasons.items()):
            name, _, case = called.partition(" ")
            words = f" {case}".replace("_", " ").rstrip()
            lines.append(f"| `{name}`{words} | {reason} |")
    return lines


if __name__ == "__main__":
    print(table(), end="")
