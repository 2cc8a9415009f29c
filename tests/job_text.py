"""A job as a user's file holds it; tests add lines that spoil it."""

JOB = """
import torch
from torch import nn
from meshwright import Job

class Data:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {"x": torch.ones(4), "y": torch.ones(2)}

def sample(n):
    return {"x": torch.randn(n, 4), "y": torch.randn(n, 2)}

def loss(output, batch):
    return ((output - batch["y"]) ** 2).sum(), len(output)

def sgd(params):
    return torch.optim.SGD(params, lr=0.1)

def build():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

parts = dict(model=build, inputs=lambda batch: (batch["x"],), loss=loss, optimizer=sgd, sample=sample, data=Data())
job = Job(**parts, global_batch=8)
"""
