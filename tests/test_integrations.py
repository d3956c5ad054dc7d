"""Trainers of others: they train what is planned, as a plain loop does, and go on where they stopped."""

from __future__ import annotations

import copy
import doctest
import importlib
import inspect
import json
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import gradfilter as gf
from gradfilter.errors import GradFilterError, MissingLibraryError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILTER = gf.GradientFilter(patch=2)
REMEMBERS = gf.SubspaceIteration(rank=2)  # its factors move on from step to step
CLASSES, BATCH, STEPS = 3, 4, 4
Tensors = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures(
    "vision"
)  # all of these libraries may import torchvision, which may warn


def needed(name: str) -> Any:
    """A library, or a skip that says which one is missing; some warn about themselves when imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


def samples() -> list[tuple[Tensor, int]]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 16, 16, generator=draw), i % CLASSES) for i in range(BATCH * STEPS)]


def batches() -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(samples(), batch_size=BATCH)  # type: ignore[arg-type]


def net() -> nn.Module:
    """The same weights each time, and norms that have seen something."""
    torch.manual_seed(1)
    model = gf.models.build("tiny", classes=CLASSES)
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 16, 16))
    return model


def copied(tensors: Any) -> Tensors:
    return {name: value.detach().clone() for name, value in dict(tensors).items()}


def gradients(model: nn.Module) -> Tensors:
    return copied((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


def changed(before: Tensors, after: Tensors) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert changed(expected, found) == set()


def assert_close(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5)


def planned(method: gf.Method, layers: str = "last:2") -> set[str]:
    """What trains, by apply_ alone."""
    model = gf.apply_(net(), method, layers)
    return {name for name, p in model.named_parameters() if p.requires_grad}


def plain_loop(method: gf.Method | None, *, accelerate: bool = False) -> tuple[list[Tensors], Tensors]:
    """The gradients of each step and the last weights of a loop by hand."""
    model, found = net().train(), []
    if method is not None:
        gf.apply_(model, method, "last:2")
    if accelerate:
        gf.accelerate_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches():
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        found.append(gradients(model))
        optimizer.step()
    return found, copied(model.state_dict())


# What they have in common


def test_a_changed_model_says_to_take_what_it_took() -> None:
    """Trainers choose columns of data, labels and losses by a forward's signature."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:
            y: Tensor = self.conv(pixel_values)
            return y

    model = Net()
    whole, part = inspect.signature(model.forward), inspect.signature(model.conv.forward)
    gf.accelerate_(gf.apply_(model, FILTER))
    assert inspect.signature(model.forward) == whole != inspect.signature(lambda *args, **kwargs: None)
    assert inspect.signature(type(model).forward) == inspect.signature(Net.forward)
    assert inspect.signature(model.conv.forward) == part
    assert inspect.signature(copy.deepcopy(model).forward) == whole
    assert model(pixel_values=torch.zeros(1, 3, 8, 8)).shape == (1, 4, 6, 6)


