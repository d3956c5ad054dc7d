"""What every method promises, on generated shapes: one suite for all that METHODS lists.

GRADFILTER_METHOD_CASES says how many shapes each method gets. A failing case prints its seed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.methods import METHODS
from gradfilter.plans import LayerPlan
from oracle import Gradients, Layer, conv_gradients
from oracles import Problem, Sample, exact
from shapes import make_case
from verdicts import report

CASES = int(os.environ.get("GRADFILTER_METHOD_CASES", "1000"))
CHUNKS = 4
NEEDS = [(x, w, b) for x in (True, False) for w in (True, False) for b in (True, False)][:-1]

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


def samples(name: str) -> list[Sample]:
    found: list[Sample] = import_module(f"oracles.{name}").SAMPLES
    return found


ALL = [(name, sample) for name in METHODS for sample in samples(name)]
every_method = pytest.mark.parametrize("name", METHODS)
every_sample = pytest.mark.parametrize("sample", [s for _, s in ALL], ids=[str(s.method) for _, s in ALL])


@dataclass(frozen=True)
class Case:
    """A layer that is legal in torch: three of four are convolutions of all kinds, the others linear."""

    seed: int

    @property
    def is_linear(self) -> bool:
        return self.seed % 4 == 3

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        """Whether input, weight and bias want a gradient: mostly all."""
        return NEEDS[self.seed % 21] if self.seed % 21 < len(NEEDS) else (True, True, True)

    def module(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        if not self.is_linear:
            return make_case(self.seed).module(dtype)
        rng, random = Random(self.seed), torch.Generator().manual_seed(self.seed)  # noqa: S311
        made = nn.Linear(rng.randint(1, 5), rng.randint(1, 5), bias=rng.random() < 0.6, dtype=dtype)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
        return made

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Input and incoming gradient."""
        if not self.is_linear:
            return make_case(self.seed).tensors(dtype)
        layer: Any = self.module()
        rng, random = Random(self.seed + 1), torch.Generator().manual_seed(self.seed)  # noqa: S311
        lead = [rng.choice([0, 1, 2, 3, 4])] + [rng.randint(1, 5) for _ in range(rng.randint(0, 3))]
        lead = [] if rng.random() < 0.05 else lead
        sizes = layer.in_features, layer.out_features
        x, g = (torch.randn(*lead, s, generator=random, dtype=torch.float64).to(dtype) for s in sizes)
        return x, g

    def problem(self, x: Tensor, w: Tensor, g: Tensor) -> Problem:
        """As the oracle sees it."""
        if not self.is_linear:
            return Problem(make_case(self.seed).layer, *(t.numpy() for t in (x, w, g)))
        x, g = (t.unsqueeze(0) if t.dim() == 1 else t for t in (x, g))
        ones = (1,) * (x.dim() - 2)
        layer = Layer(ones, ones, ones, ((0, 0),) * len(ones))
        maps = (t.movedim(-1, 1).numpy() for t in (x, g))
        return Problem(layer, next(maps), w.numpy().reshape(*w.shape, *ones), next(maps))


@dataclass(frozen=True)
class Found:
    y: Tensor
    grads: dict[str, Tensor | None]
    kept: list[np.ndarray[Any, Any]]
    memory: dict[str, np.ndarray[Any, Any]]


def run(case: Case, method: gf.Method, needs: tuple[bool, bool, bool], dtype: torch.dtype) -> Found:
    layer, (x, g) = case.module(dtype), case.tensors(dtype)
    model: Any = apply(layer, method)
    for name, needed in zip(("weight", "bias"), needs[1:], strict=True):
        if (parameter := layer._parameters[name]) is not None:
            parameter.requires_grad_(needed and name in model[PLACE].gradfilter_method.trains)
    leaf = x.detach().requires_grad_(needs[0])
    own = {t.untyped_storage()._cdata for t in layer.parameters()}
    kept: list[np.ndarray[Any, Any]] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own and tensor.dtype != torch.bfloat16:
            kept.append(tensor.detach().numpy().copy())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(leaf)
    if y.requires_grad:
        y.backward(g)
    grads = {"x": leaf.grad, "w": layer.weight.grad, "b": None if layer.bias is None else layer.bias.grad}  # type: ignore[union-attr]
    memory = {key: value.numpy().copy() for key, value in layer.gradfilter_memory.items()}  # type: ignore[union-attr]
    return Found(y.detach(), grads, kept, memory)  # type: ignore[arg-type]


