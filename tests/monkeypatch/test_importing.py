"""`import tl_devicefix` applies the patches, before or after TransformerLens, unless disabled.

A fresh interpreter has to import it, so that tests call functions of this file in one.
"""

import functools
import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def hooks_for_all():
    """Return torch's hooks for every module, and for every optimizer."""
    of_torch = [sys.modules[name] for name in ("torch.nn.modules.module", "torch.optim.optimizer")]
    named = [item for module in of_torch for item in vars(module).items()]
    return {k: {**v} for k, v in named if k.startswith("_global") and isinstance(v, dict)}


def patch_what_is_imported():
    """Patch a TransformerLens that is imported, with models and subclasses that exist."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.components import MLP
    from transformer_lens.model_bridge import TransformerBridge

    MLP.forward = functools.wraps(MLP.forward)(lambda self, x: x)
    Mine = type("Mine", (HookedTransformer,), {})
    MyBridge = type("MyBridge", (TransformerBridge,), {})
    sizes = {"n_layers": 3, "d_model": 8, "n_heads": 2, "d_head": 4, "d_vocab": 9, "n_ctx": 5}
    cfg = HookedTransformerConfig(**sizes, act_fn="relu", device="cpu")
    model = Mine(cfg)
    originals, hooks = (Mine.from_pretrained, MyBridge.boot_transformers), hooks_for_all()

    import tl_devicefix

    assert hooks_for_all() == hooks != {}
    for load, original in zip((Mine.from_pretrained, MyBridge.boot_transformers), originals):
        assert load != original
        assert "device_map" in inspect.signature(load).parameters
    tl_devicefix.fuse_blocks(model)
    (why,) = set(tl_devicefix.report(model).values())
    assert why == "not fused: MLP.forward was replaced"
    with tl_devicefix.simulate(2):
        model.to("sim:1")
        assert model.cfg.device == "sim:1"
        cfg.device, cfg.n_devices = "sim", 2
        spread = Mine(cfg)
        assert {p.device.index for p in spread.parameters()} == {0, 1}
        tokens = spread.W_pos.new_zeros(1, 2).long()
        unfinished = tl_devicefix.pipeline_map(spread, Mine.forward, [tokens] * 6)
        next(unfinished)
        globals()["unfinished"] = unfinished  # the process has to end, with runs in flight

    tl_devicefix.disable()
    assert (Mine.from_pretrained, MyBridge.boot_transformers) == originals


def import_nothing():
    """Import the package while it is disabled."""
    import tl_devicefix

    assert not {"torch", "transformers", "transformer_lens"} & sys.modules.keys()
    with pytest.raises(AttributeError, match="'save_activation'; did you mean 'save_activations'"):
        _ = tl_devicefix.save_activation


def run(*arguments, disable, path=None):
    paths = [str(Path(__file__).parent), *([str(path)] if path else [])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "TL_DEVICEFIX_DISABLE": disable}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    not version("transformer_lens").startswith("3.9."), reason="TransformerLens 3.9 has both"
)
def test_importing_it_patches_what_exists_and_adds_no_hooks(tmp_path):
    """Also in a package that takes its name: `python -m tl_devicefix` patches nothing."""
    (tmp_path / "study").mkdir()
    importing = "import test_importing; test_importing.patch_what_is_imported()\n"
    (tmp_path / "study" / "__init__.py").write_text(importing)
    (tmp_path / "study" / "__main__.py").touch()
    run("-m", "study", "tl_devicefix", disable="0", path=tmp_path)


def test_importing_it_disabled_imports_and_patches_nothing():
    run("-c", "import test_importing; test_importing.import_nothing()", disable="1")