@pytest.mark.parametrize(
    ("module", "packages", "sentence"),
    [
        ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"], "Lightning is not installed"),
        ("transformers", ["transformers"], "transformers is not installed"),
        ("timm", ["timm"], "timm is not installed"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    module: str, packages: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"gradfilter.integrations.{module}"
    monkeypatch.delitem(sys.modules, path, raising=False)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingLibraryError) as caught:
        importlib.import_module(path)
    assert str(caught.value) == f'{sentence}: pip install "gradfilter[{module}]".'
    assert isinstance(caught.value, GradFilterError)
    assert isinstance(caught.value, ImportError)


# Lightning


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return needed(request.param)


@pytest.fixture
def callback() -> Any:
    needed("lightning.pytorch")
    return importlib.import_module("gradfilter.integrations.lightning").GradFilterCallback


def lightning_module(pl: Any, network: nn.Module | None = None) -> Any:
    class Classifier(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network or net()
            self.seen: list[Tensors] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            images, labels = batch
            return cross_entropy(self.net(images), labels)

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(batch[0])

        def on_after_backward(self) -> None:
            self.seen.append(gradients(self.net))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # frozen ones too, as people do

    return Classifier()


def fit_with_lightning(
    pl: Any,
    callbacks: list[Any],
    module: Any = None,
    epochs: int = 1,
    validate: bool = False,
    **settings: Any,
) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = lightning_module(pl) if module is None else module
    with warnings.catch_warnings():  # about workers, log intervals, norms that are not in training mode
        warnings.simplefilter("ignore")
        saves = any("ModelCheckpoint" in type(c).__name__ for c in callbacks)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            callbacks=callbacks,
            enable_checkpointing=saves,
            num_sanity_val_steps=0,
            **quiet,
        )
        trainer.fit(module, batches(), batches() if validate else None, **settings)
    return module


@pytest.mark.parametrize("accelerate", [False, True])
def test_lightning_trains_as_a_plain_loop_does(pl: Any, callback: Any, accelerate: bool) -> None:
    before = copied(net().state_dict())
    module = fit_with_lightning(pl, [callback(FILTER, "last:2", accelerate=accelerate)])
    after = copied(module.net.state_dict())
    assert changed(before, after) == planned(FILTER)
    found, weights = plain_loop(FILTER, accelerate=accelerate)
    assert len(module.seen) == len(found) == STEPS
    for step, expected in zip(module.seen, found, strict=True):
        assert_same(step, expected)
    assert_same(after, weights)


def test_another_method_has_other_gradients(pl: Any, callback: Any) -> None:
    """The negative control of the test above."""
    module = fit_with_lightning(pl, [callback(gf.Exact(), "last:2", accelerate=False)])
    with pytest.raises(AssertionError):
        assert_same(module.seen[0], plain_loop(FILTER)[0][0])
    module = fit_with_lightning(pl, [])
    assert changed(copied(net().state_dict()), copied(module.net.state_dict())) > planned(FILTER)


def test_lightning_leaves_norms_fixed_and_gives_the_plain_model_back(pl: Any, callback: Any) -> None:
    plain = net()
    classes = [type(module) for module in plain.modules()]
    module = fit_with_lightning(
        pl,
        [callback(FILTER, "last:2", module="net", restore=True)],
        lightning_module(pl, plain),
        epochs=2,
        validate=True,
    )
    assert [type(part) for part in module.net.modules()] == classes
    assert all(part.training for part in module.net.modules())
    assert all(parameter.requires_grad for parameter in module.net.parameters())
    after = copied(module.net.state_dict())
    assert not [name for name in changed(copied(net().state_dict()), after) if "running" in name]
    assert module.net(torch.zeros(2, 3, 16, 16)).requires_grad  # and it runs


def test_lightning_fits_twice(pl: Any, callback: Any) -> None:
    ours, module = callback(FILTER, "last:2"), lightning_module(pl)
    for _ in range(2):
        fit_with_lightning(pl, [ours], module)
    assert len(module.seen) == 2 * STEPS


def test_lightning_accelerates_what_a_step_calls(pl: Any, callback: Any) -> None:
    module = fit_with_lightning(pl, [callback(FILTER, "last:2")])
    assert "gradfilter_program" in module.net.__dict__
    assert module.net.__dict__["gradfilter_program"]._ready


class Every:
    """Checkpoints of every epoch."""

    def __init__(self, pl: Any, folder: Path) -> None:
        self.callback = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        self.first = folder / "epoch=0.ckpt"


def test_lightning_resumes_as_if_it_had_never_stopped(pl: Any, callback: Any, tmp_path: Path) -> None:
    every = Every(pl, tmp_path)
    whole = fit_with_lightning(pl, [callback(REMEMBERS, "last:2"), every.callback], epochs=2)
    saved = torch.load(every.first, weights_only=True)
    assert saved["gradfilter"]
    assert set(saved["state_dict"]) == {f"net.{name}" for name in net().state_dict()}

    def resumed(file: Path) -> Tensors:
        module = lightning_module(pl)
        fit_with_lightning(pl, [callback(REMEMBERS, "last:2")], module, epochs=2, ckpt_path=file)
        assert len(module.seen) == STEPS
        return {**copied(module.net.state_dict()), **gf.method_state(module)}

    expected = {**copied(whole.net.state_dict()), **gf.method_state(whole)}
    assert_same(resumed(every.first), expected)
    del saved["gradfilter"]  # the negative control
    torch.save(saved, tmp_path / "less.ckpt")
    assert changed(resumed(tmp_path / "less.ckpt"), expected)


def test_lightning_resumes_adapters(pl: Any, callback: Any, tmp_path: Path) -> None:
    every, adapter = Every(pl, tmp_path), gf.LowRankAdapter(rank=2)
    torch.manual_seed(2)
    whole = fit_with_lightning(pl, [callback(adapter, "last:2"), every.callback], epochs=2)
    module = lightning_module(pl)
    torch.manual_seed(3)
    fit_with_lightning(pl, [callback(adapter, "last:2")], module, epochs=2, ckpt_path=every.first)
    assert any("gradfilter_" in name for name in module.state_dict())
    assert_same(copied(module.state_dict()), copied(whole.state_dict()))


def test_lightning_refuses_a_checkpoint_of_another_plan(pl: Any, callback: Any, tmp_path: Path) -> None:
    every = Every(pl, tmp_path)
    fit_with_lightning(pl, [callback(REMEMBERS, "last:3"), every.callback])
    with pytest.raises(GradFilterError, match="The method state is for another plan"):
        fit_with_lightning(pl, [callback(REMEMBERS, "last:1")], epochs=2, ckpt_path=every.first)


def test_lightning_names_a_part_that_is_not_there(pl: Any, callback: Any) -> None:
    with pytest.raises(GradFilterError, match=r"no module nett when fitting begins.* Did you mean net "):
        fit_with_lightning(pl, [callback(FILTER, module="nett")])


def test_the_lightning_that_is_in_use_is_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    needed("lightning.pytorch")
    ours = importlib.import_module("gradfilter.integrations.lightning")
    fakes = {name: ModuleType(name) for name in ("lightning.pytorch", "pytorch_lightning")}
    for name, fake in fakes.items():
        fake.Callback = type(name, (), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, fake)
    assert ours._callback() is fakes["lightning.pytorch"].Callback
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert ours._callback() is fakes["pytorch_lightning"].Callback


# Hugging Face


@pytest.fixture
def hf() -> Any:
    needed("accelerate")
    return needed("transformers")


def hf_net(hf: Any) -> Any:
    torch.manual_seed(1)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**sizes, num_labels=CLASSES))


