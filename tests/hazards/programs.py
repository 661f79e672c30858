"""Streams, threads, processes, other compilers, copies of models."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hazards.base import LAST, Run, gradients, hazard, loss_of


def _sleep() -> None:
    torch.cuda._sleep(50_000_000)  # tens of milliseconds of the current stream


@hazard(needs_gpu=True)
def a_first_call_on_a_side_stream(run: Run) -> Any:
    """While the default stream is busy, and free memory of its pool is not zero."""
    model, trained = run.optimize(run.network()), run.optimize(run.network(train=True))
    images, floats = run.images(), run.floats()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    _sleep()
    del_me = [torch.full((2**20,), 255, dtype=torch.uint8, device=run.device) for _ in range(8)]
    del del_me
    with torch.cuda.stream(side), torch.no_grad():
        found = [model(images) for _ in range(3)]
    _sleep()
    with torch.cuda.stream(side):
        found += [run.step(trained, floats) for _ in range(3)]
        found.append(gradients(trained))
    side.synchronize()
    torch.cuda.synchronize()
    return found


@hazard(needs_gpu=True)
def several_streams_in_turns(run: Run) -> Any:
    """Replays share memory, so that one must wait for the other."""
    model = run.optimize(run.network())
    inputs = [run.images(seed) for seed in range(12)]
    run.infer(model)
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    with torch.no_grad():
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 3]):
                if i % 2:
                    torch.cuda._sleep(5_000_000)
                found.append(model(x))
    torch.cuda.synchronize()
    return found


@hazard(needs_gpu=True)
def several_models_on_several_streams(run: Run) -> Any:
    models = [run.optimize(run.network()) for _ in range(2)]
    trained = run.optimize(run.network(train=True))
    found: list[Any] = [run.infer(model) for model in models]
    found.append(run.train(trained))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    inputs = [run.images(seed) for seed in range(8)]
    floats = [run.floats(seed) for seed in range(8)]
    torch.cuda.synchronize()
    trained.zero_grad()
    for x, wide in zip(inputs, floats, strict=True):
        for model, stream in zip(models, streams, strict=False):
            with torch.cuda.stream(stream), torch.no_grad():
                found.append(model(x))
        with torch.cuda.stream(streams[2]):
            found.append(run.step(trained, wide))
    torch.cuda.synchronize()
    return found, gradients(trained)


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return `call` as a CUDA graph, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@hazard(needs_gpu=True)
def a_cuda_graph_of_the_user(run: Run) -> Any:
    """Around an optimized model; its own calls go on beside the replays."""
    model, x = run.optimize(run.network()), run.images()
    found = []
    with torch.no_grad():
        graph, out = capture(lambda: model(x))
        for seed in range(4):
            x.copy_(run.images(seed))
            graph.replay()
            found += [out.clone(), model(run.images(seed + 5))]
        graph.replay()
        found.append(out.clone())
        model.grouped_norm.weight.mul_(3)
        graph.replay()
        found.append(out.clone())
    run.changed(found[-2], found[-1])
    return found


@hazard(needs_gpu=True)
def a_training_step_in_a_cuda_graph_of_the_user(run: Run) -> Any:
    model, x = run.optimize(run.network(train=True)), run.floats()
    found = []

    def step() -> Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        return run.step(model, x)

    graph, out = capture(step)
    for seed in range(4):
        x.copy_(run.floats(seed))
        graph.replay()
        found += [out.clone(), gradients(model)]
    return found


@hazard(needs_gpu=True)
def several_cuda_graphs_beside_eager_steps(run: Run) -> Any:
    models = [run.optimize(run.network()) for _ in range(2)]
    inputs = [run.images(seed) for seed in range(2)]
    with torch.no_grad():
        pairs = [capture(lambda m=m, x=x: m(x)) for m, x in zip(models, inputs, strict=True)]
        found = []
        for seed in range(3):
            for (graph, out), x in zip(pairs, inputs, strict=True):
                x.copy_(run.images(seed))
                graph.replay()
                found.append(out.clone())
            found += [model(run.images(seed + 7)) for model in models]
    return found


def _in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@hazard()
def first_use_in_another_thread(run: Run) -> Any:
    model, trained = run.optimize(run.network()), run.optimize(run.network(train=True))
    found = [_in_thread(lambda: run.infer(model)), _in_thread(lambda: run.train(trained))]
    trained.zero_grad()
    found += [run.infer(model), run.train(trained)]
    trained.zero_grad()
    return found, _in_thread(lambda: run.infer(model)), _in_thread(lambda: run.train(trained))


@hazard()
def a_backward_in_another_thread_than_its_forward(run: Run) -> Any:
    model, found = run.optimize(run.network(train=True)), []
    for seed in range(4):
        model.zero_grad()
        with run.autocast():
            loss = loss_of(model(run.floats(seed)))
        _in_thread(loss.backward)
        found += [loss.detach(), gradients(model)]
    return found


@hazard()
def several_threads_at_once(run: Run) -> Any:
    """Each with a model of its own, and all with one that is shared."""
    shared = run.optimize(run.network())
    run.infer(shared)
    owns = [run.optimize(run.network()) for _ in range(4)]
    barrier = threading.Barrier(4)

    def work(index: int) -> Any:
        barrier.wait()
        found = [run.infer(shared, 5, seed=index), run.infer(owns[index], 5, seed=index)]
        if run.device == "cuda":
            torch.cuda.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, range(4)))


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))


@hazard()
def workers_of_a_data_loader(run: Run) -> Any:
    """Forked from a process with an optimized model, which goes on beside them."""
    model = run.optimize(run.network(train=True))
    found = [run.train(model)]
    for batch in DataLoader(Images(), 4, num_workers=2, multiprocessing_context="fork"):
        found.append(run.step(model, batch.to(run.device, memory_format=LAST)))
    return found, gradients(model)


@contextmanager
def one_process(device: str) -> Iterator[None]:
    """Be the only process of a group."""
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@hazard()
def data_parallel_training_of_processes(run: Run) -> Any:
    """DDP, a bucket at a time; the model optimized before and after it is wrapped."""
    from torch.nn.parallel import DistributedDataParallel

    found: list[Any] = []
    with one_process(run.device):
        for is_before in (True, False):
            model = run.network(train=True)
            if is_before:
                run.optimize(model)
            wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
            if not is_before:
                run.optimize(wrapped)
            optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
            found.append(run.train(wrapped, optimizer, 4))
            with wrapped.no_sync():
                run.step(wrapped, run.floats(7))
            run.step(wrapped, run.floats(8))
            found.append(gradients(wrapped))
    return found


@hazard(kernels=False)
def fully_sharded_training(run: Run) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with one_process(run.device):
        model = run.network(train=True).to(memory_format=torch.contiguous_format)
        mesh = init_device_mesh(run.device, (1,))
        for layer in (model.stem, model.grouped):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        run.optimize(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        outs = [run.step(model, run.floats(seed), optimizer) for seed in range(4)]
        return outs, [p.detach().full_tensor() for p in model.parameters()]


@hazard(needs_gpu=True)
def data_parallel_threads(run: Run) -> Any:
    model = nn.DataParallel(run.optimize(run.network(train=True)), device_ids=[0])
    return run.train(model)


@hazard()
def compiled_again_by_pytorch(run: Run) -> Any:
    """An optimized model, and a model that has one inside."""
    model = run.optimize(run.network())
    found = [run.infer(torch.compile(model, backend="aot_eager"))]
    outer = nn.Sequential(model, nn.ReLU())
    found += [run.infer(torch.compile(outer, backend="aot_eager")), run.infer(model)]
    trained = run.optimize(run.network(train=True))
    compiled = torch.compile(trained, backend="aot_eager")
    return found, run.train(compiled)[:2]


@hazard()
def named_as_a_backend(run: Run) -> Any:
    """``torch.compile(model, backend="confpred")``, whole and in place."""
    from confpred.pytorch.backend import confpred

    # A checkout that is on the path and not installed has no entry points.
    named = entry_points(group="torch_dynamo_backends", name="confpred")
    backend = "confpred" if named else confpred
    model, trained = run.network(), run.network(train=True)
    if run.is_optimized:
        trained.compile(backend=backend, options=run.options)
        model = torch.compile(model, backend=backend, fullgraph=True, options=run.options)
    return run.infer(model, 4), run.train(trained, steps=4)


@hazard()
def exported(run: Run) -> Any:
    model = run.optimize(run.network())
    run.infer(model)
    program = torch.export.export(model, (run.images(),))
    return run.infer(program.module()), run.infer(model)


@hazard()
def traced_by_jit(run: Run) -> Any:
    model = run.optimize(run.network())
    run.infer(model)
    return run.infer(torch.jit.trace(model, run.images())), run.infer(model)


@hazard()
def scripted(run: Run) -> Any:
    model = run.optimize(run.network())
    run.infer(model)
    whole = torch.jit.script(model)
    part = run.network()
    part.grouped = torch.jit.script(part.grouped)
    found = [run.infer(whole), run.infer(run.optimize(whole)), run.infer(run.optimize(part))]
    return found, run.infer(model)


@hazard()
def traced_by_fx(run: Run) -> Any:
    model = run.optimize(run.network())
    found = run.infer(torch.fx.symbolic_trace(model))
    return found, run.infer(model)


@hazard()
def pickled_and_saved(run: Run) -> Any:
    """Copies compute the same, are not optimized, and can be."""
    model = run.optimize(run.network())
    found = [run.infer(model)]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        pickle.loads(pickle.dumps(model)),  # noqa: S301  written here
        torch.load(file, weights_only=False),
        copy.deepcopy(model),
    ]
    for other in copies:
        assert other._compiled_call_impl is None
        found += [run.infer(other), run.infer(run.optimize(other))]
    fresh = run.network()
    fresh.load_state_dict(model.state_dict())
    return found, run.infer(fresh), list(model.state_dict())


class Told(Tensor):
    """A tensor that knows what it is told."""


class Listed(nn.Module):
    """A network for the first of a list."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, xs: list[Tensor]) -> Any:
        return self.network(xs[0])


