"""Several processes end a training with the bits of one: what they share, and what they tell each other."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.methods.text import method_from
from gradfilter.training import checkpoint
from gradfilter.training.relay import leaves_no_trace, shared_split
from test_training import TASK, Noisy, assert_same, net, state, training

pytestmark = pytest.mark.usefixtures("vision")  # torchmetrics imports torchvision, which may warn


TOGETHER = """
import json, os, sys
sys.path[:0] = {path!r}
from pathlib import Path
import torch
import torch.distributed as dist
torch.set_num_threads(1)
folder, given = Path(sys.argv[1]), json.loads(sys.argv[4])
rank, processes = int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet", rank=rank, world_size=processes)
{work}
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's threads may still wait for each other, and an orderly end would abort on them
"""


def run_together(folder: Path, work: str, processes: int = 2, **given: Any) -> None:
    """Python, in several processes; it finds ``folder``, ``rank`` and what is ``given``."""
    script = folder / "run.py"
    script.write_text(TOGETHER.format(path=[str(Path(__file__).parent), *sys.path], work=work))
    command = [sys.executable, "-W", "ignore", str(script), str(folder)]
    rest = [str(processes), json.dumps(given)]
    running = [subprocess.Popen([*command, str(rank), *rest]) for rank in range(processes)]
    assert [process.wait(timeout=120) for process in running] == [0] * processes


TRAINING = """
from test_training import training
from torch import nn
forced, unlike, uneven = given.pop("forced", False), given.pop("unlike", False), given.get("patience")
made = training(folder / "run", **{"epochs": 3 if uneven else 2, **given})
made.prepared = 1e4 * rank
if unlike and rank:
    nn.init.ones_(next(iter(made.model.parameters())))
if forced:
    made._share_out = lambda: setattr(made, "shares_batches", True)
if uneven:  # as on another processor
    made.evaluate = lambda: {"accuracy": 50.0 + made.step * rank}
read, made._samples = [], lambda epoch, samples=made._samples: noting(samples(epoch))
made.run()
(folder / f"{rank}.json").write_text(json.dumps(len(read)))
"""

NOTING = """
def noting(samples):
    class Noted(torch.utils.data.Dataset):
        def __getitem__(self, index):
            read.append(index)
            return samples[index]
    return Noted()