PLACE = 1  # of the layer in its model


class Before(nn.Linear):
    """A layer that trains and changes nothing, for methods with which a layer alone may train nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0 * self.weight.sum().to(x)


class Behind(nn.LayerNorm):
    """A norm that trains and changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0 * self.weight.sum().to(x)


def placed(layer: nn.Module, method: gf.Method) -> tuple[nn.Sequential, Any]:
    """The layer in a model, and the methods there; a linear layer at the end would be a head."""
    if "weight" in method.trains or method.adds_parameters:
        return nn.Sequential(nn.Identity(), layer, nn.Identity()), method
    return nn.Sequential(Before(1, 1), layer, Behind(1)), {"0": gf.Exact(), "*": method}


def apply(layer: nn.Module, method: gf.Method) -> Any:
    return gf.apply_(*placed(layer, method))


def as_given(case: Case, grads: Gradients) -> dict[str, np.ndarray[Any, Any]]:
    """The oracle's gradients in the shapes of the layer's tensors."""
    if not case.is_linear:
        return {"x": grads.x, "w": grads.w, "b": grads.b}
    x = np.moveaxis(grads.x, 1, -1)
    return {
        "x": x[0] if case.tensors()[0].dim() == 1 else x,
        "w": grads.w.reshape(grads.w.shape[:2]),
        "b": grads.b,
    }


def wrong_gradients(case: Case, sample: Sample) -> list[str]:
    """Everything about one case's gradients, in float64, that differs from the oracle's."""
    layer, (x, g) = case.module(), case.tensors()
    found = run(case, sample.method, case.needs, torch.float64)
    problem = case.problem(x, layer.weight.detach(), g)  # type: ignore[arg-type, operator]
    problem = Problem(problem.layer, problem.x, problem.w, problem.g, found.kept, found.memory)
    row = planned(case, sample.method)
    oracle = exact if row.reason else sample.oracle
    trains = row.method.trains if row.action == "train" else frozenset()
    expected = as_given(case, oracle(problem))
    wrong = []
    if sample.method.forward_is_exact and not torch.equal(found.y, layer(x)):
        wrong.append("the forward is not the plain one, bit by bit")
    for (key, value), needed in zip(found.grads.items(), case.needs, strict=True):
        needed = needed and (key == "x" or {"w": "weight", "b": "bias"}[key] in trains)
        if key == "b" and layer.bias is None:
            continue
        if (value is not None) != needed:
            wrong.append(f"grad_{key} is {'missing' if needed else 'there'}")
        elif value is not None:
            error = np.abs(value.numpy() - expected[key]).max(initial=0.0)
            bound = sample.tolerance * (1 + np.abs(expected[key]).max(initial=0.0))
            wrong += [] if error <= bound else [f"grad_{key} is off by {error:.3g}, allowed {bound:.3g}"]
    return wrong


def planned(case: Case, method: gf.Method) -> LayerPlan:
    plan = gf.plan(*placed(case.module(), method), example=case.tensors()[0])
    return next(row for row in plan.rows if row.name == str(PLACE))


def test_every_method_has_samples_and_a_public_name() -> None:
    files = {file.stem for file in (Path(__file__).parent / "oracles").glob("[!_]*.py")}
    assert files == set(METHODS)
    assert all(type(sample.method) is METHODS[name] for name, sample in ALL)
    assert all(getattr(gf, kind.__name__) is kind for kind in METHODS.values())


@pytest.mark.parametrize("chunk", range(CHUNKS))
@every_method
def test_gradients_equal_the_oracle(name: str, chunk: int) -> None:
    own = samples(name)
    cases = [(Case(seed), own[seed % len(own)]) for seed in range(chunk, CASES, CHUNKS)]
    message = report(cases, lambda pair: wrong_gradients(*pair))
    assert not message, message


@every_sample
def test_a_wrong_oracle_is_noticed(sample: Sample) -> None:
    """The negative control: gradients of another layer, with its kernel flipped and its input shifted."""

    def flipped(problem: Problem) -> Gradients:
        p = problem
        found = conv_gradients(p.layer, p.x + 0.01, p.w[..., ::-1] * 1.01, p.g, p.dense)
        return Gradients(found.x, found.w, found.b * 1.01)

    broken = Sample(sample.method, flipped, sample.tolerance)
    assert report([Case(seed) for seed in range(12)], lambda case: wrong_gradients(case, broken))


