"""The command line: `python -m tl_devicefix plan`, `demo` and `selfcheck`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command line, by default the process's own.

    Returns:
        The exit status: 0 if all is well.
    """
    chosen = _parser().parse_args(arguments)
    import transformers.utils.logging as hf_logging

    from tl_devicefix.patches import apply

    apply()  # a command is an explicit wish, also where TL_DEVICEFIX_DISABLE is set
    hf_logging.disable_progress_bar()
    # TransformerLens 3 says at each load that HookedTransformer is deprecated.
    warnings.filterwarnings("ignore", message=".*HookedTransformer", category=DeprecationWarning)
    return 0 if _COMMANDS[chosen.command](chosen) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tl_devicefix", description="TransformerLens models over several devices."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="load the shipped checkpoint over several devices and look at its heads"
    )
    demo.add_argument("--n-devices", type=int, default=4, help="default: %(default)s")
    commands.add_parser(
        "selfcheck", help="check this machine's devices; exit status 1 if they cannot be trusted"
    )
    _add_plan(commands)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="what a job takes on each device, and whether it fits; exit status 1 if it does not",
        description="What a job takes on each device, and whether it fits. Nothing is loaded, and "
        "no devices are needed.",
    )
    plan.add_argument("model", help="a name, or a local checkpoint directory")
    plan.add_argument("--n-devices", type=int, help="how many devices; default: as named")
    plan.add_argument("--dtype", default="float32", help="of the weights; default: %(default)s")
    plan.add_argument(
        "--max-memory",
        type=_memory,
        default="80GiB",
        help="what each device has: 80GiB, or 0=24GiB,1=80GiB; with cpu=200GiB, blocks that do not "
        "fit are offloaded; default: %(default)s",
    )
    plan.add_argument(
        "--memory",
        type=_memory,
        help="what each device has, if --max-memory is what its weights may take of it",
    )
    plan.add_argument(
        "--device-map",
        type=_device_map,
        help='balanced, sequential, or JSON such as \'{"": 0, "blocks.20": 1}\'',
    )
    plan.add_argument("--batch", type=int, default=1, help="sequences; default: %(default)s")
    plan.add_argument("--ctx", type=int, help="tokens in each; default: 1024, or n_ctx if less")
    plan.add_argument(
        "--cache", help="what run_with_cache keeps: hook names (resid_post,z), or all"
    )
    plan.add_argument("--generate", type=int, default=0, help="new tokens, with a KV cache")
    plan.add_argument("--gradients", action="store_true", help="take a backward from the loss")
    plan.add_argument("--gather", type=_device, help="where stacked weights are gathered: cpu, 0")
    plan.add_argument("--json", action="store_true", help="print JSON, in bytes")


def _device(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _memory(text: str) -> Any:
    """ "80GiB", or "0=24GiB,1=80GiB" as a dict."""
    if "=" not in text:
        return text
    pairs = (part.partition("=") for part in text.split(","))
    return {_device(device.strip()): size.strip() for device, _, size in pairs}


def _device_map(text: str) -> Any:
    if not text.startswith("{"):
        return _device(text)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error


def _run_plan(chosen: argparse.Namespace) -> bool:
    from tl_devicefix.before_loading.estimation import estimate

    options = {k: v for k, v in vars(chosen).items() if k not in ("command", "model", "json")}
    try:
        found = estimate(chosen.model, **options)
    except (ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return False
    print(json.dumps(found.to_dict(), indent=2) if chosen.json else found)
    return found.fits


def _run_demo(chosen: argparse.Namespace) -> bool:
    from tl_devicefix.demo.demo import run_demo

    return run_demo(chosen.n_devices)


def _run_selfcheck(_: argparse.Namespace) -> bool:
    from tl_devicefix.demo.selfcheck import run_selfcheck

    return run_selfcheck()


_COMMANDS = {"plan": _run_plan, "demo": _run_demo, "selfcheck": _run_selfcheck}


if __name__ == "__main__":
    sys.exit(main())