"""


def trained_together(folder: Path, processes: int = 2, **settings: Any) -> checkpoint.Checkpoint:
    run_together(folder, NOTING + TRAINING, processes, **settings)
    found = checkpoint.read(folder / "run")
    assert found is not None
    return found


REMEMBERS = {"method": "SubspaceIteration(rank=2)"}
EVERY, SHARED = "every step", "shared"


@pytest.mark.parametrize(
    ("processes", "settings", "taken"),
    [
        # frozen layers
        (2, {"accelerated": True, "count": 21}, SHARED),  # the last batch has one sample
        (
            2,
            {"accelerated": True, "steps": 3},
            SHARED,
        ),  # another process has features of a fourth one by then
        (3, {"accelerated": True, "count": 30, "accumulate": 2}, SHARED),  # the last round has two batches
        # batches of a step
        (2, {"accumulate": 2, "count": 40}, SHARED),
        (2, {"accumulate": 2, "count": 17}, SHARED),  # the second process has none of the last step
        (2, {"accumulate": 3, "count": 25, "planned": {"layers": "all"}, "accelerated": True}, SHARED),
        (2, {"accumulate": 2, "count": 40, "counting": "test"}, SHARED),  # but not the tests
        (2, {"accumulate": 2, "count": 40, "counting": "draws"}, SHARED),  # nor these
        (3, {"accumulate": 4, "count": 32, "precision": "bf16"}, SHARED),
        (3, {"accumulate": 2, "count": 20, "planned": {"method": "HOSVD(variance=0.8)"}}, SHARED),
        # nothing
        (2, {}, EVERY),
        (2, {"accelerated": True, "planned": {"layers": "all"}}, EVERY),
        (2, {"accumulate": 2, "counting": "training"}, EVERY),
        (2, {"accumulate": 2, "planned": {"norm": "batch"}}, EVERY),
        (2, {"accumulate": 2, "planned": REMEMBERS}, EVERY),
        (2, {"accumulate": 2, "planned": {"method": "Quantized(bits=2)"}}, EVERY),
    ],
    ids=str,
)
def test_several_processes_are_one_to_the_bit(
    tmp_path: Path, processes: int, settings: dict[str, Any], taken: str
) -> None:
    found = trained_together(tmp_path, processes, **settings)
    alone = training(**{"epochs": 2, **settings})
    alone.run()
    assert_same(state(alone), found.tensors)
    for key in ("loss", "accuracy"):
        assert [e[key] for e in alone.history.epochs] == [e[key] for e in found.facts["epochs"]]
    read = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    assert (max(read) < 0.8 * len(cast(Noisy, alone.train)) * 2) == (taken == SHARED)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_processes_begin_with_the_weights_of_the_first(tmp_path: Path, accumulate: int) -> None:
    found = trained_together(tmp_path, accumulate=accumulate, planned={"layers": "all"}, unlike=True)
    alone = training(epochs=2, accumulate=accumulate, planned={"layers": "all"})
    alone.run()
    assert_same(state(alone), found.tensors)


FITTING = """
import gradfilter as gf
from test_processes import fitted
model = fitted(rank, given["method"], given["cache"])
torch.save(model.state_dict(), folder / f"{rank}.pt")
"""


def fitted(seed: int, method: str, cache: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = gf.models.build("tiny", classes=2).eval()
    settings = {"cache": cache, "epochs": 1, "batch": 4, "accumulate": 2}
    gf.fit(model, Noisy(16, 0), Noisy(8, 0), TASK, method_from(method), "last:3", **settings)
    return model


@pytest.mark.parametrize(
    ("method", "cache"), [("GradientFilter(2)", True), ("SparseUpdate(channels=0.5)", False)], ids=str
)
def test_models_with_other_weights_are_those_of_the_first_before_anything_looks_at_them(
    tmp_path: Path, method: str, cache: bool
) -> None:
    run_together(tmp_path, FITTING, method=method, cache=cache)
    alone = fitted(0, method, cache).state_dict()
    for rank in range(2):
        assert_same(alone, torch.load(tmp_path / f"{rank}.pt", weights_only=True))


BEGINNING = """
from torch import nn
from gradfilter.training.relay import begin_alike_
model = nn.Linear(2, 2)
model.register_buffer("zero", torch.zeros(1) * (-1 if rank else 1))
model.register_buffer("expanded", torch.full((1, 3), float(rank)).expand(2, 3))
model.register_buffer("sparse", torch.eye(2).to_sparse() * (rank + 1))
begin_alike_(model)
assert torch.equal(model.sparse.to_dense(), torch.eye(2))
del model.sparse
assert not model.zero.signbit() and model.expanded.tolist() == [[0.0] * 3] * 2
torch.save(model.state_dict(), folder / f"{rank}.pt")
"""


def test_models_begin_alike_to_the_bit(tmp_path: Path) -> None:
    run_together(tmp_path, BEGINNING)
    assert_same(*(torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)))


def test_one_process_has_nothing_to_begin_alike_with() -> None:
    """Its buffers may be such as cannot be compared."""
    model = net()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    gf.fit(model, Noisy(8, 0), None, TASK, epochs=1, batch=4)


@pytest.mark.parametrize("planned", [{"norm": "batch"}, REMEMBERS], ids=str)
def test_batches_that_leave_a_trace_cannot_be_shared(tmp_path: Path, planned: dict[str, Any]) -> None:
    """The negative control: shared all the same, they give other weights."""
    found = trained_together(tmp_path, accumulate=2, planned=planned, forced=True)
    alone = training(epochs=2, accumulate=2, planned=planned)
    alone.run()
    with pytest.raises(AssertionError):
        assert_same(state(alone), found.tensors)


SENDING = """
from gradfilter.training.processes import from_process
from test_processes import oddities, parcels
for owner in range(2):
    wanted = parcels(owner)
    found = from_process(owner, wanted if rank == owner else parcels(1 - owner))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        assert one.stride() == other.stride()
for one, other in zip(from_process(0, oddities() if rank == 0 else []), oddities(), strict=True):
    assert torch.equal(one.to_dense(), other.to_dense())
