"""What it costs that half of a model's blocks are another process's: over the same in one process.

    python benchmarks/ranks.py [--size deep] [--tokens 1 128 1024] [--context 128] [--new 16]
                               [--repeats 9] [--threads 1] [--flights 16] [--cache DIR]
    python benchmarks/ranks.py --startup 4

A Llama with random weights (on TransformerLens 4 a TransformerBridge) is loaded twice into this
process: on the CPU, and over the CPU and that of another process, which lends it. Both do the same
in turns; ratios are medians of those of neighbours in time. Each process keeps to its half of the
cores, and has `--threads`. With `--flights`, runs in flight (`tl_devicefix.pipeline_map`) over both
ranks are compared with the loop on one. Beside it stands what two processes that know nothing of
each other do here in the time that one takes.
With `--startup`, nothing else is done: so many processes of this host import, wait until all have,
and join; it is printed what each took.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from forward import SIZES, make_checkpoint
from load import HUB_NAME
from packaging.version import Version


def timed(run: Callable[[], Any]) -> float:
    """Wall seconds until what it gives is here."""
    start = time.perf_counter()
    result = run()
    if isinstance(result, torch.Tensor):
        result.cpu()
    return time.perf_counter() - start


def side_by_side(
    far: Callable[[], Any], here: Callable[[], Any], repeats: int
) -> tuple[float, float, float]:
    """Medians of seconds here, of the ratio, and of the seconds that it takes longer."""
    timed(far), timed(here)
    pairs = [(timed(far), timed(here)) for _ in range(repeats)]
    return (
        statistics.median(one for _, one in pairs),
        statistics.median(other / one for other, one in pairs),
        statistics.median(other - one for other, one in pairs),
    )


def show(what: str, found: tuple[float, float, float]) -> None:
    """Print a row."""
    here, ratio, longer = found
    print(f"{what:<46}{1e3 * here:>10.1f}{ratio:>8.2f}{1e3 * longer:>12.1f}", flush=True)


CORES = sorted(os.sched_getaffinity(0))
HALF = max(len(CORES) // 2, 1)


def start(told: list[str], arguments: argparse.Namespace, **pipes: Any) -> subprocess.Popen[str]:
    """Start a process that has the other half of the cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    started = subprocess.Popen([sys.executable, *told], env=environment, text=True, **pipes)
    os.sched_setaffinity(started.pid, CORES[HALF:] or CORES)
    return started


def lend(arguments: argparse.Namespace) -> tuple[str, float]:
    """Start a process that lends its CPU; returns where to meet it, and when that was."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{free.getsockname()[1]}"
    told = ["worker", "--master", master, "--rank", "1", "--world-size", "2"]
    start(["-m", "tl_devicefix", *told], arguments, stdout=subprocess.DEVNULL)
    return master, time.perf_counter()


def loader() -> Any:
    """What loads a model as it is, of the newest class that there is."""
    import transformer_lens

    if Version(version("transformer_lens")) < Version("4.0"):
        return transformer_lens.HookedTransformer.from_pretrained_no_processing
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers


def compare(arguments: argparse.Namespace) -> None:
    """Load, and print the table."""
    master, started = lend(arguments)
    import tl_devicefix

    load = loader()
    here = load(HUB_NAME, device="cpu")
    tl_devicefix.init_hosts(master, 0, 2)
    print(f"joined {time.perf_counter() - started:.1f} s after the other process was started")
    far = load(HUB_NAME, n_devices=2)
    print(far.placement)
    print(f"\n{'':<46}{'here, ms':>10}{'ratio':>8}{'longer, ms':>12}")
    with torch.inference_mode():
        for n_tokens in arguments.tokens:
            show_forward(far, here, n_tokens, arguments.repeats)
        show_generating(far, here, arguments)
        tokens = torch.randint(3, 1000, (1, arguments.context))
        name = f"blocks.{far.cfg.n_layers - 1}.hook_resid_pre"
        hooks = [(name, lambda value, hook: value * 2)]
        run = lambda model: model.run_with_hooks(tokens, fwd_hooks=hooks)  # noqa: E731
        found = side_by_side(lambda: run(far), lambda: run(here), arguments.repeats)
        show(f"a hook on the last block, {arguments.context} tokens", found)
        show_cache(far, here, arguments)
        show_flights(far, here, arguments)
    show_backward(far, here, arguments)
    show_steering(far, here, arguments)


def show_cache(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """All activations of a prompt: kept where they were computed, and read at home."""
    tokens = torch.randint(3, 1000, (1, arguments.context))

    def read(model: Any) -> None:
        for activation in model.run_with_cache(tokens)[1].values():
            activation.cpu()

    for what, run in (
        ("run_with_cache, unread", lambda model: model.run_with_cache(tokens)[0]),
        ("run_with_cache, all read at home", read),
    ):
        found = side_by_side(lambda: run(far), lambda: run(here), arguments.repeats)  # noqa: B023
        show(f"{what}, {arguments.context} tokens", found)


def show_backward(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """From the loss to all parameters."""
    tokens = torch.randint(3, 1000, (1, arguments.context))

    def run(model: Any) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        model(tokens, return_type="loss").backward()
        # The last one, behind all blocks.
        gradient: torch.Tensor = next(model.embed.parameters()).grad
        return gradient[0]

    found = side_by_side(lambda: run(far), lambda: run(here), arguments.repeats)
    show(f"backward to parameters, {arguments.context} tokens", found)
    for model in (far, here):
        model.zero_grad(set_to_none=True)


def show_steering(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """From the loss to a vector that is added to the first block's input, and no parameter."""
    tokens = torch.randint(3, 1000, (1, arguments.context))

    def run(model: Any) -> torch.Tensor | None:
        vector = torch.zeros(model.cfg.d_model, device=model.cfg.device, requires_grad=True)
        hooks = [("blocks.0.hook_resid_pre", lambda value, hook: value + vector)]
        model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks).backward()
        return vector.grad

    for model in (far, here):
        model.requires_grad_(False)
    found = side_by_side(lambda: run(far), lambda: run(here), arguments.repeats)
    show(f"backward to a steering vector, {arguments.context} tokens", found)