@hazard()
def subclasses_of_tensors(run: Run) -> Any:
    """Before and between plain tensors, as an argument or inside of one, and as an example."""
    model, found = run.optimize(run.network()), []
    example = run.optimize(run.network(), run.images().as_subclass(Told))
    inside = run.optimize(Listed(run.network()))
    with torch.no_grad():
        for seed in range(3):
            told = run.images(seed).as_subclass(Told)
            outs = [model(told), model(x=told), example(told), inside([told])]
            found += [(type(out).__name__, out.as_subclass(Tensor)) for out in outs]
            found += run.infer(model, 1)
    return found, run.infer(model), run.infer(example)


@hazard()
def modes_of_torch_functions(run: Run) -> Any:
    from torch.overrides import TorchFunctionMode

    class Doubling(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.conv2d else out

    model = run.optimize(run.network())
    found = [run.infer(model)]
    with Doubling():
        found.append(run.infer(model))
    run.changed(*found)
    return found, run.infer(model)


@hazard(needs_gpu=True)
def models_made_and_thrown_away(run: Run) -> Any:
    """Their graphs give their memory back."""
    import gc

    found, sizes = [], []
    for _ in range(6):
        model = run.optimize(run.network())
        found.append(run.infer(model))
        del model
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[-1] - sizes[1] < 8 * 2**20, sizes
    return found


@hazard()
def many_models_of_one_class(run: Run) -> Any:
    """More than PyTorch keeps captured graphs of one piece of code."""
    limit = torch._dynamo.config.recompile_limit
    found = []
    for _ in range(limit + 2):
        found.append(run.infer(run.optimize(run.network(nn.Sequential, *_few())), 2))
    return found


def _few() -> tuple[nn.Module, ...]:
    torch.manual_seed(4)
    return nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 3, 1, 1, 1, 64), nn.BatchNorm2d(64), nn.ReLU()
