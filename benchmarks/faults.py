"""TransformerLens's own faults: its errors compared with transformers, on tiny random models.

    python benchmarks/faults.py [--python OTHER_PYTHON ...]

It prints a table for the TransformerLens of this interpreter and of each `--python`, which needs
this package too. Each row is a fault, with the error of TransformerLens as installed, and with this
package:

- the largest difference of log probabilities, divided by the largest log probability;
- for gradients, the largest difference, divided by the largest gradient;
- for `generate`, the share of tokens that differ.

All are in float32, where rounding gives up to 1e-6.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from hf_models import (
    D_MODEL,
    GROUPED,
    HF_CONFIGS,
    N_LAYERS,
    make_hf_model,
    make_tokenizer,
    save_checkpoint,
)

import tl_devicefix
from tl_devicefix.monkeypatch.applying import is_enabled
from tl_devicefix.monkeypatch.versions import has_bridge, has_hooked_transformer, installed

BASE = 1e6
N_NEW = 8
LAYER = 2
TOKENS = torch.randint(3, 40, (2, 24), generator=torch.Generator().manual_seed(0))
ADDED = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(1))


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, divided by the largest entry."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    """Return log probabilities, computed in float64 so that only the models round."""
    return logits.double().log_softmax(dim=-1)


class Checkpoint:
    """A tiny checkpoint, and its transformers model. `edit` changes the saved config.json."""

    def __init__(self, config: Any, directory: Path, edit: Any = None) -> None:
        self.directory, self.tokenizer = str(directory), make_tokenizer(directory)
        self.hf_model = make_hf_model(config, torch.float32)
        self.hf_model.set_attn_implementation("eager")
        save_checkpoint(self.hf_model, self.tokenizer, directory)
        if edit is not None:
            file = directory / "config.json"
            file.write_text(json.dumps(edit(json.loads(file.read_text()))))

    def hooked_transformer(self, name: str, official_name: str) -> Any:
        """Load it by its directory; TransformerLens alone takes official names only."""
        from architectures import OFFICIAL_NAMES, SIZES_BY_NAME, load_hooked
        from transformer_lens import HookedTransformer

        if is_enabled():
            return HookedTransformer.from_pretrained(self.directory, device="cpu")
        read = transformers.AutoModelForCausalLM.from_pretrained(self.directory)
        sizes = {**SIZES_BY_NAME.get(name, {})}
        sizes.pop("act_fn", None)  # the tests' value would hide the fault
        with (
            mock.patch.dict(OFFICIAL_NAMES, {name: official_name}),
            mock.patch.dict(SIZES_BY_NAME, {name: sizes}),
            mock.patch.dict(HF_CONFIGS, {name: lambda: read.config}),
        ):
            return load_hooked(name, read, self.tokenizer, device="cpu")

    def bridge(self) -> Any:
        """Boot a TransformerBridge with the old hook names, and without folding."""
        from transformer_lens.model_bridge import TransformerBridge

        bridge = TransformerBridge.boot_transformers(self.directory, device="cpu")
        bridge.enable_compatibility_mode(no_processing=True)
        return bridge


def logits_of(
    name: str,
    official_name: str,
    directory: Path,
    config: Callable[[], Any] | None = None,
    edit: Any = None,
) -> float:
    """Return the error of a HookedTransformer's logits, loaded with default processing."""
    checkpoint = Checkpoint((config or HF_CONFIGS[name])(), directory, edit)
    logits = checkpoint.hooked_transformer(name, official_name)(TOKENS)
    return difference(log_probs(logits), log_probs(checkpoint.hf_model(TOKENS).logits))


def changed(name: str, **settings: Any) -> Any:
    """Return a tiny config with other settings."""
    config = HF_CONFIGS[name]()
    for setting, value in settings.items():
        setattr(config, setting, value)
    return config


def yarn_qwen2() -> Any:
    """Return a tiny Qwen2's config with rotary frequencies scaled for four times its context."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    return changed("qwen2", rope_scaling=scaling, rope_parameters={**scaling, "rope_theta": 1e4})


def stretched_gemma3() -> Any:
    """Return a config like Gemma 3's from 4B on: global layers divide positions by 8."""
    config = HF_CONFIGS["gemma-3"]()
    stretched = {"rope_type": "linear", "factor": 8.0}
    if hasattr(config, "rope_parameters"):
        stretched["rope_theta"] = BASE
        config.rope_parameters = {**config.rope_parameters, "full_attention": stretched}
    else:
        config.rope_scaling = stretched
    return config


