"""The units that weights are read and processed in: components, ln_final with the unembedding."""

from __future__ import annotations

from tl_devicefix.placement.components import component_of


def processing_unit(name: str) -> str:
    """The unit that a weight is processed in."""
    component = component_of(name)
    return "unembed" if component == "ln_final" else component


def name_in_unit(name: str) -> str:
    """The name a processing step sees: "blocks.3.attn.W_Q" -> "attn.W_Q", others whole."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def full_name(unit: str, name: str) -> str:
    """The inverse of `name_in_unit`."""
    return f"{unit}.{name}" if unit.startswith("blocks.") else name
