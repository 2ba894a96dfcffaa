"""A check on a tiny model, before any weight is read: does a load give transformers' numbers?

TransformerLens's configs lack some of transformers' settings, so a model can load without a warning
and be wrong. No list of such settings is complete, so each load is checked, where possible, on a
tiny random model of the same config:

1. transformers' config is shrunk to a few heads, layers and tokens, and transformers makes a model
   of it, with random weights.
2. The tiny model is loaded and run like the large one, with the same converter, processing and
   forward.
3. If its log probabilities differ from transformers', the large model's would differ too.

These sizes are shrunk, and every formula stays the same: the numbers of heads (not d_head), layers
of a kind, experts, neurons and tokens, d_model, and sliding windows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
import transformers.utils.logging as hf_logging
from jaxtyping import Float, Int
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tl_devicefix.checkpoints.live_weights import (
    LiveWeights,
    class_in_transformers,
    has_other_forward,
)
from tl_devicefix.errors import is_own_bug
from tl_devicefix.monkeypatch.patch import is_of_user
from tl_devicefix.placement.devices import EmptyOnMeta, OwnRandomNumbers
from tl_devicefix.placement.workers import one_load

_log = logging.getLogger(__name__)

OnMismatch = Literal["warn", "refuse", "ignore"]
"""What a load does if the tiny model differs from transformers."""

LIMIT = 1e-4
"""A larger difference is reported. Correct models differ by up to 2e-5, from float32 rounding."""

_SETTING = "TL_DEVICEFIX_ON_MISMATCH"
_MAX_TOKENS = 128  # fewer would not show scaled rotary frequencies, which are slow
_MAX_LAYERS = 6
_MAX_PARAMETERS = 30_000_000  # so that a check takes less than a second
_VOCABULARY, NEURONS, _WINDOW = 248, 88, 8  # unlike other sizes: some code guesses by size
_CLIP = 0.1  # random projections never reach a published clip_qkv, so a smaller one is used
_NEURON_COUNTS = re.compile(r"(intermediate_size|ffn_dim|n_inner)$")


@dataclass(frozen=True)
class Twin:
    """The tiny model of a check, made by transformers."""

    hf_model: PreTrainedModel  # with random weights, in float32 on the CPU
    layers: Sequence[int]  # the large model's layers that it keeps: see `_layers`
    windows: dict[int, int]  # the large model's sliding window -> the tiny model's
    n_ctx: int  # how many tokens it is run on

    @staticmethod
    def of(
        hf_config: PretrainedConfig,
        n_ctx: int,
        model_class: type[Any] | None = None,
        *,
        attn_types: Sequence[str] | None = None,
        window: int | None = None,
        has_positions: bool = False,
    ) -> Twin:
        """Return the tiny model of a transformers config, which is not changed.

        Args:
            hf_config: the config; of a multimodal model, the text model's part is used.
            n_ctx: the context length of the load, which the tiny model does not exceed.
            model_class: the class that makes the model; by default, AutoModelForCausalLM.
            attn_types: each layer's kind of attention in TransformerLens's config, if it has one.
            window: the sliding window in TransformerLens's config.
            has_positions: True if positions are learned, so that their number can be shrunk.
        """
        config: Any = copy.deepcopy(getattr(hf_config, "text_config", hf_config))
        if "long_factor" in _rope_settings(config):  # longer texts get other rotary frequencies
            n_ctx = min(n_ctx, original_context(config))
        found = {window, *(getattr(config, name, None) for name in _WINDOWS)}
        windows = sorted(size for size in found if size is not None)
        # Keep a window that no text of the load exceeds.
        shrunk = {w: w if w >= n_ctx else _WINDOW + 3 * i for i, w in enumerate(windows)}
        n_ctx = min(n_ctx, _MAX_TOKENS)
        layers = _layers(config, attn_types)
        sizes = _tiny_sizes(config, layers, shrunk)
        if has_positions:
            sizes["max_position_embeddings"] = n_ctx
        for name, value in sizes.items():
            setattr(config, name, value)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # weights arrive dequantised
        factory: Any = model_class or transformers.AutoModelForCausalLM
        if hasattr(factory, "from_config"):  # an Auto class, which may prompt for trust
            make = functools.partial(factory.from_config, trust_remote_code=False)
        else:
            make = factory._from_config
        with EmptyOnMeta():
            count = sum(p.numel() for p in make(copy.deepcopy(config)).parameters())
        if count > _MAX_PARAMETERS:
            raise ValueError(f"a tiny model of it would have {count} parameters")
        hf_model = make(config, dtype=torch.float32, attn_implementation="eager").eval()
        _randomise(hf_model)
        return Twin(hf_model, layers, shrunk, n_ctx)

    @property
    def tokens(self) -> Int[torch.Tensor, "1 pos"]:
        """Random tokens that fill the context; none is special."""
        d_vocab = self.hf_model.config.vocab_size
        lowest = min(3, d_vocab - 1)  # the first few are often special
        seeded = torch.Generator().manual_seed(0)
        return torch.randint(lowest, d_vocab, (1, self.n_ctx), generator=seeded)

    @functools.cached_property
    def _expected(self) -> Float[torch.Tensor, "1 pos d_vocab"]:
        """transformers' log probabilities."""
        logits: torch.Tensor = self.hf_model(self.tokens).logits
        return logits.double().log_softmax(-1)

    def difference(self, logits: Float[torch.Tensor, "1 pos d_vocab"]) -> float:
        """Return the largest difference of log probabilities, relative to transformers' spread."""
        logp, expected = logits.double().log_softmax(-1), self._expected  # [1, pos, d_vocab]
        spread = (expected - expected.mean(-1, keepdim=True)).abs().max()
        # NaN becomes infinite: a maximum of several differences may drop NaN.
        return ((logp - expected).abs().max() / spread).nan_to_num(float("inf")).item()


