from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvferry.core.errors import KVFerryError, RequestError
from kvferry.engine.sampling import Sampler, check_sampling
from kvferry.wire.messages import RngState, SamplingParams

LOGITS = torch.tensor([0.0, 2.0, -1.0, 2.0, 1.0, -3.0], dtype=torch.float32)


def _draws(sampler: Sampler, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    return [sampler.draw(logits) for _ in range(count)]


def _shares(params: SamplingParams, logits: torch.Tensor = LOGITS, count: int = 4000) -> np.ndarray:
    drawn = _draws(Sampler(params), count, logits)
    return np.bincount(drawn, minlength=len(logits)) / count


def _random(**fields: float) -> SamplingParams:
    values = {"temperature": 1.0, "seed": 7, **fields}
    return SamplingParams(**values)  # type: ignore[arg-type]


def test_greedy_takes_the_first_of_equals_and_needs_no_generator() -> None:
    sampler = Sampler(SamplingParams())
    assert _draws(sampler, 3) == [1, 1, 1]
    assert sampler.state() is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    expected = torch.softmax(LOGITS.double() / temperature, 0).numpy()
    shares = _shares(_random(temperature=temperature))
    sigma = np.sqrt(expected * (1 - expected) / 4000)
    assert (np.abs(shares - expected) < 5 * sigma).all()


def test_top_k_keeps_the_k_best_and_their_proportions() -> None:
    shares = _shares(_random(top_k=3))
    expected = torch.softmax(LOGITS[[1, 3, 4]].double(), 0).numpy()
    assert np.flatnonzero(shares).tolist() == [1, 3, 4]
    assert np.abs(shares[[1, 3, 4]] - expected).max() < 0.05


def test_top_k_one_is_greedy_and_among_equals_the_first_stays() -> None:
    assert set(_draws(Sampler(_random(top_k=1)), 50)) == {1}
    equal = torch.zeros(10)
    assert set(_draws(Sampler(_random(top_k=4)), 300, equal)) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [0, 6, 1000])
def test_top_k_off_or_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    assert _draws(Sampler(_random(top_k=top_k)), 200) == _draws(Sampler(_random()), 200)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)
    logits = probabilities.log()
    for top_p, kept in (
        (1e-9, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 3, 4}),
        (0.999, set(range(5))),
    ):
        assert set(_draws(Sampler(_random(top_p=top_p)), 400, logits)) == kept, top_p


def test_top_p_counts_within_what_top_k_left() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    # Of the two that top_k leaves, the first has 4/7 = 0.571 of the weight.
    assert set(_draws(Sampler(_random(top_k=2, top_p=0.57)), 200, probabilities.log())) == {0}
    assert set(_draws(Sampler(_random(top_k=2, top_p=0.58)), 200, probabilities.log())) == {0, 1}


def test_the_partial_sort_of_top_k_is_the_full_stable_sort() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 12, (500,), generator=generator).float()  # many equals
    order = np.argsort(-logits.numpy(), kind="stable")
    for k in (1, 2, 37, 250, 499):
        drawn = set(_draws(Sampler(_random(top_k=k, temperature=1e6)), 2500 if k < 40 else 200, logits))
        assert drawn <= set(order[:k].tolist())
        if k < 40:
            assert drawn == set(order[:k].tolist())


def test_a_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    first = _draws(Sampler(_random(seed=1)), 100)
    assert _draws(Sampler(_random(seed=1)), 100) == first
    assert _draws(Sampler(_random(seed=2)), 100) != first
    assert _draws(Sampler(_random(seed=1 + 2**32)), 100) != first
    assert _draws(Sampler(_random(seed=-1)), 100) == _draws(Sampler(_random(seed=2**64 - 1)), 100)


def test_without_a_seed_each_sampler_is_its_own() -> None:
    params = SamplingParams(temperature=1.0)
    assert Sampler(params).state() != Sampler(params).state()


def test_golden_draws() -> None:
    """Pins the generator and the use of its bits: both sides of a split must agree for ever."""
    sampler = Sampler(_random(seed=42))
    uniform = torch.zeros(1000)
    assert _draws(sampler, 6, uniform) == [86, 141, 270, 874, 170, 506]
    assert sampler.state() == Sampler(_random(seed=42), sampler.state()).state()


@pytest.mark.parametrize(
    "params", [_random(), _random(top_k=3), _random(top_p=0.8), _random(top_k=4, top_p=0.9)]
)
@pytest.mark.parametrize("at", range(6))
def test_a_state_goes_on_exactly_elsewhere(params: SamplingParams, at: int) -> None:
    """At each place in the generator's buffer of four outputs."""
    whole = _draws(Sampler(params), 20)
    here = Sampler(params)
    before = _draws(here, at)
    state = here.state()
    assert state is not None
    there = Sampler(params, state)
    assert before + _draws(there, 20 - at) == whole
    assert here.state() == state  # the state is a copy: drawing elsewhere does not move it


def test_every_draw_takes_exactly_one_number_whatever_the_filters() -> None:
    states = set()
    for params in (_random(), _random(top_k=1), _random(top_p=0.1), _random(temperature=1e-9)):
        sampler = Sampler(params)
        _draws(sampler, 5)
        state = sampler.state()
        assert state is not None
        states.add((state.counter, state.buffer, state.buffer_pos))
    assert len(states) == 1


def test_very_low_temperatures_are_greedy_and_do_not_overflow() -> None:
    assert set(_draws(Sampler(_random(temperature=1e-300, top_k=1)), 5, LOGITS * 1e30)) == {1}
    assert set(_draws(Sampler(_random(temperature=1e-3)), 50, torch.tensor([1.0, 0.0, -1e30]))) == {0}


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((8,), -math.inf)
    logits[[2, 6]] = 0.0
    assert set(_draws(Sampler(_random()), 100, logits)) == {2, 6}
    assert set(_draws(Sampler(_random(top_k=5)), 100, logits)) == {2, 6}
    assert set(_draws(Sampler(_random(top_p=0.999999)), 100, logits)) == {2, 6}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_overflowed_are_an_error(bad: float) -> None:
    logits = LOGITS.clone()
    logits[2] = bad
    for params in (SamplingParams(), _random()):
        with pytest.raises(KVFerryError, match="not finite"):
            Sampler(params).draw(logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
    ],
)
def test_parameters_without_meaning_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"{field} is {value}"):
        check_sampling(SamplingParams(**{field: value}))  # type: ignore[arg-type]


def test_a_state_that_no_generator_has_is_refused() -> None:
    words = (0, 0, 0, 0)
    with pytest.raises(RequestError, match="buffer_pos 5"):
        Sampler(_random(), RngState(key=(0, 0), counter=words, buffer=words, buffer_pos=5))
    with pytest.raises(RequestError, match="64 unsigned bits"):
        Sampler(_random(), RngState(key=(2**64, 0), counter=words, buffer=words, buffer_pos=4))
