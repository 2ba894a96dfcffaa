"""Forward time with contiguous weights / that with the checkpoint's memory layout.

    python benchmarks/layout.py [--rounds 10] [--device cpu] [--json FILE]

Most of TransformerLens's weights are transposed views of a checkpoint's, and its forward mostly
transposes them back. With the checkpoint's layout, neither step copies. With contiguous weights, as
in stock TransformerLens, both do. Forwards of one Llama-shaped model with random weights alternate
between the two layouts in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def load_model(dtype: torch.dtype, device: str) -> Any:
    """Make the checkpoint of a Llama-shaped model of 4 layers, and load it."""
    from transformer_lens import HookedTransformer
    from transformers import LlamaConfig, LlamaForCausalLM

    import tl_devicefix  # noqa: F401

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=4, vocab_size=1000, max_position_embeddings=512,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        LlamaForCausalLM(config).to(dtype).save_pretrained(directory)
        return HookedTransformer.from_pretrained(directory, dtype=dtype, device=device)


@torch.no_grad()
def time_layouts(model: Any, n_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a forward of `n_tokens`, for each layout and round."""
    layouts = {
        "as stored": [p.data for p in model.parameters()],
        "contiguous": [p.data.contiguous() for p in model.parameters()],
    }
    tokens = torch.randint(0, model.cfg.d_vocab, (1, n_tokens), device=model.cfg.device)
    seconds: dict[str, list[float]] = {layout: [] for layout in layouts}
    for _ in range(rounds + 1):
        for layout, tensors in layouts.items():
            for parameter, tensor in zip(model.parameters(), tensors):
                parameter.data = tensor
            start = time.perf_counter()
            model(tokens).sum().item()
            seconds[layout].append(time.perf_counter() - start)
    return {layout: measured[1:] for layout, measured in seconds.items()}  # the first warms up


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    results = []
    print(f"{'dtype':<9} {'tokens':>6} {'as stored ms':>13} {'contiguous ms':>14} {'ratio':>6}")
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(dtype, arguments.device)
        for n_tokens in (1, 128):
            measured = time_layouts(model, n_tokens, arguments.rounds)
            stored, contiguous = (1000 * statistics.median(t) for t in measured.values())
            name = str(dtype).removeprefix("torch.")
            ratio = contiguous / stored
            print(f"{name:<9} {n_tokens:>6} {stored:>13.1f} {contiguous:>14.1f} {ratio:>6.2f}")
            results.append(
                {"dtype": name, "tokens": n_tokens, "as_stored_ms": stored, "ratio": ratio}
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
