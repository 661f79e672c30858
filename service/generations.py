"""What a worker answers by: the generations that it has loaded, and the one that is current."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from confpred.errors import ModelError
from confpred.model.folder import Model
from confpred.predict.predictor import Predictor
from confpred.problem.device import KNOWN

from .access import Answer
from .errors import Error, RequestError, shorten
from .publishing import MODELS, PLAN, digest_of
from .schema import EXAMPLE

#: The reply header that names the models: ``h100=<digest>, h200=<digest>``.
MODEL_HEADER = "x-confpred-model"
_LEAST_DIGITS = 8  # of a digest that a request names


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Models and a plan, loaded.

    Attributes:
        digest: of the digests of all models and of the plan; two servers with one digest and one
            version of confpred give the same answers.
        predictor: answers by them.
        headers: what a reply says of them.
    """

    digest: str
    predictor: Predictor
    headers: Mapping[str, str]

    def model_of(self, device: str) -> Model | None:
        return self.predictor.models.get(device)

    def answer(self, device: str, sources: Mapping[str, int]) -> Answer:
        """What the log tells of a reply for `device` whose choices came from `sources`."""
        model = self.model_of(device)
        return Answer(device, sources, self.digest, None if model is None else model.digest)

    def has(self, version: str) -> bool:
        """Whether it or one of its models is called `version`, by name or by digest."""
        models = self.predictor.models.values()
        if version in (model.version for model in models):
            return True
        digests = (self.digest, *(model.digest for model in models))
        long_enough = len(version) >= _LEAST_DIGITS
        return long_enough and any(digest.startswith(version) for digest in digests)


def of(predictor: Predictor, plan: bytes | None = None) -> Generation:
    """`predictor`'s generation, its tables made, so that no client need wait for them; `plan` is
    the text of its plan."""
    for device in (*predictor.models, next(iter(KNOWN))):
        predictor.choose(EXAMPLE, device)
    models = {device: (m.version, m.digest) for device, m in predictor.models.items()}
    named = ", ".join(f"{device}={models[device][1]}" for device in sorted(models))
    return Generation(digest_of(models, plan), predictor, {MODEL_HEADER: named or "none"})


def load(folder: Path) -> Generation:
    """The generation that `publish` wrote to `folder`.

    Raises:
        ModelError, DataError, InvalidInput: the folder is damaged, or a model in it is of no use
            to this version of confpred.
    """
    if not folder.is_dir():
        raise ModelError(f"cannot read {folder}: it is gone")
    models, plan = (path if path.exists() else None for path in (folder / MODELS, folder / PLAN))
    predictor = Predictor.load(models, plan=plan)
    found = of(predictor, None if plan is None else plan.read_bytes())
    if found.digest != folder.name:
        raise ModelError(f"{folder} is damaged: it is {found.digest}")
    return found


class Loaded:
    """The generations that one process has loaded, and which of them answers."""

    def __init__(self, current: Generation, others: Iterable[Generation] = ()) -> None:
        self.current = current
        self._all = {each.digest: each for each in (*others, current)}

    @property
    def others(self) -> list[Generation]:
        """Those that answer only if asked for, the latest first."""
        return [each for each in reversed(self._all.values()) if each is not self.current]

    def add(self, generation: Generation) -> None:
        self._all[generation.digest] = generation

    def __contains__(self, digest: str) -> bool:
        return digest in self._all

    def switch(self, digest: str, keep: Iterable[str]) -> None:
        """Answer by the generation of `digest` from now on, and forget all that are not kept."""
        current = self._all[digest]
        self._all = {each: self._all[each] for each in keep if each in self._all}
        self._all[digest] = self.current = current

    def find(self, version: str) -> Generation:
        """The generation to ask for `version`: the current one if it has it, else the latest.

        Raises:
            RequestError: none has it.
        """
        for each in (self.current, *self.others):
            if each.has(version):
                return each
        names = {m.version for each in self._all.values() for m in each.predictor.models.values()}
        error = Error(
            "version_not_loaded",
            f"version {shorten(version)!r} is not loaded",
            "version",
            shorten(version),
            f"the name or digest of a model that /v1/models lists: {', '.join(sorted(names))}",
        )
        raise RequestError(404, error)
