from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.core.errors import RequestError
from kvferry.engine.gateway.errors import InvalidFieldError, UnknownModelError
from kvferry.engine.gateway.request import CompletionRequest, ServedModel, parse_completion
from kvferry.engine.tokenizer import ByteTokenizer

SERVED = ServedModel("tiny", 272, 64, ByteTokenizer())


def parse(served: ServedModel = SERVED, **fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": [1, 2, 3], **fields}).encode(), served)


def test_defaults_are_those_of_the_api() -> None:
    request = parse()
    assert request.tokens.tolist() == [1, 2, 3]
    assert request.tokens.dtype == "<u4"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1.0, 1.0, 0)
    assert (sampling.seed, sampling.ignore_eos, request.stream, request.stop) == (None, False, False, ())


def test_every_field_arrives() -> None:
    request = parse(
        model="tiny",
        prompt="ab",
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=42,
        stop=["x", "yz"],
        stream=True,
        ignore_eos=True,
        cache_salt="mine",
        stream_options={"include_usage": True},
        user="u",
    )
    assert request.tokens.tolist() == [97, 98]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 7)
    assert (sampling.seed, sampling.ignore_eos) == (42, True)
    assert (request.stop, request.stream, request.scope.salt) == (("x", "yz"), True, b"mine")


def test_null_means_not_given() -> None:
    request = parse(
        max_tokens=None, temperature=None, stop=None, seed=None, model=None, n=None, logprobs=None
    )
    assert request.sampling.max_tokens == 16


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\x80\x04\x95", b"[" * 100_000, b'{"prompt": NaN}']
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidFieldError, match="the body is"):
        parse_completion(body, SERVED)


BAD: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", 10**30),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.0),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", "s"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("stop", ["a"] * 17),
    ("stream", "yes"),
    ("stream", 1),
    ("ignore_eos", 0),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("stream_options", {"other": 1}),
    ("model", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError, match=field) as caught:
        parse(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        (None, "^prompt is missing, must be text or a list of token ids$"),
        (5, "prompt is 5"),
        ({"a": 1}, "prompt is"),
        ([1, "a"], r"prompt\[1\]"),
        ([1, True], r"prompt\[1\]"),
        ([1, 2.0], r"prompt\[1\]"),
        (["a", "b"], "one prompt a request"),
        ([[1], [2]], "one prompt a request"),
        ([1, 272], "token id 272, outside the vocabulary 0..271"),
        ([-1], "token id -1"),
        ([2**40], "outside the vocabulary"),
    ],
)
def test_a_bad_prompt_says_what_is_wrong(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        parse(prompt=prompt)


def test_a_batch_of_one_is_a_prompt() -> None:
    assert parse(prompt=["ab"]).tokens.tolist() == [97, 98]
    assert parse(prompt=[[5, 6]]).tokens.tolist() == [5, 6]


def test_the_limit_is_named_with_the_length() -> None:
    assert len(parse(prompt=[1] * 48, max_tokens=16).tokens) == 48
    with pytest.raises(
        InvalidFieldError, match=r"49 tokens and max_tokens is 16, together 65: over the limit of 64"
    ):
        parse(prompt=[1] * 49, max_tokens=16)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param"),
    [(3, 100_000, "max_tokens"), (49, 16, "max_tokens"), (64, 1, "prompt")],
)
def test_the_field_that_is_over_the_limit_is_named(prompt_tokens: int, max_tokens: int, param: str) -> None:
    with pytest.raises(InvalidFieldError, match="over the limit of 64") as caught:
        parse(prompt=[1] * prompt_tokens, max_tokens=max_tokens)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty, must be a JSON object"),
        (b" \n", "the body is empty, must be a JSON object"),
        (b"null", "the body is null, must be a JSON object"),
        (b"[1]", "the body is a JSON array, must be a JSON object"),
        (b"true", "the body is a JSON boolean, must be a JSON object"),
        (b"1.5", "the body is a JSON number, must be a JSON object"),
    ],
)
def test_a_body_that_is_no_object_is_said_in_json_words(body: bytes, says: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        parse_completion(body, ServedModel("tiny", 272, 64))
    assert str(caught.value) == says


def test_why_there_is_no_tokenizer_is_said() -> None:
    bare = ServedModel("tiny", 272, 64, no_tokenizer="DIR has no tokenizer.json")
    with pytest.raises(InvalidFieldError, match=r"no tokenizer: DIR has no tokenizer\.json; send token ids"):
        parse(bare, prompt="text")
    with pytest.raises(InvalidFieldError, match="started without --model"):
        parse(ServedModel("tiny", 272, 64), prompt="text")


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(InvalidFieldError, match=r"unknown field 'max_token', did you mean 'max_tokens'\?"):
        parse(max_token=3)
    with pytest.raises(InvalidFieldError, match=r"unknown field 'qqqqqq'$"):
        parse(qqqqqq=3)


@pytest.mark.parametrize(
    ("field", "neutral", "other"), [("n", 1, 2), ("logprobs", 0, 5), ("echo", False, True)]
)
def test_unsupported_fields_pass_only_where_they_change_nothing(field: str, neutral: Any, other: Any) -> None:
    parse(**{field: neutral})
    with pytest.raises(InvalidFieldError, match=f"^{field} {other} is not supported; leave it out$"):
        parse(**{field: other})


def test_another_model_is_not_found() -> None:
    with pytest.raises(UnknownModelError, match=r"'gpt' is not served here; 'tiny' is"):
        parse(model="gpt")


def test_without_a_tokenizer_only_token_ids_go() -> None:
    bare = ServedModel("tiny", 272, 64)
    assert parse(bare).tokens.tolist() == [1, 2, 3]
    with pytest.raises(InvalidFieldError, match="no tokenizer"):
        parse(bare, prompt="text")
    with pytest.raises(InvalidFieldError, match="no tokenizer"):
        parse(bare, stop="x")


def test_refusals_are_request_errors() -> None:
    assert issubclass(InvalidFieldError, RequestError)
    assert issubclass(UnknownModelError, RequestError)


def test_a_refusal_shows_only_the_beginning_of_what_was_sent() -> None:
    long = "x" * 5_000_000
    bad: list[dict[str, Any]] = [
        {"model": long},
        {"prompt": [10**4000]},
        {"stop": [1, long]},
        {"prompt": {long: 1}},
        {long: 1},
    ]
    for fields in bad:
        with pytest.raises(RequestError) as refused:
            parse(**fields)
        assert len(str(refused.value)) < 400
