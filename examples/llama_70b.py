"""A whole job on a 70B model across several GPUs: plan, self-check, load, cache, patch, save.

    python examples/llama_70b.py --output results.safetensors
    python examples/llama_70b.py --shipped

Prompts come in pairs that differ in names only, and so in their answer. The job looks where in the
model the answer comes from: by the logit lens, and by patching the residual stream of the clean
prompts into the corrupted ones, before every block, at every position. `--shipped` does the same
with the small checkpoint that ships with the package, on simulated devices if there are no GPUs:
try your changes this way before you queue. `llama_70b.sbatch`, beside this file, is for SLURM.

What it does is printed step by step, and is the same at each run. The first fault ends the job with
one sentence. Faults that can be known early are looked for before anything expensive runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tl_devicefix
from tl_devicefix.demo import CHECKPOINT, devices_for
from tl_devicefix.demo.selfcheck import run_selfcheck

MODEL = "meta-llama/Llama-2-70b-hf"
BATCH_SIZE = 8
"""Patched runs in one forward."""

# Clean, corrupted, the answer to each. All prompts of a set are equally long.
STORY = "When {0} and {1} went to the {3}, {2} gave a {4} to"
STORIES = [
    (STORY.format(a, b, b, place, thing), STORY.format(a, b, a, place, thing), a, b)
    for a, b, place, thing in (
        ("John", "Mary", "store", "drink"),
        ("Tom", "James", "park", "ball"),
        ("Mary", "Tom", "house", "book"),
        ("James", "John", "school", "ring"),
    )
]
FACTS = "Emma likes red . {0} likes {2} . {1} likes {3} . Paul likes gold . {4} likes"
RECALL = [
    (FACTS.format(a, b, of_a, of_b, a), FACTS.format(b, a, of_a, of_b, a), of_a, of_b)
    for a, b, of_a, of_b in (
        ("Bob", "Iris", "blue", "green"),
        ("Jack", "Mary", "pink", "white"),
        ("Leo", "Zoe", "black", "orange"),
        ("Dan", "Eva", "brown", "cyan"),
    )
]


def main() -> None:
    """Do the job."""
    options = arguments()
    prompts = RECALL if options.shipped else STORIES
    plan(options)
    selfcheck()
    with torch.no_grad(), devices_for(options.n_devices) as where:
        if not options.shipped and "simulated" in where:
            raise SystemExit(where + " For a model of this size that is no use: see --shipped.")
        model = load(options)
        results = run(model, prompts)
        words, devices = model.to_str_tokens(prompts[0][0]), devices_of(model)
        save(results, options, {"words": json.dumps(words), "on": json.dumps(devices)})


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL, help="name or directory; default: %(default)s")
    parser.add_argument("--n-devices", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("llama_70b.safetensors"))
    parser.add_argument(
        "--shipped",
        action="store_true",
        help="the shipped checkpoint in float32, on simulated devices where there are no GPUs",
    )
    options = parser.parse_args()
    if options.shipped:
        options.model, options.dtype = str(CHECKPOINT), "float32"
        torch.set_num_threads(1)  # so small a model is slower with more
    if not options.output.resolve().parent.is_dir():
        parser.error(f"--output: there is no directory {options.output.parent}")
    return options


def step(number: int, text: str) -> None:
    """Print what comes next, and flush, so that it shows at once in a file too."""
    print(f"\n[{number}/6] {text}", flush=True)


def plan(options: argparse.Namespace) -> None:
    """End here if the job would not fit, before a weight is read."""
    step(1, f"plan: does it fit on {options.n_devices} devices?")
    gpus = range(min(torch.cuda.device_count(), options.n_devices))
    free: Any = {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in gpus}
    estimate = tl_devicefix.estimate(
        options.model,
        options.n_devices,
        dtype=options.dtype,
        max_memory=free or "80GiB",
        batch_size=BATCH_SIZE * len(STORIES),
        seq_len=32,
        cache="resid_pre,resid_post",
    )
    print(str(estimate).replace(str(CHECKPOINT), "the shipped checkpoint"))
    if not estimate.fits:
        raise SystemExit("the job does not fit: see what would, above")


def selfcheck() -> None:
    """End here if this machine's devices corrupt what is copied between them."""
    step(2, "self-check: may this machine be trusted?")
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            is_good = run_selfcheck()
    except ValueError as error:  # without accelerators
        print(error)
        return
    if not is_good:
        raise SystemExit(f"{printed.getvalue()}\nthe self-check has failed")
    print(printed.getvalue().splitlines()[-1])


def load(options: argparse.Namespace) -> Any:
    """Load the model across the devices, folded and checked."""
    step(3, "load")
    dtype = getattr(torch, options.dtype)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the checkpoint, as step 1 does
        model = load_model(options.model, options.n_devices, dtype)
    print(model.placement)
    report = tl_devicefix.check(model)
    if not report:
        raise SystemExit(f"the loaded model has faults:\n{report}")
    return model


