"""Plan, apply, restore: what changes in a model, what does not, and what is said when it cannot be done."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import methods
from gradfilter.coarse import densify
from gradfilter.errors import PlanError
from gradfilter.geometry import ConvGeometry
from gradfilter.ops.exact_conv import Gradients, Want, exact_backward

FILTER = gf.GradientFilter(patch=2)


class Block(nn.Module):
    """As in ResNet: functional activation, shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = Block(8, 8)
        self.layer2 = Block(8, 16, 2)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


NETS: dict[str, Callable[[], nn.Module]] = {"net": Net, "tiny": lambda: gf.models.build("tiny", classes=5)}
LAYERS = ["conv1", *(f"layer{i}.{n}" for i in (1, 2) for n in ("conv1", "conv2", "downsample.0")), "fc"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def images(n: int = 2, side: int = 16) -> Tensor:
    return torch.randn(n, 3, side, side)


def state(model: nn.Module) -> str:
    """Everything a model is: classes, names, attributes, flags, modes, hooks, the bits of its tensors."""
    digest = hashlib.sha256()
    for name, module in model.named_modules(remove_duplicate=False):
        parts = [name, f"{type(module)}", module.training, id(module)]
        parts += [(key, id(value)) for key, value in module.__dict__.items() if not isinstance(value, dict)]
        parts += [(key, list(value)) for key, value in module.__dict__.items() if isinstance(value, dict)]
        digest.update(repr(parts).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name} {id(tensor)} {tensor.requires_grad} {tensor.dtype} {tensor.stride()}".encode())
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(call: Callable[[], Any], kind: type[Exception] = gf.GradFilterError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# What apply_ changes, and what it does not


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("norm", ["fixed", "affine", "batch"])
@pytest.mark.parametrize("training", [True, False])
def test_restore_undoes_apply(net: str, norm: Any, training: bool) -> None:
    model = NETS[net]().train(training)
    next(model.parameters()).requires_grad_(False)  # as the user left it
    before = state(model)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    assert gf.apply_(model, FILTER, "last:2", norm=norm) is model
    assert state(model) != before
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    gradients(model.eval(), images())
    model.train(training)
    assert gf.restore_(model) is model
    assert state(model) == before


def test_restore_of_a_plain_model_changes_nothing() -> None:
    model = Net()
    before = state(model)
    assert gf.restore_(model) is model
    assert state(model) == before


def test_restore_gives_norms_the_mode_that_was_asked_for_last() -> None:
    model = Net().train()
    gf.apply_(model, FILTER).eval()
    assert not any(module.training for module in gf.restore_(model).modules())
    gf.apply_(model, FILTER).train()
    assert not model.bn1.training
    assert all(module.training for module in gf.restore_(model).modules())


def test_parts_of_fixed_norms_follow_the_mode() -> None:
    model = gf.apply_(own_forwards().train(), FILTER)
    assert [module.training for module in (model[1], model[1].drop)] == [False, True]
    model.eval().train()
    assert [module.training for module in (model[1], model[1].drop)] == [False, True]
    model.eval()
    assert not model[1].drop.training
    assert not any(module.training for module in gf.restore_(model).modules())


def test_apply_and_restore_twice() -> None:
    model, x = Net().eval(), images()
    first = gradients(gf.apply_(model, FILTER), x)
    gf.restore_(model)
    second = gradients(gf.apply_(model, FILTER), x)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_apply_to_a_part_of_a_model() -> None:
    model, x = Net().eval(), images()
    expected = model(x)
    gf.apply_(model.layer2, FILTER)
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert model.conv1.weight.grad is not None  # plain, not frozen: only the part was changed
    assert error(lambda: gf.apply_(model, FILTER)).startswith("The model has a plan applied already")
    gf.restore_(model)


def test_optimizer_made_before() -> None:
    model, x = Net(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gf.apply_(model, FILTER, "last:2")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    changed = [
        name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])
    ]
    assert changed == trained(model) != []


@pytest.mark.parametrize("net", NETS)
def test_hooks_see_what_they_saw_before(net: str) -> None:
    model, x = NETS[net]().eval(), images()
    seen: list[tuple[str, str, Tensor]] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.append((name, "pre", args[0].clone()))
        )
        module.register_forward_hook(lambda _, args, y, name=name: seen.append((name, "post", y.clone())))
    plain = model(x)
    expected, seen[:] = list(seen), []
    applied = gf.apply_(model, FILTER)(x)
    assert torch.equal(plain, applied)
    assert [entry[:2] for entry in seen] == [entry[:2] for entry in expected]
    assert all(torch.equal(mine[2], theirs[2]) for mine, theirs in zip(seen, expected, strict=True))
    seen.clear()
    gf.restore_(model)(x)
    assert len(seen) == len(expected)