@every_sample
def test_kept_bytes_are_those_predicted(sample: Sample) -> None:
    def judge(case: Case) -> list[str]:
        layer, x = case.module(torch.float32), case.tensors(torch.float32)[0].clone()
        model, methods = placed(layer, sample.method)
        plan = gf.plan(model, methods, example=x)
        gf.apply_(model, plan)
        with gf.kept_bytes(model) as kept:
            model(x)
        found, predicted = sum(kept.values()), plan.kept[1]
        fits = found <= predicted if sample.method.bytes_depend_on_data else found == predicted
        return [] if fits else [f"{found} bytes kept, {predicted} predicted"]

    message = report([Case(seed) for seed in range(60)], judge)
    assert not message, message


@every_sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_smaller_types(sample: Sample, dtype: torch.dtype) -> None:
    """Runs, keeps the type, and comes to about what float64 does."""

    def judge(case: Case) -> list[str]:
        found = run(case, sample.method, (True, True, True), dtype)
        full = run(case, sample.method, (True, True, True), torch.float64)
        wrong = [
            f"grad_{k} is {v.dtype}" for k, v in found.grads.items() if v is not None and v.dtype != dtype
        ]
        for key, value in found.grads.items():
            if value is not None and not (
                torch.isfinite(value).all() and value.shape == full.grads[key].shape
            ):  # type: ignore[union-attr]
                wrong.append(f"grad_{key} is not finite, or has another shape")
        return wrong

    message = report([Case(seed) for seed in range(40)], judge)
    assert not message, message


@every_sample
def test_channels_last_is_kept(sample: Sample) -> None:
    layer = nn.Conv2d(8, 6, 3, padding=1)
    model = apply(layer, sample.method).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 10, 10).to(memory_format=torch.channels_last).requires_grad_()
    y = model(x)
    y.sum().backward()
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert x.grad is not None
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@every_sample
def test_double_backward_is_refused(sample: Sample) -> None:
    model, x = (
        apply(nn.Conv2d(4, 4, 3, padding=1), sample.method),
        torch.randn(2, 4, 6, 6, requires_grad=True),
    )
    with pytest.raises(gf.GradFilterError, match="Double backward"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum().backward()


def training(model: nn.Module, seeds: Iterator[int]) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for seed in seeds:
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@every_sample
def test_state_dict_and_resume(sample: Sample) -> None:
    """Keys stay; a copy goes on as the original does; so does a new model with both states loaded."""
    model = gf.models.build("tiny", classes=4).eval()
    keys = list(model.state_dict())
    before = copy.deepcopy(model)
    methods = {"head": gf.Exact(), "*": sample.method}
    gf.apply_(model, methods, "last:4")
    training(model, iter(range(3)))
    own = [key for key in model.state_dict() if ".gradfilter_" in key]
    assert [key for key in model.state_dict() if key not in own] == keys
    assert bool(own) == sample.method.adds_parameters
    copied, resumed = copy.deepcopy(model), gf.apply_(before, methods, "last:4")
    resumed.load_state_dict(model.state_dict())
    gf.load_method_state_(resumed, gf.method_state(model))
    for one in (model, copied, resumed):
        training(one, iter(range(3, 6)))
    for key, value in model.state_dict().items():
        assert torch.equal(value, copied.state_dict()[key])
        assert torch.equal(value, resumed.state_dict()[key])


@every_sample
def test_the_global_random_state_is_left_alone(sample: Sample) -> None:
    model, x = apply(nn.Conv2d(4, 4, 3), sample.method), torch.randn(2, 4, 8, 8)
    before = torch.get_rng_state()
    model(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@every_sample
def test_zero_and_rank_deficient_inputs(sample: Sample) -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)
    model = apply(layer, sample.method)
    for x in (torch.zeros(3, 4, 8, 8), torch.ones(3, 4, 8, 8), torch.randn(1, 4, 1, 1).expand(3, 4, 8, 8)):
        layer.zero_grad()
        model(x.double()).sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all()
