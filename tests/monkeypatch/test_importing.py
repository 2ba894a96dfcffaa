"""`import tl_devicefix` applies the patches, before or after TransformerLens, unless disabled.

This file is also a script, because a fresh interpreter has to import it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path


def hooks_for_all() -> dict[str, dict[object, object]]:
    """Return torch's hooks for every module, and for every optimizer."""
    of_torch = [sys.modules[name] for name in ("torch.nn.modules.module", "torch.optim.optimizer")]
    named = [item for module in of_torch for item in vars(module).items()]
    return {k: {**v} for k, v in named if k.startswith("_global") and isinstance(v, dict)}


def patch_what_is_imported() -> None:
    """Patch a TransformerLens that is imported, with models and subclasses that exist."""
    is_hooked = importlib.util.find_spec("transformer_lens.HookedTransformer") is not None
    if is_hooked:
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        Mine = type("Mine", (HookedTransformer,), {})
        load = "from_pretrained"
        sizes = {"n_layers": 3, "d_model": 8, "n_heads": 2, "d_head": 4, "d_vocab": 9, "n_ctx": 5}
        cfg = HookedTransformerConfig(**sizes, act_fn="relu", device="cpu")
        model = Mine(cfg)
    else:
        from transformer_lens.model_bridge import TransformerBridge

        Mine = type("Mine", (TransformerBridge,), {})
        load = "boot_transformers"
    original, hooks = getattr(Mine, load), hooks_for_all()

    import tl_devicefix

    assert hooks_for_all() == hooks != {}
    assert getattr(Mine, load) != original
    assert "device_map" in inspect.signature(getattr(Mine, load)).parameters
    if is_hooked:
        with tl_devicefix.simulate(2):
            model.to("sim:1")
            assert model.cfg.device == "sim:1"
            cfg.device, cfg.n_devices = "sim", 2
            assert {p.device.index for p in Mine(cfg).parameters()} == {0, 1}

    tl_devicefix.disable()
    assert getattr(Mine, load) == original


DISABLED = """
import sys
import tl_devicefix

assert not {"torch", "transformers", "transformer_lens"} & sys.modules.keys()
"""


def run(*arguments: str, disable: str, without: str | None = None) -> None:
    environment = {**os.environ, "TL_DEVICEFIX_DISABLE": disable}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert without is None or f" {without}\n" not in done.stderr


def test_importing_it_patches_models_and_adds_no_global_hooks():
    run(str(Path(__file__)), disable="0")


def test_importing_it_disabled_imports_and_patches_nothing():
    run("-c", DISABLED, disable="1")


def test_importing_it_in_a_package_that_takes_its_name_patches(tmp_path, monkeypatch):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "__init__.py").write_text("import tl_devicefix\n")
    script = "from tl_devicefix.patches import is_enabled; assert is_enabled()\n"
    (tmp_path / "study" / "__main__.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run("-m", "study", "tl_devicefix", disable="0")


def test_help_of_the_command_line_imports_no_torch():
    run("-X", "importtime", "-m", "tl_devicefix", "--help", disable="0", without="torch")


if __name__ == "__main__":
    patch_what_is_imported()
