"""What it costs to have half of a model's blocks on another host, compared with one process.

    python benchmarks/hosts.py [--size deep] [--tokens 1 128 1024] [--context 128] [--new 16]
                               [--repeats 9] [--threads 1] [--flights 16] [--cache DIR]

It starts a Ray cluster of two nodes on this machine. A Llama with random weights (on
TransformerLens 4 a TransformerBridge) is loaded twice: in this process alone, and with half of its
blocks on the other node. The two models take turns; ratios are medians of the ratios of
neighbouring turns. The driver and the worker each use half of the cores, and `--threads` threads.

With `--flights`, runs in flight (`tl_devicefix.pipeline_map`) on the split model are compared with
a loop in one process. For comparison, a row has the throughput of two independent loops, divided by
that of one. The last rows are the seconds until a fault is reported.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from forward import SIZES, make_checkpoint
from load import HUB_NAME
from packaging.version import Version


def timed(run: Callable[[], Any]) -> float:
    """Return the wall seconds until the result is here."""
    start = time.perf_counter()
    result = run()
    if isinstance(result, torch.Tensor):
        result.cpu()
    return time.perf_counter() - start


def side_by_side(
    far: Callable[[], Any], here: Callable[[], Any], repeats: int
) -> tuple[float, float, float]:
    """Return the medians of the seconds here, of the ratio, and of the difference in seconds."""
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


def start(command: list[str], arguments: argparse.Namespace, **pipes: Any) -> subprocess.Popen[str]:
    """Start a Python process on the other half of the cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
    started = subprocess.Popen([sys.executable, *command], env=environment, text=True, **pipes)
    os.sched_setaffinity(started.pid, CORES[HALF:] or CORES)
    return started


def start_node(stack: contextlib.ExitStack, *options: str) -> list[psutil.Process]:
    """Start a Ray node, which the stack ends, and return its processes."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray"))
    small = ["--num-cpus=0", "--num-gpus=0", "--object-store-memory=500000000", "--block"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *small]
    log = Path(directory, "log")
    with log.open("w") as file:
        node = subprocess.Popen(
            [*command, f"--temp-dir={directory}", "--disable-usage-stats"],
            env=os.environ | {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stack.callback(end, node)
    while "Ray runtime started" not in log.read_text():
        if node.poll() is not None:
            sys.exit(f"a node does not start:\n{log.read_text()}")
        time.sleep(0.1)
    return family(node.pid)


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all that it has started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def end(node: subprocess.Popen[bytes]) -> None:
    """Kill a node with its processes."""
    if node.poll() is None:
        for process in family(node.pid):
            process.kill()
        node.wait()


def worker_among(processes: list[psutil.Process]) -> psutil.Process:
    """Return the worker's process on the node with these processes."""
    (worker,) = (
        child
        for child in family(processes[0].pid)
        if child.status() != psutil.STATUS_ZOMBIE and "ray::WorkerActor" in child.cmdline()[0]
    )
    return worker


def attach(address: str, node: list[psutil.Process]) -> Any:
    """Join the cluster, pin the worker to its half of the cores, and return its host."""
    import tl_devicefix
    from tl_devicefix.multihost.hosts import joined_hosts

    start = time.perf_counter()
    tl_devicefix.init_hosts(address)
    print(f"joined in {time.perf_counter() - start:.1f} s")
    for thread in worker_among(node).threads():  # Ray runs the calls in some of them
        os.sched_setaffinity(thread.id, CORES[HALF:] or CORES)
    return joined_hosts()[0]


def show_memory(what: str, processes: list[psutil.Process]) -> None:
    """Print the memory of processes (PSS: shared memory is divided among them)."""
    used = sum(process.memory_full_info().pss for process in processes)
    print(f"{what}: {len(processes)} processes, {used / 2**20:.0f} MiB")


def show_call(connection: Any, repeats: int) -> None:
    """Print the milliseconds of a call that does nothing: Ray's part of each row."""
    found = [timed(lambda: connection.call("free_memory", 0)) for _ in range(10 * repeats)]
    print(f"{'a call that does nothing':<46}{1e3 * statistics.median(found):>10.2f}")


def show_faults(connection: Any, address: str, node: list[psutil.Process]) -> None:
    """Print the seconds from a fault until a waiting caller gets an error."""
    from tl_devicefix.multihost.hosts import HostLost

    def show_fault(what: str, fault: Callable[[], Any]) -> None:
        waiting = threading.Thread(target=ask)
        waiting.start()
        start = time.perf_counter()
        fault()
        waiting.join()
        print(f"{what:<46}{time.perf_counter() - start:>12.2f}", flush=True)

    def ask() -> None:
        with contextlib.suppress(HostLost):
            while True:
                connection.call("free_memory", 0)

    print(f"\n{'':<46}{'reported, s':>12}")
    show_fault("a killed worker", worker_among(node).kill)
    connection = attach(address, node)
    show_fault("a killed node", lambda: [process.kill() for process in family(node[0].pid)])