def load_model(name: str, n_devices: int, dtype: torch.dtype) -> Any:
    """Load by the class that the installed TransformerLens has for it."""
    try:
        from transformer_lens import HookedTransformer
    except ImportError:  # TransformerLens 4
        from transformer_lens.model_bridge import TransformerBridge

        bridge = TransformerBridge.boot_transformers(name, n_devices=n_devices, dtype=dtype)
        bridge.enable_compatibility_mode()
        return bridge
    return HookedTransformer.from_pretrained(name, n_devices=n_devices, dtype=dtype)


def one_token(model: Any, word: str) -> int:
    """The token of a word as it is inside a text."""
    tokens = model.to_tokens(f". {word}")[0].tolist()
    if len(tokens) != model.to_tokens(".").shape[1] + 1:
        raise SystemExit(f"{word!r} is not one token for this model: choose other prompts")
    return int(tokens[-1])


def run(model: Any, prompts: list[tuple[str, str, str, str]]) -> dict[str, torch.Tensor]:
    """Cache the clean prompts, and patch them into the corrupted ones."""
    step(4, f"cache: {len(prompts)} clean prompts")
    clean, corrupted, right, wrong = map(list, zip(*prompts))
    clean_tokens, corrupted_tokens = model.to_tokens(clean), model.to_tokens(corrupted)
    if clean_tokens.shape != corrupted_tokens.shape:
        raise SystemExit("clean and corrupted prompts are not equally long, in tokens")
    answers = torch.tensor([[one_token(model, a) for a in pair] for pair in zip(right, wrong)])

    def difference(logits: torch.Tensor) -> torch.Tensor:
        """By how much the answer's logit is above the other's, for each prompt."""
        final = logits[:, -1].float()
        both = final.gather(1, answers.to(final.device))
        return both[:, 0] - both[:, 1]

    logits, cache = model.run_with_cache(
        clean_tokens, names_filter=lambda name: name.endswith(("resid_pre", "resid_post"))
    )
    high, low = difference(logits), difference(model(corrupted_tokens))
    print(f"logit difference, clean {high.mean():.2f}, corrupted {low.mean():.2f}")
    if not high.mean() > low.mean():
        raise SystemExit("the model does not tell the clean from the corrupted prompts")

    streams, labels = cache.accumulated_resid(apply_ln=True, pos_slice=-1, return_labels=True)
    lens = torch.stack([difference((stream @ model.W_U)[:, None]).mean() for stream in streams])
    first = int((lens > high.mean() / 2).int().argmax())
    print(f"logit lens: half of the difference is reached at {labels[first]}")

    n_layers, length = model.cfg.n_layers, clean_tokens.shape[1]
    step(5, f"patch the residual stream: {n_layers} layers at {length} positions")
    recovered = torch.zeros(n_layers, length)
    runs = (patch(cache, layer, at) for layer in range(n_layers) for at in range(length))
    # Each batch of runs starts at the block that it patches.
    swept = tl_devicefix.sweep(model, corrupted_tokens, runs, batch_size=BATCH_SIZE)
    for layer in range(n_layers):
        for position in range(length):
            patched = difference(next(swept))
            recovered[layer, position] = ((patched - low) / (high - low)).mean()
        best = int(recovered[layer].argmax())
        device = model.placement.device_of(f"blocks.{layer}")
        most = f"{recovered[layer, best]:.2f} of the difference by patching position {best}"
        print(f"before layer {layer:2}, on {device}: {most}", flush=True)
    last = torch.stack([cache["resid_post", layer][:, -1] for layer in range(n_layers)])
    return {"recovered": recovered, "logit_lens": lens, "resid_post_at_the_end": last}


def patch(cache: Any, layer: int, position: int) -> list[tuple[str, Any]]:
    """Return one run's hook: it replaces one position of the residual stream with the clean one."""
    name = f"blocks.{layer}.hook_resid_pre"
    clean = cache[name][:, position]  # read once, because each read is a copy

    def put_clean(resid: torch.Tensor, hook: Any) -> torch.Tensor:
        resid = resid.clone()
        resid[:, position] = clean
        return resid

    return [(name, put_clean)]


def devices_of(model: Any) -> list[str]:
    """The device of each block."""
    return [str(model.placement.device_of(f"blocks.{i}")) for i in range(model.cfg.n_layers)]


def save(
    results: dict[str, torch.Tensor], options: argparse.Namespace, metadata: dict[str, str]
) -> None:
    """Write the results."""
    step(6, "save")
    on_cpu = {name: result.cpu().contiguous() for name, result in results.items()}
    for name, result in on_cpu.items():
        if not result.isfinite().all():
            raise SystemExit(f"{name} is not finite")
        print(f"{name} {list(result.shape)} {result.dtype}")
    model = "the shipped checkpoint" if options.shipped else options.model
    save_file(on_cpu, options.output, {**metadata, "model": model, "dtype": options.dtype})
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