def hf_callback(*args: Any, **kwargs: Any) -> Any:
    made = importlib.import_module("gradfilter.integrations.transformers")
    return made.GradFilterCallback(*args, **kwargs)


def hf_trainer(hf: Any, folder: Path, callbacks: list[Any], model: Any = None, **settings: Any) -> Any:
    class Seen(hf.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.seen.append(gradients(kwargs["model"]))

    given = {"max_steps": STEPS, "save_steps": STEPS // 2, "learning_rate": 0.01, **settings}
    arguments = hf.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        **given,
    )
    data = [{"pixel_values": image, "labels": label, "unused": 1} for image, label in samples()]
    source = model if isinstance(model, dict) else {"model": model or hf_net(hf)}
    trainer = hf.Trainer(**source, args=arguments, train_dataset=data, callbacks=[*callbacks, Seen()])
    trainer.seen = []
    return trainer


def test_transformers_trains_what_is_planned_as_a_plain_loop_does(hf: Any, tmp_path: Path) -> None:
    plain = gf.apply_(hf_net(hf), FILTER, "last:2").train()
    names = {name for name, p in plain.named_parameters() if p.requires_grad}
    trainer = hf_trainer(hf, tmp_path, [hf_callback(FILTER, "last:2")], max_steps=1, max_grad_norm=0.0)
    seen: list[Any] = []
    trainer.model.register_forward_pre_hook(
        lambda model, args, kwargs: seen.append(dict(kwargs)), with_kwargs=True
    )
    trainer.train()
    assert changed(copied(hf_net(hf).state_dict()), copied(trainer.model.state_dict())) == names
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in trainer.model.parameters() if p.requires_grad}
    plain(pixel_values=seen[0]["pixel_values"], labels=seen[0]["labels"]).loss.backward()
    assert_close(trainer.seen[0], gradients(plain))

    exact = gf.apply_(hf_net(hf), gf.Exact(), "last:2").train()  # the negative control
    exact(pixel_values=seen[0]["pixel_values"], labels=seen[0]["labels"]).loss.backward()
    with pytest.raises(AssertionError):
        assert_close(trainer.seen[0], gradients(exact))


def test_transformers_accelerates_what_the_model_calls(hf: Any, tmp_path: Path) -> None:
    trainer = hf_trainer(hf, tmp_path, [hf_callback(FILTER, "last:2")], max_steps=1)
    trainer.train()
    programs = [
        m.__dict__["gradfilter_program"] for m in trainer.model.modules() if hasattr(m, "gradfilter_program")
    ]
    assert len(programs) > 1
    assert all(program._ready for program in programs)


