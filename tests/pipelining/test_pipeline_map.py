"""`pipeline_map`: runs in flight give what they give one after the other."""

import contextlib
import gc
import importlib
import itertools
import threading
import time
import traceback
import weakref
from functools import partial

import pytest
import torch
import transformers.utils.logging as hf_logging
from comparison import assert_bit_equal
from devices import device
from hf_models import padded
from runs_of_users import LAST, double, generated, logits, own_forward

import tl_devicefix
from tl_devicefix import pipeline_map
from tl_devicefix.dispatch import scheduler


@pytest.fixture
def batches(tokens):
    """Four batches of tokens, each different: mostly one more than run at the same time."""
    return [tokens.roll(shift, 1) for shift in range(4)]


@pytest.fixture
def model(shared):
    return shared("llama")


def assert_nothing_is_left(model):
    assert not [thread for thread in threading.enumerate() if "pipeline_map" in thread.name]
    for point in model.hook_dict.values():
        assert not point.fwd_hooks
        assert not point.bwd_hooks


def some_of_the_cache(model, batch):
    _, cache = model.run_with_cache(batch, names_filter=lambda name: "resid_post" in name)
    return {name: cache[name] for name in cache}


def steered_at_a_block_elsewhere(model, batch):
    vector = torch.linspace(-1, 1, model.cfg.d_model, device=model.cfg.device)
    return model.run_with_hooks(batch, fwd_hooks=[(LAST, lambda a, hook: a + vector.to(a.dtype))])


def a_number_that_is_waited_for(model, batch):
    seen = []

    def look(activation, hook):
        seen.append(activation.sum().item())

    model.run_with_hooks(batch, fwd_hooks=[(f"blocks.{i}.hook_resid_pre", look) for i in (1, 4)])
    return seen


def with_a_mask(model, batch):
    return model(batch, attention_mask=padded(batch))


def a_forward_within_a_hook(model, batch):
    inner = []

    def add(activation, hook):
        inner.append(model(batch.flip(0), stop_at_layer=1))
        return activation + inner[0].to(activation.device)

    return model.run_with_hooks(batch, fwd_hooks=[(LAST, add)]), inner


def gradients(model, batch):
    kept = {}

    def keep(gradient, hook):
        kept[hook.name] = gradient.clone()

    vector = torch.zeros(model.cfg.d_model, device=model.cfg.device, requires_grad=True)
    hooks = {
        "fwd_hooks": [("blocks.0.hook_resid_pre", lambda activation, hook: activation + vector)],
        "bwd_hooks": [(name, keep) for name in ("blocks.1.hook_resid_pre", LAST)],
    }
    with torch.enable_grad(), model.hooks(**hooks):
        return torch.autograd.grad(model(batch).square().mean(), vector), kept


FORWARDS = some_of_the_cache, steered_at_a_block_elsewhere, generated, with_a_mask
WAITING = a_number_that_is_waited_for, a_forward_within_a_hook


@pytest.mark.parametrize(("runs", "n"), [(FORWARDS, 3), (WAITING, 2), ((gradients,), 2)])
def test_pipelined_runs_equal_a_loops_bit_for_bit(model, batches, runs, n):
    def all_of_them(model, batch):
        return {run.__name__: run(model, batch) for run in runs}

    expected = [all_of_them(model, batch) for batch in batches[:n]]
    assert_bit_equal(list(pipeline_map(model, all_of_them, batches[:n], 2)), expected)
    assert_nothing_is_left(model)


OF_ALL_RUNS = {
    "rand draws random numbers": lambda view, batch: torch.rand(1),
    "normal_ draws": lambda view, batch: torch.ones(2).normal_(),
    "dropout draws": lambda view, batch: torch.nn.functional.dropout(torch.ones(2)),
    "multinomial draws": lambda view, batch: view.generate(batch[:1], verbose=False),
    "backward uses .grad": lambda view, batch: view(batch).mean().backward(),
    "reading or setting it uses .grad": lambda view, batch: view.zero_grad(),
    "randn draws random numbers": lambda view, batch: view.run_with_hooks(
        batch, fwd_hooks=[(LAST, lambda activation, hook: activation + torch.randn(()))]
    ),
    # With `max_in_flight=1`, these change the model.
    "may not fuse": lambda view, batch: tl_devicefix.fuse_blocks(view),
    "cfg.use_attn_result was changed": lambda view, batch: view.set_use_attn_result(True),
}
"""What a run in flight may not do, as it acts on all runs; by what the error says."""


