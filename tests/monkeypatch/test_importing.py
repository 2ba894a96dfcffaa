"""`import tl_devicefix` applies the patches, before or after TransformerLens, unless disabled.

What an import does is seen in fresh interpreters only. They are slow to start, so they run
together, and check several things each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

TRANSFORMER_LENS_FIRST = """
    import inspect, sys

    from tl_parts import changed, changed_in_modules_of, parts_of_transformer_lens
    import transformer_lens
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    class Mine(HookedTransformer):
        pass

    cfg = HookedTransformerConfig(
        n_layers=3, d_model=8, n_heads=2, d_head=4, d_vocab=9, n_ctx=5, act_fn="relu", device="cpu"
    )
    model = Mine(cfg)
    original = parts_of_transformer_lens()

    import tl_devicefix

    replaced = changed(original, parts_of_transformer_lens())
    assert any(path.endswith("HookedTransformer.from_pretrained") for path in replaced)
    assert "device_map" in inspect.signature(HookedTransformer.from_pretrained).parameters
    assert "device_map" in inspect.signature(Mine.from_pretrained).parameters
    with tl_devicefix.simulate(2):
        model.to("sim:1")
        assert model.cfg.device == "sim:1"
        cfg.device, cfg.n_devices = "sim", 2
        assert {p.device.index for p in Mine(cfg).parameters()} == {0, 1}

    tl_devicefix.disable()
    left = changed_in_modules_of(original, parts_of_transformer_lens())
    assert left == set(), left
"""

BRIDGE_FIRST = """
    from tl_parts import changed, changed_in_modules_of, parts_of_transformer_lens
    from transformer_lens.model_bridge import TransformerBridge

    original = parts_of_transformer_lens()
    import tl_devicefix

    replaced = changed(original, parts_of_transformer_lens())
    assert any(path.endswith("TransformerBridge.boot_transformers") for path in replaced)
    tl_devicefix.disable()
    left = changed_in_modules_of(original, parts_of_transformer_lens())
    assert left == set(), left
"""

REFUSED_AND_THEN_NOT = """
    import sys

    import tl_devicefix

    assert not {"torch", "transformers", "transformer_lens"} & sys.modules.keys()
    from tl_devicefix.monkeypatch import applying
    from tl_devicefix.monkeypatch.versions import UnsupportedTransformerLens

    def refuse(patch):
        raise UnsupportedTransformerLens("not this one")

    check, applying.check_target = applying.check_target, refuse
    for attempt in range(2):
        try:
            import transformer_lens
        except UnsupportedTransformerLens as error:
            assert str(error) == "not this one"
        else:
            raise AssertionError("it was imported")
    assert not tl_devicefix.patches.is_enabled()

    applying.check_target = check
    import transformer_lens

    assert tl_devicefix.patches.is_enabled()
    from tl_parts import MODEL_CLASS, ours, parts_of_transformer_lens

    replaced = {path.partition(":")[2] for path in ours(parts_of_transformer_lens())}
    hooked = {"HookedTransformer.from_pretrained", "train"}
    bridge = {"TransformerBridge.process_weights"}
    assert (hooked if MODEL_CLASS.__name__ == "HookedTransformer" else bridge) <= replaced
    tl_devicefix.disable()
    left = ours(parts_of_transformer_lens())
    assert left == set(), left
"""

TWO_THREADS = """
    import importlib, sys, threading
    import tl_devicefix

    is_amid_it, other_comes, seen, states = threading.Event(), threading.Event(), [], []
    import_module = importlib.import_module

    def pause(event, args):
        if event == "import" and threading.current_thread() is first:
            if args[0].startswith("transformer_lens."):
                is_amid_it.set()
                other_comes.wait()
        elif event == "import" and threading.current_thread() is second:
            seen.append(args[0])
            if "tl_devicefix.pipelining.patching_loops" in seen[:-1]:
                other_comes.set()  # which imports TransformerLens, and whose lock is held

    def import_and_tell(name, package=None):
        if name == "transformer_lens":
            other_comes.set()
        return import_module(name, package)

    def imports():
        import transformer_lens

        states.append(tl_devicefix.patches.is_enabled())

    def touches():
        is_amid_it.wait()
        states.append(callable(tl_devicefix.save_activations))

    first, second = (threading.Thread(target=work, daemon=True) for work in (imports, touches))
    importlib.import_module = import_and_tell
    sys.addaudithook(pause)
    first.start()
    second.start()
    first.join()
    second.join()
    assert states == [True, True], states
"""

DISABLED = """
    import sys

    import tl_devicefix

    assert not {"torch", "transformers", "transformer_lens"} & sys.modules.keys()
    assert not tl_devicefix.patches.is_enabled()
"""


def start(script: str, disable: str | None) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TL_DEVICEFIX_DISABLE"}
    if disable is not None:
        environment["TL_DEVICEFIX_DISABLE"] = disable
    folder, elsewhere = str(Path(__file__).parent), environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, elsewhere)))
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_importing_first_or_last_or_disabled() -> None:
    first = TRANSFORMER_LENS_FIRST if has_hooked_transformer() else BRIDGE_FIRST
    interpreters = {
        "TransformerLens first": start(first, disable=None),
        "tl_devicefix first, refused, and then not": start(REFUSED_AND_THEN_NOT, disable="0"),
        "two threads": start(TWO_THREADS, disable=None),
        "disabled": start(DISABLED, disable="1"),
    }
    errors = {name: run.communicate(timeout=300)[1] for name, run in interpreters.items()}
    for name, run in interpreters.items():
        assert run.returncode == 0, f"{name}: {errors[name]}"
