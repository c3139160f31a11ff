"""The body of ``POST /v1/completions``: checked field by field, every refusal names field and value."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.core.nearest import nearest
from kvferry.core.spec import KeyScope
from kvferry.engine.gateway.errors import InvalidFieldError, UnknownModelError
from kvferry.engine.tokenizer import Tokenizer
from kvferry.wire.messages import SamplingParams

__all__ = ["CompletionRequest", "ServedModel", "parse_completion"]

MAX_STOP_STRINGS = 16
MAX_SALT_LENGTH = 256
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the workers behind the gateway serve.

    ``tokenizer`` is absent if the gateway has none; ``no_tokenizer`` says why, for messages.
    """

    name: str
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None = None
    no_tokenizer: str = "this gateway was started without --model"


def new_request_id() -> str:
    """A name for one request: in its answer, in the log lines of all three processes, in errors."""
    return f"cmpl-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request that passed every check.

    Attributes:
        tokens: The prompt, u32.
        sampling: How tokens are drawn, and how many.
        stop: Strings that end the text; they are not part of it.
        scope: What separates its cached KV from that of others.
        stream: Whether the answer comes as server-sent events.
        model: Name of the model, as served.
        id: Its name, see :func:`new_request_id`.
    """

    tokens: npt.NDArray[np.uint32]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    scope: KeyScope = KeyScope()  # noqa: RUF009  frozen
    stream: bool = False
    model: str = ""
    id: str = field(default_factory=new_request_id)


def _shown(value: object) -> str:
    """A value of the client's for a message: what was sent may have megabytes."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _invalid(param: str, value: object, wanted: str) -> InvalidFieldError:
    return InvalidFieldError(f"{param} is {_shown(value)}, must be {wanted}", param)


def _integer(param: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _invalid(param, value, f"an integer from {low} to {high}")
    return value


def _number(param: str, value: object, low: float, high: float) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # type: ignore[operator]  # NaN and infinity are not either
        raise _invalid(param, value, f"a number from {low:g} to {high:g}")
    return float(value)  # type: ignore[arg-type]


def _flag(param: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _invalid(param, value, "true or false")
    return value


def _max_tokens(value: object) -> int:
    return _integer("max_tokens", value, 1, 2**31 - 1)


def _top_p(value: object) -> float:
    top_p = _number("top_p", value, 0.0, 1.0)
    if top_p == 0.0:
        raise _invalid("top_p", value, "a number above 0, at most 1")
    return top_p


def _top_k(value: object) -> int:
    return max(0, _integer("top_k", value, -1, 2**31 - 1))  # -1 also means off, as other servers have it


def _stop(value: object) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(s, str) and s for s in found):
        raise _invalid("stop", value, "a string that is not empty, or a list of such")
    if len(found) > MAX_STOP_STRINGS:
        raise InvalidFieldError(f"stop has {len(found)} strings, at most {MAX_STOP_STRINGS} go", "stop")
    return tuple(found)


def _cache_salt(value: object) -> bytes:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_SALT_LENGTH:
        raise _invalid("cache_salt", value, f"a string of 1 to {MAX_SALT_LENGTH} characters")
    return value.encode("utf-8", "surrogatepass")


def _stream_options(value: object) -> None:
    if not isinstance(value, dict) or not set(value) <= {"include_usage", "continuous_usage_stats"}:
        raise _invalid("stream_options", value, 'an object such as {"include_usage": true}')


_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "max_tokens": _max_tokens,
    "temperature": lambda v: _number("temperature", v, 0.0, 2.0),
    "top_p": _top_p,
    "top_k": _top_k,
    "seed": lambda v: _integer("seed", v, 0, MAX_SEED),
    "stop": _stop,
    "stream": lambda v: _flag("stream", v),
    "cache_salt": _cache_salt,  # KV is reused only among requests of the same salt
    "ignore_eos": lambda v: _flag("ignore_eos", v),
    "stream_options": _stream_options,  # usage is always in the last chunk
}
_JSON_KINDS: Mapping[type, str] = {
    type(None): "null",
    bool: "a JSON boolean",
    int: "a JSON number",
    float: "a JSON number",
    str: "a JSON string",
    list: "a JSON array",
}
_OTHER_FIELDS = ("model", "prompt", "user")
# Fields of the OpenAI API that are not supported, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (0, False),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "suffix": ("",),
}