def test_what_acts_on_all_runs_is_refused_in_flight(load, batches):
    model = load("llama")
    for words, act in OF_ALL_RUNS.items():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        state = torch.get_rng_state()

        def run(view, batch, act=act):
            with torch.enable_grad():
                act(view, batch.to(view.cfg.device))

        with pytest.raises(RuntimeError, match=rf"{words}.*max_in_flight=1"):
            next(pipeline_map(model, run, batches))
        assert torch.equal(torch.get_rng_state(), state)
        next(pipeline_map(model, run, batches, 1))
        assert_nothing_is_left(model)


def test_runs_draw_from_a_generator_of_their_own(model, batches):
    def run(view, item):
        seed, batch = item
        noise = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        return view(batch), noise

    items = list(enumerate(batches))
    assert_bit_equal(list(pipeline_map(model, run, items)), [run(model, item) for item in items])


def test_runs_in_flight_of_a_model_with_dropout_are_refused(load, batches):
    model = load("llama")
    model.blocks[1].mlp.add_module("put_in", torch.nn.Dropout())
    model.train()
    with pytest.raises(RuntimeError, match=r"put_in applies dropout.*model\.eval\(\)"):
        next(pipeline_map(model, logits, batches))
    next(pipeline_map(model.eval(), logits, batches))


