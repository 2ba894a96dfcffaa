"""`import tl_devicefix` applies the patches, before or after TransformerLens, unless disabled.

This file is also a script: fresh interpreters take long to import TransformerLens, so one does it.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def transformer_lens_first() -> None:
    """Also for models and subclasses that exist."""
    from tl_parts import MODEL_CLASS, changed, parts_of_transformer_lens

    is_hooked = MODEL_CLASS.__name__ == "HookedTransformer"
    if is_hooked:
        from transformer_lens import HookedTransformerConfig

        Mine = type("Mine", (MODEL_CLASS,), {})
        sizes = {"n_layers": 3, "d_model": 8, "n_heads": 2, "d_head": 4, "d_vocab": 9, "n_ctx": 5}
        cfg = HookedTransformerConfig(**sizes, act_fn="relu", device="cpu")
        model = Mine(cfg)
    original = parts_of_transformer_lens()

    import tl_devicefix

    loader = "from_pretrained" if is_hooked else "boot_transformers"
    replaced = changed(original, parts_of_transformer_lens())
    assert any(path.endswith(f"{MODEL_CLASS.__name__}.{loader}") for path in replaced)
    if is_hooked:
        assert "device_map" in inspect.signature(MODEL_CLASS.from_pretrained).parameters
        assert "device_map" in inspect.signature(Mine.from_pretrained).parameters
        with tl_devicefix.simulate(2):
            model.to("sim:1")
            assert model.cfg.device == "sim:1"
            cfg.device, cfg.n_devices = "sim", 2
            assert {p.device.index for p in Mine(cfg).parameters()} == {0, 1}

    tl_devicefix.disable()
    left = changed(original, parts_of_transformer_lens()) & original.keys()  # others are imported
    assert left == set(), left


def refused_and_then_not() -> None:
    """Run as if TransformerLens were not imported yet."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("transformer_lens", "tl_parts"):
            del sys.modules[name]
    import tl_devicefix
    from tl_devicefix.monkeypatch import applying
    from tl_devicefix.monkeypatch.versions import UnsupportedTransformerLens

    assert "transformer_lens" not in sys.modules

    def refuse(patch: Any) -> None:
        raise UnsupportedTransformerLens("not this one")

    check, applying.check_target = applying.check_target, refuse
    for _ in range(2):
        with pytest.raises(UnsupportedTransformerLens, match=r"^not this one$"):
            import transformer_lens
    assert not tl_devicefix.patches.is_enabled()

    applying.check_target = check
    import transformer_lens  # noqa: F401

    assert tl_devicefix.patches.is_enabled()
    from tl_parts import MODEL_CLASS, ours, parts_of_transformer_lens

    replaced = {path.partition(":")[2] for path in ours(parts_of_transformer_lens())}
    hooked = {"HookedTransformer.from_pretrained"}
    bridge = {"TransformerBridge.process_weights"}
    assert (hooked if MODEL_CLASS.__name__ == "HookedTransformer" else bridge) <= replaced
    tl_devicefix.disable()
    left = ours(parts_of_transformer_lens())
    assert left == set(), left


DISABLED = """
import sys
import tl_devicefix

assert not {"torch", "transformers", "transformer_lens"} & sys.modules.keys()
assert not tl_devicefix.patches.is_enabled()
"""


def run(*arguments: str, disable: str) -> None:
    environment = {**os.environ, "TL_DEVICEFIX_DISABLE": disable}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr


def test_importing_first_or_last_or_while_disabled():
    run(str(Path(__file__)), disable="0")
    run("-c", DISABLED, disable="1")


if __name__ == "__main__":
    import tl_parts  # noqa: F401  # and with it all that TransformerLens needs

    forking = multiprocessing.get_context("fork")
    process = forking.Process(target=refused_and_then_not)
    process.start()
    process.join()
    assert process.exitcode == 0
    transformer_lens_first()
