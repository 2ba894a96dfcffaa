"""The command line: `estimate`, `demo` and `selfcheck`.

Arguments are parsed before large imports, so that help and mistakes appear at once.
"""

from __future__ import annotations

import argparse
import json
import sys

from tl_devicefix import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command line, by default the process's own.

    Returns:
        The exit status: 0 if all is well, 1 if not, and 2 if an argument is wrong or there is no
        accelerator to check.
    """
    chosen = _parser().parse_args(arguments)
    # Only `estimate` raises a TypeError for an argument.
    expected = (TypeError, ValueError) if chosen.command == "estimate" else ValueError

    import transformers.utils.logging as hf_logging

    from tl_devicefix.patches import enable

    enable()  # even with TL_DEVICEFIX_DISABLE: a command is an explicit request
    hf_logging.disable_progress_bar()
    try:
        return 0 if _run(chosen) else 1
    except expected as error:
        print(error, file=sys.stderr)
        return 2  # argparse's status for wrong arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tl_devicefix", description="TransformerLens models across several devices."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="run the shipped checkpoint across several devices, and compare it"
    )
    demo.add_argument("--n-devices", type=int, default=4, help="default: %(default)s")
    selfcheck = commands.add_parser(
        "selfcheck",
        help="check this machine's accelerators; exit status 1 if they cannot be trusted",
    )
    selfcheck.add_argument(
        "--device", help='their type, such as "xpu"; default: what TransformerLens would choose'
    )
    estimate = commands.add_parser(
        "estimate",
        help="what a job takes on each device, and whether it fits; exit status 1 if it does not",
        description="What a job takes on each device, and whether it fits. Nothing is loaded, and "
        "no devices are needed.",
    )
    _add_options(estimate)
    return parser


def _add_options(estimate: argparse.ArgumentParser) -> None:
    estimate.add_argument("model", help="a name, or a local checkpoint directory")
    estimate.add_argument(
        "--n-devices",
        type=int,
        help="how many devices; default: as many as --max-memory or --device-map names, else 1",
    )
    estimate.add_argument("--dtype", default="float32", help="of the weights; default: %(default)s")
    estimate.add_argument(
        "--max-memory",
        type=_memory,
        default="80GiB",
        help="the most to use of each device: 80GiB, or 0=24GiB,1=80GiB to use only the devices "
        "that are named; with cpu=200GiB, blocks that do not fit are offloaded; "
        "default: %(default)s",
    )
    estimate.add_argument(
        "--device-map",
        type=_device_map,
        help='balanced, sequential, or JSON such as \'{"": 0, "blocks.20": 1}\'',
    )
    estimate.add_argument(
        "--batch-size", type=int, default=1, help="sequences; default: %(default)s"
    )
    estimate.add_argument(
        "--seq-len", type=int, help="tokens in each; default: 1024, or the model's n_ctx if less"
    )
    estimate.add_argument(
        "--n-ctx", type=int, help="load the model with this n_ctx, as from_pretrained(n_ctx=) does"
    )
    estimate.add_argument(
        "--cache", help="what run_with_cache keeps: hook names (resid_post,z), or all"
    )
    estimate.add_argument(
        "--max-new-tokens", type=int, default=0, help="tokens to generate, with a KV cache"
    )
    estimate.add_argument("--gradients", action="store_true", help="take a backward from the loss")
    estimate.add_argument(
        "--fuse-blocks",
        action="store_true",
        help="run blocks as one function each: no pattern is built where none is kept",
    )
    estimate.add_argument("--json", action="store_true", help="print JSON, in bytes")


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _memory(text: str) -> int | str | dict[int | str, int | str]:
    """Return "80GiB" as it is, "0=24GiB,1=80GiB" as a dict, and digits alone as bytes."""
    if "=" not in text:  # one size for every device
        return _number(text)
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not device.strip() or not size.strip() for device, _, size in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not DEVICE=SIZE, as in 0=24GiB,1=80GiB")
    return {_number(device.strip()): _number(size.strip()) for device, _, size in pairs}


def _device_map(text: str) -> int | str | dict[str, int | str]:
    # JSON, a strategy, or one device.
    return json.loads(text) if text.startswith("{") else _number(text)


def _run(chosen: argparse.Namespace) -> bool:
    """Run the chosen command, and return True if all is well."""
    if chosen.command == "demo":
        from tl_devicefix.demo.demo import run_demo

        return run_demo(chosen.n_devices)
    if chosen.command == "selfcheck":
        from tl_devicefix.demo.selfcheck import run_selfcheck

        return run_selfcheck(chosen.device)
    from tl_devicefix.planning.estimation import estimate

    options = {k: v for k, v in vars(chosen).items() if k not in ("command", "model", "json")}
    if chosen.n_ctx is None:  # then the model keeps its own
        del options["n_ctx"]
    result = estimate(chosen.model, **options)
    print(json.dumps(result.to_dict(), indent=2) if chosen.json else result)
    return result.fits


if __name__ == "__main__":
    sys.exit(main())