MINE = torch.nn.Parameter(torch.ones(1))
ATTRIBUTES = {
    "training": lambda view: setattr(view.blocks[1].attn, "training", 1),
    "put_in": lambda view: setattr(view.blocks[1].mlp, "put_in", torch.ones(1)),
    "put_on": lambda view: setattr(view, "put_on", 3.0),
    "a parameter": lambda view: setattr(
        view.blocks[1].attn, "W_Q" if "W_Q" in view.blocks[1].attn._parameters else "mine", MINE
    ),
    "a parameter, buffer or module": lambda view: setattr(
        view.blocks[1].hook_resid_post, "probe", torch.nn.Identity()
    ),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_a_run_sets_in_its_view_is_refused(model, batches, name):
    results = pipeline_map(model, lambda view, batch: ATTRIBUTES[name](view), batches)
    with pytest.raises(RuntimeError, match=rf"a run set {name} of \w+ in its view"):
        list(results)
    results = pipeline_map(model, lambda view, batch: ATTRIBUTES[name](view), batches)
    next(results)
    with pytest.raises(RuntimeError, match=rf"a run set {name} of \w+ in its view"):
        results.close()


@pytest.mark.hooked
def test_runs_may_extend_rotary_tables(load, batches, monkeypatch):
    attention = importlib.import_module("transformer_lens.components").AbstractAttention
    if not hasattr(attention, "ROTARY_INITIAL_CACHE_SIZE"):
        pytest.skip("this TransformerLens makes tables of n_ctx rows")
    monkeypatch.setattr(attention, "ROTARY_INITIAL_CACHE_SIZE", 4)
    model = load("llama")
    results = list(pipeline_map(model, logits, batches))
    assert_bit_equal(results, [model(batch) for batch in batches])


def test_runs_may_generate_and_call_eval(model, batches):
    batches = batches[:2]
    model.train()  # as `from_pretrained` leaves it
    expected = [generated(model, batch) for batch in batches]
    assert_bit_equal(list(pipeline_map(model.train(), generated, batches)), expected)
    assert all(pipeline_map(model.train(), lambda view, batch: view.eval() is view, batches))


def test_a_run_goes_on_until_it_changes_devices(model, batches, monkeypatch):
    """Threads that alternate at each operation cost twice the time."""
    monkeypatch.setattr(scheduler, "MAX_WAIT", 600.0)
    events = []

    def note(activation, hook):
        events.append((threading.get_ident(), model.placement.device_of(hook.name)))

    def run(view, batch):
        view.run_with_hooks(batch, fwd_hooks=[(lambda name: "resid" in name, note)])

    list(pipeline_map(model, run, batches))
    n_devices = len({on for _, on in events})
    turns = [key for key, _ in itertools.groupby(events)]
    # At home also after the last block's device.
    assert len(turns) <= len(batches) * (n_devices + 1), turns


def test_a_run_that_waits_in_a_hook_holds_others_up_briefly(model, batches, monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_WAIT", 0.01)
    waits, other = threading.Event(), threading.Event()

    def wait(activation, hook):
        waits.set()
        assert other.wait(timeout=30), "the other run never came"

    def run(view, number):
        if number == 0:
            return view.run_with_hooks(batches[0], fwd_hooks=[(LAST, wait)])
        assert waits.wait(timeout=30)
        output = view(batches[0], stop_at_layer=1)
        other.set()
        return output

    list(pipeline_map(model, run, range(2)))


def test_runs_of_an_opt_go_in_flight(load, batches):
    """A Bridge's hooks are closures over its modules there, and its forwards set attributes."""
    model = load("opt", 2)
    results = list(pipeline_map(model, lambda view, batch: (view, view(batch)), batches))
    assert model not in [view for view, _ in results]
    assert_bit_equal([output for _, output in results], [model(batch) for batch in batches])


def run_nothing(blocks, activation, hook):
    return activation


class Holder:
    def __init__(self, model):
        self.model = model

    def hook(self, activation, hook):
        return activation

    __call__ = hook


def hook_of(model):
    return lambda activation, hook: activation + model.blocks[1].mlp(activation)


HOLDING = {
    "a closure": lambda model: model.add_perma_hook(LAST, hook_of(model)),
    "a closure in a partial": lambda model: model.add_perma_hook(LAST, partial(hook_of(model))),
    "PyTorch's hook": lambda model: model.blocks[1].mlp.register_forward_hook(
        partial(lambda block, *args: None, model.blocks[2])
    ),
    "a default": lambda model: model.add_perma_hook(LAST, lambda x, hook, block=model.blocks[2]: x),
    "a list": lambda model: model.add_perma_hook(LAST, partial(run_nothing, [model.blocks[2]])),
    "a method's object": lambda model: model.add_perma_hook(LAST, Holder(model).hook),
    "an object": lambda model: model.add_perma_hook(LAST, Holder(model)),
    "a forward": lambda model: own_forward(model.blocks[1].mlp),  # to the end
}


def test_runs_of_a_model_that_a_function_holds_go_in_a_loop(load):
    """One at a time, on the model itself."""
    model = load("llama")
    for name, hold in HOLDING.items():
        handle = hold(model)
        assert list(pipeline_map(model, lambda view, item: view, range(2))) == [model] * 2, name
        model.reset_hooks(including_permanent=True)
        if handle is not None:
            handle.remove()


def test_runs_of_a_model_on_one_device_are_a_loop(on_one, batches):
    model = on_one("llama")
    given = []

    def run(view, batch):
        given.append(view)
        view.add_hook(LAST, double)
        return view(batch)

    expected = model.run_with_hooks(batches[0], fwd_hooks=[(LAST, double)])
    assert_bit_equal(list(pipeline_map(model, run, batches[:1] * 2)), [expected] * 2)
    assert given == [model, model]
    assert_nothing_is_left(model)
    expected = [logits(model, batch) for batch in batches]
    assert_bit_equal(list(pipeline_map(model, logits, batches, 2)), expected)


STATES = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device(device(2)),
    "gather_on": lambda: tl_devicefix.gather_on("cpu"),
    "mix_devices": tl_devicefix.mix_devices,
}


def what_is_in_force(model, batch):
    def device_of(compute):
        with contextlib.suppress(RuntimeError):
            return str(compute().device)
        return None

    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        device_of(lambda: torch.ones(1)),
        device_of(lambda: torch.ones(1, device=device(0)) + torch.ones(1, device=device(3))),
        str(model.W_in.device),
        torch.get_num_threads(),
    )


def test_callers_torch_modes_apply_within_a_run(model):
    outside = what_is_in_force(model, None)
    expected, actual = {}, {}
    for name, state in STATES.items():
        with state():
            expected[name] = [what_is_in_force(model, None)] * 2
            actual[name] = list(pipeline_map(model, what_is_in_force, [0, 1]))
    assert actual == expected
    assert list(pipeline_map(model, what_is_in_force, [0])) == [outside]


@pytest.mark.parametrize(("error", "max_in_flight"), [(KeyError, 4), (StopIteration, 1)])
def test_error_in_a_run_is_raised_in_order_naming_its_item(model, batches, error, max_in_flight):
    def run(view, item):
        number, batch = item

        def fail(activation, hook):
            if number == 2:
                raise error from LookupError("what it came from")

        view.run_with_hooks(batch, fwd_hooks=[(LAST, fail)])
        return number

    results = pipeline_map(model, run, enumerate(batches), max_in_flight)

    assert list(itertools.islice(results, 2)) == [0, 1]
    with pytest.raises(RuntimeError if error is StopIteration else error) as raised:
        next(results)
    shown = "".join(traceback.format_exception(raised.value))
    for part in ("run of item 2", "what it came from", error.__name__):
        assert part in shown
    assert_nothing_is_left(model)
    assert next(results, "no more") == "no more"


