"""Stream weights from a source into an empty model, one component at a time."""

from __future__ import annotations

from typing import Any

import transformers.utils.logging as hf_logging

from tl_devicefix.fitting import is_out_of_memory, out_of_memory
from tl_devicefix.folding import Steps
from tl_devicefix.placement import Placement
from tl_devicefix.processing import complete_unit, load_component, processing_units
from tl_devicefix.sources import Source


def fill(model: Any, source: Source, placement: Placement, steps: Steps) -> None:
    """Read, process and store every component of a model, each on its planned device.

    Args:
        model: a HookedTransformer whose parameters are on meta.
        source: where its weights come from.
        placement: where they go.
        steps: how they are processed on the way (`Steps.applicable`).

    Raises:
        ValueError: if the source has not the weights that the model's config asks for.
        torch.OutOfMemoryError: saying which device has no room, and what would fit.
    """
    model.placement = placement
    for unit in hf_logging.tqdm(processing_units(model.cfg), desc="Loading components"):
        device = placement.device_of(unit)
        try:
            weights = complete_unit(model, unit, source.read(unit, device))
            load_component(model, unit, weights, steps)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise out_of_memory(error, model, unit, device) from error
            raise
