"""Fine-tune the last layers of a network with Lightning: pip install "gradfilter[train,lightning]"."""
# ruff: noqa: I001  gradfilter comes first: it mends a torchvision that does not fit torch, which Lightning imports

import gradfilter as gf
from gradfilter.data.transforms import Transformed, test_transform
from gradfilter.integrations.lightning import GradFilterCallback

import lightning as L
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(L.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.net = gf.models.build("tiny", classes=classes)  # yours: any nn.Module, best with trained weights

    def training_step(self, batch, index):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        right = self.net(images).argmax(1) == labels
        self.log("accuracy", right.float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


L.seed_everything(0, verbose=False)
data = gf.open_data("digits")
train, test = (Transformed(part, test_transform("classify", 32)) for part in (data.train, data.test))
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=2,
    limit_train_batches=40,
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
    # norm="batch" because the weights are random; trained ones come with statistics that can stay
    callbacks=[GradFilterCallback(gf.GradientFilter(patch=2), layers="last:4", norm="batch")],
)
loaders = DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)
trainer.fit(Classifier(len(data.classes)), *loaders)
accuracy = float(trainer.callback_metrics["accuracy"])
print(f"accuracy: {accuracy:.0%}")
