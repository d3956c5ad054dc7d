"""The feature cache: the same training as without it, and never features of anything else."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gradfilter as gf
from gradfilter import cache as cache_module
from gradfilter import feature_store
from gradfilter.cache import FeatureCache, view_of
from gradfilter.errors import GradFilterError
from gradfilter.feature_store import DiskRows, RowLayout

BATCH = 4
SPLIT = cache_module._split  # the one that users have
Sample = tuple[Tensor, int]


class Net(nn.Module):
    """A frozen stem that gives two features, a map and its means, and a tail that needs both."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()
        )
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(16 + 8, 5)

    def prefix(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = self.stem(x)
        return maps, maps.mean((2, 3))

    def tail(self, features: tuple[Tensor, ...]) -> Tensor:
        maps, means = features
        return self.head(torch.cat([self.body(maps).flatten(1), means], 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.prefix(x))


@dataclass
class HandMade:
    """The split that program.split would make of Net."""

    model: Net
    runs: int = 0
    signature: str = "stem, means"
    after: Callable[[], None] = lambda: None

    def prefix(self, x: Tensor) -> tuple[Tensor, ...]:
        self.runs += 1
        features = self.model.prefix(x)
        self.after()
        return features

    def tail(self, features: tuple[Tensor, ...]) -> Tensor:
        return self.model.tail(features)

    @property
    def frozen(self) -> list[Tensor]:
        return [*self.model.stem.parameters(), *self.model.stem.buffers()]


def net(seed: int = 0, **options: Any) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Net(**options).eval()
    model.stem.requires_grad_(False)
    return model


def pictures(count: int = 10, seed: int = 1) -> list[Sample]:
    numbers = torch.Generator().manual_seed(seed)
    return [(torch.rand(3, 16, 16, generator=numbers), i % 5) for i in range(count)]


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> HandMade:
    """The last split that was made, its runs counted."""
    made = HandMade(net())

    def split(model: Net) -> HandMade:
        made.model, made.runs = model, 0
        return made

    monkeypatch.setattr(cache_module, "_split", split)
    return made


def all_features(cache: FeatureCache) -> list[Tensor]:
    batch = next(iter(DataLoader(cache, len(cache))))[0]
    return [feature.clone() for feature in cache.decode(batch)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train(model: nn.Module, batches: Iterator[tuple[Any, Tensor]], forward: Callable[[Any], Tensor]) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for inputs, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(forward(inputs), labels).backward()
        optimizer.step()


def shuffled(data: Any, epochs: int, workers: int = 0) -> Iterator[tuple[Any, Tensor]]:
    order = torch.Generator().manual_seed(7)
    for _ in range(epochs):
        yield from DataLoader(data, BATCH, shuffle=True, generator=order, num_workers=workers, drop_last=True)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_cached_training_is_training_bit_by_bit(
    channels_last: bool, on_disk: bool, workers: int, tmp_path: Path
) -> None:
    plain = net().to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    cached = copy.deepcopy(plain)
    data = pictures(14)
    train(plain, shuffled(data, epochs=3), plain)
    cache = FeatureCache(cached, data, batch=BATCH, folder=tmp_path if on_disk else None, workers=workers)
    train(cached, shuffled(cache, epochs=3, workers=workers), cache.tail)
    assert equal(list(plain.state_dict().values()), list(cached.state_dict().values()))
    assert not torch.equal(cached.head.weight, net().head.weight)  # it did train


class Residual(nn.Module):
    """Cut inside a block: the tail needs what both of its branches give."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1)
        self.conv, self.norm = nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.norm(self.conv(x)) + self.side(x)).mean((2, 3)))


@pytest.mark.parametrize(("name", "layers"), [("tiny", "last:2"), ("residual", "conv")])
def test_cached_training_of_a_model_that_was_split(
    name: str, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_split", SPLIT)
    torch.manual_seed(0)
    plain: nn.Module = Residual() if name == "residual" else gf.models.build(name, classes=5)
    gf.apply_(plain.eval(), gf.GradientFilter(patch=2), layers=layers)
    fused, cached = gf.accelerate_(copy.deepcopy(plain)), copy.deepcopy(plain)
    data = pictures(14)
    for model in (plain, fused):
        train(model, shuffled(data, epochs=3), model)
    cache = FeatureCache(cached, data, batch=BATCH)
    train(cached, shuffled(cache, epochs=3), cache.tail)
    assert equal(list(cached.state_dict().values()), list(fused.state_dict().values()))
    for x, y in zip(cached.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(x, y, atol=1e-5)  # fused or not, but for rounding
    assert len(cache[0][0]) == 2
    with torch.no_grad():
        next(cached.parameters()).add_(1e-3)
    with pytest.raises(GradFilterError, match="changed after their features were cached"):
        cache[0]


def test_the_cache_leaves_the_random_numbers_of_the_training_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    FeatureCache(net(), RandomlyShifted(), views=2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_features_keep_their_memory_layout() -> None:
    model = net().to(memory_format=torch.channels_last)
    cache = FeatureCache(model, pictures(), batch=BATCH)
    features, _ = next(iter(DataLoader(cache, BATCH)))
    maps = cache.decode(features)[0]
    assert maps.is_contiguous(memory_format=torch.channels_last)
    assert maps.data_ptr() == features[0].data_ptr()  # and that without a copy


@pytest.mark.parametrize("size", range(1, 10))
def test_every_image_is_run_in_a_full_batch(size: int, split: HandMade) -> None:
    model, data, seen = net(), pictures(5), []
    prefix = split.prefix
    split.prefix = lambda x: (seen.append(len(x)), prefix(x))[1]
    FeatureCache(model, data, batch=size)
    assert seen == [2, 2] + [size] * -(-5 // size)  # two of the probe


def test_items_are_copies_and_negative_places_count_from_the_end() -> None:
    cache = FeatureCache(net(), pictures(), batch=BATCH)
    before = all_features(cache)
    for part in cache[0][0]:
        part.zero_()
    assert equal(all_features(cache), before)
    assert cache[-1][1] == cache[9][1]
    with pytest.raises(IndexError):
        cache[10]
    assert len(list(cache)) == len(cache) == 10


# a stale cache is never used


@pytest.mark.parametrize("change", ["in place", "data", "replaced", "removed", "buffer", "trains"])
def test_frozen_layers_that_changed_are_noticed(change: str) -> None:
    model = net()
    cache = FeatureCache(model, pictures(), batch=BATCH)
    features, _ = next(iter(DataLoader(cache, BATCH)))
    conv: Any = model.stem[0]
    with torch.no_grad():
        if change == "in place":
            conv.weight[0, 0, 0, 0] += 1e-6
        elif change == "data":
            conv.weight.data = conv.weight + 1e-3
        elif change == "replaced":
            conv.weight = nn.Parameter(conv.weight + 1e-3, requires_grad=False)
        elif change == "removed":
            conv.bias = None
        elif change == "buffer":
            model.stem[1].running_mean += 1e-3
        else:
            conv.weight.requires_grad_(True)
    for use in (lambda: cache.tail(features), lambda: cache[0], lambda: next(iter(DataLoader(cache, 2)))):
        with pytest.raises(GradFilterError, match=r"build gf\.FeatureCache again"):
            use()


def test_frozen_layers_with_the_same_content_are_the_same() -> None:
    """The control: tensors that move, or are written with their own values, are the same tensors."""
    model = net()
    cache = FeatureCache(model, pictures(), batch=BATCH)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.to(memory_format=torch.channels_last)
    train(model, shuffled(cache, epochs=1), cache.tail)
    cache[0]


def build(folder: Path, model: Net | None = None, data: Any = None, **options: Any) -> FeatureCache:
    options = {"batch": BATCH} | options
    return FeatureCache(model or net(), pictures() if data is None else data, folder=folder, **options)


PROBE = 2  # runs of the frozen layers that every opening takes


def test_a_whole_cache_is_opened_without_computing(tmp_path: Path, split: HandMade) -> None:
    first = all_features(build(tmp_path))
    assert split.runs == PROBE + 3
    assert equal(all_features(build(tmp_path)), first)
    assert split.runs == PROBE


@pytest.mark.parametrize(
    "what", ["weights", "buffers", "signature", "store", "batch", "description", "format"]
)
def test_features_that_something_else_made_are_not_used(what: str, tmp_path: Path, split: HandMade) -> None:
    build(tmp_path)
    model, options = net(), {}
    if what == "weights":
        model = net(seed=5)
    elif what == "buffers":
        model.stem[1].running_var *= 2
    elif what == "signature":
        split.signature = "another stem"
    elif what == "store":
        options["store"] = "float16"
    elif what == "batch":
        options["batch"] = 5
    elif what == "description":
        (tmp_path / "cache.json").write_bytes(b"\xff{")
    else:
        (tmp_path / "features.bin").unlink()
    found = all_features(build(tmp_path, model, **options))
    assert split.runs > PROBE + 1
    expected = all_features(FeatureCache(model, pictures(), **({"batch": BATCH} | options)))
    assert equal(found, expected)


def test_only_what_is_new_is_computed(tmp_path: Path, split: HandMade) -> None:
    data = pictures()
    build(tmp_path, data=data)
    image = data[3][0].clone()
    image[2, 15, 15] += 1e-6  # a few bits of the last pixel
    changed = [*data[:3], (image, 1), *reversed(data[4:]), *pictures(2, seed=2)]
    found = build(tmp_path, data=changed)
    assert split.runs == PROBE + 1  # three images are new
    assert [found[i][1] for i in range(12)] == [label for _, label in changed]
    assert equal(all_features(found), all_features(FeatureCache(net(), changed, batch=BATCH)))


def test_equal_images_have_one_row_but_their_own_labels(split: HandMade) -> None:
    image = torch.rand(3, 16, 16)
    cache = FeatureCache(net(), [(image, label) for label in range(9)], batch=BATCH)
    assert split.runs == PROBE + 1
    assert [label for _, label in cache] == list(range(9))


def test_rows_of_images_that_are_gone_do_not_pile_up(tmp_path: Path) -> None:
    sizes = []
    for seed in range(6):
        found = build(tmp_path, data=pictures(10, seed))
        sizes.append((tmp_path / "features.bin").stat().st_size)
        assert equal(all_features(found), all_features(FeatureCache(net(), pictures(10, seed), batch=BATCH)))
    assert max(sizes) == 2 * sizes[0]


def test_a_reader_keeps_its_rows_while_another_replaces_them(tmp_path: Path) -> None:
    first = build(tmp_path)
    before = all_features(first)
    state = pickle.dumps(first)
    build(tmp_path, net(seed=5))
    assert equal(all_features(first), before)
    with pytest.raises(GradFilterError, match="was replaced while it was in use"):
        pickle.loads(state)  # noqa: S301  our own; a worker that starts late must not read the others' rows


def test_one_process_builds_at_a_time(tmp_path: Path) -> None:
    data = [*pictures(6), ("a.png", 1), *pictures(1)]
    with pytest.raises(GradFilterError):
        build(tmp_path, data=data, workers=1)  # neither it nor its worker keeps the lock
    layout = RowLayout.of(net().prefix(torch.rand(2, 3, 16, 16)), "float32")
    first = DiskRows(layout, 9, tmp_path, {})
    with ThreadPoolExecutor() as pool:
        second = pool.submit(DiskRows, layout, 9, tmp_path, {})
        time.sleep(0.2)
        assert not second.done()
        first.close()
        second.result(timeout=60).close()


# killed


def build_slowly(folder: str) -> None:
    """Build in a process of its own, with a line for each batch, and time to be killed after it."""

    def after() -> None:
        print("batch", flush=True)
        time.sleep(0.02)

    made = HandMade(net(), after=after)
    cache_module._split = lambda _: made
    build(Path(folder), data=pictures(400), tell=lambda *_: None)
    print("done", flush=True)


@pytest.mark.parametrize("batches", [PROBE, PROBE + 1, PROBE + 7])
def test_a_build_that_was_killed_is_gone_on_with(batches: int, tmp_path: Path, split: HandMade) -> None:
    code = f"import test_cache; test_cache.build_slowly({str(tmp_path)!r})"
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=here, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        for _ in range(batches):
            assert process.stdout.readline() == "batch\n"
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    assert "done" not in rest
    found = build(tmp_path, data=pictures(400))
    assert PROBE < split.runs <= PROBE + 100 - max(0, batches - PROBE - 1)
    assert equal(all_features(found), all_features(FeatureCache(net(), pictures(400), batch=BATCH)))


def test_whatever_part_of_the_logs_is_left_nothing_false_is_read(tmp_path: Path, split: HandMade) -> None:
    expected = all_features(build(tmp_path))
    logs = {name: (tmp_path / name).read_bytes() for name in ("images.bin", "features.bin")}
    row = len(logs["features.bin"]) // 10
    for rows, digests in [(0, 0), (row - 1, 16), (row, 15), (3 * row + 5, 160), (10 * row, 40), (0, 160)]:
        (tmp_path / "features.bin").write_bytes(logs["features.bin"][:rows])
        (tmp_path / "images.bin").write_bytes(logs["images.bin"][:digests])
        assert equal(all_features(build(tmp_path)), expected)
        assert split.runs == PROBE + -(-(10 - min(rows // row, digests // 16)) // BATCH)


def test_the_controls_see_rows_under_the_wrong_digest(tmp_path: Path) -> None:
    """The tests above compare with features that are right: rows in another order do not pass for them."""
    expected = all_features(build(tmp_path))
    digests = (tmp_path / "images.bin").read_bytes()
    (tmp_path / "images.bin").write_bytes(digests[16:32] + digests[:16] + digests[32:])
    assert not equal(all_features(build(tmp_path)), expected)


def test_a_row_is_on_the_disk_before_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    settle = feature_store._settle
    monkeypatch.setattr(
        feature_store, "_settle", lambda file: (settle(file), order.append(Path(file.name).name))
    )
    build(tmp_path)
    assert order == ["cache.json.unfinished", *["features.bin", "images.bin"] * 3]


# budget, stores


@pytest.mark.parametrize(
    ("budget", "options", "fits"),
    [
        (14_000, {}, ["store='float16' (10.6 KiB)", "store='int8' (6.9 KiB)", "a folder on a disk"]),
        (8_000, {"store": "float16"}, ["store='int8' (6.9 KiB)"]),
        (30_000, {"views": 3}, ["store='int8' (20.6 KiB)", "views=1"]),
        (100, {"store": "int8", "folder": "here"}, ["Give a larger budget, or fewer images."]),
    ],
)
def test_a_cache_beyond_the_budget_is_refused_before_it_is_computed(
    budget: int, options: dict[str, Any], fits: list[str], split: HandMade, tmp_path: Path
) -> None:
    if "folder" in options:
        options = options | {"folder": tmp_path / "here"}
    with pytest.raises(
        GradFilterError, match=r"The features of 10 images.* take .* more than the budget"
    ) as caught:
        FeatureCache(net(), pictures(), batch=BATCH, budget=budget, **options)
    assert all(text in str(caught.value) for text in fits), caught.value
    assert split.runs == PROBE
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("store", ["float16", "bfloat16", "int8"])
def test_what_is_suggested_does_fit(store: str) -> None:
    size = RowLayout.of(net().prefix(torch.rand(2, 3, 16, 16)), store).row_bytes * 10
    FeatureCache(net(), pictures(), batch=BATCH, budget=size, store=store)
    with pytest.raises(GradFilterError):
        FeatureCache(net(), pictures(), batch=BATCH, budget=size - 1, store=store)


@pytest.mark.parametrize("channels_last", [False, True])
def test_errors_of_small_stores_are_bounded(channels_last: bool) -> None:
    model = net().to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    exact = all_features(FeatureCache(model, pictures(), batch=BATCH))
    bounds: dict[str, Callable[[Tensor], Tensor]] = {
        "float16": lambda x: x.abs() * 2**-11 + 2**-25,
        "bfloat16": lambda x: x.abs() * 2**-8,
        "int8": lambda x: x.abs().amax((2, 3) if x.dim() == 4 else 1, keepdim=True) / 254 * (1 + 1e-5),
    }
    for store, bound in bounds.items():
        cache = FeatureCache(model, pictures(), batch=BATCH, store=store)
        found = all_features(cache)
        for x, y in zip(exact, found, strict=True):
            assert y.dtype == x.dtype
            assert y.stride() == x.stride()
            assert ((x - y).abs() <= bound(x)).all(), store
            assert not torch.equal(x, y)  # the control: the bounds are put to work
        cache.tail(next(iter(DataLoader(cache, BATCH)))[0]).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_float32_keeps_the_bits_of_any_type(dtype: torch.dtype) -> None:
    features = [
        (torch.rand(3, 4) * 3).to(dtype),
        torch.rand(3).to(dtype),
        torch.rand(3, 2, 3, 4, 5).to(dtype),
    ]
    layout = RowLayout.of(features, "float32")
    rows = torch.zeros(3, layout.row_bytes, dtype=torch.uint8)
    layout.encode(features, rows)
    again = layout.decode(layout.fields(rows))
    assert equal(list(again), features)
    assert [x.dtype for x in again] == [dtype] * 3


def test_values_beyond_a_store_are_refused() -> None:
    model = net(norm=False)
    with torch.no_grad():
        model.stem[0].bias.fill_(1e6)
    with pytest.raises(GradFilterError, match="cannot be kept as float16; cache with store='float32'"):
        FeatureCache(model, pictures(), store="float16")
    FeatureCache(model, pictures(), store="bfloat16")


# views


class RandomlyShifted(Dataset[Sample]):
    """Augments at random, with each of the usual sources of random numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Sample:
        shift = torch.rand(()) + random.random() + index  # noqa: S311  not for secrets
        return pictures(6)[index][0] + shift, index


def test_views_are_drawn_alike_each_time_and_given_in_turn(tmp_path: Path, split: HandMade) -> None:
    cache = build(tmp_path, data=RandomlyShifted(), views=3)
    epochs = []
    for epoch in range(6):
        cache.set_epoch(epoch)
        epochs.append(all_features(cache)[0])
        for i, features in enumerate(epochs[-1]):
            same = [torch.equal(features, seen[i]) for seen in epochs]
            assert same == [(epoch - other) % 3 == 0 for other in range(epoch + 1)]
    again = build(tmp_path, data=RandomlyShifted(), views=3)
    assert split.runs == PROBE
    again.set_epoch(2)
    assert torch.equal(all_features(again)[0], epochs[2])
    assert not torch.equal(
        all_features(build(tmp_path, data=RandomlyShifted(), views=3, seed=1))[0], epochs[0]
    )
    assert split.runs == PROBE  # a seed orders the views; it does not make others


def test_a_view_depends_on_seed_epoch_and_index_alone() -> None:
    choices = [view_of(seed, epoch, i, 4) for seed in range(9) for epoch in range(9) for i in range(99)]
    assert [choices.count(view) / len(choices) for view in range(4)] == pytest.approx([0.25] * 4, abs=0.02)
    assert all({view_of(1, e, i, 4) for e in range(4)} == set(range(4)) for i in range(20))


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_workers_that_persist_see_the_epoch(start: str, on_disk: bool, tmp_path: Path) -> None:
    cache = FeatureCache(net(), RandomlyShifted(), views=2, folder=tmp_path if on_disk else None, batch=BATCH)
    context = multiprocessing.get_context(start)
    loader = DataLoader(cache, 6, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    for epoch in (0, 1, 2):
        cache.set_epoch(epoch)
        batches = [cache.decode(features)[0] for features, _ in loader]
        assert torch.equal(batches[0], all_features(cache)[0])


def test_a_key_stands_for_images_that_are_different_each_time(tmp_path: Path, split: HandMade) -> None:
    numbers = torch.Generator()  # its own, so it goes on from reading to reading

    class Noisy(RandomlyShifted):
        def __getitem__(self, index: int) -> Sample:
            return torch.rand(3, 16, 16, generator=numbers), index

    first = all_features(build(tmp_path, data=Noisy(), key="noise, 1"))
    assert len({tuple(means.tolist()) for means in first[1]}) == 6
    assert equal(all_features(build(tmp_path, data=Noisy(), key="noise, 1")), first)
    assert split.runs == PROBE
    assert not equal(all_features(build(tmp_path, data=Noisy(), key="noise, 2")), first)
    assert not equal(all_features(build(tmp_path, data=Noisy())), first)


# what cannot be done is said in one sentence


class Endless(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        yield from pictures()

    def __len__(self) -> int:
        return 10


BIG = torch.rand(3, 20, 20)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "The data set has no images, so there is nothing to cache."),
    "iterable": (Endless(), {}, "which Endless does not offer: give a data set with __len__ and __getitem__"),
    "no tensor": ([("a.png", 1)], {}, "Item 0 of the data set is a tuple of str, int; a cache needs"),
    "later": (
        [*pictures(5), ("a.png", 1), *pictures(1)],
        {"views": 2},
        "Item 5 of the data set is a tuple of str, int",
    ),
    "no pair": ([torch.rand(3, 16, 16)], {}, "Item 0 of the data set is a Tensor; a cache needs"),
    "sizes": (
        [*pictures(3), (BIG, 1), *pictures(1)],
        {},
        "Image 3 of the data set is 3x20x20 of float32, the fi",
    ),
    "bytes": (
        [(BIG.to(torch.uint8), 1)],
        {},
        "does not take images such as the first of the data set, 3x20x20",
    ),
    "store": (pictures(), {"store": "flaot16"}, "Did you mean float16"),
    "batch": (pictures(), {"batch": 0}, "batch must be a whole number of at least 1, not 0."),
    "views": (pictures(), {"views": 1.5}, "views must be a whole number of at least 1, not 1.5."),
    "last size": ([*pictures(3), (BIG, 1)], {}, "Image 3 of the data set is 3x20x20 of float32"),
    "no budget": (pictures(), {"budget": 0}, "budget must be a whole number of at least 1, not 0."),
    "budget": (pictures(), {"budget": -1}, "budget must be a whole number of at least 1, not -1."),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cached_is_refused(case: str, workers: int) -> None:
    data, options, message = REFUSED[case]
    with pytest.raises(GradFilterError) as caught:
        FeatureCache(net(), data, **({"batch": BATCH, "workers": workers} | options))
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "lock").mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "taken"):
        with pytest.raises(
            GradFilterError, match=f"Features cannot be kept in {folder}: .* Give another folder"
        ):
            build(folder)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_cache_that_fills_the_disk_can_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: HandMade
) -> None:
    build(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    build(tmp_path)
    assert split.runs == PROBE
    with pytest.raises(GradFilterError, match="more than what is free on the disk, 0"):
        build(tmp_path / "other")


def test_a_full_disk_is_said_and_leaves_what_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: HandMade
) -> None:
    settle, calls = feature_store._settle, []

    def full(file: Any) -> None:
        calls.append(file)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        settle(file)

    with monkeypatch.context() as patch:
        patch.setattr(feature_store, "_settle", full)
        with pytest.raises(GradFilterError, match="No space left on device"):
            build(tmp_path)
    expected = all_features(FeatureCache(net(), pictures(), batch=BATCH))
    assert equal(all_features(build(tmp_path)), expected)
    assert split.runs == PROBE + 2  # of three batches one was there


@pytest.mark.parametrize("spoiler", ["dropout", "batch norm"])
def test_features_that_depend_on_more_than_the_image_are_refused(spoiler: str) -> None:
    model = net()
    if spoiler == "dropout":
        model.stem.append(nn.Dropout())
    model.stem[-1 if spoiler == "dropout" else 1].train()
    for count in (10, 1):  # one image alone shows by what it leaves behind
        with pytest.raises(GradFilterError, match=r"call model\.eval\(\) before"):
            FeatureCache(model, pictures(count), batch=BATCH)


def test_a_copy_has_features_but_no_tail() -> None:
    cache = FeatureCache(net(), pictures(), batch=BATCH)
    other = pickle.loads(pickle.dumps(cache))  # noqa: S301  our own
    features, _ = next(iter(DataLoader(other, BATCH)))
    assert equal(list(cache.decode(features)), [x[:BATCH] for x in all_features(cache)])
    with pytest.raises(GradFilterError, match="has no model"):
        other.tail(features)
    with pytest.raises(GradFilterError, match="This cache gives 2 tensors per batch, not 1"):
        cache.tail(features[0])


def test_progress_and_description_say_what_there_is(tmp_path: Path) -> None:
    told = []
    cache = build(tmp_path, views=2, tell=lambda *step: told.append(step))
    assert told == [("features", step, 5) for step in range(1, 6)]
    assert str(cache) == f"FeatureCache(10 images in 2 views, 20.6 KiB of float32 in {tmp_path})"


def test_features_that_are_not_finite_are_kept_as_they_are() -> None:
    model = net(norm=False)
    with torch.no_grad():
        model.stem[0].bias[:2] = torch.tensor([torch.inf, torch.nan])
    exact = model.prefix(torch.stack([image for image, _ in pictures(BATCH)]))
    for x, y in zip(all_features(FeatureCache(model, pictures(BATCH), batch=BATCH)), exact, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def test_labels_may_be_anything() -> None:
    masks = [(image, torch.full((4, 4), label)) for image, label in pictures(4)]
    _, labels = next(iter(DataLoader(FeatureCache(net(), masks), 4)))
    assert torch.equal(labels, torch.stack([mask for _, mask in masks]))
    named = [(image, {"name": f"{label}"}) for image, label in pictures(4)]
    assert FeatureCache(net(), named)[2][1] == {"name": "2"}