@pytest.mark.parametrize("kind", ["conv", "norm", "activation"])
@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_one_hook_changes_no_result(kind: str, hook: str) -> None:
    """Layers run with what follows them as one node, but not where a hook looks in between."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    model[1].running_var.fill_(3.0)
    x = images().requires_grad_()  # torch warns of backward hooks where the input needs no gradient
    expected, plain = gradients(gf.apply_(model, FILTER), x), model(x)
    fired = []
    module = model[["conv", "norm", "activation"].index(kind)]
    getattr(module, f"register_{hook}_hook")(lambda *_: fired.append(kind))
    assert torch.equal(model(x), plain)
    found = gradients(model, x)
    assert fired
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_hook_on_all_modules() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), images()
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        expected = model(x)
        assert torch.equal(gf.apply_(model, FILTER)(x), expected)
    finally:
        handle.remove()
    assert seen == [*model, model] * 2


def test_repr_and_classes() -> None:
    model = Net()
    before = repr(model)
    gf.apply_(model, FILTER)
    assert repr(model) == before
    assert isinstance(model, Net)
    assert isinstance(model.conv1, nn.Conv2d)


# All or nothing


def other_model() -> nn.Module:
    return gf.models.build("tiny")


def wider() -> nn.Module:
    model = Net()
    model.extra = nn.Conv2d(1, 1, 1)
    return model


def as_linear() -> nn.Module:
    model = Net()
    model.conv1 = nn.Linear(3, 3)
    return model


def replaced_forward() -> nn.Module:
    model = Net()
    model.layer1.conv2.forward = lambda x: x
    return model


def scripted() -> nn.Module:
    model = Net()
    with torch.no_grad():
        model.layer1 = torch.jit.trace(model.layer1.eval(), torch.zeros(1, 8, 4, 4), check_trace=False)
    return model


ERRORS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "near name": (
        Net,
        lambda m: gf.apply_(m, FILTER, "layer2.cnv1"),
        "No layer matches 'layer2.cnv1'. Did you mean layer2.conv1 or layer2.conv2 or layer1.conv1?",
    ),
    "near container": (
        Net,
        lambda m: gf.plan(m, FILTER, "laier2"),
        "No layer matches 'laier2'. Did you mean layer2",
    ),
    "far name": (
        Net,
        lambda m: gf.plan(m, FILTER, "zzz"),
        "No layer matches 'zzz'. The model's layers run from conv1 to fc.",
    ),
    "nothing left out": (Net, lambda m: gf.plan(m, FILTER, "!zzz"), "No layer matches 'zzz'."),
    "function": (
        Net,
        lambda m: gf.plan(m, FILTER, lambda name, module: False),
        "The function given as a selection accepts no layer of the model.",
    ),
    "everything left out": (
        Net,
        lambda m: gf.plan(m, FILTER, "last:2, !layer2, !fc"),
        "The selection 'last:2, !layer2, !fc' leaves no layer to train; drop one of its '!' terms.",
    ),
    "empty": (
        Net,
        lambda m: gf.plan(m, FILTER, " , "),
        "The selection of layers is empty; say 'last:4', 'all' or a glob such as 'layer4.*'.",
    ),
    "number": (
        Net,
        lambda m: gf.plan(m, FILTER, 4),  # type: ignore[arg-type]
        "Layers are selected by strings such as 'last:4', 'layer4.*', or by functions, not 4.",
    ),
    "last:0": (
        Net,
        lambda m: gf.plan(m, FILTER, "last:0"),
        "'last:0' needs a whole number of at least 1 behind the colon, as in 'last:4'.",
    ),
    "last:x": (
        Net,
        lambda m: gf.plan(m, FILTER, "first:x"),
        "'first:x' needs a whole number of at least 1 behind the colon, as in 'last:4'.",
    ),
    "last:99": (
        Net,
        lambda m: gf.plan(m, FILTER, "last:99"),
        "'last:99' asks for more than the 7 layers there are; say 'all' instead.",
    ),
    "no layers": (
        nn.ReLU,
        lambda m: gf.plan(m, FILTER),
        "ReLU has no convolution or linear layer that runs; there is nothing to train.",
    ),
    "method": (
        Net,
        lambda m: gf.apply_(m, "filter"),  # type: ignore[arg-type]
        "A plan needs a method such as gf.GradientFilter(patch=2), not 'filter'.",
    ),
    "norm": (
        Net,
        lambda m: gf.apply_(m, FILTER, norm="frozen"),  # type: ignore[arg-type]
        "norm must be 'fixed', 'affine' or 'batch', not 'frozen'.",
    ),
    "no pattern": (
        Net,
        lambda m: gf.apply_(m, gf.GradientFilter(patch={"layer1.*": 2})),
        "GradientFilter's patch has no pattern that matches layer conv1; add '*' with a default patch.",
    ),
    "plan and layers": (
        Net,
        lambda m: gf.apply_(m, gf.plan(m, FILTER), "all"),
        "A plan has its layers, norm policy and example already; give them to gf.plan instead.",
    ),
    "not a model": (
        Net,
        lambda m: gf.plan(m.state_dict(), FILTER),  # type: ignore[arg-type]
        "A plan needs a torch.nn.Module, not OrderedDict.",
    ),
    "other model": (
        other_model,
        lambda m: gf.apply_(m, gf.plan(Net(), FILTER)),
        "The plan is for another model: this one has no layer conv1.",
    ),
    "more layers": (
        wider,
        lambda m: gf.apply_(m, gf.plan(Net(), FILTER)),
        "The plan is for another model: it does not know layer extra; plan for this one.",
    ),
    "other kind": (
        as_linear,
        lambda m: gf.apply_(m, gf.plan(Net(), FILTER)),
        "The plan is for another model: layer conv1 is a Linear here, not a Conv2d.",
    ),
    "no norm": (
        Net,
        lambda m: gf.apply_(m, replace(gf.plan(m, FILTER, norm="batch"), norms=("bn3",))),
        "The plan is for another model: this one has no norm bn3.",
    ),
    "forward": (
        replaced_forward,
        lambda m: gf.apply_(m, FILTER),
        "Layer layer1.conv2 has its forward replaced on the object; undo that before gf.apply_.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do_and_change_nothing(case: str) -> None:
    make, call, sentence = ERRORS[case]
    model = make()
    before = state(model)
    assert error(lambda: call(model), PlanError).startswith(sentence)
    assert state(model) == before


def test_jit_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit"):
        model = scripted()
    before = [type(module) for module in model.modules()]
    sentence = "Module layer1 is compiled by torch.jit; use the model it was made from."
    assert error(lambda: gf.apply_(model, FILTER), PlanError) == sentence
    assert [type(module) for module in model.modules()] == before


def test_applied_twice() -> None:
    model = gf.apply_(Net(), FILTER)
    before = state(model)
    sentence = "The model has a plan applied already; call gf.restore_(model) first."
    assert error(lambda: gf.apply_(model, FILTER)) == sentence
    assert error(lambda: gf.plan(model, FILTER)) == sentence
    assert error(lambda: gf.apply_(model, gf.plan(Net(), FILTER))) == sentence
    assert state(model) == before


def test_a_failure_halfway_is_undone() -> None:
    class Stubborn(nn.Conv2d):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "__class__":
                raise TypeError("not me")
            super().__setattr__(name, value)

    model = Net()
    model.layer2.conv2 = Stubborn(16, 16, 3, padding=1)
    before = state(model)
    with pytest.raises(TypeError, match="not me"):
        gf.apply_(model, FILTER, "last:1")
    assert state(model) == before


def test_method_settings_are_checked() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"patch": 0}, "patch must be whole numbers of at least 1, not 0; 2 or 4 are usual."),
        ({"patch": 2.0}, "patch must be whole numbers of at least 1, not 2.0; 2 or 4 are usual."),
        ({"patch": (2, -1)}, "patch must be whole numbers of at least 1, not (2, -1); 2 or 4 are usual."),
        ({"patch": {"*": ()}}, "patch must be whole numbers of at least 1, not (); 2 or 4 are usual."),
        ({"taps": "both"}, "taps must be 'overlap' or 'collapse', not 'both'."),
        ({"input_gradient": "none"}, "input_gradient must be 'coarse' or 'exact', not 'none'."),
        (
            {"weight_patch": 0},
            "weight_patch must be whole numbers of at least 1, not 0; 2 or 4 are usual.",
        ),
        ({"weight_taps": {"*": "both"}}, "weight_taps must be 'overlap' or 'collapse', not 'both'."),
        (
            {"patch": 4, "weight_patch": 2},
            "weight_patch 2 is no multiple of patch 4, on which the gradient arrives; "
            "use a multiple, a patch that divides it, or input_gradient='exact'.",
        ),
    ]
    for settings, sentence in wrong:
        assert error(lambda settings=settings: gf.GradientFilter(**settings), PlanError) == sentence


# Selections

SELECTIONS: list[tuple[Any, list[str]]] = [
    ("all", LAYERS),
    ("last:1", ["layer2.downsample.0"]),
    ("last:3", ["layer2.conv1", "layer2.conv2", "layer2.downsample.0"]),
    ("last:7", LAYERS[:-1]),
    ("first:1", ["conv1"]),
    ("first:2", ["conv1", "layer1.conv1"]),
    ("layer1.*", LAYERS[1:4]),
    ("layer1", LAYERS[1:4]),
    ("layer2.downsample", ["layer2.downsample.0"]),
    ("layer?", LAYERS[1:7]),
    ("*.conv2", ["layer1.conv2", "layer2.conv2"]),
    ("fc", []),
    ("last:1,first:1", ["conv1", "layer2.downsample.0"]),
    (" last:1 , layer1.conv2 ", ["layer1.conv2", "layer2.downsample.0"]),
    ("layer1,!*.conv1", ["layer1.conv2", "layer1.downsample.0"]),
    ("!layer1", ["conv1", *LAYERS[4:7]]),
    ("!last:2", LAYERS[:5]),
    (["last:1", "conv1"], ["conv1", "layer2.downsample.0"]),
    (["last:2", "!layer2.conv2,!fc"], ["layer2.downsample.0", None]),
    (("layer1.conv1",), ["layer1.conv1"]),
    (
        lambda name, module: isinstance(module, nn.Conv2d) and module.stride == (2, 2),
        ["conv1", "layer2.conv1", "layer2.downsample.0"],
    ),
    ([lambda name, module: name.endswith("0"), "!layer1"], ["layer2.downsample.0"]),
]


@pytest.mark.parametrize(("layers", "names"), SELECTIONS, ids=[str(i) for i in range(len(SELECTIONS))])
def test_selections(layers: Any, names: list[str | None]) -> None:
    head = [] if None in names else ["fc"]
    expected = [*filter(None, names), *head] if "fc" not in names else names
    plan = gf.plan(Net(), FILTER, layers)
    assert list(plan.trained) == expected
    model = gf.apply_(Net(), FILTER, layers)
    assert {name.rsplit(".", 1)[0] for name in trained(model)} == set(expected)


def test_everything_before_the_first_trained_layer_is_frozen() -> None:
    plan = gf.plan(Net(), FILTER, "layer1.conv2")
    actions = {row.name: row.action for row in plan.rows}
    assert actions == {
        "conv1": "frozen",
        "layer1.conv1": "frozen",
        "layer1.conv2": "train",
        "layer1.downsample.0": "pass",
        "layer2.conv1": "pass",
        "layer2.conv2": "pass",
        "layer2.downsample.0": "pass",
        "fc": "train",
    }
    assert plan.rows[-2].method == FILTER  # gradients pass through it on the grid
    assert plan.rows[-1] == replace(plan.rows[-1], method=gf.Exact(), reason="plain features have no map")


class Backwards(nn.Module):
    """Registers its layers in the opposite order of execution, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.third = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.aux = nn.Conv2d(4, 4, 1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.first = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.norm(self.second(self.first(x)))).mean((2, 3)))


