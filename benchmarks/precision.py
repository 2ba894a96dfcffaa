"""Folding in bfloat16 and float16: the distance from the float32 model, and exact rounding.

    python benchmarks/precision.py [--python OTHER_PYTHON]... [--cache DIR] [--json FILE]

The TransformerLens of this interpreter is measured, and that of each `--python` (which needs this
package too). There are three checkpoints of the recall task: the shipped Llama, which has no
biases, and a Qwen2 (RMSNorm, value biases, grouped queries) and a Pythia (LayerNorm, biases
everywhere) that are trained here in a minute; `--cache` keeps them. Each is stored in float32 and
in the dtype that it is loaded in. A hub cache has them, so that stock TransformerLens finds them.

The first tables have the KL divergence, in nats, of the next token's distribution from that of a
reference: the same stored weights, unprocessed and in float32. Without rounding, it would be 0.
"weights" runs the rounded weights in float32, with float32 rotary tables, so that no other rounding
shows. "run" computes in the dtype too, as users do.

The last table compares each folded weight with the one that was folded in float64 and rounded once.
Stock TransformerLens rounds to the dtype first, then folds, and rounds again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from recall_checkpoints import (
    DTYPES,
    HUB_NAME,
    HUB_NAMES,
    N_FACTS,
    N_STEPS,
    SEED,
    make_checkpoints,
)

VARIANTS = ("not folded", "folded by stock", "folded here")
N_PROMPTS = 64
TOLERANCE = 1e-4
"""The largest allowed difference of float32 log probabilities from transformers' own."""


@torch.no_grad()
def measure() -> dict[str, Any]:
    """Return all figures for the TransformerLens of this interpreter."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "transformer_lens": version("transformer_lens"),
        "transformers": version("transformers"),
        "torch": version("torch"),
        "from_transformers": {},
        "kl": [],
        "exact": [],
    }
    for checkpoint, stored in HUB_NAME:
        name = HUB_NAME[checkpoint, stored]
        reference = load(name, "not folded", torch.float32)
        if stored == "float32":
            results["from_transformers"][checkpoint] = check_float32(name)
        for dtype in DTYPES if stored == "float32" else (stored,):
            row = {
                "checkpoint": checkpoint,
                "stored": stored,
                "dtype": dtype,
                "transformer_lens": results["transformer_lens"],
            }
            for variant in VARIANTS:
                kls = measure_kl(name, variant, getattr(torch, dtype), reference)
                results["kl"].append({**row, "variant": variant, **kls})
            for exactness in measure_exactness(name, getattr(torch, dtype)):
                results["exact"].append({**row, **exactness})
    return results


def load(name: str, variant: str, dtype: torch.dtype) -> Any:
    """Load a checkpoint with or without folding, by stock TransformerLens or here."""
    from transformer_lens import HookedTransformer

    import tl_devicefix

    by = tl_devicefix.enabled() if variant == "folded here" else tl_devicefix.disabled()
    with by:
        if variant == "not folded":
            return HookedTransformer.from_pretrained_no_processing(name, dtype=dtype, device="cpu")
        return HookedTransformer.from_pretrained(name, dtype=dtype, device="cpu")


def prompt_tokens() -> torch.Tensor:
    """Return the prompts' tokens, all equally long."""
    from transformers import AutoTokenizer

    from tl_devicefix.demo.demo import CHECKPOINT, recall_prompts

    texts = [prompt.text for prompt in recall_prompts(N_PROMPTS, seed=SEED, n_facts=N_FACTS)]
    tokens: torch.Tensor = AutoTokenizer.from_pretrained(CHECKPOINT)(
        texts, return_tensors="pt"
    ).input_ids
    return tokens


def check_float32(name: str) -> dict[str, float]:
    """Return each variant's largest difference of float32 log probabilities from transformers' own.

    Raises:
        RuntimeError: if one exceeds `TOLERANCE`: then another model was loaded.
    """
    from transformers import AutoModelForCausalLM

    from tl_devicefix.demo.demo import largest_difference

    tokens = prompt_tokens()
    logits = AutoModelForCausalLM.from_pretrained(name)(tokens).logits
    differences = {
        variant: largest_difference(load(name, variant, torch.float32)(tokens), logits)
        for variant in VARIANTS
    }
    if not max(differences.values()) < TOLERANCE:
        raise RuntimeError(f"{name} in float32 is not what transformers computes: {differences}")
    return differences


def measure_kl(
    name: str, variant: str, dtype: torch.dtype, reference: Any
) -> dict[str, dict[str, float]]:
    """Return the KL from the float32 reference: of the loaded model, and of its weights."""
    tokens = prompt_tokens()
    expected = reference(tokens)
    model = load(name, variant, dtype)
    as_run = divergence(expected, model(tokens))
    model.to(torch.float32)  # in TransformerLens this sets cfg.dtype as well
    assert model.cfg.dtype == torch.float32
    exact_buffers = dict(reference.named_buffers())
    for buffer_name, buffer in model.named_buffers():
        buffer.copy_(exact_buffers[buffer_name])  # rotary tables were rounded too
    return {"weights": divergence(expected, model(tokens)), "run": as_run}


def divergence(expected: torch.Tensor, logits: torch.Tensor) -> dict[str, float]:
    """Return KL(expected || logits) in nats, its mean and maximum over prompts and positions."""
    log_p = expected.double().log_softmax(dim=-1)
    log_q = logits.double().log_softmax(dim=-1)
    by_position = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    return {"mean": by_position.mean().item(), "max": by_position.max().item()}


