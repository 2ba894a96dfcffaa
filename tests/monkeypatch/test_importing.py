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
    original = getattr(Mine, load)

    import tl_devicefix

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


GLOBAL_HOOKS = """
import sys
import torch

def hooks():
    modules = "torch.nn.modules.module", "torch.optim.optimizer"
    named = [item for name in modules for item in vars(sys.modules[name]).items()]
    return {k: {**v} for k, v in named if k.startswith("_global") and isinstance(v, dict)}

before = hooks()
import tl_devicefix

assert hooks() == before != {}
"""


def run(*arguments: str, disable: str, without: str | None = None) -> None:
    environment = {**os.environ, "TL_DEVICEFIX_DISABLE": disable}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert without is None or f" {without}\n" not in done.stderr


def test_importing_it_patches_transformer_lens():
    run("-c", "import tl_devicefix; assert tl_devicefix.patches.is_enabled()", disable="0")


def test_importing_it_after_transformer_lens_patches_models_too():
    run(str(Path(__file__)), disable="0")


def test_importing_it_disabled_imports_and_patches_nothing():
    run("-c", DISABLED, disable="1")


def test_importing_it_adds_no_hook_for_all_optimizers_or_modules():
    run("-c", GLOBAL_HOOKS, disable="0")


def test_a_package_that_takes_this_name_as_argument_is_patched(tmp_path, monkeypatch):
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
