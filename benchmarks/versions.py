"""HookedTransformer and TransformerBridge on the shipped checkpoint: how much they differ.

    python benchmarks/versions.py --python OTHER_PYTHON [--python ...] [--n-devices 4] [--json FILE]

The TransformerLens of this interpreter and of each `--python`, which needs this package too, loads
the checkpoint, folded, across simulated devices: as a HookedTransformer, or from 4.0 on as a
TransformerBridge in compatibility mode. The logits and log probabilities of 64 prompts are compared
with each other, and with those of transformers alone, in float32 and in float64. Folding centres
logits over the vocabulary, so those of transformers are centred too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


@torch.no_grad()
def measure(n_devices: int) -> dict[str, torch.Tensor]:
    """Return the logits by this interpreter's TransformerLens, under its version and class."""
    import tl_devicefix
    from tl_devicefix.demo.demo import load_checkpoint

    torch.set_num_threads(1)
    with tl_devicefix.simulate(n_devices):
        model = load_checkpoint(n_devices)
        name = f"{version('transformer_lens')} {type(model).__name__}"
        return {name: model(prompt_tokens().to(model.cfg.device)).cpu()}


def measure_with(python: str, n_devices: int) -> dict[str, torch.Tensor]:
    """Call `measure` in another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "logits.pt"
        command = [python, __file__, "--n-devices", str(n_devices), "--measure", str(there)]
        subprocess.run(command, check=True)
        logits: dict[str, torch.Tensor] = torch.load(there)
        return logits


@torch.no_grad()
def by_transformers() -> dict[str, torch.Tensor]:
    """Return the logits by transformers alone, centred over the vocabulary."""
    from transformers import AutoModelForCausalLM

    from tl_devicefix.demo.demo import CHECKPOINT

    found = {}
    for dtype in (torch.float32, torch.float64):
        logits = AutoModelForCausalLM.from_pretrained(CHECKPOINT).to(dtype)(prompt_tokens()).logits
        name = f"transformers in {str(dtype).removeprefix('torch.')}"
        found[name] = logits - logits.mean(dim=-1, keepdim=True)
    return found


def prompt_tokens() -> torch.Tensor:
    """Return the prompts' tokens, all equally long."""
    from transformers import AutoTokenizer

    from tl_devicefix.demo.demo import (
        CHECKPOINT,
        N_FACTS,
        N_PROMPTS,
        SEED,
        recall_prompts,
    )

    texts = [prompt.text for prompt in recall_prompts(N_PROMPTS, seed=SEED, n_facts=N_FACTS)]
    tokens: torch.Tensor = AutoTokenizer.from_pretrained(CHECKPOINT)(
        texts, return_tensors="pt"
    ).input_ids
    return tokens


def compare(logits: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return the largest differences of each pair."""
    rows = []
    for one, other in itertools.combinations(logits, 2):
        pair = [logits[one].double(), logits[other].double()]
        log_probs = [each.log_softmax(dim=-1) for each in pair]
        rows.append(
            {
                "one": one,
                "other": other,
                "logits": (pair[0] - pair[1]).abs().max().item(),
                "log_probs": (log_probs[0] - log_probs[1]).abs().max().item(),
            }
        )
    return rows


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], help="another interpreter")
    parser.add_argument("--n-devices", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)

    if arguments.measure:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            logits = measure(arguments.n_devices)
        torch.save(logits, arguments.measure)
        return
    logits = {}
    for python in (sys.executable, *arguments.python):
        logits |= measure_with(python, arguments.n_devices)
    logits |= by_transformers()
    rows = compare(logits)
    largest = max(each.abs().max().item() for each in logits.values())
    print(f"largest difference on {arguments.n_devices} devices, of logits up to {largest:.1f}")
    print(f"{'':<56}{'logits':>10}{'log probs':>11}")
    for row in rows:
        names = f"{row['one']} | {row['other']}"
        print(f"{names:<56}{row['logits']:10.1e}{row['log_probs']:11.1e}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