def with_other_base(config_class: Any) -> Any:
    """Return a config with a rotary base that is not the default."""
    return config_class(**GROUPED, rope_theta=BASE)


def as_transformers_5_saves(fields: dict[str, Any]) -> dict[str, Any]:
    """Keep the rotary base where transformers 4 does not look."""
    fields.pop("rope_theta", None)
    return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": BASE}}


def bloom_of_six_heads() -> Any:
    """Return a config whose number of heads is no power of two, like BLOOM-176B's 112."""
    return transformers.BloomConfig(hidden_size=24, n_layer=N_LAYERS, n_head=6, vocab_size=40)


def generate_texts(padded: bool, directory: Path) -> float:
    """Return the error of tokens generated for texts of 1 to 8 words, or for padded tokens."""
    checkpoint = Checkpoint(HF_CONFIGS["llama"](), directory)
    model = checkpoint.hooked_transformer("llama", "01-ai/Yi-6B")
    texts = [" ".join(f"w{7 + 3 * n + i}" for i in range(n)) for n in range(1, 9)]
    prompts: Any = model.to_tokens(texts, padding_side="left") if padded else texts
    options = {"max_new_tokens": N_NEW, "do_sample": False}
    found = model.generate(
        prompts, padding_side="left", stop_at_eos=False, verbose=False, **options
    )
    shares = []
    for text, ours in zip(texts, found):
        alone = checkpoint.tokenizer(f"<bos> {text}", return_tensors="pt").input_ids
        expected = checkpoint.hf_model.generate(alone, **options, eos_token_id=None)
        tokens = ours[None] if padded else checkpoint.tokenizer(ours, return_tensors="pt").input_ids
        shares.append(_share_of_others(tokens[0, -N_NEW:], expected[0, -N_NEW:]))
    return sum(shares) / len(shares)


def generate_with_state(name: str, directory: Path) -> float:
    """Return the error of tokens that a state space model's Bridge generates from its state."""
    checkpoint = Checkpoint(HF_CONFIGS[name](), directory)
    prompts = TOKENS.reshape(8, -1)
    expected = prompts
    for _ in range(N_NEW):
        logits = checkpoint.hf_model(expected, use_cache=False).logits[:, -1:]
        expected = torch.cat([expected, logits.argmax(-1)], dim=1)
    found = checkpoint.bridge().generate(
        prompts, max_new_tokens=N_NEW, do_sample=False, stop_at_eos=False, verbose=False
    )
    return _share_of_others(found[:, -N_NEW:], expected[:, -N_NEW:])


def _share_of_others(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found != expected).float().mean().item()


def hook_pattern(name: str, directory: Path, **settings: Any) -> float:
    """Return the error of a Bridge's logits, with hooks on patterns that change nothing."""
    checkpoint = Checkpoint(changed(name, **settings), directory)
    hooks = [(f"blocks.{i}.attn.hook_pattern", lambda x, hook: x) for i in range(N_LAYERS)]
    logits = checkpoint.bridge().run_with_hooks(TOKENS, fwd_hooks=hooks)
    return difference(log_probs(logits), log_probs(checkpoint.hf_model(TOKENS).logits))


def edit_resid_mid(of_gradients: bool, directory: Path) -> float:
    """Return the error of logits after an edit at a Bridge's `hook_resid_mid`, or of gradients."""
    checkpoint = Checkpoint(HF_CONFIGS["llama"](), directory)
    results = []
    for by_transformers in (False, True):
        seen = []

        def add(x: torch.Tensor, hook: Any = None, seen: list[torch.Tensor] = seen) -> Any:
            seen.append((x + ADDED).requires_grad_())
            return seen[0]

        if by_transformers:  # attention's output is added to the residual stream
            attention = checkpoint.hf_model.model.layers[LAYER].self_attn
            attention.register_forward_hook(lambda *call: (add(call[-1][0]), *call[-1][1:]))
            logits = checkpoint.hf_model(TOKENS).logits
        else:
            hooks = [(f"blocks.{LAYER}.hook_resid_mid", add)]
            logits = checkpoint.bridge().run_with_hooks(TOKENS, fwd_hooks=hooks)
        result = log_probs(logits)
        results.append(
            torch.autograd.grad(result[..., 5].sum(), seen)[0] if of_gradients else result
        )
    return difference(*results)