def loader() -> Any:
    """Return the loader without processing: HookedTransformer's, or from 4.0 on the Bridge's."""
    import transformer_lens

    if Version(version("transformer_lens")) < Version("4.0"):
        return transformer_lens.HookedTransformer.from_pretrained_no_processing
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers


def compare(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    """Start the cluster, load, and print the table."""
    load = loader()
    address = f"127.0.0.1:{arguments.port}"
    head = start_node(stack, "--head", f"--port={arguments.port}", "--include-dashboard=false")
    node = start_node(stack, f"--address={address}")
    show_memory("the head", head)
    show_memory("the other node", node)
    connection = attach(address, node)
    show_memory("the worker, before it loads", [worker_among(node)])
    here = load(HUB_NAME, device="cpu")
    half = here.cfg.n_layers // 2
    there = {f"blocks.{layer}": "host1/cpu" for layer in range(half, here.cfg.n_layers)}
    far = load(HUB_NAME, device_map={"": "cpu", **there})
    for layer in range(half, here.cfg.n_layers):
        here.blocks[layer].requires_grad_(False)  # parameters on another host are frozen
    print(far.placement)
    print(f"\n{'':<46}{'here, ms':>10}{'ratio':>8}{'longer, ms':>12}")
    show_call(connection, arguments.repeats)
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
    show_faults(connection, address, node)


def show_cache(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """Cache all activations of a prompt: left where they were computed, or read at home."""
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
    """Run a backward from the loss to this process's parameters: other hosts' are frozen."""
    tokens = torch.randint(3, 1000, (1, arguments.context))

    def run(model: Any) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        model(tokens, return_type="loss").backward()
        # Autograd computes the embedding's gradient last, after all blocks.
        gradient: torch.Tensor = next(model.embed.parameters()).grad
        return gradient[0]

    found = side_by_side(lambda: run(far), lambda: run(here), arguments.repeats)
    show(f"backward to parameters at home, {arguments.context} tokens", found)
    for model in (far, here):
        model.zero_grad(set_to_none=True)


def show_steering(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """Run a backward to a vector added to the first block's input; all parameters are frozen."""
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
    """Run a forward of one prompt."""
    tokens = torch.randint(3, 1000, (1, n_tokens))
    found = side_by_side(lambda: far(tokens), lambda: here(tokens), repeats)
    show(f"a forward of {n_tokens} tokens", found)


def show_generating(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """Generate tokens after a context."""
    tokens = torch.randint(3, 1000, (1, arguments.context))
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False}

    def generating(model: Any, new: int) -> Callable[[], Any]:
        return lambda: model.generate(tokens, max_new_tokens=new, **options)

    new = arguments.new
    more = side_by_side(generating(far, new), generating(here, new), arguments.repeats)
    print(f"{f'a token after {arguments.context} in a KV cache':<46}", end="")
    print(f"{1e3 * more[0] / new:>10.1f}{more[1]:>8.2f}{1e3 * more[2] / new:>12.1f}")


def show_flights(far: Any, here: Any, arguments: argparse.Namespace) -> None:
    """Compare runs in flight on the split model with a loop in one process."""
    if not arguments.flights:
        return
    from tl_devicefix import pipeline_map

    runs = [torch.randint(3, 1000, (1, arguments.context)) for _ in range(arguments.flights)]
    found = side_by_side(
        lambda: list(pipeline_map(far, lambda model, tokens: model(tokens), runs)),
        lambda: [here(tokens) for tokens in runs],
        max(arguments.repeats // 3, 1),
    )
    show(f"{arguments.flights} runs in flight / the loop in one process", found)
    print(f"{'  how many times as fast':<46}{1 / found[1]:>18.2f}")
    loop = lambda: [here(tokens) for tokens in runs]  # noqa: E731
    alone = min(timed(loop) for _ in range(3))
    with beside(arguments):
        slowed = min(timed(loop) for _ in range(3))
    print(f"{'  two processes that each run the loop':<46}{2 * alone / slowed:>18.2f}")


@contextlib.contextmanager
def beside(arguments: argparse.Namespace) -> Iterator[None]:
    """Run forwards of the same model in another process, within a `with` block."""
    command = ["-W", "ignore", __file__, *sys.argv[1:], "--only-run"]
    other = start(command, arguments, stdout=subprocess.PIPE)
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
    parser.add_argument("--port", type=int, default=20080, help="the head node's (%(default)s)")
    parser.add_argument("--cache", type=Path, help="keep the checkpoint here, for this size")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory:
        cache = arguments.cache or Path(directory)
        if not list(cache.glob("models--*")):
            longest = max(1024, arguments.context + arguments.new, *arguments.tokens)
            make_checkpoint(cache, arguments.size, longest, "cpu")
        if os.environ.get("HF_HUB_CACHE") != str(cache):  # read when transformers is imported
            offline = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
            again = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--cache", str(cache)]
            sys.exit(subprocess.call(again, env={**os.environ, **offline}))
        if arguments.only_run:  # `start` has chosen its cores
            run_for_ever(arguments)
        os.sched_setaffinity(0, CORES[:HALF])
        with contextlib.ExitStack() as stack:
            compare(arguments, stack)


if __name__ == "__main__":
    main()
