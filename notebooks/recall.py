"""The set-up that all notebooks share: devices, the model, prompts of the recall task, heat maps.

A prompt states some facts and asks for one of them again. Who likes what is drawn anew for each,
so that only the context tells the answer. For another model, words that are not one token for its
tokenizer are left out, so that all prompts are equally long.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from tl_devicefix.demo import CHECKPOINT, NAMES, OBJECTS, devices_for

SHIPPED = str(CHECKPOINT)
"""The small model that ships with tl_devicefix."""
TOKENS_OF_A_FACT = 4
_devices = contextlib.ExitStack()

Facts = list[tuple[str, str]]
"""Who likes what."""


def start(n_devices: int) -> None:
    """Make devices available while the notebook runs: simulated ones if there are too few GPUs."""
    torch.set_num_threads(1)  # so small a model is slower with more
    plt.rcParams.update({"figure.constrained_layout.use": True, "figure.dpi": 150})
    _devices.close()
    print(_devices.enter_context(devices_for(n_devices)))


def load(name: str, n_devices: int) -> Any:
    """The model, folded, by the class that the installed TransformerLens has for it."""
    dtype = torch.float32 if name == SHIPPED else torch.bfloat16
    try:
        from transformer_lens import HookedTransformer
    except ImportError:  # TransformerLens 4
        from transformer_lens.model_bridge import TransformerBridge

        bridge = TransformerBridge.boot_transformers(name, n_devices=n_devices, dtype=dtype)
        bridge.enable_compatibility_mode()
        return bridge
    return HookedTransformer.from_pretrained(name, n_devices=n_devices, dtype=dtype)


class Words:
    """Names and objects that are one token for a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        names = self.one_token(NAMES)
        self.names = [name for name in names if self.n_tokens(name) == self.n_tokens(".")]
        self.colours = self.one_token(OBJECTS["likes"])
        self.objects = self.one_token([word for words in OBJECTS.values() for word in words])

    def n_tokens(self, text: str) -> int:
        """How many tokens a text has."""
        return int(self.model.to_tokens(text).shape[1])

    def one_token(self, words: Any) -> list[str]:
        """The words that are one token inside a text."""
        return [word for word in words if self.n_tokens(f". {word}") == self.n_tokens(".") + 1]

    def ids(self, words: list[str]) -> torch.Tensor:
        """The token of each word, as it is inside a text."""
        return self.model.to_tokens([f". {word}" for word in words])[:, -1]  # type: ignore[no-any-return]

    def facts(self, n_prompts: int, n_facts: int, objects: list[str], seed: int = 0) -> list[Facts]:
        """Facts for each prompt."""
        rng = random.Random(seed)
        return [
            list(zip(rng.sample(self.names, n_facts), rng.sample(objects, n_facts)))
            for _ in range(n_prompts)
        ]


def prompt(facts: Facts, name: str) -> str:
    """A prompt that states facts and asks for the one of `name`."""
    return " ".join(f"{who} likes {what}." for who, what in facts) + f" {name} likes"


@dataclass
class Corrupted:
    """Clean prompts, and two kinds of corrupted ones whose answer is another fact's object."""

    words: Words
    n_prompts: int = 16
    n_facts: int = 4
    asked: int = 1
    """The fact that the clean question asks for."""
    other: int = 2
    """The fact whose object is the answer to corrupted prompts."""

    def __post_init__(self) -> None:
        facts = self.words.facts(self.n_prompts, self.n_facts, self.words.colours)
        asked, other = self.asked, self.other
        self.texts = {
            "clean": [prompt(each, each[asked][0]) for each in facts],
            "another question": [prompt(each, each[other][0]) for each in facts],
            "names swapped": [prompt(self._swapped(each), each[asked][0]) for each in facts],
        }
        self.kinds = ["another question", "names swapped"]
        self.tokens = {kind: self.words.model.to_tokens(text) for kind, text in self.texts.items()}
        self.answers = self.words.ids([each[asked][1] for each in facts])
        self.others = self.words.ids([each[other][1] for each in facts])
        self.length = self.tokens["clean"].shape[1]
        self.first = self.length - 2 - TOKENS_OF_A_FACT * self.n_facts  # where the facts begin

    def _swapped(self, facts: Facts) -> Facts:
        swapped = list(facts)
        swapped[self.asked] = (facts[self.other][0], facts[self.asked][1])
        swapped[self.other] = (facts[self.asked][0], facts[self.other][1])
        return swapped

    def positions(self) -> list[str]:
        """The role of each position, for a figure's axis."""
        roles = ["name {}", "likes", "object {}", "."]
        facts = [role.format(fact) for fact in range(self.n_facts) for role in roles]
        return [*(["start"] * self.first), *facts, "name asked", "likes?"]


def heads_of(model: Any) -> tuple[list[str], list[str]]:
    """Labels of heads and of layers, for a figure's axes."""
    heads = [f"H{head}" for head in range(model.cfg.n_heads)]
    return heads, [f"L{layer}" for layer in range(model.cfg.n_layers)]


def heatmap(ax: Any, values: Any, x: list[str], y: list[str], **kwargs: Any) -> Any:
    """Draw a matrix, its first row on top, with its numbers where they are few."""
    values = torch.as_tensor(values).float().cpu().numpy()
    image = ax.imshow(values, aspect="auto", **kwargs)
    ax.set_xticks(range(len(x)), x, rotation=90 if max(map(len, x)) > 3 else 0)
    every = 1 + len(y) // 40
    ax.set_yticks(range(0, len(y), every), y[::every])
    if values.size <= 400 and values.shape[1] <= 16:
        for (row, column), value in np.ndenumerate(values):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
            text = f"{value:.2f}".replace("-0.00", "0.00")
            colour = "white" if dark else "black"
            ax.text(column, row, text, ha="center", va="center", size=8, color=colour)
    return image


def by_head(values: torch.Tensor, title: str, label: str, **kwargs: Any) -> None:
    """Show a value of every head, [layer, head]; `label` is the colour bar's."""
    n_layers, n_heads = values.shape
    fig, ax = plt.subplots(figsize=(2 + 0.8 * min(n_heads, 16), max(3.5, 0.25 * n_layers)))
    x, y = [f"H{head}" for head in range(n_heads)], [f"L{layer}" for layer in range(n_layers)]
    fig.colorbar(heatmap(ax, values, x, y, **kwargs), label=label)
    fig.suptitle(title)
    ax.set(xlabel="head", ylabel="layer")
    plt.show()


def side_by_side(
    results: dict[str, torch.Tensor],
    x: list[str],
    y: list[str],
    title: str,
    xlabel: str,
    ylabel: str = "layer",
) -> None:
    """Heat maps of how much is recovered, one for each kind of corrupted prompt."""
    n, is_wide = len(results), len(x) > 16
    size = (9, n * (0.8 + 0.25 * len(y))) if is_wide else (max(9, 1.2 * len(x)), 1.7 + 0.4 * len(y))
    shape = (n, 1) if is_wide else (1, n)
    fig, axes = plt.subplots(*shape, figsize=size, sharex=is_wide, sharey=True)
    for ax, (name, values) in zip(axes, results.items()):
        image = heatmap(ax, values, x, y, cmap="RdBu", vmin=-1, vmax=1)
        ax.set_title(name)
        ax.label_outer()
    fig.supxlabel(xlabel)
    fig.supylabel(ylabel)
    fig.suptitle(title)
    fig.colorbar(image, ax=axes, label="recovered")
    plt.show()
