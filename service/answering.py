"""From a request to its reply: from memory, or worked out in steps that others' fit between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from confpred.predict.choice import answer_json, joined_json
from confpred.predict.predictor import Predictor

from .memory import Answer, Memory, Question, Reply
from .requests import PredictRequest, parsing
from .scheduler import Steps
from .settings import Settings


def remembered(memory: Memory, body: bytes, asked: PredictRequest) -> Reply | None:
    """The reply to `body`, which asks `asked`, if every answer is in memory."""
    answers = []
    for question in _questions(asked):
        answer = memory.answers.get(question)
        if answer is None:
            return None
        answers.append(answer)
    return _reply(memory, body, asked, answers)


def working(
    predictor: Predictor,
    memory: Memory,
    settings: Settings,
    body: bytes,
    asked: PredictRequest | None,
    worked_out: Callable[[], None],
) -> Steps[Reply]:
    """Work out the reply to `body`; for the one thread that works.

    A problem that several requests wait for is worked out by the first that comes to it. The
    choices are the library's own, as it writes them.

    Args:
        asked: what `body` asks, if it has been read.
        worked_out: called for each problem that is worked out.

    Raises:
        RequestError: the body is not JSON.
        InvalidInput: a field holds a value that is not allowed.
    """
    asked = asked or (yield from parsing(body, settings))
    questions = _questions(asked)
    answers = [memory.answer(question) for question in questions]
    new = {q: a for q, a in zip(questions, answers, strict=True) if a.text is None}
    for done, (question, answer) in enumerate(new.items()):
        yield len(new) - done
        if answer.text is None:
            within = predictor.within(asked.limits)
            choices = within.rank(
                question.problem, asked.device, asked.top, max_regret=asked.max_regret
            )
            answer.source, answer.text = choices[0].source, answer_json(choices)
            memory.keep(question, answer)
            worked_out()
    return _reply(memory, body, asked, answers)


def _questions(asked: PredictRequest) -> list[Question]:
    key, top, accepted, limits = asked.device.key, asked.top, asked.max_regret, asked.limits
    return [Question(key, top, problem, accepted, limits) for problem in asked.problems]


def _reply(memory: Memory, body: bytes, asked: PredictRequest, answers: Iterable[Answer]) -> Reply:
    """The reply that consists of `answers`, from now on in memory by `body`."""
    sources = Counter(answer.source for answer in answers)
    text = joined_json(answer.text or "" for answer in answers)
    reply = Reply(text.encode(), asked.device.key, sources)
    memory.replies.put(body, reply, len(body) + len(reply.body))
    return reply
