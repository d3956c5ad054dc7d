"""Fine-tune the last layers with Hugging Face's Trainer: pip install "gradfilter[train,transformers]"."""
# ruff: noqa: I001  gradfilter comes first: it mends a torchvision that does not fit torch, which transformers imports

import tempfile

import gradfilter as gf
from gradfilter.data.transforms import Transformed, test_transform
from gradfilter.integrations.transformers import GradFilterCallback

import torch
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments, set_seed


def collated(samples):
    images, labels = zip(*samples, strict=True)
    return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}


def scored(found):
    return {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()}


set_seed(0)
data = gf.open_data("digits")
train, test = (Transformed(part, test_transform("classify", 32)) for part in (data.train, data.test))
config = ResNetConfig(
    embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
)
model = ResNetForImageClassification(config)  # yours: from_pretrained(...)

with tempfile.TemporaryDirectory() as folder:
    settings = {"num_train_epochs": 1, "per_device_train_batch_size": 16, "learning_rate": 0.01}
    arguments = TrainingArguments(folder, **settings, use_cpu=True, report_to=[], save_strategy="no")
    trainer = Trainer(
        model,
        arguments,
        data_collator=collated,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=scored,
        # norm="batch" because the weights are random; trained ones come with statistics that can stay
        callbacks=[GradFilterCallback(gf.GradientFilter(patch=2), layers="last:4", norm="batch")],
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
print(f"accuracy: {accuracy:.0%}")