def test_execution_order_needs_an_example() -> None:
    model, x = Backwards(), images()
    plan = gf.plan(model, FILTER, "last:1", example=x)
    assert [row.name for row in plan.rows] == ["first", "second", "third", "head", "aux"]
    assert plan.trained == ("third", "head")
    assert (plan.rows[-1].action, plan.rows[-1].reason) == ("frozen", "does not run on the example")
    assert gf.plan(model, FILTER, "last:1").trained == ("first",)  # as registered; no linear layer comes last
    assert trained(gf.apply_(model, FILTER, "last:1", example=x)) == [
        "head.weight",
        "head.bias",
        "third.weight",
        "third.bias",
    ]


def test_norms_belong_to_the_layer_they_run_behind() -> None:
    assert gf.plan(Backwards(), FILTER, "second", norm="affine", example=images()).norms == ("norm",)
    assert gf.plan(Backwards(), FILTER, "third", norm="affine", example=images()).norms == ()
    assert gf.plan(Backwards(), FILTER, "third", norm="affine").norms == ("norm",)


def test_a_layer_that_does_not_run_cannot_be_chosen() -> None:
    assert error(lambda: gf.plan(Backwards(), FILTER, "aux", example=images())) == (
        "Layer aux does not run on the example; select others, or plan without one."
    )