def measure_exactness(name: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Compare the folded weights with those folded in float64 and rounded once."""
    unfolded = dict(load(name, "not folded", torch.float64).named_parameters())
    exact = {
        name: parameter
        for name, parameter in load(name, "folded here", torch.float64).named_parameters()
        if not torch.equal(parameter, unfolded[name])
    }
    for variant in VARIANTS[1:]:
        given = dict(load(name, variant, dtype).named_parameters())
        by_parameter = {name: compare(given[name], exact[name]) for name in exact}
        entries = sum(parameter.numel() for parameter in exact.values())
        different = sum(compared["different"] for compared in by_parameter.values())
        worst = max(by_parameter, key=lambda name: by_parameter[name]["ulps"])
        yield {
            "variant": variant,
            "entries": entries,
            "different": different,
            "equal": 1 - different / entries,
            "ulps": by_parameter[worst]["ulps"],
            "worst": worst,
            "parameters": by_parameter,
        }


def compare(given: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    """Count the entries that are not `exact` rounded once, and find the largest error in ulps.

    An ulp is that of the larger of the two values, so that an error at a zero is finite.
    """
    # Round by hand: torch converts float64 to 16 bits by way of float32, so it rounds twice.
    unit = last_place(exact, given.dtype)
    rounded = torch.round(exact / unit) * unit
    larger = torch.maximum(rounded.abs(), given.double().abs())
    ulps = (given.double() - rounded).abs() / last_place(larger, given.dtype)
    return {
        "entries": exact.numel(),
        "different": int((ulps != 0).sum()),
        "ulps": ulps.max().item(),
    }


def last_place(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance between neighbours in `dtype` around each of the float64 values."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.tensor(info.eps, dtype=torch.float64), exponent)


def measure_with(python: str, cache: Path) -> dict[str, Any]:
    """Return all figures for the TransformerLens of another interpreter."""
    offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "TL_DEVICEFIX_DISABLE": ""}
    child = subprocess.run(
        [python, "-W", "ignore", __file__, "--measure"],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        raise SystemExit(f"{python} failed:\n{child.stderr[-3000:]}")
    return json.loads(child.stdout.splitlines()[-1])


def show_checkpoints(records: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Print what the checkpoints learnt, and the float32 models' differences from transformers."""
    for checkpoint, record in records.items():
        figures = ", ".join(f"{name} {value:.3f}" for name, value in record.items())
        print(f"{checkpoint}, {N_STEPS} steps: {figures}")
    for run in runs:
        print(
            f"transformer_lens {run['transformer_lens']}, transformers {run['transformers']}, "
            f"torch {run['torch']}; largest difference of float32 log probabilities from "
            "transformers' own:"
        )
        for checkpoint, differences in run["from_transformers"].items():
            shown = ", ".join(f"{variant} {value:.1e}" for variant, value in differences.items())
            print(f"  {checkpoint}: {shown}")


def show_kl(rows: list[dict[str, Any]], title: str) -> None:
    """Print one table of KL divergences."""
    print(f"\nKL from float32, {title}\n{'':<47}{'weights':>16}{'run':>20}")
    print(
        f"{'checkpoint':<14} {'dtype':<9} {'variant':<15} {'TL':<7}"
        f"{'mean':>9} {'max':>9}  {'mean':>9} {'max':>9}"
    )
    for row in in_order(rows):
        weights, run = row["weights"], row["run"]
        print(
            f"{row['checkpoint']:<14} {row['dtype']:<9} {row['variant']:<15} "
            f"{row['transformer_lens']:<7}{weights['mean']:>9.1e} {weights['max']:>9.1e}  "
            f"{run['mean']:>9.1e} {run['max']:>9.1e}"
        )


def show_exactness(rows: list[dict[str, Any]]) -> None:
    """Print the table of folded weights against those folded in float64 and rounded once."""
    print("\nFolded weights that equal those folded in float64 and rounded once")
    print(
        f"{'checkpoint':<14} {'stored':<9} {'dtype':<9} {'variant':<15} {'TL':<7}"
        f"{'equal':>9} {'different':>9} {'max ulps':>9}  worst"
    )
    for row in in_order(rows):
        print(
            f"{row['checkpoint']:<14} {row['stored']:<9} {row['dtype']:<9} {row['variant']:<15} "
            f"{row['transformer_lens']:<7}{row['equal']:>9.3%} {row['different']:>9} "
            f"{row['ulps']:>9.3g}  {row['worst'] if row['different'] else '-'}"
        )


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, sorted by checkpoint, dtype and variant."""
    return sorted(
        rows,
        key=lambda row: (
            list(HUB_NAMES).index(row["checkpoint"]),
            DTYPES.index(row["dtype"]),
            row["stored"] != "float32",
            VARIANTS.index(row["variant"]),
        ),
    )


def main() -> None:
    """Measure and print the tables; write JSON if asked."""
    if sys.argv[1:] == ["--measure"]:
        with contextlib.redirect_stdout(io.StringIO()):
            results = measure()
        print(json.dumps(results))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], help="another interpreter")
    parser.add_argument("--cache", type=Path, help="keep the checkpoints here and use them again")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with contextlib.ExitStack() as stack:
        cache = arguments.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        record = cache / "trained.json"  # written last: if it is there, the cache is complete
        if not record.is_file():
            print("making the checkpoints", file=sys.stderr)
            record.write_text(json.dumps(make_checkpoints(cache)))
        records = json.loads(record.read_text())
        pythons = (sys.executable, *arguments.python)
        runs = [measure_with(python, cache.resolve()) for python in pythons]
    show_checkpoints(records, runs)
    kls = [row for run in runs for row in run["kl"]]
    show_kl([r for r in kls if r["stored"] == "float32"], "stored in float32")
    show_kl([r for r in kls if r["stored"] != "float32"], "stored in the dtype it is loaded in")
    show_exactness([row for run in runs for row in run["exact"]])
    if arguments.json:
        arguments.json.write_text(json.dumps({"trained": records, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