def test_endless_iterator_is_read_no_further_than_needed(model, batches):
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield batches[0]

    results = pipeline_map(model, logits, endless(), max_in_flight=3)
    assert not read
    for n_read in (4, 5):
        next(results)
        assert len(read) == n_read
    results.close()
    assert len(read) == 5
    assert_nothing_is_left(model)


@pytest.mark.parametrize(("error", "n_fetched"), [(LookupError, 2), (KeyboardInterrupt, 0)])
def test_error_of_items_comes_after_results_interrupt_at_once(model, batches, error, n_fetched):
    fetched = []

    def items():
        yield from batches[:2]
        raise error

    with pytest.raises(error):
        fetched.extend(0 for _ in pipeline_map(model, logits, items(), max_in_flight=2))
    assert len(fetched) == n_fetched
    assert_nothing_is_left(model)


def test_closing_the_iterator_ends_its_runs_and_frees_memory(model, batches):
    waits, goes_on = threading.Event(), threading.Event()

    def run(view, number):
        if number:
            kept = view(batches[0])
            alive.append(weakref.ref(kept))
            waits.set()
            goes_on.wait(10)
            while True:  # until it is ended
                kept = kept + 0
        return number

    alive = []
    results = pipeline_map(model, run, range(5), max_in_flight=3)
    assert next(results) == 0
    assert waits.wait(10)
    goes_on.set()
    results.close()

    assert_nothing_is_left(model)
    gc.collect()
    assert not [item for item in alive if item() is not None]


CHANGES = {
    "in place": lambda module, name, weight: weight.detach().mul_(1),
    "replaced": lambda module, name, weight: setattr(
        module, name, torch.nn.Parameter(weight.detach())
    ),
    "requires_grad": lambda module, name, weight: weight.requires_grad_(False),
}


def test_weight_changed_while_runs_are_in_flight_is_refused(load, batches):
    """Before the last result at the latest, and where the caller stops."""
    model = load("llama")
    for how, change_weight in CHANGES.items():

        def change(model, change_weight=change_weight):
            module = next(module for module in model.blocks[2].modules() if module._parameters)
            change_weight(module, *next(iter(module._parameters.items())))

        def run(view, batch, how=how, change=change):
            view(batch)
            if how != "replaced":  # which the caller does
                change(view)

        with pytest.raises(RuntimeError, match=r"\.2\..* was changed before result [13]"):
            [change(model) for _ in pipeline_map(model, run, batches)]
        if how != "requires_grad":  # it is changed already
            stopped = pipeline_map(model, run, batches)
            next(stopped)
            change(model)
            with pytest.raises(RuntimeError, match=r"\.2\..* was changed before result 0"):
                stopped.close()


USES = {
    "forward": logits,
    "run_with_cache": lambda model, batch: model.run_with_cache(batch),
    "hooks": lambda model, batch: model.hooks(fwd_hooks=[(LAST, double)]).__enter__(),
    "a hook point's add_hook": lambda model, batch: model.hook_dict[LAST].add_hook(double),
    "generate": generated,
    "pipeline_map": lambda model, batch: list(pipeline_map(model, logits, [batch])),
}


def test_run_that_calls_or_hooks_the_model_itself_is_refused(model, batches):
    tokenizer = model.tokenizer
    for use in USES.values():

        def run(view, batch, use=use):
            with view.hooks(fwd_hooks=[(LAST, double)]):
                return model.cfg.d_model, model.blocks[0].attn.W_Q, use(model, batch)

        with pytest.raises(RuntimeError, match="the model itself: use the first argument of `run`"):
            list(pipeline_map(model, run, batches, 3))
        assert_nothing_is_left(model)
        assert model.tokenizer is tokenizer
        list(pipeline_map(model, use, batches[:2], 3))  # of a view


def test_hooks_of_a_nested_run_reach_no_other_run(model, batches):
    """Each run in a run has a view of a view, which is restored as well."""

    def run(view, numbered):
        number, batch = numbered
        if number < 2:  # with two runs in flight, each later run gets the view of one of these
            view.add_hook(LAST, double)
            view.blocks[0].register_forward_hook(lambda block, args, output: None)
        return view(batch)

    def outer(view, batches):
        return list(pipeline_map(view, run, enumerate(batches), 2))

    ((*_, before_last, last),) = pipeline_map(model, outer, [batches], 2)
    assert_bit_equal([before_last, last], [model(batch) for batch in batches[-2:]])