def test_heads_of_several_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert gf.plan(model, FILTER, "last:1").trained == ("0", "2", "4")
    assert gf.plan(model, FILTER, "last:1, !2").trained == ("0", "4")


def test_networks_of_linear_layers_count_linear_layers() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    for example in (None, torch.zeros(2, 4)):
        assert gf.plan(model, FILTER, "last:2", example=example).trained == ("2", "3", "4")
    assert gf.plan(nn.Linear(4, 4), FILTER, "last:1").trained == ("",)


class Mixed(nn.Module):
    """A depthwise convolution, then linear layers over channels, as in ConvNeXt; linear squeeze-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.squeeze = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(8, 4)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.stem(x))
        x = x * self.squeeze(x.mean((2, 3)))[:, :, None, None]
        y = self.narrow(F.gelu(self.wide(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        return self.last(x + y)


def test_linear_layers_over_maps_count() -> None:
    plan = gf.plan(Mixed(), FILTER, "last:3", example=images())
    assert plan.trained == ("wide", "narrow", "last")
    assert gf.plan(Mixed(), FILTER, "last:4", example=images()).trained == (
        "depthwise",
        "wide",
        "narrow",
        "last",
    )
    assert gf.plan(Mixed(), FILTER, "last:2").trained == ("depthwise", "last")  # what they read is not known
    reasons = {row.name: row.reason for row in gf.plan(Mixed(), FILTER, example=images()).rows}
    assert reasons.pop("squeeze") == "plain features have no map"
    assert set(reasons.values()) == {""}


def test_linear_layers_over_tokens_need_their_map() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    tokens = torch.zeros(2, 12, 4)
    unknown = gf.plan(model, FILTER, example=tokens).rows[0]
    assert (unknown.method, unknown.reason) == (
        gf.Exact(),
        "the map behind 12 tokens is not known; set tokens=(H, W)",
    )
    wrong = gf.plan(model, gf.GradientFilter(tokens=(5, 5)), example=tokens).rows[0]
    assert wrong.reason == unknown.reason
    known = gf.plan(model, gf.GradientFilter(tokens=(3, 4)), example=tokens).rows[0]
    assert known.method == gf.GradientFilter(tokens=(3, 4))
    assert not known.reason


# Patches


def test_patch_forms() -> None:
    model = Net()
    by_layer = gf.GradientFilter(patch={"layer2.*": 4, "*.conv1": (1, 2), "*": 2})
    found = {row.name: row.method for row in gf.plan(model, by_layer).rows}
    assert {name: getattr(method, "patch", None) for name, method in found.items()} == {
        "conv1": 2,
        "layer1.conv1": (1, 2),
        "layer1.conv2": 2,
        "layer1.downsample.0": 2,
        "layer2.conv1": 4,
        "layer2.conv2": 4,
        "layer2.downsample.0": 4,
        "fc": None,
    }
    grads = gradients(gf.apply_(model.eval(), by_layer), images())
    assert set(grads) == {f"{name}.weight" for name in LAYERS} | {"fc.bias"}
    assert gf.plan(Net(), gf.GradientFilter(patch=[2, 4])).rows[0].method == gf.GradientFilter(patch=(2, 4))


def test_stores_are_checked() -> None:
    message = error(lambda: gf.GradientFilter(store="int3"), PlanError)  # type: ignore[arg-type]
    assert message.startswith("store must be 'same' or 'bf16'")
    assert message.endswith("not 'int3'.")


def test_weight_patch_and_taps_by_layer() -> None:
    by_layer = gf.GradientFilter(
        patch={"layer2.*": 4, "*": 2},
        weight_patch={"layer2.*": (8, 4), "*.conv1": None, "*": 4},
        weight_taps={"layer1.*": "collapse", "*": None},
    )
    hash(by_layer)
    found = {row.name: row.method for row in gf.plan(Net(), by_layer).rows}
    assert found["layer1.conv1"] == gf.GradientFilter(patch=2, weight_taps="collapse")
    assert found["layer1.conv2"] == gf.GradientFilter(patch=2, weight_patch=4, weight_taps="collapse")
    assert found["layer2.conv2"] == gf.GradientFilter(patch=4, weight_patch=(8, 4))
    grads = gradients(gf.apply_(Net().eval(), by_layer), images())
    assert set(grads) == {f"{name}.weight" for name in LAYERS} | {"fc.bias"}


def test_a_weight_patch_that_does_not_fit_its_layers_patch_is_refused_when_planned() -> None:
    method = gf.GradientFilter(patch={"layer2.*": 4, "*": 2}, weight_patch=2)
    assert error(lambda: gf.plan(Net(), method), PlanError).startswith(
        "weight_patch 2 is no multiple of patch 4"
    )
    dense = gf.GradientFilter(patch=4, weight_patch=2, input_gradient="exact")
    assert gf.plan(Net(), dense).rows[0].method == dense
    sides = gf.GradientFilter(patch=2, weight_patch=(2, 2, 2))
    assert (
        gf.plan(Net(), sides).rows[0].reason == "weight_patch (2, 2, 2) has 3 numbers but the map has 2 axes"
    )


def test_the_weight_patch_decides_what_is_kept_and_the_patch_what_is_passed() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)), images()
    plain = gf.plan(model, gf.GradientFilter(patch=2), example=x)
    weight = gf.plan(model, gf.GradientFilter(patch=2, weight_patch=4), example=x)
    half = gf.plan(model, gf.GradientFilter(patch=2, weight_patch=4, store="bf16"), example=x)
    assert plain.kept[1] == 4 * weight.kept[1] == 8 * half.kept[1]
    for plan in (weight, half):
        applied = gf.apply_(copy.deepcopy(model), plan)
        assert kept(applied, x) == plan.kept[1]
        with gf.count_fallbacks() as seen:
            applied(x).sum().backward()
        assert not seen


def test_a_smaller_store_rounds_the_kept_means_only() -> None:
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    g = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    found = []
    for store in ("same", "bf16"):
        conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        nn.init.constant_(conv.weight, 0.5)
        model = gf.apply_(nn.Sequential(conv), gf.GradientFilter(patch=2, store=store))  # type: ignore[arg-type]
        leaf = x.clone().requires_grad_()
        model(leaf).backward(g)
        found.append((leaf.grad, conv.weight.grad))
    (x_grad, weight_grad), (x_grad_small, weight_grad_small) = found
    assert torch.equal(x_grad, x_grad_small)
    assert not torch.equal(weight_grad, weight_grad_small)
    assert torch.allclose(weight_grad, weight_grad_small, atol=0.02 * float(weight_grad.abs().max()))


def test_patch_needs_no_pattern_for_layers_that_are_exact_anyway() -> None:
    plan = gf.plan(Net(), gf.GradientFilter(patch={"layer2.*": 2}), "layer2")
    assert [row.method for row in plan.rows[4:]] == [FILTER] * 3 + [gf.Exact()]


def test_a_patch_with_too_many_sides_leaves_the_layer_exact() -> None:
    model, x = Net().eval(), images()
    plan = gf.plan(model, gf.GradientFilter(patch=(2, 2, 2)))
    assert plan.rows[0].reason == "patch (2, 2, 2) has 3 numbers but the map has 2 axes"
    exact = gradients(gf.apply_(copy.deepcopy(model), gf.Exact()), x)
    found = gradients(gf.apply_(model, plan), x)
    assert all(torch.equal(found[name], exact[name]) for name in exact)


# Freezing


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("norm", ["fixed", "affine", "batch"])
def test_frozen_stays_bit_equal(net: str, norm: Any) -> None:
    model = NETS[net]()
    gradients(model, images())  # statistics that are not those of a new model
    plan = gf.plan(model, FILTER, "last:2", norm=norm, example=images())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gf.apply_(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(30):
        model.train()
        optimizer.zero_grad()
        model(images()).square().mean().backward()
        optimizer.step()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    layers = {f"{name}.weight" for name in plan.trained} | {f"{plan.trained[-1]}.bias"}
    assert bool(plan.norms) == (norm != "fixed")
    affine = {f"{name}.{part}" for name in plan.norms for part in ("weight", "bias")}
    statistics = {
        f"{name}.{part}"
        for name in plan.norms
        for part in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert changed == layers | affine | (statistics if norm == "batch" else set())


def test_batch_policy_equals_torch() -> None:
    """patch=1 with batch statistics is ordinary training of the same parameters."""
    model, x = Net().double(), images(4).double()
    plan = gf.plan(model, gf.GradientFilter(patch=1), norm="batch")
    assert plan.norms == ("bn1", *(f"layer{i}.{n}" for i in (1, 2) for n in ("bn1", "bn2", "downsample.1")))
    expected = gradients(copy.deepcopy(model), x)
    plain = copy.deepcopy(model)
    gradients(plain, x)
    found = gradients(gf.apply_(model, plan), x)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9) for name in expected)
    assert torch.equal(model.layer2.bn1.running_mean, plain.layer2.bn1.running_mean)


def test_other_norms_train_with_the_affine_policy() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True)
    )
    assert gf.plan(model, FILTER, norm="affine").norms == ("1", "3")
    assert trained(gf.apply_(model, FILTER, norm="affine")) == [n for n, _ in model.named_parameters()]
    grads = gradients(model, images())
    assert all(grad.any() for name, grad in grads.items() if name != "2.bias")


def test_instance_norm_statistics_are_fixed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
    gf.apply_(model, FILTER).train()
    gradients(model, images())
    assert not model[1].running_mean.any()


# Copies and files


def assert_equal_gradients(one: nn.Module, other: nn.Module) -> None:
    x = images()
    mine, theirs = gradients(one, x), gradients(other, x)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("net", NETS)
def test_deepcopy(net: str) -> None:
    model = gf.apply_(NETS[net](), FILTER, "last:2").eval()
    gradients(model, images())
    copied = copy.deepcopy(model)
    assert_equal_gradients(model, copied)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients(copied, images())
    optimizer.step()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not torch.equal(next(reversed(copied.state_dict().values())), next(reversed(before.values())))
    gf.restore_(copied)
    assert type(copied) is type(NETS[net]())
    assert type(model) is not type(copied)


def test_averaged_copies() -> None:
    model = gf.apply_(Net(), FILTER, "last:2")
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        gradients(model, images())
        optimizer.step()
        average.update_parameters(model)
    assert average.module.layer2.conv2.weight.grad is None
    assert not torch.equal(average.module.layer2.conv2.weight, model.layer2.conv2.weight)
    gradients(average, images())
    assert average.module.layer2.conv2.weight.grad is not None


@pytest.mark.parametrize("net", NETS)
def test_whole_models_in_files(net: str) -> None:
    model = gf.apply_(NETS[net](), gf.GradientFilter(patch={"*": 2}), "last:2").eval()
    assert_equal_gradients(pickle.loads(pickle.dumps(model)), model)  # noqa: S301
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_equal_gradients(loaded, model)
    assert type(gf.restore_(loaded)) is type(NETS[net]())
    assert not any("gradfilter" in key for module in loaded.modules() for key in module.__dict__)


def test_state_dicts_go_in_and_out() -> None:
    model, x = gf.apply_(Net(), FILTER).eval(), images()
    gradients(model, x)
    other = Net()
    gradients(other, x)  # moves its statistics
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other.eval()(x))
    assert_equal_gradients(model, gf.apply_(other, FILTER))


def test_scales_of_fixed_norms_are_not_remembered_too_long() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = images()
    gf.apply_(model, FILTER)
    first = gradients(model, x)["0.weight"]

    def in_place() -> None:
        model[1].running_var.mul_(4)

    def assigned() -> None:
        weights = {**model.state_dict(), "1.running_var": model[1].running_var * 4}
        model.load_state_dict(weights, assign=True)

    def at_the_same_address() -> None:
        new = (model[1].running_var * 4).tolist()
        model[1].running_var = None
        model[1].running_var = torch.tensor(new)

    def data() -> None:
        model[1].running_var.data = model[1].running_var * 4

    for i, change in enumerate((in_place, assigned, at_the_same_address, data)):
        change()
        assert torch.allclose(gradients(model, x)["0.weight"], first / 4 ** (i + 1), rtol=1e-3), change


# Modules that are there twice, and layers with a forward of their own


def test_shared_modules() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.LeakyReLU(0.5)
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.body = nn.Sequential(self.conv, self.act, self.act, nn.Conv2d(3, 3, 1), self.act, self.conv)
            self.again = self.body

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.body(x))

    model, x = Shared().double(), images().double()
    before = state(model)
    expected = gradients(copy.deepcopy(model), x)
    plan = gf.plan(model, gf.GradientFilter(patch=1), example=x)
    assert [row.name for row in plan.rows] == ["conv", "body.3"]
    assert plan.rows[0].before is not None
    assert plan.rows[0].before.forward_macs == 4 * 2 * 16 * 16 * 3 * 3 * 9  # it runs four times
    plain = model(x)
    gf.apply_(model, plan)
    assert torch.equal(model(x), plain)
    found = gradients(model, x)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9) for name in expected)
    model.zero_grad()
    assert state(gf.restore_(model)) == before


def test_tied_weights() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    model[1].weight = model[0].weight
    before = state(model)
    gf.apply_(model, FILTER, "last:1")
    assert trained(model) == ["0.weight", "1.bias"]
    assert state(gf.restore_(model)) == before


class SameConv2d(nn.Conv2d):
    """As in timm: the padding is worked out from the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