_WINDOWS = ("sliding_window", "window_size")


def _rope_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the rotary settings, which transformers 5 calls `rope_parameters`."""
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def original_context(config: PretrainedConfig) -> int:
    """Return the number of tokens that a model with scaled rotary frequencies was trained on."""
    name = "original_max_position_embeddings"
    given: int | None = _rope_settings(config).get(name) or getattr(config, name, None)
    return given or config.max_position_embeddings


def _per_layer(config: PretrainedConfig) -> dict[str, list[object]]:
    """Return the settings that have an entry for each layer."""
    n_layers = config.num_hidden_layers
    settings = vars(config).items()
    return {k: v for k, v in settings if isinstance(v, list) and len(v) == n_layers > 1}


def _layers(config: PretrainedConfig, attn_types: Sequence[str] | None) -> list[int]:
    """Return the first layer of each kind, at most six, and at least two if there are two.

    Layers of a kind have equal entries in all lists.
    """
    lists = [*_per_layer(config).values(), attn_types or [None] * config.num_hidden_layers]
    kinds = [repr(entries) for entries in zip(*lists)]
    layers = sorted({kind: kinds.index(kind) for kind in kinds}.values())[:_MAX_LAYERS]
    return sorted({*layers, *([0, 1][: len(kinds)] if len(layers) < 2 else [])})


def _tiny_sizes(
    config: PretrainedConfig, layers: list[int], windows: dict[int, int]
) -> dict[str, Any]:
    """Return the settings of the tiny model that differ from the config's."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    # Keep d_head: attention scales and rotary frequencies depend on it.
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    n_groups = min(groups, 2)
    if groups == heads and heads & (heads - 1):
        n_groups = 3  # ALiBi has another formula if n_heads is not a power of two
    n_heads = n_groups * min(heads // groups, 2)
    d_model = n_heads * d_head if heads * d_head == config.hidden_size else 96
    d_vocab = min(config.vocab_size, _VOCABULARY)
    active = getattr(config, "num_experts_per_tok", None) or 0
    # Some models' experts are in groups, of which the router chooses only a few.
    expert_groups = getattr(config, "n_group", None) or 1
    active_of_group = active // (getattr(config, "topk_group", None) or 1)
    per_layer, sizes = _per_layer(config), dict[str, object]()
    for name, value in vars(config).items():
        if name in per_layer:
            sizes[name] = [value[layer] for layer in layers]
        elif value is None:
            continue
        elif name.endswith("_token_id"):
            sizes[name] = 0  # any token of the vocabulary will do
        elif name in _WINDOWS:
            sizes[name] = windows[value]
        elif _NEURON_COUNTS.search(name):
            # Keep a width of 4 * d_model: TransformerLens's configs may hard-code it.
            sizes[name] = 4 * d_model if value == 4 * config.hidden_size else NEURONS
        elif name == "word_embed_proj_dim":
            sizes[name] = d_model if value == config.hidden_size else 48
        elif name in ("num_local_experts", "num_experts", "n_routed_experts"):
            # Keep more than are active, so that the router has to choose.
            sizes[name] = min(value, expert_groups * (active_of_group + 2))
        elif name == "first_k_dense_replace" and 1 < value < config.num_hidden_layers:
            sizes[name] = 1  # the second layer has experts
        elif name == "clip_qkv":
            sizes[name] = value * _CLIP
        elif name == "num_key_value_heads":
            sizes[name] = n_groups
        elif name == "attention_types":  # GPT-Neo derives attention_layers from it
            sizes[name] = [[[config.attention_layers[layer]], 1] for layer in layers]
    sizes |= {"num_hidden_layers": len(layers), "num_attention_heads": n_heads}
    return {**sizes, "hidden_size": d_model, "vocab_size": d_vocab}


def _randomise(model: nn.Module) -> None:
    """Give every weight values that change the output, but not so large that rounding does."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    seeded = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():  # tied parameters come once
        parameter.normal_(generator=seeded)
        if parameter is embedding:
            parameter.mul_(0.02)  # so that the norms' eps matters, as in published models
        elif parameter.dim() > 1:
            # This keeps outputs about as large as inputs.
            parameter.div_(parameter.shape[-1] ** 0.5)
        else:
            # Norms near the identity, biases near zero.
            parameter.mul_(0.3).add_(1.0 if name.endswith("weight") else 0.0)


def check_numbers(
    measure: Callable[[], float],
    called: str,
    on_mismatch: OnMismatch | None,
    advice: str,
) -> str | None:
    """Check a tiny model, and warn or raise if it differs from transformers.

    Args:
        measure: makes the tiny model, and returns its difference from transformers.
        called: the model, as the message calls it.
        on_mismatch: see `chosen_action`.
        advice: what to do about a difference.

    Returns:
        The warning; None if there was none, or if the tiny model could not be made.
    """
    choice = chosen_action(on_mismatch)
    difference = None if choice == "ignore" else _measured(measure, called)
    if difference is None or difference <= LIMIT:
        return None
    message = (
        f"{called} gives other numbers than transformers: log probabilities of a tiny model with "
        f"its config differ by {difference:.1e} of their spread; {advice}, or silence this with "
        "on_mismatch='ignore'"
    )
    warn_or_refuse(message, choice)
    return message


def warn_or_refuse(message: str, choice: str) -> None:
    """Warn, or raise a ValueError if the choice of `on_mismatch` is "refuse"."""
    if choice == "refuse":
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def chosen_action(on_mismatch: str | None) -> str:
    """Return what to do on a mismatch: the argument, else the environment variable, else "warn"."""
    chosen = on_mismatch or os.environ.get(_SETTING) or "warn"
    if chosen not in OnMismatch.__args__:  # type: ignore[attr-defined]
        where = "on_mismatch" if on_mismatch else _SETTING
        raise ValueError(f"{where} must be 'warn', 'refuse' or 'ignore', but is {chosen!r}")
    return chosen


def _measured(measure: Callable[[], float], called: str) -> float | None:
    """Return the difference; if the check cannot run, log why and return None."""
    try:
        with undisturbed():
            return measure()
    except Exception as error:  # noqa: BLE001  # transformers refuses sizes in many ways
        if is_own_bug(error):
            warnings.warn(
                f"{called} was not compared with transformers, by a fault of tl_devicefix "
                f"({type(error).__name__}: {error}): report it, or silence this with "
                "on_mismatch='ignore'",
                stacklevel=2,
            )
        _log.info(
            "%s is not checked on a tiny model: %s: %.200s", called, type(error).__name__, error
        )
        return None


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep settings that change results (precision, autocast, random numbers) out of a check."""
    with one_load:  # these settings belong to the whole process
        matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        precision, verbosity = matmul.fp32_precision, hf_logging.get_verbosity()
        bar = hf_logging.is_progress_bar_enabled()
        matmul.fp32_precision = "ieee"  # TF32 or bf16 would differ by more than LIMIT
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        try:
            with (
                warnings.catch_warnings(),
                OwnRandomNumbers(),
                torch.device("cpu"),
                torch.autocast("cpu", enabled=False),
                torch.no_grad(),
            ):
                warnings.simplefilter("ignore")
                yield
        finally:
            matmul.fp32_precision = precision
            hf_logging.set_verbosity(verbosity)
            if bar:
                hf_logging.enable_progress_bar()


def refuse_extra_parts(hf_model: nn.Module) -> None:
    """Refuse a live model for a HookedTransformer if its config does not describe all its parts.

    Raises:
        ValueError: naming the parts.
    """
    if extra := extra_parts(hf_model):
        raise ValueError(
            f"hf_model has parts that its config does not describe ({extra}), which a "
            "HookedTransformer would leave out: undo the change, use TransformerBridge without "
            "compatibility mode, or pass on_mismatch='ignore'"
        )


def extra_parts(hf_model: nn.Module) -> str:
    """Return, as text, which modules of a live model its config does not describe; "" if none.

    A converter drops a bias that it does not expect, and never sees a replaced norm or head.
    """
    live = LiveWeights(hf_model)
    # Compare with a model made from the config. A tiny model would agree: it lacks the parts too.
    config, cls = copy.deepcopy(live.model.config), class_in_transformers(live.model)
    try:
        with undisturbed(), EmptyOnMeta():
            made: nn.Module = cls._from_config(config)
    except Exception as error:  # a class that cannot be made from its config
        if is_own_bug(error):
            raise
        _log.info("%s is not compared: %.200s", type(live.model).__name__, error)
        return ""
    found = set(_module_parts(live, live.model))
    expected = set(_module_parts(LiveWeights(made), made))
    frequencies = dict(_frequencies(made))
    extra = {str(path) or "the model itself" for path, *_ in found ^ expected}.union(
        name
        for name, found_there in _frequencies(live.model)
        # A model in half precision has rounded frequencies.
        if (there := frequencies.get(name)) is not None
        and (found_there.shape != there.shape or not torch.allclose(found_there, there, rtol=0.02))
    )
    if not extra:
        return ""
    more = f" and {len(extra) - 3} more" if len(extra) > 3 else ""
    first = ", ".join(sorted(extra)[:3])
    return f"another class, other parameters or numbers, a hook or a forward: {first}{more}"


def _module_parts(
    live: LiveWeights, module: nn.Module, path: str = ""
) -> Iterator[tuple[object, ...]]:
    """Yield each module's path without layer indices, and its traits that a converter ignores."""
    module = live.plain_module(module, torch.device("meta"))  # without adapters and quantisation
    own = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    runs_otherwise = any(map(is_of_user, hooks)) or has_other_forward(module)
    numbers = [
        (name, value)
        for name, value in vars(module).items()
        # Dropout does nothing in a converted model, and users set it to 0.
        if type(value) is float and "drop" not in name and name != "p"
        # The outermost module has notes of users', too.
        if path or hasattr(module.config, name)
    ]
    kind = type(module) if path else class_in_transformers(module)
    called = re.sub(r"\.\d+(?=\.|$)", ".*", path)
    yield called, kind.__name__, own, runs_otherwise, *numbers
    for name, child in module._modules.items():
        if child is not None:
            yield from _module_parts(live, child, f"{path}.{name}" if path else name)


def _frequencies(model: nn.Module) -> Iterator[tuple[str, Float[torch.Tensor, " frequency"]]]:
    """Yield the rotary frequencies that do not change with the length of texts, by name."""
    for path, module in model.named_modules():
        kinds = str(getattr(module, "rope_type", ""))
        for name, buffer in module._buffers.items():
            is_fixed = "dynamic" not in kinds and "longrope" not in kinds
            if name.endswith("inv_freq") and is_fixed and buffer is not None and not buffer.is_meta:
                yield f"{path}.{name}", buffer.float().cpu()