HOOKED_TRANSFORMER: dict[str, Callable[[Path], float]] = {
    "Gemma 3, rope factor": partial(
        logits_of, "gemma-3", "google/medgemma-27b-text-it", config=stretched_gemma3
    ),
    "Qwen2, YaRN": partial(logits_of, "qwen2", "Qwen/Qwen2-0.5B", config=yarn_qwen2),
    "Phi-3, texts beyond the window": partial(
        logits_of,
        *("phi-3", "microsoft/Phi-3-mini-4k-instruct"),
        config=partial(changed, "phi-3", sliding_window=4),
    ),
    "Qwen2 saved by transformers 5": partial(
        logits_of,
        *("qwen2", "Qwen/Qwen2-0.5B"),
        config=partial(with_other_base, transformers.Qwen2Config),
        edit=as_transformers_5_saves,
    ),
    "Mistral saved by transformers 5": partial(
        logits_of,
        *("mistral", "mistralai/Mistral-7B-v0.1"),
        config=partial(with_other_base, transformers.MistralConfig),
        edit=as_transformers_5_saves,
    ),
    "Gemma 1, activation": partial(logits_of, "gemma", "google/gemma-2b"),
    "BLOOM, six heads": partial(
        logits_of, "bloom", "bigscience/bloom-560m", config=bloom_of_six_heads
    ),
    "gpt-oss": partial(logits_of, "gpt-oss", "openai/gpt-oss-20b"),
    "Apertus": partial(
        logits_of,
        *("apertus", "swiss-ai/Apertus-8B-2509"),
        config=partial(transformers.ApertusConfig, **GROUPED),
    ),
    "Mixtral": partial(logits_of, "mixtral", "mistralai/Mixtral-8x7B-v0.1"),
    "Gemma 2, another activation": partial(
        logits_of,
        *("gemma-2", "google/gemma-2-2b"),
        config=partial(changed, "gemma-2", hidden_activation="silu"),
    ),
    "Gemma 2 without soft caps": partial(
        logits_of,
        *("gemma-2", "google/gemma-2-2b"),
        config=partial(
            changed, "gemma-2", attn_logit_softcapping=None, final_logit_softcapping=None
        ),
    ),
    "OLMo, another activation": partial(
        logits_of,
        *("olmo", "allenai/OLMo-1B-hf"),
        config=partial(changed, "olmo", hidden_act="gelu"),
    ),
    "generate, texts of unequal length": partial(generate_texts, False),
    "generate, tokens with padding": partial(generate_texts, True),
}
BRIDGE: dict[str, Callable[[Path], float]] = {
    "hook_resid_mid, edited": partial(edit_resid_mid, False),
    "hook_resid_mid, its gradient": partial(edit_resid_mid, True),
    "Gemma 3 with soft caps": partial(hook_pattern, "gemma-3", attn_logit_softcapping=2.0),
    "GPT-2, scale_attn_weights=False": partial(hook_pattern, "gpt2", scale_attn_weights=False),
    **{
        f"generate, {name}": partial(generate_with_state, name)
        for name in ("mamba", "mamba-2", "falcon-mamba", "bamba", "nemotron-h")
    },
}


def cell(measure: Callable[[Path], float], patched: bool) -> str:
    """Return a figure, or the class of an error."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(tl_devicefix.enabled() if patched else tl_devicefix.disabled())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(io.StringIO()))
        try:
            return f"{measure(directory):.1e}"
        except Exception as error:  # versions that lack a model raise different errors
            logging.getLogger(__name__).debug("the measurement failed", exc_info=error)
            return type(error).__name__


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], help="another interpreter")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(f"transformer_lens {installed()}, transformers {transformers.__version__}")
    for kind, rows in (
        ("HookedTransformer", HOOKED_TRANSFORMER if has_hooked_transformer() else {}),
        ("TransformerBridge", BRIDGE if has_bridge() else {}),
    ):
        if rows:
            print(f"{kind:<42}{'as installed':>16}{'with the package':>18}")
        for name, measure in rows.items():
            print(f"{name:<42}{cell(measure, False):>16}{cell(measure, True):>18}", flush=True)
    for python in arguments.python:
        subprocess.run([python, __file__], check=True)


if __name__ == "__main__":
    main()
