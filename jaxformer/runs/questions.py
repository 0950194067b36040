"""Questions to a trained model: the prompt that it continues, or the source that it answers.

`Run` and the sample at the end of a run call `ask`.
"""

from typing import Any

from jaxformer import models
from jaxformer.data.mixing import Mixed
from jaxformer.data.sources import Question
from jaxformer.data.tokenizers import stop_tokens
from jaxformer.errors import ConfigError
from jaxformer.evaluation.generation import answers, best_text
from jaxformer.models import heads
from jaxformer.training.experiment import Experiment, Sample


def writes_text(experiment: Experiment) -> bool:
    """Whether the model continues a text, or answers the questions that its data make of one."""
    return hasattr(experiment.data, "question") or heads.continues_text(experiment.model)


def ends_of(data: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text of these data: an answer, a turn or a document; or no token."""
    sources = [source for _, source in data.sources] if isinstance(data, Mixed) else [data]
    has_end = any(hasattr(each, "question") or hasattr(each, "end_of_text") for each in sources)
    return stop_tokens(tokenizer) if has_end else ()


def ask(experiment: Experiment, sample: Sample, tokenizer: Any) -> Question:
    """The sample's prompt as the model reads it.

    Raises ConfigError where the model cannot continue it.
    """
    has_question = hasattr(experiment.data, "question")
    # A user's `question` need not handle an empty text.
    if sample.prompt == "" or (has_question and sample.prompt is None):
        none = "" if has_question else ", or None"
        raise ConfigError(f"sample.prompt is empty; give at least one character{none}")
    if has_question:
        question = experiment.data.question(experiment.model, tokenizer, sample.prompt)
    else:  # None starts from token 0
        question = Question([0] if sample.prompt is None else tokenizer.encode(sample.prompt), "")
    if not question.prompt:
        raise ConfigError("sample.prompt is empty: it has no token; give another one, or None")
    check_room(experiment, question)
    return question


def check_room(experiment: Experiment, question: Question) -> None:
    """Raises ConfigError where learned positions end before an answer to the prompt."""
    length = len(question.prompt)
    limit = models.last_stack(experiment.model).position_limit
    if length >= limit:
        raise ConfigError(f"sample.prompt is {length} tokens, no room in {limit} learned positions")


def asks_first_question(experiment: Experiment) -> bool:
    """Whether a run's sample answers the first question of its data.

    It does if the data have questions and no prompt is given.
    """
    return hasattr(experiment.data, "question") and experiment.sample.prompt is None


def question_of_sample(experiment: Experiment, dataset: Any) -> Question:
    """The question or prompt for the sample at the end of a run.

    Raises ConfigError where the model cannot continue it.
    """
    if not asks_first_question(experiment):
        return ask(experiment, experiment.sample, dataset.tokenizer)
    question = dataset.validation.questions[0]
    check_room(experiment, question)
    return question


def sample_text(experiment: Experiment, params: Any, dataset: Any) -> str:
    """The sample's prompt and its continuation.

    Without a prompt: the answer to the first question of the data.
    """
    sample = experiment.sample
    tokenizer = dataset.tokenizer
    question = question_of_sample(experiment, dataset)
    (texts,) = answers(
        experiment.model,
        params,
        [question],
        tokenizer,
        sample.tokens,
        sample.sampling,
        seed=experiment.seed,
        precision=experiment.activation_dtype,
        stop_tokens=ends_of(experiment.data, tokenizer),
    )
    text = best_text(texts)
    if asks_first_question(experiment):
        return f"{text}\n(the answer in the data: {question.reference})"
    return (sample.prompt or "") + text