class StandardConv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(input=x, weight=weight, bias=self.bias, stride=self.stride, padding=self.padding)


class LoudReLU(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.relu(x)


class NormAct(nn.BatchNorm2d):
    """As in timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


def own_forwards() -> nn.Module:
    layers = [
        SameConv2d(3, 4, 2, 2),
        NormAct(4),
        StandardConv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        LoudReLU(),
    ]
    return nn.Sequential(*layers, nn.Conv2d(4, 2, 1), NormAct(2), nn.ReLU())


def parametrized() -> nn.Module:
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    return nn.Sequential(conv, nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 2, 3)))


@pytest.mark.parametrize("make", [own_forwards, parametrized])
def test_layers_with_a_forward_of_their_own(make: Callable[[], nn.Module]) -> None:
    model, x = make().double().eval(), images().double()
    plain, expected = model(x), gradients(model, x)
    exact = gf.apply_(model, gf.GradientFilter(patch=1), norm="affine")
    assert torch.equal(exact(x), plain)
    found = gradients(exact, x)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-12) for name in found)
    assert {name for name in expected if "0." in name} <= set(found)
    gf.restore_(model)
    plan = gf.plan(model, FILTER, example=x)
    measured = kept(gf.apply_(model, plan), x)
    assert plan.kept[1] == measured
    assert measured < 0.6 * plan.kept[0]
    assert torch.equal(model(x), plain)


def kept(model: nn.Module, x: Tensor) -> int:
    with gf.kept_bytes(model) as found:
        y = model(x)
    del y
    return sum(found.values())


# When the method applies


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_plain_layers_run(net: str, mode: Callable[[], Any]) -> None:
    model, x = NETS[net]().eval(), images()
    with mode():
        expected = model(x)
        found = gf.apply_(model, FILTER)(x)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert found.grad_fn is None


def test_without_gradients_there_is_no_overhead() -> None:
    model, x = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(100))), torch.zeros(1, 1, 1, 1)

    def calls() -> int:
        """Python calls of one forward pass: overhead that, unlike its time, is the same in every run."""
        count = 0

        def see(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        sys.setprofile(see)
        try:
            model(x)
        finally:
            sys.setprofile(before)
        return count

    with torch.no_grad():
        plain = calls()
        gf.apply_(model, FILTER)
        assert calls() <= plain + 2 * len(model)
    assert calls() > plain + 10 * len(model)  # with gradients on, the count does see the operators


def test_frozen_layers_build_no_graph() -> None:
    model = gf.apply_(Net(), FILTER, "layer2")
    seen = []
    model.layer1.register_forward_hook(lambda module, args, y: seen.append(y.requires_grad))
    assert model(images()).requires_grad
    assert seen == [False]


def test_eval_mode_with_gradients_applies_the_method() -> None:
    model, x = Net().eval(), images()
    exact = gradients(model, x)
    found = gradients(gf.apply_(model, FILTER), x)
    train = gradients(model.train(), x)
    name = "layer2.conv2.weight"
    assert not torch.allclose(found[name], exact[name])
    assert torch.equal(found[name], train[name])  # batch norms are fixed in either mode
    assert F.cosine_similarity(found[name].flatten(), exact[name].flatten(), 0) > 0.5


def test_double_backward_is_refused() -> None:
    model = gf.apply_(Net(), FILTER)
    loss = model(images()).sum()
    sentence = (
        "Double backward through a gradfilter region is not possible: call backward without "
        "create_graph=True, or gf.restore_(model) first."
    )
    assert error(lambda: loss.backward(create_graph=True)) == sentence


def test_inputs_get_their_gradient() -> None:
    model = Net().eval()
    x = images().requires_grad_()
    model(x).sum().backward()
    exact, x.grad = x.grad, None
    gf.apply_(model, gf.GradientFilter(patch=1))(x).sum().backward()
    assert exact is not None
    assert type(x.grad) is Tensor
    assert torch.allclose(x.grad, exact, atol=1e-6)


# A method of one's own: its class, and a line in the table


@dataclass(frozen=True)
class Sign(methods.Method):
    """Keeps the signs of its input, one byte each; refuses 1x1 kernels."""

    scale: float = 1.0

    def refuses(self, geometry: ConvGeometry) -> str | None:
        return "a single tap is too few" if geometry.taps == 1 else None

    def patches(self, geometry: ConvGeometry) -> tuple[int, ...]:
        return (1,) * geometry.spatial

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: gf.Memory) -> tuple[Tensor, ...]:
        return (x.sign().to(torch.int8),)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        signs = kept[0].to(grad.dtype) * self.scale if kept else None
        return exact_backward(densify(grad), signs, weight, geometry, want)

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        return geometry.macs * want.x


def test_a_new_method_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(methods.METHODS, "sign", Sign)
    model, x = Net().eval(), images()
    expected = model(x)
    plan = gf.plan(model, methods.METHODS["sign"](scale=2.0), example=x)  # type: ignore[call-arg]
    rows = {row.name: row for row in plan.rows}
    assert str(rows["conv1"].method) == "Sign(scale=2.0)"
    assert rows["layer1.downsample.0"].reason == "a single tap is too few"
    second = rows["layer2.conv2"]
    assert second.before is not None
    assert second.after is not None
    assert 4 * second.after.kept == second.before.kept == 4 * 2 * 16 * 4 * 4
    assert 2 * second.after.backward_macs == second.before.backward_macs
    gf.apply_(model, plan)
    assert torch.equal(model(x), expected)
    assert kept(model, x) == plan.kept[1]
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, args: tuple[Tensor], y: Tensor) -> None:
        seen["x"] = args[0].detach()
        y.register_hook(lambda grad: seen.update(grad=grad))

    model.layer2.conv2.register_forward_hook(look)
    found = gradients(model, x)["layer2.conv2.weight"]
    signs = 2.0 * seen["x"].sign()
    exact = torch.nn.grad.conv2d_weight(signs, found.shape, seen["grad"], padding=1)
    assert torch.allclose(found, exact, atol=1e-5)


def test_plans_print_without_costs() -> None:
    text = str(gf.plan(Net(), gf.GradientFilter(taps="collapse"), "layer2.conv2"))
    assert text == (
        "layer                kind    action  method                                  reason\n"
        "conv1                Conv2d  frozen\n"
        "layer1.conv1         Conv2d  frozen\n"
        "layer1.conv2         Conv2d  frozen\n"
        "layer1.downsample.0  Conv2d  frozen\n"
        "layer2.conv1         Conv2d  frozen\n"
        "layer2.conv2         Conv2d  train   GradientFilter(patch=2, taps=collapse)\n"
        "layer2.downsample.0  Conv2d  pass    GradientFilter(patch=2, taps=collapse)\n"
        "fc                   Linear  train   Exact()                                 "
        "plain features have no map"
    )


@pytest.mark.parametrize("method", [gf.HOSVD, gf.SVD, gf.SparseUpdate, gf.WalshHadamard])
def test_a_store_that_is_none_is_refused(method: Any) -> None:
    with pytest.raises(gf.GradFilterError, match="store must be 'same' or 'bf16' or 'int8', not None"):
        gf.plan(gf.models.build("tiny"), method(store=None))


def test_numpys_word_for_keepdim_is_known() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            pooled = self.conv(x).mean((2, 3), keepdims=True)
            return self.last(pooled + self.conv(x).mean(axis=(2, 3), keepdims=True))

    torch.manual_seed(0)
    model, x = Pooled(), torch.randn(2, 3, 8, 8)
    wanted = model(x)
    gf.apply_(model, gf.GradientFilter(2))
    assert torch.equal(model(x), wanted)
    model(x).sum().backward()


def test_means_are_taken_once_behind_an_activation_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep that counts open pixels has them; the layer that reads the map must not pool it again."""
    from gradfilter.native.inverted_residual import is_built
    from gradfilter.ops import means

    if not is_built():
        pytest.skip("needs the native passes")

    class Sum(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.one, self.two, self.last = (nn.Conv2d(4, 4, 1) for _ in range(3))
            self.relu = nn.ReLU(inplace)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.relu(self.one(x) + self.two(x)))

    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    pooled = []
    in_patches = means._pooled
    monkeypatch.setattr(means, "_pooled", lambda *given: pooled.append(1) or in_patches(*given))
    for inplace in (False, True):
        gf.apply_(Sum(inplace), gf.GradientFilter(2))(x)
    assert len(pooled) == 4  # x, twice each time, and nothing else