def test_caller_may_run_and_hook_the_model_between_results(model, batches):
    hooked = lambda: model.run_with_hooks(batches[0], fwd_hooks=[(LAST, double)])  # noqa: E731
    expected = [(logits(model, batch), hooked()) for batch in batches[:3]]
    actual = [(out, hooked()) for out in pipeline_map(model, logits, batches[:3], 2)]
    assert_bit_equal(actual, expected)
    with pytest.raises(RuntimeError, match=r"hooks on blocks\.4\..* were added or removed"):
        [model.add_hook(LAST, double) for _ in pipeline_map(model, logits, batches, 3)]


def test_a_run_in_flight_may_not_remove_the_models_hooks(model, batches):
    """In a loop, later runs lack them."""
    model.add_hook(LAST, double)
    removed = r"run 0 removed a hook that was on blocks\.4\..*max_in_flight=1"
    with pytest.raises(RuntimeError, match=removed):
        next(pipeline_map(model, lambda view, _: view.reset_hooks(), batches))
    assert len(model.hook_dict[LAST].fwd_hooks) == 1


def test_pipeline_map_refuses_bad_arguments_at_once(on_one):
    model = on_one("llama")
    for max_in_flight in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="max_in_flight must be an int of 1 or more, but is"):
            pipeline_map(model, logits, [], max_in_flight)
    with pytest.raises(TypeError, match="Linear"):
        pipeline_map(torch.nn.Linear(2, 2), logits, [])
    with pytest.raises(TypeError, match="'function' object is not iterable"):
        pipeline_map(model, [], logits)


def test_a_bar_shows_how_many_runs_there_are(on_one, batches, capsys, monkeypatch):
    model = on_one("llama")
    monkeypatch.setattr(hf_logging, "_tqdm_active", True)
    for max_in_flight in (1, 2):
        list(pipeline_map(model, logits, batches, max_in_flight, progress=True))
        assert "4/4" in capsys.readouterr().err
    list(tl_devicefix.sweep(model, batches[0], [[], []], progress=True))
    assert "2/2" in capsys.readouterr().err


def test_tokenizer_settings_of_one_run_reach_no_other(model):
    texts, reading, has_read = ["t1 t2", "t3 t4 t5"], threading.Event(), threading.Event()

    def meanwhile(activation, hook):
        reading.set()
        assert has_read.wait(30)

    def run(view, number):
        if number == 0:
            options = {"prepend_bos": not view.cfg.default_prepend_bos, "padding_side": "left"}
            with view.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", meanwhile)]):
                return view(texts, **options)
        assert reading.wait(30)
        tokens = view.to_tokens(texts)
        has_read.set()
        return tokens

    before = model.cfg.default_prepend_bos, model.tokenizer.padding_side
    expected = model.to_tokens(texts)

    _, tokens = pipeline_map(model, run, range(2))

    assert torch.equal(tokens, expected)
    assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == before


def test_runs_in_flight_encode_texts_one_at_a_time(model, monkeypatch):
    """A call sets the padding of the Rust tokenizer, which all copies share."""
    kind, encoding = type(model.tokenizer), threading.Lock()
    name = "_batch_encode_plus" if hasattr(kind, "_batch_encode_plus") else "_encode_plus"
    encode = getattr(kind, name)

    def alone(*args, **kwargs):
        assert encoding.acquire(blocking=False)
        time.sleep(0.02)
        encoding.release()
        return encode(*args, **kwargs)

    monkeypatch.setattr(kind, name, alone)
    texts = ["t1", "t2 t3"]
    calls = [lambda view: view.tokenizer(texts), lambda _: model.to_tokens(texts)]
    runs = (call for call in calls * 3 if model.to_tokens(texts) is not None)  # in this thread
    list(pipeline_map(model, lambda view, call: call(view), runs, 3))


def test_a_runs_padding_side_reaches_no_other_run(model):
    side = model.tokenizer.padding_side

    def run(view, number):
        before = view.tokenizer.padding_side
        view.tokenizer.padding_side = "left" if side == "right" else "right"
        return before

    assert set(pipeline_map(model, run, range(6), 2)) == {side}
    assert model.tokenizer.padding_side == side
