"""How far `tl_devicefix.estimate` is from the memory of a loaded model, in percent.

    python benchmarks/estimate.py [--n-devices 3] [--device sim|cuda] [--json FILE]

For each shape and job, a checkpoint with random weights is estimated, loaded across the devices and
run. Estimated weights are compared with the memory allocated after loading, and the estimated peak
with the allocator's. `--device sim` simulates the devices.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

BATCH, CTX, NEW = 16, 128, 32
"""Large enough for a job's peak to exceed the load's, which is estimated as an upper bound."""
JOBS: dict[str, dict[str, Any]] = {
    "forward": {},
    "caching resid_post": {"cache": "resid_post"},
    "caching all": {"cache": "all"},
    "generating": {"max_new_tokens": NEW},
    "with gradients": {"gradients": True},
}


def checkpoints(folder: Path) -> Iterator[Path]:
    """Save one checkpoint of each shape, about 20M parameters."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

    sizes = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6}
    shapes = {
        "GPT-2": GPT2Config(n_embd=384, n_layer=8, n_head=6, n_positions=256, vocab_size=8000),
        "Llama": LlamaConfig(
            **sizes,
            num_key_value_heads=2,
            intermediate_size=1024,
            vocab_size=8000,
            max_position_embeddings=256,
        ),
        "Pythia": GPTNeoXConfig(
            **sizes, intermediate_size=1536, vocab_size=8000, max_position_embeddings=256
        ),
    }
    for name, config in shapes.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        yield folder / name


def measure(directory: Path, n_devices: int, module: Any, options: dict[str, Any]) -> Any:
    """Return the bytes on each device after loading, and at the job's peak."""
    from transformer_lens import HookedTransformer

    devices = range(n_devices)
    model = HookedTransformer.from_pretrained(directory, n_devices=n_devices, device=module.device)
    loaded = [module.memory_allocated(i) for i in devices]
    for index in devices:
        module.reset_peak_memory_stats(index)
    _run(model, options)
    return loaded, [module.max_memory_allocated(i) for i in devices]


def _run(model: Any, options: dict[str, Any]) -> Any:
    """Run the job, and return what its user would hold."""
    tokens = torch.zeros(BATCH, CTX, dtype=torch.long, device=model.cfg.device)
    if "gradients" in options:
        model(tokens, return_type="loss").backward()
        model.zero_grad(set_to_none=True)
        return None
    with torch.no_grad():
        if "max_new_tokens" in options:
            return _run_with_kv_cache(model, tokens)
        wanted = options.get("cache")
        names = None if wanted == "all" else (lambda name: bool(wanted) and name.endswith(wanted))
        return model.run_with_cache(tokens, names_filter=names, return_cache_object=False)[1]


def _run_with_kv_cache(model: Any, tokens: torch.Tensor) -> Any:
    """Do what `generate` does, and return the KV cache, which `generate` does not."""
    import transformer_lens

    in_2 = getattr(transformer_lens, "HookedTransformerKeyValueCache", None)
    cls = in_2 or transformer_lens.TransformerLensKeyValueCache
    kv_cache = cls.init_cache(model.cfg, model.cfg.device, BATCH)
    for step in range(NEW + 1):
        part = tokens if step == 0 else tokens[:, :1]
        model(part, past_kv_cache=kv_cache, attention_mask=torch.ones_like(part))
    return kv_cache


class Devices:
    """The torch module of real or simulated devices, which reports their memory."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._module = torch.get_device_module(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def error(estimated: list[int], measured: list[int]) -> float:
    """Return the largest error of any device, in percent of the measured bytes."""
    return max(100 * abs(e - m) / m if m else 100.0 * bool(e) for e, m in zip(estimated, measured))


def compare(device: str, n_devices: int) -> list[dict[str, Any]]:
    """Return one row for each shape and job."""
    import tl_devicefix

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for directory in checkpoints(Path(folder)):
            for job, options in JOBS.items():
                found = tl_devicefix.estimate(
                    str(directory), n_devices, batch_size=BATCH, seq_len=CTX, **options
                ).devices
                simulated = tl_devicefix.simulate(n_devices) if device == "sim" else None
                with simulated or contextlib.nullcontext():
                    loaded, peaks = measure(directory, n_devices, Devices(device), options)
                rows.append(
                    {
                        "shape": directory.name,
                        "job": job,
                        "weights": error([d.weights for d in found], loaded),
                        "peak": error([d.peak for d in found], peaks),
                    }
                )
    return rows


def main() -> None:
    """Measure and print a table; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-devices", type=int, default=3)
    parser.add_argument("--device", default="sim", choices=("sim", "cuda"))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        rows = compare(chosen.device, chosen.n_devices)
    print(f"{'shape':8}{'job':20}{'weights':>9}{'peak':>9}   (error in %)")
    for row in rows:
        numbers = "".join(f"{row[name]:9.2f}" for name in ("weights", "peak"))
        print(f"{row['shape']:8}{row['job']:20}{numbers}")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