found = from_process(0, [{"boxes": torch.ones(2), "name": "a"}, "b"] if rank == 0 else [])
assert found[1] == "b" and found[0]["boxes"].tolist() == [1, 1]
"""


def parcels(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    maps = torch.randn(2 + seed, 5, 3, 4)
    return [
        maps.contiguous(memory_format=torch.channels_last),
        maps[:, 1:3],
        maps.contiguous(memory_format=torch.channels_last)[:, 1:4],
        maps[:, :, :1].expand(-1, -1, 3, -1),
        maps.bfloat16().transpose(1, 3),
        maps > 0,
        maps.to(torch.complex64)[1:],
        maps.to(torch.int16),
        torch.arange(seed),
        torch.tensor(seed),
    ]


def oddities() -> list[Tensor]:
    """Tensors whose numbers do not lie in memory as they are, or lie askew."""
    torch.manual_seed(0)
    return [
        torch.eye(3).to_sparse(),
        torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1, count=2),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.randn(2, dtype=torch.complex64).conj().imag,
    ]


def test_tensors_of_one_process_reach_all_laid_out_alike(tmp_path: Path) -> None:
    run_together(tmp_path, SENDING)


ENDING = """
import sys, torch, torch.distributed as dist
sys.path[:0] = {path!r}
meet, rank = f"file://{{sys.argv[1]}}/meet", int(sys.argv[2])
dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
import gradfilter as gf
from test_training import Noisy, TASK, net
gf.fit(gf.restore_(net()), Noisy(8), Noisy(4), TASK, gf.GradientFilter(2), "last:3", epochs=1, batch=4)
dist.destroy_process_group()
"""


def test_a_script_may_end_as_usual_behind_fit(tmp_path: Path) -> None:
    script = tmp_path / "end.py"
    script.write_text(ENDING.format(path=[str(Path(__file__).parent), *sys.path]))
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    pair = [subprocess.Popen([*command, rank]) for rank in ("0", "1")]
    assert [process.wait(timeout=120) for process in pair] == [0, 0]


TESTING = """
from test_training import training
made, tested = training(accelerated=True, **given), []
made._share_out()
forward = made.forward
made.forward = lambda inputs: tested.append(len(inputs)) or forward(inputs)
scores = made.evaluate()
(folder / f"{rank}.json").write_text(json.dumps([scores, sum(tested)]))
"""


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"accumulate": 2}], ids=str)
def test_processes_share_the_test(tmp_path: Path, settings: dict[str, Any]) -> None:
    run_together(tmp_path, TESTING, **settings)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    scores = training(accelerated=True, **settings).evaluate()
    assert found == [[scores, count] for count in (6, 4)]


def _with(model: nn.Module, first: nn.Module) -> nn.Module:
    return nn.Sequential(first, model)


class NotANumber(nn.Identity):
    """A buffer that differs from itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unused", torch.full((2,), math.nan))


def hooked(model: nn.Module) -> nn.Module:
    """Seen when the model is called, not when it runs in two."""
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    return model


