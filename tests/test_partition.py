"""Partitions of a training set: every sample once, no client empty, the same for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradfilter as gf
from gradfilter.data.partition import dirichlet, distance, few_shot, shards

LABELS = st.lists(st.integers(0, 5), min_size=1, max_size=60)
BALANCED = torch.arange(10).repeat(100)


def check_partition(parts: list[Tensor], count: int) -> None:
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    assert min(map(len, parts)) >= 1
    for part in parts:
        assert part.dtype == torch.int64
        assert part.tolist() == sorted(part.tolist())


@given(labels=LABELS, data=st.data(), seed=st.integers(0, 9))
def test_shards_are_a_partition(labels: list[int], data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    per_client = data.draw(st.integers(1, len(labels) // clients))
    state = torch.get_rng_state()
    parts = shards(labels, clients, per_client, seed)
    assert len(parts) == clients
    check_partition(parts, len(labels))
    again = shards(torch.tensor(labels), clients, per_client, seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert torch.equal(state, torch.get_rng_state())


@given(labels=LABELS, data=st.data(), alpha=st.floats(1e-6, 1e6), seed=st.integers(0, 9))
def test_dirichlet_is_a_partition(labels: list[int], data: st.DataObject, alpha: float, seed: int) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    parts = dirichlet(labels, clients, alpha, seed)
    assert len(parts) == clients
    check_partition(parts, len(labels))
    again = dirichlet(labels, clients, alpha, seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


@given(labels=LABELS, data=st.data(), alpha=st.floats(0.01, 100))
def test_the_distance_lies_between_0_and_1(labels: list[int], data: st.DataObject, alpha: float) -> None:
    parts = dirichlet(labels, data.draw(st.integers(1, len(labels))), alpha)
    assert 0 <= distance(labels, parts) < 1
    assert distance(labels, [torch.arange(len(labels))]) == 0


def test_the_distance_is_the_mean_total_variation() -> None:
    labels = [0, 0, 0, 1]
    parts = [torch.tensor([0, 1, 2]), torch.tensor([3])]
    assert distance(labels, parts) == pytest.approx((0.25 + 0.75) / 2)


def test_few_shards_and_small_alphas_are_far_from_the_whole() -> None:
    assert distance(BALANCED, shards(BALANCED, 10, 2)) > 0.7
    assert all(len(BALANCED[part].unique()) <= 3 for part in shards(BALANCED, 10, 2))
    near, middle, far = (distance(BALANCED, dirichlet(BALANCED, 10, alpha)) for alpha in (1000, 1, 0.05))
    assert near < 0.05 < middle < far < 1
    other = dirichlet(BALANCED, 10, 1, seed=1)
    assert any(not torch.equal(a, b) for a, b in zip(dirichlet(BALANCED, 10, 1), other, strict=True))


@given(labels=LABELS, per_class=st.integers(1, 5), seed=st.integers(0, 9))
def test_few_shots_are_as_many_of_each_class(labels: list[int], per_class: int, seed: int) -> None:
    counts = torch.tensor(labels).unique(return_counts=True)[1]
    if int(counts.min()) < per_class:
        with pytest.raises(gf.GradFilterError, match="ask for fewer per class"):
            few_shot(labels, per_class, seed)
        return
    drawn = few_shot(labels, per_class, seed)
    assert torch.equal(drawn, few_shot(labels, per_class, seed))
    assert len(drawn.unique()) == len(drawn) == per_class * len(counts)
    assert (torch.tensor(labels)[drawn].unique(return_counts=True)[1] == per_class).all()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: shards([0, 1], 3, 1), "cannot be shared out to 3"),
        (lambda: shards([0, 1], 2, 2), "2 shards each need"),
        (lambda: shards([0, 1], 0, 1), "0 clients"),
        (lambda: dirichlet([0, 1], 2, 0.0), "alpha"),
        (lambda: few_shot([0, 1], 0), "per_class"),
    ],
)
def test_what_cannot_be_is_refused(call: Any, complaint: str) -> None:
    with pytest.raises(gf.GradFilterError, match=complaint):
        call()


def test_a_class_with_too_few_is_named() -> None:
    with pytest.raises(gf.GradFilterError, match="Class dog has 1 samples, less than 2"):
        few_shot([0, 0, 1], 2, names=["cat", "dog"])