def parse_completion(body: bytes, served: ServedModel, request_id: str | None = None) -> CompletionRequest:
    """Read and check a request; ``request_id`` is its name, a new one if there is none yet.

    Raises:
        InvalidFieldError: Malformed JSON, an unknown or unsupported field, a value out of range, an
            empty prompt, a token id outside the vocabulary, or a prompt over the limit.
        UnknownModelError: If ``model`` is given and is another one than the served.
    """
    fields = _decode(body)
    _check_names(fields)
    model = fields.get("model")
    if model is not None and model != served.name:
        if not isinstance(model, str):
            raise _invalid("model", model, "a string")
        raise UnknownModelError(f"model {_shown(model)} is not served here; {served.name!r} is")
    # null means "not given" to every OpenAI client
    values = {k: read(fields[k]) for k, read in _FIELDS.items() if fields.get(k) is not None}
    if fields.get("prompt") is None:
        raise InvalidFieldError("prompt is missing, must be text or a list of token ids", "prompt")
    tokens = _prompt(fields["prompt"], served)
    sampling = SamplingParams(
        max_tokens=values.get("max_tokens", 16),
        temperature=values.get("temperature", 1.0),
        top_k=values.get("top_k", 0),
        top_p=values.get("top_p", 1.0),
        seed=values.get("seed"),
        ignore_eos=values.get("ignore_eos", False),
    )
    _check_length(len(tokens), sampling.max_tokens, served.max_model_len)
    stop = values.get("stop", ())
    if stop and served.tokenizer is None:
        raise InvalidFieldError(f"stop needs text, and there is no tokenizer: {served.no_tokenizer}", "stop")
    scope = KeyScope(salt=values.get("cache_salt"))
    request_id = request_id or new_request_id()
    return CompletionRequest(
        tokens, sampling, stop, scope, values.get("stream", False), served.name, request_id
    )


def _decode(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidFieldError("the body is empty, must be a JSON object")
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InvalidFieldError(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidFieldError(f"the body is {_JSON_KINDS[type(fields)]}, must be a JSON object")
    return fields


def _check_names(fields: dict[str, Any]) -> None:
    known = {*_FIELDS, *_OTHER_FIELDS, *_NEUTRAL}
    for name, value in fields.items():
        if name not in known:
            hint = nearest(name, sorted(known))
            raise InvalidFieldError(
                f"unknown field {name[:80]!r}" + (f", did you mean {hint!r}?" if hint else ""), name[:80]
            )
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise InvalidFieldError(f"{name} {_shown(value)} is not supported; leave it out", name)


def _prompt(value: object, served: ServedModel) -> npt.NDArray[np.uint32]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]  # a batch of one
    if isinstance(value, str):
        if not value:
            raise InvalidFieldError("prompt is empty, needs at least one token", "prompt")
        if served.tokenizer is None:
            raise InvalidFieldError(
                f"prompt is text, and there is no tokenizer: {served.no_tokenizer}; send token ids",
                "prompt",
            )
        value = served.tokenizer.encode(value)
    if not isinstance(value, list):
        raise _invalid("prompt", value, "text or a list of token ids (one prompt a request)")
    if not value:
        raise InvalidFieldError("prompt is empty, needs at least one token", "prompt")
    for index, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise _invalid(f"prompt[{index}]", token, "a token id (one prompt a request)")
        if not 0 <= token < served.vocab_size:
            raise InvalidFieldError(
                f"prompt[{index}] is token id {_shown(token)}, outside the vocabulary "
                f"0..{served.vocab_size - 1}",
                "prompt",
            )
    return np.asarray(value, dtype="<u4")


def _check_length(prompt_tokens: int, max_tokens: int, limit: int) -> None:
    if prompt_tokens + max_tokens > limit:
        raise InvalidFieldError(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together "
            f"{prompt_tokens + max_tokens}: over the limit of {limit} (max_model_len); "
            "shorten the prompt or ask for fewer tokens",
            "prompt" if prompt_tokens >= limit else "max_tokens",
        )