def test_transformers_resumes_as_if_it_had_never_stopped(hf: Any, tmp_path: Path) -> None:
    def state(trainer: Any) -> Tensors:
        return {**copied(trainer.model.state_dict()), **gf.method_state(trainer.model)}

    def fresh(**settings: Any) -> Any:
        return hf_trainer(hf, tmp_path, [hf_callback(REMEMBERS, "last:2")], **settings)

    whole = fresh()
    whole.train()
    middle = tmp_path / f"checkpoint-{STEPS // 2}"
    assert set(hf_net(hf).state_dict()) == set(gf.restore_(fresh().model).state_dict())

    again = fresh()
    again.train(resume_from_checkpoint=str(middle))
    assert len(again.seen) == STEPS - STEPS // 2
    assert_same(state(again), state(whole))

    moved = tmp_path / "elsewhere"  # to another place, which the arguments can name
    middle.rename(moved)
    lost = fresh()
    with pytest.raises(
        GradFilterError, match=r"There is no .*gradfilter.safetensors.*resume_from_checkpoint"
    ):
        lost.train(resume_from_checkpoint=str(moved))
    found = fresh(resume_from_checkpoint=str(moved))
    found.train(resume_from_checkpoint=str(moved))
    assert_same(state(found), state(whole))


def test_transformers_notices_what_methods_remember_of_other_weights(hf: Any, tmp_path: Path) -> None:
    """The negative control of the test above: without the file's check, another run's would be taken."""
    hf_trainer(hf, tmp_path / "a", [hf_callback(REMEMBERS, "last:2")]).train()
    hf_trainer(hf, tmp_path / "b", [hf_callback(REMEMBERS, "last:2")], learning_rate=0.02).train()
    step = f"checkpoint-{STEPS // 2}"
    trainer = hf_trainer(hf, tmp_path / "a", [hf_callback(REMEMBERS, "last:2")])
    with pytest.raises(GradFilterError, match="belongs to other weights"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "b" / step))
    module = importlib.import_module("gradfilter.integrations.transformers")
    trainer = hf_trainer(hf, tmp_path / "a", [hf_callback(REMEMBERS, "last:2")])
    whole = hf_trainer(hf, tmp_path / "c", [hf_callback(REMEMBERS, "last:2")])
    whole.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_load_", lambda model, file: None)
        trainer.train(resume_from_checkpoint=str(tmp_path / "a" / step))
    assert changed(copied(trainer.model.state_dict()), copied(whole.model.state_dict()))


def test_transformers_with_a_model_that_is_made_for_each_training(hf: Any, tmp_path: Path) -> None:
    made = {"model_init": lambda: hf_net(hf)}
    trainer = hf_trainer(hf, tmp_path, [hf_callback(FILTER, "last:2")], made)
    trainer.train()
    plain = gf.apply_(hf_net(hf), FILTER, "last:2")
    names = {name for name, p in plain.named_parameters() if p.requires_grad}
    assert changed(copied(hf_net(hf).state_dict()), copied(trainer.model.state_dict())) == names
    trainer = hf_trainer(hf, tmp_path, [hf_callback(gf.LowRankAdapter(rank=2), "last:2")], made)
    with pytest.raises(GradFilterError, match=r"The optimizer does not have .*gradfilter_"):
        trainer.train()


def test_transformers_trains_in_bfloat16_and_gives_the_plain_model_back(hf: Any, tmp_path: Path) -> None:
    """accelerate puts a forward around ours on the model."""
    trainer, x = (
        hf_trainer(hf, tmp_path, [hf_callback(FILTER, "last:2")], bf16=True),
        torch.zeros(1, 3, 32, 32),
    )
    trainer.train()
    model = trainer.model.eval()
    expected = model(x).logits
    plain = hf_net(hf).eval()
    plain.load_state_dict(model.state_dict())
    assert type(gf.restore_(model)) is type(plain)
    assert torch.equal(model(x).logits, plain(x).logits)
    assert not torch.equal(model(x).logits, expected)  # which were bfloat16's