def show_forward(far: Any, here: Any, n_tokens: int, repeats: int) -> None:
    """A forward of one prompt."""
    tokens = torch.randint(3, 1000, (1, n_tokens))
    found = side_by_side(lambda: far(tokens), lambda: here(tokens), repeats)
    show(f"a forward of {n_tokens} tokens", found)


def show_generating(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """Tokens, one at a time behind a context."""
    tokens = torch.randint(3, 1000, (1, arguments.context))
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False}

    def of(model: Any, new: int) -> Callable[[], Any]:
        return lambda: model.generate(tokens, max_new_tokens=new, **options)

    new = arguments.new
    more = side_by_side(of(far, new), of(here, new), arguments.repeats)
    print(f"{f'a token behind {arguments.context} in a KV cache':<46}", end="")
    print(f"{1e3 * more[0] / new:>10.1f}{more[1]:>8.2f}{1e3 * more[2] / new:>12.1f}")


def show_flights(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """Many runs at once over both, and one after the other on one."""
    if not arguments.flights:
        return
    from tl_devicefix import pipeline_map

    runs = [torch.randint(3, 1000, (1, arguments.context)) for _ in range(arguments.flights)]
    found = side_by_side(
        lambda: list(pipeline_map(far, lambda model, tokens: model(tokens), runs)),
        lambda: [here(tokens) for tokens in runs],
        max(arguments.repeats // 3, 1),
    )
    show(f"{arguments.flights} runs in flight, over the loop on one", found)
    print(f"{'  how many times as fast':<46}{1 / found[1]:>18.2f}")
    loop = lambda: [here(tokens) for tokens in runs]  # noqa: E731
    alone = min(timed(loop) for _ in range(3))
    with beside(arguments):
        slowed = min(timed(loop) for _ in range(3))
    print(f"{'  two processes that each run the loop':<46}{2 * alone / slowed:>18.2f}")


@contextlib.contextmanager
def beside(arguments: argparse.Namespace) -> Iterator[None]:
    """While another process runs forwards of the same model, on the CPU."""
    told = ["-W", "ignore", __file__, *sys.argv[1:], "--only-run"]
    other = start(told, arguments, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        next(line for line in other.stdout if line == "running\n")
        yield
    finally:
        other.kill()
        other.wait()


def run_for_ever(arguments: argparse.Namespace) -> None:
    """Run forwards until this process is killed."""
    model = loader()(HUB_NAME, device="cpu")
    with torch.inference_mode():
        for count in itertools.count():
            model(torch.randint(3, 1000, (1, arguments.context)))
            if not count:
                print("running", flush=True)


_RANK = """
import sys, time
start = time.perf_counter()
import tl_devicefix, transformer_lens
from tl_devicefix.multihost.init_hosts import init_hosts
print(time.perf_counter() - start, flush=True)
sys.stdin.readline()
start = time.perf_counter()
init_hosts(memory="1GiB")
print(time.perf_counter() - start, flush=True)
"""


def show_startup(n_ranks: int) -> None:
    """What it takes that ranks meet, once each has imported what it needs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n_ranks)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks: list[Any] = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _RANK],
            env={**os.environ, **launcher, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            **pipes,  # type: ignore[call-overload]
        )
        for rank in range(n_ranks)
    ]
    imported = [float(each.stdout.readline()) for each in ranks]
    for each in ranks:
        print(file=each.stdin, flush=True)
    joined = float(ranks[0].stdout.readline())
    start = time.perf_counter()
    assert not any(each.wait() for each in ranks)
    print(f"{n_ranks} ranks on this host, which has {os.cpu_count()} cores:")
    print(f"imports, all at once: {min(imported):.1f} to {max(imported):.1f} s")
    print(f"join: {joined:.2f} s; end of all: {time.perf_counter() - start:.2f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="deep")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 128, 1024])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--flights", type=int, default=16)
    parser.add_argument("--only-run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--startup", type=int, metavar="RANKS", help="measure that, and no more")
    parser.add_argument("--cache", type=Path, help="keep the checkpoint here and use it again")
    arguments = parser.parse_args()
    if arguments.startup:
        show_startup(arguments.startup)
        return
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        cache = arguments.cache or Path(directory)
        if not list(cache.glob("models--*")):
            make_checkpoint(cache, arguments.size, max(1024, *arguments.tokens), "cpu")
        if os.environ.get("HF_HUB_CACHE") != str(cache):  # read when transformers is imported
            offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
            told = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--cache", str(cache)]
            sys.exit(subprocess.call(told, env={**os.environ, **offline}))
        if arguments.only_run:  # on the cores that it was started on
            run_for_ever(arguments)
        os.sched_setaffinity(0, CORES[:HALF])
        compare(arguments)


if __name__ == "__main__":
    main()
