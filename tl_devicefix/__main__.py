"""The command line: `python -m tl_devicefix demo` and `python -m tl_devicefix selfcheck`."""

from __future__ import annotations

import argparse
import sys
import warnings


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the command line, by default the process's own.

    Returns:
        The exit status: 0 if all is well.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tl_devicefix", description="HookedTransformer over several devices."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="load the shipped checkpoint over several devices and look at its heads"
    )
    demo.add_argument("--n-devices", type=int, default=4, help="default: %(default)s")
    commands.add_parser(
        "selfcheck", help="check this machine's devices; exit status 1 if they cannot be trusted"
    )
    chosen = parser.parse_args(arguments)
    import transformers.utils.logging as hf_logging

    from tl_devicefix.patches import apply

    apply()  # a command is an explicit wish, also where TL_DEVICEFIX_DISABLE is set
    hf_logging.disable_progress_bar()
    # TransformerLens 3 says at each load that HookedTransformer is deprecated.
    warnings.filterwarnings("ignore", message=".*HookedTransformer", category=DeprecationWarning)
    if chosen.command == "demo":
        from tl_devicefix.demo import run_demo

        well = run_demo(chosen.n_devices)
    else:
        from tl_devicefix.selfcheck import run_selfcheck

        well = run_selfcheck()
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