def test_restore_leaves_a_forward_that_is_not_around_ours() -> None:
    """The negative control of the test above."""
    model = gf.models.build("tiny")
    model.forward = lambda x: x + 1  # type: ignore[method-assign]
    assert gf.restore_(gf.apply_(model, FILTER, "last:2"))(torch.ones(1)) == 2


# timm


@pytest.fixture
def timm() -> Any:
    return needed("timm")


def timm_create_optimizer(*args: Any, **settings: Any) -> Any:
    made = importlib.import_module("gradfilter.integrations.timm")
    return made.create_optimizer(*args, **settings)


def timm_net(timm: Any) -> Any:
    torch.manual_seed(1)
    return timm.create_model("test_efficientnet", num_classes=CLASSES)


SGD = {"opt": "momentum", "lr": 0.05, "weight_decay": 1e-3}


class Script:
    """What timm's train.py does to a model, in few lines."""

    def __init__(self, timm: Any, folder: Path, method: gf.Method, **settings: Any) -> None:
        self.model, self.seen, self.timm = timm_net(timm), list[Tensors](), timm
        self.optimizer = timm_create_optimizer(self.model, method, "last:2", **{**SGD, **settings})
        self.ema = timm.utils.ModelEmaV3(self.model, decay=0.5)
        folder.mkdir(exist_ok=True)
        parts = {"model_ema": self.ema, "checkpoint_dir": str(folder)}
        self.saver = timm.utils.CheckpointSaver(self.model, self.optimizer, **parts)

    def resume(self, file: Path) -> None:
        timm = self.timm
        timm.models.resume_checkpoint(self.model, str(file), self.optimizer, log_info=False)
        timm.models.load_checkpoint(self.ema.module, str(file), use_ema=True)

    def run(self, first: int = 0, last: int = 2) -> Script:
        for epoch in range(first, last):
            self.model.train()
            for images, labels in batches():
                self.optimizer.zero_grad()
                cross_entropy(self.model(images), labels).backward()
                self.seen.append(gradients(self.model))
                self.optimizer.step()
                self.ema.update(self.model)
            self.saver.save_checkpoint(epoch, metric=float(epoch))
        return self

    def state(self) -> Tensors:
        ema = {f"ema.{name}": value for name, value in copied(self.ema.module.state_dict()).items()}
        return {**copied(self.model.state_dict()), **ema, **copied(gf.method_state(self.model))}


def test_timm_trains_what_is_planned_as_a_plain_loop_does(timm: Any, tmp_path: Path) -> None:
    script = Script(timm, tmp_path, FILTER, accelerate=False).run(last=1)
    model = gf.apply_(timm_net(timm), FILTER, "last:2").train()
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    optimized = {id(p) for group in script.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in script.model.parameters() if p.requires_grad}
    assert [group["weight_decay"] for group in script.optimizer.param_groups] == [0.0, 1e-3]
    optimizer = timm.optim.create_optimizer_v2(model, **SGD)
    for (images, labels), found in zip(batches(), script.seen, strict=True):
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        assert_same(found, gradients(model))
        optimizer.step()
    assert_same(copied(script.model.state_dict()), copied(model.state_dict()))
    assert changed(copied(timm_net(timm).state_dict()), copied(model.state_dict())) == names

    exact = Script(timm, tmp_path, gf.Exact(), accelerate=False).run(last=1)  # the negative control
    assert changed(exact.seen[0], script.seen[0])


def test_timm_keeps_averages_and_checkpoints_for_the_plain_model(timm: Any, tmp_path: Path) -> None:
    script, x = Script(timm, tmp_path, FILTER).run(), samples()[0][0][None]
    assert script.model.__dict__["gradfilter_program"]._ready
    saved = torch.load(tmp_path / "last.pth.tar", weights_only=True)
    assert saved["arch"] == type(timm_net(timm)).__name__.lower()
    assert set(saved["optimizer"]) == {"state", "param_groups"}  # this method remembers nothing
    with torch.no_grad():
        for key, expected in (("state_dict", script.model), ("state_dict_ema", script.ema.module)):
            plain = timm_net(timm).eval()
            plain.load_state_dict(saved[key])
            torch.testing.assert_close(expected.eval()(x), plain(x), rtol=1e-4, atol=1e-5)
    assert changed(saved["state_dict"], saved["state_dict_ema"]) == {
        name for name, p in script.model.named_parameters() if p.requires_grad
    }


