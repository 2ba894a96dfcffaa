"""Print docs/surface.md: what of TransformerLens is compared across devices, and what is not.

python tests/surface/table.py > docs/surface.md
"""

from __future__ import annotations

from hooked_calls import CALLS, LEFT_OUT, NEW_IN_3


def table() -> str:
    """The page, in Markdown."""
    lines = [
        "# What is compared across devices",
        "",
        "Written by `python tests/surface/table.py`. Every public method, property and function",
        "of the classes and modules below, as found by inspection of the installed",
        "TransformerLens, is called on 1, 3 and 4 simulated devices and compared with unpatched",
        "TransformerLens on one CPU (`tests/surface/test_sweep.py`): GPT-2 (LayerNorm), Llama",
        "(RMSNorm, grouped-query attention), and on 3 devices Phi-3 (RMSNorm without), on",
        "TransformerLens 3.9.0 and 2.18.0; `patching` on 4, 4 and 3. All agree to 1e-4, or raise",
        "the same error, and lie at home, or on the CPU where they were moved there. A name that",
        "is neither here nor left out fails a test.",
        "",
        "| name | compared | TransformerLens |",
        "|---|---|---|",
    ]
    for name, cases in sorted(CALLS.items()):
        words = ", ".join(case.replace("_", " ").strip() or "plain" for case in cases)
        versions = "3.9.0" if name in NEW_IN_3 else "3.9.0, 2.18.0"
        lines.append(f"| `{name}` | {words} | {versions} |")
    lines += ["", "Left out:", "", "| name | why |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in sorted(LEFT_OUT.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
