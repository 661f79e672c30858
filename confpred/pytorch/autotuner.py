"""Triton's autotuner with a model in place of trials.

    call --> remembered config of the key                                   Triton's own cache
     or  --> problem --> model: first config(s) --> launch, or time `top_k` of them
                     `-> no model: all configs are timed, and kept as measurements

It is a subclass, so that PyTorch's compiler and all else that knows `Autotuner` treats it as one:
the compiler reads ``perf_model`` and ``configs_top_k``, where the model's order is.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import operator
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

from confpred._version import __version__
from confpred.concurrency import cached_property
from confpred.cuda import driver
from confpred.data.measurements import Measurement, Run
from confpred.errors import ConfpredError, InvalidInput, ModelError, UnknownDevice, first_line
from confpred.families.registry import introduce
from confpred.measure.timing import Outcome
from confpred.predict.choice import MAX_TOP
from confpred.predict.predictor import Predictor
from confpred.problem.device import Device, get_device
from confpred.triton.problem import KernelCall, leading, word_of
from confpred.triton.source import plain_function, source_of
from confpred.triton.triton_family import (
    Choices,
    ExampleCall,
    Functions,
    TritonFamily,
    config_key,
)

log = logging.getLogger(__name__)
_NEVER = float("inf")
#: Variable with the file that new calls are recorded in.
RECORD = "CONFPRED_RECORD"


def current_device() -> Device:
    """Return the description of PyTorch's current GPU.

    Raises:
        MissingExtra: it is in no table, and cuda.core is not installed, which asks the driver.
    """
    return _described(torch.cuda.current_device())


@cache
def _described(ordinal: int) -> Device:
    try:
        return get_device(torch.cuda.get_device_name(ordinal))
    except UnknownDevice:
        return driver.device_of(ordinal)


class Tuned(Autotuner):
    """A Triton kernel whose config a model chooses; made by `confpred.tuned`, which describes the
    arguments."""

    def __init__(
        self,
        fn: Any,
        configs: Sequence[Any],
        key: Sequence[str],
        *,
        model: str | Path | None,
        top_k: int,
        transfer: bool,
        keep: str | Path | None,
        example: Callable[..., object] | None,
        reference: Callable[..., Mapping[str, torch.Tensor]] | None,
        features: Functions | None,
        choices: Choices | None,
        name: str | None,
        **autotune: Any,
    ) -> None:
        if not isinstance(top_k, int) or top_k < 1:
            raise InvalidInput("top_k", top_k, "an integer of at least 1")
        # Before the base class sets its own attributes, some of which are properties here.
        self._name, self._features, self._choices = name, features, choices
        self._example, self._reference = example, reference
        self._transfer, self._keep, self._run = transfer, keep, _new_run()
        self._model, self._top_k = None if model is None else Path(model), top_k
        self._by_trials = True
        self._said: set[str] = set()
        self._broken: list[Any] = []  # configs that the GPU refused
        self._orders: dict[tuple[KernelCall, Device], list[Any]] = {}
        self._captured: list[tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self._chosen, self._unkept, self._numbers = False, False, itertools.count()
        self._timed: tuple[KernelCall, Device] | None = None  # a call whose times are to be kept
        options = {"reset_to_zero": None, "restore_value": None, **autotune}
        super().__init__(fn, fn.arg_names, list(configs), list(key), **options)
        self._places = _perf_model(self)
        self._reset: Callable[..., None] = self.pre_hook
        self.pre_hook: Callable[..., None] = self._reset_after_trials
        self.cache: dict[tuple[Any, ...], Any]
        self._by_trials = self._model is None

    # PyTorch's compiler reads the next two, and never calls `prune_configs`.

    @property
    def perf_model(self) -> Any:
        """The positions of configs in the model's order; without a model the author's function."""
        if self._by_trials or not self._is_answered:
            return self._authors_model
        return self._places

    @perf_model.setter
    def perf_model(self, function: Any) -> None:
        self._authors_model = function

    @property
    def configs_top_k(self) -> Any:
        """How many configs are left where `perf_model` orders them."""
        if self._by_trials or not self._is_answered:
            return self._authors_top_k
        return self._top_k

    @configs_top_k.setter
    def configs_top_k(self, count: Any) -> None:
        self._authors_top_k = count

    @property
    def _is_answered(self) -> bool:
        """Whether the model answers for the current GPU."""
        if (predictor := self._predictor) is None or (device := self._device()) is None:
            return False
        if device.key in predictor.models or self._transfer:
            return True
        donors = " and ".join(predictor.models)
        self._say(f"its model is of {donors}: transfer=True takes it on {device.key}")
        return False

    def _device(self) -> Device | None:
        """Return the current GPU; None where there is none that can be described."""
        try:
            return current_device()
        except (AssertionError, ConfpredError, RuntimeError) as error:
            self._say(f"its GPU cannot be described ({first_line(error)})")
            return None

    @cached_property
    def family(self) -> TritonFamily:
        """The kernel and its configs as a family, for the registry, models and measurements. Its
        digest is of the kernel's source, so that a model is of one state of the kernel."""
        function = plain_function(self.fn)
        return TritonFamily(
            self._name or function.__name__,
            self.keys,
            [config.all_kwargs() for config in self.configs],
            source_of(function),
            triton.__version__,
            self._features,
            self.example_call,
            self._choices,  # words that an argument of the key may be
        )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel; see the module."""
        if self._captured is not None:
            self._captured.append((args, kwargs))
            return None
        while True:
            try:
                result = super().run(*args, **kwargs)
            except (OutOfResources, PTXASError):
                if not self._drop(self.best_config):
                    raise
                continue
            if self._timed is not None:
                self._keep_times(*self._timed)
            return result

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Any]:
        """Return the configs to time at a new key; a single one that the model chose is not."""
        call = self.call_of({**self.nargs, **kwargs})
        if call is not None and (file := os.environ.get(RECORD)):
            self._record(call, file)
        order = self.order(call)
        configs = self._without_model(kwargs) if order is None else self._first(order, kwargs)
        self._chosen = order is not None and len(configs) == 1
        self._timed = None
        if self._keep is not None and call is not None and not self._chosen:
            device = self._device()
            self._timed = None if device is None else (call, device)
        return configs

    def _without_model(self, kwargs: dict[str, Any]) -> list[Any]:
        self._by_trials = True
        try:
            configs: list[Any] = super().prune_configs(kwargs)
        finally:
            self._by_trials = self._model is None
        return configs

    def _first(self, order: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Return the first configs of the model's order that the author's function leaves."""
        if self.early_config_prune is not None:
            left = self.early_config_prune(self.configs, self.nargs, **kwargs)
            order = [config for config in order if config in left] or left
        return order[: self._top_k]

    def _bench(self, *args: Any, config: Any, **meta: Any) -> Any:
        return [0.0] * 3 if self._chosen else super()._bench(*args, config=config, **meta)

    def _reset_after_trials(self, kwargs: dict[str, Any], reset_only: bool = False) -> None:
        """Reset tensors between trials; where there are none, they are as the caller has them."""
        if not (reset_only and self._chosen):
            self._reset(kwargs, **({"reset_only": True} if reset_only else {}))

    def call_of(self, arguments: Mapping[str, Any]) -> KernelCall | None:
        """Return the problem that a call with these arguments by name is; None where its key is of
        other values than integers, truth values and the kernel's choices, or its source is gone."""
        values = {name: arguments.get(name, self._defaults.get(name)) for name in self.keys}
        tensors: list[Any] = [arguments.get(name) for name in self.arg_names]
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors if hasattr(t, "dtype")]
        try:
            record: Any = self.family.operation.problem
        except OSError as error:  # such as a file that went after Triton had read it
            self._say(f"its source cannot be read ({error})")
            return None
        try:
            fields = {
                name: word_of(value) if name in record.CHOICES else operator.index(value)
                for name, value in values.items()
            }
            call: KernelCall = record(**fields, dtype=leading(dtypes or ["float16"]))
            return call
        except (TypeError, InvalidInput) as error:
            self._say(f"its key is not described by integers and choices ({error})")
            return None

    def order(self, call: KernelCall | None) -> list[Any] | None:
        """Return the configs that the model puts first for a call; None where no model does."""
        if self._model is None:
            self._say("it has no model")
            return None
        if call is None or not self._is_answered or (predictor := self._predictor) is None:
            return None
        device = current_device()
        configs = self._left(self._orders.get((call, device), ()))
        if not configs:
            self._orders[call, device] = self._predicted(predictor, call, device)
            configs = self._left(self._orders[call, device])
        return configs or None

    def _left(self, configs: Sequence[Any]) -> list[Any]:
        return [config for config in configs if config not in self._broken]

    def place(self, arguments: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """Return the position of a config in the model's order for a call, counted from 0; behind
        all positions where the model does not put it first."""
        order = self.order(self.call_of(arguments)) or ()
        keys = [config_key(ranked.all_kwargs()) for ranked in order]
        key = config_key(config)
        return keys.index(key) if key in keys else len(self.configs)

    def example_call(self, problem: KernelCall) -> ExampleCall:
        """Return a call of the kernel that the author's example makes for `problem`.

        Raises:
            InvalidInput: there is no example, or it does not call the kernel with this key.
        """
        if self._example is None:
            raise InvalidInput("example", None, f"a function that calls {self.family.name} once")
        with self._capture() as calls:
            self._example(**problem.to_json())
        for args, kwargs in calls:
            named = self._named((args, kwargs))
            if self.call_of(named) == problem:
                break
        else:
            made = " and ".join(str(self.call_of(named)) for named in map(self._named, calls))
            allowed = (
                f"a function that calls {self.family.name} for {problem}, not {made or 'never'}"
            )
            raise InvalidInput("example", self._example, allowed)

        def launch(row: int) -> Any:
            config = self._of_row(row)
            meta = config.all_kwargs()
            if config.pre_hook is not None:
                config.pre_hook({**named, **meta})
            return self.fn.run(*args, **{**kwargs, **meta})

        def compiled(row: int) -> None:
            self.fn.run(*args, **{**kwargs, **self._of_row(row).all_kwargs(), "warmup": True})

        arguments = {n: named[n] for n in self.arg_names if n in named}
        tensors = {n: t for n, t in arguments.items() if isinstance(t, torch.Tensor)}
        reference = self._reference
        return ExampleCall(launch, compiled, tensors, reference and partial(reference, **arguments))

    def _named(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
        return {**dict(zip(self.arg_names, call[0], strict=False)), **call[1]}

    @contextmanager
    def _capture(self) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """Collect calls in the block, and launch none."""
        calls = self._captured = list[tuple[tuple[Any, ...], dict[str, Any]]]()
        try:
            yield calls
        finally:
            self._captured = None

    @cached_property
    def _defaults(self) -> Mapping[str, Any]:
        parameters = inspect.signature(plain_function(self.fn)).parameters
        return {n: p.default for n, p in parameters.items() if p.default is not p.empty}

    @cached_property
    def _predictor(self) -> Predictor | None:
        """The model, if it is one of this kernel; why it is not is logged."""
        folder = Path(inspect.getfile(plain_function(self.fn))).parent / str(self._model)
        try:
            introduce(self.family)
            predictor = Predictor.load(folder)
            for model in predictor.models.values():
                sources = model.card.families[self.family.name].source_digests
                digests = {text.rpartition(" ")[2] for text in sources}
                if self.family.digest not in digests:
                    raise ModelError(f"{folder} is of another source of the kernel")
                if self.family.source not in sources and not self._transfer:
                    raise ModelError(
                        f"{folder} is of {' and '.join(sources)}, and this is Triton "
                        f"{triton.__version__}: transfer=True takes it all the same"
                    )
        except (ConfpredError, OSError) as error:
            self._say(str(error))
            return None
        except KeyError:
            self._say(f"{folder} is of another kernel")
            return None
        return predictor

    def _predicted(self, predictor: Predictor, call: KernelCall, device: Device) -> list[Any]:
        """Return as many of the first choices as are to be timed, beside those that the GPU
        refuses; none where the model is of something else, which is logged."""
        count = min(self._top_k + len(self._broken), MAX_TOP)
        choices = [c for c in predictor.rank(call, device, count) if c.family == self.family.name]
        if not choices or choices[0].source == "heuristic":
            self._say(f"its model knows no such call as {call}")
            return []
        return [self._of_row(c.candidate.config_id) for c in choices]

    def _of_row(self, row: int) -> Any:
        return self._configs[config_key(self.family.kwargs[row])]

    @cached_property
    def _configs(self) -> Mapping[tuple[Any, ...], Any]:
        return {config_key(config.all_kwargs()): config for config in reversed(self.configs)}

    def _drop(self, config: Any) -> bool:
        """Forget a config that the model chose and the GPU refused; return whether it was one."""
        predicted = any(config in order for order in self._orders.values())
        if not predicted or config in self._broken:
            return False
        log.warning("%s: the GPU refuses %s; the next one is taken", self.family.name, config)
        self._broken.append(config)
        self.cache = {key: kept for key, kept in self.cache.items() if kept != config}
        return True

    def _record(self, call: KernelCall, file: str) -> None:
        """Append a call to `file`, a line in one write, so that processes may share it."""
        line = json.dumps({"kernel": self.family.name, **call.to_json()}) + "\n"
        try:
            handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            with open(handle, "ab", buffering=0) as lines:
                lines.write(line.encode())
        except OSError as error:
            log.warning("%s: %s is not recorded: %s", self.family.name, call, error)

    def _say(self, reason: str) -> None:
        """Log once why a kernel is tuned by trials."""
        if reason not in self._said:
            self._said.add(reason)
            name = plain_function(self.fn).__name__
            log.warning("%s is tuned as by triton.autotune: %s", name, reason)

    def _keep_times(self, call: KernelCall, device: Device) -> None:
        """Write what was timed for `call` as a shard of measurements. The first time that they
        cannot be written is logged: the kernel has run."""
        self._timed = None
        try:
            self._write_times(call, device)
        except (ConfpredError, ImportError, OSError) as error:
            if not self._unkept:
                self._unkept = True
                log.warning("%s: its times are not kept: %s", self.family.name, first_line(error))

    def _write_times(self, call: KernelCall, device: Device) -> None:
        if self._run[0] != os.getpid():  # a forked child, whose files are its own
            self._run = _new_run()
        _, run_id = self._run
        run = Run(run_id, device.key, device.product, "", torch.version.cuda or "", __version__)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        networks = (str(call.layer()),)
        family = self.family
        introduce(family)
        rows = [
            Measurement(call, networks, family.name, family.source, run, outcome, now).to_row()
            for outcome in self._outcomes()
        ]
        from confpred.data.parquet import write_rows  # needs pyarrow, which may be absent

        path = Path(str(self._keep), f"rows-{run_id}-{next(self._numbers):05d}.parquet")
        write_rows(rows, family.operation, path)

    def _outcomes(self) -> Iterator[Outcome]:
        """Yield what the last trials gave: Triton's median, and 20th and 80th percentile."""
        for config, times in self.configs_timings.items():
            row = self.family.rows[config_key(config.all_kwargs())]
            median, low, high = times if isinstance(times, (list, tuple)) else (times,) * 3
            if median == _NEVER:
                yield Outcome(row, "launch_error", message="Triton or the GPU refused it")
            else:
                yield Outcome(row, "ok", median, high - low, 1)


def _new_run() -> tuple[int, str]:
    """Return this process's id, and the id of a new run."""
    return os.getpid(), uuid.uuid4().hex[:12]


def _perf_model(kernel: Tuned) -> Callable[..., int]:
    """Return the model's order of a kernel's configs as a ``perf_model``: a config's position for
    the arguments that it is given.

    PyTorch's compiler traces the outer function, which leaves constants for the inner one: a size
    that varies from call to call becomes one, so that each has a config, and a graph, of its own.
    """

    def place(sizes: dict[str, Any], dtypes: dict[str, Any], config: dict[str, Any]) -> int:
        tensors = {name: _Typed(dtype) for name, dtype in dtypes.items()}
        return kernel.place({**tensors, **sizes}, config)

    place._dynamo_marked_constant = True  # type: ignore[attr-defined]
    names, fields = (
        tuple(kernel.keys),
        tuple({n: 0 for c in kernel.configs for n in c.all_kwargs()}),
    )

    def perf_model(**arguments: Any) -> int:
        values = {n: arguments[n] for n in names if n in arguments}
        sizes = {n: operator.index(v) if isinstance(v, int) else v for n, v in values.items()}
        dtypes = {n: v.dtype for n, v in arguments.items() if isinstance(v, torch.Tensor)}
        return place(sizes, dtypes, {n: arguments[n] for n in fields if n in arguments})

    return perf_model


@dataclass(frozen=True, slots=True)
class _Typed:
    """All that a tensor's dtype is asked of."""

    dtype: torch.dtype