@pytest.mark.parametrize("opt", ["momentum", "lookahead_momentum"])
def test_timm_resumes_as_if_it_had_never_stopped(timm: Any, tmp_path: Path, opt: str) -> None:
    whole = Script(timm, tmp_path / "whole", REMEMBERS, opt=opt).run()
    file = tmp_path / "whole" / "checkpoint-0.pth.tar"

    def resumed(file: Path) -> Tensors:
        script = Script(timm, tmp_path / "again", REMEMBERS, opt=opt)
        script.resume(file)
        return script.run(first=1).state()

    assert_same(resumed(file), whole.state())
    saved = torch.load(file, weights_only=True)
    assert saved["optimizer"].pop("gradfilter")  # the negative control
    torch.save(saved, tmp_path / "less.pth.tar")
    assert changed(resumed(tmp_path / "less.pth.tar"), whole.state())


# TensorBoard


@pytest.fixture
def scalars(tmp_path: Path) -> Callable[[], dict[str, list[tuple[int, float]]]]:
    needed("tensorboard")
    reader = needed("tensorboard.backend.event_processing.event_accumulator")

    def read() -> dict[str, list[tuple[int, float]]]:
        found = reader.EventAccumulator(str(tmp_path))
        found.Reload()
        tags = found.Tags()["scalars"]
        return {tag: [(event.step, round(event.value, 4)) for event in found.Scalars(tag)] for tag in tags}

    return read


ROWS = [{"epoch": n, "loss": 1.0 / n, "seconds": 2.0 * n, "accuracy": 50.0 + n} for n in (1, 2, 3, 4)]
EXPECTED = {
    key: [(row["epoch"], round(row[key], 4)) for row in ROWS] for key in ("loss", "seconds", "accuracy")
}


@pytest.mark.parametrize(("written", "kept"), [(0, 0), (1, 0), (2, 2), (3, 2), (1, 2)])
def test_tensorboard_has_each_epoch_once(tmp_path: Path, scalars: Any, written: int, kept: int) -> None:
    """Also if a kill came before the last epoch was written, or a checkpoint is some epochs old."""
    from gradfilter.training.tensorboard import TensorBoard

    with TensorBoard(tmp_path) as board:
        for row in ROWS[:written]:
            board.append({**row, "loss": 9.0} if row["epoch"] > kept else row)
    with TensorBoard(tmp_path, ROWS[:kept]) as board:
        for row in ROWS[kept:]:
            board.append(row)
    assert scalars() == EXPECTED


def test_tensorboard_without_the_old_epochs_has_some_twice(tmp_path: Path, scalars: Any) -> None:
    """The negative control of the test above."""
    writer = needed("torch.utils.tensorboard").SummaryWriter
    for rows in (ROWS[:3], ROWS[2:]):
        with writer(str(tmp_path)) as plain:
            for row in rows:
                plain.add_scalar("loss", row["loss"], row["epoch"])
    assert [step for step, _ in scalars()["loss"]] == [1, 2, 3, 3, 4]


def test_tensorboard_leaves_out_what_is_no_number(tmp_path: Path, scalars: Any) -> None:
    from gradfilter.training.tensorboard import TensorBoard

    line = json.loads('{"epoch": 1, "loss": null, "accuracy": 10.0, "note": "text"}')
    with TensorBoard(tmp_path) as board:
        board.append(line)
    assert scalars() == {"accuracy": [(1, 10.0)]}


def test_a_missing_tensorboard_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradfilter.training.tensorboard import TensorBoard

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(GradFilterError) as caught:
        TensorBoard("nowhere")
    assert str(caught.value) == 'tensorboard is not installed: pip install "gradfilter[tensorboard]".'


# The examples


@pytest.mark.parametrize("name", ["recipe", "lightning", "transformers", "timm"])
def test_doctests(name: str) -> None:
    if name != "recipe":
        needed(name)
    found = doctest.testmod(importlib.import_module(f"gradfilter.integrations.{name}"))
    assert found.attempted
    assert not found.failed


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
@pytest.mark.filterwarnings("ignore")  # they run as a user runs them
@pytest.mark.parametrize("name", ["lightning", "transformers", "timm"])
def test_examples_run_and_learn(name: str) -> None:
    needed(name)
    file = EXAMPLES / f"{name}_finetune.py"
    assert len(file.read_text().splitlines()) <= 50
    assert runpy.run_path(str(file), run_name="__main__")["accuracy"] > 0.2  # of ten classes
