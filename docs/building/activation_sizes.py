"""The size of a 70B model's saved activations: the table in docs/benchmarks.md.

python docs/building/activation_sizes.py
"""

from __future__ import annotations

D_MODEL, D_MLP, N_LAYERS, BYTES = 8192, 28672, 80, 2
SEQUENCES, POSITIONS = 8, 2048

ROWS = {
    "one layer's `resid_post`": D_MODEL,
    "the same, mean over the positions of each example (`transform`)": D_MODEL / POSITIONS,
    "one layer's `attn.hook_z`": D_MODEL,
    "one layer's `mlp.hook_post`": D_MLP,
    "`resid_post` of all layers": D_MODEL * N_LAYERS,
    "`resid_post`, `attn_out` and `mlp_out` of all layers": 3 * D_MODEL * N_LAYERS,
}
"""What is kept -> how many numbers that is for each token."""


def main() -> None:
    """Print the table."""
    print("| kept | bytes a token | 8 x 2048 tokens | a million tokens |\n|---|---|---|---|")
    for kept, numbers in ROWS.items():
        sizes = (written(numbers * BYTES * n) for n in (1, SEQUENCES * POSITIONS, 10**6))
        print("|", kept, "|", " | ".join(sizes), "|")


def written(size: float) -> str:
    """Format a number of bytes: "1.25 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 2**10:.1f} KiB" if size >= 2**10 else f"{size:.0f} bytes"


if __name__ == "__main__":
    main()