@pytest.mark.parametrize(
    ("change", "is_shared"),
    [
        (gf.accelerate_, True),
        (lambda model: model, False),  # runs otherwise when it is split
        (lambda model: gf.accelerate_(_with(model, nn.Dropout(0.1))), False),
        (lambda model: gf.accelerate_(_with(model, nn.BatchNorm2d(3).requires_grad_(False))), False),
        (lambda model: gf.accelerate_(_with(model, nn.BatchNorm2d(3).requires_grad_(False))).eval(), False),
        (lambda model: gf.accelerate_(_with(model, nn.Tanh())), True),
        (lambda model: gf.accelerate_(gf.apply_(gf.restore_(model), gf.Exact(), "all")), False),
        (lambda model: hooked(gf.accelerate_(model)), False),
        (lambda model: gf.accelerate_(_with(model, NotANumber())), True),
    ],
)
def test_frozen_layers_are_shared_if_they_are_a_pure_function(change: Any, is_shared: bool) -> None:
    model, sample = change(net()), torch.randn(1, 3, 16, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state_before = torch.get_rng_state()
    found, why = shared_split(model, sample)
    assert (found is not None) == is_shared == (not why)
    after = model.state_dict()
    assert all(torch.equal(value.nan_to_num(), after[name].nan_to_num()) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state_before)


def test_other_samples_and_mixed_precision_are_not_shared() -> None:
    model, sample = gf.accelerate_(net()), torch.randn(1, 3, 16, 16)
    assert shared_split(model, [sample])[0] is None
    with torch.autocast("cpu", torch.bfloat16):
        assert shared_split(model, sample)[0] is None


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        ({}, True),
        ({"layers": "all"}, True),
        ({"norm": "batch"}, False),
        (REMEMBERS, False),
        ({"method": "Quantized(bits=4)"}, False),
        ({"method": "GradientFilter(2, store='int8')"}, False),
        ({"method": "SparseUpdate(channels=0.5)"}, True),
    ],
    ids=str,
)
def test_traces_of_a_batch_are_found_and_wiped_away(planned: dict[str, Any], expected: bool) -> None:
    model, x = net(**planned).train(), torch.randn(2, 3, 16, 16)
    before = {**model.state_dict(), **gf.method_state(model)}
    before = {name: value.clone() for name, value in before.items()}
    for _ in range(2):
        assert leaves_no_trace(model, lambda: model(x)) == expected
        assert_same({**model.state_dict(), **gf.method_state(model)}, before)
    model(x)  # what is remembered from before stays
    before = {name: value.clone() for name, value in gf.method_state(model).items()}
    assert leaves_no_trace(model, lambda: model(x)) == expected
    assert_same(gf.method_state(model), before)


class Restless(nn.Module):
    """Its buffers are made, replaced or resized in a forward, or it draws, or refuses a single sample."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        shapes = {"replaced": 0, "resized": 1, "resized and broadcast": 2}
        self.register_buffer("grid", torch.zeros(shapes[kind]) if kind in shapes else None)
        if kind == "sparse":
            self.grid = torch.eye(2).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("replaced", "filled"):
            self.grid = torch.arange(3.0)
        elif self.kind == "made":
            self.register_buffer("late", torch.ones(1))
        elif self.kind.startswith("resized"):
            self.grid.resize_(len(x)).fill_(0)
        elif self.kind == "draws":
            x = x + torch.rand(())
        elif self.kind == "refuses":
            assert len(x) > 1
        return x


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("still", True),
        ("draws", False),
        ("filled", False),
        ("made", False),
        ("replaced", False),
        ("resized", True),  # to what it was
        ("resized and broadcast", False),
        ("refuses", False),
        ("sparse", False),
    ],
)
def test_whatever_a_forward_does_to_buffers_is_found_and_wiped_away(kind: str, expected: bool) -> None:
    model, x = nn.Sequential(Restless(kind)), torch.zeros(1, 2)
    before = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in before.items()}
    for _ in range(2):
        assert leaves_no_trace(model, lambda: model(x), draws=True) == expected
        after = dict(model.named_buffers())
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)
        assert all(torch.equal(after[name].to_dense(), values[name].to_dense()) for name in before)


def test_what_methods_remember_may_be_changed_in_place() -> None:
    model = net(**REMEMBERS).train()
    model(torch.randn(2, 3, 16, 16))
    before = {name: value.clone() for name, value in gf.method_state(model).items()}
    assert before
    assert not leaves_no_trace(model, lambda: [value.mul_(2) for value in gf.method_state(model).values()])
    assert_same(gf.method_state(model), before)


def test_calibration_of_an_int8_prefix_is_a_trace() -> None:
    model, x = gf.accelerate_(net(), prefix="int8", calibration=1), torch.randn(2, 3, 16, 16)
    called: list[int] = []
    assert not leaves_no_trace(model, lambda: called.append(1))
    assert not called
    model(x)
    assert leaves_no_trace(model, lambda: called.append(1))


def test_two_processes_end_together(tmp_path: Path) -> None:
    """The second one's time is over at once; the first would wait for it in the next step."""
    found = trained_together(tmp_path, minutes=60)
    assert found.facts["step"] == 1
    assert found.facts["why_ended"] == "the time of 60 minutes was over"


def test_the_first_process_decides_when_patience_is_over(tmp_path: Path) -> None:
    found = trained_together(tmp_path, patience=1)
    assert found.facts["why_ended"] == "accuracy had not grown for 1 epochs"
    assert len(found.facts["epochs"]) == 2
