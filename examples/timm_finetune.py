"""Fine-tune the last layers of a network as timm's train.py does: pip install "gradfilter[train,timm]"."""
# ruff: noqa: I001  gradfilter comes first: it mends a torchvision that does not fit torch, which timm imports

import tempfile

import gradfilter as gf
from gradfilter.data.transforms import Transformed, test_transform
from gradfilter.integrations.timm import create_optimizer

import timm
import torch
from timm.utils import CheckpointSaver, ModelEmaV3
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = gf.open_data("digits")
train, test = (Transformed(part, test_transform("classify", 32)) for part in (data.train, data.test))
model = timm.create_model("mobilenetv2_050", num_classes=len(data.classes))  # yours: pretrained=True

# Instead of timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.05, weight_decay=1e-4):
# (norm="batch" because the weights are random; trained ones come with statistics that can stay)
plan = gf.GradientFilter(patch=2)
optimizer = create_optimizer(
    model, plan, layers="last:4", norm="batch", opt="sgd", lr=0.05, weight_decay=1e-4
)

ema = ModelEmaV3(model, decay=0.8)
with tempfile.TemporaryDirectory() as folder:
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=folder)
    for epoch in range(1):
        model.train()
        for images, labels in DataLoader(train, batch_size=32, shuffle=True):
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        with torch.no_grad():
            right = [ema.module(x).argmax(1) == labels for x, labels in DataLoader(test, batch_size=64)]
        accuracy = float(torch.cat(right).float().mean())
        saver.save_checkpoint(epoch, metric=accuracy)
print(f"accuracy: {accuracy:.0%}")
